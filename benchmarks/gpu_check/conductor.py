"""Runs the parts, each safe from the others: a worker process takes them in order and says line by line what it found.

    conductor --- starts ---> worker: part 1, part 2, part 3 ...
        <--- {"begin": part} {"row": ...} {"end": part} {"fatal": reason} {"late": part} ---

A worker that dies, hangs or finds its device unusable costs the part it was in; another one takes the rest. So an error
that spoils a CUDA context, from which no process recovers, spoils one part. Knows no torch and nothing of what the parts do.

Invariant: every part ends in at least one row, also a part that failed or was never begun.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_check.report import Row

# How long a worker may stay silent: the longest single step is a first compilation or a model being made.
SILENCE_S = 170.0
# How long a worker that has said all may take to leave.
LEAVE_S = 20.0


class Conductor:
    """`command` starts a worker; names of parts are appended to it. `report(row)` is told of every row as it comes."""

    def __init__(
        self,
        command: Sequence[str],
        parts: Sequence[str],
        limit_s: float,
        *,
        cwd: Path | None = None,
        silence_s: float = SILENCE_S,
        report: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self._command = list(command)
        self._parts = list(parts)
        self._limit_s = limit_s
        self._cwd = cwd
        self._silence_s = silence_s
        self._report = report
        self.rows: list[Row] = []
        self.machine: dict[str, Any] = {}
        self._came_up = False
        self.seconds: dict[str, float] = {}

    def run(self) -> list[Row]:
        """All rows, in the order of the parts."""
        deadline_s = time.monotonic() + self._limit_s
        left = list(self._parts)
        while left and time.monotonic() < deadline_s:
            self._came_up = False
            done, reason = self._run_worker(left, deadline_s)
            left = left[done:]
            if reason is not None:
                # The part that was running. A worker that did not even come up would not the next time.
                for part in [left.pop(0) for _ in range(1 if self._came_up else len(left))]:
                    self._add(Row(part, "the whole part", reason, ok=False))
        for part in left:
            self._add(Row(part, "the whole part", "no time left", skipped=True))
        return self.rows

    def _run_worker(self, parts: Sequence[str], deadline_s: float) -> tuple[int, str | None]:
        """How many of the parts one worker finished, and why it ended before the last; None: for lack of time."""
        remaining_s = max(deadline_s - time.monotonic(), 0.0)
        command = [*self._command, "--limit-s", f"{remaining_s:.1f}", *parts]
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self._cwd) as process:
            reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            reader.start()
            done, reason = 0, None
            try:
                done, reason = self._listen(lines, deadline_s)
                if done == len(parts) or reason == "ended":
                    process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                pass  # whatever it still does there, its rows are here
            finally:
                process.kill()
        if done == len(parts):
            return done, None
        return done, f"the worker ended with status {process.returncode}" if reason == "ended" else reason

    def _listen(self, lines: queue.SimpleQueue[str | None], deadline_s: float) -> tuple[int, str | None]:
        done, began_s = 0, time.monotonic()
        while True:
            # A worker keeps to the time itself; what is a little late is still worth having.
            patience_s = min(self._silence_s, deadline_s + min(self._limit_s / 10, 20.0) - time.monotonic())
            try:
                line = lines.get(timeout=max(patience_s, 0.01))
            except queue.Empty:
                late = time.monotonic() > deadline_s
                return done, None if late else f"nothing was heard for {self._silence_s:g} s"
            if line is None:
                return done, "ended"
            message = _parse(line)
            if "row" in message:
                self._add(Row(**message["row"]))
            elif "end" in message:
                self.seconds[message["end"]] = round(time.monotonic() - began_s, 1)
                done, began_s = done + 1, time.monotonic()
            elif "machine" in message:
                self.machine, self._came_up = message["machine"], True
                began_s = time.monotonic()
            elif "fatal" in message:
                return done, message["fatal"]
            elif "late" in message:
                return done, None

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._report(row)


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    if stream is not None:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _parse(line: str) -> dict[str, Any]:
    """The message in a line; what else a library prints there is nothing."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
