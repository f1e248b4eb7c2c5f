"""Attention of one step through the kernels, from tensors that are on the device already.

Decodes are the leading sequences of a step and go through `paged_decode` in one call; all others go through
`paged_prefill` in one call that writes its rows of the same output. Nothing here depends on the layer, allocates by the
contents of a tensor or waits for the device, so a step of decodes alone may be captured in a graph and replayed after its
tensors have been filled anew.

Knows nothing of requests or of who owns a block. Invariant: what is read is what the tables and lengths name, so leftovers
in fresh blocks need no clearing.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol

import torch

from tieredkv.errors import ConfigError
from tieredkv.pool import KVPool
from tieredkv.staging import StepTensors

# Wider heads do not fit in a multiprocessor's shared memory with the recorded tiles.
MOST_HEAD_DIM = 256
# The kernels count with 32 bits from a token's first head to its last, which with heads outermost spans all tokens.
_MOST_HEAD_OFFSET = 2**31 - 1


class KVWrite(Protocol):
    """`kernels.kv_write.kv_write`."""

    def __call__(
        self, blocks: torch.Tensor, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None: ...


class PagedDecode(Protocol):
    """`kernels.paged_decode.paged_decode`."""

    def __call__(
        self,
        q: torch.Tensor,
        blocks: torch.Tensor,
        layer: int,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PagedPrefill(Protocol):
    """`kernels.paged_prefill.paged_prefill`."""

    def __call__(
        self,
        q: torch.Tensor,
        blocks: torch.Tensor,
        layer: int,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class KernelOps:
    """The kernels that a step calls."""

    kv_write: KVWrite
    paged_decode: PagedDecode
    paged_prefill: PagedPrefill


def ops_for(device: torch.device) -> KernelOps | None:
    """The Triton kernels for a CUDA device, or for a CPU when Triton's interpreter is asked for (`TRITON_INTERPRET=1`); None
    where plain torch serves. Raises `ConfigError` when Triton is missing for CUDA.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if device.type != "cuda" and not interpreted:
        return None
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("Triton is not installed: pip install 'tieredkv[cuda]', or triton", key="device")
    from tieredkv.kernels.kv_write import kv_write
    from tieredkv.kernels.paged_decode import paged_decode
    from tieredkv.kernels.paged_prefill import paged_prefill

    return KernelOps(kv_write, paged_decode, paged_prefill)


class KernelStep:
    """One step's view of the pool, as `attention.AttentionStep`. Sequences `[0, num_decodes)` have one new token each."""

    def __init__(self, ops: KernelOps, pool: KVPool, step: StepTensors, num_decodes: int) -> None:
        self._ops = ops
        self._blocks = pool.blocks
        self._slots = step.slots
        self._num_decodes = num_decodes
        num_sequences = len(step.context_lens)
        self._decodes = (step.block_tables[:num_decodes], step.context_lens[:num_decodes])
        self._prefills = None
        if num_decodes < num_sequences:
            self._prefills = (
                step.block_tables[num_decodes:],
                step.context_lens[num_decodes:],
                step.query_starts[num_decodes:],
            )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `attention.AttentionStep`."""
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        self._ops.kv_write(self._blocks, layer, self._slots, k, v)

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        """See `attention.AttentionStep`."""
        num = self._num_decodes
        if q.stride(2) != 1 or q.stride(1) * q.shape[1] > _MOST_HEAD_OFFSET:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if num:
            tables, lens = self._decodes
            self._ops.paged_decode(
                q[:num], self._blocks, layer, tables, lens, scale, window=window, softcap=softcap, out=out[:num]
            )
        if self._prefills is not None:
            self._ops.paged_prefill(
                q, self._blocks, layer, *self._prefills, scale, window=window, softcap=softcap, out=out
            )
        return out
