"""The rules as data: whole, without gaps, and each with where it is from."""

from __future__ import annotations

import pytest

from hf_specdec.export import ENGINES, Setup, export, load_engine
from hf_specdec.export.acceptance import FAMILIES
from hf_specdec.export.engines import METHODS, Rule

from .table import MARKS, PAGE, table


RULES = [(engine, rule) for engine in ENGINES for rule in load_engine(engine).rules]


def name_of(value: object) -> str:
    return value.versions.replace(" ", "-") if isinstance(value, Rule) else str(value)


@pytest.mark.parametrize("engine", ENGINES)
def test_versions_have_no_gap_and_no_overlap(engine: str) -> None:
    known = load_engine(engine)
    for method in {rule.method for rule in known.rules}:
        rules = [rule for rule in known.rules if rule.method == method]
        assert rules[0].since is None
        assert rules[-1].before is None
        for earlier, later in zip(rules, rules[1:], strict=False):
            assert earlier.before == later.since
            assert known.version(later.since) < known.version(later.before or "999999")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_method_has_rules(engine: str) -> None:
    methods = {rule.method for rule in load_engine(engine).rules}
    assert methods in (set(METHODS), {"any"})


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=name_of)
def test_each_rule_is_whole(engine: str, rule: Rule) -> None:
    assert sum(map(bool, (rule.command, rule.code, rule.refuse))) == 1
    assert rule.family in (None, *FAMILIES)
    assert "{config}" not in rule.command or rule.config
    for each in rule.checked:
        assert each.get("seen") or each.get("absent")
        assert ("version" if "package" in each else "commit") in each
        assert each["file"]


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=name_of)
def test_what_is_emitted_was_seen_somewhere(engine: str, rule: Rule) -> None:
    """Every flag of a command stands in something that was read, but for rules that say they weren't checked so."""
    if rule.refuse or not rule.checked:
        assert rule.sources or rule.refuse or load_engine(engine).notes
        return
    seen = " ".join(text for each in rule.checked for text in each.get("seen", ())).replace("_", "-")
    for flag in rule.command:
        if flag.startswith("--spec") or flag.startswith("--draft") or flag.startswith("--num"):
            assert flag.removeprefix("--").replace("_", "-") in seen, flag


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=name_of)
def test_each_rule_can_be_filled_in(engine: str, rule: Rule) -> None:
    if rule.refuse:
        return
    method = "hybrid" if rule.method == "any" else rule.method
    setup = Setup(target="T", draft="X", method=method, num_draft_tokens=7, temperature=1.0)
    version = rule.since or _just_before(engine, rule)
    for other_sizes in {False, rule.other_sizes is not None}:
        found = export(engine, setup, version=version, other_sizes=other_sizes)
        assert "{" not in found.command.replace('{"', "").replace("{\n", "")
        assert found.command.strip()
        assert not any("{" in note for note in found.notes)


def _just_before(engine: str, rule: Rule) -> str:
    return "1" if load_engine(engine).is_build else "0.0.1"


def test_the_page_has_the_table() -> None:
    """`python -m tests.export.table` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(MARKS[0])[2].partition(MARKS[1])[0].strip() == table().strip()
