"""Processors over whole blocks give what calling them position by position on each row gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from hf_specdec.engine.logits import BATCH_WISE, POSITION_FREE, ROW_WISE, BlockLogits, unsupported_reason
from hf_specdec.engine.rows import Rows


V = 31
PROMPT = torch.tensor([[0, 0, 4, 5, 6, 4, 5], [3, 9, 9, 2, 9, 9, 2], [0, 7, 8, 7, 8, 7, 8]])
KEEP = PROMPT != 0

PROCESSORS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
    "top-k": lambda: hf.TopKLogitsWarper(5),
    "top-p": lambda: hf.TopPLogitsWarper(0.6),
    "min-p": lambda: hf.MinPLogitsWarper(0.1),
    "typical": lambda: hf.TypicalLogitsWarper(0.6),
    "epsilon": lambda: hf.EpsilonLogitsWarper(0.02),
    "eta": lambda: hf.EtaLogitsWarper(0.02),
    "nan": lambda: hf.InfNanRemoveLogitsProcessor(),
    "normalise": lambda: hf.LogitNormalization(),
    "suppress": lambda: hf.SuppressTokensLogitsProcessor([3, 4]),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "n-gram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "bias": lambda: hf.SequenceBiasLogitsProcessor([[[4, 5], 6.0], [[9], -3.0], [[7, 8, 7], 4.0]]),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[4, 5], [9, 9, 2]], eos_token_id=torch.tensor([1])),
    "min length": lambda: hf.MinLengthLogitsProcessor(10, torch.tensor([1])),
    "min new": lambda: hf.MinNewTokensLengthLogitsProcessor(7, 3, torch.tensor([1])),
    "forced end": lambda: hf.ForcedEOSTokenLogitsProcessor(11, torch.tensor([1])),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([1]), 7),
    "begin": lambda: hf.SuppressTokensAtBeginLogitsProcessor([5, 6], 9),
    "encoder repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.7, PROMPT),
    "encoder n-gram": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(1, PROMPT),
    "prefix": lambda: hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [int(ids[-1]), row + len(ids)], 1),
}


def rows_of(emitted: list[list[int]]) -> Rows:
    """Three rows of different progress."""
    rows = Rows(PROMPT.clone(), KEEP, 50, 0)
    for row, tokens in enumerate(emitted):
        if tokens:
            rows.write(row, tokens)
    return rows


def one_by_one(processors: list[Any], logits: Tensor, rows: Rows, draft: list[list[int]]) -> Tensor:
    """Plain decoding's way: every position of every row with its own whole prefix, row by row."""
    expected = logits.clone().float()
    batch = rows.padded.shape[0]
    for index, row in enumerate(rows.live):
        written = rows.padded[row, : rows.end(row)].tolist()
        for position in range(logits.shape[1]):
            if position > len(draft[index]):
                continue
            prefix = torch.zeros(batch, len(written) + position, dtype=torch.long)
            prefix[:, :] = torch.tensor(written + draft[index][:position])
            scores = torch.zeros(batch, logits.shape[2])
            scores[row] = expected[index, position]
            for processor in processors:
                scores = processor(prefix, scores)
            expected[index, position] = scores[row]
    return expected


