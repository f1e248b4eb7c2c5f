"""Which blocks a sequence gets, which it can share, and when they become findable. Knows no tensors and no model.

Life of a sequence's blocks:

    prepare           ask the disk how much of the sequence it holds; make what matches the last to be evicted
    match     (pure)  walk the hash chain, see in which tier each block lies
    allocate          claim the hits first, then take the rest; all or nothing
    restore           bring hits of the lower tiers up, in the background
    grow              room for more tokens of a running sequence
    commit            full, computed blocks become findable, at once, also decoded ones
    release           give the blocks back, tail first; they stay findable until they are reused

Single flight: from `allocate` to `commit` (or `release`) the blocks that a sequence is about to compute are registered
under their hash, so that another one with the same prefix can wait and adopt them.

A hit may cover all tokens of a sequence. The last one is computed all the same, for its logits, against its own key and
value, which the block holds already: they are not written again.

Invariants: hits are contiguous from the first block and count for at most `num_tokens - 1` tokens; after admission
device + host + disk + computed == prompt tokens; a committed block holds what its hash says, because only tokens below
`num_computed` are committed, and it is never written to again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from tieredkv.blocks import NULL_BLOCK, BlockPool
from tieredkv.branches import Branches
from tieredkv.errors import InvariantError
from tieredkv.events import EventLog
from tieredkv.retention import Retentions
from tieredkv.sequence import Sequence
from tieredkv.tier_faces import BlockInfo
from tieredkv.tiers import Tiers
from tieredkv.types import Tier, TokenSources


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of a sequence, head first: where each block lies, and its id where that is the device
    (the null block elsewhere).
    """

    block_ids: tuple[int, ...] = ()
    tiers: tuple[Tier, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def num_ready(self) -> int:
        """Leading blocks that are on the device already."""
        return next((i for i, tier in enumerate(self.tiers) if tier is not Tier.DEVICE), len(self.tiers))

    @property
    def device_ids(self) -> list[int]:
        return [block_id for block_id in self.block_ids if block_id != NULL_BLOCK]


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did on one tier, in blocks."""

    removed: int
    in_use: int


class CacheManager:
    """The prefix cache over one device pool. Used by the engine thread alone."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        tiers: Tiers | None = None,
        clock: Callable[[], float] = time.monotonic,
        branches: Branches | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers if enable_prefix_caching else None
        self.branches = branches if branches is not None else Branches(EventLog())
        self.retentions: Retentions | None = None
        self._watch()
        self._clock = clock
        self._computing: dict[bytes, Sequence] = {}
        self._restoring: dict[int, Sequence] = {}

    def _watch(self) -> None:
        """Have every block that the tiers gain or lose told to `branches`."""
        lost_below = self.pool.on_evict

        def evicted(block_hash: bytes, block_id: int) -> None:
            if lost_below is not None:
                lost_below(block_hash, block_id)
            self.branches.removed(Tier.DEVICE, block_hash, "evicted")

        self.pool.on_evict = evicted
        if self.tiers is not None:
            self.tiers.report_to(self.branches)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def prepare(self, sequence: Sequence) -> None:
        """A sequence begins to wait: ask the disk about it, and count what it will use as used now, in every tier, so that it
        is still there when its turn comes.
        """
        if not self.enable_prefix_caching:
            return
        hashes = sequence.full_block_hashes(self.block_size)
        present = [block_id for block_id in map(self.pool.find, hashes) if block_id is not None]
        for block_id in present:
            self.pool.acquire(block_id)
        self.pool.release(present)
        if self.tiers is not None:
            self._end_lookup(sequence)
            sequence.lookup = self.tiers.look_up(hashes)

    def _end_lookup(self, sequence: Sequence) -> None:
        if sequence.lookup is not None and self.tiers is not None:
            self.tiers.forget(sequence.lookup)
        sequence.lookup = None

    def is_looking_up(self, sequence: Sequence) -> bool:
        return sequence.lookup is not None and sequence.lookup.is_pending(self._clock())

    def match(self, sequence: Sequence) -> Match:
        """The resident prefix of `sequence`, as far as bringing it up is worth it."""
        if not self.enable_prefix_caching:
            return Match()
        hashes = sequence.full_block_hashes(self.block_size)
        found: list[int] = []
        for block_hash in hashes:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        tiers = [Tier.DEVICE] * len(found)
        if self.tiers is not None and len(found) < len(hashes):
            length = sequence.lookup.length or 0 if sequence.lookup is not None else 0
            below = self.tiers.locate(hashes, len(found), length)
            for block_hash, tier in zip(hashes[len(found) :], below, strict=False):
                found.append((self.pool.find(block_hash) or NULL_BLOCK) if tier is Tier.DEVICE else NULL_BLOCK)
            tiers += below
        return Match(tuple(found), tuple(tiers))

    def next_block_in_progress(self, sequence: Sequence, match: Match) -> bytes | None:
        """The hash of the first block that is not on the device, if another sequence computes or restores it now."""
        hashes = sequence.full_block_hashes(self.block_size) if self.enable_prefix_caching else []
        # What another sequence restores or computes is worth more than restoring it a second time.
        if match.num_ready >= len(hashes):
            return None
        block_hash = hashes[match.num_ready]
        return block_hash if self.is_computing(block_hash) else None

    def is_computing(self, block_hash: bytes) -> bool:
        return block_hash in self._computing

    def can_allocate(self, match: Match, num_tokens: int, reserve: int = 0) -> bool:
        """Whether blocks for `num_tokens` are there, and `reserve` more would stay free. Changes nothing."""
        hits = match.device_ids
        resurrected = sum(map(self.pool.is_free, hits))
        return self.blocks_for(num_tokens) - len(hits) + reserve <= self.pool.num_free - resurrected

    def allocate(self, sequence: Sequence, match: Match, reserve: int = 0) -> bool:
        """Give `sequence` blocks for all its tokens, or change nothing and return False.

        Hits are claimed before anything is taken, so that taking cannot evict them. Sets `num_computed` to the hit.
        """
        if len(sequence.block_ids):
            raise InvariantError(f"{sequence} has blocks already")
        if not self.can_allocate(match, sequence.num_tokens, reserve):
            return False
        found = sequence.full_block_hashes(self.block_size)[: match.num_blocks]
        if self.enable_prefix_caching:
            self._introduce(sequence)
            self.branches.used(found)
            self._retain(sequence, found)
        if self.tiers is not None:
            self._end_lookup(sequence)
            self.tiers.use(found)
        hits = match.device_ids
        for block_id in hits:
            self.pool.acquire(block_id)
        taken = iter(self.pool.take(self.blocks_for(sequence.num_tokens) - len(hits)))
        sequence.block_ids.extend(next(taken) if block_id == NULL_BLOCK else block_id for block_id in match.block_ids)
        sequence.block_ids.extend(taken)
        sequence.num_committed_blocks = match.num_ready
        self._adopt(sequence)
        if match.num_ready == match.num_blocks:
            self._count_sources(sequence, match.tiers)
        if self.enable_prefix_caching:
            for block_hash in sequence.full_block_hashes(self.block_size)[match.num_ready :]:
                self._computing.setdefault(block_hash, sequence)
        return True

    def _adopt(self, sequence: Sequence) -> None:
        """Count what the sequence's committed blocks hold as computed, but for its last token."""
        sequence.num_computed = min(sequence.num_committed_blocks * self.block_size, sequence.num_tokens - 1)

    def _introduce(self, sequence: Sequence) -> None:
        """Say whose the sequence's blocks are, and what the client calls its prompt."""
        request = sequence.request
        self.branches.own(sequence.root_hash, request.owner, request.tenant)
        num_full = sequence.num_prompt_tokens // self.block_size
        if request.prefix_name and num_full:
            self.branches.call(sequence.full_block_hashes(self.block_size)[num_full - 1], request.prefix_name)

    def _retain(self, sequence: Sequence, found: Sequence_[bytes]) -> None:
        """Renew what is wished for the blocks that were found, and note what this request wishes for its prompt."""
        if self.retentions is not None:
            self.retentions.used(found)
            if sequence.request.retention:
                num_full = sequence.num_prompt_tokens // self.block_size
                hashes = sequence.full_block_hashes(self.block_size)[:num_full]
                self.retentions.want(hashes, sequence.request.retention)

    def start_restore(self, sequence: Sequence, match: Match) -> bool:
        """Start to bring up the blocks of an admitted sequence that lie below the device; False if there are none."""
        if self.tiers is None or match.num_ready == match.num_blocks:
            return False
        first = match.num_ready
        blocks = [
            (self._info(sequence, i), sequence.block_ids[i], match.tiers[i]) for i in range(first, match.num_blocks)
        ]
        sequence.restore = self.tiers.restore(blocks)
        self._restoring[id(sequence.restore)] = sequence
        return True

    def poll(self) -> list[Sequence]:
        """Move the lower tiers along; returns the sequences whose restore is finished, with what it brought committed."""
        resumed = []
        for restore in self.tiers.poll() if self.tiers is not None else ():
            sequence = self._restoring.pop(id(restore))
            sequence.restore = None
            first = sequence.num_committed_blocks
            usable = restore.num_usable
            tiers = [Tier.DEVICE] * first + [item.tier for item in restore.items[:usable]]
            sequence.num_computed = (first + usable) * self.block_size
            self.commit(sequence, tiers)
            self._adopt(sequence)
            self._count_sources(sequence, tiers)
            resumed.append(sequence)
        return resumed

    def _count_sources(self, sequence: Sequence, tiers: Iterable[Tier]) -> None:
        """Once per request: where its prompt's tokens come from. What a preempted sequence finds again is not counted."""
        if sequence.sources is None:
            sequence.sources = TokenSources.of_prompt(tiers, self.block_size, sequence.num_prompt_tokens)

    def _info(self, sequence: Sequence, index: int) -> BlockInfo:
        hashes = sequence.full_block_hashes(self.block_size)
        tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
        return BlockInfo(
            hash=hashes[index],
            parent=hashes[index - 1] if index else sequence.root_hash,
            depth=index,
            token_ids=tuple(tokens),
            root=sequence.root_hash,
        )

    @property
    def has_blocks_in_flight(self) -> bool:
        """Whether copies hold blocks that no sequence owns any more, perhaps."""
        return self.tiers is not None and bool(self.tiers.blocks_in_flight())

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make sure that the blocks of a running sequence cover `num_tokens`, or change nothing and return False."""
        missing = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            sequence.block_ids.extend(self.pool.take(missing))
        return True

    def commit(self, sequence: Sequence, tiers: Sequence_[Tier] | None = None) -> None:
        """Make the blocks that `num_computed` covers findable. Where another sequence was first with the same block, adopt
        that one, so that a chain of hashes is also a chain of owners. `tiers` tells where restored blocks came from.
        """
        if not self.enable_prefix_caching:
            return
        num_full = sequence.num_computed // self.block_size
        if num_full <= sequence.num_committed_blocks:
            return
        hashes = sequence.full_block_hashes(self.block_size)
        for i in range(sequence.num_committed_blocks, num_full):
            own = sequence.block_ids[i]
            holder = self.pool.commit(own, hashes[i])
            if holder == own:
                info = self._info(sequence, i)
                self.branches.stored(Tier.DEVICE, info, "computed" if tiers is None else "restored")
                if self.tiers is not None:
                    self.tiers.spiller.resident(info, on_disk=tiers is not None and tiers[i] is Tier.DISK)
            else:
                if self.tiers is not None:
                    self.tiers.spiller.used((hashes[i],))
                self.pool.acquire(holder)
                self.pool.release([own])
                sequence.block_ids[i] = holder
            if self._computing.get(hashes[i]) is sequence:
                del self._computing[hashes[i]]
        sequence.num_committed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back. The sequence can be allocated again and then finds what is still resident."""
        if sequence.restore is not None and self.tiers is not None:
            self.tiers.cancel(sequence.restore)
            del self._restoring[id(sequence.restore)]
            sequence.restore = None
        self._end_lookup(sequence)
        if self.enable_prefix_caching and len(sequence.block_ids):
            for block_hash in sequence.block_hashes[sequence.num_committed_blocks :]:
                if self._computing.get(block_hash) is sequence:
                    del self._computing[block_hash]
        self.pool.release(sequence.block_ids)
        del sequence.block_ids[:]
        sequence.num_computed = 0
        sequence.num_committed_blocks = 0

    def clear(self) -> Cleared:
        """Forget all device blocks that nobody uses."""
        gone = [block_hash for block_hash in map(self.pool.hash_of, self.pool.coldest()) if block_hash is not None]
        cleared = Cleared(*self.pool.clear())
        for block_hash in gone:
            self.branches.removed(Tier.DEVICE, block_hash, "cleared")
        if self.tiers is not None:
            self.tiers.forget_gone()
        return cleared

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount with `sequences` being all that own blocks. Raises `InvariantError`."""
        sequences = list(sequences)
        owned = [b for s in sequences for b in s.block_ids]
        if self.tiers is not None:
            owned += self.tiers.blocks_in_flight()
        self.pool.check_integrity(owned)
        for sequence in sequences:
            hashes = sequence.full_block_hashes(self.block_size)
            for i in range(sequence.num_committed_blocks):
                if self.pool.hash_of(sequence.block_ids[i]) != hashes[i]:
                    raise InvariantError(f"block {i} of {sequence} is not what its hash says")
        strangers = set(map(id, self._computing.values())) - set(map(id, sequences))
        if strangers:
            raise InvariantError("blocks are registered as being computed by sequences that own none")
        if {id(s) for s in self._restoring.values()} != {id(s) for s in sequences if s.restore is not None}:
            raise InvariantError("the restores and the sequences that wait for them disagree")
