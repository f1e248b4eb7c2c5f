"""Which blocks a sequence gets, which it can share, and when they become findable. Knows no tensors and no model.

Life of a sequence's blocks:

    match     (pure)  walk the hash chain, count what is resident
    allocate          claim the hits first, then take the rest; all or nothing
    grow              room for more tokens of a running sequence
    commit            full, computed blocks become findable, at once, also decoded ones
    release           give the blocks back, tail first; they stay findable until they are reused

Single flight: from `allocate` to `commit` (or `release`) the blocks that a sequence is about to compute are registered
under their hash, so that another one with the same prefix can wait and adopt them.

Invariants: hits are contiguous from the first block and at most `num_tokens - 1` tokens; after admission
device + host + disk + computed == prompt tokens; a committed block holds what its hash says, because only tokens below
`num_computed` are committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tieredkv.blocks import BlockPool
from tieredkv.errors import InvariantError
from tieredkv.sequence import Sequence
from tieredkv.types import TokenSources


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of a sequence: device block ids, head first."""

    block_ids: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did on one tier, in blocks."""

    removed: int
    in_use: int


class CacheManager:
    """The prefix cache over one device pool. Used by the engine thread alone."""

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._computing: dict[bytes, Sequence] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence) -> Match:
        """The resident prefix of `sequence`, at most `num_tokens - 1` tokens of it: the last token's logits are needed."""
        if not self.enable_prefix_caching:
            return Match()
        usable = (sequence.num_tokens - 1) // self.block_size
        found = []
        for block_hash in sequence.full_block_hashes(self.block_size)[:usable]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return Match(tuple(found))

    def next_block_in_progress(self, sequence: Sequence, match: Match) -> bytes | None:
        """The hash of the first block after `match`, if another sequence computes it now and `sequence` could use it."""
        if not self.enable_prefix_caching or match.num_blocks >= (sequence.num_tokens - 1) // self.block_size:
            return None
        block_hash = sequence.full_block_hashes(self.block_size)[match.num_blocks]
        return block_hash if self.is_computing(block_hash) else None

    def is_computing(self, block_hash: bytes) -> bool:
        return block_hash in self._computing

    def can_allocate(self, match: Match, num_tokens: int, reserve: int = 0) -> bool:
        """Whether blocks for `num_tokens` are there, and `reserve` more would stay free. Changes nothing."""
        resurrected = sum(self.pool.is_free(b) for b in match.block_ids)
        return self.blocks_for(num_tokens) - match.num_blocks + reserve <= self.pool.num_free - resurrected

    def allocate(self, sequence: Sequence, match: Match, reserve: int = 0) -> bool:
        """Give `sequence` blocks for all its tokens, or change nothing and return False.

        Hits are claimed before anything is taken, so that taking cannot evict them. Sets `num_computed` to the hit.
        """
        if len(sequence.block_ids):
            raise InvariantError(f"{sequence} has blocks already")
        if not self.can_allocate(match, sequence.num_tokens, reserve):
            return False
        for block_id in match.block_ids:
            self.pool.acquire(block_id)
        sequence.block_ids.extend(match.block_ids)
        sequence.block_ids.extend(self.pool.take(self.blocks_for(sequence.num_tokens) - match.num_blocks))
        sequence.num_computed = match.num_blocks * self.block_size
        sequence.num_committed_blocks = match.num_blocks
        if sequence.sources is None:
            hit = sequence.num_computed
            sequence.sources = TokenSources(device=hit, computed=sequence.num_prompt_tokens - hit)
        if self.enable_prefix_caching:
            for block_hash in sequence.full_block_hashes(self.block_size)[match.num_blocks :]:
                self._computing.setdefault(block_hash, sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make sure that the blocks of a running sequence cover `num_tokens`, or change nothing and return False."""
        missing = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            sequence.block_ids.extend(self.pool.take(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Make the blocks that `num_computed` covers findable. Where another sequence was first with the same block, adopt
        that one, so that a chain of hashes is also a chain of owners.
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
            if holder != own:
                self.pool.acquire(holder)
                self.pool.release([own])
                sequence.block_ids[i] = holder
            if self._computing.get(hashes[i]) is sequence:
                del self._computing[hashes[i]]
        sequence.num_committed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back. The sequence can be allocated again and then finds what is still resident."""
        if self.enable_prefix_caching and len(sequence.block_ids):
            for block_hash in sequence.block_hashes[sequence.num_committed_blocks :]:
                if self._computing.get(block_hash) is sequence:
                    del self._computing[block_hash]
        self.pool.release(sequence.block_ids)
        del sequence.block_ids[:]
        sequence.num_computed = 0
        sequence.num_committed_blocks = 0

    def clear(self) -> Cleared:
        """Forget all blocks that nobody uses."""
        return Cleared(*self.pool.clear())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount with `sequences` being all that own blocks. Raises `InvariantError`."""
        sequences = list(sequences)
        self.pool.check_integrity(b for s in sequences for b in s.block_ids)
        for sequence in sequences:
            hashes = sequence.full_block_hashes(self.block_size)
            for i in range(sequence.num_committed_blocks):
                if self.pool.hash_of(sequence.block_ids[i]) != hashes[i]:
                    raise InvariantError(f"block {i} of {sequence} is not what its hash says")
        strangers = set(map(id, self._computing.values())) - set(map(id, sequences))
        if strangers:
            raise InvariantError("blocks are registered as being computed by sequences that own none")
