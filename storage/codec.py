"""How a block's bytes are stored: as they are, or as zstd-compressed byte planes. Lossless, bit for bit.

A KV value's high byte (sign and exponent) repeats a lot, its low byte hardly. So `zstd` splits the values into planes
of equal bytes and compresses each on its own; a plane that does not shrink is stored as it is:

    [u32 length of plane 0] ... [u32 length of plane w-1] [plane 0] ... [plane w-1]      w = bytes per value, 1, 2 or 4

A plane whose length equals the raw one is uncompressed; whatever follows the last plane is padding. Knows no files and
no blocks. Nothing is allocated by a length that comes from the data: all buffers are sized by the caller's target.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

RAW: Final = 0
PLANES: Final = {1: 1, 2: 2, 3: 4}
"""Codec byte -> planes per value."""
ZSTD_LEVEL: Final = 1

_CODEC_OF_WIDTH = {width: code for code, width in PLANES.items()}
_UINT: dict[int, np.dtype[np.unsignedinteger[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MAX_WINDOW_NBYTES = 1 << 23
_Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """Turns a payload into what is stored. The stored bytes name their own codec, so any store mixes them freely."""

    name: str

    def max_stored_nbytes(self, raw_nbytes: int) -> int:
        """Upper bound of what `encode` writes."""
        ...

    def encode(self, payload: memoryview, out: memoryview) -> tuple[int, int]:
        """Write the stored form into `out`; returns codec byte and length in bytes."""
        ...


class RawCodec:
    """The payload as it is."""

    name = "raw"

    def max_stored_nbytes(self, raw_nbytes: int) -> int:
        return raw_nbytes

    def encode(self, payload: memoryview, out: memoryview) -> tuple[int, int]:
        copy_bytes(payload, out[: payload.nbytes])
        return RAW, payload.nbytes


class ZstdCodec:
    """Byte planes, zstd level 1. `value_nbytes` is the size of one KV value: 2 for 16-bit floats, 4 for float32."""

    name = "zstd"

    def __init__(self, value_nbytes: int) -> None:
        if value_nbytes not in _CODEC_OF_WIDTH:
            raise ValueError(f"values of {value_nbytes} bytes; known are {sorted(_CODEC_OF_WIDTH)}")
        self._width = value_nbytes
        self._local = _Scratch()

    def max_stored_nbytes(self, raw_nbytes: int) -> int:
        return raw_nbytes + 4 * self._width

    def encode(self, payload: memoryview, out: memoryview) -> tuple[int, int]:
        raw_nbytes = payload.nbytes
        width = self._width if raw_nbytes % self._width == 0 else 1
        plane_nbytes = raw_nbytes // width
        planes = self._local.planes(width, plane_nbytes)
        split_planes(np.frombuffer(payload, np.uint8), planes)
        at = 4 * width
        lengths = []
        for plane in planes:
            frame = self._local.compressor.compress(plane.data)
            packed = frame if len(frame) < plane_nbytes else plane.data
            lengths.append(len(packed))
            copy_bytes(memoryview(packed), out[at : at + len(packed)])
            at += len(packed)
        out[: 4 * width] = struct.pack(f"<{width}I", *lengths)
        return _CODEC_OF_WIDTH[width], at


def decode(code: int, stored: memoryview, target: memoryview) -> None:
    """Fill `target` from compressed `stored`. Raises `ValueError` for whatever does not fit it exactly."""
    width = PLANES.get(code)
    if width is None:
        raise ValueError(f"unknown codec {code}")
    if target.nbytes % width or stored.nbytes < 4 * width:
        raise ValueError("length does not fit the codec")
    plane_nbytes = target.nbytes // width
    lengths = struct.unpack(f"<{width}I", stored[: 4 * width])
    if 4 * width + sum(lengths) > stored.nbytes:
        raise ValueError("planes are longer than what is stored")
    planes = _decoding.planes(width, plane_nbytes)
    at = 4 * width
    for length, plane in zip(lengths, planes, strict=True):
        part = stored[at : at + length]
        at += length
        if length == plane_nbytes:
            copy_bytes(part, plane.data)
        else:
            _decompress(part, plane.data)
    join_planes(planes, np.frombuffer(target, np.uint8))


def _decompress(frame: memoryview, plane: memoryview) -> None:
    try:
        reader = _decoding.decompressor.stream_reader(frame, read_across_frames=False)
        filled = 0
        while filled < plane.nbytes:
            count = reader.readinto(plane[filled:])
            if not count:
                raise ValueError("frame ends early")
            filled += count
        if reader.read(1):
            raise ValueError("frame holds more than a plane")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy without holding the interpreter lock, which assigning to a memoryview would."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def split_planes(values: _Bytes, planes: list[_Bytes]) -> None:
    """Byte `i` of every value goes to `planes[i]`. Casts of whole integers, which vectorise, not strided copies."""
    width = len(planes)
    words = values.view(_UINT[width])
    for index, plane in enumerate(planes):
        np.copyto(plane, words >> (8 * index) if index else words, casting="unsafe")


def join_planes(planes: list[_Bytes], values: _Bytes) -> None:
    """The inverse of `split_planes`."""
    words = values.view(_UINT[len(planes)])
    np.copyto(words, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)


class _Scratch(threading.local):
    """Each thread's own buffers and zstd contexts, which are not safe to share."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
        self._buffer: _Bytes = np.empty(0, np.uint8)

    def planes(self, width: int, plane_nbytes: int) -> list[_Bytes]:
        if self._buffer.size < width * plane_nbytes:
            self._buffer = np.empty(width * plane_nbytes, np.uint8)
        return [self._buffer[i * plane_nbytes : (i + 1) * plane_nbytes] for i in range(width)]


_decoding = _Scratch()
