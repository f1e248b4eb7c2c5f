"""Products of a few or many rows with a bfloat16 weight, and what comes before and after them, in one kernel.

    x [T, in] -> (normalise the rows) -> x W^T -> (+ bias) -> (+ residual | silu(gate) * up) -> [T, out]

The weight is stored once, in the order in which it is read, by panels of 32 outputs:

    packed [out / 32, in / 2, 2 (register), 16 (output), 2 (input)]     bfloat16

A thread owns a run of panels and streams each from memory once per 256 rows; up to 8 rows meet a panel at a time, their 16
sums in registers. For a gated product the first register of a panel holds outputs of the gate, the second the same
outputs of `up`.

Knows nothing of layers. Invariant: sums are float32 from the first product to the one rounding at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tieredkv.kernels import cpu_jit
from tieredkv.kernels.cpu_jit import LANES, Emitter, Value, floats, i64

PANEL = 2 * LANES
# Rows whose sums fill half of the registers; twelve spill and are slower.
MOST_ROWS = 8
# Rows that pass while a thread's panels come from memory once; at 1,536 inputs they fill three quarters of a 1 MiB cache.
_ROW_BLOCK = 256
_UNROLL = 4
# How far ahead of the products memory is asked for weights, bytes: into the first-level cache by few rows, which are done
# with a weight as fast as it comes; by more rows into the second-level one, which takes more requests at a time.
_AHEAD, _FAR_AHEAD = 4096, 8192
_FEW_ROWS = 5
# Up to so many rows every thread normalises all of them for itself, which costs less than meeting at a barrier.
_PRIVATE_ROWS = 16


def fits(num_out: int, num_in: int) -> bool:
    return num_out % PANEL == 0 and num_in % PANEL == 0


def pack(weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """weight bfloat16 [out, in] in the order of this module; `gated`: the first half of its rows is the gate, the second up."""
    # Pairs of inputs as one number: a plain transposition, which torch does several times faster.
    num_pairs = weight.shape[1] // 2
    pairs = weight.contiguous().view(torch.int32)
    parts = pairs.view(2, -1, LANES, num_pairs).transpose(0, 1) if gated else pairs.view(-1, 2, LANES, num_pairs)
    packed = parts.permute(0, 3, 1, 2).contiguous()
    return packed.view(torch.bfloat16).view(-1, num_pairs, 2, LANES, 2)


def unpacked_rows(packed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows `numbers` int64 [T] of the weight that `pack` was given, not gated -> bfloat16 [T, in]."""
    pairs = packed.view(torch.int32).view(len(packed), -1, PANEL)
    panels = torch.div(numbers, PANEL, rounding_mode="floor")
    return pairs[panels, :, numbers % PANEL].view(torch.bfloat16)


