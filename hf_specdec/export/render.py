"""Fills an engine's rule in: the command, or the lines of Python, with everything quoted as its reader needs it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ..errors import SpecDecError
from .engines import METHODS, ExportRefused, Rule, load_engine
from .folder import as_python, folder_files


NGRAM = 4  # longest match that is looked up, as of our own prompt lookup
CONFIDENCE = 0.4  # as of Transformers' `assistant_confidence_threshold`
DRAFTERS = ("draft_model", "hybrid", "prompt_lookup", "recycling")
NEAREST = {  # drafters that other engines don't have, and what comes closest
    "hybrid": "Hybrid drafting is this project's own: there the draft model drafts alone, and nothing is copied.",
    "cross_vocabulary": "Drafts across vocabularies are this project's own: there the draft model drafts alone.",
}
BATCH_LIMIT = "serve larger ones without it."
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is to be carried over.

    Attributes:
        target: Hub id or path.
        method: A drafter's name; other engines know `"draft_model"` and `"prompt_lookup"`.
        draft: Hub id or path of the draft model.
        num_draft_tokens: Tokens drafted a step; `None` only where the engine chooses itself.
        temperature: 0 is greedy.
        confidence: Least probability of a token that is still drafted, where the engine stops by it.
        max_batch: The largest batch that gains from drafts, where there is one.
        greedy_drafts: Whether the draft's most likely tokens were measured to be accepted more often than sampled ones.
        folder: Where a `custom_generate` folder is written.
    """

    target: str
    method: str
    draft: str | None = None
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    confidence: float = CONFIDENCE
    max_batch: int | None = None
    greedy_drafts: bool = False
    folder: str = "speculative"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A setup in an engine's terms.

    Attributes:
        engine: Its name.
        title: Its own name.
        method: The method there.
        version: The version that it was written for.
        command: What to paste: a shell command, or lines of Python.
        language: `"bash"` or `"python"`.
        argv: The arguments of a shell command, unquoted; empty for Python.
        files: Files that belong to it: name → text.
        family: How it judges drafts, where that has a name.
        weaker: Whether its drafts are known to be worse than the ones measured here.
        notes: What to know.
        sources: Where the rule is from.
        checked: What was seen in which file of which release.
        doubt: What speaks against trusting the rule for this version.
    """

    engine: str
    title: str
    method: str
    version: str
    command: str
    language: str
    argv: tuple[str, ...]
    files: dict[str, str]
    family: str | None
    weaker: bool
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    checked: tuple[dict[str, Any], ...]
    doubt: str | None


def export(engine: str, setup: Setup, *, version: str | None = None, other_sizes: bool = False) -> Export:
    """Write a setup in an engine's terms. Nothing is read and nothing is written.

    Args:
        engine: One of `ENGINES`.
        setup: What is to be carried over.
        version: The engine's, as it prints it; `None` is the newest that was checked.
        other_sizes: Whether the vocabularies of target and draft are known to have different sizes.

    Raises:
        ExportRefused: If the engine can't do it; the message says what can be done instead.
        SpecDecError: If there is no such engine, or the version is none.
    """
    known = load_engine(engine)
    parsed = known.version(version)
    method = _method(engine, known.title, setup)
    rule = known.rule(method, parsed)
    if rule.refuse is not None:
        raise ExportRefused(**rule.refuse)
    if setup.num_draft_tokens is None and not rule.folder:
        raise SpecDecError(
            f"{known.title} drafts a fixed number of tokens: pass --num-draft-tokens. `hf-specdec check` finds the best."
        )
    changes = _changes(known.title, rule, setup, other_sizes)
    values = _values(setup, rule)
    files = folder_files(setup) if rule.folder else {}
    config = _filled(rule.config | changes.get("config", {}), values)
    values["config"] = json.dumps(config, ensure_ascii=False)
    if rule.file is not None:
        # JSON is YAML, and needs no rules of quoting of its own
        files = {rule.file: json.dumps(config, indent=2) + "\n"}
    code = tuple(changes.get("code", rule.code))
    argv = tuple(str(_filled(each, values)) for each in rule.command)
    lines = [each.format(**values) for each in code] if code else [*_heredocs(files), shlex.join(argv)]
    notes = [note.format(**values) for note in (*known.notes, *rule.notes)]
    if setup.max_batch is not None:
        how = (rule.max_batch or BATCH_LIMIT).format(**values)
        notes.insert(0, f"Speculation was measured to gain up to batch {setup.max_batch}: {how}")
    if method != setup.method:
        notes.insert(0, NEAREST[setup.method])
    return Export(
        engine=known.name,
        title=known.title,
        method=method,
        version=f"b{parsed}" if known.is_build else str(parsed),
        command="\n".join(lines),
        language="python" if code else "bash",
        argv=() if code else argv,
        files=files,
        family=changes.get("family", rule.family),
        weaker=rule.weaker,
        notes=(*changes.get("notes", ()), *notes),
        sources=rule.sources,
        checked=rule.checked,
        doubt=known.doubt(version),
    )


def _method(engine: str, title: str, setup: Setup) -> str:
    """The method as other engines call it; those that have none like it are refused."""
    method = setup.method
    if engine == "custom-generate" and method in DRAFTERS:
        return method
    if method in NEAREST:
        method = "draft_model"
    if method not in (*METHODS, *DRAFTERS):
        known = ", ".join(DRAFTERS)
        raise SpecDecError(f"There is no drafter {method!r} that can be exported. Choose one of {known}.")
    if method not in METHODS:
        nearest = "draft_model" if setup.draft is not None else "prompt_lookup"
        raise ExportRefused(
            f"{title} has nothing like the drafter {method!r}",
            f"The nearest is --method {nearest}; a custom-generate folder keeps {method!r} as it is",
        )
    if method == "draft_model" and setup.draft is None:
        raise SpecDecError("A draft model must be named: pass --draft, or --method prompt_lookup.")
    return method


def _changes(title: str, rule: Rule, setup: Setup, other_sizes: bool) -> dict[str, Any]:
    """What the temperature and the vocabularies change in a rule."""
    if other_sizes and rule.method == "draft_model":
        if rule.other_sizes is None:
            raise ExportRefused(
                f"{title} wants vocabularies of the same size, and these two differ", "Take another draft model"
            )
        note = rule.other_sizes["note"]
        return {key: value for key, value in rule.other_sizes.items() if key != "note"} | {"notes": (note,)}
    if rule.sampled is not None and setup.temperature > 0 and not setup.greedy_drafts:
        return dict(rule.sampled)
    return {}


def _values(setup: Setup, rule: Rule) -> dict[str, Any]:
    tokens = setup.num_draft_tokens or 0
    names = {
        "target": setup.target,
        "draft": setup.draft or "",
        "target_gguf": _converted(setup.target, ".gguf"),
        "draft_gguf": _converted(setup.draft or "", ".gguf"),
        "target_ir": _converted(setup.target, "-openvino"),
        "draft_ir": _converted(setup.draft or "", "-openvino"),
        "folder": setup.folder,
    }
    return (
        names
        | {f"{name}_py": as_python(value) for name, value in names.items()}
        | {
            "tokens": tokens,
            "window": tokens + 1,
            "ngram": NGRAM,
            "shortest": NGRAM + tokens + 1,
            "confidence": setup.confidence,
            "batch": setup.max_batch or 0,
            "more": (setup.max_batch or 0) + 1,
            "file": rule.file,
        }
    )


def _converted(name: str, ending: str) -> str:
    """The name of a model after its conversion: a file or folder here, whatever the name of the original."""
    return name if name.endswith(ending) else PurePath(name).name + ending


def _filled(template: Any, values: dict[str, Any]) -> Any:
    """Fill placeholders in. One that is the whole text keeps its type, so that numbers stay numbers in JSON."""
    if isinstance(template, dict):
        return {key: _filled(value, values) for key, value in template.items()}
    if not isinstance(template, str):
        return template
    whole = _PLACEHOLDER.fullmatch(template)
    return values[whole[1]] if whole else template


def _heredocs(files: dict[str, str]) -> list[str]:
    return [f"cat > {shlex.quote(name)} <<'EOF'\n{text}EOF" for name, text in files.items()]
