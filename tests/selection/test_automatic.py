"""The draft model of `speculative=True`: found once a model, and never in the way."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import DraftModel, IncompatibleDraftError, SpecConfig
from hf_specdec.selection import automatic, pick
from hf_specdec.selection.candidates import Candidate, Choice
from hf_specdec.selection.hub import describe, download

from ..tiny import tiny_model
from .family import DRAFT, INSTRUCT
from .hub_server import HubServer


PROMPT = torch.tensor([[3, 5, 8, 13, 21, 34, 55]])


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    automatic.reset()
    yield
    automatic.reset()


@pytest.fixture
def target(hub: HubServer) -> Any:
    """The target of the family, loaded by its id."""
    return load(INSTRUCT)


def load(id: str) -> Any:
    download(describe(id), announce=lambda line: None)
    return AutoModelForCausalLM.from_pretrained(id, local_files_only=True).eval()


def generate(model: Any, speculative: Any = True, **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **options}
    return hf_specdec.generate(model, PROMPT, speculative=speculative, **options)


def fetched(hub: HubServer) -> list[str]:
    return [name for name in hub.asked() if name.endswith(".safetensors")]


class Picks:
    """Stands in for `pick`: gives one answer and counts the questions."""

    def __init__(self, answer: Choice | Exception) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, *arguments: Any, **options: Any) -> Choice:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_draft_in_the_cache_is_used(hub: HubServer, target: Any, caplog: pytest.LogCaptureFixture) -> None:
    load(DRAFT)
    before = len(hub.requests)
    caplog.set_level(logging.INFO, logger="hf_specdec")
    output = generate(target)
    assert output.spec_stats.drafter == "hybrid"
    assert f"{DRAFT} drafts for {INSTRUCT}" in caplog.text
    plain = generate(target, speculative=False)
    assert torch.equal(output.sequences, plain if isinstance(plain, torch.Tensor) else plain.sequences)
    assert len(hub.requests) == before  # not one question to the Hub


def test_a_target_from_a_folder_asks_nothing(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    source = download(describe(INSTRUCT), announce=lambda line: None)
    folder = shutil.copytree(source, tmp_path / INSTRUCT.partition("/")[2])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    asked = len(hub.requests)
    assert generate(model).spec_stats.drafter == "prompt_lookup"
    assert len(hub.requests) == asked
    assert "downloading" not in capsys.readouterr().err


@pytest.mark.parametrize("speculative", [True, SpecConfig(draft_model="auto")], ids=["True", "auto"])
def test_a_missing_draft_is_downloaded_and_announced(
    hub: HubServer, target: Any, speculative: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = generate(target, speculative).spec_stats
    assert stats.drafter == "hybrid"
    said = capsys.readouterr().err
    assert f"downloading {DRAFT}, " in said
    assert "kB" in said
    assert fetched(hub)
    # from now on it is here for everyone
    automatic.reset()
    assert generate(target).spec_stats.drafter == "hybrid"


def test_auto_without_the_hub_is_lookup(
    hub: HubServer, target: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert generate(target, SpecConfig(draft_model="auto")).spec_stats.drafter == "prompt_lookup"
    assert len(hub.requests) == asked


def test_a_download_that_fails_is_lookup(hub: HubServer, target: Any, caplog: pytest.LogCaptureFixture) -> None:
    hub.fail(DRAFT, "cut", on="cdn")
    assert generate(target, SpecConfig(draft_model="auto")).spec_stats.drafter == "prompt_lookup"
    assert f"no draft model for {INSTRUCT}" in caplog.text


def test_seeds_mean_the_same_in_the_first_call(hub: HubServer, target: Any) -> None:
    load(DRAFT)
    before = torch.get_rng_state()
    assert automatic.draft_for(target, SpecConfig()) is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_local_folder(hub: HubServer) -> None:
    load(DRAFT)
    folder = download(describe(INSTRUCT), announce=lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert generate(model).spec_stats.drafter == "hybrid"


def test_models_without_a_name_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = Picks(RuntimeError("asked"))
    monkeypatch.setattr(pick, "pick", picks)
    assert generate(tiny_model()).spec_stats.drafter == "prompt_lookup"
    assert generate(tiny_model(), SpecConfig(draft_model="auto")).spec_stats.drafter == "prompt_lookup"
    assert picks.calls == 0


@pytest.fixture
def named() -> Any:
    """A model with a name that the local cache doesn't know."""
    model = tiny_model()
    model.name_or_path = "acme/Named-8B"
    return model


