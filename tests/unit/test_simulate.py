"""The simulator against what must hold of any cache, and against a second, plain account of the same policies."""

from __future__ import annotations

import json
import random

import pytest

from tieredkv.bench.policies import POLICIES, next_uses, replay
from tieredkv.bench.simulate import UNLIMITED, simulate
from tieredkv.bench.traces import TracedRequest, Workload, read_workload
from tieredkv.cli.main import main
from tieredkv.errors import ConfigError, RequestError
from tieredkv.types import Tier

BLOCK = 512


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Conversations of growing length, interleaved, some of them with a common system prompt."""
    rng = random.Random(5)
    fresh = iter(range(100, 1_000_000))
    conversations = [[next(fresh) for _ in range(2)] for _ in range(40)]
    for chat in conversations[:20]:
        chat[:2] = [0, 1]
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = []
    for time_ms in range(0, 300_000, 1000):
        chat = conversations[min(int(rng.expovariate(1 / 10)), 39)]
        chat += [next(fresh) for _ in range(rng.randrange(1, 4))]
        if len(chat) > 40:
            del chat[2:]
        length = len(chat) * BLOCK - rng.randrange(BLOCK)
        lines.append(json.dumps({"timestamp": time_ms, "input_length": length, "output_length": 5, "hash_ids": chat}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def workload(trace):
    return read_workload(trace, BLOCK)


def tail_first_lru(requests, capacity):
    """A plain account of least-recently-used, a prefix's tail before its head: the oldest time stamp goes."""
    stamps, time, hits = {}, 0, 0
    for blocks in requests:
        run = next((i for i, b in enumerate(blocks) if b not in stamps), len(blocks))
        hits += run
        wanted = set(blocks)
        for block in blocks:
            if block not in stamps and len(stamps) >= capacity:
                del stamps[min((b for b in stamps if b not in wanted), key=stamps.__getitem__)]
            stamps.setdefault(block, -1)
        for block in reversed(blocks):
            time += 1
            stamps[block] = time
    return hits


@pytest.mark.parametrize("capacity", [60, 120, 500])
def test_the_product_evicts_as_tail_first_lru_says(workload, capacity):
    (outcome,) = simulate(workload, ["lru"], [capacity])
    assert outcome.num_hits == tail_first_lru([r.blocks for r in workload.requests], capacity)


def test_without_limit_every_block_that_was_seen_before_hits(workload):
    seen, expected = set(), 0
    for request in workload.requests:
        run = next((i for i, b in enumerate(request.blocks) if b not in seen), len(request.blocks))
        expected += run
        seen.update(request.blocks)
    for outcome in simulate(workload, ["lru", *POLICIES], [UNLIMITED]):
        assert outcome.num_hits == expected, outcome.policy


def test_no_policy_beats_foresight(workload):
    for capacity in (60, 120, 500):
        hits = {o.policy: o.num_hits for o in simulate(workload, ["lru", *POLICIES], [capacity])}
        assert max(hits, key=hits.__getitem__) == "optimal", hits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_never_holds_more_than_its_capacity(workload, policy):
    requests = [r.blocks for r in workload.requests]
    cache = POLICIES[policy](50)
    uses = next_uses(requests)
    everything = {block for blocks in requests for block in blocks}
    for at in range(0, len(requests), 25):
        replay(cache, requests[at : at + 25], uses[at : at + 25])
        assert sum(block in cache for block in everything) <= 50


def test_tiers_below_hold_what_the_device_lost(workload):
    """A device with a large tier below it hits as a large device does, and each hit is counted in one tier."""
    (alone,) = simulate(workload, ["lru"], [60])
    (unlimited,) = simulate(workload, ["lru"], [UNLIMITED])
    for below in (
        {"host_blocks": UNLIMITED},
        {"disk_blocks": UNLIMITED},
        {"host_blocks": 100, "disk_blocks": UNLIMITED},
    ):
        (tiered,) = simulate(workload, ["lru"], [60], **below)
        assert tiered.num_hits == unlimited.num_hits, below
        assert sum(tiered.hits[Tier.DEVICE]) <= alone.num_hits
        assert tiered.num_spilled <= workload.num_unique
        assert tiered.num_stored == (workload.num_unique if "disk_blocks" in below else 0)


