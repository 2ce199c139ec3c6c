"""Recycled successors and trees: the text is plain decoding's, what is learnt is true, what is proposed is the best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import hf_specdec
from hf_specdec import Draft, Drafter, SpecConfig, decoding
from hf_specdec.drafters import recycling
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.recycling import MOST_NODES, SUCCESSORS, Grown, Memory, Recycling
from hf_specdec.engine.forward import RowModel
from hf_specdec.engine.rows import Rows
from tests.plain import assert_sound, ends_apart, new_tokens, options, plain_texts
from tests.tiny import ARCHITECTURES, ragged_prompts, tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")


class RandomTree(Drafter):
    """Random trees whose tokens come from the right text with some chance: every shape, every outcome."""

    name = "random_tree"

    def __init__(self, texts: list[list[int]], chance: float) -> None:
        self.texts, self.chance = texts, chance

    def start(self, context: DraftContext) -> None:
        assert context.trees
        self.generator = torch.Generator().manual_seed(0)

    def pick(self, high: int) -> int:
        return int(torch.randint(0, high, (), generator=self.generator))

    def propose(self, rows: Rows, length: int) -> Draft:
        tokens, parents = [], []
        for row in rows.live:
            known = self.texts[row][rows.num_new(row) :]
            line: list[int] = []
            above: list[int] = []
            depth: list[int] = []
            for index in range(self.pick(length + 1)):
                parent = self.pick(index + 1) - 1
                level = 0 if parent < 0 else depth[parent] + 1
                right = level < len(known) and float(torch.rand((), generator=self.generator)) < self.chance
                line.append(known[level] if right else self.pick(97))
                above.append(parent)
                depth.append(level)
            tokens.append(line)
            parents.append(above)
        draft = Draft.from_lists(tokens)
        return Draft(draft.tokens, draft.counts, parents=parents)


@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_tree_gives_the_text_of_plain_generate(name: str, rows: int, chance: float) -> None:
    model, prompts = tiny_model(name), ragged_prompts(rows)
    texts = plain_texts(model, prompts)
    changes = {"eos_token_id": ends_apart(texts), "pad_token_id": 5} if rows == 3 else {}
    expected = plain_texts(model, prompts, **changes)
    config = SpecConfig(drafter=RandomTree(texts, chance), num_draft_tokens=9, draft_length="fixed")
    output = hf_specdec.generate(model, **prompts, **options(**changes), speculative=config)
    assert new_tokens(output, prompts) == expected
    stats = hf_specdec.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    assert_sound(stats)
    if chance:
        assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 8])
def test_sampled_text_does_not_depend_on_the_tree(rows: int, temperature: float) -> None:
    """Sample-match with noise by position: on a tree, on a chain, and without a draft, the same tokens."""
    model, prompts = tiny_model(), ragged_prompts(rows)
    settings = options(do_sample=True, temperature=temperature, top_k=20, top_p=0.95)
    texts = []
    alone = hf_specdec.generate(model, **prompts, **settings, speculative=SpecConfig(drafter="none", seed=3))
    known = new_tokens(alone, prompts)
    for drafter in (RandomTree(known, 0.8), Recycling(), "prompt_lookup"):
        config = SpecConfig(drafter=drafter, seed=3, num_draft_tokens=9, draft_length="fixed")
        texts.append(hf_specdec.generate(model, **prompts, **settings, speculative=config))
    assert all(torch.equal(text, alone) for text in texts)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", ["adaptive", "fixed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_recycling_gives_the_text_of_plain_generate(name: str, length: str, rows: int) -> None:
    model, prompts = tiny_model(name), ragged_prompts(rows)
    config = SpecConfig(drafter="recycling", num_draft_tokens=8, draft_length=length)
    for _ in range(2):  # the second time with what the first has learnt
        output = hf_specdec.generate(model, **prompts, **options(max_new_tokens=48), speculative=config)
        assert new_tokens(output, prompts) == plain_texts(model, prompts, max_new_tokens=48)
        stats = hf_specdec.last_stats(model)
        assert stats is not None
        assert_sound(stats)
    if length == "fixed":
        assert stats.num_accepted_draft_tokens > 0


class Odd(LogitsProcessor):
    """Reads the prefix: a tree has no single one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0, -1]) % 2 :: 2] -= 1.0
        return scores


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"logits_processor": [Odd()]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"return_dict_in_generate": True, "output_hidden_states": True},
    ],
)
def test_where_trees_cannot_be_verified_it_drafts_chains(changes: dict[str, Any]) -> None:
    model, prompts = tiny_model(), ragged_prompts(1)
    config = SpecConfig(drafter=Recycling(), num_draft_tokens=6, draft_length="fixed")
    output = hf_specdec.generate(model, **prompts, **options(**changes), speculative=config)
    expected = model.generate(**prompts, **options(**changes))
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    assert torch.equal(sequences, expected if isinstance(expected, torch.Tensor) else expected.sequences)
    stats = hf_specdec.last_stats(model)
    assert stats is not None
    assert stats.fallback_reason is None
    assert stats.num_draft_tokens > 0


