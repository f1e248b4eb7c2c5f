"""How whoever asks on the asyncio loop gets to what knows the answer, each in the thread that owns it.

    call       the core        engine thread, between two steps: a few milliseconds at most
    on_disk    the store       a storage thread that changes nothing and may take long
    change     the store       the writer's thread, behind everything that was queued before
    look       the prefix tree of all tiers        a storage thread, or another one where the disk does not work

Knows threads and time limits; no verb, no HTTP. Invariant: nothing here waits without bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from tieredkv import inspection
from tieredkv.core import EngineCore
from tieredkv.errors import CapacityError, StorageError
from tieredkv.prefix_tree import PrefixTree, View
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.listing import StoreListing
from tieredkv.tier_faces import DiskTier

if TYPE_CHECKING:
    from tieredkv.engine import Engine

T = TypeVar("T")

ENGINE_TIMEOUT_S = 60.0
"""A step of the engine may take seconds; what takes longer than this has gone wrong."""
DISK_TIMEOUT_S = 30.0


class Reach:
    """The threads of one engine. With `show_text`, the prefix tree shows words of prompts."""

    def __init__(self, engine: Engine, *, show_text: bool) -> None:
        self._engine = engine
        self._show_text = show_text

    async def call(self, function: Callable[[EngineCore], T], /) -> T:
        """Run `function` on the engine thread. Raises `CapacityError` if the engine is gone or takes too long."""
        return await _wait(self._engine.call(function), ENGINE_TIMEOUT_S)

    async def on_disk(self, function: Callable[[DiskStore], T], timeout_s: float = DISK_TIMEOUT_S, /) -> T | None:
        """Run `function` on the store; None without a disk tier. Raises `StorageError` or `CapacityError`."""
        disk = await self._disk()
        return None if disk is None else await _wait(disk.ask(function), timeout_s)

    async def change(self, function: Callable[[DiskStore], T], timeout_s: float, /) -> T | None:
        """Run `function` in the writer's thread; None without a disk tier. Raises `StorageError` or `CapacityError`."""
        disk = await self._disk()
        return None if disk is None else await _wait(disk.change(function), timeout_s)

    async def look(self, function: Callable[[PrefixTree], T], /) -> T:
        """Run `function` over the prefix tree of all tiers; of those that work, if the disk does not."""
        view, namespace = await self.call(lambda core: (inspection.take_view(core), core.namespace))

        def on_store(store: DiskStore) -> list[T]:
            with store.listing(namespace) as listing:
                return [function(self._tree(view, listing))]

        try:
            found = await self.on_disk(on_store)
        except StorageError:
            found = None
        return found[0] if found is not None else await asyncio.to_thread(lambda: function(self._tree(view, None)))

    async def _disk(self) -> DiskTier | None:
        return await self.call(lambda core: None if core.tiers is None else core.tiers.disk)

    def _tree(self, view: View, listing: StoreListing | None) -> PrefixTree:
        return PrefixTree(view, listing, self._decode if self._show_text else None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(list(token_ids))


async def _wait(future: Future[T], timeout_s: float) -> T:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    except TimeoutError:
        raise CapacityError(f"no answer within {timeout_s:.0f} seconds", status=503) from None
