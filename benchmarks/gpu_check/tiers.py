"""Parts "equivalence" and "ttft": the same prompts computed, found on the device, and restored from host memory and disk.

Exact: in float32 the greedy tokens are the same from every tier and agree with stock transformers. In bfloat16 a warm, a
host-restored and a disk-restored prefix are the same bytes, so what is computed from them is the same number by number; the
cold one was computed in batches of another shape, so its log-probabilities may differ by rounding.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_check.random_model import make_runner, random_model, settings, shared_model
from benchmarks.gpu_check.report import Row
from benchmarks.gpu_check.serving import Answer, ask, forget_device, forget_host, serving, settle
from benchmarks.gpu_check.worker import Context
from tieredkv.config import Config
from tieredkv.models import LoadedModel, stock_logits
from tieredkv.types import Tier, TokenSources

# Log-probabilities of the first token, cold against restored, in bfloat16.
LOGPROB_TOLERANCE = 0.5
NUM_LOGPROBS = 20
HOST_TARGET = 1 / 8
TIERS = ("cold", "device", "host", "disk")
# Of a stock model's best logit: how far below it a chosen token may lie in float32, for two that all but tie.
_TIE = 1e-3
_SPARE_BLOCKS = 64


def prompts_of(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab) for _ in range(length)] for length in lengths]


def sized(context: Context, loaded: LoadedModel, num_tokens: int, folder: str) -> Config:
    """Settings under which `num_tokens` tokens fit into every tier, with room to spare."""
    block_size = context.sizes.block_size
    num_blocks = num_tokens // block_size + _SPARE_BLOCKS
    nbytes = num_blocks * (loaded.layout.block_nbytes + 4096)
    return settings(
        context,
        loaded,
        num_gpu_blocks_override=num_blocks,
        max_model_len=min(loaded.max_model_len, num_tokens),
        max_num_seqs=8,
        host_memory=nbytes,
        disk_path=folder,
        disk_size=max(2 * nbytes, 64 * 1024**2),
    )


def from_every_tier(
    core: Any, prompts: Sequence[list[int]], num_tokens: int, logprobs: int | None = None
) -> dict[str, list[Answer]]:
    """One answer per prompt from each of `TIERS`, one prompt at a time."""
    found: dict[str, list[Answer]] = {tier: [] for tier in TIERS}
    for prompt in prompts:
        for tier, forget in zip(TIERS, (None, None, forget_device, forget_host), strict=True):
            if forget is not None:
                settle(core)
                forget(core)
            found[tier] += ask(core, [prompt], num_tokens, logprobs)
    core.check_integrity()
    return found


def wrong_sources(found: dict[str, list[Answer]], prompts: Sequence[list[int]], block_size: int) -> str:
    """Where a prefix did not come from where it should; empty when all did."""
    for tier, answers in found.items():
        for answer, prompt in zip(answers, prompts, strict=True):
            tiers = [] if tier == "cold" else [Tier(tier)] * (len(prompt) // block_size)
            expected = TokenSources.of_prompt(tiers, block_size, len(prompt))
            if answer.sources != expected:
                return f"{tier}: {answer.sources}"
    return ""


def equivalence(context: Context) -> Iterator[Row]:
    """Tokens in float32, numbers in bfloat16."""
    sizes = context.sizes
    exact = random_model(sizes.exact_model, sizes.block_size, context.device)
    prompts = prompts_of(sizes.equivalence_prompts, exact.vocab_size, 1)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        config = sized(context, exact, sum(map(len, prompts)) + len(prompts) * sizes.num_tokens, folder)
        with serving(make_runner(context, exact, config), config) as core:
            found = from_every_tier(core, prompts, sizes.num_tokens)
    yield from token_rows(exact, prompts, found, sizes.block_size)
    del exact, core
    context.device.release()
    loaded = random_model(sizes.small_model, sizes.block_size, context.device)
    prompts = prompts_of(sizes.equivalence_prompts, loaded.vocab_size, 2)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        config = sized(context, loaded, sum(map(len, prompts)) + len(prompts) * sizes.num_tokens, folder)
        with serving(make_runner(context, loaded, config), config) as core:
            found = from_every_tier(core, prompts, 1, NUM_LOGPROBS)
    yield from number_rows(loaded, prompts, found, sizes.block_size)


def token_rows(
    loaded: LoadedModel, prompts: Sequence[list[int]], found: dict[str, list[Answer]], block_size: int
) -> Iterator[Row]:
    """Every tier's tokens against the cold ones, and those against stock transformers."""
    part = f"{loaded.layout.dtype} tokens"
    wrong = wrong_sources(found, prompts, block_size)
    yield Row("equivalence", f"{part}: sources", wrong or "as they should be", "as they should be", ok=not wrong)
    cold = [answer.tokens for answer in found["cold"]]
    for tier in TIERS[1:]:
        equal = [answer.tokens for answer in found[tier]] == cold
        yield Row("equivalence", f"{part}: {tier} = cold", "equal" if equal else "different", "equal", ok=equal)
    worst = max(behind_stock(loaded, prompt, tokens) for prompt, tokens in zip(prompts, cold, strict=True))
    yield Row(
        "equivalence",
        f"{part}: cold = stock transformers",
        f"at most {worst:.1e} of the best logit behind",
        f"<= {_TIE:g}",
        ok=worst <= _TIE,
        data={"worst": worst},
    )


