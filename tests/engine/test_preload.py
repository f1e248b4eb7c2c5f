"""Preloading: each block is computed once, what is reported is there, and a server on the store computes none of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.engine.truth import load, random_prompt, stock_tokens
from tests.server.test_process import serving
from tieredkv.cli.main import main
from tieredkv.config import Config
from tieredkv.engine import Engine
from tieredkv.preloader import Preloader
from tieredkv.storage.disk import DiskStore
from tieredkv.types import Tier
from tieredkv.warm_job import WarmPrompt
from tieredkv.warming import Warming

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
HEAD = random_prompt(8 * BLOCK, seed=0)
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "24")


@pytest.fixture(scope="module")
def model(folder):
    return folder("llama")


def write(path: Path, lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def branches(count: int, length: int = 40, head=HEAD) -> list[dict]:
    return [{"tokens": [*head, *random_prompt(length, seed=1 + i)], "name": f"branch-{i}"} for i in range(count)]


def unique_blocks(lines) -> int:
    return len({tuple(line["tokens"][:end]) for line in lines for end in range(BLOCK, len(line["tokens"]) + 1, BLOCK)})


@pytest.fixture
def run(model, tmp_path, capsys):
    """Run the command in this process; returns its exit code and its report."""

    def call(*arguments, store="store"):
        capsys.readouterr()
        directory = str(tmp_path / store)
        code = main(
            ["preload", *map(str, arguments), "--model", str(model), *SETTINGS, "--disk-path", directory, "--json"]
        )
        text = capsys.readouterr().out
        return code, json.loads(text) if text else None

    return call


def stored(directory: Path) -> int:
    store = DiskStore.open(directory, readonly=True)
    try:
        report = store.verify()
        assert report.ok, report.problems
        return store.usage().num_blocks
    finally:
        store.close()


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_a_shared_prefix_is_computed_once_however_small_the_pool(run, tmp_path, order):
    """The pool holds 23 blocks, the prompts 8 + 2 x 3 + 30 x 2 and more; two families, interleaved."""
    other = random_prompt(5 * BLOCK, seed=99)
    lines = [line for pair in zip(branches(15), branches(15, 33, other), strict=True) for line in pair][::order]
    file = write(tmp_path / "p.jsonl", lines)
    code, report = run(file)
    expected = unique_blocks(lines)
    assert (code, report["complete"], report["not_stored"]) == (0, True, [])
    assert report["computed_tokens"] == report["new_tokens"] == expected * BLOCK
    assert report["saved_blocks"] == stored(tmp_path / "store") == expected
    # And again: nothing to compute, nothing to write.
    code, report = run(file)
    assert (code, report["new_blocks"], report["stored_blocks"]) == (0, 0, expected)
    assert "computed_tokens" not in report
    assert stored(tmp_path / "store") == expected


def test_what_is_stored_is_brought_up_not_computed(run, tmp_path):
    run(write(tmp_path / "a.jsonl", branches(2)))
    more = [*branches(2), {"tokens": [*branches(1)[0]["tokens"], *random_prompt(64, seed=7)]}, *branches(4)[2:]]
    code, report = run(write(tmp_path / "b.jsonl", more))
    assert code == 0
    assert report["computed_tokens"] == (unique_blocks(more) - unique_blocks(branches(2))) * BLOCK
    assert report["saved_blocks"] * BLOCK == report["computed_tokens"]


def test_a_dry_run_says_what_a_run_does_and_does_nothing(run, tmp_path):
    lines = [*branches(3), {"prompt": "short"}, {"tokens": HEAD}]
    file = write(tmp_path / "p.jsonl", lines)
    code, plan = run(file, "--dry-run", "--verbose")
    assert code == 0
    assert not (tmp_path / "store").exists()
    code, report = run(file)
    assert (code, report["computed_tokens"], report["saved_blocks"]) == (0, plan["new_tokens"], plan["new_blocks"])
    assert [line["line"] for line in plan["lines"]] == [1, 2, 3, 4, 5]
    assert sum(line["new_tokens"] for line in plan["lines"]) == plan["new_tokens"]
    assert plan["prompts_below_a_block"] == 1
    code, plan = run(file, "--dry-run")
    assert (plan["new_tokens"], plan["stored_blocks"]) == (0, report["blocks"])


def test_lengths_round_the_block_size(run, tmp_path):
    lines = [{"tokens": random_prompt(length, seed=length)} for length in (1, 15, 16, 17, 31, 32, 33, 254, 255)]
    code, report = run(write(tmp_path / "p.jsonl", lines))
    assert code == 0
    assert report["saved_blocks"] == unique_blocks(lines) == stored(tmp_path / "store")
    assert report["prompts_below_a_block"] == 2


def test_a_store_that_is_too_small(run, tmp_path):
    """Pinned prompts come first, then those that come first; what does not fit is named, what fits is whole."""
    lines = [{"tokens": random_prompt(160, seed=i), "name": f"n{i}"} for i in range(8)]
    lines[7]["pin"] = True
    file = write(tmp_path / "p.jsonl", lines)
    code, plan = run(file, "--disk-size", "1MiB", "--dry-run")
    assert code == 1
    code, report = run(file, "--disk-size", "1MiB")
    assert code == 1
    left_out = [line["name"] for line in report["not_stored"]]
    assert left_out == [line["name"] for line in plan["not_stored"]]
    assert "n7" not in left_out
    assert "n0" not in left_out
    assert left_out
    assert all("does not fit" in line["reason"] for line in report["not_stored"])
    assert stored(tmp_path / "store") == 10 * (8 - len(left_out))
    assert report["pins"][0]["outcome"] == "accepted"
    # Its size stays what it is, and so does what it holds.
    again = run(file)
    assert (again[0], again[1]["not_stored"]) == (1, report["not_stored"])
    assert again[1]["computed_tokens"] == 0


def test_compressed_blocks_leave_room_for_more(run, tmp_path):
    lines = [{"tokens": random_prompt(160, seed=i), "name": f"n{i}"} for i in range(12)]
    file = write(tmp_path / "p.jsonl", lines)
    _, raw = run(file, "--disk-size", "1MiB", store="raw")
    _, packed = run(file, "--disk-size", "1MiB", "--kv-codec", "zstd", store="packed")
    assert 0 < len(packed["not_stored"]) < len(raw["not_stored"])
    # A file that a store of this size holds wholly, but only compressed.
    fitting = write(tmp_path / "q.jsonl", lines[: 12 - len(packed["not_stored"])])
    _, report = run(fitting, "--disk-size", "1MiB", "--kv-codec", "zstd", store="whole")
    assert report["not_stored"] == []
    assert stored(tmp_path / "packed") >= 10 * (12 - len(packed["not_stored"]))


def test_pins_are_made_once(run, tmp_path):
    lines = [branches(1)[0] | {"pin": True}, branches(2)[1] | {"pin": True, "ttl": "1h"}, {"tokens": HEAD}]
    file = write(tmp_path / "p.jsonl", lines)
    for _ in range(2):
        code, report = run(file)
        assert code == 0
        assert [(pin["name"], pin["outcome"]) for pin in report["pins"]] == [
            ("branch-0", "accepted"),
            ("branch-1", "accepted"),
        ] or [(pin["name"], pin["outcome"]) for pin in report["pins"]] == [
            ("branch-1", "accepted"),
            ("branch-0", "accepted"),
        ]
        store = DiskStore.open(tmp_path / "store", readonly=True)
        records = store.pins().records
        store.close()
        assert sorted(record.name for record in records) == ["branch-0", "branch-1"]
        assert all(len(record.hashes) == 10 for record in records)


def test_from_a_log(run, tmp_path):
    log = write(
        tmp_path / "log.jsonl",
        [{"prompt": line["tokens"], "max_tokens": 5} for line in [*branches(6), *branches(2)]] + [{"bad": 1}],
    )
    code, report = run("--from-log", log, "--budget", "1GiB")
    assert code == 0
    assert (report["log"]["num_requests"], report["log"]["num_skipped"]) == (8, 1)
    # Two of six are asked for twice.
    assert report["saved_blocks"] == report["log"]["num_chosen_blocks"] == 8 + 2 * 2
    code, report = run("--from-log", log, "--budget", "100KiB", "--output", tmp_path / "chosen.jsonl", store="none")
    assert code == 0
    assert not (tmp_path / "none").exists()
    chosen = [json.loads(line)["tokens"] for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert report["log"]["nbytes"] <= 100 * 1024
    assert all(tokens == HEAD[: len(tokens)] for tokens in chosen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a file of prompts"),
        (("p.jsonl", "--from-log", "x"), "give a file of prompts"),
        (("--from-log", "x"), "belong together"),
        (("p.jsonl", "--budget", "1GiB"), "belong together"),
        (("--from-log", "x", "--budget", "lots"), "must be a size"),
        (("p.jsonl", "--output", "x"), "--from-log"),
        (("none.jsonl",), "none.jsonl: cannot be read"),
        (("p.jsonl", "--block-size", "17"), "block_size"),
    ],
)
def test_bad_input_is_said_at_once(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", branches(1))
    assert main(["preload", *arguments, "--model", "/there/is/no/model", "--disk-path", str(tmp_path / "s")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": 7}, "p.jsonl:2: prompt"),
        ({"tokens": [1] * 256}, "p.jsonl:2: the prompt has 256 tokens"),
        ({"tokens": [5, 5000]}, "p.jsonl:2: holds a token id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words, capsys, model):
    file = write(tmp_path / "p.jsonl", [branches(1)[0], line])
    code = main(["preload", str(file), "--model", str(model), *SETTINGS, "--disk-path", str(tmp_path / "store")])
    assert code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


CHILD = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tieredkv import preloader
from tieredkv.cli.main import main
tell = preloader.Preloader._tell
def tell_and_die(self):
    tell(self)
    if self.progress.num_blocks_saved >= {after}:
        os.kill(os.getpid(), signal.SIGKILL)
preloader.Preloader._tell = tell_and_die
sys.exit(main({arguments!r}))
"""


