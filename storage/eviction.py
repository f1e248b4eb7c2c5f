"""Which leaf of the host arena goes first: by priority, then by last use.

Heaps whose entries may be out of date; an entry counts only if it still describes its slot when it surfaces. So a use
costs one push, nothing is ever searched for, and the heaps are built anew when they are mostly waste.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from tieredkv.storage.slots import Slot
from tieredkv.types import DEFAULT_PRIORITY

_Entry = tuple[int, int, int]


class EvictionQueue:
    """The evictable among `slots`. Offer a slot whenever it has become evictable or its last use or priority has changed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._by_use: list[_Entry] = []
        # Those above the ordinary priority are apart, because the lowest of them is asked for when there are too many.
        self._retained: list[_Entry] = []

    def offer(self, slot: Slot) -> None:
        """Note a slot; nothing happens if it is not evictable."""
        if slot.evictable:
            heap = self._heap_of(slot)
            heapq.heappush(heap, _by_use(slot))
            self._trim(heap)

    def take(self, protect: Collection[bytes]) -> Slot | None:
        """The slot to evict next, whose hash is not in `protect`; it leaves the queue. None if there is none."""
        return self._pop(self._by_use, protect) or self._pop(self._retained, protect)

    def take_retained(self) -> Slot | None:
        """The slot that would go first of those above the ordinary priority; it leaves the queue."""
        return self._pop(self._retained, ())

    def missing(self) -> list[Slot]:
        """Slots that could be evicted but are not in the queue; for checks."""
        ordinary, retained = set(self._by_use), set(self._retained)
        found = []
        for slot in self._slots:
            present = retained if self._heap_of(slot) is self._retained else ordinary
            if slot.evictable and _by_use(slot) not in present:
                found.append(slot)
        return found

    def _heap_of(self, slot: Slot) -> list[_Entry]:
        return self._retained if slot.priority > DEFAULT_PRIORITY else self._by_use

    def _pop(self, heap: list[_Entry], protect: Collection[bytes]) -> Slot | None:
        spared, found = [], None
        while found is None and heap:
            entry = heapq.heappop(heap)
            slot = self._slots[entry[2]]
            if not slot.evictable or _by_use(slot) != entry:
                continue
            if slot.hash in protect:
                spared.append(entry)
            else:
                found = slot
        for entry in spared:
            heapq.heappush(heap, entry)
        return found

    def _trim(self, heap: list[_Entry]) -> None:
        """Build a heap anew when it is mostly waste."""
        if len(heap) <= 2 * len(self._slots) + 16:
            return
        heap[:] = [_by_use(slot) for slot in self._slots if slot.evictable and self._heap_of(slot) is heap]
        heapq.heapify(heap)


def _by_use(slot: Slot) -> _Entry:
    return (slot.priority, slot.last_use, slot.id)
