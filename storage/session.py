"""What the parts of an open disk tier share: the environment, the counters, the verdicts, and one way to write.

Knows transactions and rows, not what a change is for. Invariant: nothing here raises; a write that did not happen
returns False and has been counted.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tieredkv.errors import InvariantError, StorageError
from tieredkv.storage.environment import StoreEnvironment
from tieredkv.storage.index import Index
from tieredkv.storage.rows import State
from tieredkv.storage.tier import BlockChange, Refusal

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESERVED_NBYTES = 64 * 1024
"""What the files beside LMDB's data file take at most; part of the capacity."""
LEAST_HEADROOM_NBYTES = 8 << 20
MAX_CHANGES = 1 << 17
CONTRADICTIONS = (InvariantError, struct.error)
"""What a damaged row leads to. The index is then rebuilt."""


def map_nbytes_for(capacity_nbytes: int) -> int:
    """Most bytes that the data file may take, so that all files together stay within the capacity."""
    return max(capacity_nbytes - RESERVED_NBYTES, 0) // 65536 * 65536


def budget_nbytes_for(capacity_nbytes: int) -> int:
    """Most bytes that the blocks may cost; the rest is LMDB's for pages that are being replaced, and for fragments.

    A tenth of the map, and not less than a few blocks need: pages freed by one commit are free for the second one after it.
    """
    map_nbytes = map_nbytes_for(capacity_nbytes)
    return map_nbytes - max(map_nbytes // 10, min(map_nbytes // 3, LEAST_HEADROOM_NBYTES))


@dataclass(slots=True)
class Counts:
    """Since the store was opened here."""

    evictions: int = 0
    corrupt: int = 0
    stored: int = 0
    refused: int = 0
    failed: int = 0


class StoreSession:
    """One process's use of an open store.

    `condemned` are the hashes of records that failed their checks and have not been deleted yet. `write_lock` keeps
    this process's writers apart where they share more than a transaction. `last_state` is what the counters said last,
    `last_num_pinned` how many blocks pins wanted, resident or not.
    """

    def __init__(self, env: StoreEnvironment, clock_us: Callable[[], int]) -> None:
        self.env = env
        self.medium = env.medium
        self.clock_us = clock_us
        self.write_lock = threading.RLock()
        self.condemned: set[bytes] = set()
        self.counts = Counts()
        self.last_state = State()
        self.last_num_pinned = 0
        self.must_rebuild = False
        self.refusal: Refusal | None = None
        """Set while blocks cannot be stored, until some have been."""
        self._changes: deque[BlockChange] | None = None
        self._count_lock = threading.Lock()

    @property
    def budget_nbytes(self) -> int:
        """What the blocks may cost, going by the last counters seen."""
        return budget_nbytes_for(self.last_state.capacity_nbytes)

    @property
    def map_nbytes(self) -> int:
        """What the data file may take."""
        return map_nbytes_for(self.last_state.capacity_nbytes)

    def count(self, **more: int) -> None:
        """Add to `counts`; safe in any thread."""
        with self._count_lock:
            for name, number in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + number)

    def write(self, apply: Callable[[Index], T]) -> T | None:
        """Run `apply` in a transaction of its own; its value, or None if it was not committed and nothing has changed."""
        try:
            with self.env.writing() as txn:
                index = Index(txn, self.medium)
                value = apply(index)
                index.save()
                self.last_state, self.last_num_pinned = index.state, index.num_pinned
            self.tell(index.changes)
        except StorageError:
            self.count(failed=1)
            return None
        except CONTRADICTIONS as error:
            self.distrust(error)
            return None
        return value

    def refused(self, reason: str, num_blocks: int) -> None:
        """The store or its device has failed to take blocks. For the thread that writes."""
        before = self.refusal
        since_us = self.clock_us() if before is None else before.since_us
        self.refusal = Refusal(reason, since_us, num_blocks + (0 if before is None else before.num_blocks))

    def follow(self) -> None:
        """From now on keep what commits change, until `take_changes`."""
        self._changes = deque()

    def tell(self, changes: Sequence[BlockChange]) -> None:
        """Note committed changes, in the thread that writes. More than anybody fetches are not kept one by one."""
        if self._changes is not None:
            if len(self._changes) + len(changes) > MAX_CHANGES:
                self._changes.clear()
                changes = (BlockChange(b"", False, "too many changes at once"),)
            self._changes.extend(changes)

    def tell_break(self, reason: str) -> None:
        """The contents have changed in a way that is not told block by block."""
        self.tell((BlockChange(b"", False, reason),))

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_changes(self) -> list[BlockChange]:
        """The changes since the last call, in the order of their commits. For one thread."""
        taken = []
        while self._changes:
            taken.append(self._changes.popleft())
        return taken

    def distrust(self, error: Exception) -> None:
        """The rows contradict each other; they will be rebuilt from the records."""
        logger.warning("disk tier: the index of %s will be rebuilt: %s", self.env.directory, error)
        self.must_rebuild = True

    def refresh(self) -> State:
        """The counters as of now, or as last seen while the store is unavailable."""
        try:
            with self.env.reading() as txn:
                index = Index(txn, self.medium)
                self.last_state, self.last_num_pinned = index.state, index.num_pinned
        except (StorageError, *CONTRADICTIONS):
            pass
        return self.last_state
