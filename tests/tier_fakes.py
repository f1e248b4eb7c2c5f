"""Tiers whose every copy and answer waits until a test lets it happen, in any order, with any outcome."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from tests.fakes import FakeRunner, ManualClock, make_core
from tieredkv.core import EngineCore
from tieredkv.storage.host import HostArena
from tieredkv.storage.pins import PinRecord, PinsSeen
from tieredkv.storage.removal import ClearOutcome
from tieredkv.storage.tier import NEVER, BlockChange, StoreOutcome, TierUsage
from tieredkv.tier_faces import LoadResult, LookupResult, StoreResult
from tieredkv.tiers import Tiers
from tieredkv.transfer import Copy
from tieredkv.types import DEFAULT_PRIORITY


class HandCrankedCopies:
    """Copies happen, byte by byte, when the test says so: until then source and target are untouched."""

    def __init__(self, runner: FakeRunner) -> None:
        self._blocks = runner.slots.view(np.uint8).reshape(runner.num_blocks, -1)
        self.launched: list[Copy] = []
        self._done: list[Copy] = []

    def launch(self, copy: Copy) -> None:
        self.launched.append(copy)

    def complete(self, index: int = 0, error: str | None = None) -> None:
        copy = self.launched.pop(index)
        copy.error = error
        for block_id, view in zip(copy.block_ids, copy.views, strict=True):
            pair = self._blocks[block_id], np.frombuffer(view, dtype=np.uint8)
            target, source = pair if copy.to_device else pair[::-1]
            target[:] = source if error is None else 0xEE
        self._done.append(copy)

    def poll(self) -> list[Copy]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


class FakeDisk:
    """A dict of bytes behind a queue that the test works off, one answer at a time."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.blocks: dict[bytes, tuple[bytes, bytes | None]] = {}
        self.pending: list = []
        self.accepts = True
        self.capacity = capacity
        self.touched: list[bytes] = []
        self.labels: dict[tuple[str, bytes], str] = {}
        self.pin_records: dict[bytes, PinRecord] = {}
        self.retained: dict[bytes, tuple[int, int]] = {}
        self.rank = lambda block_hash: (DEFAULT_PRIORITY, NEVER)
        self.protected: frozenset[bytes] = frozenset()
        self._answers: list = []

    fault = None
    refusal = None
    write_nbytes_per_s = None
    queued_nbytes = (0, 0)

    def usage(self) -> TierUsage:
        pinned = {block_hash for record in self.pin_records.values() for block_hash in record.hashes}
        num_blocks = len(self.blocks)
        return TierUsage(self.capacity, num_blocks, num_blocks, num_blocks, num_pinned=len(pinned))

    def close(self, timeout_s: float) -> bool:
        return not self.pending

    def lookup(self, hashes, tag) -> bool:
        self.pending.append(("lookup", list(hashes), tag))
        return self.accepts

    def load(self, block_hash, target, tag) -> bool:
        if self.accepts:
            self.pending.append(("load", block_hash, target, tag))
        return self.accepts

    def store(self, blocks) -> bool:
        if self.accepts:
            self.pending.append(("store", list(blocks)))
        return self.accepts

    def touch(self, block_hash) -> None:
        self.touched.append(block_hash)

    def label(self, kind, block_hash, text) -> None:
        self.labels[kind, block_hash] = text

    def ask(self, function) -> Future:
        """As `change`: `function` gets this fake for a store."""
        return self.change(function)

    def change(self, function) -> Future:
        future = Future()
        self.pending.append(("change", function, future))
        return future

    def num_fit(self, block_nbytes, block_size) -> int:
        return self.capacity

    def pin(self, record) -> int:
        self.pin_records[record.id] = record
        return self._num_resident(record)

    def unpin(self, pin_id) -> bool:
        self.pin_records.pop(pin_id, None)
        return True

    def pins(self) -> PinsSeen:
        records = tuple(self.pin_records.values())
        return PinsSeen(records, {record.id: self._num_resident(record) for record in records}, 0)

    def retain(self, rows) -> None:
        self.retained.update((block_hash, (priority, expires_us)) for block_hash, priority, expires_us in rows)

    def _num_resident(self, record) -> int:
        return next((i for i, h in enumerate(record.hashes) if h not in self.blocks), len(record.hashes))

    def clear(self, *, namespace=None, roots=None, below=None) -> ClearOutcome:
        """What `DiskStore.clear` does, as far as this fake knows roots: all, or `below`."""
        before = len(self.blocks)
        for block_hash in list(self.blocks if below is None else below):
            self.remove(block_hash, "cleared")
        return ClearOutcome(before - len(self.blocks), 0)

    def protect(self, hashes) -> None:
        self.protected = hashes

    def poll(self) -> list:
        answers, self._answers = self._answers, []
        return answers

    def complete(self, index: int = 0, fail: bool = False) -> None:
        kind, *job = self.pending.pop(index)
        if kind == "lookup":
            hashes, tag = job
            length = next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))
            self._answers.append(LookupResult(tag, 0 if fail else length))
        elif kind == "change":
            function, future = job
            future.set_result(function(self))
        elif kind == "load":
            block_hash, target, tag = job
            record = self.blocks.get(block_hash)
            if record is None or fail:
                target[:] = b"\xdd" * len(target)
                self.remove(block_hash, "corrupt")
                self._answers.append(LoadResult(block_hash, False, tag))
            else:
                target[:] = record[0]
                self._answers.append(LoadResult(block_hash, True, tag))
        else:
            for info, view in job[0]:
                self._answers.append(StoreResult(info.hash, self._store(info, view, fail)))

    def _store(self, info, view, fail: bool) -> StoreOutcome:
        if fail:
            return StoreOutcome.FAILED
        if info.hash in self.blocks:
            return StoreOutcome.PRESENT
        if info.depth and info.parent not in self.blocks:
            return StoreOutcome.NO_PARENT
        if len(self.blocks) >= self.capacity:
            return StoreOutcome.REFUSED
        self.blocks[info.hash] = (view.tobytes(), info.parent if info.depth else None)
        self._answers.append(BlockChange(info.hash, True, "spilled", info.parent, len(info.token_ids)))
        return StoreOutcome.STORED

    def remove(self, block_hash: bytes, reason: str = "evicted") -> None:
        """With everything behind it."""
        if block_hash in self.blocks:
            for child in [h for h, (_, parent) in self.blocks.items() if parent == block_hash]:
                self.remove(child, reason)
            del self.blocks[block_hash]
            self._answers.append(BlockChange(block_hash, False, reason))


