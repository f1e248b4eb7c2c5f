"""What the admin API says: plain records, the same for HTTP, the command line and the page.

Each record becomes a JSON object with the same field names; hashes and ids are lower-case hex, times are seconds since
the epoch, sizes are bytes, counts are blocks unless the name says tokens. `None` means unknown or does not apply.
Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tieredkv.types import Tier


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier now. Counters run since the start of the process; bandwidths are moving averages in bytes per second."""

    tier: Tier
    enabled: bool
    capacity_nbytes: int = 0
    used_nbytes: int = 0
    capacity_blocks: int = 0
    num_blocks: int = 0
    num_pinned_blocks: int = 0
    pin_budget_blocks: int = 0
    num_retained_blocks: int = 0
    hit_tokens: int = 0
    num_evictions: int = 0
    num_spilled_blocks: int = 0
    """Blocks that came down into this tier."""
    num_restored_blocks: int = 0
    """Blocks that went up from this tier."""
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    queued_read_nbytes: int = 0
    queued_write_nbytes: int = 0
    read_nbytes_per_s: float | None = None
    write_nbytes_per_s: float | None = None
    fault: str | None = None
    refusal: str | None = None
    """Why the tier did not take the last blocks that it was given; None once it has taken some again."""
    refusing_since_s: float | None = None
    num_refused_blocks: int = 0
    """Since then."""


@dataclass(frozen=True, slots=True)
class GateReport:
    """What the cost gate knows. `pays_from_tokens`: the shortest prefix in tokens that is worth bringing up from a tier, None
    if none is or nothing has been measured.
    """

    policy: str
    prefill_tokens_per_s: float | None
    pays_from_tokens: Mapping[Tier, int | None]
    verdict: str


@dataclass(frozen=True, slots=True)
class JobReport:
    """A warming job. `state` is one of queued, running, done, cancelled, failed."""

    id: str
    kind: str
    name: str | None
    state: str
    num_prompts: int
    num_prompts_done: int
    num_tokens: int
    num_tokens_done: int
    num_tokens_computed: int
    created_s: float
    finished_s: float | None = None
    error: str | None = None
    num_prompts_failed: int = 0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """`GET /admin/cache`. `min_hit_tokens` is the smallest unit that can hit; `seconds_saved` estimates the prefill that hits
    made unnecessary, `seconds_spent` is what requests waited for restores.
    """

    model: str
    namespace: str
    store_id: str | None
    block_size: int
    block_nbytes: int
    min_hit_tokens: int
    uptime_s: float
    tiers: list[TierReport]
    gate: GateReport
    computed_tokens: int
    seconds_saved: float
    seconds_spent: float
    num_requests_running: int
    num_requests_waiting: int
    num_requests_restoring: int
    num_unsaved_blocks: int
    num_pins: int
    event_epoch: str
    event_sequence: int
    jobs: list[JobReport]


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """A branch of the prefix tree: the blocks from where it forks off (or the root) to a leaf or to the next fork.

    `id` is the hash of its last block; `parent` the id of the branch that it continues. `num_tokens` counts from the root
    to the branch's end, `num_own_tokens` those of its own blocks; `depth` blocks lie before its own ones.
    `blocks_by_tier` counts its own blocks, one that lies in two tiers in both, and `nbytes` what they take there.
    `num_hits` counts requests that found it. `first_words` and `last_words` of the text only where the server was told to
    show text.
    """

    id: str
    parent: str | None
    tenant: str
    name: str | None
    depth: int
    num_tokens: int
    num_own_tokens: int
    num_blocks: int
    num_children: int
    blocks_by_tier: Mapping[Tier, int]
    nbytes: int
    last_use_s: float | None
    num_hits: int
    pins: list[str]
    priority: int | None
    expires_s: float | None
    first_words: str | None = None
    last_words: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixPage:
    """`next_cursor` continues the list; None at its end. A page may be shorter than asked for, even empty, with more to come.
    `num_total` counts all branches that fit the filters, None where counting would mean to read a whole large store.
    """

    prefixes: list[PrefixReport]
    next_cursor: str | None
    num_total: int | None


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block. `state` by tier: ready, or copying/loading/writing while in flight."""

    hash: str
    parent: str
    tenant: str
    depth: int
    num_tokens: int
    tiers: Mapping[Tier, str]
    nbytes: int
    ref_count: int
    num_pins: int
    num_hits: int
    priority: int | None
    last_use_s: float | None
    expires_s: float | None
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class PrefixDetail:
    """`GET /admin/cache/prefixes/{id}`: the branch and its own blocks, head first."""

    prefix: PrefixReport
    blocks: list[BlockReport]


@dataclass(frozen=True, slots=True)
class LookupSpan:
    """A run of tokens [start, end) that lie in one place: device, host, disk, computing, or missing."""

    start: int
    end: int
    where: str


@dataclass(frozen=True, slots=True)
class LookupReport:
    """What a request with this prompt would find now: the four counts add up to `num_tokens`."""

    num_tokens: int
    num_blocks: int
    spans: list[LookupSpan]
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    restore_seconds: float | None
    compute_seconds: float | None
    saved_seconds: float | None
    hashes: list[str]


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pin. `outcome` is accepted, clipped (to the budget: a prefix of it is kept) or refused; the counts are of the blocks
    that the pin keeps: present in its tier or above, loading, being computed, missing. `tier` is the lowest tier in which
    the blocks must stay.
    """

    id: str
    name: str | None
    tenant: str
    tier: Tier
    outcome: str
    reason: str | None
    num_tokens: int
    num_pinned_tokens: int
    num_blocks: int
    num_present: int
    num_loading: int
    num_missing: int
    nbytes: int
    created_s: float
    expires_s: float | None
    prefix: str | None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class TierRemoval:
    """What a removal did on one tier: gone, and what was in use, pinned or failed and stayed."""

    tier: Tier
    removed: int
    in_use: int = 0
    pinned: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """`complete` is False if anything that was asked for did not happen."""

    tiers: list[TierRemoval]
    complete: bool


@dataclass(frozen=True, slots=True)
class FlushReport:
    """`POST /admin/cache/flush`. `saved` tells that a restart now would lose nothing."""

    saved: bool
    num_unsaved_blocks: int


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of what a tier holds. `kind` is stored or removed; `reason` one of computed, spilled, restored, evicted,
    cleared, corrupt, expired, demoted. Sequence numbers within an epoch have no gaps.
    """

    sequence: int
    kind: str
    tier: Tier
    reason: str
    hashes: list[str]
    parent: str | None = None
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """What the tiers hold after the event numbered `sequence`; later events start from here.

    A large snapshot comes in several parts, all with the same numbers but `part`; `hashes_by_tier` of each adds to what came
    before. The disk may hold more than is named when `disk_complete` is False.
    """

    epoch: str
    sequence: int
    hashes_by_tier: Mapping[Tier, list[str]]
    part: int = 0
    num_parts: int = 1
    disk_complete: bool = True


@dataclass(frozen=True, slots=True)
class EventGap:
    """Events up to `sequence` are lost to this reader: it was too slow, or asked for what is not kept any more. A snapshot
    follows.
    """

    epoch: str
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `verify` found wrong, and what was done about it."""

    tier: Tier
    text: str
    repaired: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`POST /admin/cache/verify`."""

    ok: bool
    num_checked: int
    findings: list[Finding] = field(default_factory=list)
