"""Runs of both sides: the right text, every token's round and chance, alone on the device, stoppable, and failing clearly."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import SpecConfig, SpecDecError, StepEvent
from hf_specdec.selection import automatic
from hf_specdec.tools.loading import LoadedModel, encode_prompt, load_model
from hf_specdec.web import recording
from hf_specdec.web.models import Family, families, own_family
from hf_specdec.web.recording import CoupledNoise, record
from hf_specdec.web.settings import STRATEGIES, Limits
from hf_specdec.web.timeline import SCHEMA_VERSION, Comparison, Side
from hf_specdec.web.worker import worker

from ..tools.tiny_chat import byte_tokenizer, save_tiny_chat_model
from .conftest import PROMPT, recorded, settings_for


pytestmark = pytest.mark.usefixtures("one_thread")
HOT = {"temperature": 0.9, "seed": 5}


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    assert is_idle()


@dataclass(frozen=True)
class Run:
    """A run, and the rounds as our loop reported them."""

    found: Comparison
    events: list[StepEvent]


@pytest.fixture(scope="module")
def run(family: Family) -> Callable[..., Run]:
    """Runs that tests share; they only look at them."""
    generate = hf_specdec.generate

    @cache
    def once(**given: Any) -> Run:
        events: list[StepEvent] = []

        def listening(model: Any, *, speculative: Any, **options: Any) -> Any:
            events.clear()  # of the warm-up

            def on_step(event: StepEvent) -> None:
                events.append(event)
                speculative.on_step(event)

            return generate(model, speculative=replace(speculative, on_step=on_step), **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_specdec, "generate", listening)
            return Run(recorded(family, **given), events)

    return once


def is_idle() -> bool:
    """Whether no run has the thread or the device."""
    free = recording._DEVICE.acquire(blocking=False)
    if free:
        recording._DEVICE.release()
    return free and not worker().busy


def ids(side: Side) -> list[int]:
    return [token.id for token in side.tokens]


def before_forward(family: Family, call: Callable[[], None]) -> None:
    """Have something done before each forward of the target."""
    family.load()[0].model.register_forward_pre_hook(lambda module, given: call())


class TestText:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_greedy(self, family: Family, run: Callable[..., Run], strategy: str) -> None:
        found = run(strategy=strategy).found
        loaded, _ = family.load()
        inputs = encode_prompt(loaded, PROMPT)
        plain = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert ids(found.off) == ids(found.on) == plain.tolist()
        assert found.off.text == found.on.text == loaded.tokenizer.decode(plain, skip_special_tokens=True)
        assert found.complete
        assert found.same_text
        assert found.speedup is not None
        assert found.speedup == pytest.approx(found.off.seconds / found.on.seconds)
        assert not found.off.stats
        assert not found.off.rounds
        assert found.on.stats["num_emitted_tokens"] == 24
        assert found.on.stats["fallback_reason"] is None

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_sampled(self, run: Callable[..., Run], strategy: str) -> None:
        found = run(strategy=strategy, **HOT).found
        assert ids(found.off) == ids(found.on)
        assert found.same_text

    def test_seed_temperature_and_template_matter(self, run: Callable[..., Run]) -> None:
        given = [HOT, HOT | {"seed": 6}, HOT | {"temperature": 1.7}, {}, {"chat": False}]
        assert len({tuple(ids(run(strategy="none", **each).found.off)) for each in given}) == len(given)

    def test_no_chat_template(self, tmp_path: Path) -> None:
        """Then the prompt goes as it is, and the settings say so: the page's lines follow them."""
        family = own_family(str(save_tiny_chat_model(tmp_path, chat=False)), None, "float32")
        found = recorded(family, max_new_tokens=2)
        assert found.settings["chat"] is False
        assert "apply_chat_template" not in settings_for(family, chat=found.settings["chat"]).code(
            "T", None, "float32"
        )

    def test_off_stays_off(self, new_family: Callable[[], Family], enabled: None) -> None:
        """Also where the model's saved settings ask for speculation."""
        family = new_family()
        family.load()[0].model.generation_config.speculative = "prompt_lookup"
        asked = settings_for(family, strategy="prompt_lookup")
        family.warmed[asked.way] = None
        running = record(family, asked, Limits())
        for _, found in running:
            if found.off.done:
                break
        running.close()  # type: ignore[attr-defined]
        assert len(found.off.tokens) == 24
        assert hf_specdec.last_stats(family.load()[0].model) is None  # of no thread


