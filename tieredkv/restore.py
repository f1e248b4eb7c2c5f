"""Restore: bring the blocks of one sequence back to the device, from the host tier and from disk.

Each block of a restore goes through

    WAITING -> LOADING (disk -> slot) -> COPYING (slot -> device) -> READY
                     \\-> FAILED               \\-> FAILED

Host blocks start at COPYING. The usable prefix is the run of READY blocks from the first one on: it ends at the first
failure, or at the first block that is not on its way to the device when the deadline passes. A restore is finished once
everything before that end is READY and no copy of its own is in flight; a slow disk read may outlive it, since that one
only writes to a slot.

Knows hashes, block ids and slots; no tensors, no LMDB, no scheduling. Used by the engine thread alone. Invariants: a
device block is owned by the copy that writes to it until that has completed, also when its sequence is gone; bytes that
were not verified never become part of a usable prefix.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tieredkv.blocks import BlockPool
from tieredkv.gate import Arrivals
from tieredkv.tier_faces import COPYING, LOADING, BlockInfo, DiskTier, HostTier, Lease, LoadResult, Reservation
from tieredkv.transfer import Copy, CopyEngine
from tieredkv.types import Tier

# Blocks per copy to the device: the first ones are there while the last ones are still read.
_COPY_BATCH = 16


class _State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    COPYING = "copying"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class _Item:
    """One block of a restore."""

    info: BlockInfo
    block_id: int
    tier: Tier
    state: _State = _State.WAITING


@dataclass(slots=True, eq=False)
class Restore:
    """The blocks that one sequence waits for, head first; device blocks in between count as READY from the start."""

    items: list[_Item]
    deadline_s: float
    started_s: float
    limit: int = 0
    num_copying: int = 0
    cancelled: bool = False
    todo: deque[int] = field(default_factory=deque)

    @property
    def num_usable(self) -> int:
        """Blocks of the usable prefix."""
        return next((i for i, item in enumerate(self.items) if item.state is not _State.READY), len(self.items))

    @property
    def finished(self) -> bool:
        return self.num_copying == 0 and self.num_usable >= self.limit

    def num_restored(self, tier: Tier) -> int:
        """Usable blocks that came from `tier`."""
        return sum(item.tier is tier for item in self.items[: self.num_usable])

    def fail(self, index: int) -> None:
        self.items[index].state = _State.FAILED
        self.limit = min(self.limit, index)


@dataclass(slots=True)
class Restoring:
    """Tag of a copy to the device: which items of which restore it brings, and the leases that keep its slots."""

    restore: Restore
    indices: list[int]
    leases: list[Lease]


@dataclass(slots=True)
class _Loading:
    """Tag of a disk read."""

    restore: Restore
    index: int
    reservation: Reservation
    started_s: float


class Restorer:
    """Starts restores and follows them. `measured(tier, num_blocks, seconds)` reports how fast blocks came, `loaded(info)`
    those that came from disk to the host tier, `missing(hash)` blocks that the disk turned out not to hold.
    """

    def __init__(
        self,
        pool: BlockPool,
        copies: CopyEngine,
        host: HostTier,
        disk: DiskTier | None,
        clock: Callable[[], float],
        measured: Callable[[Tier, int, float], None],
        loaded: Callable[[BlockInfo], None],
        missing: Callable[[bytes], None],
    ) -> None:
        self._pool = pool
        self._copies = copies
        self._host = host
        self._disk = disk
        self._clock = clock
        self._measured = measured
        self._arrivals = {Tier.HOST: Arrivals(), Tier.DISK: Arrivals()}
        self._loaded = loaded
        self._missing = missing
        self._active: list[Restore] = []
        self._loading: dict[bytes, _Loading] = {}
        self._in_flight: dict[int, tuple[Copy, float]] = {}
        self.num_failed = 0
        self.num_timeouts = 0

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_loading(self) -> int:
        """Blocks that are being read from disk, for restores that may be gone."""
        return len(self._loading)

    @property
    def num_copying(self) -> int:
        """Blocks that are being copied to the device."""
        return sum(len(copy.block_ids) for copy, _ in self._in_flight.values())

    def coming(self) -> list[BlockInfo]:
        """The blocks that restores bring up, or read for restores that are gone."""
        wanted = [item.info for restore in self._active for item in restore.items]
        return wanted + [tag.restore.items[tag.index].info for tag in self._loading.values()]

    def states(self) -> Iterator[tuple[bytes, Tier, str]]:
        """Blocks on their way into a tier."""
        yield from ((block_hash, Tier.HOST, LOADING) for block_hash in self._loading)
        for restore in self._active:
            for item in restore.items:
                if item.state in (_State.WAITING, _State.LOADING, _State.COPYING):
                    yield item.info.hash, Tier.DEVICE, COPYING if item.state is _State.COPYING else LOADING

    def blocks_in_flight(self) -> list[int]:
        return [block_id for copy, _ in self._in_flight.values() for block_id in copy.block_ids]

    def begin(self, blocks: Sequence[tuple[BlockInfo, int, Tier]], timeout_s: float) -> Restore:
        """Start bringing up `blocks`: (what, device block id, where it lies now), head of the prefix first."""
        now_s = self._clock()
        restore = Restore(
            [_Item(info, block_id, tier) for info, block_id, tier in blocks],
            now_s + timeout_s,
            now_s,
            limit=len(blocks),
        )
        for i, item in enumerate(restore.items):
            if item.tier is Tier.DEVICE:
                item.state = _State.READY
            else:
                restore.todo.append(i)
        self._active.append(restore)
        self._advance(restore)
        return restore

    def cancel(self, restore: Restore) -> None:
        """The sequence is gone or wants its blocks no more. What is in flight completes on its own."""
        restore.cancelled = True
        restore.todo.clear()
        self._active = [r for r in self._active if r is not restore]

    def poll(self) -> list[Restore]:
        """Restores that have finished since the last call; their `num_usable` is final."""
        now_s = self._clock()
        for tier, arrivals in self._arrivals.items():
            self._measured(tier, *arrivals.take(now_s))
        finished = []
        for restore in self._active:
            if now_s >= restore.deadline_s:
                self._expire(restore)
            else:
                self._advance(restore)
            if restore.finished:
                finished.append(restore)
        if finished:
            self._active = [r for r in self._active if not r.finished]
        return finished

    def loads_done(self, results: Iterable[LoadResult]) -> None:
        """Disk reads have been answered: verified blocks become READY in the host tier and go on to the device."""
        arrived: dict[int, tuple[Restore, dict[int, Lease]]] = {}
        for result in results:
            tag: _Loading = result.tag
            self._loading.pop(result.hash, None)
            restore, index = tag.restore, tag.index
            wanted = not restore.cancelled and restore.items[index].state is _State.LOADING
            if not result.ok:
                tag.reservation.abort()
                self._missing(result.hash)
                self.num_failed += 1
                if wanted:
                    restore.fail(index)
                continue
            self._arrivals[Tier.DISK].add(1, tag.started_s)
            lease = tag.reservation.commit()
            self._loaded(restore.items[index].info)
            if wanted and index < restore.limit:
                arrived.setdefault(id(restore), (restore, {}))[1][index] = lease
            else:
                lease.release()
        for restore, leases in arrived.values():
            self._copy(restore, leases)

    def copied(self, copy: Copy, tag: Restoring) -> None:
        """A copy to the device has completed."""
        for lease in tag.leases:
            lease.release()
        self._pool.release(copy.block_ids)
        restore = tag.restore
        restore.num_copying -= len(tag.indices)
        for index in tag.indices:
            if copy.error is None:
                restore.items[index].state = _State.READY
            else:
                restore.fail(index)
                self.num_failed += 1
        _, started_s = self._in_flight.pop(id(copy))
        if copy.error is None:
            self._arrivals[Tier.HOST].add(len(tag.indices), started_s)

    def _advance(self, restore: Restore) -> None:
        """Start whatever can be started: copies of host blocks, reads of disk blocks while slots are to be had."""
        leases: dict[int, Lease] = {}
        while restore.todo:
            index = restore.todo[0]
            item = restore.items[index]
            if index >= restore.limit:
                restore.todo.clear()
                break
            lease = self._host.lease(item.info.hash)
            if lease is not None:
                leases[index] = lease
            elif item.info.hash in self._loading:
                # Another restore reads this block already, or one that was cancelled: it will be in the host tier.
                break
            elif not self._read(restore, index):
                if not self._loading and not restore.num_copying and not leases:
                    restore.fail(index)
                break
            restore.todo.popleft()
            if len(leases) == _COPY_BATCH:
                self._copy(restore, leases)
                leases = {}
        self._copy(restore, leases)

    def _read(self, restore: Restore, index: int) -> bool:
        """Start reading one block from disk into a slot; False if there is no slot or no room in the queue."""
        item = restore.items[index]
        if self._disk is None or item.tier is not Tier.DISK:
            restore.fail(index)
            return True
        info = item.info
        reservation = self._host.begin(info.hash, info.parent, info.depth)
        if reservation is None and self._make_room(restore.items[:index]):
            reservation = self._host.begin(info.hash, info.parent, info.depth)
        if reservation is None:
            return False
        tag = _Loading(restore, index, reservation, self._clock())
        if not self._disk.load(info.hash, reservation.view, tag):
            reservation.abort()
            return False
        self._loading[info.hash] = tag
        item.state = _State.LOADING
        return True

    def _make_room(self, before: Sequence[_Item]) -> bool:
        """A prefix longer than the whole host tier passes through it: forget one of its blocks there that has reached the
        device and lies on disk.
        """
        for item in before:
            gone = item.state is _State.READY and item.tier is Tier.DISK and not self._host.is_kept(item.info.hash)
            if gone and self._host.remove(item.info.hash):
                self._host.on_evict(item.info.hash)
                return True
        return False

    def _copy(self, restore: Restore, leases: dict[int, Lease]) -> None:
        """Launch a copy of leased host blocks to the device, by index of the restore."""
        if not leases:
            return
        indices = sorted(leases)
        block_ids = [restore.items[i].block_id for i in indices]
        for index, block_id in zip(indices, block_ids, strict=True):
            restore.items[index].state = _State.COPYING
            self._pool.acquire(block_id)
        restore.num_copying += len(indices)
        tag = Restoring(restore, indices, [leases[i] for i in indices])
        copy = Copy(block_ids, [lease.view for lease in tag.leases], to_device=True, tag=tag)
        self._in_flight[id(copy)] = copy, self._clock()
        self._copies.launch(copy)

    def _expire(self, restore: Restore) -> None:
        """Past the deadline nothing more is started; what is on its way to the device is still awaited."""
        on_its_way = (_State.READY, _State.COPYING)
        end = next((i for i, item in enumerate(restore.items) if item.state not in on_its_way), len(restore.items))
        if end < restore.limit:
            restore.limit = end
            restore.todo.clear()
            self.num_timeouts += 1
