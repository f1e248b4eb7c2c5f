"""The engine without HTTP or threads: `LLM(model).generate(prompts, SamplingParams(...))`, in the shape vLLM's users know.

    llm = LLM("smollm2-135m", max_model_len=2048)
    for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text, output.num_cached_tokens)

It runs the very same core as the server, in the calling thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv import hashing
from tieredkv.build import Progress, build_core, load_runner
from tieredkv.config import Config
from tieredkv.engine import fan_out
from tieredkv.errors import RequestError, TieredKVError
from tieredkv.tokenizer import Detokenizer
from tieredkv.types import EngineOutput, EngineRequest, FinishReason, SamplingParams, TokenLogprob, TokenSources

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers. `logprobs` is parallel to `token_ids` when asked for; `stop_reason` is a string or token id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers. `sources` splits the prompt's tokens by where they came from."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    sources: TokenSources = field(default_factory=TokenSources)
    finished: bool = False

    @property
    def num_cached_tokens(self) -> int:
        return self.sources.cached


@dataclass(slots=True)
class _Answer:
    """Where the outputs of one sequence go."""

    request: RequestOutput
    completion: CompletionOutput
    detokenizer: Detokenizer
    sampling: SamplingParams


class LLM:
    """A model and its cache. `config` takes every setting by name, for example `dtype="float32"`; an unknown one raises
    `ConfigError`. Loading raises `UnsupportedModelError` for a model that would be computed wrongly. Not thread-safe.
    """

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, **config: Any) -> None:
        self.config = Config.load(({"model": model} if model is not None else {}) | config)
        self.runner = load_runner(self.config, progress)
        self.core = build_core(self.runner, self.config)
        self.tokenizer = self.runner.loaded.tokenizer
        self.model_folder = self.runner.loaded.folder
        self._eos_token_ids = self.runner.loaded.eos_token_ids
        self._counter = itertools.count()

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": [...]}`.

        Returns one `RequestOutput` per prompt, in order. Raises `RequestError` before anything runs if one of them cannot
        be honoured.
        """
        parsed = [self._parse(p) for p in _as_list(prompts)]
        return self._run(parsed, self._params_for(len(parsed), sampling_params), cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        parsed: list[tuple[str | None, list[int]]] = [
            (
                None,
                self.tokenizer.apply_chat_template(
                    [dict(m) for m in conversation],
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                ),
            )
            for conversation in conversations
        ]
        return self._run(parsed, self._params_for(len(parsed), sampling_params), cache_salt)

    def warm(self, prompts: Prompt | Sequence[Prompt], *, cache_salt: str | None = None) -> list[TokenSources]:
        """Compute the prompts' blocks so that later requests find them; returns per prompt what was there and what was not."""
        outputs = self.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), cache_salt=cache_salt)
        return [output.sources for output in outputs]

    def close(self, timeout_s: float = 10.0) -> bool:
        """Save what the disk tier does not hold yet and close it; False if `timeout_s` seconds were not enough."""
        return self.core.close(timeout_s)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; True when none is left."""
        return self.core.clear().in_use == 0

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        tenant = hashing.tenant_salt(cache_salt=cache_salt)
        answers: dict[str, _Answer] = {}
        results: list[RequestOutput] = []
        requests: list[EngineRequest] = []
        for (text, token_ids), sampling in zip(prompts, params, strict=True):
            request_id = f"llm-{next(self._counter)}"
            result = RequestOutput(request_id, text, token_ids, [])
            results.append(result)
            for index, (child_id, child) in enumerate(fan_out(request_id, sampling)):
                request = EngineRequest(child_id, token_ids, child, tenant, self._eos_token_ids, time.monotonic())
                self.core.check(request)
                requests.append(request)
                completion = CompletionOutput(index, logprobs=[] if child.logprobs is not None else None)
                result.outputs.append(completion)
                answers[child_id] = _Answer(result, completion, Detokenizer(self.tokenizer, token_ids, child), child)
        try:
            for request in requests:
                self.core.add(request)
            while answers:
                for output in self.core.step():
                    self._take(output, answers)
                if self.core.is_stalled:
                    self.core.wait(0.01)
        finally:
            for request_id in answers:
                self.core.abort(request_id)
            # Takes the last words of what was aborted, here or at a stop string.
            while self.core.has_work:
                self.core.step()
        return results

    def _take(self, output: EngineOutput, answers: dict[str, _Answer]) -> None:
        answer = answers.get(output.request_id)
        if answer is None:
            return
        if output.finish_reason is FinishReason.ERROR:
            raise TieredKVError(f"request {output.request_id} failed: {output.error}")
        completion = answer.completion
        if completion.index == 0:
            answer.request.sources = output.sources
        ended = output.finish_reason is not None
        shown = output.new_token_ids
        if output.finish_reason is FinishReason.STOP and not answer.sampling.include_stop_str_in_output:
            shown = shown[:-1]
        delta = answer.detokenizer.push(shown, finished=ended)
        completion.token_ids.extend(output.new_token_ids)
        if completion.logprobs is not None and output.logprobs is not None:
            completion.logprobs.extend(output.logprobs)
        completion.text += delta.text
        if delta.stop is not None:
            self.core.abort(output.request_id)
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, delta.stop
        elif ended:
            completion.finish_reason = str(output.finish_reason)
            completion.stop_reason = output.stop_reason
        if delta.stop is not None or ended:
            del answers[output.request_id]
            answer.request.finished = all(c.finish_reason is not None for c in answer.request.outputs)

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RequestError("needs 'prompt' or 'prompt_token_ids'", param="prompt")
            prompt = str(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, [int(token_id) for token_id in prompt]

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts, but {len(params)} sampling parameters", param="sampling_params")
        return params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a string, a mapping and a sequence of token ids are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and all(isinstance(p, int) for p in several) else several
