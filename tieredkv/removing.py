"""Clearing and demoting a selection of blocks in all tiers, from choosing them to a truthful answer.

    choose      by prefix, by owner, or all of them            storage thread, over the prefix tree
    bar         nothing of them goes down any more             engine thread
    disk        behind whatever the writer has queued          writer thread
    host, device, a slice at a time, until nothing of them is on its way any more

The order is what makes it final: below first, because a block that is gone there cannot come up again. Runs on the asyncio
loop. Invariants: what did not happen is in the answer, and then the answer is not `complete`; only what was there when it
was chosen is waited for, so traffic that brings more of the same does not make a removal any longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from tieredkv import clearing
from tieredkv.clearing import SLICE_BLOCKS, Slice
from tieredkv.core import EngineCore
from tieredkv.errors import CapacityError, RequestError, StorageError
from tieredkv.prefix_tree import PrefixTree
from tieredkv.reach import Reach
from tieredkv.reports import RemovalReport, TierRemoval
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.removal import ClearOutcome
from tieredkv.types import Tier

SETTLE_TIMEOUT_S = 10.0
"""Longest wait for copies and reads that had begun before."""
DISK_TIMEOUT_S = 120.0
DEMOTE_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks: all, those of the owner `tenant`, those of the branch that ends at `prefix` and all behind it. `scope` is
    the owner whose blocks alone exist for the caller.
    """

    prefix: bytes | None
    tenant: str | None
    scope: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """`roots` and `below` choose, None as far as they do not; `near` are chosen blocks on the device or in the host tier, or on
    their way there, children before parents; the disk holds those `stored`, and is reading those `loading`.
    """

    roots: frozenset[bytes] | None
    below: bytes | None
    near: list[bytes]
    stored: frozenset[bytes]
    loading: frozenset[bytes]


def choose(tree: PrefixTree, selection: Selection) -> Chosen | None:
    """None if there is no such prefix."""
    owner = selection.tenant if selection.scope is None else selection.scope
    if selection.tenant not in (None, owner):
        return _chosen(tree, frozenset(), None)
    if selection.prefix is not None:
        branch = tree.branch(selection.prefix)
        if branch is None or owner not in (None, tree.owner(tree.root(selection.prefix))):
            return None
        return _chosen(tree, None, branch.hashes[0])
    return _chosen(tree, None if owner is None else frozenset(tree.roots_of(owner)), None)


def _chosen(tree: PrefixTree, roots: frozenset[bytes] | None, below: bytes | None) -> Chosen:
    near = tree.near(roots, below)
    stored = frozenset(h for h in near if tree.is_stored(h))
    return Chosen(roots, below, near, stored, frozenset(h for h in near if tree.is_loading(h)))


def _lower_tiers(core: EngineCore) -> tuple[bool, bool]:
    """Whether there are a host tier that keeps blocks, and a disk tier."""
    return core.tiers is not None and core.tiers.host.keeps, core.tiers is not None and core.tiers.disk is not None


def _on_core(core: EngineCore, *, work: Callable[[EngineCore, Sequence[bytes]], Slice], part: Sequence[bytes]) -> Slice:
    return work(core, part)


