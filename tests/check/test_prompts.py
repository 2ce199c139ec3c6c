"""Reading a user's prompts: every form, what is no prompt, and which are chosen."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec import SpecDecError
from hf_specdec.check.prompts import BadRecord, Reading, choose_prompts, read_prompts
from hf_specdec.tools.loading import LoadedModel
from hf_specdec.tools.suites import BenchPrompt, Suite

from ..tools.tiny_chat import byte_tokenizer


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Two?"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}]


def texts(reading: Reading) -> list[Any]:
    return [prompt.text for prompt in reading.suite.prompts]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_json_lines_of_all_kinds(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "id": 7, "category": "x"}, {"turns": ["two", "later"]}, {"messages": ANSWERED}, {"prompt": CHAT},
    ]  # fmt: skip
    found = read_prompts(write(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, lines))))
    assert texts(found) == ["one", "two", CHAT, CHAT]
    assert [prompt.id for prompt in found.suite.prompts] == ["7", "line 2", "line 3", "line 4"]
    assert [prompt.category for prompt in found.suite.prompts] == ["x", "own", "own", "own"]
    assert (found.form, found.bad) == ("JSON lines", ())


def test_bad_records_are_named_by_line_and_left_out(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "good"}', '{"prompt": "cut off', "", '["a"]', '{"text": "b"}', '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "assistant", "content": "an answer alone"}]}', '{"prompt": "a", "category": "all"}',
        "[" * 3000, '{"prompt": "good too", "id": null}',
    ]  # fmt: skip
    found = read_prompts(write(tmp_path, "mine.jsonl", "\n".join(lines)))
    assert texts(found) == ["good", "good too"]
    assert [bad.line for bad in found.bad] == [2, 4, 5, 6, 7, 8, 9]
    assert "isn't JSON" in found.bad[0].reason
    assert str(found.bad[1]).startswith("line 4: it must be a JSON object")
    assert "no prompt" in found.bad[2].reason


def test_one_json_array(tmp_path: Path) -> None:
    found = read_prompts(
        write(tmp_path, "mine.json", json.dumps([{"prompt": "a"}, 3, {"prompt": "b"}, "c"], indent=1))
    )
    assert texts(found) == ["a", "b", "c"]
    assert [bad.line for bad in found.bad] == [2]


def test_text(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, "mine.txt", "\ufeffone\n\n {two} \n"))
    assert texts(found) == ["one", "{two}"]
    assert found.form == "text"


def test_table(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.csv", 'id,question,category\n1,"a, ""b""\nc",x\n2,,x\n3,d,\n')
    found = read_prompts(path, "question")
    assert texts(found) == ['a, "b"\nc', "d"]
    assert [(prompt.id, prompt.category) for prompt in found.suite.prompts] == [("1", "x"), ("3", "own")]
    assert [bad.line for bad in found.bad] == [4]
    assert texts(read_prompts(write(tmp_path, "one.csv", "anything\nx\n"))) == ["x"]
    assert texts(read_prompts(write(tmp_path, "tabs.tsv", "a\tprompt\n1\tx, y\n"))) == ["x, y"]


@pytest.mark.parametrize(
    ("column", "message"), [(None, "--column. It has: a, b"), ("c", "no column 'c'. It has: a, b")]
)
def test_table_without_such_a_column(tmp_path: Path, column: str | None, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        read_prompts(write(tmp_path, "mine.csv", "a,b\n1,2\n"), column)


def test_a_field_of_json(tmp_path: Path) -> None:
    lines = [{"question": "a", "answer": "b"}, {"question": ANSWERED}, {"other": "c"}]
    found = read_prompts(write(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, lines))), "question")
    assert texts(found) == ["a", CHAT]
    assert found.bad == (BadRecord(3, "has no 'question'; it has other"),)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"messages": [ANSWERED, None], "question": ["a", "b"], "category": ["x", None]})
    parquet.write_table(table, tmp_path / "mine.parquet")
    assert texts(read_prompts(str(tmp_path / "mine.parquet"), "question")) == ["a", "b"]
    found = read_prompts(str(tmp_path / "mine.parquet"))
    assert texts(found) == [CHAT]
    assert [bad.line for bad in found.bad] == [2]
    with pytest.raises(SpecDecError, match="isn't a Parquet file"):
        read_prompts(write(tmp_path, "broken.parquet", "PAR1 and nothing else"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecDecError, match="pip install pyarrow"):
        read_prompts(write(tmp_path, "mine.parquet", "PAR1"))


@pytest.mark.parametrize(
    ("data", "column", "expected"),
    [
        ("one\ntwo\n", None, ["one", "two"]),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', None, ["a", "b"]),
        ('[{"prompt": "a"}]', None, ["a"]),
        ("id,q\n1,a\n", "q", ["a"]),
    ],
)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, data: str, column: str | None, expected: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data.encode())))
    found = read_prompts("-", column)
    assert texts(found) == expected
    assert found.suite.name == "standard input"


@pytest.mark.parametrize(
    ("text", "message"), [("", "0 records"), ("{}\n[1]", "2 records, none of them usable. The first, line 1")]
)
def test_nothing_usable(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        read_prompts(write(tmp_path, "mine.jsonl", text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="can't be read: No such file"):
        read_prompts(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecDecError, match="isn't UTF-8 text"):
        read_prompts(str(tmp_path / "binary.txt"))


def test_the_same_id_twice(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, "mine.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}'))
    assert [prompt.id for prompt in found.suite.prompts] == ["1", "1 (line 2)"]


def choose(prompts: list[BenchPrompt], most: int, longest: int = 1000, *, chat: bool = True) -> Reading:
    loaded = LoadedModel("tiny", SimpleNamespace(device="cpu"), byte_tokenizer(chat=chat))
    return choose_prompts(loaded, Reading(Suite("mine", "", tuple(prompts)), "text"), most, longest)


def test_chosen_from_all_categories_and_all_over_the_file() -> None:
    prompts = [BenchPrompt(f"a{n}", "a", "text") for n in range(100)] + [BenchPrompt("b0", "b", "text")]
    ids = [prompt.id for prompt in choose(prompts, 5).suite.prompts]
    assert ids[-1] == "b0"
    assert len(ids) == 5
    places = [int(name[1:]) for name in ids[:-1]]
    assert places == sorted(places)
    assert places[-1] >= 60  # not the first of the file alone


def test_long_prompts_are_counted_and_others_take_their_place() -> None:
    prompts = [BenchPrompt(f"a{n}", "a", "x" * (100 if n % 2 else 5)) for n in range(8)]
    found = choose(prompts, 4, longest=50)
    assert [prompt.id for prompt in found.suite.prompts] == ["a0", "a2", "a4", "a6"]
    assert found.too_long > 0
    with pytest.raises(SpecDecError, match="--max-prompt-tokens"):
        choose(prompts, 4, longest=3)


def test_a_chat_for_a_model_without_template() -> None:
    prompts = [BenchPrompt("1", "a", CHAT, source="line 9"), BenchPrompt("2", "a", "text")]
    found = choose(prompts, 2, chat=False)
    assert [prompt.id for prompt in found.suite.prompts] == ["2"]
    assert found.bad[0].line == 9
    assert "no chat template" in found.bad[0].reason
