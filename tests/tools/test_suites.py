"""Prompts of the benchmark: the built-in ones and their licences, a user's file and its errors."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from hf_specdec import SpecDecError
from hf_specdec.tools import suites
from hf_specdec.tools.suites import BUILT_IN, CATEGORIES, built_in_suite, read_suite


# Suites that may be copied with their licence notice; other benchmark texts may not.
MAY_BE_SHIPPED = {
    "edit_eval": "MIT",
    "gsm8k": "MIT",
    "humaneval": "MIT",
    "mgsm_zh": "CC-BY-4.0",
    "vicuna_bench": "Apache-2.0",
}
FOLDER = Path(suites.__file__).parent


def test_shipped_prompts() -> None:
    lines = (FOLDER / "bench_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    notices = (FOLDER / "bench_prompts.LICENSES.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in lines]
    for record in records:
        assert record["license"] == MAY_BE_SHIPPED[record["suite"]]
        assert f"`{record['suite']}`" in notices
        assert record["source"].partition(" @ ")[2] in notices
    assert len({record["turns"][0] for record in records}) == len(records)


def test_built_in() -> None:
    suite = built_in_suite()
    assert suite.name == BUILT_IN
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(CATEGORIES, 24)
    assert set(suite.categories) == set(CATEGORIES)
    assert all(prompt.license and prompt.source for prompt in suite.prompts)
    assert suite.sha256 == hashlib.sha256((FOLDER / "bench_prompts.jsonl").read_bytes()).hexdigest()


def test_select() -> None:
    suite = built_in_suite().select(["math", "chat", "math"])
    assert suite.categories == ("math", "chat")
    assert len(suite.prompts) == 48
    assert built_in_suite().select(None).categories == built_in_suite().categories
    with pytest.raises(SpecDecError, match=r"category 'poetry' in built-in. Choose from chat, code"):
        built_in_suite().select(["chat", "poetry"])


def test_own_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "one\u2028line", "id": "a", "category": "x"}\n\n{"turns": ["two", "three"], "license": "MIT"}\n',
        encoding="utf-8",
    )
    suite = read_suite(path)
    assert suite.name == str(path)
    assert [(each.id, each.category, each.text) for each in suite.prompts] == [
        ("a", "x", "one\u2028line"),
        ("line 3", "own", "two"),
    ]
    assert suite.prompts[1].license == "MIT"


def test_own_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("\ufeffName three rivers.\n\n  {not json}  \n", encoding="utf-8")
    assert [(each.id, each.text) for each in read_suite(path).prompts] == [
        ("line 1", "Name three rivers."),
        ("line 3", "{not json}"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ('{"prompt": "a"}\n{"prompt"', "line 2 isn't JSON"),
        ('["a"]', "line 1 must be a JSON object with `prompt` or `turns`, got list"),
        ('{"text": "a"}', "line 1 has no prompt"),
        ('{"turns": []}', "line 1 has no prompt"),
        ('{"turns": [{"role": "user"}]}', "line 1 has no prompt"),
        ('{"prompt": "  "}', "line 1 has no prompt"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "have the id '1'"),
        ('{"prompt": "a", "category": "all"}', "name of the summary"),
    ],
)
def test_wrong_jsonl(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecDecError, match=message):
        read_suite(path)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="can't be read: No such file"):
        read_suite(tmp_path / "nothing.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecDecError, match="isn't UTF-8 text"):
        read_suite(tmp_path / "binary.txt")
