"""Rotary embedding of new queries and keys, and the way of keys and values into the pool, in one pass.

    qkv [T, heads + 2 kv_heads, head_dim]   queries and keys rotated in place; keys and values stored

Knows nothing of requests. Invariant: equal to `fused.rotate` and `reference.write_planned`, but for rounding once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tieredkv.kernels import cpu_jit
from tieredkv.kernels.cpu_jit import LANES, Emitter, Value, i64


@functools.cache
def can_run(head_dim: int, rotated: int) -> bool:
    """Whether the kernel serves heads whose first `rotated` numbers turn, and compiles here."""
    if head_dim % LANES or rotated % (2 * LANES):
        return False
    return cpu_jit.works("rotary embedding", lambda: _kernel(head_dim, rotated // 2))


def rotate_and_store(
    qkv: torch.Tensor, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
) -> None:
    """Rotate and store.

    qkv     bfloat16 [T, heads + 2 kv_heads, head_dim], contiguous
    cos     bfloat16 [T, ..., >= half], sin [T, ..., half], where half of the numbers that turn; rows contiguous
    rows    the pool, a row per token, layer and half: [.., kv_heads * head_dim]
    places  int64 [2 T], the rows of the keys, then those of the values
    """
    tokens, heads, dim = qkv.shape
    _kernel(dim, sin.shape[-1])(
        qkv.data_ptr(),
        tokens,
        heads - 2 * kv_heads,
        kv_heads,
        cos.data_ptr(),
        cos.stride(0) * 2,
        sin.data_ptr(),
        sin.stride(0) * 2,
        rows.data_ptr(),
        places.data_ptr(),
    )


@functools.cache
def _kernel(dim: int, half: int) -> Callable[..., None]:
    def write(e: Emitter, arguments: list[Value], thread: Value, team: Value) -> None:
        b = e.b
        qkv, tokens, heads, kv_heads, cos, cos_stride, sin, sin_stride, rows, places = arguments
        qkv, cos, sin, rows, places = (b.inttoptr(at, cpu_jit.PTR) for at in (qkv, cos, sin, rows, places))
        head_nbytes = i64(2 * dim)
        num_turned, row_nbytes = e.add(heads, kv_heads), e.mul(kv_heads, head_nbytes)

        def of_token(token: Value, _: Any) -> None:
            mine = e.at(qkv, e.mul(token, e.add(num_turned, kv_heads), head_nbytes))
            factors = [
                [e.load_floats(e.at(e.at(base, e.mul(token, stride)), i64(2 * at))) for at in range(0, half, LANES)]
                for base, stride in ((cos, cos_stride), (sin, sin_stride))
            ]

            def turn(head: Value, _: Any) -> None:
                place = e.at(mine, e.mul(head, head_nbytes))
                for part, (c, s) in enumerate(zip(*factors, strict=True)):
                    low, high = (e.at(place, i64(2 * (LANES * part + offset))) for offset in (0, half))
                    first, second = e.load_floats(low), e.load_floats(high)
                    e.store_halves(b.fsub(b.fmul(first, c), b.fmul(second, s)), low)
                    e.store_halves(b.fadd(b.fmul(second, c), b.fmul(first, s)), high)

            e.loop(i64(0), num_turned, 1, turn)
            for first_head, index in ((heads, token), (num_turned, e.add(tokens, token))):
                source = e.at(mine, e.mul(first_head, head_nbytes))
                number = e.load(cpu_jit.I64, e.at(places, e.mul(index, i64(8))), 8)
                target = e.at(rows, e.mul(number, row_nbytes))

                def copy(at: Value, _: Any, source: Value = source, target: Value = target) -> None:
                    e.store(e.load(cpu_jit.HALVES, e.at(source, at)), e.at(target, at))

                e.loop(i64(0), row_nbytes, 2 * LANES, copy)

        e.loop(*e.share(tokens, thread, team), 1, of_token)

    return cpu_jit.compile_kernel("rotary", [cpu_jit.I64] * 10, write)
