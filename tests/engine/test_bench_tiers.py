"""`tieredkv bench tiers` on a tiny model: every hop is measured, and the verdict follows from the figures."""

from __future__ import annotations

import json

import pytest

from tests import models_for_tests
from tieredkv.bench.tiers import Hop, measure_disk, measure_lookup, pays_from_tokens
from tieredkv.cli.main import main
from tieredkv.errors import StorageError


def test_every_hop_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIEREDKV_REEXEC", "1")
    folder = models_for_tests.build("llama", tmp_path / "model")
    flags = ["--disk-path", str(tmp_path), "--block-size", "16", "--total", "1MiB", "--prompt-len", "64", "--json"]
    assert main(["bench", "tiers", str(folder), *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {hop["hop"] for hop in result["hops"]} == {
        "device to host",
        "host to device",
        "host to disk, raw",
        "disk to host, raw",
        "host to disk, zstd",
        "disk to host, zstd",
    }
    assert all(hop["nbytes_per_s"] > 0 and hop["latency_s"] > 0 for hop in result["hops"])
    assert result["prefill_tokens_per_s"] > 0
    assert {each["tier"] for each in result["pays_from_tokens"]} == {"host", "raw on disk", "zstd on disk"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_place_that_takes_no_files_is_told(tmp_path):
    gone = tmp_path / "gone"
    for measure in (lambda: measure_disk(4096, 1 << 20, "raw", gone), lambda: measure_lookup(16, gone)):
        with pytest.raises(StorageError, match="gone"):
            measure()


def test_a_tier_pays_once_its_latency_is_made_up_for():
    # 1,000 bytes a token at 1 MB/s is 1 ms a token; computing is 2 ms a token; 100 ms of latency take 100 tokens.
    hop = Hop("disk to host", 16_000, 1e6, 0.1)
    assert pays_from_tokens(1000, 16, [hop], 500.0) == 112
    assert pays_from_tokens(1000, 16, [hop], 1000.0) is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--total", "5"],
        ["--total", "x"],
        ["--total", "512TiB"],
        ["--disk-path", "/does/not/exist"],
        ["--block-size", "17"],
    ],
)
def test_bad_flags_are_one_line_and_status_2(flags, capsys):
    assert main(["bench", "tiers", *flags]) == 2
    assert capsys.readouterr().err.startswith("tieredkv: error: ")
