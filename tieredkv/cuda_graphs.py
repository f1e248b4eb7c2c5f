"""Decode steps replayed as CUDA graphs: the host launches one graph instead of hundreds of kernels.

A graph is captured once for each padded size, over buffers that stay where they are:

    batch of n decodes -> next size s >= n -> rows n..s are padding -> fill the buffers -> replay -> the first n logits

A padding row is token 0 at position 0 of an empty context; its key and value go to the null block, which nobody reads. The
graphs share one memory pool and one logits buffer, since only one of them runs at a time.

Knows no requests and no sampling. What captures and replays is handed in, so that everything but CUDA's own part runs on
a CPU as well. Invariant: a replay computes what the same batch computes without a graph, up to rounding by batch shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tieredkv.batch import Batch
from tieredkv.staging import StepTensors, UploadRing

# Bytes that CUDA keeps for each captured graph beside its buffers; an allowance, not a measurement.
GRAPH_NBYTES = 8 * 1024**2

# Runs a function once in a way that it can be repeated, and returns what repeats it on the same memory.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded batch sizes, ascending: 1, 2, 4, then multiples of 8, and the largest batch itself."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 1, 8)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class CudaCapture:
    """`Capture` by CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        # Whatever is made on first use (kernels, workspaces) must not be made during the capture.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do with CUDA meanwhile, such as waiting for a copy, does not spoil the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


class DecodeGraphs:
    """Captured decode steps of up to `max_num_seqs` sequences with up to `max_blocks` blocks each.

    `run(step)` computes a step of decodes from its tensors and returns logits [rows, vocabulary]; `logits_like` is a
    tensor of their type on their device.
    """

    def __init__(
        self,
        run: Callable[[StepTensors], torch.Tensor],
        capture: Capture,
        *,
        max_num_seqs: int,
        max_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._run = run
        self._capture = capture
        self._max_blocks = max_blocks
        self.sizes = graph_sizes(max_num_seqs)
        # token ids, positions, slots: one row each, so that one copy fills all three for any size.
        self._wide = torch.zeros(3 * max_num_seqs, dtype=torch.int64, device=device)
        self._lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._rows = torch.arange(max_num_seqs, dtype=torch.int64, device=device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._logits = torch.zeros((max_num_seqs, vocab_size), dtype=dtype, device=device)
        self._replays: dict[int, Callable[[], None]] = {}

    def capture_all(self) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self.sizes):
            self._replays[size] = self._capture(self._function(size))

    def covers(self, batch: Batch) -> bool:
        """Whether the batch is one that can be replayed: decodes that are all sampled."""
        num = batch.num_sequences
        return (
            batch.num_decodes == num == len(batch.sampled)
            and num <= self.sizes[-1]
            and batch.block_tables.shape[1] <= self._max_blocks
            and bool(self._replays)
        )

    def replay(self, batch: Batch, ring: UploadRing) -> torch.Tensor:
        """Logits [n, vocabulary] of a batch that `covers` accepts. They are overwritten by the next replay."""
        num = batch.num_sequences
        size = next(size for size in self.sizes if size >= num)
        wide = np.zeros((3, size), dtype=np.int64)
        wide[:, :num] = batch.token_ids, batch.positions, batch.slots
        lens = np.zeros(size, dtype=np.int32)
        lens[:num] = batch.context_lens
        # Padding rows read nothing, so what their tables hold does not matter.
        staged_wide, staged_lens, staged_tables = ring.upload([wide, lens, batch.block_tables])
        self._wide[: 3 * size].copy_(staged_wide.view(-1))
        self._lens[:size].copy_(staged_lens)
        self._tables[:num, : staged_tables.shape[1]].copy_(staged_tables)
        self._replays[size]()
        return self._logits[:num]

    def _function(self, size: int) -> Callable[[], None]:
        token_ids, positions, slots = self._wide[: 3 * size].view(3, size).unbind(0)
        step = StepTensors(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            logits_indices=self._rows[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._lens[:size],
            block_tables=self._tables[:size],
        )
        logits = self._logits[:size]

        def run() -> None:
            logits.copy_(self._run(step))

        return run


def graphs_nbytes(max_num_seqs: int, max_blocks: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes to set aside for `DecodeGraphs` of these sizes."""
    buffers = max_num_seqs * (vocab_size * dtype.itemsize + max_blocks * 4)
    return buffers + GRAPH_NBYTES * len(graph_sizes(max_num_seqs))
