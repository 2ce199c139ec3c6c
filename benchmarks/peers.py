"""The same prompts through plain `generate`, the peers and ours, interleaved; and the tables that come of it.

    python benchmarks/peers.py run --prompts FILE --out results.jsonl      # greedy, batch of 1, by group of prompts
    python benchmarks/peers.py off --prompts FILE --out results.jsonl      # our loop without drafts, batches of 1 and 8
    python benchmarks/peers.py ragged --prompts FILE --out results.jsonl   # batches of 8 prompts of different length
    python benchmarks/peers.py pair --out results.jsonl                    # draft models: an exact pair, 12 layers to 1
    python benchmarks/peers.py summary results.jsonl --json summary.json

Every prompt's record is on the disk before the next prompt begins. The same command goes on where it stopped; with more
methods it measures those that are missing. Methods are listed in `benchmarks/methods.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor

from benchmarks.common import about, append, read, read_lines, speedup, timed
from benchmarks.methods import Bench, Method, Output, build, peer_versions
from benchmarks.summary import changed, key, markdown, merged, summarize
from hf_specdec.tools.demo import find_difference
from hf_specdec.tools.replay import replay


# group of the tables -> its (suite, category); None takes every category of the suite
GROUPS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "code_edit": (("edit_eval", None),),
    "humaneval": (("humaneval", None),),
    "summarization+rag": (("spec_bench", "summarization"), ("spec_bench", "rag")),
    "chat": (("spec_bench", "mt_bench"), ("vicuna_bench", None)),
    "math": (("gsm8k", None),),
    "math_zh": (("mgsm_zh", None),),
    "qa": (("spec_bench", "qa"),),
    "translation": (("spec_bench", "translation"),),
    "mbpp": (("mbpp", None),),
    "rag_zh": (("xquad_zh", None),),
}
LOOKUPS = "ours,transformers_lookup,flashspec_ngram,economize_lookup"
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Mode:
    """What a mode measures unless the command says otherwise."""

    methods: str
    groups: str
    batches: tuple[int, ...]
    per_group: int
    plain_every: int  # a plain run behind so many methods
    max_new_tokens: int
    eta_per_group: int


MODES = {
    "run": Mode(f"{LOOKUPS},ours:adversarial", ",".join(GROUPS), (1,), 10, 2, 96, 2),
    "off": Mode("ours:none,ours:off,ours:none@eager,ours:off@eager", "chat,math", (1, 8), 3, 1, 48, 0),
    "ragged": Mode("ours", "code_edit", (8,), 4, 1, 64, 2),
    "pair": Mode("ours,transformers_assisted,flashspec_model,economize_model", "pair", (1,), 10, 1, 64, 2),
}


@dataclass(frozen=True, slots=True)
class Item:
    """One batch of prompts of a group."""

    group: str
    ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]

    def inputs(self, pad: int, device: torch.device) -> dict[str, Tensor]:
        """Left-padded inputs of `generate`."""
        longest = max(map(len, self.prompts))
        ids = torch.tensor([[*[pad] * (longest - len(row)), *row] for row in self.prompts], device=device)
        mask = torch.tensor([[*[0] * (longest - len(row)), *[1] * len(row)] for row in self.prompts], device=device)
        return {"input_ids": ids, "attention_mask": mask}


def prompt_items(
    records: Sequence[dict[str, Any]], tokenizer: Any, groups: Sequence[str], batch: int, number: int, longest: int
) -> Iterator[Item]:
    """The first batches of each group whose prompts fit, one group after the other in turns."""
    by_group = []
    for group in groups:
        sources = [
            [r for r in records if r["suite"] == suite and category in (None, r["category"])]
            for suite, category in GROUPS[group]
        ]
        fitting: list[tuple[str, tuple[int, ...]]] = []
        for record in _in_turns(sources):
            if len(fitting) == batch * number:
                break
            tokens = _encode(tokenizer, record["turns"][0])
            if len(tokens) <= longest:
                fitting.append((record["id"], tokens))
        pieces = [fitting[start : start + batch] for start in range(0, len(fitting) - batch + 1, batch)]
        by_group.append([Item(group, *zip(*piece, strict=True)) for piece in pieces])
    return _in_turns(by_group)


def _in_turns(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    return (each for each in chain.from_iterable(zip_longest(*lists)) if each is not None)


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        return tuple(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def random_items(batch: int, number: int, vocabulary: int) -> Iterator[Item]:
    """Random prompts of 16 to 48 tokens."""
    generator = torch.Generator().manual_seed(0)
    for start in range(number):
        rows = [
            torch.randint(2, vocabulary, (16 + (7 * (start + row)) % 33,), generator=generator) for row in range(batch)
        ]
        names = tuple(f"random/{start}/{row}" for row in range(batch))
        yield Item("pair", names, tuple(tuple(row.tolist()) for row in rows))


def measure(
    bench: Bench, item: Item, methods: dict[str, Method], tokens: int, every: int, eta: bool
) -> dict[str, Any]:
    """Run an item: plain, `every` methods, plain again, and so on; a method that fails is noted and left out."""
    device = bench.model.device
    inputs = item.inputs(bench.pad, device)
    plain, names = build("plain", bench), list(methods)
    seconds, reference = timed(lambda: plain(inputs, tokens), device)
    plain_seconds, rate = [seconds], _rate(reference, seconds)
    results: dict[str, dict[str, Any]] = {}
    outputs: dict[str, Output] = {}
    for start in range(0, len(names), every):
        ran = []
        for name in names[start : start + every]:
            try:
                seconds, outputs[name] = timed(lambda name=name: methods[name](inputs, tokens), device)
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
            else:
                ran.append(name)
                results[name] = {"seconds": seconds, "rate": _rate(outputs[name], seconds)}
        if ran:
            seconds, again = timed(lambda: plain(inputs, tokens), device)
            plain_seconds.append(seconds)
            before, rate = rate, _rate(again, seconds)
            for name in ran:
                results[name]["speedup"] = speedup(results[name]["rate"], before, rate)
    for name, output in outputs.items():
        results[name] |= _describe(bench, item, reference, output)
        if eta and len(output.events) > 1:
            ideal = replay(bench.model, bench.draft, item.prompts, output.events)
            before, rate = rate, _rate(*reversed(timed(lambda: plain(inputs, tokens), device)))
            best = speedup(_rate(output, ideal), before, rate)
            results[name] |= {"ideal_speedup": best, "eta": results[name]["speedup"] / best}
    return {"plain_seconds": plain_seconds, "plain_tokens": sum(map(len, reference.rows)), "results": results}


def _rate(output: Output, seconds: float) -> float:
    return sum(map(len, output.rows)) / seconds


def _describe(bench: Bench, item: Item, plain: Output, output: Output) -> dict[str, Any]:
    """What is recorded of a run besides its time, such as where each row first differs from the plain run."""
    differences = []
    for row, (prompt, off, on) in enumerate(zip(item.prompts, plain.rows, output.rows, strict=True)):
        ids = torch.tensor([prompt], device=bench.model.device)
        found = find_difference(bench.model, ids, off, on)
        if found is not None:
            differences.append(
                {"row": row, "index": found.index, "gap": found.gap, "band": found.band, "near_tie": found.near_tie}
            )
    described = {
        "tokens": sum(map(len, output.rows)),
        "texts": len(output.rows),
        "differences": differences,
        "acceptance_length": output.acceptance_length,
    }
    if output.stats is not None:
        described |= {
            "draft_acceptance_rate": output.stats.draft_acceptance_rate,
            "steps_by_source": output.stats.steps_by_source,
            "lean_forward": output.stats.lean_forward,
            "fallback_reason": output.stats.fallback_reason,
        }
    return described


def load(options: argparse.Namespace) -> tuple[str, Bench, Any]:
    """Name of the model, what methods work with, and the tokenizer (`None` for the pair)."""
    dtype = getattr(torch, options.dtype)
    if options.mode == "pair":
        from tests.tiny import exact_pair

        target, draft = exact_pair(options.layers, options.noise, vocab_size=256, max_position_embeddings=4096)
        name = f"exact pair {options.layers}:1, noise {options.noise:g}"
        return name, Bench(target.to(dtype), draft.to(dtype), 0, ()), None
    from hf_specdec.tools.chat_model import fetch_chat_model
    from hf_specdec.tools.loading import load_model

    loaded = load_model(options.model or str(fetch_chat_model()), dtype=options.dtype)
    model, kept = loaded.model, loaded.model.generation_config
    end = kept.eos_token_id
    ends = tuple(end) if isinstance(end, list) else () if end is None else (end,)
    pad = kept.pad_token_id if kept.pad_token_id is not None else (ends or (0,))[0]
    # a checkpoint's own settings (repetition penalties and the like) would bind `generate` but not the peers' loops
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=kept.bos_token_id, eos_token_id=end, pad_token_id=pad
    )
    return Path(loaded.name).name, Bench(model, None, pad, ends), loaded.tokenizer


def run(options: argparse.Namespace) -> None:
    """Measure what isn't in the results file yet, until the time is up."""
    began, mode = time.perf_counter(), MODES[options.mode]
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # peers run on what Transformers has deprecated
    name, bench, tokenizer = load(options)
    methods, skipped = {}, {}
    for wanted in (options.methods or mode.methods).split(","):
        try:
            methods[wanted] = build(wanted, bench)
        except ImportError as error:
            skipped[wanted] = f"{type(error).__name__}: {error}"
            print(f"{wanted}: left out, {error}", file=sys.stderr)
    out, number = Path(options.out), options.per_group or mode.per_group
    now = {"kind": "about", "peers": peer_versions(), "skipped": skipped} | about(sys.argv)
    for what in changed([*read([out]), now]):
        print(f"{out} has results of another {what}", file=sys.stderr)
    append(out, now)
    done = {
        key(record): {each for each, result in record["results"].items() if "error" not in result}
        for record in merged(read([out]))
    }
    longest = 0.0  # seconds a prompt
    warm, with_eta = set(), dict[tuple[str, int], int]()
    for batch in options.batch or mode.batches:
        if tokenizer is None:
            items = random_items(batch, number, bench.model.config.vocab_size)
        else:
            records = read_lines(Path(options.prompts))
            groups = (options.groups or mode.groups).split(",")
            items = prompt_items(records, tokenizer, groups, batch, number, options.max_prompt_tokens)
        for index, item in enumerate(items):
            record = {
                "kind": "result", "mode": options.mode, "model": name, "dtype": options.dtype, "batch": batch,
                "max_new_tokens": options.max_new_tokens, "group": item.group, "ids": item.ids,
                "prompt_tokens": [len(prompt) for prompt in item.prompts],
            }  # fmt: skip
            place = (item.group, batch)
            with_eta[place] = with_eta.get(place, 0) + 1
            missing = [each for each in methods if each not in done.get(key(record), ())]
            if not missing:
                continue
            if options.minutes is not None and time.perf_counter() - began + longest * batch > 60 * options.minutes:
                print("time is up; the same command goes on from here", file=sys.stderr)
                return
            item_began = time.perf_counter()
            _warm_up(bench, item, {each: methods[each] for each in missing if (each, batch) not in warm})
            warm |= {(each, batch) for each in missing}
            turned = missing[index % len(missing) :] + missing[: index % len(missing)]
            eta, every = with_eta[place] <= options.eta_per_group, options.plain_every or mode.plain_every
            chosen = {each: methods[each] for each in turned}
            record |= measure(bench, item, chosen, options.max_new_tokens, every, eta)
            append(out, record)
            longest = max(longest, (time.perf_counter() - item_began) / batch)
            _say(record)


