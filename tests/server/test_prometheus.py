"""A real Prometheus reads a real server with the shipped configuration: every query of the dashboard and every alert finds
its series, and alerts fire when they should.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.models_for_tests import build
from tests.server.conftest import running_server
from tieredkv.config import Config
from tieredkv.engine import Engine
from tieredkv.server.main import bind

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
DASHBOARD = json.loads((ROOT / "configs" / "grafana" / "dashboards" / "tieredkv.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
# Grafana's own variables, and ours with all servers and models chosen.
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$model": ".*", "$instance": ".*"}
THRESHOLD = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*[\d.]+(?![\w.])")
SMALL = {"num_gpu_blocks_override": 24, "max_model_len": 256, "host_memory": "1MiB", "restore": "always"}
WAIT_S = 60

# What makes each alert fire: series and their values, one a minute in promtool's notation, judged at minute NOW_MIN. Every
# case is a server of its own.
NOW_MIN = 180
ALWAYS = f"x{NOW_MIN}"
CASES: dict[str, dict[str, str]] = {
    "TieredKVServerDown": {"up": f"1x{NOW_MIN - 5} 0x5"},
    "TieredKVNoServer": {"up": f"0{ALWAYS}"},
    "TieredKVStepsFail": {"tieredkv:failed_steps_total": f"0x{NOW_MIN - 3} 1x3"},
    "TieredKVSlowFirstToken": {
        'tieredkv:time_to_first_token_seconds_bucket{le="10"}': f"0+50{ALWAYS}",
        'tieredkv:time_to_first_token_seconds_bucket{le="20"}': f"0+60{ALWAYS}",
        'tieredkv:time_to_first_token_seconds_bucket{le="+Inf"}': f"0+60{ALWAYS}",
    },
    "TieredKVLongQueue": {
        'tieredkv:request_queue_time_seconds_bucket{le="5"}': f"0+50{ALWAYS}",
        'tieredkv:request_queue_time_seconds_bucket{le="10"}': f"0+60{ALWAYS}",
        'tieredkv:request_queue_time_seconds_bucket{le="+Inf"}': f"0+60{ALWAYS}",
    },
    "TieredKVPoolFull": {"tieredkv:kv_cache_usage_perc": f"0.99{ALWAYS}"},
    "TieredKVPreemptions": {"tieredkv:num_preemptions_total": f"0+30{ALWAYS}"},
    "TieredKVDiskTierDown": {'tieredkv:tier_healthy{tier="disk"}': f"1x{NOW_MIN - 5} 0x5"},
    "TieredKVCorruptRecords": {'tieredkv:tier_corrupt_records_total{tier="disk"}': f"0x{NOW_MIN - 30} 1x30"},
    "TieredKVDiskRefuses": {"tieredkv:disk_refused_blocks_total": f"0+120{ALWAYS}"},
    "TieredKVBlocksLost": {
        'tieredkv:dropped_blocks_total{tier="host"}': f"0+120{ALWAYS}",
        'tieredkv:tier_capacity_bytes{tier="disk"}': f"1000{ALWAYS}",
    },
    "TieredKVFailedCopies": {"tieredkv:failed_copies_total": f"0x{NOW_MIN - 10} 1x10"},
    "TieredKVRestoresTimeOut": {"tieredkv:restore_timeouts_total": f"0+1{ALWAYS}"},
    "TieredKVRestoresFail": {"tieredkv:restore_failures_total": f"0+10{ALWAYS}"},
    "TieredKVLookupsTimeOut": {"tieredkv:lookup_timeouts_total": f"0+1{ALWAYS}"},
    "TieredKVRestoresDoNotPay": {
        "tieredkv:restore_seconds_total": f"0+3{ALWAYS}",
        "tieredkv:restore_seconds_saved_total": f"0+2{ALWAYS}",
    },
    "TieredKVHitRateFell": {
        "tieredkv:prefix_cache_hits_total": f"0+80x{NOW_MIN - 120} {80 * (NOW_MIN - 120)}+5x120",
        "tieredkv:prefix_cache_queries_total": f"0+100{ALWAYS}",
    },
}
QUIET: dict[str, dict[str, str]] = {
    "no disk tier, so the host tier's evictions are losses": {
        'tieredkv:dropped_blocks_total{tier="host"}': f"0+120{ALWAYS}"
    },
    "restores that pay": {
        "tieredkv:restore_seconds_total": f"0+1{ALWAYS}",
        "tieredkv:restore_seconds_saved_total": f"0+2{ALWAYS}",
    },
    "never there": {"up": f"0{ALWAYS}"},
    "nobody asks": {
        "up": f"1{ALWAYS}",
        "tieredkv:prefix_cache_hits_total": f"0{ALWAYS}",
        "tieredkv:prefix_cache_queries_total": f"0{ALWAYS}",
        "tieredkv:restore_seconds_total": f"0{ALWAYS}",
        "tieredkv:restore_seconds_saved_total": f"0{ALWAYS}",
        'tieredkv:time_to_first_token_seconds_bucket{le="10"}': f"0{ALWAYS}",
        'tieredkv:time_to_first_token_seconds_bucket{le="+Inf"}': f"0{ALWAYS}",
    },
}

if os.environ.get("CI") != "true":
    pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")


class Prometheus:
    """A running Prometheus with the shipped configuration, scraping one server."""

    def __init__(self, folder: Path, target: str) -> None:
        config = folder / "configs"
        shutil.copytree(PROMETHEUS, config)
        # The one thing that differs from what is shipped: which servers there are.
        for file in (config / "targets").iterdir():
            file.unlink()
        (config / "targets" / "servers.yml").write_text(json.dumps([{"targets": [target]}]), encoding="utf-8")
        with bind("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={config}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._log = folder / "prometheus.log"
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def query(self, expr: str) -> list[dict]:
        """The series that `expr` has now, none while Prometheus starts. Raises `AssertionError` if it refuses `expr`."""
        response = self._http.post("/api/v1/query", data={"query": expr})
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            # It listens before it has opened its database.
            return []
        answer = response.json()
        assert answer["status"] == "success", (expr, answer)
        assert answer["data"]["resultType"] == "vector", expr
        return answer["data"]["result"]

    def wait_for(self, expr: str) -> None:
        """Until `expr` has a series."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                if self.query(expr):
                    return
            except httpx.TransportError:
                assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.2)
        raise AssertionError(f"{expr} never had a series\n{self._log.read_text()}")

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """It has scraped a server before, while and after the server's tiers were used."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings = {**SMALL, "model": str(build("llama", folder / "tiny")), "dtype": "float32", "device": "cpu"}
    engine = Engine.load(Config.load({**settings, "disk_path": str(folder / "store"), "disk_size": "64MiB"}))
    engine.start()
    try:
        with running_server(engine, served_model_name="tiny") as server, httpx.Client(base_url=server.url) as http:
            reader = Prometheus(folder, f"127.0.0.1:{server.port}")
            try:
                reader.wait_for('up{job="tieredkv"} == 1')
                _use_every_tier(http)
                num_scrapes = int(reader.query('count_over_time(up{job="tieredkv"}[5m])')[0]["value"][1])
                reader.wait_for(f'count_over_time(up{{job="tieredkv"}}[5m]) > {num_scrapes}')
                yield reader
            finally:
                reader.close()
    finally:
        engine.close(20)


def _use_every_tier(http: httpx.Client) -> None:
    """Ask the same prompts in turn, far more than the device and the host tier hold, until each tier has served some."""
    sources = {"device": 0, "host": 0, "disk": 0}
    for round_number in range(40):
        for first in range(12):
            prompt = [first + 3] * 128
            for _ in range(1 + (first == 0)):
                body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                usage = http.post("/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
                for source in sources:
                    sources[source] += usage["tieredkv"][f"{source}_tokens"]
        if round_number and all(sources.values()):
            return
    raise AssertionError(f"not every tier was used: {sources}")


def _promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _without_variables(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable that nothing is known about: {expr}"
    return expr


def test_promtool_accepts_configuration_and_rules():
    _promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    _promtool("check", "rules", str(PROMETHEUS / "alerts.yml"))


def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    assert sorted(CASES) == sorted(rule["alert"] for rule in RULES)
    # No server at all cannot be told beside servers that are there.
    alone = "TieredKVNoServer"
    together = {name: series for name, series in CASES.items() if name != alone}
    document = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "1m",
        "tests": [
            _rule_test(together | QUIET, [f'{{alertname="{name}", instance="{name}"}}' for name in together]),
            _rule_test({alone: CASES[alone]}, [f'{{alertname="{alone}"}}']),
        ],
    }
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    (tmp_path / "cases.yml").write_text(json.dumps(document), encoding="utf-8")
    _promtool("test", "rules", str(tmp_path / "cases.yml"))


def _rule_test(servers: dict[str, dict[str, str]], firing: list[str]) -> dict:
    """A test in promtool's form: the series of `servers`, and which alerts fire."""
    return {
        "interval": "1m",
        "input_series": [
            {"series": _labelled(name, server), "values": values}
            for server, series in servers.items()
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
                "eval_time": f"{NOW_MIN}m",
                "exp_samples": [{"labels": labels, "value": 1} for labels in firing],
            }
        ],
    }


