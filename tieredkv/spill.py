"""Spill: copies of device blocks to the host tier and from there to disk, ahead of need.

    device block --copy--> host slot --writer--> disk

A block is *dirty* while the device alone holds it, and *unsaved* while the disk does not. Before the pool runs out,
the coldest dirty blocks are copied, so that allocation finds clean ones and never waits. Parents go before children, so
that every tier can keep whole prefixes; where a tier refuses, what gets lost is the end of a prefix. Idle time saves
everything that is unsaved.

Knows block ids, hashes and slots; no sequences, no tensors, no LMDB. Used by the engine thread alone. Invariants: only
committed blocks are copied; a block is owned by its copy until that has completed; a slot becomes findable only when
its bytes are complete; a slot that the writer reads is leased until the writer has answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tieredkv.blocks import BlockPool, Hold
from tieredkv.gate import Rate
from tieredkv.keeping import Keeper
from tieredkv.storage.tier import StoreOutcome
from tieredkv.tier_faces import COPYING, WRITING, BlockInfo, DiskTier, HostTier, Lease, Reservation, StoreResult
from tieredkv.transfer import Copy, CopyEngine
from tieredkv.types import Tier

# Blocks per copy and per disk transaction: long enough to amortise both, short enough not to disturb a step.
_BATCH = 32
# Share of the pool that is kept clean or free, and its bounds in blocks.
_WATERMARK_SHARE, _WATERMARK_LEAST, _WATERMARK_MOST = 0.125, 64, 4096
# After the disk has refused blocks, nothing more is sent for a while, twice as long each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(slots=True)
class SpillCounts:
    """Totals in blocks. Dropped: gone from a tier while no lower one held them."""

    to_host: int = 0
    to_disk: int = 0
    dropped_by_device: int = 0
    dropped_by_host: int = 0
    refused_by_disk: int = 0
    failed_copies: int = 0


@dataclass(slots=True)
class Spilling:
    """Tag of a copy to the host: what is being copied, parallel to the copy's blocks."""

    hashes: list[bytes]
    holds: list[Hold]
    reservations: list[Reservation]
    started_s: float


