"""What the values of a store's rows are, byte by byte: what is known of a block, and the store's counters.

    meta     parent root namespace depth children raw stored cost last-use created expires priority codec | tokens
    state    blocks, what they cost, what they hold, the store's clock, its capacity, tokens
    recency  keys that sort leaves by the order in which they go; see `index`

All numbers are little endian but those in keys, whose bytes must sort like the numbers. Knows no transaction.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tieredkv.storage.tier import NEVER

EXPIRING, ORDINARY = b"\x00", b"\x01"
"""What the keys of `recency` begin with: those sorted by expiry, and those sorted by priority and last use."""
HASH_NBYTES = 32
_ROW = struct.Struct("<32s32s32sIIQQQQQQBB2x")
_LINKS = struct.Struct("<32s32s32sII")
_STATE = struct.Struct("<QQQQQQ")
_PAGE_HEADER_NBYTES, _NODE_HEADER_NBYTES = 16, 8


@dataclass(slots=True)
class Row:
    """What is known of one resident block. Times in microseconds since the epoch; `cost_nbytes` is page-rounded."""

    parent: bytes
    root: bytes
    namespace: bytes
    depth: int
    num_children: int
    raw_nbytes: int
    stored_nbytes: int
    cost_nbytes: int
    last_use_us: int
    created_us: int
    expires_us: int
    priority: int
    codec: int
    token_ids: bytes

    def pack(self) -> bytes:
        return (
            _ROW.pack(
                self.parent,
                self.root,
                self.namespace,
                self.depth,
                self.num_children,
                self.raw_nbytes,
                self.stored_nbytes,
                self.cost_nbytes,
                self.last_use_us,
                self.created_us,
                self.expires_us,
                self.priority,
                self.codec,
            )
            + self.token_ids
        )

    @classmethod
    def unpack(cls, value: memoryview | bytes) -> Row:
        return cls(*(*_ROW.unpack_from(value), bytes(value[_ROW.size :])))

    @staticmethod
    def links(value: memoryview | bytes) -> tuple[bytes, bytes, bytes, int, int]:
        """Parent, root, namespace, depth and number of children: what a walk over many rows needs."""
        parent, root, namespace, depth, num_children = _LINKS.unpack_from(value)
        return parent, root, namespace, depth, num_children

    def recency_key(self, block_hash: bytes) -> bytes:
        return ORDINARY + bytes([self.priority]) + self.last_use_us.to_bytes(8, "big") + block_hash

    def expiry_key(self, block_hash: bytes) -> bytes | None:
        return None if self.expires_us == NEVER else EXPIRING + self.expires_us.to_bytes(8, "big") + block_hash

    def recency_keys(self, block_hash: bytes) -> list[bytes]:
        """The rows in `recency` that a leaf without a pin has."""
        expiry = self.expiry_key(block_hash)
        return [self.recency_key(block_hash)] + ([] if expiry is None else [expiry])


@dataclass(slots=True)
class State:
    """The store's counters: blocks, what they cost, what they hold, the store's clock, its capacity, tokens."""

    num_blocks: int = 0
    used_nbytes: int = 0
    payload_nbytes: int = 0
    clock_us: int = 0
    capacity_nbytes: int = 0
    num_tokens: int = 0

    def pack(self) -> bytes:
        return _STATE.pack(
            self.num_blocks, self.used_nbytes, self.payload_nbytes, self.clock_us, self.capacity_nbytes, self.num_tokens
        )

    @classmethod
    def unpack(cls, value: memoryview | bytes) -> State:
        return cls(*_STATE.unpack(value))

    def add(self, row: Row, sign: int) -> None:
        self.num_blocks += sign
        self.used_nbytes += sign * row.cost_nbytes
        self.payload_nbytes += sign * row.raw_nbytes
        self.num_tokens += sign * (len(row.token_ids) // 4)

    def tick(self, now_us: int) -> int:
        """A time later than every one before."""
        self.clock_us = max(now_us, self.clock_us + 1)
        return self.clock_us


def record_cost(record_nbytes: int, num_token_bytes: int, psize: int) -> int:
    """Bytes that a block takes in the file: its record in whole pages, plus twice its rows in the trees, whose pages are
    about two thirds full.
    """
    pages = -(-(_PAGE_HEADER_NBYTES + record_nbytes) // psize)
    rows = 4 * (_NODE_HEADER_NBYTES + HASH_NBYTES) + 2 * 9 + _ROW.size + num_token_bytes
    return pages * psize + 2 * rows
