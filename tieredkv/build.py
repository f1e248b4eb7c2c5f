"""Puts an engine core together from settings: model, pool, tiers.

The only place that knows which implementation serves on which device. Derived sizes are worked out here or by those who
need them; settings are never changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tieredkv.blocks import BlockPool
from tieredkv.config import Config, format_size
from tieredkv.core import EngineCore
from tieredkv.cuda_runtime import CupyRuntime, cupy_problem
from tieredkv.cuda_transfer import CudaCopyEngine
from tieredkv.disk_tier import ThreadedDisk
from tieredkv.errors import ConfigError, StorageError
from tieredkv.gate import CostGate
from tieredkv.metrics import EngineMetrics
from tieredkv.runtime import free_memory_nbytes
from tieredkv.storage.autocodec import make_codec
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.host import MIN_STAGING_SLOTS, HostArena
from tieredkv.storage.medium import Medium
from tieredkv.storage.memory import PAGE_NBYTES, Allocator, PinnedMemory, PlainMemory
from tieredkv.storage.workers import StorageWorkers
from tieredkv.tiers import Tiers
from tieredkv.transfer import CopyEngine, ThreadCopyEngine

if TYPE_CHECKING:
    from tieredkv.model_runner import ModelRunner
    from tieredkv.models import LoadedModel

Progress = Callable[[str, float], None]
Wake = Callable[[], None]

_CPU_HOST_MOST_NBYTES = 4 * 1024**3
# Page-locking takes about 0.1 s a GiB at every start.
_CUDA_HOST_MOST_NBYTES = 32 * 1024**3
# What one step may start to spill there: a step of 8,192 tokens makes about as much, and DMA moves it in 20 ms.
_CUDA_SPILL_NBYTES = 1024**3
# With the host tier off, what passes between device and disk: enough for a batch each way.
_STAGING_NBYTES = 64 * 1024**2


def load_runner(config: Config, progress: Progress | None = None, loaded: LoadedModel | None = None) -> ModelRunner:
    """Load the model (unless it is `loaded` already), size the pool, and compare the whole path with stock transformers on a
    short prompt; takes seconds.

    Raises `ConfigError` or `UnsupportedModelError`.
    """
    from tieredkv.model_runner import ModelRunner
    from tieredkv.models import load_model

    check_device(config)
    report = progress or (lambda stage, fraction: None)
    loaded = loaded or load_model(config.model, config.cache.block_size, progress)
    report("Preparing the model", 0.92)
    runner = ModelRunner(loaded, config)
    report("Comparing with stock transformers", 0.95)
    runner.self_check()
    # What the first request would otherwise wait for happens here.
    report("Warming up", 0.98)
    runner.warm_up()
    report("Ready", 1.0)
    return runner


def check_device(config: Config) -> None:
    """Raise `ConfigError` with what to install when the device that `config` leads to lacks something; takes no time."""
    from tieredkv.kernel_step import ops_for
    from tieredkv.models import choose_device

    device = choose_device(config.model.device)
    ops_for(device)
    if device.type == "cuda" and _has_tiers(config) and (problem := cupy_problem()) is not None:
        raise ConfigError(
            f"the tiers below the GPU need CuPy: {problem}. Without them: --host-memory 0 --disk-path none",
            key="device",
        )


def build_core(
    runner: ModelRunner,
    config: Config,
    *,
    clock: Callable[[], float] = time.monotonic,
    medium: Medium | None = None,
) -> EngineCore:
    """The core for a loaded model: the longest sequence is what model, settings and pool allow together. `medium` is what
    touches the disk tier's files, if not the plain one.

    Raises `ConfigError` when `max_model_len` was asked for and does not fit, or when a tier cannot be had as asked for.
    """
    loaded = runner.loaded
    fits = (runner.num_blocks - 1) * config.cache.block_size
    wanted = config.model.max_model_len
    if wanted is not None and wanted > loaded.max_model_len:
        raise ConfigError(
            f"the model was made for at most {loaded.max_model_len} tokens, got {wanted}", key="max_model_len"
        )
    if wanted is not None and wanted > fits:
        raise ConfigError(
            f"the pool of {runner.num_blocks} blocks holds {fits} tokens, fewer than the {wanted} asked for; "
            "give it more memory (--kv-cache-memory) or ask for less",
            key="max_model_len",
        )
    name = config.model.served_model_name[0] if config.model.served_model_name else loaded.name
    metrics = EngineMetrics(name, config.server.metrics_prefix)
    metrics.describe(
        {
            "block_size": config.cache.block_size,
            "cache_dtype": loaded.layout.dtype,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "gpu_memory_utilization": config.cache.gpu_memory_utilization,
            "num_gpu_blocks": runner.num_blocks,
            "block_nbytes": loaded.layout.block_nbytes,
        }
    )
    return EngineCore(
        runner,
        config,
        namespace=loaded.namespace.digest,
        max_model_len=min(loaded.max_model_len, fits, wanted or loaded.max_model_len),
        vocab_size=loaded.vocab_size,
        metrics=metrics,
        block_nbytes=loaded.layout.block_nbytes,
        clock=clock,
        make_tiers=_tiers_maker(runner, config, clock, medium),
    )


def _tiers_maker(
    runner: ModelRunner, config: Config, clock: Callable[[], float], medium: Medium | None
) -> Callable[[BlockPool, CostGate, Wake], Tiers] | None:
    """What makes the tiers below the device; None where there are to be none."""
    tiers, loaded = config.tiers, runner.loaded
    if not _has_tiers(config):
        return None
    block_nbytes = loaded.layout.block_nbytes

    def make(pool: BlockPool, gate: CostGate, wake: Wake) -> Tiers:
        host_nbytes = tiers.host_memory
        if host_nbytes is None:
            most_nbytes = _CPU_HOST_MOST_NBYTES if loaded.device.type == "cpu" else _CUDA_HOST_MOST_NBYTES
            host_nbytes = min(free_memory_nbytes() // 4, most_nbytes)
        least_nbytes = MIN_STAGING_SLOTS * (block_nbytes + PAGE_NBYTES)
        if 0 < host_nbytes < least_nbytes:
            raise ConfigError(
                f"must be 0 or at least {format_size(least_nbytes)} for blocks of {format_size(block_nbytes)}",
                key="host_memory",
            )
        allocate, copies = copying_for(runner, wake)
        try:
            host = HostArena(
                block_nbytes,
                host_nbytes,
                allocate=allocate,
                staging_slots=MIN_STAGING_SLOTS if host_nbytes else max(_STAGING_NBYTES // block_nbytes, 8),
            )
        except StorageError as error:
            copies.close()
            raise ConfigError(str(error), key="host_memory") from error
        disk = None
        if tiers.disk_path is not None:
            disk = ThreadedDisk(
                _store_opener(runner, config, Path(tiers.disk_path).expanduser(), wake, medium),
                loaded.namespace.digest,
                tiers.restore_timeout,
                clock,
            )
        made = Tiers(
            pool,
            copies,
            host,
            disk,
            gate,
            clock=clock,
            timeout_s=tiers.restore_timeout,
            block_nbytes=block_nbytes,
        )
        if loaded.device.type == "cuda":
            made.spiller.blocks_per_step = max(made.spiller.blocks_per_step, _CUDA_SPILL_NBYTES // block_nbytes)
        return made

    return make


def _has_tiers(config: Config) -> bool:
    tiers = config.tiers
    return config.cache.enable_prefix_caching and (tiers.host_memory != 0 or tiers.disk_path is not None)


def copying_for(runner: ModelRunner, wake: Wake) -> tuple[Allocator, CopyEngine]:
    """Where host slots come from and what copies between them and the pool's blocks, by the pool's device.

    Raises `ConfigError` when CUDA is used and CuPy is not there.
    """
    pool = runner.pool
    if pool.device.type == "cpu":
        return PlainMemory, ThreadCopyEngine(pool.as_bytes(), wake)
    import torch

    copies = CudaCopyEngine(
        pool.blocks.data_ptr(),
        pool.num_blocks,
        pool.layout.block_nbytes,
        CupyRuntime(),
        lambda: torch.cuda.current_stream(pool.device).cuda_stream,
        wake,
    )
    return PinnedMemory, copies


def _store_opener(
    runner: ModelRunner, config: Config, directory: Path, wake: Wake, medium: Medium | None
) -> Callable[[], StorageWorkers]:
    loaded = runner.loaded
    value_nbytes = loaded.layout.token_nbytes // (
        loaded.layout.num_layers * 2 * loaded.layout.num_kv_heads * loaded.layout.head_dim
    )
    about = json.dumps({"model": loaded.name, "dtype": loaded.layout.dtype, "block_size": loaded.layout.block_size})

    def open_store() -> StorageWorkers:
        codec = make_codec(config.tiers.kv_codec, value_nbytes, directory)
        store = DiskStore.open(directory, config.tiers.disk_size, codec=codec, medium=medium)
        workers = StorageWorkers(store, on_result=wake)
        workers.call(lambda: store.describe_namespace(loaded.namespace.digest, about))
        return workers

    return open_store
