"""The folder of one store: whose it is, which format lies in it, and whether its data can be believed.

    data.mdb  lock.mdb   LMDB's own; several processes share them
    tieredkv.lock        held (flock) while a process opens or resets the store; names the format
    unsynced             exists while commits may be newer than the device; holds the boot id of their machine

Commits are not synced one by one: a killed process loses nothing, a crashed machine may leave LMDB's file torn. So the
first commit after a sync leaves `unsynced` behind, on the device, before it happens. Whoever opens the store and finds
the marker of another boot starts empty, because nothing in the file can be believed then.

Knows files, not LMDB. Invariants: nothing is deleted in a folder that is not marked as a store of this format; the
marker is on the device before the first commit it speaks of, and leaves only after a sync under LMDB's write lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tieredkv.errors import StorageError
from tieredkv.storage.medium import DATA, Medium

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LOCK, OPEN_LOCK, UNSYNCED, UNSYNCED_NEW = "lock.mdb", "tieredkv.lock", "unsynced", "unsynced.new"
COMPACT = "data.compact"
OPEN_WAIT_S = 5.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_OWN_FILES = {DATA, LOCK, OPEN_LOCK, UNSYNCED, UNSYNCED_NEW, COMPACT}
_MARK = "tieredkv store, format "


def boot_id() -> str | None:
    """What changes with every start of the machine; None where the system does not tell."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def wrong_format(directory: Path, found: object) -> StorageError:
    """The error for a store that a different version of this program has written."""
    return StorageError(
        f"{directory} holds a store of format {found}, this program reads format {FORMAT_VERSION}; "
        "choose another folder or delete that one"
    )


class StoreDirectory:
    """The files of the store in `path`. `boot` is None where the system tells no boot id: then every commit is synced."""

    def __init__(self, path: Path, medium: Medium) -> None:
        self.path = path
        self.boot = boot_id()
        self.data = path / DATA
        self.num_resets = 0
        self._medium = medium
        # Text, because it is asked for at every commit.
        self._marker = os.fspath(path / UNSYNCED)

    def make_private(self) -> None:
        """Blocks encode prompts: the folder is for its owner only, unless it holds other things as well."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if set(os.listdir(self.path)) <= _OWN_FILES and self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)

    @contextlib.contextmanager
    def opening(self, *, create: bool) -> Iterator[bool]:
        """One process at a time opens or resets the store. Yields whether the folder is ours to reset.

        Raises `StorageError` for a store of another format, and if another process takes too long.
        """
        try:
            fd = os.open(self.path / OPEN_LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except OSError:
            if create:
                raise
            yield False
            return
        try:
            self._lock(fd)
            ours = self._is_ours(fd)
            if create and not ours and not self.data.exists():
                self._mark(fd)
                ours = True
            yield ours
            if create and not ours:
                self._mark(fd)
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        give_up_at_s = time.monotonic() + OPEN_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up_at_s:
                    raise StorageError(
                        f"another process has been opening {self.path} for {OPEN_WAIT_S:.0f} s"
                    ) from None
                time.sleep(0.002)

    def _is_ours(self, fd: int) -> bool:
        text = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
        if not text.startswith(_MARK):
            return False
        if text != f"{_MARK}{FORMAT_VERSION}":
            raise wrong_format(self.path, text.removeprefix(_MARK))
        return True

    def _mark(self, fd: int) -> None:
        os.pwrite(fd, f"{_MARK}{FORMAT_VERSION}\n".encode(), 0)

    def crashed(self) -> bool:
        """Whether the machine stopped while commits were not on the device yet."""
        try:
            left = (self.path / UNSYNCED).read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return False
        return left != self.boot

    def reset(self, reason: str) -> None:
        """Start empty. Other processes notice that the file is another one and follow."""
        if self.data.exists():
            self.num_resets += 1
            logger.warning("disk tier: %s starts empty: %s", self.path, reason)
        for name in (DATA, LOCK, UNSYNCED, UNSYNCED_NEW, COMPACT):
            (self.path / name).unlink(missing_ok=True)

    def replace_data(self, copy: Callable[[int], None]) -> None:
        """Put what `copy(fd)` writes in the place of the data file. Other processes notice and follow; what they write
        meanwhile goes down with the old file.
        """
        new = self.path / COMPACT
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            copy(fd)
            os.fsync(fd)
            (self.path / LOCK).unlink(missing_ok=True)
            new.replace(self.data)
        finally:
            os.close(fd)
            new.unlink(missing_ok=True)

    @property
    def unsynced(self) -> bool:
        return os.path.exists(self._marker)

    def mark_unsynced(self) -> None:
        """To be called before each commit, with LMDB's write lock held."""
        if self.boot is not None and not self.unsynced:
            # Renamed into place, so that a process killed in between leaves no marker without a boot id.
            self._medium.write_file(self.path / UNSYNCED_NEW, self.path / UNSYNCED, self.boot)

    def mark_synced(self) -> None:
        """To be called after a sync, still within the write lock that the sync was made in."""
        self._medium.remove_file(self.path / UNSYNCED)
