"""The model runner: equal to stock transformers in any mix of steps, and sure of it before it serves."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
from array import array
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig

from tests.models_for_tests import ARCHITECTURES, WINDOWED, build
from tieredkv import fused, pool_plan, runtime
from tieredkv.batch import build_batch
from tieredkv.config import Config
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.model_runner import ModelRunner
from tieredkv.models import LoadedModel, load_model
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.types import EngineRequest, SamplingParams

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @cache
    def of(arch: str, **changes) -> Path:
        return build(arch, tmp_path_factory.mktemp(arch), **changes)

    return of


def config(path: Path, **settings) -> Config:
    defaults = {"model": str(path), "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 200}
    return Config.load(defaults | settings)


def load(path: Path, **settings) -> tuple[LoadedModel, Config]:
    chosen = config(path, **settings)
    return load_model(chosen.model, BLOCK_SIZE), chosen


def stock_logits(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    attention = "eager" if "gemma2" in path.name else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def sequences(lengths: list[int]) -> list[Sequence]:
    """Random prompts with scattered blocks."""
    rng = random.Random(0)
    free = list(range(1, 200))
    rng.shuffle(free)
    made = []
    for length in lengths:
        request = EngineRequest("r", [rng.randrange(300) for _ in range(length)], SamplingParams(temperature=0.0))
        made.append(Sequence(request, b""))
        made[-1].block_ids = array("i", [free.pop() for _ in range(-(-length // BLOCK_SIZE))])
    return made


def run_at_random(runner: ModelRunner, all_sequences: list[Sequence]) -> list[dict[int, torch.Tensor]]:
    """Compute every sequence in parts of random size, several at once; per sequence, logits by position."""
    rng = random.Random(1)
    prompts = [list(sequence.token_ids) for sequence in all_sequences]
    done = [0] * len(prompts)
    found: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        parts = []
        for i, sequence in enumerate(all_sequences):
            left = len(prompts[i]) - done[i]
            if left and rng.random() < 0.8:
                num_new = min(left, rng.choice((1, 1, 1, 2, 7, 40, 150)))
                sequence.token_ids = prompts[i][: done[i] + num_new]
                parts.append(ScheduledSequence(sequence, done[i], num_new))
                done[i] += num_new
        if not parts:
            continue
        parts.sort(key=lambda part: part.num_new != 1)
        logits = runner.logits(build_batch(parts, BLOCK_SIZE))
        for part, row in zip(parts, logits, strict=True):
            found[all_sequences.index(part.sequence)][part.end - 1] = row
    for sequence, prompt in zip(all_sequences, prompts, strict=True):
        sequence.token_ids = prompt
    return found


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_logits_equal_stock_in_any_mix_of_steps(folder, arch):
    loaded, chosen = load(folder(arch))
    runner = ModelRunner(loaded, chosen)
    assert isinstance(runner.forward, fused.FusedModel) == (arch in ARCHITECTURES)
    runner.self_check()
    # Whatever lay in the pool before must not matter.
    runner.pool.blocks.fill_(float("nan"))
    made = sequences([5, 33, 170, 320])
    for sequence, found in zip(made, run_at_random(runner, made), strict=True):
        expected = stock_logits(folder(arch), sequence.token_ids)
        for position, row in found.items():
            torch.testing.assert_close(row, expected[position], rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("arch", ["smollm", "qwen3"])
def test_bfloat16_stays_within_rounding(folder, arch):
    loaded, chosen = load(folder(arch), dtype="bfloat16")
    runner = ModelRunner(loaded, chosen)
    assert isinstance(runner.forward, fused.FusedModel)
    runner.self_check()
    made = sequences([40, 170])
    for sequence, found in zip(made, run_at_random(runner, made), strict=True):
        expected = stock_logits(folder(arch), sequence.token_ids)
        theirs = (stock_logits(folder(arch), sequence.token_ids, torch.bfloat16).float() - expected).abs().mean().item()
        ours = torch.stack([(row.float() - expected[at]).abs().mean() for at, row in found.items()]).mean().item()
        assert ours < 1.5 * theirs + 1e-3


def test_tied_embeddings_survive(folder, tmp_path):
    path = build("llama", tmp_path, tie_word_embeddings=True)
    loaded, chosen = load(path)
    runner = ModelRunner(loaded, chosen)
    made = sequences([50])
    (found,) = run_at_random(runner, made)
    expected = stock_logits(path, made[0].token_ids)
    assert all(torch.allclose(row, expected[at], rtol=1e-4, atol=1e-3) for at, row in found.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_nothing_of_a_packed_model_stays_in_its_files(folder, dtype, tied):
    """Weights in the files' precision are mapped, not read: one tensor left there keeps all of them in memory."""
    path = folder("llama", tie_word_embeddings=tied, torch_dtype=dtype)
    loaded, chosen = load(path, dtype=dtype)
    runner = ModelRunner(loaded, chosen)
    runner.self_check()
    assert isinstance(runner.forward, fused.FusedModel)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_execute_samples_where_a_sequence_ends(folder):
    loaded, chosen = load(folder("llama"))
    runner = ModelRunner(loaded, chosen)
    whole, part = sequences([20, 30])
    tokens = runner.execute(build_batch([ScheduledSequence(whole, 0, 20), ScheduledSequence(part, 0, 10)], BLOCK_SIZE))
    assert [token.token_id for token in tokens] == [stock_logits(folder("llama"), whole.token_ids)[-1].argmax().item()]
    assert runner.execute(build_batch([ScheduledSequence(part, 10, 10)], BLOCK_SIZE)) == []


