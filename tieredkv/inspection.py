"""Reading what a core knows, for people: reports of the tiers, the gate, and of what a prompt would find.

Runs on the engine thread between two steps and changes nothing. Knows the core and its parts; no loop, no HTTP. What would
take long over a large cache is copied out as a `View`, for another thread to work on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tieredkv.clearing import in_flight
from tieredkv.core import EngineCore
from tieredkv.errors import InvariantError
from tieredkv.gate import CostGate
from tieredkv.prefix_tree import View
from tieredkv.reports import BlockReport, CacheReport, GateReport, LookupReport, LookupSpan, TierReport
from tieredkv.storage.tier import NEVER
from tieredkv.types import DEFAULT_PRIORITY, Tier, TokenSources

# The longest prefix, in blocks, for which it is asked whether bringing it up pays.
_MOST_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the reports need and the core does not know."""

    model: str
    started_s: float
    store_id: str | None


def take_view(core: EngineCore) -> View:
    """A copy of what lies on the device and in the host tier, about 10 ns a block."""
    coming = core.tiers.restorer.coming() if core.tiers is not None else []
    return View(core.branches.snapshot(), core.pins.by_block(), in_flight(core), coming, core.block_nbytes)


def complete(core: EngineCore, blocks: Sequence[BlockReport]) -> list[BlockReport]:
    """Add what only the engine thread knows: how many requests and copies use each block on the device, and for how long it is
    retained.
    """
    done = []
    for block in blocks:
        block_hash = bytes.fromhex(block.hash)
        block_id = core.pool.find(block_hash)
        priority, expires_us = core.retentions.rank(block_hash)
        known = block.priority is not None and priority == DEFAULT_PRIORITY
        done.append(
            replace(
                block,
                ref_count=0 if block_id is None else core.pool.ref_count(block_id),
                priority=block.priority if known else priority,
                expires_s=block.expires_s if known or expires_us == NEVER else expires_us / 1e6,
            )
        )
    return done


def contradictions(core: EngineCore) -> list[tuple[Tier, str]]:
    """Recount the blocks of device and host tier; what does not add up."""
    found = []
    checks = [(Tier.DEVICE, core.check_integrity), (Tier.DEVICE, lambda: check_branches(core))]
    if core.tiers is not None:
        checks.append((Tier.HOST, core.tiers.host.check_integrity))
    for tier, check in checks:
        try:
            check()
        except InvariantError as error:
            found.append((tier, str(error)))
    return found


def check_branches(core: EngineCore) -> None:
    """Compare the registry of blocks with the tiers themselves. Raises `InvariantError`."""
    num_host = 0
    nodes = core.branches.snapshot().nodes
    for block_hash, node in nodes.items():
        near = core.pool.find(block_hash) is not None, core.tiers is not None and block_hash in core.tiers.host
        num_host += near[1]
        if near != (node.is_in(Tier.DEVICE), node.is_in(Tier.HOST)):
            raise InvariantError(f"block {block_hash.hex()} is not where it is known to be")
    num_device = sum(node.is_in(Tier.DEVICE) for node in nodes.values())
    if num_device != core.pool.num_committed:
        raise InvariantError(f"{num_device} blocks are known on the device, {core.pool.num_committed} are there")
    if core.tiers is not None and num_host != core.tiers.host.usage().num_blocks:
        raise InvariantError(f"{num_host} blocks are known in the host tier, not all that are there")


def cache_report(core: EngineCore, fixed: Fixed) -> CacheReport:
    """Everything but the jobs, which others know."""
    tiers, scheduler = core.tiers, core.scheduler
    return CacheReport(
        model=fixed.model,
        namespace=core.namespace.hex(),
        store_id=fixed.store_id,
        block_size=core.block_size,
        block_nbytes=core.block_nbytes,
        min_hit_tokens=core.block_size,
        uptime_s=time.monotonic() - fixed.started_s,
        tiers=[_device_report(core), _host_report(core), _disk_report(core)],
        gate=gate_report(core.gate, [] if tiers is None else [Tier.HOST, *([Tier.DISK] if tiers.disk else [])]),
        computed_tokens=core.token_totals.computed,
        seconds_saved=core.saved_s,
        seconds_spent=0.0 if tiers is None else tiers.totals.spent_s,
        num_requests_running=len(scheduler.running),
        num_requests_waiting=len(scheduler.waiting),
        num_requests_restoring=len(scheduler.restoring),
        num_unsaved_blocks=0 if tiers is None else tiers.spiller.num_unsaved,
        num_pins=len(core.pins),
        event_epoch=core.events.epoch,
        event_sequence=core.events.publish(),
        jobs=[],
    )


