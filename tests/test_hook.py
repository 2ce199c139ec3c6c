"""The door: what enabling changes, what it leaves alone, and every way to ask for speculation."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, TextGenerationPipeline
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation import utils as native
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import (
    Draft,
    Drafter,
    DraftModel,
    Hybrid,
    IncompatibleDraftError,
    PromptLookup,
    SpecConfig,
    SpecDecError,
    UnsupportedModelError,
)
from hf_specdec.engine.rows import Rows

from .plain import options
from .tiny import exact_pair, ragged_prompts, tiny_model
from .tools.tiny_chat import byte_tokenizer


METHODS = ("generate", "_sample", "_assisted_decoding", "_prepare_generation_config", "_validate_generation_mode")


def host() -> dict[str, Any]:
    """Everything of Transformers that enabling could change."""
    found = {name: value for name, value in vars(GenerationMixin).items() if callable(value)}
    found |= {f"config.{name}": id(value) for name, value in vars(GenerationConfig).items()}
    return found | {f"mapping.{mode}": name for mode, name in native.GENERATION_MODES_MAPPING.items()}


def prompt() -> Tensor:
    return ragged_prompts(1)["input_ids"]


def repeating() -> Tensor:
    return torch.arange(2, 14).repeat(3)[None]


def spoken(model: Any) -> str | None:
    """The drafter of the model's last generation, `None` if speculation wasn't asked for."""
    stats = hf_specdec.last_stats(model)
    return None if stats is None else stats.drafter


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh process from the repository's root."""
    root = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# enabling and disabling


def test_enable_is_idempotent_and_reversible() -> None:
    before = host()
    hf_specdec.enable()
    once = host()
    assert once != before
    hf_specdec.enable()
    assert host() == once
    hf_specdec.disable()
    assert host() == before
    hf_specdec.disable()
    assert host() == before
    hf_specdec.enable()
    assert {name for name in host() if host()[name] != once.get(name)} <= set(METHODS)
    hf_specdec.disable()
    assert host() == before


def test_enable_of_one_model_is_idempotent_and_reversible() -> None:
    before, model = host(), tiny_model()
    kind = type(model)
    hf_specdec.enable(model)
    enabled = type(model)
    hf_specdec.enable(model)
    assert type(model) is enabled
    assert isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert host() == before
    hf_specdec.disable(model)
    assert type(model) is kind
    hf_specdec.disable(model)
    assert type(model) is kind


def test_importing_patches_nothing() -> None:
    code = """
from transformers.generation import GenerationMixin, utils
def host(): return dict(vars(GenerationMixin)), dict(utils.GENERATION_MODES_MAPPING)
before = host()
import hf_specdec
hf_specdec.SpecConfig(); hf_specdec.PromptLookup(); hf_specdec.generate; hf_specdec.decoder(); hf_specdec.enable
assert host() == before
import hf_specdec.auto
assert host() != before
hf_specdec.disable()
assert host() == before
"""
    run_python(code)


def test_import_auto_enables() -> None:
    code = """
import torch
import hf_specdec.auto
from tests.tiny import tiny_model
model = tiny_model()
model.generate(torch.arange(2, 9).repeat(3)[None], speculative=True, max_new_tokens=8, do_sample=False)
print(hf_specdec.last_stats(model).drafter)
"""
    assert run_python(code) == "prompt_lookup"


def test_one_enabled_model_leaves_others_alone() -> None:
    enabled, other = tiny_model(), tiny_model(seed=1)
    hf_specdec.enable(enabled)
    enabled.generate(prompt(), **options(), speculative=True)
    assert spoken(enabled) == "prompt_lookup"
    with pytest.raises(ValueError, match=r"not used by the model: \['speculative'\]") as raised:
        other.generate(prompt(), **options(), speculative=True)
    assert not isinstance(raised.value, SpecDecError)
    draft = tiny_model(seed=2)
    other.generate(prompt(), **options(), assistant_model=draft)
    assert spoken(other) is None


