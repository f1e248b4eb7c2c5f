"""Soft retention: which prefixes requests asked to keep longer, with which priority, until when.

A wish belongs to the blocks of a prompt's beginning. It begins when the request is admitted and is renewed by every use
of the blocks, whoever uses them. Device pool and host arena are told the priority of each block, and told again when it
has run out; the disk is told the time as well, because it outlives the process. Nothing here keeps a block: each tier
prefers no more blocks than its share, and the table holds no more than the largest tier's.

Knows hashes, priorities and times; no sequences, no tensors, no rows. Used by the engine thread alone. Invariants: a
block's priority in a tier is that of its highest wish that has not run out, or the ordinary one; wishes on a block imply
wishes on all before it that last as long.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tieredkv.blocks import BlockPool
from tieredkv.errors import InvariantError
from tieredkv.storage.tier import NEVER
from tieredkv.tiers import Tiers
from tieredkv.types import DEFAULT_PRIORITY, MAX_PRIORITY, Retention

# Changes for the disk wait for each other, but not so long that a wish might run out meanwhile.
_DISK_BATCH = 16
_DISK_EVERY_US = 30_000_000


class _Wish:
    """What is wished for one block: (priority, time to live, expiry), no entry both lower and shorter than another one."""

    __slots__ = ("depth", "entries", "priority")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.entries: list[tuple[int, int, int]] = []
        self.priority = DEFAULT_PRIORITY

    def add(self, priority: int, ttl_us: int, now_us: int) -> None:
        more = (priority, ttl_us, now_us + ttl_us)
        if not any(p >= priority and ttl >= ttl_us and end >= more[2] for p, ttl, end in self.entries):
            self.entries = [e for e in self.entries if e[0] > priority or e[1] > ttl_us or e[2] > more[2]]
            self.entries.append(more)

    def renew(self, now_us: int) -> None:
        self.entries = [(priority, ttl_us, now_us + ttl_us) for priority, ttl_us, _ in self.entries]

    def expire(self, now_us: int) -> None:
        self.entries = [entry for entry in self.entries if entry[2] > now_us]

    @property
    def highest(self) -> int:
        return max((priority for priority, _, _ in self.entries), default=DEFAULT_PRIORITY)

    @property
    def first_expiry_us(self) -> int:
        return min((end for _, _, end in self.entries), default=NEVER)

    @property
    def expiry_us(self) -> int:
        """When the highest priority ends."""
        return max((end for priority, _, end in self.entries if priority == self.highest), default=NEVER)


class Retentions:
    """All wishes of one process. `budget` is the share of each tier that is preferred at most; `clock_us` the wall clock."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers | None,
        *,
        block_size: int,
        block_nbytes: int,
        budget: float,
        clock_us: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._host = tiers.host if tiers is not None else None
        self._disk = tiers.disk if tiers is not None else None
        self._block_size = block_size
        self._block_nbytes = block_nbytes
        self._budget = budget
        self._clock_us = clock_us
        self._wishes: dict[bytes, _Wish] = {}
        # By priority, the blocks that were used longest ago first: the order in which wishes are forgotten.
        self._order: dict[int, OrderedDict[bytes, None]] = {}
        self._ends: list[tuple[int, int, bytes]] = []
        self._for_disk: dict[bytes, tuple[int, int]] = {}
        self._tell_disk_us = NEVER
        pool.retained_limit = int(pool.num_usable * budget)
        if tiers is not None:
            tiers.host.retained_limit = int(tiers.host.num_slots * budget)
            tiers.rank_by(self.priority, self.rank)

    def __len__(self) -> int:
        return len(self._wishes)

    def priority(self, block_hash: bytes) -> int:
        wish = self._wishes.get(block_hash)
        return DEFAULT_PRIORITY if wish is None else wish.priority

    def rank(self, block_hash: bytes) -> tuple[int, int]:
        """Priority, and until when, in microseconds since the epoch."""
        wish = self._wishes.get(block_hash)
        return (DEFAULT_PRIORITY, NEVER) if wish is None else (wish.priority, wish.expiry_us)

    def want(self, hashes: Sequence[bytes], wishes: Sequence[Retention]) -> None:
        """A request was admitted whose prompt has these full blocks, head first."""
        now_us = self._clock_us()
        for wish in wishes:
            if wish.priority == DEFAULT_PRIORITY:
                continue
            num_blocks = min(wish.num_tokens // self._block_size, len(hashes))
            priority = min(max(wish.priority, 0), MAX_PRIORITY)
            # From the tail on, so that the tail counts as used longest ago.
            for depth in range(num_blocks - 1, -1, -1):
                noted = self._wishes.setdefault(hashes[depth], _Wish(depth))
                noted.add(priority, int(wish.ttl_s * 1e6), now_us)
                self._apply(hashes[depth], noted)
                self._order[noted.priority].move_to_end(hashes[depth])
            if num_blocks:
                self._note_for_disk(hashes[num_blocks - 1], now_us)
        if wishes:
            self._hold_to_budget()

    def used(self, hashes: Sequence[bytes]) -> None:
        """A request was admitted that found these blocks, head first: what is wished for them lasts as long again."""
        if not self._wishes:
            return
        now_us = self._clock_us()
        noted = [block_hash for block_hash in hashes if block_hash in self._wishes]
        for block_hash in reversed(noted):
            wish = self._wishes[block_hash]
            wish.renew(now_us)
            self._order[wish.priority].move_to_end(block_hash)
            if self._host is not None:
                # It may have been one too many there before this use.
                self._host.retain(block_hash, wish.priority)
        if noted:
            self._note_for_disk(noted[-1], now_us)

    def expire(self) -> None:
        """Make ordinary again what nobody has used in time. Costs next to nothing when there is nothing to do."""
        if not self._wishes and not self._for_disk:
            return
        now_us = self._clock_us()
        while self._ends and self._ends[0][0] <= now_us:
            _, depth, block_hash = heapq.heappop(self._ends)
            wish = self._wishes.get(block_hash)
            if wish is not None and wish.depth == depth:
                wish.expire(now_us)
                if not wish.entries:
                    del self._wishes[block_hash]
                self._apply(block_hash, wish)
        if now_us >= self._tell_disk_us:
            self.tell_disk()

    def tell_disk(self) -> None:
        """Pass on what the disk has to know now: when nothing else is to be done, too."""
        rows = [(block_hash, priority, end) for block_hash, (priority, end) in self._for_disk.items()]
        self._for_disk, self._tell_disk_us = {}, NEVER
        if rows and self._disk is not None:
            self._disk.change(lambda store: store.retain(rows))

    def _note_for_disk(self, block_hash: bytes, now_us: int) -> None:
        """Only the deepest block of a prefix: those before it have children there as long as it stays."""
        if self._disk is None:
            return
        self._for_disk[block_hash] = self.rank(block_hash)
        self._tell_disk_us = min(self._tell_disk_us, now_us + _DISK_EVERY_US)
        if len(self._for_disk) >= _DISK_BATCH:
            self.tell_disk()

    def _apply(self, block_hash: bytes, wish: _Wish) -> None:
        """Tell the tiers the priority of a block if it has changed, and look at it again when that ends."""
        if wish.entries:
            heapq.heappush(self._ends, (wish.first_expiry_us, wish.depth, block_hash))
            if len(self._ends) > 4 * len(self._wishes) + 64:
                self._ends = [(w.first_expiry_us, w.depth, h) for h, w in self._wishes.items()]
                heapq.heapify(self._ends)
        if wish.priority != wish.highest:
            if wish.priority != DEFAULT_PRIORITY:
                del self._order[wish.priority][block_hash]
            wish.priority = wish.highest
            if wish.priority != DEFAULT_PRIORITY:
                self._order.setdefault(wish.priority, OrderedDict())[block_hash] = None
            self._pool.prioritize(block_hash, wish.priority)
            if self._host is not None:
                self._host.retain(block_hash, wish.priority)

    def _hold_to_budget(self) -> None:
        """Forget wishes: of the lowest priority first, and among those what was used longest ago."""
        sizes = [self._pool.num_usable, self._host.num_slots if self._host is not None else 0]
        if self._disk is not None:
            sizes.append(self._disk.num_fit(self._block_nbytes, self._block_size))
        most = int(max(sizes) * self._budget)
        while len(self._wishes) > most:
            block_hash = next(
                iter(next(self._order[priority] for priority in sorted(self._order) if self._order[priority]))
            )
            wish = self._wishes.pop(block_hash)
            wish.entries = []
            self._apply(block_hash, wish)

    def check_integrity(self) -> None:
        """Compare with what the device pool was told. Raises `InvariantError`."""
        told = {h: wish.priority for h, wish in self._wishes.items() if wish.priority != DEFAULT_PRIORITY}
        ordered = {h: priority for priority, hashes in self._order.items() for h in hashes}
        if (
            told != self._pool.priorities
            or told != ordered
            or any(w.priority != w.highest for w in self._wishes.values())
        ):
            raise InvariantError("the wishes and the priorities of the device pool disagree")
