"""A round copies from the device to the host once; every other read would wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_specdec
from hf_specdec import Draft, Drafter
from hf_specdec.decoding import Generation
from hf_specdec.drafters import draft_model

from .plain import make_drafter, options, plain_texts
from .tiny import exact_pair, ragged_prompts, tiny_model


pytestmark = pytest.mark.usefixtures("one_thread")


# operators whose result, or the shape of it, has to be known on the host
WAITING_OPERATORS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.is_nonzero",
    "aten.equal",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.bincount",
    "aten.allclose",
)
# methods that read a tensor's data on the host; `tolist` of a CPU tensor calls no operator at all
READING_METHODS = (
    "tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
)  # fmt: skip
# our own code; transformers' and torch's forwards are not ours to change
OURS = ("hf_specdec",)


class Counter(TorchDispatchMode):
    """Counts the operators that wait for the device, with the place in our code that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).rsplit(".", 1)[0]
        if name in WAITING_OPERATORS or self._masks(name, args):
            self.note(name)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _masks(name: str, args: Any) -> bool:
        """Indexing with a boolean mask calls `nonzero` inside."""
        return name == "aten.index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )

    def note(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(OURS):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}" if frame else "elsewhere"
        self.found.append(f"{what} in {place}")


@contextmanager
def counting() -> Iterator[list[str]]:
    """Everything that reads from the device while the context is open, one entry a read."""
    counter = Counter()
    inside = False

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # one read, however it is made
                return original(self, *args, **kwargs)
            counter.note(name)
            inside, before = True, len(counter.found)
            try:
                return original(self, *args, **kwargs)
            finally:
                inside = False
                del counter.found[before:]

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in READING_METHODS:
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        with counter:
            yield counter.found


class Copyist(Drafter):
    """Drafts the known text, every third token of it wrong, without a look at any tensor."""

    name = "copyist"

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def propose(self, rows: Any, length: int) -> Draft:
        places = [(row, rows.num_new(row)) for row in rows.live]
        return Draft.from_lists(
            [
                [(token + (place % 3 == 0)) % 97 for place, token in enumerate(self.texts[row])][at : at + length]
                for row, at in places
            ]
        )


def rounds_of(model: Any, prompts: dict[str, torch.Tensor], speculative: Any, **changes: Any) -> list[list[str]]:
    """Reads of every round of a generation."""
    rounds: list[list[str]] = []
    original = Generation._round

    def counted(self: Generation) -> None:
        with counting() as found:
            original(self)
        rounds.append(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "_round", counted)
        patch.setattr(
            draft_model, "HOST", "elsewhere"
        )  # on a CPU a draft's confidence is read too, which costs no wait
        hf_specdec.generate(model, **prompts, **options(**changes), speculative=speculative)
    assert hf_specdec.last_stats(model).fallback_reason is None
    return rounds


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ending": {"eos_token_id": [5, 6, 7, 8, 9, 10]},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "draft_model fixed", "hybrid", "copyist"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_copy_a_round(setting: str, rows: int, drafter: str) -> None:
    target, draft = exact_pair(layers=2, noise=0.3)
    prompts = ragged_prompts(rows)
    changes = SETTINGS[setting]
    copyist = drafter == "copyist"
    speculative = Copyist(plain_texts(target, prompts)) if copyist else make_drafter(drafter, [], draft)
    rounds = rounds_of(target, prompts, speculative, max_new_tokens=14, **changes)
    assert rounds
    for found in rounds:
        assert found == ["tolist in sampling.py:to_host"]
    if drafter == "draft_model fixed" and setting != "greedy, ending":
        assert hf_specdec.last_stats(target).num_draft_tokens > 0


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_copy_with_every_verification(rows: int, verification: str) -> None:
    target, draft = exact_pair(layers=2, noise=0.3)
    config = hf_specdec.SpecConfig(
        drafter="draft_model", draft_model=draft, draft_length="fixed", num_draft_tokens=4, verification=verification
    )
    for found in rounds_of(target, ragged_prompts(rows), config, do_sample=True):
        assert found == ["tolist in sampling.py:to_host"]
    assert hf_specdec.last_stats(target).num_draft_tokens > 0


@pytest.mark.parametrize(
    "option", [{"repetition_penalty": 1.3}, {"bad_words_ids": [[5], [6, 7]]}, {"min_new_tokens": 9, "eos_token_id": 3}]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_one_copy_of_our_own_with_processors(rows: int, option: dict[str, Any]) -> None:
    """Processors of Transformers may read on their own account; our code around them still reads once."""
    model = tiny_model()
    prompts = ragged_prompts(rows)
    for found in rounds_of(model, prompts, Copyist(plain_texts(model, prompts)), **option):
        ours = [each for each in found if "logits.py" not in each]
        assert ours == ["tolist in sampling.py:to_host"]


def test_output_records_need_no_copy() -> None:
    model = tiny_model()
    prompts = ragged_prompts(3)
    speculative = Copyist(plain_texts(model, prompts))
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for found in rounds_of(model, prompts, speculative, **wanted):
        assert found == ["tolist in sampling.py:to_host"]


class Impolite(Copyist):
    """A drafter that reads from the device, each time in another way."""

    def __init__(self, texts: list[list[int]], read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(texts)
        self.read = read

    def propose(self, rows: Any, length: int) -> Any:
        self.read(torch.ones(3))
        return super().propose(rows, length)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t[0].item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: float(t[0]),
        lambda t: int(t[0]),
        lambda t: bool((t > 0).all()),
        lambda t: (t > 0).nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.equal(t, t),
        lambda t: [bool(each) for each in t],
        lambda t: t.unique(),
        lambda t: [1, 2, 3][t[0].long()],
        lambda t: torch.arange(int(t[0])),
    ],
)
def test_the_counter_sees_every_kind_of_read(read: Callable[[torch.Tensor], Any]) -> None:
    """The negative control: a read more in the round is found."""
    model = tiny_model()
    prompts = ragged_prompts(1)
    config = hf_specdec.SpecConfig(drafter=Impolite(plain_texts(model, prompts), read), draft_length="fixed")
    rounds = rounds_of(model, prompts, config, max_new_tokens=12)
    assert all(len(found) > 1 for found in rounds[:-1])
