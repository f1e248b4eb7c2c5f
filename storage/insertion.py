"""How blocks get into the disk tier: what is stored, what has to go for it, and what happens when there is no room.

Knows records, rows and room. A batch goes in by small transactions, parents before children, each preceded by the
evictions that it needs; so the cap holds at every commit, and a batch that breaks off leaves a usable prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tieredkv.errors import StorageError
from tieredkv.storage.codec import Codec
from tieredkv.storage.environment import DeviceFullError, StoreFullError
from tieredkv.storage.index import Index
from tieredkv.storage.record import encode_record, max_record_nbytes
from tieredkv.storage.rows import Row, record_cost
from tieredkv.storage.session import CONTRADICTIONS, StoreSession, budget_nbytes_for, map_nbytes_for
from tieredkv.storage.tier import BlockRecord, StoreOutcome

logger = logging.getLogger(__name__)

BATCH_NBYTES = 4 << 20
"""Payload per transaction. Each one costs LMDB a search through its free pages and a rewrite of their list, which counts
when the store is full of records of many lengths; much larger ones make it fetch fresh memory for its dirty pages.
"""
BATCH_BLOCKS = 128
RELIEF = (2, 8, 32)
"""How many times a batch's bytes to evict before each further try, when the map is full for lack of a long enough gap."""


class BlockInserter:
    """Stores batches of blocks, for one thread at a time."""

    def __init__(self, session: StoreSession, codec: Codec) -> None:
        self._session = session
        self._codec = codec
        self._staging = np.empty(0, np.uint8)

    def put(self, records: Sequence[BlockRecord], protect: Collection[bytes]) -> list[StoreOutcome]:
        """One outcome per record; see `DiskStore.put`."""
        outcomes: dict[int, StoreOutcome] = {}
        order = sorted(range(len(records)), key=lambda i: records[i].depth)
        protected = {*protect, *(r.hash for r in records), *(r.parent for r in records)}
        self._sift(records, order, outcomes)
        reason = None
        for group in self._groups(records, [i for i in order if i not in outcomes]):
            reason = self._put_group(records, group, outcomes, protected)
            if reason is not None:
                break
        done = [outcomes.get(i, StoreOutcome.FAILED) for i in range(len(records))]
        num_stored = done.count(StoreOutcome.STORED)
        num_failed = done.count(StoreOutcome.FAILED)
        num_refused = len(done) - num_stored - num_failed - done.count(StoreOutcome.PRESENT)
        self._session.count(stored=num_stored, failed=num_failed, refused=num_refused)
        if reason is not None:
            self._session.refused(reason, num_failed + done.count(StoreOutcome.NO_ROOM))
        elif num_stored:
            self._session.refusal = None
        return done

    def _sift(self, records: Sequence[BlockRecord], order: list[int], outcomes: dict[int, StoreOutcome]) -> None:
        """Answer what needs no write, so that nothing is compressed in vain and no lock taken."""
        try:
            with self._session.env.reading() as txn:
                index = Index(txn, self._session.medium)
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
        except CONTRADICTIONS as error:
            self._session.distrust(error)

    def _groups(self, records: Sequence[BlockRecord], order: list[int]) -> Iterator[list[int]]:
        limit = min(BATCH_NBYTES, self._session.budget_nbytes // 64)
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
    ) -> str | None:
        """Store one group; why that failed, where there is no point in trying the ones behind it."""
        try:
            encoded = self._encode([records[i] for i in group])
        except (StorageError, ValueError) as error:
            logger.warning("disk tier: blocks refused: %s", error)
            outcomes.update(dict.fromkeys(group, StoreOutcome.REFUSED))
            return None
        nbytes = sum(view.nbytes for view in encoded)
        relief = [factor * nbytes for factor in RELIEF]
        while True:
            try:
                outcomes.update(self._attempt(records, group, encoded, protected))
                return None
            except StoreFullError as error:
                # Evicting gives the file system nothing back: where that is full, one more try has to do.
                relief = relief[: 1 if isinstance(error, DeviceFullError) else None]
                if not relief or not self._relieve(min(relief.pop(0), self._session.budget_nbytes // 4), protected):
                    unanswered = (i for i in range(len(records)) if i not in outcomes)
                    outcomes.update(dict.fromkeys(unanswered, StoreOutcome.NO_ROOM))
                    return str(error)
            except StorageError as error:
                return str(error)
            except CONTRADICTIONS as error:
                self._session.distrust(error)
                return str(error)

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
        with self._session.env.writing() as txn:
            index = Index(txn, self._session.medium)
            self._session.last_state = index.state
            for i, view in zip(group, encoded, strict=True):
                outcomes[i], evicted = self._insert(index, records[i], view, protected)
                num_evicted += evicted
            index.save()
        self._session.tell(index.changes)
        self._session.count(evictions=num_evicted)
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
        now_us = self._session.clock_us()
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

        Pages that a transaction frees are free for the second one after it, hence the empty round, and not before the views
        that are older have ended. A map that is smaller than the capacity, which another process has raised, grows.
        """
        env = self._session.env
        map_nbytes = map_nbytes_for(self._session.last_state.capacity_nbytes)
        if env.map_nbytes < map_nbytes and env.resize(map_nbytes):
            return True
        try:
            env.forget_dead_readers()
            for extra_nbytes in (nbytes, 0):
                if not self._evict(extra_nbytes, protected):
                    env.outlast_readers()
                    if not self._evict(extra_nbytes, protected):
                        return False
                env.outlast_readers()
        except StorageError:
            return False
        return True

    def _evict(self, nbytes: int, protected: Collection[bytes]) -> bool:
        """Free what `nbytes` of blocks cost, in a transaction of its own; False if even that has no room."""
        now_us = self._session.clock_us()

        def apply(index: Index) -> int:
            index.state.tick(now_us)
            return index.make_room(max(index.state.used_nbytes - nbytes, 0), protected, now_us)[1]

        num_evicted = self._session.write(apply)
        self._session.count(evictions=num_evicted or 0)
        return num_evicted is not None
