"""The host tier: blocks in CPU memory, in fixed slots of one arena.

    FREE ──begin()──> WRITING ──commit()──> READY (n leases) ──no lease, evicted or removed──> FREE
                         └────abort()────> FREE

A slot in WRITING belongs to its `Reservation`, a slot in READY is safe from reuse while it has a `Lease`. Both are
objects somebody holds; no clock ever frees a slot, so a copy that is late finds its slot still its own. `check_integrity`
with the holders' own count finds every leak.

Knows hashes and bytes, no tokens, no devices, no disk. Threads: the arena belongs to the engine thread. Loader and
writer threads see a hash and a slot's view, nothing else, while the engine thread holds the reservation or the lease.

Evicts like the disk tier: leaves only, by priority, then by last use, and none that is kept; a parent left without
children inherits their last use. Unlike there, a block's parent need not be resident, since the device holds it often
enough; a block evicted from here is never the parent of one that stays. Of the blocks above the ordinary priority only
`retained_limit` stay ahead of the others: what would go first among them becomes an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tieredkv.errors import InvariantError, StorageError
from tieredkv.storage.eviction import EvictionQueue
from tieredkv.storage.memory import PAGE_NBYTES, Allocator, Memory, PlainMemory
from tieredkv.storage.slots import Lease, Reservation, Slot, SlotState
from tieredkv.storage.tier import TierUsage
from tieredkv.types import DEFAULT_PRIORITY

MIN_STAGING_SLOTS = 4


class HostArena:
    """Slots of `block_nbytes` bytes within `capacity_nbytes`; with room for fewer than `staging_slots` a staging arena.

    A staging arena has `staging_slots` slots and keeps nothing: a block is gone with its last lease. It is what lets
    blocks pass between device and disk when the host tier is off. `on_evict(hash)` is called after a READY block has gone
    without anyone having asked for it, `priority(hash)` when a block comes.
    """

    def __init__(
        self,
        block_nbytes: int,
        capacity_nbytes: int,
        *,
        allocate: Allocator = PlainMemory,
        staging_slots: int = MIN_STAGING_SLOTS,
    ) -> None:
        if block_nbytes < 1 or capacity_nbytes < 0 or staging_slots < 1:
            raise StorageError(f"no arena of {capacity_nbytes} bytes for blocks of {block_nbytes} bytes")
        self.block_nbytes = block_nbytes
        self.slot_nbytes = -(-block_nbytes // PAGE_NBYTES) * PAGE_NBYTES
        num_slots = capacity_nbytes // self.slot_nbytes
        self.keeps = num_slots >= staging_slots
        self.num_slots = num_slots if self.keeps else staging_slots
        self.on_evict: Callable[[bytes], None] = lambda block_hash: None
        self.priority: Callable[[bytes], int] = lambda block_hash: DEFAULT_PRIORITY
        self._memory: Memory = allocate(self.num_slots * self.slot_nbytes, self.slot_nbytes)
        # Slots that have held something; the others come into being when they are taken, so a large arena starts at once.
        self._slots: list[Slot] = []
        self._free_ids: list[int] = []
        self._by_hash: dict[bytes, Slot] = {}
        self._children: dict[bytes, int] = {}
        self._queue = EvictionQueue(self._slots)
        self._kept: set[bytes] = set()
        self.retained_limit = self.num_slots
        self.num_retained = 0
        self.num_kept = 0
        """Blocks here that are kept; `num_retained` those above the ordinary priority."""
        self._num_ready = 0
        self._num_uses = 0
        self._num_evictions = 0
        self._num_stored = 0
        self._num_refused = 0

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def num_keepable(self) -> int:
        """Slots that pins may take at most: some must stay for blocks that pass through."""
        return max(self.num_slots - MIN_STAGING_SLOTS, 0) if self.keeps else 0

    @property
    def capacity_nbytes(self) -> int:
        return self.num_slots * self.slot_nbytes

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._slots) + len(self._free_ids)

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot `i` begins `i * slot_nbytes` further."""
        return self._memory.address

    def usage(self) -> TierUsage:
        num_taken = self.num_slots - self.num_free
        return TierUsage(
            capacity_nbytes=self.capacity_nbytes,
            used_nbytes=num_taken * self.slot_nbytes,
            payload_nbytes=self._num_ready * self.block_nbytes,
            num_blocks=self._num_ready,
            num_evictions=self._num_evictions,
            num_stored=self._num_stored,
            num_refused=self._num_refused,
            num_pinned=self.num_kept,
            num_retained=self.num_retained,
        )

    def slot_view(self, slot: int) -> memoryview:
        """The `block_nbytes` bytes of a slot."""
        start = slot * self.slot_nbytes
        return self._memory.view[start : start + self.block_nbytes]

    def tensor(self) -> Any:
        """The arena as a torch tensor `[num_slots, block_nbytes]` of uint8 that shares its memory."""
        import torch

        flat = torch.frombuffer(self._memory.view, dtype=torch.uint8)
        return flat.view(self.num_slots, self.slot_nbytes)[:, : self.block_nbytes]

    # -- lookup --------------------------------------------------------------------------------------------------------

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is READY. Changes nothing."""
        slot = self._by_hash.get(block_hash)
        return slot is not None and slot.state is SlotState.READY

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, from the first on, are READY without a gap. Changes nothing, not even recency."""
        for number, block_hash in enumerate(hashes):
            if block_hash not in self:
                return number
        return len(hashes)

    def lease(self, block_hash: bytes) -> Lease | None:
        """Keep a READY block where it is; None if it is not here."""
        slot = self._by_hash.get(block_hash)
        if slot is None or slot.state is not SlotState.READY:
            return None
        slot.num_leases += 1
        return Lease(self, slot)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Note a use of a matched prefix, head first: the tail becomes the least recent of them."""
        for block_hash in reversed(hashes):
            slot = self._by_hash.get(block_hash)
            if slot is not None:
                self._use(slot)
                self._offer(slot)

    # -- filling and emptying ------------------------------------------------------------------------------------------

    def begin(
        self,
        block_hash: bytes,
        parent: bytes,
        depth: int,
        *,
        protect: Collection[bytes] = (),
    ) -> Reservation | None:
        """A slot for a block that is not here, evicting if need be but nothing in `protect`, nor the block's parent.

        The block gets the priority that `priority` tells. None if it is here already, or is being filled, or if every slot
        is in use or kept.
        """
        if block_hash in self._by_hash:
            return None
        if not self.num_free:
            victim = self._queue.take({*protect, parent})
            if victim is None:
                self._num_refused += 1
                return None
            self._num_evictions += 1
            self._evict(victim)
        slot = self._take_free()
        slot.state, slot.hash, slot.parent, slot.depth = SlotState.WRITING, block_hash, parent, depth
        slot.priority, slot.forgotten, slot.kept = self.priority(block_hash), False, block_hash in self._kept
        slot.num_leases, slot.num_children = 0, self._children.get(block_hash, 0)
        self._by_hash[block_hash] = slot
        self._adopt(slot, +1)
        return Reservation(self, slot)

    def _take_free(self) -> Slot:
        if self._free_ids:
            return self._slots[self._free_ids.pop()]
        self._slots.append(Slot(len(self._slots)))
        return self._slots[-1]

    def keep(self, block_hash: bytes) -> None:
        """Never evict the block with this hash, now or once it is here, until `unkeep`."""
        if block_hash not in self._kept:
            self._kept.add(block_hash)
            self._set_kept(block_hash, kept=True)

    def unkeep(self, block_hash: bytes) -> None:
        if block_hash in self._kept:
            self._kept.remove(block_hash)
            self._set_kept(block_hash, kept=False)

    @property
    def num_kept_hashes(self) -> int:
        """Hashes that `keep` was called for, here or not."""
        return len(self._kept)

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is, or would be, kept."""
        return block_hash in self._kept

    def _set_kept(self, block_hash: bytes, *, kept: bool) -> None:
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            slot.kept = kept
            if slot.state is SlotState.READY:
                self.num_kept += 1 if kept else -1
                self._queue.offer(slot)

    def retain(self, block_hash: bytes, priority: int) -> None:
        """Give a block that is here another priority (0 to 100), until it is given yet another."""
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            self._set_priority(slot, priority)

    def _set_priority(self, slot: Slot, priority: int) -> None:
        self.num_retained -= slot.retained
        slot.priority = priority
        self.num_retained += slot.retained
        self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        """Put a slot where it belongs in the order of eviction, and hold the retained ones to their limit."""
        self._queue.offer(slot)
        while self.num_retained > self.retained_limit and (least := self._queue.take_retained()) is not None:
            self._set_priority(least, DEFAULT_PRIORITY)

    def remove(self, block_hash: bytes) -> bool:
        """Forget a READY block; its slot is free once the last lease ends. False if it is not here."""
        slot = self._by_hash.get(block_hash)
        if slot is None or slot.state is not SlotState.READY:
            return False
        self._forget(slot)
        return True

    def clear(self) -> tuple[int, int]:
        """Forget every READY block; returns how many were, and how many slots are still in use by leases or copies."""
        ready = [slot for slot in self._slots if slot.state is SlotState.READY and not slot.forgotten]
        for slot in ready:
            self._forget(slot)
        return len(ready), self.num_slots - self.num_free

    def close(self) -> None:
        """Give the memory back. Raises `InvariantError` while anything is leased or being filled."""
        busy = [s.id for s in self._slots if s.state is SlotState.WRITING or s.num_leases]
        if busy:
            raise InvariantError(f"slots {busy} are in use")
        self._memory.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def on_commit(self, slot: Slot) -> Lease:
        """For `Reservation.commit`."""
        slot.state = SlotState.READY
        slot.num_leases = 1
        self._num_ready += 1
        self._num_stored += 1
        self.num_kept += slot.kept
        self.num_retained += slot.retained
        self._use(slot)
        return Lease(self, slot)

    def on_abort(self, slot: Slot) -> None:
        """For `Reservation.abort`."""
        self._unlink(slot)
        self._free(slot)

    def on_release(self, slot: Slot) -> None:
        """For `Lease.release`."""
        slot.num_leases -= 1
        if slot.num_leases:
            return
        if slot.forgotten:
            self._free(slot)
        elif not self.keeps:
            self._evict(slot)
        else:
            self._offer(slot)

    def _evict(self, slot: Slot) -> None:
        block_hash = slot.hash
        self._forget(slot)
        self.on_evict(block_hash)

    def _forget(self, slot: Slot) -> None:
        """From READY to FREE, by way of the last lease if there is one."""
        self._unlink(slot)
        self._num_ready -= 1
        self.num_kept -= slot.kept
        self.num_retained -= slot.retained
        slot.forgotten = True
        if not slot.num_leases:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.state, slot.hash, slot.parent, slot.forgotten = SlotState.FREE, b"", b"", False
        slot.num_children = slot.num_leases = 0
        slot.priority, slot.kept = DEFAULT_PRIORITY, False
        self._free_ids.append(slot.id)

    def _unlink(self, slot: Slot) -> None:
        if self._by_hash.pop(slot.hash, None) is not slot:
            raise InvariantError(f"slot {slot.id} does not hold its hash")
        self._adopt(slot, -1)

    def _adopt(self, slot: Slot, delta: int) -> None:
        """Count a child for the parent, which may not be here (yet)."""
        number = self._children.get(slot.parent, 0) + delta
        if number:
            self._children[slot.parent] = number
        else:
            self._children.pop(slot.parent, None)
        parent = self._by_hash.get(slot.parent)
        if parent is not None:
            parent.num_children = number
            if delta < 0:
                parent.last_use = max(parent.last_use, slot.last_use)
                self._offer(parent)

    def _use(self, slot: Slot) -> None:
        self._num_uses += 1
        slot.last_use = self._num_uses

    def check_integrity(self, *, num_leases: int | None = None, num_reservations: int | None = None) -> None:
        """Recount everything; with the holders' own counts, find leaks. Raises `InvariantError`."""
        by_state = {state: [s for s in self._slots if s.state is state] for state in SlotState}
        if sorted(self._free_ids) != [s.id for s in by_state[SlotState.FREE]]:
            raise InvariantError("the free list and the slots disagree")
        findable = {s.hash: s for s in self._slots if s.state is not SlotState.FREE and not s.forgotten}
        if findable != self._by_hash:
            raise InvariantError("the index and the slots disagree")
        children: dict[bytes, int] = {}
        for slot in findable.values():
            children[slot.parent] = children.get(slot.parent, 0) + 1
        if children != self._children:
            raise InvariantError("counts of children are wrong")
        for slot in findable.values():
            if slot.num_children != children.get(slot.hash, 0):
                raise InvariantError(f"slot {slot.id} counts {slot.num_children} children")
        for slot in self._queue.missing():
            raise InvariantError(f"slot {slot.id} could be evicted but is not in the queue")
        if any(s.forgotten and not s.num_leases for s in self._slots):
            raise InvariantError("a forgotten slot without leases is not free")
        ready = [s for s in by_state[SlotState.READY] if not s.forgotten]
        if self._num_ready != len(ready):
            raise InvariantError("the count of blocks is wrong")
        if any(s.kept != (s.hash in self._kept) for s in findable.values()):
            raise InvariantError("the marks of kept blocks are wrong")
        if self.num_kept != sum(s.kept for s in ready) or self.num_retained != sum(s.retained for s in ready):
            raise InvariantError("the counts of kept and retained blocks are wrong")
        leased = sum(s.num_leases for s in self._slots)
        if num_leases is not None and leased != num_leases:
            raise InvariantError(f"{leased} leases in the arena, {num_leases} held")
        writing = len(by_state[SlotState.WRITING])
        if num_reservations is not None and writing != num_reservations:
            raise InvariantError(f"{writing} slots are being filled, {num_reservations} reservations held")