def _labelled(name: str, server: str) -> str:
    """A series' name with the labels that every series of a server has."""
    name, _, own = name.partition("{")
    return f'{name}{{instance="{server}",job="tieredkv",{own or "}"}'


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{i}-{title}" for i, (title, _) in enumerate(QUERIES)])
def test_every_query_of_the_dashboard_has_numbers(prometheus, title, expr):
    series = prometheus.query(_without_variables(expr))
    assert series, expr
    # Not a quotient of two counters that never moved.
    assert any(math.isfinite(float(one["value"][1])) for one in series), (expr, series)


def test_all_three_tiers_are_in_the_dashboard(prometheus):
    for expr, label in (
        ("sum by (tier) (tieredkv:tier_used_bytes) > 0", "tier"),
        ("sum by (source) (rate(tieredkv:prompt_tokens_cached_by_source_total[1m])) > 0", "source"),
    ):
        assert {one["metric"][label] for one in prometheus.query(expr)} == {"device", "host", "disk"}


def test_variables_of_the_dashboard_have_values(prometheus):
    for variable in DASHBOARD["templating"]["list"]:
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        assert prometheus.query(f"count by ({label}) ({_without_variables(selector)})"), variable["name"]


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_watches_something_that_exists(prometheus, rule):
    assert THRESHOLD.search(rule["expr"]), "no threshold"
    assert prometheus.query(THRESHOLD.sub("", rule["expr"])), rule["expr"]


def test_nothing_is_critical_on_a_healthy_server(prometheus):
    for rule in RULES:
        if rule["labels"]["severity"] == "critical":
            assert prometheus.query(rule["expr"]) == [], rule["alert"]
