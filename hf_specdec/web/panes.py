"""What visitors read, as HTML: both answers, the legend, the figures, one round explained. All text is escaped.

Every token is a `<span>` with the time it came at, so that the page can play both answers again (`race.js`) without
asking the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .timeline import Comparison, Round, Side, Token


SOURCES = {
    "prompt_lookup": ("lookup", "copied from the prompt or the answer so far"),
    "draft_model": ("model", "from the draft model"),
    "cross_vocabulary": ("model", "from the draft model"),
    "recycling": ("recycling", "from the target's earlier second choices"),
    "eagle": ("head", "from the trained head"),
}
OTHER_SOURCE = ("other", "from another drafter")
KINDS = {
    "bonus": "the target's, behind a draft that was right to its end",
    "corrected": "the target's, in place of a draft token it refused",
    "own": "the target's, behind a tree of drafts",
    "plain": "the target's, no draft",
}
STAGES = {
    "loading": "Loading the model …",
    "warm-up": "Warming up, not timed …",
    "off": "Running without speculation …",
    "on": "Running with speculation …",
    "checking": "Comparing the texts …",
    "done": "",
}
CHANCES = (
    "Probabilities are the model's own at this temperature, before what else its generation settings do to them, such as a "
    "repetition penalty."
)
SHOWN_DRAFT = 24  # draft tokens of one round


def pane(side: Side, coloured: bool, empty: str = "") -> str:
    """One answer.

    Args:
        side: The answer, or what there is of it.
        coloured: Whether to tell drafted tokens from the target's own.
        empty: What to say in its place while it has no token.
    """
    if not side.tokens:
        return f'<div class="sd-text sd-empty" dir="auto">{escape(empty)}</div>'
    spans = "".join(span(token, coloured) for token in side.tokens)
    note = f'<div class="sd-note">Ended early: {escape(side.cut)}.</div>' if side.cut else ""
    name = "answer with speculation" if coloured else "answer without speculation"
    attributes = f'dir="auto" tabindex="0" role="group" aria-label="{name}" data-end="{side.seconds:.4f}"'
    return f'<div class="sd-text" {attributes}>{spans}</div>{note}'


def card(side: Side, label: str, coloured: bool, empty: str = "") -> str:
    """One answer under its heading, as `pane` and `counter` take them."""
    return f'<div class="sd-card">{counter(side, label)}{pane(side, coloured, empty)}</div>'


def span(token: Token, coloured: bool) -> str:
    """One token; its class says where it came from, its tooltip everything."""
    name = style_of(token) if coloured else "plain"
    about = tooltip(token) if coloured else f"token {token.id}, at {token.seconds:.2f} s{_chance(token)}"
    text = escape(token.text).replace("\r", "&#13;")
    return f'<span class="sd-t sd-{name}" data-t="{token.seconds:.4f}" data-tip="{escape(about)}">{text}</span>'


def style_of(token: Token) -> str:
    """The name of a token's style: a source's, or a kind's."""
    return SOURCES.get(token.source, OTHER_SOURCE)[0] if token.kind == "accepted" else token.kind


def tooltip(token: Token) -> str:
    """Round, source and probability of a token, as one line."""
    if token.kind == "accepted":
        origin = f"drafted and accepted ({SOURCES.get(token.source, (token.source,))[0]})"
    else:
        origin = KINDS[token.kind]
    return f"round {token.step}, {token.seconds:.2f} s: {origin}{_chance(token)}"


def _chance(token: Token) -> str:
    return "" if token.probability is None else f", probability {_percent(token.probability)}"


def _percent(share: float) -> str:
    return "under 1%" if 0 <= share < 0.005 else f"{share:.0%}"


def legend(side: Side) -> str:
    """Every style in use, a sample of it, and how many tokens have it."""
    counts: dict[str, int] = {}
    for token in side.tokens:
        counts[style_of(token)] = counts.get(style_of(token), 0) + 1
    meanings = {name: f"drafted and accepted: {text}" for name, text in (*SOURCES.values(), OTHER_SOURCE)} | KINDS
    entries = "".join(
        f'<li><span class="sd-t sd-{name}">{escape(name)}</span> {escape(meanings[name])} '
        f'<span class="sd-count">{count}</span></li>'
        for name, count in counts.items()
    )
    return (
        f'<ul class="sd-legend" aria-label="Legend">{entries}</ul><p class="sd-note">{CHANCES}</p>' if entries else ""
    )


