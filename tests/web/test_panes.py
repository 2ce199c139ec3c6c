"""The HTML that visitors see: every character of the answer and nothing else as text, and everything said of a token."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from hf_specdec.web import panes
from hf_specdec.web.timeline import Comparison, Round, Side, Token


NASTY = [
    "<script>alert(1)</script>", "</span></div>", '" onmouseover="x', "' & &amp; &lt;", "\n\n", "\t", "   ", "\r\n", "\r",
    "a\x00b", "\x1b[31m", "é👩‍🚀你", "שלום\u202e", "\\", "-->", "<!--", "]]>", "{0}", "%s", "",
]  # fmt: skip
ACTIVE = {"script", "img", "iframe", "a", "style", "svg", "form", "input"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    parts: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def all(self, name: str = "", style: str = "") -> list[Element]:
        inside = [part for part in self.parts if isinstance(part, Element)]
        mine = [each for each in inside if (not name or each.name == name) and (not style or style in each.classes)]
        return mine + [found for each in inside for found in each.all(name, style)]


class Parser(HTMLParser):
    """A tree of elements; fails where tags don't match or anything could run."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.path = [self.root]
        self.feed(html)
        self.close()
        assert self.path == [self.root], "an element is open"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ACTIVE
        assert not any(name.startswith("on") for name, _ in attrs)
        self.path[-1].parts.append(Element(tag, {name: value or "" for name, value in attrs}))
        self.path.append(self.path[-1].parts[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.path[-1].parts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError("a comment")

    handle_decl = unknown_decl = handle_pi = handle_comment


def parsed(html: str) -> Element:
    return Parser(html).root


def side(*kinds: str, texts: list[str] | None = None) -> Side:
    """Tokens of these kinds, a second apart; `kind:source` for accepted ones."""
    tokens = []
    for at, kind in enumerate(kinds):
        name, _, source = kind.partition(":")
        text = texts[at] if texts else f"t{at} "
        tokens.append(Token(at, text, float(at + 1), name, at // 2, source, 0.125 * (at % 8)))
    return Side(tokens, [], float(len(tokens)), True)


EVERY_KIND = (
    "plain", "accepted:prompt_lookup", "accepted:draft_model", "accepted:cross_vocabulary", "accepted:recycling",
    "accepted:eagle", 'accepted:"><b>own', "bonus", "corrected", "own",
)  # fmt: skip


class TestPane:
    @pytest.mark.parametrize("coloured", [True, False])
    def test_text_is_the_answer(self, coloured: bool) -> None:
        one = side(*["plain"] * len(NASTY), texts=NASTY)
        root = parsed(panes.pane(one, coloured))
        assert root.all("div", "sd-text")[0].text == one.text == "".join(NASTY)
        assert [each.text for each in root.all("span")] == NASTY
        assert root.text == one.text

    def test_carriage_returns_survive_a_browser(self) -> None:
        """Which makes newlines of those that aren't written as references."""
        assert "\r" not in panes.pane(side("plain", texts=["a\r\nb\rc"]), True)

    def test_tooltips(self) -> None:
        one = side(*EVERY_KIND)
        spans = parsed(panes.pane(one, True)).all("span", "sd-t")
        assert len(spans) == len(EVERY_KIND)
        for token, span in zip(one.tokens, spans, strict=True):
            about = span.attributes["data-tip"]
            assert f"round {token.step}, {token.seconds:.2f} s: " in about
            shown = "under 1%" if token.probability < 0.005 else f"{token.probability:.0%}"
            assert about.endswith(f"probability {shown}")
            assert float(span.attributes["data-t"]) == token.seconds
        tips = [span.attributes["data-tip"] for span in spans]
        names = ["lookup", "model", "model", "recycling", "head", '"><b>own']
        assert [re.findall(r"accepted \((.*)\)", tip) for tip in tips[1:7]] == [[name] for name in names]
        for tip, kind in zip([tips[0], *tips[7:]], ["plain", "bonus", "corrected", "own"], strict=True):
            assert panes.KINDS[kind] in tip

    def test_no_probability_yet(self) -> None:
        one = side("plain")
        one.tokens[0].probability = None
        assert "probability" not in panes.pane(one, True) + panes.pane(one, False)

    def test_styles(self) -> None:
        spans = parsed(panes.pane(side(*EVERY_KIND), True)).all("span", "sd-t")
        styles = ["plain", "lookup", "model", "model", "recycling", "head", "other", "bonus", "corrected", "own"]
        assert [span.classes[1] for span in spans] == [f"sd-{name}" for name in styles]

    def test_off_is_plain(self) -> None:
        spans = parsed(panes.pane(side("plain", "plain"), False)).all("span")
        assert {tuple(span.classes) for span in spans} == {("sd-t", "sd-plain")}
        assert spans[1].attributes["data-tip"] == "token 1, at 2.00 s, probability 12%"

    def test_nothing_yet(self) -> None:
        root = parsed(panes.pane(Side(), True, "<i>nothing</i>"))
        assert root.text == "<i>nothing</i>"
        assert "sd-empty" in root.all("div")[0].classes

    def test_cut(self) -> None:
        root = parsed(panes.pane(replace(side("plain", texts=["a"]), cut="<time> limit"), True))
        assert root.all("div", "sd-note")[0].text == "Ended early: <time> limit."
        assert root.all("div", "sd-text")[0].text == "a"

    def test_the_two_have_names(self) -> None:
        names = [parsed(panes.pane(side("plain"), on)).all("div")[0].attributes["aria-label"] for on in (True, False)]
        assert names == ["answer with speculation", "answer without speculation"]


class TestLegend:
    def test_styles_in_use(self) -> None:
        entries = parsed(panes.legend(side(*EVERY_KIND, "plain", "bonus", "bonus"))).all("li")
        counts = {each.all("span", "sd-t")[0].text: int(each.all("span", "sd-count")[0].text) for each in entries}
        assert counts == {
            "plain": 2, "lookup": 1, "model": 2, "recycling": 1, "head": 1, "other": 1, "bonus": 3, "corrected": 1, "own": 1,
        }  # fmt: skip
        for each in entries:
            sample = each.all("span", "sd-t")[0]
            assert sample.classes == ["sd-t", f"sd-{sample.text}"]

    def test_only_those(self) -> None:
        root = parsed(panes.legend(side("plain", "plain")))
        assert len(root.all("li")) == 1
        assert root.all("p", "sd-note")[0].text == panes.CHANCES  # what the tooltips' numbers are
        assert panes.legend(Side()) == ""


def round_of(drafted: list[str], accepted: int, tokens: list[Token], **more: Any) -> Side:
    """A prompt's round with one token, then the round in question."""
    first = Token(9, "first ", 0.5)
    source = more.pop("source", "draft_model" if drafted else "none")
    one = Round(1, source, drafted, accepted, 1, len(tokens), 1.0, **more)
    return Side([first, *tokens], [Round(0, "none", [], 0, 0, 1, 0.5), one], 1.0, True)


def accepted(*texts: str) -> list[Token]:
    return [Token(1, text, 1.0, "accepted", 1, "draft_model") for text in texts]


def own(kind: str, text: str = "own") -> Token:
    return Token(2, text, 1.0, kind, 1, "", 0.75)


class TestRound:
    def view(self, one: Side, number: int = 1) -> tuple[list[str], list[tuple[str, str]]]:
        """Its steps, and its chips' styles and texts."""
        root = parsed(panes.round_view(one, number))
        chips = [(chip.classes[1].removeprefix("sd-chip-"), chip.text) for chip in root.all("span", "sd-chip")]
        return [step.text for step in root.all("li")], chips

    def test_all_accepted(self) -> None:
        steps, chips = self.view(round_of(["a", "b"], 2, [*accepted("a", "b"), own("bonus")]))
        assert chips == [("yes", "a ✓ accepted"), ("yes", "b ✓ accepted"), ("target", "own probability 75%")]
        assert steps[0].startswith("Draft (model, from the draft model): 2 tokens.")
        assert steps[2] == "No divergence: all are kept."
        assert steps[3].startswith("Bonus token, free with the same pass:")

    def test_some_accepted(self) -> None:
        steps, chips = self.view(round_of(["a", "b", "c"], 1, [*accepted("a"), own("corrected")], rejected=0.25))
        assert chips == [
            ("yes", "a ✓ accepted"), ("no", "b ✗ refused, probability 25%"), ("unseen", "c – not reached"),
            ("target", "own probability 75%"),
        ]  # fmt: skip
        assert steps[2] == "First divergence: token 2 of the draft. 1 are kept."
        assert steps[3].startswith("The target's own token")

    def test_none_accepted(self) -> None:
        steps, chips = self.view(round_of(["a"], 0, [own("corrected")]))
        assert chips == [("no", "a ✗ refused"), ("target", "own probability 75%")]
        assert "1 token." in steps[0]
        assert steps[2].startswith("First divergence: token 1")

    def test_tree(self) -> None:
        tokens = [*accepted("b", "c"), own("own")]
        steps, chips = self.view(round_of(["a", "b", "c", "d"], 2, tokens, is_tree=True, source="recycling"))
        assert chips == [
            *[("tree", text) for text in "abcd"], ("yes", "b ✓ accepted"), ("yes", "c ✓ accepted"),
            ("target", "own probability 75%"),
        ]  # fmt: skip
        assert "The longest branch that the target would have written: 2 tokens." in steps[2]

    def test_no_draft(self) -> None:
        steps, chips = self.view(round_of([], 0, [own("plain")]))
        assert steps == ["No draft: the target decodes one token. own probability 75%"]
        assert chips == [("target", "own probability 75%")]

    def test_the_prompts(self) -> None:
        steps, chips = self.view(round_of([], 0, [own("plain")]), 0)
        assert steps[0].startswith("The prompt's pass gives the first token.")
        assert chips == [("target", "first␣")]

    @pytest.mark.parametrize("kept", [2, 3], ids=["inside", "at its last token"])
    def test_the_answer_ends_in_the_draft(self, kept: int) -> None:
        """Nothing diverged, and nothing was refused."""
        steps, chips = self.view(round_of(["a", "b", "c"], kept, accepted(*"abc"[:kept])))
        assert [style for style, _ in chips] == ["yes"] * kept + ["unseen"] * (3 - kept)
        assert steps[-1] == "The answer ends inside the draft."
        assert not any("ivergence" in step for step in steps)

    def test_long_draft(self) -> None:
        texts = [str(at) for at in range(30)]
        steps, chips = self.view(round_of(texts, 0, [own("corrected")]))
        assert len(chips) == panes.SHOWN_DRAFT + 1
        assert steps[0].endswith("… and 6 more")

    def test_any_number(self) -> None:
        one = round_of(["a"], 0, [own("corrected")])
        first, last = panes.round_view(one, 0), panes.round_view(one, 1)
        assert panes.round_view(one, -5) == first != last
        assert panes.round_view(one, 10**9) == last
        assert "Round 1 of 1, until 1.00 s" in parsed(last).text

    def test_no_rounds(self) -> None:
        assert parsed(panes.round_view(Side(), 3)).text == "No rounds yet."

    @pytest.mark.parametrize("text", NASTY)
    def test_escaped(self, text: str) -> None:
        one = round_of([text, text], 1, [*accepted(text), own("corrected", text)], source=text)
        one.tokens[0].text = text
        shown = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("\r", "␍") or "∅"
        root = parsed(panes.round_view(one, 1))
        assert [chip.text for chip in root.all("bdi")] == [shown] * 3
        if text:
            assert root.all("p", "sd-context")[0].text == f"… {text}"


def comparison(**more: Any) -> Comparison:
    off, on = side("plain", "plain"), replace(side("plain", "bonus"), seconds=1.0)
    return replace(Comparison(off, on, {}, "model", "<CPU> & more"), **more)


class TestHeadline:
    def test_speedup(self) -> None:
        root = parsed(panes.headline(comparison()))
        assert root.all("span", "sd-big")[0].text == "2.00× as fast"
        assert root.all("span", "sd-same")[0].text == "✓ same text: yes"
        assert root.all("span", "sd-where")[0].text == "model, <CPU> & more"

    def test_slower(self) -> None:
        assert "slower" in panes.headline(comparison(on=replace(side("plain", "plain"), seconds=4.0)))

    @pytest.mark.parametrize(("near_tie", "style"), [(True, "sd-tie"), (False, "sd-differs")])
    def test_difference(self, near_tie: bool, style: str) -> None:
        root = parsed(panes.headline(comparison(difference="<at> 3", near_tie=near_tie)))
        assert root.all("span", style)[0].text == "✗ same text: no (<at> 3)"

    def test_a_check_that_was_stopped(self) -> None:
        root = parsed(panes.headline(comparison(checked=False)))
        assert root.all("span", "sd-same")
        assert "The check was stopped" in root.all("span", "sd-stage")[0].text
        differs = comparison(checked=False, off=side("plain", "plain", "plain"))
        assert "same text: no (where and why, the check would have told)" in parsed(panes.headline(differs)).text
        assert "The check" not in panes.headline(comparison())

    def test_cut(self) -> None:
        html = panes.headline(comparison(on=replace(side("plain"), cut="<stopped>")))
        assert "Ended early: <stopped>." in parsed(html).text
        assert "sd-big" not in html

    def test_stages(self) -> None:
        for stage, text in panes.STAGES.items():
            if text:
                root = parsed(panes.headline(comparison(), stage))
                assert root.all("span", "sd-stage")[0].text == text
                assert not root.all("span", "sd-big")

    def test_recorded(self) -> None:
        root = parsed(panes.headline(comparison(), recorded="<there> & then"))
        assert root.all("b", "sd-badge")[0].text == "recorded"
        assert root.all("span", "sd-where")[0].text == "recorded model, <there> & then"

    def test_before_the_first(self) -> None:
        assert parsed(panes.headline(None)).text == "Press Run."


@pytest.mark.parametrize("text", NASTY)
def test_everything_is_escaped(text: str) -> None:
    """What can hold text of a visitor, a model's name or an error."""
    for html in (
        panes.problem(text), panes.sentence(text), panes.counter(side("plain"), text), panes.table([(text, text, text)]),
        panes.shares([(text, 1.0)]), panes.headline(comparison(difference=text, conditions=text)),
        panes.headline(comparison(), recorded=text),
    ):  # fmt: skip
        assert text in parsed(html).text


def test_table() -> None:
    cells = parsed(panes.table([("a", "1", "2"), ("b", "3", "4")])).all("tr")
    assert [[cell.text for cell in row.parts] for row in cells] == [
        ["figure", "off", "on"],
        ["a", "1", "2"],
        ["b", "3", "4"],
    ]


def test_shares() -> None:
    root = parsed(panes.shares([("a", 1.0), ("b", 3.0)]))
    assert [bar.attributes["style"] for bar in root.all("span", "sd-share")] == ["width:25.00%", "width:75.00%"]
    assert [each.text for each in root.all("li")] == ["a 1.00 s, 25%", "b 3.00 s, 75%"]
    assert parsed(panes.shares([])).text == ""
    assert "0%" in panes.shares([("a", 0.0)])


def test_figures() -> None:
    stats = {
        "num_accepted_draft_tokens": 3, "num_draft_tokens": 4, "num_target_forwards": 5, "mean_acceptance_length": 1.75,
    }  # fmt: skip
    found = comparison()
    found.on.stats = stats
    rows = {name: (off, on) for name, off, on in panes.figures(found)}
    assert rows["tokens"] == ("2", "2")
    assert rows["tokens/s, prompt included"] == ("1.0", "2.0")
    assert rows["first token"] == ("1.00 s", "1.00 s")
    assert rows["whole run"] == ("2.00 s", "1.00 s")
    assert rows["forward passes of the target"] == ("2", "5")
    assert rows["acceptance length (tokens a pass)"] == ("1.00", "1.75")
    assert rows["draft tokens accepted"] == ("–", "3 of 4 (75%)")
    found.on.stats = stats | {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
    assert panes.figures(found)[-1][2] == "0 of 0"
    assert [off for _, off, _ in panes.figures(Comparison(Side(), Side(), {}, "", ""))] == ["0", "0.0", "–", "0.00 s"]