def test_an_error_is_lookup_and_said_once(
    named: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    picks = Picks(RuntimeError("the disk is on fire"))
    monkeypatch.setattr(pick, "pick", picks)
    for _ in range(3):
        assert generate(named).spec_stats.drafter == "prompt_lookup"
    assert picks.calls == 1
    assert caplog.text.count("the disk is on fire") == 1
    hf_specdec.reset(named)
    generate(named)
    assert picks.calls == 2


@pytest.mark.parametrize("verified", [True, False])
def test_what_would_be_a_download_is_named_with_its_size(
    named: Any, verified: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verdict = "fits" if verified else "unverified"
    draft = Candidate(
        "acme/Named-1B", "draft_model", verdict, download_bytes=2_500_000_000, predicted_speedup=1.5, verified=verified
    )
    monkeypatch.setattr(pick, "pick", Picks(Choice("acme/Named-8B", draft)))
    for _ in range(2):
        assert generate(named).spec_stats.drafter == "prompt_lookup"
    assert caplog.text.count("acme/Named-1B could draft for acme/Named-8B (predicted 1.50×)") == 1
    assert "2.50 GB" in caplog.text
    assert "hf-specdec drafts acme/Named-8B" in caplog.text
    assert 'draft_model="auto"' in caplog.text


def test_unverified_is_not_downloaded(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Candidate("acme/Named-1B", "draft_model", "unverified", download_bytes=1)
    monkeypatch.setattr(pick, "pick", Picks(Choice("acme/Named-8B", draft)))
    monkeypatch.setattr("hf_specdec.selection.hub.download", Picks(RuntimeError("downloaded")))
    assert generate(named, SpecConfig(draft_model="auto")).spec_stats.drafter == "prompt_lookup"


def test_a_saved_name_with_other_ids_is_not_used(
    named: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Candidate(
        "acme/Named-1B", "draft_model", "other vocabulary", ("its ids differ",), download_bytes=0, verified=True
    )
    monkeypatch.setattr(pick, "pick", Picks(Choice("acme/Named-8B", draft)))
    assert generate(named).spec_stats.drafter == "prompt_lookup"
    assert "acme/Named-1B doesn't draft for acme/Named-8B: its ids differ" in caplog.text


def test_what_the_user_chose_is_left_alone(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    picks = Picks(RuntimeError("asked"))
    monkeypatch.setattr(pick, "pick", picks)
    for asked in ("prompt_lookup", "recycling", "none", SpecConfig(draft_model=tiny_model()), False):
        generate(named, asked)
    generate(named, prompt_lookup_num_tokens=3)
    generate(named, SpecConfig(num_draft_tokens=0))
    generate(named, SpecConfig(drafter="prompt_lookup", draft_model="auto"))
    assert picks.calls == 0


def test_asking_for_a_draft_model_that_is_not_there(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pick, "pick", Picks(Choice("acme/Named-8B", None)))
    with pytest.raises(IncompatibleDraftError, match="needs a draft model"):
        generate(named, "draft_model")
    # made for a draft that isn't found
    config = SpecConfig(drafter=DraftModel("auto", 0.4), draft_model="auto")
    assert generate(named, config).spec_stats.drafter == "prompt_lookup"


def test_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert automatic._free_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    assert automatic._free_bytes(torch.device("cuda")) == 900


def test_looking_for_one_target_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, asked = threading.Event(), threading.Event()

    def slow(name: str, **options: Any) -> Choice:
        if name == "slow":
            asked.set()
            assert answered.wait(60)
        return Choice(name, None)

    monkeypatch.setattr(pick, "pick", slow)
    targets = {name: tiny_model() for name in ("slow", "quick")}
    for name, model in targets.items():
        model.name_or_path = name
    waiting = threading.Thread(target=automatic.draft_for, args=(targets["slow"], SpecConfig()))
    waiting.start()
    try:
        assert asked.wait(60)
        assert automatic.draft_for(targets["quick"], SpecConfig()) is None
        assert waiting.is_alive()
    finally:
        answered.set()
        waiting.join(60)
