"""Choosing prefixes from a request log: never over the budget, closed under parents, and as good as can be."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from tieredkv.errors import ConfigError, RequestError
from tieredkv.request_log import choose_prefixes

BLOCK = 4


def encode(body):
    """Logged prompts are token ids here."""
    if not isinstance(body.get("prompt"), list):
        raise RequestError("no prompt")
    return [body["prompt"]]


def choose(tmp_path, requests, num_blocks, **more):
    log, output = tmp_path / "log.jsonl", tmp_path / "prompts.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in requests))
    report = choose_prefixes(
        log, output, encode, block_size=BLOCK, block_nbytes=100, budget_nbytes=100 * num_blocks + 99, **more
    )
    return report, [json.loads(line) for line in output.read_text().splitlines()]


def blocks_of(tokens, salt=None):
    """All prefixes of whole blocks, as keys."""
    return {(salt, *tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}


def random_requests(rng, count):
    heads = [[rng.randrange(9) for _ in range(rng.randrange(1, 20))] for _ in range(4)]
    return [rng.choice(heads) + [rng.randrange(9) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_its_size(tmp_path, seed):
    rng = random.Random(seed)
    prompts = random_requests(rng, 25)
    num_blocks = rng.randrange(1, 12)
    report, lines = choose(tmp_path, [{"prompt": prompt} for prompt in prompts], num_blocks)
    chosen = set().union(*(blocks_of(line["tokens"]) for line in lines)) if lines else set()
    assert len(chosen) == report.num_chosen_blocks <= num_blocks
    counts = {}
    for prompt in prompts:
        for block in blocks_of(prompt):
            counts[block] = counts.get(block, 0) + 1
    best = sorted((count for count in counts.values() if count >= 2), reverse=True)[:num_blocks]
    assert sorted((counts[block] for block in chosen), reverse=True) == best
    saved = sum(min(BLOCK * len(blocks_of(prompt) & chosen), len(prompt) - 1) for prompt in prompts)
    assert report.hit_rate == pytest.approx(saved / sum(map(len, prompts)))
    # No line is a beginning of another one.
    for a, b in itertools.permutations([line["tokens"] for line in lines], 2):
        assert b[: len(a)] != a


def test_salts_and_nesting_and_what_is_skipped(tmp_path):
    shared = list(range(8))
    report, lines = choose(
        tmp_path,
        [
            {"prompt": [*shared, 1]},
            {"body": {"prompt": [*shared, 2]}, "custom_id": "x"},
            {"request": {"prompt": [*shared, 3], "cache_salt": "s"}},
            {"prompt": [*shared, 4], "cache_salt": "s"},
            {"messages": "?"},
            ["no object"],
        ],
        100,
    )
    assert report.num_requests == 4
    assert report.num_skipped == 2
    assert "log.jsonl:5" in report.first_problem
    assert sorted((line.get("cache_salt", ""), tuple(line["tokens"])) for line in lines) == [
        ("", tuple(shared)),
        ("s", tuple(shared)),
    ]
    assert report.held_out_hit_rate is None


def test_the_later_half_tells_what_to_expect(tmp_path):
    old, new = list(range(8)), list(range(100, 108))
    requests = [{"prompt": [*new, i], "timestamp": 1000 + i} for i in range(10)]
    requests += [{"prompt": [*old, i], "timestamp": i} for i in range(10)]
    report, _ = choose(tmp_path, requests, 100)
    assert report.hit_rate == pytest.approx(8 / 9)
    # What the first half wanted, nobody wants later.
    assert report.held_out_hit_rate == 0.0
    report, _ = choose(tmp_path, [{"prompt": [*old, i]} for i in range(20)], 100)
    assert report.held_out_hit_rate == pytest.approx(8 / 9)


def test_nothing_is_worth_keeping(tmp_path):
    report, lines = choose(tmp_path, [{"prompt": [i] * 9} for i in range(5)], 100)
    assert (lines, report.num_chosen_blocks, report.hit_rate) == ([], 0, 0.0)
    report, lines = choose(tmp_path, [{"prompt": [i] * 9} for i in range(5)], 100, min_hits=1)
    assert report.num_chosen_blocks == 10
    assert oct((tmp_path / "prompts.jsonl").stat().st_mode & 0o777) == "0o600"


def test_a_log_without_requests_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no request with a prompt"):
        choose(tmp_path, [{"x": 1}], 1)
