"""`hf-specdec env`: versions and hardware for bug reports."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


SCHEMA_VERSION = 1
EXAMPLES = """Examples:

hf-specdec env

hf-specdec env --json"""


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions and hardware, for bug reports."""
    from ..tools.environment import describe_environment

    found = describe_environment()
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION} | found, indent=2))
        return
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
