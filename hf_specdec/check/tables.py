"""The report as small tables of words, which the terminal, Markdown and HTML show alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..selection.ranking import size
from ..tools.printable import printable
from ..tools.suites import ALL, BUILT_IN
from .verdict import failures


NONE = "–"
SHOWN_BAD = 10
RULES = {
    "A1": "greedy draft, ratio test: vLLM, SGLang",
    "A2": "sampled draft, ratio test: Transformers",
    "B1": "greedy draft, exact match: llama.cpp, TGI",
    "B2": "sampled draft, exact match: MLX-LM",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its title; the first column says what a row is about. `figure` is the picture that belongs to it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    figure: str | None = None

    def printable(self) -> Section:
        """The same without control characters, which ids and categories of a user's file may hold."""
        rows = tuple(tuple(map(printable, row)) for row in self.rows)
        return replace(self, rows=rows, notes=tuple(map(printable, self.notes)))


def headline(report: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    found = report["recommendation"]
    if report["static_only"]:
        reason = report["static"]["plain_reason"]
        return f"Nothing was measured. {'It would be decoded plainly.' if reason else 'It can be sped up.'}"
    if report["interrupted"]:
        return "Interrupted: no verdict yet."
    if not report["passed"]:
        return "FAIL: switch it off."
    lossless = "lossless" if _shown_lossless(report["lossless"]) else "no fault was found"
    if found["verdict"] == "off":
        return f"PASS, {lossless}. Verdict: off, it isn't shown to pay."
    return f"PASS, {lossless}. Verdict: {found['verdict']}."


def _shown_lossless(lossless: Mapping[str, Any]) -> bool:
    """Whether enough was looked at, greedy and sampled, to say more than that nothing was found."""
    greedy, sampled = lossless["greedy"], lossless["sampled"]
    return bool(greedy and greedy["num_draft_tokens"] and sampled and sampled["verdict"] == "pass")


def code_line(report: Mapping[str, Any]) -> str | None:
    """What to pass to `generate`, or `None` where the verdict is off."""
    if report["recommendation"]["verdict"] == "off":
        return None
    options = []
    if (drafter := report["settings"]["drafter"]) != "auto":
        options.append(f"drafter={drafter!r}")
    if report["settings"]["draft"]:
        options.append(f"draft_model={report['settings']['draft']!r}")
    return f"speculative=hf_specdec.SpecConfig({', '.join(options)})" if options else "speculative=True"


def sections(report: Mapping[str, Any]) -> list[Section]:
    """All tables that have something to show, in the order of their importance."""
    every = (
        _lossless, _speed, _categories, _positions, _lengths, _output_lengths, _temperatures, _families, _static, _bad,
    )  # fmt: skip
    return [section.printable() for build in every if (section := build(report)) is not None]


def notes(report: Mapping[str, Any]) -> list[str]:
    """What a reader has to know besides, one sentence each."""
    return list(map(printable, _notes(report)))


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    prompts = report["prompts"]
    if prompts["file"] == BUILT_IN:
        yield "These are the prompts that come with the package, not yours: check with your own (--prompts)."
    if prompts["num_bad_records"]:
        yield f"Records left out because they are no prompts: {prompts['num_bad_records']}."
    if prompts["left_out_too_long"]:
        longest = report["settings"]["max_prompt_tokens"]
        yield f"Prompts left out for more than {longest} tokens: {prompts['left_out_too_long']}."
    plan, settings = report["plan"], report["settings"]
    if plan and plan["text_tokens"] < settings["max_new_tokens"]:
        yield (
            f"The model is slow here ({plan['seconds_per_prompt']:.2g} s to read a prompt, {1000 * plan['seconds_per_token']:.0f} "
            f"ms a token): to stay within {settings['minutes']:g} "
            f"minutes (--minutes), texts that aren't timed have {plan['text_tokens']} tokens, and fewer prompts are timed"
            f"{_short_batches(plan)}."
        )
    for reason in (report["acceptance"] or {}).get("fallback_reasons", ()):
        yield f"Wholly or partly decoded plainly: {reason}."
    skipped = report["lossless"]["greedy"] and not report["lossless"]["sampled"]
    if skipped and not report["interrupted"] and "sampled" not in report["problems"]:
        yield "Sampling was not checked: that needs SciPy (pip install 'hf-specdec[check]')."
    yield from report["static"]["problems"]


def _short_batches(plan: Mapping[str, Any]) -> str:
    """Which timed runs were shortened."""
    tokens = plan["timed_tokens"]
    short = {size: number for size, number in tokens.items() if number < max(tokens.values())}
    return "".join(f", batches of {size} over {number} tokens" for size, number in short.items())


def conditions(report: Mapping[str, Any]) -> str:
    """Model, place, prompts and versions in one line."""
    target, settings, environment = report["target"], report["settings"], report["environment"]
    versions = environment["versions"]
    parts = [str(target["name"])]
    if "parameters" in target:
        hardware = target["hardware"] or f"{environment['cpu']}, {environment['torch_threads']} threads"
        parts += [f"{size(target['parameters'])} parameters", target["dtype"], hardware]
        parts.append(f"draft: {report['draft'] or 'no model'}, drafter: {report['drafter']}")
        parts.append(f"{len(report['prompts']['ids'])} prompts of {report['prompts']['file']}")
        parts.append(f"up to {settings['max_new_tokens']} new tokens, {settings['trials']} trials")
    parts += [f"torch {versions['torch']}", f"transformers {versions['transformers']}", report["date"]]
    return printable("; ".join(parts))


def reasons(report: Mapping[str, Any]) -> list[str]:
    """Why the verdict is what it is, one sentence each."""
    return list(map(printable, report["recommendation"]["reasons"]))


def _lossless(report: Mapping[str, Any]) -> Section | None:
    greedy, sampled = report["lossless"]["greedy"], report["lossless"]["sampled"]
    rows, remarks = [], []
    if greedy:
        others = [(greedy["ties"], "ties"), (greedy["near_ties"], "near-ties"), (greedy["mismatches"], "MISMATCHES")]
        found = [f"{greedy['same']} of {greedy['texts']} texts the same", *(f"{n} {name}" for n, name in others if n)]
        gap = (
            "" if greedy["worst_gap"] is None else f"; worst gap {greedy['worst_gap']:.2g}, band {greedy['band']:.2g}"
        )
        rows.append(("greedy", _word(greedy["verdict"]), ", ".join(found) + gap))
        remarks += greedy.get("reasons", ())
    if sampled:
        passed = sum(test["passed"] for test in sampled["tests"])
        text = f"{passed} of {len(sampled['tests'])} tests passed on {sampled['tokens']} tokens"
        text += ", looked at again with four times as many" if sampled["rerun"] else ""
        rows.append((f"sampled, T = {sampled['temperature']:g}", _word(sampled["verdict"]), text))
        remarks += [*sampled.get("reasons", ()), *_power(sampled)]
    rows += [("also", "FAIL", each) for each in failures(report)]
    return Section("Is it lossless here?", ("", "verdict", "found"), tuple(rows), tuple(remarks)) if rows else None


def _power(sampled: Mapping[str, Any]) -> Iterator[str]:
    power = sampled.get("power") or {}
    chance = power.get("probability")
    kinds = {"draft_share": "draft tokens", "top_share": "most likely tokens"}
    found = [f"{100 * power[key]:.2g} % too many or too few {name}" for key, name in kinds.items() if power.get(key)]
    if chance and found:
        yield f"Found with {chance:.0%} probability: {' or '.join(found)}, as a share of all tokens."


def _word(verdict: str) -> str:
    return "FAIL" if verdict == "fail" else verdict


def _speed(report: Mapping[str, Any]) -> Section | None:
    rows = []
    for batch, each in report["speed"].items():
        if not each["on"] or not each["plain"]:
            continue
        ratio = each["on"]["speedup"]
        cells = (
            [NONE] * 3
            if ratio is None
            else [_times(ratio["geometric_mean"]), _span(each["interval"]), _times(ratio["worst"])]
        )
        rows.append((f"batch {batch}", _rate(each["plain"]), _rate(each["on"]), *cells))
    if not rows:
        return None
    refused = (each["on"]["refused"] for each in report["speed"].values() if each["on"])
    timed = ", ".join(
        _counted(len(each["cases"]), *(("prompt", "prompts") if batch == "1" else ("batch", "batches")))
        + ("" if batch == "1" else f" of {batch}")
        for batch, each in report["speed"].items()
    )
    remarks = (f"Timed in turns: {timed}.", *(why for why in refused if why))
    titles = ("", "plain tok/s", "on tok/s", "speed-up", "95 %", "worst")
    return Section("Does it pay?", titles, tuple(rows), remarks, "speed")


def _rate(summary: Mapping[str, Any]) -> str:
    return f"{summary['tokens_per_second']:.1f}"


def _categories(report: Mapping[str, Any]) -> Section | None:
    if report["acceptance"] is None:
        return None
    speeds = report["speed"].get("1", {}).get("categories", {})
    found = report["acceptance"]["by_category"]
    rows = []
    for name, each in found.items():
        if name == ALL and len(found) == 2:
            continue
        ratio = _total(report) if name == ALL else (speeds.get(name) or {}).get("speedup")
        rows.append((
            name, str(each["prompts"]), _share(each["draft_acceptance_rate"]), _span(each["draft_acceptance_rate_interval"], "%"),
            f"{each['mean_acceptance_length']:.2f}", _times(ratio["geometric_mean"] if ratio else None),
        ))  # fmt: skip
    k = report["acceptance"]["num_draft_tokens"]
    remark = (
        f"Greedy, {k} draft tokens a round. accepted: accepted ÷ drafted, without bonus tokens. tok/step: 1 + accepted ÷ "
        "steps, with them. speed-up: adaptive length, batch 1."
    )
    titles = ("category", "prompts", "accepted", "95 %", "tok/step", "speed-up")
    return Section("Acceptance by category", titles, tuple(rows), (remark,), "categories")


def _total(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = (report["speed"].get("1", {}).get("on") or {}).get("speedup")
    return found


def _positions(report: Mapping[str, Any]) -> Section | None:
    if report["acceptance"] is None:
        return None
    found = report["acceptance"]["by_category"][ALL]["positions"]
    rows = tuple(
        (str(each["position"]), str(each["drafted"]), _share(each["rate"]), _span(each["interval"], "%")) for each in found
    )  # fmt: skip
    remark = "accepted: the chance that the token there is accepted, given that all before it were."
    titles = ("position", "tried", "accepted", "95 %")
    return Section("Acceptance by position", titles, rows, (remark,), "positions") if rows else None


def _lengths(report: Mapping[str, Any]) -> Section | None:
    found = report["draft_length"]
    if found is None:
        return None
    rows = tuple(
        (str(each["num_draft_tokens"]), f"{each['tokens']:.2f}", _times(each["speedup"])) for each in found["curve"]
    )
    others = [
        f"{best or 'none'} at batch {rows}"
        for rows, best in report["best_by_batch"].items()
        if int(rows) != found["batch"]
    ]
    best = f"Best: {'; '.join([str(found['best'] or 'none, do not draft'), *others])}."
    even = found["break_even"]
    level = (
        "No acceptance would pay." if even is None else f"At {even:.0%} acceptance at every position it gains nothing."
    )
    gain = (
        f"A draft step costs {found['draft_cost']:.2f} of a pass. From acceptance and measured costs, against the same loop "
        f"without drafts, whose one-token pass takes 1/{found['forward_gain']:.2f} of Transformers' step."
    )
    titles = ("draft tokens", "tok/step", "predicted")
    return Section("Best fixed draft length, predicted", titles, rows, (f"{best} {level} {gain}",), "draft_length")


def _output_lengths(report: Mapping[str, Any]) -> Section | None:
    found = report["curves"]["output_length"]
    if not found or _total(report) is None:
        return None
    rows = tuple((str(each["tokens"]), str(each["cases"]), _times(each["speedup"])) for each in found)
    remark = "If the texts of batch 1 ended there, the prompt's pass included."
    return Section("By length of the output", ("tokens", "prompts", "speed-up"), rows, (remark,), "output_length")


def _temperatures(report: Mapping[str, Any]) -> Section | None:
    found = report["curves"]["temperature"]
    rows = tuple(
        (f"{each['temperature']:g}", NONE if each["refused"] else _times(each["speedup"]), f"{each['mean_acceptance_length']:.2f}")
        for each in found
    )  # fmt: skip
    remarks = tuple(dict.fromkeys(each["refused"] for each in found if each["refused"]))
    cases = f"{_counted(found[0]['cases'], 'prompt', 'prompts')}, one at a time." if found else ""
    titles = ("temperature", "speed-up", "tok/step")
    return Section("By temperature", titles, rows, (cases, *remarks), "temperature") if rows else None


def _families(report: Mapping[str, Any]) -> Section | None:
    found = (report["acceptance"] or {}).get("families") or {}
    if not any(rate is not None for rate in found.values()):
        return None
    rows = tuple((name, RULES[name], _share(found[name])) for name in RULES)
    temperature = report["acceptance"]["sampled"]["temperature"]
    remark = f"Chance of a draft token at temperature {temperature:g} with the same two models; greedy rates carry over as they are."
    return Section("What other engines would accept", ("rule", "it is", "accepted"), rows, (remark,))


def _static(report: Mapping[str, Any]) -> Section:
    found = report["static"]
    rows: list[tuple[str, str]] = []
    if target := found["target"]:
        kind = ", ".join(target["architectures"]) or target["model_type"]
        rows.append(("architecture", f"{kind}, {size(target['parameters'])} parameters, {target['layers']} layers"))
    rows.append(("can be sped up", f"no: {found['plain_reason']}" if found["plain_reason"] else "yes"))
    if cache := found["cache"]:
        rows.append(("cache", f"{cache['bytes_per_token'] / 1024:,.4g} KiB a token and row"))
    if choice := found["draft_choice"]:
        gain = "" if choice["predicted_speedup"] is None else f", predicted {choice['predicted_speedup']:.2f} ×"
        rows.append(("draft", f"{choice['id']}: {choice['verdict']}{gain}; {'; '.join(choice['reasons'])}"))
    else:
        rows.append(("draft", "no model: text is copied from the prompt and the answer"))
    if words := found["vocabulary"]:
        rows.append(("vocabulary", "; ".join([words["verdict"], *words["reasons"]])))
        rows += [(f"in {name}", "; ".join(warnings)) for name, warnings in words["engines"].items() if warnings]
    if memory := found["memory"]:
        load = f"batch {memory['batch']}, {memory['context']:,} tokens a row"
        for device in memory["devices"]:
            used = device["target_gib"] + device["draft_gib"] + device["working_gib"]
            rows.append(
                (f"memory, {device['device']}", f"{used:.2f} GiB used, {device['free_gib']:.2f} GiB free ({load})")
            )
    return Section("Without weights", ("", ""), tuple(rows))


def _bad(report: Mapping[str, Any]) -> Section | None:
    found: Sequence[Mapping[str, Any]] = report["prompts"]["bad_records"]
    rows = tuple((str(each["line"] or NONE), each["reason"]) for each in found[:SHOWN_BAD])
    more = report["prompts"]["num_bad_records"] - len(rows)
    remarks = (f"And {more} more.",) if more > 0 else ()
    return Section("Records that are no prompts", ("line", "why"), rows, remarks) if rows else None


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _share(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:.0%}"


def _times(ratio: float | None) -> str:
    return NONE if not ratio else f"{ratio:.2f}×"


def _span(interval: Sequence[float] | None, unit: str = "") -> str:
    if interval is None:
        return NONE
    low, high = interval
    return f"{100 * low:.0f} – {100 * high:.0f} %" if unit else f"{low:.2f} – {high:.2f}"
