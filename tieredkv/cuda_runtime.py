"""The few calls of the CUDA runtime that copies need, as plain functions on integers, and their CuPy form.

Streams and events are integers (`cudaStream_t`, `cudaEvent_t`), the same ones that torch uses: both libraries work in the
device's primary context, so an event recorded by one orders work of the other. Knows no blocks, no slots, no policy.

CuPy is imported only when a `CupyRuntime` is made; whoever makes one on a machine without it gets a `ConfigError` that
says what to install.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from tieredkv.errors import ConfigError

logger = logging.getLogger(__name__)

# cudaErrorNotReady: what an event query answers while the event has not been reached.
_NOT_READY = 600
# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order, like those of any other asynchronous copy.
_ACCESS_IN_STREAM_ORDER = 1


class CudaRuntime(Protocol):
    """What the copy engine asks of CUDA. Every call may raise, with CUDA's own description of what went wrong."""

    def create_stream(self) -> int:
        """A stream that neither waits for the legacy default stream nor makes it wait."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int:
        """An event without a time stamp, on which a thread can sleep."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event happens once everything that is in the stream now has been done."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What enters the stream from now on starts after the event, as recorded last."""
        ...

    def has_happened(self, event: int) -> bool: ...

    def synchronize_event(self, event: int) -> None:
        """Sleep until the event has happened, without holding the interpreter."""
        ...

    def synchronize_stream(self, stream: int) -> None: ...

    def copy(self, targets: Sequence[int], sources: Sequence[int], nbytes: int, to_device: bool, stream: int) -> None:
        """Start copies of `nbytes` bytes each between device addresses and page-locked host addresses."""
        ...


class CupyRuntime:
    """`CudaRuntime` by CuPy. Copies go to the driver in one call where it has one for batches (CUDA 13), else one by one."""

    def __init__(self, runtime: Any = None, batch_copy: BatchCopy | None = None) -> None:
        """`runtime` is `cupy.cuda.runtime`, `batch_copy` the driver's, unless a test brings its own. Raises `ConfigError`."""
        if runtime is None:
            runtime = _cupy_runtime()
            batch_copy = find_batch_copy()
        self._runtime = runtime
        self._batch_copy = batch_copy

    def create_stream(self) -> int:
        return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        self._runtime.streamDestroy(stream)

    def create_event(self) -> int:
        flags = self._runtime.eventDisableTiming | self._runtime.eventBlockingSync
        return int(self._runtime.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._runtime.streamWaitEvent(stream, event, 0)

    def has_happened(self, event: int) -> bool:
        # CuPy hands the status on without looking at it.
        status = int(self._runtime.eventQuery(event))
        if status not in (0, _NOT_READY):
            raise OSError(f"CUDA error {status} while copying")
        return status == 0

    def synchronize_event(self, event: int) -> None:
        self._runtime.eventSynchronize(event)

    def synchronize_stream(self, stream: int) -> None:
        self._runtime.streamSynchronize(stream)

    def copy(self, targets: Sequence[int], sources: Sequence[int], nbytes: int, to_device: bool, stream: int) -> None:
        if self._batch_copy is not None and len(targets) > 1:
            status = self._batch_copy(targets, sources, nbytes, stream)
            if status == 0:
                return
            # Copying a block twice in stream order is harmless, so what a refused batch has started does not matter.
            logger.warning("the driver refuses batches of copies (CUDA error %d): copying one by one", status)
            self._batch_copy = None
        runtime = self._runtime
        kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
        for target, source in zip(targets, sources, strict=True):
            runtime.memcpyAsync(target, source, nbytes, kind, stream)


class BatchCopy(Protocol):
    """Starts many copies of one size; the driver's status, 0 when all is well."""

    def __call__(self, targets: Sequence[int], sources: Sequence[int], nbytes: int, stream: int) -> int: ...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of the CUDA 13 driver API."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    )


def find_batch_copy(library: Any = None) -> BatchCopy | None:
    """The driver's `cuMemcpyBatchAsync` in its CUDA 13 form, which CuPy does not offer; None where the driver lacks it."""
    if library is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
    function = getattr(library, "cuMemcpyBatchAsync_v2", None)
    if function is None:
        return None

    def copy(targets: Sequence[int], sources: Sequence[int], nbytes: int, stream: int) -> int:
        count = len(targets)
        addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
        # One set of attributes, which holds from copy 0 on.
        first = ctypes.c_size_t(0)
        return int(
            function(
                addresses(*targets),
                addresses(*sources),
                sizes(*[nbytes] * count),
                ctypes.c_size_t(count),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                ctypes.c_void_p(stream),
            )
        )

    return copy


def cupy_problem() -> str | None:
    """What keeps CuPy from being used, with the way out; None when nothing does."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'tieredkv[cuda]', or cupy-cuda13x (cupy-cuda12x for CUDA 12)"
    try:
        from cupy.cuda import runtime

        runtime.getDeviceCount()
    except Exception as error:  # CuPy has its own exceptions, which cannot be named without it
        return f"CuPy is installed but cannot be used: {error}"
    return None


def _cupy_runtime() -> Any:
    if (problem := cupy_problem()) is not None:
        raise ConfigError(problem, key="device")
    from cupy.cuda import runtime

    return runtime
