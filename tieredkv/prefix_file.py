"""One file that carries prefixes from a store to another: its bytes, written and read.

    header   "TKVX" | version u16 | 0 u16 | block size u32 | block bytes u64 | blocks u64 | namespace 32
             | length u32 | facts (JSON) | digest 32
    block    "BLCK" | length u32 | length u32 | tokens (u32 each) | record (storage.record) | digest 32        parents first
    end      "DONE" | blocks u64 | digest 32

Numbers are little endian. Each digest is the BLAKE2b-256 of everything before it but the digests: what lies before a damaged
or missing byte can still be believed, and nothing behind it. A block's hash is computed again from its parent and its tokens,
so none passes under another's name. The number of blocks in the header is what was meant to come, that at the end what came.

Knows records and hashes, no store. Nothing is unpickled, and nothing is allocated by a length that the header does not
explain. Invariant: a block is handed out only if everything before it in the file has been verified, its parent among it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tieredkv import hashing
from tieredkv.errors import StorageError
from tieredkv.storage.codec import Codec
from tieredkv.storage.record import BadRecordError, Header, decode_record, encode_record, max_record_nbytes
from tieredkv.storage.tier import BlockRecord

MAGIC, VERSION = b"TKVX", 1
MAX_BLOCK_NBYTES = 1 << 30
MAX_BLOCK_SIZE = 1 << 12
MAX_FACTS_NBYTES = 16 << 20
_BLOCK, _END = b"BLCK", b"DONE"
_HEADER = struct.Struct("<4sHHIQQ32sI")
_FRAME = struct.Struct("<4sII")
_FRAME_END = struct.Struct("<4sQ")
_DIGEST_NBYTES = 32
# Where a record names its block.
_NAME = slice(64, 96)
# What a record may be longer than its payload: its header, the lengths of its planes.
_SLACK_NBYTES = 4096


class PrefixFileError(StorageError):
    """The file cannot be believed from some point on. The message says where and why."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """`block_nbytes` is a block's raw size; `num_blocks` what was meant to follow. `facts` are what the blocks belong to, and
    the labels of roots and prefixes: {"about": {...}, "roots": {hash: owner}, "names": {hash: name}}.
    """

    namespace: bytes
    block_size: int
    block_nbytes: int
    num_blocks: int
    facts: dict[str, Any] = field(default_factory=dict)


class PrefixFileWriter:
    """Writes a file block by block; `end` makes it whole."""

    def __init__(self, file: BinaryIO, header: FileHeader, codec: Codec) -> None:
        self._file = file
        self._header = header
        self._codec = codec
        self._state = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        self._staging = bytearray(max_record_nbytes(header.block_nbytes, codec))
        self._num_blocks = 0
        facts = json.dumps(header.facts, sort_keys=True).encode()
        if len(facts) > MAX_FACTS_NBYTES:
            raise StorageError("too many names for one file")
        fixed = _HEADER.pack(
            MAGIC,
            VERSION,
            0,
            header.block_size,
            header.block_nbytes,
            header.num_blocks,
            header.namespace,
            len(facts),
        )
        self._write(fixed, facts)

    def add(self, block_hash: bytes, parent: bytes, depth: int, token_ids: bytes, payload: memoryview) -> None:
        """`token_ids` packed as in a store; `payload` the raw bytes. Parents come first."""
        length = encode_record(
            memoryview(self._staging),
            payload,
            codec=self._codec,
            namespace=self._header.namespace,
            block_hash=block_hash,
            parent=parent,
            depth=depth,
        )
        record = memoryview(self._staging)[:length]
        self._write(_FRAME.pack(_BLOCK, len(token_ids), length), token_ids, record)
        self._num_blocks += 1

    def end(self) -> None:
        self._write(_FRAME_END.pack(_END, self._num_blocks))

    def _write(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._state.update(part)
            self._file.write(part)
        self._file.write(self._state.digest())


class PrefixFileReader:
    """Reads a file from its beginning. Making one reads the header.

    Raises `PrefixFileError` for what is no such file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        self._depths: dict[bytes, int] = {}
        fixed = self._take(_HEADER.size, "header")
        magic, version, zero, block_size, block_nbytes, num_blocks, namespace, facts_nbytes = _HEADER.unpack(fixed)
        if magic != MAGIC:
            raise PrefixFileError("is not a file of exported prefixes")
        if version != VERSION or zero:
            raise PrefixFileError(f"has format version {version}; this program reads version {VERSION}")
        if not (0 < block_size <= MAX_BLOCK_SIZE and 0 < block_nbytes <= MAX_BLOCK_NBYTES):
            raise PrefixFileError("header is damaged: impossible size of a block")
        if facts_nbytes > MAX_FACTS_NBYTES:
            raise PrefixFileError("header is damaged: impossible length")
        facts = self._take(facts_nbytes, "header")
        self._check_digest("header")
        try:
            found = json.loads(facts)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise PrefixFileError("header holds no facts")
        self.header = FileHeader(namespace, block_size, block_nbytes, num_blocks, found)

    def __iter__(self) -> Iterator[BlockRecord]:
        """The blocks, verified, each with a payload of its own. Raises `PrefixFileError` where the file stops being right."""
        number = 0
        while True:
            where = f"block {number}"
            kind = self._take(4, where)
            if kind == _END:
                (count,) = struct.unpack("<Q", self._take(8, "end"))
                self._check_digest("end")
                if count != number:
                    raise PrefixFileError(f"has {number} blocks where its end says {count}")
                if self._file.read(1):
                    raise PrefixFileError("goes on behind its end")
                return
            if kind != _BLOCK:
                raise PrefixFileError(f"{where}: is damaged")
            yield self._block(where)
            number += 1

    def _block(self, where: str) -> BlockRecord:
        header = self.header
        num_tokens_nbytes, record_nbytes = struct.unpack("<II", self._take(8, where))
        if num_tokens_nbytes != 4 * header.block_size or record_nbytes > header.block_nbytes + _SLACK_NBYTES:
            raise PrefixFileError(f"{where}: is damaged: impossible length")
        token_ids = self._take(num_tokens_nbytes, where)
        record = self._take(record_nbytes, where)
        self._check_digest(where)
        name = record[_NAME]
        payload = bytearray(header.block_nbytes)
        try:
            found = decode_record(memoryview(record), memoryview(payload), name, header.namespace, _InMemory())
        except BadRecordError as error:
            raise PrefixFileError(f"{where}: {error}") from None
        self._check_place(found, token_ids, where)
        self._depths[found.hash] = found.depth
        return BlockRecord(
            hash=found.hash,
            parent=found.parent,
            depth=found.depth,
            namespace=header.namespace,
            payload=memoryview(payload),
            token_ids=token_ids,
        )

    def _check_place(self, found: Header, token_ids: bytes, where: str) -> None:
        """The block's name is that of these tokens behind that parent, which has come before."""
        if hashing.block_hash(found.parent, hashing.unpack_tokens(token_ids)) != found.hash:
            raise PrefixFileError(f"{where}: its hash is not that of its tokens")
        if found.depth and self._depths.get(found.parent) != found.depth - 1:
            raise PrefixFileError(f"{where}: the block before it is not in the file")
        if not found.depth and found.parent in self._depths:
            raise PrefixFileError(f"{where}: has no depth, but a block before it")

    def _take(self, nbytes: int, where: str) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise PrefixFileError(f"{where}: the file ends here")
        self._state.update(data)
        return data

    def _check_digest(self, where: str) -> None:
        if self._file.read(_DIGEST_NBYTES) != self._state.digest():
            raise PrefixFileError(f"{where}: is damaged: its digest differs")


class _InMemory:
    """Records that lie in memory, for `decode_record`."""

    def peek(self, source: memoryview, nbytes: int) -> bytes:
        return bytes(source[:nbytes])

    def read(self, source: memoryview, target: memoryview) -> None:
        target[:] = source


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that only its owner may read, in its place when all of it is written and on the device. Only a regular file is
    ever replaced, the one that a link leads to. Raises `StorageError`.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} cannot be written: it is there and is no regular file")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_TRUNC, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
