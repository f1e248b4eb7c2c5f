"""Part "kernels": every kernel against attention written out in float64, on the device itself.

    pool: all NaN, but what `kv_write` puts into the blocks that a sequence owns
    error = largest difference / largest value, query by query, of decode and of prefill

What a sequence does not own (other blocks, the null block, other layers, slots past its context, table entries past it) is
NaN, and so are the output and the workspace before each call: whatever is read wrongly or left out shows as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.report import Row
from benchmarks.gpu_check.sizes import OracleCase
from benchmarks.gpu_check.worker import Context
from tieredkv.kernels.block_copy import block_copy
from tieredkv.kernels.kv_write import kv_write
from tieredkv.kernels.paged_decode import launch_for, paged_decode
from tieredkv.kernels.paged_prefill import paged_prefill

NUM_LAYERS, LAYER = 2, 1
# Roundings of the type in the weights and in the result. Products in TF32 would be wrong by 3e-4.
TOLERANCES = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}


@dataclass
class Filled:
    """A pool of NaN in which each sequence owns scattered blocks; keys, values [S, kv_heads, head_dim] of each."""

    blocks: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def kernels(context: Context) -> Iterator[Row]:
    """One row per case, and one for `block_copy`."""
    device = context.device.torch
    yield check_block_copy(device)
    for number, case in enumerate(context.sizes.oracle):
        if context.late():
            yield Row("kernels", f"{len(context.sizes.oracle) - number} more cases", "no time left", skipped=True)
            return
        yield check_case(case, device, number)
        context.device.release()


def check_case(case: OracleCase, device: torch.device, seed: int) -> Row:
    """Write, decode and prefill one case."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, case.dtype)
    filled, written = fill(case, dtype, device, generator)
    heads = case.kv_heads * case.group
    num_seqs, total = len(case.contexts), sum(case.news)
    scale = case.head_dim**-0.5

    def queries(rows: int) -> torch.Tensor:
        return torch.randn(rows, heads, case.head_dim, generator=generator, device=device).to(dtype)

    q = queries(num_seqs)
    launch = launch_for(q, case.kv_heads, filled.tables.shape[1] * case.block_size)
    decoded = torch.full_like(q, math.nan)
    workspace = torch.full((launch.workspace_numel,), math.nan, device=device)
    paged_decode(
        q, filled.blocks, LAYER, filled.tables, filled.lens, scale, window=case.window,
        softcap=case.softcap, out=decoded, workspace=workspace, launch=launch,
    )  # fmt: skip
    new = queries(total)
    starts = torch.tensor([0, *case.news], device=device).cumsum(0).to(torch.int32)
    prefilled = torch.full_like(new, math.nan)
    paged_prefill(
        new, filled.blocks, LAYER, filled.tables, filled.lens, starts, scale, window=case.window,
        softcap=case.softcap, out=prefilled,
    )  # fmt: skip
    expected_decoded, expected_prefilled, row = [], [], 0
    for s, num_new in enumerate(case.news):
        rest = (filled.keys[s], filled.values[s], scale, case.window, case.softcap)
        expected_decoded.append(attention(q[s : s + 1], *rest))
        expected_prefilled.append(attention(new[row : row + num_new], *rest))
        row += num_new
    errors = [error_of(decoded, torch.cat(expected_decoded)), error_of(prefilled, torch.cat(expected_prefilled))]
    tolerance = TOLERANCES[case.dtype]
    return Row(
        "kernels",
        case.name,
        f"decode {errors[0]:.1e}, prefill {errors[1]:.1e}" + ", written wrongly" * (not written),
        f"<= {tolerance:g}",
        # A NaN is not less than anything.
        ok=written and all(error <= tolerance for error in errors),
        data={"decode": _number(errors[0]), "prefill": _number(errors[1]), "kv_write": written},
    )


def fill(case: OracleCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Filled, bool]:
    """The case's pool, and whether `kv_write` changed exactly what it should have."""
    counts = [-(-length // case.block_size) for length in case.contexts]
    shape = (NUM_LAYERS, 2, case.block_size, case.kv_heads, case.head_dim)
    num_blocks = max(sum(counts) + 3, case.least_numel // math.prod(shape))
    blocks = torch.full((num_blocks, *shape), math.nan, dtype=dtype, device=device)
    # The last blocks of the pool in any order, so that in a large one offsets are large.
    order = (num_blocks - 1 - torch.randperm(sum(counts) + 1, generator=generator, device=device)).tolist()
    tables = torch.full((len(counts), max(counts) + 1), order.pop(), dtype=torch.int32, device=device)
    keys, values, slots = [], [], []
    for s, (length, count) in enumerate(zip(case.contexts, counts, strict=True)):
        own = torch.tensor([order.pop() for _ in range(count)], device=device)
        tables[s, :count] = own
        kv = torch.randn(2, length, case.kv_heads, case.head_dim, generator=generator, device=device).to(dtype)
        keys.append(kv[0])
        values.append(kv[1])
        positions = torch.arange(length, device=device)
        slots.append(own[positions // case.block_size] * case.block_size + positions % case.block_size)
    all_slots, k, v = torch.cat(slots), torch.cat(keys), torch.cat(values)
    kv_write(blocks, LAYER, all_slots, k, v)
    block_ids, offsets = all_slots // case.block_size, all_slots % case.block_size
    found = blocks[block_ids, LAYER, :, offsets]
    num_numbers = sum(int(torch.isfinite(part).sum()) for part in torch.split(blocks, max(num_blocks // 16, 1)))
    written = torch.equal(found[:, 0], k) and torch.equal(found[:, 1], v) and num_numbers == 2 * k.numel()
    return Filled(blocks, tables, torch.tensor(case.contexts, dtype=torch.int32, device=device), keys, values), written


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """float64 [T, heads, head_dim]: q are the last T of the S tokens in k, v [S, kv_heads, head_dim]; 16 queries at a time."""
    num_new, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k64, v64 = k.double(), v.double()
    positions = torch.arange(len(k), device=k.device)
    outputs = []
    for rows in torch.split(torch.arange(num_new, device=k.device), 16):
        grouped = q[rows].double().view(len(rows), -1, group, head_dim)
        scores = torch.einsum("tkgd,skd->tkgs", grouped, k64) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = (len(k) - num_new + rows)[:, None]
        hidden = positions > own
        if window:
            hidden |= positions <= own - window
        scores.masked_fill_(hidden[:, None, None, :], -math.inf)
        outputs.append(torch.einsum("tkgs,skd->tkgd", scores.softmax(-1), v64).reshape(len(rows), heads, head_dim))
    return torch.cat(outputs)


def error_of(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value of the same query; NaN when there is one.

    Query by query, since those with long contexts have small outputs, whose errors others would hide.
    """
    differences = (ours.double() - expected).abs().amax((1, 2))
    return float((differences / expected.abs().amax((1, 2))).max())


def _number(error: float) -> float | None:
    """JSON has no NaN."""
    return error if math.isfinite(error) else None


def check_block_copy(device: torch.device) -> Row:
    """Scattered blocks of random bytes, NaN payloads among them, to other places of the same pool."""
    blocks = torch.randint(-(2**62), 2**62, (24, 4, 4096), device=device)
    expected = blocks.clone()
    order = torch.randperm(24, device=device)
    pairs = torch.stack((order[:10], order[10:20]), 1).contiguous()
    expected[pairs[:, 1]] = expected[pairs[:, 0]]
    block_copy(blocks, blocks, pairs)
    equal = torch.equal(blocks, expected)
    return Row("kernels", "block_copy", "equal" if equal else "other bytes", "equal", ok=equal)
