"""Pins over hand-cranked tiers: what is pinned stays, what is not goes; counts, budgets, times, restarts."""

from __future__ import annotations

import pytest

from tests.fakes import Collector, expected_tokens, make_core, request
from tests.tier_fakes import FakeDisk, TieredCore
from tests.unit.test_tiers import churn, prompt, run
from tieredkv.errors import RequestError
from tieredkv.types import Tier

BLOCK = 8


def pinned_core(**settings) -> TieredCore:
    return TieredCore(num_blocks=40, num_slots=24, max_model_len=160, **settings)


def where(tiered: TieredCore, tokens) -> str:
    """How the full blocks of a prompt are found now: d, h, k (disk) or '-' for each."""
    hashes = tiered.core.pins._chain(tokens, b"")
    text = ""
    for block_hash in hashes:
        if tiered.core.pool.find(block_hash) is not None:
            text += "d"
        elif block_hash in tiered.host:
            text += "h"
        else:
            text += "k" if tiered.disk is not None and block_hash in tiered.disk.blocks else "-"
    return text


def check(tiered: TieredCore) -> None:
    tiered.core.check_integrity()
    tiered.check_tiers()


def test_a_pin_on_the_device_outlives_any_churn():
    core, runner = make_core(num_blocks=40, max_model_len=160)
    run_plain(core, "a", prompt(64))
    report = core.pins.pin(prompt(64), name="system")
    assert (report.outcome, report.tier, report.num_present, report.num_blocks) == ("accepted", Tier.DEVICE, 8, 8)
    assert "no disk tier" in report.reason
    for i in range(40):
        run_plain(core, f"churn-{i}", prompt(100, seed=100 + i))
    before = runner.num_computed_tokens
    run_plain(core, "b", [*prompt(64), 1, 2, 3])
    assert runner.num_computed_tokens - before == 3 + 3
    assert core.pins.unpin(report.id) is not None
    assert core.pins.list() == []
    for i in range(10):
        run_plain(core, f"more-{i}", prompt(100, seed=300 + i))
    assert core.pool.find(core.pins._chain(prompt(64), b"")[0]) is None
    core.check_integrity()


def run_plain(core, name: str, tokens) -> None:
    core.add(request(name, tokens))
    assert Collector(core).run().tokens[name] == expected_tokens(tokens, 4)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_pin_outlives_churn_in_its_tier(tier):
    tiered = pinned_core(disk=FakeDisk())
    run(tiered, request("a", prompt(64)))
    report = tiered.core.pins.pin(prompt(64), tier=tier)
    assert report.outcome == "accepted"
    for i in range(10):
        churn(tiered, 4, seed=100 + 4 * i)
        tiered.settle()
    check(tiered)
    places = where(tiered, prompt(64))
    assert places == {Tier.DEVICE: "d" * 8, Tier.HOST: "h" * 8, Tier.DISK: "k" * 8}[tier]
    (report,) = tiered.core.pins.list()
    assert (report.num_present, report.num_loading, report.num_missing) == (8, 0, 0)
    assert len(tiered.disk.pin_records) == 1


def test_what_is_pinned_on_disk_gets_there_before_what_is_older():
    disk = FakeDisk()
    tiered = pinned_core(disk=disk)
    disk.accepts = False
    for i in range(3):
        run_plain(tiered.core, f"old-{i}", prompt(60, seed=10 + i))
    run_plain(tiered.core, "a", prompt(64))
    disk.accepts = True
    while tiered.crank():
        pass
    tiered.core.pins.pin(prompt(64))
    tiered.core.work_idle()
    hashes = list(tiered.core.pins._chain(prompt(64), b""))
    assert tiered.copies.launched[0].tag.hashes == hashes


def test_a_pinned_block_that_only_the_device_holds_is_not_lost():
    disk = FakeDisk()
    disk.accepts = False
    tiered = pinned_core(disk=disk)
    run(tiered, request("a", prompt(64)))
    tiered.core.pins.pin(prompt(64))
    for i in range(40):
        # No copy ever completes either.
        tiered.core.add(request(f"churn-{i}", prompt(100, seed=100 + i)))
        Collector(tiered.core).run()
    assert where(tiered, prompt(64)) == "d" * 8
    (report,) = tiered.core.pins.list()
    assert report.num_present == 8
    disk.accepts = True
    tiered.settle()
    churn(tiered, 10)
    assert where(tiered, prompt(64)) == "k" * 8
    assert tiered.core.pool.num_kept == 0
    check(tiered)


