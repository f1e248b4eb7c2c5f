"""Saving and checking what the tiers hold, on demand, while the engine serves.

    flush       what a restart would lose goes down, some at a time     engine thread, then the writer
    verify      device and host are recounted, the disk is read         engine thread, then a storage thread

Runs on the asyncio loop. Knows the core and the store; no HTTP. Invariant: what was not saved, not checked or found wrong is
in the answer.
"""

from __future__ import annotations

import asyncio
import time

from tieredkv import inspection
from tieredkv.core import EngineCore
from tieredkv.errors import CapacityError, InvariantError, StorageError
from tieredkv.reach import Reach
from tieredkv.reports import Finding, FlushReport, VerifyReport
from tieredkv.storage.audit import Report
from tieredkv.types import Tier

VERIFY_TIMEOUT_S = 1800.0
_ANSWER_TIMEOUT_S = 30.0
"""What an audit gets to end by itself after its time is over."""


async def flush(reach: Reach, timeout_s: float) -> FlushReport:
    """Save everything that a restart would lose, within `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    await reach.call(try_again)
    while True:
        num_unsaved = await reach.call(_save_some)
        if num_unsaved is None:
            num_blocks = await reach.call(lambda core: len(core.branches))
            return FlushReport(not num_blocks, num_blocks)
        if not num_unsaved:
            synced = await _sync(reach, max(deadline_s - time.monotonic(), 0.1))
            return FlushReport(synced, 0)
        if time.monotonic() >= deadline_s:
            return FlushReport(False, num_unsaved)
        await asyncio.sleep(min(0.01, max(deadline_s - time.monotonic(), 0)))


def try_again(core: EngineCore) -> None:
    """Somebody waits for everything to be saved: what the disk refused before may have room by now."""
    if core.tiers is not None:
        core.tiers.spiller.try_again()


def _save_some(core: EngineCore) -> int | None:
    """Start to save what a restart would lose; returns how many blocks that are, None where nothing outlives the process."""
    if core.tiers is None or core.tiers.disk is None:
        return None
    core.tiers.spiller.save_some()
    return core.tiers.spiller.num_unsaved


async def _sync(reach: Reach, timeout_s: float) -> bool:
    """Bring the disk tier's writes to the device."""
    try:
        return bool(await reach.change(lambda store: store.sync(), timeout_s))
    except (StorageError, CapacityError):
        return False


async def verify(reach: Reach) -> VerifyReport:
    """Check every tier; reading the store may take long."""
    num_checked = await reach.call(lambda core: len(core.branches))
    findings = [Finding(tier, text, repaired=False) for tier, text in await reach.call(inspection.contradictions)]
    deadline_s = time.monotonic() + VERIFY_TIMEOUT_S
    try:
        report: Report | None = await reach.on_disk(
            lambda store: store.check(lambda: time.monotonic() > deadline_s), VERIFY_TIMEOUT_S + _ANSWER_TIMEOUT_S
        )
    except (StorageError, InvariantError) as error:
        findings.append(Finding(Tier.DISK, f"cannot be checked: {error}", repaired=False))
        report = None
    if report is not None:
        num_checked += report.num_blocks
        findings += _findings(report)
    return VerifyReport(ok=not findings, num_checked=num_checked, findings=findings)


def _findings(report: Report) -> list[Finding]:
    found = [Finding(Tier.DISK, text, repaired=True) for text in report.problems]
    if report.num_problems > len(report.problems):
        more = report.num_problems - len(report.problems)
        found.append(Finding(Tier.DISK, f"{more} more like these", repaired=True))
    if report.stopped:
        text = f"stopped after {report.num_blocks} blocks, with more to check"
        found.append(Finding(Tier.DISK, text, repaired=False))
    return found
