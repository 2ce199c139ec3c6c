"""What showing a run costs it: the same runs with nobody watching, and streamed to a visitor of the page; in turns.

    python benchmarks/page.py --trials 6 --max-new-tokens 96

The visitor is another process that reads the page's stream as a browser does, without drawing it: browsers are on other
machines. Both sides of each run are compared: tokens a second watched ÷ unwatched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import about
from hf_specdec.tools.timing import quartiles
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
    unwatched, updates = [], []
    for trial in range(options.trials + 1):  # the first pair warms up
        *_, (_, found) = record(offered[key], settings, limits)
        done = subprocess.run(
            [sys.executable, "-c", VISITOR, json.dumps([address, names["begin"], names["run"], values])],
            capture_output=True,
            text=True,
            check=True,
        )
        if not trial:
            watched.clear()
            continue
        unwatched.append(found)
        updates.append(int(done.stdout))
        print(
            f"{trial}: speed-up {found.speedup:.2f} unwatched, {watched[-1].speedup:.2f} watched, {updates[-1]} updates"
        )
    result: dict[str, Any] = {"about": about(sys.argv), "updates": updates, "trials": options.trials}
    for side in ("off", "on"):
        ratios = [
            getattr(seen, side).tokens_per_second / getattr(alone, side).tokens_per_second
            for seen, alone in zip(watched, unwatched, strict=True)
        ]
        result[side] = {"median": median(ratios), "quartiles": quartiles(ratios), "ratios": ratios}
        print(
            f"{side}: watched ÷ unwatched {median(ratios):.3f}, quartiles {quartiles(ratios)[0]:.3f}–{quartiles(ratios)[2]:.3f}"
        )
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
