"""How blocks leave the disk tier other than by eviction: deleted by hand, cleared, or condemned by a failed check.

Always from the leaves up, in transactions of moderate size, so that the store is prefix-closed at every commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tieredkv.errors import StorageError
from tieredkv.storage.index import Index
from tieredkv.storage.rows import Row
from tieredkv.storage.session import CONTRADICTIONS, StoreSession
from tieredkv.storage.tier import CLEARED, CORRUPT

REMOVALS_PER_TXN = 256
NUM_TRIES = 3
"""Another process may add a child between the walk and the removal; then both are repeated."""


@dataclass(frozen=True, slots=True)
class ClearOutcome:
    """What `clear` did: blocks removed, blocks that stay because they are pinned or carry a pinned one, and blocks that could
    not be removed.
    """

    num_removed: int
    num_kept: int
    num_failed: int = 0
    error: str | None = None


class BlockRemover:
    """Deletes blocks, for one thread at a time."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session

    def remove(self, hashes: Collection[bytes], reason: str = CLEARED) -> tuple[int, bool]:
        """Delete blocks with all behind them, pinned or not; returns how many went, and whether all of `hashes` are gone."""
        num_removed = 0
        try:
            for _ in range(NUM_TRIES):
                with self._session.env.reading() as txn:
                    doomed = Index(txn, self._session.medium).descendants(hashes)
                if not doomed:
                    return num_removed, True
                num_removed += self._remove_leaves(doomed, reason, spare_pinned=False)
        except StorageError:
            self._session.count(failed=1)
        except CONTRADICTIONS as error:
            self._session.distrust(error)
        return num_removed, False

    def drop_condemned(self) -> None:
        """Delete the records that failed their checks; those that cannot be deleted now stay condemned."""
        condemned = set(self._session.condemned)
        if condemned and not self._session.env.readonly and self.remove(condemned, CORRUPT)[1]:
            self._session.condemned -= condemned

    def clear(
        self, namespace: bytes | None, roots: Collection[bytes] | None, below: Collection[bytes] | None
    ) -> ClearOutcome:
        """See `DiskStore.clear`."""
        num_removed = 0
        left: list[bytes] = []
        try:
            for _ in range(NUM_TRIES):
                chosen = self._choose(namespace, roots, below)
                num_removed += self._remove_leaves(chosen, CLEARED, spare_pinned=True)
                with self._session.env.reading() as txn:
                    index = Index(txn, self._session.medium)
                    left = [h for h in chosen if index.row(h) is not None]
                    kept = self._kept_by_pins(index, left)
                if len(left) == len(kept):
                    return ClearOutcome(num_removed, len(kept))
            error = "blocks were added behind others meanwhile"
        except StorageError as failure:
            self._session.count(failed=1)
            error = str(failure)
        except CONTRADICTIONS as failure:
            self._session.distrust(failure)
            error = str(failure)
        kept = set()
        with contextlib.suppress(StorageError, *CONTRADICTIONS), self._session.env.reading() as txn:
            kept = self._kept_by_pins(Index(txn, self._session.medium), left)
        return ClearOutcome(num_removed, len(kept), len(left) - len(kept), self._session.env.fault or error)

    def _choose(
        self, namespace: bytes | None, roots: Collection[bytes] | None, below: Collection[bytes] | None
    ) -> list[bytes]:
        """The blocks that all conditions fit, deepest first."""
        with self._session.env.reading() as txn:
            if below is not None:
                return Index(txn, self._session.medium).descendants(below)
            found = []
            for key, value in self._session.medium.scan(txn.raw, txn.dbs["meta"]):
                _, root, space, depth, _ = Row.links(value)
                if (namespace is None or space == namespace) and (roots is None or root in roots):
                    found.append((-depth, key))
        return [key for _, key in sorted(found)]

    def _kept_by_pins(self, index: Index, left: Sequence[bytes]) -> set[bytes]:
        """Those of `left`, deepest first, that are pinned or carry a pinned block."""
        kept: set[bytes] = set()
        for block_hash in left:
            row = index.row(block_hash)
            if row is not None and (block_hash in kept or index.num_pins(block_hash)):
                kept |= {block_hash, row.parent} if row.depth else {block_hash}
        return kept.intersection(left)

    def _remove_leaves(self, hashes: Sequence[bytes], reason: str, *, spare_pinned: bool) -> int:
        """Delete those of `hashes`, deepest first, that are leaves when their turn comes."""
        num_removed = 0
        for at in range(0, len(hashes), REMOVALS_PER_TXN):
            batch = hashes[at : at + REMOVALS_PER_TXN]

            def apply(index: Index, batch: Sequence[bytes] = batch) -> int:
                return sum(self._remove_leaf(index, block_hash, reason, spare_pinned) for block_hash in batch)

            removed = self._session.write(apply)
            if removed is None:
                break
            num_removed += removed
        return num_removed

    def _remove_leaf(self, index: Index, block_hash: bytes, reason: str, spare_pinned: bool) -> bool:
        row = index.row(block_hash)
        if row is None or row.num_children or (spare_pinned and index.num_pins(block_hash)):
            return False
        index.remove(block_hash, reason)
        return True
