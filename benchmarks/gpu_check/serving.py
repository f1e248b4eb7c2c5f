"""An engine core driven by hand: prompts in, tokens out, with the times and sources that the parts compare."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tieredkv.build import build_core
from tieredkv.config import Config
from tieredkv.core import EngineCore
from tieredkv.errors import TieredKVError
from tieredkv.model_runner import ModelRunner
from tieredkv.types import EngineRequest, FinishReason, SamplingParams, TokenLogprob, TokenSources

_SETTLE_S = 60.0
_numbers = itertools.count()


@dataclass(slots=True)
class Answer:
    """What came of one prompt. `first_s` and `last_s` are seconds from the start to the first and the last token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sources: TokenSources = field(default_factory=TokenSources)
    first_s: float = 0.0
    last_s: float = 0.0


@contextmanager
def serving(runner: ModelRunner, config: Config) -> Iterator[EngineCore]:
    """A core with the tiers of `config` over a runner that may serve others before and after."""
    core = build_core(runner, config)
    try:
        yield core
    finally:
        core.close(_SETTLE_S)


def ask(core: EngineCore, prompts: Sequence[list[int]], num_tokens: int, logprobs: int | None = None) -> list[Answer]:
    """Greedy answers of exactly `num_tokens` tokens to all prompts at once. Raises `TieredKVError` for one that fails."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
    began_s = time.perf_counter()
    answers: dict[str, Answer] = {}
    for prompt in prompts:
        request_id = f"check-{next(_numbers)}"
        answers[request_id] = Answer()
        core.add(EngineRequest(request_id, prompt, sampling, arrival_s=time.monotonic()))
    while core.has_work:
        outputs = core.step()
        now_s = time.perf_counter() - began_s
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise TieredKVError(f"a request failed: {output.error}")
            answer = answers[output.request_id]
            answer.first_s = answer.first_s if answer.tokens else now_s
            answer.last_s = now_s
            answer.tokens += output.new_token_ids
            answer.logprobs += output.logprobs or []
            answer.sources = output.sources
        if core.is_stalled:
            core.wait(0.01)
    return list(answers.values())


def settle(core: EngineCore) -> None:
    """Idle until everything that can be saved is saved. Raises `TieredKVError` when that takes too long."""
    deadline_s = time.monotonic() + _SETTLE_S
    while core.work_idle():
        if time.monotonic() > deadline_s:
            raise TieredKVError(f"the tiers do not come to rest in {_SETTLE_S:g} s")
        core.wait(0.01)


def forget_device(core: EngineCore) -> None:
    core.clear()


def forget_host(core: EngineCore) -> None:
    forget_device(core)
    tiers: Any = core.tiers
    if tiers is not None:
        tiers.host.clear()
        tiers.forget_gone()
