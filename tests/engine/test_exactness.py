"""In fp32, greedy tokens equal stock transformers', whatever is cached and whoever shares the batch.

The reference is `generate` of the unchanged transformers model with its own attention and its own cache.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.truth import check, greedy, load, random_prompt, stock_tokens
from tests.models_for_tests import ARCHITECTURES, WINDOWED
from tieredkv import LLM
from tieredkv.types import EngineRequest

SMOLLM2 = "smollm2-135m"
TEXT = (
    "A page cache keeps what was read from disk in memory, because what was read once is likely to be read again. "
    "When memory runs low, the pages that nobody has used for the longest time make room; those that were changed are "
    "written back first. The same idea serves a language model. The keys and values of a prompt cost a lot to compute "
    "and little to keep, and the next request often begins with the same words: a system prompt, a document, the "
    "conversation so far. "
)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_cold_warm_and_partly_warm(arch, folder):
    path = folder(arch)
    llm = load(path)
    prompts = [random_prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 31, 64, 97, 150)]
    for prompt in prompts:
        assert check(llm, path, [prompt])[0].num_cached_tokens == 0
    for prompt in prompts:
        assert check(llm, path, [prompt])[0].num_cached_tokens == min(len(prompt) // 16 * 16, len(prompt) - 1)
    longer = prompts[-1] + random_prompt(40, seed=1)
    assert check(llm, path, [longer])[0].num_cached_tokens == 144
    forked = prompts[-1][:70] + random_prompt(50, seed=2)
    assert check(llm, path, [forked])[0].num_cached_tokens == 64
    first = check(llm, path, [prompts[5]], num_tokens=40)[0]
    turn = prompts[5] + first.outputs[0].token_ids + random_prompt(9, seed=3)
    assert check(llm, path, [turn])[0].num_cached_tokens == 64


@pytest.mark.parametrize("budget", [4, 16, 33, 100])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunked_prefill(arch, budget, folder):
    path = folder(arch)
    llm = load(path, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [random_prompt(n, seed=n) for n in (5, 33, 120)]
    check(llm, path, prompts, num_tokens=8)
    check(llm, path, [p + random_prompt(37, seed=4) for p in prompts], num_tokens=8)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_preemption(arch, caching, folder):
    path = folder(arch)
    llm = load(path, num_gpu_blocks_override=12, max_model_len=128, enable_prefix_caching=caching)
    prompts = [random_prompt(40, seed=n) for n in range(4)]
    check(llm, path, prompts, num_tokens=40)
    assert llm.core.scheduler.num_preemptions > 0


def run_staggered(llm: LLM, requests: list[EngineRequest], seed: int) -> dict[str, list[int]]:
    """Add requests at random moments while others run."""
    rng = random.Random(seed)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    left = list(requests)
    while left or llm.core.has_work:
        for _ in range(rng.randrange(4)):
            if left:
                llm.core.add(left.pop(0))
        for output in llm.core.step():
            tokens[output.request_id].extend(output.new_token_ids)
    llm.core.check_integrity()
    return tokens


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_sixteen_concurrent_mixed_requests(arch, folder):
    path = folder(arch)
    llm = load(path, num_gpu_blocks_override=60, max_num_batched_tokens=48, max_num_seqs=12, max_model_len=256)
    shared = random_prompt(50, seed=99)
    prompts = {}
    for i in range(16):
        own = random_prompt(3 + 7 * i, seed=i)
        prompts[f"r{i}"] = shared + own if i % 3 else own
    prompts["r7"] = prompts["r4"]
    requests = [EngineRequest(name, p, greedy(6 + 2 * i)) for i, (name, p) in enumerate(prompts.items())]
    tokens = run_staggered(llm, requests, seed=5)
    for i, (name, prompt) in enumerate(prompts.items()):
        assert tokens[name] == stock_tokens(str(path), prompt, 6 + 2 * i), name


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(block_size, folder):
    path = folder(ARCHITECTURES[0])
    llm = load(path, block_size=block_size)
    prompt = random_prompt(130, seed=1)
    check(llm, path, [prompt])
    assert check(llm, path, [prompt])[0].num_cached_tokens == 129 // block_size * block_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("budget", [4, 33, 512])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *WINDOWED])
def test_every_precision_serves_every_shape(arch, budget, dtype, folder):
    """Not for equality, which only float32 promises: steps of any shape, also those in which nothing is sampled, run."""
    llm = load(folder(arch), dtype=dtype, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [random_prompt(n, seed=n) for n in (1, 2, 4, 5, 15, 16, 17, 33, 66, 120)]
    for _ in range(2):
        outputs = [*llm.generate(prompts, greedy(5)), *(llm.generate(p, greedy(2))[0] for p in prompts)]
        assert [len(o.outputs[0].token_ids) for o in outputs] == [5] * len(prompts) + [2] * len(prompts)
        assert all(o.sources.total == len(o.prompt_token_ids) for o in outputs)
        llm.core.check_integrity()


@pytest.mark.smollm2
def test_smollm2_takes_prompts_longer_than_a_step():
    llm = load(SMOLLM2, dtype="bfloat16", num_gpu_blocks_override=300, max_model_len=4096)
    (output,) = llm.generate(random_prompt(2500, seed=1), greedy(3))
    assert len(output.outputs[0].token_ids) == 3
    assert llm.generate(random_prompt(2500, seed=1), greedy(3))[0].num_cached_tokens == 2496


@pytest.mark.smollm2
def test_smollm2_on_real_text():
    llm = load(SMOLLM2, num_gpu_blocks_override=80, max_model_len=1024, max_num_batched_tokens=256)
    path = str(llm.model_folder)
    encode = llm.tokenizer.encode
    document = encode(TEXT * 4)
    assert len(document) > 300
    questions = ["What is a page cache?", "Write a haiku about memory.", "Why keep keys and values?"]
    prompts = [document + encode(q) for q in questions] + [encode(q) for q in questions]
    # Cold and side by side: the document is computed once.
    outputs = check(llm, path, prompts, num_tokens=24)
    assert sum(o.sources.computed for o in outputs) < len(document) + 16 * 6 + sum(map(len, map(encode, questions))) * 2
    # Warm, one by one.
    for prompt in prompts:
        output = check(llm, path, [prompt], num_tokens=24)[0]
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    # A second turn of a chat.
    messages = [{"role": "user", "content": "Name three colours. " + TEXT}]
    first = llm.tokenizer.apply_chat_template(messages)
    answer = check(llm, path, [first], num_tokens=40)[0].outputs[0].token_ids
    turn = first + answer + encode("\nAnd three more?")
    assert check(llm, path, [turn])[0].num_cached_tokens == (len(first) + 39) // 16 * 16
