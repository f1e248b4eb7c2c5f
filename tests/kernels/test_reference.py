"""The torch kernels against attention written out in double precision, and against blocks full of NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tieredkv.kernels import reference

NUM_LAYERS = 2


@dataclass
class Case:
    """A pool in which each sequence owns scattered blocks; everything else, the null block included, is NaN."""

    blocks: torch.Tensor
    tables: np.ndarray
    context_lens: np.ndarray
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_case(context_lens: list[int], *, block_size=16, kv_heads=2, dim=16, dtype=torch.float32, layer=1) -> Case:
    rng = torch.Generator().manual_seed(sum(context_lens))
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = 2 * sum(counts) + 3
    order = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
    blocks = torch.full((num_blocks, NUM_LAYERS, 2, block_size, kv_heads, dim), float("nan"), dtype=dtype)
    tables = np.zeros((len(counts), max(counts) + 1), dtype=np.int32)
    keys, values = [], []
    for s, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        own = [order.pop() for _ in range(count)]
        tables[s, :count] = own
        k, v = torch.randn(2, length, kv_heads, dim, generator=rng).to(dtype)
        # What a pool guarantees: slots of an owned block past the context are finite.
        slab = torch.zeros(2, count * block_size, kv_heads, dim, dtype=dtype)
        slab[0, :length], slab[1, :length] = k, v
        blocks[own, layer] = slab.view(2, count, block_size, kv_heads, dim).transpose(0, 1)
        keys.append(k)
        values.append(v)
    return Case(blocks, tables, np.asarray(context_lens, dtype=np.int32), keys, values)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """q [T, heads, dim] are the last T of the S tokens in k, v [S, kv_heads, dim]; computed in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys, queries = torch.arange(len(k))[None], torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = keys > queries
    if window:
        hidden |= keys <= queries - window
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[ours.dtype]
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "context_lens",
    [[1], [16], [37], [320, 320], [5, 33], [64, 64, 64, 64], [1, 17, 31, 48, 100], [3, 5, 400, 410, 90, 1000]],
)
def test_decode_is_attention_over_the_context(context_lens, dtype):
    case = make_case(context_lens, dtype=dtype)
    q = torch.randn(len(context_lens), 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = reference.paged_decode(q, case.blocks, 1, case.tables, case.context_lens, 0.3)
    for s in range(len(context_lens)):
        assert_close(ours[s : s + 1], plain_attention(q[s : s + 1], case.keys[s], case.values[s], 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("cached", [0, 1, 16, 130])
@pytest.mark.parametrize("new", [1, 2, 16, 127, 128, 129, 300])
def test_prefill_is_causal_attention_over_cached_and_new(cached, new, block_size, dtype):
    case = make_case([cached + new], block_size=block_size, dtype=dtype)
    q = torch.randn(new, 4, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    starts = np.asarray([0, new], dtype=np.int32)
    ours = reference.paged_prefill(q, case.blocks, 1, case.tables, case.context_lens, starts, 0.25)
    assert_close(ours, plain_attention(q, case.keys[0], case.values[0], 0.25))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 128), (6, 2, 80)])
def test_prefill_of_several_sequences_with_grouped_heads(heads, kv_heads, dim):
    new, context_lens = [5, 1, 40], [5, 60, 45]
    case = make_case(context_lens, kv_heads=kv_heads, dim=dim)
    starts = np.cumsum([0, *new]).astype(np.int32)
    q = torch.randn(sum(new), heads, dim, generator=torch.Generator().manual_seed(3))
    scale = dim**-0.5
    ours = reference.paged_prefill(q, case.blocks, 1, case.tables, case.context_lens, starts, scale)
    for s in range(3):
        part = slice(starts[s], starts[s + 1])
        assert_close(ours[part], plain_attention(q[part], case.keys[s], case.values[s], scale))


OPTIONS = [(1, 0.0), (16, 0.0), (37, 0.0), (150, 0.0), (10_000, 0.0), (0, 0.5), (20, 2.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("context_lens", [[37], [5, 33], [1, 17, 31, 48, 100], [3, 5, 400, 410, 90, 1000]])
def test_decode_under_a_window_and_a_soft_cap(context_lens, window, softcap, dtype):
    case = make_case(context_lens, dtype=dtype)
    q = torch.randn(len(context_lens), 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = reference.paged_decode(q, case.blocks, 1, case.tables, case.context_lens, 0.3, window, softcap)
    for s in range(len(context_lens)):
        expected = plain_attention(q[s : s + 1], case.keys[s], case.values[s], 0.3, window, softcap)
        assert_close(ours[s : s + 1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 300), (130, 2), (130, 300), (16, 600), (700, 257)])
def test_prefill_under_a_window_and_a_soft_cap(cached, new, window, softcap, dtype):
    case = make_case([cached + new], dtype=dtype)
    q = torch.randn(new, 4, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    starts = np.asarray([0, new], dtype=np.int32)
    ours = reference.paged_prefill(q, case.blocks, 1, case.tables, case.context_lens, starts, 0.25, window, softcap)
    assert_close(ours, plain_attention(q, case.keys[0], case.values[0], 0.25, window, softcap))


def test_write_fills_its_slots_and_nothing_else():
    blocks = torch.zeros(5, 3, 2, 8, 2, 4)
    slots = np.asarray([4 * 8 + 7, 1 * 8, 2 * 8 + 3], dtype=np.int64)
    k, v = torch.randn(2, 3, 2, 4)
    reference.kv_write(blocks, 1, slots, k, v)
    for token, slot in enumerate(slots):
        written = blocks[slot // 8, 1, :, slot % 8]
        assert torch.equal(written, torch.stack((k[token], v[token])))
        written.zero_()
    assert not blocks.any()


def test_contexts_of_very_different_length_are_read_apart():
    lens = np.asarray([1000, 10, 12, 900, 200], dtype=np.int32)
    tables = np.arange(5 * 63, dtype=np.int32).reshape(5, 63)
    plans = reference.plan_decode(tables, lens, 2, 16, torch.float32, torch.device("cpu"))
    read = sum(plan.num_sequences * plan.context_len for plan in plans)
    assert read < 1.5 * lens.sum()
    assert sorted(m for plan in plans for m in plan.members.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 6])
def test_it_does_not_matter_how_queries_lie_in_memory(num_seqs, window, softcap):
    """Models hand over views of many kinds: tokens outermost, heads outermost, a part of a wider tensor."""
    case = make_case([5 + 9 * s for s in range(num_seqs)])
    q = torch.randn(num_seqs, 4, 16)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    part = torch.cat((q, q), -1)[..., 16:]
    starts = np.array([0, num_seqs])
    for other in (by_head, part):
        for kernel, tables, lens in (
            (reference.paged_decode, case.tables, case.context_lens),
            (lambda *a: reference.paged_prefill(*a[:5], starts, *a[5:]), case.tables[-1:], case.context_lens[-1:]),
        ):
            expected = kernel(q, case.blocks, 1, tables, lens, 0.3, window, softcap)
            torch.testing.assert_close(kernel(other, case.blocks, 1, tables, lens, 0.3, window, softcap), expected)