def test_a_second_runner_on_the_same_model_works(folder):
    loaded, chosen = load(folder("llama"))
    first, second = ModelRunner(loaded, chosen), ModelRunner(loaded, chosen)
    second.self_check()
    (sequence,) = sequences([40])
    batch = build_batch([ScheduledSequence(sequence, 0, 40)], BLOCK_SIZE)
    assert torch.equal(first.logits(batch), second.logits(batch))


def test_what_structure_does_not_show_is_found_by_its_logits(folder, tmp_path, caplog):
    """Granite has Llama's modules and multiplies in its forward methods; it must run as transformers computes it."""
    template, chosen = load(folder("llama"))
    settings = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2}
    granite = GraniteConfig(**settings, **heads, residual_multiplier=0.4, embedding_multiplier=3.0, logits_scaling=2.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(granite).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="tieredkv").eval()
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(dataclasses.replace(template, model=model), chosen)
    assert "deviate" in caplog.text
    assert not isinstance(runner.forward, fused.FusedModel)
    runner.self_check()
    made = sequences([60])
    (found,) = run_at_random(runner, made)
    expected = stock_logits(tmp_path, made[0].token_ids)
    assert all(torch.allclose(row, expected[at], rtol=1e-4, atol=1e-3) for at, row in found.items())


def test_a_model_computed_wrongly_is_refused(folder):
    loaded, chosen = load(folder("llama"))
    runner = ModelRunner(loaded, chosen)
    forward = runner.forward
    assert isinstance(forward, fused.FusedModel)
    forward._layers[1].scale *= 1.5
    with pytest.raises(UnsupportedModelError, match=r"logits differ .* by 0\.\d"):
        runner.self_check()


class TestPoolSize:
    def test_override_is_exact(self, folder):
        loaded, chosen = load(folder("llama"), num_gpu_blocks_override=7)
        runner = ModelRunner(loaded, chosen)
        assert runner.num_blocks == runner.pool.num_blocks == 7

    def test_memory_is_not_exceeded(self, folder):
        loaded, chosen = load(folder("llama"), num_gpu_blocks_override=None, kv_cache_memory="1MiB")
        runner = ModelRunner(loaded, chosen)
        assert 0 <= 2**20 - runner.pool.nbytes < loaded.layout.block_nbytes

    def test_no_room_is_an_error_that_names_the_setting(self, folder):
        loaded, chosen = load(folder("llama"), num_gpu_blocks_override=None, kv_cache_memory="1KiB")
        with pytest.raises(ConfigError, match="kv_cache_memory"):
            ModelRunner(loaded, chosen)

    def test_default_takes_a_quarter_of_free_memory_at_most(self, folder, monkeypatch):
        loaded, chosen = load(folder("llama"), num_gpu_blocks_override=None, max_num_seqs=2000)
        monkeypatch.setattr(pool_plan, "free_memory_nbytes", lambda: 2**26)
        assert 2**24 - loaded.layout.block_nbytes < ModelRunner(loaded, chosen).pool.nbytes <= 2**24
        assert runtime.free_memory_nbytes() > 0

    def test_default_is_not_more_than_can_be_used(self, folder):
        loaded, chosen = load(folder("llama"), num_gpu_blocks_override=None, max_num_seqs=2)
        most = 2 * -(-loaded.max_model_len // BLOCK_SIZE) + 1
        assert ModelRunner(loaded, chosen).num_blocks <= most
