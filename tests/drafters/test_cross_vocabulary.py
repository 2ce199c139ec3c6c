"""A draft with other token ids: the text is plain decoding's, and what the draft says arrives in the target's ids."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_specdec
from hf_specdec import CrossVocabulary, DraftModel, Hybrid, SpecConfig, SpecDecError
from hf_specdec.drafters import crossed
from hf_specdec.drafters.cross_vocabulary import Bridge, bridge_between
from hf_specdec.engine.rows import Rows
from hf_specdec.engine.tokens import Codec

from .. import test_distribution as distribution
from ..plain import assert_sound, new_tokens, options, plain_texts
from ..tiny import ragged_prompts, tiny_model
from ..vocabularies import ASCII, byte_level, permuted, sentencepiece


pytestmark = pytest.mark.usefixtures("one_thread")
FULL = os.environ.get("HF_SPECDEC_FULL_TESTS") == "1"
MODES = ("intersection", "text")
ORDER = random.Random(1).sample(range(97), 97)
HALVES = [bytes([byte]) for byte in range(0x9F, 0x100)]  # no row of them is a text
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def generate(
    target: Any, drafter: Any, prompts: dict[str, Tensor], on_step: Any = None, **changes: Any
) -> hf_specdec.SpecStats:
    """Fixed draft length; greedy text is plain decoding's."""
    config = SpecConfig(drafter=drafter, draft_length="fixed", num_draft_tokens=4, on_step=on_step)
    output = hf_specdec.generate(target, **prompts, **options(**changes), speculative=config)
    if not changes.get("do_sample"):
        assert new_tokens(output, prompts) == plain_texts(target, prompts, **changes)
    stats = hf_specdec.last_stats(target)
    assert stats is not None
    assert stats.fallback_reason is None
    assert_sound(stats)
    return stats


def prompt(*ids: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def bigram(following: dict[int, int], size: int) -> Any:
    """A model that says `following[token]` behind every token; its layers add nothing."""
    model = tiny_model(vocab_size=size, hidden_size=64, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64)[:size])
        model.lm_head.weight.zero_()
        for token, then in following.items():
            model.lm_head.weight[then, token] = 1.0
    return model


def cycle(pieces: Sequence[Any], *names: Any) -> dict[int, int]:
    """These tokens one behind the other, round and round, as ids."""
    ids = [pieces.index(name) for name in names]
    return dict(zip(ids, [*ids[1:], ids[0]], strict=True))


# the same model with its ids shuffled: whatever isn't accepted is an error of the mapping


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces", [ASCII, HALVES], ids=["letters", "bytes within characters"])
def test_shuffled_ids_are_all_accepted(pieces: list[bytes], mode: str, rows: int) -> None:
    target = tiny_model()
    draft = permuted(target, ORDER)
    drafter = CrossVocabulary(draft, byte_level(pieces), byte_level([pieces[index] for index in ORDER]), mode)
    stats = generate(target, drafter, ragged_prompts(rows))
    assert stats.draft_acceptance_rate == 1
    assert stats.num_draft_tokens >= 18 * rows
    assert stats.drafter == "cross_vocabulary"


@pytest.mark.parametrize("mode", MODES)
def test_shuffled_ids_in_a_hybrid(mode: str) -> None:
    target = tiny_model()
    model = CrossVocabulary(permuted(target, ORDER), byte_level(ASCII), byte_level([ASCII[at] for at in ORDER]), mode)
    events: list[hf_specdec.StepEvent] = []
    stats = generate(target, Hybrid(model, min_match=1), ragged_prompts(3), max_new_tokens=40, on_step=events.append)
    assert stats.steps_by_source["prompt_lookup"] > 0
    drafts = [
        (len(guess), kept)
        for event in events
        for guess, kept, source in zip(event.drafted, event.accepted, event.source, strict=True)
        if source == "cross_vocabulary"
    ]
    assert len(drafts) > 5
    assert all(drafted == kept for drafted, kept in drafts)


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_shuffled_ids_when_sampling(verification: str) -> None:
    """p = q at every position, with the target's processors applied to the draft in the target's ids."""
    target = tiny_model()
    drafter = CrossVocabulary(permuted(target, ORDER), byte_level(ASCII), byte_level([ASCII[at] for at in ORDER]))
    settings = options(do_sample=True, temperature=0.7, top_k=10, repetition_penalty=1.3)
    config = SpecConfig(drafter=drafter, draft_length="fixed", num_draft_tokens=5, verification=verification)
    hf_specdec.generate(target, **ragged_prompts(3), **settings, speculative=config)
    assert hf_specdec.last_stats(target).draft_acceptance_rate == 1


