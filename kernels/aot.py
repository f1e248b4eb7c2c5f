"""Compile every kernel ahead of time, on a machine without a GPU, and report what each takes: `python -m tieredkv.kernels.aot`.

    variants of a kernel  ->  Triton  ->  cubin  ->  cuobjdump  ->  registers, stack, shared memory

Tiles, compile-time arguments and options come from the functions that the wrappers call, argument types from the kernels'
own parameters, so what is checked is what is launched. Every type, head dim, option (window, softcap, split) and row
padding is compiled for every target; block sizes and query groups, which change a divisor and a mask but no tile, take
turns. Knows nothing of what the kernels compute.

Exits with 1 when a variant does not compile, has a stack (no kernel has local arrays, so a stack means that registers
were spilled to memory), or needs more shared memory than a block may have on its target.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tieredkv.kernels import block_copy, kv_write, paged_decode, paged_prefill
from tieredkv.kernels.launch import Tile, decode_tile, launch_options, prefill_tile

ARCHS = (80, 90, 100)
# Bytes of shared memory that one block may have (CUDA programming guide, technical specifications per capability).
MOST_SHARED_NBYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
# Query heads per key head, by the rows of a decode tile: 16, 32, 64.
GROUPS = ((1, 3, 4, 7, 8, 9, 16), (17, 32), (48, 64))
# Key heads of models in use; kv_write copies all of one token at once.
KV_HEADS = (1, 2, 3, 4, 8, 16, 32)

_POINTERS = {
    "tables_ptr": "*i32",
    "lens_ptr": "*i32",
    "starts_ptr": "*i32",
    "slots_ptr": "*i64",
    "pairs_ptr": "*i64",
    "log_sum_ptr": "*fp32",
    "partial_ptr": "*fp32",
}
_FLOATS = ("scale", "softcap")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation: the kernel's module and name, its target, the pool's type, compile-time arguments and options.

    pointers  types of pointers that differ from the kernel's usual ones
    """

    module: str
    kernel: str
    arch: int
    dtype: str
    label: str
    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int
    pointers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled variant takes: registers and stack bytes of a thread, shared memory of a block; or why it failed."""

    variant: Variant
    num_registers: int = 0
    stack_nbytes: int = 0
    shared_nbytes: int = 0
    error: str = ""

    @property
    def problem(self) -> str:
        """Why this variant must not ship; empty when it may."""
        if self.error:
            return self.error
        if self.stack_nbytes:
            return f"spills: a stack of {self.stack_nbytes} bytes"
        limit = MOST_SHARED_NBYTES[self.variant.arch]
        return f"shared memory: the target has {limit} bytes" if self.shared_nbytes > limit else ""


def variants(archs: Sequence[int], quick: bool = False) -> Iterator[Variant]:
    """Every specialisation to check. `quick` leaves out float16, which compiles as bfloat16 does, and some in between."""
    for arch in archs:
        yield from _decode_variants(arch, quick)
        yield from _prefill_variants(arch, quick)
        for dtype in ("bf16", "fp32") if quick else tuple(ITEMSIZE):
            yield from _merge_variants(arch, dtype, quick)
            yield from _write_variants(arch, dtype, quick)
        copy: dict[str, int | bool] = {"CHUNK": block_copy.CHUNK_WORDS, "STEP": block_copy.COPY_WARPS * 64}
        pointers = {"source_ptr": "*i64", "destination_ptr": "*i64"}
        yield Variant(
            block_copy.__name__, "block_copy_kernel", arch, "any", "", copy, block_copy.COPY_WARPS, 3, pointers
        )


def _problems(quick: bool) -> Iterator[tuple[str, int, bool, bool]]:
    """(dtype, head dim, window, softcap)."""
    dtypes = ("bf16", "fp32") if quick else tuple(ITEMSIZE)
    options = ((False, False), (True, True)) if quick else tuple(itertools.product((False, True), repeat=2))
    dims = (64, 80, 128, 256) if quick else HEAD_DIMS
    for dtype, head_dim, (window, softcap) in itertools.product(dtypes, dims, options):
        yield dtype, head_dim, window, softcap


def _label(group: int, head_dim: int, block_size: int, window: bool, softcap: bool) -> str:
    options = " window" * window + " softcap" * softcap
    return f"dim {head_dim} group {group} block {block_size}{options}"


def _decode_variants(arch: int, quick: bool) -> Iterator[Variant]:
    turn = itertools.count()
    for dtype, head_dim, window, softcap in _problems(quick):
        for groups, split in itertools.product(GROUPS[:1] if quick else GROUPS, (True,) if quick else (True, False)):
            at = next(turn)
            group, block_size = groups[at % len(groups)], BLOCK_SIZES[at % len(BLOCK_SIZES)]
            tile = decode_tile(ITEMSIZE[dtype], head_dim, group)
            constants = paged_decode.decode_constants(
                tile, group, head_dim, block_size, window=window, softcap=softcap, split=split, upcast=False
            )
            label = _label(group, head_dim, block_size, window, softcap) + " split" * split
            # Without parts the wrapper passes the output where the workspace would go.
            pointers = {} if split else {"partial_ptr": f"*{dtype}", "log_sum_ptr": f"*{dtype}"}
            yield Variant(
                paged_decode.__name__,
                "decode_kernel",
                arch,
                dtype,
                label,
                constants,
                tile.num_warps,
                tile.num_stages,
                pointers,
            )


def _prefill_variants(arch: int, quick: bool) -> Iterator[Variant]:
    turn = itertools.count()
    for dtype, head_dim, window, softcap in _problems(quick):
        at = next(turn)
        block_size = BLOCK_SIZES[at % len(BLOCK_SIZES)]
        # Wide groups may have a tile of their own; those that share one take turns.
        sharing: dict[Tile, list[int]] = {}
        for group in itertools.chain(*GROUPS):
            tile = prefill_tile(ITEMSIZE[dtype], head_dim, group, arch, options=window or softcap)
            sharing.setdefault(tile, []).append(group)
        for tile, groups in list(sharing.items())[: 1 if quick else None]:
            group = groups[at % len(groups)]
            constants = paged_prefill.prefill_constants(
                tile, group, head_dim, block_size, window=window, softcap=softcap, upcast=False
            )
            yield Variant(
                paged_prefill.__name__,
                "prefill_kernel",
                arch,
                dtype,
                _label(group, head_dim, block_size, window, softcap),
                constants,
                tile.num_warps,
                tile.num_stages,
                {},
            )


def _merge_variants(arch: int, dtype: str, quick: bool) -> Iterator[Variant]:
    for head_dim, window in itertools.product(HEAD_DIMS, (False,) if quick else (False, True)):
        constants = paged_decode.merge_constants(decode_tile(ITEMSIZE[dtype], head_dim, 1), head_dim, window=window)
        label = f"dim {head_dim}{' window' * window}"
        warps = paged_decode.MERGE_WARPS
        yield Variant(paged_decode.__name__, "merge_kernel", arch, dtype, label, constants, warps, 3, {})


def _write_variants(arch: int, dtype: str, quick: bool) -> Iterator[Variant]:
    shapes = ((8, 128), (3, 64), (32, 256)) if quick else itertools.product(KV_HEADS, HEAD_DIMS)
    for (num_kv_heads, head_dim), block_size in zip(shapes, itertools.cycle(BLOCK_SIZES), strict=False):
        constants = kv_write.write_constants(num_kv_heads, head_dim, block_size)
        label = f"dim {head_dim} heads {num_kv_heads} block {block_size}"
        warps = kv_write.write_warps(num_kv_heads, head_dim)
        yield Variant(kv_write.__name__, "kv_write_kernel", arch, dtype, label, constants, warps, 3, {})


def signature_of(kernel: Any, variant: Variant) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """(types, attributes) of a kernel's arguments as a launch would find them.

    Pointers and strides are multiples of 16 (head dims are), unless the kernel says that they are not to be looked at.
    """
    types: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            types[name] = variant.pointers.get(name) or _POINTERS.get(name) or f"*{variant.dtype}"
            aligned = not parameter.do_not_specialize_on_alignment
        else:
            types[name] = "fp32" if name in _FLOATS else "i32"
            aligned = name.startswith("stride_") and not parameter.do_not_specialize
        if aligned:
            attributes[(at,)] = [["tt.divisibility", 16]]
    return types, attributes


def compile_variant(variant: Variant) -> Usage:
    """Compile one variant and read its usage from the cubin."""
    kernel = getattr(sys.modules[variant.module], variant.kernel)
    types, attributes = signature_of(kernel, variant)
    source = ASTSource(kernel, types, dict(variant.constants), attributes)
    options = launch_options(variant.num_warps, variant.num_stages)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=options)
    except Exception as error:
        return Usage(variant, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    num_registers, stack_nbytes = _resources(compiled.asm["cubin"])
    return Usage(variant, num_registers, stack_nbytes, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of the one kernel in `cubin`, by the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = _RESOURCES.search(done.stdout)
    if found is None:
        raise ValueError(f"cuobjdump reported no resources: {done.stdout!r}")
    return int(found[1]), int(found[2])


HEADER = f"{'target':6} {'kernel':18} {'type':5} {'registers':>9} {'shared':>7} {'stack':>5}  variant"


def row(usage: Usage) -> str:
    """A line of the report."""
    v = usage.variant
    return (
        f"sm_{v.arch:<3} {v.kernel:18} {v.dtype:5} {usage.num_registers:9} {usage.shared_nbytes:7} "
        f"{usage.stack_nbytes:5}  {v.label}{f'  <-- {usage.problem}' if usage.problem else ''}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each variant and a summary; 1 when a variant has a problem."""
    parser = argparse.ArgumentParser(prog="tieredkv.kernels.aot", description="Compile all kernels without a GPU.")
    parser.add_argument("--quick", action="store_true", help="leave out what hardly differs from something compiled")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--arch", type=int, action="append", choices=sorted(MOST_SHARED_NBYTES), help="instead of all")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    options = parser.parse_args(arguments)
    wanted = [v for v in variants(options.arch or ARCHS, options.quick) if options.match in v.kernel]
    usages = []
    print(HEADER)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as processes:
        for usage in processes.map(compile_variant, wanted, chunksize=4):
            usages.append(usage)
            print(row(usage), flush=True)
    problems = sum(1 for usage in usages if usage.problem)
    registers = max(usage.num_registers for usage in usages)
    print(f"{len(usages)} variants compiled, at most {registers} registers, {problems} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
