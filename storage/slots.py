"""A slot of the host arena, and the two objects that keep it: a `Reservation` while it is filled, a `Lease` afterwards.

Knows nothing of how slots are found or chosen. Invariant: each reservation is closed exactly once, by `commit` or
`abort`, each lease exactly once, by `release`; a second time is a bug and raises `InvariantError`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from tieredkv.errors import InvariantError
from tieredkv.types import DEFAULT_PRIORITY


class SlotState(enum.Enum):
    FREE = "free"
    WRITING = "writing"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Slot:
    """One place in the arena and the block in it. `hash` is empty while FREE; `last_use` counts uses, not time.

    `kept` marks a block that a pin keeps. `forgotten` marks one that was removed while it was leased: not findable, freed
    with the last lease.
    """

    id: int
    state: SlotState = SlotState.FREE
    hash: bytes = b""
    parent: bytes = b""
    depth: int = 0
    num_leases: int = 0
    num_children: int = 0
    priority: int = DEFAULT_PRIORITY
    last_use: int = 0
    forgotten: bool = False
    kept: bool = False

    @property
    def evictable(self) -> bool:
        return self.state is SlotState.READY and not (
            self.num_leases or self.num_children or self.forgotten or self.kept
        )

    @property
    def retained(self) -> bool:
        return self.priority > DEFAULT_PRIORITY and self.state is SlotState.READY and not self.forgotten


class SlotOwner(Protocol):
    """The arena, as reservations and leases see it."""

    def slot_view(self, slot: int) -> memoryview: ...

    def on_commit(self, slot: Slot) -> Lease: ...

    def on_abort(self, slot: Slot) -> None: ...

    def on_release(self, slot: Slot) -> None: ...


@dataclass(slots=True)
class _Held:
    """A slot that somebody holds, until it is closed once."""

    _arena: SlotOwner
    _slot: Slot
    _open: bool = field(default=True)

    @property
    def slot(self) -> int:
        return self._slot.id

    @property
    def hash(self) -> bytes:
        return self._slot.hash

    @property
    def view(self) -> memoryview:
        """The block's `block_nbytes` bytes: a reservation's are to be written, a lease's are not."""
        return self._arena.slot_view(self._slot.id)

    def _close(self) -> None:
        if not self._open:
            raise InvariantError(f"the {type(self).__name__.lower()} of slot {self._slot.id} was closed twice")
        self._open = False


class Reservation(_Held):
    """A slot being filled, owned by whoever fills it until `commit` or `abort`."""

    __slots__ = ()

    def commit(self) -> Lease:
        """The bytes are complete: make the block findable. The lease keeps it until released."""
        self._close()
        return self._arena.on_commit(self._slot)

    def abort(self) -> None:
        """The bytes are worth nothing: free the slot. Call only when nothing writes to it any more."""
        self._close()
        self._arena.on_abort(self._slot)


class Lease(_Held):
    """Keeps a READY slot's bytes where they are. Use it as a context manager, or release it once, whatever happens."""

    __slots__ = ()

    def release(self) -> None:
        self._close()
        self._arena.on_release(self._slot)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
