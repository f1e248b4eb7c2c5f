"""One request's tokens and the blocks that hold their keys and values.

Knows no pool, no cache, no model. The token ranges of a sequence, in tokens:

    0            num_computed          num_tokens
    |-- KV in the pool --|-- still to compute --|
    |-------- prompt --------|--- generated ----|
                        num_prompt_tokens

Invariants: `num_computed <= num_tokens`; while RUNNING, `block_ids` covers at least `num_computed` tokens; the first
`num_committed_blocks` blocks are findable under `block_hashes`.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from typing import Any

from tieredkv import hashing
from tieredkv.types import EngineRequest, FinishReason, SamplingParams, TokenSources


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class Sequence:
    """The mutable state of one request inside the engine. `block_ids` is an int32 array, block 0 never appears in it."""

    __slots__ = (
        "block_hashes",
        "block_ids",
        "finish_reason",
        "first_scheduled_s",
        "first_token_s",
        "last_token_s",
        "lookup",
        "num_committed_blocks",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "reported_admissions",
        "request",
        "restore",
        "root_hash",
        "sources",
        "status",
        "stop_reason",
        "token_ids",
        "waiting_for",
        "waiting_since_s",
    )

    def __init__(self, request: EngineRequest, root_hash: bytes) -> None:
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.block_ids: array[int] = array("i")
        self.root_hash = root_hash
        self.block_hashes: list[bytes] = []
        self.num_committed_blocks = 0
        self.status = SequenceStatus.WAITING
        self.sources: TokenSources | None = None
        self.num_preemptions = 0
        # How many of its admissions (one more than preemptions) the metrics have been told about.
        self.reported_admissions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        # The question to the disk how much of this sequence it holds, and the restore that brings blocks up (row 4 objects).
        self.lookup: Any = None
        self.restore: Any = None
        # Single flight: the block that another sequence computes and this one wants to adopt, and since when.
        self.waiting_for: bytes | None = None
        self.waiting_since_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status in (SequenceStatus.FINISHED, SequenceStatus.ABORTED)

    def full_block_hashes(self, block_size: int) -> list[bytes]:
        """The hash chain of all full blocks of `token_ids`; extended in place as tokens arrive. 32 bytes each."""
        num_full = len(self.token_ids) // block_size
        chain = self.block_hashes
        if len(chain) < num_full:
            parent = chain[-1] if chain else self.root_hash
            hashing.extend_chain(chain, parent, self.token_ids, block_size, num_full)
        return chain

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, tokens={self.num_tokens}, "
            f"computed={self.num_computed}, blocks={len(self.block_ids)})"
        )


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part of one step: compute the tokens `[start, start + num_new)`, then sample if that reaches the end."""

    sequence: Sequence
    start: int
    num_new: int

    @property
    def end(self) -> int:
        return self.start + self.num_new

    @property
    def samples(self) -> bool:
        return self.end == self.sequence.num_tokens
