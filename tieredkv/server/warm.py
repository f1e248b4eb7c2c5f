"""Prompts from files as token ids: what `serve --warm` and `tieredkv preload` share with the endpoints.

Knows the tokenizer and the prompt file; no engine. A line is encoded exactly as a request with the same text would be;
messages as the beginning that all chats share that start with them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import owner_label, tenant_salt
from tieredkv.prompt_file import PromptFile, PromptLine, complain, is_token_list
from tieredkv.server.prompts import encode_beginning, parse_messages, parse_prompts
from tieredkv.tokenizer import Tokenizer
from tieredkv.warm_job import DeferredPrompt, WarmPrompt


def check_prompt_file(path: Path) -> list[PromptLine]:
    """Check all that can be checked without a tokenizer; returns the lines without their content.

    Raises `ConfigError` that names file and line, also for a file without prompts.
    """
    lines = []
    for line in PromptFile(path):
        if line.messages is not None:
            try:
                parse_messages(line.messages)
            except RequestError as error:
                complain(path, line.number, str(error), "messages")
        lines.append(PromptLine(line.number, line.offset, pin=line.pin))
    if not lines:
        raise ConfigError("holds no prompts", source=str(path))
    return lines


def encode_line(tokenizer: Tokenizer, path: Path, line: PromptLine) -> list[int]:
    """The token ids of a line. Raises `ConfigError` that names file and line."""
    key = "prompt" if line.prompt is not None else "messages" if line.messages is not None else "tokens"
    try:
        if line.prompt is not None:
            token_ids = tokenizer.encode(line.prompt)
        elif line.messages is not None:
            token_ids = encode_beginning(tokenizer, parse_messages(line.messages))
        else:
            token_ids = line.tokens or []
    except RequestError as error:
        complain(path, line.number, str(error), key)
    if not token_ids:
        complain(path, line.number, "has no token", key)
    return token_ids


def deferred_prompts(
    path: Path, lines: Sequence[PromptLine], tokenizer: Tokenizer, api_keys: Sequence[str]
) -> list[DeferredPrompt]:
    """The lines of a checked file, each read and encoded when its turn comes; once for each API key, whose caches are apart."""
    file = PromptFile(path)

    def load(number: int, offset: int, api_key: str | None) -> WarmPrompt:
        line = file.at(number, offset)
        return WarmPrompt(
            encode_line(tokenizer, path, line),
            name=line.name,
            tenant=tenant_salt(api_key=api_key, cache_salt=line.cache_salt),
            owner=owner_label(api_key),
            pin=line.pin,
            ttl_s=line.ttl_s,
            tier=line.tier,
        )

    keys: Sequence[str | None] = api_keys or (None,)
    return [
        DeferredPrompt(line.pin, functools.partial(load, line.number, line.offset, key), line.number)
        for line in lines
        for key in keys
    ]


def encode_logged(tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of the prompts in a logged request's body, or in a line of a prompt file. Raises `RequestError`."""
    if is_token_list(body.get("tokens")):
        return [body["tokens"]]
    if body.get("messages") is not None:
        return [
            tokenizer.apply_chat_template(
                parse_messages(body["messages"]), add_generation_prompt=body.get("add_generation_prompt") is not False
            )
        ]
    special = body.get("add_special_tokens") is not False
    prompts = parse_prompts(body.get("prompt"))
    return [tokenizer.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
