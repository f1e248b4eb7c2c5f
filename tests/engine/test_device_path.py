"""How batches reach a GPU, on a CPU: staged arrays, one step over the kernels' faces, decodes replayed from fixed buffers.

The kernels are replaced by their definition, and a graph by calling again what was captured; all else is what serves on
CUDA.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.engine.test_model_runner import BLOCK_SIZE, load, run_at_random, sequences
from tests.engine.truth import greedy, random_prompt, stock_model, stock_tokens
from tests.models_for_tests import ARCHITECTURES, WINDOWED, build, config_of
from tests.naive_kernels import OPS
from tieredkv import pool_plan
from tieredkv.attention import register
from tieredkv.batch import build_batch
from tieredkv.build import build_core, load_runner
from tieredkv.config import Config
from tieredkv.cuda_graphs import graph_sizes, graphs_nbytes
from tieredkv.errors import DeviceLostError, UnsupportedModelError
from tieredkv.kernel_step import KernelOps, KernelStep
from tieredkv.layout import KVLayout
from tieredkv.model_runner import ModelRunner
from tieredkv.models import adopt_model
from tieredkv.pool import KVPool
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.staging import StepTensors, UploadRing
from tieredkv.types import EngineRequest, SamplingParams

CPU = torch.device("cpu")


class Recorder:
    """Captures by remembering, and counts replays."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, function):
        function()
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            function()

        return replay


