"""What cache, spill and restore see of the tiers below the device: small Protocols, and the data that crosses them.

Knows no LMDB, no arena, no thread. Everything here is called on the engine thread; what takes time is submitted and
answered through `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tieredkv.storage.tier import BlockChange, Refusal, StoreOutcome, TierUsage

if TYPE_CHECKING:
    from tieredkv.storage.disk import DiskStore

T = TypeVar("T")

COPYING, LOADING, WRITING = "copying", "loading", "writing"
"""What happens to a block on its way into a tier: copied between device and host, read from disk, written to it."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What a stored block needs besides its bytes. `parent` is the previous block's hash, or the root at depth 0; `root`
    is that of the whole chain.
    """

    hash: bytes
    parent: bytes
    depth: int
    token_ids: tuple[int, ...]
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreResult:
    hash: bytes
    outcome: StoreOutcome


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`ok` only if the slot holds the block's verified bytes; `tag` is what `load` was given."""

    hash: bytes
    ok: bool
    tag: Any


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`length` hashes, from the first one on, were on disk."""

    tag: Any
    length: int


DiskResult = StoreResult | LoadResult | LookupResult | BlockChange


class Lease(Protocol):
    """Keeps one READY slot from being reused until it is released."""

    @property
    def view(self) -> memoryview: ...

    def release(self) -> None: ...


class Reservation(Protocol):
    """A slot that is being filled, until it is committed or aborted."""

    @property
    def view(self) -> memoryview: ...

    def commit(self) -> Lease:
        """The bytes are complete: make them findable. They stay at least until the lease is released."""
        ...

    def abort(self) -> None: ...


class HostTier(Protocol):
    """Fixed slots in host memory: FREE -> WRITING (`begin`) -> READY -> FREE (by eviction). `on_evict(hash)` is called when a
    READY block goes without having been asked to, `priority(hash)` when one comes. A tier that does not keep blocks only lets
    them pass: each is gone with its last lease.
    """

    on_evict: Callable[[bytes], None]
    priority: Callable[[bytes], int]
    retained_limit: int
    """Most blocks that stay ahead of others for their priority."""

    @property
    def num_slots(self) -> int: ...

    @property
    def keeps(self) -> bool:
        """Whether blocks stay after their last lease; otherwise slots only let blocks pass."""
        ...

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        ...

    @property
    def num_keepable(self) -> int:
        """Slots that pins may take at most."""
        ...

    @property
    def num_kept_hashes(self) -> int:
        """Hashes that `keep` was called for."""
        ...

    def usage(self) -> TierUsage: ...

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a READY slot holds the block."""
        ...

    def begin(self, block_hash: bytes, parent: bytes, depth: int) -> Reservation | None:
        """A slot to write the block into, evicting the least useful one if need be, but not the block's parent; None if that
        cannot be had, or if the block is there or being written.
        """
        ...

    def retain(self, block_hash: bytes, priority: int) -> None:
        """Give a block that is there another priority (0 to 100, 35 is ordinary), until it is given yet another."""
        ...

    def lease(self, block_hash: bytes) -> Lease | None:
        """Keep a READY block where it is; None if it is not there."""
        ...

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Count a prefix, head first, as used now."""
        ...

    def check_integrity(self) -> None:
        """Recount everything. Raises `InvariantError`."""
        ...

    def remove(self, block_hash: bytes) -> bool:
        """Forget a READY block; its slot is free once the last lease ends."""
        ...

    def keep(self, block_hash: bytes) -> None:
        """Never evict this block, now or once it is there, until `unkeep`."""
        ...

    def unkeep(self, block_hash: bytes) -> None: ...

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether the block is, or would be, kept."""
        ...


class DiskTier(Protocol):
    """The disk behind its threads. Each call returns at once. `rank(hash)` tells a stored block's priority, and until when."""

    rank: Callable[[bytes], tuple[int, int]]

    @property
    def accepts(self) -> bool:
        """Whether the writer takes more now: it is healthy and its queue is below its bound."""
        ...

    @property
    def fault(self) -> str | None:
        """What is wrong with the tier, for people."""
        ...

    @property
    def refusal(self) -> Refusal | None:
        """Set while the tier fails to take blocks, until it has taken some again."""
        ...

    @property
    def queued_nbytes(self) -> tuple[int, int]:
        """Bytes of reads and of writes that wait or run."""
        ...

    @property
    def write_nbytes_per_s(self) -> float | None:
        """How fast the writer writes, while it does; None before it has."""
        ...

    def usage(self) -> TierUsage:
        """As last seen; never waits."""
        ...

    def num_fit(self, block_nbytes: int, block_size: int) -> int:
        """Blocks of this size, with `block_size` tokens, that the tier has room for in all; 0 while it is down."""
        ...

    def lookup(self, hashes: Sequence[bytes], tag: Any) -> bool:
        """Ask how many of `hashes`, from the first one on, are stored; False if it cannot be asked now."""
        ...

    def load(self, block_hash: bytes, target: memoryview, tag: Any) -> bool:
        """Read and verify a block into `target`; False if the queue is full or the tier is down."""
        ...

    def store(self, blocks: Sequence[tuple[BlockInfo, memoryview]]) -> bool:
        """Write blocks, parents first; all are answered, or none is taken and this returns False."""
        ...

    def touch(self, block_hash: bytes) -> None:
        """The prefix that ends with this block was used."""
        ...

    def label(self, kind: str, block_hash: bytes, text: str) -> None:
        """Keep a short text about a root or a block that is stored now or soon."""
        ...

    def ask(self, function: Callable[[DiskStore], T]) -> Future[T]:
        """Run something on the store that changes nothing, in a thread that may take long over it. The future fails with
        `StorageError` if the tier is down. For any thread, as is `change`.
        """
        ...

    def change(self, function: Callable[[DiskStore], T]) -> Future[T]:
        """Run something on the store behind everything that was given to the writer before."""
        ...

    def protect(self, hashes: frozenset[bytes]) -> None:
        """The deepest blocks of what waiting requests have matched: they and all before them are not evicted now."""
        ...

    def poll(self) -> list[DiskResult]:
        """Answers since the last call, and what this process has changed in the tier, in order."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and stop; False if that took too long."""
        ...