def test_killed_half_way_and_run_again_computes_no_block_twice(run, model, tmp_path):
    lines = [line for family in range(6) for line in branches(8, 50, random_prompt(6 * BLOCK, seed=1000 + family))]
    file = write(tmp_path / "p.jsonl", lines)
    total = unique_blocks(lines)
    store = tmp_path / "store"
    arguments = ["preload", str(file), "--model", str(model), *SETTINGS, "--disk-path", str(store)]
    code = CHILD.format(root=str(ROOT), after=total // 3, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = stored(store)
    assert total // 3 <= before < total
    code, report = run(file)
    assert code == 0
    assert report["stored_blocks"] == before
    assert report["computed_tokens"] == (total - before) * BLOCK
    assert report["saved_blocks"] == total - before
    assert stored(store) == total


def test_interrupted_it_keeps_what_it_has(run, tmp_path, monkeypatch):
    """Ctrl-C saves what is computed; the next run continues there."""
    lines = branches(12)
    file = write(tmp_path / "p.jsonl", lines)
    tell = Preloader._tell

    def interrupted(self):
        tell(self)
        if self.progress.num_blocks_saved >= 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(Preloader, "_tell", interrupted)
    assert run(file) == (130, None)
    before = stored(tmp_path / "store")
    assert before >= 10
    monkeypatch.undo()
    code, report = run(file)
    assert (code, report["stored_blocks"]) == (0, before)
    assert report["computed_tokens"] == (unique_blocks(lines) - before) * BLOCK


@pytest.mark.soak
def test_beside_an_engine_that_uses_the_store(run, model, tmp_path):
    """Two processes' worth of writers on one store: each finds what the other has computed."""
    lines = branches(4)
    with load(model, max_model_len=256, disk_path=str(tmp_path / "store"), restore="always") as llm:
        llm.warm(lines[0]["tokens"])
        llm.core.flush(10)
        code, report = child_run(model, write(tmp_path / "p.jsonl", lines), tmp_path / "store")
        assert (code, report["stored_blocks"]) == (0, 10)
        assert report["computed_tokens"] == (unique_blocks(lines) - 10) * BLOCK
        (sources,) = llm.warm([*lines[3]["tokens"], 5])
        assert sources.computed <= BLOCK


def child_run(model, file, store) -> tuple[int, dict]:
    """The command in a process of its own: LMDB lets a process open a store once."""
    command = [sys.executable, "-m", "tieredkv", "preload", str(file), "--model", str(model), *SETTINGS]
    done = subprocess.run(
        [*command, "--disk-path", str(store), "--json"], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout)


def complete(url: str, tokens: list[int]) -> dict:
    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_a_server_on_a_preloaded_store_computes_no_full_block(run, model, tmp_path):
    """Preloaded by one process, served by another, which warms more by itself; all answers as without any cache."""
    lines = [
        *({"tokens": random_prompt(length, seed=length)} for length in (100, 129, 200)),
        *({"tokens": [*HEAD, *random_prompt(30, seed=i)]} for i in range(2)),
        {"messages": [{"role": "system", "content": "the cache keeps the blocks of a prompt " * 8}]},
    ]
    file = write(tmp_path / "p.jsonl", lines)
    assert run(file)[0] == 0
    warm = [{"tokens": random_prompt(150, seed=77)}, {"tokens": random_prompt(90, seed=78), "pin": True, "name": "w"}]
    warm_file = write(tmp_path / "w.jsonl", warm)
    # On so small a model computing is faster than loading; a server that may choose would compute again what it can.
    flags = (
        "--max-model-len",
        "512",
        "--disk-path",
        str(tmp_path / "store"),
        "--restore",
        "always",
        "--warm",
        str(warm_file),
    )
    with serving(model, *flags) as process:
        for line in lines[:5]:
            tokens = line["tokens"]
            answer = complete(process.url, tokens)
            sources = answer["usage"]["tieredkv"]
            assert sources["computed_tokens"] == len(tokens) - (len(tokens) - 1) // BLOCK * BLOCK <= BLOCK
            assert answer["choices"][0]["token_ids"] == stock_tokens(str(model), tokens, 8)
        chat = [*lines[5]["messages"], {"role": "user", "content": "what is a block?"}]
        body = {"messages": chat, "max_tokens": 1}
        usage = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        # All but the end of it, which is new.
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 40 - BLOCK
        job = wait_for_job(process.url)
        assert (job["state"], job["num_prompts_done"], job["error"]) == ("done", 2, None)
        for line in warm:
            sources = complete(process.url, line["tokens"])["usage"]["tieredkv"]
            assert sources["computed_tokens"] <= BLOCK
        (pin,) = httpx.get(f"{process.url}/admin/pins", timeout=60).json()["pins"]
        assert (pin["name"], pin["outcome"], pin["num_missing"]) == ("w", "accepted", 0)
        assert process.stop() == 0


def wait_for_job(url: str) -> dict:
    """The job that warms the file, once it is over; what pins miss after a start has a job of its own."""
    while True:
        (job,) = [job for job in httpx.get(f"{url}/admin/jobs", timeout=60).json()["jobs"] if job["kind"] == "start"]
        if job["state"] not in ("queued", "running"):
            return job


def test_a_bad_file_to_warm_stops_the_server_before_the_model_is_loaded(tmp_path, capsys):
    file = write(tmp_path / "w.jsonl", [{"prompt": "fine"}, {"promt": "typo"}])
    assert main(["serve", "/there/is/no/model", "--port", "0", "--warm", str(file)]) == 2
    assert "w.jsonl:2: promt: unknown key" in capsys.readouterr().err


def test_a_library_user_finds_what_was_preloaded(run, model, tmp_path):
    lines = branches(2)
    run(write(tmp_path / "p.jsonl", lines))
    with load(model, max_model_len=256, disk_path=str(tmp_path / "store")) as llm:
        # The first request, before anything has been measured.
        (sources,) = llm.warm(lines[0]["tokens"])
        assert (sources.disk, sources.computed) == (160, 8)


def test_warming_leaves_on_disk_what_is_there(run, model, tmp_path):
    """A second look at the store, not a restore: blocks stay where they are, unless they are wanted higher up."""
    lines = branches(3)
    run(write(tmp_path / "p.jsonl", lines))
    config = Config.load(
        {"model": str(model), "device": "cpu", "dtype": "float32", "max_model_len": 256, "kv_cache_memory": "64MiB",
         "host_memory": "0", "disk_path": str(tmp_path / "store"), "restore": "always"}
    )  # fmt: skip
    engine = Engine.load(config)
    engine.start()

    async def main():
        warming = Warming(engine)

        async def warm(prompts):
            job = warming.start(prompts)
            while (report := warming.get(job.id)).finished_s is None:
                await asyncio.sleep(0.001)
            in_pool = await asyncio.wrap_future(engine.call(lambda core: core.pool.num_committed))
            return report, in_pool

        report, in_pool = await warm([WarmPrompt(line["tokens"]) for line in lines])
        assert (report.state, report.num_tokens_done, report.num_tokens_computed) == ("done", 3 * 168, 0)
        assert in_pool == 0
        report, in_pool = await warm([WarmPrompt(lines[0]["tokens"], tier=Tier.DEVICE)])
        assert (report.state, report.num_tokens_computed) == ("done", 0)
        assert in_pool == 10
        report, in_pool = await warm([WarmPrompt([*lines[1]["tokens"], *random_prompt(32, seed=5)])])
        assert report.num_tokens_computed == 32 + 168 % BLOCK - 200 % BLOCK
        await warming.close()

    try:
        asyncio.run(main())
    finally:
        assert engine.close()
