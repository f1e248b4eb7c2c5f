"""The plan of a preload: which prompts there are, what of them is stored and shared, what fits, and in which order.

The order is that of a walk through the tree of all prompts, so a shared prefix is computed once and is the last thing used
while its branches are computed. Knows hashes and what a block costs; no core, no text, no terminal. A plan keeps 8 bytes per
block and no tokens: each prompt is made again when it is computed.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tieredkv import hashing
from tieredkv.prompt_file import complain
from tieredkv.storage.record import HEADER_NBYTES
from tieredkv.storage.rows import record_cost
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.types import Tier
from tieredkv.warm_job import DeferredPrompt, WarmPrompt

_KEY_NBYTES = 8

LookUp = Callable[[Sequence[bytes]], int]
"""How many of a chain's hashes, from the first on, are stored."""


@dataclass(slots=True, eq=False)
class Entry:
    """One prompt of a plan. Counts are of full blocks: in all, stored before, shared with the entry before it.

    `key` holds the first 8 bytes of each block's hash, `last_hash` the last one's; both empty for a prompt below a block.
    """

    source: DeferredPrompt
    name: str | None
    pin: bool
    ttl_s: float | None
    tier: Tier | None
    num_tokens: int
    num_blocks: int
    key: bytes
    last_hash: bytes
    num_stored: int
    num_shared: int = 0
    fits: bool = True
    error: str | None = None

    @property
    def num_new(self) -> int:
        """Blocks that computing this entry adds, those before it being done."""
        return self.num_blocks - max(self.num_stored, self.num_shared)


@dataclass(slots=True)
class Plan:
    """What there is to do, in order."""

    block_size: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def num_unique_blocks(self) -> int:
        return sum(entry.num_blocks - entry.num_shared for entry in self.entries)

    @property
    def num_stored_blocks(self) -> int:
        return sum(max(entry.num_stored - entry.num_shared, 0) for entry in self.entries)

    @property
    def num_new_blocks(self) -> int:
        return sum(entry.num_new for entry in self.entries)

    def admit(self, num_blocks: int) -> None:
        """Mark what fits a store with room for `num_blocks` in all: pinned prompts first, then in the order of the file. A
        prompt that does not fit is left out as a whole; a later, shorter one may still fit. With more room than before, what
        fitted before still does.
        """
        if self.num_unique_blocks <= num_blocks:
            for entry in self.entries:
                entry.fits = True
            return
        kept: set[bytes] = set()
        for entry in sorted(self.entries, key=lambda e: (not e.fits, not e.pin, e.source.number)):
            keys = [entry.key[i : i + _KEY_NBYTES] for i in range(0, len(entry.key), _KEY_NBYTES)]
            # Equal keys at another place of another chain are as good as impossible, and would cost a block's room.
            missing = [key for key in keys if key not in kept]
            entry.fits = len(kept) + len(missing) <= num_blocks
            if entry.fits:
                kept.update(missing)


def make_plan(
    path: Path,
    prompts: Iterable[DeferredPrompt],
    *,
    namespace: bytes,
    block_size: int,
    max_model_len: int,
    vocab_size: int,
    look_up: LookUp,
    progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Read all prompts once, which come from the file `path`. Raises `ConfigError`, naming file and line, for one that cannot
    be read or could never be served.
    """
    plan = Plan(block_size)
    for number, source in enumerate(prompts, 1):
        prompt = source.load()
        num_tokens = len(prompt.token_ids)
        if max(prompt.token_ids) >= vocab_size:
            complain(path, source.number, f"holds a token id that is not below {vocab_size}")
        if num_tokens >= max_model_len:
            complain(
                path,
                source.number,
                f"the prompt has {num_tokens} tokens; the context has {max_model_len}, one of them for the answer",
            )
        chain = _chain(prompt, namespace, block_size)
        plan.entries.append(
            Entry(
                source,
                prompt.name,
                prompt.pin,
                prompt.ttl_s,
                prompt.tier,
                num_tokens,
                len(chain),
                b"".join(block_hash[:_KEY_NBYTES] for block_hash in chain),
                chain[-1] if chain else b"",
                look_up(chain) if chain else 0,
            )
        )
        progress(number)
    plan.entries.sort(key=lambda entry: entry.key)
    for before, entry in itertools.pairwise(plan.entries):
        entry.num_shared = _num_common(before.key, entry.key)
    return plan


def _chain(prompt: WarmPrompt, namespace: bytes, block_size: int) -> list[bytes]:
    return hashing.full_block_hashes(hashing.root_hash(namespace, prompt.tenant), prompt.token_ids, block_size)


def _num_common(a: bytes, b: bytes) -> int:
    most = min(len(a), len(b)) // _KEY_NBYTES
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: middle * _KEY_NBYTES] == b[: middle * _KEY_NBYTES] else (low, middle - 1)
    return low


def block_cost(block_nbytes: int, block_size: int) -> int:
    """Most bytes that one block takes in a store."""
    return record_cost(HEADER_NBYTES + block_nbytes, 4 * block_size, mmap.PAGESIZE)


def room_blocks(capacity_nbytes: int, block_nbytes: int, block_size: int) -> int:
    """How many blocks a store of this capacity holds for certain."""
    return max(budget_nbytes_for(capacity_nbytes), 0) // block_cost(block_nbytes, block_size)


def num_stored_blocks(entry: Entry, namespace: bytes, block_size: int, look_up: LookUp) -> int:
    """How many of an entry's blocks a store holds now."""
    if not entry.last_hash or look_up([entry.last_hash]):
        # Residency is closed under parents.
        return entry.num_blocks
    return look_up(_chain(entry.source.load(), namespace, block_size))