def _device_report(core: EngineCore) -> TierReport:
    pool, nbytes, tiers = core.pool, core.block_nbytes, core.tiers
    return TierReport(
        tier=Tier.DEVICE,
        enabled=core.cache.enable_prefix_caching,
        capacity_nbytes=pool.num_usable * nbytes,
        used_nbytes=(pool.num_usable - pool.num_free + pool.num_findable_free) * nbytes,
        capacity_blocks=pool.num_usable,
        num_blocks=pool.num_committed,
        num_pinned_blocks=pool.num_kept,
        pin_budget_blocks=core.pins.budget_blocks(Tier.DEVICE),
        num_retained_blocks=pool.num_retained,
        hit_tokens=core.token_totals.device,
        num_evictions=pool.num_evicted,
        num_dropped_blocks=0 if tiers is None else tiers.spiller.counts.dropped_by_device,
    )


def _host_report(core: EngineCore) -> TierReport:
    tiers, nbytes = core.tiers, core.block_nbytes
    if tiers is None:
        return TierReport(Tier.HOST, enabled=False)
    usage, counts = tiers.host.usage(), tiers.spiller.counts
    return TierReport(
        tier=Tier.HOST,
        enabled=tiers.host.keeps,
        capacity_nbytes=usage.capacity_nbytes,
        used_nbytes=usage.used_nbytes,
        capacity_blocks=tiers.host.num_slots,
        num_blocks=usage.num_blocks,
        num_pinned_blocks=usage.num_pinned,
        pin_budget_blocks=core.pins.budget_blocks(Tier.HOST),
        num_retained_blocks=usage.num_retained,
        hit_tokens=core.token_totals.host,
        num_evictions=usage.num_evictions,
        num_spilled_blocks=counts.to_host,
        num_restored_blocks=tiers.totals.host,
        num_dropped_blocks=counts.dropped_by_host,
        queued_read_nbytes=tiers.restorer.num_copying * nbytes,
        queued_write_nbytes=tiers.spiller.num_copying * nbytes,
        read_nbytes_per_s=core.gate.bandwidth[Tier.HOST].per_s,
        write_nbytes_per_s=tiers.spiller.copy_rate.per_s,
    )


def _disk_report(core: EngineCore) -> TierReport:
    tiers, nbytes = core.tiers, core.block_nbytes
    disk = tiers.disk if tiers is not None else None
    if tiers is None or disk is None:
        return TierReport(Tier.DISK, enabled=False)
    usage, counts = disk.usage(), tiers.spiller.counts
    reads, writes = disk.queued_nbytes
    each = usage.used_nbytes / usage.num_blocks if usage.num_blocks else nbytes
    refusal = disk.refusal
    return TierReport(
        tier=Tier.DISK,
        enabled=True,
        capacity_nbytes=usage.capacity_nbytes,
        used_nbytes=usage.used_nbytes,
        # Blocks are compressed and rounded: what fits is estimated by what is there.
        capacity_blocks=int(usage.capacity_nbytes / each),
        num_blocks=usage.num_blocks,
        num_pinned_blocks=usage.num_pinned,
        pin_budget_blocks=core.pins.budget_blocks(Tier.DISK),
        num_retained_blocks=usage.num_retained,
        hit_tokens=core.token_totals.disk,
        num_evictions=usage.num_evictions,
        num_spilled_blocks=counts.to_disk,
        num_restored_blocks=tiers.totals.disk,
        num_dropped_blocks=counts.refused_by_disk,
        num_corrupt_blocks=usage.num_corrupt,
        queued_read_nbytes=reads,
        queued_write_nbytes=writes,
        read_nbytes_per_s=core.gate.bandwidth[Tier.DISK].per_s,
        write_nbytes_per_s=disk.write_nbytes_per_s,
        fault=disk.fault,
        refusal=None if refusal is None else refusal.reason,
        refusing_since_s=None if refusal is None else refusal.since_us / 1e6,
        num_refused_blocks=0 if refusal is None else refusal.num_blocks,
    )


