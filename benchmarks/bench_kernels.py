"""Micro-benchmarks of the CPU path: what `docs/performance.md` states, measured again.

    python -m benchmarks.bench_kernels steps      whole forward passes, beside transformers' own layers
    python -m benchmarks.bench_kernels linear     products whose weights come from memory, beside torch's
    python -m benchmarks.bench_kernels attention  decode and prefill attention, in place beside torch over gathered blocks
    python -m benchmarks.bench_kernels small      normalisation beside torch's; activation, rotation
    python -m benchmarks.bench_kernels all --save all of them, written to benchmarks/results/

Knows nothing of HTTP or scheduling. Times are milliseconds, medians; what is compared runs by turns. Nothing else may run
on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable

from benchmarks.report import Report
from tieredkv import runtime

# SmolLM2-135M.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 576, 1536, 9, 3, 64, 49152
BLOCK_SIZE = 16

Run = Callable[[], object]


def times_ms(runs: dict[str, Run], *, budget_s: float = 0.3, least: int = 5) -> dict[str, float]:
    """Median duration of each of `runs`, which take turns, after two rounds that do not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in [*runs.values(), *runs.values()]:
        run()
    end_s = time.perf_counter() + budget_s * len(runs)
    for count in range(1000):
        if count >= least and time.perf_counter() >= end_s:
            break
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            found[name].append((time.perf_counter() - began_s) * 1e3)
    return {name: statistics.median(each) for name, each in found.items()}


def show(report: Report, name: str, run: Run, beside: Run | None = None, *, budget_s: float = 0.3) -> float:
    """Measure `run`, and `beside` by turns with it, and print both and their ratio; returns the milliseconds of `run`."""
    runs = {"ours": run} | ({} if beside is None else {"beside": beside})
    found = times_ms(runs, budget_s=budget_s)
    other = f"{found['beside']:10.3f}{found['ours'] / found['beside']:8.2f}" if beside is not None else " " * 18
    report.say(f"{name:<52}{found['ours']:10.3f}{other}".rstrip())
    return found["ours"]


def headline(report: Report, title: str, beside: str) -> None:
    report.say(f"\n{title:<52}{'ours ms':>10}{beside:>10}{'ratio':>8}")


def bench_steps(report: Report, profile_rows: int) -> None:
    """Forward passes inside the engine's runner, batch layout and sampling included, beside the same runner over
    transformers' own layers.
    """
    import torch

    from tieredkv.batch import build_batch
    from tieredkv.config import Config
    from tieredkv.model_runner import ModelRunner, StockForward
    from tieredkv.models import load_model
    from tieredkv.sequence import ScheduledSequence, Sequence
    from tieredkv.types import EngineRequest, SamplingParams

    config = Config.load({"dtype": "bfloat16", "num_gpu_blocks_override": 2000})
    runner = ModelRunner(load_model(config.model, BLOCK_SIZE), config)
    runner.warm_up()
    # Another copy of the model: preparing the first one has emptied its layers.
    unprepared = load_model(config.model, BLOCK_SIZE)
    forwards = {"ours": runner.forward, "stock": StockForward(unprepared.model)}
    generator = torch.Generator().manual_seed(0)

    def sequences(lengths: Iterable[int]) -> list[Sequence]:
        made, next_block = [], 1
        for length in lengths:
            ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
            sequence = Sequence(EngineRequest("bench", ids, SamplingParams(temperature=0.0)), b"")
            num_blocks = length // BLOCK_SIZE + 8
            sequence.block_ids = array("i", range(next_block, next_block + num_blocks))
            next_block += num_blocks
            made.append(sequence)
        return made

    def step(parts: list[tuple[Sequence, int, int]]) -> None:
        runner.execute(build_batch([ScheduledSequence(*part) for part in parts], BLOCK_SIZE))

    def decode(lengths: Iterable[int]) -> Callable[[], None]:
        made = sequences(lengths)
        for sequence in made:
            step([(sequence, 0, sequence.num_tokens)])
            sequence.token_ids.append(5)
        return lambda: step([(sequence, sequence.num_tokens - 1, 1) for sequence in made])

    (prompt,) = sequences([1024])
    eight = sequences([256] * 8)
    cases: dict[str, Callable[[], None]] = {
        "prefill 1024 tokens, cold": lambda: step([(prompt, 0, 1024)]),
        "prefill 16 tokens over 1008 cached": lambda: step([(prompt, 1008, 16)]),
        "prefill 8 x 256 tokens": lambda: step([(sequence, 0, 256) for sequence in eight]),
        "decode 1 stream of 300 tokens": decode([300]),
        "decode 8 streams of about 320 tokens": decode(range(300, 340, 5)),
        "decode 32 streams of about 320 tokens": decode(range(300, 332)),
    }

    def by(forward: str, run: Run) -> Run:
        def swapped() -> None:
            runner.forward = forwards[forward]
            run()

        return swapped

    headline(report, "steps", "stock")
    for name, run in cases.items():
        show(report, name, by("ours", run), by("stock", run), budget_s=2.0)
        if profile_rows:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU]) as record:
                by("ours", run)()
            print(record.key_averages().table(sort_by="self_cpu_time_total", row_limit=profile_rows))


