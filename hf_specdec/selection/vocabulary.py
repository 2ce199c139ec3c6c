"""Does a draft have the target's token ids?

A draft with other ids costs speed, never the answer, so this only decides whether drafting is worth trying.
"""

from __future__ import annotations

from typing import Any

from ..engine import compat


PADDING = 1024  # embeddings are padded to a multiple of a power of two


def different_ids_reason(target: Any, draft: Any, tokenizer: Any = None, draft_tokenizer: Any = None) -> str | None:
    """Why the draft's ids can't be the target's, or `None`.

    Args:
        target: The target model.
        draft: The draft model.
        tokenizer: The target's tokenizer, if known.
        draft_tokenizer: The draft's tokenizer, if known.
    """
    if tokenizer is not None and draft_tokenizer is not None:
        ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        small, large = sorted((ours, theirs), key=len)
        changed = [token for token, index in small.items() if large.get(token, index) != index]
        missing = sum(token not in large for token in small)
        if len(changed) + missing <= len(small) // 100:
            return None
        return f"the draft's tokenizer gives {len(changed) + missing} of {len(small)} tokens another id"
    size, draft_size = (compat.text_config(model).vocab_size for model in (target, draft))
    if abs(size - draft_size) > max(PADDING, size // 50):
        return f"the draft has {draft_size} token ids and the target {size}, so their tokenizers differ"
    return None
