"""Targets spread over CPU and disk by Accelerate's hooks, and pairs loaded from folders: the same text as ever."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import IncompatibleDraftError, PlacementError, SpecConfig
from hf_specdec.engine import compat
from hf_specdec.selection.candidates import Candidate, Choice
from hf_specdec.selection.load import load_draft
from hf_specdec.selection.placement import plan
from tests.tiny import exact_pair, ragged_prompts

from .family import DRAFT, INSTRUCT, checkpoint
from .hub_server import HubServer


CALL = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
REST = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
MAPS = {
    "layers on disk": dict.fromkeys((*REST, "model.layers.0"), "cpu")
    | {f"model.layers.{index}": "disk" for index in (1, 2, 3)},
    "embedding and head on disk": dict.fromkeys(("model.embed_tokens", "lm_head", "model.layers.1"), "disk")
    | dict.fromkeys(("model.norm", "model.rotary_emb", *(f"model.layers.{index}" for index in (0, 2, 3))), "cpu"),
    "all on disk": {"": "disk"},
}
KIB = 1024


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Tensor], Tensor]:
    """Folders of a target and a draft that mostly agrees with it, prompts, and what the target says to them."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = exact_pair(layers=4, noise=0.5)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    prompts = ragged_prompts(3)
    return str(folder / "target"), str(folder / "draft"), prompts, target.generate(**prompts, **CALL)


def spread(path: str, device_map: dict[str, str], folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map=device_map, offload_folder=str(folder)
    ).eval()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "recycling", "draft_model"])
def test_same_text(name: str, drafter: str, pair: Any, tmp_path: Path) -> None:
    target_path, draft_path, prompts, expected = pair
    target = spread(target_path, MAPS[name], tmp_path)
    draft = draft_path if drafter == "draft_model" else None
    speculative = SpecConfig(drafter=drafter, draft_model=draft, draft_length="fixed")  # drafts whatever it costs
    out = hf_specdec.generate(target, **prompts, **CALL, speculative=speculative)
    assert torch.equal(out, expected)
    stats = hf_specdec.last_stats(target)
    assert stats is not None
    assert stats.fallback_reason is None
    assert not stats.lean_forward  # hooks fetch the weights, so the model's own forward has to run
    assert stats.num_accepted_draft_tokens > 0


def test_same_sampled_text(pair: Any, tmp_path: Path) -> None:
    """Coupled sampling says the same wherever the weights are."""
    target_path, draft_path, prompts, _ = pair
    config = SpecConfig(verification="coupled", seed=3, draft_model=draft_path)
    texts = [
        hf_specdec.generate(
            spread(target_path, place, tmp_path), **prompts, **CALL | {"do_sample": True}, speculative=config
        )
        for place in ({"": "cpu"}, MAPS["embedding and head on disk"])
    ]
    assert torch.equal(*texts)


def test_where_modules_run(pair: Any, tmp_path: Path) -> None:
    """Offloaded weights are on no device between forwards; what the hooks say counts."""
    target = spread(pair[0], MAPS["embedding and head on disk"], tmp_path)
    assert target.device.type == "meta"
    assert compat.input_device(target) == compat.head_device(target) == torch.device("cpu")
    assert load_draft(target, pair[1]).device.type == "cpu"
    target.lm_head._hf_hook = types.SimpleNamespace(execution_device="cuda:1")
    assert compat.head_device(target) == torch.device("cuda:1")
    target.lm_head._hf_hook = types.SimpleNamespace(hooks=[types.SimpleNamespace(), target.lm_head._hf_hook])
    assert compat.head_device(target) == torch.device("cuda:1")
    assert compat.input_device(target) == torch.device("cpu")


def test_pair_in_memory(pair: Any) -> None:
    target, draft = hf_specdec.load_pair(pair[0], pair[1], max_memory={"cpu": "1GiB"}, context=64)
    assert (target.training, draft.training) == (False, False)
    assert not hasattr(target, "_hf_hook")
    config = SpecConfig(draft_length="fixed")
    out = hf_specdec.generate(target, **pair[2], **CALL, speculative=config, assistant_model=draft)
    assert torch.equal(out, pair[3])
    assert hf_specdec.last_stats(target).num_accepted_draft_tokens > 0  # type: ignore[union-attr]