class TieredCore:
    """A core over hand-cranked tiers. A second one over the same `disk` is a restart."""

    def __init__(
        self, *, num_slots: int = 16, disk: FakeDisk | None = None, policy: str = "always", **settings
    ) -> None:
        self.clock = ManualClock()
        self.disk = disk
        made: dict = {}

        def make_tiers(pool, gate, wake):
            runner = made["runner"]
            block_nbytes = runner.slots.nbytes // runner.num_blocks
            # Slots start at page borders: the capacity is counted in pages.
            self.host = HostArena(block_nbytes, num_slots * 4096)
            self.copies = HandCrankedCopies(runner)
            return Tiers(
                pool, self.copies, self.host, disk, gate, clock=self.clock, timeout_s=5.0, block_nbytes=block_nbytes
            )

        self.core: EngineCore
        self.core, self.runner = make_core(
            clock=self.clock,
            make_tiers=make_tiers,
            on_runner=lambda runner: made.update(runner=runner),
            restore=policy,
            **settings,
        )
        self.tiers = self.core.tiers
        if disk is not None:
            # What a start asks the store for is answered before anything else.
            while disk.pending:
                disk.complete()
            self.core.pins.expire()

    def crank(self) -> bool:
        """Let everything that is under way happen; False if nothing was."""
        if self.copies.launched:
            self.copies.complete()
        elif self.disk is not None and self.disk.pending:
            self.disk.complete()
        else:
            return False
        return True

    def settle(self) -> None:
        """Idle until all is saved."""
        for _ in range(10_000):
            if not self.core.work_idle():
                return
            self.crank()
        raise AssertionError("the tiers do not come to rest")

    def check_tiers(self) -> None:
        """Every stored byte belongs to its key, and nothing is leased that nobody reads."""
        spiller = self.tiers.spiller
        for info in spiller._info.values():
            lease = self.host.lease(info.hash)
            if lease is not None:
                assert bytes(lease.view) == expected_bytes(info), "host bytes are not their key's"
                lease.release()
        for block_hash, (data, parent) in (self.disk.blocks if self.disk is not None else {}).items():
            if block_hash in spiller._info:
                assert data == expected_bytes(spiller._info[block_hash]), "disk bytes are not their key's"
            assert parent is None or parent in self.disk.blocks, "a block without its parent is on disk"
        copies = [*self.copies.launched, *self.copies._done]
        leased = sum(len(c.block_ids) for c in copies if c.to_device)
        writing = sum(len(c.block_ids) for c in copies if not c.to_device)
        assert spiller._queued.keys() <= spiller._to_disk.keys(), (
            "a slot is kept for a write that will never be asked for"
        )
        self.host.check_integrity(
            num_leases=leased + spiller.num_storing + len(spiller._queued),
            num_reservations=writing + self.tiers.restorer.num_loading,
        )


def expected_bytes(info) -> bytes:
    size = len(info.token_ids)
    rows = np.empty((size, 2), dtype=np.int64)
    rows[:, 0] = info.token_ids
    rows[:, 1] = np.arange(info.depth * size, (info.depth + 1) * size)
    return rows.tobytes()
