"""The table of flags by version in docs/how-to/export.md, from the rules. `python -m tests.export.table` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from packaging.version import Version

from hf_specdec.export import ENGINES, load_engine
from hf_specdec.export.engines import Engine, Rule


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "export.md"
MARKS = ("<!-- flags by version: from the rules, not by hand -->", "<!-- end of the flags -->")
NAMES = {"target": "T", "draft": "D", "tokens": "K", "window": "K+1", "ngram": "4", "confidence": "P",
         "target_gguf": "T.gguf", "draft_gguf": "D.gguf", "target_py": '"T"', "draft_py": '"D"', "folder_py": '"FOLDER"',
         "target_ir_py": '"T"', "draft_ir_py": '"D"'}  # fmt: skip
CODE = ("draft_model=", "prompt_lookup=", "num_assistant_tokens", "confidence", "generate(", "max_ngram")


def table() -> str:
    """A section an engine, a row a rule."""
    parts = []
    for name in ENGINES:
        engine = load_engine(name)
        rows = "\n".join(_row(engine, rule) for rule in engine.rules)
        checked = "; ".join(_releases(engine))
        parts.append(
            f"### {engine.title}\n\n| versions | drafts | what it takes | family |\n|---|---|---|---|\n{rows}\n\n"
            f"Checked against {checked}.\n"
        )
    return "\n".join(parts)


def _releases(engine: Engine) -> list[str]:
    """Every package with its releases, the oldest first; and files of repositories."""
    packages: dict[str, set[Version]] = {}
    others: dict[str, None] = {}
    for each in (entry for rule in engine.rules for entry in rule.checked):
        if "package" in each:
            packages.setdefault(each["package"], set()).add(Version(each["version"]))
        else:
            others[f"`{each['file']}` of {each['repository']} at {each['commit'][:8]}"] = None
    return [f"{name} {', '.join(map(str, sorted(versions)))}" for name, versions in packages.items()] + list(others)


def _row(engine: Engine, rule: Rule) -> str:
    drafts = {"draft_model": "model", "prompt_lookup": "n-grams", "any": "any drafter"}[rule.method]
    versions = _builds(rule.versions) if engine.is_build else rule.versions
    taken = f"refused: {rule.refuse['reason']}" if rule.refuse else _taken(rule)
    if rule.sampled:
        taken += f"; sampling: also `{json.dumps(rule.sampled['config'])[1:-1]}`"
    if rule.other_sizes and "config" in rule.other_sizes:
        taken += f"; vocabularies of other sizes: also `{json.dumps(rule.other_sizes['config'])[1:-1]}`"
    family = "" if rule.refuse else rule.family or "–"
    family += f", {rule.sampled['family']}" if rule.sampled else ""
    return f"| {versions} | {drafts} | {taken} | {family} |"


def _taken(rule: Rule) -> str:
    if rule.code:
        lines = [line.strip() for line in rule.code if any(part in line for part in CODE)]
        return "<br>".join(f"`{_short(line)}`" for line in lines)
    flags = [part for part in rule.command if part not in ("{file}",)]
    # what is typed for any model is left out
    start = next(index for index, part in enumerate(flags) if part in ("{target}", "{target_gguf}")) + 1
    shown = " ".join(_config(rule) if part == "{config}" else _short(part) for part in flags[start:])
    return f"`{shown}`" + (f" with `{_config(rule)}`" if rule.file else "")


def _config(rule: Rule) -> str:
    return _short(json.dumps(rule.config).replace('"{tokens}"', "K").replace('"{ngram}"', "4"))


def _short(text: str) -> str:
    for name, letter in NAMES.items():
        text = text.replace(f"{{{name}}}", letter)
    return text


def _builds(versions: str) -> str:
    return " ".join(f"b{word}" if word.isdigit() else word for word in versions.split())


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")
