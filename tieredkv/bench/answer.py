"""What the events of a streamed answer say. They come from any server, so nothing about their shape is taken for granted.

Knows JSON and the fields of OpenAI-style answers; no bytes on a wire, no times. Invariant: whatever an event holds, reading it
raises nothing; what a figure would be made of has the type and the range that it has to have, or the event is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SOURCES = ("device", "host", "disk", "computed")
# More tokens than any answer has: what is above is no count.
_MOST_TOKENS = 10**12


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `has_token` tells whether it has a choice; `error` is what the server says went wrong, or what is wrong with
    the event.
    """

    done: bool = False
    error: str | None = None
    usage: dict[str, Any] | None = None
    has_token: bool = False
    text: str = ""
    finish_reason: str | None = None


def read_event(data: bytes) -> Event:
    """The data of one server-sent event."""
    if data == b"[DONE]":
        return Event(done=True)
    try:
        message = _object(json.loads(data), "the event")
        if message.get("error"):
            return Event(error=printable(json.dumps(message["error"]))[:500])
        usage, choices = _usage(message), message.get("choices") or []
        if not isinstance(choices, list):
            raise ValueError("choices must be a list")
        if not choices:
            return Event(usage=usage)
        choice = _object(choices[0], "a choice")
        delta = _object(choice.get("delta") or {}, "delta")
        reason = choice.get("finish_reason")
        return Event(
            usage=usage,
            has_token=True,
            text=_text(choice, "text") or _text(delta, "content"),
            finish_reason=reason if isinstance(reason, str) else None,
        )
    # Brackets nested deep enough exhaust the parser's stack.
    except (ValueError, RecursionError) as error:
        return Event(error=printable(f"not an answer of this API ({error}): {data[:80]!r}"))


def printable(text: str) -> str:
    """Text of a server as a terminal may show it: without control characters."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _usage(message: dict[str, Any]) -> dict[str, Any] | None:
    """The counts of tokens, where the event has them. Raises `ValueError` for what cannot be counts."""
    usage = message.get("usage")
    if usage is None:
        return None
    usage = _object(usage, "usage")
    num_prompt = _count(usage, "prompt_tokens")
    _count(usage, "completion_tokens")
    num_cached = _count(_object(usage.get("prompt_tokens_details") or {}, "prompt_tokens_details"), "cached_tokens")
    if num_cached > num_prompt:
        raise ValueError(f"{num_cached} cached_tokens of {num_prompt} prompt_tokens")
    by_source = _object(usage.get("tieredkv") or {}, "usage.tieredkv")
    for source in SOURCES:
        _count(by_source, f"{source}_tokens")
    return usage


def _count(counts: dict[str, Any], name: str) -> int:
    value = counts.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} must be a number of tokens")
    return value


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text")
    return value
