"""How much of a prompt is resident, in which tiers: asked on the engine thread, answered when the disk has answered.

Knows the core's pool, its tiers and hashes; no requests, no loop.
"""

from __future__ import annotations

from tieredkv import hashing
from tieredkv.core import EngineCore
from tieredkv.types import Tier
from tieredkv.warm_job import WarmPrompt


class ResidencyLook:
    """Where a prompt's full blocks lie; its methods run on the engine thread. What the disk holds is protected until `end`."""

    def __init__(self, core: EngineCore, prompt: WarmPrompt) -> None:
        self.block_size = core.block_size
        root = hashing.root_hash(core.namespace, prompt.tenant)
        self.hashes = hashing.full_block_hashes(root, prompt.token_ids, core.block_size)
        tiers = core.tiers
        self._host = tiers.host if tiers is not None and prompt.tier is not Tier.DEVICE else None
        wants_disk = prompt.tier in (None, Tier.DISK)
        self._lookup = tiers.look_up(self.hashes) if tiers is not None and wants_disk and self.hashes else None

    def num_resident(self, core: EngineCore) -> int | None:
        """The leading blocks that lie in the wanted tier or above; None while the disk has not answered."""
        on_disk = 0 if self._lookup is None else self._lookup.length
        if on_disk is None:
            return None
        for index, block_hash in enumerate(self.hashes):
            near = core.pool.find(block_hash) is not None or (self._host is not None and block_hash in self._host)
            if not near and index >= on_disk:
                return index
        return len(self.hashes)

    def end(self, core: EngineCore) -> None:
        if self._lookup is not None and core.tiers is not None:
            core.tiers.forget(self._lookup)
            self._lookup = None
