"""Taking blocks off the device and out of the host tier on purpose, a slice at a time, between two steps of the engine.

    bar       nothing of the chosen blocks is copied down any more
    (disk)    the writer removes them behind everything that was queued before
    remove    host and device, as far as nobody uses or pins them
    again     while something of them is still on its way

Runs on the engine thread. Knows blocks and what keeps them; chooses none. Invariant: what was counted as removed cannot be
found in that tier, and comes back only if a request computes or uses it anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tieredkv.core import EngineCore
from tieredkv.types import Tier

SLICE_BLOCKS = 1000
"""Blocks per call: a few milliseconds."""


@dataclass(slots=True)
class Slice:
    """What one slice did, in blocks by tier. Those `waiting` may go a little later, because something of theirs is on its way;
    they are counted as nothing else, and are named in the order in which they were given. `ended` are those that were counted.
    """

    removed: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    in_use: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    pinned: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    waiting: dict[Tier, list[bytes]] = field(default_factory=lambda: {tier: [] for tier in Tier})
    ended: set[bytes] = field(default_factory=set)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    def add(self, other: Slice) -> None:
        """Count another slice, of other blocks."""
        for mine, theirs in ((self.removed, other.removed), (self.in_use, other.in_use), (self.pinned, other.pinned)):
            for tier, count in theirs.items():
                mine[tier] += count
        for tier, hashes in other.waiting.items():
            self.waiting[tier] += hashes
        self.ended |= other.ended


def bar(core: EngineCore, hashes: Sequence[bytes], tiers: Collection[Tier]) -> Slice:
    """Keep chosen blocks, unless they are pinned, from being copied into tiers that are being cleared."""
    if core.tiers is not None and (Tier.HOST in tiers or Tier.DISK in tiers):
        free = [h for h in hashes if not (_is_kept(core, h, Tier.DEVICE) or _is_kept(core, h, Tier.HOST))]
        core.tiers.spiller.bar(free)
    return Slice()


def forget_saved(core: EngineCore, hashes: Sequence[bytes]) -> Slice:
    """The disk has been cleared of these blocks, the pinned ones excepted."""
    if core.tiers is not None:
        core.tiers.spiller.removed_from_disk(hashes)
    return Slice()


def remove(core: EngineCore, hashes: Sequence[bytes], tiers: Collection[Tier]) -> Slice:
    """Remove blocks, children before parents, from device and host if those are among `tiers`."""
    done = Slice()
    moving = in_flight(core)
    for block_hash in hashes:
        for tier in (Tier.HOST, Tier.DEVICE):
            if tier in tiers:
                _remove(core, block_hash, tier, "cleared", done, moving)
    core.events.publish()
    return done


def demote(core: EngineCore, hashes: Sequence[bytes], tier: Tier, stored: Collection[bytes], held: set[bytes]) -> Slice:
    """Remove blocks, children before parents, from the device or the host tier where a lower tier holds them; see to it that it
    will hold the others. `stored` are those that the disk holds, `held`, which grows, those with a child that waits: nothing
    is copied down whose beginning has gone.
    """
    done = Slice()
    moving = in_flight(core)
    missing = []
    tiers = core.tiers
    for block_hash in hashes:
        if not _is_in(core, block_hash, tier):
            continue
        in_host = tiers is not None and tiers.host.keeps and block_hash in tiers.host
        below = block_hash in stored or (tier is Tier.DEVICE and in_host)
        node = core.branches.node(block_hash)
        if node is not None and (not below or block_hash in held):
            held.add(node.parent)
        if not below:
            missing.append(block_hash)
            done.waiting[tier].append(block_hash)
        elif block_hash in held:
            done.waiting[tier].append(block_hash)
        else:
            _remove(core, block_hash, tier, "demoted", done, moving)
    if tiers is not None and missing:
        tiers.spiller.removed_from_disk(missing)
        tiers.spiller.used(missing)
        if tier is Tier.DEVICE:
            tiers.spiller.spill(missing)
        tiers.spiller.feed_disk()
    core.events.publish()
    return done


def in_flight(core: EngineCore) -> dict[bytes, dict[Tier, str]]:
    """Blocks on their way into a tier, and how."""
    found: dict[bytes, dict[Tier, str]] = {}
    if core.tiers is not None:
        for part in (core.tiers.spiller, core.tiers.restorer):
            for block_hash, tier, state in part.states():
                found.setdefault(block_hash, {})[tier] = state
    return found


def _is_in(core: EngineCore, block_hash: bytes, tier: Tier) -> bool:
    if tier is Tier.DEVICE:
        return core.pool.find(block_hash) is not None
    return core.tiers is not None and block_hash in core.tiers.host


def _is_kept(core: EngineCore, block_hash: bytes, tier: Tier) -> bool:
    if tier is Tier.DEVICE:
        return core.pool.is_kept(block_hash)
    return core.tiers is not None and core.tiers.host.is_kept(block_hash)


def _remove(
    core: EngineCore,
    block_hash: bytes,
    tier: Tier,
    reason: str,
    done: Slice,
    moving: dict[bytes, dict[Tier, str]],
) -> None:
    states = moving.get(block_hash, {})
    if not _is_in(core, block_hash, tier):
        # What is on its way into the host tier was barred or will be there soon; what is on its way to the device is a
        # request's.
        if tier in states and tier is Tier.HOST:
            done.waiting[tier].append(block_hash)
        elif tier in states:
            done.in_use[tier] += 1
            done.ended.add(block_hash)
        return
    if _is_kept(core, block_hash, tier):
        done.pinned[tier] += 1
        done.ended.add(block_hash)
        return
    if tier is Tier.HOST and core.tiers is not None:
        core.tiers.host.remove(block_hash)
        core.tiers.spiller.removed_from_host(block_hash)
    else:
        block_id = core.pool.find(block_hash)
        if block_id is None or not core.pool.is_free(block_id):
            # A copy to the host tier ends by itself, a request when it ends.
            if Tier.HOST in states:
                done.waiting[tier].append(block_hash)
            else:
                done.in_use[tier] += 1
                done.ended.add(block_hash)
            return
        core.pool.forget(block_id)
        if core.tiers is not None:
            core.tiers.spiller.removed_from_device(block_hash)
    done.removed[tier] += 1
    done.ended.add(block_hash)
    core.branches.removed(tier, block_hash, reason)
