"""The tiers below the device, as cache and core see them: lookup, restore, spill, and one `poll` that moves it all along.

Binds copy engine, host tier, disk tier, cost gate, `Restorer` and `Spiller`; owns none of their rules. Knows block ids and
hashes; no sequences (a tag stands for one), no tensors. Used by the engine thread alone.

Invariant: nothing in here raises because a tier below misbehaves: what fails is a miss, and is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tieredkv.blocks import BlockPool
from tieredkv.branches import Branches
from tieredkv.errors import InvariantError
from tieredkv.gate import CostGate
from tieredkv.keeping import Keeper
from tieredkv.restore import Restore, Restorer, Restoring
from tieredkv.spill import Spiller, Spilling
from tieredkv.storage.tier import CORRUPT, BlockChange
from tieredkv.tier_faces import BlockInfo, DiskTier, HostTier, LoadResult, LookupResult, StoreResult
from tieredkv.transfer import CopyEngine
from tieredkv.types import Tier

# A lookup takes well under a millisecond; a request does not wait longer than this for one on a disk that hangs.
_LOOKUP_TIMEOUT_S = 0.25


@dataclass(slots=True)
class RestoreTotals:
    """What restores brought, in blocks, and what they cost and saved, in seconds."""

    host: int = 0
    disk: int = 0
    spent_s: float = 0.0
    saved_s: float = 0.0


class Lookup:
    """A question to the disk: how much of a prefix it holds. `length` is None until answered or given up."""

    __slots__ = ("_deadline_s", "hashes", "length")

    def __init__(self, hashes: Sequence[bytes], deadline_s: float, length: int | None = None) -> None:
        self.hashes = hashes
        self.length = length
        self._deadline_s = deadline_s

    @property
    def deepest(self) -> bytes | None:
        """The last block of what the disk holds."""
        return self.hashes[self.length - 1] if self.length else None

    def is_pending(self, now_s: float) -> bool:
        return self.length is None and now_s < self._deadline_s


class Tiers:
    """Host and disk below one device pool. `timeout_s` bounds every restore."""

    def __init__(
        self,
        pool: BlockPool,
        copies: CopyEngine,
        host: HostTier,
        disk: DiskTier | None,
        gate: CostGate,
        *,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = 5.0,
        block_nbytes: int,
    ) -> None:
        self.host = host
        self.disk = disk
        self.gate = gate
        self.block_nbytes = block_nbytes
        self.totals = RestoreTotals()
        self._pool = pool
        self._copies = copies
        self._clock = clock
        self._timeout_s = timeout_s
        # Of requests that wait.
        self._lookups: dict[Lookup, None] = {}
        self.lookup_timeout_s = _LOOKUP_TIMEOUT_S
        self.num_lookup_timeouts = 0
        self.keeper = Keeper(pool, host, has_disk=disk is not None)
        self.spiller = Spiller(pool, copies, host, disk, clock, max(host.num_slots // 2, 1), self.keeper)
        self.restorer = Restorer(
            pool,
            copies,
            host,
            disk,
            clock,
            measured=gate.measure_load,
            loaded=self._loaded,
            missing=self.spiller.lost_on_disk,
        )
        self._branches: Branches | None = None
        host.on_evict = self._host_evicted
        pool.on_evict = lambda block_hash, _: self.spiller.device_evicted(block_hash)

    def report_to(self, branches: Branches) -> None:
        """Tell `branches` what host and disk gain and lose, and the disk whose blocks they are."""
        self._branches = branches
        self.spiller.on_spilled = lambda info: branches.stored(Tier.HOST, info, "spilled")
        if self.disk is not None:
            branches.on_label = self.disk.label

    def rank_by(self, priority: Callable[[bytes], int], rank: Callable[[bytes], tuple[int, int]]) -> None:
        """Ask these for the priority of blocks that go down, and how long it lasts."""
        self.host.priority = priority
        if self.disk is not None:
            self.disk.rank = rank

    def _loaded(self, info: BlockInfo) -> None:
        if self._branches is not None:
            self._branches.stored(Tier.HOST, info, "restored")
        self.spiller.resident(info, on_disk=True)

    def _host_evicted(self, block_hash: bytes) -> None:
        self.spiller.host_evicted(block_hash)
        if self._branches is not None:
            self._branches.removed(Tier.HOST, block_hash, "evicted")

    def _disk_changed(self, change: BlockChange) -> None:
        if not change.hash:
            self.spiller.disk_replaced()
        elif change.reason == CORRUPT:
            self.spiller.removed_from_disk((change.hash,))
        if self._branches is None:
            return
        events = self._branches.events
        if not change.hash:
            events.interrupt(Tier.DISK, change.reason)
        elif change.stored:
            events.stored(Tier.DISK, change.reason, change.hash, change.parent, change.num_tokens)
        else:
            events.removed(Tier.DISK, change.reason, change.hash)

    def look_up(self, hashes: Sequence[bytes]) -> Lookup:
        """Ask the disk for the longest prefix of `hashes`, unless device and host have all of it. What it holds is protected
        there until `forget`.
        """
        if self.disk is None or all(self._is_near(h) for h in hashes):
            return Lookup(hashes, 0.0, length=0)
        lookup = Lookup(hashes, self._clock() + self.lookup_timeout_s)
        if self.disk.lookup(hashes, lookup):
            self._lookups[lookup] = None
        else:
            lookup.length = 0
        return lookup

    def forget(self, lookup: Lookup) -> None:
        """Nobody waits with this lookup any more."""
        self._lookups.pop(lookup, None)
        self._protect()

    def use(self, hashes: Sequence[bytes]) -> None:
        """A request was admitted that matched this prefix, head first: it is recent now, in the host tier and on disk."""
        self.spiller.used(hashes)
        self.host.touch(hashes)
        if self.disk is not None and hashes:
            self.disk.touch(hashes[-1])

    def locate(self, hashes: Sequence[bytes], start: int, disk_length: int) -> list[Tier]:
        """Where the blocks of a chain lie from `start` on, as far as they are resident and worth bringing up."""
        found: list[Tier] = []
        for i in range(start, len(hashes)):
            if self._pool.find(hashes[i]) is not None:
                found.append(Tier.DEVICE)
            elif hashes[i] in self.host:
                found.append(Tier.HOST)
            elif i < disk_length:
                found.append(Tier.DISK)
            else:
                break
        if not found:
            return found
        return found[: self.gate.worth_restoring(found, {Tier.DISK: self.restorer.num_loading})]

    def restore(self, blocks: Sequence[tuple[BlockInfo, int, Tier]]) -> Restore:
        return self.restorer.begin(blocks, self._timeout_s)

    def cancel(self, restore: Restore) -> None:
        self.restorer.cancel(restore)

    def poll(self) -> list[Restore]:
        """Take in what copies and disk have done; returns the restores that are finished."""
        for copy in self._copies.poll():
            if isinstance(copy.tag, Spilling):
                self.spiller.copied(copy, copy.tag)
            elif isinstance(copy.tag, Restoring):
                self.restorer.copied(copy, copy.tag)
            else:
                raise InvariantError("a copy that nobody launched")
        if self.disk is not None:
            loads: list[LoadResult] = []
            stores: list[StoreResult] = []
            for result in self.disk.poll():
                if isinstance(result, LoadResult):
                    loads.append(result)
                elif isinstance(result, StoreResult):
                    stores.append(result)
                elif isinstance(result, BlockChange):
                    self._disk_changed(result)
                elif isinstance(result, LookupResult) and result.tag.length is None:
                    result.tag.length = result.length
                    self._protect()
            self.restorer.loads_done(loads)
            self.spiller.stored(stores)
        self._give_up_lookups()
        finished = self.restorer.poll()
        for restore in finished:
            self._account(restore)
        return finished

    def work_ahead(self) -> None:
        """After a step: keep the cold end of the pool clean and the writer fed."""
        self.spiller.write_back()
        self.spiller.feed_disk()

    def work_idle(self) -> bool:
        """With nothing else to do: save what is unsaved. True while that gets on."""
        return bool(self.spiller.save_some()) or self.busy

    @property
    def busy(self) -> bool:
        """Whether something is under way that `poll` will hear of."""
        spiller, restorer = self.spiller, self.restorer
        return bool(spiller.num_copying or spiller.num_storing or restorer.num_active or restorer.num_loading)

    def flush(self, timeout_s: float, wait: Callable[[float], Any]) -> bool:
        """Save everything within `timeout_s` seconds; False if something is left. `wait(seconds)` sleeps until woken."""
        deadline_s = self._clock() + timeout_s
        while True:
            self.poll()
            if not self.work_idle():
                return self.disk is None or self.spiller.num_unsaved == 0
            if self._clock() >= deadline_s:
                return False
            wait(0.01)

    def close(self, timeout_s: float) -> bool:
        """Stop copies and disk; False if the disk did not finish in time. The host tier's memory goes with the process."""
        self._copies.close()
        return self.disk is None or self.disk.close(timeout_s)

    def blocks_in_flight(self) -> list[int]:
        """Device blocks that are owned by copies, once per copy."""
        return [*self.spiller.blocks_in_flight(), *self.restorer.blocks_in_flight()]

    def forget_gone(self) -> None:
        """After a tier was cleared: drop what is known of blocks that lie neither on the device nor in the host tier."""
        self.spiller.forget_where(lambda h: not self._is_near(h))

    def _give_up_lookups(self) -> None:
        now_s = self._clock()
        for lookup in self._lookups:
            if lookup.length is None and not lookup.is_pending(now_s):
                lookup.length = 0
                self.num_lookup_timeouts += 1

    def _protect(self) -> None:
        if self.disk is not None:
            self.disk.protect(frozenset(lookup.deepest for lookup in self._lookups if lookup.deepest is not None))

    def _is_near(self, block_hash: bytes) -> bool:
        return self._pool.find(block_hash) is not None or block_hash in self.host

    def _account(self, restore: Restore) -> None:
        host, disk = restore.num_restored(Tier.HOST), restore.num_restored(Tier.DISK)
        spent_s = self._clock() - restore.started_s
        self.totals.host += host
        self.totals.disk += disk
        self.totals.spent_s += spent_s
        self.totals.saved_s += self.gate.prefill_seconds((host + disk) * self.gate.block_size)
