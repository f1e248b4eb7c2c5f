"""LMDB's environment of one store and its life: opening, transactions, the map's size, faults, reopening.

Knows LMDB and the folder, but not what a row means. Translates whatever goes wrong into two exceptions and one text,
`fault`.

Invariants: no memory map is closed or moved while a transaction of this process runs; a file that was removed, replaced
or cut short is not read through its map; every failure leaves `fault` set until an operation of that kind succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from tieredkv.errors import StorageError
from tieredkv.storage.directory import StoreDirectory
from tieredkv.storage.medium import Medium
from tieredkv.storage.opening import DAMAGED, Handle, StoreOpener, Txn

logger = logging.getLogger(__name__)

RETRY_OPEN_S = 1.0
RESIZE_WAIT_S = 1.0
READERS_WAIT_S = 0.2

_FULL = (errno.ENOSPC, errno.EDQUOT)
_STALE = (lmdb.PanicError, lmdb.BadTxnError, lmdb.BadRslotError, lmdb.BadDbiError)


class StoreUnavailableError(StorageError):
    """The store cannot be used now; the message says why."""


class StoreFullError(StorageError):
    """The map or the disk has no room for what the transaction wrote; nothing of it is visible."""


class DeviceFullError(StoreFullError):
    """The file system has no space; the map may have some."""


# Grows in every forked child. Cheaper to compare at each transaction than the process id, which is a system call.
_forks = 0


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class StoreEnvironment:
    """Opens on construction. `initialize(txn)` is called in the write transaction that creates an empty store.

    `map_nbytes` bounds the data file; 0 takes what the store was used with (then it must exist).
    `readonly` never creates or changes anything. Raises `StorageError` with what to do about it when the store cannot be
    opened: no access, another format, another program's file, open in this process already.
    """

    def __init__(
        self,
        directory: Path,
        map_nbytes: int,
        *,
        initialize: Callable[[Txn], None],
        readonly: bool = False,
        medium: Medium | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.readonly = readonly
        self.medium = medium or Medium()
        self._files = StoreDirectory(directory, self.medium)
        # Text, because it is asked for at every transaction.
        self._data = os.fspath(self._files.data)
        self._opener = StoreOpener(self._files, self.medium, map_nbytes, initialize)
        self._clock = clock
        self._forks = _forks
        self._gate = threading.Condition()
        self._reopening = threading.Lock()
        self._handle: Handle | None = None
        self._inside_now: set[object] = set()
        self._retired = False
        self._damaged: tuple[int, int] | None = None
        self._resizing = False
        self._closed = False
        self._retry_at_s = 0.0
        self._unsynced = False
        self.num_reopened = 0
        """How often the store was given up and opened again; it may hold something else since."""
        self._faults: dict[str, str] = {}
        self._handle = self._open()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """Why the store does not work as it should, or None."""
        return "; ".join(self._faults.values()) or None

    @property
    def num_resets(self) -> int:
        """How often the store had to start empty because its data could not be believed."""
        return self._files.num_resets

    @property
    def map_nbytes(self) -> int:
        """Most bytes that the data file may take as it is mapped here, 0 while it is not."""
        handle = self._handle
        with contextlib.suppress(lmdb.Error):  # closed by another thread just now
            return 0 if handle is None else int(handle.env.info()["map_size"])
        return 0

    @property
    def file_nbytes(self) -> int:
        """Length of the data file, 0 while it is gone."""
        try:
            return self.medium.stat(self._files.data).st_size
        except OSError:
            return 0

    # -- transactions --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Txn]:
        """A consistent view. Raises `StoreUnavailableError` at once where a writer would wait."""
        with self._inside() as handle, self._blamed("read"):
            txn = self._begin(handle, write=False)
            try:
                yield Txn(txn, handle.dbs, handle.psize)
            finally:
                txn.abort()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Txn]:
        """All or nothing: commits at the end of the block, aborts on any exception.

        Waits for other writers, of other processes too. Reopens a store that had to be given up. Raises
        `StoreFullError` or `StoreUnavailableError`; in both cases nothing has changed.
        """
        if self.readonly:
            raise StoreUnavailableError(f"{self.directory} is open for reading only")
        self.reopen()
        with self._inside() as handle, self._blamed("write"):
            txn = self._begin(handle, write=True)
            try:
                yield Txn(txn, handle.dbs, handle.psize)
                self._files.mark_unsynced()
                self._unsynced = True
                self.medium.commit(txn)
            except BaseException:
                with contextlib.suppress(lmdb.Error):  # a failed commit has ended the transaction already
                    txn.abort()
                raise
            self._cover(handle)
        self._faults.pop("space", None)

    def _cover(self, handle: Handle) -> None:
        """Make the file as long as what LMDB counts. Pages at its end that a transaction took and gave back are counted but
        never written, and a file that lacks them would be taken for one that was cut short.
        """
        with contextlib.suppress(lmdb.Error, OSError):
            needed = (handle.env.info()["last_pgno"] + 1) * handle.psize
            if self.medium.stat(self._data).st_size < needed:
                self.medium.extend(self._data, needed)

    def _begin(self, handle: Handle, *, write: bool) -> Any:
        try:
            return self.medium.begin(handle.env, write=write)
        except lmdb.ReadersFullError:
            # Readers that were killed keep their slots until somebody looks.
            handle.env.reader_check()
            return self.medium.begin(handle.env, write=write)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Handle]:
        if self._forks != _forks:
            raise StoreUnavailableError("the store was opened by the parent process; open it again after a fork")
        with self._gate:
            handle = self._handle
            if handle is None or self._retired or self._resizing or self._closed:
                raise StoreUnavailableError(self.fault or f"{self.directory} is not open")
            visit = object()
            self._inside_now.add(visit)
        try:
            self._check_files(handle)
            yield handle
        finally:
            with self._gate:
                self._inside_now.discard(visit)
                self._dispose()
                self._gate.notify_all()

    def _check_files(self, handle: Handle) -> None:
        """A map over a file that is gone, replaced or cut short must not be touched any more."""
        # Taken before the look at the file, which another thread's transaction may see longer than this one.
        least_nbytes = handle.file_nbytes
        try:
            found = self.medium.stat(self._data)
        except OSError as error:
            self._retire("files", f"{self.directory}: {error.strerror or error}")
            raise StoreUnavailableError(self._faults["files"]) from None
        if (found.st_dev, found.st_ino) != handle.identity:
            self._retire("files", f"{self.directory} was replaced")
        elif found.st_size < least_nbytes:
            self._retire("files", f"{self._files.data} was cut short", damaged=True)
        else:
            handle.file_nbytes = max(handle.file_nbytes, found.st_size)
            return
        raise StoreUnavailableError(self._faults["files"])

    @contextlib.contextmanager
    def _blamed(self, kind: str) -> Iterator[None]:
        """Translate what LMDB and the system raise, and remember it as the fault of this kind of operation."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFullError(f"{self.directory}: {error}") from None
        except lmdb.MapResizedError:
            self._faults["size"] = f"{self.directory}: another process has enlarged the store"
            raise StoreUnavailableError(self._faults["size"]) from None
        except DAMAGED as error:
            self._retire(kind, f"{self.directory} is damaged: {error}", damaged=True)
            raise StoreUnavailableError(self._faults[kind]) from None
        except _STALE as error:
            self._retire(kind, f"{self.directory}: {error}")
            raise StoreUnavailableError(self._faults[kind]) from None
        except (lmdb.Error, OSError) as error:
            code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
            if code in _FULL or isinstance(error, lmdb.DiskError):
                self._faults["space"] = f"{self.directory}: no space left on the device"
                raise DeviceFullError(self._faults["space"]) from None
            self._blame(kind, f"{self.directory}: {error}")
            raise StoreUnavailableError(self._faults[kind]) from None
        else:
            self._faults.pop(kind, None)

    def _blame(self, kind: str, reason: str) -> None:
        if self._faults.get(kind) != reason:
            logger.warning("disk tier: %s", reason)
        self._faults[kind] = reason

    # -- giving up and opening again -----------------------------------------------------------------------------------

    def _retire(self, kind: str, reason: str, *, damaged: bool = False) -> None:
        """Use this map no more; it is closed when the last transaction of this process has left it."""
        self._blame(kind, reason)
        with self._gate:
            self._retired = True
            if damaged and self._handle is not None:
                self._damaged = self._handle.identity
            self._retry_at_s = self._clock()

    def _dispose(self) -> None:
        """Called with the gate held."""
        if self._retired and not self._inside_now and self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(lmdb.Error, OSError):
                self.medium.close(handle.env)

    def _open(self) -> Handle:
        handle = self._opener.open(create=not self.readonly, damaged=self._damaged)
        self._damaged = None
        self._unsynced = self._files.unsynced
        return handle

    def reopen(self) -> bool:
        """Bring a store that was given up, or whose size another process has changed, back into use; True if it works.

        Tries again at most once a second. A damaged file is deleted, one that is merely gone is not created before its
        directory is back.
        """
        if self._closed or self._forks != _forks:
            return False
        if "size" in self._faults:
            return self.resize(0)
        if self._handle is not None and not self._retired:
            return True
        if not self._reopening.acquire(blocking=False):
            return False
        try:
            if self._handle is not None or self._clock() < self._retry_at_s:
                return False
            self._retry_at_s = self._clock() + RETRY_OPEN_S
            if not self.directory.is_dir():
                raise StorageError(f"{self.directory} is gone")
            handle = self._open()
            with self._gate:
                self._handle, self._retired = handle, False
            self._faults.clear()
            self.num_reopened += 1
            logger.warning("disk tier: %s is in use again", self.directory)
            return True
        except (StorageError, OSError) as error:
            self._blame("files", str(error))
            return False
        finally:
            self._reopening.release()

    def resize(self, map_nbytes: int) -> bool:
        """Set the map's size in bytes, 0 for what other processes made it; False if running transactions do not end soon."""
        with self._gate:
            if self._resizing or self._handle is None or self._retired:
                return False
            self._resizing = True
            try:
                if not self._gate.wait_for(lambda: not self._inside_now, RESIZE_WAIT_S) or self._handle is None:
                    return False
                self.medium.resize(self._handle.env, map_nbytes)
                self._opener.map_nbytes = map_nbytes or self._opener.map_nbytes
                self._faults.pop("size", None)
                return True
            except (lmdb.Error, OSError) as error:
                self._blame("size", f"{self.directory}: the map cannot be resized: {error}")
                return False
            finally:
                self._resizing = False

    def forget_dead_readers(self) -> None:
        """Free the reader slots of processes that were killed; their views would keep freed pages from being reused."""
        with self._inside() as handle, self._blamed("read"):
            handle.env.reader_check()

    def outlast_readers(self) -> None:
        """Wait for the views of this process that are open now to end, a fifth of a second at most."""
        with self._gate:
            now_inside = set(self._inside_now)
            self._gate.wait_for(lambda: not now_inside & self._inside_now, READERS_WAIT_S)

    def compact(self) -> bool:
        """Write the file anew without its free pages, for a store whose capacity was lowered; True if that worked.

        Takes as long as copying what is in the store, and as much space besides, and keeps other writers out meanwhile.
        """
        try:
            with (
                self._files.opening(create=True),
                self._inside() as handle,
                self._blamed("compact"),
                handle.env.begin(write=True),
            ):
                self._files.replace_data(lambda fd: self.medium.copy(handle.env, fd))
                self._retire("files", f"{self.directory} has been written anew")
        except (StorageError, lmdb.Error, OSError) as error:
            logger.warning("disk tier: %s cannot be made smaller: %s", self.directory, error)
            return False
        return self.reopen()

    def close(self) -> None:
        """Sync, then close once running transactions have ended (waits a second for them at most)."""
        if not self.readonly:
            self.sync()
        with self._gate:
            self._closed = self._retired = True
            self._gate.wait_for(lambda: not self._inside_now, RESIZE_WAIT_S)
            self._dispose()

    # -- crash safety --------------------------------------------------------------------------------------------------

    def sync(self) -> bool:
        """Bring all commits to the device and take the marker away; True if the store is clean."""
        if not self._unsynced:
            return True
        try:
            with self._inside() as handle, self._blamed("sync"):
                # Most of the work first, without the lock; then what others have committed meanwhile, with it.
                self.medium.sync(handle.env)
                txn = self._begin(handle, write=True)
                try:
                    self.medium.sync(handle.env)
                    self._files.mark_synced()
                    self._unsynced = False
                finally:
                    txn.abort()
        except StorageError:
            return False
        return True
