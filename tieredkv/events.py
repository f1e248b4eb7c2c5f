"""What the tiers came to hold and to lose, as a numbered log that readers follow.

    engine thread   stored, removed --> the open event --publish, once a step--> ring of sealed events
    reader                                                 read(sequence) <----/   None: overwritten, too late

Knows hashes and tiers, no blocks and no readers' sockets. Changes of one kind that follow each other share an event: a
chain of blocks that was stored, or blocks that went for one reason.

Invariants: sequence numbers of an epoch have no gaps; an event never changes once it is published; a ring of fixed length
is all that is kept, whoever listens. One thread writes; any thread may read, because an entry of the ring is replaced in
one assignment and carries its number. Replaying events over a snapshot that was begun after event S gives the truth
after any later event, for an event only states where a block is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from tieredkv.reports import CacheEvent
from tieredkv.types import Tier

STORED, REMOVED, BREAK = "stored", "removed", "break"
RING_EVENTS = 16384
MAX_HASHES = 256
"""Blocks per event."""


@dataclass(slots=True, eq=False)
class Entry:
    """One event. `parent` and `num_tokens` (per block) belong to stored chains, head first; a break tells in `reason` why
    the log says nothing about what happened before it.
    """

    sequence: int
    kind: str
    tier: Tier
    reason: str
    hashes: list[bytes] = field(default_factory=list)
    parent: bytes | None = None
    num_tokens: int | None = None

    def report(self) -> CacheEvent:
        return CacheEvent(
            sequence=self.sequence,
            kind=self.kind,
            tier=self.tier,
            reason=self.reason,
            hashes=[h.hex() for h in self.hashes],
            parent=None if self.parent is None else self.parent.hex(),
            num_tokens=None if self.num_tokens is None else self.num_tokens * len(self.hashes),
        )


class EventLog:
    """The log of one process. `epoch` is random, so that numbers of another run are never taken for this one's."""

    def __init__(self, num_kept: int = RING_EVENTS) -> None:
        self.epoch = secrets.token_hex(8)
        self.published = 0
        """Sequence number of the last event that readers can see; 0 before the first."""
        self._ring: list[Entry | None] = [None] * num_kept
        self._open: Entry | None = None
        self._listeners: dict[object, Callable[[], None]] = {}

    # -- writing: the engine thread ------------------------------------------------------------------------------------

    def stored(self, tier: Tier, reason: str, block_hash: bytes, parent: bytes, num_tokens: int) -> None:
        """A block can be found in `tier` from now on."""
        event = self._still_open(STORED, tier, reason)
        if event is not None and event.hashes[-1] == parent:
            event.hashes.append(block_hash)
            return
        self._seal()
        self._open = Entry(self.published + 1, STORED, tier, reason, [block_hash], parent, num_tokens)

    def removed(self, tier: Tier, reason: str, block_hash: bytes) -> None:
        """A block cannot be found in `tier` any more."""
        event = self._still_open(REMOVED, tier, reason)
        if event is not None:
            event.hashes.append(block_hash)
            return
        self._seal()
        self._open = Entry(self.published + 1, REMOVED, tier, reason, [block_hash])

    def _still_open(self, kind: str, tier: Tier, reason: str) -> Entry | None:
        """The event being written, if one more block of this kind can go into it."""
        event = self._open
        if event is None or len(event.hashes) >= MAX_HASHES:
            return None
        return event if (event.kind, event.tier, event.reason) == (kind, tier, reason) else None

    def interrupt(self, tier: Tier, reason: str) -> None:
        """`tier` changed in a way that events do not tell: readers have to start anew."""
        self._seal()
        self._open = Entry(self.published + 1, BREAK, tier, reason)

    def publish(self) -> int:
        """Let readers see all that was written; returns the last sequence number. Cheap when there is nothing new."""
        if self._open is not None:
            self._seal()
            for wake in list(self._listeners.values()):
                wake()
        return self.published

    def _seal(self) -> None:
        event = self._open
        if event is not None:
            self._ring[event.sequence % len(self._ring)] = event
            self.published = event.sequence
            self._open = None

    # -- reading: any thread -------------------------------------------------------------------------------------------

    def read(self, sequence: int) -> Entry | None:
        """The event with this number, if it is published and still kept."""
        event = self._ring[sequence % len(self._ring)]
        return event if event is not None and event.sequence == sequence else None

    def has_all_after(self, sequence: int) -> bool:
        """Whether a reader that has seen everything up to `sequence` can go on from there."""
        if not 0 <= sequence <= self.published:
            return False
        return sequence == self.published or self.read(sequence + 1) is not None

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` in the engine thread after each publication, until the returned function is called. For the engine
        thread.
        """
        key = object()
        self._listeners[key] = wake

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop
