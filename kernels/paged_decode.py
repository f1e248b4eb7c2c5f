"""Decode attention over the block pool: one query token per sequence, context split over programs, then merged.

    q       [num_seqs, heads, head_dim]
    blocks  [num_blocks, layers, 2, block_size, kv_heads, head_dim]     read in place, through strides
    tables  int32 [num_seqs, max_blocks]                                row s: blocks of sequence s, in order
    lens    int32 [num_seqs]                                            context length, the query's own token included

    program (kv head, part, sequence)       part of the context, tile by tile        partial output, log2 of its sum
      rows = the heads of the group    x    [....tile....|....tile....|..   ]   ->   merged by a second kernel

After "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023): softmax over parts is exact when each
part's output is weighted by its share of the sum. The heads that share a key head are the rows of one product, so keys
and values are read once per group.

Knows nothing of requests or schedules. Invariants: no host-device synchronisation, no allocation when `out` and
`workspace` are given, a grid fixed by shapes: a call may be captured in a CUDA graph and replayed with other contents of
the same tensors. Slots past a context, blocks outside a table and table entries past a context are never read, so NaN
there cannot show. A sequence of length 0 (padding) reads nothing and gets zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tieredkv.kernels.device import device_facts
from tieredkv.kernels.launch import DecodeLaunch, Tile, decode_launch, launch_options, padded_head_dim
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

_MERGE_PARTS = 32
MERGE_WARPS = 4


@triton.jit(
    do_not_specialize=["layer", "num_splits", "min_tiles", "window", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"],
)
def decode_kernel(
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    q_ptr,
    blocks_ptr,
    tables_ptr,
    lens_ptr,
    layer,
    num_splits,
    min_tiles,
    window,
    scale,
    softcap,
    stride_out_seq,
    stride_out_head,
    stride_q_seq,
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
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One part of one sequence's context for one key head. Key heads are neighbours in the grid and in memory."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    context_len = tl.load(lens_ptr + seq)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len - window, 0)
    first_tile = first_key // BLOCK_N
    num_tiles = tl.cdiv(context_len, BLOCK_N) - first_tile
    low = 0
    high = num_tiles
    if SPLIT:
        part_tiles = tl.maximum(tl.cdiv(num_tiles, num_splits), min_tiles)
        low = split * part_tiles
        if low >= num_tiles:
            return
        high = tl.minimum(low + part_tiles, num_tiles)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head + dims[None, :], real, other=0.0
    )

    keys_ptr = blocks_ptr + layer.to(tl.int64) * stride_layer + kv_head * stride_head
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    # Scores are kept in units of log2, so that the exponential is one instruction.
    factor = scale * LOG2_E
    if HAS_SOFTCAP:
        factor = 1.0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    in_tile = tl.arange(0, BLOCK_N)
    start = (first_tile + low) * BLOCK_N
    block_ids = load_block_ids(table_ptr, start + in_tile, context_len, BLOCK_SIZE)
    for tile in range(first_tile + low, first_tile + high):
        positions = tile * BLOCK_N + in_tile
        seen = positions < context_len
        if HAS_WINDOW:
            seen = seen & (positions >= first_key)
        offsets = token_offsets(block_ids, positions, stride_block, stride_token, BLOCK_SIZE)
        # The next tile's block ids are read a turn ahead: an address that waits for a load of its own turn would leave
        # the pipeline one tile deep.
        block_ids = load_block_ids(table_ptr, positions + BLOCK_N, context_len, BLOCK_SIZE)
        k = load_rows(keys_ptr + offsets, seen, HEAD_DIM, BLOCK_D, True)
        scores = product(q, tl.trans(k), UPCAST)
        if HAS_SOFTCAP:
            scores = cap(scores * scale, softcap) * LOG2_E
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every tile holds a key that is seen, so the new top is finite.
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(keys_ptr + stride_half + offsets, seen, HEAD_DIM, BLOCK_D, True)
        acc = add_product(weights.to(v.dtype), v, acc * shrink[:, None], UPCAST)
        top = new_top

    # An empty sequence has total 0 and acc 0: zeros, not 0 / 0.
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        part_rows = (seq * tl.num_programs(0) * GROUP + heads) * num_splits + split
        tl.store(partial_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :], out, real)
        tl.store(log_sum_ptr + part_rows, top + tl.log2(total), rows < GROUP)
    else:
        out_ptrs = out_ptr + seq.to(tl.int64) * stride_out_seq + heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), real)


@triton.jit(
    do_not_specialize=["num_splits", "min_tiles", "window"],
    do_not_specialize_on_alignment=["lens_ptr"],
)
def merge_kernel(
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    lens_ptr,
    num_splits,
    min_tiles,
    window,
    stride_out_seq,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Weighted sum of the parts of one head of one sequence. Only parts that were computed are read."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    context_len = tl.load(lens_ptr + seq)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(context_len - window, 0) // BLOCK_N
    num_tiles = tl.cdiv(context_len, BLOCK_N) - first_tile
    part_tiles = tl.maximum(tl.cdiv(num_tiles, num_splits), min_tiles)
    num_parts = tl.cdiv(num_tiles, part_tiles)

    dims = tl.arange(0, BLOCK_D)
    first_row = (seq * tl.num_programs(0) + head) * num_splits
    # Finite, so that no difference of two infinities can arise; far below any real score.
    top = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for low in range(0, num_parts, BLOCK_S):
        parts = low + tl.arange(0, BLOCK_S)
        here = parts < num_parts
        log_sums = tl.load(log_sum_ptr + first_row + parts, here, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (first_row + parts)[:, None] * HEAD_DIM + dims[None, :],
            here[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
        top = new_top
    out = acc / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + seq.to(tl.int64) * stride_out_seq + head * stride_out_head + dims
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), dims < HEAD_DIM)


def decode_constants(
    tile: Tile, group: int, head_dim: int, block_size: int, *, window: bool, softcap: bool, split: bool, upcast: bool
) -> Mapping[str, int | bool]:
    """The compile-time arguments of `decode_kernel`."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded_head_dim(head_dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "SPLIT": split,
        "UPCAST": upcast,
    }


