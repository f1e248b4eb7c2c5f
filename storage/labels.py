"""Short texts about chains, kept beside the blocks: whose a root is, what a prefix is called.

    info    b"label:" kind b":" hash -> text

Knows nothing of what the texts mean. Labels do not count against the capacity, so there is at most one for each root and
each block that lives, and some room for more: those of blocks that have gone are swept when their number has doubled.
"""

from __future__ import annotations

from collections.abc import Mapping

from tieredkv.storage.index import Index
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import Txn
from tieredkv.storage.session import StoreSession

_PREFIX = b"label:"
LEAST_BEFORE_SWEEP = 1024
Labels = Mapping[tuple[str, bytes], str]


def label_key(kind: str, block_hash: bytes) -> bytes:
    return _PREFIX + kind.encode() + b":" + block_hash


def read_label(txn: Txn, medium: Medium, kind: str, block_hash: bytes) -> str | None:
    """What `put` was given for this hash."""
    value = medium.get(txn.raw, label_key(kind, block_hash), txn.dbs["info"])
    return None if value is None else bytes(value).decode("utf-8", "replace")


def read_labels(txn: Txn, medium: Medium, kind: str) -> dict[bytes, str]:
    """All labels of a kind, by hash."""
    start = label_key(kind, b"")
    found = {}
    for key, value in medium.scan(txn.raw, txn.dbs["info"], start):
        if not key.startswith(start):
            break
        found[key.removeprefix(start)] = bytes(value).decode("utf-8", "replace")
    return found


class LabelWriter:
    """Writes labels, for one thread at a time."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._num_new = 0
        self._most_new = LEAST_BEFORE_SWEEP
        self._suspects: set[bytes] = set()

    def put(self, labels: Labels) -> bool:
        """Set labels in one transaction; False if that did not happen."""

        def apply(index: Index) -> bool:
            for (kind, block_hash), text in labels.items():
                index.put_info(label_key(kind, block_hash), text.encode("utf-8", "replace"))
            return True

        done = bool(self._session.write(apply))
        self._num_new += len(labels)
        if done and self._num_new > self._most_new:
            self._num_new = 0
            self._most_new = max(self._session.write(self._sweep) or 0, LEAST_BEFORE_SWEEP)
        return done

    def _sweep(self, index: Index) -> int:
        """Delete the labels that no resident block explains, this time and the time before, since a label may come before its
        blocks; returns how many stay.
        """
        roots, blocks = index.roots_and_blocks()
        keys = index.info_keys(_PREFIX)
        names = {key: key.removeprefix(_PREFIX).partition(b":")[2] for key in keys}
        vain = {key for key in keys if names[key] not in roots and names[key] not in blocks}
        for key in vain & self._suspects:
            index.delete_info(key)
        self._suspects = vain - self._suspects
        return len(keys) - len(vain)