def test_without_enabling_the_argument_is_transformers_own_error() -> None:
    with pytest.raises(ValueError, match=r"not used by the model: \['speculative'\]"):
        tiny_model().generate(prompt(), **options(), speculative=True)


def test_both_kinds_of_enabling_together() -> None:
    one, other = tiny_model(), tiny_model()
    hf_specdec.enable(one)
    hf_specdec.enable()
    texts = [model.generate(repeating(), **options(), speculative=True) for model in (one, other)]
    assert torch.equal(*texts)
    assert spoken(one) == spoken(other) == "prompt_lookup"
    fixed = hf_specdec.SpecConfig(drafter="prompt_lookup", draft_length="fixed")  # adaptive lengths follow the clock
    for model in (one, other):
        model.generate(repeating(), **options(), speculative=fixed)
    assert hf_specdec.last_stats(one).num_spec_steps == hf_specdec.last_stats(other).num_spec_steps  # type: ignore[union-attr]
    for text in (one, other):
        assert torch.equal(text.generate(repeating(), **options(), speculative=False), texts[0])
    one.generate(prompt(), **options(num_beams=2), speculative=True)
    hf_specdec.disable()
    one.generate(repeating(), **options(), speculative="none")
    assert spoken(one) == "none"
    hf_specdec.disable(one)
    with pytest.raises(ValueError, match="speculative"):
        one.generate(prompt(), **options(), speculative=True)


def test_a_deepcopy_is_enabled_and_independent() -> None:
    model = tiny_model()
    hf_specdec.enable(model)
    duplicate = copy.deepcopy(model)
    wanted = model.generate(repeating(), **options(), speculative=True)
    assert torch.equal(duplicate.generate(repeating(), **options(), speculative=True), wanted)
    assert spoken(duplicate) == "prompt_lookup"
    with torch.no_grad():
        duplicate.lm_head.weight.neg_()
    assert not torch.equal(duplicate.generate(repeating(), **options(), speculative=True), wanted)
    assert torch.equal(model.generate(repeating(), **options(), speculative=True), wanted)
    hf_specdec.disable(duplicate)
    assert type(duplicate) is LlamaForCausalLM
    assert type(model) is not LlamaForCausalLM


def test_a_pickle_loads_where_hf_specdec_is_not_installed(tmp_path: Path) -> None:
    model = tiny_model()
    hf_specdec.enable(model)
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    code = f"""
import pickle, sys
sys.modules["hf_specdec"] = None  # importing it raises
model = pickle.loads(open({str(path)!r}, "rb").read())
from transformers import LlamaForCausalLM
assert type(model) is LlamaForCausalLM
import torch
print(model.generate(torch.arange(2, 9)[None], max_new_tokens=8, do_sample=False)[0, 7:].tolist())
"""
    again = model.generate(torch.arange(2, 9)[None], max_new_tokens=8, do_sample=False)
    assert json.loads(run_python(code)) == again[0, 7:].tolist()
    assert type(pickle.loads(pickle.dumps(model))) is LlamaForCausalLM


@pytest.mark.parametrize("one_model", [True, False])
def test_saved_models_are_clean(tmp_path: Path, one_model: bool) -> None:
    model = tiny_model()
    hf_specdec.enable(*[model] * one_model)
    model.generate(prompt(), **options(), speculative=SpecConfig(num_draft_tokens=3))
    model.generate(prompt(), **options(), assistant_model=tiny_model(seed=1), num_assistant_tokens=3)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    for name in ("generation_config.json", "config.json"):
        text = (tmp_path / name).read_text().lower()
        assert "spec" not in text
        assert "draft" not in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    wanted = model.generate(repeating(), **options(), speculative=True)
    assert torch.equal(loaded.generate(repeating(), **options()), wanted)


