"""How many blocks the pool gets, and how many of them one sequence can fill. Worked out once, before the pool exists.

On a GPU the pool takes what weights, one step's activations and the captured graphs leave of `gpu_memory_utilization`; the
activations are found by running the largest step. On a CPU it takes a share of the free memory. Knows a model and settings;
no requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from tieredkv.batch import Batch, build_batch
from tieredkv.config import Config, format_size
from tieredkv.cuda_graphs import graphs_nbytes
from tieredkv.errors import ConfigError
from tieredkv.models import LoadedModel
from tieredkv.pool import KVPool
from tieredkv.runtime import free_memory_nbytes
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.types import EngineRequest, SamplingParams

_CPU_POOL_MOST_NBYTES = 4 * 1024**3

# Computes a batch in a pool.
Run = Callable[[Batch, KVPool], object]


def plan_num_blocks(loaded: LoadedModel, config: Config, run: Run) -> int:
    """How many blocks the pool gets, the null block included. Raises `ConfigError` when not one usable block fits."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    block_nbytes = loaded.layout.block_nbytes
    if cache.kv_cache_memory is not None:
        room, key = cache.kv_cache_memory, "kv_cache_memory"
        num_blocks = room // block_nbytes
    else:
        room = _room_nbytes(loaded, config, run)
        key = "gpu_memory_utilization" if loaded.device.type == "cuda" else "kv_cache_memory"
        most_useful = 1 + config.scheduler.max_num_seqs * -(-loaded.max_model_len // cache.block_size)
        num_blocks = min(room // block_nbytes, most_useful)
    if num_blocks < 2:
        raise ConfigError(
            f"{format_size(room)} for the block pool is less than two blocks of {format_size(block_nbytes)}", key=key
        )
    return num_blocks


def _room_nbytes(loaded: LoadedModel, config: Config, run: Run) -> int:
    """Bytes that the pool may take where the user named no size."""
    if loaded.device.type != "cuda":
        return min(free_memory_nbytes() // 4, _CPU_POOL_MOST_NBYTES)
    free, total = torch.cuda.mem_get_info(loaded.device)
    used = total - free
    graphs = 0
    if not config.model.enforce_eager:
        max_blocks = -(-loaded.max_model_len // config.cache.block_size)
        graphs = graphs_nbytes(config.scheduler.max_num_seqs, max_blocks, loaded.vocab_size, loaded.dtype)
    room = int(total * config.cache.gpu_memory_utilization) - used - graphs
    return max(room - _activation_nbytes(loaded, config, run), 0)


@torch.inference_mode()
def _activation_nbytes(loaded: LoadedModel, config: Config, run: Run) -> int:
    """Peak bytes that the largest step takes beside weights and pool, found by running one on the GPU."""
    num_tokens = config.scheduler.max_num_batched_tokens
    batch, pool = synthetic_batch(loaded, num_tokens, min(num_tokens, loaded.max_model_len))
    torch.cuda.synchronize(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    run(batch, pool)
    torch.cuda.synchronize(loaded.device)
    return torch.cuda.max_memory_allocated(loaded.device) - before + pool.nbytes


def most_blocks(loaded: LoadedModel, config: Config, num_blocks: int) -> int:
    """Blocks of the longest sequence that can run."""
    longest = min(loaded.max_model_len, config.model.max_model_len or loaded.max_model_len)
    return min(-(-longest // config.cache.block_size), num_blocks - 1)


def synthetic_batch(loaded: LoadedModel, num_tokens: int, longest: int) -> tuple[Batch, KVPool]:
    """A prefill of `num_tokens` in sequences of at most `longest` tokens, and a pool of its own for it.

    The sequences share their blocks: what is computed means nothing.
    """
    block_size = loaded.layout.block_size
    num_blocks = -(-longest // block_size)
    pool = KVPool(loaded.layout, 1 + num_blocks, loaded.device, loaded.dtype)
    scheduled = []
    for start in range(0, num_tokens, longest):
        num_new = min(longest, num_tokens - start)
        sequence = Sequence(EngineRequest("synthetic", [0] * num_new, SamplingParams()), b"")
        sequence.block_ids = array("i", range(1, 1 + num_blocks))
        scheduled.append(ScheduledSequence(sequence, 0, num_new))
    scheduled.sort(key=lambda part: part.num_new != 1)
    return build_batch(scheduled, block_size), pool
