"""The prefix tree over all tiers, a page at a time.

    device, host   a snapshot of `Branches`                      --\\
    disk           one read transaction, walked by a cursor      --/--> union --> branches, in the order of their ids

A *branch* is the run of blocks from a fork (or the root) to the next fork or a leaf; its last block's hash is its id. So a
branch ends at every block of the union whose number of children is not one. Ids are hashes: their order means nothing, but
it stays, so a list that is read page by page misses no branch that was there all the time and names none twice.

Knows hashes, rows and nodes; no engine. Runs in a thread that may take its time, and yet takes little: a page reads at most
`MAX_READS` blocks, whatever the store holds and the filters let through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredkv import hashing
from tieredkv.branches import NAME_LABEL, ROOT_LABEL, Node, Root, Snapshot
from tieredkv.reports import BlockReport, PrefixReport
from tieredkv.storage.listing import StoreListing
from tieredkv.storage.rows import Row
from tieredkv.storage.tier import NEVER
from tieredkv.tier_faces import LOADING, BlockInfo
from tieredkv.types import Tier

MAX_READS = 20_000
"""Blocks looked at for one page; about a tenth of a second's work."""
READS_PER_REPORT = 8
"""What describing a branch takes, in blocks looked at."""
MAX_TO_COUNT = 10_000
"""Blocks up to which all branches are counted for every page, unless that takes `MAX_READS`."""
WORDS_OF_TOKENS = 12
UNKNOWN_OWNER = "unknown"

Decode = Callable[[Sequence[int]], str]
Accept = Callable[[PrefixReport], bool]


@dataclass(frozen=True, slots=True)
class View:
    """What the engine thread knows at one moment, for another thread. `pins` has the ids of the pins by block, `in_flight` the
    states of blocks that are on their way into a tier, `coming` those of them that requests bring up.
    """

    blocks: Snapshot
    pins: Mapping[bytes, Sequence[str]]
    in_flight: Mapping[bytes, Mapping[Tier, str]]
    coming: Sequence[BlockInfo]
    block_nbytes: int


