"""Runs batches: owns the pool, drives the model from outside, samples.

The model is a transformers module that attends through `attention.paged_attention`; all new tokens of all sequences go
through it as one row. On a CPU the step attends in plain torch. On CUDA it attends through the kernels, its arrays go up in
one transfer, and decodes replay graphs. Knows nothing of which block holds what, of waiting requests, or of tiers.

Invariants: `execute` computes logits only where a token is sampled and returns one `SampledToken` per entry of
`batch.sampled`, in its order; a model whose logits differ from stock transformers never gets past `self_check`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tieredkv import fused, models
from tieredkv.attention import AttentionStep, KVBatch, register
from tieredkv.batch import Batch, SampledToken, build_batch
from tieredkv.config import Config
from tieredkv.cuda_graphs import Capture, CudaCapture, DecodeGraphs
from tieredkv.errors import DeviceLostError, UnsupportedModelError
from tieredkv.kernel_step import MOST_HEAD_DIM, KernelOps, KernelStep, ops_for
from tieredkv.models import LoadedModel
from tieredkv.pool import KVPool
from tieredkv.pool_plan import most_blocks, plan_num_blocks, synthetic_batch
from tieredkv.runtime import num_cores
from tieredkv.sampler import Sampler
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.staging import StepTensors, UploadRing, events_of
from tieredkv.types import EngineRequest, SamplingParams

logger = logging.getLogger(__name__)

# What the first prompt would wait for: on a GPU kernels made on demand; on a CPU, once the model was checked, fresh memory
# alone, which is at most 30 ms for 1,024 tokens.
_WARM_UP_TOKENS = {"cuda": 512, "cpu": 64}
_CHECK_TOKENS = 40
# Sequences side by side: prefills together, decodes beside a prefill, many decodes, and a few, which the CPU attends to in
# another way.
_CHECK_PARTS = [(21, 1, 1, 1), (17, 19, 1, 1), (9, 1, 1), (30, 1, 1)]
# Largest difference of logits from stock transformers, as a share of the largest stock logit.
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
# In half precision also: this many times the difference that two of transformers' own attentions make.
_CHECK_NOISE_RATIO = 4.0


class Forward(Protocol):
    """One pass of a model: logits [N, vocabulary] of the `rows` [N] of the tokens; token_ids, positions int64 [T]."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, kv_batch: AttentionStep
    ) -> torch.Tensor: ...


class Running:
    """A step that was launched. `result` waits for it: one `SampledToken` per entry of `batch.sampled`, in its order. It raises
    what went wrong, or `DeviceLostError` when `device` does nothing any more.
    """

    def __init__(self, finish: Callable[[], list[SampledToken]], device: torch.device) -> None:
        self._finish = finish
        self._device = device

    @torch.inference_mode()
    def result(self) -> list[SampledToken]:
        with _telling_if_lost(self._device):
            return self._finish()


@contextlib.contextmanager
def _telling_if_lost(device: torch.device) -> Iterator[None]:
    """Turn an error after which even waiting for the device fails into `DeviceLostError`: such errors of CUDA stay."""
    try:
        yield
    except Exception as error:
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except Exception as lost:
                raise DeviceLostError(f"{device} is lost ({lost}) after {type(error).__name__}: {error}") from error
        raise