def test_a_pin_may_come_before_its_blocks():
    tiered = pinned_core(disk=FakeDisk())
    report = tiered.core.pins.pin(prompt(64))
    assert (report.outcome, report.num_present, report.num_missing) == ("accepted", 0, 8)
    run(tiered, request("a", prompt(64)))
    tiered.settle()
    for i in range(10):
        churn(tiered, 4, seed=100 + 4 * i)
    tiered.settle()
    assert tiered.core.pins.get(report.id).num_present == 8
    assert where(tiered, prompt(64)) == "k" * 8
    check(tiered)


def test_pins_of_what_is_being_computed_are_loading():
    disk = FakeDisk()
    tiered = pinned_core(disk=disk, max_num_batched_tokens=16)
    tiered.core.add(request("a", prompt(64)))
    disk.complete()
    tiered.core.step()
    tiered.core.step()
    report = tiered.core.pins.pin(prompt(80))
    assert (report.num_present, report.num_loading, report.num_missing) == (4, 4, 2)
    Collector(tiered.core).run()


def test_a_restart_finds_pins_and_keeps_them():
    disk = FakeDisk()
    before = pinned_core(disk=disk)
    run(before, request("a", prompt(64)))
    pins = [before.core.pins.pin(prompt(64), tier=tier, name=tier.value) for tier in Tier]
    before.settle()
    after = pinned_core(disk=disk)
    assert sorted(r.id for r in after.core.pins.list()) == sorted(r.id for r in pins)
    by_name = {r.name: r for r in after.core.pins.list()}
    assert [by_name[t.value].num_present for t in (Tier.DISK, Tier.HOST, Tier.DEVICE)] == [8, 0, 0]
    assert by_name["device"].num_loading == 8
    # The first use brings them up, and up there they stay.
    result = run(after, request("b", [*prompt(64), 1]))
    assert result.sources["b"].disk == 64
    for i in range(10):
        churn(after, 4, seed=100 + 4 * i)
    after.settle()
    assert {r.name: r.num_present for r in after.core.pins.list()} == {"device": 8, "host": 8, "disk": 8}
    check(after)


def test_time_passes_also_while_nothing_runs():
    disk = FakeDisk()
    before = pinned_core(disk=disk)
    before.core.pins.pin(prompt(64), ttl_s=10, name="short")
    before.core.pins.pin(prompt(64, seed=2), ttl_s=1000, name="long")
    before.settle()
    after = pinned_core(disk=disk)
    after.clock.now_s += 20
    assert [r.name for r in after.core.pins.list()] == ["long"]
    check(after)


def test_a_pin_ends_with_its_time():
    tiered = pinned_core(disk=FakeDisk())
    run(tiered, request("a", prompt(64)))
    report = tiered.core.pins.pin(prompt(64), tier=Tier.DEVICE, ttl_s=60)
    assert report.expires_s == report.created_s + 60
    churn(tiered, 10)
    assert where(tiered, prompt(64)) == "d" * 8
    tiered.clock.now_s += 60
    churn(tiered, 10)
    assert where(tiered, prompt(64)) == "k" * 8
    assert tiered.core.pins.get(report.id) is None
    tiered.settle()
    assert tiered.disk.pin_records == {}
    check(tiered)


def test_pinning_again_renews_and_counts_once():
    tiered = pinned_core(disk=FakeDisk())
    run(tiered, request("a", prompt(64)))
    first = tiered.core.pins.pin(prompt(64), ttl_s=60)
    tiered.clock.now_s += 50
    again = tiered.core.pins.pin(prompt(64), ttl_s=60)
    assert (again.id, again.created_s, again.expires_s) == (first.id, first.created_s, first.expires_s + 50)
    named = tiered.core.pins.pin(prompt(64), name="x")
    renamed = tiered.core.pins.pin(prompt(80, seed=2), name="x", tier=Tier.HOST)
    assert renamed.id == named.id != first.id
    assert len(tiered.core.pins.list()) == 2
    others = tiered.core.pins.pin(prompt(64), name="x", owner="somebody")
    assert others.id not in (named.id, first.id)
    tiered.settle()
    assert len(tiered.disk.pin_records) == 3
    for report in tiered.core.pins.list():
        tiered.core.pins.unpin(report.id)
    tiered.settle()
    assert tiered.disk.pin_records == {}
    assert tiered.core.pool.num_kept_hashes == tiered.host.num_kept_hashes == 0
    check(tiered)


