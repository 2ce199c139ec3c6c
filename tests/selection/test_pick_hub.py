"""Which draft is picked when the Hub answers, doesn't, refuses or breaks off: `pick` against a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import SpecConfig
from hf_specdec.cli import app
from hf_specdec.selection import hub as hubs
from hf_specdec.selection.candidates import Candidate, Choice
from hf_specdec.selection.hub import HubProblem, cached, describe, download
from hf_specdec.selection.pick import pick

from ..tiny import ragged_prompts
from .family import DRAFT, INSTRUCT, TOKEN, changed, checkpoint
from .hub_server import HubServer


SECOND = "acme/Tiny-1.7B-Instruct"
OTHER_IDS = "acme/Tiny-0.5B-Instruct"
LARGE = "vast/Large-8B-Instruct"


@pytest.fixture(autouse=True)
def _no_weights(hub: HubServer) -> Iterator[None]:
    """Picking looks at configurations and tokenizers alone."""
    yield
    assert not [name for name in hub.asked() if name.endswith((".bin", ".py", ".gguf"))]


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "METADATA_SECONDS", 1.5)
    monkeypatch.setattr(hubs, "TOKENIZER_SECONDS", 1.5)


def name_of(choice: Choice) -> str | None:
    return choice.chosen.id if choice.chosen else None


def candidate(choice: Choice, id: str) -> Candidate:
    return next(each for each in choice.candidates if each.id == id)


def store(*ids: str) -> None:
    for id in ids:
        download(describe(id), announce=lambda text: None)


def test_from_the_hub(hub: HubServer) -> None:
    choice = pick(INSTRUCT)
    chosen = choice.chosen
    assert chosen is not None
    assert (chosen.id, chosen.source, chosen.verdict, chosen.verified) == (DRAFT, "hub", "fits with padding", True)
    assert chosen.revision == hub.repositories[DRAFT].main
    assert chosen.download_bytes == pytest.approx(len(checkpoint(32, 2)["model.safetensors"]), rel=0.05)
    assert chosen.predicted_speedup is not None
    assert chosen.predicted_speedup > 1
    wrong = candidate(choice, OTHER_IDS)  # smaller, but its ids stand for other tokens
    assert (wrong.verdict, wrong.verified) == ("other vocabulary", True)
    assert {each.id for each in choice.candidates} <= set(hub.repositories)
    assert not [
        each for each in choice.candidates if each.id.endswith(("AWQ", "GGUF", "FP8", "LoRA", "0.3B-Instruct"))
    ]
    assert not [name for name in hub.asked() if name.endswith(".safetensors")]


def test_from_the_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store(INSTRUCT, DRAFT, OTHER_IDS, SECOND)
    before = len(hub.requests)
    choice = pick(INSTRUCT, local_files_only=True)
    assert (name_of(choice), choice.chosen and choice.chosen.source) == (DRAFT, "cache")
    assert choice.chosen is not None
    assert choice.chosen.download_bytes == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert name_of(pick(INSTRUCT)) == DRAFT
    assert len(hub.requests) == before


def test_what_is_here_comes_before_what_would_have_to_be_fetched(hub: HubServer) -> None:
    store(SECOND)
    assert name_of(pick(INSTRUCT)) == SECOND


def test_offline_with_an_empty_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(INSTRUCT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert name_of(pick(INSTRUCT)) is None  # its tokenizer isn't here, and no draft either
    nothing = pick("acme/Tiny-8B")
    assert nothing.chosen is None
    assert "HF_HUB_OFFLINE" in " ".join(nothing.notes)
    assert len(hub.requests) == before


def test_a_gated_draft_gives_way_to_the_next(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[DRAFT].readers = (TOKEN,)
    choice = pick(INSTRUCT)
    assert name_of(choice) == SECOND
    assert "gated" in " ".join(candidate(choice, DRAFT).reasons)
    assert name_of(pick(INSTRUCT, token=TOKEN, refresh=True)) == DRAFT
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert name_of(pick(INSTRUCT, refresh=True)) == DRAFT


def test_a_base_model_is_no_draft_for_an_instruct_model(hub: HubServer) -> None:
    for id in (DRAFT, SECOND):
        del hub.repositories[id]
    choice = pick(INSTRUCT)
    assert choice.chosen is None
    assert "another kind" in candidate(choice, "acme/Tiny-0.6B").reasons[0]  # its tokenizer has no chat template


def test_with_all_drafts_gated_none_is_picked(hub: HubServer) -> None:
    for id in (DRAFT, SECOND):
        hub.repositories[id].readers = (TOKEN,)
    choice = pick(INSTRUCT)
    assert choice.chosen is None
    assert "gated" in " ".join(candidate(choice, SECOND).reasons)


def test_a_gated_target_is_said_to_be_gated(hub: HubServer) -> None:
    hub.repositories[INSTRUCT].readers = (TOKEN,)
    choice = pick(INSTRUCT)
    assert choice.chosen is None
    assert "HF_TOKEN" in " ".join(choice.notes)
    assert name_of(pick(INSTRUCT, token=TOKEN)) == DRAFT


@pytest.mark.parametrize("fault", ["slow", "429", "500", "drop"])
@pytest.mark.parametrize("on", ["config.json", "tokenizer.json"])
def test_a_draft_that_cannot_be_read_gives_way_to_the_next(
    hub: HubServer, fault: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "slow":
        impatient(monkeypatch)
    hub.fail(DRAFT, fault, on=on)
    choice = pick(INSTRUCT)
    assert name_of(choice) == SECOND
    assert not candidate(choice, DRAFT).verified


@pytest.mark.parametrize("fault", ["slow", "429", "500", "drop", "nonsense"])
def test_a_search_without_an_answer_picks_none_and_says_why(
    hub: HubServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "slow":
        impatient(monkeypatch)
    hub.fail("acme", fault)
    choice = pick(INSTRUCT)
    assert choice.chosen is None
    assert "not searched" in " ".join(choice.notes)


def test_without_a_connection_the_cache_answers(hub: HubServer) -> None:
    store(INSTRUCT, DRAFT)
    hub.stop()
    assert name_of(pick(INSTRUCT)) == DRAFT


@pytest.mark.parametrize("fault", ["cut", "short"])
def test_a_download_that_breaks_off_leaves_no_draft(
    hub: HubServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(INSTRUCT)
    choice = pick(INSTRUCT)
    assert choice.chosen is not None
    hub.fail(DRAFT, fault, on="cdn")
    with pytest.raises(HubProblem):
        store(DRAFT)
    assert [each.id for each in cached()] == [INSTRUCT]
    assert name_of(pick(INSTRUCT, local_files_only=True)) is None
    hub.faults.clear()
    store(DRAFT)
    assert name_of(pick(INSTRUCT, local_files_only=True)) == DRAFT


def test_only_siblings_with_other_ids(hub: HubServer) -> None:
    for id in (DRAFT, SECOND, "acme/Tiny-0.6B", "acme/Tiny-8B"):
        del hub.repositories[id]
    choice = pick(INSTRUCT)
    assert choice.chosen is None
    assert candidate(choice, OTHER_IDS).verdict == "other vocabulary"


def test_only_siblings_that_are_too_large(hub: HubServer) -> None:
    choice = pick(LARGE)
    assert choice.chosen is None
    rejected = candidate(choice, "vast/Large-7B-Instruct")
    assert rejected.verdict == "rejected"
    assert "too large" in rejected.reasons[0]


def qwen(hub: HubServer) -> list[str]:
    """Qwen3 as the Hub has it, but for its weights and tokens."""
    sizes = {"8B": (4096, 36, 12288), "0.6B": (1024, 28, 3072), "1.7B": (2048, 28, 6144), "4B": (2560, 36, 9728)}
    for name, (hidden, layers, inner) in sizes.items():
        files = changed(
            checkpoint(32, 2),
            model_type="qwen3",
            architectures=["Qwen3ForCausalLM"],
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=inner,
            num_attention_heads=32 if hidden > 2048 else 16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=name != "8B",
            dtype="bfloat16",
        )
        hub.push(f"Qwen/Qwen3-{name}", files, tags=("text-generation",))
    return [f"Qwen/Qwen3-{name}" for name in sizes]


def test_a_family_of_the_catalog_is_verified_on_the_hub(hub: HubServer) -> None:
    target, draft, *_ = qwen(hub)
    choice = pick(target)
    assert name_of(choice) == draft
    assert choice.chosen is not None
    assert choice.chosen.verified
    assert not hub.asked("list")


def test_one_silent_hub_is_asked_a_few_questions_not_one_a_candidate(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    target, *drafts = qwen(hub)
    for id in drafts:
        hub.fail(id, "slow")
    hub.fail("Qwen", "slow")
    choice = pick(target)
    assert choice.chosen is None or not choice.chosen.verified
    assert len([request for request in hub.requests if request.id != target]) <= 2
    assert "doesn't answer" in " ".join(choice.notes)


def generated(model: Any, **options: Any) -> list[list[int]]:
    ids = ragged_prompts(1, vocabulary=320)["input_ids"]
    found: list[list[int]] = model.generate(ids, max_new_tokens=12, do_sample=False, **options).tolist()
    return found


@pytest.mark.usefixtures("enabled")
def test_generate_fetches_a_draft_that_is_not_here(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(INSTRUCT)
    plain = generated(model)
    assert generated(model, speculative="prompt_lookup") == plain
    assert DRAFT not in {request.id for request in hub.requests}
    assert generated(model, speculative=True) == plain
    assert hub.asked("cdn", DRAFT) == ["model.safetensors"]
    assert f"downloading {DRAFT}, 158 kB" in capsys.readouterr().err
    assert hf_specdec.last_stats(model).drafter == "hybrid"
    before = len(hub.requests)
    hf_specdec.reset(model)
    assert generated(model, speculative=True) == plain  # by now it is here
    assert hf_specdec.last_stats(model).drafter == "hybrid"
    assert len(hub.requests) == before


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(("fault", "on"), [("cut", "cdn"), ("500", "*.safetensors"), ("429", "list"), ("drop", "*")])
def test_generate_goes_on_without_the_draft_that_cannot_be_fetched(hub: HubServer, fault: str, on: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(INSTRUCT)
    hub.fail("acme" if on == "list" else DRAFT, fault, on=on)
    if fault == "drop":
        hub.fail("acme", fault)
    assert generated(model, speculative=SpecConfig(draft_model="auto")) == generated(model)
    assert DRAFT not in [each.id for each in cached()]


def run(*arguments: str) -> tuple[int, Any]:
    """Exit code and JSON (or messages) of `hf-specdec drafts`."""
    result = CliRunner().invoke(app, ["drafts", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.exit_code == 0 else result.output


def test_the_command_line_says_the_same(hub: HubServer) -> None:
    code, data = run(INSTRUCT)
    assert code == 0
    assert data["chosen"] == {"id": DRAFT, "kind": "draft_model", "verified": True}
    assert data["target"] == INSTRUCT
    verdicts = {each["id"]: each["verdict"] for each in data["candidates"]}
    assert verdicts[DRAFT] == "fits with padding"
    assert verdicts[OTHER_IDS] == "other vocabulary"
    code, data = run(LARGE)
    assert (code, data["chosen"]) == (0, None)
    assert not [name for name in hub.asked() if name.endswith(".safetensors")]


def test_the_command_line_without_the_hub(hub: HubServer) -> None:
    hub.repositories[DRAFT].readers = (TOKEN,)
    assert run(INSTRUCT)[1]["chosen"]["id"] == SECOND
    hub.stop()
    code, data = run("Qwen/Qwen3-8B")  # in the catalog
    assert code == 0
    assert data["chosen"] == {"id": "Qwen/Qwen3-0.6B", "kind": "draft_model", "verified": False}
    assert {each["verdict"] for each in data["candidates"]} <= {"unverified", "rejected"}
    code, data = run("acme/Nowhere")
    assert (code, data["chosen"]) == (0, None)


def test_a_better_draft_that_comes_later_is_found(hub: HubServer) -> None:
    store(INSTRUCT, "acme/Tiny-1.7B-Instruct")
    assert name_of(pick(INSTRUCT, local_files_only=True)) == "acme/Tiny-1.7B-Instruct"
    store(DRAFT)
    assert name_of(pick(INSTRUCT, local_files_only=True)) == DRAFT
