"""Does a draft have the target's token ids? Ids decide, not names or sizes.

A draft with other ids costs speed, never the answer, so this only decides how drafting is worth trying: with the ids as
they are, or across vocabularies (`drafters.CrossVocabulary`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine import compat
from ..engine.tokens import BYTE_LEVEL, SENTENCEPIECE, WORDS, PerPair, Vocabulary, vocabulary_of


__all__ = ["Comparison", "DifferentId", "Vocabulary", "compare", "different_ids_reason", "engine_warnings"]

SAME, PADDED, DIFFERENT = "same", "same-with-padding", "different"
PADDING = 1024  # embeddings are padded to a multiple of a power of two
MOST_CHANGED = 0.01  # share of ids that may stand for another token and leave a draft useful: renamed markers, mostly
SHOWN = 5
LLAMA_CPP_SIZES, LLAMA_CPP_FIRST = (
    128,
    5,
)  # common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE, …_CHECK_START_TOKEN_ID
LLAMA_CPP_KINDS = {BYTE_LEVEL: "BPE", SENTENCEPIECE: "SPM", WORDS: "WPM"}


@dataclass(frozen=True, slots=True)
class DifferentId:
    """An id that doesn't stand for the same token on both sides.

    Attributes:
        id: The id.
        target: The target's token string, or `None` where it has none.
        draft: The draft's.
    """

    id: int
    target: str | None
    draft: str | None

    def __str__(self) -> str:
        ours, theirs = ("no token" if each is None else repr(each) for each in (self.target, self.draft))
        return f"{self.id}: {ours} in the target, {theirs} in the draft"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison of two vocabularies found.

    Attributes:
        verdict: `"same"`; `"same-with-padding"`: every id that both have is the same token, and what only one of them
            has is padding of the output layer or an added token; `"different"`.
        differences: The first ids that aren't the same token, at most five.
        num_different: All of them.
        overlap: Share of the target's tokens that the draft has too, under whatever id.
        fits: Whether the draft can be run on the target's ids: all but a hundredth of the ids that both have are the
            same, and texts are split alike.
        reasons: Why, one sentence each; notes on what doesn't count too.
    """

    verdict: str
    differences: tuple[DifferentId, ...] = ()
    num_different: int = 0
    overlap: float = 1.0
    fits: bool = True
    reasons: tuple[str, ...] = ()


def compare(target: Vocabulary, draft: Vocabulary) -> Comparison:
    """Compare the ids of two vocabularies.

    Args:
        target: The target's.
        draft: The draft's.
    """
    ours, theirs = target.strings, draft.strings
    every = sorted(ours.keys() | theirs.keys())
    unequal = [index for index in every if ours.get(index) != theirs.get(index)]
    changed = [index for index in unequal if index in ours and index in theirs]
    reasons = []
    if changed:
        share = f"{len(changed)} of {min(len(ours), len(theirs))} ids stand for another token"
        reasons.append(f"{share}, first {DifferentId(changed[0], ours[changed[0]], theirs[changed[0]])}")
    model_tokens = 0
    for one, other, name, owner in ((target, draft, "target", ours), (draft, target, "draft", theirs)):
        extra = [index for index in unequal if index not in other.strings]
        if extra:
            added = set(one.added.values())
            model_tokens += (unadded := sum(index not in added for index in extra))
            kind = "added tokens" if not unadded else "tokens"
            reasons.append(f"{len(extra)} {kind} are the {name}'s alone, first {owner[extra[0]]!r} ({extra[0]})")
    other_merges = target.merges is not None and draft.merges is not None and target.merges != draft.merges
    if other_merges:
        reasons.append("the merges differ, so texts are split into other tokens")
    if target.kind != draft.kind:
        reasons.append(f"the target's tokens are {target.kind} and the draft's {draft.kind}")
    sizes = target.output_size, draft.output_size
    if None not in sizes and sizes[0] != sizes[1]:
        reasons.append(f"the output layers have {sizes[0]} and {sizes[1]} rows")
    reasons += _role_notes(target, draft)
    apart = bool(changed) or other_merges or target.kind != draft.kind
    if apart or model_tokens:
        verdict = DIFFERENT
    else:
        verdict = PADDED if unequal or (None not in sizes and sizes[0] != sizes[1]) else SAME
    small, large = sorted((ours, theirs), key=len)
    wrong = sum(large.get(index) != token for index, token in small.items())
    fits = wrong <= MOST_CHANGED * len(small) and not other_merges and target.kind == draft.kind
    first = tuple(DifferentId(index, ours.get(index), theirs.get(index)) for index in unequal[:SHOWN])
    common = len(set(target.pieces.values()) & set(draft.pieces.values()))
    overlap = common / max(len(set(target.pieces.values())), 1)
    return Comparison(verdict, first, len(unequal), overlap, fits, tuple(reasons))


