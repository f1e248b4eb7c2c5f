"""A scripted engine over a byte tokenizer: the server's tests say what the model answers and see what was asked.

Tokens 0 to 255 are bytes; then come the specials. The chat template is `<user>text` per message and `<assistant>`.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter

from tieredkv.engine import OutputStream
from tieredkv.errors import CapacityError, RequestError
from tieredkv.tokenizer import Tokenizer
from tieredkv.types import EngineOutput, FinishReason, TokenLogprob, TokenSources

EOS, USER, ASSISTANT, SYSTEM = 256, 257, 258, 259
NAMES = {EOS: "<eos>", USER: "<user>", ASSISTANT: "<assistant>", SYSTEM: "<system>"}
VOCAB_SIZE = 260
MODEL = "fake-model"


class ByteTokenizer(Tokenizer):
    def __init__(self) -> None:
        self._special_ids = frozenset(NAMES)

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=True):
        kept = [t for t in token_ids if not (skip_special_tokens and t in NAMES)]
        return b"".join(self.byte_content(t) for t in kept).decode("utf-8", "replace")

    def apply_chat_template(self, messages, add_generation_prompt=True, continue_final_message=False, variables=None):
        # As the real one does for every argument of its own.
        if "messages" in (variables or {}):
            raise RequestError("messages cannot be set as a template variable", param="chat_template_kwargs.messages")
        roles = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
        ids = []
        for message in messages:
            ids += [roles[message["role"]], *message["content"].encode()]
        return [*ids, ASSISTANT] if add_generation_prompt else ids

    def byte_content(self, token_id):
        return NAMES[token_id].encode() if token_id in NAMES else bytes([token_id])


class FakeEngine:
    """Answers each request with `script(request)`, one output per token, or per `tokens_per_step` tokens.

    With `hold_after` set, a sequence stops after that many tokens until it is aborted or `release` is called.
    """

    def __init__(self, max_model_len=512) -> None:
        self.tokenizer = ByteTokenizer()
        self.model_name = MODEL
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = frozenset([EOS])
        registry = CollectorRegistry()
        Counter("tieredkv:fake", "A counter.", registry=registry)
        self.metrics = SimpleNamespace(registry=registry)
        self.reset()

    def reset(self) -> None:
        self.script = lambda request: [*b"Hello, world!", EOS]
        self.sources = lambda request: TokenSources(device=16, computed=len(request.prompt_token_ids) - 16)
        self.tokens_per_step = 1
        self.hold_after = None
        self.full = False
        self.fail_after = None
        self.unhealthy = None
        self.worries: list[str] = []
        self.draining = False
        self.submitted = []
        self.aborted = []
        self.running = {}
        self.changed = threading.Condition()

    def wait_for(self, predicate, timeout_s=20.0) -> None:
        """Block the test's thread until `predicate()`, which is looked at after each change."""
        with self.changed:
            assert self.changed.wait_for(predicate, timeout_s), "the engine never got there"

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def check(self, request) -> None:
        sampling = request.sampling
        total = len(request.prompt_token_ids) + (sampling.max_tokens or 1)
        if total > self.max_model_len:
            raise RequestError(
                f"maximum context length is {self.max_model_len}, not {total}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        for name, ids in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if any(not 0 <= t < VOCAB_SIZE for t in ids):
                raise RequestError("token id out of vocabulary", param=name)

    def submit(self, request):
        self.check(request)
        if self.full:
            raise CapacityError("the queue is full", retry_after_s=7)
        if self.draining:
            raise CapacityError("draining", status=503)
        stream = OutputStream(request.request_id, asyncio.get_running_loop(), self.abort)
        task = asyncio.get_running_loop().create_task(self._run(request, stream))
        self.running[request.request_id] = (stream, task)
        self.submitted.append(request)
        self._notify()
        return stream

    async def _run(self, request, stream) -> None:
        tokens = self.script(request)[: request.sampling.max_tokens]
        sources = self.sources(request)
        with_logprobs = request.sampling.logprobs is not None
        for at in range(0, len(tokens), self.tokens_per_step):
            if self.hold_after is not None and at >= self.hold_after:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            part = tokens[at : at + self.tokens_per_step]
            if self.fail_after is not None and at >= self.fail_after:
                self._end(
                    request,
                    stream,
                    EngineOutput(request.request_id, [], sources, None, FinishReason.ERROR, error="it broke"),
                )
                return
            ended = at + self.tokens_per_step >= len(tokens)
            reason = (FinishReason.STOP if part[-1] == EOS else FinishReason.LENGTH) if ended else None
            logprobs = None
            if with_logprobs:
                top = [(t, -0.5 - i) for i, t in enumerate((65, 66, 67))][: request.sampling.logprobs]
                logprobs = [TokenLogprob(t, float("-inf") if t == EOS else -0.25, 1, top) for t in part]
            output = EngineOutput(request.request_id, part, sources, logprobs, reason)
            if ended:
                self._end(request, stream, output)
            else:
                stream.put(output)

    def _end(self, request, stream, output) -> None:
        del self.running[request.request_id]
        stream.put(output)
        self._notify()

    def abort(self, request_id) -> None:
        found = self.running.pop(request_id, None)
        if found is not None:
            stream, task = found
            task.cancel()
            self.aborted.append(request_id)
            stream.put(EngineOutput(request_id, [], TokenSources(), finish_reason=FinishReason.ABORT))
            self._notify()

    def abort_all(self) -> None:
        for request_id in list(self.running):
            self.abort(request_id)

    def begin_drain(self) -> None:
        self.draining = True

    async def wait_drained(self, timeout_s) -> bool:
        return not self.running

    def health(self):
        return self.unhealthy

    def warnings(self):
        return self.worries
