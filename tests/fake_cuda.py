"""A CUDA device for tests: streams are queues whose work happens when the test cranks it, in any order that events allow.

Addresses are those of real memory, so that copies move real bytes. Every rule is CUDA's: a wait refers to the event as
recorded when the wait was enqueued; an event that was never recorded has happened; recording again replaces the record.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


class CudaError(Exception):
    pass


@dataclass(eq=False)
class Record:
    happened: threading.Event = field(default_factory=threading.Event)


class FakeCuda:
    """A `CudaRuntime` with a compute stream, number 0, to which a test adds work with `compute`."""

    def __init__(self) -> None:
        self.streams: dict[int, deque] = {0: deque()}
        self.events: dict[int, Record] = {}
        self.log: list[tuple] = []
        self.fail: dict[str, int] = {}
        self.lost: Exception | None = None
        self._next = 1

    # What a test does

    def compute(self, work: Callable[[], None]) -> None:
        self.streams[0].append(("work", work))

    def runnable(self) -> list[int]:
        return [s for s, ops in self.streams.items() if ops and self._may_run(ops[0])]

    def crank(self, stream: int) -> None:
        """Do the first thing in a stream."""
        kind, *rest = self.streams[stream].popleft()
        if kind == "work":
            rest[0]()
        elif kind == "record":
            rest[0].happened.set()
        elif kind == "copy":
            ctypes.memmove(*rest)

    def crank_all(self) -> None:
        while streams := self.runnable():
            self.crank(streams[0])

    def lose_context(self) -> None:
        """Every further call fails, and nothing runs any more."""
        self.lost = CudaError("an illegal memory access was encountered")
        for ops in self.streams.values():
            ops.clear()
        for record in self.events.values():
            record.happened.set()

    # CudaRuntime

    def create_stream(self) -> int:
        stream = self._number()
        self.streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        assert not self.streams.pop(stream)

    def create_event(self) -> int:
        self._check("create_event")
        event = self._number()
        self.events[event] = Record()
        self.events[event].happened.set()
        return event

    def destroy_event(self, event: int) -> None:
        assert self.events.pop(event).happened.is_set()

    def record(self, event: int, stream: int) -> None:
        self._check("record")
        self.events[event] = Record()
        self.streams[stream].append(("record", self.events[event]))

    def wait(self, stream: int, event: int) -> None:
        self._check("wait")
        self.streams[stream].append(("wait", self.events[event]))

    def has_happened(self, event: int) -> bool:
        self._check("has_happened")
        return self.events[event].happened.is_set()

    def synchronize_event(self, event: int) -> None:
        assert self.events[event].happened.wait(30)

    def synchronize_stream(self, stream: int) -> None:
        self._check("synchronize_stream")
        while self.streams[stream]:
            self.crank(self.runnable()[0])

    def copy(self, targets, sources, nbytes, to_device, stream) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._check("copy")
            self.streams[stream].append(("copy", target, source, nbytes))

    def _check(self, name: str) -> None:
        if self.lost is not None:
            raise self.lost
        left = self.fail.get(name)
        if left == 0:
            del self.fail[name]
            raise CudaError(f"{name} was refused")
        if left is not None:
            self.fail[name] = left - 1

    def _may_run(self, op: tuple) -> bool:
        return op[0] != "wait" or op[1].happened.is_set()

    def _number(self) -> int:
        self._next += 1
        return self._next
