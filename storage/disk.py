"""The disk tier: blocks in LMDB, found by hash, kept within a hard cap, shared by any number of processes.

Knows records, rows and room; knows nothing of tensors, of the host tier or of who calls it from which thread. What is
resident *is* what LMDB holds: no index in memory, so opening is immediate and other processes' blocks are seen at once.

Threads: lookups and loads may run in any number of threads; `put` and all else that writes is meant for one. Nothing
here raises once the store is open, except `verify` and `inspect`: a fault shows in the outcome, in `fault` and in
`usage()`, and the store serves again when the fault has gone.

Invariants: a block is resident only if the block before it is; what the blocks cost never exceeds nine tenths of the
capacity at any commit, and the file never exceeds the capacity; only leaves are evicted, none that is pinned, none that
the batch being written needs. A record that failed its checks is not found again, even before it has been deleted.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tieredkv.errors import ConfigError, InvariantError, StorageError
from tieredkv.storage.audit import Inspection, Report, inspect_store, rebuild, verify_store
from tieredkv.storage.codec import Codec, RawCodec
from tieredkv.storage.environment import RESERVED_NBYTES, StoreEnvironment, StoreFullError, Txn
from tieredkv.storage.index import NAMESPACE_KEY, STATE_KEY, STORE_ID_KEY, Index, Row, State, record_cost
from tieredkv.storage.medium import Medium
from tieredkv.storage.record import BadRecordError, decode_record, encode_record, max_record_nbytes
from tieredkv.storage.tier import BlockRecord, LoadOutcome, StoreOutcome, TierUsage

logger = logging.getLogger(__name__)

MIN_CAPACITY_NBYTES = 512 * 1024
BATCH_NBYTES = 1 << 20
"""Payload per transaction. Small ones are faster: LMDB's dirty pages then stay in memory the allocator holds warm."""
BATCH_BLOCKS = 128
REMOVALS_PER_TXN = 256


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did: blocks removed, and blocks that stay because they are pinned or carry a pinned one."""

    num_removed: int
    num_kept: int


@dataclass(slots=True)
class _Counts:
    evictions: int = 0
    corrupt: int = 0
    stored: int = 0
    loaded: int = 0
    refused: int = 0
    failed: int = 0


def map_nbytes_for(capacity_nbytes: int) -> int:
    """Most bytes that the data file may take, so that all files together stay within the capacity."""
    return (capacity_nbytes - RESERVED_NBYTES) // 65536 * 65536


def budget_nbytes_for(capacity_nbytes: int) -> int:
    """Most bytes that the blocks may cost; the rest is LMDB's for pages that are being replaced, and for fragments."""
    return map_nbytes_for(capacity_nbytes) * 9 // 10


def wall_clock_us() -> int:
    return time.time_ns() // 1000


