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

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from tieredkv.errors import ConfigError, StorageError
from tieredkv.storage.audit import Inspection, Report, inspect_store, rebuild, verify_store
from tieredkv.storage.codec import Codec, RawCodec
from tieredkv.storage.environment import StoreEnvironment, StoreFullError
from tieredkv.storage.index import NAMESPACE_KEY, STATE_KEY, STORE_ID_KEY, Index
from tieredkv.storage.insertion import BlockInserter
from tieredkv.storage.labels import Labels, LabelWriter
from tieredkv.storage.listing import StoreListing
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import Txn
from tieredkv.storage.pinning import PinStore
from tieredkv.storage.pins import PinRecord, PinsSeen
from tieredkv.storage.record import BadRecordError, decode_record
from tieredkv.storage.removal import BlockRemover, ClearOutcome
from tieredkv.storage.rows import Row, State
from tieredkv.storage.session import CONTRADICTIONS, StoreSession, budget_nbytes_for, map_nbytes_for
from tieredkv.storage.tier import BlockChange, BlockRecord, LoadOutcome, Refusal, StoreOutcome, TierUsage

logger = logging.getLogger(__name__)

MIN_CAPACITY_NBYTES = 512 * 1024
TRIM_STEP = 32
"""Blocks per transaction when a store is made smaller."""


def wall_clock_us() -> int:
    return time.time_ns() // 1000


