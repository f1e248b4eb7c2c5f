"""Prefill attention over the block pool: many query tokens per sequence, causal, over cached and new context.

    q       [T, heads, head_dim]            sequence s owns rows [starts[s], starts[s + 1]), the last tokens of its context
    blocks  [num_blocks, layers, 2, block_size, kv_heads, head_dim]     read in place, through strides
    tables  int32 [num_seqs, max_blocks]    row s: blocks of sequence s, in order
    lens    int32 [num_seqs]                context length, cached and new

A program computes one tile of query tokens for one key head; its rows are (token, head of the group) pairs, so keys and
values are read once per group. It walks the keys in tiles:

    keys      0 ........................ position of the first query ...... of the last query
    walk      [cut by the window |  all rows see all keys  |   on the diagonal: masked   ]

Only the outer parts pay for masks. Tiles are numbered over all sequences without the host knowing any length: tiles of s
start at number `starts[s] // tokens + s`, which leaves room for every earlier sequence; surplus programs end at once. The
softmax is the running one of FlashAttention-2 (Dao, 2023).

Knows nothing of requests or schedules. Invariants: no host-device synchronisation and no allocation when `out` is given;
the grid depends on shapes only. Slots past a context, blocks outside a table and table entries past a context are never
read, so NaN there cannot show.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tieredkv.kernels.device import device_facts
from tieredkv.kernels.launch import Tile, launch_options, padded_head_dim, prefill_tile
from tieredkv.kernels.paged_tiles import (
    INTERPRETED,
    LOG2_E,
    add_product,
    cap,
    load_block_ids,
    load_rows,
    product,
    token_offsets,
)


@triton.jit
def tile_rows(zero, first, num_queries, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token of the sequence, head of the group, whether there is such a token) of each row of a tile."""
    rows = tl.arange(0, BLOCK_M) + zero
    tokens = first + rows // GROUP
    return tokens, rows % GROUP, (rows < TOKENS * GROUP) & (tokens < num_queries)


@triton.jit
def walk_keys(
    acc,
    top,
    total,
    q,
    low,
    high,
    query_positions,
    context_len,
    window,
    scale,
    softcap,
    keys_ptr,
    table_ptr,
    stride_block,
    stride_half,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend over keys [low, high), `low` a multiple of BLOCK_N; unless MASKED every row sees every one of them."""
    # Scores are kept in units of log2, so that the exponential is one instruction.
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        factor = 1.0
    in_tile = tl.arange(0, BLOCK_N)
    block_ids = load_block_ids(table_ptr, low + in_tile, context_len, BLOCK_SIZE)
    for start in range(low, high, BLOCK_N):
        positions = tl.multiple_of(start, BLOCK_N) + in_tile
        known = positions < context_len
        offsets = token_offsets(block_ids, positions, stride_block, stride_token, BLOCK_SIZE)
        # Read a turn ahead: an address that waits for a load of its own turn would leave the pipeline one tile deep.
        block_ids = load_block_ids(table_ptr, positions + BLOCK_N, context_len, BLOCK_SIZE)
        k = load_rows(keys_ptr + offsets, known, HEAD_DIM, BLOCK_D, MASKED)
        scores = product(q, tl.trans(k), UPCAST)
        if HAS_SOFTCAP:
            scores = cap(scores * scale, softcap) * LOG2_E
        if MASKED:
            # Keys past the context are after every query, but for rows without a token; those may read the zeros.
            seen = positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                seen = seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED and HAS_WINDOW:
            # A row may have seen no key yet: keep -inf - -inf out of the exponential.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(keys_ptr + stride_half + offsets, known, HEAD_DIM, BLOCK_D, MASKED)
        acc = add_product(weights.to(v.dtype), v, acc * shrink[:, None], UPCAST)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=["layer", "num_seqs", "search_steps", "window", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr"],
)
def prefill_kernel(
    out_ptr,
    q_ptr,
    blocks_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    layer,
    num_seqs,
    search_steps,
    window,
    scale,
    softcap,
    stride_out_token,
    stride_out_head,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_layer,
    stride_half,
    stride_token,
    stride_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of query tokens of one sequence for one key head."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Masks take registers, and a narrow tile wastes less past the diagonal.
    EDGE_N: tl.constexpr = BLOCK_N // 2 if BLOCK_N > 64 else BLOCK_N
    # Late tiles see the most keys: they start first, so that the device does not wait for one of them at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.full([], 0, tl.int32)
    last = num_seqs - 1
    for _ in range(search_steps):
        middle = (seq + last + 1) // 2
        owned = tl.load(starts_ptr + middle) // TOKENS + middle <= tile
        seq = tl.where(owned, middle, seq)
        last = tl.where(owned, last, middle - 1)
    query_low = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - query_low
    first = (tile - query_low // TOKENS - seq) * TOKENS
    # Surplus tiles: past a sequence's last token, or before the first sequence when its rows begin later.
    if first >= num_queries or first < 0:
        return

    dims = tl.arange(0, BLOCK_D)
    tokens, heads, real = tile_rows(0, first, num_queries, TOKENS, GROUP, BLOCK_M)
    real = real[:, None] & (dims < HEAD_DIM)[None, :]
    heads += kv_head * GROUP
    q_rows = (query_low + tokens).to(tl.int64) * stride_q_token + heads * stride_q_head
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], real, other=0.0)

    context_len = tl.load(lens_ptr + seq)
    num_cached = context_len - num_queries
    query_positions = num_cached + tokens
    first_position = num_cached + first
    high = tl.minimum(first_position + TOKENS, context_len)
    # Before `diagonal` lie the tiles whose last key is not after the first query.
    diagonal = (first_position + 1) // BLOCK_N * BLOCK_N
    keys_ptr = blocks_ptr + layer.to(tl.int64) * stride_layer + kv_head * stride_head
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = 0
    if HAS_WINDOW:
        low = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        # From `whole` on no row's window has an edge any more.
        whole = tl.cdiv(tl.maximum(high - window, 0), BLOCK_N) * BLOCK_N
        acc, top, total = walk_keys(
            acc, top, total, q, low, tl.minimum(whole, high), query_positions, context_len, window, scale, softcap,
            keys_ptr, table_ptr, stride_block, stride_half, stride_token,
            HEAD_DIM, BLOCK_SIZE, EDGE_N, BLOCK_D, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )  # fmt: skip
    acc, top, total = walk_keys(
        acc, top, total, q, whole, diagonal, query_positions, context_len, window, scale, softcap,
        keys_ptr, table_ptr, stride_block, stride_half, stride_token,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip
    acc, top, total = walk_keys(
        acc, top, total, q, tl.maximum(whole, diagonal), high, query_positions, context_len, window, scale, softcap,
        keys_ptr, table_ptr, stride_block, stride_half, stride_token,
        HEAD_DIM, BLOCK_SIZE, EDGE_N, BLOCK_D, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
    )  # fmt: skip

    # The same rows again, from a zero that the compiler cannot know: else their numbers would take registers all along.
    zero = tl.minimum(num_queries - 1, 0)
    tokens, heads, real = tile_rows(zero, first, num_queries, TOKENS, GROUP, BLOCK_M)
    real = real[:, None] & (dims < HEAD_DIM)[None, :]
    heads += kv_head * GROUP
    out_rows = (query_low + tokens).to(tl.int64) * stride_out_token + heads * stride_out_head
    # Rows without a token of their own may have seen nothing.
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), real)


def prefill_constants(
    tile: Tile, group: int, head_dim: int, block_size: int, *, window: bool, softcap: bool, upcast: bool
) -> Mapping[str, int | bool]:
    """The compile-time arguments of `prefill_kernel`."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded_head_dim(head_dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "UPCAST": upcast,
    }


