"""A model of a given shape with random weights, made in memory, as the engine takes it."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.gpu_check.device import Device
from benchmarks.gpu_check.sizes import Shape
from benchmarks.gpu_check.worker import Context
from tieredkv import Config
from tieredkv.attention import NAME, register
from tieredkv.model_runner import ModelRunner
from tieredkv.models import LoadedModel, adopt_model
from tieredkv.tokenizer import Tokenizer

# No token ends a text.
_EOS = "</s>"


def random_model(shape: Shape, block_size: int, device: Device) -> LoadedModel:
    """Llama's architecture; weights as large as a trained model starts with at this width, so that answers differ by prompt."""
    register()
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_len,
        initializer_range=1.28 / math.sqrt(shape.hidden),
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype: torch.dtype = getattr(torch, shape.dtype)
    auto_class: Any = AutoModelForCausalLM
    with torch.random.fork_rng(), device.torch:
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=NAME)
    model = model.eval().requires_grad_(False).to(device.torch)
    backend = Backend(WordLevel({_EOS: 0, "a": 1}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = Tokenizer(tokenizer_class(tokenizer_object=backend, eos_token=_EOS))
    return adopt_model(
        model, tokenizer, "random", Path(tempfile.gettempdir()), lambda: "random", block_size, shape.max_len
    )


def shared_model(context: Context) -> LoadedModel:
    """The 8B model, made once for all parts of a process."""
    if "model" not in context.shared:
        context.shared["model"] = random_model(context.sizes.model, context.sizes.block_size, context.device)
    model: LoadedModel = context.shared["model"]
    return model


def settings(context: Context, loaded: LoadedModel, **changes: Any) -> Config:
    """Settings of an engine that serves `loaded`; nothing comes from the environment."""
    chosen = {
        "device": context.device.torch.type,
        "dtype": loaded.layout.dtype,
        "block_size": context.sizes.block_size,
        "max_num_batched_tokens": context.sizes.max_num_batched_tokens,
        "host_memory": "0",
        "restore": "always",
        "restore_timeout": 60.0,
    }
    return Config.load(chosen | changes, environ={})


def make_runner(context: Context, loaded: LoadedModel, config: Config) -> ModelRunner:
    """A runner that is ready to serve: checked against stock transformers, warm, its graphs captured."""
    runner = ModelRunner(loaded, config, capture=context.device.capture())
    runner.self_check()
    runner.warm_up()
    return runner
