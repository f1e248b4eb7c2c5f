"""Prefixes from a store to a file and from a file to a store.

Knows stores and the file's face; no model, no terminal. Both ways work on a store that servers use at the same time: rows
are looked at in short views, blocks are read and put as a server does it. Blocks go out in the order of a walk through the
prefix tree, so a file that breaks off still holds whole prefixes.

Invariants: nothing enters a store that `prefix_file` has not verified; a report counts as kept what was found in the store
at the end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieredkv.errors import StorageError
from tieredkv.hashing import HASH_NBYTES
from tieredkv.prefix_file import FileHeader, PrefixFileError, PrefixFileReader, PrefixFileWriter, private_file
from tieredkv.storage.codec import Codec
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.pins import PinRecord
from tieredkv.storage.record import HEADER_NBYTES
from tieredkv.storage.rows import Row, record_cost
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.storage.tier import BlockRecord, LoadOutcome

ROOT_LABEL, NAME_LABEL = "root", "name"
MAX_LABEL_CHARS = 256
_ROWS_PER_VIEW = 4096
_BATCH_NBYTES, _BATCH_BLOCKS = 8 << 20, 64
_PAGE_NBYTES = 4096
Progress = Callable[[int, int], None]
"""Called with blocks done and blocks in all."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """`num_gone` blocks were chosen, but left the store before they were read."""

    num_blocks: int
    num_tokens: int
    nbytes: int
    num_gone: int = 0


@dataclass(slots=True)
class ImportReport:
    """What came of an import, in blocks. `problem` says why not all that the file was to hold is in the store now."""

    namespace: str
    about: Any
    num_announced: int
    num_verified: int = 0
    num_imported: int = 0
    num_present: int = 0
    num_kept: int = 0
    problem: str | None = None


def find_namespace(store: DiskStore, prefix: str | None) -> tuple[bytes, str]:
    """The namespace whose digest begins with `prefix` (hex), or the only one with blocks; and its description.

    Raises `StorageError` if there is none, or more than one.
    """
    found = [space for space in store.inspect().namespaces if space.num_blocks]
    if prefix is not None:
        found = [space for space in found if space.digest.hex().startswith(prefix.lower())]
    if not found:
        raise StorageError(f"{store.directory} holds no blocks" + (f" of namespace {prefix}" if prefix else ""))
    if len(found) > 1:
        names = ", ".join(f"{space.digest.hex()[:16]} {space.description}" for space in found)
        raise StorageError(f"{store.directory} holds blocks of {len(found)} models; choose one: {names}")
    return found[0].digest, found[0].description


def find_named(store: DiskStore, namespace: bytes, name: str) -> set[bytes]:
    """The last blocks of the prefixes that requests or pins call so."""
    with store.listing(namespace) as listing:
        called = {block_hash for block_hash, label in listing.labels(NAME_LABEL).items() if label == name}
        ends = {block_hash for block_hash in called if block_hash in listing}
    return ends | {pin.hashes[-1] for pin in _pins(store, namespace) if pin.name == name and pin.hashes}


def find_prefix(store: DiskStore, namespace: bytes, text: str) -> bytes:
    """The block whose hash, in hex, begins with `text`. Raises `StorageError` if there is none, or more than one."""
    found: list[bytes] = []
    wanted = text.lower()
    try:
        start = bytes.fromhex(wanted.ljust(64, "0"))
    except ValueError:
        start = None
    if start is not None and len(start) == HASH_NBYTES and wanted:
        with store.listing(namespace) as listing:
            for block_hash, num_children in listing.scan(start):
                if not block_hash.hex().startswith(wanted) or len(found) > 1:
                    break
                if num_children is not None:
                    found.append(block_hash)
    if len(found) != 1:
        raise StorageError(f"{len(found) or 'no'} blocks in {store.directory} begin with {text[:64]!r}")
    return found[0]


def find_pinned(store: DiskStore, namespace: bytes) -> set[bytes]:
    """The last blocks of all pins."""
    return {pin.hashes[-1] for pin in _pins(store, namespace) if pin.hashes}


def _pins(store: DiskStore, namespace: bytes) -> list[PinRecord]:
    seen = store.pins()
    if seen is None:
        raise StorageError(store.fault or f"{store.directory} cannot be read")
    return [pin for pin in seen.records if pin.namespace == namespace]


def export_prefixes(
    store: DiskStore,
    path: Path,
    namespace: bytes,
    ends: Collection[bytes] | None,
    *,
    codec: Codec,
    about: Any = None,
    progress: Progress = lambda done, total: None,
) -> ExportReport:
    """Write the prefixes that end with the blocks in `ends`, or with None all of the namespace, to `path` (mode 0600).

    Where the end of a prefix is missing, as much of it as is there. Raises `StorageError` if nothing is.
    """
    rows = _rows(store, namespace)
    order = _walk(rows, None if ends is None else _paths(store, namespace, rows, ends))
    if not order:
        raise StorageError("there is nothing to export: none of these prefixes is in the store")
    first = rows[order[0]]
    block_size, block_nbytes = len(first.token_ids) // 4, first.raw_nbytes
    with store.listing(namespace) as listing:
        owners = {root: listing.label(ROOT_LABEL, root) for root in {rows[h].root for h in order}}
        names = {h: label for h, label in listing.labels(NAME_LABEL).items() if h in rows}
    wanted = set(order)
    facts = {
        "about": about,
        "roots": {root.hex(): owner for root, owner in owners.items() if owner is not None},
        "names": {h.hex(): name for h, name in names.items() if h in wanted},
    }
    payload = memoryview(bytearray(block_nbytes))
    written: set[bytes] = set()
    with private_file(path) as file:
        writer = PrefixFileWriter(file, FileHeader(namespace, block_size, block_nbytes, len(order), facts), codec)
        for done, block_hash in enumerate(order, 1):
            row = rows[block_hash]
            fits = row.raw_nbytes == block_nbytes and len(row.token_ids) == 4 * block_size
            if fits and (not row.depth or row.parent in written):
                outcome = store.load(block_hash, namespace, payload, token_ids=row.token_ids)
                if outcome is LoadOutcome.FAILED:
                    raise StorageError(store.fault or f"{store.directory} cannot be read")
                if outcome is LoadOutcome.LOADED:
                    writer.add(block_hash, row.parent, row.depth, row.token_ids, payload)
                    written.add(block_hash)
            progress(done, len(order))
        writer.end()
        nbytes = file.tell()
    return ExportReport(len(written), len(written) * block_size, nbytes, len(order) - len(written))


def _rows(store: DiskStore, namespace: bytes) -> dict[bytes, Row]:
    """All rows of a namespace, gathered in short views."""
    rows: dict[bytes, Row] = {}
    start = b""
    while True:
        with store.listing(namespace) as listing:
            seen = list(itertools.islice(listing.scan(start), _ROWS_PER_VIEW))
            for block_hash, num_children in seen:
                row = listing.row(block_hash) if num_children is not None else None
                if row is not None:
                    rows[block_hash] = row
        if len(seen) < _ROWS_PER_VIEW:
            return rows
        start = seen[-1][0] + b"\x00"


def _paths(store: DiskStore, namespace: bytes, rows: dict[bytes, Row], ends: Collection[bytes]) -> set[bytes]:
    """These blocks and all before them. Of a pinned prefix that is not whole, what is there."""
    whole = {pin.hashes[-1]: pin.hashes for pin in _pins(store, namespace) if pin.hashes}
    found: set[bytes] = set()
    for end in ends:
        # Pins name their blocks, so that the beginning of one whose end is missing is found all the same.
        present = (h for h in reversed(whole.get(end, (end,))) if h in rows)
        at = next(present, None)
        while at is not None and at in rows and at not in found:
            found.add(at)
            at = rows[at].parent if rows[at].depth else None
    return found


def _walk(rows: dict[bytes, Row], wanted: Collection[bytes] | None) -> list[bytes]:
    """The blocks in the order of their tree, each behind its parent."""
    children: dict[bytes, list[bytes]] = {}
    for block_hash, row in rows.items():
        if wanted is None or block_hash in wanted:
            children.setdefault(row.parent, []).append(block_hash)
    heads = [block_hash for parent, hashes in children.items() if parent not in rows for block_hash in hashes]
    stack = sorted((h for h in heads if not rows[h].depth), reverse=True)
    order = []
    while stack:
        block_hash = stack.pop()
        order.append(block_hash)
        stack.extend(sorted(children.get(block_hash, ()), reverse=True))
    return order


def import_prefixes(
    store: DiskStore, path: Path, *, any_model: bool = False, progress: Progress = lambda done, total: None
) -> ImportReport:
    """Put the blocks of a file into a store, as far as the file can be believed and the store has room.

    A file of a model that the store does not know is refused unless `any_model` or the store is new. Raises
    `PrefixFileError` for a file of which nothing can be used, `StorageError` for a store or a file that cannot be had.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        try:
            reader = PrefixFileReader(file)
        except PrefixFileError as error:
            raise PrefixFileError(f"{path}: {error}") from None
        header = reader.header
        known = {space.digest for space in store.inspect().namespaces}
        if known and header.namespace not in known and not any_model:
            raise PrefixFileError(
                f"{path} holds blocks of a model that is not in {store.directory} "
                f"({_text(header.facts.get('about'))}); --any-model imports them nevertheless"
            )
        report = ImportReport(header.namespace.hex(), header.facts.get("about"), header.num_blocks)
        imported = _Importer(store, header, report)
        try:
            for block in reader:
                if not imported.add(block):
                    break
                progress(report.num_verified, header.num_blocks)
        except PrefixFileError as error:
            report.problem = f"{path}: {error}"
        except OSError as error:
            report.problem = f"{path} cannot be read: {error.strerror or error}"
        imported.end()
    return report


