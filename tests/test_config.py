"""`SpecConfig`: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from hf_specdec import (
    IncompatibleDraftError,
    PromptLookup,
    SpecConfig,
    SpecDecError,
    UnsupportedCacheError,
    UnsupportedModelError,
)


def test_everything_is_optional_and_keyword_only() -> None:
    config = SpecConfig()
    assert len(fields(config)) <= 10
    assert all(getattr(config, name) is None for name in ("drafter", "draft_model", "num_draft_tokens", "seed"))
    assert (config.draft_length, config.verification, config.strict) == ("adaptive", "auto", False)
    assert config.compile is False
    with pytest.raises(TypeError):
        SpecConfig("prompt_lookup")  # type: ignore[call-arg]


def test_it_is_frozen_comparable_and_copies() -> None:
    config = SpecConfig(num_draft_tokens=3, seed=1)
    with pytest.raises(FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
    assert config == SpecConfig(num_draft_tokens=3, seed=1)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_length": "auto"}, "`draft_length` must be one of .*'adaptive', 'fixed'.*, got 'auto'"),
        ({"verification": "lossy"}, "`verification` must be one of .*'coupled'.*, got 'lossy'"),
        ({"num_draft_tokens": -1}, "`num_draft_tokens` must be an integer from 0 to 128 or None, got -1"),
        ({"num_draft_tokens": 129}, "from 0 to 128 or None, got 129"),
        ({"num_draft_tokens": 2.0}, "from 0 to 128 or None, got 2.0"),
        ({"num_draft_tokens": True}, "from 0 to 128 or None, got True"),
        ({"num_draft_tokens": "5"}, "from 0 to 128 or None, got '5'"),
        ({"seed": 1.5}, "`seed` must be an integer or None, got 1.5"),
        ({"seed": False}, "`seed` must be an integer or None, got False"),
        ({"seed": (1, None)}, r"`seed` must be an integer or None, got \(1, None\). A tuple gives each row its own"),
        ({"seed": ()}, r"got \(\)"),
        ({"seed": (1, 2), "verification": "block"}, "needs `verification='coupled'` or 'auto', got 'block'"),
        ({"compile": 1}, "`compile` must be True or False, got 1"),
        ({"on_step": 3}, "`on_step` must be a callable taking a StepEvent, got 3"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        SpecConfig(**given)
    with pytest.raises(SpecDecError, match=message):
        replace(SpecConfig(), **given)


@pytest.mark.parametrize("number", [0, 1, 128, None])
@pytest.mark.parametrize("seed", [0, -3, 2**70, None, (1, 2)])
def test_right_values_are_taken(number: int | None, seed: Any) -> None:
    config = SpecConfig(num_draft_tokens=number, seed=seed, on_step=print)
    assert (config.num_draft_tokens, config.seed) == (number, seed)


@pytest.mark.parametrize(
    ("length", "number", "most"), [("adaptive", None, 16), ("fixed", None, 5), ("adaptive", 3, 3), ("fixed", 0, 0)]
)
def test_the_most_that_is_drafted(length: str, number: int | None, most: int) -> None:
    assert SpecConfig(draft_length=length, num_draft_tokens=number).max_draft_tokens == most


def test_arguments_of_generate() -> None:
    lookup, config = PromptLookup(), SpecConfig(num_draft_tokens=3)
    assert SpecConfig.from_argument(None) is None
    assert SpecConfig.from_argument(False, num_draft_tokens=3) is None
    assert SpecConfig.from_argument(True) == SpecConfig()
    assert SpecConfig.from_argument("hybrid") == SpecConfig(drafter="hybrid")
    assert SpecConfig.from_argument(lookup) == SpecConfig(drafter=lookup)
    assert SpecConfig.from_argument(config) is config
    assert SpecConfig.from_argument(config, draft_model=None) is config
    assert SpecConfig.from_argument(config, draft_model="x") == SpecConfig(num_draft_tokens=3, draft_model="x")
    with pytest.raises(SpecDecError, match="num_draft_tokens"):
        SpecConfig.from_argument(True, num_draft_tokens=-1)


@pytest.mark.parametrize("argument", [1, 0, 2.5, [], {}, object(), PromptLookup])
def test_other_arguments_are_refused(argument: Any) -> None:
    with pytest.raises(SpecDecError, match="`speculative` must be True, False, a drafter's name"):
        SpecConfig.from_argument(argument)


def test_errors_are_value_errors_of_one_family() -> None:
    for kind in (IncompatibleDraftError, UnsupportedCacheError, UnsupportedModelError):
        assert issubclass(kind, SpecDecError)
    assert issubclass(SpecDecError, ValueError)
