"""The one place that touches LMDB's data and the store's files: a thin layer that tests replace to inject faults.

Every method is the plain operation; `DiskStore` and its parts never go round it.

LMDB finds a record in its memory map, but the bytes are read with `pread` from the same place of the file, which the
value's address tells (Linux). Reading through the map would make a bad sector or a file cut short a fatal signal instead
of an error, and costs a page fault for every few pages; `pread` copies from the page cache straight into the slot.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tieredkv.storage.codec import copy_bytes

DATA = "data.mdb"
_MAPS = Path("/proc/self/maps")

Environment = Any
Transaction = Any
Database = Any


@dataclass(frozen=True, slots=True)
class _Window:
    """Where a data file is mapped: addresses `start` to `end`, from the file's beginning on; and the file itself."""

    start: int
    end: int
    fd: int


class Medium:
    """Plain LMDB and plain file calls. Errors are `lmdb.Error` and `OSError`, whatever the operation raises."""

    def __init__(self) -> None:
        self._windows: dict[Environment, _Window] = {}

    def open(self, directory: Path, **options: Any) -> Environment:
        env = lmdb.open(os.fspath(directory), **options)
        self._find_window(env, directory / DATA)
        return env

    def close(self, env: Environment) -> None:
        window = self._windows.pop(env, None)
        env.close()
        if window is not None:
            os.close(window.fd)

    def resize(self, env: Environment, map_nbytes: int) -> None:
        """Only while no transaction of this process runs."""
        path = Path(env.path()) / DATA
        env.set_mapsize(map_nbytes)
        self._find_window(env, path)

    def begin(self, env: Environment, *, write: bool) -> Transaction:
        return env.begin(write=write, buffers=True)

    def get(self, txn: Transaction, key: bytes, db: Database) -> memoryview | None:
        """A view into the map, valid until the transaction ends or writes."""
        value: memoryview | None = txn.get(key, db=db)
        return value

    def put(self, txn: Transaction, key: bytes, value: bytes | memoryview, db: Database) -> None:
        txn.put(key, value, db=db)

    def delete(self, txn: Transaction, key: bytes, db: Database) -> bool:
        return bool(txn.delete(key, db=db))

    def scan(self, txn: Transaction, db: Database, start: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Keys from `start` on, in order, with their values. Stop iterating before the transaction changes anything."""
        with txn.cursor(db=db) as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            while found:
                yield bytes(cursor.key()), cursor.value()
                found = cursor.next()

    def first_key(self, txn: Transaction, db: Database, start: bytes) -> bytes | None:
        """The first key at or behind `start`."""
        with txn.cursor(db=db) as cursor:
            return bytes(cursor.key()) if cursor.set_range(start) else None

    def commit(self, txn: Transaction) -> None:
        txn.commit()

    def sync(self, env: Environment) -> None:
        """Everything committed reaches the device."""
        env.sync(True)

    def copy(self, env: Environment, fd: int) -> None:
        """Write the whole environment without its free pages."""
        env.copyfd(fd, compact=True)

    def stat(self, path: Path | str) -> os.stat_result:
        return os.stat(path)

    def extend(self, path: Path | str, nbytes: int) -> None:
        """Make a file at least this long. Never shorter, and never changes what another process writes there meanwhile."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            missing = nbytes - os.fstat(fd).st_size
            if missing > 0:
                os.posix_fallocate(fd, nbytes - missing, missing)
        finally:
            os.close(fd)

    def write_file(self, scratch: Path, path: Path, text: str) -> None:
        """A small file, written aside and renamed; on the device when this returns."""
        with open(scratch, "w", encoding="ascii", opener=_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        _sync_directory(path.parent)

    def remove_file(self, path: Path) -> None:
        """Gone from the device when this returns; nothing happens if there is none."""
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)

    def peek(self, source: memoryview, nbytes: int) -> bytes:
        """The first bytes of a value. Raises `OSError` where the device cannot be read."""
        head = bytearray(min(nbytes, source.nbytes))
        self._copy_out(source[: len(head)], memoryview(head))
        return bytes(head)

    def read(self, source: memoryview, target: memoryview) -> None:
        """Copy a value of `target`'s length, or a part of one, without holding the interpreter lock. Raises `OSError` where
        the device cannot be read.
        """
        self._copy_out(source, target)

    def _copy_out(self, source: memoryview, target: memoryview) -> None:
        address = _address(source)
        for window in list(self._windows.values()):
            if window.start <= address < window.end:
                _pread(window.fd, address - window.start, target)
                return
        copy_bytes(source, target)

    def _find_window(self, env: Environment, path: Path) -> None:
        """Learn where the data file is mapped. Without that, reads go through the map."""
        old = self._windows.pop(env, None)
        if old is not None:
            os.close(old.fd)
        try:
            lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        found = os.fstat(fd)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        for line in lines:
            # start-end perms offset device inode path
            span, _, offset, where, inode, *_ = line.split(maxsplit=5)
            if int(offset, 16) == 0 and where == device and int(inode) == found.st_ino:
                start, _, end = span.partition("-")
                self._windows[env] = _Window(int(start, 16), int(end, 16), fd)
                return
        os.close(fd)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def _pread(fd: int, offset: int, target: memoryview) -> None:
    while target.nbytes:
        count = os.preadv(fd, [target], offset)
        if not count:
            raise OSError(errno.EIO, "a stored block lies behind the end of its file")
        target, offset = target[count:], offset + count


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