def paged_prefill(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each context, whose keys and values are already in the pool.

    q             [T, heads, head_dim], last dimension contiguous; float32, float16 or bfloat16 as the pool
    blocks        [num_blocks, layers, 2, block_size, kv_heads, head_dim]
    block_tables  int32 [num_seqs, max_blocks], rows contiguous
    context_lens  int32 [num_seqs], cached and new tokens
    query_starts  int32 [num_seqs + 1], ascending, query_starts[0] >= 0: sequence s owns rows
                  [query_starts[s], query_starts[s + 1]) of q and out. Rows outside all of them are left as they are, so
                  the prefills of a mixed batch may be given with the whole q and out and with starts that begin later.
                  An empty range (padding) is skipped. One query over a long context is computed, but slower than by decode.
    window        keys that a query sees, its own included (transformers' `sliding_window`); 0: all
    softcap       scores become softcap * tanh(score * scale / softcap) (transformers' `softcap`); 0: off
    out           [T, heads, head_dim], last dimension contiguous; made when not given
    tile          overrides the recorded launch shape, for measurements
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, _, block_size, num_kv_heads, _ = blocks.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_seqs = context_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    if tile is None:
        arch = device_facts(q.device).arch
        tile = prefill_tile(q.element_size(), head_dim, group, arch, options=window > 0 or softcap > 0)
    num_tiles = num_tokens // (tile.block_m // group) + num_seqs
    block_stride, layer_stride, half_stride, token_stride, head_stride, _ = blocks.stride()
    prefill_kernel[(num_tiles, num_kv_heads)](
        out,
        q,
        blocks,
        block_tables,
        context_lens,
        query_starts,
        layer,
        num_seqs,
        (num_seqs - 1).bit_length(),
        window,
        float(scale),
        float(softcap),
        out.stride(0),
        out.stride(1),
        q.stride(0),
        q.stride(1),
        block_stride,
        layer_stride,
        half_stride,
        token_stride,
        head_stride,
        block_tables.stride(0),
        **prefill_constants(
            tile,
            group,
            head_dim,
            block_size,
            window=window > 0,
            softcap=softcap > 0,
            upcast=INTERPRETED and q.dtype == torch.bfloat16,
        ),
        **launch_options(tile.num_warps, tile.num_stages),
    )
    return out
