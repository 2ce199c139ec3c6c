"""The page's endpoint as a program uses it: `gradio_client` with every control and every bad input."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import groupby
from typing import Any

import httpx
import pytest

from hf_specdec.web import recording

from .parrot import HELD_TOKENS
from .served import CRAWL, SECONDS, WAITING, Served, needed, wait_for


pytest_plugins = ["tests.web.serving"]
pytestmark = pytest.mark.slow

SAID = "one two one two one two three"


@pytest.fixture
def new_client(served: Served) -> Callable[[], Any]:
    """Makes clients; each is a session."""
    gradio_client = needed("gradio_client")
    return lambda: gradio_client.Client(served.url, verbose=False, analytics_enabled=False)


@pytest.fixture(scope="module")
def shared(server: Served) -> Any:
    """A client for all calls that don't need one of their own."""
    return needed("gradio_client").Client(server.url, verbose=False, analytics_enabled=False)


@pytest.fixture
def client(served: Served, shared: Any) -> Any:
    """The same, with a page where nothing runs."""
    return shared


def text(side: dict[str, Any]) -> str:
    return "".join(token["text"] for token in side["tokens"])


def compare(client: Any, prompt: Any = SAID, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.predict(prompt, api_name="/compare", **given)
    return found


def error_of(client: Any, prompt: Any = SAID, **given: Any) -> str:
    """What a refused call says; never more than that."""
    with pytest.raises(Exception, match=".") as caught:
        compare(client, prompt, **given)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "/site-packages/" not in message
    assert ".py" not in message
    return message


def test_one_call_answers_with_both_timelines(client: Any) -> None:
    found = compare(client)
    assert text(found["off"]) == text(found["on"]) == SAID
    assert found["same_text"] is True
    assert found["speedup"] > 0
    assert found["why"]
    assert found["model"]
    assert found["title"] == "own prompt"
    assert found["settings"]["prompt"] == SAID
    assert found["on"]["stats"]["num_accepted_draft_tokens"] > 0
    assert len(found["on"]["rounds"]) == found["on"]["stats"]["num_target_forwards"]
    times = [token["seconds"] for token in found["off"]["tokens"]]
    assert times == sorted(times)
    json.dumps(found)


def test_the_documented_parameters_are_the_controls(client: Any) -> None:
    (endpoint,) = client.view_api(return_format="dict", print_info=False)["named_endpoints"].items()
    name, about = endpoint
    assert name == "/compare"
    assert [each["parameter_name"] for each in about["parameters"]] == [
        "prompt", "family", "strategy", "num_draft_tokens", "temperature", "max_new_tokens", "chat", "seed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({"family": "drafted"}, lambda found: found["settings"]["family"] == "drafted"),
        ({"family": "drafted", "strategy": "draft_model", "num_draft_tokens": 3}, lambda found: {t["source"] for t in found["on"]["tokens"]} == {"", "draft_model"}),
        ({"strategy": "prompt_lookup"}, lambda found: "prompt_lookup" in {t["source"] for t in found["on"]["tokens"]}),
        ({"strategy": "recycling"}, lambda found: any(each["is_tree"] for each in found["on"]["rounds"])),
        ({"strategy": "none"}, lambda found: found["on"]["stats"]["num_draft_tokens"] == 0),
        ({"strategy": "prompt_lookup", "num_draft_tokens": 2}, lambda found: max(len(each["drafted"]) for each in found["on"]["rounds"]) == 2),
        ({"max_new_tokens": 1}, lambda found: len(found["off"]["tokens"]) == len(found["on"]["tokens"]) == 1),
        ({"max_new_tokens": 7}, lambda found: text(found["on"]) == SAID[:7]),
        ({"chat": False}, lambda found: found["settings"]["chat"] is False and text(found["on"]) == SAID),
        ({"temperature": 2.0, "seed": 5}, lambda found: found["same_text"] is True and text(found["off"]) != SAID),
    ],
    ids=lambda value: "-".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_control_does_what_it_says(
    client: Any, given: dict[str, Any], holds: Callable[[dict[str, Any]], bool]
) -> None:
    found = compare(client, **given)
    assert found["same_text"] is True
    assert holds(found)


def test_the_seed_decides_and_the_same_seed_repeats(client: Any) -> None:
    first, again, other = (text(compare(client, temperature=2.0, seed=seed)["on"]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "prompt",
    [
        "😀👩‍👩‍👧 two flags 🇫🇷🇯🇵",
        "مرحبا بالعالم \u202eabc\u202c שלום",
        "tab\there, two  spaces, \x01\x07\x1b[31mcontrol\x7f, nul \x00 end",
        "\n\n  leading and trailing  \n",
        "<script>alert(1)</script><img src=x onerror=alert(1)>\"'`${1+1}{{1+1}}&amp;",
        "e\u0301 \u200b\ufeff zero width",
        "%s %d {0} {prompt} \\n \\x00 ../../etc/passwd",
        "a",
    ],
)
def test_any_text_comes_back_as_it_is(client: Any, prompt: str) -> None:
    found = compare(client, prompt)
    assert found["same_text"] is True
    assert text(found["off"]) == text(found["on"]) == prompt


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": " \n\t\u2003 "}, "The prompt is empty"),
        ({"prompt": None}, "The prompt is empty"),
        ({"prompt": 5}, "The prompt is empty"),
        ({"prompt": ["a"]}, "The prompt is empty"),
        ({"prompt": {"text": "a"}}, "The prompt is empty"),
        ({"prompt": "a" * 3001}, "3,001 characters; at most 3,000"),
        ({"prompt": "a" * 601}, "601 tokens; at most 600"),
        ({"family": "gpt-17"}, "The model must be one of plain, drafted, got 'gpt-17'"),
        ({"family": ["plain"]}, "The model must be one of"),
        ({"strategy": "eagle9"}, "The strategy must be one of auto"),
        ({"strategy": None}, "The strategy must be one of auto"),
        ({"strategy": "draft_model"}, "There is no draft model for 'plain' here"),
        ({"num_draft_tokens": -1}, "The draft length must be a"),
        ({"num_draft_tokens": 17}, "The draft length must be a"),
        ({"num_draft_tokens": 2.5}, "The draft length must be a whole number"),
        ({"temperature": -0.1}, "The temperature must be a number from 0 to 2"),
        ({"temperature": 2.1}, "The temperature must be a number from 0 to 2"),
        ({"temperature": "hot"}, "The temperature must be a number from 0 to 2"),
        ({"temperature": True}, "The temperature must be a number from 0 to 2"),
        ({"max_new_tokens": 0}, "The number of new tokens must be a"),
        ({"max_new_tokens": 301}, "The number of new tokens must be a"),
        ({"max_new_tokens": 10**400}, "The number of new tokens must be a"),
        ({"max_new_tokens": "many"}, "The number of new tokens must be a"),
        ({"max_new_tokens": None}, "The number of new tokens must be a"),
        ({"chat": "perhaps"}, "The chat template must be on or off"),
        ({"chat": {}}, "The chat template must be on or off"),
        ({"seed": -1}, "The seed must be a"),
        ({"seed": 2**31}, "The seed must be a"),
        ({"seed": 0.5}, "The seed must be a whole number"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_each_bad_input_gets_its_sentence(client: Any, given: dict[str, Any], says: str) -> None:
    assert says in error_of(client, **given)


class Raw:
    """The protocol under `gradio_client`, for what it doesn't let through."""

    def __init__(self, served: Served) -> None:
        self.http = httpx.Client(base_url=served.url, timeout=SECONDS)
        self.numbers = {each["api_name"]: each["id"] for each in served.page.config["dependencies"]}

    def listener(self, name: str, *data: Any) -> str:
        """What one of the page's own listeners answers."""
        body = {"data": data, "fn_index": self.numbers[name], "session_hash": "raw"}
        return self.http.post("gradio_api/run/predict", json=body).text

    def run(self, *values: Any) -> str:
        """Press Run with these controls; everything that comes back."""
        self.listener("begin")
        body = {"data": values, "fn_index": self.numbers["run"], "session_hash": "raw"}
        self.http.post("gradio_api/queue/join", json=body)
        with self.http.stream("GET", "gradio_api/queue/data", params={"session_hash": "raw"}) as answer:
            return "".join(answer.iter_text()) + self.listener("show", None)

    def call(self, data: str) -> str:
        """The whole answer to a call whose `data` is that JSON."""
        posted = self.http.post(
            "gradio_api/call/compare", content=f'{{"data": {data}}}', headers={"content-type": "application/json"}
        )
        if posted.status_code != 200:
            return posted.text
        with self.http.stream("GET", f"gradio_api/call/compare/{posted.json()['event_id']}") as answer:
            return "".join(answer.iter_text())


@pytest.mark.parametrize(
    "data",
    [
        '["a", "", "auto", 0, NaN, 8, true, 0]',
        '["a", "", "auto", 0, 1e999, 8, true, 0]',
        '["\\ud83d half", "", "auto", 0, 0, 8, true, 0]',
        '["a"',
        "{}",
        "[]",
        "null",
    ],
)
def test_what_is_no_call_gets_an_error_without_insides(served: Served, data: str) -> None:
    answer = Raw(served).call(data)
    assert "same_text" not in answer
    assert "Traceback" not in answer
    assert "/site-packages/" not in answer
    assert "File " not in answer


def test_a_failing_model_says_so_and_the_next_call_works(served: Served, client: Any) -> None:
    compare(client)
    served.parrot.error = RuntimeError("CUDA out of memory. Tried to allocate 17 GiB")
    assert "There isn't enough memory" in error_of(client, max_new_tokens=80)
    served.parrot.error = None
    assert compare(client)["same_text"] is True


def test_two_clients_are_served_one_after_the_other(
    served: Served, new_client: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.parrot.delay = 0.01
    clients = [new_client(), new_client()]
    prompts = list[str]()  # of each side that was decoded, in order
    generate = recording._Runner._generate

    def listening(runner: Any, *arguments: Any) -> Any:
        prompts.append(runner.settings.prompt)
        return generate(runner, *arguments)

    monkeypatch.setattr(recording._Runner, "_generate", listening)
    jobs = [
        each.submit(prompt, api_name="/compare")
        for each, prompt in zip(clients, ("alpha " * 8, "omega " * 8), strict=True)
    ]
    first, second = (job.result() for job in jobs)
    assert len(prompts) >= 4  # off and on of each, and a warm-up
    assert len(list(groupby(prompts))) == 2  # nobody's side between another's
    assert text(first["on"]) == "alpha " * 8
    assert text(second["on"]) == "omega " * 8
    assert "omega" not in json.dumps(first)
    assert "alpha" not in json.dumps(second)


def test_a_full_queue_says_so_and_opens_again(served: Served, new_client: Callable[[], Any]) -> None:
    served.parrot.hold()
    clients = [new_client() for _ in range(WAITING + 2)]
    running = clients[0].submit("x" * 200, strategy="none", max_new_tokens=300, api_name="/compare")
    wait_for(lambda: served.decodes)
    waiting = [each.submit("wait", max_new_tokens=4, api_name="/compare") for each in clients[1:-1]]
    wait_for(lambda: served.waiting == WAITING)
    assert "queue" in error_of(clients[-1], "late").lower()
    served.parrot.release(CRAWL)
    running.cancel()
    served.parrot.release()
    assert [text(job.result(SECONDS)["on"]) for job in waiting] == ["wait"] * WAITING
    assert text(compare(clients[-1], "late")["on"]) == "late"


def test_an_abandoned_call_frees_the_device(served: Served, client: Any) -> None:
    served.parrot.hold()
    http = httpx.Client(base_url=served.url, timeout=SECONDS)
    posted = http.post("gradio_api/call/compare", json={"data": ["y" * 250, "", "none", 0, 0, 300, True, 0]})
    with http.stream("GET", f"gradio_api/call/compare/{posted.json()['event_id']}"):
        wait_for(lambda: served.parrot.place >= HELD_TOKENS)
    http.close()
    served.parrot.release(CRAWL)
    served.wait_free()
    served.parrot.release()
    assert compare(client)["same_text"] is True


def test_nothing_of_a_prompt_is_logged(
    served: Served, client: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it comes by the endpoint, the page or a link, is run, refused, or fails in the run."""
    caplog.set_level(logging.DEBUG)
    raw, rest = Raw(served), ["plain", "auto", 0, 0, 20, True, 0]
    compare(client, "Zanzibar " * 4)
    assert "same text: yes" in raw.run("Zanzibar " * 4, *rest)
    assert httpx.get(served.url, params={"prompt": "Zanzibar"}).status_code == 200
    assert "Zanzibar" in raw.listener("from_link", "prompt=Zanzibar")
    assert "at most 3,000" in raw.listener("from_link", f"prompt={'Zanzibar' * 500}")
    raw.listener("choose", "Zanzibar")
    raw.listener("show_recorded", "Zanzibar")
    raw.listener("show_round", None, "Zanzibar")
    error_of(client, "Zanzibar", temperature=9)
    error_of(client, "Zanzibar" * 500)
    assert "at most 3,000" in raw.run("Zanzibar" * 500, *rest)
    assert "must be one of" in raw.run("Zanzibar", "Zanzibar", *rest[1:])
    assert "The prompt is empty" in raw.run({"text": "Zanzibar"}, *rest)
    assert "must be a number" in raw.run("Zanzibar", "plain", "auto", *["Zanzibar"] * 5)
    served.parrot.error = RuntimeError("broken at Zanzibar")
    error_of(client, "Zanzibar")
    assert "broken" in raw.run("Zanzibar", *rest)
    written = capfd.readouterr()
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    assert "Zanzibar" not in written.out + written.err + "\n".join(logged)
