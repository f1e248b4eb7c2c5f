"""Checking a whole store, mending it, and telling what it holds.

Knows the rows and the records, not how they came to be. `verify_store` compares everything with everything:

    payload and header checksums      header = meta           parent resident, one depth less, same root and namespace
    number of children = counted      recency = leaves without a pin      counts of pins, counters = recounted

Payloads are read in many short transactions, so that a store in use stays usable; the rows are compared in one.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tieredkv.storage.environment import StoreEnvironment
from tieredkv.storage.index import NAMESPACE_KEY, PIN_KEY, STATE_KEY
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import Txn
from tieredkv.storage.pins import PinRecord
from tieredkv.storage.record import HEADER_NBYTES, BadRecordError, Header, check_record
from tieredkv.storage.rows import Row, State, record_cost

RECORDS_PER_TXN = 16
MAX_PROBLEMS = 100
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Report:
    """What an audit found. `problems` holds the first hundred, for people; `num_problems` counts all of them. `bad` are the
    blocks whose records cannot be believed, `num_row_problems` counts contradictions between rows. `stopped` tells that the
    audit ended early, after `num_blocks` blocks.
    """

    num_blocks: int = 0
    num_bytes_checked: int = 0
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    num_removed: int = 0
    repaired: bool = False
    bad: set[bytes] = field(default_factory=set)
    num_row_problems: int = 0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        return not self.num_problems and not self.stopped

    def add(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


@dataclass(slots=True)
class NamespaceSummary:
    """One namespace's share. Times in microseconds since the epoch; `depths` counts blocks by power of two of depth + 1."""

    digest: bytes
    description: str = ""
    num_blocks: int = 0
    num_tokens: int = 0
    payload_nbytes: int = 0
    cost_nbytes: int = 0
    num_chains: int = 0
    num_roots: int = 0
    num_pinned: int = 0
    last_use_us: int = 0
    created_us: int = 0
    depths: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Inspection:
    """What a store holds. A chain is a leaf with all before it; a root is one tenant of a namespace."""

    directory: str
    capacity_nbytes: int
    used_nbytes: int
    file_nbytes: int
    num_blocks: int
    namespaces: list[NamespaceSummary]


@dataclass(slots=True)
class _Snapshot:
    """All rows of one transaction."""

    rows: dict[bytes, Row]
    unreadable: set[bytes]
    stored: set[bytes]
    pins: dict[bytes, int]
    wanted: Counter[bytes]
    unreadable_pins: set[bytes]
    recency: set[bytes]
    state: State


