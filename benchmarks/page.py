"""What showing a run costs it, and whether the page's speed-up is `hf-specdec bench`'s.

    python benchmarks/page.py --trials 8 --max-new-tokens 96

Each trial runs the first example three times: with nobody watching, streamed to a visitor of the page (these two in
turns first), and as `bench` does behind its warm-up: plain, on, plain. The visitor is another process that reads the page's stream as a
browser does, without drawing it: browsers are on other machines. Watched ÷ unwatched is said of tokens a second, and of
the server's own processor time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import hf_specdec
from benchmarks.common import about
from hf_specdec.config import SpecConfig
from hf_specdec.tools.bench import WARM_UP_PROMPT
from hf_specdec.tools.loading import encode_batch
from hf_specdec.tools.timing import quartiles
from hf_specdec.tools.trials import Learnt, Method, Run, decode, interleave
from hf_specdec.web.app import build, launch
from hf_specdec.web.examples import examples
from hf_specdec.web.models import families
from hf_specdec.web.recording import record
from hf_specdec.web.settings import Limits, RunSettings
from hf_specdec.web.timeline import Comparison


VISITOR = """
import json, sys, urllib.request as web
address, begin, run, values = json.loads(sys.argv[1])
def post(path, body):
    request = web.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return web.urlopen(request).read()
post("/gradio_api/run/predict", {"data": [], "fn_index": begin, "session_hash": "benchmark"})
post("/gradio_api/queue/join", {"data": values, "fn_index": run, "session_hash": "benchmark"})
updates = 0
for line in web.urlopen(address + "/gradio_api/queue/data?session_hash=benchmark"):
    if line.startswith(b"data:"):
        kind = json.loads(line[5:])["msg"]
        updates += kind == "process_generating"
        if kind == "process_completed":
            break
print(updates)
"""


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()

    offered = families(False)
    key, prompt = next(iter(offered)), examples()[0].text
    limits = Limits(seconds=300)
    settings = RunSettings.checked(limits, offered, family=key, prompt=prompt, max_new_tokens=options.max_new_tokens)
    watched: list[Comparison] = []

    def kept(run: Any) -> Any:
        def wrapped(*arguments: Any) -> Iterator[tuple[str, Comparison]]:
            for stage, found in run(*arguments):
                yield stage, found
            watched.append(found)

        return wrapped

    page = build(offered, limits, wrap=kept)
    address = launch(page, quiet=True, prevent_thread_lock=True)[1].rstrip("/")
    names = {each["api_name"]: each["id"] for each in page.config["dependencies"]}
    values = [*(getattr(settings, name) for name in ("prompt", "family", "strategy", "num_draft_tokens", "temperature",
                "max_new_tokens", "chat", "seed")), None]  # fmt: skip

    def visit() -> int:
        done = subprocess.run(
            [sys.executable, "-c", VISITOR, json.dumps([address, names["begin"], names["run"], values])],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    def alone() -> Comparison:
        *_, (_, found) = record(offered[key], settings, limits)
        return found

    alone(), visit(), watched.clear()  # warm up
    loaded, _ = offered[key].load()
    # what `bench` knows behind its warm-up and a first case: costs, and another prompt's text
    hf_specdec.reset(loaded.model)
    decode(loaded, encode_batch(loaded, [WARM_UP_PROMPT]), Method("on", SpecConfig()), options.max_new_tokens)
    inputs, learnt = encode_batch(loaded, [prompt]), Learnt(loaded.model)

    def plain_or_on(method: Method) -> Run:
        learnt.restore()
        return decode(loaded, inputs, method, options.max_new_tokens)

    unwatched: list[Comparison] = []
    processor: list[float] = []
    benched: list[float] = []
    updates: list[int] = []
    for trial in range(1, options.trials + 1):
        first_alone = bool(trial % 2)
        if first_alone:
            found, alone_seconds = timed(alone)
        seen, watched_seconds = timed(visit)
        if not first_alone:
            found, alone_seconds = timed(alone)
        plain, on = interleave(plain_or_on, [Method("on", SpecConfig())], 1, {})
        around = (plain[0].seconds_per_token + plain[1].seconds_per_token) / 2
        benched.append(around / on["on"][0].run.seconds_per_token)
        unwatched.append(found)
        updates.append(seen)
        processor.append(watched_seconds / alone_seconds)
        print(
            f"{trial}: speed-up {found.speedup:.2f} unwatched, {watched[-1].speedup:.2f} watched, {benched[-1]:.2f} bench; "
            f"processor time watched ÷ unwatched {processor[-1]:.3f}; {seen} updates",
            flush=True,
        )
    result: dict[str, Any] = {"about": about(sys.argv), "trials": options.trials, "updates": updates}
    for side in ("off", "on"):
        ratios = [
            getattr(seen, side).tokens_per_second / getattr(alone, side).tokens_per_second
            for seen, alone in zip(watched, unwatched, strict=True)
        ]
        result[f"tokens a second, {side}, watched ÷ unwatched"] = told(f"{side}: watched ÷ unwatched", ratios)
    result["processor time, watched ÷ unwatched"] = told("processor time, watched ÷ unwatched", processor)
    result["speed-up, page"] = told("speed-up, page", [each.speedup or 0.0 for each in watched])
    result["speed-up, page, unwatched"] = told("speed-up, unwatched", [each.speedup or 0.0 for each in unwatched])
    result["speed-up, bench"] = told("speed-up, bench", benched)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2), encoding="utf-8")


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it returned, and the processor seconds that this process spent meanwhile."""
    began = time.process_time()
    found = run()
    return found, time.process_time() - began


def told(what: str, ratios: list[float]) -> dict[str, Any]:
    """A figure with its spread, printed and for the record."""
    low, middle, high = quartiles(ratios)
    mean = geometric_mean(ratios)
    print(f"{what}: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, geometric mean {mean:.3f}")
    return {"median": median(ratios), "quartiles": [low, middle, high], "geometric_mean": mean, "ratios": ratios}


if __name__ == "__main__":
    main()