def test_overlapping_pins_are_counted_per_block():
    tiered = pinned_core(disk=FakeDisk())
    run(tiered, request("a", prompt(96)))
    short = tiered.core.pins.pin(prompt(48), tier=Tier.DEVICE, name="short")
    long = tiered.core.pins.pin(prompt(96), tier=Tier.DEVICE, name="long")
    assert tiered.core.pins.num_blocks(Tier.DEVICE) == 12
    tiered.core.pins.unpin(long.id)
    churn(tiered, 10)
    assert where(tiered, prompt(96)) == "d" * 6 + "k" * 6
    tiered.core.pins.unpin(short.id)
    churn(tiered, 10)
    assert where(tiered, prompt(96)) == "k" * 12
    check(tiered)


def test_a_pin_over_the_budget_is_clipped_then_refused():
    tiered = pinned_core(disk=FakeDisk(capacity=100))
    budget = tiered.core.pins.budget_blocks(Tier.DEVICE)
    # 39 blocks, of which the greatest request needs 20.
    assert budget == 19
    first = tiered.core.pins.pin(prompt(14 * BLOCK), tier=Tier.DEVICE)
    assert first.outcome == "accepted"
    second = tiered.core.pins.pin(prompt(14 * BLOCK, seed=2), tier=Tier.DEVICE)
    assert (second.outcome, second.num_blocks, second.num_pinned_tokens) == ("clipped", 5, 5 * BLOCK)
    assert "19" in second.reason
    third = tiered.core.pins.pin(prompt(14 * BLOCK, seed=3), tier=Tier.DEVICE)
    assert (third.outcome, third.id, third.num_blocks) == ("refused", "", 0)
    # What is pinned already costs nothing; what replaces itself neither.
    assert tiered.core.pins.pin(prompt(14 * BLOCK), tier=Tier.DEVICE, name="same blocks").outcome == "accepted"
    assert tiered.core.pins.pin(prompt(14 * BLOCK), tier=Tier.DEVICE).outcome == "accepted"
    tiered.core.pins.unpin(first.id)
    assert tiered.core.pins.pin(prompt(14 * BLOCK, seed=3), tier=Tier.HOST).outcome == "clipped"
    check(tiered)


def test_the_disk_budget_counts_the_pins_of_others():
    disk = FakeDisk(capacity=20)
    ours, theirs = pinned_core(disk=disk), pinned_core(disk=disk, namespace=b"m" * 32)
    assert theirs.core.pins.pin(prompt(56)).outcome == "accepted"
    theirs.settle()
    clipped = ours.core.pins.pin(prompt(56))
    assert (clipped.outcome, clipped.num_blocks) == ("clipped", 3)
    ours.settle()
    assert ours.core.pins.pin(prompt(56)).num_blocks == 3
    assert len(ours.core.pins.list()) == 1


