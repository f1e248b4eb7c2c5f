"""Which leaf of the host arena goes first: expired ones, then by priority, then by last use.

Two heaps whose entries may be out of date; an entry counts only if it still describes its slot when it surfaces. So a
use costs one push, nothing is ever searched for, and the heaps are built anew when they are mostly waste.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from tieredkv.storage.slots import Slot
from tieredkv.storage.tier import NEVER

_Entry = tuple[int, int, int]


class EvictionQueue:
    """The evictable among `slots`. Offer a slot whenever it has become evictable or its last use has changed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._by_use: list[_Entry] = []
        self._by_expiry: list[_Entry] = []

    def offer(self, slot: Slot) -> None:
        """Note a slot; nothing happens if it is not evictable."""
        if not slot.evictable:
            return
        heapq.heappush(self._by_use, _by_use(slot))
        if slot.expires_us != NEVER:
            heapq.heappush(self._by_expiry, _by_expiry(slot))
        if len(self._by_use) > 2 * len(self._slots) + 16:
            self._rebuild()

    def take(self, protect: Collection[bytes], now_us: int) -> Slot | None:
        """The slot to evict next, whose hash is not in `protect`; it leaves the queue. None if there is none."""
        return self._pop(self._by_expiry, protect, now_us) or self._pop(self._by_use, protect, None)

    def __contains__(self, slot: Slot) -> bool:
        """Linear; for checks."""
        return _by_use(slot) in self._by_use

    def _pop(self, heap: list[_Entry], protect: Collection[bytes], until: int | None) -> Slot | None:
        key = _by_use if until is None else _by_expiry
        spared, found = [], None
        while found is None and heap and (until is None or heap[0][0] <= until):
            entry = heapq.heappop(heap)
            slot = self._slots[entry[2]]
            if not slot.evictable or key(slot) != entry:
                continue
            if slot.hash in protect:
                spared.append(entry)
            else:
                found = slot
        for entry in spared:
            heapq.heappush(heap, entry)
        return found

    def _rebuild(self) -> None:
        evictable = [slot for slot in self._slots if slot.evictable]
        self._by_use = [_by_use(slot) for slot in evictable]
        self._by_expiry = [_by_expiry(slot) for slot in evictable if slot.expires_us != NEVER]
        heapq.heapify(self._by_use)
        heapq.heapify(self._by_expiry)


def _by_use(slot: Slot) -> _Entry:
    return (slot.priority, slot.last_use, slot.id)


def _by_expiry(slot: Slot) -> _Entry:
    return (slot.expires_us, slot.last_use, slot.id)
