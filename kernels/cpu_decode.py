"""Attention of single queries over the block pool in place: no block is copied before it is read.

One item of work is one sequence, one key head and some of the query heads that share it. Contexts are read 16 tokens at
a time, which lie in one block:

    scores [16]   16 dot products, their lanes summed in a tree of shuffles that leaves one score in each lane
    softmax       with a running maximum and sum, as in Milakov and Gimelshein, "Online normalizer calculation", 2018
    values        rows of two tokens interleaved, so that one bfloat16 dot product adds both

Knows nothing of requests. Invariants: only blocks that hold a part of the context (or of its window) are read; slots of
its last block past the context have weight zero and must hold finite numbers. Weights are rounded to bfloat16, sums are
float32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tieredkv.kernels import cpu_jit
from tieredkv.kernels.cpu_jit import LANES, Emitter, Value, floats, i64

logger = logging.getLogger(__name__)

# Registers that hold the weighted sums of values.
_MOST_SUMS = 16
_MOST_HEAD_DIM = 256


@functools.cache
def can_run(head_dim: int, group: int, block_size: int) -> bool:
    """Whether the kernel serves `group` query heads to a key head and compiles here."""
    if head_dim % (2 * LANES) or head_dim > _MOST_HEAD_DIM or block_size % LANES or not cpu_jit.is_available():
        return False
    try:
        _kernel(head_dim, group, block_size)
    except Exception as error:
        # Another LLVM, another libffi: whatever is in the way, the path through torch serves.
        logger.warning("no attention of our own on this CPU: %s", error)
        return False
    return True


def paged_decode(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """See `reference.paged_decode`: q bfloat16 [B, heads, head_dim], heads of one query contiguous; block_tables int32 [B, N]
    and context_lens int32 [B], both contiguous."""
    batch, heads, dim = q.shape
    _, num_layers, _, block_size, kv_heads, _ = blocks.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    out = torch.empty((batch, heads, dim), dtype=q.dtype)
    half_nbytes = block_size * kv_heads * dim * 2
    _kernel(dim, heads // kv_heads, block_size)(
        q.data_ptr(),
        q.stride(0) * 2,
        blocks.data_ptr() + layer * 2 * half_nbytes,
        num_layers * 2 * half_nbytes,
        half_nbytes,
        block_tables.ctypes.data,
        block_tables.shape[1],
        context_lens.ctypes.data,
        out.data_ptr(),
        batch,
        kv_heads,
        window,
        scale,
    )
    return out


@functools.cache
def _kernel(dim: int, group: int, block_size: int) -> Callable[..., None]:
    """The kernel for heads of `dim` numbers, `group` query heads to a key head, and blocks of `block_size` tokens."""
    # Query heads of one item: as many as divide the group and have their sums in registers.
    width = max(
        n for n in range(1, group + 1) if group % n == 0 and n * (dim // LANES) <= max(_MOST_SUMS, dim // LANES)
    )

    def write(e: Emitter, arguments: list[Value], thread: Value, team: Value) -> None:
        kv_heads, batch = arguments[10], arguments[9]
        low, high = e.share(e.mul(batch, kv_heads, i64(group // width)), thread, team)
        weights = e.stack(width)
        e.loop(low, high, 1, lambda item, _: _write_item(e, arguments, item, weights, dim, group, width, block_size))

    return cpu_jit.compile_kernel("decode", [cpu_jit.I64] * 12 + [cpu_jit.F64], write)


def _write_item(
    e: Emitter, arguments: list[Value], item: Value, weights: Value, dim: int, group: int, width: int, block_size: int
) -> None:
    b = e.b
    (q_at, q_stride, layer_at, block_nbytes, half_nbytes, tables_at, table_len, lens_at, out_at, _, kv_heads) = (
        arguments[:11]
    )
    window, scale = arguments[11:]
    q, layer, tables, lens, out = (b.inttoptr(at, cpu_jit.PTR) for at in (q_at, layer_at, tables_at, lens_at, out_at))
    parts = i64(group // width)
    sequence, rest = b.sdiv(item, e.mul(kv_heads, parts)), b.srem(item, e.mul(kv_heads, parts))
    kv_head, first_head = b.sdiv(rest, parts), e.mul(rest, i64(width))
    row_nbytes, head_nbytes = e.mul(kv_heads, i64(2 * dim)), 2 * dim
    q = e.at(q, e.add(e.mul(sequence, q_stride), e.mul(first_head, i64(head_nbytes))))
    queries = [
        [e.load(cpu_jit.PAIRS, e.at(q, i64(head * head_nbytes + 64 * part))) for part in range(dim // 32)]
        for head in range(width)
    ]
    table = e.at(tables, e.mul(sequence, table_len, i64(4)))
    length = b.sext(e.load(cpu_jit.I32, e.at(lens, e.mul(sequence, i64(4))), 4), cpu_jit.I64)
    begin = b.sub(length, window)
    begin = b.select(b.and_(b.icmp_signed(">", window, i64(0)), b.icmp_signed(">", begin, i64(0))), begin, i64(0))
    factor = e.splat(b.fptrunc(scale, cpu_jit.F32), cpu_jit.FLOATS)
    numbers = cpu_jit.constant(cpu_jit.INTS, list(range(LANES)))
    first, last = (e.splat(b.trunc(v, cpu_jit.I32), cpu_jit.INTS) for v in (begin, length))

    def keys_at(token: Value) -> Value:
        """Where the key of `token`, the first of 16, lies in the pool."""
        block = e.load(cpu_jit.I32, e.at(table, e.mul(b.sdiv(token, i64(block_size)), i64(4))), 4)
        offset = e.mul(b.srem(token, i64(block_size)), row_nbytes)
        inside = e.add(offset, e.mul(kv_head, i64(head_nbytes)))
        return e.at(layer, e.add(e.mul(b.sext(block, cpu_jit.I64), block_nbytes), inside))

    def sixteen(token: Value, state: list[Value]) -> list[Value]:
        keys = keys_at(token)
        values = e.at(keys, half_nbytes)
        coming = e.add(token, i64(LANES))
        upcoming = keys_at(b.select(b.icmp_signed("<", coming, length), coming, token))
        for row in range(LANES):
            for line in range(0, head_nbytes, 64):
                place = e.at(upcoming, e.add(e.mul(row_nbytes, i64(row)), i64(line)))
                e.prefetch(place)
                e.prefetch(e.at(place, half_nbytes))
        at = b.add(e.splat(b.trunc(token, cpu_jit.I32), cpu_jit.INTS), numbers)
        seen = b.and_(b.icmp_signed("<", at, last), b.icmp_signed(">=", at, first))
        tops, totals, sums = state[:width], state[width : 2 * width], state[2 * width :]
        per_head = len(sums) // width
        new_tops, new_totals, new_sums = [], [], []
        for head, products in enumerate(_scores(e, keys, row_nbytes, queries, 0, LANES)):
            scores = b.select(seen, b.fmul(products, factor), floats(-3e38))
            top = e.call("llvm.maxnum.f32", cpu_jit.F32, tops[head], e.largest(scores))
            fading = e.exp(e.splat(b.fsub(tops[head], top), cpu_jit.FLOATS))
            weight = b.select(seen, e.exp(b.fsub(scores, e.splat(top, cpu_jit.FLOATS))), floats(0.0))
            e.store_halves(weight, e.at(weights, i64(64 * head)))
            new_tops.append(top)
            new_totals.append(b.fadd(b.fmul(totals[head], fading), weight))
            new_sums += [b.fmul(part, fading) for part in sums[head * per_head : (head + 1) * per_head]]
        _add_values(e, values, row_nbytes, weights, new_sums, per_head)
        return [*new_tops, *new_totals, *new_sums]

    start = [cpu_jit.constant(cpu_jit.F32, -3e38)] * width + [floats(0.0)] * (width + width * (dim // LANES))
    aligned = b.and_(begin, i64(-LANES))
    end = e.loop(aligned, length, LANES, sixteen, start)
    out = e.at(out, e.mul(e.add(e.mul(sequence, kv_heads, i64(group)), first_head), i64(head_nbytes)))
    for head in range(width):
        total = e.splat(e.sum(end[width + head]), cpu_jit.FLOATS)
        for part in range(dim // LANES):
            place = e.at(out, i64(head * head_nbytes + 32 * part))
            e.store_halves(b.fdiv(end[2 * width + head * (dim // LANES) + part], total), place)


def _scores(e: Emitter, keys: Value, row_nbytes: Value, queries: list[list[Value]], low: int, high: int) -> list[Value]:
    """Per query head one register: 16 / (high - low) partial sums of each of the dot products with keys `low` to `high`."""
    if high - low == 1:
        row = e.at(keys, e.mul(row_nbytes, i64(low)))
        totals = [floats(0.0)] * len(queries)
        for part in range(len(queries[0])):
            key = e.load(cpu_jit.PAIRS, e.at(row, i64(64 * part)))
            totals = [e.dot(total, key, query[part]) for total, query in zip(totals, queries, strict=True)]
        return totals
    middle = (low + high) // 2
    first, second = (_scores(e, keys, row_nbytes, queries, *half) for half in ((low, middle), (middle, high)))
    evens, odds = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
    return [
        e.b.fadd(e.shuffle(one, other, evens), e.shuffle(one, other, odds))
        for one, other in zip(first, second, strict=True)
    ]


def _add_values(e: Emitter, values: Value, row_nbytes: Value, weights: Value, sums: list[Value], per_head: int) -> None:
    """Add 16 rows of values, weighted, to `sums`: `per_head` registers for each query head."""
    interleaved = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
    for token in range(0, LANES, 2):
        rows = [e.at(values, e.mul(row_nbytes, i64(token + odd))) for odd in (0, 1)]
        pairs = [e.load_pair(e.at(weights, i64(64 * head + 2 * token))) for head in range(len(sums) // per_head)]
        for part in range(per_head):
            first, second = (e.load(cpu_jit.HALVES, e.at(row, i64(32 * part))) for row in rows)
            both = e.shuffle(first, second, interleaved)
            for head, pair in enumerate(pairs):
                sums[head * per_head + part] = e.dot(sums[head * per_head + part], both, pair)