class _Importer:
    """Puts verified blocks into a store, some at a time, and keeps account of them."""

    def __init__(self, store: DiskStore, header: FileHeader, report: ImportReport) -> None:
        self._store = store
        self._header = header
        self._report = report
        self._batch: list[BlockRecord] = []
        self._hashes: list[bytes] = []
        self._roots: set[bytes] = set()
        cost_nbytes = record_cost(HEADER_NBYTES + header.block_nbytes, 4 * header.block_size, _PAGE_NBYTES)
        self._most_blocks = budget_nbytes_for(store.usage().capacity_nbytes) // cost_nbytes
        about = header.facts.get("about")
        if about is not None:
            store.describe_namespace(header.namespace, json.dumps(about))

    def add(self, block: BlockRecord) -> bool:
        """False if there is no point in going on."""
        report = self._report
        report.num_verified += 1
        if len(self._hashes) + len(self._batch) >= self._most_blocks:
            # More would only push out what came before it.
            report.problem = "the store is too small for all of it"
            return False
        if not block.depth:
            self._roots.add(block.parent)
        self._batch.append(block)
        if len(self._batch) >= min(_BATCH_BLOCKS, max(_BATCH_NBYTES // self._header.block_nbytes, 1)):
            return self._put()
        return True

    def _put(self) -> bool:
        batch, self._batch = self._batch, []
        outcomes = self._store.put(batch) if batch else []
        for block, outcome in zip(batch, outcomes, strict=True):
            if not outcome.resident:
                reason = self._store.fault or str(outcome).replace("_", " ")
                self._report.problem = f"the store refused a block: {reason}"
                return False
            self._hashes.append(block.hash)
            if outcome == "stored":
                self._report.num_imported += 1
            else:
                self._report.num_present += 1
        return True

    def end(self) -> None:
        """Put the rest, sync, and look at what is there."""
        report = self._report
        self._put()
        self._label()
        self._store.sync()
        report.num_kept = sum(block_hash in self._store for block_hash in self._hashes)
        if report.num_kept < len(self._hashes):
            lost = len(self._hashes) - report.num_kept
            report.problem = report.problem or f"the store is full: {lost} blocks had to go again"

    def _label(self) -> None:
        """Whose the roots are and what the prefixes are called, as far as they are in the store."""
        here = set(self._hashes)
        labels = {
            **dict(self._labels("roots", ROOT_LABEL, self._roots)),
            **dict(self._labels("names", NAME_LABEL, here)),
        }
        if labels:
            self._store.label(labels)

    def _labels(self, key: str, kind: str, known: Collection[bytes]) -> Iterator[tuple[tuple[str, bytes], str]]:
        found = self._header.facts.get(key)
        for name, text in found.items() if isinstance(found, dict) else ():
            try:
                block_hash = bytes.fromhex(name)
            except ValueError:
                continue
            if block_hash in known and isinstance(text, str) and 0 < len(text) <= MAX_LABEL_CHARS:
                yield (kind, block_hash), text


def _text(about: Any) -> str:
    if isinstance(about, dict) and isinstance(about.get("model"), str):
        return f"{about['model'][:80]}, {str(about.get('dtype'))[:20]}"
    return "unknown"
