"""The engine over the kernels, end to end. Run by `test_kernel_engine.py` in a process with `TRITON_INTERPRET=1`, since Triton
decides at import whether it interprets.
"""

from __future__ import annotations

import pytest

from tests.engine.truth import check, load, random_prompt
from tests.models_for_tests import build
from tieredkv.kernel_step import ops_for

SMALL = {"num_gpu_blocks_override": 6, "max_model_len": 64, "restore": "always", "block_size": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """One layer with a window, one without, both with capped scores: everything that the kernels can do."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return build("gemma2", tmp_path_factory.mktemp("gemma2"), **small)


def settle(llm) -> None:
    for _ in range(2000):
        if not llm.core.work_idle():
            return
        llm.core.wait(0.01)
    raise AssertionError("the tiers do not come to rest")


def test_the_kernels_are_what_runs(path):
    with load(path, **SMALL, host_memory="0") as llm:
        assert ops_for(llm.runner.device) is not None
        assert type(llm.runner._path).__name__ == "_KernelPath"


def test_cold_warm_host_and_disk(path, tmp_path):
    """One prompt after another through every tier, each time with the tokens of stock transformers."""
    prompts = [random_prompt(length, seed=length) for length in (33, 40, 49)]
    store = {**SMALL, "disk_path": str(tmp_path / "store")}
    with load(path, **store, host_memory="1MiB") as llm:
        sources = []
        for prompt in [prompts[0], *prompts, prompts[0]]:
            sources.append(check(llm, path, [prompt], num_tokens=4)[0].sources)
            settle(llm)
        assert (sources[0].device, sources[1].device) == (0, 32)
        assert sources[4].host == 32
    with load(path, **store, host_memory="0") as llm:
        for output in check(llm, path, prompts[:2], num_tokens=4):
            assert output.sources.disk == 32


def test_preempted_and_in_parts(path):
    settings = {**SMALL, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with load(path, **settings, host_memory="0") as llm:
        prompts = [random_prompt(length, seed=length) for length in (30, 31)]
        check(llm, path, prompts, num_tokens=6)
        assert llm.core.scheduler.num_preemptions > 0
