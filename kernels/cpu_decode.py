"""Attention of single queries over the block pool in place: no block is copied before it is read.

Contexts are cut into as many pieces as there are threads. One item of work is one piece of one sequence, for all heads, so
that memory is read in its order and threads have equal shares, whatever the lengths:

    for each 32 tokens of the piece, for each key head, for some of the query heads that share it:
        scores [32]   dot products, the lanes of 16 of them summed in a tree of shuffles that leaves one score in each lane
        softmax       with a running maximum and sum, as in Milakov and Gimelshein, "Online normalizer calculation", 2018
        values        rows of two tokens interleaved, so that one bfloat16 dot product adds both
    all threads meet; pieces of a row are weighed against each other and added

A row's state, float32: [head_dim sums, greatest score, sum of weights, ...]. The sums lie in the order that interleaving
within 128 bits leaves; `merge` restores it.

Knows nothing of requests. Invariants: only blocks that hold a part of the context (or of its window) are read; slots of
its last block past the context have weight zero and must hold finite numbers. Weights are rounded to bfloat16, sums are
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tieredkv.kernels import cpu_jit
from tieredkv.kernels.cpu_jit import LANES, Emitter, Value, floats, i64

# Registers for queries and for the partial sums of their scores; the rest is for keys.
_MOST_REGISTERS = 28
_MOST_HEAD_DIM = 256
# Tokens between two looks at the maximum: keys and values of three key heads of 64 stay in the first-level cache.
_TOKENS = 32
# Tokens ahead of the products for which memory is asked.
_AHEAD = 64
# Threads up to which every sequence is cut; with more of them many sequences are shared out whole.
_MOST_PIECES = 4
# Less than any score; far enough from the end of float32 for the exponential.
_LOWEST = -1e38


@functools.cache
def can_run(head_dim: int, group: int, block_size: int) -> bool:
    """Whether the kernel serves `group` query heads to a key head and compiles here."""
    if head_dim % (2 * LANES) or head_dim > _MOST_HEAD_DIM or block_size % LANES:
        return False
    return cpu_jit.works("attention", lambda: _kernel(head_dim, group, block_size))


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
    num_threads = torch.get_num_threads()
    pieces = num_threads if num_threads <= _MOST_PIECES or batch < _MOST_PIECES * num_threads else 1
    out = torch.empty((batch, heads, dim), dtype=q.dtype)
    states = torch.empty((pieces, batch, heads, dim + LANES), dtype=torch.float32)
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
        pieces,
        states.data_ptr(),
        scale,
    )
    return out


@functools.cache
def _kernel(dim: int, group: int, block_size: int) -> Callable[..., None]:
    """The kernel for heads of `dim` numbers, `group` query heads to a key head, and blocks of `block_size` tokens."""

    def write(e: Emitter, arguments: list[Value], thread: Value, team: Value) -> None:
        _Decode(e, dim, group, block_size, arguments).write(thread, team)

    return cpu_jit.compile_kernel("decode", [cpu_jit.I64] * 14 + [cpu_jit.F64], write)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Some query heads of one key head over the 32 tokens from `start`, or fewer."""

    sequence: Value
    start: Value
    end: Value
    number: Value
    # Of all heads of the item.
    states: Value
    # Given a token, the first of 16: which of them count, and where the 16 lie that memory is asked for meanwhile.
    seen: Callable[[Value], Value]
    upcoming: Callable[[Value], Value]


