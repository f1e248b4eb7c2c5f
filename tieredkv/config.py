"""Settings: frozen dataclasses put together by composition, read from TOML, `TIEREDKV_*` variables and flags.

Later sources win: defaults < file < environment < flags. An unknown key or a bad value raises `ConfigError` that names
key, value and source. Nothing here is derived from the machine or the model; derived sizes live with those who derive
them, and a config is never mutated.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (8, 16, 32, 64, 128)
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?\s*$", re.IGNORECASE)


def parse_size(value: object) -> int:
    """A size in bytes: an int, or text such as `512MiB`, `4g`, `1.5GB`. K, M, G, T are powers of 1024, with or without `i`.

    Raises `ValueError` for anything else.
    """
    if isinstance(value, bool):
        raise ValueError("must be a size such as 4GiB")
    if isinstance(value, int):
        number, power = float(value), 0
    else:
        found = _SIZE.match(str(value))
        if not found:
            raise ValueError("must be a size such as 4GiB")
        number = float(found[1])
        power = " kmgt".index(found[2].lower()) if found[2] else 0
    nbytes = number * 1024**power
    if nbytes < 0:
        raise ValueError("must not be negative")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _setting(default: Any, doc: str, **rules: Any) -> Any:
    """A dataclass field with its description and its rules: `choices`, `low`, `high`, or `size=True` (bytes)."""
    return field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, where and in which precision."""

    model: str = _setting(
        DEFAULT_MODEL, "Model: 'smollm2-135m', a local Hugging Face folder, a hub id, or a GGUF file."
    )
    served_model_name: tuple[str, ...] = _setting(
        (), "Name(s) under which the API serves the model; the first one is reported."
    )
    device: str = _setting("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    dtype: str = _setting(
        "auto",
        "Precision of weights and KV cache; auto takes the model's own where the device is fast at it.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = _setting(
        None, "Longest prompt plus output in tokens; default: what the model was trained for and the pool holds.", low=1
    )
    chat_template: str | None = _setting(None, "File with a Jinja chat template to use instead of the model's own.")
    seed: int = _setting(0, "Seed for requests that send none.", low=0, high=2**64 - 1)
    enforce_eager: bool = _setting(False, "Never capture CUDA graphs.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool on the device."""

    block_size: int = _setting(16, "Tokens per KV block.", choices=BLOCK_SIZES)
    enable_prefix_caching: bool = _setting(True, "Reuse the KV blocks of known prefixes.")
    gpu_memory_utilization: float = _setting(
        0.9, "Share of the GPU's memory for weights, activations and the pool.", low=0.01, high=1.0
    )
    num_gpu_blocks_override: int | None = _setting(
        None, "Exact number of blocks in the pool, whatever the memory.", low=2
    )
    kv_cache_memory: int | None = _setting(
        None, "Size of the pool, such as 4GiB; default on CPU: a quarter of the free memory, at most 4 GiB.", size=True
    )


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers below the device."""

    host_memory: int | None = _setting(
        None,
        "Size of the host tier, such as 8GiB; 0 turns it off. Default: a quarter of the free memory, at most 4 GiB on CPU and "
        "32 GiB beside a GPU.",
        size=True,
    )
    disk_path: str | None = _setting(
        None, "Directory of the disk tier; none turns it off. `tieredkv serve` defaults to the user's cache directory."
    )
    disk_size: int = _setting(
        10 * 1024**3, "Hard cap on the files of the disk tier, such as 100GiB.", size=True, low=1024**2
    )
    kv_codec: str = _setting(
        "raw", "How blocks are stored on disk; auto measures which is faster here.", choices=("raw", "zstd", "auto")
    )
    restore: str = _setting(
        "auto",
        "When to bring blocks back: auto if it is predicted to beat computing them, always, or never.",
        choices=("always", "auto", "never"),
    )
    restore_timeout: float = _setting(
        5.0, "Longest time in seconds that a request waits for its blocks; then the rest is computed.", low=0.001
    )
    pin_budget: float = _setting(0.5, "Share of each tier that pins may take.", low=0.0, high=0.9)
    retention_budget: float = _setting(
        0.5,
        "Share of each tier that requests may ask to retain; more than that is kept like anything else.",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How requests share a step."""

    max_num_seqs: int = _setting(64, "Most sequences that run at once.", low=1)
    max_num_batched_tokens: int = _setting(
        2048, "Token budget of one step; longer prompts are computed in parts.", low=1
    )
    max_queue_size: int = _setting(1024, "Requests that may wait; one more is answered with 429.", low=1)
    async_scheduling: bool = _setting(
        True, "Take in new requests and move blocks between the tiers while the device computes."
    )
    single_flight_timeout: float = _setting(
        30.0,
        "Longest time in seconds that a request waits for another one computing the same prefix; 0 turns it off.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    api_key: tuple[str, ...] = _setting(
        (), "Key(s) that clients must send as a bearer token; each key has its own cache."
    )
    metrics_prefix: str = _setting("tieredkv:", "Prefix of all metric names.")
    max_body_size: int = _setting(32 * 1024**2, "Largest request body; a larger one is answered with 413.", size=True)
    drain_timeout: float = _setting(30.0, "Seconds that running requests get to finish after SIGTERM.", low=0)
    log_level: str = _setting("info", "Verbosity.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """The admin API: who may use it, and where it listens."""

    admin_key: tuple[str, ...] = _setting(
        (), "Key(s) for the admin API as a bearer token; without one it answers on loopback only."
    )
    admin_port: int | None = _setting(
        None, "Port of the admin API; default: the server's own. 0 takes a free one.", low=0, high=65535
    )
    admin_show_text: bool = _setting(
        False, "Show the first and last words of cached prompts; they are private otherwise."
    )
    warm: str | None = _setting(
        None, "JSONL file of prompts to compute in the background from the start, pinned ones first."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Build it with `Config.load`, which checks every value."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)

    @classmethod
    def load(
        cls,
        overrides: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        source: str = "argument",
        defaults: Mapping[str, Any] | None = None,
    ) -> Config:
        """Read `file` (TOML with one table per section), then `TIEREDKV_*` in `environ` (`TIEREDKV_*_FILE`: the value is in
        that file), then `overrides` (None = unset).
        `defaults` replace the defaults of the fields.

        Keys are the field names, which are unique over all sections. Raises `ConfigError`.
        """
        values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for key, value in (defaults or {}).items():
            section = _section_of(key, "default")
            values[section][key] = _check(section, key, value, "default")
        if file is not None:
            for section, key, value, where in _read_file(Path(file)):
                values[section][key] = _check(section, key, value, where)
        for key, text, where in _variables(environ or {}):
            section = _section_of(key, where)
            values[section][key] = _check(section, key, text, where)
        for key, value in (overrides or {}).items():
            if value is not None:
                section = _section_of(key, source)
                values[section][key] = _check(section, key, value, source)
        config = cls(**{section: _SECTIONS[section](**given) for section, given in values.items()})
        if config.scheduler.max_num_batched_tokens < config.scheduler.max_num_seqs:
            raise ConfigError(
                f"must be at least max_num_seqs ({config.scheduler.max_num_seqs}), "
                f"got {config.scheduler.max_num_batched_tokens}",
                key="max_num_batched_tokens",
            )
        return config


_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "tiers": TierConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
    "admin": AdminConfig,
}
# Variables with the prefix that steer the process, not the product.
_NOT_SETTINGS = frozenset({"TIEREDKV_REEXEC", "TIEREDKV_CPU_JIT", "TIEREDKV_CACHE_DIR", "TIEREDKV_CONFIG"})


def settings() -> list[tuple[str, str, Any, str]]:
    """All settings as (section, key, default, description), in order of definition."""
    return [
        (section, f.name, f.default, str(f.metadata["doc"]))
        for section, cls in _SECTIONS.items()
        for f in dataclasses.fields(cls)
    ]


def _section_of(key: str, source: str) -> str:
    for section, cls in _SECTIONS.items():
        if key in {f.name for f in dataclasses.fields(cls)}:
            return section
    raise ConfigError("unknown setting", key=key, source=source)


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The settings in `environ` as (key, text, source). `TIEREDKV_KEY_FILE` names a file with the value, as secrets are
    mounted into containers; several lines are several values.
    """
    for name, text in sorted(environ.items()):
        if not name.startswith("TIEREDKV_") or name in _NOT_SETTINGS:
            continue
        where = f"environment variable {name}"
        plain = name.removesuffix("_FILE")
        key = plain.removeprefix("TIEREDKV_").lower()
        if plain != name:
            if plain in environ:
                raise ConfigError(f"is set together with {plain}; set one of them", key=key, source=where)
            try:
                text = ",".join(Path(text).read_text(encoding="utf-8").split())
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot be read from {text}: {error}", key=key, source=where) from error
        yield key, text, where


def _read_file(path: Path) -> list[tuple[str, str, Any, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not valid TOML: {error}", source=str(path)) from error
    found = []
    for section, table in document.items():
        if section not in _SECTIONS or not isinstance(table, dict):
            raise ConfigError(f"unknown table; known are {', '.join(_SECTIONS)}", key=section, source=str(path))
        known = {f.name for f in dataclasses.fields(_SECTIONS[section])}
        for key, value in table.items():
            if key not in known:
                raise ConfigError("unknown setting", key=f"{section}.{key}", source=str(path))
            found.append((section, key, value, str(path)))
    return found


def _check(section: str, key: str, value: Any, source: str) -> Any:
    """`value` as the type of its field, within its rules."""
    cls = _SECTIONS[section]
    info = next(f for f in dataclasses.fields(cls) if f.name == key)
    try:
        result = _convert(typing.get_type_hints(cls)[key], value, size=bool(info.metadata.get("size")))
        rules = info.metadata
        if "choices" in rules and result not in rules["choices"]:
            raise ValueError(f"must be one of {', '.join(map(str, rules['choices']))}")
        if result is not None and "low" in rules and result < rules["low"]:
            raise ValueError(f"must be at least {rules['low']}")
        if result is not None and "high" in rules and result > rules["high"]:
            raise ValueError(f"must be at most {rules['high']}")
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{error}, got {value!r}", key=key, source=source) from None
    return result


def _convert(kind: Any, value: Any, *, size: bool) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "auto")):
            return None
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if size:
        return parse_size(value)
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ValueError("must be true or false")
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError("must be a whole number")
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError("must be a whole number") from None
    if kind is float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
        if isinstance(value, bool) or not math.isfinite(number):
            raise ValueError("must be a finite number")
        return number
    if typing.get_origin(kind) is tuple:
        parts = [p.strip() for p in value.split(",")] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(p, str) and p for p in parts):
            raise ValueError("must be text, or a list of texts")
        return tuple(parts)
    if not isinstance(value, str):
        raise ValueError("must be text")
    if not value:
        raise ValueError("must not be empty")
    return value
