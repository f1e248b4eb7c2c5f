"""The CPU's own kernels equal the definition in float64, for any number of rows, shape, and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from tieredkv.fused import rotate
from tieredkv.kernels import cpu_decode, cpu_jit, cpu_linear, cpu_prefill, cpu_rotary, reference
from tieredkv.linear import StackedLinear
from tieredkv.norm import Norm

needs_jit = pytest.mark.skipif(not cpu_jit.is_available(), reason="needs AVX512 with bfloat16, and llvmlite")


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def deviation(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest number expected; NaN where a NaN is."""
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


@needs_jit
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 32), (64, 96), (576, 960), (1536, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 40, 257])
@pytest.mark.usefixtures("threads")
def test_products_equal_the_definition(rows: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, num_in).bfloat16(), torch.randn(num_out, num_in).bfloat16()
    bias, residual = torch.randn(num_out).bfloat16(), torch.randn(rows, num_out).bfloat16()
    scale = torch.rand(num_in).bfloat16()
    packed, gated = cpu_linear.pack(weight), cpu_linear.pack(weight, gated=True)
    plain = x.double() @ weight.double().T
    assert deviation(cpu_linear.linear(x, packed), plain) < 6e-3
    both = cpu_linear.linear(x, packed, bias=bias, residual=residual)
    assert deviation(both, plain + bias.double() + residual.double()) < 6e-3
    # A normalised row is rounded once before it is multiplied.
    unit = functional.rms_norm(x.double(), (num_in,), scale.double(), 1e-5).bfloat16().double() @ weight.double().T
    assert deviation(cpu_linear.linear(x, packed, norm=(scale, 1e-5)), unit) < 1e-2
    gate, up = (unit + bias.double()).chunk(2, -1)
    multiplied = cpu_linear.linear(x, gated, norm=(scale, 1e-5), gated=True, bias=bias)
    assert deviation(multiplied, functional.silu(gate) * up) < 1e-2


@needs_jit
def test_large_gates_neither_overflow_nor_vanish() -> None:
    weight = torch.eye(32).bfloat16()
    x = torch.tensor([-3e4, -100, -20, -1, 0, 1, 20, 100, 3e4] + [1.0] * 23).bfloat16()[None]
    x[0, 16:] = 1.0
    got = cpu_linear.linear(x, cpu_linear.pack(weight, gated=True), gated=True)[0]
    assert torch.allclose(got.double(), functional.silu(x[0, :16].double()), rtol=5e-3, atol=1e-6)


@needs_jit
@pytest.mark.parametrize("window", [0, 1, 7, 20])
@pytest.mark.parametrize("lens", [[1], [5, 16, 17, 300], [33, 1, 40], [64] * 8], ids=str)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "block_size"),
    [(64, 9, 3, 16), (32, 4, 4, 16), (128, 8, 1, 32), (96, 4, 2, 16), (256, 2, 1, 48)],
)
@pytest.mark.usefixtures("threads")
def test_decode_reads_its_own_blocks_alone(
    dim: int, heads: int, kv_heads: int, block_size: int, lens: list[int], window: int
) -> None:
    """Every block that no sequence owns is NaN, as is every block before a window."""
    rng = np.random.default_rng(sum(lens))
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in lens]
    blocks = torch.full((sum(counts) + 6, 2, 2, block_size, kv_heads, dim), float("nan")).bfloat16()
    tables = np.full((len(lens), max(counts)), sum(counts) + 3, np.int32)
    ids = iter(rng.permutation(np.arange(1, sum(counts) + 1)).tolist())
    for sequence, (count, length) in enumerate(zip(counts, lens, strict=True)):
        tables[sequence, :count] = [next(ids) for _ in range(count)]
        first = max(length - window, 0) // block_size if window else 0
        for block in tables[sequence, first:count]:
            blocks[block] = torch.randn(blocks.shape[1:]).bfloat16()
    q = 2 * torch.randn(len(lens), heads + 2, dim).bfloat16()[:, :heads]
    context_lens = np.array(lens, np.int32)
    got = cpu_decode.paged_decode(q, blocks, 1, tables, context_lens, 0.125, window)
    # The definition may read before the window.
    known = blocks.double().nan_to_num()
    expected = reference.paged_decode(q.double(), known, 1, tables, context_lens, 0.125, window)
    assert deviation(got, expected) < 1e-2