def test_pair_with_layers_on_disk(pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Too little memory for both: the draft stays in it, and layers of the target go to the disk."""
    with caplog.at_level(logging.INFO, "hf_specdec"):
        target, draft = hf_specdec.load_pair(
            pair[0], pair[1], max_memory={"cpu": 900 * KIB}, context=64, offload_folder=tmp_path / "weights"
        )
    assert "disk" in target.hf_device_map.values()
    assert {each.device.type for each in draft.parameters()} == {"cpu"}
    assert "fetched in every forward" in caplog.text
    assert "room for batch 1, context 64" in caplog.text
    assert torch.equal(hf_specdec.generate(target, **pair[2], **CALL, assistant_model=draft), pair[3])


def test_dtype_and_options_reach_both(pair: Any) -> None:
    target, draft = hf_specdec.load_pair(
        pair[0], pair[1], max_memory={"cpu": "1GiB"}, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config._attn_implementation == "eager"


@pytest.mark.parametrize("draft", [None, False])
def test_without_a_draft(draft: Any, pair: Any) -> None:
    assert hf_specdec.load_pair(pair[0], draft, max_memory={"cpu": "1GiB"})[1] is None


def test_loaded_draft(pair: Any) -> None:
    given = AutoModelForCausalLM.from_pretrained(pair[1])
    assert hf_specdec.load_pair(pair[0], given, max_memory={"cpu": "1GiB"})[1] is given


def test_refused_before_anything_is_loaded(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(PlacementError, match=r"GiB are needed at batch 1 and context 4,096"):
        hf_specdec.load_pair(pair[0], pair[1], max_memory={"cpu": 200 * KIB})


def test_named_draft_that_is_none(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDraftError, match="can't be planned"):
        hf_specdec.load_pair(pair[0], str(tmp_path), max_memory={"cpu": "1GiB"})


def without_safetensors(path: str, folder: Path) -> str:
    """The same checkpoint as a pickle, which is never read."""
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return str(folder)


def test_pickles_are_not_read(pair: Any, tmp_path: Path) -> None:
    path = without_safetensors(pair[1], tmp_path)
    with pytest.raises(IncompatibleDraftError, match="can't be loaded"):
        hf_specdec.load_pair(pair[0], path, max_memory={"cpu": "1GiB"})
    with pytest.raises(OSError, match="safetensors"):
        hf_specdec.load_pair(path, None, max_memory={"cpu": "1GiB"})
    with pytest.raises(IncompatibleDraftError, match="safetensors"):
        load_draft(AutoModelForCausalLM.from_pretrained(pair[0]), path)


class TestAuto:
    """What comes of looking for a draft; the looking itself is replaced."""

    @pytest.fixture
    def picks(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def install(answer: Any, **hub: Any) -> None:
            monkeypatch.setattr("hf_specdec.selection.pick.pick", answer)
            for name, function in hub.items():
                monkeypatch.setattr(f"hf_specdec.selection.hub.{name}", function)

        return install

    def chosen(self, name: str, kind: str = "draft_model", verified: bool = True) -> Any:
        candidate = Candidate(name, kind, "fits", verified=verified, download_bytes=0)
        return lambda target, **hub: Choice(target, candidate, notes=("The Hub can't be reached.",))

    def test_found(self, picks: Any, pair: Any) -> None:
        picks(self.chosen(pair[1]))
        target, draft = hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})
        assert torch.equal(hf_specdec.generate(target, **pair[2], **CALL, assistant_model=draft), pair[3])
        assert draft.config.num_hidden_layers == 1

    def test_arguments(self, picks: Any, pair: Any) -> None:
        seen = {}
        picks(lambda target, **hub: seen.update(hub, target=target) or Choice(target, None))
        hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"}, local_files_only=True)
        assert seen["target"] == pair[0]
        assert seen["local_files_only"] is True

    def test_none(self, picks: Any, pair: Any, caplog: pytest.LogCaptureFixture) -> None:
        picks(lambda target, **hub: Choice(target, None, notes=("The Hub can't be reached.",)))
        assert hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})[1] is None
        assert "no draft for" in caplog.text
        assert "The Hub can't be reached." in caplog.text
        picks(self.chosen(pair[1], verified=False))
        assert hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})[1] is None

    def test_head(self, picks: Any, pair: Any, caplog: pytest.LogCaptureFixture) -> None:
        picks(self.chosen("org/head", "eagle3"))
        assert hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})[1] is None
        assert "org/head is a draft of kind 'eagle3'" in caplog.text

    def test_broken(self, picks: Any, pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def fails(target: str, **hub: Any) -> Choice:
            raise RuntimeError("no luck")

        picks(fails)
        assert hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})[1] is None
        assert "RuntimeError: no luck" in caplog.text
        picks(self.chosen(without_safetensors(pair[1], tmp_path)))
        assert hf_specdec.load_pair(pair[0], max_memory={"cpu": "1GiB"})[1] is None
        assert "The target goes without a draft." in caplog.text

    def test_too_large(self, picks: Any, pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A draft that was found gives way to the target: it is there for speed."""
        picks(self.chosen(pair[1]))
        room = {"max_memory": {"cpu": 1000 * KIB}, "context": 64}
        with pytest.raises(PlacementError):
            hf_specdec.load_pair(pair[0], pair[1], **room)
        target, draft = hf_specdec.load_pair(pair[0], **room)
        assert draft is None
        assert "goes without the draft" in caplog.text
        target, draft = hf_specdec.load_pair(pair[0], **room, offload_folder=tmp_path)
        assert draft is None
        assert {each.device.type for each in target.parameters()} == {"cpu"}
        assert "more of the target would be offloaded for it" in caplog.text


class TestFromTheHub:
    """Looked for, planned and fetched from the stand-in of the Hub."""

    SMALLER = "acme/Tiny-0.1B-Instruct"

    @staticmethod
    def weights(hub: HubServer, id: str) -> bool:
        return bool(hub.asked("cdn", id))

    def test_announced_and_loaded(self, hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
        target, draft = hf_specdec.load_pair(INSTRUCT, max_memory={"cpu": "1GiB"})
        assert f"downloading {DRAFT}, " in capsys.readouterr().err
        assert self.weights(hub, DRAFT)
        ids = torch.arange(20, 40)[None]
        plain = target.generate(ids, **CALL)
        assert torch.equal(hf_specdec.generate(target, ids, **CALL, assistant_model=draft), plain)

    @pytest.mark.parametrize("room", [DRAFT, SMALLER, None])
    def test_a_smaller_one_where_the_first_has_no_room(
        self, room: str | None, hub: HubServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub.push(self.SMALLER, checkpoint(16, 3), tags=("text-generation", "conversational"), downloads=100)
        size = sum(each.used for each in plan(INSTRUCT, room, max_memory={"cpu": "1GiB"}).devices)
        target, draft = hf_specdec.load_pair(INSTRUCT, max_memory={"cpu": size})
        fetched = [id for id in (DRAFT, self.SMALLER) if self.weights(hub, id)]
        assert fetched == ([] if room is None else [room])  # what has no room isn't fetched
        assert (draft is None) == (room is None)
        assert (f"goes without the draft {DRAFT}: " in caplog.text) == (room != DRAFT)

    def test_the_room_of_one_call_is_not_remembered(self, hub: HubServer) -> None:
        hub.push(self.SMALLER, checkpoint(16, 3), tags=("text-generation", "conversational"), downloads=100)
        size = sum(each.used for each in plan(INSTRUCT, self.SMALLER, max_memory={"cpu": "1GiB"}).devices)
        hf_specdec.load_pair(INSTRUCT, max_memory={"cpu": size})
        hf_specdec.load_pair(INSTRUCT, max_memory={"cpu": "1GiB"})
        assert self.weights(hub, DRAFT)

    def test_a_draft_that_cannot_be_fetched(self, hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
        hub.fail(DRAFT, "cut", on="cdn")
        target, draft = hf_specdec.load_pair(INSTRUCT, max_memory={"cpu": "1GiB"})
        assert draft is None
        assert "The target goes without a draft." in caplog.text
