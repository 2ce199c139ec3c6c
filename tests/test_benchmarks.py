"""The benchmark scripts run at toy size, and their arithmetic is right; no test looks at a speed."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import common, core, gpu, methods, peers, summary

from .tools.tiny_chat import save_tiny_chat_model


@pytest.fixture(autouse=True)
def _settings_come_back() -> Iterator[None]:
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny chat model."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts each of two groups; the first doesn't fit."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["far too long " * 20, "a b a b a b", "abc abc", "say it again", "one two"]
    records = [
        {"id": f"{suite}/{number}", "suite": suite, "category": "any", "turns": [text]}
        for suite in ("edit_eval", "gsm8k")
        for number, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def command(mode: str, chat: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    known = ["--prompts", str(prompts), "--model", str(chat), "--out", str(out), "--threads", "1"]
    size = ["--groups", "code_edit,math", "--per-group", "2", "--max-new-tokens", "8", "--max-prompt-tokens", "40"]
    return [mode, *known, *size, "--dtype", "float32", *more]


def results(path: Path) -> list[dict[str, Any]]:
    return [record for record in common.read([path]) if record["kind"] == "result"]


def test_spread_by_hand() -> None:
    found = common.spread([4.0, 1.0, 2.0])
    assert found == {"n": 3, "gmean": 2.0, "median": 2.0, "q1": 1.5, "q3": 3.0, "worst": 1.0}
    assert common.spread([3.0])["q1"] == common.spread([3.0])["q3"] == 3.0


def test_speedup_is_against_both_neighbours() -> None:
    assert common.speedup(30.0, 10.0, 20.0) == 2.0


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    common.append(path, {"a": 1})
    path.write_text(path.read_text() + '{"b": ')  # a run was killed here
    common.append(path, {"c": 3})
    assert common.read([path]) == [{"a": 1}, {"c": 3}]


def test_time_limit_is_not_swallowed() -> None:
    def stubborn() -> None:
        with contextlib.suppress(Exception):
            time.sleep(10)

    with pytest.raises(TimeoutError), common.time_limit(0.05):
        stubborn()


@pytest.mark.parametrize("acceptance", [1.0, 0.75, 0.0])
def test_exact_draft_pair_agrees_as_often_as_asked(acceptance: float) -> None:
    target, draft = (transformers.LlamaConfig(**shape, eos_token_id=None) for shape in (gpu.TOY_TARGET, gpu.TOY_DRAFT))
    models = common.exact_draft_pair(target, draft, acceptance)
    every = torch.arange(512)[:, None]
    with torch.no_grad():
        said, guessed = (model(every).logits[:, -1].argmax(-1) for model in models)
    assert (said == guessed).float().mean().item() == acceptance
    assert sorted(said.tolist()) == list(range(512))  # a cycle: texts don't repeat themselves


def record(group: str, name: str, **found: Any) -> dict[str, Any]:
    """A result of the methods in `found`: (tokens per second, speed-up), or a dictionary."""
    plain = {"texts": 1, "differences": [], "acceptance_length": 2.0}
    each = {
        key: plain | (value if isinstance(value, dict) else dict(zip(("rate", "speedup"), value, strict=True)))
        for key, value in found.items()
    }
    known = {"kind": "result", "mode": "run", "model": "m", "dtype": "bfloat16", "batch": 1, "max_new_tokens": 8}
    return known | {"group": group, "ids": [name], "results": each}


def test_summary_by_hand() -> None:
    difference = {"gap": 0.5, "near_tie": True}, {"gap": 3.0, "near_tie": False}
    records = [
        {"kind": "about"},
        record("code_edit", "a", ours=(40, 4.0), flashspec_ngram=(10, 2.0)),  # its plain runs took twice as long
        record("code_edit", "b", ours=(10, 1.0), flashspec_ngram={"error": "ValueError: no"}),
        record("chat", "c", ours={"rate": 9, "speedup": 0.9, "differences": [difference[0]], "eta": 0.8}),
        record(
            "chat", "c", flashspec_ngram={"rate": 6, "speedup": 0.6, "differences": [difference[1]]}
        ),  # added later
    ]
    found = summary.summarize(records)
    (run,) = found["runs"]
    ours, theirs = run["methods"]["ours"], run["methods"]["flashspec_ngram"]
    assert (ours["groups"]["code_edit"]["gmean"], ours["groups"]["code_edit"]["worst"]) == (2.0, 1.0)
    assert ours["all"]["gmean"] == pytest.approx((4 * 1 * 0.9) ** (1 / 3), abs=1e-4)
    assert ours["by_group"] == pytest.approx((2 * 0.9) ** 0.5, abs=1e-4)
    assert (ours["same_texts"], ours["texts"], ours["near_ties"], ours["other_differences"]) == (2, 3, 1, 0)
    assert (theirs["same_texts"], theirs["texts"], theirs["other_differences"]) == (1, 2, 1)
    assert (theirs["largest_gap"], theirs["errors"]) == (3.0, ["ValueError: no"])
    versus = run["ours_vs"]["flashspec_ngram"]
    assert (versus["groups"]["code_edit"]["gmean"], versus["groups"]["chat"]["gmean"]) == (2.0, 1.5)
    assert versus["by_group"] == pytest.approx(3**0.5, abs=1e-4)
    bars = {bar["name"]: (bar["figure"], bar["met"]) for bar in found["bars"]}
    assert bars["bfloat16, worst group against plain"] == (pytest.approx(0.9), False)
    assert bars["bfloat16, code_edit against plain"] == (pytest.approx(2.0), True)
    assert bars["bfloat16, all groups against flashspec_ngram"] == (pytest.approx(3**0.5, abs=1e-4), True)
    assert bars["bfloat16, η of a batch of 1"] == (0.8, False)
    assert bars["bfloat16, humaneval against plain"] == bars["float32, all groups against plain"] == (None, None)
    text = summary.markdown(found)
    assert text.count("## Bars: m, 8 tokens") == text.count("## Bars") == 1
    assert "| bfloat16, worst group against plain | 0.98 | 0.9 | no |" in text


def test_bars_pool_nothing() -> None:
    """Each model and length has its own; larger batches have none."""
    records = [
        record("chat", "a", ours=(1, 2.0)),
        record("chat", "a", ours=(1, 9.0)) | {"batch": 8},
        record("chat", "a", ours=(1, 3.0)) | {"max_new_tokens": 16},
        record("chat", "a", ours=(1, 4.0)) | {"model": "n"},
        record("chat", "a", **{"ours:off": (1, 1.0)}) | {"mode": "off", "model": "o"},
    ]
    found = {(bar.model, bar.max_new_tokens, bar.name): bar.figure for bar in summary.bars(records)}
    name = "bfloat16, chat against plain"
    assert {each[:2]: figure for each, figure in found.items() if each[2] == name} == {
        ("m", 8): pytest.approx(2.0), ("m", 16): pytest.approx(3.0), ("n", 8): pytest.approx(4.0)
    }  # fmt: skip
    assert [each for each in found if each[0] == "o"] == [
        ("o", 8, "bfloat16, ours:off against plain, batch of 1 (median)")
    ]
    assert summary.markdown(summary.summarize(records)).count("## Bars") == 4


def test_a_success_outlasts_an_error() -> None:
    worked, failed = record("chat", "a", ours=(1, 2.0)), record("chat", "a", ours={"error": "no"})
    for records in ([worked, failed], [failed, worked]):
        (found,) = summary.merged(records)
        assert found["results"]["ours"]["speedup"] == 2.0


def test_changed_conditions_are_named() -> None:
    old, new = {"kind": "about", "torch_threads": 2}, {"kind": "about", "torch_threads": 2, "git_revision": "a"}
    assert summary.changed([{"kind": "result"}, old, new]) == []
    assert summary.changed([new, new | {"git_revision": "b", "torch_threads": 1}]) == ["git_revision", "torch_threads"]


def test_separators_in_a_prompt_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["one\u2028two\x85"]}, {"turns": ["three"]}]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    assert common.read_lines(path) == common.read([path]) == lines


def test_core_methods_take_turns() -> None:
    assert [core.turn(number)[1] for number in range(4)] == ["ours", "transformers"] * 2
    assert all(core.turn(number)[0] == "plain" and len(set(core.turn(number))) == 3 for number in range(2))


def test_off_and_ragged_have_their_own_bars() -> None:
    records = [
        record("chat", "a", **{"ours:off": (1, 0.98), "ours:none": (1, 1.0)}) | {"mode": "off"},
        record("chat", "b", **{"ours:off": (1, 1.02), "ours:none": (1, 0.9)}) | {"mode": "off"},
        record("code_edit", "c", ours={"rate": 1, "speedup": 1.5, "eta": 0.7}) | {"mode": "ragged", "batch": 8},
    ]
    bars = {bar.name: (bar.figure, bar.met) for bar in summary.bars(records)}
    assert bars["bfloat16, ours:off against plain, batch of 1 (median)"] == (1.0, True)
    assert bars["bfloat16, ours:none against plain, batch of 1 (median)"] == (0.95, False)
    assert bars["bfloat16, ragged batch of 8 against plain"] == (1.5, True)
    assert bars["bfloat16, η of a ragged batch of 8"] == (0.7, False)


def test_run_is_resumed(chat: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashspec", None)  # not installed
    out = tmp_path / "results.jsonl"
    peers.main(command("run", chat, prompts, out, "--methods", "ours,ours:adversarial,flashspec_ngram"))
    first = results(out)
    assert [each["ids"] for each in first] == [["edit_eval/1"], ["gsm8k/1"], ["edit_eval/2"], ["gsm8k/2"]]
    assert "flashspec_ngram" in common.read([out])[0]["skipped"]
    for each in first:
        assert set(each["results"]) == {"ours", "ours:adversarial"}
        rates = [each["plain_tokens"] / seconds for seconds in each["plain_seconds"]]
        for result in each["results"].values():
            assert result["differences"] == []
            assert result["rate"] == result["tokens"] / result["seconds"]
            assert result["speedup"] == pytest.approx(common.speedup(result["rate"], rates[0], rates[1]))
            assert result["eta"] == pytest.approx(result["speedup"] / result["ideal_speedup"])
    more = command("run", chat, prompts, out, "--methods", "ours,transformers_lookup", "--eta-per-group", "0")
    peers.main([*more, "--minutes", "0"])
    assert len(results(out)) == 4
    peers.main(more)
    peers.main(more)
    added = results(out)[4:]
    assert [(each["ids"], set(each["results"])) for each in added] == [
        (each["ids"], {"transformers_lookup"}) for each in first
    ]
    peers.main(["summary", str(out), "--json", str(tmp_path / "summary.json")])
    (run,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert {name: each["texts"] for name, each in run["methods"].items()} == {
        "ours": 4,
        "ours:adversarial": 4,
        "transformers_lookup": 4,
    }


def test_a_failing_method_is_recorded(
    chat: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(inputs: Any, tokens: int) -> methods.Output:
        raise KeyError("broken\nin two lines")

    monkeypatch.setitem(methods.BUILDERS, "peer", lambda bench: fails)
    out = tmp_path / "results.jsonl"
    again = command("run", chat, prompts, out, "--methods", "peer,ours", "--eta-per-group", "0")
    peers.main(again)
    failed = results(out)
    for each in failed:
        assert each["results"]["peer"]["error"].startswith("KeyError: ")
        assert each["results"]["ours"]["speedup"] > 0
    monkeypatch.setitem(methods.BUILDERS, "peer", methods.BUILDERS["plain"])
    peers.main(again)  # it was mended
    for each in results(out)[len(failed) :]:
        assert set(each["results"]) == {"peer"}
        assert each["results"]["peer"]["speedup"] > 0
    assert len(results(out)) == 2 * len(failed)


def test_a_wrong_text_is_recorded(chat: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(bench: methods.Bench) -> methods.Method:
        plain = methods.BUILDERS["plain"](bench)

        def run(inputs: Any, tokens: int) -> methods.Output:
            rows = [row[:2] + [(row[2] + 1) % 257] + row[3:] for row in plain(inputs, tokens).rows]
            return methods.Output(rows)

        return run

    monkeypatch.setitem(methods.BUILDERS, "liar", lies)
    out = tmp_path / "results.jsonl"
    peers.main(command("run", chat, prompts, out, "--methods", "liar"))
    for each in results(out):
        (difference,) = each["results"]["liar"]["differences"]
        assert (difference["index"], difference["near_tie"]) == (2, False)


@pytest.mark.parametrize("mode", ["off", "ragged"])
def test_batches(mode: str, chat: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    peers.main(command(mode, chat, prompts, out, "--batch", "2"))
    found = results(out)
    assert [each["ids"] for each in found if each["group"] == "math"] == [
        ["gsm8k/1", "gsm8k/2"],
        ["gsm8k/3", "gsm8k/4"],
    ]
    for each in found:
        for name, result in each["results"].items():
            assert (result["texts"], result["differences"]) == (2, [])
            assert result["lean_forward"] is not name.endswith("@eager")
            if mode == "off":
                assert result["draft_acceptance_rate"] == 0
                assert result["acceptance_length"] == 1


def test_pair(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    size = ["--layers", "2", "--per-group", "1", "--max-new-tokens", "12", "--threads", "1"]
    peers.main(["pair", "--out", str(out), *size, "--methods", "ours,transformers_assisted"])
    (found,) = results(out)
    for result in found["results"].values():
        assert result["differences"] == []
        assert result["acceptance_length"] > 3
    assert found["results"]["ours"]["eta"] > 0


@pytest.mark.parametrize(
    ("name", "error"),
    [("nothing", "no method"), ("plain@eager", "eager"), ("flashspec_model", "draft model"), ("plain:x", "no method")],
)
def test_unknown_methods_are_named(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        methods.build(name, methods.Bench(None, None, 0, ()))


def test_rows_end_at_the_first_end_token() -> None:
    assert methods.cut([4, 7, 2, 2, 2], (2, 9)) == [4, 7, 2]
    assert methods.cut([4, 7], (2,)) == [4, 7]


def test_gpu_script_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu.main(["--toy", "--max-new-tokens", "8", "--trials", "1", "--prompt-tokens", "6"])
    report = json.loads((tmp_path / "gpu.json").read_text())
    rows = {(row["method"], row["batch"]): row for row in report["rows"]}
    assert set(rows) == {(name, batch) for name in ("plain", *gpu.ORDER) for batch in (1, 2)}
    assert "batch of 1 only" in rows["transformers_assisted", 2]["skipped"]
    for (name, _), row in rows.items():
        if "skipped" not in row and name != "plain":
            assert row["same_text"]
            assert row["speedup"]["n"] == 1
        if name.startswith("ours"):
            assert row["eta"] > 0
            assert row["eta_forwards"] == "eager"


def test_gpu_script_stops_in_time(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--minutes", "0", "--max-new-tokens", "4", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert all(row["skipped"] for row in rows if row["method"] != "plain")


class TestTraces:
    """The runs that the page shows on opening."""

    @pytest.fixture
    def traces(self) -> Any:
        pytest.importorskip("gradio")
        from benchmarks import record_traces

        return record_traces

    def test_at_toy_size(self, traces: Any, chat: Path, tmp_path: Path) -> None:
        from hf_specdec.web.timeline import Comparison

        names = ["--examples", "chat,where-it-loses-short-random-too-long-drafts"]
        traces.main([*names, "--model", str(chat), "--runs", "1", "--max-new-tokens", "8", "--out", str(tmp_path)])
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == [
            "05-chat.json",
            "07-where-it-loses-short-random-too-long-drafts.json",
        ]
        for file, title in zip(files, ("Chat", "Where it loses: short, random, too long drafts"), strict=True):
            given = json.loads(file.read_text())
            run = Comparison.from_dict(given["run"])
            assert run.complete
            assert run.title == title
            assert run.settings["max_new_tokens"] == 8
            assert run.conditions in given["recorded"]
            assert "--runs 1" in given["command"]

    def test_the_median_run_is_kept(self, traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_specdec.web.timeline import Comparison, Side, Token

        seconds = iter([1.0, 4.0, 2.0])

        def record(*_: Any) -> Iterator[tuple[str, Comparison]]:
            tokens = [Token(1, "a", 0.5)]
            off, on = (Side(tokens, seconds=each, done=True) for each in (8.0, next(seconds)))
            yield "done", Comparison(off, on, {}, "", "")

        monkeypatch.setattr(traces, "record", record)
        run, speedups = traces.median_run(None, None, "", 3)
        assert run.speedup == 4.0
        assert speedups == [2.0, 4.0, 8.0]

    def test_a_cut_run_is_refused(self, traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_specdec.web.timeline import Comparison, Side

        found = Comparison(Side(cut="time limit", done=True), Side(), {}, "", "")
        monkeypatch.setattr(traces, "record", lambda *_: iter([("done", found)]))
        with pytest.raises(RuntimeError, match="time limit"):
            traces.median_run(None, None, "x", 1)

    def test_numbers_are_short(self, traces: Any) -> None:
        assert traces.rounded({"a": [0.123456, (1, True)], "b": None}) == {"a": [0.1235, [1, True]], "b": None}

    def test_unknown_example(self, traces: Any) -> None:
        with pytest.raises(ValueError, match="no example nothing; there are code-edit"):
            traces.chosen("nothing")

    def test_those_that_come_with_the_package(self, traces: Any) -> None:
        known = {name for name, _ in traces.chosen(None)}
        for file in traces.TRACES.glob("*.json"):
            given = json.loads(file.read_text(encoding="utf-8"))
            assert file.name in known
            assert file.stat().st_size <= traces.MOST_BYTES
            assert given["recorded"].startswith(given["run"]["conditions"])
            assert "record_traces.py" in given["command"]
