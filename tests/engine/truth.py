"""What is right: greedy tokens of stock transformers, and how an engine is loaded and compared with them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tieredkv import LLM, SamplingParams


@cache
def stock_model(path: str):
    # transformers' SDPA knows no soft-capping.
    capped = getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None)
    attention = "eager" if capped else "sdpa"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


@torch.inference_mode()
def stock_tokens(path: str, prompt: list[int], num_tokens: int) -> list[int]:
    output = stock_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=1.0,
    )
    return output[0, len(prompt) :].tolist()


# What a test has loaded, for the fixture that closes it.
loaded: list[LLM] = []


def random_prompt(length: int, seed: int, vocab_size: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, vocab_size) for _ in range(length)]


def load(path: Path | str, **settings) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "block_size": 16, "kv_cache_memory": "64MiB", "max_model_len": 512}
    # The default would be gigabytes: a million slots for blocks as small as these.
    defaults["host_memory"] = "16MiB"
    llm = LLM(str(path), **defaults | settings)
    loaded.append(llm)
    return llm


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def check(llm: LLM, path, prompts: list[list[int]], num_tokens: int = 24) -> list:
    outputs = llm.generate(prompts, greedy(num_tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == stock_tokens(str(path), prompt, num_tokens), (
            f"prompt of {len(prompt)} tokens"
        )
        assert output.sources.total == len(prompt)
    llm.core.check_integrity()
    return outputs