class ModelRunner:
    """One loaded model with its block pool. Used by one thread.

    `ops` are the kernels to attend with and `capture` is what captures decode steps; by default those of the device.
    """

    def __init__(
        self, loaded: LoadedModel, config: Config, *, ops: KernelOps | None = None, capture: Capture | None = None
    ) -> None:
        """Raises `ConfigError` when the pool would not hold even one block for a sequence, or when the device's kernels are
        not installed, and `UnsupportedModelError` for a model that they do not serve.
        """
        register()
        self.loaded = loaded
        self.layout = loaded.layout
        self.device = loaded.device
        if loaded.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(num_cores())
        ops = ops if ops is not None else ops_for(loaded.device)
        if ops is not None and loaded.layout.head_dim > MOST_HEAD_DIM:
            raise UnsupportedModelError(
                f"{loaded.name}: heads of {loaded.layout.head_dim} numbers, the kernels serve up to {MOST_HEAD_DIM}"
            )
        self._path = _HostPath() if ops is None else _KernelPath(ops, loaded.device)
        self._prepared = _prepare(loaded, self._path)
        self.forward = self._prepared.forward
        self.num_blocks = plan_num_blocks(loaded, config, lambda batch, pool: self._path.run(self.forward, batch, pool))
        self.pool = KVPool(loaded.layout, self.num_blocks, loaded.device, loaded.dtype)
        self._graphs = self._make_graphs(config, capture)
        self._sampler = Sampler(config.model.seed)
        self._end = events_of(loaded.device)()

    @property
    def replays(self) -> bool:
        """Whether decode steps are replayed from graphs."""
        return self._graphs is not None

    def execute(self, batch: Batch) -> list[SampledToken]:
        """Compute the batch's tokens into the pool and sample where a sequence reaches its end."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Running:
        """Start computing the batch. On CUDA this returns while the device works; one step may be running at a time.

        Raises what went wrong, or `DeviceLostError` when the device does nothing any more.
        """
        with _telling_if_lost(self.device):
            logits = self.logits(batch)
            if not batch.sampled:
                # Nothing to fetch, but the step's time is measured, so its end is awaited all the same.
                self._end.record()
                return Running(self._nothing_sampled, self.device)
            return Running(self._sampler.start(logits, [part.sequence for part in batch.sampled]), self.device)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Run the batch; [N, vocabulary], one row per entry of `batch.sampled`. Valid until the next step."""
        if self._graphs is not None and isinstance(self._path, _KernelPath) and self._graphs.covers(batch):
            return self._graphs.replay(batch, self._path.ring)
        return self._path.run(self.forward, batch, self.pool)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a long prompt once and capture the decode steps, so that the first request does not wait for memory, for kernels
        made on demand, or for graphs.
        """
        # Kernels that are interpreted have nothing to warm up.
        if self.device.type == "cuda" or isinstance(self._path, _HostPath):
            num_tokens = min(_WARM_UP_TOKENS.get(self.device.type, 512), self.loaded.max_model_len)
            self._path.run(self.forward, *synthetic_batch(self.loaded, num_tokens, num_tokens))
        if self._graphs is not None and isinstance(self._path, _KernelPath):
            try:
                self._graphs.capture_all()
                self._check_replay(self._graphs, self._path)
            except Exception as error:
                # Some models decide on the host what to run, as mixtures of experts do.
                logger.warning("%s cannot be captured, decodes run eagerly: %s", self.loaded.name, error)
                self._graphs = None

    def _check_replay(self, graphs: DecodeGraphs, path: _KernelPath) -> None:
        """Compare a replayed step with the same step run eagerly, in blocks that nobody owns yet. Raises
        `UnsupportedModelError`.
        """
        # Three, where there is room: the fourth row is padding.
        num = min(3, graphs.sizes[-1], self.num_blocks - 1)
        parts = []
        for block_id, token_id in enumerate(_check_prompt(self.loaded.vocab_size)[:num], start=1):
            sequence = Sequence(EngineRequest("check", [token_id], SamplingParams()), b"")
            sequence.block_ids = array("i", [block_id])
            parts.append(ScheduledSequence(sequence, 0, 1))
        batch = build_batch(parts, self.layout.block_size)
        replayed = graphs.replay(batch, path.ring).clone()
        expected = path.run(self.forward, batch, self.pool)
        deviation = _difference(replayed, expected) / _largest(expected)
        if not deviation <= self._prepared.tolerance:
            raise UnsupportedModelError(f"a replay differs from the step it repeats by {deviation:.2g}")

    def _nothing_sampled(self) -> list[SampledToken]:
        self._end.synchronize()
        return []

    def _make_graphs(self, config: Config, capture: Capture | None) -> DecodeGraphs | None:
        """The graphs of this pool and model, not captured yet; None where decodes run eagerly."""
        path, loaded = self._path, self.loaded
        if capture is None and loaded.device.type == "cuda":
            capture = CudaCapture()
        if capture is None or config.model.enforce_eager or not isinstance(path, _KernelPath):
            return None
        return DecodeGraphs(
            lambda step: path.run_step(self.forward, step, len(step.context_lens), self.pool),
            capture,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_blocks=most_blocks(loaded, config, self.num_blocks),
            vocab_size=loaded.vocab_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )

    def self_check(self) -> None:
        """Compare logits of the whole path (prefill in parts, decode, both mixed) with stock transformers'.

        Raises `UnsupportedModelError` with the deviation when it is larger than rounding explains.
        """
        deviation = _deviation(self.loaded, self._prepared, self._path, _CHECK_PARTS)
        tolerance = self._prepared.tolerance
        if not deviation <= tolerance:
            raise UnsupportedModelError(
                f"{self.loaded.name}: logits differ from stock transformers by {deviation:.2g} of the largest logit, "
                f"more than {tolerance:g}: this model would be served wrongly"
            )


class _HostPath:
    """Batches in plain torch."""

    def run(self, forward: Forward, batch: Batch, pool: KVPool) -> torch.Tensor:
        """One pass over `batch`, with keys and values in `pool`; logits [N, vocabulary]."""
        return forward(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.logits_indices),
            KVBatch(batch, pool),
        )


class _KernelPath:
    """Batches through the kernels, their arrays staged by `ring`."""

    def __init__(self, ops: KernelOps, device: torch.device) -> None:
        self._ops = ops
        self.ring = UploadRing(device)

    def run(self, forward: Forward, batch: Batch, pool: KVPool) -> torch.Tensor:
        """One pass over `batch`, with keys and values in `pool`; logits [N, vocabulary]."""
        return self.run_step(forward, self.ring.stage(batch), batch.num_decodes, pool)

    def run_step(self, forward: Forward, step: StepTensors, num_decodes: int, pool: KVPool) -> torch.Tensor:
        """The same from tensors on the device."""
        return forward(
            step.token_ids, step.positions, step.logits_indices, KernelStep(self._ops, pool, step, num_decodes)
        )


_Path = _HostPath | _KernelPath


@dataclass(slots=True)
class _Prepared:
    """How a model is run, stock transformers' logits [_CHECK_TOKENS, vocabulary] of the check prompt, and how far ours may
    be from them, as a share of the largest."""

    forward: Forward
    stock_logits: torch.Tensor
    tolerance: float


# Preparing a model on the CPU empties its modules, so a second runner must find what the first one made.
_prepared_models: WeakKeyDictionary[torch.nn.Module, _Prepared] = WeakKeyDictionary()


def _prepare(loaded: LoadedModel, path: _Path) -> _Prepared:
    """Choose the forward for this model and device; the fused one only after its logits were seen to be stock's."""
    known = _prepared_models.get(loaded.model)
    if known is not None:
        return known
    prompt = _check_prompt(loaded.vocab_size)
    # transformers' SDPA leaves soft-capping out.
    capped = any(loaded.facts.softcaps)
    expected = models.stock_logits(loaded.model, prompt, "eager" if capped else "sdpa")
    tolerance = _CHECK_TOLERANCE[loaded.dtype]
    if loaded.dtype != torch.float32 and not capped:
        noise = _difference(models.stock_logits(loaded.model, prompt, "eager"), expected)
        tolerance = max(tolerance, _CHECK_NOISE_RATIO * noise / _largest(expected))
    prepared = _Prepared(StockForward(loaded.model), expected, tolerance)
    fits = isinstance(path, _HostPath) and loaded.facts.is_plain
    if fits:
        _leave_files(loaded.model)
    candidate = fused.from_model(loaded.model, loaded.layout) if fits else None
    if candidate is not None:
        prepared.forward = candidate
        deviation = _deviation(loaded, prepared, path, _CHECK_PARTS[:1])
        if deviation <= tolerance:
            candidate.pack()
        else:
            logger.warning("%s: fused layers deviate by %.2g, running transformers' own", loaded.name, deviation)
            prepared.forward = StockForward(loaded.model)
    _prepared_models[loaded.model] = prepared
    return prepared


