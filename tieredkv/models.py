"""Load a model: find its files, check that it would be computed rightly, put the weights on the device, name its KV.

Knows transformers and the files of a checkpoint; knows no requests, no pool, no kernels. The attention that the loaded
model calls is the one registered as "tieredkv". Invariant: two loads have the same `namespace` only if every block
computed by one may be read by the other.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tieredkv import attention, lean, support
from tieredkv.checkpoint import Checkpoint, content_digest, resolve
from tieredkv.config import ModelConfig
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.layout import KVLayout, Namespace
from tieredkv.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Settings that say nothing about what a layer computes, so that changing them keeps the cache.
_NOT_ARCHITECTURE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_interleaved")
_ATTENTION_FIELDS = (
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the other parts need to know of it.

    `model` is a transformers `PreTrainedModel` in eval mode on `device`; `max_model_len` is the most tokens it supports;
    `eos_token_ids` come from its generation config, its config and its tokenizer; `folder` holds its files; `facts` says how
    its layers attend.
    """

    name: str
    folder: Path
    model: Any
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    namespace: Namespace
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    weights_nbytes: int
    facts: support.AttentionFacts


def load_model(
    config: ModelConfig, block_size: int, progress: Callable[[str, float], None] | None = None
) -> LoadedModel:
    """Load `config.model`; `progress(stage, fraction)` is called as it goes on.

    Raises `ConfigError` for a model or a device that is not there, `UnsupportedModelError` for a model that would be
    served wrongly.
    """
    report = progress or (lambda stage, fraction: None)
    device = choose_device(config.device)
    checkpoint = resolve(config.model, _convert_gguf, report)
    weight_files = sorted(checkpoint.folder.glob("*.safetensors"))
    if not weight_files:
        raise UnsupportedModelError(f"{checkpoint.folder} holds no .safetensors files")
    hf_config = _read_config(checkpoint)
    max_model_len = support.check_config(hf_config, config.max_model_len)
    dtype = choose_dtype(config.dtype, _stored_dtype(hf_config), device)
    # Hashing the weights and compiling kernels leave the interpreter to the thread that loads.
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="load") as pool:
        digest = pool.submit(content_digest, weight_files)
        if device.type == "cpu" and dtype == torch.bfloat16 and (shape := _attention_shape(hf_config)) is not None:
            pool.submit(attention.compile_ahead, *shape, block_size)
        tokenizer = Tokenizer.from_folder(checkpoint.folder, config.chat_template)
        report("Loading weights", 0.0)
        model = _load_weights(checkpoint, hf_config, dtype, device)
        report("Checking the model", 0.9)
        return adopt_model(
            model, tokenizer, checkpoint.name, checkpoint.folder, digest.result, block_size, max_model_len
        )


def adopt_model(
    model: Any,
    tokenizer: Tokenizer,
    name: str,
    folder: Path,
    weights_digest: Callable[[], str],
    block_size: int,
    max_model_len: int,
) -> LoadedModel:
    """A model that is in memory, in eval mode and with attention "tieredkv", as a `LoadedModel`.

    `weights_digest()` names the weights' content: two models with different weights must not have the same. Raises
    `UnsupportedModelError` for a model whose attention is not the kind that is served here.
    """
    facts = support.probe_attention(model)
    dtype: torch.dtype = model.dtype
    layout = KVLayout(
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
    )
    return LoadedModel(
        name=name,
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        dtype=dtype,
        layout=layout,
        namespace=_namespace(model.config, weights_digest(), facts, layout),
        max_model_len=max_model_len,
        vocab_size=int(model.config.vocab_size),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        weights_nbytes=_weights_nbytes(model),
        facts=facts,
    )


def stock_logits(model: Any, token_ids: Sequence[int], attention_name: str = "sdpa") -> torch.Tensor:
    """Logits `[len(token_ids), vocab]` of one prompt through transformers' own attention: the reference for ours.

    "sdpa" leaves out soft-capping; for models with it "eager" is the reference.
    """
    tokens = torch.tensor([list(token_ids)], dtype=torch.long, device=model.device)
    with _attention_of(model, attention_name), torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0]