class TestRounds:
    def test_drafts_of_all_fates_are_there(self, run: Callable[..., Run]) -> None:
        """Else the tests below would show nothing."""
        chains, trees = (run(strategy=name, num_draft_tokens=4).found.on for name in ("draft_model", "recycling"))
        assert {token.kind for token in chains.tokens} == {"plain", "accepted", "bonus", "corrected"}
        assert {token.kind for token in trees.tokens} >= {"own", "accepted"}

    @pytest.mark.parametrize("given", [{}, HOT], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("length", [0, 4])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_against_the_loop(
        self, family: Family, run: Callable[..., Run], strategy: str, length: int, given: dict[str, Any]
    ) -> None:
        one = (
            run(strategy=strategy, **given) if not length else run(strategy=strategy, num_draft_tokens=length, **given)
        )
        events, side, decode = one.events, one.found.on, family.load()[0].tokenizer.decode
        kinds, sources, steps = list[str](), list[str](), list[int]()
        for event in events:
            drafted, emitted, source = event.drafted[0], event.emitted[0], event.source[0]
            if source == "recycling":
                kept, own = min(event.accepted[0], len(emitted)), "own"
            else:
                kept = next(
                    (at for at, pair in enumerate(zip(drafted, emitted, strict=False)) if len(set(pair)) > 1), None
                )
                kept = min(len(drafted), len(emitted)) if kept is None else kept
                own = "plain" if not drafted else "bonus" if kept == len(drafted) else "corrected"
            kinds += ["accepted"] * kept + [own] * (len(emitted) - kept)
            sources += [source] * kept + [""] * (len(emitted) - kept)
            steps += [event.step] * len(emitted)
        assert [token.kind for token in side.tokens] == kinds
        assert [token.source for token in side.tokens] == sources
        assert [token.step for token in side.tokens] == steps
        assert [each.step for each in side.rounds] == list(range(len(events)))
        assert [each.drafted for each in side.rounds] == [
            [decode([id]) for id in event.drafted[0]] for event in events
        ]
        assert kinds.count("accepted") == side.stats["num_accepted_draft_tokens"]
        assert sum(len(each.drafted) for each in side.rounds) == side.stats["num_draft_tokens"]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_rounds_cover_the_tokens(self, run: Callable[..., Run], strategy: str) -> None:
        side = run(strategy=strategy, num_draft_tokens=4).found.on
        at = 0
        for each in side.rounds:
            assert each.first == at
            assert {token.step for token in side.tokens[at : at + each.tokens]} == {each.step}
            assert each.accepted == sum(token.kind == "accepted" for token in side.tokens[at : at + each.tokens])
            at += each.tokens
        assert at == len(side.tokens)
        assert (side.rounds[0].drafted, side.rounds[0].tokens) == ([], 1)

    def test_an_answer_that_ends_inside_a_draft(self, new_family: Callable[[], Family]) -> None:
        """What was drafted behind the end is neither kept nor refused."""
        family = new_family()
        model = family.load()[0].model
        settings = settings_for(family, strategy="draft_model", num_draft_tokens=8)
        runner = recording._Runner(*family.load(), settings, Limits())
        side = Side()
        words = recording.Detokenizer(byte_tokenizer())
        end = model.generation_config.eos_token_id
        runner._take(
            side, words, 0.5, StepEvent(1, (0,), ((65, 66, end, 67),), (4,), ((65, 66, end),), ("draft_model",), 0.1)
        )
        assert [token.kind for token in side.tokens] == ["accepted"] * 3
        assert (side.rounds[0].accepted, side.rounds[0].tokens) == (3, 3)
        runner.add_probabilities(side)
        assert side.rounds[0].rejected is None

    @pytest.mark.parametrize("strategy", ["none", "draft_model", "recycling"])
    def test_times(self, run: Callable[..., Run], strategy: str) -> None:
        found = run(strategy=strategy).found
        for side in (found.off, found.on):
            times = [token.seconds for token in side.tokens]
            assert times == sorted(times)
            assert 0 < times[0] <= times[-1] <= side.seconds
            assert side.first_token_seconds == times[0]
            assert side.tokens_per_second == pytest.approx(24 / side.seconds)
        ends = [(each.seconds, found.on.tokens[each.first].seconds) for each in found.on.rounds]
        assert all(end == token for end, token in ends)

    def test_a_run_knows_nothing_of_the_one_before(self, new_family: Callable[[], Family]) -> None:
        """Recycling would draft an answer that it has seen; no visitor's first call does that."""
        family = new_family()
        first, second = (recorded(family, strategy="recycling", num_draft_tokens=4).on for _ in range(2))
        assert [each.drafted for each in first.rounds] == [each.drafted for each in second.rounds]


class TestProbabilities:
    @pytest.mark.parametrize("given", [{}, HOT], ids=["greedy", "sampled"])
    def test_against_single_forwards(self, family: Family, run: Callable[..., Run], given: dict[str, Any]) -> None:
        one = run(strategy="draft_model", num_draft_tokens=4, **given)
        found, events = one.found, one.events
        loaded, _ = family.load()
        text = encode_prompt(loaded, PROMPT)["input_ids"][0].tolist()
        rows = []
        with torch.no_grad():
            for id in ids(found.on):
                logits = loaded.model(torch.tensor([text])).logits[0, -1].double()
                rows.append((logits / (given.get("temperature") or 1)).softmax(-1))
                text.append(id)
        for side in (found.off, found.on):
            for token, row in zip(side.tokens, rows, strict=True):
                assert token.probability == pytest.approx(float(row[token.id]), abs=2e-4)
        refused = 0
        for each, event in zip(found.on.rounds, events, strict=True):
            if each.accepted < len(each.drafted) and each.tokens > each.accepted:
                refused += 1
                row, id = rows[each.first + each.accepted], event.drafted[0][each.accepted]
                assert each.rejected == pytest.approx(float(row[id]), abs=2e-4)
            else:
                assert each.rejected is None
        assert refused

    def test_trees_have_no_first_refused_token(self, run: Callable[..., Run]) -> None:
        rounds = run(strategy="recycling", num_draft_tokens=4).found.on.rounds
        assert any(each.is_tree for each in rounds)
        assert all(each.rejected is None for each in rounds)


class TestNoise:
    """Plain `generate` with our noise samples from softmax(logits / temperature), through the options that it is given."""

    V, N, TEMPERATURE = 4, 600, 0.5

    LOGITS = torch.tensor([[0.5, -0.3, 0.1, 1.0]])

    @pytest.fixture(scope="class")
    @classmethod
    def chosen(cls) -> torch.Tensor:
        """Two tokens a seed, `[N, 2]`."""
        found: list[list[int]] = []

        class Alone:
            """A model that decodes as greedily as it is told to."""

            device = torch.device("cpu")

            def generate(self, input_ids: torch.Tensor, **options: Any) -> None:
                assert options["do_sample"] is False
                processors: LogitsProcessorList = options["logits_processor"]
                text = input_ids
                for _ in range(2):
                    text = torch.cat([text, processors(text, cls.LOGITS.clone()).argmax(-1, keepdim=True)], 1)
                found.append(text[0, -2:].tolist())

        loaded = LoadedModel("alone", Alone(), byte_tokenizer())
        family = SimpleNamespace(draft=None)
        settings = settings_for(family, prompt="hello", temperature=cls.TEMPERATURE)  # type: ignore[arg-type]
        runner = recording._Runner(loaded, None, settings, Limits())
        runner.inputs = {"input_ids": torch.tensor([runner.prompt])}
        for seed in range(cls.N):
            runner.settings = replace(settings, seed=seed)
            runner._generate(False, 2, recording._Until(1.0), lambda at, what: None)
        return torch.tensor(found)

    def p_value(self, chosen: torch.Tensor, weights: torch.Tensor) -> float:
        joint = (weights[:, None] * weights[None, :]).flatten().double()  # both positions, independent
        counts = torch.bincount(chosen[:, 0] * self.V + chosen[:, 1], minlength=self.V**2)
        return float(stats.chisquare(counts.numpy(), (joint / joint.sum() * len(chosen)).numpy()).pvalue)

    def test_distribution(self, chosen: torch.Tensor) -> None:
        assert self.p_value(chosen, (self.LOGITS[0] / self.TEMPERATURE).softmax(-1)) > 1e-4

    def test_the_test_sees_what_is_wrong(self, chosen: torch.Tensor) -> None:
        weights = (self.LOGITS[0] / self.TEMPERATURE).softmax(-1)
        assert self.p_value(chosen, self.LOGITS[0].softmax(-1)) < 1e-6  # another temperature
        assert self.p_value(chosen[:, :1].expand(-1, 2), weights) < 1e-6  # one noise for both positions
        assert self.p_value(chosen.roll(1, 0).sort(1).values, weights) < 1e-6  # positions that depend on each other

    def test_the_noise_is_of_the_prompt(self) -> None:
        text, scores = torch.tensor([[1, 2, 3]]), torch.zeros(1, self.V)
        one, other = (CoupledNoise(0, prompt)(text, scores) for prompt in ([1, 2, 3], [3, 2, 1]))
        assert not torch.equal(one, other)
        assert one.dtype == torch.float32


class TestStopping:
    @pytest.mark.parametrize("stage", ["off", "on"])
    def test_closing_frees_the_device(
        self, new_family: Callable[[], Family], monkeypatch: pytest.MonkeyPatch, stage: str
    ) -> None:
        monkeypatch.setattr(recording, "UPDATE_SECONDS", 0.002)
        family, forwards = new_family(), list[int]()

        def slow() -> None:
            time.sleep(0.002)
            forwards.append(0)

        before_forward(family, slow)
        settings = settings_for(family, strategy="none", max_new_tokens=80)
        running = record(family, settings, Limits())
        for at, found in running:
            side = found.on if at == "on" else found.off
            if at == stage and side.tokens:
                break
        assert worker().busy
        forwards.clear()
        running.close()  # type: ignore[attr-defined]
        assert is_idle()
        assert len(forwards) < 40
        assert not side.done
        assert not found.complete
        assert found.speedup is None
        assert found.same_text is None
        assert len(recorded(family, max_new_tokens=3).on.tokens) == 3

    def test_closing_in_the_check(self, new_family: Callable[[], Family], monkeypatch: pytest.MonkeyPatch) -> None:
        """Its forward ends at the next layer, and nothing is said of what it didn't see."""
        monkeypatch.setattr(recording, "UPDATE_SECONDS", 0.002)
        stoppable, asked, reached = recording._stoppable, list[threading.Event](), list[int]()

        def listening(model: Any, stopped: threading.Event) -> Any:
            asked.append(stopped)
            return stoppable(model, stopped)

        monkeypatch.setattr(recording, "_stoppable", listening)
        family = new_family()
        first, second = family.load()[0].model.model.layers

        def wait(module: Any, given: Any) -> None:
            assert not asked or asked[0].wait(60)

        def note(module: Any, given: Any) -> None:
            reached.extend([1] * len(asked))

        first.register_forward_pre_hook(wait)
        second.register_forward_pre_hook(note)
        running = record(family, settings_for(family, strategy="none"), Limits())
        stage, found = next(running)
        while stage != "checking" or not asked:
            stage, found = next(running)
        running.close()  # type: ignore[attr-defined]
        assert is_idle()
        assert reached == []
        assert found.complete
        assert found.same_text
        assert not found.checked
        assert found.speedup is not None
        assert all(token.probability is None for token in found.on.tokens)
        assert [len(each._forward_pre_hooks) for each in (first, second)] == [1, 1]
        assert recorded(family, max_new_tokens=3).checked

    def test_closing_before_it_begins(self, family: Family) -> None:
        running = record(family, settings_for(family), Limits())
        assert next(running)[0] == "loading"
        assert is_idle()
        running.close()  # type: ignore[attr-defined]
        record(family, settings_for(family), Limits())  # not even begun

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """A clock for the limit that goes on as the test says."""
        seconds = [0.0]
        fake = SimpleNamespace(monotonic=lambda: seconds[0], perf_counter=time.perf_counter)
        monkeypatch.setattr(recording, "time", fake)
        return seconds

    def test_time_limit_of_both(self, new_family: Callable[[], Family], clock: list[float]) -> None:
        """The side that was cut says where, the other one goes as far."""
        family = new_family()

        def tick() -> None:
            clock[0] += 1

        before_forward(family, tick)
        found = recorded(family, Limits(seconds=10), strategy="none")
        assert found.off.cut == "time limit"
        assert len(found.off.tokens) == len(found.on.tokens) == 11
        assert ids(found.off) == ids(found.on)
        assert found.on.cut == ""
        assert found.same_text
        assert found.speedup is not None

    def test_time_limit_of_one(self, new_family: Callable[[], Family], clock: list[float]) -> None:
        family, slow = new_family(), list[int]()

        def tick() -> None:
            clock[0] += 5 if slow else 1

        before_forward(family, tick)
        for stage, found in record(family, settings_for(family, strategy="none"), Limits(seconds=30)):
            if stage == "off" and found.off.done:
                slow.append(1)
        assert (found.off.cut, found.on.cut) == ("", "time limit")
        assert len(found.off.tokens) == 24
        assert len(found.on.tokens) == 7
        assert found.speedup is None
        assert found.same_text is None
        assert found.difference == ""
        assert all(token.probability is not None for token in found.on.tokens)

    def test_a_side_with_all_its_tokens_is_not_cut(self, new_family: Callable[[], Family], clock: list[float]) -> None:
        family = new_family()

        def tick() -> None:
            clock[0] += 1

        before_forward(family, tick)
        found = recorded(family, Limits(seconds=10), strategy="none", max_new_tokens=11)
        assert (found.off.cut, found.on.cut) == ("", "")
        assert found.speedup is not None


class TestFailures:
    def test_long_prompt(self, family: Family) -> None:
        settings = settings_for(family, prompt="a" * 30, chat=False)
        *_, (stage, _) = record(family, settings, Limits(prompt_tokens=30))
        assert stage == "done"
        with pytest.raises(SpecDecError, match=r"The prompt has 30 tokens; at most 29 are taken here\. Shorten it\."):
            list(record(family, settings, Limits(prompt_tokens=29)))

    def test_missing_model(self, tmp_path: Path) -> None:
        family = own_family(str(tmp_path / "nothing"), None, "float32")
        with pytest.raises(SpecDecError, match="can't be loaded"):
            recorded(family)

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (KeyError("boom"), "The run failed: KeyError: 'boom'"),
            (ValueError("boom\nand more"), "The run failed: ValueError: boom"),
            (RuntimeError("x" * 999), f"The run failed: RuntimeError: {'x' * 300}"),
            (SpecDecError("as it is"), "as it is"),
            (MemoryError(), "new tokens. Try a shorter prompt, or 4 new tokens."),
            (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "shorter prompt, or 4 new tokens."),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory for this prompt and 8 new tokens."),
        ],
    )
    def test_forward_raises(self, new_family: Callable[[], Family], error: Exception, message: str) -> None:
        self.check(new_family(), "off", error, message)

    @pytest.mark.parametrize("stage", ["warm-up", "on", "checking"])
    @pytest.mark.parametrize("error", [KeyError("boom"), MemoryError()], ids=["bug", "memory"])
    def test_at_any_stage(self, new_family: Callable[[], Family], stage: str, error: Exception) -> None:
        self.check(
            new_family(), stage, error, "or 4 new tokens." if isinstance(error, MemoryError) else "KeyError: 'boom'"
        )

    def check(self, family: Family, stage: str, error: Exception, message: str) -> None:
        armed: list[int] = []

        def fail() -> None:
            if armed:
                raise error

        before_forward(family, fail)

        def run() -> None:
            for at, found in record(family, settings_for(family, strategy="none", max_new_tokens=8), Limits()):
                next_one = {"warm-up": "warm-up", "off": "on", "checking": "checking"}.get(at)
                if next_one == stage and (at != "off" or found.off.done):
                    armed.append(1)

        if stage == "off":
            family.warmed["none", 0, False] = None
            armed.append(1)
        with pytest.raises(SpecDecError) as caught:
            run()
        assert message in str(caught.value)
        assert len(str(caught.value)) < 400
        assert is_idle()
        assert bool(family.warmed) == (stage != "warm-up")
        armed.clear()
        assert recorded(family, strategy="none", max_new_tokens=2).complete

    def test_one_token_at_least(self) -> None:
        text = str(recording._explained(MemoryError(), SimpleNamespace(max_new_tokens=1)))  # type: ignore[arg-type]
        assert text.endswith("or 1 new tokens.")

    def test_decoded_plainly(self, new_family: Callable[[], Family]) -> None:
        """A call that can't be sped up still has its text, and its reason."""
        family = new_family()
        family.load()[0].model.generation_config.use_cache = False
        found = recorded(family, strategy="prompt_lookup")
        assert ids(found.off) == ids(found.on)
        assert found.same_text
        assert "use_cache" in found.on.stats["fallback_reason"]
        times = [token.seconds for token in found.on.tokens]
        assert len(set(times)) == len(times) == 24
        assert times == sorted(times)

    def test_switched_off(self, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_SPECDEC_DISABLE", "1")
        found = recorded(family, strategy="prompt_lookup")
        assert ids(found.off) == ids(found.on)


def test_two_at_once(new_family: Callable[[], Family]) -> None:
    """From warm-up to the last check a run has the device for itself."""
    family, lock, seen = new_family(), threading.Lock(), list[str]()
    model = family.load()[0].model

    def begin(module: Any, given: Any) -> None:
        assert lock.acquire(blocking=False), "two forwards at once"
        time.sleep(0.0005)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda module, given, output: lock.release())
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            settings = settings_for(family, prompt=name * 9, strategy="none", max_new_tokens=8)
            for stage, found in record(family, settings, Limits(), name):
                results[name] = found
                if stage not in ("loading", "done"):
                    seen.append(name)
        except BaseException as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in "abc":
        found = results[name]
        assert isinstance(found, Comparison), found
        assert found.complete
        assert found.same_text
        assert found.settings["prompt"] == name * 9
    assert sum(before != after for before, after in zip(seen, seen[1:], strict=False)) == 2