def _role_notes(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """Special tokens that are used otherwise; that alone makes no other ids."""
    notes = []
    for role in sorted(target.roles.keys() & draft.roles.keys()):
        ours, theirs = target.roles[role], draft.roles[role]
        if ours != theirs:
            names = [each.strings.get(index) for each, index in ((target, ours), (draft, theirs))]
            notes.append(f"the {role} is {names[0]!r} ({ours}) in the target and {names[1]!r} ({theirs}) in the draft")
    return notes


def engine_warnings(target: Vocabulary, draft: Vocabulary) -> dict[str, list[str]]:
    """What other engines make of a pair, by their own rules (as of November 2026).

    Args:
        target: The target's vocabulary, with the size of the output layer.
        draft: The draft's.

    Returns:
        Engine (`"vllm"`, `"llama.cpp"`, `"sglang"`) → warnings; an empty list where it takes the pair as it is.
    """
    rules: dict[str, Callable[[Vocabulary, Vocabulary], list[str]]] = {
        "vllm": _vllm, "llama.cpp": _llama_cpp, "sglang": _sglang,
    }  # fmt: skip
    return {engine: rule(target, draft) for engine, rule in rules.items()}


def _sizes(target: Vocabulary, draft: Vocabulary) -> tuple[int, int]:
    ours, theirs = ((each.output_size or each.size) for each in (target, draft))
    return ours, theirs


def _vllm(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """`vocab_size` must be equal; ids are never looked at."""
    ours, theirs = _sizes(target, draft)
    if ours != theirs:
        return [
            f"vocab_size is {ours} for the target and {theirs} for the draft: refused. From 0.25 on "
            '"use_heterogeneous_vocab": true takes the pair (greedy drafts, V1 model runner)'
        ]
    if target.strings != draft.strings:
        return ["vocab_size is equal, so the pair is taken, but the ids differ: hardly any draft will be accepted"]
    return []


def _llama_cpp(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """Type, BOS, size, and the text of every token from id 5 on."""
    found = []
    if target.kind != draft.kind:
        kinds = [LLAMA_CPP_KINDS[each.kind] for each in (target, draft)]
        found.append(f"the vocabulary types differ ({kinds[0]} and {kinds[1]})")
    if bool(target.prefix) != bool(draft.prefix):
        found.append("only one of them begins texts with a BOS token")
    # EOS ids count only where texts end with one by themselves, which causal models' tokenizers don't do
    ours, theirs = (each.roles.get("bos_token") for each in (target, draft))
    if target.prefix and draft.prefix and ours != theirs:
        found.append(f"the bos_token ids differ ({ours} and {theirs})")
    sizes = _sizes(target, draft)
    if abs(sizes[0] - sizes[1]) > LLAMA_CPP_SIZES:
        found.append(f"the vocabulary sizes differ by more than {LLAMA_CPP_SIZES} ({sizes[0]} and {sizes[1]})")
    for index in range(LLAMA_CPP_FIRST, min(sizes)):
        if target.strings.get(index) != draft.strings.get(index):
            found.append(f"id {DifferentId(index, target.strings.get(index), draft.strings.get(index))}")
            break
    return [f"{reason}: it will serve without drafts" for reason in found]


def _sglang(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """`vocab_size` and the whole vocabulary must be equal."""
    ours, theirs = _sizes(target, draft)
    if ours != theirs:
        return [f"vocab_size is {ours} for the target and {theirs} for the draft: refused"]
    return ["the vocabularies differ: refused"] if target.tokens != draft.tokens else []


def different_ids_reason(target: Any, draft: Any, tokenizer: Any = None, draft_tokenizer: Any = None) -> str | None:
    """Why the draft's ids can't be the target's, or `None`.

    Args:
        target: The target model.
        draft: The draft model.
        tokenizer: The target's tokenizer, if known.
        draft_tokenizer: The draft's tokenizer, if known.
    """
    if tokenizer is not None and draft_tokenizer is not None:
        return _tokenizers_reason(tokenizer, draft_tokenizer)
    size, draft_size = (compat.text_config(model).vocab_size for model in (target, draft))
    if abs(size - draft_size) > max(PADDING, size // 50):
        return f"the draft has {draft_size} token ids and the target {size}, so their tokenizers differ"
    return None


@PerPair
def _tokenizers_reason(tokenizer: Any, draft_tokenizer: Any) -> str | None:
    found = compare(vocabulary_of(tokenizer), vocabulary_of(draft_tokenizer))
    return None if found.fits else f"the draft's tokenizer gives other ids: {'; '.join(found.reasons)}"
