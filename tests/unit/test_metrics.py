"""Metrics tell the truth about what the core did, under the names that dashboards expect, and never hurt a request."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from tests.fakes import Collector, make_core, request
from tieredkv.metrics import EngineMetrics
from tieredkv.types import TokenSources


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value("tieredkv:" + name, {"model_name": "fake", **labels})
    assert found is not None, name
    return found


def test_tokens_by_source_add_up_to_prompt_tokens():
    core, runner = make_core(num_blocks=24, max_model_len=100)
    collector = Collector(core)
    for turn in range(3):
        for i in range(4):
            core.add(request(f"{turn}-{i}", [i] * (20 + 5 * turn), max_tokens=30))
        collector.run()
    metrics = core.metrics
    by_source = sum(
        value(metrics, "prompt_tokens_cached_by_source_total", source=s) for s in ("device", "host", "disk")
    )
    prompt_tokens = value(metrics, "prompt_tokens_total")
    assert prompt_tokens == sum(4 * (20 + 5 * turn) for turn in range(3))
    assert by_source + value(metrics, "prompt_tokens_computed_total") == prompt_tokens
    assert value(metrics, "prefix_cache_queries_total") == prompt_tokens
    assert value(metrics, "prefix_cache_hits_total") == by_source > 0
    assert value(metrics, "generation_tokens_total") == 3 * 4 * 30
    assert value(metrics, "request_success_total", finished_reason="length") == 12
    assert value(metrics, "num_preemptions_total") == core.scheduler.num_preemptions > 0
    # Each prompt token and all but the last generated one is computed once, plus what preemption threw away.
    once = value(metrics, "prompt_tokens_computed_total") + 3 * 4 * 29
    assert once < runner.num_computed_tokens <= once + value(metrics, "recomputed_tokens_total")
    assert value(metrics, "num_requests_running") == value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 12
    sources = ("device", "host", "disk", "computed")
    assert sum(value(metrics, "time_to_first_token_by_source_seconds_count", source=s) for s in sources) == 12
    assert value(metrics, "inter_token_latency_seconds_count") == 3 * 4 * 29


@pytest.mark.parametrize(
    ("sources", "lowest"),
    [
        (TokenSources(computed=9), "computed"),
        (TokenSources(device=8, computed=1), "device"),
        (TokenSources(device=8, host=8, computed=1), "host"),
        (TokenSources(device=8, host=8, disk=8, computed=1), "disk"),
        (TokenSources(disk=8, computed=100), "disk"),
    ],
)
def test_first_tokens_are_told_apart_by_the_lowest_tier_used(sources, lowest):
    metrics = EngineMetrics("fake")
    metrics.first_token(0.25, 0.1, sources)
    for source in ("device", "host", "disk", "computed"):
        name = "time_to_first_token_by_source_seconds_count"
        assert value(metrics, name, source=source) == (1 if source == lowest else 0)
    assert value(metrics, "time_to_first_token_by_source_seconds_sum", source=lowest) == 0.25


def test_the_prefix_can_be_changed():
    metrics = EngineMetrics("m", prefix="vllm:")
    metrics.describe({"block_size": 16})
    text = generate_latest(metrics.registry).decode()
    assert "vllm:prefix_cache_hits_total" in text
    assert 'vllm:cache_config_info{block_size="16",model_name="m"} 1.0' in text
    assert "tieredkv" not in text


def test_a_failing_metric_is_dropped():
    metrics = EngineMetrics("m")
    metrics.admitted(TokenSources(device=-5, computed=1), 0.1)
    metrics.first_token(float("nan"), 0.0, TokenSources(computed=1))
    assert metrics.num_failed_updates == 1