@pytest.mark.parametrize("below", [{"host_blocks": 4}, {"host_blocks": 63}, {"host_blocks": 200}, {"disk_blocks": 256}])
def test_a_tier_holds_what_it_is_said_to_hold(below):
    """Two prompts in turn, each as long as the device: what hits has come from the tier below, whatever its size."""
    prompts = [
        TracedRequest(tuple(bytes([who, i % 256, i // 256]) + bytes(29) for i in range(300)), 300) for who in (1, 2)
    ]
    (outcome,) = simulate(Workload("alternating", 1, tuple(prompts * 6)), ["lru"], [300], **below)
    (size,) = below.values()
    assert max(map(sum, zip(*outcome.hits.values(), strict=True))) <= size * 1.06
    (large,) = simulate(Workload("alternating", 1, tuple(prompts * 6)), ["lru"], [300], **dict.fromkeys(below, 700))
    assert large.num_hits == 10 * 300


def test_a_tier_larger_than_the_workload_ends(workload):
    small = Workload("small", 16, workload.requests[:2])
    (outcome,) = simulate(small, ["lru"], [1], host_blocks=UNLIMITED)
    assert outcome.num_hits <= small.num_blocks


def test_hit_tokens_never_cover_a_whole_prompt(workload):
    (outcome,) = simulate(workload, ["lru"], [UNLIMITED])
    assert outcome.hit_tokens(workload) <= sum(r.num_tokens - 1 for r in workload.requests)
    assert outcome.hit_tokens(workload) <= outcome.num_hits * BLOCK


def test_command_prints_json(trace, capsys):
    assert main(["simulate", str(trace), "--policy", "lru,S3-FIFO", "--blocks", "60,inf", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["policy"], r["blocks"]) for r in results] == [
        ("lru", 60),
        ("s3fifo", 60),
        ("lru", None),
        ("s3fifo", None),
    ]
    assert all(0 < r["hit_rate"] < 1 for r in results)


def test_command_turns_sizes_into_blocks_and_rates_into_time(trace, capsys):
    flags = ["--kv-bytes-per-token", "1024", "--blocks", "30MiB", "--prefill-rate", "1000", "--policy", "lru", "--json"]
    assert main(["simulate", str(trace), *flags]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["blocks"] == 60
    assert result["saved_s"] == result["hit_tokens"] / 1000


def test_command_draws(trace, tmp_path, capsys):
    picture = tmp_path / "hits.png"
    flags = ["--policy", "lru", "--blocks", "60,500", "--host-blocks", "200", "--plot", str(picture)]
    assert main(["simulate", str(trace), *flags]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("device", "host", "disk", "restored"))
    assert "requests" in next(line for line in shown.splitlines() if "different ones" in line)
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_request_logs_are_tokenized(tmp_path, capsys):
    log = tmp_path / "requests.jsonl"
    tokens = list(range(1, 100))
    bodies = [{"prompt": tokens}, {"body": {"prompt": [*tokens, 7]}, "timestamp": 3.5}, {"prompt": "Hello"}]
    log.write_text("\n".join(map(json.dumps, bodies)))
    assert (
        main(["simulate", str(log), "--model", "smollm2-135m", "--blocks", "1MiB,inf", "--policy", "lru", "--json"])
        == 0
    )
    small, unlimited = json.loads(capsys.readouterr().out)["results"]
    assert unlimited["hit_tokens"] == 96
    assert small["blocks"] == 1024**2 // (16 * 23_040)


def test_a_log_is_read_as_preloading_reads_it(tmp_path, capsys):
    """Several prompts in a body, options of the endpoint, salts, lines of a prompt file; what holds no prompt is counted."""
    log = tmp_path / "requests.jsonl"
    head = list(range(1, 49))
    chat = {"messages": [{"role": "user", "content": "word " * 40}]}
    lines = [
        {"prompt": "x", "model": 3, "tools": []},
        {"prompt": [[*head, 5], [*head, 6]]},
        {"tokens": [*head, 7], "name": "from a prompt file"},
        {"request": {"prompt": [*head, 8], "cache_salt": "apart"}},
        {"body": chat},
        {"body": chat | {"add_generation_prompt": False}},
        {"input": "an embedding"},
        {"body": {"messages": [{"role": "nobody"}]}},
    ]
    log.write_text("\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    flags = [str(log), "--model", "smollm2-135m", "--blocks", "inf", "--policy", "lru"]
    assert main(["simulate", *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["workload"]["requests"] == 7
    assert answer["workload"]["skipped_lines"] == 3
    # The second prompt and the one with `tokens` find the head; the last chat finds the one before it.
    assert answer["results"][0]["hit_tokens"] >= 2 * 48 + 32
    assert main(["simulate", *flags]) == 0
    assert "3 lines without a prompt; the first: " in capsys.readouterr().out


def test_a_log_needs_a_tokenizer_and_a_prompt(tmp_path):
    log = tmp_path / "requests.jsonl"
    log.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match="--model"):
        read_workload(log, 16)

    def refuse(body):
        raise RequestError("no prompt here")

    with pytest.raises(ConfigError, match=r"holds no requests.*jsonl:1: no prompt here"):
        read_workload(log, 16, refuse)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"hash_ids": [1, "a"]}', "whole numbers"),
        ('{"hash_ids": [1], "input_length": 100000}', "--block-tokens"),
        ('{"hash_ids": [1], "input_length": -1}', "not negative"),
        ('{"prompt": "x"}', "whole numbers"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, complaint):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n\n' + line)
    with pytest.raises(ConfigError, match=f"(?s){complaint}.*|trace.jsonl:3") as caught:
        read_workload(path, BLOCK)
    assert "trace.jsonl:3" in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--policy", "mru"],
        ["--blocks", "0"],
        ["--blocks", "many"],
        ["--blocks", "1GiB"],
        ["--blocks", "²"],
        ["--policy", "fifo", "--host-blocks", "5"],
        ["--host-blocks", "3"],
        ["--disk-blocks", "5"],
        ["--plot", "/does/not/exist/picture.png"],
        ["--block-size", "17"],
        ["--plot", "picture.nonsense", "--policy", "lru", "--blocks", "10"],
    ],
)
def test_bad_flags_are_one_line_and_status_2(trace, flags, capsys):
    assert main(["simulate", str(trace), *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("tieredkv: error: ")


def test_a_missing_file_and_an_empty_one_are_refused(tmp_path, capsys):
    assert main(["simulate", str(tmp_path / "none.jsonl")]) == 2
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["simulate", str(tmp_path / "empty.jsonl")]) == 2
    assert "holds no requests" in capsys.readouterr().err
