"""Whether bringing blocks back beats computing them: two measured rates and one comparison.

    load(n)     = latency + n * block_nbytes / bandwidth   per tier, plus what is queued before it
    compute(n)  = n * block_size / prefill rate

Both sides are kept current as moving averages. Until a side has been measured the gate lets everything through: the first
restore is how it learns. Knows no blocks, no queues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tieredkv.types import Tier

# Weight of a new measurement. High enough to follow a disk that turns slow within a handful of loads.
_WEIGHT = 0.25
# Steps with fewer new tokens say little about the rate of long prompts.
_LEAST_PREFILL_TOKENS = 64


class Rate:
    """A moving average of units per second; None until the first measurement."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def measure(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        sample = units / seconds
        # Averaging times, not speeds: one stalled load must weigh as much as it cost.
        self.per_s = sample if self.per_s is None else 1 / ((1 - _WEIGHT) / self.per_s + _WEIGHT / sample)

    def seconds_for(self, units: float) -> float:
        """Predicted time for `units`; 0 while nothing has been measured."""
        return 0.0 if self.per_s is None else units / self.per_s


class Arrivals:
    """What a tier has brought since it was asked last, and in how much time.

    Loads are started together and served one after another: to count each one's wait from its own start would count the
    same seconds once for every load that was queued. A tier is at work from when it got the first of these loads, or had
    brought the ones before, until now.
    """

    def __init__(self) -> None:
        self._num_blocks = 0
        self._since_s = math.inf
        self._last_s = -math.inf

    def add(self, num_blocks: int, started_s: float) -> None:
        """Blocks have arrived whose load was started at `started_s`."""
        self._num_blocks += num_blocks
        self._since_s = min(self._since_s, max(started_s, self._last_s))

    def take(self, now_s: float) -> tuple[int, float]:
        """(blocks, seconds) since the last call; (0, 0.0) if nothing has arrived."""
        if not self._num_blocks:
            return 0, 0.0
        taken = self._num_blocks, now_s - self._since_s
        self._num_blocks, self._since_s, self._last_s = 0, math.inf, now_s
        return taken


class CostGate:
    """Decides how many of the blocks that lie in lower tiers are worth loading."""

    def __init__(self, policy: str, block_size: int, block_nbytes: int) -> None:
        self.policy = policy
        self.prefill = Rate()
        self.bandwidth = {Tier.HOST: Rate(), Tier.DISK: Rate()}
        self.block_size = block_size
        self.block_nbytes = block_nbytes

    def measure_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of the engine that computed `num_tokens`."""
        if num_tokens >= _LEAST_PREFILL_TOKENS:
            self.prefill.measure(num_tokens, seconds)

    def measure_load(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        self.bandwidth[tier].measure(num_blocks * self.block_nbytes, seconds)

    def prefill_seconds(self, num_tokens: int) -> float:
        return self.prefill.seconds_for(num_tokens)

    def load_seconds(self, tier: Tier, num_blocks: int) -> float | None:
        """Predicted time to bring up blocks of a tier with nothing queued before them; None while nothing has been measured."""
        rate = self.bandwidth[tier]
        return None if rate.per_s is None else rate.seconds_for(num_blocks * self.block_nbytes)

    def worth_restoring(self, sources: Sequence[Tier], queued: dict[Tier, int] | None = None) -> int:
        """How many of the blocks, from the first on, to bring up. `sources` tells where each lies, head of the prefix first;
        blocks that are on the device already cost nothing. `queued` counts blocks that wait before ours, by tier.
        """
        if self.policy == "never":
            return next((i for i, tier in enumerate(sources) if tier is not Tier.DEVICE), len(sources))
        if self.policy == "always":
            return len(sources)
        queued = queued or {}
        best, best_gain, cost = 0, 0.0, 0.0
        seen: set[Tier] = set()
        for i, tier in enumerate(sources):
            if tier is not Tier.DEVICE:
                num_blocks = 1 if tier in seen else 1 + queued.get(tier, 0)
                seen.add(tier)
                cost += self.bandwidth[tier].seconds_for(num_blocks * self.block_nbytes)
            gain = self.prefill_seconds((i + 1) * self.block_size) - cost
            # Unmeasured rates make both sides zero: then more blocks are taken to be better.
            if gain > best_gain or (gain == best_gain and (self.prefill.per_s is None or tier is Tier.DEVICE)):
                best, best_gain = i + 1, gain
        return best
