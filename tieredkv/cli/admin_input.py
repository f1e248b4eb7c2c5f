"""What a person gives to `tieredkv admin`, as flags and files, in the form that the admin API takes.

Knows the API's field names and how files are read; no server, no table. Raises `AdminError` for what cannot be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tieredkv.errors import AdminError

Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt as text.")]
PromptText = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", allow_dash=True, help="File with the prompt as text; - reads it here."),
]
MessagesFile = Annotated[
    Path | None,
    typer.Option("--messages", metavar="FILE", allow_dash=True, help="JSON file with a list of chat messages."),
]
Tokens = Annotated[str | None, typer.Option("--tokens", metavar="IDS", help="Token ids, separated by commas.")]
Salt = Annotated[str | None, typer.Option("--cache-salt", metavar="TEXT", help="The cache_salt of the requests meant.")]
Ttl = Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Seconds, or 5m, 1h, 7d.")]


def prompt_field(
    prompt: str | None, file: Path | None, messages: Path | None, tokens: str | None, *, needed: bool = True
) -> dict[str, Any]:
    """The field of a body that says which prompt is meant."""
    num_given = sum(value is not None for value in (prompt, file, messages, tokens))
    if num_given != int(needed):
        ways = "exactly one of --prompt, --file, --messages and --tokens is needed"
        raise AdminError(ways if needed else "--prefix stands in place of a prompt")
    if prompt is not None:
        return {"prompt": prompt}
    if file is not None:
        return {"prompt": _read(file)}
    if messages is not None:
        try:
            return {"messages": json.loads(_read(messages))}
        except ValueError as error:
            raise AdminError(f"{messages} is not valid JSON: {error}") from None
    if tokens is not None:
        try:
            return {"tokens": [int(part) for part in tokens.split(",")]}
        except ValueError:
            raise AdminError(f"--tokens must be whole numbers separated by commas, got {tokens[:60]!r}") from None
    return {}


def ttl_value(text: str | None) -> str | float | None:
    """Plain numbers are seconds; the server knows the other forms."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _read(path: Path) -> str:
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise AdminError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise AdminError(f"{path} is not text in UTF-8") from None


def prompts_of(path: Path, tenant: str | None) -> list[dict[str, Any]]:
    """The lines of a prompt file as the API takes them."""
    from tieredkv.prompt_file import PromptFile

    entries = []
    for line in PromptFile(path):
        entry = {
            "prompt": line.prompt,
            "messages": line.messages,
            "tokens": line.tokens,
            "name": line.name,
            "pin": line.pin,
            "ttl": line.ttl_s,
            "cache_salt": line.cache_salt,
            "tier": line.tier,
            "tenant": tenant,
        }
        entries.append({name: value for name, value in entry.items() if value is not None})
    if not entries:
        raise AdminError(f"{path} holds no prompts")
    return entries