def test_stages(new_family: Callable[[], Family]) -> None:
    family = new_family()
    for first in (True, False):
        stages = [
            stage for stage, _ in record(family, settings_for(family, strategy="none", max_new_tokens=2), Limits())
        ]
        expected = ["loading", *(["warm-up"] if first else []), "off", "on", "checking", "done"]
        assert list(dict.fromkeys(stages)) == expected


class TestComparison:
    def test_round_trip(self, run: Callable[..., Run]) -> None:
        found = run(strategy="draft_model", num_draft_tokens=4).found
        text = json.dumps(found.to_dict(), allow_nan=False)
        again = Comparison.from_dict(json.loads(text))
        assert again == found
        assert json.loads(text)["speedup"] == again.speedup == found.speedup
        assert json.loads(text)["schema_version"] == SCHEMA_VERSION
        assert json.loads(text)["same_text"] is True

    @pytest.mark.parametrize(
        "change",
        [
            {"schema_version": 99}, {"schema_version": None}, {"off": None}, {"on": {}}, {"on": {"tokens": 5}},
            {"off": {"tokens": [{"id": 1}], "rounds": []}}, {"off": {"tokens": [], "rounds": [], "more": 1}},
        ],
    )  # fmt: skip
    def test_something_else(self, change: dict[str, Any]) -> None:
        good = Comparison(Side(), Side(), {}, "", "").to_dict()
        with pytest.raises(SpecDecError, match="schema version|no recorded run"):
            Comparison.from_dict(good | change)

    @pytest.mark.parametrize("bad", [None, [], "text", 5, {}, {"schema_version": SCHEMA_VERSION}])
    def test_nothing_like_it(self, bad: Any) -> None:
        with pytest.raises(SpecDecError, match="no recorded run"):
            Comparison.from_dict(bad)

    def test_same_text_is_of_the_tokens(self) -> None:
        """Whether or not somebody has looked where they part."""
        off, on = (Side([recording.Token(id, "a", 0.1)], [], 1.0, True) for id in (1, 2))
        assert Comparison(off, on, {}, "", "").same_text is False
        assert Comparison(off, off, {}, "", "", checked=False).same_text is True

    def test_speedup(self) -> None:
        tokens = [recording.Token(1, "a", 0.1)] * 4
        off, on = Side(tokens, [], 2.0, True), Side(tokens, [], 0.5, True)
        assert Comparison(off, on, {}, "", "").speedup == 4.0
        for unfinished in (replace(on, done=False), replace(on, cut="time limit"), replace(on, cut="stopped")):
            found = Comparison(off, unfinished, {}, "", "")
            assert (found.speedup, found.same_text) == (None, None)
        assert Comparison(replace(off, tokens=[]), on, {}, "", "").speedup is None
        assert Comparison(off, on, {}, "", "", difference="at token 2").same_text is False

    def test_difference(self, family: Family) -> None:
        """With the gap of the scores that chose: logits, or where tokens are sampled logits with the noise of the place."""
        for given, message in (({}, "not a near-tie at token 1, gap "), (HOT, "not a near-tie at token 1, gap ")):
            found = recorded(family, strategy="none", max_new_tokens=3, **given)
            found.on.tokens[1].id = (found.on.tokens[1].id + 1) % 256
            recording._Runner(*family.load(), settings_for(family, **given), Limits()).compare(found)
            assert found.difference.startswith(message)
            assert not found.near_tie
            assert found.same_text is False

    def test_conditions(self, family: Family) -> None:
        found = recorded(family, max_new_tokens=1)
        assert "float32" in found.conditions
        assert "torch 2" in found.conditions
        assert "\n" not in found.conditions
        assert found.model == family.name


