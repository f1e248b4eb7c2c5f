"""Part "graphs": greedy decoding with and without CUDA graphs: the same tokens, and the time of a step.

In float32 the tokens must be equal. In bfloat16, where sums depend on how a context is split, the share of equal ones is
reported and not judged: there the time matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu_check.random_model import make_runner, random_model, settings, shared_model
from benchmarks.gpu_check.report import Row
from benchmarks.gpu_check.serving import Answer, ask, serving
from benchmarks.gpu_check.tiers import prompts_of
from benchmarks.gpu_check.worker import Context
from tieredkv.errors import InvariantError
from tieredkv.models import LoadedModel


def graphs(context: Context) -> Iterator[Row]:
    """Both models, each with and without graphs, at every batch size."""
    exact = random_model(context.sizes.exact_model, context.sizes.block_size, context.device)
    found = decoded(context, exact)
    for batch, (with_graphs, eagerly) in zip(context.sizes.graph_batches, zip(*found, strict=True), strict=True):
        same = share_of_equal_tokens(with_graphs, eagerly)
        name = f"{exact.layout.dtype}, batch {batch}: graphs = eager"
        yield Row("graphs", name, f"{same:.0%} of tokens equal", "100%", ok=same == 1.0)
    del exact
    context.device.release()
    loaded = shared_model(context)
    found = decoded(context, loaded)
    for batch, (with_graphs, eagerly) in zip(context.sizes.graph_batches, zip(*found, strict=True), strict=True):
        graph_s, eager_s = step_s(with_graphs), step_s(eagerly)
        same = share_of_equal_tokens(with_graphs, eagerly)
        yield Row(
            "graphs",
            f"{loaded.layout.dtype}, batch {batch}",
            f"{graph_s * 1e3:.2f} ms a token ({batch / graph_s:.0f} tokens/s), eager {eager_s * 1e3:.2f} ms; "
            f"{same:.0%} equal",
            data={"graph_s": graph_s, "eager_s": eager_s, "tokens_per_s": batch / graph_s, "equal": same},
        )


def decoded(context: Context, loaded: LoadedModel) -> list[list[list[Answer]]]:
    """Answers with graphs and without, per batch size."""
    sizes = context.sizes
    largest, length = max(sizes.graph_batches), sizes.graph_context + sizes.graph_tokens
    num_blocks = 1 + largest * -(-length // sizes.block_size)
    found = []
    for eager in (False, True):
        config = settings(
            context,
            loaded,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=largest,
            max_model_len=length,
            enable_prefix_caching=False,
            enforce_eager=eager,
        )
        runner = make_runner(context, loaded, config)
        if runner.replays == eager:
            raise InvariantError("decode steps could not be captured" if not eager else "captured although eager")
        with serving(runner, config) as core:
            for _ in range(2):
                # The first time warms up.
                answers = [
                    ask(core, prompts_of([sizes.graph_context] * batch, loaded.vocab_size, 4), sizes.graph_tokens)
                    for batch in sizes.graph_batches
                ]
            found.append(answers)
        del runner, core
        context.device.release()
    return found


def step_s(answers: Sequence[Answer]) -> float:
    """Seconds a token, from when all sequences had their first one."""
    began_s = max(answer.first_s for answer in answers)
    num_steps = min(len(answer.tokens) for answer in answers) - 1
    return (max(answer.last_s for answer in answers) - began_s) / num_steps


def share_of_equal_tokens(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.tokens, b.tokens, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