WRONG: dict[str, tuple[Any, str]] = {
    "too few parents": ([[-1, 0]], "parent of each"),
    "a parent behind its child": ([[1, -1, 0]], "earlier draft token"),
    "no such parent": ([[-1, -2, 0]], "earlier draft token"),
    "no whole numbers": ([[-1.0, 0.0, 0.0]], "TypeError"),
    "rows missing": ([], "parent of each"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tree_that_is_none_costs_the_draft_only(wrong: str) -> None:
    parents, reason = WRONG[wrong]

    class Wrong(Drafter):
        def propose(self, rows: Rows, length: int) -> Draft:
            return Draft(torch.ones(1, 3, dtype=torch.long), [3], parents=parents)

    model, prompts = tiny_model(), ragged_prompts(1)
    config = SpecConfig(drafter=Wrong(), num_draft_tokens=3, draft_length="fixed")
    output = hf_specdec.generate(model, **prompts, **options(), speculative=config)
    assert new_tokens(output, prompts) == plain_texts(model, prompts)
    assert reason in str(hf_specdec.last_stats(model).fallback_reason)  # type: ignore[union-attr]


def test_what_is_learnt_is_what_the_target_says() -> None:
    model, prompts = tiny_model(), ragged_prompts(1)
    config = SpecConfig(drafter="recycling", num_draft_tokens=8, draft_length="fixed")
    text = hf_specdec.generate(model, **prompts, **options(), speculative=config)[0]
    memory = recycling._MEMORIES[model]
    logits = model(text[None]).logits[0]
    seen = {}
    for position in range(24, len(text) - 2):  # what was read last counts
        seen[int(text[position])] = tuple(logits[position].topk(SUCCESSORS).indices.tolist())
    last = {token: best for token, best in seen.items() if memory.successors[token] == best}
    assert len(last) >= len(seen) // 2  # tokens that a rejected branch has read since say something else
    assert all(len(best) <= SUCCESSORS for best in memory.successors.values())
    assert all(0.0 <= rate.value <= 1.0 for rate in memory.ranks)


def grow(memory: Memory, text: list[int], trees: bool = True) -> Grown:
    drafter = Recycling()
    drafter.memory, drafter.trees, drafter.end_tokens = memory, trees, frozenset({9})
    drafter.indexes = [recycling.Index(4)]
    return drafter._grow(0, text)


def test_the_likeliest_tokens_come_first_and_parents_before_children() -> None:
    memory = Memory(successors={1: (2, 3), 2: (4, 9), 3: (5,), 9: (1,)})
    grown = grow(memory, [7, 8, 1])
    assert grown.gains == sorted(grown.gains, reverse=True)
    assert all(parent < index for index, parent in enumerate(grown.parents))
    assert grown.tokens[0] == 2
    assert grown.parents[0] == -1
    assert 9 not in [grown.tokens[parent] for parent in grown.parents if parent >= 0], "nothing follows an end token"
    assert len(grown.tokens) <= MOST_NODES
    chances: dict[int, float] = {}
    for parent, gain in zip(grown.parents, grown.gains, strict=True):
        chances[parent] = chances.get(parent, 0.0) + gain
    assert all(total <= (1.0 if parent < 0 else grown.gains[parent]) + 1e-9 for parent, total in chances.items())


def test_a_lookup_is_a_branch_of_the_tree() -> None:
    grown = grow(Memory(successors={3: (7, 8)}), [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert grown.tokens[0] == 4 == grown.copied
    assert {7, 8} & set(grown.tokens)
    path, at = [], -1
    while at in grown.parents:
        at = grown.parents.index(at)
        path.append(grown.tokens[at])
    assert path[:3] == [4, 5, 6]


def test_a_chain_has_one_branch() -> None:
    memory = Memory(successors={1: (2, 3), 2: (4, 5), 4: (6,)})
    grown = grow(memory, [7, 1], trees=False)
    assert grown.tokens == [2, 4, 6]
    assert grown.parents == [-1, 0, 1]


def test_nothing_known_is_nothing_drafted() -> None:
    assert grow(Memory(), [1, 2, 3]).tokens == []


def test_rates_follow_the_outcomes() -> None:
    rate = recycling.Rate(0.5)
    for _ in range(200):
        rate.update(True)
    assert rate.value > 0.9
    for _ in range(600):
        rate.update(False)
    assert rate.value < 0.1


def drafter_with(memory: Memory) -> Recycling:
    drafter = Recycling()
    drafter.memory, drafter.trees, drafter.end_tokens, drafter.grown = memory, True, frozenset(), []
    return drafter


def test_guesses_are_measured_against_what_was_said_before_they_are_replaced() -> None:
    """Not against the likeliest token (sampling says others), and not against what a neighbour has just taught."""
    memory = Memory(successors={1: (2, 3)})
    before = [rate.value for rate in memory.ranks[:2]]
    drafter_with(memory).learn([[1], [1]], [[[5, 6]], [[5, 6]]], [[3], [3]])
    assert memory.ranks[0].value < before[0]
    assert memory.ranks[1].value > before[1]
    assert memory.ranks[0].tried == pytest.approx(1 + memory.ranks[0].discount)
    assert memory.successors[1] == (5, 6)


def test_the_accepted_path_is_remembered_over_rejected_branches() -> None:
    memory = Memory()
    drafter = drafter_with(memory)
    drafter.grown = [Grown([7, 8, 7], [-1, -1, 1], [0.5, 0.3, 0.2])]
    drafter.learn([[1, 7, 8, 7]], [[[8], [90], [7], [91]]], [[8, 7, 91]])
    assert memory.successors[7] == (91,)
    drafter.grown = [Grown([7, 8, 7], [-1, -1, 1], [0.5, 0.3, 0.2])]
    drafter.learn([[1, 7, 8, 7]], [[[7], [90], [7], [91]]], [[7, 90]])
    assert memory.successors[7] == (90,)


def test_a_prompt_does_not_overwrite_what_was_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_HEAD_SHARE", 0.0)  # nothing is learnt of the prompt's own logits
    model, ids = tiny_model(), torch.tensor([[5, 6, 5, 7]])
    recycling._MEMORIES[model] = Memory(successors={5: (40, 41)})
    config = SpecConfig(drafter="recycling", num_draft_tokens=1, draft_length="fixed")
    hf_specdec.generate(model, ids, max_new_tokens=1, do_sample=False, speculative=config)
    assert recycling._MEMORIES[model].successors[5] == (40, 41)
    assert recycling._MEMORIES[model].successors[6] == (5,)


def test_a_tree_cut_to_nothing_was_not_tried() -> None:
    class Beyond(Drafter):
        def propose(self, rows: Rows, length: int) -> Draft:
            return Draft(torch.tensor([[500, 3]]), [2], parents=[[-1, -1]])

    model, prompts = tiny_model(), ragged_prompts(1)
    config = SpecConfig(drafter=Beyond(), num_draft_tokens=2, draft_length="fixed")
    output = hf_specdec.generate(model, **prompts, **options(), speculative=config)
    assert new_tokens(output, prompts) == plain_texts(model, prompts)
    stats = hf_specdec.last_stats(model)
    assert stats is not None
    assert stats.num_draft_tokens == sum(stats.drafted_at) == 0


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_prompts_own_successors_are_learnt(rows: int, chunk: int | None) -> None:
    """What stands in the memory behind the prefill is what the target says behind each prompt token, seen last."""
    model, prompts = tiny_model(), ragged_prompts(rows)
    settings = options(max_new_tokens=1) | ({"prefill_chunk_size": chunk} if chunk else {})
    hf_specdec.generate(model, **prompts, **settings, speculative="recycling")
    expected: dict[int, tuple[int, ...]] = {}
    for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            best = model(input_ids=ids[mask][None]).logits[0].topk(SUCCESSORS).indices
        expected.update(zip(ids[mask].tolist(), map(tuple, best.tolist()), strict=True))
    assert recycling._MEMORIES[model].successors == expected


def test_a_dear_output_layer_is_not_run_on_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """97 x 64 of 88,000 parameters are 7 %; beyond an eighth the prompt's logits would cost more than they bring."""
    model, kept = tiny_model(), []
    forward = RowModel.forward
    monkeypatch.setattr(
        RowModel, "forward", lambda self, *rest, **named: kept.append(rest[2:]) or forward(self, *rest, **named)
    )

    def keeps_all(**changes: Any) -> bool:
        kept.clear()
        hf_specdec.generate(model, **ragged_prompts(1), **options(max_new_tokens=1), **changes)
        return kept[0] == (0,)

    assert keeps_all(speculative="recycling")
    assert not keeps_all(speculative="prompt_lookup")
    monkeypatch.setattr(decoding, "MOST_HEAD_SHARE", 0.05)
    assert not keeps_all(speculative="recycling")


def test_lookups_branch() -> None:
    """Three places say three things behind [5, 6]; all stand in the tree, the longest match first and on with its text."""
    text = [1, 5, 6, 20, 21, 2, 5, 6, 30, 3, 4, 5, 6, 40, 41, 3, 4, 5, 6]
    grown = grow(Memory(), text)
    branches = [token for token, parent in zip(grown.tokens, grown.parents, strict=True) if parent < 0]
    assert branches == [40, 30, 20]
    assert grown.tokens[grown.parents.index(grown.tokens.index(40))] == 41
    assert grown.copied == 40
    assert sum(gain for gain, parent in zip(grown.gains, grown.parents, strict=True) if parent < 0) <= 1


def test_lookups_that_agree_are_one_branch_until_they_part() -> None:
    text = [5, 6, 7, 20, 1, 5, 6, 7, 30, 2, 5, 6]
    grown = grow(Memory(), text)
    assert grown.tokens[0] == 7
    assert grown.parents.count(-1) == 1
    children = [token for token, parent in zip(grown.tokens, grown.parents, strict=True) if parent == 0]
    assert children[0] == 30
    assert 20 not in children or children.index(20) > 0