@needs_jit
@pytest.mark.parametrize("window", [0, 7, 70])
@pytest.mark.parametrize(
    ("context_len", "tokens"), [(1, 1), (5, 3), (64, 64), (65, 10), (130, 40), (300, 17), (333, 300), (340, 256)]
)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "block_size"), [(64, 9, 3, 16), (32, 4, 4, 16), (128, 8, 1, 32), (96, 4, 2, 48)]
)
@pytest.mark.usefixtures("threads")
def test_prefill_reads_its_own_blocks_alone(
    dim: int, heads: int, kv_heads: int, block_size: int, context_len: int, tokens: int, window: int
) -> None:
    """Every block that the sequence does not own is NaN, as is every block before the first query's window."""
    torch.manual_seed(0)
    num_blocks = -(-context_len // block_size)
    blocks = torch.full((num_blocks + 6, 2, 2, block_size, kv_heads, dim), float("nan")).bfloat16()
    table = np.random.default_rng(context_len).permutation(np.arange(1, num_blocks + 1)).astype(np.int32)
    first = max(context_len - tokens + 1 - window, 0) // block_size if window else 0
    blocks[table[first:]] = torch.randn(num_blocks - first, *blocks.shape[1:]).bfloat16()
    q = 2 * torch.randn(tokens, heads + 2, dim).bfloat16()[:, :heads]
    got = cpu_prefill.paged_prefill(q, blocks, 1, table, context_len, 0.125, window)
    known, lens, starts = (
        blocks.double().nan_to_num(),
        np.array([context_len], np.int32),
        np.array([0, tokens], np.int32),
    )
    expected = reference.paged_prefill(q.double(), known, 1, table[None], lens, starts, 0.125, window)
    assert deviation(got, expected) < 1e-2


@needs_jit
def test_far_apart_scores_keep_their_maximum() -> None:
    """The first keys score highest, then come 500 that are far below, and the other way round."""
    blocks = torch.zeros(40, 1, 2, 16, 1, 32).bfloat16()
    tables = np.arange(1, 33, dtype=np.int32)[None]
    q = torch.ones(1, 1, 32).bfloat16()
    for hot in (1, 32):
        blocks.zero_()
        blocks[:, 0, 0] = -30.0
        blocks[hot, 0, 0, 3] = 30.0
        blocks[hot, 0, 1, 3] = 1.0
        got = cpu_decode.paged_decode(q, blocks, 0, tables, np.array([512], np.int32), 1.0)
        assert torch.equal(got, torch.ones_like(got))


@needs_jit
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("dim", "turned", "heads", "kv_heads"), [(64, 64, 9, 3), (128, 64, 2, 1), (96, 32, 3, 3), (32, 32, 4, 2)]
)
@pytest.mark.usefixtures("threads")
def test_rotation_and_writing_equal_their_definitions(
    dim: int, turned: int, heads: int, kv_heads: int, tokens: int
) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).bfloat16()
    angles = torch.rand(tokens, 1, turned // 2) * 6.3
    cos = torch.cat((angles.cos(), angles.cos(), torch.ones(tokens, 1, dim - turned)), -1).bfloat16()
    sin = angles.sin().repeat(1, 1, 2).bfloat16()[..., : turned // 2]
    slots = np.random.default_rng(tokens).permutation(16 * 6)[:tokens].astype(np.int64)
    blocks = torch.full((6, 2, 2, 16, kv_heads, dim), float("nan")).bfloat16()
    expected_blocks = blocks.double()
    rotated = rotate(qkv[:, : heads + kv_heads].double(), cos.double(), sin.double())
    v = qkv[:, heads + kv_heads :].double()
    reference.kv_write(expected_blocks, 1, slots, rotated[:, heads:], v)
    plan = reference.plan_write(slots, 2, 16, torch.device("cpu"))
    cpu_rotary.rotate_and_store(qkv, kv_heads, cos, sin, blocks.view(-1, kv_heads * dim), plan.rows[1])
    assert deviation(qkv[:, :heads], rotated[:, :heads]) < 4e-3
    assert torch.equal(blocks.isnan(), expected_blocks.isnan())
    assert deviation(blocks.nan_to_num(), expected_blocks.nan_to_num()) < 4e-3


@needs_jit
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_same_with_and_without(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    modules = [torch.nn.Linear(64, 96, bias=bias).bfloat16() for _ in range(2)]
    norm = Norm(torch.rand(64).bfloat16(), 1e-5)
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 192).bfloat16()
    results = []
    for can_run in (cpu_linear.can_run, lambda: False):
        monkeypatch.setattr(cpu_linear, "can_run", can_run)
        plain, gated = StackedLinear(modules), StackedLinear(modules)
        plain.pack(release=False)
        gated.pack(release=False, gated=True)
        with torch.inference_mode():
            results.append((plain(x), plain(x, norm), plain.add(x, residual), gated.gated(x, norm)))
    for ours, theirs in zip(*results, strict=True):
        assert deviation(ours, theirs.double()) < 2e-2


def test_float32_and_odd_shapes_go_through_torch() -> None:
    for module in (torch.nn.Linear(64, 64), torch.nn.Linear(64, 50).bfloat16(), torch.nn.Linear(20, 64).bfloat16()):
        linear = StackedLinear([module])
        linear.pack(release=False)
        x = torch.randn(3, module.in_features).to(module.weight.dtype)
        assert deviation(linear(x), module(x).detach().double()) < 1e-2


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_jit.SWITCH, "0")
    cpu_jit.is_available.cache_clear()
    try:
        assert not cpu_jit.is_available()
    finally:
        monkeypatch.undo()
        cpu_jit.is_available.cache_clear()


def test_what_does_not_compile_is_said_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("unknown intrinsic")

    cached = (cpu_linear.can_run, cpu_linear._kernel, cpu_decode.can_run, cpu_decode._kernel)
    monkeypatch.setattr(cpu_jit, "is_available", lambda: True)
    monkeypatch.setattr(cpu_jit, "compile_kernel", refuse)
    monkeypatch.setattr(cpu_jit, "I64", None, raising=False)
    monkeypatch.setattr(cpu_jit, "F64", None, raising=False)
    for function in cached:
        function.cache_clear()
    try:
        for _ in range(2):
            assert not cpu_decode.can_run(64, 3, 16)
        assert len(caplog.records) == 1
    finally:
        for function in cached:
            function.cache_clear()
