"""What the bytes of a block mean, and the namespace that keeps unlike bytes apart.

A block holds `block_size` tokens over all layers, as one contiguous slab:

    [num_layers, 2 (key, value), block_size, num_kv_heads, head_dim]   in `dtype`, C order

The same bytes lie in every tier, so `block_nbytes` is one number everywhere. Keys are stored after RoPE, which is why
everything that changes a rotated key belongs to the namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tieredkv.errors import ConfigError
from tieredkv.hashing import HASH_SCHEME

LAYOUT_VERSION = 1
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape and type of one block. `dtype` is a torch dtype's name, all counts are per model, not per shard."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ConfigError(f"must be one of {', '.join(DTYPE_NBYTES)}, got {self.dtype!r}", key="dtype")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, got {getattr(self, name)}", key=name)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        return self.token_nbytes * self.block_size


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens and tenant that a block's bytes depend on. One field changed = no hit, ever.

    `weights` is a digest of the weights' content, `config` the model's architecture-relevant settings, `rope` and
    `attention` (scaling, softcap, window) named apart because forgetting them is the classic mistake.
    """

    weights: str
    config: Mapping[str, object]
    rope: Mapping[str, object]
    attention: Mapping[str, object]
    layout: KVLayout
    adapter: str = ""
    hash_scheme: str = field(default=HASH_SCHEME)

    def canonical(self) -> bytes:
        """Canonical JSON (sorted keys, no spaces, ASCII), the input of `digest`."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.blake2b(self.canonical(), digest_size=32, person=b"tkv.namespace.1").digest()