@torch.inference_mode()
def expected_logits(path, token_ids):
    return stock_model(str(path))(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("arch", ["llama", "qwen3", *WINDOWED])
def test_logits_equal_stock_in_any_mix_of_steps(folder, arch):
    loaded, chosen = load(folder(arch))
    runner = ModelRunner(loaded, chosen, ops=OPS)
    runner.self_check()
    runner.pool.blocks.fill_(float("nan"))
    made = sequences([5, 33, 170])
    for sequence, found in zip(made, run_at_random(runner, made), strict=True):
        expected = expected_logits(folder(arch), sequence.token_ids)
        for position, row in found.items():
            torch.testing.assert_close(row, expected[position], rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_heads_that_the_kernels_cannot_hold_are_refused(tmp_path):
    loaded, chosen = load(build("llama", tmp_path, head_dim=260))
    with pytest.raises(UnsupportedModelError, match="heads of 260 numbers"):
        ModelRunner(loaded, chosen, ops=OPS)


def test_a_model_made_in_memory_is_served(tmp_path):
    """As a benchmark needs it: no files, no tokenizer."""
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="tieredkv", dtype=torch.float32)
    model.eval().requires_grad_(False)
    loaded = adopt_model(
        model, SimpleNamespace(eos_token_ids=[2]), "made up", tmp_path, lambda: "random", BLOCK_SIZE, max_model_len=256
    )
    chosen = Config.load({"device": "cpu", "num_gpu_blocks_override": 40})
    runner = load_runner(chosen, loaded=loaded)
    core = build_core(runner, chosen)
    prompt = random_prompt(50, seed=1)
    tokens = []
    core.add(EngineRequest("r", prompt, greedy(4)))
    while core.has_work:
        tokens += [token for output in core.step() for token in output.new_token_ids]
    assert len(tokens) == 4
    assert core.close(5.0)


@pytest.mark.parametrize("num_tokens", [5, 70_000])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_kernels_get_queries_that_they_can_count_through(order, num_tokens):
    """Whatever way a model lays them out: heads outermost, many heads and tokens make a step from head to head too long."""
    shape, seen = (num_tokens, 128, 256), []

    def note(q, *_, out, **__):
        seen.append(q)
        return out

    layout = KVLayout(num_layers=1, num_kv_heads=8, head_dim=256, block_size=16, dtype="float16")
    pool = KVPool(layout, 2, torch.device("meta"), torch.float16)
    whole = torch.zeros(0, dtype=torch.int32, device="meta")
    step = StepTensors(whole, whole, whole, whole, whole.expand(0), torch.zeros(1, device="meta"), whole)
    q = torch.empty([shape[i] for i in order], dtype=torch.float16, device="meta")
    q = q.permute([order.index(i) for i in range(3)])
    assert q.shape == shape
    kernel_step = KernelStep(KernelOps(lambda *_: seen.extend(_[3:]), note, note), pool, step, num_decodes=0)
    kernel_step.attend(0, q, 1.0)
    kernel_step.write(0, q, q)
    for tensor in seen:
        assert tensor.shape == shape
        assert tensor.stride(2) == 1
    assert len(seen) == 3
    assert seen[0].stride(1) * 127 + 255 < 2**31


# Graphs


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_padded_sizes(most, sizes):
    assert graph_sizes(most) == sizes
    assert graphs_nbytes(most, 10, 100, torch.float32) >= most * (10 * 4 + 100 * 4)


def test_padded_sizes_waste_little():
    sizes = graph_sizes(256)
    assert sizes[-1] == 256
    for num in range(1, 257):
        padded = next(size for size in sizes if size >= num)
        assert padded - num < 8


@pytest.fixture(scope="module")
def runners(folder):
    """One that replays and one that does not, over the same model."""
    recorder = Recorder()
    found = []
    for capture in (recorder, None):
        loaded, chosen = load(folder("gemma2"), max_num_seqs=11, max_model_len=112)
        found.append(ModelRunner(loaded, chosen, ops=OPS, capture=capture))
        found[-1].warm_up()
    return *found, recorder


def decodes(rng: random.Random, num: int) -> list[ScheduledSequence]:
    """`num` sequences that decode one token each, with scattered blocks."""
    free = list(range(1, 200))
    rng.shuffle(free)
    parts = []
    for _ in range(num):
        length = rng.randrange(1, 112)
        request = EngineRequest("r", [rng.randrange(300) for _ in range(length)], SamplingParams(temperature=0.0))
        sequence = Sequence(request, b"")
        sequence.block_ids = array("i", [free.pop() for _ in range(-(-length // BLOCK_SIZE))])
        parts.append(ScheduledSequence(sequence, length - 1, 1))
    return parts


@settings(max_examples=20, deadline=None)
@given(num=st.integers(1, 11), seed=st.integers(0, 1000))
def test_a_replay_equals_the_same_batch_run_eagerly(runners, num, seed):
    replaying, eager, recorder = runners
    assert recorder.num_captures == len(graph_sizes(11))
    rng = random.Random(seed)
    torch.manual_seed(seed)
    blocks = torch.randn(replaying.pool.blocks.shape)
    # What a batch does not own is poison, and what lies in the null block does not matter.
    parts = decodes(rng, num)
    owned = sorted({block_id for part in parts for block_id in part.sequence.block_ids})
    for runner in (replaying, eager):
        runner.pool.blocks.fill_(float("nan"))
        runner.pool.blocks[owned] = blocks[owned]
    batch = build_batch(parts, BLOCK_SIZE)
    before = recorder.num_replays
    ours, theirs = replaying.logits(batch), eager.logits(batch)
    assert recorder.num_replays == before + 1
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # Padding writes to the null block alone.
    torch.testing.assert_close(replaying.pool.blocks[1:], eager.pool.blocks[1:], equal_nan=True)


def test_what_cannot_be_replayed_runs_eagerly(runners):
    replaying, _, recorder = runners
    rng = random.Random(0)
    before = recorder.num_replays
    prefill = decodes(rng, 1)
    prefill[0] = ScheduledSequence(prefill[0].sequence, 0, prefill[0].sequence.num_tokens)
    replaying.logits(build_batch([*decodes(rng, 2), *prefill], BLOCK_SIZE))
    # The one-token end of a part that is not sampled.
    (part,) = decodes(rng, 1)
    part.sequence.token_ids.append(5)
    part.sequence.block_ids = array("i", [1, 2, 3, 4, 5, 6, 7, 8])
    replaying.logits(build_batch([part], BLOCK_SIZE))
    replaying.logits(build_batch(decodes(rng, 12), BLOCK_SIZE))
    assert recorder.num_replays == before


class Watcher(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# What makes the host wait for the device, or reads the host's memory: none of it may run while a graph is captured.
NOT_IN_A_GRAPH = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2", "lift_fresh", "item",
}  # fmt: skip


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_a_step_of_decodes_can_be_captured(folder, arch):
    """The model's own code included: else every decode would run eagerly, or a replay would repeat what the host decided."""
    names: set[str] = set()

    def decode(q, blocks, layer, block_tables, context_lens, scale, *, window=0, softcap=0.0, out=None):
        assert q.stride(-1) == out.stride(-1) == block_tables.stride(-1) == 1
        return out.zero_()

    def write(blocks, layer, slots, k, v):
        assert k.stride(-1) == v.stride(-1) == 1

    def capture(function):
        with Watcher() as watcher:
            function()
        names.update(watcher.names)
        return function

    loaded, chosen = load(folder(arch), max_num_seqs=3)
    runner = ModelRunner(loaded, chosen, ops=KernelOps(write, decode, OPS.paged_prefill), capture=capture)
    runner.warm_up()
    assert "embedding" in names
    assert not names & NOT_IN_A_GRAPH
    with Watcher() as watcher:
        torch.tensor([1]).nonzero().sum().item()
    assert watcher.names >= {"lift_fresh", "nonzero", "_local_scalar_dense"}


def test_eager_means_eager(folder):
    loaded, chosen = load(folder("llama"), enforce_eager=True)
    recorder = Recorder()
    ModelRunner(loaded, chosen, ops=OPS, capture=recorder).warm_up()
    assert recorder.num_captures == 0


def test_a_replay_that_is_wrong_is_found_before_it_serves(folder, caplog):
    def forgetful(function):
        function()
        return lambda: None

    loaded, chosen = load(folder("llama"))
    runner = ModelRunner(loaded, chosen, ops=OPS, capture=forgetful)
    with caplog.at_level("WARNING"):
        runner.warm_up()
    assert "a replay differs" in caplog.text
    made = sequences([40])
    for position, row in run_at_random(runner, made)[0].items():
        expected = expected_logits(folder("llama"), made[0].token_ids)[position]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-3)


def test_a_model_that_cannot_be_captured_is_served_eagerly(folder, caplog):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    loaded, chosen = load(folder("llama"))
    runner = ModelRunner(loaded, chosen, ops=OPS, capture=refuse)
    with caplog.at_level("WARNING"):
        runner.warm_up()
    assert "decodes run eagerly" in caplog.text
    made = sequences([40])
    run_at_random(runner, made)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_the_engine_over_graphs_gives_stock_tokens(folder, arch):
    loaded, chosen = load(
        folder(arch),
        max_num_seqs=5,
        max_model_len=128,
        num_gpu_blocks_override=24,
        host_memory="1MiB",
        restore="always",
    )
    recorder = Recorder()
    runner = ModelRunner(loaded, chosen, ops=OPS, capture=recorder)
    runner.warm_up()
    core = build_core(runner, chosen)
    prompts = {f"r{i}": random_prompt(10 + 12 * i, seed=i) for i in range(7)}
    for _ in range(2):
        tokens = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            core.add(EngineRequest(name, prompt, greedy(12)))
        while core.has_work:
            for output in core.step():
                tokens[output.request_id] += output.new_token_ids
            if core.is_stalled:
                core.wait(0.01)
        for name, prompt in prompts.items():
            assert tokens[name] == stock_tokens(str(folder(arch)), prompt, 12)
    assert recorder.num_replays > 20
    core.check_integrity()
    core.close(5.0)


# Staging


class CrankedEvent:
    """An event that happens when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.pending = False
        self.num_waits = 0

    def record(self) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.num_waits += self.pending
        self.pending = False


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=12), st.integers(1, 3))
def test_what_is_staged_arrives_whatever_its_size(sizes, num_buffers):
    events: list[CrankedEvent] = []

    def new_event() -> CrankedEvent:
        events.append(CrankedEvent())
        return events[-1]

    ring = UploadRing(CPU, num_buffers, new_event)
    rng = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        arrays = [
            rng.integers(-(2**60), 2**60, size),
            rng.integers(-(2**30), 2**30, (3, size // 7), dtype=np.int32),
            rng.integers(0, 9, 1),
            np.zeros((2, 0), dtype=np.int32),
        ]
        tensors = ring.upload(arrays)
        for array_, tensor in zip(arrays, tensors, strict=True):
            assert tensor.shape == array_.shape
            assert np.array_equal(tensor.numpy(), array_)
            assert tensor.storage_offset() * tensor.element_size() % 16 == 0
        # A buffer is taken again only after its event was waited for.
        assert sum(event.num_waits for event in events) == max(number + 1 - num_buffers, 0)


@pytest.mark.parametrize("arch", ARCHITECTURES[:1])
def test_a_step_is_launched_and_then_awaited(folder, arch):
    loaded, chosen = load(folder(arch))
    runner = ModelRunner(loaded, chosen, ops=OPS)
    (sequence,) = sequences([20])
    running = runner.launch(build_batch([ScheduledSequence(sequence, 0, 20)], BLOCK_SIZE))
    (token,) = running.result()
    assert token.token_id == expected_logits(folder(arch), sequence.token_ids)[-1].argmax().item()
    assert runner.launch(build_batch([ScheduledSequence(sequence, 0, 10)], BLOCK_SIZE)).result() == []


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("at", ["launch", "result"])
def test_an_error_that_stays_is_told_from_one_that_passes(folder, at, lost, monkeypatch):
    loaded, chosen = load(folder("llama"))
    runner = ModelRunner(loaded, chosen, ops=OPS)
    (sequence,) = sequences([20])
    batch = build_batch([ScheduledSequence(sequence, 0, 20)], BLOCK_SIZE)

    def fail(*_):
        raise RuntimeError("what the step met")

    def synchronize(device):
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(runner, "device", torch.device("cuda", 0))
    monkeypatch.setattr(
        runner, *(("logits", fail) if at == "launch" else ("_sampler", SimpleNamespace(start=lambda *_: fail)))
    )
    with pytest.raises(DeviceLostError if lost else RuntimeError, match="what the step met") as caught:
        runner.launch(batch).result()
    assert isinstance(caught.value, DeviceLostError) == lost


# The pool's size


@pytest.mark.parametrize("eager", [True, False])
def test_the_pool_takes_what_a_gpu_has_left(eager, monkeypatch):
    gib = 1024**3
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    loaded = SimpleNamespace(
        device=torch.device("cuda", 0), layout=layout, max_model_len=131072, vocab_size=128256, dtype=torch.bfloat16
    )
    chosen = Config.load({"max_num_seqs": 64, "enforce_eager": eager})
    allocated = iter((20 * gib, 22 * gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(pool_plan, "synthetic_batch", lambda *_: ("batch", SimpleNamespace(nbytes=gib)))
    ran = []
    num_blocks = pool_plan.plan_num_blocks(loaded, chosen, lambda batch, pool: ran.append(batch))
    graphs = 0 if eager else graphs_nbytes(64, 8192, 128256, torch.bfloat16)
    assert ran == ["batch"]
    # 90 of 100 GiB, less 20 in use, 2 of activations, 1 for the trial's pool, and the graphs.
    assert num_blocks == (67 * gib - graphs) // layout.block_nbytes
    assert pool_plan.most_blocks(loaded, chosen, num_blocks) == 8192