class DiskStore:
    """One store directory, opened by `DiskStore.open`."""

    def __init__(self, env: StoreEnvironment, codec: Codec, clock_us: Callable[[], int]) -> None:
        self._env = env
        self._medium = env.medium
        self._codec = codec
        self._clock_us = clock_us
        self._write_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._counts = _Counts()
        self._condemned: set[bytes] = set()
        self._must_rebuild = False
        self._staging = np.empty(0, np.uint8)
        self._last_state = State()
        self._described: dict[bytes, str] = {}

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        capacity_nbytes: int | None = None,
        *,
        codec: Codec | None = None,
        readonly: bool = False,
        medium: Medium | None = None,
        clock_us: Callable[[], int] = wall_clock_us,
    ) -> DiskStore:
        """Open the store in `directory`, creating it if there is none; takes milliseconds at any size.

        `capacity_nbytes` caps all files of the store. It belongs to the store: with several processes the one that
        opened it last decides for all. A store that holds more is trimmed by and by. None takes the store as it is.

        Raises `StorageError`, saying what to do, if the store cannot be used, and `ConfigError` for a useless capacity.
        """
        if capacity_nbytes is not None and capacity_nbytes < MIN_CAPACITY_NBYTES:
            raise ConfigError(f"must be at least {MIN_CAPACITY_NBYTES} bytes, got {capacity_nbytes}", key="disk_size")
        capacity = capacity_nbytes or 0
        env_medium = medium or Medium()

        def initialize(txn: Txn) -> None:
            if not capacity:
                raise StorageError(f"{directory} holds no store")
            env_medium.put(txn.raw, STATE_KEY, State(capacity_nbytes=capacity).pack(), txn.dbs["info"])
            env_medium.put(txn.raw, STORE_ID_KEY, secrets.token_bytes(16), txn.dbs["info"])

        env = StoreEnvironment(
            Path(directory),
            map_nbytes_for(capacity) if capacity else 0,
            initialize=initialize,
            readonly=readonly,
            medium=env_medium,
        )
        store = cls(env, codec or RawCodec(), clock_us)
        try:
            with env.reading() as txn:
                store._last_state = Index(txn, env_medium).state
            if capacity and not readonly and store._last_state.capacity_nbytes != capacity:
                store._set_capacity(capacity)
        except BaseException:
            env.close()
            raise
        return store

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        return self._env.directory

    @property
    def fault(self) -> str | None:
        """Why the store does not work as it should, for people; None while all is well."""
        return self._env.fault or ("the index contradicts itself and waits for repair" if self._must_rebuild else None)

    @property
    def file_nbytes(self) -> int:
        return self._env.file_nbytes

    @property
    def codec(self) -> Codec:
        return self._codec

    def usage(self) -> TierUsage:
        """Counters. Contents as of now, or as last seen while the store is unavailable."""
        try:
            with self._env.reading() as txn:
                self._last_state = Index(txn, self._medium).state
        except (StorageError, InvariantError, struct.error):
            pass
        state, counts = self._last_state, self._counts
        return TierUsage(
            capacity_nbytes=state.capacity_nbytes,
            used_nbytes=state.used_nbytes,
            payload_nbytes=state.payload_nbytes,
            num_blocks=state.num_blocks,
            num_evictions=counts.evictions,
            num_corrupt=counts.corrupt,
            num_stored=counts.stored,
            num_loaded=counts.loaded,
            num_refused=counts.refused,
            num_failed=counts.failed,
            num_resets=self._env.num_resets,
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def __contains__(self, block_hash: bytes) -> bool:
        return self.longest_prefix([block_hash]) == 1

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's hashes, from the first on, are resident. Binary search: residency is prefix-closed.

        `hashes` may start anywhere in a chain. Changes nothing, not even recency. 0 while the store is unavailable.
        """
        if not hashes:
            return 0
        try:
            with self._env.reading() as txn:
                get, raw, blocks = self._medium.get, txn.raw, txn.dbs["blocks"]
                found, missing = 0, len(hashes)
                probe = min(1, missing)
                while found < missing:
                    if get(raw, hashes[probe - 1], blocks) is None:
                        missing = probe - 1
                    else:
                        found = probe
                    probe = len(hashes) if found == 1 and missing == len(hashes) else (found + missing + 1) // 2
        except StorageError:
            return 0
        if self._condemned:
            found = next((i for i, h in enumerate(hashes[:found]) if h in self._condemned), found)
        return found

    def load(
        self, block_hash: bytes, namespace: bytes, target: memoryview, *, token_ids: bytes | None = None
    ) -> LoadOutcome:
        """Fill `target`, writable and exactly the block's raw length, with a block's bytes, verified.

        With `token_ids` the stored tokens are compared as well. A record that fails a check is condemned: not found any
        more, and deleted with all behind it by the next write. `target` is undefined unless the outcome is LOADED.
        """
        if block_hash in self._condemned:
            return LoadOutcome.MISSING
        try:
            with self._env.reading() as txn:
                record = self._medium.get(txn.raw, block_hash, txn.dbs["blocks"])
                if record is None:
                    return LoadOutcome.MISSING
                try:
                    decode_record(record, target.cast("B"), block_hash, namespace, self._medium.read)
                    if token_ids is not None:
                        row = Index(txn, self._medium).row(block_hash)
                        if row is None or row.token_ids != token_ids:
                            raise BadRecordError("record holds other tokens")
                except OSError:
                    # A block that the device cannot read today will not be asked for again.
                    self._condemned.add(block_hash)
                    raise
        except BadRecordError as error:
            self._condemned.add(block_hash)
            self._count(corrupt=1)
            logger.warning("disk tier: block %s is dropped: %s", block_hash.hex()[:16], error)
            return LoadOutcome.CORRUPT
        except StorageError:
            self._count(failed=1)
            return LoadOutcome.FAILED
        self._count(loaded=1)
        return LoadOutcome.LOADED

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, records: Sequence[BlockRecord], *, protect: Collection[bytes] = ()) -> list[StoreOutcome]:
        """Store blocks, parents before children; returns one outcome per record, in the order given.

        Makes room first by evicting leaves, but none in `protect` (the deepest hash of what waiting requests have
        matched) and none that `records` name. Where nothing more fits, the suffix is dropped. Each transaction holds a
        few blocks, each of them visible wholly or not at all.
        """
        outcomes: dict[int, StoreOutcome] = {}
        order = sorted(range(len(records)), key=lambda i: records[i].depth)
        protected = {*protect, *(r.hash for r in records), *(r.parent for r in records)}
        with self._write_lock:
            self._drop_condemned()
            self._sift(records, order, outcomes)
            for group in self._groups(records, [i for i in order if i not in outcomes]):
                if not self._put_group(records, group, outcomes, protected):
                    break
        done = [outcomes.get(i, StoreOutcome.FAILED) for i in range(len(records))]
        num_stored = done.count(StoreOutcome.STORED)
        num_failed = done.count(StoreOutcome.FAILED)
        num_refused = len(done) - num_stored - num_failed - done.count(StoreOutcome.PRESENT)
        self._count(stored=num_stored, failed=num_failed, refused=num_refused)
        return done

    def _sift(self, records: Sequence[BlockRecord], order: list[int], outcomes: dict[int, StoreOutcome]) -> None:
        """Answer what needs no write, so that nothing is compressed in vain and no lock taken."""
        try:
            with self._env.reading() as txn:
                index = Index(txn, self._medium)
                coming = set()
                for i in order:
                    record = records[i]
                    if record.hash in index:
                        outcomes[i] = StoreOutcome.PRESENT
                    elif record.depth and record.parent not in coming and record.parent not in index:
                        outcomes[i] = StoreOutcome.NO_PARENT
                    else:
                        coming.add(record.hash)
        except StorageError:
            return

    def _groups(self, records: Sequence[BlockRecord], order: list[int]) -> Iterator[list[int]]:
        limit = min(BATCH_NBYTES, budget_nbytes_for(self._last_state.capacity_nbytes) // 64)
        group: list[int] = []
        nbytes = 0
        for i in order:
            size = records[i].payload.nbytes
            if group and (nbytes + size > limit or len(group) >= BATCH_BLOCKS):
                yield group
                group, nbytes = [], 0
            group.append(i)
            nbytes += size
        if group:
            yield group

    def _put_group(
        self,
        records: Sequence[BlockRecord],
        group: list[int],
        outcomes: dict[int, StoreOutcome],
        protected: Collection[bytes],
    ) -> bool:
        """Store one group; False if there is no point in trying the ones behind it."""
        try:
            encoded = self._encode([records[i] for i in group])
        except (StorageError, ValueError) as error:
            logger.warning("disk tier: blocks refused: %s", error)
            outcomes.update(dict.fromkeys(group, StoreOutcome.REFUSED))
            return True
        for last_try in (False, True):
            try:
                outcomes.update(self._attempt(records, group, encoded, protected))
                return True
            except StoreFullError:
                nbytes = sum(view.nbytes for view in encoded)
                if last_try or not self._relieve(2 * nbytes, protected):
                    break
            except StorageError:
                return False
            except (InvariantError, struct.error) as error:
                self._distrust(error)
                return False
        outcomes.update(dict.fromkeys((i for i in range(len(records)) if i not in outcomes), StoreOutcome.NO_ROOM))
        return False

    def _attempt(
        self,
        records: Sequence[BlockRecord],
        group: list[int],
        encoded: list[memoryview],
        protected: Collection[bytes],
    ) -> dict[int, StoreOutcome]:
        """One transaction: all of the group's outcomes, or an exception and nothing is stored."""
        outcomes: dict[int, StoreOutcome] = {}
        num_evicted = 0
        with self._env.writing() as txn:
            index = Index(txn, self._medium)
            self._last_state = index.state
            for i, view in zip(group, encoded, strict=True):
                outcomes[i], evicted = self._insert(index, records[i], view, protected)
                num_evicted += evicted
            index.save()
        self._count(evictions=num_evicted)
        return outcomes

    def _insert(
        self, index: Index, record: BlockRecord, view: memoryview, protected: Collection[bytes]
    ) -> tuple[StoreOutcome, int]:
        if record.hash in index:
            return StoreOutcome.PRESENT, 0
        root = record.parent
        if record.depth:
            parent = index.row(record.parent)
            if parent is None:
                return StoreOutcome.NO_PARENT, 0
            if parent.depth + 1 != record.depth or parent.namespace != record.namespace:
                return StoreOutcome.REFUSED, 0
            root = parent.root
        budget = budget_nbytes_for(index.state.capacity_nbytes)
        cost = record_cost(view.nbytes, len(record.token_ids), index.psize)
        if cost > budget:
            return StoreOutcome.TOO_LARGE, 0
        now_us = self._clock_us()
        fits, num_evicted = index.make_room(budget - cost, protected, now_us)
        if not fits:
            return StoreOutcome.NO_ROOM, num_evicted
        used_us = index.state.tick(now_us)
        row = Row(
            parent=record.parent,
            root=root,
            namespace=record.namespace,
            depth=record.depth,
            num_children=0,
            raw_nbytes=record.payload.nbytes,
            stored_nbytes=view.nbytes,
            cost_nbytes=cost,
            last_use_us=used_us,
            created_us=now_us,
            expires_us=record.expires_us,
            priority=record.priority,
            codec=view[6],
            token_ids=record.token_ids,
        )
        index.insert(record.hash, row, view)
        return StoreOutcome.STORED, num_evicted

    def _encode(self, records: list[BlockRecord]) -> list[memoryview]:
        """The records' bytes, side by side in the staging buffer, which the next call reuses."""
        sizes = [max_record_nbytes(r.payload.nbytes, self._codec) for r in records]
        if self._staging.size < sum(sizes):
            self._staging = np.empty(sum(sizes), np.uint8)
        views, at = [], 0
        for record, size in zip(records, sizes, strict=True):
            out = self._staging.data[at : at + size]
            at += size
            length = encode_record(
                out,
                record.payload.cast("B"),
                codec=self._codec,
                namespace=record.namespace,
                block_hash=record.hash,
                parent=record.parent,
                depth=record.depth,
            )
            views.append(out[:length])
        return views

    def _relieve(self, nbytes: int, protected: Collection[bytes]) -> bool:
        """After the map or the disk was full: evict `nbytes` more than the cap asks for, and let LMDB have the pages.

        Pages that a transaction frees are free for the second one after it, hence the empty round. Readers that were
        killed are forgotten: their view would keep every page alive. A map that is smaller than the capacity, which
        another process has raised, grows.
        """
        map_nbytes = map_nbytes_for(self._last_state.capacity_nbytes)
        if self._env.map_nbytes < map_nbytes and self._env.resize(map_nbytes):
            return True
        try:
            self._env.forget_dead_readers()
            for extra_nbytes in (nbytes, 0):
                with self._env.writing() as txn:
                    index = Index(txn, self._medium)
                    _, num_evicted = index.make_room(
                        max(index.state.used_nbytes - extra_nbytes, 0), protected, self._clock_us()
                    )
                    index.state.tick(self._clock_us())
                    index.save()
                self._count(evictions=num_evicted)
        except (StorageError, InvariantError, struct.error):
            return False
        return True

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Note uses, in order, in one transaction. Of a matched prefix only the deepest block needs to be named: the
        ones before it inherit its last use when they become leaves.
        """

        def apply(index: Index) -> None:
            for block_hash in hashes:
                index.touch(block_hash, self._clock_us())

        self._write(apply)

    def pin(self, hashes: Iterable[bytes]) -> list[int | None]:
        """Add a pin to each block; a pinned block and all before it stay. Returns the new counts, None where missing."""
        return self._repin(hashes, +1)

    def unpin(self, hashes: Iterable[bytes]) -> list[int | None]:
        """Take a pin from each block, never below none."""
        return self._repin(hashes, -1)

    def _repin(self, hashes: Iterable[bytes], delta: int) -> list[int | None]:
        names = list(hashes)
        counts: list[int | None] = []
        done = self._write(lambda index: counts.extend(index.pin(h, delta) for h in names))
        return counts if done else [None] * len(names)

    def remove(self, hashes: Collection[bytes]) -> int:
        """Delete blocks with all that lie behind them, pinned or not; returns how many went."""
        with self._write_lock:
            return self._remove(hashes)[0]

    def clear(self, *, namespace: bytes | None = None, root: bytes | None = None) -> Cleared:
        """Delete all blocks, or those of a namespace or of a chain's root (one tenant), but none that a pin keeps."""
        with self._write_lock:
            try:
                with self._env.reading() as txn:
                    chosen = [
                        (row.depth, key)
                        for key, value in self._medium.scan(txn.raw, txn.dbs["meta"])
                        if (row := Row.unpack(value))
                        and (namespace is None or row.namespace == namespace)
                        and (root is None or row.root == root)
                    ]
            except (StorageError, struct.error):
                return Cleared(0, 0)
            chosen.sort(reverse=True)
            num_removed = self._remove_leaves([key for _, key in chosen], spare_pinned=True)
            return Cleared(num_removed, len(chosen) - num_removed)

    def _remove(self, hashes: Collection[bytes]) -> tuple[int, bool]:
        """How many blocks went, and whether all of `hashes` have."""
        num_removed = 0
        try:
            # Another process may add a child between the walk and the removal; then the walk is repeated.
            for _ in range(3):
                with self._env.reading() as txn:
                    doomed = Index(txn, self._medium).descendants(hashes)
                if not doomed:
                    return num_removed, True
                num_removed += self._remove_leaves(doomed, spare_pinned=False)
        except (StorageError, struct.error):
            pass
        return num_removed, False

    def _remove_leaves(self, hashes: Sequence[bytes], *, spare_pinned: bool) -> int:
        """Delete those of `hashes`, deepest first, that are leaves when their turn comes."""
        num_removed = 0
        for at in range(0, len(hashes), REMOVALS_PER_TXN):
            removed: list[bytes] = []

            def apply(index: Index, at: int = at, removed: list[bytes] = removed) -> None:
                for block_hash in hashes[at : at + REMOVALS_PER_TXN]:
                    row = index.row(block_hash)
                    if row is None or row.num_children or (spare_pinned and index.num_pins(block_hash)):
                        continue
                    index.remove(block_hash)
                    removed.append(block_hash)

            if not self._write(apply):
                break
            num_removed += len(removed)
        return num_removed

    def _drop_condemned(self) -> None:
        if self._condemned and not self._env.readonly:
            condemned = set(self._condemned)
            if self._remove(condemned)[1]:
                self._condemned -= condemned

    def _write(self, apply: Callable[[Index], object]) -> bool:
        """Run `apply` in a transaction of its own; False if it was not committed."""
        try:
            with self._env.writing() as txn:
                index = Index(txn, self._medium)
                apply(index)
                index.save()
                self._last_state = index.state
        except StorageError:
            self._count(failed=1)
            return False
        except (InvariantError, struct.error) as error:
            self._distrust(error)
            return False
        return True

    def _distrust(self, error: Exception) -> None:
        logger.warning("disk tier: %s: the index contradicts itself (%s) and will be rebuilt", self.directory, error)
        self._must_rebuild = True

    def _count(self, **more: int) -> None:
        with self._count_lock:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def maintain(self, *, idle: bool) -> None:
        """What nobody waits for; call it about once a second from the thread that writes.

        Reopens a store that was given up, deletes condemned records, repairs the index, trims a store whose capacity was
        lowered, finds out whether a fault has gone; when `idle`, syncs.
        """
        if self._env.readonly or not self._env.reopen():
            return
        with self._write_lock:
            if self._must_rebuild:
                self._rebuild()
            self._drop_condemned()
            if self.fault or self.usage().used_nbytes > budget_nbytes_for(self._last_state.capacity_nbytes):
                self._write(self._trim)
        if idle:
            self._env.sync()

    def _trim(self, index: Index) -> None:
        _, num_evicted = index.make_room(budget_nbytes_for(index.state.capacity_nbytes), (), self._clock_us())
        index.state.tick(self._clock_us())
        self._count(evictions=num_evicted)

    def _rebuild(self) -> None:
        try:
            with self._env.writing() as txn:
                rebuild(txn, self._medium)
            self._must_rebuild = False
        except (StorageError, InvariantError, struct.error) as error:
            logger.warning("disk tier: %s cannot be repaired: %s", self.directory, error)

    def _set_capacity(self, capacity_nbytes: int) -> None:
        def apply(index: Index) -> None:
            index.state = replace(index.state, capacity_nbytes=capacity_nbytes)

        if not self._write(apply):
            raise StorageError(self.fault or f"{self.directory} cannot be written")

    def describe_namespace(self, digest: bytes, text: str) -> None:
        """Leave a description (JSON) of what a namespace's blocks belong to, for `inspect`."""
        if self._described.get(digest) == text:
            return
        key = NAMESPACE_KEY + digest

        def apply(index: Index) -> None:
            index.put_info(key, text.encode())

        if self._write(apply):
            self._described[digest] = text

    def verify(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Audit every record and the invariants; `progress(done, total)` in blocks. Raises `StorageError`."""
        with self._write_lock:
            return verify_store(self._env, repair=repair, progress=progress)

    def inspect(self) -> Inspection:
        """What the store holds, by namespace. Raises `StorageError`."""
        return inspect_store(self._env)

    def sync(self) -> bool:
        """Bring everything to the device; True if a crash of the machine would lose nothing now."""
        return self._env.sync()

    def close(self) -> None:
        """Sync and close. Everything afterwards fails softly."""
        self._env.close()
