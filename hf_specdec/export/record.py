"""Reads what to export from the report of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecDecError
from ..tools.measured import read_record
from .engines import ExportRefused


@dataclass(frozen=True, slots=True)
class Checked:
    """A check, as far as an export needs it.

    Attributes:
        target: Hub id or path.
        draft: The draft model's, if there was one.
        method: The drafter.
        num_draft_tokens: The best length; `None` where it isn't known.
        max_batch: The largest batch that gains; `None`: no limit was found.
        verdict: `"on"`, `"on with settings"` or `"off"`.
        reasons: Why.
        record: The whole report.
    """

    target: str
    draft: str | None
    method: str
    num_draft_tokens: int | None
    max_batch: int | None
    verdict: str
    reasons: tuple[str, ...]
    record: Mapping[str, Any]

    @property
    def greedy_drafts(self) -> bool:
        """Whether, in its sampled part, the draft's most likely tokens were accepted more often than sampled ones."""
        families = (self.record.get("acceptance") or {}).get("families") or {}
        return (families.get("A1") or 0.0) > (families.get("A2") or 0.0)

    def refuse_if_off(self) -> None:
        """Raise where the check recommends to leave speculation off.

        Raises:
            ExportRefused: If it does.
        """
        if self.verdict == "off":
            why = " ".join(self.reasons) or "it gives no reason."
            raise ExportRefused(
                f"the check recommends to leave speculation off: {why.rstrip('.')}",
                "Say what to export all the same: --draft or --method, and --num-draft-tokens",
            )


def read_check(path: Path) -> Checked:
    """Read a report of `hf-specdec check --json FILE`.

    Raises:
        SpecDecError: If it isn't one.
    """
    record = read_record(path)
    if record["kind"] != "check":
        raise SpecDecError(f"{path} is a benchmark. Pass what `hf-specdec check --json FILE` wrote.")
    try:
        recommended, target = record["recommendation"], record["target"]
        draft = recommended.get("draft_model") or record.get("draft")
        used = (record.get("acceptance") or {}).get("drafter")
        method = recommended.get("drafter") or record.get("drafter") or "auto"
        if method == "auto":
            method = used if used and used != "none" else "hybrid" if draft else "prompt_lookup"
        return Checked(
            target=str(target["name"] if isinstance(target, Mapping) else target),
            draft=None if draft is None else str(draft),
            method=str(method),
            num_draft_tokens=recommended.get("num_draft_tokens") or None,
            max_batch=recommended.get("max_batch") or None,
            verdict=str(recommended["verdict"]),
            reasons=tuple(map(str, recommended.get("reasons") or ())),
            record=record,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecDecError(f"The report {path} lacks what it should have ({error!r}). Write it again.") from error