@pytest.mark.parametrize("one_model", [True, False])
def test_a_saved_wish_is_the_default(tmp_path: Path, one_model: bool) -> None:
    model = tiny_model()
    # one made from the model's config would lose names of its own when it is loaded
    model.generation_config = GenerationConfig(bos_token_id=1, speculative=True)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["speculative"] is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_specdec.enable(*[loaded] * one_model)
    loaded.generate(repeating(), **options())
    assert spoken(loaded) == "prompt_lookup"
    loaded.generate(repeating(), **options(), speculative="none")
    assert spoken(loaded) == "none"
    other = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_specdec.enable(*[other] * one_model)
    other.generate(repeating(), **options(), speculative=False)
    assert spoken(other) is None
    other.generate(repeating(), generation_config=GenerationConfig(**options(), speculative="none"))
    assert spoken(other) == "none"


# switching off


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_the_kill_switch(monkeypatch: pytest.MonkeyPatch, enabled: None, value: str) -> None:
    monkeypatch.setenv("HF_SPECDEC_DISABLE", value)
    target, draft = exact_pair()
    wanted = target.generate(prompt(), **options())
    native_calls = spy_on_the_native_loop(monkeypatch)
    assert torch.equal(target.generate(prompt(), **options(), speculative=True), wanted)
    assert torch.equal(hf_specdec.generate(target, prompt(), **options(), assistant_model=draft), wanted)
    assert native_calls == []
    assert torch.equal(target.generate(prompt(), **options(), assistant_model=draft), wanted)
    assert len(native_calls) == 1
    assert spoken(target) is None
    monkeypatch.setenv("HF_SPECDEC_DISABLE", "0")
    target.generate(prompt(), **options(), speculative=True)
    assert spoken(target) == "prompt_lookup"


