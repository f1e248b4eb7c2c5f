"""Workloads to replay: which prefix blocks each request of a log asks for, in order.

Two kinds of files, both JSON lines:

    timed trace    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}; an id names a prefix up
                   to and including a block of `block_size` tokens, the last one perhaps partial
    request log    bodies of OpenAI-style requests (`prompt` or `messages`), one a line, perhaps with a `timestamp` in
                   seconds; also lines that hold the body under `body` or `request`

Knows no cache. Invariant: two requests share a block's name exactly if all their tokens up to its end are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.hashing import HASH_NBYTES, full_block_hashes, root_hash, tenant_salt
from tieredkv.prompt_file import json_objects

TokenCounter = Callable[[Mapping[str, Any]], Sequence[int]]
"""From the body of a request to the token ids of its prompt."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: seconds since the first one, the names of its prompt's blocks (32 bytes each), its prompt's tokens."""

    time_s: float
    blocks: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a file. A block holds `block_size` tokens."""

    source: str
    block_size: int
    requests: list[TracedRequest] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return sum(len(request.blocks) for request in self.requests)

    @property
    def num_unique(self) -> int:
        return len({block for request in self.requests for block in request.blocks})

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


def read_workload(path: Path, block_size: int, tokenize: TokenCounter | None = None) -> Workload:
    """Read a trace or a request log, told apart by its first line. `tokenize` is needed for the latter.

    Raises `ConfigError` naming the file and the line.
    """
    requests: list[TracedRequest] = []
    start_s: float | None = None
    for number, line in json_objects(path):
        where = f"{path}:{number}"
        if "hash_ids" in line:
            time_s, blocks, num_tokens = _traced(line, where, block_size)
        else:
            time_s, blocks, num_tokens = _logged(line, where, block_size, tokenize)
        start_s = time_s if start_s is None else start_s
        requests.append(TracedRequest(max(time_s - start_s, 0.0), blocks, num_tokens))
    if not requests:
        raise ConfigError("holds no requests", source=str(path))
    return Workload(path.name, block_size, requests)


def _number(line: Mapping[str, Any], key: str, where: str) -> float:
    value = line.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ConfigError(f"{key} must be a number that is not negative, got {value!r}", source=where)
    return float(value)


def _traced(line: Mapping[str, Any], where: str, block_size: int) -> tuple[float, tuple[bytes, ...], int]:
    ids = line["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise ConfigError("hash_ids must be a list of whole numbers", source=where)
    num_tokens = int(_number(line, "input_length", where)) or len(ids) * block_size
    if not (len(ids) - 1) * block_size < max(num_tokens, 1) <= max(len(ids), 1) * block_size:
        raise ConfigError(
            f"input_length {num_tokens} does not fit {len(ids)} blocks of {block_size} tokens; "
            "is --block-tokens that of the trace?",
            source=where,
        )
    return _number(line, "timestamp", where) / 1000, tuple(i.to_bytes(HASH_NBYTES, "little") for i in ids), num_tokens


def _logged(
    line: Mapping[str, Any], where: str, block_size: int, tokenize: TokenCounter | None
) -> tuple[float, tuple[bytes, ...], int]:
    body = next((line[key] for key in ("body", "request") if isinstance(line.get(key), dict)), line)
    if tokenize is None:
        raise ConfigError("is a request log: name the --model whose tokenizer counts its tokens", source=where)
    try:
        tokens = tokenize(body)
    except ValueError as error:
        raise ConfigError(str(error), source=where) from None
    salt = body.get("cache_salt")
    root = root_hash(b"", tenant_salt(cache_salt=salt if isinstance(salt, str) else None))
    chain = full_block_hashes(root, list(tokens), block_size)
    return _number(line, "timestamp", where), tuple(chain), len(tokens)
