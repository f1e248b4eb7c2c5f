"""What the engine tells the world, as Prometheus metrics. Names follow vLLM's where the meaning is the same.

Knows no queue and no cache: callers report what happened. A metric is never on the failure path: whatever goes wrong in
here is counted and dropped, the request goes on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tieredkv.types import FinishReason, TokenSources

logger = logging.getLogger(__name__)

# fmt: off
TTFT_BUCKETS_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_BUCKETS_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BUCKETS_S = (.001, .0025, .005, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3, .5, .75, 1, 2, 5, 10)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
# fmt: on

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a part that keeps its own totals. `kind` is "counter" or "gauge"; `labels` tells rows of one name apart."""

    kind: str
    name: str
    doc: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class _Samples:
    """Reads a part's totals at every scrape. A part that fails to report is left out, and the rest is reported."""

    def __init__(self, prefix: str, model_name: str, read: Callable[[], Iterable[Sample]]) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        try:
            samples = list(self._read())
        except Exception:
            logger.exception("a part of the engine could not report its metrics")
            return
        for sample in samples:
            labels = {"model_name": self._model_name, **sample.labels}
            if sample.name not in families:
                make = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[sample.name] = make(self._prefix + sample.name, sample.doc, labels=list(labels))
            families[sample.name].add_metric(list(labels.values()), sample.value)
        yield from families.values()

    def describe(self) -> list[Metric]:
        return []


def _never_fails(
    method: Callable[Concatenate[EngineMetrics, P], None],
) -> Callable[Concatenate[EngineMetrics, P], None]:
    @functools.wraps(method)
    def guarded(self: EngineMetrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.num_failed_updates += 1
            if self.num_failed_updates == 1:
                logger.exception("a metric could not be updated; further failures are only counted")

    return guarded


class EngineMetrics:
    """All series of one engine in a registry of their own, labelled with the model's name. Times in seconds."""

    def __init__(self, model_name: str, prefix: str = "tieredkv:") -> None:
        self.registry = CollectorRegistry()
        self.num_failed_updates = 0
        self.model_name = model_name
        self._prefix = prefix
        label = ["model_name"]

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(prefix + name, doc, [*label, *labels], registry=self.registry)

        def gauge(name: str, doc: str) -> Gauge:
            return Gauge(prefix + name, doc, label, registry=self.registry).labels(model_name)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(prefix + name, doc, label, registry=self.registry, buckets=buckets).labels(model_name)

        def plain(name: str, doc: str) -> Counter:
            return counter(name, doc).labels(model_name)

        self._prompt_tokens = plain("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = plain("generation_tokens", "Tokens generated.")
        self._queries = plain("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = plain("prefix_cache_hits", "Prompt tokens found in the prefix cache, all tiers.")
        by_source = counter("prompt_tokens_cached_by_source", "Prompt tokens served by a tier of the cache.", "source")
        self._by_source = {s: by_source.labels(model_name, s) for s in ("device", "host", "disk")}
        self._computed = plain("prompt_tokens_computed", "Prompt tokens computed by the model.")
        self._saved = plain(
            "prefill_seconds_saved", "Estimated time that computing the cached prompt tokens would take."
        )
        self._recomputed = plain("recomputed_tokens", "Tokens computed again after a preemption.")
        self._preemptions = plain("num_preemptions", "Requests that gave their blocks back to others.")
        self._failed_steps = plain("failed_steps", "Steps of the engine that raised an error.")
        finished = counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}
        self._running = gauge("num_requests_running", "Requests that compute.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait.")
        self._usage = gauge("kv_cache_usage_perc", "Share of device blocks in use by requests, 0 to 1.")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        by_lowest = Histogram(
            prefix + "time_to_first_token_by_source_seconds",
            "Arrival to first token, by the lowest tier that the prompt came from; computed: nothing was cached.",
            [*label, "source"],
            registry=self.registry,
            buckets=TTFT_BUCKETS_S,
        )
        self._ttft_by_source = {s: by_lowest.labels(model_name, s) for s in ("device", "host", "disk", "computed")}
        self._itl = histogram("inter_token_latency_seconds", "Time between tokens of a request.", ITL_BUCKETS_S)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean of it per request.", ITL_BUCKETS_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self._queue = histogram("request_queue_time_seconds", "Arrival to admission.", E2E_BUCKETS_S)
        self._prefill = histogram("request_prefill_time_seconds", "Admission to first token.", E2E_BUCKETS_S)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", E2E_BUCKETS_S)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS)
        self._output_sizes = histogram("request_generation_tokens", "Tokens generated per request.", TOKEN_BUCKETS)
        self._step = histogram("engine_step_seconds", "One step of the engine.", STEP_BUCKETS_S)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed per step.", TOKEN_BUCKETS)

    @_never_fails
    def describe(self, facts: Mapping[str, object]) -> None:
        """Publish `cache_config_info`, a constant series whose labels are `facts`."""
        names = sorted(facts)
        info = Gauge(
            f"{self._prefix}cache_config_info",
            "The cache as configured.",
            ["model_name", *names],
            registry=self.registry,
        )
        info.labels(self.model_name, *(str(facts[n]) for n in names)).set(1)

    def watch(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Report what `read()` returns at every scrape; it is called from the scraping thread."""
        self.registry.register(_Samples(self._prefix, self.model_name, read))

    @_never_fails
    def admitted(self, sources: TokenSources, queue_s: float, saved_s: float = 0.0) -> None:
        """`saved_s` is the estimated time that computing the cached tokens would have taken."""
        self._prompt_tokens.inc(sources.total)
        self._queries.inc(sources.total)
        self._hits.inc(sources.cached)
        self._by_source["device"].inc(sources.device)
        self._by_source["host"].inc(sources.host)
        self._by_source["disk"].inc(sources.disk)
        self._computed.inc(sources.computed)
        self._saved.inc(saved_s)
        self._prompt_sizes.observe(sources.total)
        self._queue.observe(queue_s)

    @_never_fails
    def readmitted(self, num_recomputed: int) -> None:
        self._recomputed.inc(num_recomputed)

    @_never_fails
    def first_token(self, ttft_s: float, prefill_s: float, sources: TokenSources) -> None:
        self._generation_tokens.inc()
        self._ttft.observe(ttft_s)
        self._ttft_by_source[_lowest_source(sources)].observe(ttft_s)
        self._prefill.observe(prefill_s)

    @_never_fails
    def next_token(self, since_last_s: float) -> None:
        self._generation_tokens.inc()
        self._itl.observe(since_last_s)

    @_never_fails
    def finished(self, reason: FinishReason, num_tokens: int, e2e_s: float, decode_s: float) -> None:
        """`decode_s` is the time from the first to the last token; it counts from two tokens on."""
        self._finished[reason].inc()
        self._output_sizes.observe(num_tokens)
        self._e2e.observe(e2e_s)
        if num_tokens > 1:
            self._decode.observe(decode_s)
            self._tpot.observe(decode_s / (num_tokens - 1))

    @_never_fails
    def step(self, seconds: float, num_tokens: int, num_preempted: int) -> None:
        self._step.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._preemptions.inc(num_preempted)

    @_never_fails
    def failed_step(self) -> None:
        self._failed_steps.inc()

    @_never_fails
    def gauges(self, num_running: int, num_waiting: int, usage: float) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._usage.set(usage)


def _lowest_source(sources: TokenSources) -> str:
    """The slowest place that a prompt's tokens came from: a tier, or "computed" when none of them was cached."""
    if sources.disk:
        return "disk"
    if sources.host:
        return "host"
    return "device" if sources.device else "computed"