# vocabularies that overlap in part

WORDS = [b"th", b"the", b" the", b"an", b"and", b" and"]
MERGES = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"a", b"n"), (b"an", b"d"), (b" ", b"and")]
TARGET_PIECES: list[Any] = ["<s>", "</s>", "<|user|>", *WORDS, *ASCII[:86], "<|end|>", b"\xe2"]
OTHER_WORDS = [b"he", b"nd", b" a", b"in", b"ing"]
OTHER_MERGES = [(b"h", b"e"), (b"n", b"d"), (b" ", b"a"), (b"i", b"n"), (b"in", b"g")]


def other_tokenizer(kind: str) -> Any:
    if kind == "byte-level":
        return byte_level(["<pad>", *ASCII[::-1], *OTHER_WORDS, "</s>"], OTHER_MERGES, eos_token="</s>")
    pieces = ["<s>", "<unk>", *ASCII[:95], b" a", b" the", "<0x0A>", "<0x09>", "</s>"]
    return sentencepiece(pieces, [(" ", "a")], prepend=True, prefix=True, **ROLES)


@cache
def target_tokenizer() -> Any:
    return byte_level(TARGET_PIECES, MERGES, prefix=True, **ROLES)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_any_draft_keeps_the_text(kind: str, mode: str, rows: int) -> None:
    """Random models over vocabularies that overlap in part; special tokens and halves of characters anywhere."""
    assert len(TARGET_PIECES) == 97
    tokenizer = other_tokenizer(kind)
    draft = tiny_model("llama" if rows == 1 else "gemma3", seed=3, vocab_size=len(tokenizer) + 5)
    drafter = CrossVocabulary(draft, target_tokenizer(), tokenizer, mode)
    stats = generate(tiny_model(), drafter, ragged_prompts(rows), eos_token_id=1)
    assert stats.num_draft_tokens > 0


def test_texts_that_begin_with_markers() -> None:
    """Nothing but markers that the draft doesn't have: it has something to read all the same."""
    target, draft = tiny_model(), tiny_model(seed=3, vocab_size=110)
    for mode in MODES:
        generate(target, CrossVocabulary(draft, target_tokenizer(), other_tokenizer("byte-level"), mode), prompt(0, 2))


def test_a_draft_without_positions_for_the_text() -> None:
    target, draft = tiny_model(), tiny_model(seed=3, vocab_size=110, max_position_embeddings=32)
    tokenizer = other_tokenizer("byte-level")
    for mode in MODES:
        stats = generate(target, CrossVocabulary(draft, target_tokenizer(), tokenizer, mode), ragged_prompts(3))
        assert 0 < stats.num_draft_tokens < 200  # of 288


def test_confidence_threshold() -> None:
    target = tiny_model()
    noisy = permuted(target, ORDER)
    with torch.no_grad():
        noisy.lm_head.weight.add_(0.3 * torch.randn_like(noisy.lm_head.weight))
    tokenizers = byte_level(ASCII), byte_level([ASCII[at] for at in ORDER])
    for mode in MODES:
        full = generate(target, CrossVocabulary(noisy, *tokenizers, mode), ragged_prompts(3))
        cut = generate(target, CrossVocabulary(noisy, *tokenizers, mode, confidence_threshold=0.9), ragged_prompts(3))
        assert cut.num_draft_tokens < full.num_draft_tokens
        assert cut.draft_acceptance_rate > full.draft_acceptance_rate > 0


