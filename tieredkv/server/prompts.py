"""Prompts and messages: from JSON values to token ids.

Knows the tokenizer's face, not the engine's. Text over `_THREAD_CHARS` is tokenized in a thread, so that a long prompt
does not hold up the streams of others. Raises `RequestError` that names the field.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tieredkv.errors import RequestError
from tieredkv.server.breakpoints import Breakpoint, locate
from tieredkv.tokenizer import Tokenizer
from tieredkv.types import Retention

ROLES = frozenset({"system", "developer", "user", "assistant"})
MAX_PROMPTS = 1024
_THREAD_CHARS = 4096
# What a message costs a template besides its text.
_MESSAGE_CHARS = 100
# What chats may go on with: begins differently, so that no word of it is taken for a part of the beginning.
_PROBES = ("Why?", "7 + 5")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. `text` is None when the client sent token ids; `retention` is what the client wants kept."""

    token_ids: list[int]
    text: str | None = None
    retention: tuple[Retention, ...] = ()


def parse_prompts(value: Any) -> list[str] | list[list[int]]:
    """OpenAI's `prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise RequestError(f"At most {MAX_PROMPTS} prompts per request are accepted.", param="prompt")
        kinds = set(map(type, value))
        if kinds == {str}:
            return value
        if kinds == {int}:
            return [_token_ids(value)]
        if kinds == {list} and all(set(map(type, part)) == {int} for part in value):
            return [_token_ids(part) for part in value]
    raise RequestError(
        "'prompt' must be a string, a list of strings, a list of token ids, or a list of lists of token ids, "
        "and not empty.",
        param="prompt",
    )


def _token_ids(values: list[int]) -> list[int]:
    if min(values) < 0 or max(values) >= 2**32:
        raise RequestError("'prompt' holds a token id outside the vocabulary.", param="prompt")
    return values


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """OpenAI's `messages`, with text parts joined: a list of `{"role", "content"}` (and `name` where given)."""
    if not isinstance(value, list) or not value:
        raise RequestError("'messages' must be a list with at least one message.", param="messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"'{where}' must be an object.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise RequestError(f"'{where}.role' must be one of {known}.", param=f"{where}.role")
    for key in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if message.get(key):
            raise RequestError(f"'{where}.{key}' is not supported by this server.", param=f"{where}.{key}")
    # Chat templates know the older name of this role.
    result = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{where}.content"),
    }
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise RequestError(f"'{where}.name' must be a string.", param=f"{where}.name")
        result["name"] = name
    return result


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{where}' must be a string or a list of text parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RequestError(
                f"'{where}.{index}' must be a text part: {{'type': 'text', 'text': ...}}; "
                "images, audio and files are not supported.",
                param=f"{where}.{index}",
            )
    return "\n".join(texts)


async def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]], *, add_special_tokens: bool
) -> list[Prompt]:
    """Prompts as token ids. Raises `RequestError` when one has no token."""

    def encode() -> list[Prompt]:
        return [
            Prompt(tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
            if isinstance(prompt, str)
            else Prompt(prompt)
            for prompt in prompts
        ]

    result = await _off_loop(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), encode)
    if not all(prompt.token_ids for prompt in result):
        raise RequestError("'prompt' must not be empty: it has no token.", param="prompt")
    return result


async def encode_messages(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    breakpoints: Sequence[Breakpoint] = (),
) -> Prompt:
    """Messages as the token ids that the model's chat template makes of them; `variables` are passed to the template. What is
    to be kept up to `breakpoints` becomes the prompt's `retention`.
    """
    if continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "'continue_final_message' needs an assistant message at the end.", param="continue_final_message"
        )
    render = functools.partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )

    def encode() -> tuple[list[int], tuple[Retention, ...]]:
        ids = render(messages)
        if not breakpoints:
            return ids, ()
        part = functools.partial(render, add_generation_prompt=False, continue_final_message=False)
        return ids, locate(breakpoints, messages, ids, part)

    num_chars = sum(len(message["content"]) + _MESSAGE_CHARS for message in messages)
    ids, retention = await _off_loop(num_chars * (1 + len(breakpoints)), encode)
    if not ids:
        raise RequestError("'messages' make an empty prompt.", param="messages")
    return Prompt(ids, retention=retention)


def encode_beginning(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """The longest beginning that all chats share that start with these messages, as token ids: what is worth computing ahead.

    It is found by rendering continuations and keeping what they have in common. After a user's message that is these
    messages alone, answered, and two chats that go on after different answers; otherwise two chats whose user asks different
    things next. So it holds whatever the template does with the end of a conversation, and is never part of what follows.
    Raises `RequestError` on `messages`, also where nothing is shared.
    """
    ends_with_user = messages[-1]["role"] == "user"
    renderings: list[list[int]] = []
    refusal: RequestError | None = None
    if ends_with_user:
        renderings.append(tokenizer.apply_chat_template(messages))
    for probe in _PROBES:
        follow_up = {"role": "user", "content": probe}
        more = [{"role": "assistant", "content": probe}, follow_up] if ends_with_user else [follow_up]
        try:
            renderings.append(tokenizer.apply_chat_template([*messages, *more]))
        except RequestError as error:
            # A template that takes one question only: then there is nothing but the messages themselves.
            refusal = error
    if not renderings and refusal is not None:
        raise refusal
    shortest = min(renderings, key=len)
    length = next((i for i, ids in enumerate(zip(*renderings, strict=False)) if len(set(ids)) > 1), len(shortest))
    if not length:
        raise RequestError("'messages' share no beginning with the chats that they start.", param="messages")
    return shortest[:length]


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Run `work` here when it is short, else in a thread."""
    return work() if num_chars <= _THREAD_CHARS else await asyncio.to_thread(work)
