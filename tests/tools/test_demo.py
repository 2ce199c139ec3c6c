"""The demo: what it measures, in which order, and what it says where the texts differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec import SpecDecError, SpecStats
from hf_specdec.tools import demo
from hf_specdec.tools.demo import DemoPrompt, demo_prompts, run_demo, user_prompts
from hf_specdec.tools.differences import find_difference, near_tie_band
from hf_specdec.tools.loading import LoadedModel, encode_prompt, load_model

from .tiny_chat import END, save_tiny_chat_model


# Suites that may be copied with their licence notice; other benchmark texts may not.
MAY_BE_SHIPPED = {
    "vicuna_bench": "Apache-2.0",
    "edit_eval": "MIT",
    "mgsm_zh": "CC-BY-4.0",
    "hf_specdec": "Apache-2.0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32", device="cpu")


class FixedLogits:
    """A model whose next-token logits are given."""

    def __init__(self, logits: list[float], dtype: torch.dtype = torch.float32) -> None:
        self.logits, self.dtype, self.seen = torch.tensor(logits), dtype, []

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        self.seen.append(ids.tolist())
        return SimpleNamespace(logits=self.logits.expand(1, ids.shape[1], -1))


def test_shipped_prompts() -> None:
    folder = Path(demo.__file__).parent
    records = [json.loads(line) for line in (folder / "demo_prompts.jsonl").read_text().splitlines()]
    notices = (folder / "demo_prompts.LICENSES.md").read_text()
    for record in records:
        assert record["license"] == MAY_BE_SHIPPED[record["suite"]]
        assert record["source"]
        assert f"`{record['id']}`" in notices
    assert [prompt.title for prompt in demo_prompts()] == ["chat", "code edit", "quotes", "Chinese"]
    assert [prompt.lang for prompt in demo_prompts()] == ["en", "en", "en", "zh"]


@pytest.mark.parametrize("drafter", ["auto", "prompt_lookup"])
def test_same_text(loaded: LoadedModel, drafter: str) -> None:
    prompts = user_prompts(["abcabcabcabc", "one two one two"])
    report = run_demo(loaded, prompts=prompts, max_new_tokens=24, drafter=drafter)
    assert report.ok
    assert report.dtype == "float32"
    assert report.device == "cpu"
    assert report.drafter == drafter
    assert report.speedup > 0
    for result, prompt in zip(report.results, prompts, strict=True):
        assert result.prompt == prompt
        assert result.verdict == "same text: yes"
        assert result.text_off == result.text_on
        assert result.num_tokens_off == result.num_tokens_on == result.stats["num_emitted_tokens"]
        assert result.stats["num_accepted_draft_tokens"] <= result.stats["num_draft_tokens"]


def test_draft_model(loaded: LoadedModel, folder: Path) -> None:
    """The model as its own draft: everything that it drafts is accepted."""
    prompts = user_prompts(["one two"])
    report = run_demo(
        loaded, prompts=prompts, max_new_tokens=24, trials=1, drafter="draft_model", draft_model=str(folder)
    )
    stats = report.results[0].stats
    assert report.ok
    assert report.draft_model == report.to_dict()["draft_model"] == str(folder)
    assert stats["drafter"] == "draft_model"
    assert stats["num_accepted_draft_tokens"] == stats["num_draft_tokens"] > 0


def test_report_is_json(loaded: LoadedModel) -> None:
    report = run_demo(loaded, prompts=user_prompts(["abcabc"]), max_new_tokens=8, trials=1)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["schema_version"] == demo.SCHEMA_VERSION
    assert {"model", "dtype", "device", "hardware", "threads", "versions", "trials", "ok", "speedup"} <= set(data)
    result = data["results"][0]
    assert result["prompt"]["text"] == "abcabc"
    assert result["same_text"] is True
    assert result["difference"] is None
    assert result["stats"]["mean_acceptance_length"] >= 1


class TestMeasurement:
    """With decoding replaced: off takes 4, 6 seconds, on 1 and 2, after a warm-up that isn't counted."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        seconds = iter([100.0, 100.0, 4.0, 1.0, 6.0, 2.0])

        def decode(loaded: LoadedModel, inputs: Any, speculative: Any, max_new_tokens: int) -> Any:
            calls.append((speculative, max_new_tokens))
            stats = None if speculative is False else SpecStats()
            return demo._Decoded(tokens=[65, 66, 67, 68], seconds=next(seconds), stats=stats)

        monkeypatch.setattr(demo, "_decode", decode)
        return calls

    def test_sides_take_turns(self, loaded: LoadedModel, calls: list[Any]) -> None:
        run_demo(loaded, prompts=user_prompts(["a"]), max_new_tokens=32, trials=2, drafter="hybrid")
        warm_up = [(False, demo.WARM_UP_TOKENS), ("hybrid", demo.WARM_UP_TOKENS)]
        assert calls == warm_up + [(False, 32), ("hybrid", 32)] * 2

    def test_medians(self, loaded: LoadedModel, calls: list[Any]) -> None:
        report = run_demo(loaded, prompts=user_prompts(["a"]), trials=2)
        result = report.results[0]
        assert result.tokens_per_second_off == pytest.approx((4 / 4 + 4 / 6) / 2)
        assert result.tokens_per_second_on == pytest.approx((4 / 1 + 4 / 2) / 2)
        assert report.speedup == pytest.approx((4 + 3) / 2)
        assert calls[1][0] is True

    def test_steps_are_announced(self, loaded: LoadedModel, calls: list[Any]) -> None:
        titles: list[str] = []

        @contextmanager
        def step(title: str) -> Iterator[None]:
            titles.append(title)
            yield

        run_demo(loaded, prompts=user_prompts(["a"]), step=step)
        assert titles == ["Warm up", "prompt 1: off and on, 2 times"]