def test_common_tokens() -> None:
    """Of the same bytes, one to one; a byte token stands for a letter only where there is no other."""
    ours = byte_level(["</s>", b"a", b" a", b"z", b"\n", b"<0x61>"], eos_token="</s>")
    theirs = sentencepiece(["<0x61>", "<0x0A>", b"a", b" a", b"b", "<eos>", "<unk>"], eos_token="<eos>")
    there, back = Bridge.between(ours, theirs), Bridge.between(theirs, ours)
    assert there.common == {1: 2, 2: 3, 4: 1}
    assert back.common == {2: 1, 3: 2, 1: 4}
    assert (there.markers, back.markers) == ({0: 5}, {5: 0})
    assert there.overlap == pytest.approx(3 / 5)
    assert Bridge.between(theirs, theirs).common == {index: index for index in range(5)}


# texts whose tokens begin and end elsewhere


def test_longer_tokens_in_the_target() -> None:
    ours = [b"a", b"b", b"c", b"d", b"ab", b"cd"]
    target = bigram(cycle(ours, b"ab", b"cd"), 6)
    draft = bigram(cycle(ours[3::-1], b"a", b"b", b"c", b"d"), 4)
    tokenizers = byte_level(ours, [(b"a", b"b"), (b"c", b"d")]), byte_level(ours[3::-1])
    stats = generate(target, CrossVocabulary(draft, *tokenizers, "text"), prompt(4, 5, 4))
    assert stats.draft_acceptance_rate > 0.9  # the last round may draft one letter, which is half of a token
    assert stats.mean_acceptance_length > 2.5  # four letters are two tokens


def test_longer_tokens_in_the_draft() -> None:
    pieces = [b"a", b"b", b"c", b"d"]
    theirs = [*pieces, b"ab", b"cd"]
    target, draft = bigram(cycle(pieces, *pieces), 4), bigram(cycle(theirs, b"ab", b"cd"), 6)
    tokenizers = byte_level(pieces), byte_level(theirs, [(b"a", b"b"), (b"c", b"d")])
    stats = generate(target, CrossVocabulary(draft, *tokenizers, "text"), prompt(0, 1, 2, 3))
    # where a round ends within one of the draft's tokens, this draft doesn't know how to go on
    assert stats.draft_acceptance_rate >= 0.45