@functools.cache
def can_run() -> bool:
    """Whether the kernel compiles here and multiplies right."""

    def right() -> bool:
        weight = torch.arange(64 * 32, dtype=torch.float32).sin().view(64, 32).bfloat16()
        x = torch.arange(9 * 32, dtype=torch.float32).cos().view(9, 32).bfloat16()
        return torch.allclose(linear(x, pack(weight)).float(), x.float() @ weight.float().T, rtol=0.02, atol=0.05)

    return cpu_jit.works("products", right)


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """x bfloat16 [T, in], rows contiguous -> [T, out], or [T, out / 2] when `gated`. `norm`: weight [in] and eps of a
    root-mean-square normalisation of the rows of x. `bias` [out] in the order of the unpacked weight."""
    rows, num_in = x.shape
    num_out = packed.shape[0] * PANEL
    out = torch.empty((rows, num_out // 2 if gated else num_out), dtype=x.dtype)
    x = x.contiguous()
    if bias is not None and gated:
        bias = bias.view(2, -1, LANES).transpose(0, 1).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    normed_at, weight_at, eps = 0, 0, 0.0
    if norm is not None:
        copies = torch.get_num_threads() if rows <= _PRIVATE_ROWS else 1
        normed = torch.empty((copies * rows, num_in), dtype=x.dtype)
        normed_at, weight_at, eps = normed.data_ptr(), norm[0].data_ptr(), norm[1]
    _kernel()(
        x.data_ptr(),
        packed.data_ptr(),
        out.data_ptr(),
        rows,
        num_out,
        num_in,
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        gated,
        normed_at,
        weight_at,
        eps,
    )
    return out


@functools.cache
def _kernel() -> Callable[..., None]:
    return cpu_jit.compile_kernel("linear", [cpu_jit.I64] * 11 + [cpu_jit.F64], _write_linear)


def _write_linear(e: Emitter, arguments: list[Value], thread: Value, team: Value) -> None:
    b = e.b
    x_at, packed_at, out_at, rows, num_out, num_in, bias_at, residual_at, gated, normed_at, weight_at, eps = arguments
    sums = e.stack(2 * MOST_ROWS)
    x_nbytes = e.mul(num_in, i64(2))
    zero = i64(0)
    x_memory, source = b.inttoptr(x_at, cpu_jit.PTR), e.stack(1)
    e.store(x_memory, source, 8)
    with b.if_then(b.icmp_signed("!=", weight_at, zero)):
        private = b.icmp_signed("<=", rows, i64(_PRIVATE_ROWS))
        mine = b.select(private, e.mul(thread, rows, x_nbytes), zero)
        normed = e.at(b.inttoptr(normed_at, cpu_jit.PTR), mine)
        low, high = e.share(rows, thread, team)
        low, high = b.select(private, zero, low), b.select(private, rows, high)
        _write_norm(e, x_memory, normed, low, high, num_in, b.inttoptr(weight_at, cpu_jit.PTR), eps)
        e.store(normed, source, 8)
        with b.if_then(b.not_(private)):
            e.call("GOMP_barrier", cpu_jit.VOID)
    x = e.load(cpu_jit.PTR, source, 8)
    packed, out = b.inttoptr(packed_at, cpu_jit.PTR), b.inttoptr(out_at, cpu_jit.PTR)
    has_bias, has_residual = (b.icmp_signed("!=", at, zero) for at in (bias_at, residual_at))
    is_gated = b.icmp_signed("!=", gated, zero)
    num_pairs = b.sdiv(num_in, i64(2))
    first_panel, end_panel = e.share(b.sdiv(num_out, i64(PANEL)), thread, team)

    def tile(row: Value, end: Value, panel: Value) -> None:
        count = e.least(b.sub(end, row), i64(MOST_ROWS))
        weight = e.at(packed, e.mul(panel, num_pairs, i64(4 * PANEL)))
        multiply(e, count, e.at(x, e.mul(row, x_nbytes)), x_nbytes, weight, num_pairs, sums)
        e.loop(zero, count, 1, lambda i, _: finish(i, e.add(row, i), panel))

    def finish(i: Value, row: Value, panel: Value) -> None:
        """One row's 32 sums: additions, activation, rounding."""
        places = [e.at(sums, e.add(e.mul(i, i64(4 * PANEL)), i64(64 * half))) for half in (0, 1)]
        column = e.mul(panel, i64(2 * PANEL))
        where = e.add(e.mul(row, num_out, i64(2)), column)
        for wanted, base, offset in ((has_bias, bias_at, column), (has_residual, residual_at, where)):
            with b.if_then(wanted):
                for half, place in enumerate(places):
                    term = e.load_floats(e.at(b.inttoptr(base, cpu_jit.PTR), e.add(offset, i64(32 * half))))
                    e.store(b.fadd(e.load(cpu_jit.FLOATS, place, 64), term), place, 64)
        first, second = (e.load(cpu_jit.FLOATS, place, 64) for place in places)
        with b.if_else(is_gated) as (then, otherwise):
            with then:
                divisor = b.fadd(e.exp(b.fsub(floats(0.0), first)), floats(1.0))
                e.store_halves(b.fmul(b.fdiv(first, divisor), second), e.at(out, b.sdiv(where, i64(2))))
            with otherwise:
                e.store_halves(first, e.at(out, where))
                e.store_halves(second, e.at(out, e.add(where, i64(32))))

    def row_block(low: Value, _: Any) -> None:
        high = e.least(e.add(low, i64(_ROW_BLOCK)), rows)

        def of_panel(panel: Value, _: Any) -> None:
            e.loop(low, high, MOST_ROWS, lambda row, _: tile(row, high, panel))

        e.loop(first_panel, end_panel, 1, of_panel)

    e.loop(zero, rows, _ROW_BLOCK, row_block)


def multiply(
    e: Emitter, num_rows: Value, x: Value, x_nbytes: Value, weight: Value, num_pairs: Value, sums: Value
) -> None:
    """Write: sums float32 [num_rows, 32] = 1 to 8 rows of x, `x_nbytes` apart, by one panel of `num_pairs` pairs of inputs,
    a multiple of 4."""
    b = e.b
    names = _tiles()
    done = b.append_basic_block()
    switch = b.switch(num_rows, done)
    for count, name in enumerate(names, 1):
        case = b.append_basic_block()
        switch.add_case(i64(count), case)
        b.position_at_end(case)
        e.call(name, cpu_jit.VOID, x, x_nbytes, weight, num_pairs, sums)
        b.branch(done)
    b.position_at_end(done)


@functools.cache
def _tiles() -> list[str]:
    """Names of the functions for 1 to 8 rows, compiled."""
    module = cpu_jit.new_module("tiles")
    names = [_write_tile(module, num_rows) for num_rows in range(1, MOST_ROWS + 1)]
    cpu_jit.compile_shared(module, names)
    return names


def _write_tile(module: Value, num_rows: int) -> str:
    """A function: `num_rows` rows of x by one panel, sums [num_rows, 32] float32 to memory."""
    kinds = [cpu_jit.PTR, cpu_jit.I64, cpu_jit.PTR, cpu_jit.I64, cpu_jit.PTR]
    name = f"tieredkv_tile_{num_rows}"
    e = Emitter(module, name, kinds)
    x, x_nbytes, weight, num_pairs, sums = e.arguments
    rows = [e.at(x, e.mul(x_nbytes, i64(row))) for row in range(num_rows)]

    def step(first: Value, totals: list[Value]) -> list[Value]:
        totals = list(totals)
        for ahead in range(_UNROLL):
            pair = e.add(first, i64(ahead))
            place = e.at(weight, e.mul(pair, i64(4 * PANEL)))
            halves = [e.load(cpu_jit.PAIRS, e.at(place, i64(64 * half)), 64) for half in (0, 1)]
            for half in (0, 1):
                if num_rows <= _FEW_ROWS:
                    e.prefetch(e.at(place, i64(_AHEAD + 64 * half)))
                else:
                    e.prefetch(e.at(place, i64(_FAR_AHEAD + 64 * half)), level=2)
            for row, memory in enumerate(rows):
                x_pair = e.load_pair(e.at(memory, e.mul(pair, i64(4))))
                for half in (0, 1):
                    totals[2 * row + half] = e.dot(totals[2 * row + half], halves[half], x_pair)
        return totals

    for at, total in enumerate(e.loop(i64(0), num_pairs, _UNROLL, step, [floats(0.0)] * (2 * num_rows))):
        e.store(total, e.at(sums, i64(64 * at)), 64)
    e.b.ret_void()
    return name


def _write_norm(
    e: Emitter, x: Value, out: Value, low: Value, high: Value, size: Value, weight: Value, eps: Value
) -> None:
    """Rows `low` to `high` of x, each divided by its root mean square and multiplied by the weight."""
    b = e.b

    def of_row(row: Value, _: Any) -> None:
        base = e.mul(row, size, i64(2))

        def add_squares(at: Value, totals: list[Value]) -> list[Value]:
            value = e.load_floats(e.at(x, e.add(base, e.mul(at, i64(2)))))
            return [e.call("llvm.fma.v16f32", cpu_jit.FLOATS, value, value, totals[0])]

        (squares,) = e.loop(i64(0), size, LANES, add_squares, [floats(0.0)])
        mean = b.fdiv(b.fpext(e.sum(squares), cpu_jit.F64), b.sitofp(size, cpu_jit.F64))
        root = e.call("llvm.sqrt.f64", cpu_jit.F64, b.fadd(mean, eps))
        factor = e.splat(b.fptrunc(b.fdiv(cpu_jit.constant(cpu_jit.F64, 1.0), root), cpu_jit.F32), cpu_jit.FLOATS)

        def scale(at: Value, _: Any) -> None:
            offset = e.mul(at, i64(2))
            place = e.add(base, offset)
            value = b.fmul(e.load_floats(e.at(x, place)), factor)
            e.store_halves(b.fmul(value, e.load_floats(e.at(weight, offset))), e.at(out, place))

        e.loop(i64(0), size, LANES, scale)

    e.loop(low, high, 1, of_row)
