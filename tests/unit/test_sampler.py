"""Tokens are drawn from the distribution asked for, and a request's draws are its own affair."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.sampler import Sampler
from tieredkv.sequence import Sequence
from tieredkv.types import EngineRequest, SamplingParams

EOS = 2


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, request_id: str = "r", **sampling
) -> Sequence:
    sampling.setdefault("max_tokens", None)
    request = EngineRequest(request_id, prompt or [5], SamplingParams(**sampling), eos_token_ids=frozenset({EOS}))
    result = Sequence(request, b"\0" * 32)
    result.token_ids += output or []
    return result


def reference_probabilities(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The distribution in plain Python, step by step as documented; equal logits rank by id."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    weight = {i: math.exp((logits[i] - best) / temperature) for i in order}
    weight = {i: w for i, w in weight.items() if w >= min_p}
    if top_k > 0:
        weight = dict(list(weight.items())[:top_k])
    total, before, kept = sum(weight.values()), 0.0, {}
    for i, w in weight.items():
        if kept and before >= top_p * total:
            break
        kept[i] = w
        before += w
    total = sum(kept.values())
    return [kept.get(i, 0.0) / total for i in range(len(logits))]


def draws(logits: torch.Tensor, count: int, **sampling) -> Counter[int]:
    """`count` draws from one row of logits, by as many requests with different seeds."""
    rows = [sequence(seed=seed, **sampling) for seed in range(count)]
    return Counter(t.token_id for t in Sampler().sample(logits.expand(count, -1), rows))


def chi_square_limit(degrees: int) -> float:
    """A value that chi-square exceeds about once in 10^6 (Wilson and Hilferty's approximation); seeds are fixed anyway."""
    if degrees == 0:
        return 1e-9
    z, v = 4.75, 2 / (9 * degrees)
    return degrees * (1 - v + z * math.sqrt(v)) ** 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 0.999, "temperature": 4.0},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(sampling, dtype):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(7)).to(dtype) * 2
    count = 4000
    expected = reference_probabilities(logits[0].tolist(), **sampling)
    seen = draws(logits, count, **sampling)
    assert all(expected[token] > 0 for token in seen)
    # Tokens expected less than five times are counted together, as the test demands.
    bins = [(seen[i], p * count) for i, p in enumerate(expected) if p * count >= 5]
    rare = [(seen[i], p * count) for i, p in enumerate(expected) if 0 < p * count < 5]
    if sum(e for _, e in rare) >= 5:
        bins.append((sum(s for s, _ in rare), sum(e for _, e in rare)))
    assert sum((s - e) ** 2 / e for s, e in bins) < chi_square_limit(len(bins) - 1)


def test_top_p_is_exact_where_the_first_look_is_too_narrow():
    logits = torch.zeros(1, 3000)  # every token has the same share: 90 % of the mass are 2700 tokens
    seen = draws(logits, 3000, top_p=0.9)
    assert max(seen) < 2700
    assert len([t for t in seen if t >= 256]) > 1000


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_filters_never_let_another_token_through(data):
    vocab = data.draw(st.integers(2, 400))
    # Few different values: ties at the border are the rule, not the exception.
    values = data.draw(st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=vocab, max_size=vocab))
    sampling = {
        "temperature": data.draw(st.sampled_from([1e-6, 0.3, 1.0, 50.0])),
        "top_k": data.draw(st.sampled_from([-1, 0, 1, 2, 7, 64, 65, 1000])),
        "top_p": data.draw(st.sampled_from([1e-9, 0.4, 0.95, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.2, 1.0])),
    }
    allowed = reference_probabilities(values, **sampling)
    # One more rounding step than the reference's: a token at the very border may be in one and not in the other.
    wider = reference_probabilities(values, **(sampling | {"top_p": min(1.0, sampling["top_p"] + 1e-6)}))
    seen = draws(torch.tensor([values]), 20, **sampling)
    assert all(allowed[token] > 0 or wider[token] > 0 for token in seen)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_draw_depends_on_nothing_but_its_own_request(seed, others):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        {},
        {"top_k": 3},
        {"top_k": 90},
        {"top_p": 0.7},
        {"top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}},
        {"logprobs": 4},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ]
    logits = torch.randn(1 + others, 300, generator=generator).bfloat16()
    rows = [
        sequence(seed=rng.getrandbits(60), request_id=f"r{i}", output=[7] * rng.randrange(5), **rng.choice(kinds))
        for i in range(1 + others)
    ]
    alone = [Sampler(1).sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert Sampler(2).sample(logits, rows) == alone
    order = rng.sample(range(1 + others), 1 + others)
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])
    assert shuffled == [alone[i] for i in order]


def test_equal_seeds_repeat_and_positions_differ():
    logits = torch.zeros(1, 1000)
    first = [Sampler().sample(logits, [sequence(seed=11, output=[1] * n)])[0].token_id for n in range(50)]
    again = [Sampler().sample(logits, [sequence(seed=11, output=[1] * n)])[0].token_id for n in range(50)]
    other = [Sampler().sample(logits, [sequence(seed=12, output=[1] * n)])[0].token_id for n in range(50)]
    assert first == again
    assert first != other
    assert len(set(first)) > 40


