"""What the rows of a store mean, and how they change together inside one transaction.

    blocks   hash -> header + payload (record.py)
    meta     hash -> Row (rows.py): parent, root, namespace, depth, children, sizes, last use, priority, expiry, tokens
    recency  b"\\x01" priority last-use hash -> empty     leaves that may be evicted, the first to go first
             b"\\x00" expiry hash -> empty                those of them whose priority expires, the soonest first
    pins     hash -> number of pins that want the block, whether it is resident or not
    info     b"state" -> State (rows.py); b"pin:" id -> PinRecord; b"format"; b"store" -> random id;
             b"namespace:" digest -> description

A *leaf* is a block without resident children. Knows no payloads, no files and no threads.

Invariants, after every method: a block's parent is resident (or it has depth 0); `recency` holds exactly the leaves
without a pin; `pins` counts what the pin rows add up to; children, entries and bytes in `meta` and `state` are exact; the
bytes never exceed the budget that `make_room` is called with. Last uses only grow, in the order of a clock kept in the
store, so that a clock set back does not turn the order round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from tieredkv.errors import InvariantError
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import Txn
from tieredkv.storage.pins import PinRecord
from tieredkv.storage.rows import EXPIRING, HASH_NBYTES, ORDINARY, Row, State
from tieredkv.storage.tier import EVICTED, NEVER, SPILLED, BlockChange
from tieredkv.types import DEFAULT_PRIORITY

STATE_KEY = b"state"
STORE_ID_KEY = b"store"
NAMESPACE_KEY = b"namespace:"
PIN_KEY = b"pin:"
MAX_EVICTIONS_PER_TXN = 4096
MAX_EXPIRIES_PER_VICTIM = 256


class Index:
    """The rows as one transaction sees them. Call `save` before the transaction ends if anything was changed."""

    def __init__(self, txn: Txn, medium: Medium) -> None:
        self._txn = txn.raw
        self._dbs = txn.dbs
        self._medium = medium
        self.psize = txn.psize
        self.changes: list[BlockChange] = []
        """What this transaction brings in and takes out, in order; true once it is committed."""
        value = medium.get(txn.raw, STATE_KEY, txn.dbs["info"])
        if value is None:
            raise InvariantError("a store without counters")
        self.state = State.unpack(value)

    def save(self) -> None:
        self._put("info", STATE_KEY, self.state.pack())

    # -- reading -------------------------------------------------------------------------------------------------------

    def __contains__(self, block_hash: bytes) -> bool:
        return self._get("blocks", block_hash) is not None

    def row(self, block_hash: bytes) -> Row | None:
        value = self._get("meta", block_hash)
        return None if value is None else Row.unpack(value)

    def num_pins(self, block_hash: bytes) -> int:
        value = self._get("pins", block_hash)
        return 0 if value is None else int.from_bytes(value, "little")

    def descendants(self, block_hashes: Collection[bytes]) -> list[bytes]:
        """These blocks and all that lie behind them, the deepest first. Walks all rows once where one has children."""
        rows = {h: row for h in block_hashes if (row := self.row(h)) is not None}
        found = {h: row.depth for h, row in rows.items()}
        if any(row.num_children for row in rows.values()):
            roots = {row.root for row in rows.values()}
            related = []
            for key, value in self._medium.scan(self._txn, self._dbs["meta"]):
                parent, root, _, depth, _ = Row.links(value)
                if root in roots:
                    related.append((depth, key, parent))
            for depth, key, parent in sorted(related):
                if parent in found:
                    found[key] = depth
        return sorted(found, key=lambda h: -found[h])

    # -- writing -------------------------------------------------------------------------------------------------------

    def insert(self, block_hash: bytes, row: Row, record: memoryview) -> None:
        """Add a block that is not resident. Its parent, unless it is the first, must be."""
        if row.depth:
            parent = self._require(row.parent)
            if not parent.num_children:
                self._drop_from_recency(row.parent, parent)
            parent.num_children += 1
            self._put("meta", row.parent, parent.pack())
        self._put("blocks", block_hash, record)
        self._put("meta", block_hash, row.pack())
        if not self.num_pins(block_hash):
            self._add_to_recency(block_hash, row)
        self.state.add(row, +1)
        self.changes.append(BlockChange(block_hash, True, SPILLED, row.parent, len(row.token_ids) // 4))

    def remove(self, block_hash: bytes, reason: str = EVICTED) -> None:
        """Take a leaf away, pinned or not; if it comes back it is pinned again. A parent that becomes a leaf inherits the last
        use.
        """
        row = self._require(block_hash)
        if row.num_children:
            raise InvariantError("a block with resident children cannot be removed")
        self._drop_from_recency(block_hash, row)
        self._delete("meta", block_hash)
        self._delete("blocks", block_hash)
        self.state.add(row, -1)
        self.changes.append(BlockChange(block_hash, False, reason))
        if row.depth:
            parent = self._require(row.parent)
            parent.num_children -= 1
            parent.last_use_us = max(parent.last_use_us, row.last_use_us)
            self._put("meta", row.parent, parent.pack())
            if not parent.num_children and not self.num_pins(row.parent):
                self._add_to_recency(row.parent, parent)

    def make_room(
        self, budget_nbytes: int, protected: Collection[bytes], now_us: int, limit: int = MAX_EVICTIONS_PER_TXN
    ) -> tuple[bool, int]:
        """Evict until the blocks cost at most `budget_nbytes`; returns whether they do, and how many went."""
        num_evicted = 0
        while self.state.used_nbytes > budget_nbytes:
            victim = self.victim(protected, now_us)
            if victim is None or num_evicted >= limit:
                return False, num_evicted
            self.remove(victim)
            num_evicted += 1
        return True, num_evicted

    def victim(self, protected: Collection[bytes], now_us: int) -> bytes | None:
        """The leaf to evict next: by priority, then by last use. Priorities that have expired are the ordinary one."""
        self._expire_priorities(now_us)
        key = self._medium.first_key(self._txn, self._dbs["recency"], ORDINARY)
        while key is not None:
            block_hash = key[-HASH_NBYTES:]
            if block_hash not in protected:
                return block_hash
            key = self._medium.first_key(self._txn, self._dbs["recency"], key + b"\x00")
        return None

    def _expire_priorities(self, now_us: int) -> None:
        due = EXPIRING + now_us.to_bytes(8, "big") + b"\xff" * HASH_NBYTES
        for _ in range(MAX_EXPIRIES_PER_VICTIM):
            key = self._medium.first_key(self._txn, self._dbs["recency"], EXPIRING)
            if key is None or key > due:
                return
            self.retain(key[-HASH_NBYTES:], DEFAULT_PRIORITY, NEVER)

    def touch(self, block_hash: bytes, now_us: int) -> None:
        """Note that a block was used; nothing happens if it has gone."""

        def use(row: Row) -> None:
            row.last_use_us = self.state.tick(now_us)

        self._rank_anew(block_hash, use)

    def retain(self, block_hash: bytes, priority: int, expires_us: int) -> None:
        """Give a block another priority, until `expires_us`; nothing happens if it has gone."""

        def favour(row: Row) -> None:
            row.priority, row.expires_us = priority, expires_us

        self._rank_anew(block_hash, favour)

    def _rank_anew(self, block_hash: bytes, change: Callable[[Row], None]) -> None:
        """Apply `change` to what a block's place in the order of eviction depends on, and give it that place."""
        row = self.row(block_hash)
        if row is None:
            return
        listed = not row.num_children and not self.num_pins(block_hash)
        if listed:
            self._drop_from_recency(block_hash, row)
        change(row)
        self._put("meta", block_hash, row.pack())
        if listed:
            self._add_to_recency(block_hash, row)

    # -- pins ----------------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        """Blocks that a pin wants, resident or not."""
        return int(self._txn.stat(self._dbs["pins"])["entries"])

    def pin_records(self) -> list[PinRecord]:
        """All pins. Raises `struct.error` where one cannot be read."""
        return [PinRecord.unpack(key.removeprefix(PIN_KEY), value) for key, value in self._pin_rows()]

    def pins_cost_nbytes(self, *, without: bytes) -> int:
        """About what all pins but one take in the store."""
        return sum(PinRecord.cost_of(value) for key, value in self._pin_rows() if key != PIN_KEY + without)

    def due_pins(self, now_us: int) -> list[bytes]:
        """Ids of the pins that have expired."""
        return [
            key.removeprefix(PIN_KEY)
            for key, value in self._pin_rows()
            if PinRecord.expiry_of(value) <= min(now_us, NEVER - 1)
        ]

    def put_pin(self, record: PinRecord) -> None:
        """Add a pin, or put it in the place of the one that has its id."""
        self.drop_pin(record.id)
        for block_hash in record.hashes:
            self._count_pin(block_hash, +1)
        self._put("info", PIN_KEY + record.id, record.pack())

    def drop_pin(self, pin_id: bytes) -> bool:
        """Take a pin away; False if there is none."""
        value = self._get("info", PIN_KEY + pin_id)
        if value is None:
            return False
        record = PinRecord.unpack(pin_id, value)
        for block_hash in record.hashes:
            self._count_pin(block_hash, -1)
        self._delete("info", PIN_KEY + pin_id)
        return True

    def _count_pin(self, block_hash: bytes, delta: int) -> None:
        before = self.num_pins(block_hash)
        after = before + delta
        if after < 0:
            raise InvariantError("a pin whose block nobody has counted")
        if after:
            self._put("pins", block_hash, after.to_bytes(4, "little"))
        else:
            self._delete("pins", block_hash)
        row = self.row(block_hash) if bool(before) != bool(after) else None
        if row is not None and not row.num_children:
            if after:
                self._drop_from_recency(block_hash, row)
            else:
                self._add_to_recency(block_hash, row)

    def _pin_rows(self) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._medium.scan(self._txn, self._dbs["info"], PIN_KEY):
            if not key.startswith(PIN_KEY):
                break
            yield key, value

    def put_info(self, key: bytes, value: bytes) -> None:
        self._put("info", key, value)

    def delete_info(self, key: bytes) -> None:
        self._delete("info", key)

    def info_keys(self, prefix: bytes) -> list[bytes]:
        found = []
        for key, _ in self._medium.scan(self._txn, self._dbs["info"], prefix):
            if not key.startswith(prefix):
                break
            found.append(key)
        return found

    def roots_and_blocks(self) -> tuple[set[bytes], set[bytes]]:
        """The roots of all chains, and all blocks. Walks all rows."""
        roots, blocks = set(), set()
        for key, value in self._medium.scan(self._txn, self._dbs["meta"]):
            roots.add(Row.links(value)[1])
            blocks.add(key)
        return roots, blocks

    def _require(self, block_hash: bytes) -> Row:
        row = self.row(block_hash)
        if row is None:
            raise InvariantError("a row that must be in the store is missing")
        return row

    def _add_to_recency(self, block_hash: bytes, row: Row) -> None:
        for key in row.recency_keys(block_hash):
            self._put("recency", key, b"")

    def _drop_from_recency(self, block_hash: bytes, row: Row) -> None:
        for key in row.recency_keys(block_hash):
            self._delete("recency", key)

    def _get(self, name: str, key: bytes) -> memoryview | None:
        return self._medium.get(self._txn, key, self._dbs[name])

    def _put(self, name: str, key: bytes, value: bytes | memoryview) -> None:
        self._medium.put(self._txn, key, value, self._dbs[name])

    def _delete(self, name: str, key: bytes) -> None:
        self._medium.delete(self._txn, key, self._dbs[name])
