"""Workloads to replay: which prefix blocks each request of a log asks for, in order.

Two kinds of files, both JSON lines:

    timed trace    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}; an id names a prefix up
                   to and including a block of `block_size` tokens, the last one perhaps partial
    request log    bodies of OpenAI-style requests, as `request_log` reads them, in the order of their timestamps

The first line tells which it is. Knows no cache, and no model: `encode` turns a logged body into token ids. Invariant: two
requests share a block's name exactly if all their tokens up to its end are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.hashing import HASH_NBYTES, full_block_hashes, root_hash, tenant_salt
from tieredkv.prompt_file import json_objects, raw_lines
from tieredkv.request_log import Encode, read_log


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: the names of its prompt's blocks (32 bytes each), and the number of its prompt's tokens."""

    blocks: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a file, in order. A block holds `block_size` tokens. Of lines without a prompt in a log, which are passed
    over, `problems` tells what is wrong with each.
    """

    source: str
    block_size: int
    requests: tuple[TracedRequest, ...]
    problems: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(len(request.blocks) for request in self.requests)

    @property
    def num_unique(self) -> int:
        return len({block for request in self.requests for block in request.blocks})

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


def is_timed_trace(path: Path) -> bool:
    """Whether the file is a timed trace, going by its first line; else it is a request log. Raises `ConfigError`."""
    first = next(raw_lines(path), None)
    return first is None or b'"hash_ids"' in first.data


def read_workload(path: Path, block_size: int, encode: Encode | None = None) -> Workload:
    """Read a timed trace, whose blocks hold `block_size` tokens, or a request log, for which `encode` is needed.

    Raises `ConfigError` naming the file and, where it is one, the line.
    """
    problems: list[str] = []
    if is_timed_trace(path):
        requests = [_traced(line, f"{path}:{number}", block_size) for number, line in json_objects(path)]
    elif encode is None:
        raise ConfigError("is a request log: name the --model whose tokenizer counts its tokens", source=str(path))
    else:
        requests = _logged(path, block_size, encode, problems)
    if not requests:
        raise ConfigError("holds no requests" + "".join(f" ({problem})" for problem in problems[:1]), source=str(path))
    return Workload(path.name, block_size, tuple(requests), tuple(problems))


def _traced(line: Mapping[str, Any], where: str, block_size: int) -> TracedRequest:
    ids, num_tokens = line.get("hash_ids"), line.get("input_length", 0)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise ConfigError("hash_ids must be a list of whole numbers", source=where)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | float) or not 0 <= num_tokens < 1e18:
        raise ConfigError(f"input_length must be a number that is not negative, got {num_tokens!r}", source=where)
    num_tokens = int(num_tokens) or len(ids) * block_size
    if not (len(ids) - 1) * block_size < max(num_tokens, 1) <= max(len(ids), 1) * block_size:
        raise ConfigError(
            f"input_length {num_tokens} does not fit {len(ids)} blocks of {block_size} tokens; "
            "is --block-tokens that of the trace?",
            source=where,
        )
    return TracedRequest(tuple(i.to_bytes(HASH_NBYTES, "little") for i in ids), num_tokens)


def _logged(path: Path, block_size: int, encode: Encode, problems: list[str]) -> list[TracedRequest]:
    timed: list[tuple[float, TracedRequest]] = []
    for prompt in read_log(path, encode, problems.append):
        root = root_hash(b"", tenant_salt(cache_salt=prompt.cache_salt))
        chain = full_block_hashes(root, prompt.token_ids, block_size)
        timed.append((prompt.time_s, TracedRequest(tuple(chain), len(prompt.token_ids))))
    # Stable: without timestamps the order is that of the file.
    timed.sort(key=lambda each: each[0])
    return [request for _, request in timed]
