"""Choosing between `raw` and `zstd` by measurement: which one moves a block to the disk and back in less time here.

A block costs, per raw byte, with the ratio r of stored to raw bytes, the rates of the codec and those of the disk:

    raw    1 / write + 1 / read
    zstd   1 / compress + r / write + r / read + 1 / decompress

The disk's rates are those of the device, not of the page cache: it is the cold read after a restart that hurts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tieredkv.storage.codec import RAW, Codec, RawCodec, ZstdCodec, decode

CODECS = ("raw", "zstd", "auto")
NUM_SAMPLES = 8
PROBE_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second of the device."""

    write: float
    read: float


def measure_disk(directory: Path) -> DiskRates:
    """Write a nameless file of 16 MiB, sync it, forget its pages, read it back. Takes 0.2 s at 200 MB/s. Raises `OSError`."""
    path = directory / f"probe-{os.getpid()}"
    data = np.random.default_rng(0).integers(0, 256, PROBE_NBYTES, dtype=np.uint8).data
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        path.unlink()
        started_s = time.perf_counter()
        view = data
        while view.nbytes:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        written_s = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        target = memoryview(bytearray(1 << 20))
        read_from_s = time.perf_counter()
        while os.readv(fd, [target]):
            pass
        read_s = time.perf_counter() - read_from_s
    finally:
        os.close(fd)
    return DiskRates(PROBE_NBYTES / max(written_s - started_s, 1e-9), PROBE_NBYTES / max(read_s, 1e-9))


class AutoCodec:
    """Compresses the first blocks both ways, then keeps to what is faster. One thread at a time may encode.

    `rates` measures the disk, when the first block arrives; if that fails, raw it is.
    """

    name = "auto"

    def __init__(self, value_nbytes: int, rates: Callable[[], DiskRates]) -> None:
        self._raw = RawCodec()
        self._zstd = ZstdCodec(value_nbytes)
        self._measure = rates
        self._num_samples = 0
        self._raw_nbytes = self._stored_nbytes = 0
        self._compress_s = self._decompress_s = 0.0
        self.choice: Codec | None = None

    def max_stored_nbytes(self, raw_nbytes: int) -> int:
        return self._zstd.max_stored_nbytes(raw_nbytes)

    def encode(self, payload: memoryview, out: memoryview) -> tuple[int, int]:
        if self.choice is not None:
            return self.choice.encode(payload, out)
        started_s = time.perf_counter()
        code, stored_nbytes = self._zstd.encode(payload, out)
        encoded_s = time.perf_counter()
        if code != RAW:
            decode(code, out[:stored_nbytes], memoryview(bytearray(payload.nbytes)))
        decoded_s = time.perf_counter()
        self._num_samples += 1
        # The first block pays for buffers and contexts that the others find ready.
        if self._num_samples > 1:
            self._raw_nbytes += payload.nbytes
            self._stored_nbytes += stored_nbytes
            self._compress_s += encoded_s - started_s
            self._decompress_s += decoded_s - encoded_s
        if self._num_samples >= NUM_SAMPLES:
            self.choice = self._decide()
        return code, stored_nbytes

    def _decide(self) -> Codec:
        try:
            rates = self._measure()
        except OSError:
            return self._raw
        raw_s = self._raw_nbytes * (1 / rates.write + 1 / rates.read)
        zstd_s = self._compress_s + self._decompress_s + self._stored_nbytes * (1 / rates.write + 1 / rates.read)
        return self._zstd if zstd_s < raw_s else self._raw


def make_codec(name: str, value_nbytes: int, directory: Path) -> Codec:
    """The codec called `name` for KV values of `value_nbytes`; `auto` measures the disk under `directory`."""
    if name == "raw":
        return RawCodec()
    if name == "zstd":
        return ZstdCodec(value_nbytes)
    if name == "auto":
        return AutoCodec(value_nbytes, lambda: measure_disk(directory))
    raise ValueError(f"unknown codec {name!r}; known are {', '.join(CODECS)}")
