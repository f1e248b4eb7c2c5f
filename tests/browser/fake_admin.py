"""The admin verbs over made-up numbers that move with every poll: what the page's tests look at and change."""

from __future__ import annotations

import time
from dataclasses import replace

from tieredkv.errors import CapacityError, RequestError
from tieredkv.metrics import EngineMetrics
from tieredkv.reports import (
    BlockReport,
    CacheReport,
    FlushReport,
    GateReport,
    JobReport,
    LookupReport,
    LookupSpan,
    PinReport,
    PrefixDetail,
    PrefixPage,
    PrefixReport,
    RemovalReport,
    TierRemoval,
    TierReport,
    VerifyReport,
)
from tieredkv.types import Tier, TokenSources

BLOCK_SIZE = 16
BLOCK_NBYTES = 360 * 1024
SHARED = "shared"


def branch(number: int, parent: PrefixReport | None = None, *, num_own: int = 10, **changes) -> PrefixReport:
    """A branch of `num_own` blocks that continues `parent`."""
    before = parent.num_tokens if parent else 0
    report = PrefixReport(
        id=f"{number:064x}",
        parent=parent.id if parent else None,
        tenant=SHARED,
        name=None,
        depth=before // BLOCK_SIZE,
        num_tokens=before + num_own * BLOCK_SIZE,
        num_own_tokens=num_own * BLOCK_SIZE,
        num_blocks=num_own,
        num_children=0,
        blocks_by_tier={Tier.DEVICE: num_own, Tier.HOST: num_own // 2},
        nbytes=num_own * BLOCK_NBYTES,
        last_use_s=time.time() - 5,
        num_hits=number,
        pins=[],
        priority=None,
        expires_s=None,
    )
    return replace(report, **changes)


class FakeAdmin:
    """Stands in for `tieredkv.admin.Admin`. `calls` lists the changes that were asked for, as (verb, arguments)."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics("fake-model")
        self.reset()

    def reset(self) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.num_polls = 0
        self.epoch = "first"
        self.branches: list[PrefixReport] = []
        self.pinned: dict[str, PinReport] = {}
        self.jobs_by_id: dict[str, JobReport] = {}
        self.in_use = 0
        self.refuse_pins = False
        self.fault: str | None = None
        self.refusal: str | None = None
        self.is_idle = False
        self.failure: Exception | None = None

    def grow(self, *, roots: int, children: int) -> None:
        """Fill the tree, each root followed by its children."""
        number = 0
        for _ in range(roots):
            number += 1
            root = branch(number, num_children=children, name=f"root {number}")
            self.branches.append(root)
            for _ in range(children):
                number += 1
                self.branches.append(branch(number, root, num_own=2))

    async def cache(self) -> CacheReport:
        if self.failure is not None:
            raise self.failure
        if not self.is_idle:
            self.num_polls += 1
        n = self.num_polls
        for sources, seconds in (
            (TokenSources(device=9), 0.02),
            (TokenSources(host=9), 0.05),
            (TokenSources(disk=9), 0.09),
            (TokenSources(computed=9), 0.6),
        ):
            if not self.is_idle:
                self.metrics.first_token(seconds, 0.01, sources)
        tiers = [
            self._tier(Tier.DEVICE, 1000, min(200 + 20 * n, 900), hit_tokens=4000 * n, num_evictions=5 * n),
            self._tier(
                Tier.HOST,
                4000,
                min(300 + 10 * n, 3000),
                hit_tokens=1000 * n,
                num_spilled_blocks=12 * n,
                num_restored_blocks=8 * n,
                read_nbytes_per_s=5e9,
                write_nbytes_per_s=4e9,
                fault=self.fault,
                refusal=self.refusal,
                refusing_since_s=None if self.refusal is None else time.time() - 60,
                num_refused_blocks=0 if self.refusal is None else 1234,
            ),
            self._tier(
                Tier.DISK,
                20000,
                min(1000 + 10 * n, 18000),
                hit_tokens=500 * n,
                num_spilled_blocks=10 * n,
                num_restored_blocks=3 * n,
                read_nbytes_per_s=1.1e9,
                write_nbytes_per_s=6e8,
            ),
        ]
        return CacheReport(
            model="fake-model",
            namespace="ab" * 32,
            store_id="cd" * 16,
            block_size=BLOCK_SIZE,
            block_nbytes=BLOCK_NBYTES,
            min_hit_tokens=BLOCK_SIZE,
            uptime_s=100.0 + n,
            tiers=tiers,
            gate=GateReport(
                "auto", 2500.0, {Tier.DEVICE: 16, Tier.HOST: 16, Tier.DISK: 48}, "restoring from every tier pays"
            ),
            computed_tokens=2000 * n,
            seconds_saved=1.5 * n,
            seconds_spent=0.1 * n,
            num_requests_running=3,
            num_requests_waiting=2,
            num_requests_restoring=1,
            num_unsaved_blocks=7,
            num_pins=len(self.pinned),
            event_epoch=self.epoch,
            event_sequence=n,
            jobs=list(self.jobs_by_id.values()),
        )

    @staticmethod
    def _tier(tier: Tier, capacity: int, used: int, **counters) -> TierReport:
        return TierReport(
            tier,
            True,
            capacity_nbytes=capacity * BLOCK_NBYTES,
            used_nbytes=used * BLOCK_NBYTES,
            capacity_blocks=capacity,
            num_blocks=used,
            num_pinned_blocks=used // 10,
            pin_budget_blocks=capacity // 2,
            **counters,
        )

    async def prefixes(
        self, *, limit=50, cursor=None, tier=None, pinned=None, tenant=None, query=None, scope=None
    ) -> PrefixPage:
        found = [
            b
            for b in self.branches
            if (tier is None or b.blocks_by_tier.get(tier))
            and (pinned is None or bool(b.pins) == pinned)
            and (tenant is None or b.tenant == tenant)
            and (scope is None or b.tenant == scope)
            and (query is None or query in f"{b.name} {b.id} {b.first_words}")
        ]
        start = int(cursor or 0)
        following = str(start + limit) if start + limit < len(found) else None
        return PrefixPage(found[start : start + limit], following, len(found))

    def _find(self, prefix_id: str) -> PrefixReport:
        for report in self.branches:
            if report.id == prefix_id:
                return report
        raise RequestError(f"There is no prefix {prefix_id[:12]}.", status=404)

    async def prefix(self, prefix_id, *, scope=None) -> PrefixDetail:
        report = self._find(prefix_id)
        blocks = [
            BlockReport(
                hash=f"{int(report.id, 16) * 1000 + i:064x}",
                parent=report.id,
                tenant=report.tenant,
                depth=report.depth + i,
                num_tokens=BLOCK_SIZE,
                tiers={Tier.DEVICE: "ready", Tier.DISK: "writing"},
                nbytes=BLOCK_NBYTES,
                ref_count=1,
                num_pins=len(report.pins),
                num_hits=2,
                priority=35,
                last_use_s=time.time(),
                expires_s=None,
            )
            for i in range(report.num_blocks)
        ]
        return PrefixDetail(report, blocks)

    async def lookup(self, token_ids, *, tenant) -> LookupReport:
        total = len(token_ids)
        device, disk = total // 2, total // 4
        spans = [
            LookupSpan(0, device, "device"),
            LookupSpan(device, device + disk, "disk"),
            LookupSpan(device + disk, total, "missing"),
        ]
        return LookupReport(
            total, total // BLOCK_SIZE, spans, device, 0, disk, total - device - disk, 0.004, 0.12, 0.31, []
        )

    async def pin(self, token_ids, *, prefix_id=None, tenant, owner, tier, ttl_s, name, warm=True, scope=None):
        self.calls.append(("pin", {"prefix_id": prefix_id, "tier": tier, "ttl_s": ttl_s, "name": name}))
        num_tokens = len(token_ids) if token_ids else self._find(prefix_id).num_tokens
        now_s = time.time()
        made = PinReport(
            id=f"pin-{len(self.calls)}",
            name=name,
            tenant=owner,
            tier=tier or Tier.DISK,
            outcome="refused" if self.refuse_pins else "accepted",
            reason="the budget of the disk tier is used up" if self.refuse_pins else None,
            num_tokens=num_tokens,
            num_pinned_tokens=num_tokens,
            num_blocks=num_tokens // BLOCK_SIZE,
            num_present=num_tokens // BLOCK_SIZE,
            num_loading=0,
            num_missing=0,
            nbytes=num_tokens // BLOCK_SIZE * BLOCK_NBYTES,
            created_s=now_s,
            expires_s=None if ttl_s is None else now_s + ttl_s,
            prefix=prefix_id,
        )
        if not self.refuse_pins:
            self.pinned[made.id] = made
            self.branches = [replace(b, pins=[*b.pins, made.id]) if b.id == prefix_id else b for b in self.branches]
        return made

    async def pins(self, *, scope=None) -> list[PinReport]:
        return [p for p in self.pinned.values() if scope in (None, p.tenant)]

    async def unpin(self, pin_id, *, scope=None) -> PinReport:
        self.calls.append(("unpin", {"pin_id": pin_id}))
        self.branches = [replace(b, pins=[p for p in b.pins if p != pin_id]) for b in self.branches]
        return self.pinned.pop(pin_id)

    async def warm(self, prompts, *, name, owner) -> JobReport:
        job = self.add_job(name=name, num_prompts=len(prompts))
        self.calls.append(("warm", {"name": name, "num_prompts": len(prompts)}))
        return job

    def add_job(self, **changes) -> JobReport:
        job = JobReport(
            id=f"job-{len(self.jobs_by_id) + 1}",
            kind="warm",
            name=None,
            state="running",
            num_prompts=4,
            num_prompts_done=1,
            num_tokens=4000,
            num_tokens_done=1000,
            num_tokens_computed=800,
            created_s=time.time(),
        )
        job = replace(job, **changes)
        self.jobs_by_id[job.id] = job
        return job

    async def jobs(self, *, scope=None) -> list[JobReport]:
        return list(self.jobs_by_id.values())

    async def cancel_job(self, job_id, *, scope=None) -> JobReport:
        self.calls.append(("cancel", {"job_id": job_id}))
        self.jobs_by_id[job_id] = replace(self.jobs_by_id[job_id], state="cancelled", finished_s=time.time())
        return self.jobs_by_id[job_id]

    async def clear(self, *, tiers, prefix_id=None, tenant=None, scope=None) -> RemovalReport:
        self.calls.append(("clear", {"tiers": tiers, "prefix_id": prefix_id, "tenant": tenant}))
        removed = len(self.branches)
        self.branches = [b for b in self.branches if prefix_id is not None and b.id != prefix_id]
        return RemovalReport(
            [TierRemoval(tier, removed, in_use=self.in_use) for tier in sorted(tiers or Tier)], complete=not self.in_use
        )

    async def flush(self, timeout_s) -> FlushReport:
        self.calls.append(("flush", {}))
        return FlushReport(saved=False, num_unsaved_blocks=3) if self.in_use else FlushReport(True, 0)

    async def verify(self) -> VerifyReport:
        self.calls.append(("verify", {}))
        if self.failure is not None:
            raise CapacityError("not now")
        return VerifyReport(ok=True, num_checked=1234)
