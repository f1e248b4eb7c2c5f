"""Other ways to evict, to compare the product's with: what each would keep of a stream of prefixes.

The product evicts least recently used leaves first; `simulate` replays that through its own code. These are models of
what others do, block by block, without reference counts or tiers. A request hits the leading run of blocks that are
resident; the blocks behind it are inserted, head first.

    fifo     the oldest first
    lfu      the least often used first, among equals the least recently used
    sieve    SIEVE (Zhang et al., NSDI 2024): a queue with one bit a block and a moving hand
    s3fifo   S3-FIFO (Yang et al., SOSP 2023): a small queue (a tenth), a main queue, a ghost queue
    optimal  perfect foresight: the block whose next use is furthest away (Belady 1966), also if it has just come in
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

NEVER = 1 << 62


class Policy(Protocol):
    """A set of at most `capacity` blocks. `time` counts block accesses; `next_use` is when the block comes again."""

    def __contains__(self, block: bytes) -> bool: ...

    def use(self, block: bytes, next_use: int) -> None:
        """A resident block was hit."""
        ...

    def insert(self, block: bytes, next_use: int) -> None:
        """A block that is not resident was computed."""
        ...


class Fifo:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: bytes) -> bool:
        return block in self._blocks

    def use(self, block: bytes, next_use: int) -> None:
        pass

    def insert(self, block: bytes, next_use: int) -> None:
        if len(self._blocks) >= self._capacity:
            self._blocks.popitem(last=False)
        self._blocks[block] = None


class Lfu:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[bytes, tuple[int, int]] = {}
        # Holds outdated entries too; they are skipped when they come up.
        self._heap: list[tuple[int, int, bytes]] = []
        self._time = 0

    def __contains__(self, block: bytes) -> bool:
        return block in self._entries

    def use(self, block: bytes, next_use: int) -> None:
        self._set(block, self._entries[block][0] + 1)

    def insert(self, block: bytes, next_use: int) -> None:
        while len(self._entries) >= self._capacity:
            count, time, victim = heapq.heappop(self._heap)
            if self._entries.get(victim) == (count, time):
                del self._entries[victim]
        self._set(block, 1)

    def _set(self, block: bytes, count: int) -> None:
        self._time += 1
        self._entries[block] = (count, self._time)
        heapq.heappush(self._heap, (count, self._time, block))


class Optimal:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __contains__(self, block: bytes) -> bool:
        return block in self._next

    def use(self, block: bytes, next_use: int) -> None:
        self._set(block, next_use)

    def insert(self, block: bytes, next_use: int) -> None:
        self._set(block, next_use)
        while len(self._next) > self._capacity:
            negative, victim = heapq.heappop(self._heap)
            if self._next.get(victim) == -negative:
                del self._next[victim]

    def _set(self, block: bytes, next_use: int) -> None:
        self._next[block] = next_use
        heapq.heappush(self._heap, (-next_use, block))


class Sieve:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Old to new, as a linked list: neighbours by block; a sentinel closes the ring.
        self._newer: dict[bytes, bytes] = {b"": b""}
        self._older: dict[bytes, bytes] = {b"": b""}
        self._visited: dict[bytes, bool] = {}
        self._hand = b""

    def __contains__(self, block: bytes) -> bool:
        return block in self._visited

    def use(self, block: bytes, next_use: int) -> None:
        self._visited[block] = True

    def insert(self, block: bytes, next_use: int) -> None:
        if len(self._visited) >= self._capacity:
            self._evict()
        newest = self._older[b""]
        self._newer[newest], self._older[block] = block, newest
        self._newer[block], self._older[b""] = b"", block
        self._visited[block] = False

    def _evict(self) -> None:
        victim = self._hand or self._newer[b""]
        while self._visited[victim]:
            self._visited[victim] = False
            victim = self._newer[victim] or self._newer[b""]
        self._hand = self._newer[victim]
        older, newer = self._older.pop(victim), self._newer.pop(victim)
        self._newer[older], self._older[newer] = newer, older
        del self._visited[victim]


class S3Fifo:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_capacity = max(capacity // 10, 1)
        self._small: deque[bytes] = deque()
        self._main: deque[bytes] = deque()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}

    def __contains__(self, block: bytes) -> bool:
        return block in self._uses

    def use(self, block: bytes, next_use: int) -> None:
        self._uses[block] = min(self._uses[block] + 1, 3)

    def insert(self, block: bytes, next_use: int) -> None:
        while len(self._uses) >= self._capacity:
            if len(self._small) >= self._small_capacity or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        self._uses[block] = 0
        if block in self._ghost:
            del self._ghost[block]
            self._main.append(block)
        else:
            self._small.append(block)

    def _evict_small(self) -> None:
        block = self._small.popleft()
        if self._uses[block] > 1:
            self._uses[block] = 0
            self._main.append(block)
            return
        del self._uses[block]
        self._ghost[block] = None
        if len(self._ghost) > self._capacity:
            self._ghost.popitem(last=False)

    def _evict_main(self) -> None:
        block = self._main.popleft()
        if self._uses[block]:
            self._uses[block] -= 1
            self._main.append(block)
        else:
            del self._uses[block]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "fifo": Fifo,
    "lfu": Lfu,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
    "optimal": Optimal,
}


def next_uses(requests: Sequence[Sequence[bytes]]) -> list[list[int]]:
    """For each block of each request: at which block access it comes again, `NEVER` if it does not."""
    time = sum(map(len, requests))
    seen: dict[bytes, int] = {}
    result: list[list[int]] = []
    for blocks in reversed(requests):
        row = []
        for block in reversed(blocks):
            time -= 1
            row.append(seen.get(block, NEVER))
            seen[block] = time
        result.append(row[::-1])
    return result[::-1]


def replay(policy: Policy, requests: Sequence[Sequence[bytes]], uses: Sequence[Sequence[int]]) -> list[int]:
    """Hits of each request in blocks: the leading run of resident ones. `uses` is what `next_uses` says."""
    hits = []
    for blocks, nexts in zip(requests, uses, strict=True):
        run = next((i for i, block in enumerate(blocks) if block not in policy), len(blocks))
        hits.append(run)
        for i, (block, next_use) in enumerate(zip(blocks, nexts, strict=True)):
            if i < run or block in policy:
                policy.use(block, next_use)
            else:
                policy.insert(block, next_use)
    return hits
