"""Opening a store's LMDB environment: what is created, what is refused, what is thrown away.

Knows LMDB, the folder and the format; not what happens afterwards. Invariant: a file that is not a store of this format
is never changed; one that is and cannot be believed is replaced by an empty one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lmdb

from tieredkv.errors import StorageError
from tieredkv.storage.directory import FORMAT_VERSION, StoreDirectory, wrong_format
from tieredkv.storage.medium import Medium

DATABASES = ("blocks", "meta", "recency", "pins", "info")
FORMAT_KEY = b"format"
MAX_READERS = 510
SHRINK_ROOM_NBYTES = 1 << 20
DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
"""What LMDB raises about a file that contradicts itself."""


@dataclass(slots=True)
class Txn:
    """A transaction and the handles of the sub-databases, by name."""

    raw: Any
    dbs: dict[str, Any]
    psize: int


@dataclass(slots=True)
class Handle:
    """An open environment. `identity` is the file's (device, inode); `file_nbytes` the length that it had at least."""

    env: Any
    dbs: dict[str, Any]
    identity: tuple[int, int]
    psize: int
    file_nbytes: int


class StoreOpener:
    """Opens one store, as often as need be. `initialize(txn)` fills an empty store in the transaction that creates it.

    `map_nbytes` bounds the data file; 0 takes what the store was used with (then it must exist).
    """

    def __init__(
        self, files: StoreDirectory, medium: Medium, map_nbytes: int, initialize: Callable[[Txn], None]
    ) -> None:
        self.map_nbytes = map_nbytes
        self._files = files
        self._medium = medium
        self._initialize = initialize

    def open(self, *, create: bool, damaged: tuple[int, int] | None = None) -> Handle:
        """`create` allows to create, change and reset; `damaged` is the identity of a file that must not be used again.

        Raises `StorageError`, saying what to do about it.
        """
        try:
            if create:
                self._files.make_private()
            elif not self._files.data.exists():
                raise StorageError(f"{self._files.path} holds no store")
            with self._files.opening(create=create) as ours:
                if create and ours and self._files.crashed():
                    self._files.reset("the machine stopped before the store was synced")
                if create and ours and damaged is not None and self._identity() == damaged:
                    self._files.reset("the file was damaged")
                try:
                    return self._open_files(create=create)
                except DAMAGED as error:
                    if not create or not ours:
                        raise StorageError(
                            f"{self._files.data} is not a store: {error}; choose another folder"
                        ) from None
                    self._files.reset(str(error))
                    return self._open_files(create=create)
        except (lmdb.Error, OSError) as error:
            raise StorageError(f"the store in {self._files.path} cannot be opened: {error}") from None

    def _open_files(self, *, create: bool) -> Handle:
        env = self._medium.open(
            self._files.path,
            map_size=self._map_nbytes_to_open(),
            readonly=not create,
            create=create,
            mode=0o600,
            max_dbs=len(DATABASES),
            max_readers=MAX_READERS,
            sync=self._files.boot is None,
            metasync=self._files.boot is None,
            readahead=True,
            meminit=True,
        )
        try:
            psize, found = env.stat()["psize"], self._medium.stat(self._files.data)
            if found.st_size < (env.info()["last_pgno"] + 1) * psize:
                raise lmdb.CorruptedError("the file is shorter than what it holds")
            env.reader_check()
            dbs = self._open_databases(env, psize, create=create)
        except BaseException:
            self._medium.close(env)
            raise
        return Handle(env, dbs, (found.st_dev, found.st_ino), psize, found.st_size)

    def _identity(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = self._medium.stat(self._files.data)
            return found.st_dev, found.st_ino
        return None

    def _map_nbytes_to_open(self) -> int:
        """A file that is larger than wanted must be mapped whole, with some room to work in while it is being emptied."""
        with contextlib.suppress(OSError):
            file_nbytes = self._medium.stat(self._files.data).st_size
            if file_nbytes > self.map_nbytes > 0:
                return file_nbytes + SHRINK_ROOM_NBYTES
        return self.map_nbytes

    def _open_databases(self, env: Any, psize: int, *, create: bool) -> dict[str, Any]:
        """The sub-databases; created where the file is empty.

        Handles that are opened in a read transaction do not outlive it, so this waits for a writer, as any write does.
        """
        if not create:
            if not env.stat()["entries"]:
                raise StorageError(f"{self._files.path} holds no store")
            dbs = self._existing_databases(env, None)
            with env.begin() as txn:
                self._check_format(txn, dbs)
            return dbs
        with env.begin(write=True) as txn:
            if txn.stat()["entries"]:
                dbs = self._existing_databases(env, txn)
                self._check_format(txn, dbs)
            else:
                self._files.mark_unsynced()
                dbs = {name: env.open_db(name.encode(), txn=txn) for name in DATABASES}
                txn.put(FORMAT_KEY, FORMAT_VERSION.to_bytes(4, "little"), db=dbs["info"])
                self._initialize(Txn(txn, dbs, psize))
        return dbs

    def _existing_databases(self, env: Any, txn: Any) -> dict[str, Any]:
        try:
            return {name: env.open_db(name.encode(), txn=txn, create=False) for name in DATABASES}
        except (lmdb.NotFoundError, lmdb.IncompatibleError):
            raise StorageError(f"{self._files.path} holds another program's LMDB file; choose another folder") from None

    def _check_format(self, txn: Any, dbs: dict[str, Any]) -> None:
        version = int.from_bytes(txn.get(FORMAT_KEY, b"", db=dbs["info"]), "little")
        if version != FORMAT_VERSION:
            raise wrong_format(self._files.path, version)
