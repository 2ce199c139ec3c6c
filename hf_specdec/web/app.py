"""The page itself: controls, both panes, figures. What it shows is made in `panes` and `explain`, the runs in `recording`.

One listener fills both panes: Gradio runs two listeners of one button one after the other.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from ..errors import SpecDecError
from . import explain, panes
from .controls import place_controls
from .examples import examples, title_of, traces
from .models import Family
from .recording import record
from .settings import Limits, RunSettings
from .theme import theme
from .timeline import Comparison, Side


MOST_ACCEPTED = 128  # of a pass, as `SpecConfig` has it
MOST_SESSIONS, MOST_RUNS = 256, 3  # pages that have runs, and runs that one of them has
WAITING = 16  # visitors in the queue; the next one is told to come back
DEVICE = "device"  # all that runs a model shares one place in the queue
LEFT_EMPTY, RIGHT_EMPTY = "plain model.generate(…)", "generate(…, speculative=True)"
CONTROLS = (
    "prompt", "family", "strategy", "num_draft_tokens", "temperature", "max_new_tokens", "chat", "seed",
)  # fmt: skip
OWN = "Your own prompt"
WIDTHS: list[str | int] = [50, 100, 140, 120, 75, 110, 75, 90, 90, 90, 60, 110, 105]  # of the columns of runs
IDLE = gr.update(interactive=True), gr.update(interactive=False)  # the buttons Run and Stop

Record = Callable[[str, RunSettings, Limits, str], Iterator[tuple[str, Comparison]]]


def build(
    families: Mapping[str, Family], limits: Limits | None = None, wrap: Callable[[Any], Any] | None = None
) -> gr.Blocks:
    """The page.

    Args:
        families: The models that are offered, by key; the first is the default.
        limits: What a visitor may ask for.
        wrap: Put around the function that uses the device, such as `spaces.GPU(...)`.
    """

    def recorded(key: str, settings: RunSettings, limits: Limits, title: str) -> Iterator[tuple[str, Comparison]]:
        yield from record(families[key], settings, limits, title)

    page = _Page(dict(families), limits or Limits(), recorded if wrap is None else wrap(recorded))
    return page.build()


def launch(page: gr.Blocks, **options: Any) -> Any:
    """Serve the page; options go to `Blocks.launch`."""
    folder = Path(str(files(__package__)))
    page.queue(max_size=WAITING, default_concurrency_limit=1)
    return page.launch(
        theme=theme(), css_paths=folder / "style.css", head=f"<script>{(folder / 'race.js').read_text()}</script>",
        footer_links=["api"], run_history=False, enable_monitoring=False, ssr_mode=False, max_file_size="1kb", show_error=False, **options,
    )  # fmt: skip


class _Page:
    """The page's listeners, and what they share."""

    def __init__(self, families: dict[str, Family], limits: Limits, record: Record) -> None:
        self.families, self.limits, self.record = families, limits, record
        self.stops: dict[str, deque[threading.Event]] = {}  # of each session's runs, the oldest first
        self.running: threading.Event | None = None
        self.results: dict[str, Comparison] = {}  # of each session's last run, until the figures are drawn
        self.folder = tempfile.TemporaryDirectory(prefix="hf-specdec-")  # each session's files; Gradio serves copies

    def build(self) -> gr.Blocks:
        """Lay the page out and connect it."""
        first = examples()[0]
        recorded, trace = traces()[0] if traces() else ("", None)
        with gr.Blocks(
            title="hf_specdec: speculation off and on", analytics_enabled=False, delete_cache=(3600, 86400)
        ) as page:
            gr.HTML(
                "<h1>Same text, fewer passes</h1><p>Left: plain <code>generate</code>. Right: the same call with "
                "<code>speculative=True</code>. They run one after the other, alone on the device; then the race "
                "replays both at their true speed.</p>",
                elem_id="sd-title",
            )
            with gr.Row():
                with gr.Column(scale=3):
                    titles = [each.title for each in examples()]
                    example = gr.Dropdown([*titles, OWN], value=first.title, label="Example", elem_id="sd-example")
                    prompt = gr.Textbox(
                        first.text, label="Prompt", lines=5, max_lines=12, elem_id="sd-prompt",
                        max_length=self.limits.prompt_characters,
                    )  # fmt: skip
                    with gr.Row():
                        run = gr.Button(
                            "Run off, then on", variant="primary", elem_id="sd-run", scale=2, min_width=130
                        )
                        stop = gr.Button("Stop", variant="stop", elem_id="sd-stop", interactive=False, min_width=70)
                        race = gr.Button("Replay race", elem_id="sd-race", min_width=90)
                with gr.Column(scale=2):
                    controls = place_controls(self.families, self.limits)
            headline = gr.HTML(panes.headline(trace, recorded=recorded), elem_id="sd-headline")
            with gr.Row(equal_height=True):
                with gr.Column(min_width=320):
                    off = gr.HTML(self._pane(trace.off if trace else None, False), elem_id="sd-off")
                with gr.Column(min_width=320):
                    on = gr.HTML(self._pane(trace.on if trace else None, True), elem_id="sd-on")
            legend = gr.HTML(panes.legend(trace.on) if trace else "", elem_id="sd-legend")
            last, rows = gr.State(trace and trace.to_dict()), gr.State([])
            with gr.Tabs():
                with gr.Tab("Figures"):
                    figures = gr.HTML(self._figures(trace), elem_id="sd-figures")
                with gr.Tab("Plots"), gr.Row():
                    line = gr.LinePlot(
                        self._points(trace), x="seconds", y="tokens", color="side", title="Tokens over time", height=260,
                        color_map={"off": "#64748b", "on": "#0d9488"},
                    )  # fmt: skip
                    bars = gr.BarPlot(
                        self._counts(trace), x="accepted", y="passes", title="Draft tokens accepted in a pass",
                        height=260, sort=[str(accepted) for accepted in range(MOST_ACCEPTED + 1)],
                    )  # fmt: skip
                with gr.Tab("One round"):
                    most = self._rounds(trace)
                    number = gr.Slider(0, most, value=min(1, most), step=1, label="Round", elem_id="sd-number")
                    view = gr.HTML(panes.round_view(trace.on if trace else Side(), 1), elem_id="sd-round")
                with gr.Tab("Copy the code"):
                    code = gr.Code(
                        self._code(trace), "python", elem_id="sd-code", label="With speculation on", wrap_lines=True
                    )
                    link = gr.Textbox(
                        label="Link to these settings", elem_id="sd-link", buttons=["copy"], interactive=False
                    )
                with gr.Tab("Runs of this session"):
                    table = gr.Dataframe(elem_id="sd-runs", interactive=False, wrap=True, column_widths=WIDTHS)
                    with gr.Row():
                        as_csv = gr.DownloadButton("CSV", elem_id="sd-csv", interactive=False)
                        as_json = gr.DownloadButton("JSON", elem_id="sd-json", interactive=False)
            prompt_and_controls = [prompt, *controls]
            answers, drawn = [headline, off, on, legend], [figures, line, bars, number, view, code, last]
            shown = [*drawn, link, table, as_csv, as_json, rows, run, stop]
            light: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
            status = [headline, run, stop]
            # unread by Gradio, which would log what isn't on its list
            example.input(self.choose, example, [prompt, *controls[1:5]], preprocess=False, **light).then(
                self.show_recorded, example, [*answers, *drawn], preprocess=False, **light
            ).then(None, js="() => window.hfSpecdec.play(true)")
            prompt.change(lambda text: title_of(text, OWN), prompt, example, **light)
            # only what changes during a run: Gradio makes every other output's component anew for each update
            turn = run.click(self.begin, None, status, **light).then(
                self.run, prompt_and_controls, answers, api_visibility="private", concurrency_id=DEVICE,
                concurrency_limit=1, show_progress="hidden", trigger_mode="multiple",
                preprocess=False,  # `RunSettings.checked` takes anything; Gradio logs what it can't take
            )  # fmt: skip
            drawing = turn.success(self.show, rows, shown, **light)
            drawing.failure(self.refused, None, status, **light)
            drawing.success(
                None, link, link, js="(link) => (window.hfSpecdec.play(), location.origin + location.pathname + link)"
            )
            turn.failure(self.refused, None, status, **light)
            stop.click(self.stop, None, status, **light)
            run.click(None, js="() => window.hfSpecdec.look()")
            race.click(None, js="() => (window.hfSpecdec.look(), window.hfSpecdec.play())")
            number.change(self.show_round, [last, number], view, preprocess=False, **light)
            # what stands behind a link's # goes to no server's log; older links have it behind a ?
            page.load(
                self.from_link, link, [*prompt_and_controls, example, headline],
                js="() => location.hash.slice(1) || location.search.slice(1)", **light,
            ).then(None, js="() => window.hfSpecdec.play(true)")  # fmt: skip
            page.unload(self.leave)
            gr.api(  # type: ignore[attr-defined]
                self.compare, api_name="compare", concurrency_id=DEVICE, concurrency_limit=1
            )
        built: gr.Blocks = page
        return built

    # What listeners do

    def choose(self, title: Any) -> tuple[Any, ...]:
        """An example's prompt and settings; for an own prompt everything stays."""
        found = next((each for each in examples() if each.title == title), None)
        if found is None:
            return "", *[gr.skip()] * 4
        most = min(found.max_new_tokens, self.limits.new_tokens)
        return found.text, found.strategy, found.num_draft_tokens, found.temperature, most

    def begin(self, request: gr.Request) -> tuple[Any, ...]:
        """Make the session's run stoppable, also while it waits for its turn."""
        session = _session(request)
        if len(self.stops) >= MOST_SESSIONS and session not in self.stops:
            raise gr.Error("Too many pages run at once. Try again in a minute.", print_exception=False)
        self.stops.setdefault(session, deque(maxlen=MOST_RUNS)).append(threading.Event())
        return panes.remark("Waiting for the device …"), gr.update(interactive=False), gr.update(interactive=True)

    def stop(self, request: gr.Request) -> tuple[Any, ...]:
        """Stop the session's run; one that waits for its turn is over at once."""
        events = self.stops.get(_session(request), ())
        for event in events:
            event.set()
        if not events:
            return gr.skip(), *IDLE
        if self.running in events:
            return gr.skip(), gr.skip(), gr.update(interactive=False)
        return panes.remark("Stopped before it began."), *IDLE

    def refused(self, request: gr.Request) -> tuple[Any, ...]:
        """What didn't get into the queue doesn't run; Gradio has said why."""
        if events := self.stops.get(_session(request)):
            events.pop()
        return panes.problem(
            "This run couldn't be made. Check the settings; if too many wait, try again in a minute."
        ), *IDLE

    def leave(self, request: gr.Request) -> None:
        """A closed page frees the device, and leaves nothing behind."""
        session = _session(request)
        for event in self.stops.pop(session, ()):
            event.set()
        self.results.pop(session, None)
        shutil.rmtree(Path(self.folder.name) / session, ignore_errors=True)

    def run(
        self, prompt: Any, family: Any, strategy: Any, num_draft_tokens: Any, temperature: Any, max_new_tokens: Any,
        chat: Any, seed: Any, request: gr.Request,
    ) -> Iterator[list[Any]]:  # fmt: skip
        """Run both sides and show them while they run."""
        session = _session(request)
        values = (prompt, family, strategy, num_draft_tokens, temperature, max_new_tokens, chat, seed)
        nothing = [gr.skip()] * 4
        shown: list[Any] = [None] * 4
        ended = False  # the run without speculation: then its pane stays as it is
        found: Comparison | None = None
        events = self.stops.get(session)
        if not events:
            yield nothing
            return
        stop = events[0]
        try:
            if stop.is_set():  # while it waited; what it ends with must change nothing
                yield nothing
                return
            self.running = stop
            settings = RunSettings.checked(self.limits, self.families, **dict(zip(CONTROLS, values, strict=True)))
            running = self.record(settings.family, settings, self.limits, title_of(settings.prompt))
            try:
                for stage, found in running:
                    if stop.is_set():
                        break
                    if stage != "done":
                        left = shown[1] if ended else self._pane(found.off, False)
                        new = [panes.headline(found, stage), left, self._pane(found.on, True), ""]
                        yield [gr.skip() if each == old else each for each, old in zip(new, shown, strict=True)]
                        shown, ended = new, stage in ("on", "checking")
            finally:
                running.close()  # type: ignore[attr-defined]
            assert found is not None
            if stop.is_set():
                for side in (found.off, found.on):
                    side.cut = side.cut or ("" if side.done else "stopped")
            if self.stops.get(session) is events:  # else the page was closed meanwhile
                self.results[session] = found
            yield self._answers(found)
        except SpecDecError as error:
            yield [panes.problem(str(error)), *nothing[1:]]
        finally:
            if self.running is stop:
                self.running = None
            if stop in events:
                events.remove(stop)
            if not events and self.stops.get(session) is events:
                del self.stops[session]

    def show(self, rows: list[dict[str, Any]], request: gr.Request) -> list[Any]:
        """Draw what a run that has ended leaves: figures, plots, rounds, code, link, and the table of runs."""
        session = _session(request)
        found = self.results.pop(session, None)
        if found is None:
            return [*[gr.skip()] * 12, *IDLE]
        rows = [*rows, explain.row_of(found, len(rows) + 1)]
        files = explain.write_rows(rows, Path(self.folder.name) / session)
        downloads = [gr.DownloadButton(value=file, interactive=True) for file in files]
        link = f"#{RunSettings(**found.settings).query()}"
        return [*self._drawn(found), link, pd.DataFrame(rows), *downloads, rows, *IDLE]

    def show_recorded(self, title: Any, request: gr.Request) -> list[Any]:
        """The recorded run of an example, if there is one; while the session's own run is on, that one stays."""
        for recorded, found in traces():
            if found.title == title and not self.stops.get(_session(request)):
                return [*self._answers(found, recorded), *self._drawn(found)]
        return [gr.skip()] * 11

    def compare(
        self, prompt: str, family: str = "", strategy: str = "auto", num_draft_tokens: int = 0, temperature: float = 0.0,
        max_new_tokens: int = 96, chat: bool = True, seed: int = 0,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Decode one prompt off and on. Tells how far it is; last come both timelines, figures, whether the text is the same."""
        given = {
            "family": family or next(iter(self.families)), "prompt": prompt, "strategy": strategy,
            "num_draft_tokens": num_draft_tokens, "temperature": temperature, "max_new_tokens": max_new_tokens,
            "chat": chat, "seed": seed,
        }  # fmt: skip
        try:
            settings = RunSettings.checked(self.limits, self.families, **given)
            for stage, found in self.record(settings.family, settings, self.limits, title_of(prompt)):
                if stage == "done":
                    yield found.to_dict() | {"why": explain.why(found)}
                else:
                    yield {"stage": stage, "off_tokens": len(found.off.tokens), "on_tokens": len(found.on.tokens)}
        except SpecDecError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def show_round(self, last: dict[str, Any] | None, number: Any) -> str:
        """The round that the slider stands at."""
        place = int(number) if isinstance(number, (int, float)) else 0  # an error would be logged with what was sent
        return panes.round_view(Comparison.from_dict(last).on if last else Side(), place)

    def from_link(self, link: Any) -> list[Any]:
        """The settings of the link that the page was opened with; what it says wrongly is named, and left as it is."""
        first = examples()[0]
        settings, refused = RunSettings.from_query(
            link, self.limits, self.families, prompt=first.text, temperature=first.temperature,
            max_new_tokens=min(first.max_new_tokens, self.limits.new_tokens),
        )  # fmt: skip
        if settings is None:
            return [gr.skip()] * (len(CONTROLS) + 2)
        problem = panes.problem(f"Not all of the link could be taken. {' '.join(refused)}") if refused else gr.skip()
        return [*(getattr(settings, name) for name in CONTROLS), title_of(settings.prompt, OWN), problem]

    # What is shown

    def _answers(self, found: Comparison, recorded: str = "") -> list[str]:
        off, on = self._pane(found.off, False), self._pane(found.on, True)
        return [panes.headline(found, recorded=recorded), off, on, panes.legend(found.on)]

    def _drawn(self, found: Comparison) -> list[Any]:
        most = self._rounds(found)
        number = gr.update(maximum=most, value=min(1, most))
        view, code = panes.round_view(found.on, 1), self._code(found)
        return [self._figures(found), self._points(found), self._counts(found), number, view, code, found.to_dict()]

    def _pane(self, side: Side | None, coloured: bool) -> str:
        label, empty = ("speculation on", RIGHT_EMPTY) if coloured else ("speculation off", LEFT_EMPTY)
        return panes.card(side or Side(), label, coloured, empty)

    def _figures(self, found: Comparison | None) -> str:
        if found is None:
            return '<p class="sd-note">No run yet.</p>'
        return (
            panes.sentence(explain.why(found))
            + panes.table(panes.figures(found))
            + panes.shares(explain.time_shares(found.on))
        )

    def _code(self, found: Comparison | None) -> str:
        if found is None:
            return ""
        family = self.families.get(found.settings["family"])
        settings = RunSettings(**found.settings)
        if family is None or family.name != found.model:  # recorded elsewhere
            return settings.code(found.model, None, "float32" if "float32" in found.conditions else "bfloat16")
        return settings.code(family.name, family.draft, family.dtype)

    def _points(self, found: Comparison | None) -> pd.DataFrame:
        return pd.DataFrame(explain.timeline_points(found) if found else [], columns=["seconds", "tokens", "side"])

    def _counts(self, found: Comparison | None) -> pd.DataFrame:
        counts = explain.accepted_counts(found.on) if found else []
        return pd.DataFrame([(str(accepted), passes) for accepted, passes in counts], columns=["accepted", "passes"])

    def _rounds(self, found: Comparison | None) -> int:
        return max(len(found.on.rounds) - 1, 1) if found else 1


def _session(request: gr.Request) -> str:
    """A session's name. Visitors choose their own, so it is hashed: it may become the name of a folder."""
    if not request.session_hash:
        raise gr.Error("The request names no session.", print_exception=False)
    return hashlib.sha256(str(request.session_hash).encode()).hexdigest()
