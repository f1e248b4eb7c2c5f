"""The offline API in the shape that vLLM's users know, over the real engine on a tiny model."""

from __future__ import annotations

import math

import pytest

from tests.models_for_tests import build
from tieredkv import LLM, SamplingParams
from tieredkv.errors import ConfigError, RequestError, UnsupportedModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(build("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", dtype="float32", num_gpu_blocks_override=100, max_model_len=512)


@pytest.fixture(autouse=True)
def _clean(request):
    yield
    if "llm" in request.fixturenames:
        core = request.getfixturevalue("llm").core
        assert not core.has_work
        core.check_integrity()
        assert core.pool.num_free == core.pool.num_usable


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_prompts_come_as_text_tokens_or_mappings(llm):
    text = "the cache keeps the blocks of a prompt"
    ids = llm.tokenizer.encode(text)
    outputs = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY)
    assert len({o.outputs[0].text for o in outputs}) == 1
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert outputs[0].prompt == text
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate(["one", "two", "three"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 9]
    with pytest.raises(RequestError):
        llm.generate(["one", "two"], params)


def test_chat_reuses_the_conversation_so_far(llm):
    messages = [{"role": "user", "content": "the next prompt reads the blocks again " * 3}]
    first = llm.chat(messages, GREEDY)[0]
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "again"},
    ]
    second = llm.chat([messages], GREEDY)[0]
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 - 16 > 0
    assert second.sources.total == len(second.prompt_token_ids)


def test_warm_computes_once(llm):
    llm.reset_prefix_cache()
    prompt = "one two three four five six seven eight nine ten " * 4
    (before,) = llm.warm(prompt)
    (after,) = llm.warm(prompt)
    assert before.cached == 0
    assert after.cached == (after.total - 1) // 16 * 16 > 0
    assert llm.reset_prefix_cache()
    assert llm.warm(prompt)[0].cached == 0


def test_salts_share_nothing(llm):
    prompt = "keys and values of sixteen tokens over all layers " * 3
    llm.generate(prompt, GREEDY, cache_salt="a")
    assert llm.generate(prompt, GREEDY, cache_salt="b")[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, cache_salt="a")[0].num_cached_tokens > 0


def test_n_answers_with_a_seed_are_reproducible_and_differ(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=16, ignore_eos=True)
    first, second = (llm.generate("one two", params)[0] for _ in range(2))
    texts = [c.token_ids for c in first.outputs]
    assert texts == [c.token_ids for c in second.outputs]
    assert len(set(map(tuple, texts))) > 1
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    alone = llm.generate("one two", params.replace(n=1, seed=8))[0]
    assert alone.outputs[0].token_ids == texts[1]


def test_stop_strings_end_the_text_and_free_the_blocks(llm):
    whole = (
        llm.generate("a block holds", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0].text
    )
    stop = whole[12:15]
    at = whole.index(stop)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,))
    output = llm.generate("a block holds", params)[0].outputs[0]
    assert output.text == whole[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = llm.generate("a block holds", params.replace(include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == whole[: at + len(stop)]


def test_stop_tokens_are_counted_but_not_shown(llm):
    plain = llm.generate("a block", GREEDY)[0].outputs[0]
    stop = plain.token_ids[4]
    output = llm.generate("a block", GREEDY.replace(stop_token_ids=(stop,)))[0].outputs[0]
    end = plain.token_ids.index(stop) + 1
    assert output.token_ids == plain.token_ids[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == llm.tokenizer.decode(plain.token_ids[: end - 1])


def test_logprobs_are_parallel_to_tokens(llm):
    output = llm.generate("a block", GREEDY.replace(logprobs=3))[0].outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token_id
        assert entry.rank == 1
        assert entry.top[0][0] == token_id
        assert sum(math.exp(p) for _, p in entry.top) <= 1 + 1e-6
    assert output.cumulative_logprob == pytest.approx(sum(e.logprob for e in output.logprobs))


def test_bad_input_is_refused_before_anything_runs(llm):
    for bad, param in (([], "prompt"), ({"text": "x"}, "prompt"), ([10**6], "prompt"), ("x " * 2000, "prompt")):
        with pytest.raises(RequestError) as caught:
            llm.generate(["fine", bad], GREEDY)
        assert caught.value.param == param


def test_bad_settings_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, max_model_len=10**6)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, max_model_len=512, num_gpu_blocks_override=4)
    with pytest.raises(ConfigError, match="no_such_setting"):
        LLM(folder, no_such_setting=1)
    with pytest.raises((ConfigError, UnsupportedModelError)):
        LLM(str(tmp_path / "missing"))


def test_the_default_length_is_what_the_pool_holds(folder):
    llm = LLM(folder, device="cpu", dtype="float32", num_gpu_blocks_override=5)
    assert llm.core.max_model_len == 64
