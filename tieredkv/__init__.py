"""TieredKV: a tiered KV cache service for LLM inference.

`LLM` runs a model offline; `SamplingParams` says how to sample; `Config` holds all settings. Importing this package
loads no torch: `LLM` is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tieredkv.config import Config
from tieredkv.types import SamplingParams

if TYPE_CHECKING:
    from tieredkv.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Config", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tieredkv.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
