"""A benchmark's printed lines, kept to become a result file: what the machine is, then whatever is said.

Knows nothing of what is measured.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from benchmarks import machine

RESULTS = Path(__file__).with_name("results")


def result_stem(name: str) -> Path:
    """Where today's result of the benchmark `name` goes, without a suffix."""
    return RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"


class Report:
    """Lines that are printed at once, below a description of the machine."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        for line in machine.lines(machine.describe()):
            self.say(line)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def save(self, name: str) -> Path:
        """Write the lines to today's result file of the benchmark `name`."""
        path = result_stem(name).with_suffix(".txt")
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        return path
