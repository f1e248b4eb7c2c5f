"""What `aot` compiles is what the wrappers launch: argument types, what Triton is told of their values, compile-time
arguments, warps and stages.

Launches are caught before they reach a device, and each is described as Triton itself would describe it there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tieredkv.kernels import aot, block_copy, kv_write, paged_decode, paged_prefill
from tieredkv.kernels.device import DeviceFacts
from tieredkv.kernels.launch import DEFAULT_NUM_SMS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Change a divisor and a mask, but no tile: `aot` lets them take turns.
TAKING_TURNS = {"GROUP", "BLOCK_SIZE", "NUM_KV_HEADS"}
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
# Of wide tiles only.
MORE_OPTIONS = {"maxnreg"}

Launch = tuple[object, ...]


def describe(kernel: JITFunction, arch: int, types, attributes, constants, options) -> Launch:
    constants = {name: value for name, value in constants.items() if name not in TAKING_TURNS}
    assert set(options) - MORE_OPTIONS == OPTIONS
    return (
        kernel.fn.__name__,
        arch,
        tuple(types.items()),
        tuple(sorted((at, str(what)) for at, what in attributes.items())),
        tuple(sorted(constants.items())),
        tuple(sorted(options.items())),
    )


def compiled(variant: aot.Variant) -> Launch:
    import sys

    kernel = getattr(sys.modules[variant.module], variant.kernel)
    types, attributes = aot.signature_of(kernel, variant)
    return describe(
        kernel,
        variant.arch,
        types,
        attributes,
        variant.constants,
        aot.launch_options(variant.num_warps, variant.num_stages),
    )


class Catcher:
    """Takes the place of a kernel's launch."""

    def __init__(self, kernel: JITFunction, arch: int, found: set[Launch]) -> None:
        self._kernel, self._arch, self._found = kernel, arch, found
        self._backend = make_backend(GPUTarget("cuda", arch, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)

    def __call__(self, *args, grid, warmup, **kwargs) -> None:
        bound, specialization, options = self._bind(*args, **kwargs)
        types, attributes, constants = {}, {}, {}
        for at, (parameter, (kind, key)) in enumerate(zip(self._kernel.params, specialization, strict=True)):
            types[parameter.name] = kind
            if kind == "constexpr":
                assert parameter.is_constexpr, f"{parameter.name} was made a constant because of its value"
                constants[parameter.name] = bound[parameter.name]
            elif key:
                attributes[(at,)] = self._backend.parse_attr(key)
        self._found.add(describe(self._kernel, self._arch, types, attributes, constants, options))


@pytest.fixture(params=aot.ARCHS)
def launched(request, monkeypatch) -> tuple[int, set[Launch]]:
    """The architecture, and what was launched on it."""
    arch, found = request.param, set()
    kernels = [
        paged_decode.decode_kernel,
        paged_decode.merge_kernel,
        paged_prefill.prefill_kernel,
        kv_write.kv_write_kernel,
        block_copy.block_copy_kernel,
    ]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "run", Catcher(kernel, arch, found))
    for module in (paged_decode, paged_prefill):
        monkeypatch.setattr(module, "device_facts", lambda device: DeviceFacts(arch, DEFAULT_NUM_SMS))
    return arch, found


def problems() -> Iterator[tuple[torch.dtype, int, int, int, int, float]]:
    """(type, head dim, query heads per key head, key heads, window, softcap)."""
    groups = (1, 4, 9, 17, 64)
    for dtype, head_dim, group, window, softcap in itertools.product(
        DTYPES.values(), aot.HEAD_DIMS, groups, (0, 17), (0.0, 2.0)
    ):
        yield dtype, head_dim, group, 3, window, softcap


def test_all_that_is_launched_is_compiled(launched):
    arch, found = launched
    for dtype, head_dim, group, kv_heads, window, softcap in problems():
        blocks = torch.empty(2, 3, 2, 16, kv_heads, head_dim, dtype=dtype)
        # As a model hands them over: heads outermost, in one tensor with keys and values; the decodes come first.
        fused = torch.empty(7, (group + 2) * kv_heads * head_dim, dtype=dtype)
        sizes = [n * kv_heads * head_dim for n in (group, 1, 1)]
        q, k, v = (part.view(7, -1, head_dim) for part in fused.split(sizes, dim=-1))
        out = torch.empty(7, group * kv_heads, head_dim, dtype=dtype)
        # Arrays of a step lie in one buffer: tables and lengths begin anywhere in it.
        tables, lens = torch.ones(5, 40, dtype=torch.int32)[1:], torch.full((5,), 9, dtype=torch.int32)[1:]
        starts = torch.tensor([0, 3, 4, 5, 7], dtype=torch.int32)[1:]
        options = {"window": window, "softcap": softcap}
        kv_write.kv_write(blocks, 1, torch.arange(8)[1:], k, v)
        for num, num_splits in ((1, None), (3, 1), (3, 4)):
            launch = paged_decode.launch_for(q[:num], kv_heads, 640, num_splits)
            paged_decode.paged_decode(
                q[:num], blocks, 2, tables[:num], lens[:num], 0.1, out=out[:num], launch=launch, **options
            )
        paged_prefill.paged_prefill(q, blocks, 1, tables[:3], lens[:3], starts, 0.1, out=out, **options)
        block_copy.block_copy(blocks, blocks, torch.tensor([[0, 1]]))
    known = {compiled(variant) for variant in aot.variants([arch])}
    assert len(found) > 100
    assert found <= known, "\n".join(map(str, sorted(found - known, key=str)[:5]))


def test_a_launch_that_is_not_compiled_is_noticed(launched):
    arch, found = launched
    q, blocks = torch.empty(1, 4, 64), torch.empty(2, 1, 2, 16, 4, 64)
    launch = paged_decode.launch_for(q, 4, 64, 1)
    other = dataclasses.replace(launch, tile=dataclasses.replace(launch.tile, num_stages=1))
    tables, lens = torch.ones(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    paged_decode.paged_decode(q, blocks, 0, tables, lens, 0.1, launch=other)
    assert found
    assert not found & {compiled(variant) for variant in aot.variants([arch])}
