"""How much of each tier pins may claim, and how much of a new one fits.

Budgets are shares of a tier in blocks. On the device one request of the greatest length must find room beside what is kept,
in the host tier some slots must stay for blocks that pass through. A pin claims its tier and, where there is one, the disk.
Knows sizes and what is claimed; keeps nothing. Used by the engine thread alone, but for `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.blocks import BlockPool
from tieredkv.keeping import Keeper
from tieredkv.tiers import Tiers
from tieredkv.types import Tier


class PinBudget:
    """`share` is the part of each tier that pins may claim; `max_model_len` the longest sequence in tokens."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers | None,
        keeper: Keeper,
        *,
        share: float,
        block_size: int,
        block_nbytes: int,
        max_model_len: int,
        enabled: bool,
    ) -> None:
        self._keeper = keeper
        self._host = tiers.host if tiers is not None else None
        self._disk = tiers.disk if tiers is not None else None
        self._share = share
        self._block_size = block_size
        self._block_nbytes = block_nbytes
        # The last token of the longest request is an answer, which is never computed on.
        self._max_blocks = (max_model_len - 1) // block_size
        self._enabled = enabled
        spare = pool.num_usable - -(-max_model_len // block_size)
        self._device = max(min(int(pool.num_usable * share), spare), 0)
        self._in_host = min(int(self._host.num_slots * share), self._host.num_keepable) if self._host else 0
        keeper.limit(device=self._device, host=self._in_host)

    @property
    def lowest_tier(self) -> Tier:
        """The tier that a pin stays in unless it is told otherwise."""
        if self._disk is not None:
            return Tier.DISK
        return Tier.HOST if self._in_host else Tier.DEVICE

    def blocks(self, tier: Tier) -> int:
        """Most blocks of a tier that pins may claim. Any thread may ask."""
        if tier is Tier.DISK:
            return int(self._disk.num_fit(self._block_nbytes, self._block_size) * self._share) if self._disk else 0
        return self._device if tier is Tier.DEVICE else self._in_host

    def fit(self, hashes: Sequence[bytes], tier: Tier, others: int) -> tuple[int, str | None]:
        """How many leading blocks can be kept in `tier`, and why not all of them; `others` have claimed so many of the disk."""
        if not self._enabled:
            return 0, "prefix caching is off"
        if not hashes:
            return 0, f"shorter than one block of {self._block_size} tokens"
        if tier is Tier.DISK and self._disk is None:
            return 0, "there is no disk tier"
        if tier is Tier.HOST and (self._host is None or not self._host.keeps):
            return 0, "there is no host tier"
        num_fit, reason = len(hashes), None
        if num_fit > self._max_blocks:
            num_fit, reason = self._max_blocks, "longer than the longest request"
        for each in (tier, Tier.DISK) if tier is not Tier.DISK and self._disk is not None else (tier,):
            part, why = self.fit_in(hashes[:num_fit], each, others if each is Tier.DISK else 0)
            if part < num_fit:
                num_fit, reason = part, why
        return num_fit, reason

    def fit_in(self, hashes: Sequence[bytes], tier: Tier, others: int = 0) -> tuple[int, str | None]:
        """The same for one tier alone: what is claimed there already costs nothing."""
        claimed = self._keeper.num_wanted_in(tier) + others
        room = self.blocks(tier) - claimed
        for i, block_hash in enumerate(hashes):
            if not self._keeper.is_wanted_in(tier, block_hash):
                room -= 1
                if room < 0:
                    return i, self._why(tier, claimed)
        return len(hashes), None

    def _why(self, tier: Tier, claimed: int) -> str:
        budget = self.blocks(tier)
        if budget:
            return f"pins may take {budget} blocks of the {tier.value} tier, others take {claimed}"
        if tier is Tier.DISK and self._share:
            return f"the disk tier cannot be used: {(self._disk and self._disk.fault) or 'it is too small'}"
        if tier is Tier.DEVICE and self._share:
            return "the device pool has no room beside one request of the greatest length"
        return f"pins may take nothing of the {tier.value} tier"