@pytest.mark.parametrize(
    ("tokens", "settings", "tier", "reason"),
    [
        (prompt(5), {}, None, "shorter"),
        (prompt(64), {"disk": None}, Tier.DISK, "no disk"),
        (prompt(64), {"num_slots": 0}, Tier.HOST, "no host"),
        (prompt(64), {"max_model_len": 312}, Tier.DEVICE, "greatest length"),
        (prompt(64), {"pin_budget": 0.0}, None, "nothing"),
        (prompt(64), {"enable_prefix_caching": False}, None, "off"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(tokens, settings, tier, reason):
    made = {"num_blocks": 40, "num_slots": 24, "max_model_len": 160, "disk": FakeDisk()} | settings
    tiered = TieredCore(**made)
    report = tiered.core.pins.pin(tokens, tier=tier)
    assert report.outcome == "refused"
    assert reason in report.reason
    assert tiered.core.pins.list() == []


def test_more_than_a_request_can_have_is_clipped():
    tiered = pinned_core(disk=FakeDisk())
    report = tiered.core.pins.pin(prompt(200))
    # Of 160 tokens the last one is an answer's, so no request fills the last block.
    assert (report.outcome, report.num_pinned_tokens) == ("clipped", 152)


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": float("nan")}, {"name": ""}, {"name": "x" * 1000}]
)
def test_nonsense_is_an_error_of_the_request(wrong):
    core, _ = make_core()
    with pytest.raises(RequestError):
        core.pins.pin(prompt(64), **wrong)


def test_everybody_sees_his_own_pins_only():
    core, _ = make_core()
    mine = core.pins.pin(prompt(32), owner="me")
    assert core.pins.get(mine.id, scope="you") is None
    assert core.pins.unpin(mine.id, scope="you") is None
    assert core.pins.list(scope="you") == []
    assert core.pins.get("nonsense") is None
    assert core.pins.get(mine.id, scope="me") == core.pins.get(mine.id)
    assert core.pins.unpin(mine.id, scope="me") is not None


def test_what_a_reader_has_seen_of_the_pins_does_not_change_under_it():
    core, _ = make_core(num_blocks=40, max_model_len=160)
    first = core.pins.pin(prompt(32))
    seen = core.pins.by_block()
    assert seen is core.pins.by_block(), "no copy while nothing changes"
    before = dict(seen)
    second = core.pins.pin(prompt(48))
    core.pins.unpin(first.id)
    assert seen == before
    assert set(core.pins.by_block().values()) == {(second.id,)}
    core.check_integrity()


def test_the_greatest_request_runs_beside_full_pins():
    core, _ = make_core(num_blocks=40, max_model_len=160)
    for i in range(5):
        core.pins.pin(prompt(80, seed=10 + i))
        run_plain(core, f"pinned-{i}", prompt(80, seed=10 + i))
    assert core.pool.num_kept == 19
    run_plain(core, "big", prompt(150, seed=50))
    for i in range(3):
        core.add(request(f"many-{i}", prompt(120, seed=60 + i)))
    assert len(Collector(core).run().tokens) == 3
    core.check_integrity()


def test_a_pin_may_go_while_its_blocks_are_restored_or_spilled():
    disk = FakeDisk()
    tiered = pinned_core(disk=disk)
    run(tiered, request("a", prompt(64)))
    report = tiered.core.pins.pin(prompt(64), tier=Tier.HOST)
    tiered.core.work_idle()
    assert tiered.copies.launched
    tiered.core.pins.unpin(report.id)
    tiered.settle()
    churn(tiered, 10)
    assert where(tiered, prompt(64)) == "k" * 8
    again = tiered.core.pins.pin(prompt(64), tier=Tier.DEVICE)
    tiered.settle()
    tiered.core.add(request("b", [*prompt(64), 1]))
    tiered.core.step()
    tiered.disk.complete()
    collector = Collector(tiered.core)
    collector.step()
    assert any(kind == "load" for kind, *_ in disk.pending)
    tiered.core.pins.unpin(again.id)
    check(tiered)
    while tiered.core.has_work:
        collector.step()
        while tiered.crank():
            pass
    assert collector.tokens["b"] == expected_tokens([*prompt(64), 1], 4)
    check(tiered)


def test_a_store_that_forgot_is_told_again():
    disk = FakeDisk()
    tiered = pinned_core(disk=disk)
    report = tiered.core.pins.pin(prompt(64))
    assert not tiered.core.pins.is_saved(report.id)
    tiered.settle()
    assert tiered.core.pins.is_saved(report.id)
    # Another process gives the pin up.
    disk.pin_records.clear()
    tiered.clock.now_s += 10
    tiered.core.pins.list()
    tiered.settle()
    assert tiered.core.pins.list() == []
    check(tiered)


def test_a_damaged_block_is_missing_until_it_is_there_again():
    disk = FakeDisk()
    tiered = pinned_core(disk=disk)
    run(tiered, request("a", prompt(64)))
    report = tiered.core.pins.pin(prompt(64))
    tiered.settle()
    churn(tiered, 10)
    tiered.settle()
    hashes = list(tiered.core.pins._chain(prompt(64), b""))
    disk.remove(hashes[4])
    run(tiered, request("b", [*prompt(64), 1]))
    tiered.settle()
    churn(tiered, 10)
    tiered.clock.now_s += 10
    tiered.core.pins.list()
    tiered.settle()
    assert tiered.core.pins.get(report.id).num_present == 8
    assert where(tiered, prompt(64)) == "k" * 8
    check(tiered)
