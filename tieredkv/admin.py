"""The verbs of the admin API over a running engine: inspect, pin, warm, demote, clear, flush, verify, follow.

    asyncio loop     Admin          one coroutine per verb, which asks by way of `Reach`
    engine thread    inspection, clearing, pins       a few milliseconds at a time
    storage thread   prefix_tree, audit, removal

Knows no HTTP. `scope` is None for an administrator, or the owner label of a tenant, to whom everything of other owners is
as if it did not exist.

Invariants: no verb waits without bound, and none holds up the engine for longer than a few milliseconds at a time; an
answer says what did not happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tieredkv import hashing, inspection, upkeep
from tieredkv.branches import Root
from tieredkv.config import Config
from tieredkv.core import EngineCore
from tieredkv.errors import CapacityError, RequestError, StorageError
from tieredkv.event_feed import follow
from tieredkv.prefix_tree import PrefixTree
from tieredkv.reach import Reach
from tieredkv.removing import Removal, Selection
from tieredkv.reports import (
    BlockReport,
    CacheEvent,
    CacheReport,
    EventGap,
    EventSnapshot,
    FlushReport,
    JobReport,
    LookupReport,
    PinReport,
    PrefixDetail,
    PrefixPage,
    PrefixReport,
    RemovalReport,
    VerifyReport,
)
from tieredkv.types import Tier
from tieredkv.warm_job import WarmPrompt
from tieredkv.warming import Warming

if TYPE_CHECKING:
    from tieredkv.engine import Engine

MAX_PAGE = 1000
PIN_TIMEOUT_S = 5.0
PINS_AT_ONCE = 100
"""Pins reported between two steps of the engine."""
CHANGE_TIMEOUT_S = 30.0
"""Longest wait for removals that were asked for before."""


class Admin:
    """The admin verbs of one engine. `warming` is None where no prompts can be warmed."""

    def __init__(self, engine: Engine, config: Config, warming: Warming | None) -> None:
        self._engine = engine
        self._reach = Reach(engine, show_text=config.admin.admin_show_text)
        self._warming = warming
        self._started_s = time.monotonic()
        self._changing = asyncio.Lock()
        self._verifying = asyncio.Lock()

    # -- inspection ----------------------------------------------------------------------------------------------------

    async def cache(self) -> CacheReport:
        """All tiers, the gate, requests, pins and jobs now."""
        try:
            store_id = await self._reach.on_disk(lambda store: store.store_id)
        except StorageError:
            store_id = None
        fixed = inspection.Fixed(self._engine.model_name, self._started_s, store_id)
        report = await self._reach.call(lambda core: inspection.cache_report(core, fixed))
        return replace(report, jobs=[] if self._warming is None else self._warming.jobs(scope=None))

    async def prefixes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        tier: Tier | None = None,
        pinned: bool | None = None,
        tenant: str | None = None,
        query: str | None = None,
        scope: str | None = None,
    ) -> PrefixPage:
        """One page of the branches of the prefix tree. `query` is looked for in ids, names, tenants and the words shown.

        Raises `RequestError` for a bad cursor or limit.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise RequestError(f"limit must be between 1 and {MAX_PAGE}", param="limit")
        start = b"" if cursor is None else _parse_hash(cursor, "cursor", status=400)
        wanted = (query or "").lower()

        def accept(report: PrefixReport) -> bool:
            return (
                scope in (None, report.tenant)
                and tenant in (None, report.tenant)
                and (tier is None or report.blocks_by_tier[tier] > 0)
                and pinned in (None, bool(report.pins))
                and (
                    not wanted or report.id.startswith(wanted) or any(wanted in text.lower() for text in _texts(report))
                )
            )

        page = await self._reach.look(lambda tree: tree.page(start, limit, accept))
        return PrefixPage(page.prefixes, None if page.next_start is None else page.next_start.hex(), page.num_total)

    async def prefix(self, prefix_id: str, *, scope: str | None = None) -> PrefixDetail:
        """One branch and its blocks. Raises `RequestError` with status 404."""
        last = _parse_hash(prefix_id, "prefix")

        def find(tree: PrefixTree) -> PrefixDetail | None:
            branch = tree.branch(last)
            if branch is None:
                return None
            blocks = [report for h in branch.hashes if (report := tree.block(h)) is not None]
            return PrefixDetail(tree.report(branch), blocks)

        detail = await self._reach.look(find)
        if detail is None or scope not in (None, detail.prefix.tenant):
            raise RequestError("there is no such prefix", param="prefix", status=404)
        return replace(detail, blocks=await self._reach.call(lambda core: inspection.complete(core, detail.blocks)))

    async def block(self, block_hash: str, *, scope: str | None = None) -> BlockReport:
        """One block. Raises `RequestError` with status 404."""
        name = _parse_hash(block_hash, "block")
        report = await self._reach.look(lambda tree: tree.block(name))
        if report is None or scope not in (None, report.tenant):
            raise RequestError("there is no such block", param="block", status=404)
        return (await self._reach.call(lambda core: inspection.complete(core, [report])))[0]

    async def lookup(self, token_ids: list[int], *, tenant: bytes) -> LookupReport:
        """What a request with these prompt tokens would find; changes nothing."""
        namespace, block_size = await self._reach.call(lambda core: (core.namespace, core.block_size))
        root = hashing.root_hash(namespace, tenant)
        hashes = await asyncio.to_thread(hashing.full_block_hashes, root, token_ids, block_size)
        try:
            length = await self._reach.on_disk(lambda store: store.longest_prefix(hashes))
        except StorageError:
            length = 0
        return await self._reach.call(lambda core: inspection.lookup_report(core, len(token_ids), hashes, length or 0))

    # -- pins and warming ----------------------------------------------------------------------------------------------

    async def pin(
        self,
        token_ids: list[int] | None,
        *,
        prefix_id: str | None = None,
        tenant: bytes,
        owner: str,
        tier: Tier | None,
        ttl_s: float | None,
        name: str | None,
        warm: bool = True,
        scope: str | None = None,
    ) -> PinReport:
        """Pin the full blocks of a prompt, or a branch with all before it; with `warm` what is missing is computed. Answers
        when a restart would find the pin, and says so if it would not.

        Raises `RequestError` for what cannot be pinned, with status 404 for an unknown prefix.
        """
        if (token_ids is None) == (prefix_id is None):
            raise RequestError("either tokens or a prefix must be given", param="prefix")
        if prefix_id is not None:
            token_ids, root = await self._chain(prefix_id, scope)
            tenant, owner = root.tenant, root.owner if scope is None else owner
        wanted = token_ids or []
        report = await self._reach.call(
            lambda core: core.pins.pin(wanted, tenant=tenant, owner=owner, tier=tier, ttl_s=ttl_s, name=name)
        )
        if not report.id:
            return report
        saved = await self._is_saved(report.id)
        # By now the store has told what it holds of the pin.
        now = await self._reach.call(lambda core: core.pins.get(report.id))
        report = now or report
        if warm and self._warming is not None and report.num_present < report.num_blocks:
            report = replace(
                report, job=self._warm_pin(report, wanted[: report.num_pinned_tokens], tenant, owner, tier)
            )
        if not saved:
            report = replace(report, reason=report.reason or "not on disk yet: a restart now would lose the pin")
        return report

    async def _chain(self, prefix_id: str, scope: str | None) -> tuple[list[int], Root]:
        """The tokens of a prefix, and where its chain begins."""
        last = _parse_hash(prefix_id, "prefix")

        def find(tree: PrefixTree) -> tuple[list[int], Root] | None:
            found = tree.token_ids(last)
            about = None if found is None else tree.about(tree.root(last))
            return None if found is None or about is None else (found, about)

        found = await self._reach.look(find)
        if found is None or scope not in (None, found[1].owner):
            raise RequestError("there is no such prefix, or not all of it", param="prefix", status=404)
        return found

    def _warm_pin(
        self, report: PinReport, token_ids: list[int], tenant: bytes, owner: str, tier: Tier | None
    ) -> str | None:
        """Have what a pin misses computed or brought up; returns the job's id, None if too many jobs are open."""
        prompt = WarmPrompt(token_ids, report.name, tenant, owner, tier=tier)
        try:
            return self._jobs.start([prompt], name=report.name, kind="pin", owner=owner).id
        except CapacityError:
            return None

    async def warm_pins(self) -> list[JobReport]:
        """Bring up or compute what the pins miss in their tiers, as after a restart; a job for each owner that has any."""

        def missing(core: EngineCore) -> dict[str, list[WarmPrompt]]:
            found: dict[str, list[WarmPrompt]] = {}
            for pin in core.pins.list():
                tokens, tenant = core.pins.token_ids(pin.id), core.pins.tenant(pin.id)
                if pin.num_present < pin.num_blocks and tokens is not None and tenant is not None:
                    kept = list(tokens[: pin.num_pinned_tokens])
                    found.setdefault(pin.tenant, []).append(
                        WarmPrompt(kept, pin.name, tenant, pin.tenant, tier=pin.tier)
                    )
            return found

        await self._pins_known()
        return [
            self._jobs.start(prompts, name="pins after a restart", kind="pin", owner=owner)
            for owner, prompts in (await self._reach.call(missing)).items()
        ]

    async def _pins_known(self) -> None:
        """Wait for what the store was asked about pins, above all after a start; at most some seconds."""
        deadline_s = time.monotonic() + PIN_TIMEOUT_S
        while time.monotonic() < deadline_s and await self._reach.call(lambda core: core.pins.busy):
            await asyncio.sleep(0.005)

    async def _is_saved(self, pin_id: str) -> bool:
        deadline_s = time.monotonic() + PIN_TIMEOUT_S
        while not await self._reach.call(lambda core: core.pins.is_saved(pin_id)):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def pins(self, *, scope: str | None = None) -> list[PinReport]:
        """All pins, the newest first; each as it stood when its turn came."""
        await self._pins_known()
        ids = await self._reach.call(lambda core: core.pins.ids(scope=scope))
        reports: list[PinReport] = []
        for at in range(0, len(ids), PINS_AT_ONCE):
            reports += await self._reach.call(partial(_pin_reports, ids=ids[at : at + PINS_AT_ONCE]))
        return reports

    async def get_pin(self, pin_id: str, *, scope: str | None = None) -> PinReport:
        """One pin. Raises `RequestError` with status 404."""
        await self._pins_known()
        return _found(await self._reach.call(lambda core: core.pins.get(pin_id, scope=scope)))

    async def unpin(self, pin_id: str, *, scope: str | None = None) -> PinReport:
        """Take a pin away; returns what it was. Raises `RequestError` with status 404."""
        await self._pins_known()
        return _found(await self._reach.call(lambda core: core.pins.unpin(pin_id, scope=scope)))

    @property
    def _jobs(self) -> Warming:
        if self._warming is None:
            raise CapacityError("no prompts can be warmed here", status=503)
        return self._warming

    async def warm(self, prompts: list[WarmPrompt], *, name: str | None, owner: str) -> JobReport:
        """Start to compute prompts in the background."""
        return self._jobs.start(prompts, name=name, owner=owner)

    async def jobs(self, *, scope: str | None = None) -> list[JobReport]:
        """Jobs that run or ran, as far as they are remembered."""
        return self._jobs.jobs(scope=scope)

    async def job(self, job_id: str, *, scope: str | None = None) -> JobReport:
        """One job. Raises `RequestError` with status 404."""
        return self._jobs.get(job_id, scope=scope)

    async def cancel_job(self, job_id: str, *, scope: str | None = None) -> JobReport:
        """Cancel a job that is not over. Raises `RequestError` with status 404."""
        return self._jobs.cancel(job_id, scope=scope)

    # -- removal -------------------------------------------------------------------------------------------------------

    async def demote(
        self,
        *,
        tiers: Collection[Tier],
        prefix_id: str | None = None,
        tenant: str | None = None,
        scope: str | None = None,
    ) -> RemovalReport:
        """Move blocks from the named tiers to the next lower one: copied first where it does not have them, then removed.

        Raises `RequestError` for the disk, below which there is nothing, and with status 404 for an unknown prefix.
        """
        if Tier.DISK in tiers:
            raise RequestError("there is no tier below the disk", param="tiers")
        selection = Selection(_prefix_or_none(prefix_id), tenant, scope)
        async with self._alone():
            return await Removal(self._reach).demote(tiers, selection)

    async def clear(
        self,
        *,
        tiers: Collection[Tier] | None,
        prefix_id: str | None = None,
        tenant: str | None = None,
        scope: str | None = None,
    ) -> RemovalReport:
        """Remove blocks from the named tiers, all of them if None: those of a tenant, or a branch and everything below it, or
        all of this model. Pinned blocks and those that requests use stay, and are counted.

        Raises `RequestError` with status 404 for an unknown prefix.
        """
        selection = Selection(_prefix_or_none(prefix_id), tenant, scope)
        async with self._alone():
            return await Removal(self._reach).clear(set(Tier) if tiers is None else set(tiers), selection)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None, None]:
        """One removal at a time: a demotion must not carry down what a clear is taking away. Raises `CapacityError`."""
        try:
            await asyncio.wait_for(self._changing.acquire(), CHANGE_TIMEOUT_S)
        except TimeoutError:
            raise CapacityError("other removals are still at work", status=503, retry_after_s=5) from None
        try:
            yield
        finally:
            self._changing.release()

    # -- upkeep --------------------------------------------------------------------------------------------------------

    async def flush(self, timeout_s: float) -> FlushReport:
        """Save everything that a restart would lose, within `timeout_s` seconds, beside what the engine does."""
        return await upkeep.flush(self._reach, timeout_s)

    async def verify(self) -> VerifyReport:
        """Check the blocks of every tier: recount device and host, read and compare every record on disk. What is wrong on disk
        is mended. Raises `CapacityError` while another check runs.
        """
        if self._verifying.locked():
            raise CapacityError("a check is running already", status=503, retry_after_s=10)
        async with self._verifying:
            return await upkeep.verify(self._reach)

    def events(
        self, *, since: tuple[str, int] | None = None
    ) -> AsyncGenerator[CacheEvent | EventSnapshot | EventGap, None]:
        """Changes of the tiers from (epoch, sequence) `since` on, or from a snapshot. Endless: close it when done."""
        return follow(self._reach, since)


def _parse_hash(text: str, param: str, *, status: int = 404) -> bytes:
    try:
        parsed = bytes.fromhex(text)
    except ValueError:
        parsed = b""
    if len(parsed) != hashing.HASH_NBYTES or parsed.hex() != text:
        reason = "cannot be read" if status == 400 else "does not exist"
        raise RequestError(f"this {param} {reason}", param=param, status=status)
    return parsed


def _prefix_or_none(prefix_id: str | None) -> bytes | None:
    return None if prefix_id is None else _parse_hash(prefix_id, "prefix")


def _texts(report: PrefixReport) -> list[str]:
    return [text for text in (report.name, report.tenant, report.first_words, report.last_words) if text]


def _pin_reports(core: EngineCore, *, ids: Sequence[str]) -> list[PinReport]:
    """Reports of those that are still there."""
    return [report for pin_id in ids if (report := core.pins.get(pin_id)) is not None]


def _found(report: PinReport | None) -> PinReport:
    if report is None:
        raise RequestError("there is no such pin", param="id", status=404)
    return report
