"""The completion endpoints through the official client and through raw HTTP: what comes back is what the engine said."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fake_engine import ASSISTANT, EOS, MODEL, SYSTEM, USER
from tieredkv.hashing import tenant_salt
from tieredkv.types import TokenSources

PROMPT = "The quick brown fox jumps over the lazy dog."


def events(response):
    """The payloads of an SSE answer; checks the framing to the byte."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def stream(http, path, **body):
    response = http.post(path, json={"model": MODEL, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response)


def test_completion_with_the_official_client(client, engine):
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 14
    assert answer.usage.total_tokens == len(PROMPT) + 14
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert engine.submitted[0].sampling.max_tokens == 16
    assert engine.submitted[0].prompt_token_ids == list(PROMPT.encode())


def test_streamed_completion_with_the_official_client(client):
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello, world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(c.usage is None for c in chunks)


def test_chat_with_the_official_client(client, engine):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.role == "assistant"
    request = engine.submitted[0]
    assert request.prompt_token_ids == [SYSTEM, *b"Be kind.", USER, *b"Hi\nthere", ASSISTANT]
    assert request.sampling.max_tokens == engine.max_model_len - len(request.prompt_token_ids)


def test_streamed_chat_with_the_official_client(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi, how are you today?"}],
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=5,
            max_tokens=400,
        )
    )
    *tokens, last = chunks
    assert tokens[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in tokens) == "Hello"
    assert tokens[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert all(c.usage is None for c in tokens)


def test_the_first_event_comes_with_the_first_token_and_not_before(http, engine, server):
    engine.script = lambda request: [*"é!".encode(), EOS]
    first = stream(http, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}])
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    # The first token is half a character: its chunk is empty, and the character comes whole.
    assert [c["choices"][0]["delta"]["content"] for c in first[1:]] == ["", "é", "!", ""]
    assert len({c["id"] for c in first}) == 1


