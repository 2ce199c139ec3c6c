"""`hf-specdec env`: versions and hardware for bug reports."""

from __future__ import annotations

import json
from typing import Any

from .formats import Format, FormatOption, JsonOption, chosen


SCHEMA_VERSION = 1
EXAMPLES = """Examples:

hf-specdec env

hf-specdec env --format json

hf-specdec env --format quiet"""


def env(output: FormatOption = Format.HUMAN, as_json: JsonOption = False) -> None:
    """Print versions and hardware, for bug reports.

    --format quiet prints the installed versions on one line.
    """
    output = chosen(output, as_json)
    from ..tools.environment import describe_environment

    found = describe_environment()
    if output is Format.JSON:
        print(json.dumps({"schema_version": SCHEMA_VERSION} | found, indent=2))
    elif output is Format.QUIET:
        print(*(f"{name}=={value}" for name, value in found["versions"].items() if value))
    else:
        for name, value in _lines(found):
            print(f"- {name}: {value}")


def _lines(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """Flatten the description to one line for each value."""
    versions = [(name, value or "not installed") for name, value in found["versions"].items()]
    hardware = [
        ("platform", found["platform"]),
        ("CPU", f"{found['cpu']}, {found['cpu_cores']} cores, {found['torch_threads']} torch threads"),
        ("memory", "unknown" if found["memory_gib"] is None else f"{found['memory_gib']} GiB"),
        ("CUDA", found["cuda"] or "none"),
    ]
    gpus = [("GPU", f"{gpu['name']}, {gpu['memory_gib']} GiB") for gpu in found["gpus"]]
    return [*versions, *hardware, *gpus, ("MPS", "yes" if found["mps"] else "no"), *found["settings"].items()]
