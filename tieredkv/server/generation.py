"""One request's generation: fan-out into sequences, their streams merged, tokens turned into text, usage counted.

    prompts x n  ->  EngineRequest "<id>-<k>"  ->  OutputStream  ->  Choice (detokenizer, counters)  ->  Piece

Knows the engine's face and no JSON. Invariants: choice `index` is `prompt index * n + i`; a choice ends with exactly
one piece that has a finish reason; once `close` was called no sequence of this generation runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv.engine import fan_out
from tieredkv.errors import CapacityError, RequestError
from tieredkv.server.errors import GenerationError
from tieredkv.server.face import Engine, OutputStream
from tieredkv.server.prompts import Prompt
from tieredkv.tokenizer import Detokenizer
from tieredkv.types import (
    SHARED_OWNER,
    EngineOutput,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    TokenSources,
)

MAX_SEQUENCES = 1024


@dataclass(slots=True)
class Choice:
    """One sequence: its prompt, its stream, and what came of it so far. Token ids and log-probabilities are parallel."""

    index: int
    prompt: Prompt
    sampling: SamplingParams
    stream: OutputStream
    detokenizer: Detokenizer
    sources: TokenSources = field(default_factory=TokenSources)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, output: EngineOutput) -> Piece:
        """The next piece. Raises `GenerationError` when the engine failed, `CapacityError` when it is stopping."""
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            raise GenerationError(output.error or "The engine failed.")
        if reason is FinishReason.ABORT:
            raise CapacityError("The request was aborted: the server is shutting down.", status=503, retry_after_s=10)
        self.sources = output.sources
        ids = output.new_token_ids
        # The token that stopped the sequence is counted, but its text is shown only on demand.
        hidden = int(reason is FinishReason.STOP and not self.sampling.include_stop_str_in_output)
        delta = self.detokenizer.push(ids[: len(ids) - hidden] if hidden else ids, reason is not None)
        if delta.stop is not None:
            self.stream.abort()
            ids = ids[: delta.num_tokens_used]
            self.finish_reason, self.stop_reason = "stop", delta.stop
        elif reason is not None:
            self.finish_reason, self.stop_reason = reason.value, output.stop_reason
        self.num_tokens += len(ids)
        logprobs = output.logprobs[: len(ids)] if output.logprobs is not None else None
        return Piece(self, delta.text, ids, logprobs)


@dataclass(slots=True)
class Piece:
    """What one step brought one choice. `text` may be empty while tokens have come."""

    choice: Choice
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None


class Generation:
    """All sequences of one request. Submits them on creation, all or none; raises what `Engine.submit` raises."""

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
        tenant: bytes,
        *,
        owner: str = SHARED_OWNER,
        prefix_name: str | None = None,
    ) -> None:
        requests: list[tuple[Prompt, EngineRequest]] = []
        if sum(sampling.n for sampling in samplings) > MAX_SEQUENCES:
            raise RequestError(f"At most {MAX_SEQUENCES} sequences per request are accepted.", param="n")
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            for child_id, child in fan_out(f"{request_id}-{index}", sampling):
                request = EngineRequest(
                    child_id,
                    prompt.token_ids,
                    child,
                    tenant,
                    engine.eos_token_ids,
                    owner=owner,
                    prefix_name=prefix_name,
                    retention=prompt.retention,
                )
                engine.check(request)
                requests.append((prompt, request))
        self.prompts = prompts
        self.choices: list[Choice] = []
        self._forwarders: list[asyncio.Task[None]] = []
        try:
            for prompt, request in requests:
                detokenizer = Detokenizer(engine.tokenizer, prompt.token_ids, request.sampling)
                stream = engine.submit(request)
                self.choices.append(Choice(len(self.choices), prompt, request.sampling, stream, detokenizer))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what still runs; idempotent."""
        for task in self._forwarders:
            task.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.stream.abort()

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces of all choices, as they come. Raises as `Choice.take` does."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            async for output in choice.stream:
                yield choice.take(output)
                if choice.finish_reason is not None:
                    return
            raise GenerationError("The engine ended the request without a reason.")
        merged: asyncio.Queue[tuple[Choice, EngineOutput | None]] = asyncio.Queue()
        self._forwarders = [asyncio.create_task(_forward(choice, merged)) for choice in self.choices]
        num_open = len(self.choices)
        while num_open:
            choice, merged_output = await merged.get()
            if choice.finish_reason is not None:
                num_open -= merged_output is None
            elif merged_output is not None:
                yield choice.take(merged_output)
            else:
                raise GenerationError("The engine ended the request without a reason.")

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, with `tieredkv` beside it: the tiers that the prompt tokens came from.

        A prompt counts once however many choices it has; its sources are those of its first choice.
        """
        num_choices = len(self.choices) // len(self.prompts)
        sources = TokenSources()
        for choice in self.choices[::num_choices]:
            own = choice.sources
            sources.device += own.device
            sources.host += own.host
            sources.disk += own.disk
            sources.computed += own.computed
        return usage(
            sum(len(prompt.token_ids) for prompt in self.prompts), sum(c.num_tokens for c in self.choices), sources
        )


async def _forward(choice: Choice, merged: asyncio.Queue[tuple[Choice, EngineOutput | None]]) -> None:
    """Put the outputs of one choice into the common queue, and None at their end."""
    async for output in choice.stream:
        merged.put_nowait((choice, output))
    merged.put_nowait((choice, None))


def usage(num_prompt_tokens: int, num_completion_tokens: int, sources: TokenSources) -> dict[str, Any]:
    """The `usage` object of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sources.cached},
        "tieredkv": {
            "device_tokens": sources.device,
            "host_tokens": sources.host,
            "disk_tokens": sources.disk,
            "computed_tokens": sources.computed,
        },
    }
