"""Part "copies": blocks between host and device through the engine's own parts, beside one large copy of page-locked memory.

    one large copy          torch, one contiguous piece               the bus
    blocks, alone           copy engine, blocks in any order          share of the bus
    blocks, while decoding  the same beside a model that decodes      share of the bus, and what a decode step costs more

Block and slots are those of an 8B model (2 MiB); the decoding model has a pool of its own. Bytes are compared afterwards.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.gpu_check.device import times_s
from benchmarks.gpu_check.random_model import make_runner, settings, shared_model
from benchmarks.gpu_check.report import Row, share_row
from benchmarks.gpu_check.worker import Context
from tieredkv.batch import build_batch
from tieredkv.build import copying_for
from tieredkv.layout import KVLayout
from tieredkv.model_runner import ModelRunner
from tieredkv.pool import KVPool
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.storage.host import HostArena
from tieredkv.storage.memory import REGISTER_CHUNK_NBYTES
from tieredkv.transfer import Copy, CopyEngine
from tieredkv.types import EngineRequest, SamplingParams

COPY_TARGET = 0.9
DIRECTIONS = {"host to device": True, "device to host": False}
# Registered memory comes in chunks that one copy must not span; a large copy fits into the first.
_LARGEST_COPY_NBYTES = REGISTER_CHUNK_NBYTES
_TIMEOUT_S = 60.0
# All blocks so many times beside a decoding model: the end is seen only after a step, which must not matter.
_ROUNDS_BESIDE = 4


class Copies:
    """Blocks, slots and what copies between them."""

    def __init__(self, context: Context) -> None:
        sizes, device = context.sizes, context.device
        self.sizes = sizes
        layout = KVLayout(sizes.copy_layers, sizes.kv_heads, sizes.head_dim, sizes.block_size, sizes.speed_dtype)
        self.pool = KVPool(layout, sizes.num_copies + 1, device.torch, getattr(torch, sizes.speed_dtype))
        for part in torch.split(self.pool.blocks, 64):
            part.normal_()
        allocate, self.engine = copying_for(cast(Any, SimpleNamespace(pool=self.pool)), lambda: None)
        self.nbytes = sizes.num_copies * layout.block_nbytes
        # Blocks are whole pages, so slots follow one another without a gap.
        self.arena = HostArena(layout.block_nbytes, self.nbytes, allocate=allocate)
        order = torch.randperm(sizes.num_copies).tolist()
        self.block_ids = [1 + i for i in order]
        self.slots = [self.arena.slot_view(i) for i in reversed(range(sizes.num_copies))]

    def launch(self, to_device: bool) -> list[Copy]:
        """All blocks, in batches."""
        size = self.sizes.blocks_per_launch
        copies = [
            Copy(self.block_ids[low : low + size], self.slots[low : low + size], to_device)
            for low in range(0, len(self.slots), size)
        ]
        for copy in copies:
            self.engine.launch(copy)
        return copies

    def close(self) -> None:
        self.engine.close()
        self.slots.clear()
        # An error on its way up may still hold a view.
        with contextlib.suppress(BufferError):
            self.arena.close()


def wait_for(engine: CopyEngine, num_copies: int, meanwhile: Callable[[], object] = lambda: None) -> float:
    """Call `meanwhile` until so many copies have arrived; seconds. Raises `RuntimeError` for one that failed or is late."""
    began_s, arrived = time.perf_counter(), 0
    while arrived < num_copies:
        meanwhile()
        for copy in engine.poll():
            arrived += 1
            if copy.error is not None:
                raise RuntimeError(f"a copy failed: {copy.error}")
        if time.perf_counter() - began_s > _TIMEOUT_S:
            raise RuntimeError(f"{num_copies - arrived} copies have not arrived after {_TIMEOUT_S:g} s")
    return time.perf_counter() - began_s


def copies(context: Context) -> Iterator[Row]:
    """Each direction alone, then beside a decoding model."""
    made = Copies(context)
    try:
        rates = {}
        for name, to_device in DIRECTIONS.items():
            rates[name] = large_copy_rate(context, made, to_device)
            value = f"{rates[name] / 1e9:.1f} GB/s"
            yield Row("copies", f"{name}, one large copy", value, data={"bytes_per_s": rates[name]})
        yield check_bytes(made)
        for name, to_device in DIRECTIONS.items():
            seconds = alone_s(context, made, to_device)
            yield rate_row(f"{name}, blocks", made.nbytes / seconds, rates[name])
        yield from beside_decoding(context, made, rates)
    finally:
        made.close()


def rate_row(name: str, rate: float, large: float, **data: Any) -> Row:
    """A rate of block copies beside the rate of a large copy."""
    value = f"{rate / large:.2f} of large copy, {rate / 1e9:.1f} GB/s"
    return share_row("copies", name, value, rate / large, COPY_TARGET, bytes_per_s=rate, **data)


def large_copy_rate(context: Context, made: Copies, to_device: bool) -> float:
    """Bytes per second of one piece between page-locked memory and the device."""
    nbytes = min(made.nbytes, _LARGEST_COPY_NBYTES)
    host = made.arena.tensor().flatten()[:nbytes]
    device = made.pool.blocks.view(torch.uint8).flatten()[:nbytes]
    target, source = (device, host) if to_device else (host, device)
    seconds = times_s(context.device, lambda: target.copy_(source, non_blocking=True), context.sizes.repeats)
    return nbytes / statistics.median(seconds)


def check_bytes(made: Copies) -> Row:
    """Down and up again: the blocks are what they were, after others were in their place."""
    before = made.pool.blocks.view(torch.uint8).clone()
    wait_for(made.engine, len(made.launch(to_device=False)))
    made.pool.blocks[1:].zero_()
    wait_for(made.engine, len(made.launch(to_device=True)))
    equal = torch.equal(made.pool.blocks.view(torch.uint8), before)
    return Row("copies", "down and up again", "equal" if equal else "other bytes", "equal", ok=equal)


def alone_s(context: Context, made: Copies, to_device: bool) -> float:
    """Seconds for all blocks with nothing else running; the median."""
    found = []
    for _ in range(context.sizes.repeats):
        context.device.synchronize()
        began_s = time.perf_counter()
        wait_for(made.engine, len(made.launch(to_device)))
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def beside_decoding(context: Context, made: Copies, rates: dict[str, float]) -> Iterator[Row]:
    """The same while a model decodes, and the model's steps with and without."""
    batch_size, tokens = context.sizes.decode_beside
    loaded = shared_model(context)
    num_blocks = 1 + batch_size * -(-(tokens + 1) // context.sizes.block_size)
    config = settings(
        context, loaded, num_gpu_blocks_override=num_blocks, max_num_seqs=batch_size, max_model_len=tokens + 1
    )
    runner = make_runner(context, loaded, config)
    step = decode_of(runner, batch_size, tokens, context.sizes.block_size)
    for name, to_device in DIRECTIONS.items():
        num_steps = 0

        def count() -> None:
            nonlocal num_steps
            num_steps += 1
            step()

        for _ in range(context.sizes.repeats):
            step()
        began_s = time.perf_counter()
        for _ in range(4 * context.sizes.repeats):
            step()
        alone = (time.perf_counter() - began_s) / (4 * context.sizes.repeats)
        began_s = time.perf_counter()
        num_copies = sum(len(made.launch(to_device)) for _ in range(_ROUNDS_BESIDE))
        wait_for(made.engine, num_copies, count)
        seconds = time.perf_counter() - began_s
        step_s = seconds / num_steps
        rate = _ROUNDS_BESIDE * made.nbytes / seconds
        yield rate_row(f"{name}, blocks while decoding", rate, rates[name])
        yield Row(
            "copies",
            f"{name}, a decode step of {batch_size} x {tokens} beside",
            f"{step_s / alone:.2f} of alone, {step_s * 1e3:.2f} ms",
            data={"of_alone": step_s / alone, "seconds": step_s, "alone_s": alone, "num_steps": num_steps},
        )


def decode_of(runner: ModelRunner, batch_size: int, tokens: int, block_size: int) -> Callable[[], object]:
    """The same decode step again and again: `batch_size` sequences of `tokens`, whose blocks hold whatever they hold."""
    runner.pool.blocks.normal_()
    per_sequence = -(-(tokens + 1) // block_size)
    parts = []
    for i in range(batch_size):
        request = EngineRequest(f"decode-{i}", [1] * tokens, SamplingParams(temperature=0.0))
        sequence = Sequence(request, b"")
        sequence.block_ids = array("i", range(1 + i * per_sequence, 1 + (i + 1) * per_sequence))
        parts.append(ScheduledSequence(sequence, tokens - 1, 1))
    batch = build_batch(parts, block_size)
    return lambda: runner.execute(batch)