def counter(side: Side, label: str) -> str:
    """A pane's heading: its name, and the tokens a second that `race.js` counts along."""
    speed = f"{side.tokens_per_second:.1f}" if side.tokens else "–"
    return (
        f'<div class="sd-bar"><span class="sd-label">{escape(label)}</span>'
        f'<span class="sd-speed"><b data-speed>{speed}</b> tokens/s</span>'
        f'<span class="sd-clock"><span data-clock>{side.seconds:.2f}</span> s</span></div>'
    )


def headline(found: Comparison | None, stage: str = "done", recorded: str = "") -> str:
    """The one big number, the tick, and what is going on.

    Args:
        found: The run, or `None` before the first.
        stage: One of `STAGES`.
        recorded: Where and when the run was recorded, if it isn't this machine's.
    """
    if found is None:
        return remark("Press Run.")
    parts = []
    if stage == "done" and found.speedup is not None:
        slower = " sd-slower" if found.speedup < 1 else ""
        word = "as fast: slower" if slower else "as fast"
        parts.append(f'<span class="sd-big{slower}">{found.speedup:.2f}× <small>{word}</small></span>')
        parts.append(_verdict(found))
        if not found.checked:
            parts.append('<span class="sd-stage">The check was stopped, so tokens have no probability.</span>')
    elif stage == "done":
        parts.append(
            f'<span class="sd-stage">Ended early: {escape(found.on.cut or found.off.cut or "stopped")}.</span>'
        )
    else:
        parts.append(f'<span class="sd-stage">{escape(STAGES[stage])}</span>')
    where = ", ".join(filter(None, (found.title, found.model, recorded or found.conditions)))
    if where:
        badge = '<b class="sd-badge">recorded</b> ' if recorded else ""
        parts.append(f'<span class="sd-where">{badge}{escape(where)}</span>')
    return f'<div class="sd-headline" role="status" aria-live="polite">{"".join(parts)}</div>'


def _verdict(found: Comparison) -> str:
    if found.same_text:
        return '<span class="sd-same">✓ same text: yes</span>'
    kind = "sd-tie" if found.near_tie else "sd-differs"
    why = found.difference or "where and why, the check would have told"
    return f'<span class="{kind}">✗ same text: no ({escape(why)})</span>'


def remark(text: str) -> str:
    """What goes on, where the big number would be."""
    return f'<div class="sd-headline" role="status"><span class="sd-stage">{escape(text)}</span></div>'


def problem(text: str) -> str:
    """An error, where the big number would be."""
    return f'<div class="sd-headline sd-problem" role="alert"><span class="sd-stage">{escape(text)}</span></div>'


def sentence(text: str) -> str:
    """A remark above the figures."""
    return f'<p class="sd-why">{escape(text)}</p>' if text else ""


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Figures of both sides: name, off, on."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(off)}</td><td>{escape(on)}</td></tr>'
        for name, off, on in rows
    )
    head = '<tr><th scope="col">figure</th><th scope="col">off</th><th scope="col">on</th></tr>'
    return f'<table class="sd-figures"><thead>{head}</thead><tbody>{body}</tbody></table>'


def shares(parts: Sequence[tuple[str, float]]) -> str:
    """A bar of what the time went to; the names and the numbers stand below it."""
    total = sum(seconds for _, seconds in parts) or 1.0
    bars = "".join(
        f'<span class="sd-share sd-share-{index}" style="width:{100 * seconds / total:.2f}%"></span>'
        for index, (_, seconds) in enumerate(parts)
    )
    names = "".join(
        f'<li><span class="sd-share-{index} sd-key"></span>{escape(name)} {seconds:.2f} s, {seconds / total:.0%}</li>'
        for index, (name, seconds) in enumerate(parts)
    )
    return f'<div class="sd-shares" aria-hidden="true">{bars}</div><ul class="sd-share-names">{names}</ul>'


