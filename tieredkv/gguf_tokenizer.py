"""The tokenizer of a GGUF file, written as tokenizer.json and tokenizer_config.json.

Byte-level vocabularies are built here, because how text is split before merging decides the token ids and must be known
for certain; SentencePiece vocabularies go through transformers. An unknown splitting rule is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tieredkv.errors import UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "codeshell", "command-r"})
_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "olmo"})
# The published pre-tokenizer patterns of Llama 3 and Qwen2; they differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "llama3": _WORDS + r"\p{N}{1,3}" + _REST,
    "llama-v3": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "deepseek-r1-qwen": _WORDS + r"\p{N}" + _REST,
}
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(file: Path, get: Callable[..., Any], folder: Path) -> None:
    """Write the tokenizer of `file`, whose key-value pairs `get(key, default)` returns, into `folder`.

    Raises `UnsupportedModelError` for a kind of tokenizer that is not known here.
    """
    kind = get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokens = get("tokenizer.ggml.tokens")
        byte_level_tokenizer(get).save(str(folder / "tokenizer.json"))
        named = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
        config: dict[str, Any] = {name: tokens[index] for name, index in named.items() if index is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    elif kind == "llama":
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(str(folder))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    else:
        raise UnsupportedModelError(f"tokenizers of kind {kind!r} in a GGUF file are not supported")
    if template := get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def byte_level_tokenizer(get: Callable[..., Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from the vocabulary, merges and splitting rule of a GGUF file."""
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [])
    rule = get("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=rule in _LLAMA3))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule in _PATTERNS and rule not in _LLAMA3:
        tokenizer.normalizer = normalizers.NFC()
    marked = [t for t, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in marked if types[vocab[t]] == _CONTROL])
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t in marked if types[vocab[t]] == _USER_DEFINED]
    )
    bos = get("tokenizer.ggml.bos_token_id")
    if bos is not None and get("tokenizer.ggml.add_bos_token", rule in _LLAMA3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(rule: str) -> Any:
    if rule in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _BY_DIGIT:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if rule in _PATTERNS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[rule]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UnsupportedModelError(f"a GGUF file that splits text by the rule {rule!r} is not supported")
