"""Pins: prefixes that stay, by whose wish, where, and until when.

A pin belongs to the full blocks of its tokens, not to a request: it may come before them, and outlives whoever computed
them. With a disk tier it is stored there and holds for all processes that share the store; without one it ends with the
process. What it may take is bounded by a share of each tier; a pin that does not fit is clipped to its beginning.

Pinning under a name that its owner has used before replaces that pin; without a name, pinning the same tokens again does.
So repeating a request renews its time and never counts twice.

Knows hashes, budgets and times; where copies are kept is `keeping`'s business, rows in the store are `storage`'s. No HTTP,
no sequences, no tensors. Used by the engine thread alone. Invariants: every pin shown here is noted in the keeper, exactly
once per block; no tier's share is exceeded by what was accepted here; a request of the greatest length always fits beside
what is kept on the device.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tieredkv import hashing
from tieredkv.blocks import BlockPool
from tieredkv.errors import InvariantError, RequestError
from tieredkv.keeping import Keeper
from tieredkv.pin_budget import PinBudget
from tieredkv.reports import PinReport
from tieredkv.storage.pins import PIN_ID_NBYTES, PinRecord, PinsSeen
from tieredkv.storage.tier import NEVER
from tieredkv.stored_pins import StoredPins
from tieredkv.tiers import Tiers
from tieredkv.types import SHARED_OWNER, Tier

ACCEPTED, CLIPPED, REFUSED = "accepted", "clipped", "refused"
MAX_NAME_CHARS = 200
MAX_TTL_S = 100 * 365 * 86400.0
# After the store has failed to take a pin, or to give one up.
_RETRY_AFTER_US = 5_000_000
_SEE_AGAIN_AFTER_US = 1_000_000


@dataclass(slots=True, eq=False)
class _Pin:
    """A pin of this process's namespace. The first `num_firm` blocks stay in its tier."""

    record: PinRecord
    num_firm: int
    reason: str | None = None


