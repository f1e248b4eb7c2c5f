"""Looking at what a store holds, without changing it: one read transaction's view of one namespace's blocks.

Knows rows and labels, no payloads. Whoever walks bounds the walk: a view that stays open keeps LMDB from reusing pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tieredkv.storage.index import Index
from tieredkv.storage.labels import read_label, read_labels
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import Txn
from tieredkv.storage.rows import Row


class StoreListing:
    """Valid while its transaction is open. `condemned` blocks are as if they were gone."""

    def __init__(self, txn: Txn, medium: Medium, namespace: bytes, condemned: Collection[bytes]) -> None:
        self._txn = txn
        self._medium = medium
        self._namespace = namespace
        self._condemned = condemned
        self._index = Index(txn, medium)

    @property
    def num_blocks(self) -> int:
        """Of all namespaces."""
        return self._index.state.num_blocks

    def __contains__(self, block_hash: bytes) -> bool:
        return self.row(block_hash) is not None

    def row(self, block_hash: bytes) -> Row | None:
        """What is known of a block; None if it is not here, or belongs to another namespace."""
        if block_hash in self._condemned:
            return None
        row = self._index.row(block_hash)
        return row if row is not None and row.namespace == self._namespace else None

    def scan(self, start: bytes = b"") -> Iterator[tuple[bytes, int | None]]:
        """Blocks from `start` on in the order of their hashes, with their number of children; None for those that are no
        concern of this namespace.
        """
        for key, value in self._medium.scan(self._txn.raw, self._txn.dbs["meta"], start):
            _, _, namespace, _, num_children = Row.links(value)
            mine = namespace == self._namespace and key not in self._condemned
            yield key, num_children if mine else None

    def num_pins(self, block_hash: bytes) -> int:
        return self._index.num_pins(block_hash)

    def label(self, kind: str, block_hash: bytes) -> str | None:
        return read_label(self._txn, self._medium, kind, block_hash)

    def labels(self, kind: str) -> dict[bytes, str]:
        return read_labels(self._txn, self._medium, kind)