def spy_on_the_native_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    original = GenerationMixin._assisted_decoding

    @functools.wraps(original)
    def spied(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", spied)
    return calls


@pytest.mark.parametrize("one_model", [True, False])
def test_false_gives_transformers_own_loop_back(monkeypatch: pytest.MonkeyPatch, one_model: bool) -> None:
    calls = spy_on_the_native_loop(monkeypatch)
    target, draft = exact_pair()
    hf_specdec.enable(*[target] * one_model)
    wanted = target.generate(prompt(), **options(), speculative=False)
    assert torch.equal(target.generate(prompt(), **options(), assistant_model=draft, speculative=False), wanted)
    assert len(calls) == 1
    target.generate(prompt(), **options(), prompt_lookup_num_tokens=3, speculative=False)
    assert len(calls) == 2
    assert spoken(target) is None
    assert torch.equal(target.generate(prompt(), **options(), assistant_model=draft), wanted)
    assert len(calls) == 2
    assert spoken(target) == "hybrid"
    # its limits are the native loop's limits again
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(**ragged_prompts(3), **options(), assistant_model=draft, speculative=False)
    assert target.generate(**ragged_prompts(3), **options(), assistant_model=draft).shape[0] == 3


@pytest.mark.parametrize("one_model", [True, False])
def test_early_exit_stays_with_transformers(monkeypatch: pytest.MonkeyPatch, one_model: bool) -> None:
    calls = spy_on_the_native_loop(monkeypatch)
    target, _ = exact_pair()
    hf_specdec.enable(*[target] * one_model)
    wanted = target.generate(prompt(), **options(), speculative=False)
    assert torch.equal(target.generate(prompt(), **options(), assistant_early_exit=1), wanted)
    assert len(calls) == 1


# every form of the argument


FORMS: dict[str, Any] = {
    "True": (lambda draft: True, "prompt_lookup"),
    "prompt_lookup": (lambda draft: "prompt_lookup", "prompt_lookup"),
    "none": (lambda draft: "none", "none"),
    "SpecConfig": (lambda draft: SpecConfig(), "prompt_lookup"),
    "SpecConfig with a draft": (lambda draft: SpecConfig(draft_model=draft), "hybrid"),
    "SpecConfig with both": (lambda draft: SpecConfig(draft_model=draft, drafter="draft_model"), "draft_model"),
    "SpecConfig with an instance": (lambda draft: SpecConfig(drafter=DraftModel(draft)), "draft_model"),
    "PromptLookup": (lambda draft: PromptLookup(), "prompt_lookup"),
    "DraftModel": (lambda draft: DraftModel(draft), "draft_model"),
    "Hybrid": (lambda draft: Hybrid(DraftModel(draft)), "hybrid"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", ["enabled", "generate", "decoder"])
def test_every_form_of_the_argument(form: str, door: str) -> None:
    make, drafter = FORMS[form]
    target, draft = exact_pair()
    wanted = target.generate(repeating(), **options())
    speculative = make(draft)
    if door == "enabled":
        hf_specdec.enable()
        got = target.generate(repeating(), **options(), speculative=speculative)
    elif door == "generate":
        got = hf_specdec.generate(target, repeating(), **options(), speculative=speculative)
    else:
        got = target.generate(
            repeating(), **options(), custom_generate=hf_specdec.decoder(speculative=speculative)
        )  # fmt: skip
    assert torch.equal(got, wanted)
    assert spoken(target) == drafter
    stats = hf_specdec.last_stats(target)
    assert stats is not None
    assert stats.fallback_reason is None


@pytest.mark.parametrize(("name", "drafter"), [("draft_model", "draft_model"), ("hybrid", "hybrid"), (True, "hybrid")])
def test_names_take_the_assistant_model(enabled: None, name: Any, drafter: str) -> None:
    target, draft = exact_pair()
    wanted = target.generate(prompt(), **options())
    assert torch.equal(target.generate(prompt(), **options(), assistant_model=draft, speculative=name), wanted)
    assert spoken(target) == drafter
    got = hf_specdec.generate(target, prompt(), **options(), assistant_model=draft, speculative=name)
    assert torch.equal(got, wanted)
    assert spoken(target) == drafter


@pytest.mark.parametrize("value", [None, False])
def test_no_wish_is_plain_decoding(enabled: None, value: Any) -> None:
    model = tiny_model()
    wanted = model.generate(prompt(), **options())
    assert torch.equal(model.generate(prompt(), **options(), speculative=value), wanted)
    assert spoken(model) is None


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (3, "must be True, False, a drafter's name"),
        (["prompt_lookup"], "must be True, False, a drafter's name"),
        ({"num_draft_tokens": 3}, "must be True, False, a drafter's name"),
        ("promt_lookup", "There is no drafter 'promt_lookup'.*prompt_lookup"),
        ("draft_model", "'draft_model' needs a draft model"),
        ("hybrid", "'hybrid' needs a draft model"),
        (SpecConfig(drafter=object()), "must be a name or have a `propose` method"),
    ],
)
@pytest.mark.parametrize("door", ["enabled", "enabled model", "generate", "decoder"])
def test_a_wrong_argument_gives_one_clear_error(speculative: Any, message: str, door: str) -> None:
    model = tiny_model()
    if door.startswith("enabled"):
        hf_specdec.enable(*[model] * (door == "enabled model"))
    arguments: dict[str, Any] = {"speculative": speculative}
    if door == "decoder":
        with pytest.raises(SpecDecError, match=message) as raised:
            model.generate(
                prompt(), **options(), custom_generate=lambda *a, **k: hf_specdec.decoder(**arguments)(*a, **k)
            )
    else:
        call = functools.partial(hf_specdec.generate, model) if door == "generate" else model.generate
        with pytest.raises(SpecDecError, match=message) as raised:
            call(prompt(), **options(), **arguments)
    assert raised.value.__cause__ is None
    # the model is as usable as before
    assert hf_specdec.generate(model, prompt(), **options()).shape == (1, 48)


def test_decoder_refuses_unknown_fields() -> None:
    with pytest.raises(SpecDecError, match="num_drafts"):
        hf_specdec.decoder(num_drafts=3)
    with pytest.raises(SpecDecError, match="need a `tokenizer="):
        hf_specdec.decoder(stop_strings=["x"])


def test_a_saved_wrong_wish_is_clear_too(enabled: None) -> None:
    model = tiny_model()
    model.generation_config.speculative = "promt_lookup"
    with pytest.raises(SpecDecError, match="There is no drafter 'promt_lookup'"):
        model.generate(prompt(), **options())


# draft models by path


@pytest.mark.parametrize("door", ["enabled", "generate", "assistant"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_draft_model_is_loaded_from_a_path_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, door: str, kind: Any
) -> None:
    target, draft = exact_pair()
    draft.save_pretrained(tmp_path)
    wanted = target.generate(prompt(), **options())
    loads: list[Any] = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(a) or original(*a, **k))
    hf_specdec.enable()
    for _ in range(2):
        if door == "enabled":
            got = target.generate(prompt(), **options(), speculative=SpecConfig(draft_model=kind(tmp_path)))
        elif door == "generate":
            got = hf_specdec.generate(target, prompt(), **options(), assistant_model=kind(tmp_path))
        else:
            got = target.generate(prompt(), **options(), assistant_model=kind(tmp_path))
        assert torch.equal(got, wanted)
        assert spoken(target) == "hybrid"
    assert len(loads) == 1


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-org/no-such-model"])
def test_a_wrong_path_is_one_clear_error(enabled: None, name: str) -> None:
    model = tiny_model()
    with pytest.raises(IncompatibleDraftError, match=f"The draft model '{name}' can't be loaded"):
        model.generate(prompt(), **options(), speculative=SpecConfig(draft_model=name))
    with pytest.raises(IncompatibleDraftError, match="Pass the id or path"):
        hf_specdec.generate(model, prompt(), **options(), assistant_model=name)


# the doors without a hook


def test_generate_needs_no_hook() -> None:
    before = host()
    target, draft = exact_pair()
    prompts = ragged_prompts(3)
    wanted = target.generate(**prompts, **options(return_dict_in_generate=True, output_scores=True))
    got = hf_specdec.generate(
        target, **prompts, **options(return_dict_in_generate=True, output_scores=True), assistant_model=draft
    )
    assert torch.equal(got.sequences, wanted.sequences)
    assert len(got.scores) == len(wanted.scores)
    assert got.spec_stats is hf_specdec.last_stats(target)
    assert got.spec_stats.drafter == "hybrid"
    plain = hf_specdec.generate(target, **prompts, **options(), speculative=False)
    assert torch.equal(plain, wanted.sequences)
    assert host() == before


@pytest.mark.parametrize("how", ["kwarg", "config", "saved"])
def test_generate_stops_at_strings_without_a_hook(how: str) -> None:
    tokenizer = byte_tokenizer()
    target, draft = exact_pair(vocab_size=len(tokenizer))
    free = target.generate(prompt(), **options())
    stop = next(c for token in free[0, 30:] if (c := tokenizer.decode(token)).isascii())
    wanted = target.generate(prompt(), **options(), tokenizer=tokenizer, stop_strings=stop)
    assert wanted.shape[1] < free.shape[1]
    settings: dict[str, Any] = options()
    if how == "kwarg":
        settings["stop_strings"] = stop
    elif how == "config":
        settings = {"generation_config": GenerationConfig(**settings, stop_strings=stop)}
    else:
        target.generation_config.stop_strings = stop
    got = hf_specdec.generate(target, prompt(), **settings, tokenizer=tokenizer, assistant_model=draft)
    assert torch.equal(got, wanted)
    if how == "config":
        assert settings["generation_config"].stop_strings == stop
    if how == "saved":
        assert target.generation_config.stop_strings == stop


class Listener(BaseStreamer):
    """Notes what a streamer hears."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("door", ["enabled", "generate", "decoder"])
def test_streamer_and_stop_strings_through_every_door(door: str) -> None:
    tokenizer = byte_tokenizer()
    target, draft = exact_pair(vocab_size=len(tokenizer))
    free = target.generate(prompt(), **options())
    stop = next(c for token in free[0, 30:] if (c := tokenizer.decode(token)).isascii())
    plain, ours = Listener(), Listener()
    wanted = target.generate(prompt(), **options(), tokenizer=tokenizer, stop_strings=stop, streamer=plain)
    extra = {"streamer": ours, "tokenizer": tokenizer, "stop_strings": stop}
    if door == "enabled":
        hf_specdec.enable()
        got = target.generate(prompt(), **options(), **extra, assistant_model=draft)
    elif door == "generate":
        got = hf_specdec.generate(target, prompt(), **options(), **extra, assistant_model=draft)
    else:
        custom = hf_specdec.decoder(**extra, draft_model=draft)
        got = target.generate(prompt(), **options(), custom_generate=custom)
    assert torch.equal(got, wanted)
    assert wanted.shape[1] < free.shape[1]
    assert ours.heard == plain.heard
    assert ours.ended == 1
    assert spoken(target) == "hybrid"


def test_a_decoder_serves_many_calls_and_models() -> None:
    target, draft = exact_pair()
    other = tiny_model(seed=3)
    custom = hf_specdec.decoder(draft_model=draft, num_draft_tokens=3, draft_length="fixed")
    for model in (target, other, target):
        for do_sample in (False, True):
            torch.manual_seed(1)
            got = model.generate(**ragged_prompts(3), **options(do_sample=do_sample), custom_generate=custom)
            assert got.shape == (3, 48)
        greedy = model.generate(**ragged_prompts(3), **options(), custom_generate=custom)
        assert torch.equal(greedy, model.generate(**ragged_prompts(3), **options()))
        assert len(hf_specdec.last_stats(model).acceptance_histogram) <= 4  # type: ignore[union-attr]


# what isn't sped up


def test_beams_run_plainly(enabled: None) -> None:
    target, draft = exact_pair()
    wanted = target.generate(**ragged_prompts(2), **options(num_beams=4), speculative=False)
    for extra in ({"speculative": True}, {"assistant_model": draft}):
        assert torch.equal(target.generate(**ragged_prompts(2), **options(num_beams=4), **extra), wanted)
        assert "beam" in str(hf_specdec.last_stats(target).fallback_reason)  # type: ignore[union-attr]
    assert torch.equal(hf_specdec.generate(target, **ragged_prompts(2), **options(num_beams=4)), wanted)
    with pytest.raises(UnsupportedModelError, match="beam"):
        target.generate(prompt(), **options(num_beams=4), speculative=SpecConfig(strict=True))
    with pytest.raises(UnsupportedModelError, match="beam"):
        hf_specdec.generate(target, prompt(), **options(num_beams=4), speculative=SpecConfig(strict=True))


@pytest.mark.parametrize("mode", [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE])
@pytest.mark.parametrize("one_model", [True, False])
def test_num_return_sequences_with_an_assistant(mode: GenerationMode, one_model: bool) -> None:
    target, draft = exact_pair()
    hf_specdec.enable(*[target] * one_model)
    settings = options(do_sample=mode is GenerationMode.SAMPLE, num_return_sequences=3)
    if mode is GenerationMode.GREEDY_SEARCH:
        settings = options(num_return_sequences=1)
    got = target.generate(**ragged_prompts(2), **settings, assistant_model=draft)
    assert got.shape == (6 if mode is GenerationMode.SAMPLE else 2, 48)
    assert spoken(target) == "hybrid"


# threads and pipelines


class Meeting(Drafter):
    """Two threads meet in every `propose`: what one generation set in `start` must still be its own."""

    name = "meeting"

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)

    def start(self, context: Any) -> None:
        self.rows = context.rows

    def propose(self, rows: Rows, length: int) -> Draft:
        self.barrier.wait()
        assert self.rows is rows
        return Draft.from_lists([[0] for _ in rows.live])


def in_threads(work: Callable[[int], None], number: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("one_model", [True, False])
def test_threads_with_one_model_and_one_drafter_do_not_disturb_each_other(one_model: bool) -> None:
    target, draft = exact_pair(noise=0.3)
    hf_specdec.enable(*[target] * one_model)
    shared = Hybrid(DraftModel(draft), min_match=1)
    jobs = []
    for index in range(4):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 30, (1 + index, 12 + index), generator=generator)
        config = SpecConfig(drafter=shared, seed=index, verification="coupled", num_draft_tokens=4)
        jobs.append({"input_ids": ids, **options(do_sample=bool(index % 2)), "speculative": config})
    alone = [target.generate(**job) for job in jobs]
    problems: list[str] = []
    barrier = threading.Barrier(len(jobs), timeout=60)

    def work(index: int) -> None:
        for _ in range(3):
            barrier.wait()
            got = target.generate(**jobs[index])
            barrier.wait()  # every thread has finished, so the latest statistics are mostly another one's
            stats = hf_specdec.last_stats(target)
            if not torch.equal(got, alone[index]):
                problems.append(f"text of {index}")
            if stats is None or stats.fallback_reason or len(stats.rows) != 1 + index:
                problems.append(f"stats of {index}: {stats}")
            elif stats.num_emitted_tokens != 24 * (1 + index):
                problems.append(f"count of {index}: {stats.num_emitted_tokens}")

    in_threads(work, len(jobs))
    assert problems == []


def test_state_of_a_shared_drafter_stays_in_its_generation() -> None:
    model, drafter = tiny_model(), Meeting()
    reasons: list[str | None] = []

    def work(index: int) -> None:
        config = SpecConfig(drafter=drafter, num_draft_tokens=1, draft_length="fixed")
        hf_specdec.generate(model, prompt(), **options(min_new_tokens=24), speculative=config)
        reasons.append(hf_specdec.last_stats(model).fallback_reason)  # type: ignore[union-attr]

    in_threads(work, 2)
    assert reasons == [None, None]


def test_last_stats_of_another_thread_are_seen_until_there_are_own_ones() -> None:
    model = tiny_model()
    assert hf_specdec.last_stats(model) is None
    thread = threading.Thread(target=lambda: hf_specdec.generate(model, repeating(), **options()))
    thread.start()
    thread.join()
    assert spoken(model) == "prompt_lookup"
    hf_specdec.generate(model, prompt(), **options(), speculative="none")
    assert spoken(model) == "none"


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_pipeline_takes_the_argument(enabled: None, batch_size: int) -> None:
    tokenizer = byte_tokenizer(chat=False)
    end = tokenizer.eos_token_id
    target, draft = exact_pair(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, bos_token_id=None)
    pipe = TextGenerationPipeline(model=target, tokenizer=tokenizer)
    texts = ["the cat, the cat, the cat", "hello"]
    wanted = pipe(texts, max_new_tokens=16, do_sample=False, batch_size=batch_size)
    for speculative in (True, "prompt_lookup", SpecConfig(draft_model=draft)):
        got = pipe(texts, max_new_tokens=16, do_sample=False, batch_size=batch_size, speculative=speculative)
        assert got == wanted
        assert hf_specdec.last_stats(target).fallback_reason is None  # type: ignore[union-attr]
    assert spoken(target) == "hybrid"


def test_nested_native_drafting_is_not_routed(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native loop calls `generate` of the draft: those calls stay native, even if the draft asks for speculation."""
    target, draft = exact_pair()
    draft.generation_config.speculative = True
    wanted = target.generate(prompt(), **options(), speculative=False)
    assert torch.equal(target.generate(prompt(), **options(), assistant_model=draft, speculative=False), wanted)
    assert spoken(draft) is None
