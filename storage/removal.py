"""How blocks leave the disk tier other than by eviction: deleted by hand, cleared, or condemned by a failed check.

Always from the leaves up, in transactions of moderate size, so that the store is prefix-closed at every commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tieredkv.errors import StorageError
from tieredkv.storage.index import Index, Row
from tieredkv.storage.session import CONTRADICTIONS, StoreSession

REMOVALS_PER_TXN = 256
NUM_TRIES = 3
"""Another process may add a child between the walk and the removal; then both are repeated."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did: blocks removed, and blocks that stay because they are pinned or carry a pinned one."""

    num_removed: int
    num_kept: int


class BlockRemover:
    """Deletes blocks, for one thread at a time."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session

    def remove(self, hashes: Collection[bytes]) -> tuple[int, bool]:
        """Delete blocks with all behind them, pinned or not; returns how many went, and whether all of `hashes` are gone."""
        num_removed = 0
        try:
            for _ in range(NUM_TRIES):
                with self._session.env.reading() as txn:
                    doomed = Index(txn, self._session.medium).descendants(hashes)
                if not doomed:
                    return num_removed, True
                num_removed += self._remove_leaves(doomed, spare_pinned=False)
        except StorageError:
            self._session.count(failed=1)
        except CONTRADICTIONS as error:
            self._session.distrust(error)
        return num_removed, False

    def drop_condemned(self) -> None:
        """Delete the records that failed their checks; those that cannot be deleted now stay condemned."""
        condemned = set(self._session.condemned)
        if condemned and not self._session.env.readonly and self.remove(condemned)[1]:
            self._session.condemned -= condemned

    def clear(self, namespace: bytes | None, root: bytes | None) -> Cleared:
        """See `DiskStore.clear`."""
        try:
            with self._session.env.reading() as txn:
                chosen = [
                    (row.depth, key)
                    for key, value in self._session.medium.scan(txn.raw, txn.dbs["meta"])
                    if (row := Row.unpack(value))
                    and (namespace is None or row.namespace == namespace)
                    and (root is None or row.root == root)
                ]
        except StorageError:
            self._session.count(failed=1)
            return Cleared(0, 0)
        except CONTRADICTIONS as error:
            self._session.distrust(error)
            return Cleared(0, 0)
        chosen.sort(reverse=True)
        num_removed = self._remove_leaves([key for _, key in chosen], spare_pinned=True)
        return Cleared(num_removed, len(chosen) - num_removed)

    def _remove_leaves(self, hashes: Sequence[bytes], *, spare_pinned: bool) -> int:
        """Delete those of `hashes`, deepest first, that are leaves when their turn comes."""
        num_removed = 0
        for at in range(0, len(hashes), REMOVALS_PER_TXN):
            batch = hashes[at : at + REMOVALS_PER_TXN]

            def apply(index: Index, batch: Sequence[bytes] = batch) -> int:
                return sum(self._remove_leaf(index, block_hash, spare_pinned) for block_hash in batch)

            removed = self._session.write(apply)
            if removed is None:
                break
            num_removed += removed
        return num_removed

    def _remove_leaf(self, index: Index, block_hash: bytes, spare_pinned: bool) -> bool:
        row = index.row(block_hash)
        if row is None or row.num_children or (spare_pinned and index.num_pins(block_hash)):
            return False
        index.remove(block_hash)
        return True