@pytest.mark.parametrize(
    ("options", "last_only", "everywhere"),
    [
        (None, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_usage_chunks_come_only_on_demand(http, path, body, options, last_only, everywhere):
    chunks = stream(http, path, **body, stream_options=options)
    with_usage = [chunk for chunk in chunks if "usage" in chunk]
    assert [chunk for chunk in chunks if chunk["choices"] == []] == (chunks[-1:] if last_only else [])
    if everywhere:
        counts = [c["usage"]["completion_tokens"] for c in with_usage]
        assert counts == sorted(counts)
        assert counts[-1] == 14
    else:
        assert len(with_usage) == last_only


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_add_up_and_cached_tokens_are_always_there(http, engine, streaming):
    engine.sources = lambda request: TokenSources(device=0, host=0, disk=0, computed=len(request.prompt_token_ids))
    if streaming:
        usage = stream(http, "/v1/completions", prompt=PROMPT, stream_options={"include_usage": True})[-1]["usage"]
    else:
        usage = http.post("/v1/completions", json={"prompt": PROMPT}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert sum(usage["tieredkv"].values()) == usage["prompt_tokens"] == len(PROMPT)


def test_sources_of_several_prompts_are_summed_once_per_prompt(http, engine):
    engine.sources = lambda request: TokenSources(device=8, host=4, disk=2, computed=len(request.prompt_token_ids) - 14)
    usage = http.post("/v1/completions", json={"prompt": [PROMPT, PROMPT + "!"], "n": 3}).json()["usage"]
    assert usage["prompt_tokens"] == 2 * len(PROMPT) + 1
    assert usage["completion_tokens"] == 6 * 14
    assert usage["tieredkv"] == {
        "device_tokens": 16,
        "host_tokens": 8,
        "disk_tokens": 4,
        "computed_tokens": usage["prompt_tokens"] - 28,
    }
    assert usage["prompt_tokens_details"]["cached_tokens"] == 28


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_all_shapes_of_a_prompt(client, engine, prompt):
    client.completions.create(model=MODEL, prompt=prompt)
    assert [r.prompt_token_ids for r in engine.submitted] == [[97, 98, 99]]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_prompts_and_choices_are_told_apart_by_index(http, engine, streaming):
    engine.script = lambda request: [*bytes(request.prompt_token_ids), *f"/{request.sampling.seed}".encode(), EOS]
    body = {"prompt": ["one", "three"], "n": 2, "seed": 5}
    if streaming:
        texts = {}
        for chunk in stream(http, "/v1/completions", **body):
            choice = chunk["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    else:
        answer = http.post("/v1/completions", json=body).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        texts = {c["index"]: c["text"] for c in answer["choices"]}
    assert texts == {0: "one/5", 1: "one/6", 2: "three/5", 3: "three/6"}
    assert len({r.request_id for r in engine.submitted}) == 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo_puts_the_prompt_in_front(http, streaming, prompt):
    if streaming:
        chunks = stream(http, "/v1/completions", prompt=prompt, echo=True)
        text = "".join(c["choices"][0]["text"] for c in chunks)
    else:
        text = http.post("/v1/completions", json={"prompt": prompt, "echo": True}).json()["choices"][0]["text"]
    assert text == "abcHello, world!"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hello, w")])
@pytest.mark.parametrize("per_step", [1, 3, 50])
def test_a_stop_string_ends_the_choice_and_the_sequence(http, engine, streaming, include, text, per_step):
    engine.tokens_per_step = per_step
    body = {"prompt": PROMPT, "stop": [", w", "never"], "include_stop_str_in_output": include}
    if streaming:
        *chunks, last = stream(http, "/v1/completions", **body, stream_options={"include_usage": True})
        choices = [c["choices"][0] for c in chunks]
        assert "".join(c["text"] for c in choices) == text
        choice, usage = choices[-1], last["usage"]
    else:
        answer = http.post("/v1/completions", json=body).json()
        choice, usage = answer["choices"][0], answer["usage"]
        assert choice["text"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ", w")
    assert usage["completion_tokens"] == 8
    engine.wait_for(lambda: not engine.running)


def test_completion_logprobs(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [*"Hello, world!", "<eos>"]
    assert logprobs.text_offset == list(range(14))
    assert logprobs.token_logprobs == [-0.25] * 13 + [-9999.0]
    assert logprobs.top_logprobs[0] == {"H": -0.25, "A": -0.5, "B": -1.5}


def test_streamed_completion_logprobs_are_the_same(http):
    whole = http.post("/v1/completions", json={"prompt": PROMPT, "logprobs": 1}).json()["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in stream(http, "/v1/completions", prompt=PROMPT, logprobs=1)]
    for key, value in whole.items():
        assert [item for part in parts for item in part[key]] == value


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"Hello, world!", "<eos>"]
    assert content[0].bytes == [ord("H")]
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("A", -0.5), ("B", -1.5)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_on_demand(http, path):
    body = {"prompt": PROMPT, "messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
    answer = http.post(path, json=body).json()
    assert answer["choices"][0]["token_ids"] == [*b"Hello, world!", EOS]
    chunks = stream(http, path, **body)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids") or []] == [*b"Hello, world!", EOS]


def test_all_sampling_fields_reach_the_engine(http, engine):
    wanted = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 9, "min_tokens": 2,
        "stop_token_ids": [4], "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    http.post("/v1/completions", json={"prompt": PROMPT, "stop": "zz", "logit_bias": {"7": -1}, **wanted})
    sampling = engine.submitted[0].sampling
    assert {key: getattr(sampling, key) for key in wanted if key != "stop_token_ids"} == {
        key: value for key, value in wanted.items() if key != "stop_token_ids"
    }
    assert sampling.stop_token_ids == (4,)
    assert sampling.stop == ("zz",)
    assert sampling.logit_bias == {7: -1.0}


def test_null_means_the_default(http, engine):
    body = dict.fromkeys(
        ("max_tokens", "logprobs", "temperature", "stop", "n", "stream", "logit_bias", "suffix", "seed")
    )
    assert http.post("/v1/completions", json={"prompt": PROMPT, **body}).status_code == 200
    assert engine.submitted[0].sampling.max_tokens == 16


def test_the_default_of_max_tokens_is_cut_to_what_fits(http, engine):
    assert http.post("/v1/completions", json={"prompt": [1] * (engine.max_model_len - 3)}).status_code == 200
    assert engine.submitted[0].sampling.max_tokens == 3


def test_the_salt_separates_tenants(http, engine):
    for salt in (None, "a", "b", "a"):
        http.post("/v1/completions", json={"prompt": PROMPT, "cache_salt": salt})
    tenants = [r.tenant for r in engine.submitted]
    assert tenants == [b"", tenant_salt(cache_salt="a"), tenant_salt(cache_salt="b"), tenant_salt(cache_salt="a")]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40), st.integers(1, 7), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_equals_the_whole_text(http, engine, text, per_step, stop):
    engine.script = lambda request: [*text.encode(), EOS]
    engine.tokens_per_step = per_step
    body = {"prompt": "x", "stop": stop, "max_tokens": 400}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    choices = [c["choices"][0] for c in stream(http, "/v1/completions", **body)]
    assert "".join(c["text"] for c in choices) == whole["text"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    found = [whole["text"].find(s) for s in stop]
    assert all(at < 0 for at in found)
    if not any(s in text for s in stop):
        assert whole["text"] == text
