"""Request logs: their prompts, which prefixes are worth keeping under a budget, and what keeping them would save.

A log holds bodies of OpenAI-style requests, one JSON object a line, also under `body` or `request`, with a `timestamp` where
there is one (a number, any origin). Lines that hold no prompt are told and passed over.

All blocks cost the same and each saves its tokens once per request that begins with it, so the best choice of a given size
are the blocks with the highest counts. It is closed under parents, because no block is asked for more often than the one
before it; among equals, the blocks of one prefix come before those of the next.

Knows no model and no store: `encode` turns a body into token ids, which wait in a temporary file for the second look.
Invariants: what is chosen never exceeds the budget; of each chosen block all before it are chosen.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from tieredkv import hashing
from tieredkv.errors import ConfigError, RequestError
from tieredkv.prompt_file import parse_object, raw_lines

Encode = Callable[[Mapping[str, Any]], Sequence[Sequence[int]]]
"""From a request's body to the token ids of its prompts. Raises `RequestError`."""
Skipped = Callable[[str], None]
"""Told of each line that is passed over: where it is, and what is wrong with it."""
MIN_HITS = 2
LEAST_HELD_OUT = 10
"""Requests in a log below which its halves say nothing about each other."""


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """A prompt of the log: its line, its time (0 where there is none), and what its hashes are made of."""

    number: int
    time_s: float
    cache_salt: str | None
    token_ids: Sequence[int]


def read_log(log: Path, encode: Encode, skipped: Skipped) -> Iterator[LoggedPrompt]:
    """The prompts of a log, line by line. Raises `ConfigError` if the file cannot be read."""
    for line in raw_lines(log):
        try:
            entry = parse_object(log, line)
            body = next((entry[key] for key in ("body", "request") if isinstance(entry.get(key), dict)), entry)
            prompts = encode(body)
        except ConfigError as error:
            skipped(str(error))
            continue
        except RequestError as error:
            skipped(f"{log}:{line.number}: {error}")
            continue
        stamp = entry.get("timestamp")
        time_s = float(stamp) if isinstance(stamp, int | float) and not isinstance(stamp, bool) else 0.0
        salt = body.get("cache_salt")
        for token_ids in prompts:
            yield LoggedPrompt(line.number, time_s, salt if isinstance(salt, str) and salt else None, token_ids)


@dataclass(slots=True)
class LogReport:
    """What a log holds and what the choice brings. Rates are shares of prompt tokens.

    `hit_rate` is that of the whole log with all chosen blocks there from the start. `held_out_hit_rate` is that of its later
    half with a choice made from its earlier one, which tells better what to expect of requests to come.
    """

    num_requests: int = 0
    num_skipped: int = 0
    first_problem: str | None = None
    num_tokens: int = 0
    num_unique_blocks: int = 0
    num_chosen_blocks: int = 0
    nbytes: int = 0
    num_prefixes: int = 0
    hit_rate: float = 0.0
    held_out_hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """One logged prompt; its tokens lie at `offset` of the temporary file."""

    number: int
    time_s: float
    cache_salt: str | None
    offset: int
    num_tokens: int