def test_requests_without_a_seed_differ_by_id_and_follow_the_default_seed():
    logits = torch.zeros(1, 10**6)

    def token(sampler: Sampler, request_id: str) -> int:
        return sampler.sample(logits, [sequence(request_id=request_id)])[0].token_id

    assert token(Sampler(3), "a") == token(Sampler(3), "a")
    assert token(Sampler(3), "a") != token(Sampler(3), "b")
    assert token(Sampler(3), "a") != token(Sampler(4), "a")
    assert token(Sampler(), "a") != token(Sampler(), "a")


def test_greedy_takes_the_largest_and_leaves_the_logits_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    rows = [sequence(temperature=0.0) for _ in range(3)] + [sequence(seed=1, repetition_penalty=2.0) for _ in range(3)]
    tokens = [t.token_id for t in Sampler().sample(logits, rows)]
    assert tokens[:3] == logits[:3].argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_penalties_are_vllms():
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5, 0.0]])
    cases = [
        # The repetition penalty covers prompt and output, divides positive logits and multiplies negative ones.
        ({"repetition_penalty": 4.0}, [0], [1], [0.5, -4.0, 1.0, 0.5, 0.0]),
        ({"presence_penalty": 1.5}, [0], [2, 2], [2.0, -1.0, -0.5, 0.5, 0.0]),
        ({"frequency_penalty": 0.75}, [0], [2, 2, 3], [2.0, -1.0, -0.5, -0.25, 0.0]),
        ({"logit_bias": {4: 3.0, 0: -1.0, 99: 7.0}}, [0], [], [1.0, -1.0, 1.0, 0.5, 3.0]),
    ]
    for sampling, prompt, output, edited in cases:
        count = 3000
        rows = [sequence(prompt, output, seed=seed, **sampling) for seed in range(count)]
        seen = Counter(t.token_id for t in Sampler().sample(logits.expand(count, -1), rows))
        expected = reference_probabilities(edited)
        assert sum((seen[i] - p * count) ** 2 / (p * count) for i, p in enumerate(expected)) < chi_square_limit(4)
        greedy = sequence(prompt, output, temperature=0.0, **sampling)
        assert Sampler().sample(logits, [greedy])[0].token_id == max(range(5), key=edited.__getitem__)


def test_min_tokens_forbids_every_end_until_it_is_reached():
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0, 5.0]])
    for output, expected in (([], 4), ([1], 4), ([1, 1], EOS)):
        row = sequence(output=output, temperature=0.0, min_tokens=2, stop_token_ids=(3, 77))
        assert Sampler().sample(logits, [row])[0].token_id == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(2, 60))
def test_logprobs_are_the_raw_distributions(seed, wanted, vocab):
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        sequence(seed=seed, logprobs=wanted, temperature=0.2, top_k=2, logit_bias={0: 50.0}),
        sequence(temperature=0.0),
    ]
    first, second = Sampler().sample(logits, rows)
    assert second.logprob is None
    found = first.logprob
    assert found is not None
    raw = torch.log_softmax(logits[0].double(), -1).tolist()
    assert found.token_id == first.token_id
    assert found.logprob == pytest.approx(raw[first.token_id], abs=1e-4)
    assert found.rank == 1 + sum(value > raw[first.token_id] for value in raw)
    assert [i for i, _ in found.top] == sorted(range(vocab), key=lambda i: -raw[i])[:wanted]
    assert [value for _, value in found.top] == pytest.approx([raw[i] for i, _ in found.top], abs=1e-4)


def test_broken_logits_give_a_token_of_the_vocabulary():
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.full((4, 10), value)
        rows = [sequence(seed=1), sequence(seed=1, top_k=3), sequence(seed=1, top_p=0.5), sequence(temperature=0.0)]
        assert all(0 <= t.token_id < 10 for t in Sampler().sample(logits, rows))


def test_rounding_of_logits_changes_a_draw_only_at_a_near_tie():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 49_152, generator=generator) * 3
    noisy = logits + torch.randn(logits.shape, generator=generator) * 2e-6
    for sampling in ({}, {"temperature": 0.7, "top_k": 50}, {"top_p": 0.9}):
        rows = [sequence(seed=seed, **sampling) for seed in range(400)]
        first = [t.token_id for t in Sampler().sample(logits.expand(400, -1), rows)]
        second = [t.token_id for t in Sampler().sample(noisy.expand(400, -1), rows)]
        assert sum(a != b for a, b in zip(first, second, strict=True)) <= 1
        assert len(set(first)) > 20


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-39, 1e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 5
    assert draws(logits, 20, temperature=temperature) == Counter({int(logits.argmax()): 20})


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 0.01}, {"repetition_penalty": 100.0}, {"temperature": 1e-5}]
)
def test_extreme_settings_still_draw_likely_tokens(sampling):
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 5
    best = set(logits[0].topk(250).indices.tolist())
    assert set(draws(logits, 50, **sampling)) <= best


def test_when_every_token_is_forbidden_the_likeliest_comes():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 5
    for temperature in (0.0, 1e-4):
        seen = draws(logits, 5, temperature=temperature, stop_token_ids=tuple(range(500)), min_tokens=2)
        assert seen == Counter({int(logits.argmax()): 5})


def test_seeds_are_64_bits_whatever_their_sign():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    one, same, other = (
        Sampler().sample(logits, [sequence(seed=seed)])[0].token_id for seed in (-1, 2**64 - 1, 2**63 - 1)
    )
    assert one == same != other
