"""Tiny random models in Hugging Face layout, with a tokenizer and a chat template, made on the spot without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the cache keeps the blocks of a prompt and the next prompt reads the blocks again",
    "a block holds the keys and values of sixteen tokens over all layers of the model",
    "one two three four five six seven eight nine ten, 1 2 3 4 5 6 7 8 9 10",
)
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    # SmolLM2's head counts and head size.
    "smollm": (LlamaConfig, {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3Config, {"sliding_window": None, "original_max_position_embeddings": 2048}),
}
# Every layer plain: attention over the whole context.
ARCHITECTURES = tuple(_CONFIGS)
# Layers that see a window of the context, shorter than most prompts of the tests and no multiple of a block; Gemma-2 also
# caps its scores, hard enough to show.
WINDOW = 20
_CONFIGS |= {
    "mistral_window": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "num_hidden_layers": 4},
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}
WINDOWED = tuple(name for name in _CONFIGS if name not in ARCHITECTURES)


def config_of(arch: str, **changes: Any) -> Any:
    """The configuration of a tiny model; `changes` override its fields."""
    kind, own = _CONFIGS[arch]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        # Ten times the usual: with small random weights every prompt would be answered by the same token.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    return kind(**(settings | own | changes))


def build(arch: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a tiny model of `arch` (one of `ARCHITECTURES`) and its tokenizer to `folder`, and return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(arch, **changes), dtype=dtype)
        # Norms and biases start out as ones and zeros, which would hide a mistake in them.
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    hf_tokenizer().save_pretrained(folder)
    return folder


def hf_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with every byte, some merges, three special tokens and a chat template."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
