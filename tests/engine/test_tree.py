"""Token trees: every branch gets the logits of its own text, the walk keeps the target's choice, the cache its keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.engine.forward import RowModel
from hf_specdec.engine.tree import Tree, accept_path, depths
from hf_specdec.engine.verify import accept_matching
from tests.tiny import ARCHITECTURES, tiny_model


CPU = torch.device("cpu")
PARENTS = [[-1, -1, 0, 1], [-1, 0, 1], [-1, -1, -1, 2]]
BRANCHES = [[[0, 1, 3], [0, 2, 4]], [[0, 1, 2, 3]], [[0, 1], [0, 2], [0, 3, 4]]]
KEPT = [[2, 4], [1], [3, 4]]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [(30, 21, 17), (20, 20, 20)])
def test_every_branch_has_its_own_logits_and_keys(name: str, attention: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 97, (length,), generator=generator).tolist() for length in lengths]
    runner = RowModel(model, 3, 32)
    runner.prefill(prompts)
    block = torch.randint(2, 97, (3, 5), generator=generator)
    logits = runner.forward(block, [5, 4, 5], tree=Tree(PARENTS, CPU)).logits
    for row, branches in enumerate(BRANCHES):
        for branch in branches:
            text = torch.tensor([prompts[row] + block[row, branch].tolist()])
            expected = model(text, use_cache=False).logits[0, -len(branch) :]
            torch.testing.assert_close(logits[row, branch], expected, rtol=1e-4, atol=1e-4)
    runner.cache.compact(KEPT)
    runner.cache.commit([1 + len(path) for path in KEPT])
    following = torch.randint(2, 97, (3, 2), generator=generator)
    logits = runner.forward(following, [2, 2, 2]).logits
    for row, path in enumerate(KEPT):
        text = prompts[row] + block[row, [0, *path]].tolist() + following[row].tolist()
        expected = model(torch.tensor([text]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


trees = st.lists(
    st.integers(0, 8).flatmap(
        lambda size: st.tuples(*[st.integers(-1, index - 1) for index in range(size)]).map(list)
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@given(trees)
def test_layout(parents: list[list[int]]) -> None:
    tree = Tree(parents, CPU)
    width = max(map(len, parents)) + 1
    assert tree.parents.shape == tree.depth.shape == (len(parents), width)
    for row, line in enumerate(parents):
        assert tree.depth[row].tolist() == [0, *depths(line)] + [0] * (width - 1 - len(line))
        for index in range(len(line) + 1):
            kin, at = {index}, index
            while at:
                at = line[at - 1] + 1
                kin.add(at)
            assert set(tree.ancestors[row, index].nonzero()[:, 0].tolist()) == kin
        for index in range(len(line) + 1, width):
            assert tree.ancestors[row, index].nonzero()[:, 0].tolist() == [index], "a dummy sees itself"
    assert tree.deepest == int(tree.depth.max())


@given(trees, st.integers(0, 2**31))
def test_the_walk_is_the_one_a_person_would_take(parents: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = Tree(parents, CPU)
    rows, width = tree.depth.shape
    chosen = torch.randint(0, 3, (rows, width), generator=generator)
    draft = torch.randint(0, 3, (rows, width - 1), generator=generator)
    counts = torch.tensor([int(torch.randint(0, len(line) + 1, (), generator=generator)) for line in parents])
    accepted, following, path = accept_path(chosen, draft, counts, tree)
    for row, line in enumerate(parents):
        at, walked = 0, []
        while True:
            good = [
                index + 1
                for index, parent in enumerate(line[: int(counts[row])])
                if parent + 1 == at and draft[row, index] == chosen[row, at]
            ]
            if not good:
                break
            at = good[0]
            walked.append(at)
        assert int(accepted[row]) == len(walked)
        assert path[row, : len(walked)].tolist() == walked
        assert int(following[row]) == int(chosen[row, at])


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_a_chain_is_a_tree(length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 2, (2, length + 1), generator=generator)
    draft = torch.randint(0, 2, (2, length), generator=generator)
    counts = torch.tensor([length, length // 2])
    tree = Tree([list(range(-1, length - 1))] * 2, CPU)
    accepted, following, path = accept_path(chosen, draft, counts, tree)
    expected = accept_matching(chosen, draft, counts)
    assert torch.equal(accepted, expected[0])
    assert torch.equal(following, expected[1])
    assert path[0, : int(accepted[0])].tolist() == list(range(1, int(accepted[0]) + 1))
