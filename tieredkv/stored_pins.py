"""Pins on their way to the store and out of it: what was asked of its writer, what failed and is asked again.

    save(record)  --change-->  store.pin     --answer-->  saved(record, blocks that are there)
    leave(id)     --change-->  store.unpin
    see()         --change-->  store.pins    --answer-->  seen(all pins, what is there of each)

Everything goes through the writer's queue, so answers are in the order of what they tell. Knows the disk tier's face; decides
nothing about pins. Used by the engine thread alone. Invariant: a pin that was saved or left reaches the store sooner or
later, unless something newer takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from tieredkv.errors import StorageError
from tieredkv.storage.pins import PinRecord, PinsSeen
from tieredkv.tier_faces import DiskTier

if TYPE_CHECKING:
    from tieredkv.storage.disk import DiskStore

T = TypeVar("T")


class StoredPins:
    """The pins of a store, as far as it has answered. Without a disk tier everything counts as saved, and nothing is."""

    def __init__(
        self,
        disk: DiskTier | None,
        saved: Callable[[PinRecord, int], None],
        seen: Callable[[PinsSeen], None],
    ) -> None:
        self._disk = disk
        self._on_saved = saved
        self._on_seen = seen
        # What the store is to have and has not confirmed; those that nobody works on have failed.
        self._open: dict[bytes, PinRecord] = {}
        self._writing: set[bytes] = set()
        # What it is to give up, with the number of blocks.
        self._leaving: dict[bytes, int] = {}
        self._jobs: list[tuple[Future[Any], Callable[[Any], None]]] = []

    @property
    def busy(self) -> bool:
        """Whether answers are to come."""
        return bool(self._jobs)

    @property
    def has_failed(self) -> bool:
        """Whether something has to be asked again: see `retry`."""
        return bool(self._leaving) or any(pin_id not in self._writing for pin_id in self._open)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks of pins that the store may still count although they are gone, each once per pin."""
        return sum(self._leaving.values())

    def is_saved(self, pin_id: bytes) -> bool:
        return pin_id not in self._open

    def is_leaving(self, pin_id: bytes) -> bool:
        return pin_id in self._leaving

    def save(self, record: PinRecord) -> None:
        """Have the store keep a pin, in the place of the one with its id."""
        if self._disk is None:
            return
        self._leaving.pop(record.id, None)
        self._open[record.id] = record
        self._writing.add(record.id)

        def answered(num_resident: int | None) -> None:
            if self._open.get(record.id) is not record:
                return
            self._writing.discard(record.id)
            if num_resident is not None:
                del self._open[record.id]
                self._on_saved(record, num_resident)

        self._ask(lambda store: store.pin(record), answered)

    def leave(self, pin_id: bytes, num_blocks: int) -> None:
        """Have the store give a pin up."""
        if self._disk is None:
            return
        self._open.pop(pin_id, None)
        self._leaving[pin_id] = num_blocks

        def answered(done: bool | None) -> None:
            if done and pin_id not in self._open:
                self._leaving.pop(pin_id, None)

        self._ask(lambda store: store.unpin(pin_id), answered)

    def see(self) -> None:
        """Ask for all pins."""

        def answered(seen: PinsSeen | None) -> None:
            if seen is not None:
                self._on_seen(seen)

        self._ask(lambda store: store.pins(), answered)

    def retry(self) -> None:
        """Ask again for what has failed."""
        for record in [r for r in self._open.values() if r.id not in self._writing]:
            self.save(record)
        for pin_id, num_blocks in list(self._leaving.items()):
            self.leave(pin_id, num_blocks)

    def take_answers(self) -> bool:
        """Pass on what the store has answered; whether that was anything."""
        done = [job for job in self._jobs if job[0].done()]
        self._jobs = [job for job in self._jobs if not job[0].done()]
        for future, answered in done:
            try:
                result = future.result()
            except (StorageError, CancelledError):
                result = None
            answered(result)
        return bool(done)

    def _ask(self, change: Callable[[DiskStore], T], answered: Callable[[T | None], None]) -> None:
        if self._disk is not None:
            self._jobs.append((self._disk.change(change), answered))
