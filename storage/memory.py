"""Where the host arena's bytes come from: plain anonymous memory, or the same memory registered with CUDA.

Knows sizes only. Exactly the size asked for, rounded to pages: no allocator that rounds to powers of two. Registration
(pinning) goes by chunks, because one of hundreds of gigabytes fails; chunks end on slot borders, because one copy must
not span two registrations.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, Protocol

import numpy as np

from tieredkv.errors import StorageError
from tieredkv.runtime import anonymous_memory

REGISTER_CHUNK_NBYTES = 1 << 30
PAGE_NBYTES = mmap.PAGESIZE


class Memory(Protocol):
    """A page-aligned region, zero-filled, at `address`."""

    pinned: bool

    @property
    def view(self) -> memoryview:
        """The region, writable, as bytes."""
        ...

    @property
    def address(self) -> int: ...

    def close(self) -> None:
        """Give the region back. No view of it may be used any more."""
        ...


class Allocator(Protocol):
    """`allocate(nbytes, granule_nbytes)`: no slot of `granule_nbytes`, counted from the start, may be torn apart."""

    def __call__(self, nbytes: int, granule_nbytes: int) -> Memory: ...


class PlainMemory:
    """Anonymous pages of the operating system; they cost nothing until they are touched."""

    pinned = False

    def __init__(self, nbytes: int, granule_nbytes: int = 1) -> None:
        try:
            self._map = anonymous_memory(max(nbytes, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise StorageError(f"{nbytes} bytes of host memory cannot be had: {error}") from None
        self._view = memoryview(self._map)[:nbytes]

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def address(self) -> int:
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def close(self) -> None:
        self._view.release()
        # While somebody still holds a view the pages stay; they go with the last one.
        with contextlib.suppress(BufferError):
            self._map.close()


class PinnedMemory(PlainMemory):
    """The same, page-locked for DMA through CuPy. Raises `StorageError` if CUDA refuses, with everything undone.

    `runtime` is `cupy.cuda.runtime`, unless a test brings its own.
    """

    pinned = True

    def __init__(self, nbytes: int, granule_nbytes: int, runtime: Any = None) -> None:
        super().__init__(nbytes, granule_nbytes)
        self._registered: list[int] = []
        try:
            self._runtime = runtime if runtime is not None else _cuda_runtime()
            granules = max(REGISTER_CHUNK_NBYTES // granule_nbytes, 1)
            chunk_nbytes = granules * granule_nbytes
            for start in range(0, nbytes, chunk_nbytes):
                address = self.address + start
                self._runtime.hostRegister(address, min(chunk_nbytes, nbytes - start), 0)
                self._registered.append(address)
        except Exception as error:  # CuPy has its own exceptions, which cannot be named without it
            self.close()
            raise StorageError(f"{nbytes} bytes of host memory cannot be pinned: {error}") from error

    def close(self) -> None:
        while self._registered:
            self._runtime.hostUnregister(self._registered.pop())
        super().close()


def _cuda_runtime() -> Any:
    from cupy.cuda import runtime  # only where CUDA is used

    return runtime