def bench_linear(report: Report) -> None:
    """One product per distinct weight, 212 MB of weights in all, so that each is read from memory."""
    import torch

    from tieredkv.linear import StackedLinear

    for width_in, width_out in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN), (HIDDEN, VOCABULARY)):
        count = max(2, round(212e6 / (2 * width_in * width_out)))
        layers = [torch.nn.Linear(width_in, width_out, bias=False).bfloat16() for _ in range(count)]
        nbytes = count * width_in * width_out * 2
        plain = [(layer.weight.detach()) for layer in layers]
        packed = [StackedLinear([layer]) for layer in layers]
        for linear in packed:
            linear.pack(release=False)
        headline(report, f"{count} products with [{width_in}, {width_out}]", "torch")
        for rows in (1, 4, 8, 16, 32, 256):
            if rows == 256 and width_out == VOCABULARY:
                continue
            x = torch.randn(rows, width_in).bfloat16()

            def ours(x: torch.Tensor = x, packed: list[StackedLinear] = packed) -> None:
                for linear in packed:
                    linear(x)

            def theirs(x: torch.Tensor = x, plain: list[torch.Tensor] = plain) -> None:
                for weight in plain:
                    torch.nn.functional.linear(x, weight)

            took_ms = show(report, f"{rows} rows", ours, theirs)
            report.say(f"{'':52}{nbytes / took_ms / 1e6:10.1f} GB/s {rows * nbytes / took_ms / 1e6:8.0f} GFLOP/s")


