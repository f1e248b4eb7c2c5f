"""An admin in memory with the face of `tieredkv.admin.Admin`: chains of blocks by tenant, pins, jobs, a log of events.

A chain is what one prompt's full blocks are; blocks know their owner. Good enough to test what HTTP, the command line and
the page make of answers: whose things are seen, what is refused, how a stream of events looks.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from tieredkv.errors import RequestError
from tieredkv.hashing import extend_chain, root_hash
from tieredkv.reports import (
    BlockReport,
    CacheEvent,
    CacheReport,
    EventGap,
    EventSnapshot,
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
from tieredkv.types import SHARED_OWNER, Tier

BLOCK_SIZE = 16
EPOCH = "e1"


class Chain:
    def __init__(self, hashes, tenant, owner, name=None):
        self.hashes, self.tenant, self.owner, self.name = hashes, tenant, owner, name
        self.tiers = {Tier.DEVICE}

    @property
    def id(self):
        return self.hashes[-1].hex()


class FakeAdmin:
    def __init__(self):
        self.reset()

    def reset(self):
        self.chains = {}
        self.all_pins = {}
        self.pin_owners = {}
        self.all_jobs = {}
        self.job_owners = {}
        self.events_log = []
        self.readers = []
        self.busy_blocks = 0
        self.unsaved = 0
        self.pin_budget = 1000
        self.first_event = 1
        self.calls = []
        self._ids = itertools.count(1)

    def hold(self, token_ids, tenant=b"", owner=SHARED_OWNER, name=None):
        """Pretend that these tokens have been computed."""
        hashes = self._hashes(token_ids, tenant)
        chain = Chain(hashes, tenant, owner, name)
        self.chains[chain.id] = chain
        self.publish("stored", "computed", [h.hex() for h in hashes])
        return chain

    def publish(self, kind, reason, hashes):
        event = CacheEvent(len(self.events_log) + 1, kind, Tier.DEVICE, reason, hashes)
        self.events_log.append(event)
        for reader in self.readers:
            reader.put_nowait(event)

    @staticmethod
    def _hashes(token_ids, tenant):
        hashes = []
        extend_chain(hashes, root_hash(b"fake", tenant), token_ids, BLOCK_SIZE, len(token_ids) // BLOCK_SIZE)
        return hashes

    def _visible(self, scope):
        return [chain for chain in self.chains.values() if scope in (None, chain.owner)]

    def _find(self, prefix_id, scope):
        chain = self.chains.get(prefix_id)
        if chain is None or scope not in (None, chain.owner):
            raise RequestError(f"there is no prefix {prefix_id}", status=404)
        return chain

    async def cache(self):
        blocks = {h for chain in self.chains.values() for h in chain.hashes}
        tiers = [
            TierReport(Tier.DEVICE, True, 1 << 20, len(blocks) * 64, 100, len(blocks)),
            TierReport(Tier.HOST, True, 1 << 20, 0, 100, 0),
            TierReport(
                Tier.DISK,
                True,
                1 << 40,
                1 << 39,
                100_000,
                50_000,
                read_nbytes_per_s=3e9,
                fault="it is slow, " * 9,
                refusal="no space left on the device",
                refusing_since_s=1e9,
                num_refused_blocks=1234,
            ),
        ]
        gate = GateReport("auto", 1000.0, {Tier.HOST: 16, Tier.DISK: None}, "host pays from 16 tokens")
        return CacheReport(
            "fake-model", "00" * 32, None, BLOCK_SIZE, 64, BLOCK_SIZE, 1.5, tiers, gate, 0, 0.0, 0.0, 0, 0, 0,
            self.unsaved, len(self.all_pins), EPOCH, len(self.events_log), list(self.all_jobs.values()),
        )  # fmt: skip

    def _report(self, chain):
        pins = [pin.id for pin in self.all_pins.values() if pin.prefix == chain.id]
        num = len(chain.hashes)
        return PrefixReport(
            chain.id, None, chain.owner, chain.name, 0, num * BLOCK_SIZE, num * BLOCK_SIZE, num, 0,
            dict.fromkeys(sorted(chain.tiers), num), num * 64, 1.0, 0, pins, None, None,
        )  # fmt: skip

    async def prefixes(
        self, *, limit=50, cursor=None, tier=None, pinned=None, tenant=None, query=None, scope=None
    ):  # fmt: skip
        found = [self._report(chain) for chain in self._visible(scope)]
        found = [
            report
            for report in found
            if (tier is None or tier in report.blocks_by_tier)
            and (pinned is None or bool(report.pins) == pinned)
            and tenant in (None, report.tenant)
            and (not query or query in (report.name or "") or report.id.startswith(query))
        ]
        if cursor is not None and not cursor.isdecimal():
            raise RequestError("'cursor' is not one of this server's", param="cursor")
        start = int((cursor or "0")[:9])
        end = start + limit
        return PrefixPage(found[start:end], str(end) if end < len(found) else None, len(found))

    async def prefix(self, prefix_id, *, scope=None):
        chain = self._find(prefix_id, scope)
        return PrefixDetail(
            self._report(chain),
            [self._block(chain, depth) for depth in range(len(chain.hashes))],
        )

    def _block(self, chain, depth):
        parent = chain.hashes[depth - 1] if depth else root_hash(b"fake", chain.tenant)
        return BlockReport(
            chain.hashes[depth].hex(), parent.hex(), chain.owner, depth, BLOCK_SIZE,
            dict.fromkeys(sorted(chain.tiers), "ready"), 64, 0, 0, 0, None, 1.0, None,
        )  # fmt: skip

    async def block(self, block_hash, *, scope=None):
        for chain in self._visible(scope):
            for depth, found in enumerate(chain.hashes):
                if found.hex() == block_hash:
                    return self._block(chain, depth)
        raise RequestError(f"there is no block {block_hash}", status=404)

    async def lookup(self, token_ids, *, tenant):
        known = {h for chain in self.chains.values() for h in chain.hashes}
        hashes = self._hashes(token_ids, tenant)
        hit = BLOCK_SIZE * next((i for i, h in enumerate(hashes) if h not in known), len(hashes))
        spans = [LookupSpan(0, hit, "device")] if hit else []
        if hit < len(token_ids):
            spans.append(LookupSpan(hit, len(token_ids), "missing"))
        return LookupReport(
            len(token_ids), len(hashes), spans, hit, 0, 0, len(token_ids) - hit, None, None, None,
            [h.hex() for h in hashes],
        )  # fmt: skip

    async def pin(
        self, token_ids, *, prefix_id=None, tenant, owner, tier, ttl_s, name, warm=True, scope=None
    ):  # fmt: skip
        self.calls.append({"verb": "pin", "tier": tier, "ttl_s": ttl_s, "name": name, "warm": warm, "owner": owner})
        if prefix_id is not None:
            chain = self._find(prefix_id, scope)
            hashes, owner = chain.hashes, chain.owner
        else:
            hashes = self._hashes(token_ids, tenant)
        num = len(hashes)
        outcome = "refused" if num > self.pin_budget or not num else "accepted"
        report = PinReport(
            f"pin-{next(self._ids)}", name, owner, tier or Tier.HOST, outcome,
            "it is over the budget" if outcome == "refused" else None, num * BLOCK_SIZE, num * BLOCK_SIZE, num, num, 0, 0,
            num * 64, 1.0, None if ttl_s is None else 1.0 + ttl_s, hashes[-1].hex() if num else None,
        )  # fmt: skip
        if outcome != "refused":
            self.all_pins[report.id] = report
            self.pin_owners[report.id] = owner
        return report

    async def pins(self, *, scope=None):
        return [pin for pin in self.all_pins.values() if scope in (None, pin.tenant)]

    async def get_pin(self, pin_id, *, scope=None):
        pin = self.all_pins.get(pin_id)
        if pin is None or scope not in (None, pin.tenant):
            raise RequestError(f"there is no pin {pin_id[:64]!r}", status=404)
        return pin

    async def unpin(self, pin_id, *, scope=None):
        pin = await self.get_pin(pin_id, scope=scope)
        del self.all_pins[pin_id]
        return pin

    async def warm(self, prompts, *, name, owner):
        self.calls.append({"verb": "warm", "prompts": prompts, "owner": owner})
        num = sum(len(prompt.token_ids) for prompt in prompts)
        job = JobReport(f"job-{next(self._ids)}", "warm", name, "running", len(prompts), 0, num, 0, 0, 1.0)
        self.all_jobs[job.id] = job
        self.job_owners[job.id] = owner
        return job

    async def jobs(self, *, scope=None):
        return [job for job in self.all_jobs.values() if scope in (None, self.job_owners[job.id])]

    async def job(self, job_id, *, scope=None):
        if job_id not in self.all_jobs or scope not in (None, self.job_owners[job_id]):
            raise RequestError(f"there is no job {job_id[:64]!r}", status=404)
        return self.all_jobs[job_id]

    async def cancel_job(self, job_id, *, scope=None):
        job = await self.job(job_id, scope=scope)
        self.all_jobs[job_id] = replace(job, state="cancelled", finished_s=2.0)
        return self.all_jobs[job_id]

    async def demote(self, *, tiers, prefix_id=None, tenant=None, scope=None):
        if Tier.DISK in tiers:
            raise RequestError("'tiers': there is no tier below disk", param="tiers")
        return self._remove("demote", tiers, prefix_id, tenant, scope)

    async def clear(self, *, tiers, prefix_id=None, tenant=None, scope=None):
        return self._remove("clear", tiers, prefix_id, tenant, scope)

    def _remove(self, verb, tiers, prefix_id, tenant, scope):
        self.calls.append({"verb": verb, "tiers": tiers, "tenant": tenant, "scope": scope})
        chosen = [self._find(prefix_id, scope)] if prefix_id is not None else self._visible(scope)
        chosen = [chain for chain in chosen if tenant in (None, chain.owner)]
        for chain in chosen:
            if tiers is None or Tier.DEVICE in tiers:
                del self.chains[chain.id]
                self.publish("removed", "cleared", [h.hex() for h in chain.hashes])
        num = sum(len(chain.hashes) for chain in chosen)
        done = [
            TierRemoval(tier, num if tier is Tier.DEVICE else 0, in_use=self.busy_blocks)
            for tier in Tier
            if tiers is None or tier in tiers
        ]
        return RemovalReport(done, not self.busy_blocks)

    async def flush(self, timeout_s):
        self.calls.append({"verb": "flush", "timeout_s": timeout_s})
        return FlushReport(not self.unsaved, self.unsaved)

    async def verify(self):
        return VerifyReport(True, sum(len(chain.hashes) for chain in self.chains.values()))

    async def events(self, *, since=None):
        queue = asyncio.Queue()
        self.readers.append(queue)
        try:
            if since is None or since[0] != EPOCH or not self.first_event - 1 <= since[1] <= len(self.events_log):
                sequence = len(self.events_log)
                if since is not None:
                    yield EventGap(EPOCH, sequence, "these events are not kept any more")
                hashes = [h.hex() for chain in self.chains.values() for h in chain.hashes]
                yield EventSnapshot(EPOCH, sequence, {Tier.DEVICE: hashes})
            else:
                for event in self.events_log[since[1] :]:
                    yield event
            while True:
                event = await queue.get()
                if event is None:
                    return
                yield event
        finally:
            self.readers.remove(queue)
