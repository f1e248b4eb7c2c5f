"""The results of the comparison with the peers: rows with a ratio and a target, by part, as a table and as a file.

Knows no server, no load and no prompt: `bench_peers` measures and fills the rows. Parts may be measured one by
one: a file keeps those that were not measured again, and each part says at which commit it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

LOWER, HIGHER = "at most", "at least"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of ours beside a peer's (or a fixed reference); `ratio` is ours over theirs."""

    figure: str
    unit: str
    ours: float
    peer: str
    theirs: float | None
    ratio: float
    bound: str
    target: float

    @property
    def reached(self) -> bool:
        return self.ratio <= self.target if self.bound == LOWER else self.ratio >= self.target


def compare(figure: str, unit: str, ours: float, peer: str, theirs: float, bound: str, target: float) -> Row:
    return Row(figure, unit, ours, peer, theirs, ours / theirs, bound, target)


def absolute(figure: str, unit: str, ours: float, bound: str, target: float, peer: str = "fixed") -> Row:
    return Row(figure, unit, ours, peer, None, ours, bound, target)


@dataclass(slots=True)
class PeerTable:
    """What was measured on `machine`; `parts` has each part's rows as plain data, the same as in the JSON file."""

    machine: dict[str, str]
    parts: dict[str, Any] = field(default_factory=dict)

    def add(self, part: str, commit: str, rows: Sequence[Row]) -> None:
        """Rows of a part, in place of those that it had."""
        self.parts[part] = {"measured": commit, "rows": [asdict(row) for row in rows]}

    def take_parts(self, stem: Path) -> None:
        """Begin with the parts in the file that `save` wrote there, if there is one."""
        path = stem.with_suffix(".json")
        if path.exists():
            self.parts = json.loads(path.read_text(encoding="utf-8"))["parts"]

    def save(self, stem: Path) -> None:
        """Write `stem` with the suffixes `.json` and `.txt`."""
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".txt").write_text(self.as_text(), encoding="utf-8")

    def as_text(self) -> str:
        """The table for people."""
        lines = machine.lines(self.machine)
        lines += ["", f"{'figure':58}{'ours':>10}{'theirs':>10}  {'unit':11}{'peer':18}{'ratio':>8}  target"]
        for part, found in self.parts.items():
            lines.append(f"-- {part} ({found['measured']})")
            lines += [_line(Row(**row)) for row in found["rows"]]
        return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    theirs = "" if row.theirs is None else f"{row.theirs:.1f}"
    ratio = "" if row.theirs is None else f"{row.ratio:.2f}"
    verdict = "reached" if row.reached else "missed"
    return (
        f"{row.figure:58}{row.ours:10.1f}{theirs:>10}  {row.unit:11}{row.peer:18}{ratio:>8}  "
        f"{row.bound} {row.target:g}: {verdict}"
    )