def _warm_up(bench: Bench, item: Item, methods: dict[str, Method]) -> None:
    """Run each method once, unmeasured; its errors show when it is measured."""
    inputs = item.inputs(bench.pad, bench.model.device)
    for method in (build("plain", bench), *methods.values()) if methods else ():
        try:
            method(inputs, WARM_UP_TOKENS)
        except Exception as error:
            print(f"warm-up: {type(error).__name__}: {error}", file=sys.stderr)


def _say(record: dict[str, Any]) -> None:
    found = [
        f"{name} {result['speedup']:.2f}{'' if not result['differences'] else '≠'}"
        if "speedup" in result
        else f"{name} ✗"
        for name, result in record["results"].items()
    ]
    print(f"{record['group']} {record['ids'][0]} B={record['batch']}: {', '.join(found)}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or read results and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="mode", required=True)
    for name, mode in MODES.items():
        command = commands.add_parser(name)
        command.add_argument("--out", required=True, help="results file, JSON lines; added to")
        command.add_argument("--methods", help=f"comma-separated; default {mode.methods}")
        command.add_argument("--dtype", default="float32" if name == "pair" else "bfloat16")
        command.add_argument(
            "--batch", type=int, action="append", help=f"batch size, repeatable; default {mode.batches}"
        )
        command.add_argument("--per-group", type=int, help=f"batches of each group; default {mode.per_group}")
        command.add_argument("--max-new-tokens", type=int, default=mode.max_new_tokens)
        command.add_argument("--plain-every", type=int, help=f"methods between plain runs; default {mode.plain_every}")
        command.add_argument(
            "--eta-per-group", type=int, default=mode.eta_per_group, help="batches of each group to measure η on"
        )
        command.add_argument("--minutes", type=float, help="stop before a prompt that would end later")
        command.add_argument("--threads", type=int, default=2)
        if name == "pair":
            command.add_argument("--layers", type=int, default=12)
            command.add_argument("--noise", type=float, default=0.0, help="on the draft's head: 0 accepts everything")
            continue
        command.add_argument("--prompts", required=True, help="JSONL with id, suite, category, turns")
        command.add_argument("--model", help="folder or id; default SmolLM2-135M-Instruct")
        command.add_argument("--groups", help=f"comma-separated; default {mode.groups}")
        command.add_argument("--max-prompt-tokens", type=int, default=700)
    command = commands.add_parser("summary")
    command.add_argument("results", nargs="+")
    command.add_argument("--json", help="write the figures here as well")
    options = parser.parse_args(arguments)
    if options.mode != "summary":
        run(options)
        return
    records = read(map(Path, options.results))
    summary = summarize(records) | {"about": [record for record in records if record.get("kind") == "about"]}
    if options.json:
        Path(options.json).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(markdown(summary))


if __name__ == "__main__":
    main()
