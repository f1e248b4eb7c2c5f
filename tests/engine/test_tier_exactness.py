"""Exactness through the tiers: in fp32, greedy tokens equal stock transformers' also when the blocks come back from host
memory, from disk, after a restart, and after a kill; and restored bytes equal spilled bytes.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.truth import check, greedy, load, random_prompt
from tests.models_for_tests import ARCHITECTURES, WINDOWED
from tieredkv import LLM
from tieredkv.storage.disk import DiskStore
from tieredkv.types import TokenSources

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_gpu_blocks_override": 24, "max_model_len": 256, "restore": "always"}


def prompts_of(num: int, length: int = 100) -> list[list[int]]:
    return [random_prompt(length + i, seed=1000 + i) for i in range(num)]


def settle(llm: LLM) -> None:
    """Idle until nothing more can be saved."""
    for _ in range(2000):
        if not llm.core.work_idle():
            return
        llm.core.wait(0.01)
    raise AssertionError("the tiers do not come to rest")


def ask_twice(llm, path, prompts) -> list[TokenSources]:
    """Where the tokens of each prompt came from when it was asked again, after all the others."""
    found = []
    for again in (False, True):
        for prompt in prompts:
            output = check(llm, path, [prompt], num_tokens=8)[0]
            settle(llm)
            if again:
                assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
                found.append(output.sources)
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_host_restored(arch, folder):
    path = folder(arch)
    llm = load(path, **SMALL, host_memory="64MiB")
    assert sum(sources.host for sources in ask_twice(llm, path, prompts_of(6))) >= 4 * 96
    assert llm.close()


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_disk_restored_and_restarted(arch, folder, tmp_path):
    path = folder(arch)
    settings = {**SMALL, "host_memory": "0", "disk_path": str(tmp_path / "store"), "disk_size": "256MiB"}
    prompts = prompts_of(6)
    with load(path, **settings) as llm:
        assert sum(sources.disk for sources in ask_twice(llm, path, prompts)) >= 4 * 96
    with load(path, **settings) as llm:
        # All at once, some of them twice: restores, computes and single flight side by side.
        for output in check(llm, path, [*prompts, *prompts[:2]], num_tokens=8)[: len(prompts)]:
            assert output.sources.disk == (len(output.prompt_token_ids) - 1) // 16 * 16


@pytest.mark.parametrize("arch", [ARCHITECTURES[0], *WINDOWED])
@pytest.mark.parametrize("length", [16, 96])
def test_a_prompt_that_is_resident_in_full_computes_its_last_token_alone(arch, length, folder, tmp_path):
    path = folder(arch)
    prompt = random_prompt(length, seed=5)
    store = {"disk_path": str(tmp_path / "store")}
    with load(path, **SMALL, **store, host_memory="16MiB") as llm:
        check(llm, path, [prompt], num_tokens=20)
        settle(llm)
        assert check(llm, path, [prompt], num_tokens=20)[0].sources.device == length - 1
        for other in prompts_of(6):
            check(llm, path, [other], num_tokens=4)
            settle(llm)
        assert check(llm, path, [prompt], num_tokens=20)[0].sources.host == length - 1
    with load(path, **SMALL, **store, host_memory="0") as llm:
        outputs = check(llm, path, [prompt, prompt], num_tokens=20)
        assert outputs[0].sources.disk == length - 1
        assert all(output.sources.computed == 1 for output in outputs)


def test_preemption_over_the_tiers(folder, tmp_path):
    path = folder(ARCHITECTURES[0])
    settings = {
        "num_gpu_blocks_override": 12,
        "max_model_len": 128,
        "restore": "always",
        "host_memory": "16MiB",
        "disk_path": str(tmp_path / "store"),
    }
    with load(path, **settings) as llm:
        check(llm, path, [random_prompt(40, seed=n) for n in range(5)], num_tokens=40)
        assert llm.core.scheduler.num_preemptions > 0
        check(llm, path, [random_prompt(40, seed=n) for n in range(5)], num_tokens=40)


@pytest.mark.parametrize("change", ["dtype", "block_size", "salt"])
def test_what_differs_never_hits(change, folder, tmp_path):
    path = folder(ARCHITECTURES[0])
    settings = {**SMALL, "disk_path": str(tmp_path / "store")}
    prompt = random_prompt(100, seed=1)
    with load(path, **settings) as llm:
        llm.generate(prompt, greedy(4))
    changed = {
        "dtype": {"dtype": "bfloat16"},
        "block_size": {"block_size": 8, "num_gpu_blocks_override": 48},
        "salt": {},
    }[change]
    with load(path, **settings | changed) as llm:
        salt = "tenant" if change == "salt" else None
        assert llm.generate(prompt, greedy(4), cache_salt=salt)[0].num_cached_tokens == 0
    with load(path, **settings) as llm:
        assert llm.generate(prompt, greedy(4))[0].sources.disk == 96


def test_two_models_share_a_directory(folder, tmp_path):
    settings = {**SMALL, "disk_path": str(tmp_path / "store")}
    prompt = random_prompt(100, seed=1)
    for arch in ARCHITECTURES[:3]:
        with load(folder(arch), **settings) as llm:
            assert check(llm, folder(arch), [prompt], num_tokens=4)[0].num_cached_tokens == 0
    for arch in ARCHITECTURES[:3]:
        with load(folder(arch), **settings) as llm:
            assert check(llm, folder(arch), [prompt], num_tokens=4)[0].sources.disk == 96


def test_restored_bytes_equal_spilled_bytes(folder, tmp_path):
    path = folder(ARCHITECTURES[0])
    prompt = random_prompt(200, seed=1)
    seen: list[dict[bytes, bytes]] = []
    for _ in range(2):
        with load(path, **SMALL, disk_path=str(tmp_path / "store"), kv_codec="zstd") as llm:
            llm.generate(prompt, greedy(2))
            blocks = llm.runner.pool.as_bytes()
            pool = llm.core.pool
            seen.append({pool.hash_of(i): blocks[i].tobytes() for i in range(1, pool.num_blocks) if pool.hash_of(i)})
    assert seen[0] == seen[1]
    assert len(seen[0]) == 12


CHILD = """
import sys
sys.path.insert(0, {root!r})
from tests.engine.test_tier_exactness import SMALL, greedy, load, prompts_of
llm = load({path!r}, **SMALL, host_memory="16MiB", disk_path={store!r})
print("ready", flush=True)
round = 0
while True:
    for prompt in prompts_of(6):
        llm.generate(prompt, greedy(8))
        for _ in range(4):
            llm.core.work_idle()
            llm.core.wait(0.002)
    round += 1
    print("round", round, flush=True)