def test_a_difference_in_any_trial_is_reported(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter([b"abcd", b"abXd", b"abcd", b"abcd"])

    def decode(loaded: LoadedModel, inputs: Any, speculative: Any, max_new_tokens: int) -> Any:
        tokens = loaded.tokenizer(next(texts).decode()).input_ids
        return demo._Decoded(tokens=tokens, seconds=1.0, stats=SpecStats())

    monkeypatch.setattr(demo, "_decode", decode)
    result = demo.compare(loaded, DemoPrompt("x", "x", "en", "hello", "", ""), True, 4, 2)
    assert (result.text_off, result.text_on) == ("abcd", "abXd")
    assert result.difference is not None
    assert result.difference.index == 2
    assert not result.ok
    assert result.verdict.startswith("same text: no (not a near-tie at token 2, gap ")


class TestDifference:
    prompt = torch.tensor([[5, 6]])

    def test_none(self) -> None:
        assert find_difference(FixedLogits([0.0]), self.prompt, [1, 2], [1, 2]) is None

    def test_gap_after_the_text_without_speculation(self) -> None:
        model = FixedLogits([1.0, 3.0, 2.5], torch.bfloat16)
        difference = find_difference(model, self.prompt, [1, 1, 0], [1, 2, 2])
        assert difference is not None
        assert (difference.index, difference.token_off, difference.token_on) == (1, 1, 2)
        assert difference.gap == pytest.approx(0.5)
        assert not difference.near_tie
        assert model.seen == [[[5, 6, 1]]]

    def test_near_tie(self) -> None:
        difference = find_difference(FixedLogits([12.0, 11.9], torch.bfloat16), self.prompt, [0], [1])
        assert difference is not None
        assert difference.near_tie
        assert str(difference) == "near-tie at token 0, gap 0.1"

    def test_float32_is_stricter(self) -> None:
        difference = find_difference(FixedLogits([12.0, 11.99]), self.prompt, [0], [1])
        assert difference is not None
        assert not difference.near_tie

    @pytest.mark.parametrize(("off", "on"), [([1, 1], [1]), ([1], [1, 1]), ([], [1])])
    def test_one_side_ended(self, off: list[int], on: list[int]) -> None:
        difference = find_difference(FixedLogits([0.0, 1.0], torch.bfloat16), self.prompt, off, on)
        assert difference is not None
        assert difference.gap is None
        assert not difference.near_tie
        assert str(difference) == f"one side ended at token {min(len(off), len(on))}"

    @pytest.mark.parametrize(
        ("dtype", "logit", "band"),
        [
            (torch.bfloat16, 3.0, 0.05),
            (torch.bfloat16, 12.0, 0.125),
            (torch.bfloat16, -20.0, 0.25),
            (torch.float16, 12.0, 0.05),
            (torch.float32, 12.0, 1e-4),
            (torch.bfloat16, 0.0, 0.05),
        ],
    )
    def test_band(self, dtype: torch.dtype, logit: float, band: float) -> None:
        assert near_tie_band(SimpleNamespace(dtype=dtype), logit) == pytest.approx(band)


@pytest.mark.parametrize("arguments", [{"trials": 0}, {"max_new_tokens": 0}, {"prompts": []}])
def test_bad_arguments(loaded: LoadedModel, arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecDecError, match="at least one prompt"):
        run_demo(loaded, **arguments)


def test_unknown_drafter(loaded: LoadedModel) -> None:
    with pytest.raises(SpecDecError, match="crystal_ball"):
        run_demo(loaded, prompts=user_prompts(["a"]), drafter="crystal_ball")


def test_default_model_is_the_chat_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.tools.chat_model.fetch_chat_model", lambda: folder)
    loaded = demo.load_demo_model(dtype="bfloat16", device="cpu")
    assert loaded.name == str(folder)
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training


class TestLoading:
    def test_chat_template_is_used_where_there_is_one(self, loaded: LoadedModel) -> None:
        def text(**options: Any) -> str:
            return loaded.tokenizer.decode(encode_prompt(loaded, "hi", **options)["input_ids"][0])

        assert text() == text(chat=True) == "[hi]"
        assert text(chat=False) == "hi"

    def test_no_chat_template(self, tmp_path: Path) -> None:
        plain = load_model(str(save_tiny_chat_model(tmp_path, chat=False)), device="cpu")
        assert plain.tokenizer.decode(encode_prompt(plain, "hi")["input_ids"][0]) == "hi"
        with pytest.raises(SpecDecError, match="no chat template"):
            encode_prompt(plain, "hi", chat=True)

    def test_empty_prompt(self, loaded: LoadedModel) -> None:
        with pytest.raises(SpecDecError, match="no tokens"):
            encode_prompt(loaded, "", chat=False)

    def test_unknown_dtype(self, folder: Path) -> None:
        with pytest.raises(SpecDecError, match=r"float32, bfloat16, float16, got 'int3'"):
            load_model(str(folder), dtype="int3")

    def test_missing_model(self, tmp_path: Path) -> None:
        with pytest.raises(SpecDecError, match="can't be loaded"):
            load_model(str(tmp_path / "nothing"))

    def test_end_token(self, loaded: LoadedModel) -> None:
        assert loaded.tokenizer.eos_token == END


@pytest.mark.slow
def test_real_model_gives_the_same_text(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    report = run_demo(LoadedModel("SmolLM2", model, tokenizer), prompts=demo_prompts(), max_new_tokens=32, trials=1)
    assert [result.verdict for result in report.results] == ["same text: yes"] * 4
    quotes = report.results[2]
    assert quotes.stats["mean_acceptance_length"] > 2