class DiskStore:
    """One store directory, opened by `DiskStore.open`."""

    def __init__(self, env: StoreEnvironment, codec: Codec, clock_us: Callable[[], int]) -> None:
        self._env = env
        self._medium = env.medium
        self._codec = codec
        self._session = StoreSession(env, clock_us)
        self._inserter = BlockInserter(self._session, codec)
        self._remover = BlockRemover(self._session)
        self._pins = PinStore(self._session)
        self._labels = LabelWriter(self._session)
        self._described: dict[bytes, str] = {}
        self._num_reopened = 0
        self._store_id: str | None = None
        self.stopping = False
        """Set when the store is about to be closed: long walks end with `StorageError`."""

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
            if not store._look() and not readonly:
                store._rebuild()
                store._look()
            if not readonly:
                store._pins.expire()
            if capacity and not readonly and store._session.last_state.capacity_nbytes != capacity:
                store._set_capacity(capacity)
        except BaseException:
            env.close()
            raise
        return store

    def _look(self) -> bool:
        """Read the counters once; False if they cannot be read, so that the index has to be rebuilt."""
        try:
            with self._env.reading() as txn:
                self._session.last_state = Index(txn, self._medium).state
        except CONTRADICTIONS as error:
            self._session.distrust(error)
            return False
        return True

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        return self._env.directory

    @property
    def fault(self) -> str | None:
        """Why the store does not work as it should, for people; None while all is well."""
        return self._env.fault or (
            "the index contradicts itself and waits for repair" if self._session.must_rebuild else None
        )

    @property
    def refusal(self) -> Refusal | None:
        """Set while blocks cannot be stored, until some have been. Smaller writes, and so `fault`, may fare better."""
        return self._session.refusal

    @property
    def file_nbytes(self) -> int:
        return self._env.file_nbytes

    @property
    def codec(self) -> Codec:
        return self._codec

    def usage(self, *, cached: bool = False) -> TierUsage:
        """Counters. Contents as of now, or as last seen while the store is unavailable, or `cached`, which never waits."""
        state = self._session.last_state if cached else self._session.refresh()
        counts = self._session.counts
        return TierUsage(
            capacity_nbytes=state.capacity_nbytes,
            used_nbytes=state.used_nbytes,
            payload_nbytes=state.payload_nbytes,
            num_blocks=state.num_blocks,
            num_evictions=counts.evictions,
            num_corrupt=counts.corrupt,
            num_stored=counts.stored,
            num_refused=counts.refused,
            num_failed=counts.failed,
            num_resets=self._env.num_resets,
            num_pinned=self._session.last_num_pinned,
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
                probe = 1
                while found < missing:
                    if get(raw, hashes[probe - 1], blocks) is None:
                        missing = probe - 1
                    else:
                        found = probe
                    probe = len(hashes) if found == 1 and missing == len(hashes) else (found + missing + 1) // 2
        except StorageError:
            return 0
        if self._session.condemned:
            found = next((i for i, h in enumerate(hashes[:found]) if h in self._session.condemned), found)
        return found

    def load(
        self, block_hash: bytes, namespace: bytes, target: memoryview, *, token_ids: bytes | None = None
    ) -> LoadOutcome:
        """Fill `target`, writable and exactly the block's raw length, with a block's bytes, verified.

        With `token_ids` the stored tokens are compared as well. A record that fails a check is condemned: not found any
        more, and deleted with all behind it by the next write. `target` is undefined unless the outcome is LOADED.
        """
        if block_hash in self._session.condemned:
            return LoadOutcome.MISSING
        try:
            with self._env.reading() as txn:
                record = self._medium.get(txn.raw, block_hash, txn.dbs["blocks"])
                if record is None:
                    return LoadOutcome.MISSING
                try:
                    decode_record(record, target.cast("B"), block_hash, namespace, self._medium)
                    if token_ids is not None:
                        row = self._medium.get(txn.raw, block_hash, txn.dbs["meta"])
                        if row is None or Row.unpack(row).token_ids != token_ids:
                            raise BadRecordError("record holds other tokens")
                except OSError:
                    # A block that the device cannot read today will not be asked for again.
                    self._session.condemned.add(block_hash)
                    raise
        except BadRecordError as error:
            self._session.condemned.add(block_hash)
            self._session.count(corrupt=1)
            logger.warning("disk tier: block %s is dropped: %s", block_hash.hex()[:16], error)
            return LoadOutcome.CORRUPT
        except StorageError:
            self._session.count(failed=1)
            return LoadOutcome.FAILED
        except CONTRADICTIONS as error:
            self._session.distrust(error)
            return LoadOutcome.FAILED
        return LoadOutcome.LOADED

    @property
    def store_id(self) -> str | None:
        """The random id, in hex, that the store got when it was created; None while it cannot be read."""
        if self._store_id is None:
            try:
                with self._env.reading() as txn:
                    found = self._medium.get(txn.raw, STORE_ID_KEY, txn.dbs["info"])
                    self._store_id = None if found is None else bytes(found).hex()
            except StorageError:
                return None
        return self._store_id

    @contextlib.contextmanager
    def listing(self, namespace: bytes) -> Iterator[StoreListing]:
        """Look at the blocks of a namespace; keep it short. Raises `StorageError`."""
        try:
            with self._env.reading() as txn:
                yield StoreListing(txn, self._medium, namespace, self._session.condemned)
        except CONTRADICTIONS as error:
            self._session.distrust(error)
            raise StorageError(str(error)) from None

    # -- changes, for whoever keeps account of them --------------------------------------------------------------------

    def follow(self) -> None:
        """From now on keep what changes, until `take_changes`."""
        self._session.follow()

    @property
    def has_changes(self) -> bool:
        return self._session.has_changes

    def take_changes(self) -> list[BlockChange]:
        """What this process has changed since the last call, in the order of the commits."""
        return self._session.take_changes()

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, records: Sequence[BlockRecord], *, protect: Collection[bytes] = ()) -> list[StoreOutcome]:
        """Store blocks, parents before children; returns one outcome per record, in the order given.

        Makes room first by evicting leaves, but none in `protect` (the deepest hash of what waiting requests have
        matched) and none that `records` name. Where nothing more fits, the suffix is dropped. Each transaction holds a
        few blocks, each of them visible wholly or not at all.
        """
        with self._session.write_lock:
            self._remover.drop_condemned()
            return self._inserter.put(records, protect)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Note uses, in order, in one transaction. Of a matched prefix only the deepest block needs to be named: the
        ones before it inherit its last use when they become leaves.
        """

        def apply(index: Index) -> None:
            for block_hash in hashes:
                index.touch(block_hash, self._session.clock_us())

        self._session.write(apply)

    def retain(self, rows: Iterable[tuple[bytes, int, int]]) -> None:
        """Give blocks another priority until a time: (hash, priority, expires_us), in one transaction. As for `touch`, of a
        prefix only the deepest block needs to be named.
        """

        def apply(index: Index) -> None:
            for block_hash, priority, expires_us in rows:
                index.retain(block_hash, priority, expires_us)

        self._session.write(apply)

    def pin(self, record: PinRecord) -> int | None:
        """Keep a pin, in the place of the one with its id: from now on its blocks stay, also those that come later. Returns how
        many of its leading blocks are resident; None if it was not kept, because of a fault or for lack of room for pins.
        """
        with self._session.write_lock:
            return self._pins.put(record)

    def unpin(self, pin_id: bytes) -> bool:
        """Take a pin away, if it is there; False if that could not be done."""
        with self._session.write_lock:
            return self._pins.drop(pin_id)

    def pins(self) -> PinsSeen | None:
        """All pins, of all processes and namespaces; None while the store is unavailable."""
        return self._pins.see(self._env.num_resets)

    def remove(self, hashes: Collection[bytes]) -> int:
        """Delete blocks with all that lie behind them, pinned or not; returns how many went."""
        with self._session.write_lock:
            return self._remover.remove(hashes)[0]

    def clear(
        self,
        *,
        namespace: bytes | None = None,
        root: bytes | None = None,
        roots: Collection[bytes] | None = None,
        below: Collection[bytes] | None = None,
    ) -> ClearOutcome:
        """Delete all blocks, or those of a namespace, of some chains' roots (one tenant), or these blocks with all behind them;
        but none that a pin keeps.
        """
        with self._session.write_lock:
            return self._remover.clear(namespace, (root,) if root is not None else roots, below)

    def label(self, labels: Labels) -> bool:
        """Keep short texts about roots and blocks, by kind and hash; False if that did not happen."""
        return self._labels.put(labels)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def maintain(self, *, idle: bool) -> None:
        """What nobody waits for; call it about once a second from the thread that writes.

        Reopens a store that was given up, deletes condemned records and expired pins, repairs the index, trims a store
        whose capacity was lowered, finds out whether a fault has gone; when `idle`, syncs.
        """
        if self._env.readonly or not self._env.reopen():
            return
        with self._session.write_lock:
            if self._session.must_rebuild:
                self._rebuild()
            if self._num_reopened != self._env.num_reopened:
                self._num_reopened, self._store_id = self._env.num_reopened, None
                self._session.tell_break("the store was opened anew")
            self._remover.drop_condemned()
            self._pins.expire()
            self._session.refresh()
            if self.fault:
                # Any write tells whether the fault is still there.
                self._session.write(lambda index: index.state.tick(self._session.clock_us()))
            while self._session.last_state.used_nbytes > self._session.budget_nbytes:
                if self._session.write(self._trim) is None:
                    break
            else:
                if idle and self.file_nbytes > self._session.map_nbytes > 0:
                    self._env.compact()
        if idle:
            self._env.sync()

    def _trim(self, index: Index) -> int:
        """One step towards a lowered capacity. Small, because there is little room to work in."""
        goal_nbytes = budget_nbytes_for(index.state.capacity_nbytes)
        _, num_evicted = index.make_room(goal_nbytes, (), self._session.clock_us(), TRIM_STEP)
        self._session.count(evictions=num_evicted)
        if not num_evicted:
            raise StoreFullError("all that is left is pinned")
        return num_evicted

    def _rebuild(self) -> None:
        try:
            with self._env.writing() as txn:
                rebuild(txn, self._medium, capacity_nbytes=self._session.last_state.capacity_nbytes)
            self._session.must_rebuild = False
            self._session.tell_break("the store was repaired")
        except (StorageError, *CONTRADICTIONS) as error:
            logger.warning("disk tier: %s cannot be repaired: %s", self.directory, error)

    def _set_capacity(self, capacity_nbytes: int) -> None:
        def apply(index: Index) -> bool:
            index.state.capacity_nbytes = capacity_nbytes
            return True

        if not self._session.write(apply):
            raise StorageError(self.fault or f"{self.directory} cannot be written")

    def describe_namespace(self, digest: bytes, text: str) -> None:
        """Leave a description (JSON) of what a namespace's blocks belong to, for `inspect`."""
        if self._described.get(digest) == text:
            return
        key = NAMESPACE_KEY + digest

        def apply(index: Index) -> bool:
            index.put_info(key, text.encode())
            return True

        if self._session.write(apply):
            self._described[digest] = text

    def verify(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Audit every record and the invariants; `progress(done, total)` in blocks. Raises `StorageError`."""
        with self._session.write_lock:
            return verify_store(
                self._env,
                repair=repair,
                progress=progress,
                capacity_nbytes=self._session.last_state.capacity_nbytes,
            )

    def check(self, stop: Callable[[], bool]) -> Report:
        """Audit the store while it is in use, in any thread, without keeping anybody out; ends early when `stop()`.

        What is found is mended as usual: bad blocks are found no more and go with the next write, rows that contradict
        each other are written anew by `maintain`. Raises `StorageError`.
        """
        report = verify_store(self._env, stop=lambda: self.stopping or stop())
        if not self._env.readonly:
            self._session.condemned |= report.bad
            self._session.must_rebuild |= bool(report.num_row_problems)
        return report

    def inspect(self) -> Inspection:
        """What the store holds, by namespace. Raises `StorageError`."""
        return inspect_store(self._env)

    def sync(self) -> bool:
        """Bring everything to the device; True if a crash of the machine would lose nothing now."""
        return self._env.sync()

    def close(self) -> None:
        """Sync and close. Everything afterwards fails softly."""
        self._env.close()