def _leave_files(model: torch.nn.Module) -> None:
    """Give the weights that are never packed, those of norms and biases, memory of their own: checkpoints are mapped files,
    which stay in memory as a whole, beside what was packed, as long as one tensor lies in them.
    """
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.clone()


@torch.inference_mode()
def _deviation(loaded: LoadedModel, prepared: _Prepared, path: _Path, all_parts: Seq[tuple[int, ...]]) -> float:
    """Compute the check prompt once per entry of `all_parts`, step by step in the same batches, in a pool of its own.

    Returns the largest deviation from the stock logits, as a share of the largest stock logit.
    """
    block_size = loaded.layout.block_size
    num_blocks = -(-_CHECK_TOKENS // block_size)
    prompt = _check_prompt(loaded.vocab_size)
    pool = KVPool(loaded.layout, 1 + num_blocks * len(all_parts), loaded.device, loaded.dtype)
    sequences = [Sequence(EngineRequest("check", prompt, SamplingParams()), b"") for _ in all_parts]
    for i, sequence in enumerate(sequences):
        sequence.block_ids = array("i", range(1 + i * num_blocks, 1 + (i + 1) * num_blocks))
    worst = 0.0
    for step in range(max(map(len, all_parts))):
        scheduled = []
        for sequence, parts in zip(sequences, all_parts, strict=True):
            if step < len(parts):
                start = sum(parts[:step])
                sequence.token_ids = prompt[: start + parts[step]]
                scheduled.append(ScheduledSequence(sequence, start, parts[step]))
        scheduled.sort(key=lambda part: part.num_new != 1)
        ours = path.run(prepared.forward, build_batch(scheduled, block_size), pool)
        rows = torch.tensor([part.end - 1 for part in scheduled], device=loaded.device)
        difference = _difference(ours, prepared.stock_logits[rows])
        if math.isnan(difference):
            return difference
        worst = max(worst, difference)
    return worst / _largest(prepared.stock_logits)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest absolute difference; NaN where one of them holds a NaN."""
    return (ours.float() - theirs.float()).abs().max().item()


def _largest(logits: torch.Tensor) -> float:
    return max(logits.abs().max().item(), 1e-9)


class StockForward:
    """The transformers model driven from outside: everything as it computes it, but attention."""

    def __init__(self, model: Any) -> None:
        # Weak: the registry of prepared models must not keep a model alive that nobody else uses.
        self._model = weakref.ref(model)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, kv_batch: AttentionStep
    ) -> torch.Tensor:
        """See `Forward`."""
        model: Any = self._model()
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            kv_batch=kv_batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _check_prompt(vocab_size: int) -> list[int]:
    """A fixed pseudo-random prompt of `_CHECK_TOKENS` ids."""
    ids: list[int] = np.random.default_rng(0).integers(0, vocab_size, _CHECK_TOKENS).tolist()
    return ids
