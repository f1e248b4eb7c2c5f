"""Files of prompts, one JSON object a line, for `tieredkv preload` and `tieredkv serve --warm`.

    {"prompt": "..."}  or  {"messages": [...]}  or  {"tokens": [1, 2, ...]}, and with it, where wanted,
    "name": "...", "pin": true, "ttl": 300 | "5m" | "1h" | "7d", "cache_salt": "...", "tier": "device" | "host" | "disk"

Knows JSON and these keys; no tokenizer, no chat template, no engine. A file is read line by line, and a line can be read
again by where it starts, so its size does not matter. Blank lines are skipped.

Invariant: whatever is wrong with a file is a `ConfigError` that names the file and the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from tieredkv.errors import ConfigError
from tieredkv.types import Tier

MAX_LINE_NBYTES = 64 * 1024**2
MAX_NAME_CHARS = 200
MAX_TTL_S = 10 * 365 * 86400.0
KEYS = ("prompt", "messages", "tokens", "name", "pin", "ttl", "cache_salt", "tier")
_CONTENT = ("prompt", "messages", "tokens")
_TTL = re.compile(r"^(\d{1,9}(?:\.\d{1,9})?)(s|m|h|d)?$")
_UNIT_S = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line. Exactly one of `prompt`, `messages` and `tokens` is set; `offset` is where the line starts, in bytes."""

    number: int
    offset: int
    prompt: str | None = None
    messages: list[Any] | None = None
    tokens: list[int] | None = None
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    cache_salt: str | None = None
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank, as it stands in the file. `number` counts from 1."""

    number: int
    offset: int
    data: bytes


def parse_ttl(value: object) -> float:
    """A time to live in seconds: a positive number, or text such as `90`, `30s`, `5m`, `1h`, `7d`. Raises `ValueError`."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _TTL.match(value.strip())):
        seconds = float(found[1]) * _UNIT_S[found[2]]
    if not 0 < seconds <= MAX_TTL_S:
        raise ValueError("must be a time in seconds, or text such as 5m, 1h or 7d, above 0 and at most ten years")
    return seconds


def raw_lines(path: Path) -> Iterator[RawLine]:
    """The lines of a JSONL file that are not blank. Raises `ConfigError` if it cannot be read or a line is too long."""
    with open_file(path) as file:
        number = 0
        while True:
            offset = file.tell()
            data = _read_line(path, file, number + 1)
            if not data:
                return
            number += 1
            if len(data) > MAX_LINE_NBYTES:
                complain(path, number, f"longer than {MAX_LINE_NBYTES >> 20} MiB")
            if number == 1 and data.startswith(_BOM):
                offset, data = offset + len(_BOM), data[len(_BOM) :]
            if data.strip():
                yield RawLine(number, offset, data)


def _read_line(path: Path, file: BinaryIO, number: int) -> bytes:
    """The next line, or the beginning of one that is too long."""
    try:
        return file.readline(MAX_LINE_NBYTES + 1)
    except OSError as error:
        complain(path, number, f"cannot be read: {error.strerror or error}")


def parse_object(path: Path, line: RawLine) -> dict[str, Any]:
    """A line as a JSON object. Raises `ConfigError`."""
    try:
        line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        complain(path, line.number, f"is not UTF-8 (byte {error.start + 1})")
    try:
        value = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        complain(path, line.number, f"is not JSON: {error}")
    if not isinstance(value, dict):
        complain(path, line.number, "must be a JSON object")
    return value


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a JSONL file that are not blank, each with its number. Raises `ConfigError` that names file and line."""
    for line in raw_lines(path):
        yield line.number, parse_object(path, line)


def complain(path: Path, number: int, message: str, key: str | None = None) -> NoReturn:
    """Raise the `ConfigError` that names file and line."""
    raise ConfigError(message, key=key, source=f"{path}:{number}") from None


def open_file(path: Path) -> BinaryIO:
    """Open for reading. Raises `ConfigError` that names the file."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from error


class PromptFile:
    """A file of prompts. Iterating reads it from the start; `at` reads one line again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[PromptLine]:
        """The lines, checked. Raises `ConfigError` at the first one that is wrong."""
        for line in raw_lines(self.path):
            yield self._parse(line)

    def at(self, number: int, offset: int) -> PromptLine:
        """The line with this number, which starts at `offset`. Raises `ConfigError`, also when the file was changed."""
        with open_file(self.path) as file:
            file.seek(offset)
            data = _read_line(self.path, file, number)
        if not data.strip() or len(data) > MAX_LINE_NBYTES:
            complain(self.path, number, "was changed while it was being used")
        return self._parse(RawLine(number, offset, data))

    def _parse(self, line: RawLine) -> PromptLine:
        value = {key: item for key, item in parse_object(self.path, line).items() if item is not None}

        def require(ok: bool, key: str, rule: str) -> None:
            if not ok:
                shown = repr(value[key])
                shown = shown if len(shown) <= 60 else shown[:60] + "..."
                complain(self.path, line.number, f"{rule}, got {shown}", key)

        if unknown := sorted(value.keys() - set(KEYS)):
            complain(self.path, line.number, f"unknown key; known are {', '.join(KEYS)}", unknown[0][:60])
        given = [key for key in _CONTENT if key in value]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            complain(self.path, line.number, f"needs exactly one of prompt, messages and tokens, found {found}")
        if "prompt" in value:
            require(isinstance(value["prompt"], str) and bool(value["prompt"]), "prompt", "must be text and not empty")
        if "messages" in value:
            messages = value["messages"]
            require(
                isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) for m in messages),
                "messages",
                "must be a list of messages and not empty",
            )
        if "tokens" in value:
            require(is_token_list(value["tokens"]), "tokens", "must be a list of token ids and not empty")
        if "name" in value:
            name = value["name"]
            rule = f"must be text of 1 to {MAX_NAME_CHARS} characters"
            require(isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS, "name", rule)
        if "pin" in value:
            require(isinstance(value["pin"], bool), "pin", "must be true or false")
        if "cache_salt" in value:
            salt = value["cache_salt"]
            require(isinstance(salt, str) and bool(salt), "cache_salt", "must be text and not empty")
        if "tier" in value:
            require(value["tier"] in list(Tier), "tier", f"must be one of {', '.join(Tier)}")
        ttl_s = None
        if "ttl" in value:
            try:
                ttl_s = parse_ttl(value["ttl"])
            except ValueError as error:
                require(False, "ttl", str(error))
        return PromptLine(
            number=line.number,
            offset=line.offset,
            prompt=value.get("prompt"),
            messages=value.get("messages"),
            tokens=value.get("tokens"),
            name=value.get("name"),
            pin=value.get("pin", False),
            ttl_s=ttl_s,
            cache_salt=value.get("cache_salt"),
            tier=Tier(value["tier"]) if "tier" in value else None,
        )


def is_token_list(value: object) -> bool:
    """Whether `value` is a list of whole numbers that fit in 32 bits, not empty."""
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return False
    return bool(min(value) >= 0 and max(value) < 2**32)
