"""Rows of the check: what was measured, what it should be, and the table and JSON made of them. Knows no torch.

A row is judged in one of two ways. `ok` says whether a result is right: a wrong one fails the check. `reached` says whether
a target of speed is met: a miss is reported and fails nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FAILED, SKIPPED = "FAILED", "skipped"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `value` is for people, `data` holds the same as numbers."""

    part: str
    name: str
    value: str = ""
    target: str = ""
    ok: bool | None = None
    reached: bool | None = None
    skipped: bool = False
    data: dict[str, Any] | None = None

    @property
    def verdict(self) -> str:
        if self.ok is False:
            return FAILED
        if self.skipped:
            return SKIPPED
        if self.reached is not None:
            return "reached" if self.reached else "missed"
        return "ok" if self.ok else "-"


def share_row(part: str, name: str, value: str, share: float, least: float | None, **data: Any) -> Row:
    """A measured share, against the least that it should be where there is a target."""
    return Row(
        part,
        name,
        value,
        "" if least is None else f">= {least:g}",
        reached=None if least is None else share >= least,
        data={"share": share, **data},
    )


def failed(rows: Sequence[Row]) -> bool:
    """Whether anything was wrong, or nothing was looked at."""
    return not rows or any(row.ok is False for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The rows for people, with a line of totals last."""
    lines = [("part", "what", "measured", "target", "verdict")]
    lines += [(row.part, row.name, row.value, row.target, row.verdict) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    shown = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in lines
    ]
    counts = {word: sum(row.verdict == word for row in rows) for word in ("ok", "reached", "missed", SKIPPED, FAILED)}
    total = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    return "\n".join([*shown, "", total])


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "verdict": row.verdict} for row in rows]