class _Decode:
    """The body being written, and the values that all of it shares."""

    def __init__(self, e: Emitter, dim: int, group: int, block_size: int, arguments: list[Value]) -> None:
        self.e, self.dim, self.group, self.block_size = e, dim, group, block_size
        # Query heads that meet a key together: as many as divide the group and fit.
        per_head = dim // (2 * LANES) + 5
        self.width = max(
            n for n in range(1, group + 1) if group % n == 0 and n * per_head <= max(_MOST_REGISTERS, per_head)
        )
        self.head_nbytes, self.state_nbytes = 2 * dim, 4 * (dim + LANES)
        (q, self.q_stride, layer, self.block_nbytes, self.half_nbytes, tables, self.table_len, lens, out) = arguments[
            :9
        ]
        self.batch, self.kv_heads, self.window, self.pieces, states, scale = arguments[9:]
        addresses = (q, layer, tables, lens, out, states)
        self.q, self.layer, self.tables, self.lens, self.out, self.states = (
            e.b.inttoptr(address, cpu_jit.PTR) for address in addresses
        )
        self.scale = e.splat(e.b.fptrunc(scale, cpu_jit.F32), cpu_jit.FLOATS)
        self.heads = e.mul(self.kv_heads, i64(group))
        self.row_nbytes = e.mul(self.kv_heads, i64(self.head_nbytes))
        self.scores, self.weights = e.stack(self.width * _TOKENS // LANES), e.stack(self.width * _TOKENS // LANES // 2)

    def write(self, thread: Value, team: Value) -> None:
        e, b = self.e, self.e.b
        count = e.mul(self.batch, self.pieces)
        low, high = e.share(count, thread, team)
        e.loop(low, high, 1, lambda item, _: self._write_item(item, e.least(e.add(item, i64(1)), b.sub(high, i64(1)))))
        e.call("GOMP_barrier", cpu_jit.VOID)
        stride = e.mul(self.batch, self.heads, i64(self.state_nbytes))

        def finish(row: Value, _: Any) -> None:
            state = e.at(self.states, e.mul(row, i64(self.state_nbytes)))
            merge(e, state, self.pieces, stride, e.at(self.out, e.mul(row, i64(self.head_nbytes))), self.dim, True)

        e.loop(*e.share(e.mul(self.batch, self.heads), thread, team), 1, finish)

    def _piece(self, item: Value) -> tuple[Value, Value, Value, Value, Value, Value]:
        """An item's sequence and piece; its first token, a multiple of 16, and its end; the first token that is seen, and the
        length of the context."""
        e, b = self.e, self.e.b
        sequence = b.srem(item, self.batch)
        # Pieces change threads from sequence to sequence: some are longer by 16 tokens.
        piece = b.srem(e.add(b.sdiv(item, self.batch), sequence), self.pieces)
        length = b.sext(e.load(cpu_jit.I32, e.at(self.lens, e.mul(sequence, i64(4))), 4), cpu_jit.I64)
        begin = b.sub(length, self.window)
        cut = b.and_(b.icmp_signed(">", self.window, i64(0)), b.icmp_signed(">", begin, i64(0)))
        begin = b.select(cut, begin, i64(0))
        first = b.sdiv(begin, i64(LANES))
        chunks = b.sub(b.sdiv(e.add(length, i64(LANES - 1)), i64(LANES)), first)
        low, high = e.share(chunks, piece, self.pieces)
        return sequence, piece, *(e.mul(e.add(first, at), i64(LANES)) for at in (low, high)), begin, length

    def _keys_at(self, sequence: Value, token: Value) -> Value:
        """Where the keys of `token`, the first of 16, lie in the pool."""
        e, b = self.e, self.e.b
        number = e.add(e.mul(sequence, self.table_len), b.sdiv(token, i64(self.block_size)))
        block = b.sext(e.load(cpu_jit.I32, e.at(self.tables, e.mul(number, i64(4))), 4), cpu_jit.I64)
        offset = e.mul(b.srem(token, i64(self.block_size)), self.row_nbytes)
        return e.at(self.layer, e.add(e.mul(block, self.block_nbytes), offset))

    def _write_item(self, item: Value, following: Value) -> None:
        """One piece; memory is asked for the beginning of the piece of item `following` as well."""
        e, b = self.e, self.e.b
        sequence, piece, low, high, begin, length = self._piece(item)
        next_sequence, _, next_low, _, _, next_length = self._piece(following)
        row = e.mul(e.add(e.mul(piece, self.batch), sequence), self.heads)
        states = e.at(self.states, e.mul(row, i64(self.state_nbytes)))
        first, last = (e.splat(b.trunc(v, cpu_jit.I32), cpu_jit.INTS) for v in (begin, length))

        def clear(row: Value, _: Any) -> None:
            state = e.at(states, e.mul(row, i64(self.state_nbytes)))
            for part in range(0, self.dim, LANES):
                e.store(floats(0.0), e.at(state, i64(4 * part)), 4)
            e.store(cpu_jit.constant(cpu_jit.F32, _LOWEST), e.at(state, i64(4 * self.dim)), 4)
            e.store(cpu_jit.constant(cpu_jit.F32, 0.0), e.at(state, i64(4 * self.dim + 4)), 4)

        def seen(token: Value) -> Value:
            numbers = cpu_jit.constant(cpu_jit.INTS, list(range(LANES)))
            at = b.add(e.splat(b.trunc(token, cpu_jit.I32), cpu_jit.INTS), numbers)
            return b.and_(b.icmp_signed("<", at, last), b.icmp_signed(">=", at, first))

        def upcoming(token: Value) -> Value:
            """What lies `_AHEAD` tokens after `token`, in this piece or the following one."""
            coming = e.add(token, i64(_AHEAD))
            beyond = b.icmp_signed(">=", coming, high)
            later = e.least(e.add(next_low, b.sub(coming, high)), b.and_(b.sub(next_length, i64(1)), i64(-LANES)))
            return self._keys_at(b.select(beyond, next_sequence, sequence), b.select(beyond, later, coming))

        def segment(start: Value, _: Any) -> None:
            end = e.least(high, e.add(start, i64(_TOKENS)))

            def of_unit(number: Value, _: Any) -> None:
                self._write_unit(_Unit(sequence, start, end, number, states, seen, upcoming))

            e.loop(i64(0), e.mul(self.kv_heads, i64(self.group // self.width)), 1, of_unit)

        e.loop(i64(0), self.heads, 1, clear)
        e.loop(low, high, _TOKENS, segment)

    def _write_unit(self, unit: _Unit) -> None:
        e, b, width, dim, start = self.e, self.e.b, self.width, self.dim, unit.start
        first_head = e.mul(unit.number, i64(width))
        kv_offset = e.mul(b.sdiv(unit.number, i64(self.group // width)), i64(self.head_nbytes))
        q = e.at(self.q, e.add(e.mul(unit.sequence, self.q_stride), e.mul(first_head, i64(self.head_nbytes))))
        states = [
            e.at(unit.states, e.mul(e.add(first_head, i64(head)), i64(self.state_nbytes))) for head in range(width)
        ]
        queries = [
            [e.load(cpu_jit.PAIRS, e.at(q, i64(head * self.head_nbytes + 64 * part))) for part in range(dim // 32)]
            for head in range(width)
        ]

        def score(token: Value, greatest: list[Value]) -> list[Value]:
            lines = self._lines(unit, token, i64(0))
            keys = e.at(self._keys_at(unit.sequence, token), kv_offset)
            known, new = unit.seen(token), []
            column = e.mul(b.sub(token, start), i64(4))
            for head, products in enumerate(_scores(e, keys, self.row_nbytes, queries, lines, 0, LANES)):
                scores = b.select(known, b.fmul(products, self.scale), floats(_LOWEST))
                e.store(scores, e.at(self.scores, e.add(column, i64(4 * _TOKENS * head))), 64)
                new.append(e.greater(greatest[head], scores))
            return new

        tops, fadings = [], []
        for greatest, state in zip(
            e.loop(start, unit.end, LANES, score, [floats(_LOWEST)] * width), states, strict=True
        ):
            before = e.load(cpu_jit.F32, e.at(state, i64(4 * dim)), 4)
            top = e.greater(before, e.largest(greatest))
            e.store(top, e.at(state, i64(4 * dim)), 4)
            fadings.append(e.exp(e.splat(b.fsub(before, top), cpu_jit.FLOATS)))
            tops.append(e.splat(top, cpu_jit.FLOATS))

        def weigh(token: Value, totals: list[Value]) -> list[Value]:
            at, new = b.sub(token, start), []
            for head, (top, total) in enumerate(zip(tops, totals, strict=True)):
                place = e.at(self.scores, e.add(e.mul(at, i64(4)), i64(4 * _TOKENS * head)))
                scores = e.load(cpu_jit.FLOATS, place, 64)
                known = b.fcmp_ordered(">", scores, floats(_LOWEST / 2))
                weight = b.select(known, e.exp(b.fsub(scores, top)), floats(0.0))
                e.store_halves(weight, e.at(self.weights, e.add(e.mul(at, i64(2)), i64(2 * _TOKENS * head))))
                new.append(b.fadd(total, weight))
            return new

        weighed = e.loop(start, unit.end, LANES, weigh, [floats(0.0)] * width)
        for total, fading, state in zip(weighed, fadings, states, strict=True):
            place = e.at(state, i64(4 * dim + 4))
            factor = b.extract_element(fading, cpu_jit.constant(cpu_jit.I32, 0))
            e.store(b.fadd(b.fmul(e.load(cpu_jit.F32, place, 4), factor), e.sum(total)), place, 4)
        # Numbers of a head whose sums, for all heads of the unit, are in registers at a time.
        stretch = 2 * LANES
        while dim % (2 * stretch) == 0 and 2 * stretch * width <= 16 * LANES:
            stretch *= 2
        for low in range(0, dim, stretch):
            places = [e.at(state, i64(4 * at)) for state in states for at in range(low, low + stretch, LANES)]
            values = e.add(self.half_nbytes, kv_offset, i64(2 * low))
            self._add_values(unit, values, places, fadings, asks=low == 0)

    def _add_values(self, unit: _Unit, offset: Value, places: list[Value], fadings: list[Value], asks: bool) -> None:
        """Add a stretch of a unit's values, weighted, to the sums in `places`, as many for each query head."""
        e, per_head = self.e, len(places) // self.width

        def add(token: Value, sums: list[Value]) -> list[Value]:
            values = e.at(self._keys_at(unit.sequence, token), offset)
            lines = self._lines(unit, token, self.half_nbytes) if asks else []
            weights = e.at(self.weights, e.mul(e.b.sub(token, unit.start), i64(2)))
            return _add_sixteen(e, values, self.row_nbytes, weights, list(sums), per_head, lines)

        faded = [
            e.b.fmul(e.load(cpu_jit.FLOATS, place, 4), fadings[number // per_head])
            for number, place in enumerate(places)
        ]
        for value, place in zip(e.loop(unit.start, unit.end, LANES, add, faded), places, strict=True):
            e.store(value, place, 4)

    def _lines(self, unit: _Unit, token: Value, offset: Value) -> list[Value]:
        """The unit's share of the memory to ask for at `token`: of the keys, or of the values at `offset` from them."""
        share = 2 * LANES * self.dim * self.width // self.group
        place = self.e.at(unit.upcoming(token), self.e.add(offset, self.e.mul(unit.number, i64(share))))
        return [self.e.at(place, i64(line)) for line in range(0, share, 64)]


def merge(e: Emitter, state: Value, pieces: Value, stride: Value, out: Value, dim: int, interleaved: bool) -> None:
    """Write one row of attention, bfloat16 [dim]: the sums of `pieces` states, `stride` bytes apart, each brought to the
    greatest score of all. `interleaved`: the order of sums in this module, else their natural one."""
    b = e.b
    top_at, total_at = i64(4 * dim), i64(4 * dim + 4)

    def look(piece: Value, top: list[Value]) -> list[Value]:
        mine = e.load(cpu_jit.F32, e.at(state, e.add(e.mul(piece, stride), top_at)), 4)
        return [e.greater(top[0], mine)]

    (top,) = e.loop(i64(0), pieces, 1, look, [cpu_jit.constant(cpu_jit.F32, _LOWEST)])

    def add(piece: Value, sums: list[Value]) -> list[Value]:
        mine = e.at(state, e.mul(piece, stride))
        fading = e.exp(e.splat(b.fsub(e.load(cpu_jit.F32, e.at(mine, top_at), 4), top), cpu_jit.FLOATS))
        terms = [e.splat(e.load(cpu_jit.F32, e.at(mine, total_at), 4), cpu_jit.FLOATS)]
        terms += [e.load(cpu_jit.FLOATS, e.at(mine, i64(4 * at)), 4) for at in range(0, dim, LANES)]
        return [
            e.call("llvm.fma.v16f32", cpu_jit.FLOATS, term, fading, before)
            for term, before in zip(terms, sums, strict=True)
        ]

    total, *sums = e.loop(i64(0), pieces, 1, add, [floats(0.0)] * (1 + dim // LANES))
    for number in range(0, len(sums), 2):
        pair = sums[number : number + 2]
        if interleaved:
            quarters = [[0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23]]
            quarters.append([lane + 8 for lane in quarters[0]])
            pair = [e.shuffle(pair[0], pair[1], quarter) for quarter in quarters]
        for half, value in enumerate(pair):
            e.store_halves(b.fdiv(value, total), e.at(out, i64(2 * LANES * (number + half))))


def _scores(
    e: Emitter, keys: Value, row_nbytes: Value, queries: list[list[Value]], lines: list[Value], low: int, high: int
) -> list[Value]:
    """Per query head one register: 16 / (high - low) partial sums of each of the dot products with keys `low` to `high`.
    Memory is asked for `lines` in between: requests that come all at once hold up the loads behind them."""
    if high - low == 1:
        for line in lines[low::LANES]:
            e.prefetch(line, level=2)
        row = e.at(keys, e.mul(row_nbytes, i64(low)))
        totals = [floats(0.0)] * len(queries)
        for part in range(len(queries[0])):
            key = e.load(cpu_jit.PAIRS, e.at(row, i64(64 * part)))
            totals = [e.dot(total, key, query[part]) for total, query in zip(totals, queries, strict=True)]
        return totals
    middle = (low + high) // 2
    first, second = (_scores(e, keys, row_nbytes, queries, lines, *half) for half in ((low, middle), (middle, high)))
    # Neighbours meet within 128 bits first, then whole runs of 128 bits: such shuffles need no register of indices.
    if high - low <= 4:
        evens = [at + lane for lane in range(0, LANES, 4) for at in (0, 2, LANES, LANES + 2)]
        odds = [lane + 1 for lane in evens]
    else:
        evens = [run + lane for run in (0, 8, LANES, LANES + 8) for lane in range(4)]
        odds = [lane + 4 for lane in evens]
    return [
        e.b.fadd(e.shuffle(one, other, evens), e.shuffle(one, other, odds))
        for one, other in zip(first, second, strict=True)
    ]


def _add_sixteen(
    e: Emitter,
    values: Value,
    row_nbytes: Value,
    weights: Value,
    sums: list[Value],
    per_head: int,
    lines: list[Value],
) -> list[Value]:
    """`sums`, `per_head` registers for each query head, with 16 rows of values added, weighted; `lines` as in `_scores`."""
    orders = [
        [place for run in range(half, 2 * LANES, 8) for at in range(4) for place in (run + at, run + at + 2 * LANES)]
        for half in (0, 4)
    ]
    for token in range(0, LANES, 2):
        for line in lines[token // 2 :: LANES // 2]:
            e.prefetch(line, level=2)
        rows = [e.at(values, e.mul(row_nbytes, i64(token + odd))) for odd in (0, 1)]
        pairs = [
            e.load_pair(e.at(weights, i64(2 * _TOKENS * head + 2 * token))) for head in range(len(sums) // per_head)
        ]
        for part in range(0, per_head, 2):
            first, second = (e.load(cpu_jit.SHORTS, e.at(row, i64(32 * part))) for row in rows)
            for half, order in enumerate(orders):
                both = e.b.bitcast(e.shuffle(first, second, order), cpu_jit.PAIRS)
                for head, pair in enumerate(pairs):
                    at = head * per_head + part + half
                    sums[at] = e.dot(sums[at], both, pair)
    return sums
