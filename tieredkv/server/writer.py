"""Pieces written as answers: what `/v1/completions` and `/v1/chat/completions` have in common.

A writer belongs to one request. Streaming, `chunk` turns each piece into the bytes of its events; otherwise `add`
gathers the pieces and `result` writes the one answer. The common case of a streamed token (text only) is put together
from bytes prepared once per choice, without building a dict.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson

from tieredkv.server.generation import Choice, Generation, Piece, usage
from tieredkv.server.protocol import GenerateBody
from tieredkv.server.sse import DONE, event
from tieredkv.tokenizer import Tokenizer
from tieredkv.types import TokenLogprob

# JSON has no infinity; the value that other servers send for an impossible token.
MIN_LOGPROB = -9999.0


@dataclass(slots=True)
class Gathered:
    """All pieces of one choice."""

    choice: Choice
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Writer(ABC):
    """`envelope` is what every chunk and the answer carry: id, object, created, model."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        body: GenerateBody,
        *,
        request_id: str,
        kind: str,
        model: str,
    ) -> None:
        self.generation = generation
        self.tokenizer = tokenizer
        self.body = body
        self.envelope = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._usage_in_chunks = (
            self._include_usage and body.stream_options is not None and body.stream_options.continuous_usage_stats
        )
        self._with_logprobs = generation.choices[0].sampling.logprobs is not None
        self._plain = not (self._with_logprobs or self._usage_in_chunks or body.return_token_ids)
        self._head = b"data: " + orjson.dumps(self.envelope)[:-1] + b',"choices":['
        self._tail = b""
        self._heads: dict[int, bytes] = {}
        self._gathered = [Gathered(choice) for choice in generation.choices]

    @abstractmethod
    def text_parts(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text (a JSON string) of a plain chunk's choice."""

    @abstractmethod
    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk, in full."""

    @abstractmethod
    def opening(self, piece: Piece) -> tuple[bytes, str]:
        """Events to send before a choice's first piece, and text to put in front of it."""

    @abstractmethod
    def answer_choice(self, gathered: Gathered) -> dict[str, Any]:
        """The choice of the whole answer."""

    def chunk(self, piece: Piece) -> bytes:
        """The events of `piece`; empty when there is nothing to tell yet."""
        choice = piece.choice
        head = self._heads.get(choice.index)
        before = b""
        if head is None:
            start, self._tail = self.text_parts(choice.index)
            head = self._heads[choice.index] = self._head + start
            before, prefix = self.opening(piece)
            piece.text = prefix + piece.text
        elif not piece.text and choice.finish_reason is None and self._plain:
            return b""
        if self._plain and choice.finish_reason is None:
            return before + head + orjson.dumps(piece.text) + self._tail
        chunk: dict[str, Any] = {**self.envelope, "choices": [self.chunk_choice(piece)]}
        if self._usage_in_chunks:
            chunk["usage"] = usage(len(choice.prompt.token_ids), choice.num_tokens, choice.sources)
        return before + event(chunk)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The whole stream."""
        async for piece in self.generation.pieces():
            data = self.chunk(piece)
            if data:
                yield data
        end = {**self.envelope, "choices": [], "usage": self.generation.usage()}
        yield event(end) + DONE if self._include_usage else DONE

    async def answer(self) -> dict[str, Any]:
        """The whole answer, once every choice has ended."""
        async for piece in self.generation.pieces():
            gathered = self._gathered[piece.choice.index]
            gathered.text.append(piece.text)
            gathered.token_ids.extend(piece.token_ids)
            gathered.logprobs.extend(piece.logprobs or ())
        choices = [self.answer_choice(gathered) for gathered in self._gathered]
        return {**self.envelope, "choices": choices, "usage": self.generation.usage()}

    def token_name(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else self.tokenizer.token_text(token_id)


def clamp(logprob: float) -> float:
    """`logprob` as JSON can hold it."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
