"""Would this engine take this pair? Compares the tokenizers by the engine's own rule, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..selection import hub as real_hub
from ..selection.facts import decoder_config
from ..selection.hub import HubProblem
from ..selection.vocabulary import Vocabulary, compare, engine_warnings


FITS, WARNINGS, REFUSED, OTHER_SIZES, UNVERIFIED = "fits", "warnings", "refused", "other sizes", "unverified"


@dataclass(frozen=True, slots=True)
class VocabularyCheck:
    """What an engine makes of a pair.

    Attributes:
        verdict: `"fits"`, `"warnings"`, `"refused"` (it stops, drafts nothing, or writes other texts), `"other sizes"`
            (the vocabularies have different sizes, which some engines can be told about) or `"unverified"`.
        warnings: Why.
    """

    verdict: str
    warnings: tuple[str, ...] = ()


def check(
    engine: str, target: str, draft: str, *, local_files_only: bool = False, hub: Any = real_hub
) -> VocabularyCheck:
    """Compare the tokenizers of a pair as an engine does. Weights are neither read nor downloaded.

    Args:
        engine: How the engine compares: `"vllm"`, `"llama.cpp"`, `"sglang"` (`selection.engine_warnings`), `"mlx-lm"` and
            `"sizes"` (the sizes alone), or `"ids"` (not at all, so ids that differ are drafted in vain).
        target: Hub id or folder.
        draft: Hub id or folder.
        local_files_only: Ask the local cache alone.
        hub: What answers in the place of `selection.hub`.
    """
    pair = []
    for name in (target, draft):
        try:
            pair.append(_vocabulary(name, local_files_only, hub))
        except HubProblem as problem:
            return VocabularyCheck(UNVERIFIED, (f"the tokenizer of {name} can't be read: {problem}",))
    return judge(engine, *pair)


def judge(engine: str, target: Vocabulary, draft: Vocabulary) -> VocabularyCheck:
    """The verdict for two vocabularies; `engine` as in `check`."""
    sizes = tuple(each.output_size or each.size for each in (target, draft))
    if engine in ("llama.cpp", "sglang"):
        found = engine_warnings(target, draft)[engine]
        return VocabularyCheck(REFUSED, tuple(found)) if found else VocabularyCheck(FITS)
    if engine in ("vllm", "sizes") and sizes[0] != sizes[1]:
        return VocabularyCheck(OTHER_SIZES, (f"the vocabularies have {sizes[0]} and {sizes[1]} ids",))
    if engine == "vllm":
        found = engine_warnings(target, draft)["vllm"]
        return VocabularyCheck(WARNINGS, tuple(found)) if found else VocabularyCheck(FITS)
    own = tuple(len(each.tokens) - len(each.added) for each in (target, draft))
    if engine == "mlx-lm" and own[0] != own[1]:
        return VocabularyCheck(REFUSED, (f"the tokenizers have {own[0]} and {own[1]} tokens, added ones left out",))
    compared = compare(target, draft)
    if compared.fits:
        return VocabularyCheck(FITS)
    reasons = "; ".join(compared.reasons)
    return VocabularyCheck(REFUSED, (f"hardly any draft would be accepted: {reasons}",))


def _vocabulary(name: str, local_files_only: bool, hub: Any) -> Vocabulary:
    repository = hub.describe(name, local_files_only=local_files_only)
    folder = hub.tokenizer_folder(repository, local_files_only=local_files_only)
    if folder is None:
        raise HubProblem("unusable", f"{name} has no tokenizer.")
    try:
        size = getattr(decoder_config(repository.config), "vocab_size", None)
        return Vocabulary.load(folder, size)
    except Exception as error:  # of whatever kind its files are broken
        raise HubProblem("unusable", f"The tokenizer of {name} can't be read: {error}.") from error
