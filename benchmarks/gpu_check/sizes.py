"""How large everything is: on a GPU, and small for a CPU that runs the kernels in an interpreter. Knows no torch.

The shapes of the full check are those of an 8B model: 32 query heads, 8 key heads, head dim 128, hidden size 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# In the order in which they run: right before fast, cheap before dear.
PARTS = ("kernels", "equivalence", "decode", "prefill", "copies", "ttft", "graphs")

GIB, MIB = 1024**3, 1024**2


@dataclass(frozen=True, slots=True)
class OracleCase:
    """One comparison with attention in float64. `contexts` are lengths, of which the last `news` tokens are queries of the
    prefill; `least_numel` makes the pool larger than the case needs, so that its blocks lie far from the start.
    """

    dtype: str
    head_dim: int
    block_size: int
    group: int
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    contexts: tuple[int, ...] = (1, 37, 150, 300)
    news: tuple[int, ...] = (1, 37, 20, 259)
    least_numel: int = 0

    @property
    def name(self) -> str:
        extras = [f"window {self.window}"] * bool(self.window) + [f"softcap {self.softcap:g}"] * bool(self.softcap)
        extras += [f"{max(self.contexts)} tokens"] * (max(self.contexts) > 1000)
        extras += ["pool over 2^31"] * (self.least_numel > 2**31)
        shape = f"{self.dtype} head dim {self.head_dim}, block {self.block_size}, group {self.group}"
        return ", ".join([shape, *extras])


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of random weights."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    max_len: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that has a size; counts of tokens, bytes, or repetitions."""

    oracle: Sequence[OracleCase]
    # Attention of one layer.
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    speed_dtype: str
    copy_nbytes: int
    flush_nbytes: int
    pool_nbytes: int
    most_layers: int
    decode_batches: Sequence[int]
    decode_contexts: Sequence[int]
    matmul: int
    prefills: Sequence[tuple[int, int]]
    repeats: int
    # Copies: blocks of `copy_layers` layers.
    copy_layers: int
    num_copies: int
    blocks_per_launch: int
    decode_beside: tuple[int, int]
    # Whole models: for equal tokens, for equal numbers, and an 8B one for times.
    exact_model: Shape
    small_model: Shape
    model: Shape
    equivalence_prompts: Sequence[int]
    num_tokens: int
    ttft_tokens: int
    ttft_rounds: int
    graph_batches: Sequence[int]
    graph_context: int
    graph_tokens: int
    max_num_batched_tokens: int


def _matrix() -> list[OracleCase]:
    """Every type with every head dim; block sizes, groups and options take turns. The served case comes first."""
    options = [(0, 0.0), (20, 0.0), (0, 1.5), (100, 2.5)]
    cases = [OracleCase("bfloat16", 128, 16, 4)]
    cases += [
        OracleCase("bfloat16", 128, 16, 4, kv_heads=8, contexts=(131_072, 40), news=(64, 40)),
        OracleCase("bfloat16", 128, 16, 4, least_numel=2**31 + 2**28),
    ]
    number = 0
    for head_dim in (128, 64, 256, 96, 80):
        for dtype in ("float16", "bfloat16", "float32"):
            number += 1
            window, softcap = options[number % len(options)]
            block_size, group = (16, 32, 64)[number // 2 % 3], (1, 3, 4, 7, 8)[number % 5]
            cases.append(OracleCase(dtype, head_dim, block_size, group, window=window, softcap=softcap))
    return cases


FULL = Sizes(
    oracle=_matrix(),
    heads=32,
    kv_heads=8,
    head_dim=128,
    block_size=16,
    speed_dtype="bfloat16",
    copy_nbytes=4 * GIB,
    flush_nbytes=256 * MIB,
    pool_nbytes=34 * GIB,
    most_layers=32,
    decode_batches=(1, 8, 32, 64, 128, 256),
    decode_contexts=(1024, 8192, 32_768, 131_072),
    matmul=8192,
    prefills=((2048, 0), (8192, 0), (32_768, 0), (2048, 30_720)),
    repeats=10,
    copy_layers=32,
    num_copies=1024,
    blocks_per_launch=64,
    decode_beside=(8, 8192),
    exact_model=Shape(3, 1024, 2816, 8, 2, 128, 4096, "float32", 8192),
    small_model=Shape(4, 4096, 14_336, 32, 8, 128, 32_000, "bfloat16", 131_072),
    model=Shape(32, 4096, 14_336, 32, 8, 128, 32_000, "bfloat16", 131_072),
    equivalence_prompts=(4000, 1000, 300),
    num_tokens=24,
    ttft_tokens=32_768,
    ttft_rounds=2,
    graph_batches=(1, 8, 64),
    graph_context=1024,
    graph_tokens=64,
    max_num_batched_tokens=8192,
)

SMALL = Sizes(
    oracle=[
        OracleCase("float32", 64, 16, 2, contexts=(1, 37), news=(1, 20)),
        OracleCase("float16", 80, 32, 3, 1, window=20, contexts=(40, 70), news=(3, 70)),
        OracleCase("bfloat16", 96, 64, 1, 1, softcap=1.5, contexts=(70,), news=(5,), least_numel=2**17),
    ],
    heads=2,
    kv_heads=1,
    head_dim=64,
    block_size=16,
    speed_dtype="float16",
    copy_nbytes=MIB,
    flush_nbytes=MIB,
    pool_nbytes=MIB,
    most_layers=2,
    decode_batches=(1, 2),
    decode_contexts=(20, 8192),
    matmul=64,
    prefills=((20, 0), (16, 16)),
    repeats=1,
    copy_layers=2,
    num_copies=8,
    blocks_per_launch=3,
    decode_beside=(2, 20),
    exact_model=Shape(1, 32, 32, 2, 1, 16, 128, "float32", 256),
    small_model=Shape(1, 32, 32, 2, 1, 16, 128, "bfloat16", 256),
    model=Shape(1, 32, 32, 2, 1, 16, 128, "bfloat16", 512),
    equivalence_prompts=(33,),
    num_tokens=2,
    ttft_tokens=48,
    ttft_rounds=1,
    graph_batches=(1, 2),
    graph_context=9,
    graph_tokens=2,
    max_num_batched_tokens=40,
)
