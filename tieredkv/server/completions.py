"""`POST /v1/completions`: prompts as text or token ids, `n`, `echo`, log-probabilities, streaming."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tieredkv.server.generation import Choice, Generation, Piece
from tieredkv.server.prompts import encode_prompts, parse_prompts
from tieredkv.server.protocol import CompletionBody
from tieredkv.server.service import get_service
from tieredkv.server.sse import until_disconnect
from tieredkv.server.writer import Gathered, Writer, clamp
from tieredkv.types import TokenLogprob

DEFAULT_MAX_TOKENS = 16


class CompletionWriter(Writer):
    """Writes `text_completion` objects."""

    body: CompletionBody

    def __init__(self, generation: Generation, *args: Any, **kwargs: Any) -> None:
        super().__init__(generation, *args, **kwargs)
        self._offsets = [0] * len(generation.choices)

    def text_parts(self, index: int) -> tuple[bytes, bytes]:
        head = b'{"index":%d,"text":' % index
        return head, b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'

    def opening(self, piece: Piece) -> tuple[bytes, str]:
        return b"", self._echo(piece.choice)

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        choice = piece.choice
        result = self._choice(choice, piece.text, piece.logprobs, first=choice.num_tokens - len(piece.token_ids))
        if self.body.return_token_ids:
            opens = choice.num_tokens == len(piece.token_ids)
            result["prompt_token_ids"] = choice.prompt.token_ids if opens else None
            result["token_ids"] = piece.token_ids
        return result

    def answer_choice(self, gathered: Gathered) -> dict[str, Any]:
        choice = gathered.choice
        text = self._echo(choice) + "".join(gathered.text)
        logprobs = gathered.logprobs if choice.sampling.logprobs is not None else None
        result = self._choice(choice, text, logprobs, first=0)
        if self.body.return_token_ids:
            result["prompt_token_ids"] = choice.prompt.token_ids
            result["token_ids"] = gathered.token_ids
        return result

    def _choice(self, choice: Choice, text: str, logprobs: Any, *, first: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if logprobs is None else self._logprobs(choice, logprobs, first=first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _echo(self, choice: Choice) -> str:
        if not self.body.echo:
            return ""
        prompt = choice.prompt
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self.body.skip_special_tokens)

    def _logprobs(self, choice: Choice, logprobs: list[TokenLogprob], *, first: int) -> dict[str, Any]:
        """OpenAI's four parallel lists. `first` is the position of the first token in the completion."""
        offset = len(self._echo(choice)) if first == 0 else self._offsets[choice.index]
        offsets, names = [], []
        for entry in logprobs:
            offsets.append(offset)
            names.append(self.token_name(entry.token_id))
            offset += len(names[-1])
        self._offsets[choice.index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [clamp(entry.logprob) for entry in logprobs],
            "tokens": names,
            "top_logprobs": [
                {self.token_name(entry.token_id): clamp(entry.logprob)}
                | {self.token_name(token_id): clamp(value) for token_id, value in entry.top}
                for entry in logprobs
            ],
        }


async def create_completion(request: Request) -> Response:
    """The endpoint."""
    service = get_service(request)
    body = await service.read(request, CompletionBody)
    model = service.check_model(body.model)
    service.check_accepting()
    texts = parse_prompts(body.prompt)
    engine = service.engine
    prompts = await until_disconnect(
        request.receive, encode_prompts(engine.tokenizer, texts, add_special_tokens=body.add_special_tokens)
    )
    samplings = [
        service.sampling(body, len(p.token_ids), max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs) for p in prompts
    ]
    request_id, generation = service.start(request, body, "cmpl", prompts, samplings)
    return await service.respond(
        request,
        body,
        generation,
        lambda: CompletionWriter(
            generation, engine.tokenizer, body, request_id=request_id, kind="text_completion", model=model
        ),
    )
