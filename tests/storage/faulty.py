"""A medium that fails on demand, at every point where the disk tier touches LMDB or a file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tieredkv.storage.medium import Medium

READS = ("get", "scan", "first_key", "peek", "read")
WRITES = ("put", "delete", "commit", "sync", "write_file", "remove_file")
BOTH = ("begin", "stat")
OPERATIONS = (*READS, *WRITES, *BOTH)


class Gate(threading.Event):
    """Holds an operation up until it is set; `entered` is set when one has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def pass_through(self) -> None:
        self.entered.set()
        self.wait(30)


class FaultyMedium(Medium):
    """`faults[operation]` is called instead of the operation while it is there; it raises, waits, or returns a value.

    `after` lets that many calls of the operation pass first. `calls` counts them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, Callable[..., Any]] = {}
        self.after: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def fail(self, operation: str, error: BaseException | type[BaseException], *, after: int = 0) -> None:
        def raise_it(*args: Any, **more: Any) -> Any:
            raise error

        self.faults[operation] = raise_it
        self.after[operation] = after

    def block(self, operation: str) -> Gate:
        """The operation waits at a gate, then goes on as usual."""
        gate = Gate()
        plain = getattr(super(), operation)

        def wait(*args: Any, **more: Any) -> Any:
            gate.pass_through()
            return plain(*args, **more)

        self.faults[operation] = wait
        return gate

    def heal(self) -> None:
        self.faults.clear()
        self.after.clear()


def _through(operation: str) -> Callable[..., Any]:
    plain = getattr(Medium, operation)

    def call(self: FaultyMedium, *args: Any, **more: Any) -> Any:
        self.calls[operation] += 1
        fault = self.faults.get(operation)
        if fault is not None:
            if self.after[operation] <= 0:
                self.hits[operation] += 1
                return fault(*args, **more)
            self.after[operation] -= 1
        return plain(self, *args, **more)

    return call


for _operation in OPERATIONS:
    setattr(FaultyMedium, _operation, _through(_operation))