def test_characters_split_elsewhere() -> None:
    """`é€` in both, in bytes that no token of the other one is made of."""
    names = [b"\xc3", b"\xa9\xe2\x82", b"\xac"]
    ours = [b"x", *names, b"\xa9", b"\xe2", b"\x82"]
    theirs = [b"\xac", b"\x82", b"\xe2", b"\xa9", b"\xc3", b"x"]
    draft = bigram(cycle(theirs, b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac"), len(theirs))
    merges = [(b"\xe2", b"\x82"), (b"\xa9", b"\xe2\x82")]
    ours.append(b"\xe2\x82")
    target = bigram(cycle(ours, *names), len(ours))
    stats = generate(
        target, CrossVocabulary(draft, byte_level(ours, merges), byte_level(theirs), "text"), prompt(1, 2)
    )
    assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prepend", [False, True])
def test_spaces_of_sentencepiece(prepend: bool, mode: str) -> None:
    ours = [b" ", b"a", b"b", b"c", b"\n", b" a", b" c"]
    theirs = ["<s>", b"c", b"a", b" c", b"b", b" ", b" a", "<0x0A>"]
    target = bigram(cycle(ours, b" a", b"b", b" c", b"\n"), len(ours))
    draft = bigram(cycle(theirs, b" a", b"b", b" c", "<0x0A>"), len(theirs))
    tokenizer = sentencepiece(theirs, [(" ", "a"), (" ", "c")], prepend=prepend, prefix=True, bos_token="<s>")
    drafter = CrossVocabulary(draft, byte_level(ours, [(b" ", b"a"), (b" ", b"c")]), tokenizer, mode)
    assert generate(target, drafter, prompt(5, 2, 6, 4)).draft_acceptance_rate == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_drafts_end_is_the_targets(mode: str) -> None:
    ours, theirs = ["</s>", b"a", b"b", b"c"], [b"c", b"b", b"a", "</s>"]
    target, draft = (
        bigram(cycle(ours, b"a", b"b", b"c", "</s>"), 4),
        bigram(cycle(theirs, b"a", b"b", b"c", "</s>"), 4),
    )
    tokenizers = (byte_level(each, eos_token="</s>") for each in (ours, theirs))
    stats = generate(target, CrossVocabulary(draft, *tokenizers, mode), prompt(1), eos_token_id=0)
    assert stats.num_emitted_tokens == 3
    assert stats.num_accepted_draft_tokens == 2  # the end is one of them
    other = (byte_level(ours, eos_token="</s>"), byte_level([*theirs[:3], "<|im_end|>"], eos_token="<|im_end|>"))
    stats = generate(target, CrossVocabulary(draft, *other, mode), prompt(1), eos_token_id=0)
    assert stats.num_accepted_draft_tokens == 2


def test_how_much_of_its_own_draft_is_kept() -> None:
    drafter = CrossVocabulary(None)
    drafter.bridge = Bridge.between(
        byte_level(["</s>", b"a", b"b", b"ab"], [(b"a", b"b")], eos_token="</s>"),
        byte_level([b"b", b"a", b"ba", "</s>"], [(b"b", b"a")], eos_token="</s>"),
    )
    drafter.ends = {3}
    drafted = [1, 2, 0, 3]  # a|ba|b, the end
    for ours, kept in (
        ([3, 3, 0], [0, 1, 3, 4]),
        ([1, 2, 3], [0, 1, 1, 4]),
        ([], [0]),
    ):  # ab|ab, the end; a|b|ab; nothing
        assert [drafter._own_kept(ours, drafted, accepted) for accepted in range(len(ours) + 1)] == kept


@pytest.mark.parametrize("mode", MODES)
def test_only_new_text_is_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither encoding nor the draft's forwards begin anew."""
    pieces = [b"a", b"b", b"c", b"d"]
    encoded: list[int] = []
    original = Codec.ids_of
    monkeypatch.setattr(Codec, "ids_of", lambda self, text: encoded.append(len(text)) or original(self, text))
    target, draft = bigram(cycle(pieces, *pieces), 4), bigram(cycle(pieces[::-1], *pieces), 4)
    read: list[int] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    tokenizers = byte_level(pieces), byte_level(pieces[::-1])
    stats = generate(target, CrossVocabulary(draft, *tokenizers, mode), prompt(*[0, 1, 2, 3] * 50))
    assert stats.draft_acceptance_rate == 1
    assert read[0] >= 200
    assert max(read[1:]) <= 2
    assert all(size < 40 for size in encoded[1:])


# never changed, and how it is asked for


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", [False, True])
def test_model_and_tokenizers_are_never_changed(sample: bool, mode: str) -> None:
    target, draft = tiny_model(), tiny_model(seed=3, vocab_size=110)
    draft.generation_config.temperature = 0.3
    ours, theirs = target_tokenizer(), other_tokenizer("byte-level")
    drafter = CrossVocabulary(draft, ours, theirs, mode)

    def state() -> tuple[Any, ...]:
        backends = [each.backend_tokenizer for each in (ours, theirs)]
        return (
            draft.generation_config.to_dict(), draft.config.to_dict(), type(draft), draft.training, dict(vars(draft)),
            dict(vars(drafter)), [each.to_str() for each in backends], [each.encode_special_tokens for each in backends],
        )  # fmt: skip

    weights = {name: value.clone() for name, value in draft.state_dict().items()}
    before = state()
    generate(target, drafter, ragged_prompts(3), do_sample=sample)
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in draft.state_dict().items())


@pytest.fixture
def shuffled() -> tuple[Any, Any, Any, Any]:
    """A target, the same model with its ids shuffled, and their tokenizers."""
    target = tiny_model()
    return target, permuted(target, ORDER), byte_level(ASCII), byte_level([ASCII[at] for at in ORDER])


@pytest.mark.parametrize("door", ["assistant_model", "generate", "decoder"])
def test_transformers_spelling(door: str, shuffled: tuple[Any, Any, Any, Any]) -> None:
    target, draft, ours, theirs = shuffled
    prompts = ragged_prompts(3)
    tokenizers = {"tokenizer": ours, "assistant_tokenizer": theirs}
    if door == "assistant_model":
        hf_specdec.enable()
        output = target.generate(**prompts, **options(), assistant_model=draft, **tokenizers)
        hf_specdec.disable()
    elif door == "generate":
        output = hf_specdec.generate(target, **prompts, **options(), assistant_model=draft, **tokenizers)
    else:
        decode = hf_specdec.decoder(draft_model=draft, **tokenizers)
        output = target.generate(**prompts, **options(), custom_generate=decode)
    stats = hf_specdec.last_stats(target)
    assert new_tokens(output, prompts) == plain_texts(target, prompts)
    assert stats.fallback_reason is None
    assert stats.steps_by_source["cross_vocabulary"] > 0
    assert stats.num_accepted_draft_tokens > 0


def test_named_models_bring_their_tokenizers(tmp_path: Path, shuffled: tuple[Any, Any, Any, Any]) -> None:
    from transformers import AutoModelForCausalLM

    for name, model, tokenizer in (("target", *shuffled[::2]), ("draft", *shuffled[1::2])):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    for config in (
        SpecConfig(draft_model=str(tmp_path / "draft"), drafter="draft_model"),
        SpecConfig(drafter=CrossVocabulary(AutoModelForCausalLM.from_pretrained(tmp_path / "draft"))),
    ):
        hf_specdec.generate(target, **ragged_prompts(1), **options(), speculative=config)
        stats = hf_specdec.last_stats(target)
        assert stats.fallback_reason is None
        assert stats.drafter == "cross_vocabulary"
        assert stats.draft_acceptance_rate == 1


def test_unknown_tokenizers() -> None:
    target, draft = tiny_model(), tiny_model(vocab_size=3000)
    output = hf_specdec.generate(target, **ragged_prompts(1), **options(), assistant_model=draft)
    assert new_tokens(output, ragged_prompts(1)) == plain_texts(target, ragged_prompts(1))
    reason = hf_specdec.last_stats(target).fallback_reason
    assert "3000 token ids" in reason
    assert "`assistant_tokenizer=`" in reason
    hf_specdec.generate(target, **ragged_prompts(1), **options(), speculative=CrossVocabulary(draft))
    assert "target's tokenizer isn't known" in hf_specdec.last_stats(target).fallback_reason


def test_what_is_crossed() -> None:
    draft = tiny_model()
    hybrid = Hybrid(DraftModel(draft, 0.5), min_match=2)
    changed = crossed(hybrid, 1, 2)
    assert isinstance(changed, Hybrid)
    assert isinstance(changed.model, CrossVocabulary)
    assert (changed.model.confidence_threshold, changed.model.tokenizer, changed.model.draft_tokenizer) == (0.5, 1, 2)
    assert type(hybrid.model) is DraftModel
    for other in (CrossVocabulary(draft), hf_specdec.PromptLookup(), None):
        assert crossed(other, 1, 2) is other


def test_unknown_mode() -> None:
    with pytest.raises(SpecDecError, match="'words'"):
        CrossVocabulary(None, mode="words")


# the distribution of sampled texts, as in tests/test_distribution.py: half of the target's tokens are the draft's too


LETTERS = [b"a", b"b", b"c", b"d", b"e"]
THEIRS = [b"x", b"c", b"y", b"e", b"a", b"z"]


@cache
def stranger() -> Any:
    model = tiny_model(seed=1, vocab_size=6, hidden_size=16, intermediate_size=32, num_attention_heads=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
    return model


def drafter_of(kind: type[CrossVocabulary], mode: str) -> CrossVocabulary:
    return kind(stranger(), byte_level(LETTERS), byte_level(THEIRS), mode)


@pytest.mark.parametrize(("verification", "settings"), [("rejection", "processed"), ("block", "plain")])
def test_the_intersection_keeps_the_joint_of_three_tokens(verification: str, settings: str) -> None:
    drafter = drafter_of(CrossVocabulary, "intersection")
    seen, stats = distribution.sample(drafter, verification, settings, n=8 * distribution.BATCH)
    assert distribution.p_of(seen, settings) > distribution.RIGHT
    assert stats.sum_min_pq > 0
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("mode", "verification"), [("text", "block"), ("text", "coupled"), ("intersection", "coupled")]
)
def test_without_a_sampled_draft_the_text_is_a_function_of_the_seed(mode: str, verification: str) -> None:
    """What decoding without a draft says, which tests/test_distribution.py puts to the chi-square test."""
    inputs = {"inputs": torch.tensor([distribution.PROMPT]), "num_return_sequences": 300}
    text = distribution.texts_of(drafter_of(CrossVocabulary, mode), verification, "processed", **inputs)
    assert torch.equal(text, distribution.texts_of("none", "auto", "processed", **inputs))


class NotMoved(CrossVocabulary):
    """Says the draft's probabilities under the draft's own ids."""

    def _choose(self, logits: Tensor, rows: Rows, drafted: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, highest = super()._choose(logits, rows, drafted)
        assert q is not None
        moved = torch.zeros_like(q)
        moved[:, self.theirs.clamp(max=q.shape[-1] - 1)] = q[:, self.ours]
        return token, moved / moved.sum(-1, keepdim=True), highest


class NotZero(CrossVocabulary):
    """Says that tokens outside of the intersection could have been drawn."""

    def _choose(self, logits: Tensor, rows: Rows, drafted: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, highest = super()._choose(logits, rows, drafted)
        assert q is not None
        return token, 0.7 * q + 0.3 * (q == 0) / (q == 0).sum(-1, keepdim=True), highest


@pytest.mark.parametrize("wrong", [NotMoved, NotZero])
def test_a_wrong_q_is_caught(wrong: type[CrossVocabulary]) -> None:
    seen, _ = distribution.sample(drafter_of(wrong, "intersection"), "rejection", n=distribution.CONTROL)
    assert distribution.p_of(seen) < distribution.WRONG


class NotScaled(CrossVocabulary):
    """Doesn't make up for what is cut away: such a q is no distribution, and the draft isn't used."""

    def _choose(self, logits: Tensor, rows: Rows, drafted: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        token, q, highest = super()._choose(logits, rows, drafted)
        return token, q * 0.6 if q is not None else None, highest


def test_a_q_that_is_not_scaled_is_not_used() -> None:
    seen, stats = distribution.sample(drafter_of(NotScaled, "intersection"), "rejection", n=2 * distribution.BATCH)
    assert distribution.p_of(seen) > distribution.RIGHT
    assert stats.num_draft_tokens == 0


# a real pair: byte-level and SentencePiece, 49,152 and 262,144 tokens


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    """Gemma 3 270M in float32, and its tokenizer; converted once a machine, in minutes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_specdec.tools.chat_model import fetch_gemma

    if not FULL:
        pytest.skip("238 MB to download and minutes of decoding: set HF_SPECDEC_FULL_TESTS=1")
    try:
        path = str(fetch_gemma())
    except SpecDecError as error:
        pytest.skip(f"Gemma can't be fetched: {error}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


PROMPTS = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Water — H₂O — boils at 100 °C. 🌊 In winter",
)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("direction", ["SmolLM2 for Gemma", "Gemma for SmolLM2"])
def test_real_pair(gemma: tuple[Any, Any], request: pytest.FixtureRequest, direction: str, text: str) -> None:
    smollm2 = request.getfixturevalue("smollm2")  # not before it is known whether the test is skipped
    (target, tokenizer), (draft, draft_tokenizer) = (
        (gemma, smollm2) if direction == "SmolLM2 for Gemma" else (smollm2, gemma)
    )
    inputs = dict(tokenizer(text, return_tensors="pt"))
    settings = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    config = SpecConfig(draft_model=draft, drafter="draft_model", draft_length="fixed", num_draft_tokens=4)
    output = hf_specdec.generate(
        target, **inputs, **settings, speculative=config, tokenizer=tokenizer, assistant_tokenizer=draft_tokenizer
    )
    stats = hf_specdec.last_stats(target)
    assert torch.equal(output, plain)
    assert (stats.drafter, stats.fallback_reason) == ("cross_vocabulary", None)
    assert stats.num_accepted_draft_tokens > 0
    # Gemma has nearly all of SmolLM2's tokens, so it drafts in the intersection; the other way the draft writes text
    assert bridge_between(tokenizer, draft_tokenizer).overlap == pytest.approx(
        0.18 if target is gemma[0] else 0.94, abs=0.01
    )