def merge_constants(tile: Tile, head_dim: int, *, window: bool) -> Mapping[str, int | bool]:
    """The compile-time arguments of `merge_kernel`."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_S": _MERGE_PARTS,
        "HAS_WINDOW": window,
    }


def launch_for(q: torch.Tensor, num_kv_heads: int, max_context: int, num_splits: int | None = None) -> DecodeLaunch:
    """The launch of a decode of `q` [num_seqs, heads, head_dim] on its device; cached, cheap to ask again."""
    num_seqs, num_heads, head_dim = q.shape
    num_sms = device_facts(q.device).num_sms
    return decode_launch(
        q.element_size(), num_seqs, num_heads, num_kv_heads, head_dim, max_context, num_sms, num_splits
    )


def paged_decode(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    launch: DecodeLaunch | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V of each sequence over its own context, in layer `layer`.

    q             [num_seqs, heads, head_dim], last dimension contiguous; float32, float16 or bfloat16 as the pool
    blocks        [num_blocks, layers, 2, block_size, kv_heads, head_dim]
    block_tables  int32 [num_seqs, max_blocks], rows contiguous
    context_lens  int32 [num_seqs], each at most max_blocks * block_size; 0 gives zeros
    window        keys that a query sees, its own included (transformers' `sliding_window`); 0: all
    softcap       scores become softcap * tanh(score * scale / softcap) (transformers' `softcap`); 0: off
    out           [num_seqs, heads, head_dim], last dimension contiguous; made when not given
    workspace     float32, contiguous, at least `launch.workspace_numel` numbers; contents mean nothing before and after
    launch        from `launch_for(q, kv_heads, max_context)`; by default for max_context = max_blocks * block_size

    For a CUDA graph give `out`, `workspace` and `launch`, made once per padded batch size; one workspace of the largest
    size may serve all graphs and all layers of one stream.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, _, _, block_size, num_kv_heads, _ = blocks.shape
    if launch is None:
        launch = launch_for(q, num_kv_heads, block_tables.shape[1] * block_size)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    splits = launch.num_splits
    num_parts = num_seqs * num_heads * splits
    partial = log_sums = out
    if splits > 1:
        if workspace is None:
            workspace = torch.empty(launch.workspace_numel, dtype=torch.float32, device=q.device)
        partial, log_sums = workspace, workspace[num_parts * head_dim :]
    tile, upcast = launch.tile, INTERPRETED and q.dtype == torch.bfloat16
    block_stride, layer_stride, half_stride, token_stride, head_stride, _ = blocks.stride()
    decode_kernel[(num_kv_heads, splits, num_seqs)](
        out,
        partial,
        log_sums,
        q,
        blocks,
        block_tables,
        context_lens,
        layer,
        splits,
        launch.min_tiles,
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
        **decode_constants(
            tile,
            num_heads // num_kv_heads,
            head_dim,
            block_size,
            window=window > 0,
            softcap=softcap > 0,
            split=splits > 1,
            upcast=upcast,
        ),
        **launch_options(tile.num_warps, tile.num_stages),
    )
    if splits > 1:
        merge_kernel[(num_heads, num_seqs)](
            out,
            partial,
            log_sums,
            context_lens,
            splits,
            launch.min_tiles,
            window,
            out.stride(0),
            out.stride(1),
            **merge_constants(tile, head_dim, window=window > 0),
            **launch_options(MERGE_WARPS),
        )
    return out
