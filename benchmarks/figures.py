"""The figures of the serving benchmark: what each one is, how it is judged against a peer, how a result is written.

Knows no clock and no HTTP: `bench_serving` fills the samples. A result is plain data, the same in JSON and in the table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.report import result_stem
from benchmarks.servers import MODEL_NAME, Server

PROMPT_TOKENS = 1024
BATCH_STREAMS, BATCH_IN, BATCH_OUT = 8, 256, 64


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity; `limit` bounds the ratio to the peer, from above when `lower_is_better`, else from below."""

    key: str
    label: str
    unit: str
    lower_is_better: bool = True
    limit: float | None = None


FIGURES = (
    Figure("ttft_cold_ms", f"TTFT, {PROMPT_TOKENS} tokens, cold", "ms", limit=1.0),
    Figure("ttft_warm_ms", "TTFT, same prompt again", "ms", limit=0.8),
    Figure("itl_ms", "per token, one stream", "ms", limit=1.0),
    Figure("tokens_per_s", f"output, {BATCH_STREAMS} x ({BATCH_IN} in, {BATCH_OUT} out)", "tok/s", False, 1.0),
    Figure("step8_ms", f"per token, {BATCH_STREAMS} streams", "ms"),
)


@dataclass(slots=True)
class Contender:
    """A server under measurement and its samples: one list per figure, one value (or several) per round."""

    server: Server
    version: str = ""
    samples: dict[str, list[float]] = field(default_factory=lambda: {f.key: [] for f in FIGURES})
    cached_tokens: int | None = None

    def median(self, key: str) -> float:
        return statistics.median(self.samples[key])


def collect(contenders: Sequence[Contender], alone: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians, ranges, ratios and all samples."""
    result: dict[str, Any] = {"machine": machine.describe(), "model": f"{MODEL_NAME}, bfloat16", "servers": {}}
    for contender in contenders:
        result["servers"][contender.server.name] = {
            "version": contender.version,
            "command": [
                Path(contender.server.command[0]).name,
                *(part.replace(str(Path.home()), "~") for part in contender.server.command[1:]),
            ],
            "start_s": round(contender.server.start_s, 1),
            "cached_tokens_when_warm": contender.cached_tokens,
            "figures": {key: summary(values) for key, values in contender.samples.items()},
        }
    if len(contenders) == 2:
        own, peer = contenders
        result["ratios"] = {
            f.key: {
                "ratio": round(own.median(f.key) / peer.median(f.key), 3),
                "limit": f.limit,
                "reached": f.limit is None or reached(f, own.median(f.key) / peer.median(f.key)),
            }
            for f in FIGURES
        }
    if alone:
        step_ms, model_ms = (statistics.median(a[key] for a in alone) for key in ("step_ms", "model_ms"))
        served_ms = contenders[0].median("step8_ms")
        result["added_per_token"] = {
            "model_ms": round(model_ms, 3),
            "engine_step_ms": round(step_ms, 3),
            "served_ms": round(served_ms, 3),
            "http_and_scheduling_ms": round(served_ms - model_ms, 3),
            "reached": served_ms - model_ms < 1.0,
            "samples": list(alone),
        }
    return result


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and all values, rounded to what the clock can tell."""
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "samples": [round(v, 2) for v in values],
    }


def reached(figure: Figure, ratio: float) -> bool:
    if figure.limit is None:
        return True
    return ratio <= figure.limit if figure.lower_is_better else ratio >= figure.limit


def as_text(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    names = list(result["servers"])
    lines = machine.lines(result["machine"])
    lines.append(f"{'model':13} {result['model']}")
    for name in names:
        info = result["servers"][name]
        lines.append(f"{name:13} {info['version']}: {' '.join(info['command'][:3])} ..., ready in {info['start_s']} s")
    ratios = result.get("ratios", {})
    header = f"{'median (min - max)':36}" + "".join(f"{name:>26}" for name in names)
    lines += ["", header + (f"{'ratio':>8}{'to reach':>10}" if ratios else "")]
    for figure in FIGURES:
        cells = ""
        for name in names:
            s = result["servers"][name]["figures"][figure.key]
            cells += f"{s['median']:10.1f} ({s['min']:.1f} - {s['max']:.1f})".rjust(26)
        row = f"{figure.label + ', ' + figure.unit:36}{cells}"
        if ratios:
            ratio = ratios[figure.key]
            row += f"{ratio['ratio']:8.2f}"
            if figure.limit is not None:
                sign = "<=" if figure.lower_is_better else ">="
                row += f"{sign + ' ' + format(figure.limit, '.1f'):>10}  {'reached' if ratio['reached'] else 'missed'}"
        lines.append(row)
    if added := result.get("added_per_token"):
        lines += [
            "",
            f"One token of each of {BATCH_STREAMS} streams: model alone {added['model_ms']:.2f} ms, engine step "
            f"{added['engine_step_ms']:.2f} ms, over HTTP {added['served_ms']:.2f} ms;",
            f"HTTP and scheduling add {added['http_and_scheduling_ms']:.2f} ms (to reach: under 1 ms, "
            f"{'reached' if added['reached'] else 'missed'}).",
        ]
    return "\n".join(lines) + "\n"


def save(result: dict[str, Any]) -> Path:
    """Write `results/<date>-serving.json` and `.txt`; returns the latter's path."""
    stem = result_stem("serving")
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = stem.with_suffix(".txt")
    text.write_text(as_text(result), encoding="utf-8")
    return text
