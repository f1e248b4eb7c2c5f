"""What a request wants kept: `cache_control` on messages and their parts, `cache_control` and `prompt_cache_retention` of a
whole request.

    messages ... [part, part {cache_control}] ...   ->  Breakpoint  --chat template-->  Retention(tokens up to there)

The vocabulary is that of others: `{"type": "ephemeral", "ttl": "5m" | "1h"}`, at most four in a request, and "24h" for the
whole prompt; `priority` (0 to 100, 35 is ordinary) is an addition. Knows the tokenizer's face, no engine. Raises
`RequestError` that names the field. Invariant: the tokens of a breakpoint are a prefix of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tieredkv.errors import RequestError
from tieredkv.types import MAX_PRIORITY, RETAINED_PRIORITY, Retention

MAX_BREAKPOINTS = 4
TTL_S = {"5m": 300.0, "1h": 3600.0}
_RETENTION_S = {"in_memory": None, "in-memory": None, "24h": 86400.0}
# Two ends that begin differently: what both leave alone of a prompt does not depend on how it goes on.
_PROBES = ("Why?", "7 + 5")

Render = Callable[[list[dict[str, Any]]], list[int]]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Everything up to `text` of message `message`, which ends there, is to be kept."""

    message: int
    text: str
    priority: int
    ttl_s: float


def parse_breakpoints(messages: Any) -> list[Breakpoint]:
    """The breakpoints of `messages` that `prompts.parse_messages` has accepted, in order."""
    found = []
    for index, message in enumerate(messages):
        content, where = message.get("content"), f"messages.{index}"
        parts = content if isinstance(content, list) else []
        for number, part in enumerate(parts):
            if part.get("cache_control") is not None:
                text = "\n".join(each["text"] for each in parts[: number + 1])
                wish = _parse(part["cache_control"], f"{where}.content.{number}.cache_control")
                found.append(Breakpoint(index, text, *wish))
        if message.get("cache_control") is not None:
            text = "\n".join(part["text"] for part in parts) if parts else content
            found.append(Breakpoint(index, text, *_parse(message["cache_control"], f"{where}.cache_control")))
    if len(found) > MAX_BREAKPOINTS:
        raise RequestError(f"At most {MAX_BREAKPOINTS} 'cache_control' marks are accepted.", param="messages")
    return found


def parse_wishes(cache_control: Any, retention: str | None) -> list[tuple[int, float]]:
    """(priority, seconds) that a request asks for its whole prompt."""
    wishes = []
    if cache_control is not None:
        wishes.append(_parse(cache_control, "cache_control"))
    if retention is not None:
        if retention not in _RETENTION_S:
            raise RequestError("'prompt_cache_retention' must be 'in_memory' or '24h'.", param="prompt_cache_retention")
        ttl_s = _RETENTION_S[retention]
        if ttl_s is not None:
            wishes.append((RETAINED_PRIORITY, ttl_s))
    return wishes


def _parse(value: Any, where: str) -> tuple[int, float]:
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise RequestError(f"'{where}' must be an object with 'type': 'ephemeral'.", param=where)
    ttl, priority = value.get("ttl"), value.get("priority")
    if ttl is not None and (not isinstance(ttl, str) or ttl not in TTL_S):
        raise RequestError(f"'{where}.ttl' must be one of {', '.join(TTL_S)}.", param=f"{where}.ttl")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= MAX_PRIORITY):
        raise RequestError(f"'{where}.priority' must be between 0 and {MAX_PRIORITY}.", param=f"{where}.priority")
    return (RETAINED_PRIORITY if priority is None else priority), TTL_S[ttl or "5m"]


def locate(
    breakpoints: Sequence[Breakpoint], messages: list[dict[str, Any]], prompt: Sequence[int], render: Render
) -> tuple[Retention, ...]:
    """Where the breakpoints lie in `prompt`, which `render` makes of all messages: the longest beginning that it shares with
    the messages rendered up to there. A template that does not take a part of a conversation gets the whole one with other
    words behind the breakpoint. What shares nothing, or cannot be rendered at all, is left out.
    """
    found = []
    for point in breakpoints:
        num_tokens = _shared(prompt, render, _cut(messages, point)) or _shared(
            prompt, render, *(_changed(messages, point, probe) for probe in _PROBES)
        )
        if num_tokens:
            found.append(Retention(num_tokens, point.priority, point.ttl_s))
    return tuple(found)


def _cut(messages: list[dict[str, Any]], point: Breakpoint) -> list[dict[str, Any]]:
    return [*messages[: point.message], {**messages[point.message], "content": point.text}]


def _changed(messages: list[dict[str, Any]], point: Breakpoint, probe: str) -> list[dict[str, Any]]:
    behind = [{**message, "content": probe} for message in messages[point.message + 1 :]]
    return [*_cut(messages, Breakpoint(point.message, f"{point.text}\n{probe}", 0, 0.0)), *behind]


def _shared(prompt: Sequence[int], render: Render, *variants: list[dict[str, Any]]) -> int:
    """How many leading tokens of `prompt` all variants have as well; 0 if one cannot be rendered."""
    for variant in variants:
        try:
            ids = render(variant)
        except RequestError:
            return 0
        prompt = prompt[: next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(ids))]
    return len(prompt)
