"""The arrays that one forward pass needs, built once per step from the scheduler's decision. Knows numpy, not torch.

All new tokens of all sequences lie flattened in one row of T tokens; sequence s owns `[query_starts[s], query_starts[s+1])`.
Sequences with one new token (decodes) come first, so `num_decodes` of them can go through the decode kernel together.

    token_ids      | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |      T = 9
    query_starts     0    1    2    3             7       9

A token whose block is committed already, so that only its logits are wanted, has its slot in the null block.

Invariants: every other slot belongs to a block of the sequence that owns the token, and slots of different tokens differ.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieredkv.blocks import NULL_BLOCK
from tieredkv.sequence import ScheduledSequence
from tieredkv.types import TokenLogprob


@dataclass(slots=True)
class Batch:
    """One forward pass over S sequences and T new tokens.

    token_ids      int64 [T]
    positions      int64 [T]    position of each token in its sequence
    slots          int64 [T]    block_id * block_size + offset: where the token's key and value go (block 0: nowhere)
    query_starts   int32 [S+1]  prefix sums of the numbers of new tokens
    context_lens   int32 [S]    tokens of each sequence after this step, cached and new
    block_tables   int32 [S, max_blocks]  block ids, padded with 0 (the null block)
    logits_indices int64 [N]    rows of the T tokens whose logits are needed, in the order of `sampled`
    sampled        the N sequences that get a new token
    num_decodes    how many of the leading sequences have exactly one new token
    """

    scheduled: Seq[ScheduledSequence]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logits_indices: NDArray[np.int64]
    sampled: list[ScheduledSequence]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence, with its log-probabilities when the request asked for them."""

    token_id: int
    logprob: TokenLogprob | None = None


def build_batch(scheduled: Seq[ScheduledSequence], block_size: int) -> Batch:
    """Lay out one step. `scheduled` is not empty and has its decodes first."""
    num = len(scheduled)
    lens = np.fromiter((s.num_new for s in scheduled), dtype=np.int32, count=num)
    query_starts = np.zeros(num + 1, dtype=np.int32)
    np.cumsum(lens, out=query_starts[1:])
    total = int(query_starts[-1])
    context_lens = np.fromiter((s.end for s in scheduled), dtype=np.int32, count=num)
    num_blocks = -(-context_lens // block_size)
    block_tables = np.zeros((num, int(num_blocks.max())), dtype=np.int32)
    token_ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    sampled: list[ScheduledSequence] = []
    logits_indices: list[int] = []
    num_decodes = 0
    for i, part in enumerate(scheduled):
        sequence, low, high = part.sequence, query_starts[i], query_starts[i + 1]
        table = np.frombuffer(sequence.block_ids, dtype=np.int32, count=int(num_blocks[i]))
        block_tables[i, : len(table)] = table
        if part.num_new == 1:
            token_ids[low] = sequence.token_ids[part.start]
            positions[low] = part.start
        else:
            token_ids[low:high] = sequence.token_ids[part.start : part.end]
            positions[low:high] = np.arange(part.start, part.end)
        if part.num_new == 1 and num_decodes == i:
            num_decodes += 1
        if part.samples:
            sampled.append(part)
            logits_indices.append(int(high) - 1)
    rows = np.repeat(np.arange(num), lens)
    blocks = positions // block_size
    committed = np.fromiter((s.sequence.num_committed_blocks for s in scheduled), dtype=np.int64, count=num)
    # Findable blocks are shared and may be copied at any time: nothing is written to them.
    writable = np.where(blocks < committed[rows], NULL_BLOCK, block_tables[rows, blocks])
    slots = writable.astype(np.int64) * block_size + positions % block_size
    return Batch(
        scheduled=scheduled,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        logits_indices=np.asarray(logits_indices, dtype=np.int64),
        sampled=sampled,
        num_decodes=num_decodes,
    )