class Spiller:
    """Decides what is copied down and follows each copy to its end. `max_storing` bounds the slots that wait for the disk."""

    def __init__(
        self,
        pool: BlockPool,
        copies: CopyEngine,
        host: HostTier,
        disk: DiskTier | None,
        clock: Callable[[], float],
        max_storing: int,
        keeper: Keeper,
    ) -> None:
        self._pool = pool
        self._copies = copies
        self._host = host
        self._disk = disk
        self._clock = clock
        self._max_storing = max(max_storing, 1)
        self._keeper = keeper
        # What is known of every block that lies on the device or in the host tier.
        self._info: dict[bytes, BlockInfo] = {}
        # Those of them that the disk holds, as far as is known: a load or a refused child may tell otherwise.
        self._on_disk: set[bytes] = set()
        # The others: on the device alone; or in the host tier and, if there is a disk, to go there. Parents come first.
        self._dirty: dict[bytes, None] = {}
        self._to_disk: dict[bytes, None] = {}
        # Those of the latter that must not leave the host tier: about to be given to the writer, or with it.
        self._queued: dict[bytes, Lease] = {}
        self._storing: dict[bytes, Lease] = {}
        # Blocks that are being copied to the host, and the copies that own them.
        self._copying: set[bytes] = set()
        self._in_flight: dict[int, Copy] = {}
        self._paused_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.counts = SpillCounts()
        # Most of the coldest blocks that one step starts to copy. More where copies cost the computation nothing.
        self.blocks_per_step = _BATCH
        # How fast blocks go down: bytes per second of a copy.
        self.copy_rate = Rate()
        # Called when a copied block has become findable in the host tier.
        self.on_spilled: Callable[[BlockInfo], None] = lambda info: None
        # Blocks that were removed from a lower tier on purpose: not copied there again before somebody uses them.
        self._barred: set[bytes] = set()
        usable = pool.num_usable
        self._watermark = min(max(int(usable * _WATERMARK_SHARE), _WATERMARK_LEAST), _WATERMARK_MOST, usable // 2)

    @property
    def num_copying(self) -> int:
        return len(self._copying)

    @property
    def num_storing(self) -> int:
        return len(self._storing)

    @property
    def num_unsaved(self) -> int:
        return len(self._dirty) + len(self._to_disk)

    def blocks_in_flight(self) -> list[int]:
        return [block_id for copy in self._in_flight.values() for block_id in copy.block_ids]

    def resident(self, info: BlockInfo, *, on_disk: bool = False) -> None:
        """A block has become findable on the device or in the host tier: newly computed, or brought up from where it still
        lies.
        """
        self._info[info.hash] = info
        if on_disk:
            self._on_disk.add(info.hash)
            self._keeper.saved(info.hash)
        elif info.parent in self._barred:
            # A request that was running goes on behind what was removed below: nothing can be saved behind that.
            self._barred.add(info.hash)
        self._sort_in(info.hash)
        self._keeper.moved(info.hash)

    def device_evicted(self, block_hash: bytes) -> None:
        """The device pool is about to reuse a block."""
        self.counts.dropped_by_device += block_hash in self._dirty
        if block_hash not in self._host:
            self._forget(block_hash)

    def host_evicted(self, block_hash: bytes) -> None:
        """The host tier has reused a slot."""
        if self._pool.find(block_hash) is None:
            self.counts.dropped_by_host += block_hash not in self._on_disk
            self._forget(block_hash)
        else:
            self._to_disk.pop(block_hash, None)
            self._sort_in(block_hash)
        self._keeper.moved(block_hash)

    def write_back(self) -> int:
        """Start copies of what pins want below, and of the coldest dirty blocks until enough of what is reused next is clean;
        returns how many.
        """
        return self._copy_wanted() + self._copy_coldest()

    def _copy_coldest(self) -> int:
        room = self._watermark - (self._pool.num_free - self._pool.num_findable_free)
        most = self._most_to_copy(self.blocks_per_step)
        chosen: dict[bytes, int] = {}
        for block_id in self._pool.coldest():
            if room <= 0 or len(chosen) >= most:
                break
            room -= 1
            block_hash = self._pool.hash_of(block_id)
            if block_hash is not None and block_hash in self._dirty:
                chosen |= self._with_dirty_ancestors(block_hash, chosen)
        return self._copy(chosen)

    def _copy_wanted(self) -> int:
        chosen: dict[bytes, int] = {}
        most = self._most_to_copy(_BATCH)
        for block_hash in self._keeper.wanted:
            if len(chosen) >= most:
                break
            block_id = self._pool.find(block_hash)
            if block_id is None or block_hash in self._copying or block_hash not in self._info:
                continue
            if block_hash in self._dirty:
                chosen |= self._with_dirty_ancestors(block_hash, chosen)
            elif block_hash not in self._barred:
                chosen[block_hash] = block_id
        return self._copy(chosen)

    def _most_to_copy(self, limit: int) -> int:
        """Up to `limit`. Slots that only let blocks pass are for what the disk takes soon: all else would be copied again."""
        return limit if self._host.keeps else min(limit, self._max_storing - len(self._to_disk))

    def save_some(self) -> int:
        """Bring some unsaved blocks one tier further down; returns how many were started. 0 means: nothing can be done now.

        Without a disk to follow, the host tier's free slots are filled, but nothing is evicted for it.
        """
        num_started = self._copy_wanted()
        if self._clock() < self._paused_until_s:
            return num_started
        num_started += self.feed_disk()
        room = self._host.num_free if self._disk is None else self._max_storing - len(self._to_disk)
        chosen: dict[bytes, int] = {}
        for block_hash in self._dirty:
            if len(chosen) >= min(_BATCH, room):
                break
            if block_hash not in self._copying:
                chosen |= self._with_dirty_ancestors(block_hash, chosen)
        return num_started + self._copy(chosen)

    def try_again(self) -> None:
        """Offer blocks to the disk again at once, however often it has refused some."""
        self._paused_until_s, self._pause_s = self._clock(), _FIRST_PAUSE_S

    def feed_disk(self) -> int:
        """Hand unsaved host blocks to the writer, parents first, as long as it takes them; returns how many it took."""
        num_taken = 0
        disk = self._disk
        if disk is None or self._clock() < self._paused_until_s:
            return 0
        while disk.accepts and len(self._storing) < self._max_storing:
            room = min(_BATCH, self._max_storing - len(self._storing))
            batch: dict[bytes, tuple[BlockInfo, Lease]] = {}
            for block_hash in list(itertools.islice(self._to_disk, len(self._storing) + 2 * _BATCH)):
                if len(batch) >= room:
                    break
                self._add_unsaved_path(block_hash, batch)
            if not batch:
                break
            taken = disk.store([(info, lease.view) for info, lease in batch.values()])
            for block_hash, (_, lease) in batch.items():
                (self._storing if taken else self._queued)[block_hash] = lease
            if not taken:
                break
            num_taken += len(batch)
        return num_taken

    def copied(self, copy: Copy, tag: Spilling) -> None:
        """A copy to the host has completed."""
        for block_hash, reservation in zip(tag.hashes, tag.reservations, strict=True):
            self._copying.discard(block_hash)
            if copy.error is not None:
                reservation.abort()
                self.counts.failed_copies += 1
                continue
            info = self._info.get(block_hash)
            if info is None or block_hash in self._barred:
                reservation.abort()
                continue
            lease = reservation.commit()
            self.counts.to_host += 1
            self.on_spilled(info)
            self._dirty.pop(block_hash, None)
            self._sort_in(block_hash)
            self._keeper.moved(block_hash)
            if block_hash in self._to_disk and len(self._queued) + len(self._storing) < self._max_storing:
                self._queued[block_hash] = lease
            else:
                lease.release()
        del self._in_flight[id(copy)]
        self._pool.end_hold(tag.holds)
        if copy.error is None:
            self.copy_rate.measure(sum(view.nbytes for view in copy.views), self._clock() - tag.started_s)

    def stored(self, results: Iterable[StoreResult]) -> None:
        """The writer has answered for some blocks."""
        refused = False
        for result in results:
            lease = self._storing.pop(result.hash, None)
            if lease is not None:
                lease.release()
            if result.outcome.resident:
                self.counts.to_disk += result.outcome is StoreOutcome.STORED
                self._dirty.pop(result.hash, None)
                self._to_disk.pop(result.hash, None)
                if result.hash in self._info:
                    self._on_disk.add(result.hash)
                self._keeper.saved(result.hash)
                self._pause_s = _FIRST_PAUSE_S
            else:
                refused = True
                self.counts.refused_by_disk += 1
                info = self._info.get(result.hash)
                if result.outcome is StoreOutcome.NO_PARENT and info is not None and info.depth:
                    self.lost_on_disk(info.parent)
        if refused:
            self._paused_until_s = self._clock() + self._pause_s
            self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)

    def lost_on_disk(self, block_hash: bytes) -> None:
        """The disk turned out not to hold a block, and so nothing behind it: what other tiers hold is unsaved again."""
        children: dict[bytes, list[bytes]] = {}
        for info in self._info.values():
            if info.depth and info.hash in self._on_disk:
                children.setdefault(info.parent, []).append(info.hash)
        lost = [block_hash]
        for name in lost:
            lost += children.get(name, ())
            self._on_disk.discard(name)
            if name in self._info:
                self._sort_in(name)
        self._keeper.lost(block_hash)

    def states(self) -> Iterator[tuple[bytes, Tier, str]]:
        """Blocks on their way into a tier."""
        yield from ((block_hash, Tier.HOST, COPYING) for block_hash in self._copying)
        yield from ((block_hash, Tier.DISK, WRITING) for block_hash in self._storing)

    def spill(self, hashes: Iterable[bytes]) -> int:
        """Start to copy those of these blocks to the host tier that lie nowhere but on the device, whether or not it is their
        turn; returns how many copies began.
        """
        chosen: dict[bytes, int] = {}
        for block_hash in hashes:
            if len(chosen) >= _BATCH:
                break
            if block_hash in self._dirty and block_hash not in self._copying:
                chosen |= self._with_dirty_ancestors(block_hash, chosen)
        return self._copy(chosen)

    def removed_from_host(self, block_hash: bytes) -> None:
        """A block was removed from the host tier on purpose."""
        self._unqueue(block_hash)
        if self._pool.find(block_hash) is None:
            self._forget(block_hash)
        else:
            self._to_disk.pop(block_hash, None)
            self._sort_in(block_hash)
        self._keeper.moved(block_hash)

    def removed_from_device(self, block_hash: bytes) -> None:
        """A block was removed from the device on purpose."""
        if block_hash not in self._host:
            self._forget(block_hash)
        self._keeper.moved(block_hash)

    def removed_from_disk(self, hashes: Iterable[bytes]) -> None:
        """The disk does not hold these blocks, for whatever reason: what other tiers hold of them is unsaved again."""
        for block_hash in hashes:
            self._on_disk.discard(block_hash)
            if block_hash in self._info:
                self._sort_in(block_hash)
            if self._keeper.is_saved(block_hash):
                self._keeper.lost(block_hash)

    def disk_replaced(self) -> None:
        """The disk may hold anything now. What is offered to it a second time costs next to nothing."""
        self.removed_from_disk(sorted(self._on_disk, key=lambda h: self._info[h].depth))

    def bar(self, hashes: Iterable[bytes]) -> None:
        """These blocks are being removed from a lower tier on purpose: what still lies above is not copied down again before
        somebody uses it.
        """
        for block_hash in hashes:
            if block_hash in self._info:
                self._bar(block_hash)
        # Blocks behind them that were not named, perhaps because they are newer. Parents come before children.
        for block_hash in [*self._to_disk, *self._dirty]:
            if self._info[block_hash].parent in self._barred:
                self._bar(block_hash)

    def _bar(self, block_hash: bytes) -> None:
        self._barred.add(block_hash)
        self._dirty.pop(block_hash, None)
        self._to_disk.pop(block_hash, None)
        self._unqueue(block_hash)

    def used(self, hashes: Iterable[bytes]) -> None:
        """Somebody uses these blocks: they are worth keeping in every tier again."""
        if self._barred:
            for block_hash in hashes:
                if block_hash in self._barred:
                    self._barred.discard(block_hash)
                    self._sort_in(block_hash)

    def forget_where(self, gone: Callable[[bytes], bool]) -> None:
        """Drop the bookkeeping of blocks that lie nowhere any more."""
        for block_hash in [h for h in self._info if gone(h)]:
            self._forget(block_hash)

    def _with_dirty_ancestors(self, block_hash: bytes, chosen: dict[bytes, int]) -> dict[bytes, int]:
        """The block and its dirty ancestors, head first, as hash -> device block id. Empty where an ancestor is nowhere or
        unknown: without its beginning a block can never be found again.
        """
        path: list[tuple[bytes, int]] = []
        at: bytes | None = block_hash
        while at is not None and at not in chosen and at not in self._copying:
            info, block_id = self._info.get(at), self._pool.find(at)
            if info is None or at in self._barred:
                return {}
            if at not in self._dirty or block_id is None:
                break
            path.append((at, block_id))
            at = info.parent if info.depth else None
        return dict(reversed(path))

    def _add_unsaved_path(self, block_hash: bytes, batch: dict[bytes, tuple[BlockInfo, Lease]]) -> None:
        """Lease a host block and its unsaved ancestors into `batch`, head first; nothing if one of them is not in the host tier
        yet, or is with the writer already (its children follow in a later batch). What has lost its beginning is not saved.
        """
        path: list[tuple[bytes, BlockInfo]] = []
        at: bytes | None = block_hash
        while at is not None and at not in batch and at not in self._on_disk:
            info = self._info.get(at)
            if info is None or at in self._barred:
                self._to_disk.pop(block_hash, None)
                self._unqueue(block_hash)
                return
            if at in self._storing or at not in self._host:
                return
            path.append((at, info))
            at = info.parent if info.depth else None
        for name, info in reversed(path):
            lease = self._queued.pop(name, None) or self._host.lease(name)
            if lease is None:
                return
            batch[name] = (info, lease)

    def _copy(self, chosen: dict[bytes, int]) -> int:
        hashes, block_ids, reservations = [], [], []
        for block_hash, block_id in chosen.items():
            reservation = self._reserve(self._info[block_hash])
            if reservation is None:
                break
            self._copying.add(block_hash)
            hashes.append(block_hash)
            block_ids.append(block_id)
            reservations.append(reservation)
        if hashes:
            tag = Spilling(hashes, self._pool.hold(block_ids), reservations, self._clock())
            copy = Copy(block_ids, [r.view for r in reservations], to_device=False, tag=tag)
            self._in_flight[id(copy)] = copy
            self._copies.launch(copy)
        return len(hashes)

    def _reserve(self, info: BlockInfo) -> Reservation | None:
        """A slot for a block. A prefix longer than the whole host tier passes through it: where nothing else can go, an
        ancestor goes that the disk holds.
        """
        reservation = self._host.begin(info.hash, info.parent, info.depth)
        at: BlockInfo | None = info
        while reservation is None and at is not None and at.depth:
            at = self._info.get(at.parent)
            if at is None or at.hash not in self._on_disk or self._host.is_kept(at.hash):
                continue
            if self._host.remove(at.hash):
                self._host.on_evict(at.hash)
                reservation = self._host.begin(info.hash, info.parent, info.depth)
        return reservation

    def _sort_in(self, block_hash: bytes) -> None:
        """Put a known block where it belongs by what holds it now."""
        if block_hash in self._on_disk or block_hash in self._barred:
            return
        if block_hash not in self._host:
            self._dirty.setdefault(block_hash)
        elif self._disk is not None:
            self._to_disk.setdefault(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        self._info.pop(block_hash, None)
        self._dirty.pop(block_hash, None)
        self._to_disk.pop(block_hash, None)
        self._on_disk.discard(block_hash)
        self._barred.discard(block_hash)
        self._unqueue(block_hash)

    def _unqueue(self, block_hash: bytes) -> None:
        lease = self._queued.pop(block_hash, None)
        if lease is not None:
            lease.release()
