"""The bytes of one block on disk: a header and the stored payload. Pure functions over buffers; knows no files.

    offset  size  field                                    offset  size  field
         0     4  magic "TKVB"                                 24     8  stored length
         4     2  format version                               32    32  namespace
         6     1  codec                                        64    32  hash of this block
         7     1  zero                                         96    32  hash of the block before it, or the root
         8     4  depth (0 = first block of a chain)          128     8  XXH3-64 of the stored payload
        12     4  zero                                        136     8  XXH3-64 of bytes 0 to 135
        16     8  raw length                                  144     -  stored payload

Compressed payloads are padded with zeros (see `_size_class`). All numbers are little endian. A record names the block
it belongs to, so one that lies under another's key is found out. XXH3 guards against accidents at the speed of memory
(20 GB/s against 4 GB/s of CRC-32 where it was measured); it is no defence against someone who can write to the files.

Invariant: nothing that a record says is believed before the header's checksum, and nothing of the payload reaches the
caller as valid before the payload's checksum, has been compared.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Protocol

import xxhash

from tieredkv.errors import StorageError
from tieredkv.hashing import HASH_NBYTES
from tieredkv.storage.codec import RAW, Codec, RawCodec, decode

MAGIC = b"TKVB"
RECORD_VERSION = 1
HEADER_NBYTES = 144
OVERHEAD_NBYTES = HEADER_NBYTES + 16
"""With LMDB's own header of a run of pages."""
MIN_STEP_NBYTES = 4096

_FIELDS = struct.Struct("<4sHBBIIQQ32s32s32sQ")
_CHECKSUM = struct.Struct("<Q")
_FIELDS_NBYTES = _FIELDS.size


class Reader(Protocol):
    """How the bytes of a stored record are got at. Raises `OSError` if the device cannot be read."""

    def peek(self, source: memoryview, nbytes: int) -> bytes:
        """The first `nbytes` bytes of `source`, or all of it."""
        ...

    def read(self, source: memoryview, target: memoryview) -> None:
        """Fill `target` from a `source` of the same length."""
        ...


class BadRecordError(StorageError):
    """A record is not what its key says, or is damaged. The message names what disagrees."""


@dataclass(frozen=True, slots=True)
class Header:
    """The checked fields of a record."""

    codec: int
    depth: int
    raw_nbytes: int
    stored_nbytes: int
    namespace: bytes
    hash: bytes
    parent: bytes
    checksum: int


def checksum(data: memoryview) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def max_record_nbytes(payload_nbytes: int, codec: Codec) -> int:
    """Room that `encode_record` needs for a payload of this length."""
    return HEADER_NBYTES + max(codec.max_stored_nbytes(payload_nbytes), payload_nbytes)


def encode_record(
    out: memoryview,
    payload: memoryview,
    *,
    codec: Codec,
    namespace: bytes,
    block_hash: bytes,
    parent: bytes,
    depth: int,
) -> int:
    """Write header and stored payload into `out`; returns the record's length in bytes."""
    if not len(namespace) == len(block_hash) == len(parent) == HASH_NBYTES:
        raise StorageError("namespace, hash and parent are 32 bytes each")
    kind, stored_nbytes = codec.encode(payload, out[HEADER_NBYTES:])
    if kind != RAW:
        padded_nbytes = _size_class(stored_nbytes)
        if padded_nbytes < payload.nbytes:
            out[HEADER_NBYTES + stored_nbytes : HEADER_NBYTES + padded_nbytes] = bytes(padded_nbytes - stored_nbytes)
            stored_nbytes = padded_nbytes
        else:
            kind, stored_nbytes = RawCodec().encode(payload, out[HEADER_NBYTES:])
    end = HEADER_NBYTES + stored_nbytes
    fields = _FIELDS.pack(
        MAGIC,
        RECORD_VERSION,
        kind,
        0,
        depth,
        0,
        payload.nbytes,
        stored_nbytes,
        namespace,
        block_hash,
        parent,
        checksum(out[HEADER_NBYTES:end]),
    )
    out[:HEADER_NBYTES] = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return end


