"""Causal attention of many queries over the block pool in place, 64 keys at a time.

One item of work is one key head and a block of the sequence's new tokens, for all query heads that share the key head:

    for each 64 keys:  keys and values into the order in which `cpu_linear` reads a weight
        for each query head, each 8 tokens:
            scores [8, 64] = queries x keys       the tile of `cpu_linear`, keys as its outputs
            softmax so far                        running maximum and sum per row, as in `cpu_decode`
            sums [8, head_dim] = sums * fading + weights x values        the same tile, numbers of a head as its outputs

Threads take items in turn: neighbours see about as many keys. A few queries over a long context are too few items, and
keys laid out for few queries cost as much as for many: there an item is all queries and a piece of the context, and pieces
are put together as in `cpu_decode`.

Knows nothing of requests. Invariants: as in `cpu_decode`; a query sees no key after its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tieredkv.kernels import cpu_decode, cpu_jit
from tieredkv.kernels.cpu_jit import LANES, Emitter, Value, floats, i64
from tieredkv.kernels.cpu_linear import MOST_ROWS, PANEL, multiply

_KEYS = 64
_LOWEST = -1e38
_MOST_HEAD_DIM = 256
# Queries up to which a long context is cut into pieces.
_FEW_QUERIES = 64
# Bytes of one panel's sums for all rows of a tile.
_SUMS_NBYTES = MOST_ROWS * PANEL * 4


@functools.cache
def can_run(head_dim: int, group: int, block_size: int) -> bool:
    """Whether the kernel serves `group` query heads to a key head and compiles here."""
    if head_dim % PANEL or head_dim > _MOST_HEAD_DIM or block_size % LANES:
        return False
    return cpu_jit.works("prefill attention", lambda: _kernel(head_dim, group, block_size))


def paged_prefill(
    q: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_table: NDArray[np.int32],
    context_len: int,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """`reference.paged_prefill` for one sequence: q bfloat16 [T, heads, head_dim], the last T of `context_len` tokens, heads of
    one token contiguous; block_table int32 [>= blocks of the context], contiguous."""
    tokens, heads, dim = q.shape
    _, num_layers, _, block_size, kv_heads, _ = blocks.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    group = heads // kv_heads
    num_threads, pieces = torch.get_num_threads(), 1
    # Long blocks of queries lay out fewer keys, short ones are enough items for all threads.
    num_queries = 64 if tokens >= 256 else 16 if tokens > 32 else MOST_ROWS
    if tokens <= _FEW_QUERIES and context_len >= max(4 * tokens, 4 * _KEYS):
        num_queries, pieces = 8 * -(-tokens // 8), min(num_threads, context_len // (2 * _KEYS))
    num_states = pieces * kv_heads if pieces > 1 else num_threads
    out = torch.empty((tokens, heads, dim), dtype=q.dtype)
    states = torch.empty((num_states, group * num_queries, dim + 2), dtype=torch.float32)
    scratch = torch.empty((num_threads, _KEYS * dim), dtype=torch.float32)
    half_nbytes = block_size * kv_heads * dim * 2
    _kernel(dim, group, block_size)(
        q.data_ptr(),
        q.stride(0) * 2,
        blocks.data_ptr() + layer * 2 * half_nbytes,
        num_layers * 2 * half_nbytes,
        half_nbytes,
        block_table.ctypes.data,
        context_len,
        out.data_ptr(),
        tokens,
        kv_heads,
        window,
        num_queries,
        pieces,
        states.data_ptr(),
        scratch.data_ptr(),
        scale,
    )
    return out


@functools.cache
def _kernel(dim: int, group: int, block_size: int) -> Callable[..., None]:
    """The kernel for heads of `dim` numbers, `group` query heads to a key head, and blocks of `block_size` tokens."""

    def write(e: Emitter, arguments: list[Value], thread: Value, team: Value) -> None:
        prefill = _Prefill(e, dim, group, block_size, *arguments)
        prefill.prepare(thread)
        count = e.mul(prefill.num_items, prefill.pieces)
        turns = e.b.sdiv(e.add(e.b.sub(count, thread), team, i64(-1)), team)
        e.loop(i64(0), turns, 1, lambda turn, _: prefill.write_item(e.add(thread, e.mul(turn, team)), thread))
        with e.b.if_then(prefill.is_split):
            e.call("GOMP_barrier", cpu_jit.VOID)
            e.loop(*e.share(prefill.num_items, thread, team), 1, lambda item, _: prefill.finish_item(item, item))

    return cpu_jit.compile_kernel("prefill", [cpu_jit.I64] * 15 + [cpu_jit.F64], write)


@dataclass(slots=True)
class _Prefill:
    """The body being written: what the kernel was given, and one thread's memory."""

    e: Emitter
    dim: int
    group: int
    block_size: int
    q: Value
    q_stride: Value
    layer: Value
    block_nbytes: Value
    half_nbytes: Value
    table: Value
    context_len: Value
    out: Value
    tokens: Value
    kv_heads: Value
    window: Value
    num_queries: Value
    pieces: Value
    states: Value
    scratch: Value
    scale: Value
    num_items: Value = None
    is_split: Value = None
    state_nbytes: Value = None
    keys: Value = None
    values: Value = None
    sums: Value = None
    weights: Value = None
    fading: Value = None

    def prepare(self, thread: Value) -> None:
        """Once per thread: pointers, the parts of its scratch memory, the functions that are called."""
        e, b = self.e, self.e.b
        for name in ("q", "layer", "table", "out", "states", "scratch"):
            setattr(self, name, b.inttoptr(getattr(self, name), cpu_jit.PTR))
        self.num_items = e.mul(b.sdiv(e.add(self.tokens, self.num_queries, i64(-1)), self.num_queries), self.kv_heads)
        self.is_split = b.icmp_signed(">", self.pieces, i64(1))
        self.state_nbytes = e.mul(self.num_queries, i64(4 * self.group * (self.dim + 2)))
        self.keys = e.at(self.scratch, e.mul(thread, i64(4 * _KEYS * self.dim)))
        self.values = e.at(self.keys, i64(_KEYS * self.dim * 2))
        self.sums = e.stack(_KEYS // PANEL * _SUMS_NBYTES // 64)
        self.weights, self.fading = e.stack(MOST_ROWS * _KEYS // 32), e.stack(1)
        self.scale = e.splat(b.fptrunc(self.scale, cpu_jit.F32), cpu_jit.FLOATS)

    def _queries_of(self, item: Value) -> tuple[Value, Value, Value]:
        """The first query of an item, their number, and the key head."""
        first = self.e.mul(self.e.b.sdiv(item, self.kv_heads), self.num_queries)
        return (
            first,
            self.e.least(self.num_queries, self.e.b.sub(self.tokens, first)),
            self.e.b.srem(item, self.kv_heads),
        )

    def write_item(self, item: Value, thread: Value) -> None:
        """One item, or one piece of it: pieces of all items come one after the other."""
        e, b = self.e, self.e.b
        piece, item_of_all = b.sdiv(item, self.num_items), item
        item = b.srem(item, self.num_items)
        first_query, count, kv_head = self._queries_of(item)
        first_at = e.add(b.sub(self.context_len, self.tokens), first_query)
        end_key = e.add(first_at, count)
        start = b.sub(e.add(first_at, i64(1)), self.window)
        cut = b.and_(b.icmp_signed(">", self.window, i64(0)), b.icmp_signed(">", start, i64(0)))
        begin = b.and_(b.select(cut, start, i64(0)), i64(-LANES))
        low, high = e.share(b.sdiv(e.add(b.sub(end_key, begin), i64(_KEYS - 1)), i64(_KEYS)), piece, self.pieces)
        low, high = (e.add(begin, e.mul(at, i64(_KEYS))) for at in (low, high))
        q = e.at(self.q, e.add(e.mul(first_query, self.q_stride), e.mul(kv_head, i64(self.group * self.dim * 2))))
        number = b.select(self.is_split, item_of_all, thread)
        states = e.at(self.states, e.mul(number, self.state_nbytes))
        self._clear(states)
        # Tiles of like size: one of a single query takes half as long as one of eight.
        num_tiles = b.sdiv(e.add(count, i64(MOST_ROWS - 1)), i64(MOST_ROWS))
        size = b.sdiv(e.add(count, num_tiles, i64(-1)), num_tiles)

        def sixty_four(key: Value, _: Any) -> None:
            e.loop(i64(0), i64(_KEYS // LANES), 1, lambda part, _: self._lay_out(key, part, end_key, kv_head))

            def tile(head: Value, query: Value) -> None:
                rows = e.least(size, b.sub(count, query))
                at = e.add(first_at, query)
                with b.if_then(b.icmp_signed("<", key, e.add(at, rows))):
                    place = e.at(q, e.add(e.mul(query, self.q_stride), e.mul(head, i64(2 * self.dim))))
                    self._attend(place, rows, at, key, self._state_of(states, head, query))

            def of_head(head: Value, _: Any) -> None:
                e.loop(i64(0), num_tiles, 1, lambda number, _: tile(head, e.mul(number, size)))

            e.loop(i64(0), i64(self.group), 1, of_head)

        e.loop(low, high, _KEYS, sixty_four)
        with b.if_then(b.not_(self.is_split)):
            self.finish_item(item, thread)

    def finish_item(self, item: Value, number: Value) -> None:
        """Write an item's rows, from states `number` and, of further pieces, those `num_items` on."""
        e = self.e
        first_query, count, kv_head = self._queries_of(item)
        heads, stride = e.mul(self.kv_heads, i64(self.group)), e.mul(self.num_items, self.state_nbytes)
        states = e.at(self.states, e.mul(number, self.state_nbytes))

        def finish(head: Value, query: Value) -> None:
            column = e.add(e.mul(e.add(first_query, query), heads), e.mul(kv_head, i64(self.group)), head)
            out = e.at(self.out, e.mul(column, i64(2 * self.dim)))
            state = self._state_of(states, head, query)
            cpu_decode.merge(e, state, self.pieces, stride, out, self.dim, interleaved=False)

        def finish_head(head: Value, _: Any) -> None:
            e.loop(i64(0), count, 1, lambda query, _: finish(head, query))

        e.loop(i64(0), i64(self.group), 1, finish_head)

    def _state_of(self, states: Value, head: Value, query: Value) -> Value:
        """A row's memory: sums float32 [dim], largest score, sum of weights."""
        row = self.e.add(self.e.mul(head, self.num_queries), query)
        return self.e.at(states, self.e.mul(row, i64(4 * (self.dim + 2))))

    def _clear(self, states: Value) -> None:
        e = self.e

        def clear(row: Value, _: Any) -> None:
            state = e.at(states, e.mul(row, i64(4 * (self.dim + 2))))
            for at in range(0, self.dim, LANES):
                e.store(floats(0.0), e.at(state, i64(4 * at)), 4)
            e.store(cpu_jit.constant(cpu_jit.F32, _LOWEST), e.at(state, i64(4 * self.dim)), 4)
            e.store(cpu_jit.constant(cpu_jit.F32, 0.0), e.at(state, i64(4 * self.dim + 4)), 4)

        e.loop(i64(0), e.mul(self.num_queries, i64(self.group)), 1, clear)

    def _lay_out(self, first_key: Value, part: Value, end_key: Value, kv_head: Value) -> None:
        """16 tokens: keys as 16 outputs of half a panel, values as 16 inputs. Past the end the context's last 16 come again."""
        e, b = self.e, self.e.b
        last = b.and_(e.add(end_key, i64(-1)), i64(-LANES))
        token = e.add(first_key, e.mul(part, i64(LANES)))
        row_nbytes = e.mul(self.kv_heads, i64(2 * self.dim))

        def source_of(token: Value) -> Value:
            block = e.load(cpu_jit.I32, e.at(self.table, e.mul(b.sdiv(token, i64(self.block_size)), i64(4))), 4)
            inside = e.add(e.mul(b.srem(token, i64(self.block_size)), row_nbytes), e.mul(kv_head, i64(2 * self.dim)))
            return e.at(self.layer, e.add(e.mul(b.sext(block, cpu_jit.I64), self.block_nbytes), inside))

        upcoming = source_of(e.least(e.add(token, i64(_KEYS)), last))
        for row in range(LANES):
            for line in range(0, 2 * self.dim, 64):
                place = e.at(upcoming, e.add(e.mul(row_nbytes, i64(row)), i64(line)))
                e.prefetch(place, level=2)
                e.prefetch(e.at(place, self.half_nbytes), level=2)
        source = source_of(e.least(token, last))
        rows = [e.at(source, e.mul(row_nbytes, i64(row))) for row in range(LANES)]
        panel = e.mul(b.sdiv(part, i64(2)), i64(2 * PANEL * self.dim))
        keys = e.at(self.keys, e.add(panel, e.mul(b.srem(part, i64(2)), i64(64))))
        for at in range(0, self.dim, PANEL):
            turned = _transpose(e, [e.load(cpu_jit.INTS, e.at(row, i64(2 * at))) for row in rows])
            for pair, register in enumerate(turned):
                e.store(register, e.at(keys, i64((at // 2 + pair) * 4 * PANEL)), 4)
        interleaved = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
        rows = [e.at(row, self.half_nbytes) for row in rows]
        values = e.at(self.values, e.mul(part, i64(LANES // 2 * 4 * PANEL)))
        for at in range(0, self.dim, LANES):
            column = at // PANEL * (_KEYS // 2) * 4 * PANEL + at % PANEL * 4
            for pair in range(LANES // 2):
                first, second = (
                    e.load(cpu_jit.HALVES, e.at(row, i64(2 * at))) for row in rows[2 * pair : 2 * pair + 2]
                )
                both = e.shuffle(first, second, interleaved)
                e.store(both, e.at(values, i64(column + pair * 4 * PANEL)), 4)

    def _attend(self, q: Value, rows: Value, first_at: Value, key: Value, state: Value) -> None:
        """Up to 8 queries, the first at `first_at`, over the 64 keys from `key`."""
        e, b = self.e, self.e.b
        state_nbytes = 4 * (self.dim + 2)
        for panel in range(_KEYS // PANEL):
            weight = e.at(self.keys, i64(panel * 2 * PANEL * self.dim))
            multiply(e, rows, q, self.q_stride, weight, i64(self.dim // 2), e.at(self.sums, i64(panel * _SUMS_NBYTES)))

        def weigh(row: Value, masked: bool) -> None:
            mine = e.at(state, e.mul(row, i64(state_nbytes)))
            at = e.add(first_at, row)
            edge = b.sub(at, self.window)
            low = b.select(b.icmp_signed(">", self.window, i64(0)), edge, i64(-1))
            low, high = (e.splat(b.trunc(b.sub(end, key), cpu_jit.I32), cpu_jit.INTS) for end in (low, at))
            seen, scores = [], []
            for part in range(_KEYS // LANES):
                numbers = cpu_jit.constant(cpu_jit.INTS, [part * LANES + lane for lane in range(LANES)])
                if masked:
                    seen.append(b.and_(b.icmp_signed("<=", numbers, high), b.icmp_signed(">", numbers, low)))
                place = e.add(e.mul(row, i64(4 * PANEL)), i64(part // 2 * _SUMS_NBYTES + part % 2 * 64))
                score = b.fmul(e.load(cpu_jit.FLOATS, e.at(self.sums, place), 64), self.scale)
                scores.append(b.select(seen[-1], score, floats(_LOWEST)) if masked else score)
            greatest = functools.reduce(e.greater, scores)
            top_at, total_at = e.at(mine, i64(4 * self.dim)), e.at(mine, i64(4 * self.dim + 4))
            before = e.load(cpu_jit.F32, top_at, 4)
            top = e.greater(before, e.largest(greatest))
            fading = b.extract_element(
                e.exp(e.splat(b.fsub(before, top), cpu_jit.FLOATS)), cpu_jit.constant(cpu_jit.I32, 0)
            )
            total = floats(0.0)
            for part, score in enumerate(scores):
                weight = e.exp(b.fsub(score, e.splat(top, cpu_jit.FLOATS)))
                if masked:
                    weight = b.select(seen[part], weight, floats(0.0))
                total = b.fadd(total, weight)
                e.store_halves(weight, e.at(self.weights, e.add(e.mul(row, i64(2 * _KEYS)), i64(32 * part))))
            e.store(top, top_at, 4)
            e.store(b.fadd(b.fmul(e.load(cpu_jit.F32, total_at, 4), fading), e.sum(total)), total_at, 4)
            e.store(fading, e.at(self.fading, e.mul(row, i64(4))), 4)

        # Most keys lie before all queries: nothing to mask.
        before = b.icmp_signed("<=", e.add(key, i64(_KEYS - 1)), first_at)
        with b.if_else(b.and_(before, b.icmp_signed("<=", self.window, i64(0)))) as (then, otherwise):
            with then:
                e.loop(i64(0), rows, 1, lambda row, _: weigh(row, False))
            with otherwise:
                e.loop(i64(0), rows, 1, lambda row, _: weigh(row, True))
        for panel in range(self.dim // PANEL):
            weight = e.at(self.values, i64(panel * _KEYS // 2 * 4 * PANEL))
            multiply(e, rows, self.weights, i64(2 * _KEYS), weight, i64(_KEYS // 2), self.sums)

            def accumulate(row: Value, _: Any, panel: int = panel) -> None:
                fading = e.splat(e.load(cpu_jit.F32, e.at(self.fading, e.mul(row, i64(4))), 4), cpu_jit.FLOATS)
                for half in (0, 1):
                    place = e.at(state, e.add(e.mul(row, i64(state_nbytes)), i64(4 * PANEL * panel + 64 * half)))
                    new = e.load(cpu_jit.FLOATS, e.at(self.sums, e.add(e.mul(row, i64(4 * PANEL)), i64(64 * half))), 64)
                    old = e.load(cpu_jit.FLOATS, place, 4)
                    e.store(e.call("llvm.fma.v16f32", cpu_jit.FLOATS, old, fading, new), place, 4)

            e.loop(i64(0), rows, 1, accumulate)


def _transpose(e: Emitter, rows: list[Value]) -> list[Value]:
    """16 registers of 16 numbers, rows for columns: halves of ever smaller squares change places."""
    size = LANES // 2
    while size:
        low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        for at in range(LANES):
            if not at & size:
                first, second = rows[at], rows[at + size]
                rows[at], rows[at + size] = e.shuffle(first, second, low), e.shuffle(first, second, high)
        size //= 2
    return rows
