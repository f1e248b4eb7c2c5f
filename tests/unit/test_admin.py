"""The admin verbs over a running engine with real threads and a real store, served by a model made of arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil

import pytest

from tests.engine_with_tiers import BLOCK_SIZE, NAMESPACE, running_engine
from tests.fakes import expected_tokens, request
from tests.storage.faulty import FaultyMedium
from tieredkv.admin import Admin
from tieredkv.config import Config
from tieredkv.errors import CapacityError, RequestError
from tieredkv.hashing import extend_chain, root_hash
from tieredkv.reports import CacheEvent, EventGap, EventSnapshot
from tieredkv.storage.disk import DiskStore
from tieredkv.types import Retention, Tier
from tieredkv.warming import Warming

ALICE, SALT = "a11ce0000000", b"a" * 32


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 79 + i * 31) % 256 for i in range(length)]


def chain(token_ids, tenant: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root_hash(NAMESPACE, tenant), token_ids, BLOCK_SIZE, len(token_ids) // BLOCK_SIZE)
    return hashes


class Operator:
    """An admin over one engine, and a client of the same engine."""

    def __init__(self, engine, **settings) -> None:
        self.engine = engine
        self.warming = Warming(engine)
        self.admin = Admin(engine, Config.load({"block_size": BLOCK_SIZE, **settings}), self.warming)
        self._number = 0

    async def ask(self, token_ids, *, tenant=b"", owner="shared", name=None, max_tokens=4):
        self._number += 1
        each = request(f"r{self._number}", token_ids, max_tokens=max_tokens, tenant=tenant)
        each.owner, each.prefix_name = owner, name
        tokens = []
        async for output in self.engine.submit(each):
            tokens += output.new_token_ids
        assert tokens == expected_tokens(token_ids, max_tokens)
        return output.sources

    async def all_prefixes(self, **filters):
        found, cursor = [], None
        while True:
            page = await self.admin.prefixes(cursor=cursor, **filters)
            found += page.prefixes
            cursor = page.next_cursor
            if cursor is None:
                return found


def run(main, *args, **settings):
    """`main(operator)` on an engine of its own."""

    async def body(engine):
        operator = Operator(engine)
        try:
            return await asyncio.wait_for(main(operator), 60)
        finally:
            await operator.warming.close()

    with running_engine(*args, **settings) as engine:
        return asyncio.run(body(engine))


def test_many_pins_are_listed_a_few_at_a_time_with_steps_between(monkeypatch):
    monkeypatch.setattr("tieredkv.admin.PINS_AT_ONCE", 3)

    async def main(operator):
        made = []
        for i in range(8):
            owner = "one" if i % 2 else "two"
            report = await operator.admin.pin(
                prompt(16, i), tenant=b"", owner=owner, tier=None, ttl_s=None, name=f"{i}", warm=False
            )
            made.append(report.id)
        listed, largest = [], 0
        call = operator.engine.call

        def watched(function):
            def counting(core):
                nonlocal largest
                before = len(listed)
                get = core.pins.get
                core.pins.get = lambda pin_id, **more: listed.append(pin_id) or get(pin_id, **more)
                try:
                    return function(core)
                finally:
                    del core.pins.get
                    largest = max(largest, len(listed) - before)

            return call(counting)

        monkeypatch.setattr(operator.engine, "call", watched)
        assert [pin.id for pin in await operator.admin.pins()] == made[::-1] == listed
        assert largest == 3
        assert [pin.id for pin in await operator.admin.pins(scope="one")] == made[1::2][::-1]

    run(main)


def test_the_cache_report_adds_up(tmp_path):
    async def main(operator):
        await operator.ask(prompt(60))
        await operator.ask(prompt(60) + prompt(20, 2))
        assert (await operator.admin.flush(10)).saved
        report = await operator.admin.cache()
        assert [tier.tier for tier in report.tiers] == list(Tier)
        device, host, disk = report.tiers
        assert device.num_blocks == host.num_blocks == disk.num_blocks == 10
        assert device.hit_tokens == 56
        assert report.computed_tokens == 60 + 24
        assert host.num_spilled_blocks == disk.num_spilled_blocks == 10
        assert host.write_nbytes_per_s > 0
        assert disk.write_nbytes_per_s > 0
        for tier in report.tiers:
            assert tier.enabled
            assert 0 < tier.used_nbytes <= tier.capacity_nbytes
            assert tier.num_blocks <= tier.capacity_blocks
        assert report.min_hit_tokens == report.block_size == BLOCK_SIZE
        assert report.namespace == NAMESPACE.hex()
        assert len(report.store_id) == 32
        assert report.num_unsaved_blocks == report.num_pins == report.num_requests_running == 0
        assert "disk" in report.gate.verdict
        await operator.admin.demote(tiers={Tier.DEVICE, Tier.HOST})
        assert (await operator.ask(prompt(60))).disk == 56
        report = await operator.admin.cache()
        assert report.tiers[2].hit_tokens == 56
        assert report.tiers[2].num_restored_blocks == 7
        assert report.tiers[2].read_nbytes_per_s > 0
        assert report.seconds_spent > 0

    run(main, tmp_path)


def test_a_cache_without_tiers_is_looked_at_as_well():
    async def main(operator):
        await operator.ask(prompt(60))
        report = await operator.admin.cache()
        assert [tier.enabled for tier in report.tiers] == [True, False, False]
        (branch,) = await operator.all_prefixes()
        assert (branch.num_blocks, branch.blocks_by_tier[Tier.DEVICE]) == (7, 7)
        assert (await operator.admin.block(branch.id)).tiers == {Tier.DEVICE: "ready"}
        assert (await operator.admin.lookup(prompt(60), tenant=b"")).device_tokens == 56
        assert (await operator.admin.verify()).ok
        flushed = await operator.admin.flush(1)
        assert (flushed.saved, flushed.num_unsaved_blocks) == (False, 7)
        cleared = await operator.admin.clear(tiers=None)
        assert cleared.complete
        assert cleared.tiers[0].removed == 7
        assert not await operator.all_prefixes()
        assert (await operator.admin.flush(1)).saved

    run(main, num_slots=None)


def test_branches_their_names_and_owners_outlive_a_restart(tmp_path):
    async def first(operator):
        await operator.ask(prompt(40) + prompt(20, 2), name="left")
        await operator.ask(prompt(40) + prompt(20, 3), name="right")
        await operator.ask(prompt(60, 4), tenant=SALT, owner=ALICE, name="hers")
        await operator.admin.flush(10)
        return await operator.all_prefixes()

    async def second(operator):
        return await operator.all_prefixes(), await operator.all_prefixes(scope=ALICE)

    before = run(first, tmp_path)
    after, hers = run(second, tmp_path)
    assert {(b.id, b.parent, b.name, b.tenant, b.num_tokens) for b in before} == {
        (b.id, b.parent, b.name, b.tenant, b.num_tokens) for b in after
    }
    assert {b.name for b in after} == {None, "left", "right", "hers"}
    assert [b.name for b in hers] == ["hers"]
    assert all(b.blocks_by_tier[Tier.DISK] == b.num_blocks for b in after)


def test_filters_and_search(tmp_path):
    async def main(operator):
        await operator.ask(prompt(60), name="Handbook")
        await operator.ask(prompt(60, 2), tenant=SALT, owner=ALICE)
        await operator.admin.flush(10)
        await operator.admin.demote(tiers={Tier.DEVICE}, tenant=ALICE)
        everything = await operator.all_prefixes()
        assert len(everything) == 2
        assert [b.tenant for b in await operator.all_prefixes(tier=Tier.DEVICE)] == ["shared"]
        assert [b.tenant for b in await operator.all_prefixes(tenant=ALICE)] == [ALICE]
        assert [b.name for b in await operator.all_prefixes(query="handb")] == ["Handbook"]
        assert await operator.all_prefixes(query=everything[0].id[:10]) == [everything[0]]
        assert await operator.all_prefixes(pinned=True) == []
        assert await operator.all_prefixes(tenant="shared", scope=ALICE) == []
        for bad in ({"limit": 0}, {"limit": 10_000}, {"cursor": "zz"}, {"cursor": "00" * 33}):
            with pytest.raises(RequestError) as refused:
                await operator.admin.prefixes(**bad)
            assert refused.value.status == 400

    run(main, tmp_path)


def test_another_owners_blocks_do_not_exist(tmp_path):
    async def main(operator):
        await operator.ask(prompt(60), tenant=SALT, owner=ALICE)
        last = chain(prompt(60), SALT)[-1].hex()
        assert (await operator.admin.prefix(last, scope=ALICE)).prefix.tenant == ALICE
        verbs = [
            operator.admin.prefix(last, scope="b0b"),
            operator.admin.block(last, scope="b0b"),
            operator.admin.clear(tiers=None, prefix_id=last, scope="b0b"),
            operator.admin.demote(tiers={Tier.DEVICE}, prefix_id=last, scope="b0b"),
            operator.admin.pin(
                None, prefix_id=last, tenant=b"", owner="b0b", tier=None, ttl_s=None, name=None, scope="b0b"
            ),
            operator.admin.prefix("no hash"),
            operator.admin.block("00" * 32),
            operator.admin.get_pin("00"),
            operator.admin.unpin("00"),
            operator.admin.job("00"),
        ]
        for verb in verbs:
            with pytest.raises(RequestError) as refused:
                await verb
            assert refused.value.status == 404
        assert (await operator.admin.block(last)).tiers[Tier.DEVICE] == "ready"

    run(main, tmp_path)


def test_a_prefix_tells_its_blocks_and_shows_text_only_if_told_to(tmp_path):
    text = list(b"The quick brown fox jumps over the lazy dog, again and again.")

    async def main(operator):
        await operator.ask(text, max_tokens=1)
        last = chain(text)[-1].hex()
        private = await operator.admin.prefix(last)
        assert [block.depth for block in private.blocks] == list(range(7))
        assert private.prefix.first_words is None
        assert all(block.token_ids is None for block in private.blocks)
        shown = Operator(operator.engine, admin_show_text=True)
        public = await shown.admin.prefix(last)
        assert public.prefix.first_words.startswith("The quick")
        assert [t for block in public.blocks for t in block.token_ids] == text[:56]
        assert len((await shown.admin.prefixes(query="QUICK")).prefixes) == 1
        assert not (await operator.admin.prefixes(query="QUICK")).prefixes

    run(main, tmp_path)


def test_a_lookup_tells_what_a_request_then_finds(tmp_path):
    async def main(operator):
        admin = operator.admin
        await operator.ask(prompt(64))
        await admin.flush(10)
        await admin.demote(tiers={Tier.DEVICE, Tier.HOST})
        await operator.ask(prompt(33))
        await admin.demote(tiers={Tier.DEVICE})
        await operator.ask(prompt(17))
        looked = await admin.lookup(prompt(64), tenant=b"")
        assert [(span.start, span.end, span.where) for span in looked.spans] == [
            (0, 16, "device"),
            (16, 32, "host"),
            (32, 64, "disk"),
        ]
        assert looked.num_tokens == sum(
            (looked.device_tokens, looked.host_tokens, looked.disk_tokens, looked.computed_tokens)
        )
        assert looked == await admin.lookup(prompt(64), tenant=b""), "a lookup changes nothing"
        sources = await operator.ask(prompt(64))
        assert (sources.device, sources.host, sources.disk, sources.computed) == (
            looked.device_tokens,
            looked.host_tokens,
            looked.disk_tokens,
            looked.computed_tokens,
        )
        stranger = await admin.lookup(prompt(64), tenant=b"x" * 32)
        assert (stranger.computed_tokens, stranger.spans[0].where) == (64, "missing")
        assert (await admin.lookup([1, 2, 3], tenant=b"")).computed_tokens == 3

    run(main, tmp_path, restore="always")


def test_pins_are_saved_warmed_and_survive_a_clear(tmp_path):
    async def main(operator):
        admin = operator.admin
        pin = await admin.pin(prompt(60), tenant=b"", owner="shared", tier=None, ttl_s=None, name="rules")
        assert (pin.outcome, pin.num_blocks, pin.tier) == ("accepted", 7, Tier.DISK)
        while (await admin.job(pin.job)).state != "done":
            await asyncio.sleep(0.01)
        assert (await admin.flush(10)).saved
        assert (await admin.get_pin(pin.id)).num_present == 7
        assert len(await operator.all_prefixes(pinned=True)) == 1
        await operator.ask(prompt(60, 2))
        report = await admin.clear(tiers=None)
        assert not report.complete
        assert report.tiers[2].pinned == 7
        await admin.demote(tiers={Tier.DEVICE, Tier.HOST})
        assert (await admin.lookup(prompt(60), tenant=b"")).disk_tokens == 56
        assert (await admin.lookup(prompt(60, 2), tenant=b"")).disk_tokens == 0
        assert await admin.pins(scope=ALICE) == []
        assert (await admin.unpin(pin.id)).id == pin.id
        assert (await admin.clear(tiers=None)).complete
        assert not await operator.all_prefixes()

    run(main, tmp_path)


def test_what_pins_keep_near_is_near_again_after_a_restart(tmp_path):
    async def before(operator):
        for seed, tier in enumerate((Tier.DEVICE, Tier.HOST, Tier.DISK)):
            await operator.admin.pin(
                prompt(60, seed), tenant=b"", owner="shared", tier=tier, ttl_s=None, name=tier.value
            )
        await settled(operator)
        assert (await operator.admin.flush(10)).saved

    async def settled(operator):
        while any(job.state in ("queued", "running") for job in await operator.admin.jobs()):
            await asyncio.sleep(0.002)

    async def after(operator):
        assert {pin.name for pin in await operator.admin.pins()} == {"device", "host", "disk"}
        assert await operator.admin.warm_pins()
        await settled(operator)
        pins = {pin.name: pin for pin in await operator.admin.pins()}
        assert all(pin.num_present == pin.num_blocks == 7 for pin in pins.values()), pins
        # Nothing was brought up that is only to stay on disk.
        assert (await operator.admin.lookup(prompt(60, 2), tenant=b"")).spans[0].where == "disk"

    run(before, tmp_path)
    run(after, tmp_path)


def test_a_branch_can_be_pinned_by_its_id_also_another_tenants_by_the_administrator(tmp_path):
    async def main(operator):
        admin = operator.admin
        await operator.ask(prompt(60), tenant=SALT, owner=ALICE)
        last = chain(prompt(60), SALT)[-1].hex()
        pin = await admin.pin(None, prefix_id=last, tenant=b"", owner="shared", tier=None, ttl_s=60.0, name=None)
        assert (pin.prefix, pin.tenant, pin.num_present) == (last, ALICE, 7)
        assert (await admin.block(last)).num_pins == 1
        assert (await admin.prefix(last)).prefix.pins == [pin.id]

    run(main, tmp_path)


def test_clear_while_requests_run_leaves_a_right_engine(tmp_path):
    async def main(operator):
        admin = operator.admin

        async def traffic(seed):
            for turn in range(6):
                await operator.ask(prompt(60, seed) + prompt(10 * turn, seed + 1), max_tokens=10)

        async def clearing():
            for tiers in [None, {Tier.HOST}, {Tier.DISK}, {Tier.DEVICE}] * 3:
                report = await admin.clear(tiers=tiers)
                assert all(part.error is None for part in report.tiers)

        await asyncio.gather(*(traffic(seed) for seed in range(4)), clearing())
        assert (await admin.verify()).ok
        assert (await admin.flush(10)).saved
        assert (await admin.clear(tiers=None)).complete
        assert not await operator.all_prefixes()
        assert (await admin.verify()).ok

    run(main, tmp_path, num_blocks=80)
    store = DiskStore.open(tmp_path)
    assert store.usage().num_blocks == 0
    assert store.verify().ok
    store.close()


def test_verify_finds_and_mends_a_damaged_record(tmp_path):
    async def main(operator):
        await operator.ask(prompt(60))
        await operator.admin.flush(10)
        assert (await operator.admin.verify()).ok
        disk = await asyncio.wrap_future(operator.engine.call(lambda core: core.tiers.disk))

        def damage(store: DiskStore) -> None:
            with store._env.writing() as txn:
                key = chain(prompt(60))[3]
                record = bytearray(store._medium.get(txn.raw, key, txn.dbs["blocks"]))
                record[-1] ^= 1
                store._medium.put(txn.raw, key, bytes(record), txn.dbs["blocks"])

        await asyncio.wrap_future(disk.change(damage))
        report = await operator.admin.verify()
        assert not report.ok
        assert [finding.tier for finding in report.findings] == [Tier.DISK]
        assert report.findings[0].repaired
        # The next write takes it away with all behind it.
        await asyncio.wrap_future(disk.change(lambda store: store.maintain(idle=False)))
        assert (await operator.admin.verify()).ok
        await operator.admin.demote(tiers={Tier.DEVICE, Tier.HOST})
        assert (await operator.ask(prompt(60))).total == 60

    run(main, tmp_path)


def test_one_check_at_a_time(tmp_path):
    async def main(operator):
        await operator.ask(prompt(60))
        first, second = await asyncio.gather(operator.admin.verify(), operator.admin.verify(), return_exceptions=True)
        assert first.ok
        assert isinstance(second, CapacityError)

    run(main, tmp_path)


async def read(events, count):
    found = []
    async with contextlib.aclosing(events) as stream:
        async for event in stream:
            found.append(event)
            if len(found) == count:
                break
    return found


class Replay:
    """What a reader knows who applies everything in order."""

    def __init__(self) -> None:
        self.known: dict[Tier, set[str]] = {tier: set() for tier in Tier}
        self.epoch = ""
        self.sequence = 0
        self.num_gaps = 0

    def apply(self, event) -> None:
        if isinstance(event, EventSnapshot):
            if event.part == 0:
                self.known = {tier: set() for tier in Tier}
            for tier, hashes in event.hashes_by_tier.items():
                self.known[tier] |= set(hashes)
            self.epoch, self.sequence = event.epoch, event.sequence
        elif isinstance(event, EventGap):
            self.num_gaps += 1
        elif isinstance(event, CacheEvent):
            assert event.sequence == self.sequence + 1
            self.sequence = event.sequence
            if event.kind == "stored":
                self.known[event.tier] |= set(event.hashes)
            else:
                self.known[event.tier] -= set(event.hashes)


def test_whoever_follows_the_events_knows_what_every_tier_holds(tmp_path):
    async def main(operator):
        replay, late = Replay(), Replay()

        async def follow(into):
            async for event in operator.admin.events():
                into.apply(event)

        await operator.ask(prompt(60))
        readers = [asyncio.create_task(follow(replay))]
        await asyncio.gather(*(operator.ask(prompt(60, seed) + prompt(30, seed + 9)) for seed in range(8)))
        readers.append(asyncio.create_task(follow(late)))
        await operator.admin.clear(tiers={Tier.HOST})
        await asyncio.gather(*(operator.ask(prompt(60, seed)) for seed in range(8, 14)))
        await operator.admin.flush(10)
        last = (await operator.admin.cache()).event_sequence
        while min(replay.sequence, late.sequence) < last:
            await asyncio.sleep(0.01)
        branches = await asyncio.wrap_future(operator.engine.call(lambda core: core.branches.snapshot().nodes))
        disk = await asyncio.wrap_future(operator.engine.call(lambda core: core.tiers.disk))

        def on_disk(store):
            with store.listing(NAMESPACE) as listing:
                return {h.hex() for h, _ in listing.scan()}

        truth = {tier: {h.hex() for h, node in branches.items() if node.is_in(tier)} for tier in Tier}
        truth[Tier.DISK] = await asyncio.wrap_future(disk.ask(on_disk))
        assert replay.known == late.known == truth
        assert replay.num_gaps == late.num_gaps == 0
        for reader in readers:
            reader.cancel()

    run(main, tmp_path, num_blocks=40, num_slots=20)


def test_a_reader_goes_on_where_it_was_or_is_told_of_a_gap(tmp_path):
    async def main(operator):
        admin = operator.admin
        (snapshot,) = await read(admin.events(), 1)
        await operator.ask(prompt(60))
        (event,) = await read(admin.events(since=(snapshot.epoch, snapshot.sequence)), 1)
        assert (event.sequence, event.kind, event.tier, event.reason) == (1, "stored", Tier.DEVICE, "computed")
        assert event.hashes == [h.hex() for h in chain(prompt(60))]
        for since in (("another", 1), (snapshot.epoch, 10**9), (snapshot.epoch, -1)):
            gap, again = await read(admin.events(since=since), 2)
            assert isinstance(gap, EventGap)
            assert isinstance(again, EventSnapshot)
        listening = await asyncio.wrap_future(operator.engine.call(lambda core: len(core.events._listeners)))
        assert not listening

    run(main, tmp_path)


def test_a_large_snapshot_comes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("tieredkv.event_feed.PART_HASHES", 4)

    async def main(operator):
        await operator.ask(prompt(60))
        await operator.admin.flush(10)
        replay, parts = Replay(), []
        async with contextlib.aclosing(operator.admin.events()) as stream:
            async for part in stream:
                parts.append(part)
                replay.apply(part)
                if part.part == part.num_parts - 1:
                    break
        assert [part.part for part in parts] == list(range(len(parts)))
        assert len(parts) == 4
        names = {h.hex() for h in chain(prompt(60))}
        assert replay.known == dict.fromkeys(Tier, names)

    run(main, tmp_path)


def test_a_disk_that_refuses_blocks_says_so_until_it_takes_some(tmp_path):
    medium = FaultyMedium()

    async def main(operator):
        async def disk():
            return (await operator.admin.cache()).tiers[2]

        assert operator.engine.warnings() == []
        medium.fail("put", OSError(errno.ENOSPC, "No space left on device"))
        await operator.ask(prompt(60))
        while (told := await disk()).refusal is None:
            await asyncio.sleep(0.01)
        assert "no space" in told.refusal
        assert told.num_refused_blocks > 0
        assert told.refusing_since_s is not None
        (warning,) = operator.engine.warnings()
        assert "no blocks since" in warning
        assert str(tmp_path) not in warning, "anybody may read it"
        medium.heal()
        assert (await operator.admin.flush(20)).saved
        assert (await disk()).refusal is None
        assert operator.engine.warnings() == []

    run(main, tmp_path / "store", medium=medium)


def test_a_disk_that_is_gone_is_a_fault_and_no_obstacle(tmp_path):
    async def main(operator):
        admin = operator.admin
        await operator.ask(prompt(60))
        await admin.flush(10)
        shutil.rmtree(tmp_path / "store")
        await operator.ask(prompt(60, 2))
        while (await admin.cache()).tiers[2].fault is None:
            await asyncio.sleep(0.01)
        assert len(await operator.all_prefixes()) == 2
        assert (await admin.lookup(prompt(60), tenant=b"")).device_tokens == 56
        assert not (await admin.verify()).ok
        report = await admin.clear(tiers={Tier.DEVICE, Tier.HOST})
        assert report.complete
        assert not await operator.all_prefixes()
        assert not (await admin.clear(tiers={Tier.DISK})).complete
        assert not (await admin.flush(0.1)).saved or not (await admin.cache()).num_unsaved_blocks

    run(main, tmp_path / "store")


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_host_tier_that_keeps_nothing_is_no_tier_to_demote_to(tmp_path, with_disk):
    async def main(operator):
        await operator.ask(prompt(60))
        report = await operator.admin.demote(tiers={Tier.DEVICE})
        assert report.complete == with_disk
        looked = await operator.admin.lookup(prompt(60), tenant=b"")
        assert (looked.device_tokens, looked.disk_tokens) == ((0, 56) if with_disk else (56, 0))
        assert (await operator.admin.clear(tiers=None)).complete
        assert not await operator.all_prefixes()
        assert (await operator.admin.verify()).ok

    run(main, tmp_path if with_disk else None, num_slots=0, restore="always")


def test_a_retained_block_says_so_before_it_is_on_disk():
    async def main(operator):
        each = request("r", prompt(60))
        each.retention = (Retention(num_tokens=24, priority=80, ttl_s=300.0),)
        async for _ in operator.engine.submit(each):
            pass
        detail = await operator.admin.prefix(chain(prompt(60))[-1].hex())
        assert [block.priority for block in detail.blocks] == [80] * 3 + [35] * 4
        assert [block.expires_s is not None for block in detail.blocks] == [True] * 3 + [False] * 4

    run(main)
