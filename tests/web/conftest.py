"""A tiny family: a target and a draft that often agree, with a tokenizer of bytes, as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.web.models import Family, own_family
from hf_specdec.web.recording import record
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison

from ..tiny import exact_pair
from ..tools.tiny_chat import byte_tokenizer


PROMPT = "abcabcabcabc, and again: abcabc"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target's and the draft's."""
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    pair = exact_pair(
        layers=2, noise=0.3, vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, bos_token_id=None
    )
    found = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    for model, folder in zip(pair, found, strict=True):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


@pytest.fixture
def new_family(folders: tuple[Path, Path]) -> Callable[[], Family]:
    """Makes families that nothing has run on."""
    return lambda: own_family(str(folders[0]), str(folders[1]), "float32")


@pytest.fixture(scope="session")
def family(folders: tuple[Path, Path]) -> Family:
    """One that all tests share."""
    return own_family(str(folders[0]), str(folders[1]), "float32")


def settings_for(family: Family, limits: Limits = Limits(), **given: Any) -> RunSettings:  # noqa: B008
    return RunSettings.checked(limits, {"own": family}, **{"prompt": PROMPT, "max_new_tokens": 24} | given)


def recorded(family: Family, limits: Limits = Limits(), **given: Any) -> Comparison:  # noqa: B008
    """A run, to its end."""
    *_, (stage, found) = record(family, settings_for(family, limits, **given), limits)
    assert stage == "done"
    return found
