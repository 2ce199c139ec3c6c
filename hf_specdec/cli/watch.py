"""`hf-specdec watch`: whether a running server really speculates, and how much it accepts."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..tools.printable import printable
from .formats import Format, FormatOption, JsonOption, chosen


if TYPE_CHECKING:
    from ..tools.watch.compare import Comparison
    from ..tools.watch.observe import Observed
    from ..tools.watch.servers import Server

SCHEMA_VERSION = 1
NEGATIVE, CANT_TELL = 1, 3
ENGINES = ("vllm", "sglang", "llama-cpp", "tgi")
MOST_RESPONSE = 64 * 2**20
LINE = "{:<8}  {:>8}  {:>9}  {:>9}  {:>9}  {:>6}  {:>13}"
TITLES = ("time", "tokens/s", "generated", "drafted", "accepted", "rate", "tokens a step")
EXAMPLES = """Examples:

hf-specdec watch http://localhost:8000

hf-specdec watch http://localhost:8000 --once --format quiet

hf-specdec watch http://localhost:8080 --for 60 --compare check.json

hf-specdec watch --response answer.json"""


def watch(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Of a vLLM, SGLang, llama.cpp or TGI server.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One reading: what it counted since it was started.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two readings.")] = 10.0,
    seconds: Annotated[
        float | None,
        typer.Option("--for", min=0.1, metavar="SECONDS", help="How long.", show_default="until Ctrl-C"),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="What hf-specdec check measured (JSON).")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="vllm, sglang, llama-cpp or tgi.", show_default="by the metrics"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Count for this model alone.", show_default="all of the server's"),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="How many it drafts, for TGI, which doesn't tell.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="For one answer.")] = 5.0,
    response: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead of a server: one answer that it gave (JSON); - is stdin."),
    ] = None,
    output: FormatOption = Format.HUMAN,
    as_json: JsonOption = False,
) -> None:
    """See whether a running server really speculates, and how much of the drafts it accepts.

    Reads /metrics, and what llama.cpp and SGLang tell elsewhere; a key comes from the variable HF_SPECDEC_API_KEY. --format
    json prints an object a line, quiet the status, rate and tokens a step. Exit code 1: speculation is off or never used, far
    below what --compare lets expect, or the server can't be read; 3: nothing was generated, or it can't be told.
    """
    output = chosen(output, as_json)
    if (url is None) == (response is None):
        raise typer.BadParameter("Give either URL, a server, or --response, an answer of one.")
    if engine is not None and engine not in ENGINES:
        raise typer.BadParameter(f"--engine is one of {', '.join(ENGINES)}; got {engine!r}.")
    if once and seconds is not None:
        raise typer.BadParameter("--once takes one reading; leave out --for.")
    from ..tools.measured import read_record
    from ..tools.watch.compare import acceptance_of
    from ..tools.watch.compare import compare as compare_with
    from ..tools.watch.fetch import KEY_VARIABLE, check_url
    from ..tools.watch.observe import since_start
    from ..tools.watch.servers import Server, read_response

    measured = None if compare is None else acceptance_of(read_record(compare))
    if response is not None:
        total = since_start(read_response(_text_of(response)))
        printer = _Printer(output, response, one_answer=True)
    else:
        server = Server(
            check_url(url or ""), engine, model, num_draft_tokens, timeout, os.environ.get(KEY_VARIABLE) or None
        )
        printer = _Printer(output, server.url)
        total = _follow(server, printer, min(interval, seconds or interval), seconds, once=once)
    comparison = None if measured is None else compare_with(total, measured)
    printer.end(total, comparison)
    raise typer.Exit(_exit_code(total, comparison))


def _text_of(response: str) -> str:
    from ..errors import SpecDecError

    try:
        with sys.stdin.buffer if response == "-" else Path(response).open("rb") as stream:
            data = stream.read(MOST_RESPONSE + 1)
    except OSError as error:
        raise SpecDecError(f"The answer {response} can't be read: {error.strerror or error}.") from error
    if len(data) > MOST_RESPONSE:
        raise SpecDecError(f"The answer is larger than {MOST_RESPONSE // 2**20} MiB. Give a single one.")
    return data.decode("utf-8", "replace")


def _follow(server: Server, printer: _Printer, interval: float, seconds: float | None, *, once: bool) -> Observed:
    """What the server did while it was watched; with `once`, or where that was cut short, since it was started."""
    from ..errors import SpecDecError
    from ..tools.watch.follow import follow
    from ..tools.watch.observe import since_start, together

    first = server.read()
    started = since_start(first, server.says(first))
    if once:
        return started
    printer.start(started)
    total: Observed | None = None
    failed = False
    try:
        for found in follow(server, first, interval=interval, seconds=seconds):
            failed = isinstance(found, SpecDecError)
            if isinstance(found, SpecDecError):
                print("error:", printable(" ".join(str(found).split())), file=sys.stderr)
                continue
            printer.interval(found)
            total = found if total is None else together(total, found)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if failed:
        raise typer.Exit(NEGATIVE)
    return started if total is None else total


def _exit_code(total: Observed, comparison: Comparison | None) -> int:
    from ..tools.watch.compare import FAR_BELOW
    from ..tools.watch.observe import IDLE, OFF, UNKNOWN, UNUSED

    if total.status in (OFF, UNUSED) or (comparison is not None and comparison.verdict == FAR_BELOW):
        return NEGATIVE
    return CANT_TELL if total.status in (IDLE, UNKNOWN) else 0


class _Printer:
    """Prints what was observed, while it happens and at the end."""

    def __init__(self, output: Format, source: str, *, one_answer: bool = False) -> None:
        self.output, self.source, self.one_answer = output, source, one_answer
        self.several = False

    def start(self, started: Observed) -> None:
        """Print what the server counted before it was watched."""
        self.several = True
        if self.output is Format.JSON:
            self._object("start", started)
        elif self.output is Format.HUMAN:
            self._block(started)
            print()
            print(LINE.format(*TITLES), flush=True)

    def interval(self, found: Observed) -> None:
        """Print one interval."""
        if self.output is Format.JSON:
            self._object("interval", found)
        elif self.output is Format.HUMAN:
            counts = found.counts
            cells = (
                datetime.now().strftime("%H:%M:%S"),
                _number(found.tokens_per_second, ".1f"),
                _number(counts.tokens),
                _number(counts.drafted),
                _number(counts.accepted),
                _number(found.draft_acceptance_rate, ".0%"),
                _number(found.mean_acceptance_length, ".2f"),
            )
            print(LINE.format(*cells), flush=True)

    def end(self, total: Observed, comparison: Comparison | None) -> None:
        """Print the verdict."""
        if self.output is Format.QUIET:
            figures = (total.draft_acceptance_rate, total.mean_acceptance_length)
            print(total.status, *("-" if each is None else f"{each:.3f}" for each in figures))
        elif self.output is Format.JSON:
            since = "answer" if self.one_answer else "start" if total.seconds is None else "watch"
            self._object(since, total, comparison, indent=None if self.several else 2)
        else:
            if self.several:
                print()
            self._block(total, notes=True)
            if comparison is not None:
                _wrapped(_spoken(comparison))
                for hint in comparison.hints:
                    _wrapped(f"- {hint}")

    def _object(
        self, since: str, found: Observed, comparison: Comparison | None = None, indent: int | None = None
    ) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        whole = {"schema_version": SCHEMA_VERSION, "kind": "watch", "source": self.source, "time": now, "since": since}
        whole |= found.to_dict() | {"comparison": None if comparison is None else comparison.to_dict()}
        print(json.dumps(whole, indent=indent, ensure_ascii=False, allow_nan=False), flush=True)

    def _block(self, found: Observed, *, notes: bool = False) -> None:
        from ..tools.watch.engines import TITLES as ENGINE_TITLES

        when = "since it was started" if found.seconds is None else f"in {found.seconds:.0f} s"
        models = f" ({', '.join(found.models)})" if found.models else ""
        where = f", in the answer {self.source}" if self.one_answer else f" at {self.source}{models}, {when}"
        _wrapped(f"{ENGINE_TITLES[found.engine]}{where}: {found.spoken}.")
        for name, value in _rows(found):
            print(f"  {name:<14} {value}")
        for note in found.notes() if notes else ():
            _wrapped(f"! {note}")


def _rows(found: Observed) -> list[tuple[str, str]]:
    counts = found.counts
    rows = []
    if counts.tokens is not None:
        speed = "" if found.tokens_per_second is None else f", {found.tokens_per_second:.1f} a second"
        rows.append(("generated", f"{counts.tokens:,.0f} tokens{speed}"))
    if counts.steps:
        share = found.drafting_share
        rows.append(("steps", f"{found.all_steps:,.0f}" + ("" if share is None else f", {share:.0%} with a draft")))
    if counts.drafted:
        rows.append(("drafted", f"{counts.drafted:,.0f} tokens"))
    rate, length = found.draft_acceptance_rate, found.mean_acceptance_length
    if counts.accepted is not None and counts.steps:
        rows.append(
            ("accepted", f"{counts.accepted:,.0f} tokens" + ("" if rate is None else f", {rate:.0%} of the drafted"))
        )
    elif rate is not None:
        rows.append(("accepted", f"{rate:.0%} of the drafted"))
    if length is not None:
        own = found.mean_acceptance_length_of_drafts
        other = "" if own is None or abs(own - length) < 0.01 else f"; {own:.2f} over those with a draft"
        rows.append(("tokens a step", f"{length:.2f} (1 + accepted ÷ steps{other})"))
    if found.per_position_acceptance:
        rows.append(("by position", " ".join(f"{each:.0%}" for each in found.per_position_acceptance[:12])))
    return rows


def _spoken(comparison: Comparison) -> str:
    if comparison.expected is None or comparison.observed is None:
        return "Not compared with the check."
    rate = comparison.figure == "draft_acceptance_rate"
    low, high = (f"{each:.0%}" if rate else f"{each:.2f}" for each in comparison.expected)
    seen = f"{comparison.observed:.0%}" if rate else f"{comparison.observed:.2f}"
    name = "Acceptance" if rate else "Tokens a step"
    return f"{name} {seen}; the check lets expect {low} to {high}: {comparison.verdict}."


def _number(value: float | None, form: str = ",.0f") -> str:
    return "–" if value is None else format(value, form)


def _wrapped(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(printable(text)))