def round_view(side: Side, number: int) -> str:
    """One round, step by step: the draft, the verdict on each token, where they part, what the target added.

    Args:
        side: The side with speculation.
        number: Which of its rounds, from 0.
    """
    if not side.rounds:
        return '<p class="sd-note">No rounds yet.</p>'
    one = side.rounds[min(max(number, 0), len(side.rounds) - 1)]
    new = side.tokens[one.first : one.first + one.tokens]
    before = "".join(token.text for token in side.tokens[: one.first])[-80:]
    title = f"<p><b>Round {one.step}</b> of {side.rounds[-1].step}, until {one.seconds:.2f} s</p>"
    context = f'<p class="sd-context" dir="auto">… {escape(before)}</p>' if before else ""
    return f'<div class="sd-round">{title}{context}<ol>{"".join(_steps(one, new))}</ol></div>'


def _steps(one: Round, new: Sequence[Token]) -> list[str]:
    own = new[one.accepted :]
    added = "".join(_chip(token.text, "target", _chance(token).removeprefix(", ")) for token in own)
    if not one.drafted:
        why = (
            "The prompt's pass gives the first token." if one.step == 0 else "No draft: the target decodes one token."
        )
        return [f"<li>{why} {added}</li>"]
    source, meaning = SOURCES.get(one.source, OTHER_SOURCE)
    verdicts = []
    for place, text in enumerate(one.drafted[:SHOWN_DRAFT]):
        if one.is_tree:
            verdicts.append(_chip(text, "tree", ""))
        elif place < one.accepted:
            verdicts.append(_chip(text, "yes", "✓ accepted"))
        elif place == one.accepted and own:
            chance = "" if one.rejected is None else f", probability {_percent(one.rejected)}"
            verdicts.append(_chip(text, "no", f"✗ refused{chance}"))
        else:
            verdicts.append(_chip(text, "unseen", "– not reached"))
    more = len(one.drafted) - SHOWN_DRAFT
    rest = f" … and {more} more" if more > 0 else ""
    number = f"{len(one.drafted)} token{'s' if len(one.drafted) > 1 else ''}"
    steps = [f"<li>Draft ({escape(source)}, {escape(meaning)}): {number}. {''.join(verdicts)}{rest}</li>"]
    steps.append("<li>Verify: the target reads all of them in one forward pass.</li>")
    if one.is_tree:
        kept = "".join(_chip(token.text, "yes", "✓ accepted") for token in new[: one.accepted])
        steps.append(f"<li>The longest branch that the target would have written: {one.accepted} tokens. {kept}</li>")
    elif one.accepted < len(one.drafted) and own:
        steps.append(f"<li>First divergence: token {one.accepted + 1} of the draft. {one.accepted} are kept.</li>")
    elif own:
        steps.append("<li>No divergence: all are kept.</li>")
    if own:
        name = "Bonus token" if own[-1].kind == "bonus" else "The target's own token"
        steps.append(f"<li>{name}, free with the same pass: {added}</li>")
    else:
        steps.append("<li>The answer ends inside the draft.</li>")
    return steps


def _chip(text: str, kind: str, note: str) -> str:
    shown = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"
    small = f" <small>{escape(note)}</small>" if note else ""
    return f'<span class="sd-chip sd-chip-{kind}"><bdi>{escape(shown)}</bdi>{small}</span>'


def figures(found: Comparison) -> list[tuple[str, str, str]]:
    """Both sides' figures, as `table` takes them."""
    off, on = found.off, found.on
    stats: dict[str, Any] = on.stats
    rows = [
        ("tokens", str(len(off.tokens)), str(len(on.tokens))),
        ("tokens/s, prompt included", f"{off.tokens_per_second:.1f}", f"{on.tokens_per_second:.1f}"),
        ("first token", _seconds(off.first_token_seconds), _seconds(on.first_token_seconds)),
        ("whole run", _seconds(off.seconds), _seconds(on.seconds)),
    ]
    if stats and not stats.get("fallback_reason"):
        accepted, drafted = stats["num_accepted_draft_tokens"], stats["num_draft_tokens"]
        rate = f"{accepted} of {drafted}" + (f" ({accepted / drafted:.0%})" if drafted else "")
        rows += [
            ("forward passes of the target", str(len(off.tokens)), str(stats["num_target_forwards"])),
            ("acceptance length (tokens a pass)", "1.00", f"{stats['mean_acceptance_length']:.2f}"),
            ("draft tokens accepted", "–", rate),
        ]
    return rows


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