class Pins:
    """All pins of one namespace. `budget` is the share of each tier that pins may take; `clock_us` the wall clock in
    microseconds; `is_computing(hash)` tells whether a request is about to compute a block.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers | None,
        *,
        namespace: bytes,
        block_size: int,
        block_nbytes: int,
        max_model_len: int,
        budget: float,
        is_computing: Callable[[bytes], bool],
        clock_us: Callable[[], int],
        enabled: bool = True,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._disk = tiers.disk if tiers is not None else None
        self._namespace = namespace
        self._block_size = block_size
        self._block_nbytes = block_nbytes
        self._is_computing = is_computing
        self._clock_us = clock_us
        self.keeper = tiers.keeper if tiers is not None else Keeper(pool, None, has_disk=False)
        self._budget = PinBudget(
            pool,
            tiers,
            self.keeper,
            share=budget,
            block_size=block_size,
            block_nbytes=block_nbytes,
            max_model_len=max_model_len,
            enabled=enabled,
        )
        self._pins: dict[bytes, _Pin] = {}
        self._by_block: dict[bytes, tuple[str, ...]] = {}
        # Somebody reads it: the next change is made to a copy.
        self._is_shown = False
        self._store = StoredPins(self._disk, self._saved, self._seen)
        self._num_resets: int | None = None
        self._seen_us = 0
        self._due_us = NEVER
        self._store.see()

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def pin(
        self,
        token_ids: Sequence[int],
        *,
        tenant: bytes = b"",
        owner: str = SHARED_OWNER,
        tier: Tier | None = None,
        ttl_s: float | None = None,
        name: str | None = None,
    ) -> PinReport:
        """Keep the full blocks of these tokens in `tier` (the lowest there is, if None) or above it, for `ttl_s` seconds or
        until `unpin`. The report says accepted, clipped or refused; a refused pin does not exist and has no id.

        Raises `RequestError` for a name or a time that cannot be.
        """
        if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
            raise RequestError("ttl must be above 0 and at most a hundred years", param="ttl")
        if name is not None and not 0 < len(name) <= MAX_NAME_CHARS:
            raise RequestError(f"name must have 1 to {MAX_NAME_CHARS} characters", param="name")
        self.expire()
        now_us = self._clock_us()
        chosen = tier or self._budget.lowest_tier
        packed = hashing.pack_tokens(token_ids)
        others = self._num_claimed_by_others()
        before = self._find_same(owner, name, tenant, packed)
        if before is not None:
            self._uncount(before)
        hashes = self._chain(token_ids, tenant)
        num_fit, reason = self._budget.fit(hashes, chosen, others)
        record = PinRecord(
            id=before.record.id if before is not None else secrets.token_bytes(PIN_ID_NBYTES),
            namespace=self._namespace,
            tenant=tenant,
            owner=owner,
            name=name,
            tier=chosen,
            created_us=before.record.created_us if before is not None else now_us,
            expires_us=NEVER if ttl_s is None else now_us + int(ttl_s * 1e6),
            hashes=tuple(hashes[:num_fit]),
            token_ids=packed,
        )
        pin = _Pin(record, num_fit, reason)
        if not num_fit:
            if before is not None:
                self._count(before)
            return self._report(pin)
        self._pins[record.id] = pin
        self._count(pin)
        if self._tiers is not None:
            self._tiers.spiller.used(record.hashes)
        self._store.save(record)
        self._plan()
        self._see_again()
        return self._report(pin)

    def unpin(self, pin_id: str, *, scope: str | None = None) -> PinReport | None:
        """Give a pin up; returns what it was, None if there is none of this id in `scope`."""
        self.expire()
        pin = self._find(pin_id, scope)
        if pin is None:
            return None
        report = self._report(pin)
        self._forget(pin)
        return report

    def get(self, pin_id: str, *, scope: str | None = None) -> PinReport | None:
        """A pin as it stands; None if there is none of this id in `scope` (None: everybody's)."""
        self.expire()
        self._see_again()
        pin = self._find(pin_id, scope)
        return None if pin is None else self._report(pin)

    def list(self, *, scope: str | None = None) -> builtins.list[PinReport]:
        """The pins in `scope` (None: everybody's), the newest first."""
        return [report for pin_id in self.ids(scope=scope) if (report := self.get(pin_id)) is not None]

    def ids(self, *, scope: str | None = None) -> builtins.list[str]:
        """The ids of what `list` lists; each report takes a look at each of its blocks."""
        self.expire()
        self._see_again()
        chosen = [pin.record for pin in self._pins.values() if scope in (None, pin.record.owner)]
        return [record.id.hex() for record in sorted(chosen, key=lambda record: -record.created_us)]

    def is_saved(self, pin_id: str) -> bool:
        """Whether a restart would find the pin: True without a disk tier only in that there is nothing to wait for."""
        pin = self._find(pin_id, None)
        return pin is None or self._store.is_saved(pin.record.id)

    def token_ids(self, pin_id: str) -> Sequence[int] | None:
        """The tokens that were pinned, also those beyond what it was clipped to; for computing what is missing."""
        pin = self._find(pin_id, None)
        return None if pin is None else hashing.unpack_tokens(pin.record.token_ids)

    def tenant(self, pin_id: str) -> bytes | None:
        """The salt that the pin's chain was made with."""
        pin = self._find(pin_id, None)
        return None if pin is None else pin.record.tenant

    def by_block(self) -> Mapping[bytes, tuple[str, ...]]:
        """The ids of the pins on each pinned block, as they are now: later pins do not show in it. For any thread."""
        self._is_shown = True
        return self._by_block

    def __len__(self) -> int:
        return len(self._pins)

    def budget_blocks(self, tier: Tier) -> int:
        """Most blocks of a tier that pins may claim."""
        return self._budget.blocks(tier)

    def num_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that stay because of pins; on disk those of all processes, also where they are not there yet. Reads
        counters only, so any thread may call it.
        """
        if tier is Tier.DEVICE:
            return self._pool.num_kept
        below = self._tiers.host if tier is Tier.HOST and self._tiers is not None else self._disk
        return 0 if below is None else below.usage().num_pinned

    @property
    def busy(self) -> bool:
        """Whether the store has been asked something that `expire` takes the answer of."""
        return self._store.busy

    def expire(self) -> None:
        """Give up the pins whose time has come, take the store's answers, repeat what it failed to do. Costs next to nothing
        when there is nothing to do.
        """
        if self._store.busy and self._store.take_answers():
            self._plan()
        now_us = self._clock_us()
        if now_us < self._due_us:
            return
        for pin in list(self._pins.values()):
            if pin.record.is_due(now_us):
                self._forget(pin)
        self._store.retry()
        if self._disk is not None and self._num_resets is None:
            self._store.see()
        self._plan()

    # -- bookkeeping -------------------------------------------------------------------------------------------------------

    def _chain(self, token_ids: Sequence[int], tenant: bytes) -> Sequence[bytes]:
        return hashing.full_block_hashes(hashing.root_hash(self._namespace, tenant), token_ids, self._block_size)

    def _num_claimed_by_others(self) -> int:
        """Blocks of the store that other processes and namespaces have pinned."""
        if self._disk is None:
            return 0
        own = self.keeper.num_wanted_in(Tier.DISK) + self._store.num_leaving_blocks
        return max(self._disk.usage().num_pinned - own, 0)

    def _find(self, pin_id: str, scope: str | None) -> _Pin | None:
        try:
            pin = self._pins.get(bytes.fromhex(pin_id))
        except ValueError:
            return None
        return pin if pin is not None and scope in (None, pin.record.owner) else None

    def _find_same(self, owner: str, name: str | None, tenant: bytes, packed: bytes) -> _Pin | None:
        for pin in self._pins.values():
            record = pin.record
            same = record.owner == owner and record.name == name
            if same and (name is not None or (record.tenant == tenant and record.token_ids == packed)):
                return pin
        return None

    def _count(self, pin: _Pin) -> None:
        self.keeper.add(pin.record.hashes, pin.record.tier, pin.num_firm)
        pin_id, by_block = pin.record.id.hex(), self._by_block_to_change()
        for block_hash in pin.record.hashes:
            by_block[block_hash] = (*by_block.get(block_hash, ()), pin_id)

    def _uncount(self, pin: _Pin) -> None:
        self.keeper.remove(pin.record.hashes, pin.record.tier, pin.num_firm)
        pin_id, by_block = pin.record.id.hex(), self._by_block_to_change()
        for block_hash in pin.record.hashes:
            others = tuple(each for each in by_block[block_hash] if each != pin_id)
            if others:
                by_block[block_hash] = others
            else:
                del by_block[block_hash]

    def _by_block_to_change(self) -> dict[bytes, tuple[str, ...]]:
        if self._is_shown:
            self._by_block, self._is_shown = self._by_block.copy(), False
        return self._by_block

    def _forget(self, pin: _Pin) -> None:
        self._uncount(pin)
        del self._pins[pin.record.id]
        self._store.leave(pin.record.id, len(pin.record.hashes))
        self._plan()

    def _plan(self) -> None:
        """When `expire` has something to do next."""
        due = [pin.record.expires_us for pin in self._pins.values()]
        if self._store.has_failed or (self._disk is not None and self._num_resets is None):
            due.append(self._clock_us() + _RETRY_AFTER_US)
        self._due_us = min(due, default=NEVER)

    def _report(self, pin: _Pin) -> PinReport:
        record = pin.record
        present = loading = 0
        for block_hash in record.hashes:
            where = self._where(block_hash, record.tier)
            present += where == "present"
            loading += where == "loading"
        num_blocks = len(record.hashes)
        clipped = min(num_blocks, pin.num_firm) < record.num_tokens // self._block_size
        return PinReport(
            id=record.id.hex() if num_blocks else "",
            name=record.name,
            tenant=record.owner,
            tier=record.tier,
            outcome=REFUSED if not num_blocks else CLIPPED if clipped else ACCEPTED,
            reason=pin.reason or self._remark(),
            num_tokens=record.num_tokens,
            num_pinned_tokens=num_blocks * self._block_size,
            num_blocks=num_blocks,
            num_present=present,
            num_loading=loading,
            num_missing=num_blocks - present - loading,
            nbytes=num_blocks * self._block_nbytes,
            created_s=record.created_us / 1e6,
            expires_s=None if record.expires_us == NEVER else record.expires_us / 1e6,
            prefix=record.hashes[-1].hex() if num_blocks else None,
        )

    def _remark(self) -> str | None:
        return None if self._disk is not None else "there is no disk tier: the pin ends with the process"

    def _where(self, block_hash: bytes, tier: Tier) -> str:
        """present: in `tier` or above; loading: below it, or being computed; else missing."""
        if self._pool.find(block_hash) is not None:
            return "present"
        in_host = self._tiers is not None and block_hash in self._tiers.host
        saved = self.keeper.is_saved(block_hash)
        if (in_host and tier is not Tier.DEVICE) or (saved and tier is Tier.DISK):
            return "present"
        return "loading" if in_host or saved or self._is_computing(block_hash) else "missing"

    # -- the store -----------------------------------------------------------------------------------------------------

    def _see_again(self) -> None:
        if self._clock_us() >= self._seen_us + _SEE_AGAIN_AFTER_US:
            self._seen_us = self._clock_us()
            self._store.see()

    def _saved(self, record: PinRecord, num_resident: int) -> None:
        """The store keeps a pin, and has its first `num_resident` blocks."""
        for block_hash in record.hashes[:num_resident]:
            self.keeper.saved(block_hash)

    def _seen(self, seen: PinsSeen) -> None:
        """What the store has: also pins from before the start, and those of other processes."""
        reset = self._num_resets is not None and seen.num_resets != self._num_resets
        self._num_resets = seen.num_resets
        records = {r.id: r for r in seen.records if r.namespace == self._namespace}
        for pin in list(self._pins.values()):
            pin_id = pin.record.id
            if pin_id in records or not self._store.is_saved(pin_id):
                continue
            if reset:
                self._store.save(pin.record)
            else:
                # Another process has given it up, or its time is over there.
                self._uncount(pin)
                del self._pins[pin_id]
        now_us = self._clock_us()
        for record in records.values():
            if self._store.is_leaving(record.id) or not self._store.is_saved(record.id) or record.is_due(now_us):
                continue
            known = self._pins.get(record.id)
            if known is None or known.record != record:
                self._adopt(record, known)
            self._note_resident(record, seen.num_resident[record.id])

    def _adopt(self, record: PinRecord, known: _Pin | None) -> None:
        """Take over a pin from the store. What it claims there it has; above, it gets what fits."""
        if known is not None:
            self._uncount(known)
        num_firm, reason = len(record.hashes), None
        if record.tier is not Tier.DISK:
            num_firm, reason = self._budget.fit_in(record.hashes, record.tier)
        pin = _Pin(record, num_firm, reason)
        self._pins[record.id] = pin
        self._count(pin)
        self._plan()

    def _note_resident(self, record: PinRecord, num_resident: int) -> None:
        """The store holds the first `num_resident` blocks of a pin and not the one behind them."""
        for block_hash in record.hashes[:num_resident]:
            self.keeper.saved(block_hash)
        if num_resident < len(record.hashes) and self.keeper.is_saved(record.hashes[num_resident]):
            missing = record.hashes[num_resident]
            if self._tiers is not None:
                self._tiers.spiller.lost_on_disk(missing)
            self.keeper.lost(missing)

    def check_integrity(self) -> None:
        """Recount. Raises `InvariantError`."""
        counts: dict[bytes, int] = {}
        for pin in self._pins.values():
            for block_hash in pin.record.hashes:
                counts[block_hash] = counts.get(block_hash, 0) + 1
        agree = all(self.keeper.num_pins(h) == len(self._by_block[h]) == n for h, n in counts.items())
        if not agree or not len(counts) == len(self._by_block) == self.keeper.num_noted:
            raise InvariantError("the pins and the counts of their blocks disagree")
        for tier in (Tier.DEVICE, Tier.HOST):
            if self.keeper.num_wanted_in(tier) > self.budget_blocks(tier):
                raise InvariantError(f"pins claim more of the {tier.value} tier than they may")
        self.keeper.check_integrity()
