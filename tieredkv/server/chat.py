"""`POST /v1/chat/completions`: messages through the model's chat template, log-probabilities, streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tieredkv.errors import RequestError
from tieredkv.server.breakpoints import parse_breakpoints
from tieredkv.server.generation import Piece
from tieredkv.server.prompts import encode_messages, parse_messages
from tieredkv.server.protocol import ChatBody
from tieredkv.server.service import get_service
from tieredkv.server.sse import event, until_disconnect
from tieredkv.server.writer import Gathered, Writer, clamp
from tieredkv.types import TokenLogprob


class ChatWriter(Writer):
    """Writes `chat.completion` and `chat.completion.chunk` objects."""

    body: ChatBody

    def text_parts(self, index: int) -> tuple[bytes, bytes]:
        head = b'{"index":%d,"delta":{"content":' % index
        return head, b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def opening(self, piece: Piece) -> tuple[bytes, str]:
        """The role comes with the first token, not before it: clients stop their clocks at it."""
        choice: dict[str, Any] = {
            "index": piece.choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk: dict[str, Any] = {**self.envelope, "choices": [choice]}
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = piece.choice.prompt.token_ids
        return event(chunk), ""

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        result = {
            "index": piece.choice.index,
            "delta": {"content": piece.text},
            "logprobs": None if piece.logprobs is None else self._logprobs(piece.logprobs),
            "finish_reason": piece.choice.finish_reason,
        }
        if piece.choice.finish_reason is not None:
            result["stop_reason"] = piece.choice.stop_reason
        if self.body.return_token_ids:
            result["token_ids"] = piece.token_ids
        return result

    def answer_choice(self, gathered: Gathered) -> dict[str, Any]:
        choice = gathered.choice
        result = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(gathered.text), "refusal": None},
            "logprobs": self._logprobs(gathered.logprobs) if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            result["token_ids"] = gathered.token_ids
        return result

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        num_top = self.body.top_logprobs or 0
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(token_id, value) for token_id, value in entry.top[:num_top]],
                }
                for entry in logprobs
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token_name(token_id),
            "logprob": clamp(logprob),
            "bytes": self.tokenizer.token_bytes(token_id),
        }


# How `SamplingParams` and the engine call what a chat client named differently.
_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}


async def create_chat_completion(request: Request) -> Response:
    """The endpoint."""
    service = get_service(request)
    body = await service.read(request, ChatBody)
    model = service.check_model(body.model)
    service.check_accepting()
    names = dict(_NAMES)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    messages = parse_messages(body.messages)
    breakpoints = parse_breakpoints(body.messages)
    engine = service.engine
    prompt = await until_disconnect(
        request.receive,
        encode_messages(
            engine.tokenizer,
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            breakpoints=breakpoints,
        ),
    )
    try:
        sampling = service.sampling(
            body,
            len(prompt.token_ids),
            max_tokens=engine.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        request_id, generation = service.start(request, body, "chatcmpl", [prompt], [sampling])
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise
    return await service.respond(
        request,
        body,
        generation,
        lambda: ChatWriter(
            generation,
            engine.tokenizer,
            body,
            request_id=request_id,
            kind="chat.completion.chunk" if body.stream else "chat.completion",
            model=model,
        ),
    )
