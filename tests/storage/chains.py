"""Blocks for tests: every payload follows from its hash, so bytes under a wrong key are found out."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Sequence

from tieredkv.storage.disk import DiskStore
from tieredkv.storage.pins import PIN_ID_NBYTES, PinRecord
from tieredkv.storage.tier import NEVER, BlockRecord, LoadOutcome
from tieredkv.types import DEFAULT_PRIORITY, Tier

NAMESPACE = hashlib.sha256(b"namespace").digest()
ROOT = hashlib.sha256(b"root").digest()
BLOCK_NBYTES = 20_000
TOKENS = bytes(range(64))


def name(chain: object, depth: int) -> bytes:
    return hashlib.sha256(f"{chain}/{depth}".encode()).digest()


@functools.cache
def payload_of(block_hash: bytes, nbytes: int = BLOCK_NBYTES) -> bytes:
    """Compressible by half, like KV."""
    half = random.Random(block_hash).randbytes(nbytes // 2)
    return (half + bytes(nbytes))[:nbytes]


def record(
    block_hash: bytes,
    parent: bytes,
    depth: int,
    *,
    nbytes: int = BLOCK_NBYTES,
    namespace: bytes = NAMESPACE,
    priority: int = DEFAULT_PRIORITY,
    expires_us: int = NEVER,
) -> BlockRecord:
    payload = memoryview(payload_of(block_hash, nbytes))
    return BlockRecord(block_hash, parent, depth, namespace, payload, TOKENS, priority, expires_us)


def chain(
    key: object, length: int, *, start: int = 0, root: bytes = ROOT, nbytes: int = BLOCK_NBYTES, **more: object
) -> list[BlockRecord]:
    """Blocks `start` to `length - 1` of the chain called `key`."""
    return [
        record(name(key, d), name(key, d - 1) if d else root, d, nbytes=nbytes, **more)  # type: ignore[arg-type]
        for d in range(start, length)
    ]


def pin(
    key: object,
    hashes: Sequence[bytes],
    *,
    namespace: bytes = NAMESPACE,
    expires_us: int = NEVER,
) -> PinRecord:
    """The pin called `key` on these blocks."""
    return PinRecord(
        id=name(key, 0)[:PIN_ID_NBYTES],
        namespace=namespace,
        tenant=b"",
        owner="shared",
        name=str(key),
        tier=Tier.DISK,
        created_us=0,
        expires_us=expires_us,
        hashes=tuple(hashes),
        token_ids=TOKENS * len(hashes),
    )


def hashes(key: object, length: int) -> list[bytes]:
    return [name(key, d) for d in range(length)]


def load(store: DiskStore, block_hash: bytes, nbytes: int = BLOCK_NBYTES, namespace: bytes = NAMESPACE) -> LoadOutcome:
    """Load a block; what was loaded is compared with what belongs to the hash."""
    target = memoryview(bytearray(b"\xaa" * nbytes))
    outcome = store.load(block_hash, namespace, target)
    if outcome is LoadOutcome.LOADED:
        assert target == payload_of(block_hash, nbytes), "bytes of another block"
    return outcome


def assert_sound(store: DiskStore) -> None:
    """Every record and every invariant, and the cap."""
    report = store.verify()
    assert report.ok, report.problems
    usage = store.usage()
    assert usage.used_nbytes <= usage.capacity_nbytes
    assert store.file_nbytes <= usage.capacity_nbytes


def resident(store: DiskStore, candidates: Iterable[bytes]) -> set[bytes]:
    return {h for h in candidates if h in store}