def check(make: Callable[[], list[Any]], live: list[int], emitted: list[list[int]], draft: list[list[int]]) -> None:
    rows = rows_of(emitted)
    rows.live = live
    generator = torch.Generator().manual_seed(0)
    width = max(map(len, draft))
    logits = 3 * torch.randn(len(live), width + 1, V, generator=generator)
    original = logits.clone()
    laid = torch.zeros(len(live), width, dtype=torch.long)
    for index, tokens in enumerate(draft):
        laid[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    expected = one_by_one(make(), logits, rows, draft)
    block = BlockLogits(make())
    if block.needs_prefix and width:
        rows.lay_draft(laid)
    scores = block(logits, rows, [len(tokens) for tokens in draft])
    assert torch.equal(logits, original), "the raw logits are kept for `output_logits`"
    for index, tokens in enumerate(draft):
        torch.testing.assert_close(scores[index, : len(tokens) + 1], expected[index, : len(tokens) + 1])
    assert block.impure is None


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("width", [0, 1, 4])
def test_each_processor(name: str, width: int) -> None:
    drafts = [[4, 5, 6, 4], [9, 9, 2, 9], [7, 8, 7, 8]]
    draft = [tokens[: max(0, width - row)] for row, tokens in enumerate(drafts)]
    check(lambda: [PROCESSORS[name]()], [0, 1, 2], [[6, 4], [9], [7, 8, 7, 1]], draft)


@pytest.mark.parametrize("name", PROCESSORS)
def test_finished_rows_in_between(name: str) -> None:
    """Row 1 is gone; the others keep their place in the batch."""
    check(lambda: [PROCESSORS[name]()], [0, 2], [[6, 4], [9, 1], [7]], [[5, 6, 4], [8, 7]])


def test_all_of_them_in_order() -> None:
    leave = ("forced end", "prefix", "encoder n-gram", "suppress")
    names = [name for name in PROCESSORS if name not in leave]
    check(lambda: [PROCESSORS[name]() for name in names], [0, 1, 2], [[6], [9, 9], []], [[4, 5], [9], [7, 8, 7]])


def test_half_precision_becomes_float32() -> None:
    """As in plain decoding, which copies logits to float32 before its processors."""
    rows = rows_of([[], [], []])
    logits = torch.randn(3, 2, V).to(torch.bfloat16)
    scores = BlockLogits([PROCESSORS["temperature"]()])(logits, rows, [1, 1, 1])
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, logits.float() / 0.7)


def test_draft_only_leaves_custom_processors_out() -> None:
    class Raises(hf.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            raise AssertionError("not for drafts")

    rows = rows_of([[], [], []])
    logits = torch.randn(3, 1, V)
    block = BlockLogits([PROCESSORS["temperature"](), Raises()])
    torch.testing.assert_close(block(logits, rows, [0, 0, 0], draft_only=True), logits / 0.7)
    with pytest.raises(AssertionError, match="not for drafts"):
        block(logits, rows, [0, 0, 0])


def test_copy_takes_the_draft_and_the_original_the_text() -> None:
    seen: list[tuple[str, int]] = []

    class Watch(hf.LogitsProcessor):
        tag = "original"

        def __deepcopy__(self, memo: Any) -> Watch:
            duplicate = copy.copy(self)
            duplicate.tag = "copy"
            return duplicate

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            note((self.tag, input_ids.shape[1]))
            return scores

    def note(what: Any) -> None:
        seen.append(what)

    rows = rows_of([[], [], []])
    rows.lay_draft(torch.tensor([[4, 5], [9, 9], [7, 8]]))
    BlockLogits([Watch()])(torch.randn(3, 3, V), rows, [2, 2, 2])
    assert [each for each in seen if each[0] == "original"] == [("original", 7)]
    assert [each for each in seen if each[0] == "copy"] == [("copy", 8), ("copy", 9)]


def test_state_is_found_out() -> None:
    class Counts(hf.LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return scores

    block = BlockLogits([Counts()])
    block(torch.randn(3, 1, V), rows_of([[], [], []]), [0, 0, 0])
    assert block.impure == "Counts"


def test_which_processors_are_decoded_plainly() -> None:
    for name, make in PROCESSORS.items():
        assert unsupported_reason([make()]) is None, name
    synthid = hf.SynthIDTextWatermarkLogitsProcessor(5, [1, 2], 10, 1, 16, "cpu")
    assert "SynthID" in unsupported_reason([synthid])
    assert "Watermark" in unsupported_reason([hf.WatermarkLogitsProcessor(V, "cpu")])


def test_every_kind_is_in_one_group_alone() -> None:
    kinds = [*POSITION_FREE, *ROW_WISE, *BATCH_WISE]
    assert len(kinds) == len(set(kinds))
    subclass = type("Own", (hf.TopKLogitsWarper,), {"__call__": lambda self, ids, scores: scores})
    assert unsupported_reason([subclass(3)]) is None  # a user's subclass is a custom processor, not a known one
    assert BlockLogits([subclass(3)]).needs_prefix