def behind_stock(loaded: LoadedModel, prompt: list[int], tokens: list[int]) -> float:
    """How far the stock logits of the chosen tokens lie behind the best ones, as a share of the largest."""
    logits = stock_logits(loaded.model, prompt + tokens[:-1])[len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float((logits.amax(1) - chosen).max() / logits.abs().max())


def number_rows(
    loaded: LoadedModel, prompts: Sequence[list[int]], found: dict[str, list[Answer]], block_size: int
) -> Iterator[Row]:
    """Log-probabilities of the first token from every tier."""
    part = f"{loaded.layout.dtype} log-probabilities"
    wrong = wrong_sources(found, prompts, block_size)
    yield Row("equivalence", f"{part}: sources", wrong or "as they should be", "as they should be", ok=not wrong)
    for tier in TIERS[2:]:
        worst = max(map(largest_difference, found["device"], found[tier]))
        yield Row("equivalence", f"{part}: {tier} = device", f"{worst:.1e}", "= 0", ok=worst == 0.0)
    worst = max(map(largest_difference, found["cold"], found["device"]))
    yield Row(
        "equivalence",
        f"{part}: device = cold",
        f"{worst:.1e}",
        f"<= {LOGPROB_TOLERANCE:g}",
        ok=worst <= LOGPROB_TOLERANCE,
        data={"worst": worst},
    )


def largest_difference(one: Answer, other: Answer) -> float:
    """Over the tokens that both list for their first position; infinite when they share none."""
    here, there = (dict([*a.logprobs[0].top, (a.logprobs[0].token_id, a.logprobs[0].logprob)]) for a in (one, other))
    return max((abs(here[t] - there[t]) for t in here.keys() & there.keys()), default=float("inf"))


def ttft(context: Context) -> Iterator[Row]:
    """Time to the first token of a long prompt, from each tier; the median over prompts, the first of which warms up."""
    sizes, loaded = context.sizes, shared_model(context)
    prompts = prompts_of([sizes.ttft_tokens] * (sizes.ttft_rounds + 1), loaded.vocab_size, 3)
    times: dict[str, list[float]] = {tier: [] for tier in TIERS}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        config = sized(context, loaded, len(prompts) * (sizes.ttft_tokens + sizes.block_size), folder)
        with serving(make_runner(context, loaded, config), config) as core:
            for number, prompt in enumerate(prompts):
                if number > 1 and context.late():
                    yield Row("ttft", f"{len(prompts) - number} more prompts", "no time left", skipped=True)
                    break
                found = from_every_tier(core, [prompt], 1)
                wrong = wrong_sources(found, [prompt], sizes.block_size)
                if wrong:
                    yield Row("ttft", "sources", wrong, "as they should be", ok=False)
                if number:
                    for tier, answers in found.items():
                        times[tier].append(answers[0].first_s)
    yield from ttft_rows({tier: statistics.median(seconds) for tier, seconds in times.items()}, sizes.ttft_tokens)


def ttft_rows(seconds: dict[str, float], num_tokens: int) -> Iterator[Row]:
    """The times, as shares of the cold one."""
    for tier, value in seconds.items():
        share = value / seconds["cold"]
        yield Row(
            "ttft",
            f"{num_tokens} tokens, {tier}",
            f"{value * 1e3:.1f} ms, {share:.3f} of cold",
            f"<= {HOST_TARGET:g}" if tier == "host" else "",
            reached=share <= HOST_TARGET if tier == "host" else None,
            data={"seconds": value, "of_cold": share},
        )
