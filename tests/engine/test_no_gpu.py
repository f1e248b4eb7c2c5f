"""Without a GPU, and without CuPy: everything imports and serves, and asking for CUDA says in one line what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.truth import check, load, random_prompt
from tests.fake_cuda import FakeCuda
from tieredkv import build, cuda_runtime, kernel_step
from tieredkv.build import check_device, load_runner
from tieredkv.cli.main import main
from tieredkv.config import Config
from tieredkv.cuda_transfer import CudaCopyEngine
from tieredkv.errors import ConfigError
from tieredkv.storage.memory import PinnedMemory

ROOT = Path(__file__).resolve().parents[2]
# Imports that fail as they do where the package is not installed.
BLOCKED = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_everything_imports_without_cupy_and_without_triton_of_ours():
    code = BLOCKED.format(names={"cupy"}) + (
        "import tieredkv, tieredkv.build, tieredkv.engine, tieredkv.llm, tieredkv.server.main, tieredkv.cli.main\n"
        "import tieredkv.model_runner, tieredkv.cuda_transfer, tieredkv.cuda_graphs, tieredkv.storage.memory\n"
        "ours = ('tieredkv.kernels.paged', 'tieredkv.kernels.kv_write', 'tieredkv.kernels.block_copy')\n"
        "print(sorted(m for m in sys.modules if m.startswith(('cupy', *ours))))\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


class Cuda:
    """`torch.cuda` as it answers on some machine."""

    def __init__(self, monkeypatch, *, available: bool, built: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "cuda", built)


def config(**settings) -> Config:
    return Config.load({"device": "cuda", "model": "no-model-is-needed-to-find-out"} | settings)


def hide(monkeypatch, *names: str) -> None:
    for module in (cuda_runtime, kernel_step):
        find_spec = module.importlib.util.find_spec
        monkeypatch.setattr(
            module.importlib.util, "find_spec", lambda n, *r, f=find_spec: None if n in names else f(n, *r)
        )


def test_torch_without_cuda(monkeypatch):
    Cuda(monkeypatch, available=False, built=None)
    with pytest.raises(ConfigError, match=r"device: cuda is not available: .* install a CUDA build of torch"):
        load_runner(config())


def test_cuda_without_a_driver(monkeypatch):
    Cuda(monkeypatch, available=False)
    with pytest.raises(ConfigError, match=r"is built for CUDA 13\.0 but finds no usable GPU or driver"):
        load_runner(config())


def test_cuda_without_cupy_serves_only_without_tiers(monkeypatch):
    Cuda(monkeypatch, available=True)
    hide(monkeypatch, "cupy")
    with pytest.raises(ConfigError, match=r"need CuPy: .*pip install 'tieredkv\[cuda\]'.*--host-memory 0"):
        load_runner(config())
    with pytest.raises(ConfigError, match="need CuPy"):
        check_device(config(device="auto"))
    for without in ({"host_memory": "0"}, {"enable_prefix_caching": False}):
        check_device(config(**without))
    with pytest.raises(ConfigError, match="need CuPy"):
        check_device(config(host_memory="0", disk_path="/somewhere"))


def test_cuda_without_triton(monkeypatch):
    Cuda(monkeypatch, available=True)
    hide(monkeypatch, "triton")
    with pytest.raises(ConfigError, match="Triton is not installed"):
        check_device(config(host_memory="0"))


def test_on_a_cpu_nothing_is_missing(monkeypatch):
    Cuda(monkeypatch, available=False, built=None)
    hide(monkeypatch, "cupy", "triton")
    for device in ("cpu", "auto"):
        check_device(config(device=device))


def test_the_command_line_answers_in_one_line(monkeypatch, capsys):
    Cuda(monkeypatch, available=False, built=None)
    code = main(["serve", "--device", "cuda", "--port", "0", "no-model-is-needed-to-find-out"])
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert "cuda is not available" in error[-1]
    assert not any("Traceback" in line for line in error)


# With a GPU, as far as a CPU can show it


class SelfCrankingCuda(FakeCuda):
    """Does one thing, of those that may be done, whenever it is asked whether something has happened."""

    def has_happened(self, event: int) -> bool:
        if streams := self.runnable():
            self.crank(streams[-1])
        return super().has_happened(event)


class FakeRegistration:
    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


def test_the_engine_restores_exactly_through_the_cuda_copy_engine(folder, monkeypatch):
    """The tiers over page-locked memory and event-ordered copies, on a device that takes its time."""
    cuda, registration = SelfCrankingCuda(), FakeRegistration()

    def copying_for(runner, wake):
        pool = runner.pool
        engine = CudaCopyEngine(
            pool.blocks.data_ptr(), pool.num_blocks, pool.layout.block_nbytes, cuda, lambda: 0, wake
        )
        return (lambda nbytes, granule: PinnedMemory(nbytes, granule, registration)), engine

    monkeypatch.setattr(build, "copying_for", copying_for)
    path = folder("llama")
    settings = {"num_gpu_blocks_override": 24, "max_model_len": 256, "restore": "always", "host_memory": "4MiB"}
    with load(path, **settings) as llm:
        assert sum(registration.registered.values()) == llm.core.tiers.host.capacity_nbytes
        prompts = [random_prompt(100 + i, seed=1000 + i) for i in range(6)]
        restored = 0
        for _ in range(2):
            for prompt in prompts:
                restored += check(llm, path, [prompt], num_tokens=6)[0].sources.host
                for _ in range(2000):
                    if not llm.core.work_idle():
                        break
                    llm.core.wait(0.001)
        assert restored >= 4 * 96
    assert list(cuda.streams) == [0]


def test_parts_for_a_gpu_are_those_of_cuda(monkeypatch):
    made = {}
    monkeypatch.setattr(build, "CupyRuntime", FakeCuda)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.setdefault("device", device) and stream)
    pool = SimpleNamespace(
        device=torch.device("cuda", 0),
        blocks=SimpleNamespace(data_ptr=lambda: 4096),
        num_blocks=3,
        layout=SimpleNamespace(block_nbytes=64),
    )
    allocate, copies = build.copying_for(SimpleNamespace(pool=pool), lambda: None)
    assert allocate is PinnedMemory
    assert isinstance(copies, CudaCopyEngine)
    copies.close()