def _size_class(stored_nbytes: int) -> int:
    """The length to which compressed payloads are padded: one of four per power of two, less what the record adds.

    Records of all lengths leave gaps that fit none of the next, and LMDB spends its time looking for room. Filled three times
    over with records of 230 to 330 KiB, a store of 4 GiB kept 0.56 of its first rate without classes and 0.73 with them.
    """
    nbytes = OVERHEAD_NBYTES + stored_nbytes
    step = max(1 << max(nbytes.bit_length() - 3, 0), MIN_STEP_NBYTES)
    return -(-nbytes // step) * step - OVERHEAD_NBYTES


def read_header(record: memoryview, block_hash: bytes, namespace: bytes | None, reader: Reader) -> Header:
    """The header of a record found under `block_hash`, compared with all that the caller knows.

    Raises `BadRecordError`. The payload is not looked at.
    """
    if record.nbytes < HEADER_NBYTES:
        raise BadRecordError(f"record of {record.nbytes} bytes is shorter than a header")
    head = reader.peek(record, HEADER_NBYTES)
    fields = head[:_FIELDS_NBYTES]
    (expected,) = _CHECKSUM.unpack(head[_FIELDS_NBYTES:])
    if xxhash.xxh3_64_intdigest(fields) != expected:
        raise BadRecordError("header checksum differs")
    magic, version, codec, zero, depth, zeros, raw, stored, space, name, parent, digest = _FIELDS.unpack(fields)
    if magic != MAGIC or version != RECORD_VERSION or zero or zeros:
        raise BadRecordError(f"not a record of version {RECORD_VERSION}")
    if name != block_hash:
        raise BadRecordError("record belongs to another block")
    if namespace is not None and space != namespace:
        raise BadRecordError("record belongs to another namespace")
    if HEADER_NBYTES + stored != record.nbytes:
        raise BadRecordError(f"record holds {record.nbytes - HEADER_NBYTES} of {stored} stored bytes")
    return Header(codec, depth, raw, stored, space, name, parent, digest)


def decode_record(
    record: memoryview, target: memoryview, block_hash: bytes, namespace: bytes, reader: Reader
) -> Header:
    """Check a record and fill `target` (the raw length exactly) with its payload.

    What is checked is the copy, in the target or on the way there, so what happens to the file afterwards does not matter.
    Raises `BadRecordError`; `target` is then undefined.
    """
    header = read_header(record, block_hash, namespace, reader)
    if header.raw_nbytes != target.nbytes:
        raise BadRecordError(f"block of {header.raw_nbytes} bytes where {target.nbytes} were expected")
    stored = record[HEADER_NBYTES:]
    if header.codec == RAW:
        if header.stored_nbytes != header.raw_nbytes:
            raise BadRecordError("uncompressed record with two lengths")
        reader.read(stored, target)
        stored = target
    else:
        stored = _read_aside(stored, reader)
    if checksum(stored) != header.checksum:
        raise BadRecordError("payload checksum differs")
    if header.codec != RAW:
        try:
            decode(header.codec, stored, target)
        except ValueError as error:
            raise BadRecordError(f"payload does not decode: {error}") from None
    return header


def check_record(record: memoryview, block_hash: bytes, reader: Reader) -> Header:
    """Check header and payload checksum without decoding. Raises `BadRecordError`."""
    header = read_header(record, block_hash, None, reader)
    if checksum(_read_aside(record[HEADER_NBYTES:], reader)) != header.checksum:
        raise BadRecordError("payload checksum differs")
    return header


def _read_aside(stored: memoryview, reader: Reader) -> memoryview:
    """A copy in this thread's buffer, valid until its next call. Its length is that of the value, which lies in a file."""
    if _aside.buffer.nbytes < stored.nbytes:
        _aside.buffer = memoryview(bytearray(stored.nbytes))
    copy = _aside.buffer[: stored.nbytes]
    reader.read(stored, copy)
    return copy


class _Aside(threading.local):
    buffer = memoryview(b"")


_aside = _Aside()
