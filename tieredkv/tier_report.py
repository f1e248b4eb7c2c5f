"""What the tiers did and hold, as metrics. Knows the tiers' totals; decides nothing, changes nothing.

Everything is read from the scraping thread while the engine thread counts on: numbers may be a step apart from each
other, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tieredkv.blocks import BlockPool
from tieredkv.metrics import Sample
from tieredkv.storage.tier import TierUsage
from tieredkv.tiers import Tiers
from tieredkv.types import Tier


def report(pool: BlockPool, block_nbytes: int, tiers: Tiers | None) -> Iterator[Sample]:
    """All samples: what each tier holds and may hold, what moved between them, what was lost, what waits."""
    device: dict[str, float] = {
        "capacity": pool.num_usable * block_nbytes,
        "used": (pool.num_usable - pool.num_free + pool.num_findable_free) * block_nbytes,
        "blocks": pool.num_committed,
        "evictions": pool.num_evicted,
        "pinned": pool.num_kept,
        "retained": pool.num_retained,
    }
    holds: dict[Tier, Mapping[str, float]] = {Tier.DEVICE: device}
    if tiers is not None:
        holds[Tier.HOST] = _facts(tiers.host.usage())
        if tiers.disk is not None:
            # The store does not count what is retained: its rows say so one by one.
            holds[Tier.DISK] = {key: n for key, n in _facts(tiers.disk.usage()).items() if key != "retained"}
    for kind, name, key, doc in (
        ("gauge", "tier_capacity_bytes", "capacity", "Most bytes that the tier's blocks may take."),
        ("gauge", "tier_used_bytes", "used", "Bytes that the tier's blocks take."),
        ("gauge", "tier_blocks", "blocks", "Findable blocks in the tier."),
        ("gauge", "tier_pinned_blocks", "pinned", "Blocks that pins keep in the tier."),
        ("gauge", "tier_retained_blocks", "retained", "Blocks that requests asked to retain, in the tier."),
        ("counter", "tier_evictions", "evictions", "Blocks that made room for others in the tier."),
        ("counter", "tier_corrupt_records", "corrupt", "Stored blocks that failed verification and were dropped."),
    ):
        for tier, facts in holds.items():
            if key in facts:
                yield Sample(kind, name, doc, facts[key], {"tier": tier.value})
    if tiers is not None:
        yield from _moved(tiers, block_nbytes)
        yield from _waiting(tiers, block_nbytes)


def _facts(usage: TierUsage) -> dict[str, float]:
    return {
        "capacity": usage.capacity_nbytes,
        "used": usage.used_nbytes,
        "blocks": usage.num_blocks,
        "evictions": usage.num_evictions,
        "corrupt": usage.num_corrupt,
        "pinned": usage.num_pinned,
        "retained": usage.num_retained,
    }


def _moved(tiers: Tiers, block_nbytes: int) -> Iterator[Sample]:
    spilled, restored = tiers.spiller.counts, tiers.totals
    for verb, doc, counts in (
        ("spilled", "copied down to the tier", {Tier.HOST: spilled.to_host, Tier.DISK: spilled.to_disk}),
        ("restored", "brought up to the device from the tier", {Tier.HOST: restored.host, Tier.DISK: restored.disk}),
        (
            "dropped",
            "lost by the tier while no lower one held them",
            {Tier.DEVICE: spilled.dropped_by_device, Tier.HOST: spilled.dropped_by_host},
        ),
    ):
        for unit, factor in (("blocks", 1), ("bytes", block_nbytes)):
            for tier, count in counts.items():
                yield Sample(
                    "counter", f"{verb}_{unit}", f"{unit.title()} {doc}.", count * factor, {"tier": tier.value}
                )
    yield Sample("counter", "restore_seconds", "Time that requests waited for their blocks.", restored.spent_s)
    yield Sample("counter", "restore_seconds_saved", "Estimated time that computing them would take.", restored.saved_s)
    yield Sample("counter", "restore_failures", "Blocks that could not be brought up.", tiers.restorer.num_failed)
    yield Sample("counter", "restore_timeouts", "Restores cut short by their deadline.", tiers.restorer.num_timeouts)
    yield Sample(
        "counter", "lookup_timeouts", "Lookups that the disk did not answer in time.", tiers.num_lookup_timeouts
    )
    yield Sample("counter", "disk_refused_blocks", "Blocks that the disk tier did not take.", spilled.refused_by_disk)
    yield Sample("counter", "failed_copies", "Blocks whose copy to the host failed.", spilled.failed_copies)


def _waiting(tiers: Tiers, block_nbytes: int) -> Iterator[Sample]:
    spiller = tiers.spiller
    yield Sample("gauge", "unsaved_blocks", "Blocks that a restart would lose.", spiller.num_unsaved)
    yield Sample("gauge", "num_requests_restoring", "Requests that wait for their blocks.", tiers.restorer.num_active)
    loads, writes = tiers.disk.queued_nbytes if tiers.disk is not None else (0, 0)
    doc = "Bytes of copies that wait or run."
    yield Sample("gauge", "tier_queue_bytes", doc, spiller.num_copying * block_nbytes, {"queue": "device_to_host"})
    yield Sample("gauge", "tier_queue_bytes", doc, writes, {"queue": "host_to_disk"})
    yield Sample("gauge", "tier_queue_bytes", doc, loads, {"queue": "disk_to_host"})
    down = tiers.disk is not None and (tiers.disk.fault is not None or tiers.disk.refusal is not None)
    doc = "1 while the disk tier works and takes blocks."
    yield Sample("gauge", "tier_healthy", doc, 0.0 if down else 1.0, {"tier": "disk"})
