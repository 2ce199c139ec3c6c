"""Reads what `hf-specdec check` and `hf-specdec bench` have measured back from their JSON. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SpecDecError


MOST_BYTES = 256 * 2**20
LEAST_TRIED = 10  # a position that was reached less often says nothing about acceptance
MODEL_SOURCES = ("draft_model", "cross_vocabulary")  # drafts from these cost a draft step a token, others nothing
KINDS = ("check", "bench")
SCHEMA_VERSION = 1


def read_record(path: str | Path) -> dict[str, Any]:
    """Read a report.

    Args:
        path: What `check --json FILE` or `bench --json FILE` wrote, or the `results.json` of `bench --out`.

    Raises:
        SpecDecError: If it can't be read, or is something else.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SpecDecError(f"{path} is larger than {MOST_BYTES // 2**20} MiB, so it is no report.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecDecError(f"The report {path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise SpecDecError(f"The report {path} isn't JSON ({error}).") from error
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise SpecDecError(f"{path} is no report of hf-specdec check or bench. Write one with --json FILE.")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise SpecDecError(
            f"The report {path} has schema version {found.get('schema_version')!r}, not {SCHEMA_VERSION}. "
            "Write it again with this version of hf-specdec."
        )
    return found


def conditions_of(
    record: Mapping[str, Any], *, method: str | None = None, batch: int | None = None
) -> tuple[dict[str, Any], str]:
    """What a gain is computed from, as far as it was measured.

    Args:
        record: From `read_record`.
        method: One of a benchmark's methods; `None` takes the one of the largest speed-up, or the longest acceptance.
        batch: A batch size that was measured; `None` is the smallest.

    Returns:
        Arguments of `Conditions`, and one line that says where they are from.

    Raises:
        SpecDecError: If nothing of the kind was measured.
    """
    try:
        return (_from_check if record["kind"] == "check" else _from_bench)(record, method, batch)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        if isinstance(error, SpecDecError):
            raise
        raise SpecDecError(f"The report lacks what it should have ({error!r}). Write it again.") from error


def _from_check(record: Mapping[str, Any], method: str | None, batch: int | None) -> tuple[dict[str, Any], str]:
    if method is not None:
        raise SpecDecError("A check measures one drafter; leave out --method.")
    acceptance = record["acceptance"]
    if not acceptance or not acceptance.get("per_position"):
        raise SpecDecError("This check measured no acceptance. Run it to its end.")
    sources = acceptance["steps_by_source"]
    costs = {int(size): each for size, each in (record.get("costs") or {}).items()}
    size = min(costs, default=1) if batch is None else batch
    found: dict[str, Any] = {
        "acceptance": tuple(map(float, acceptance["per_position"])),
        "batch": size,
        "share": _drafting_share(sources),
    }
    if size in costs:
        widths = {int(width): seconds for width, seconds in costs[size]["forward"].items()}
        by_tokens = {size * width: seconds for width, seconds in widths.items()}
        found |= _costs(by_tokens, size, costs[size]["draft_step"], _model_share(sources))
    elif batch is not None and costs:
        raise SpecDecError(f"Batch {batch} wasn't measured; there are {', '.join(map(str, sorted(costs)))}.")
    return found, f"{_name(record['target'])}, {record.get('drafter')}, batch {size}, from a check"


def _from_bench(record: Mapping[str, Any], method: str | None, batch: int | None) -> tuple[dict[str, Any], str]:
    drafted = [each for each in record["summaries"] if each["acceptance_by_position"]]
    sizes = sorted({each["batch"] for each in drafted})
    if not drafted:
        raise SpecDecError("Nothing was drafted in this benchmark, so it has no acceptance to compute a gain from.")
    size = sizes[0] if batch is None else batch
    own = [each for each in drafted if each["batch"] == size]
    if not own:
        raise SpecDecError(f"Batch {size} wasn't measured; there are {', '.join(map(str, sizes))}.")
    whole = [each for each in own if each["category"] == "all"] or own
    named = [each for each in whole if method in (None, each["method"])]
    if not named:
        raise SpecDecError(f"There is no method {method!r}; there are {', '.join(each['method'] for each in whole)}.")
    summary = max(
        named, key=lambda each: ((each["speedup"] or {}).get("geometric_mean", 0), each["acceptance_length"])
    )
    chances = [accepted / tried for tried, accepted in summary["acceptance_by_position"] if tried >= LEAST_TRIED]
    if not chances:
        raise SpecDecError(f"No position was reached {LEAST_TRIED} times: too few drafts. Measure more prompts.")
    sources = summary["rounds_by_source"]
    found: dict[str, Any] = {"acceptance": tuple(chances), "batch": size, "share": _drafting_share(sources)}
    curve = next((each for each in record["cost_curves"] if each["rows"] == size), None)
    if curve is not None:
        by_tokens = {int(tokens): seconds for tokens, seconds in curve["forward"].items()}
        found |= _costs(by_tokens, size, curve["draft_step"], _model_share(sources))
    return found, f"{_name(record['target'])}, {summary['method']}, batch {size}, from a benchmark"


def _costs(by_tokens: Mapping[int, float], rows: int, draft_step: float | None, share: float) -> dict[str, Any]:
    """Costs in the loop's own forwards over one token a row, so that a faster forward isn't counted as the drafts' gain."""
    plain = by_tokens[rows]
    return {
        "verify_cost": {tokens: seconds / plain for tokens, seconds in by_tokens.items()},
        "draft_cost": share * (draft_step or 0.0) / plain,
    }


def _model_share(sources: Mapping[str, float]) -> float:
    """Share of the drafts that a draft model made."""
    drafts = sum(count for name, count in sources.items() if name != "none")
    return sum(sources.get(name, 0) for name in MODEL_SOURCES) / drafts if drafts else 0.0


def _drafting_share(sources: Mapping[str, float]) -> float:
    """Share of the steps that had a draft; all where the sources weren't told."""
    steps = sum(sources.values())
    return 1 - sources.get("none", 0) / steps if steps else 1.0


def _name(target: Any) -> str:
    name = target["name"] if isinstance(target, Mapping) else target
    return Path(str(name)).name if str(name).startswith(("/", ".")) else str(name)
