"""Cache, scheduler and core together, over a model that notices every wrong block.

The properties: tokens never depend on what is cached or who shares a batch; sources add up; nothing leaks; work that is
cached or in progress is not done twice.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import VOCAB_SIZE, Collector, ManualClock, expected_tokens, make_core, next_token, request
from tieredkv.errors import InvariantError, RequestError
from tieredkv.hashing import full_block_hashes, root_hash
from tieredkv.types import FinishReason, SamplingParams


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB_SIZE for i in range(length)]


def run_all(core, *requests) -> Collector:
    for each in requests:
        core.add(each)
    return Collector(core).run()


@pytest.mark.parametrize("budget", [8, 13, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 100])
def test_cold_and_warm_answers_are_equal(budget, length):
    core, runner = make_core(max_num_batched_tokens=budget)
    cold = run_all(core, request("cold", prompt(length)))
    before = runner.num_computed_tokens
    warm = run_all(core, request("warm", prompt(length)))
    assert cold.tokens["cold"] == warm.tokens["warm"] == expected_tokens(prompt(length), 4)
    reused = min(length // 8 * 8, length - 1)
    assert warm.sources["warm"].device == reused
    assert warm.sources["warm"].total == length
    assert runner.num_computed_tokens - before == length - reused + 3


def test_of_a_prompt_that_is_there_in_full_one_token_is_computed_and_nothing_written():
    core, runner = make_core()
    first = run_all(core, request("a", prompt(32)))
    held = {core.pool.find(h) for h in full_block_hashes(root_hash(b"n" * 32), prompt(32), 8)}
    rows = [block_id * 8 + i for block_id in held for i in range(8)]
    before, computed = runner.slots[rows].copy(), runner.num_computed_tokens
    again = run_all(core, request("b", prompt(32), max_tokens=1), request("c", prompt(32), max_tokens=1))
    assert again.sources["b"].device == again.sources["c"].device == 31
    assert again.tokens["b"] == again.tokens["c"] == first.tokens["a"][:1]
    assert runner.num_computed_tokens - computed == 2
    assert (runner.slots[rows] == before).all()


def test_the_next_chat_turn_reuses_the_answer():
    core, _ = make_core()
    first = run_all(core, request("a", prompt(20), max_tokens=13))
    turn = prompt(20) + first.tokens["a"] + prompt(5, seed=9)
    # Of 20 + 13 tokens the last one was never computed; 32 lie in full blocks.
    assert run_all(core, request("b", turn)).sources["b"].device == 32


def test_without_prefix_caching_nothing_is_reused():
    core, runner = make_core(enable_prefix_caching=False)
    run_all(core, request("a", prompt(40)), request("b", prompt(40)))
    assert run_all(core, request("c", prompt(40))).sources["c"].cached == 0
    assert runner.num_computed_tokens == 3 * 43
    assert core.pool.num_committed == 0


def test_tenants_share_nothing():
    core, _ = make_core()
    run_all(core, request("a", prompt(40), tenant=b"t" * 32))
    assert run_all(core, request("b", prompt(40), tenant=b"u" * 32)).sources["b"].device == 0
    assert run_all(core, request("c", prompt(40))).sources["c"].device == 0
    assert run_all(core, request("d", prompt(40), tenant=b"t" * 32)).sources["d"].device == 39


def test_identical_prompts_are_computed_once():
    core, runner = make_core(num_blocks=128)
    result = run_all(core, *(request(f"r{i}", prompt(60)) for i in range(8)))
    assert all(tokens == expected_tokens(prompt(60), 4) for tokens in result.tokens.values())
    # One of them computes 60 tokens, the others adopt 56 and compute 4; then three decodes each.
    assert runner.num_computed_tokens == 60 + 7 * 4 + 8 * 3


def test_followers_wait_even_when_the_leader_needs_several_steps():
    core, runner = make_core(num_blocks=128, max_num_batched_tokens=16)
    result = run_all(core, *(request(f"r{i}", prompt(100)) for i in range(4)))
    assert runner.num_computed_tokens == 100 + 3 * 4 + 4 * 3
    assert all(tokens == expected_tokens(prompt(100), 4) for tokens in result.tokens.values())


def test_waiting_for_another_request_is_bounded():
    clock = ManualClock()
    core, _ = make_core(num_blocks=128, clock=clock, single_flight_timeout=5)
    core.add(request("leader", prompt(30)))
    core.add(request("follower", prompt(30)))
    # The leader never gets anywhere: its step is planned again and again, but not run.
    for waited_s in (0.0, 2.0, 2.0):
        clock.now_s += waited_s
        assert [part.sequence.request_id for part in core.scheduler.schedule()] == ["leader"]
    clock.now_s += 2.0
    assert [part.sequence.request_id for part in core.scheduler.schedule()] == ["leader", "follower"]
    result = Collector(core).run()
    assert result.tokens["leader"] == result.tokens["follower"] == expected_tokens(prompt(30), 4)


def test_single_flight_can_be_turned_off():
    core, runner = make_core(single_flight_timeout=0)
    run_all(core, request("a", prompt(30)), request("b", prompt(30)))
    assert [name for name, *_ in runner.batches[0]] == ["a", "b"]
    assert runner.num_computed_tokens == 2 * 33


def test_followers_go_on_when_the_leader_is_cancelled():
    core, _ = make_core(max_num_batched_tokens=16)
    core.add(request("leader", prompt(200)))
    core.add(request("follower", prompt(200)))
    collector = Collector(core)
    collector.step()
    core.abort("leader")
    collector.run()
    assert collector.reasons == {"leader": FinishReason.ABORT, "follower": FinishReason.LENGTH}
    assert collector.sources["follower"].device == 16
    assert collector.tokens["follower"] == expected_tokens(prompt(200), 4)


def test_unrelated_requests_overtake_a_waiting_follower():
    core, runner = make_core()
    core.add(request("leader", prompt(30)))
    core.add(request("follower", prompt(30)))
    core.add(request("other", prompt(10, seed=5)))
    collector = Collector(core).run()
    assert [[name for name, *_ in batch] for batch in runner.batches[:2]] == [
        ["leader", "other"],
        ["leader", "other", "follower"],
    ]
    assert collector.tokens["other"] == expected_tokens(prompt(10, seed=5), 4)


def test_decodes_go_first_and_the_budget_holds():
    core, runner = make_core(max_num_batched_tokens=16)
    core.add(request("a", prompt(4), max_tokens=30))
    collector = Collector(core)
    collector.step()
    core.add(request("b", prompt(90, seed=3)))
    collector.run()
    for batch in runner.batches:
        sizes = [num_new for *_, num_new in batch]
        assert sum(sizes) <= 16
        assert sizes == sorted(sizes, key=lambda n: n != 1)
    # While b is computed in parts, a gets a token in every step.
    during = [b for b in runner.batches if any(name == "b" and n > 1 for name, _, n in b)]
    assert len(during) >= 6
    assert all(any(name == "a" for name, *_ in b) for b in during)


def test_preemption_changes_no_token_and_resumes_from_the_cache():
    core, runner = make_core(num_blocks=14, max_model_len=100)
    requests = [request(f"r{i}", prompt(20, seed=i), max_tokens=40) for i in range(4)]
    result = run_all(core, *requests)
    assert core.scheduler.num_preemptions > 0
    for i in range(4):
        assert result.tokens[f"r{i}"] == expected_tokens(prompt(20, seed=i), 40)
    # Recomputation is less than computing everything twice.
    assert runner.num_computed_tokens < 2 * 4 * 60


def test_preemption_without_prefix_caching():
    core, _ = make_core(num_blocks=14, max_model_len=100, enable_prefix_caching=False)
    result = run_all(core, *(request(f"r{i}", prompt(20, seed=i), max_tokens=40) for i in range(4)))
    assert core.scheduler.num_preemptions > 0
    for i in range(4):
        assert result.tokens[f"r{i}"] == expected_tokens(prompt(20, seed=i), 40)


def test_cancellation_frees_blocks_within_a_step():
    core, _ = make_core()
    core.add(request("a", prompt(100)))
    collector = Collector(core)
    collector.step()
    assert core.pool.num_free < core.pool.num_usable
    core.abort("a")
    assert core.pool.num_free == core.pool.num_usable
    collector.step()
    assert collector.reasons == {"a": FinishReason.ABORT}
    assert not core.has_work
    core.abort("a")
    core.abort("never seen")


def test_a_failing_step_ends_its_requests_and_nothing_else():
    core, runner = make_core()
    run_all(core, request("before", prompt(40)))
    core.add(request("a", prompt(40, seed=2)))
    runner.fail_next = RuntimeError("out of luck")
    result = Collector(core).run()
    assert result.reasons == {"a": FinishReason.ERROR}
    after = run_all(core, request("b", prompt(40)), request("c", prompt(40, seed=2)))
    assert after.sources["b"].device == 39
    assert after.sources["c"].device == 0
    assert after.tokens["c"] == expected_tokens(prompt(40, seed=2), 4)


def test_stop_tokens_and_limits():
    tokens = expected_tokens(prompt(10), 10)
    core, _ = make_core()
    stop = request("stop", prompt(10), max_tokens=10, stop_token_ids=(tokens[3],))
    eos = request("eos", prompt(10), max_tokens=10)
    eos.eos_token_ids = frozenset({tokens[2]})
    ignore = request("ignore", prompt(10), max_tokens=10, ignore_eos=True)
    ignore.eos_token_ids = frozenset({tokens[2]})
    late = request("late", prompt(10), max_tokens=10, min_tokens=6, stop_token_ids=(tokens[3],))
    result = run_all(core, stop, eos, ignore, late)
    assert result.tokens == {"stop": tokens[:4], "eos": tokens[:3], "ignore": tokens, "late": tokens}
    assert result.reasons["stop"] is result.reasons["eos"] is FinishReason.STOP
    assert result.reasons["ignore"] is FinishReason.LENGTH


def test_generation_ends_at_the_models_length():
    core, _ = make_core(max_model_len=32)
    result = run_all(core, request("a", prompt(30), max_tokens=None))
    assert result.tokens["a"] == expected_tokens(prompt(30), 2)
    assert result.reasons["a"] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("x", []), "prompt"),
        (request("x", prompt(256)), "prompt"),
        (request("x", prompt(250), max_tokens=7), "max_tokens"),
        (request("x", [VOCAB_SIZE]), "prompt"),
        (request("x", [-1]), "prompt"),
        (request("x", [1], stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        (request("x", [1], logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_by_name(bad, param):
    core, _ = make_core()
    with pytest.raises(RequestError) as caught:
        core.add(bad)
    assert caught.value.param == param
    assert not core.has_work


def test_a_request_id_is_used_once_at_a_time():
    core, _ = make_core()
    core.add(request("a", prompt(5)))
    with pytest.raises(RequestError):
        core.add(request("a", prompt(5)))


def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    core, runner = make_core()
    with pytest.raises(InvariantError):
        type(core)(
            runner,
            __import__("tieredkv").Config.load({"block_size": 8}),
            namespace=b"n" * 32,
            max_model_len=10_000,
            vocab_size=VOCAB_SIZE,
            metrics=core.metrics,
        )


def test_the_cache_survives_as_long_as_there_is_room_and_forgets_on_clear():
    core, _ = make_core()
    run_all(core, request("a", prompt(80)))
    core.add(request("running", prompt(40, seed=2), max_tokens=20))
    collector = Collector(core)
    collector.step()
    cleared = core.clear()
    assert cleared.removed == 10
    assert cleared.in_use == 5
    collector.run()
    assert run_all(core, request("b", prompt(80))).sources["b"].device == 0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    budget=st.integers(8, 64),
    num_blocks=st.integers(17, 64),
    shared=st.integers(0, 50),
)
def test_answers_never_depend_on_company(lengths, budget, num_blocks, shared):
    core, _ = make_core(num_blocks=num_blocks, max_model_len=128, max_num_batched_tokens=budget)
    prompts = {f"r{i}": prompt(shared) + prompt(n, seed=i + 2) for i, n in enumerate(lengths)}
    result = run_all(core, *(request(name, p, max_tokens=9) for name, p in prompts.items()))
    for name, tokens in prompts.items():
        assert result.tokens[name] == expected_tokens(tokens, 9)
        assert result.sources[name].total == len(tokens)


class CoreMachine(RuleBasedStateMachine):
    """Requests come, go and are cut off in any order over a pool that is too small; every token is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.core, self.runner = make_core(
            num_blocks=20, block_size=8, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=4, clock=self.clock
        )
        self.collector = Collector(self.core)
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.count = 0

    @rule(shared=st.integers(0, 3), own=st.integers(1, 40), tenant=st.sampled_from([b"", b"x"]), n=st.integers(1, 20))
    def add(self, shared, own, tenant, n):
        name = f"r{self.count}"
        self.count += 1
        self.prompts[name] = prompt(shared * 10, seed=1) + prompt(own, seed=own % 3 + 2)
        self.core.add(request(name, self.prompts[name], max_tokens=n, tenant=tenant))

    @rule()
    def step(self):
        self.clock.now_s += 0.1
        self.collector.step()

    @precondition(lambda self: self.prompts.keys() - self.collector.reasons.keys())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.prompts.keys() - self.collector.reasons.keys())))
        self.core.abort(name)
        self.aborted.add(name)

    @rule()
    def clear(self):
        self.core.clear()

    @rule()
    def wait_long(self):
        self.clock.now_s += 100

    @precondition(lambda self: self.core.has_work)
    @rule()
    def fail(self):
        self.runner.fail_next = RuntimeError("injected")

    @invariant()
    def holds(self):
        self.core.check_integrity()
        for name, tokens in self.collector.tokens.items():
            assert tokens == expected_tokens(self.prompts[name], len(tokens))
            sources = self.collector.sources[name]
            assert sources.total in (0, len(self.prompts[name]))
            if tokens:
                assert sources.total == len(self.prompts[name])

    def teardown(self):
        self.runner.fail_next = None
        self.collector.run()
        assert self.collector.reasons.keys() == self.prompts.keys()
        assert self.core.pool.num_free == self.core.pool.num_usable


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_sampling_parameters_are_checked_by_name():
    for name, value in [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("max_tokens", 0),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("stop", ("",)),
        ("seed", 2**65),
    ]:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_the_fake_model_notices_a_swapped_token():
    assert next_token([1, 2, 3]) != next_token([1, 3, 2])