def verify_store(
    env: StoreEnvironment,
    *,
    repair: bool = False,
    progress: Progress | None = None,
    capacity_nbytes: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Audit the store; with `repair` delete bad blocks with all behind them and write the rows anew (see `rebuild`).

    `progress(done, total)` counts blocks; the audit ends early when `stop()`, asked every few blocks. Raises
    `StorageError` if the store cannot be read (or written, to repair it).
    """
    report = Report()
    bad = _check_records(env, report, progress, stop)
    if report.stopped:
        report.bad = bad
        return report
    with env.reading() as txn:
        snapshot = _snapshot(txn, env.medium)
    report.num_blocks = len(snapshot.rows)
    # A record that another process has replaced or removed since it was read is no concern any more.
    bad &= snapshot.stored
    report.bad = bad
    num_record_problems = report.num_problems
    _check_rows(snapshot, report)
    report.num_row_problems = report.num_problems - num_record_problems
    if repair and not report.ok:
        with env.writing() as txn:
            report.num_removed = rebuild(txn, env.medium, bad, capacity_nbytes=capacity_nbytes)
        report.repaired = True
    return report


def _check_records(
    env: StoreEnvironment, report: Report, progress: Progress | None, stop: Callable[[], bool]
) -> set[bytes]:
    bad: set[bytes] = set()
    start, total, done = b"", 0, 0
    while True:
        with env.reading() as txn:
            total = max(txn.raw.stat(txn.dbs["blocks"])["entries"], done)
            batch: list[bytes] = []
            for key, record in env.medium.scan(txn.raw, txn.dbs["blocks"], start):
                if len(batch) == RECORDS_PER_TXN:
                    break
                batch.append(key)
                try:
                    header = check_record(record, key, env.medium)
                    row = env.medium.get(txn.raw, key, txn.dbs["meta"])
                    if row is not None and not _agrees(Row.unpack(row), header, txn.psize):
                        raise BadRecordError("row contradicts the record")
                except (BadRecordError, OSError, struct.error) as error:
                    bad.add(key)
                    report.add(f"block {key.hex()}: {error}")
                report.num_bytes_checked += record.nbytes
        done += len(batch)
        if progress is not None:
            progress(done, max(total, done))
        if len(batch) < RECORDS_PER_TXN:
            return bad
        if stop():
            report.stopped, report.num_blocks = True, done
            return bad
        start = batch[-1] + b"\x00"


def _agrees(row: Row, header: Header, psize: int) -> bool:
    return (row.parent, row.namespace, row.depth, row.raw_nbytes, row.stored_nbytes, row.codec, row.cost_nbytes) == (
        header.parent,
        header.namespace,
        header.depth,
        header.raw_nbytes,
        HEADER_NBYTES + header.stored_nbytes,
        header.codec,
        record_cost(HEADER_NBYTES + header.stored_nbytes, len(row.token_ids), psize),
    )


def _snapshot(txn: Txn, medium: Medium) -> _Snapshot:
    rows, unreadable = {}, set()
    for key, value in medium.scan(txn.raw, txn.dbs["meta"]):
        try:
            rows[key] = Row.unpack(value)
        except struct.error:
            unreadable.add(key)
    stored = {key for key, _ in medium.scan(txn.raw, txn.dbs["blocks"])}
    pins = {key: int.from_bytes(value, "little") for key, value in medium.scan(txn.raw, txn.dbs["pins"])}
    wanted: Counter[bytes] = Counter()
    unreadable_pins = set()
    for key, value in medium.scan(txn.raw, txn.dbs["info"], PIN_KEY):
        if not key.startswith(PIN_KEY):
            break
        try:
            wanted.update(PinRecord.unpack(key.removeprefix(PIN_KEY), value).hashes)
        except struct.error:
            unreadable_pins.add(key)
    recency = {key for key, _ in medium.scan(txn.raw, txn.dbs["recency"])}
    counters = medium.get(txn.raw, STATE_KEY, txn.dbs["info"])
    try:
        state = State() if counters is None else State.unpack(counters)
    except struct.error:
        state = State()
    return _Snapshot(rows, unreadable, stored, pins, wanted, unreadable_pins, recency, state)


def _check_rows(found: _Snapshot, report: Report) -> None:
    """Add every contradiction between the rows to the report."""
    rows = found.rows
    for key in found.unreadable:
        report.add(f"block {key.hex()}: row cannot be read")
    for key in found.stored - set(rows) - found.unreadable:
        report.add(f"block {key.hex()}: record without a row")
    for key in set(rows) - found.stored:
        report.add(f"block {key.hex()}: row without a record")
    for key in found.unreadable_pins:
        report.add(f"pin {key.removeprefix(PIN_KEY).hex()}: cannot be read")
    for key in set(found.pins) | set(found.wanted):
        if found.pins.get(key, 0) != found.wanted[key]:
            report.add(f"block {key.hex()}: {found.pins.get(key, 0)} pins noted, {found.wanted[key]} found")
    children = Counter(row.parent for row in rows.values() if row.depth)
    for key, row in rows.items():
        if row.num_children != children[key]:
            report.add(f"block {key.hex()}: {row.num_children} children noted, {children[key]} found")
        if not _has_parent(row, rows):
            report.add(f"block {key.hex()}: orphan at depth {row.depth}")
    expected = {k for key in rows if not children[key] and key not in found.pins for k in rows[key].recency_keys(key)}
    for entry in found.recency ^ expected:
        word = "unexpected" if entry in found.recency else "missing"
        report.add(f"block {entry[-32:].hex()}: {word} entry in the order of eviction")
    counted = _count(rows, found.state)
    if counted != found.state:
        report.add(f"counters say {found.state}, counted {counted}")


def _has_parent(row: Row, rows: dict[bytes, Row]) -> bool:
    if not row.depth:
        return row.root == row.parent
    parent = rows.get(row.parent)
    return (
        parent is not None
        and parent.depth + 1 == row.depth
        and (parent.root, parent.namespace) == (row.root, row.namespace)
    )


def _count(rows: dict[bytes, Row], state: State) -> State:
    total = State(clock_us=state.clock_us, capacity_nbytes=state.capacity_nbytes)
    for row in rows.values():
        total.add(row, +1)
    return total


def rebuild(txn: Txn, medium: Medium, bad: set[bytes] | None = None, *, capacity_nbytes: int = 0) -> int:
    """Make the rows consistent: drop `bad` blocks, orphans and halves, recount everything; returns how many blocks went.

    A row that cannot be read loses its block, a pin that cannot be read is gone. Blocks, pins, uses and descriptions of
    the rest stay as they were; `capacity_nbytes` stands in for a capacity that cannot be read.
    """
    found = _snapshot(txn, medium)
    dropped = set(bad or ()) | found.unreadable | (found.stored ^ set(found.rows))
    kept: dict[bytes, Row] = {}
    for key, row in sorted(found.rows.items(), key=lambda item: item[1].depth):
        if key not in dropped and _has_parent(row, kept):
            kept[key] = row
    children = Counter(row.parent for row in kept.values() if row.depth)
    for key, row in kept.items():
        row.num_children = children[key]
    for key in (set(found.rows) | found.stored | found.unreadable) - set(kept):
        medium.delete(txn.raw, key, txn.dbs["blocks"])
        medium.delete(txn.raw, key, txn.dbs["meta"])
    for key in found.unreadable_pins:
        medium.delete(txn.raw, key, txn.dbs["info"])
    for key in set(found.pins) - set(found.wanted):
        medium.delete(txn.raw, key, txn.dbs["pins"])
    for key, count in found.wanted.items():
        medium.put(txn.raw, key, count.to_bytes(4, "little"), txn.dbs["pins"])
    for key in found.recency:
        medium.delete(txn.raw, key, txn.dbs["recency"])
    latest_us = found.state.clock_us
    for key, row in kept.items():
        latest_us = max(latest_us, row.last_use_us)
        medium.put(txn.raw, key, row.pack(), txn.dbs["meta"])
        if not row.num_children and key not in found.wanted:
            for entry in row.recency_keys(key):
                medium.put(txn.raw, entry, b"", txn.dbs["recency"])
    found.state.clock_us = latest_us
    found.state.capacity_nbytes = found.state.capacity_nbytes or capacity_nbytes
    medium.put(txn.raw, STATE_KEY, _count(kept, found.state).pack(), txn.dbs["info"])
    return len(found.stored) - len(kept)


def inspect_store(env: StoreEnvironment) -> Inspection:
    """Walk all rows of one transaction. Raises `StorageError`."""
    with env.reading() as txn:
        found = _snapshot(txn, env.medium)
        spaces: dict[bytes, NamespaceSummary] = {}
        for key, value in env.medium.scan(txn.raw, txn.dbs["info"], NAMESPACE_KEY):
            if not key.startswith(NAMESPACE_KEY):
                break
            digest = key.removeprefix(NAMESPACE_KEY)
            spaces[digest] = NamespaceSummary(digest, description=bytes(value).decode("utf-8", "replace"))
    roots: dict[bytes, set[bytes]] = {}
    for key, row in found.rows.items():
        space = spaces.setdefault(row.namespace, NamespaceSummary(row.namespace))
        space.num_blocks += 1
        space.num_tokens += len(row.token_ids) // 4
        space.payload_nbytes += row.raw_nbytes
        space.cost_nbytes += row.cost_nbytes
        space.num_chains += not row.num_children
        space.num_pinned += key in found.pins
        space.last_use_us = max(space.last_use_us, row.last_use_us)
        space.created_us = min(space.created_us or row.created_us, row.created_us)
        space.depths[(row.depth + 1).bit_length() - 1] += 1
        roots.setdefault(row.namespace, set()).add(row.root)
    for digest, space in spaces.items():
        space.num_roots = len(roots.get(digest, ()))
    return Inspection(
        directory=str(env.directory),
        capacity_nbytes=found.state.capacity_nbytes,
        used_nbytes=found.state.used_nbytes,
        file_nbytes=env.file_nbytes,
        num_blocks=len(found.rows),
        namespaces=sorted(spaces.values(), key=lambda space: -space.cost_nbytes),
    )
