"""Which blocks lie on the device and in the host tier, whose they are, and how often they were used.

    cache, spill, restore --stored, removed, used--> Branches --> EventLog

One node per block, for as long as one of the two tiers holds it; the disk keeps account of its own blocks. A node knows
its parent, so nodes are a forest of prefixes. Who owns a chain's root and what its prompts are called is handed to
`on_label`, which makes it survive a restart.

Knows hashes, tokens and tiers; no pool, no arena, no disk. Used by the engine thread alone; `snapshot` is what others may
read. Invariants: a node's `where` says what the tiers say; roots and names are bounded by the nodes and a constant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tieredkv.events import EventLog
from tieredkv.tier_faces import BlockInfo
from tieredkv.types import Tier

ROOT_LABEL, NAME_LABEL = "root", "name"
MAX_NAMES = 4096
MAX_NAME_LENGTH = 256
_LEAST_ROOTS = 1024
_BITS = {Tier.DEVICE: 1, Tier.HOST: 2}


class Node:
    """One block. `where` is a bit set, 1 for the device and 2 for the host tier; `last_use_s` is wall-clock time."""

    __slots__ = ("depth", "hash", "last_use_s", "num_hits", "parent", "root", "token_ids", "where")

    def __init__(self, info: BlockInfo, now_s: float) -> None:
        self.hash = info.hash
        self.parent = info.parent
        self.depth = info.depth
        self.root = info.root
        self.token_ids = info.token_ids
        self.where = 0
        self.num_hits = 0
        self.last_use_s = now_s

    def is_in(self, tier: Tier) -> bool:
        return bool(self.where & _BITS.get(tier, 0))


@dataclass(frozen=True, slots=True)
class Root:
    """Where the chains of one owner and cache salt begin: whose they are, and the salt that seeds them."""

    owner: str
    tenant: bytes

    def pack(self) -> str:
        return f"{self.owner} {self.tenant.hex()}"

    @classmethod
    def unpack(cls, text: str) -> Root | None:
        """None for what is no packed root."""
        owner, _, tenant = text.partition(" ")
        try:
            return cls(owner, bytes.fromhex(tenant))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What lay on the device and in the host tier after event `sequence`. The nodes themselves live on."""

    sequence: int
    nodes: Mapping[bytes, Node]
    roots: Mapping[bytes, Root]
    names: Mapping[bytes, str]


class Branches:
    """The nodes of one engine. `on_label(kind, hash, text)` is called for each root whose first block comes, and for each
    name of a prefix that is new here.
    """

    def __init__(self, events: EventLog, clock: Callable[[], float] = time.time) -> None:
        self.events = events
        self.on_label: Callable[[str, bytes, str], None] = lambda kind, block_hash, text: None
        self._clock = clock
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Root] = {}
        self._names: dict[bytes, str] = {}
        self._most_roots = _LEAST_ROOTS

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, block_hash: bytes) -> Node | None:
        return self._nodes.get(block_hash)

    def snapshot(self) -> Snapshot:
        """A copy for another thread, at about 10 ns a block; publishes the events so far."""
        return Snapshot(self.events.publish(), self._nodes.copy(), self._roots.copy(), self._names.copy())

    def stored(self, tier: Tier, info: BlockInfo, reason: str) -> None:
        """A block can be found on the device or in the host tier from now on."""
        node = self._nodes.get(info.hash)
        if node is None:
            node = self._nodes[info.hash] = Node(info, self._clock())
            if not info.depth and info.root in self._roots:
                # Each time: the disk may have forgotten a root that it held nothing of.
                self.on_label(ROOT_LABEL, info.root, self._roots[info.root].pack())
        bit = _BITS[tier]
        if not node.where & bit:
            node.where |= bit
            self.events.stored(tier, reason, info.hash, info.parent, len(info.token_ids))

    def removed(self, tier: Tier, block_hash: bytes, reason: str) -> None:
        """A block cannot be found there any more. Nothing happens if it was not known to be there."""
        node = self._nodes.get(block_hash)
        bit = _BITS[tier]
        if node is None or not node.where & bit:
            return
        node.where &= ~bit
        if not node.where:
            del self._nodes[block_hash]
        self.events.removed(tier, reason, block_hash)

    def used(self, hashes: Iterable[bytes]) -> None:
        """A request was admitted that found these blocks."""
        now_s = self._clock()
        get = self._nodes.get
        for block_hash in hashes:
            node = get(block_hash)
            if node is not None:
                node.num_hits += 1
                node.last_use_s = now_s

    def own(self, root: bytes, owner: str, tenant: bytes) -> None:
        """Blocks below `root`, which `tenant` seeds, belong to `owner`. To be told before the first of them is stored."""
        known = self._roots.get(root)
        if known is not None and known.owner == owner:
            return
        if len(self._roots) >= self._most_roots:
            live = {node.root for node in self._nodes.values()}
            self._roots = {name: each for name, each in self._roots.items() if name in live}
            self._most_roots = max(2 * len(self._roots), _LEAST_ROOTS)
        self._roots[root] = Root(owner, tenant)

    def call(self, block_hash: bytes, name: str) -> None:
        """The prefix that ends with this block is called `name`."""
        name = name[:MAX_NAME_LENGTH]
        if self._names.get(block_hash) == name:
            return
        self._names.pop(block_hash, None)
        while len(self._names) >= MAX_NAMES:
            del self._names[next(iter(self._names))]
        self._names[block_hash] = name
        self.on_label(NAME_LABEL, block_hash, name)