def choose_device(name: str) -> torch.device:
    """The device named `auto`, `cpu` or `cuda`. Raises `ConfigError` when CUDA is asked for and something is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            f"torch {torch.__version__} is built for CUDA {built} but finds no usable GPU or driver"
            if built
            else f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
        )
        raise ConfigError(f"cuda is not available: {reason}", key="device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision named, or for `auto` the checkpoint's own where the device is fast at it."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if stored not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.type == "cuda":
        return stored if stored == torch.float16 or torch.cuda.is_bf16_supported(False) else torch.float16
    return torch.bfloat16 if cpu_has_fast_bfloat16() else torch.float32


def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)


def _convert_gguf(file: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    from tieredkv import gguf

    gguf.convert(file, folder, progress)


def _read_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    # transformers answers a config it cannot use with OSError, ValueError, KeyError or TypeError.
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{checkpoint.name}: its config.json cannot be used: {error}") from error


def _stored_dtype(hf_config: Any) -> torch.dtype:
    stored = getattr(hf_config, "dtype", None)
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _attention_shape(hf_config: Any) -> tuple[int, int, int] | None:
    """Query heads, key heads and head size as the config gives them, to begin with; what counts is what the probe finds."""
    num_heads: Any = getattr(hf_config, "num_attention_heads", None)
    num_kv_heads: Any = getattr(hf_config, "num_key_value_heads", None) or num_heads
    width: Any = getattr(hf_config, "hidden_size", None)
    if not all(isinstance(number, int) and number > 0 for number in (num_heads, num_kv_heads, width)):
        return None
    return num_heads, num_kv_heads, getattr(hf_config, "head_dim", None) or width // num_heads


def _load_weights(checkpoint: Checkpoint, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if model_class is None:
        raise UnsupportedModelError(f"transformers has no causal language model of type {hf_config.model_type!r}")
    support.check_model_class(model_class)
    attention.register()

    def load() -> tuple[Any, Mapping[str, Any]]:
        model, info = model_class.from_pretrained(
            checkpoint.folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        return model, info

    with _quiet():
        try:
            with lean.quick_construction():
                model, info = load()
        except RuntimeError as error:
            # torch names the device "meta" where a constructor mixes its numbers with real ones.
            if re.search(r"\bmeta\b", str(error)) is None:
                raise
            logger.info("the model's constructor needs real numbers, so it is loaded anew: %s", error)
            model, info = load()
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(f"the checkpoint lacks the weight {missing[0]} (and {len(missing) - 1} more)")
    if mismatched := info["mismatched_keys"]:
        raise UnsupportedModelError(f"a weight has the wrong shape: {sorted(mismatched)[0]}")
    model.eval().requires_grad_(False)
    return model.to(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: the caller has its own."""
    from transformers.utils import logging as hf_logging

    logging: Any = hf_logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _attention_of(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _namespace(hf_config: Any, digest: str, facts: support.AttentionFacts, layout: KVLayout) -> Namespace:
    settings: Mapping[str, Any] = hf_config.to_dict()
    apart = {*_ROPE_FIELDS, *_ATTENTION_FIELDS}
    rope = {name: settings[name] for name in _ROPE_FIELDS if settings.get(name) is not None}
    seen = {name: settings[name] for name in _ATTENTION_FIELDS if settings.get(name) is not None}
    # Only where there are any: what a plain model has stored stays valid.
    capped = {} if facts.is_plain else {"windows": list(facts.windows), "softcaps": list(facts.softcaps)}
    return Namespace(
        weights=digest,
        config={k: v for k, v in settings.items() if k not in _NOT_ARCHITECTURE and k not in apart},
        rope=rope | {"max_position_embeddings": settings.get("max_position_embeddings")},
        attention=seen
        | {"num_heads": facts.num_heads, "head_dim": facts.head_dim, "scaling": sorted(set(facts.scalings))}
        | capped,
        layout=layout,
    )


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    found: set[int] = set(tokenizer.eos_token_ids)
    for source in (model.generation_config, model.config):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(i for i in found if i >= 0)


def _weights_nbytes(model: Any) -> int:
    """Bytes of all parameters and buffers; tied weights count once."""
    tensors = {t.data_ptr(): t.nbytes for group in (model.parameters(), model.buffers()) for t in group}
    return sum(tensors.values())