def bench_attention(report: Report) -> None:
    """One layer's reads and attention, over contexts scattered in a pool of 30 layers."""
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from tieredkv.kernels import cpu_decode, cpu_prefill, reference

    headline(report, "attention", "gathered")
    compiled = cpu_decode.can_run(HEAD_DIM, HEADS // KV_HEADS, BLOCK_SIZE)
    num_layers, num_blocks, cpu = 30, 1000, torch.device("cpu")
    blocks = torch.randn(num_blocks, num_layers, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM).bfloat16()
    halves = blocks.view(-1, BLOCK_SIZE * KV_HEADS * HEAD_DIM)
    rng = np.random.default_rng(0)
    for lens in ([300], [1024], list(range(300, 340, 5)), list(range(300, 332))):
        width = -(-max(lens) // BLOCK_SIZE)
        tables = rng.permutation(num_blocks)[: len(lens) * width].reshape(len(lens), width).astype(np.int32)
        context_lens = np.asarray(lens, dtype=np.int32)
        plans = reference.plan_decode(tables, context_lens, num_layers, BLOCK_SIZE, torch.bfloat16, cpu)
        q = torch.randn(len(lens), HEADS, HEAD_DIM).bfloat16()

        def decode(q: torch.Tensor = q, plans: list[reference.DecodePlan] = plans) -> None:
            for layer in range(num_layers):
                reference.decode_groups(q, halves, layer, plans, KV_HEADS, 0.125)

        def decode_in_place(
            q: torch.Tensor = q, tables: NDArray[np.int32] = tables, context_lens: NDArray[np.int32] = context_lens
        ) -> None:
            for layer in range(num_layers):
                cpu_decode.paged_decode(q, blocks, layer, tables, context_lens, 0.125)

        name = f"decode, {len(lens)} sequences of about {lens[0]}, 30 layers"
        show(report, name, *((decode_in_place, decode) if compiled else (decode,)))
    for new, context in ((1024, 1024), (17, 1024), (256, 256)):
        table = rng.permutation(num_blocks)[: -(-context // BLOCK_SIZE)].astype(np.int32)
        plan = reference.plan_prefill(table, 0, new, context, num_layers, BLOCK_SIZE, cpu)
        q = torch.randn(new, HEADS, HEAD_DIM).bfloat16()

        def prefill(q: torch.Tensor = q, plan: reference.PrefillPlan = plan) -> None:
            for layer in range(num_layers):
                reference.prefill_planned(q, halves, layer, plan, KV_HEADS, 0.125)

        def prefill_in_place(q: torch.Tensor = q, table: NDArray[np.int32] = table, context: int = context) -> None:
            for layer in range(num_layers):
                cpu_prefill.paged_prefill(q, blocks, layer, table, context, 0.125)

        name = f"prefill, {new} of {context} tokens, 30 layers"
        in_place = compiled and cpu_prefill.can_run(HEAD_DIM, HEADS // KV_HEADS, BLOCK_SIZE)
        show(report, name, *((prefill_in_place, prefill) if in_place else (prefill,)))


def bench_small(report: Report) -> None:
    """Element-wise work, where the number of operations and of temporaries decides."""
    import torch
    from torch.nn import functional

    from tieredkv.fused import rotate
    from tieredkv.norm import Norm

    headline(report, "small operations", "torch")
    for rows in (1, 8, 1024):
        x = torch.randn(rows, HIDDEN).bfloat16()
        norm = Norm(torch.randn(HIDDEN).bfloat16(), 1e-5)
        gate, up = torch.randn(rows, 2 * INTERMEDIATE).bfloat16().chunk(2, -1)
        qk = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()[:, : HEADS + KV_HEADS]
        cos, sin = torch.randn(rows, 1, HEAD_DIM).bfloat16(), torch.randn(rows, 1, HEAD_DIM // 2).bfloat16()

        def normed(x: torch.Tensor = x, norm: Norm = norm) -> None:
            norm(x)

        def rms_norm(x: torch.Tensor = x, norm: Norm = norm) -> None:
            functional.rms_norm(x, (HIDDEN,), norm.weight, norm.eps)

        def activated(gate: torch.Tensor = gate, up: torch.Tensor = up) -> None:
            functional.silu(gate).mul_(up)

        def rotated(qk: torch.Tensor = qk, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> None:
            rotate(qk, cos, sin)

        show(report, f"RMS norm by weight normalisation, {rows} rows", normed, rms_norm)
        show(report, f"silu(gate) * up, {rows} rows", activated)
        show(report, f"rotary embedding, {rows} rows", rotated)


def main() -> None:
    parser = argparse.ArgumentParser(description="Micro-benchmarks of the CPU path.")
    parser.add_argument("what", choices=("steps", "linear", "attention", "small", "all"))
    parser.add_argument(
        "--profile", type=int, default=0, metavar="ROWS", help="with `steps`: also the ROWS dearest operations"
    )
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args()
    runtime.maybe_reexec(sys.argv)
    import torch

    torch.set_num_threads(runtime.num_cores())
    report = Report()
    parts: dict[str, Callable[[Report], None]] = {
        "steps": lambda report: bench_steps(report, options.profile),
        "linear": bench_linear,
        "attention": bench_attention,
        "small": bench_small,
    }
    with torch.inference_mode():
        for name, part in parts.items():
            if options.what in (name, "all"):
                part(report)
    if options.save:
        print(f"written to {report.save('kernels')}")


if __name__ == "__main__":
    main()