def test_families() -> None:
    assert list(families(False)) == ["smollm2"]
    assert list(families(True)) == ["qwen3", "smollm2"]
    assert families(True)["qwen3"].draft
    assert families(False)["smollm2"].name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert own_family("/models/target/", "org/draft", "bfloat16").title == "target, draft draft"


class TestPickedDraft:
    """A target without a draft of its own has the one of `speculative=True`, before anything is timed or warmed up."""

    @pytest.fixture
    def alone(self, folders: tuple[Path, Path]) -> Family:
        return own_family(str(folders[0]), None, "float32")

    def test_looked_for_when_the_models_are_loaded(
        self, alone: Family, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = list[bool]()

        def find(target: Any, name: str, config: SpecConfig, may_fetch: bool) -> Any:
            asked.append(may_fetch)
            return load_model(str(folders[1]), dtype="float32").model

        monkeypatch.setattr(automatic, "_find", find)
        _, draft = alone.load()
        assert asked == [False]  # a folder's draft is never fetched
        assert draft is None  # the page offers no draft model that visitors could choose
        found = recorded(alone, strategy="auto")
        assert asked == [False]
        assert found.on.stats["drafter"] == "hybrid"

    def test_declined(self, alone: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(automatic, "_find", lambda *given: None)
        alone.load()
        monkeypatch.setattr(automatic, "_find", lambda *given: pytest.fail("asked again"))
        assert recorded(alone, strategy="auto").on.stats["drafter"] == "prompt_lookup"

    def test_ones_own_is_the_one(self, new_family: Callable[[], Family], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(automatic, "_find", lambda *given: pytest.fail("asked"))
        assert new_family().load()[1] is not None


def test_probability_is_a_number(tmp_path: Path) -> None:
    """Also at the lowest temperature and with the widest logits."""
    family = own_family(str(save_tiny_chat_model(tmp_path)), None, "float32")
    with torch.no_grad():
        family.load()[0].model.lm_head.weight.mul_(1e3)
    found = recorded(family, temperature=0.01, max_new_tokens=4)
    assert all(math.isfinite(token.probability or 0.0) for token in found.on.tokens)