"""


def run_and_kill(path: Path, store: str, after_s: float) -> None:
    """Serve prompts from a process of its own and kill it `after_s` seconds after its first round."""
    code = CHILD.format(root=str(ROOT), path=str(path), store=store)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout.readline().strip() == "ready"
        assert child.stdout.readline().startswith("round")
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)


def check_store(store: str) -> None:
    disk = DiskStore.open(store)
    try:
        assert disk.verify().problems == []
    finally:
        disk.close()


def check_after_kill(path: Path, store: str) -> None:
    with load(path, **SMALL, host_memory="0", disk_path=store) as llm:
        outputs = [check(llm, path, [prompt], num_tokens=8)[0] for prompt in prompts_of(6)]
    assert sum(o.sources.disk for o in outputs) > 0


def test_after_a_kill(folder, tmp_path):
    path = folder(ARCHITECTURES[0])
    store = str(tmp_path / "store")
    run_and_kill(path, store, after_s=0.05)
    check_store(store)
    check_after_kill(path, store)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_after_many_kills(folder, tmp_path):
    path = folder(ARCHITECTURES[0])
    store = str(tmp_path / "store")
    rng = random.Random(3)
    for _ in range(25):
        run_and_kill(path, store, after_s=rng.random() / 2)
        check_store(store)
    check_after_kill(path, store)
