"""Offline jobs: what is read, what is written, and that a kill at any moment changes nothing of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec import SpecDecError
from hf_specdec.tools import offline, offline_worker
from hf_specdec.tools.offline import Launch, run_job
from hf_specdec.tools.offline_files import JobFiles, to_line
from hf_specdec.tools.offline_records import WINDOW, Batch, JobSettings, Record, batches, read_records

from .tiny_job import one_by_one, read, save_job_model, write_prompts


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_job_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 30)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "few.jsonl", 14)


ALONE = JobSettings("", max_new_tokens=12, batch_size=4, seed=3)


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[float, list[str]]:
    """The texts of `few`, each generated alone, by temperature."""
    few = write_prompts(tmp_path_factory.mktemp("few") / "few.jsonl", 14)
    return {
        temperature: one_by_one(dataclasses.replace(ALONE, model=model, temperature=temperature), few)
        for temperature in (0.0, 1.5)
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def run(settings: JobSettings, prompts: Path, out: Path, **options: Any) -> dict[str, Any]:
    summary = run_job(settings, prompts, out, **options)
    assert summary is not None
    return summary


class TestRecords:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("nonsense", "not a line of JSON"),
            ('{"prompt": "torn', "not a line of JSON"),
            ('{"prompt": "a", "id": NaN}', "not a line of JSON: NaN"),
            ("[" * 100_000, "not a line of JSON"),
            ('{"prompt": "a", "id": ' + "[" * 500 + "]" * 500 + "}", "nested deeper than 100 levels"),
            ('{"prompt": "a", "id": [1e999]}', "`id` can't be written as JSON"),
            (b'{"prompt": "\xff"}', "not a line of JSON: 'utf-8' codec"),
            ('"text"', "must be an object with `prompt` or `messages`, got a text"),
            ("{}", "needs either `prompt` or `messages`, got neither"),
            ('{"prompt": "a", "messages": [{"role": "user"}]}', "got both"),
            ('{"prompt": 3}', "`prompt` must be a text, got a number"),
            ('{"messages": "hi"}', "`messages` must be a list of objects with `role`"),
            ('{"messages": []}', "`messages` must be"),
            ('{"messages": [{"content": "hi"}]}', "`messages` must be"),
            ('{"prompt": "a", "max_new_tokens": 0}', "`max_new_tokens` must be an integer from 1, got 0"),
            ('{"prompt": "a", "max_new_tokens": true}', "got True"),
            ('{"prompt": "a", "seed": "1"}', "`seed` must be an integer, got '1'"),
        ],
        ids=range(17),
    )
    def test_bad_records_are_named(self, line: str | bytes, message: str, tmp_path: Path) -> None:
        file = tmp_path / "in.jsonl"
        data = line if isinstance(line, bytes) else line.encode()
        file.write_bytes(b'\xef\xbb\xbf{"prompt": "good"}\n\n' + data + b'\n{"prompt": "good", "other": {}}')
        first, bad, last = read_records(file)
        assert message in (bad.error or "")
        assert (bad.index, bad.line) == (1, 3)
        assert (first.prompt, first.error) == (last.prompt, last.error) == ("good", None)
        assert last.index == 2

    def test_fields(self, tmp_path: Path) -> None:
        file = tmp_path / "in.jsonl"
        messages = [{"role": "user", "content": "a\u2028b"}]
        file.write_text(
            json.dumps({"messages": messages, "id": 7, "max_new_tokens": 3, "seed": -1}, ensure_ascii=False)
        )
        assert list(read_records(file)) == [Record(0, 1, 7, messages, 3, -1)]

    def test_nesting(self, tmp_path: Path) -> None:
        file = tmp_path / "in.jsonl"
        file.write_text('{"prompt": "[[[", "id": ' + "[" * 99 + "]" * 99 + "}\n")
        (record,) = read_records(file)
        assert record.error is None
        to_line({"batch": 0, "records": [[record.to_dict(), {}]]})

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(SpecDecError, match="can't be read: No such file"):
            list(read_records(tmp_path / "nothing"))


class TestBatches:
    @pytest.mark.parametrize("size", [1, 3, 8])
    @pytest.mark.parametrize("count", [0, 1, 8, 1000])
    def test_every_record_is_in_one_batch_near_its_place(self, size: int, count: int) -> None:
        source = random.Random(0)
        records = [Record(index, index, prompt="x" * source.randrange(500)) for index in range(count)]
        cut = list(batches(records, size))
        assert [batch.number for batch in cut] == list(range(-(-count // size)))
        assert sorted(record.index for batch in cut for record in batch.records) == list(range(count))
        for batch in cut:
            window = batch.number // WINDOW
            assert {record.index // (WINDOW * size) for record in batch.records} == {window}

    def test_similar_lengths_stand_together(self) -> None:
        source = random.Random(0)
        records = [Record(index, index, prompt="x" * source.randrange(500)) for index in range(WINDOW * 8)]
        padding = sum(
            len(batch.records[0].prompt) - record.size for batch in batches(records, 8) for record in batch.records
        )
        assert padding < 0.05 * sum(record.size for record in records)

    def test_records_that_may_generate_more_come_first(self) -> None:
        records = [Record(index, index, prompt="x", max_new_tokens=index % 2 + 1) for index in range(4)]
        assert [[record.index for record in batch.records] for batch in batches(records, 2)] == [[1, 3], [0, 2]]


class TestTexts:
    @pytest.mark.parametrize(
        ("drafting", "temperature"), [("chosen", 0.0), ("chosen", 1.5), ("draft", 1.5), ("off", 0.0)]
    )
    def test_they_are_those_of_one_prompt_at_a_time(
        self, model: str, few: Path, out: Path, alone: dict[float, list[str]], drafting: str, temperature: float
    ) -> None:
        draft = model if drafting == "draft" else None
        own = dataclasses.replace(ALONE, model=model, draft=draft, off=drafting == "off", temperature=temperature)
        summary = run(own, few, out)
        records, stats = read(out), read(Path(summary["stats"]))
        texts = [record["text"] for record in records]
        assert texts == alone[temperature]
        assert len(set(texts)) == (14 if temperature else 12)  # two prompts come twice
        assert [record["index"] for record in records] == [row["index"] for row in stats] == list(range(14))
        assert [record["id"] for record in records] == [row["id"] for row in stats] == [f"r{i}" for i in range(14)]
        assert all((record["finish_reason"] == "length") == (record["num_tokens"] == 12) for record in records)
        assert summary["tokens"] == sum(row["num_emitted_tokens"] for row in stats)
        assert summary["records"] == summary["generated_records"] == 14
        assert (summary["errors"], {row["fallback_reason"] for row in stats}) == (0, {None})
        if drafting != "off":
            assert all(row["mean_acceptance_length"] >= 1 and row["num_spec_steps"] > 0 for row in stats)
            assert 0 < summary["verify_share"] < 1
        assert {row["drafter"] for row in stats} == {
            {"chosen": "prompt_lookup", "draft": "hybrid"}.get(drafting, "off")
        }
        assert sorted(path.name for path in out.parent.iterdir()) == [
            "few.jsonl", "out.jsonl", "out.jsonl.job.json", "out.jsonl.stats.jsonl",
        ]  # fmt: skip

    def test_plain_samples_are_repeated_when_a_job_goes_on(
        self, model: str, few: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = JobSettings(model, off=True, temperature=1.5, max_new_tokens=8, batch_size=4)
        run(settings, few, tmp_path / "whole.jsonl")
        real = offline_worker.Worker.run

        def dies(self: Any, batch: Batch) -> dict[str, Any]:
            if batch.number == 2:
                raise InterruptedError
            return real(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(offline_worker.Worker, "run", dies)
            with pytest.raises(InterruptedError):
                run(settings, few, out)
        assert run(settings, few, out)["generated_records"] == 6
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_seeds(self, model: str, tmp_path: Path) -> None:
        prompts = tmp_path / "in.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": "abc", **own}) + "\n" for own in ({}, {"seed": 5}, {"seed": 5}))
        )
        texts = []
        for seed in (1, 1, 2):
            settings = JobSettings(model, temperature=2.0, seed=seed, max_new_tokens=16)
            run(settings, prompts, tmp_path / "out.jsonl", restart=True)
            texts.append([record["text"] for record in read(tmp_path / "out.jsonl")])
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[2][0]
        assert texts[0][1] == texts[0][2] == texts[2][1] != texts[0][0]

    def test_stop_and_length(self, model: str, prompts: Path, out: Path) -> None:
        run(JobSettings(model, temperature=3.0, max_new_tokens=40), prompts, out)
        reasons = {record["finish_reason"] for record in read(out)}
        assert reasons == {"stop", "length"}
        assert all("<|end|>" not in record["text"] for record in read(out))

    def test_chat_and_lengths_of_records(self, model: str, tmp_path: Path, out: Path) -> None:
        prompts, turn = tmp_path / "in.jsonl", {"role": "user", "content": "abc"}
        records = [{"messages": [turn]}, {"prompt": "abc"}, {"messages": [turn, turn], "max_new_tokens": 2}]
        prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
        run(JobSettings(model, max_new_tokens=9, chat=False), prompts, out)
        chat, text, short = read(out)
        assert [record["num_tokens"] for record in (chat, text, short)] == [5, 9, 2]
        assert chat["text"] != text["text"]
        run(JobSettings(model, max_new_tokens=9), prompts, out, restart=True)
        assert read(out)[1]["text"] == chat["text"]

    @pytest.mark.parametrize("off", [False, True])
    @pytest.mark.parametrize(
        "saved",
        [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"penalty_alpha": 0.6, "top_k": 4}],
        ids=lambda saved: next(iter(saved)),
    )
    def test_one_text_whatever_the_model_has_saved(
        self, tmp_path: Path, few: Path, out: Path, saved: dict[str, Any], off: bool
    ) -> None:
        model, config = save_job_model(tmp_path / "model"), tmp_path / "model" / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | saved))
        temperature = 1.0 if "do_sample" in saved else 0.0
        summary = run(JobSettings(model, off=off, temperature=temperature, max_new_tokens=4), few, out)
        assert (summary["records"], summary["errors"]) == (14, 0)
        assert {row["fallback_reason"] for row in read(Path(summary["stats"]))} == {None}


class TestBadRecords:
    def test_they_are_skipped_and_named(self, model: str, tmp_path: Path, out: Path) -> None:
        prompts = tmp_path / "in.jsonl"
        lines = ['{"prompt": "abc"}', "nonsense", '{"prompt": ""}', json.dumps({"prompt": "x" * 200, "id": "long"})]
        lines += [json.dumps({"prompt": "x" * 150}), '{"prompt": "\\ud800"}', '{"prompt": "abc", "id": "\\ud800"}']
        prompts.write_text("\n".join(lines))
        told: list[str] = []
        summary = run(JobSettings(model, max_new_tokens=12, chat=False, batch_size=4), prompts, out, warn=told.append)
        good, nonsense, empty, long, nearly, surrogate, named = records = read(out)
        assert [record["finish_reason"] for record in records] == [
            "length", "error", "error", "error", "length", "error", "length",
        ]  # fmt: skip
        assert nonsense["error"].startswith("line 2: not a line of JSON")
        assert empty["error"] == "line 3: The prompt has no tokens. Give it at least one character."
        assert long["error"] == "line 4: too long: the prompt has 200 tokens, the model room for 160 with the answer"
        assert (long["id"], long["text"], long["num_tokens"]) == ("long", None, 0)
        assert nearly["num_tokens"] == 10  # all that the model has room for
        assert surrogate["error"].startswith("line 6: ")
        assert named["id"] == "\ud800"
        assert good["error"] is None
        assert good["text"] == named["text"]
        assert (summary["records"], summary["errors"]) == (7, 4)
        assert sorted(line[:19] for line in told) == [f"record {index} is skipped" for index in (1, 2, 3, 5)]

    def test_messages_need_a_template(self, tmp_path: Path, out: Path) -> None:
        model, prompts = save_job_model(tmp_path / "model", chat=False), tmp_path / "in.jsonl"
        prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "a"}\n')
        run(JobSettings(model, max_new_tokens=4), prompts, out)
        assert "no chat template. Give it a text" in read(out)[0]["error"]
        assert read(out)[1]["error"] is None
        with pytest.raises(SpecDecError, match="no chat template. Use --no-chat"):
            run(JobSettings(model, chat=True), prompts, out, restart=True)

    def test_less_memory_makes_smaller_batches(
        self, model: str, prompts: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = JobSettings(model, max_new_tokens=8, batch_size=8)
        run(settings, prompts, tmp_path / "whole.jsonl")
        real, sizes = offline_worker.hf_specdec.generate, []

        def scarce(model: Any, **options: Any) -> Any:
            rows, length = options["input_ids"].shape
            sizes.append(rows)
            if rows > 3 or length > 35:
                raise torch.OutOfMemoryError
            return real(model, **options)

        monkeypatch.setattr(offline_worker.hf_specdec, "generate", scarce)
        run(settings, prompts, out)
        whole, split = read(tmp_path / "whole.jsonl"), read(out)
        failed = [record for record in split if record["error"]]
        assert {record["error"].partition(": ")[2] for record in failed} == {"out of memory"}
        assert [record for record in split if not record["error"]] == [
            record for record, other in zip(whole, split, strict=True) if not other["error"]
        ]
        assert len(failed) == 6
        assert {1, 2, 8} <= set(sizes)


class Stub:
    """A worker without a model. It notes what it was given, and dies at a batch if it is told to."""

    seen: list[int]
    dies_at: int | None

    def __init__(self, settings: JobSettings, device: str | None = None) -> None:
        self.settings = settings

    def run(self, batch: Batch) -> dict[str, Any]:
        if len(Stub.seen) == Stub.dies_at:
            raise InterruptedError
        Stub.seen.append(batch.number)
        pairs = [[self._record(record), self._row(record)] for record in batch.records]
        return {"batch": batch.number, "records": pairs}

    def _record(self, record: Record) -> dict[str, Any]:
        text = f"{self.settings.seed}: {record.prompt}"
        return {"index": record.index, "text": text, "num_tokens": 1, "error": None}

    def _row(self, record: Record) -> dict[str, Any]:
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "draft_share", "verify_share")
        return {"index": record.index, "batch_seconds": 1.0, "batch_rows": 1} | dict.fromkeys(names, 1)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr(offline_worker, "Worker", Stub)
    Stub.seen, Stub.dies_at = [], None
    return Stub


SETTINGS = JobSettings("model", batch_size=4)


def interrupted(stub: type[Stub], prompts: Path, out: Path, after: int) -> Path:
    """Run a job up to some batch; returns its part file."""
    stub.dies_at = len(stub.seen) + after
    with pytest.raises(InterruptedError):
        run(SETTINGS, prompts, out)
    stub.dies_at = None
    assert not out.exists()
    (part,) = [path for path in (out.parent / "out.jsonl.parts").glob("part-*") if path.stat().st_size]
    return part


class TestResuming:
    def test_from_any_byte(self, stub: type[Stub], prompts: Path, out: Path, tmp_path: Path) -> None:
        run(SETTINGS, prompts, tmp_path / "whole.jsonl")
        part = interrupted(stub, prompts, out, after=7)
        data = part.read_bytes()
        ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
        assert len(ends) == 7
        for cut in sorted({0, 1, *ends, *(end - 1 for end in ends), *range(0, len(data), 307)}):
            for path in (out, *out.parent.glob("out.jsonl.stats*"), *part.parent.glob("part-*")):
                path.unlink(missing_ok=True)
            part.parent.mkdir(exist_ok=True)
            out.with_name("out.jsonl.job.json").write_text(
                json.dumps({"settings": read_settings(tmp_path / "whole.jsonl"), "summary": None})
            )
            part.write_bytes(data[:cut])
            stub.seen.clear()
            kept = sum(end <= cut for end in ends)
            summary = run(SETTINGS, prompts, out)
            assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
            assert stub.seen == list(range(kept, 8))
            assert summary["generated_records"] == 30 - 4 * kept

    def test_again_and_again(self, stub: type[Stub], prompts: Path, out: Path, tmp_path: Path) -> None:
        run(SETTINGS, prompts, tmp_path / "whole.jsonl")
        stub.seen.clear()
        for _ in range(3):
            stub.dies_at = len(stub.seen) + 2
            with pytest.raises(InterruptedError):
                run(SETTINGS, prompts, out)
        stub.dies_at = None
        assert run(SETTINGS, prompts, out)["generated_records"] == 6
        assert stub.seen == list(range(8))
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_batches_that_two_wrote_count_once(
        self, stub: type[Stub], prompts: Path, out: Path, tmp_path: Path
    ) -> None:
        run(SETTINGS, prompts, tmp_path / "whole.jsonl")
        part = interrupted(stub, prompts, out, after=4)
        (part.parent / "part-00009-0twice00.jsonl").write_bytes(part.read_bytes())
        assert run(SETTINGS, prompts, out)["generated_records"] == 14
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_lines_that_a_crash_damaged_are_done_again(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        part = interrupted(stub, prompts, out, after=4)
        lines = part.read_bytes().splitlines(keepends=True)
        lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
        part.write_bytes(b"".join(lines) + b"\0" * 50)
        stub.seen.clear()
        run(SETTINGS, prompts, out)
        assert stub.seen == [1, 4, 5, 6, 7]

    @pytest.mark.parametrize("behind", [False, True])
    def test_killed_while_the_output_moves(
        self, stub: type[Stub], prompts: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
    ) -> None:
        run(SETTINGS, prompts, tmp_path / "whole.jsonl")
        stub.seen.clear()

        def die(*arguments: Any) -> None:
            if not behind:
                next(arguments[0])  # one record is written
            raise InterruptedError

        with monkeypatch.context() as patch:
            patch.setattr(*((JobFiles, "complete") if behind else (offline, "summarise")), die)
            with pytest.raises(InterruptedError):
                run(SETTINGS, prompts, out)
        assert out.exists() == behind
        assert run(SETTINGS, prompts, out)["generated_records"] == 0
        assert stub.seen == list(range(8))
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert not out.with_name("out.jsonl.parts").exists()

    def test_a_complete_job_stays(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        first = run(SETTINGS, prompts, out)
        stub.seen.clear()
        assert run(SETTINGS, prompts, out) == first | {"generated_records": 0}
        assert stub.seen == []
        left = out.with_name("out.jsonl.parts")
        left.mkdir()
        (left / "part-00000-00000000.jsonl").write_text("what a kill behind the output's moving leaves")
        assert run(SETTINGS, prompts, out) == first | {"generated_records": 0}
        assert not left.exists()
        out.unlink()
        assert run(SETTINGS, prompts, out)["generated_records"] == 30
        assert len(read(out)) == 30

    @pytest.mark.parametrize("complete", [False, True])
    def test_other_settings_are_refused(self, stub: type[Stub], prompts: Path, out: Path, complete: bool) -> None:
        if complete:
            run(SETTINGS, prompts, out)
        else:
            interrupted(stub, prompts, out, after=1)
        other = dataclasses.replace(SETTINGS, seed=1, batch_size=5)
        with pytest.raises(SpecDecError, match="seed was 0 and is 1, batch_size was 4 and is 5.*--restart"):
            run(other, prompts, out)
        with prompts.open("a") as file:
            file.write('{"prompt": "new"}\n')
        with pytest.raises(SpecDecError, match="prompts_sha256 was"):
            run(SETTINGS, prompts, out)
        assert run(other, prompts, out, restart=True)["generated_records"] == 31
        assert {record["text"][0] for record in read(out)} == {"1"}

    def test_settings_may_change_while_nothing_is_done(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        stub.dies_at = 0
        with pytest.raises(InterruptedError):
            run(SETTINGS, prompts, out)
        stub.dies_at = None
        run(dataclasses.replace(SETTINGS, seed=1), prompts, out)
        assert {record["text"][0] for record in read(out)} == {"1"}

    def test_foreign_files_are_left_alone(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        out.write_text("mine")
        with pytest.raises(SpecDecError, match="exists and is no job's"):
            run(SETTINGS, prompts, out)
        assert out.read_text() == "mine"
        with pytest.raises(SpecDecError, match="the same file"):
            run(SETTINGS, prompts, prompts, restart=True)
        for end in (".stats.jsonl", ".job.json"):
            named = prompts.rename(prompts.with_name("x" + end))
            with pytest.raises(SpecDecError, match="the same file"):
                run(SETTINGS, named, prompts.with_name("x"), restart=True)
            named.rename(prompts)
        run(SETTINGS, prompts, out, restart=True)
        out.with_name("out.jsonl.job.json").write_text("{}")
        with pytest.raises(SpecDecError, match="can't be read"):
            run(SETTINGS, prompts, out)

    def test_foreign_statistics_are_left_alone(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        stats = out.with_name("out.jsonl.stats.jsonl")
        stats.write_text("mine")
        with pytest.raises(SpecDecError, match=r"out\.jsonl\.stats\.jsonl exists and is no job's"):
            run(SETTINGS, prompts, out)
        assert stats.read_text() == "mine"
        assert not out.with_name("out.jsonl.parts").exists()
        run(SETTINGS, prompts, out, restart=True)
        assert len(read(stats)) == 30

    @pytest.mark.parametrize("refused", [False, True])
    def test_a_foreign_folder_is_left_alone(self, stub: type[Stub], prompts: Path, out: Path, refused: bool) -> None:
        folder = out.with_name("out.jsonl.parts")
        (folder / "more").mkdir(parents=True)
        for name in ("mine.txt", "part-mine.jsonl", "more/mine.txt"):
            (folder / name).write_text("mine")
        if refused:
            out.write_text("mine")
        with pytest.raises(SpecDecError) if refused else contextlib.nullcontext():
            run(SETTINGS, prompts, out)
        assert sorted(path.name for path in folder.rglob("*")) == ["mine.txt", "mine.txt", "more", "part-mine.jsonl"]
        assert {path.read_text() for path in folder.rglob("*.*")} == {"mine"}

    def test_no_more_part_files_are_open_than_need_be(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        part = interrupted(stub, prompts, out, after=7)
        for number, line in enumerate(part.read_bytes().splitlines(keepends=True)):
            (part.parent / f"part-00000-{number:08}.jsonl").write_bytes(line)
        part.unlink()
        limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, limits[1]))
        try:
            summary = run(SETTINGS, prompts, out)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (summary["records"], summary["generated_records"]) == (30, 2)

    def test_two_at_once_are_refused(self, stub: type[Stub], prompts: Path, out: Path) -> None:
        other = JobFiles(out)
        other.open({}, False)
        with pytest.raises(SpecDecError, match="Another process is writing"):
            run(SETTINGS, prompts, out)
        other.close()
        run(SETTINGS, prompts, out)

    def test_a_file_that_shrinks_is_no_endless_wait(
        self, stub: type[Stub], prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(offline, "read_records", lambda path: iter(()))
        with pytest.raises(SpecDecError, match="fewer records than before"):
            run(SETTINGS, prompts, out)

    def test_no_records(self, stub: type[Stub], tmp_path: Path, out: Path) -> None:
        (tmp_path / "in.jsonl").write_text("\n\n")
        assert run(SETTINGS, tmp_path / "in.jsonl", out)["records"] == 0
        assert out.read_bytes() == b""


def read_settings(out: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(out.with_name(out.name + ".job.json").read_text())["settings"]
    return settings


class TestLaunch:
    def test_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RANK", raising=False)
        assert Launch.from_environment() == Launch(0, 1, 0)
        assert Launch().device is None

    def test_under_a_launcher(self, monkeypatch: pytest.MonkeyPatch, prompts: Path, out: Path) -> None:
        for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        launch = Launch.from_environment()
        assert launch == Launch(5, 8, 1)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        for devices, device in ((4, "cuda:1"), (0, "cpu")):
            monkeypatch.setattr(torch.accelerator, "device_count", lambda devices=devices: devices)
            monkeypatch.setattr(torch.accelerator, "is_available", lambda devices=devices: devices > 0)
            assert launch.device == device
        monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
        assert launch.device == "cpu"
        with pytest.raises(SpecDecError, match="without a launcher"):
            run(SETTINGS, prompts, out, engine="ray")

    @pytest.mark.parametrize(("pending", "seen"), [([0, 2, 3, 7], [2, 7]), ([0], []), ([], [])])
    def test_the_first_rank_says_what_is_left(
        self, stub: type[Stub], prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch, pending: Any, seen: Any
    ) -> None:
        """What the second rank sees on its disk doesn't count: each batch is done by one of them."""
        part = interrupted(stub, prompts, out, after=3)
        before = sorted(part.parent.iterdir())
        stub.seen.clear()

        @contextlib.contextmanager
        def together(self: Launch) -> Iterator[Any]:
            yield lambda value: pending

        monkeypatch.setattr(Launch, "together", together)
        monkeypatch.setattr(Launch, "from_environment", lambda: Launch(1, 2, 1))
        assert run_job(SETTINGS, prompts, out) is None
        assert stub.seen == seen
        assert len(set(part.parent.iterdir()) - set(before)) == bool(seen)  # no part file where there is nothing to do


def test_progress_is_told(stub: type[Stub], prompts: Path, out: Path) -> None:
    interrupted(stub, prompts, out, after=2)
    told: list[tuple[int, int, int]] = []
    run(SETTINGS, prompts, out, tell=lambda *news: told.append(news))
    assert told == [(done, 30, done - 8) for done in (12, 16, 20, 24, 28, 30, 30)]


def test_lines_are_json_in_utf8() -> None:
    value = {"text": "é\u2028\ud800\n\\ud800"}
    line = to_line(value)
    assert line.count(b"\n") == 1
    assert json.loads(line.decode("utf-8")) == value