class Removal:
    """One verb at work. The four functions reach the engine, the store, the tree and the store's writer."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def _choose(self, selection: Selection) -> Chosen:
        chosen = await self._reach.look(lambda tree: choose(tree, selection))
        if chosen is None:
            raise RequestError("there is no such prefix", param="prefix", status=404)
        return chosen

    async def _again(self, chosen: Chosen) -> Chosen:
        """What of the same choice is there now."""
        return await self._reach.look(lambda tree: _chosen(tree, chosen.roots, chosen.below))

    async def _sliced(self, hashes: Sequence[bytes], work: Callable[[EngineCore, Sequence[bytes]], Slice]) -> Slice:
        total = Slice()
        for at in range(0, len(hashes), SLICE_BLOCKS):
            part = hashes[at : at + SLICE_BLOCKS]
            total.add(await self._reach.call(partial(_on_core, work=work, part=part)))
        return total

    # -- clear ---------------------------------------------------------------------------------------------------------

    async def clear(self, tiers: Collection[Tier], selection: Selection) -> RemovalReport:
        """Remove the selection from `tiers`. Raises `RequestError` with status 404 for an unknown prefix."""
        chosen = await self._choose(selection)

        await self._sliced(chosen.near, partial(clearing.bar, tiers=tiers))
        reports: dict[Tier, TierRemoval] = {}
        if Tier.DISK in tiers:
            reports[Tier.DISK] = await self._clear_disk(chosen)
            chosen = await self._read_out(chosen)
            # Also what was read from the disk, or computed, since the first time.
            gone = [h for h in chosen.near if h not in chosen.stored]
            await self._sliced(gone, partial(clearing.bar, tiers=tiers))
            await self._sliced(gone, clearing.forget_saved)
        near = [tier for tier in (Tier.DEVICE, Tier.HOST) if tier in tiers]
        if near:
            reports.update(await self._clear_near(near, chosen))
        return _report(reports)

    async def _clear_disk(self, chosen: Chosen) -> TierRemoval:
        namespace = await self._reach.call(lambda core: core.namespace)

        def clear(store: DiskStore) -> ClearOutcome:
            below = None if chosen.below is None else [chosen.below]
            return store.clear(namespace=namespace, roots=chosen.roots, below=below)

        try:
            done = await self._reach.change(clear, DISK_TIMEOUT_S)
        except (StorageError, CapacityError) as error:
            return TierRemoval(Tier.DISK, 0, error=str(error))
        if done is None:
            return TierRemoval(Tier.DISK, 0)
        return TierRemoval(Tier.DISK, done.num_removed, done.num_failed, done.num_kept, done.error)

    async def _read_out(self, chosen: Chosen) -> Chosen:
        """Wait for the reads that had begun before the disk was cleared; what of the choice is there then."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        chosen = await self._again(chosen)
        # What has stayed on disk may be read at any time, and more than once.
        begun = chosen.loading - chosen.stored
        while begun and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
            chosen = await self._again(chosen)
            begun &= chosen.loading - chosen.stored
        return chosen

    async def _clear_near(self, tiers: Collection[Tier], chosen: Chosen) -> dict[Tier, TierRemoval]:
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        total = await self._sliced(chosen.near, partial(clearing.remove, tiers=tiers))
        while total.num_waiting and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
            waiting, total.waiting = total.waiting, {tier: [] for tier in Tier}
            for tier in (Tier.HOST, Tier.DEVICE):
                total.add(await self._sliced(waiting[tier], partial(clearing.remove, tiers=[tier])))
        return {
            tier: TierRemoval(
                tier, total.removed[tier], total.in_use[tier] + len(total.waiting[tier]), total.pinned[tier]
            )
            for tier in tiers
        }

    # -- demote --------------------------------------------------------------------------------------------------------

    async def demote(self, tiers: Collection[Tier], selection: Selection) -> RemovalReport:
        """Move the selection out of `tiers`, the device first. Raises `RequestError` with status 404 for an unknown prefix."""
        chosen = await self._choose(selection)
        has_host, has_disk = await self._reach.call(_lower_tiers)
        reports: dict[Tier, TierRemoval] = {}
        for tier, has_lower in ((Tier.DEVICE, has_host or has_disk), (Tier.HOST, has_disk)):
            if tier not in tiers:
                continue
            if has_lower:
                chosen = await self._again(chosen)
                reports[tier] = await self._demote_from(tier, chosen)
            else:
                reports[tier] = TierRemoval(tier, 0, error="there is no tier below")
        return _report(reports)

    async def _demote_from(self, tier: Tier, chosen: Chosen) -> TierRemoval:
        deadline_s = time.monotonic() + DEMOTE_TIMEOUT_S
        total, near = Slice(), chosen.near
        while True:
            work = partial(clearing.demote, tier=tier, stored=chosen.stored, held=set())
            # Some come from above in the meantime; once one has gone, its coming back is somebody else's wish.
            total.add(await self._sliced([h for h in near if h not in total.ended], work))
            num_waiting = total.num_waiting
            if not num_waiting or time.monotonic() >= deadline_s:
                break
            total.waiting[tier] = []
            await asyncio.sleep(_LOOK_AGAIN_S)
            chosen = await self._again(chosen)
        error = f"{num_waiting} blocks have no copy in the tier below yet" if num_waiting else None
        return TierRemoval(tier, total.removed[tier], total.in_use[tier], total.pinned[tier], error)


def _report(reports: dict[Tier, TierRemoval]) -> RemovalReport:
    parts = [reports[tier] for tier in Tier if tier in reports]
    return RemovalReport(parts, complete=not any(part.in_use or part.pinned or part.error for part in parts))
