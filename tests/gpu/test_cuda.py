"""On a real GPU: copies, kernels, graphs and tiers together. Run by `pytest -m gpu`; everything here has a CPU counterpart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.truth import check, load, random_prompt
from tests.models_for_tests import WINDOWED, build
from tieredkv.transfer import Copy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("batched", [True, False])
def test_copies_are_exact_and_ordered(batched):
    from tieredkv.cuda_runtime import CupyRuntime
    from tieredkv.cuda_transfer import CudaCopyEngine
    from tieredkv.storage.memory import PinnedMemory

    nbytes, num = 256 * 1024, 64
    pool = torch.zeros((num, nbytes), dtype=torch.uint8, device="cuda")
    memory = PinnedMemory(num * nbytes, nbytes)
    slots = [memory.view[i * nbytes : (i + 1) * nbytes] for i in range(num)]
    runtime = CupyRuntime()
    if not batched:
        runtime._batch_copy = None
    engine = CudaCopyEngine(pool.data_ptr(), num, nbytes, runtime, lambda: torch.cuda.current_stream().cuda_stream)
    busy = torch.randn((4096, 4096), device="cuda")

    def finish(copy: Copy) -> None:
        while copy not in engine.poll():
            pass
        assert copy.error is None

    for value in range(1, 6):
        # The fill is queued behind work that takes a while; the copy must wait for it.
        for _ in range(8):
            busy = busy @ busy / 4096
        pool.fill_(value)
        copy = Copy(range(num), slots, to_device=False)
        engine.launch(copy)
        finish(copy)
        assert all((np.frombuffer(slot, np.uint8) == value).all() for slot in slots)
    order = list(reversed(range(num)))
    for i, slot in enumerate(slots):
        np.frombuffer(slot, np.uint8)[:] = i
    up = Copy(order, slots, to_device=True)
    engine.launch(up)
    finish(up)
    assert pool[:, 0].tolist() == list(reversed(range(num)))
    engine.close()
    memory.close()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("arch", ["llama", *WINDOWED])
def test_cold_warm_restored_and_preempted_equal_stock(arch, eager, tmp_path):
    path = build(arch, tmp_path / arch, head_dim=64)
    settings = {
        "device": "cuda",
        "num_gpu_blocks_override": 24,
        "max_model_len": 256,
        "restore": "always",
        "host_memory": "64MiB",
        "disk_path": str(tmp_path / "store"),
        "enforce_eager": eager,
    }
    prompts = [random_prompt(100 + i, seed=1000 + i) for i in range(6)]
    restored = 0
    with load(path, **settings) as llm:
        for _ in range(2):
            for prompt in prompts:
                restored += check(llm, path, [prompt], num_tokens=12)[0].sources.host
                for _ in range(2000):
                    if not llm.core.work_idle():
                        break
                    llm.core.wait(0.01)
        check(llm, path, prompts, num_tokens=40)
    assert restored >= 4 * 96
    with load(path, **settings | {"host_memory": "0"}) as llm:
        assert check(llm, path, [prompts[0]], num_tokens=12)[0].sources.disk == 96