def choose_prefixes(
    log: Path,
    output: Path,
    encode: Encode,
    *,
    block_size: int,
    block_nbytes: int,
    budget_nbytes: int,
    min_hits: int = MIN_HITS,
) -> LogReport:
    """Write the prefixes worth keeping to `output` as a prompt file, the most wanted first.

    `block_nbytes` is what one block costs; a block that fewer than `min_hits` requests ask for is not worth it. Lines
    without a prompt are skipped and counted. Raises `ConfigError` if a file cannot be used or holds no request.
    """
    report = LogReport()
    with tempfile.TemporaryFile() as tokens:
        requests = _read(log, encode, tokens, report)
        if not requests:
            problem = f" ({report.first_problem})" if report.first_problem else ""
            raise ConfigError(f"holds no request with a prompt{problem}", source=str(log))
        trie = _Trie(tokens, block_size)
        num_wanted = budget_nbytes // block_nbytes
        counts = trie.count(requests)
        chosen = _most_wanted(counts, num_wanted, min_hits)
        report.num_requests = len(requests)
        report.num_tokens = sum(request.num_tokens for request in requests)
        report.num_unique_blocks = len(counts)
        report.num_chosen_blocks = len(chosen)
        report.nbytes = len(chosen) * block_nbytes
        report.hit_rate = trie.hit_rate(requests, chosen)
        if len(requests) >= LEAST_HELD_OUT:
            earlier, later = requests[: len(requests) // 2], requests[len(requests) // 2 :]
            known = _most_wanted(trie.count(earlier), num_wanted, min_hits)
            report.held_out_hit_rate = trie.hit_rate(later, known)
        prefixes = trie.prefixes(requests, chosen)
        prefixes.sort(key=lambda prefix: -counts[prefix[0]])
        report.num_prefixes = len(prefixes)
        _write(output, ((request, trie.tokens_of(request)[:length]) for _, request, length in prefixes))
    return report


def _read(log: Path, encode: Encode, tokens: IO[bytes], report: LogReport) -> list[_Request]:
    """The log's prompts in order of time, their token ids in `tokens`."""

    def skipped(problem: str) -> None:
        report.num_skipped += 1
        report.first_problem = report.first_problem or problem

    requests: list[_Request] = []
    for prompt in read_log(log, encode, skipped):
        offset = tokens.tell()
        tokens.write(array("I", prompt.token_ids).tobytes())
        requests.append(_Request(prompt.number, prompt.time_s, prompt.cache_salt, offset, len(prompt.token_ids)))
    # Stable: without timestamps the order is that of the file.
    requests.sort(key=lambda request: request.time_s)
    return requests


class _Trie:
    """The tree of all blocks that the logged prompts ask for; a block's hash names the path to it."""

    def __init__(self, tokens: IO[bytes], block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size

    def tokens_of(self, request: _Request) -> list[int]:
        found: array[int] = array("I")
        self._tokens.seek(request.offset)
        found.frombytes(self._tokens.read(found.itemsize * request.num_tokens))
        return found.tolist()

    def chain(self, request: _Request) -> list[bytes]:
        """The blocks that a hit can cover."""
        root = hashing.root_hash(b"", hashing.tenant_salt(cache_salt=request.cache_salt))
        return hashing.full_block_hashes(root, self.tokens_of(request), self._block_size)

    def count(self, requests: Iterable[_Request]) -> dict[bytes, int]:
        """How many requests ask for each block. A block comes behind the one before it."""
        counts: dict[bytes, int] = {}
        for request in requests:
            for block_hash in self.chain(request):
                counts[block_hash] = counts.get(block_hash, 0) + 1
        return counts

    def hit_rate(self, requests: Sequence[_Request], kept: Collection[bytes]) -> float:
        """The share of the requests' tokens that `kept` blocks save; the last token of each is computed in any case."""
        num_hit = sum(
            min(_depth(self.chain(request), kept) * self._block_size, max(request.num_tokens - 1, 0))
            for request in requests
        )
        return num_hit / max(sum(request.num_tokens for request in requests), 1)

    def prefixes(self, requests: Iterable[_Request], chosen: Collection[bytes]) -> list[tuple[bytes, _Request, int]]:
        """The longest chosen prefixes, which together hold all chosen blocks: last block, a request, number of tokens."""
        ends: dict[bytes, tuple[_Request, int]] = {}
        inner: set[bytes] = set()
        for request in requests:
            chain = self.chain(request)
            depth = _depth(chain, chosen)
            if depth:
                inner.update(chain[: depth - 1])
                ends.setdefault(chain[depth - 1], (request, depth * self._block_size))
        return [(end, *prefix) for end, prefix in ends.items() if end not in inner]


def _most_wanted(counts: Mapping[bytes, int], num_wanted: int, min_hits: int) -> set[bytes]:
    wanted = sorted((block for block, count in counts.items() if count >= min_hits), key=lambda block: -counts[block])
    return set(wanted[:num_wanted])


def _depth(chain: Sequence[bytes], kept: Collection[bytes]) -> int:
    return next((i for i, block_hash in enumerate(chain) if block_hash not in kept), len(chain))


def _write(output: Path, prefixes: Iterator[tuple[_Request, list[int]]]) -> None:
    """Prompts are private, so the file is, too."""
    try:
        with open(output, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            for request, token_ids in prefixes:
                line: dict[str, Any] = {"name": f"log-{request.number}", "tokens": token_ids}
                if request.cache_salt is not None:
                    line["cache_salt"] = request.cache_salt
                file.write(orjson.dumps(line) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", source=str(output)) from error
