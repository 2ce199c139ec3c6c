"""The noise of sampling: the right law, and a function of (seed, prompt, position, token) alone."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from scipy import stats
from torch import Tensor

from hf_specdec.engine.noise import Noise, draw, row_keys


CPU = torch.device("cpu")
SEEDS = (0, 1, 2**61 + 12345, -7)
UNLIKELY = 1e-5  # seeds are fixed, so a right law that passes once passes always


def noise(seed: int, keys: list[int], first: list[int], width: int, vocabulary: int) -> Tensor:
    return Noise(seed, keys).gumbel(range(len(keys)), first, width, vocabulary, CPU)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_part_of_a_batch_has_the_same_noise(seed: int) -> None:
    source = Noise(seed, [11, 22, 33])
    whole = source.gumbel([0, 1, 2], [4, 5, 6], 6, 50, CPU)
    assert torch.equal(source.gumbel([2, 0], [6, 4], 6, 50, CPU), whole[[2, 0]])
    assert torch.equal(source.gumbel([1], [5], 1, 50, CPU), whole[1:2, :1])
    assert torch.equal(source.gumbel([1], [7], 3, 50, CPU), whole[1:2, 2:5])
    assert torch.equal(Noise(seed, [22]).gumbel([0], [5], 6, 50, CPU), whole[1:2])
    assert torch.equal(source.gumbel([0, 1, 2], [4, 5, 6], 6, 20, CPU), whole[..., :20])
    assert whole.dtype == torch.float32


def test_seeds_may_be_given_row_by_row() -> None:
    mixed = Noise(SEEDS, [11, 22, 11, 22]).gumbel(range(4), [4, 5, 6, 7], 3, 50, CPU)
    for row, (seed, key, first) in enumerate(zip(SEEDS, [11, 22, 11, 22], [4, 5, 6, 7], strict=True)):
        assert torch.equal(mixed[row : row + 1], noise(seed, [key], [first], 3, 50))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 1, 50_000), (1, 5000, 10), (5000, 2, 5)])
def test_it_is_gumbel_along_every_axis(seed: int, rows: int, width: int, vocabulary: int) -> None:
    keys = row_keys([[1, 2, 3]] * rows)
    values = noise(seed, keys, [1] * rows, width, vocabulary)
    assert values.isfinite().all()
    assert stats.kstest(values.flatten().numpy(), "gumbel_r").pvalue > UNLIKELY


def test_a_wrong_law_fails_the_test_above() -> None:
    values = noise(0, [5], [0], 20_000, 10).flatten()
    assert stats.kstest((1.02 * values).numpy(), "gumbel_r").pvalue < UNLIKELY


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("axis", ["rows", "positions"])
def test_the_argmax_is_a_sample(seed: int, axis: str) -> None:
    N, p = 50_000, torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    keys = row_keys([[7, 8]] * N) if axis == "rows" else [99]
    values = noise(seed, keys, [3] * len(keys), 1 if axis == "rows" else N, len(p)).reshape(N, len(p))
    chosen = (p.log() + values).argmax(-1)
    assert stats.chisquare(torch.bincount(chosen, minlength=len(p)).numpy(), (N * p).numpy()).pvalue > UNLIKELY


def test_tokens_that_the_target_forbids_are_never_chosen() -> None:
    scores = torch.tensor([0.0, float("-inf"), 1.0])
    chosen = (scores + noise(3, [1], [0], 10_000, 3)[0]).argmax(-1)
    assert set(chosen.tolist()) == {0, 2}


def test_seeds_rows_positions_and_tokens_are_uncorrelated() -> None:
    n = 20_000
    streams = {
        "seed 0": noise(0, [42], [0], n, 2)[0, :, 0],
        "seed 0, next token": noise(0, [42], [0], n, 2)[0, :, 1],
        "seed 1": noise(1, [42], [0], n, 2)[0, :, 0],
        "seed with another upper half": noise(2**32, [42], [0], n, 2)[0, :, 0],
        "seed with upper and lower half swapped": noise(2**33 + 1, [42], [0], n, 2)[0, :, 0],
        "next row": noise(0, [43], [0], n, 2)[0, :, 0],
        "row of a repeated prompt": noise(0, [(42 + 0x9E3779B9) % 2**32], [0], n, 2)[0, :, 0],
        "row and seed that differ alike": noise(1, [43], [0], n, 2)[0, :, 0],
        "next position": noise(0, [42], [1], n, 2)[0, :, 0],
        "vocabulary at one position": noise(0, [42], [0], 1, n)[0, 0],
    }
    for (one, first), (other, second) in combinations(streams.items(), 2):
        # the standard error of a correlation is 1/sqrt(n)
        correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
        assert abs(correlation) < 5 / n**0.5, (one, other)


@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_a_row_is_not_correlated_with_itself(lag: int) -> None:
    values = noise(5, [9], [0], 50_000, 1).flatten()
    correlation = float(torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1])
    assert abs(correlation) < 5 / len(values) ** 0.5


def test_repeated_prompts_get_keys_of_their_own() -> None:
    texts = [[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3], [4, 5]]
    keys = row_keys(texts)
    assert len(set(keys)) == 5
    assert keys == row_keys(texts)
    assert len(set(row_keys([[1, 2, 3]] * 5000))) == 5000


def test_a_key_depends_on_its_prompt_alone() -> None:
    alone = row_keys([[1, 2, 3]])[0]
    assert row_keys([[9], [8, 7], [1, 2, 3]])[2] == alone
    assert row_keys([[1, 2, 3], [1, 2, 3], [9]])[:1] == [alone]
    # no prompt is another one's prefix in disguise
    assert len(set(row_keys([[1, 23], [12, 3], [1, 2, 3], [123], []]))) == 5
    assert all(0 <= key < 2**32 for key in row_keys([[i] for i in range(100)]))


def test_draws_follow_unnormalised_weights() -> None:
    weights = torch.tensor([2.0, 0.0, 1.0, 5.0])
    generator = torch.Generator().manual_seed(0)
    drawn = draw(weights.expand(50_000, -1), generator)
    counts = torch.bincount(drawn, minlength=4)
    assert counts[1] == 0
    expected = 50_000 * weights / weights.sum()
    assert stats.chisquare(counts[[0, 2, 3]].numpy(), expected[[0, 2, 3]].numpy()).pvalue > UNLIKELY
