"""The Triton kernels as far as a machine without a GPU can tell: some cases in the interpreter, some compiled.

`make kernels-test` runs all cases, `make kernels-aot` compiles all variants.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_kernels_equal_the_oracle_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not matrix"]
    done = subprocess.run(
        [*command, "tests/kernels/interpreter"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def variant(kernel: str, arch: int = 90, dtype: str = "bf16"):
    from tieredkv.kernels import aot

    return next(v for v in aot.variants([arch], quick=True) if v.kernel == kernel and v.dtype == dtype)


@pytest.mark.parametrize("kernel", ["decode_kernel", "merge_kernel", "prefill_kernel", "kv_write_kernel"])
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(kernel):
    from tieredkv.kernels import aot

    usage = aot.compile_variant(variant(kernel))
    assert usage.problem == ""
    assert 0 < usage.num_registers <= 255
    assert kernel in aot.row(usage)


def test_what_does_not_fit_is_a_problem():
    from tieredkv.kernels import aot

    hungry = aot.compile_variant(dataclasses.replace(variant("decode_kernel", arch=80), num_stages=12))
    assert "shared memory" in hungry.problem
    assert "spills" in dataclasses.replace(hungry, stack_nbytes=8).problem
    broken = aot.compile_variant(dataclasses.replace(variant("decode_kernel"), constants={}))
    assert broken.problem


def test_every_kernel_type_option_and_size_is_compiled():
    from tieredkv.kernels import aot

    variants = list(aot.variants(aot.ARCHS))
    assert {v.arch for v in variants} == {80, 90, 100}
    for kernel in ("decode_kernel", "prefill_kernel"):
        mine = [v for v in variants if v.kernel == kernel]
        assert {v.dtype for v in mine} == {"fp32", "fp16", "bf16"}
        assert {v.constants["HEAD_DIM"] for v in mine} == {64, 80, 96, 128, 256}
        assert {v.constants["BLOCK_SIZE"] for v in mine} == {8, 16, 32, 64, 128}
        assert {(v.constants["HAS_WINDOW"], v.constants["HAS_SOFTCAP"]) for v in mine} == {
            (False, False),
            (False, True),
            (True, False),
            (True, True),
        }
    assert {v.constants["SPLIT"] for v in variants if v.kernel == "decode_kernel"} == {False, True}
