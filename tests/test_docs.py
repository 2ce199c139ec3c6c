"""The documentation is code: its Python blocks run, its names exist, its translation has the same examples."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specdec


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block: its language, its code, the line it starts at, and why it isn't run (or `None`)."""

    language: str
    code: str
    line: int
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    """Yield every fenced block of a page, its indentation removed."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
        yield Block(match["language"], code, text.count("\n", 0, match.start("code")) + 1, match["reason"])


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("python", "py")]


@pytest.fixture
def hub_names_are_local(monkeypatch: pytest.MonkeyPatch, smollm2_path: str) -> None:
    """Let the pages name real Hub models: those ids give a tiny random model with SmolLM2's tokenizer.

    Folders are loaded as they are, so the tutorial runs the real SmolLM2.
    """
    load_model, load_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained

    def model_from(name: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.isdir(name):
            return load_model(name, *args, **kwargs)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(load_tokenizer(smollm2_path)),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
        return LlamaForCausalLM(config).eval()

    def tokenizer_from(name: Any, *args: Any, **kwargs: Any) -> Any:
        return load_tokenizer(name if os.path.isdir(name) else smollm2_path, *args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model_from)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer_from)
    monkeypatch.setattr("hf_specdec.tools.chat_model.fetch_chat_model", lambda *args, **kwargs: Path(smollm2_path))


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(
    page: Path, hub_names_are_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a page's blocks top to bottom in one namespace, as a reader would, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in python_blocks(page):
            if block.reason is None:
                # Empty lines in front, so that a traceback shows the page's own line numbers.
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
    finally:
        hf_specdec.disable()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_skipped_blocks_say_why(page: Path) -> None:
    for block in blocks(page):
        assert block.reason is None or len(block.reason) > 10, f"{page}:{block.line}: the reason says nothing"


def test_fences_are_found() -> None:
    """The pattern sees every fence: an unseen block would be an untested one."""
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
        inner = sum(len(re.findall(r"^ *```", block.code, re.MULTILINE)) for block in blocks(page))
        assert len(fences) == 2 * len(list(blocks(page))) + inner, page


def test_translation_has_the_same_code() -> None:
    english, chinese = ([block[:2] for block in blocks(ROOT / name)] for name in ("README.md", "README.zh.md"))
    assert english == chinese


def test_translation_has_the_same_structure() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for pattern in (r"^## ", r"^\|", r"^- ", r"^<!-- numbers"):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (english, chinese)]
        assert counts[0] == counts[1], f"lines that match {pattern!r}"


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in hf_specdec.__all__ if not re.search(rf"\bhf_specdec\.{name}\b", page)]
    assert not missing


def test_every_documented_name_is_public() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: hf_specdec\.(\w+)$", page, re.MULTILINE)) <= set(hf_specdec.__all__)


def test_every_statistic_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "statistics.md").read_text(encoding="utf-8")
    missing = [name for name in hf_specdec.SpecStats().to_dict() if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "CONTRIBUTING.md"])
def test_links_to_files_exist(name: str) -> None:
    """mkdocs checks the links inside docs/; these pages lie outside."""
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
