"""Settings and fixtures of all tests. Tiny models come from configs and seeds (`tests/tiny.py`), never from a hub."""

import os


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.engine import length


# beside another worker of pytest-xdist a second thread would only wait
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture
def enabled() -> Iterator[None]:
    """`hf_specdec.enable()` for the time of a test."""
    hf_specdec.enable()
    yield
    hf_specdec.disable()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No test depends on what another one learnt or drew."""
    torch.manual_seed(0)
    length._CONTROLLERS.clear()
    yield
    hf_specdec.disable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are a fifth faster without threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Folder of the real chat model, converted once a machine."""
    from hf_specdec.tools.chat_model import fetch_chat_model

    return str(fetch_chat_model())


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str) -> tuple[Any, Any]:
    """The real chat model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2_path)