@dataclass(slots=True)
class Page:
    """`next_start` continues the list, None at its end; `num_total` is None where it was not counted."""

    prefixes: list[PrefixReport]
    next_start: bytes | None = None
    num_total: int | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of the union."""

    node: Node | None
    row: Row | None

    @property
    def parent(self) -> bytes:
        return self.node.parent if self.node is not None else self._stored.parent

    @property
    def depth(self) -> int:
        return self.node.depth if self.node is not None else self._stored.depth

    @property
    def root(self) -> bytes:
        return self.node.root if self.node is not None else self._stored.root

    @property
    def token_ids(self) -> Sequence[int]:
        if self.node is not None:
            return self.node.token_ids
        return hashing.unpack_tokens(self._stored.token_ids)

    @property
    def last_use_s(self) -> float:
        near = self.node.last_use_s if self.node is not None else 0.0
        return max(near, self.row.last_use_us / 1e6 if self.row is not None else 0.0)

    @property
    def priority(self) -> int | None:
        return None if self.row is None else self.row.priority

    @property
    def expires_s(self) -> float | None:
        return None if self.row is None or self.row.expires_us == NEVER else self.row.expires_us / 1e6

    @property
    def num_hits(self) -> int:
        return 0 if self.node is None else self.node.num_hits

    def tiers(self) -> list[Tier]:
        near = [tier for tier in (Tier.DEVICE, Tier.HOST) if self.node is not None and self.node.is_in(tier)]
        return near if self.row is None else [*near, Tier.DISK]

    def nbytes(self, block_nbytes: int) -> int:
        return sum(self._stored.cost_nbytes if tier is Tier.DISK else block_nbytes for tier in self.tiers())

    @property
    def _stored(self) -> Row:
        if self.row is None:
            raise KeyError("a block that lies nowhere")
        return self.row


@dataclass(frozen=True, slots=True)
class Branch:
    """Its own blocks, head first, and what it continues."""

    hashes: list[bytes]
    blocks: list[_Block]
    parent: bytes | None
    num_children: int


class PrefixTree:
    """The union of a view and a listing, while both last. `decode` turns token ids into text, None keeps text private."""

    def __init__(self, view: View, listing: StoreListing | None, decode: Decode | None = None) -> None:
        self._view = view
        self._nodes = view.blocks.nodes
        self._listing = listing
        self._decode = decode
        self._children: dict[bytes, list[bytes]] = {}
        for node in self._nodes.values():
            if node.depth:
                self._children.setdefault(node.parent, []).append(node.hash)
        self._roots: dict[bytes, Root | None] = {}
        self.num_reads = 0

    # -- pages ---------------------------------------------------------------------------------------------------------

    def page(self, start: bytes, limit: int, accept: Accept) -> Page:
        """Up to `limit` branches from id `start` on that `accept` takes."""
        num_blocks = len(self._nodes) + (self._listing.num_blocks if self._listing is not None else 0)
        page = self._page(start, limit, accept, counts=True) if num_blocks <= MAX_TO_COUNT else None
        return page or self._page(start, limit, accept, counts=False) or Page([])

    def _page(self, start: bytes, limit: int, accept: Accept, *, counts: bool) -> Page | None:
        """The page, counting all branches or none; None if counting them takes too long."""
        self.num_reads, page, num_total = 0, Page([]), 0
        for block_hash, num_children in self._walk(b"" if counts else start):
            if counts and self.num_reads > MAX_READS:
                return None
            if not counts and (len(page.prefixes) >= limit or (self.num_reads > MAX_READS and block_hash > start)):
                page.next_start = block_hash
                return page
            if num_children is None or num_children == 1:
                continue
            branch = self.branch(block_hash)
            if branch is None:
                continue
            report = self.report(branch)
            self.num_reads += READS_PER_REPORT
            if not accept(report):
                continue
            num_total += 1
            if len(page.prefixes) < limit and block_hash >= start:
                page.prefixes.append(report)
            elif page.next_start is None and block_hash >= start:
                page.next_start = block_hash
        page.num_total = num_total if counts else None
        return page

    def _walk(self, start: bytes) -> Iterator[tuple[bytes, int | None]]:
        """Blocks from `start` on, in order, with the number of their children in the union; of those that only lie on the
        device or in the host tier, those alone at which a branch ends.
        """
        near = sorted(h for h in self._nodes if h >= start and len(self._children.get(h, ())) != 1)
        at = 0
        for key, num_children in self._listing.scan(start) if self._listing is not None else ():
            while at < len(near) and near[at] < key:
                yield near[at], len(self._children.get(near[at], ()))
                at += 1
            if num_children is not None:
                at += at < len(near) and near[at] == key
                yield key, num_children + self._num_only_near(key)
            else:
                yield key, None
            self.num_reads += 1
        for key in near[at:]:
            yield key, len(self._children.get(key, ()))

    def _num_only_near(self, block_hash: bytes) -> int:
        children = self._children.get(block_hash)
        if not children:
            return 0
        return sum(self._listing is None or child not in self._listing for child in children)

    # -- single branches and blocks ------------------------------------------------------------------------------------

    def _find(self, block_hash: bytes) -> _Block | None:
        self.num_reads += 1
        node = self._nodes.get(block_hash)
        row = self._listing.row(block_hash) if self._listing is not None else None
        return None if node is None and row is None else _Block(node, row)

    def _num_children(self, block_hash: bytes, block: _Block) -> int:
        if block.row is None:
            return len(self._children.get(block_hash, ()))
        return block.row.num_children + self._num_only_near(block_hash)

    def branch(self, block_hash: bytes) -> Branch | None:
        """The branch up to this block, be it the branch's end or not; None if the block lies nowhere."""
        block = self._find(block_hash)
        return None if block is None else self._branch(block_hash, block)

    def _branch(self, last: bytes, block: _Block) -> Branch:
        """Walks up from `last`, one look at each block."""
        num_children = self._num_children(last, block)
        hashes, blocks, parent = [last], [block], None
        while block.depth:
            above = self._find(block.parent)
            if above is None:
                # The blocks before these have gone; what is left cannot be hit, but it is there.
                break
            if self._num_children(block.parent, above) != 1:
                parent = block.parent
                break
            hashes.append(block.parent)
            blocks.append(above)
            block = above
        return Branch(hashes[::-1], blocks[::-1], parent, num_children)

    def about(self, root: bytes) -> Root | None:
        """What is known of a root."""
        if root not in self._roots:
            found = self._view.blocks.roots.get(root)
            if found is None and self._listing is not None:
                label = self._listing.label(ROOT_LABEL, root)
                found = None if label is None else Root.unpack(label)
            self._roots[root] = found
        return self._roots[root]

    def owner(self, root: bytes) -> str:
        about = self.about(root)
        return UNKNOWN_OWNER if about is None else about.owner

    def roots_of(self, owner: str) -> set[bytes]:
        """The roots of an owner's chains, one per cache salt."""
        stored = self._listing.labels(ROOT_LABEL) if self._listing is not None else {}
        roots = {root: Root.unpack(label) for root, label in stored.items()} | dict(self._view.blocks.roots)
        return {root for root, about in roots.items() if about is not None and about.owner == owner}

    def token_ids(self, block_hash: bytes) -> list[int] | None:
        """All tokens from the root to the end of this block; None if some of its chain lies nowhere."""
        parts: list[Sequence[int]] = []
        at = block_hash
        while (block := self._find(at)) is not None:
            parts.append(block.token_ids)
            if not block.depth:
                return [token_id for part in reversed(parts) for token_id in part]
            at = block.parent
        return None

    def root(self, block_hash: bytes) -> bytes:
        """The root of a block's chain. Raises `KeyError` if the block lies nowhere."""
        block = self._find(block_hash)
        if block is None:
            raise KeyError(block_hash.hex())
        return block.root

    def is_stored(self, block_hash: bytes) -> bool:
        """Whether the block is on disk."""
        return self._listing is not None and block_hash in self._listing

    def is_loading(self, block_hash: bytes) -> bool:
        """Whether the block is being read from disk."""
        return self._view.in_flight.get(block_hash, {}).get(Tier.HOST) == LOADING

    def near(self, roots: Collection[bytes] | None, below: bytes | None) -> list[bytes]:
        """Blocks on the device, in the host tier or on their way there, children before parents: all; those of some `roots`;
        or the block `below` and what lies behind it.
        """
        found: dict[bytes, tuple[int, bytes, bytes]] = {
            info.hash: (info.depth, info.parent, info.root) for info in self._view.coming
        }
        found.update((node.hash, (node.depth, node.parent, node.root)) for node in self._nodes.values())
        hashes = sorted(found, key=lambda h: found[h][0])
        if below is not None:
            chosen = {below}
            for block_hash in hashes:
                if found[block_hash][1] in chosen:
                    chosen.add(block_hash)
            hashes = [h for h in hashes if h in chosen]
        elif roots is not None:
            hashes = [h for h in hashes if found[h][2] in roots]
        return hashes[::-1]

    def _name(self, hashes: Sequence[bytes]) -> str | None:
        for block_hash in reversed(hashes):
            name = self._view.blocks.names.get(block_hash)
            if name is None and self._listing is not None:
                name = self._listing.label(NAME_LABEL, block_hash)
            if name is not None:
                return name
        return None

    def report(self, branch: Branch) -> PrefixReport:
        blocks = branch.blocks
        first, last = blocks[0], blocks[-1]
        by_tier = dict.fromkeys(Tier, 0)
        pins: dict[str, None] = {}
        for block_hash, block in zip(branch.hashes, blocks, strict=True):
            for tier in block.tiers():
                by_tier[tier] += 1
            pins.update(dict.fromkeys(self._view.pins.get(block_hash, ())))
        block_size = len(last.token_ids)
        priorities = [block.priority for block in blocks if block.priority is not None]
        expiries = [block.expires_s for block in blocks if block.expires_s is not None]
        return PrefixReport(
            id=branch.hashes[-1].hex(),
            parent=None if branch.parent is None else branch.parent.hex(),
            tenant=self.owner(last.root),
            name=self._name(branch.hashes),
            depth=first.depth,
            num_tokens=(last.depth + 1) * block_size,
            num_own_tokens=len(blocks) * block_size,
            num_blocks=len(blocks),
            num_children=branch.num_children,
            blocks_by_tier=by_tier,
            nbytes=sum(block.nbytes(self._view.block_nbytes) for block in blocks),
            last_use_s=max(block.last_use_s for block in blocks),
            num_hits=max(block.num_hits for block in blocks),
            pins=list(pins),
            priority=max(priorities, default=None),
            expires_s=max(expiries, default=None),
            first_words=self._words(blocks, from_end=False),
            last_words=self._words(blocks, from_end=True),
        )

    def _words(self, blocks: Sequence[_Block], *, from_end: bool) -> str | None:
        """The text at the beginning or the end of some blocks."""
        if self._decode is None:
            return None
        num_blocks = -(-WORDS_OF_TOKENS // len(blocks[-1].token_ids))
        some = blocks[-num_blocks:] if from_end else blocks[:num_blocks]
        token_ids = [token_id for block in some for token_id in block.token_ids]
        return self._decode(token_ids[-WORDS_OF_TOKENS:] if from_end else token_ids[:WORDS_OF_TOKENS])

    def block(self, block_hash: bytes) -> BlockReport | None:
        """One block, its tokens only where text may be shown; `inspection.complete` adds its uses."""
        block = self._find(block_hash)
        if block is None:
            return None
        states = dict.fromkeys(block.tiers(), "ready")
        for tier, state in self._view.in_flight.get(block_hash, {}).items():
            states.setdefault(tier, state)
        return BlockReport(
            hash=block_hash.hex(),
            parent=block.parent.hex(),
            tenant=self.owner(block.root),
            depth=block.depth,
            num_tokens=len(block.token_ids),
            tiers=states,
            nbytes=block.nbytes(self._view.block_nbytes),
            ref_count=0,
            num_pins=len(self._view.pins.get(block_hash, ())),
            num_hits=block.num_hits,
            priority=block.priority,
            last_use_s=block.last_use_s,
            expires_s=block.expires_s,
            token_ids=None if self._decode is None else list(block.token_ids),
        )