def gate_report(gate: CostGate, lower: Sequence[Tier]) -> GateReport:
    """What the gate would decide now, asked with prefixes of growing length that lie in one tier."""
    pays: dict[Tier, int | None] = {}
    sentences = []
    for tier in lower:
        rate = gate.bandwidth[tier].per_s
        measured = gate.policy != "auto" or (rate is not None and gate.prefill.per_s is not None)
        pays[tier] = _pays_from(gate, tier) if measured else None
        if gate.policy == "always":
            sentences.append(f"{tier}: always restored, as told")
        elif gate.policy == "never":
            sentences.append(f"{tier}: never restored, as told")
        elif rate is None or gate.prefill.per_s is None:
            sentences.append(f"{tier}: not measured yet, so restored")
        else:
            # Bytes that hold the tokens computed in one second.
            need = gate.prefill.per_s * gate.block_nbytes / gate.block_size
            verdict = "restoring pays" if pays[tier] is not None else "computing is faster"
            sentences.append(
                f"{tier}: {verdict}, it brings {rate / 1e6:,.0f} MB/s and computing makes {need / 1e6:,.0f} MB/s"
            )
    return GateReport(
        policy=gate.policy,
        prefill_tokens_per_s=gate.prefill.per_s,
        pays_from_tokens=pays,
        verdict="; ".join(sentences) or "there is no tier to restore from",
    )


def _pays_from(gate: CostGate, tier: Tier) -> int | None:
    """The shortest prefix, in tokens, that the gate would bring up whole."""
    length = 1
    while length <= _MOST_BLOCKS:
        if gate.worth_restoring([tier] * length) == length:
            break
        length *= 2
    else:
        return None
    low = length // 2
    while low + 1 < length:
        middle = (low + length) // 2
        low, length = (low, middle) if gate.worth_restoring([tier] * middle) == middle else (middle, length)
    return length * gate.block_size


def lookup_report(core: EngineCore, num_tokens: int, hashes: Sequence[bytes], disk_length: int) -> LookupReport:
    """What a request with a prompt of `num_tokens` would find: `hashes` are those of its full blocks, of which the disk holds
    the first `disk_length`.
    """
    block_size, pool, tiers, gate = core.block_size, core.pool, core.tiers, core.gate
    usable = hashes if core.cache.enable_prefix_caching else []
    near = next((i for i, h in enumerate(usable) if pool.find(h) is None), len(usable))
    found = [Tier.DEVICE] * near
    if tiers is not None:
        found += tiers.locate(usable, near, disk_length)
    sources = TokenSources.of_prompt(found, block_size, num_tokens)
    below = [tier for tier in (Tier.HOST, Tier.DISK) if tier in found]
    restore_s: float | None = 0.0
    for tier in below:
        seconds = gate.load_seconds(tier, found.count(tier))
        restore_s = None if seconds is None or restore_s is None else restore_s + seconds
    measured = gate.prefill.per_s is not None
    saved_s = gate.prefill_seconds(sources.cached) - restore_s if measured and restore_s is not None else None
    return LookupReport(
        num_tokens=num_tokens,
        num_blocks=len(hashes),
        spans=_spans([_where(core, h, i < disk_length) for i, h in enumerate(hashes)], block_size, num_tokens),
        device_tokens=sources.device,
        host_tokens=sources.host,
        disk_tokens=sources.disk,
        computed_tokens=sources.computed,
        restore_seconds=restore_s,
        compute_seconds=gate.prefill_seconds(sources.computed) if measured else None,
        saved_seconds=saved_s,
        hashes=[h.hex() for h in hashes],
    )


def _where(core: EngineCore, block_hash: bytes, on_disk: bool) -> str:
    if core.pool.find(block_hash) is not None:
        return Tier.DEVICE.value
    if core.tiers is not None and block_hash in core.tiers.host:
        return Tier.HOST.value
    if core.cache.is_computing(block_hash):
        return "computing"
    return Tier.DISK.value if on_disk else "missing"


def _spans(places: Sequence[str], block_size: int, num_tokens: int) -> list[LookupSpan]:
    """Runs of one place; the tokens behind the last full block have none."""
    spans: list[LookupSpan] = []
    for i, where in enumerate([*places, *(["missing"] if len(places) * block_size < num_tokens else [])]):
        start, end = i * block_size, min((i + 1) * block_size, num_tokens)
        if spans and spans[-1].where == where:
            spans[-1] = LookupSpan(spans[-1].start, end, where)
        else:
            spans.append(LookupSpan(start, end, where))
    return spans
