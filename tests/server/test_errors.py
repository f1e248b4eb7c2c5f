"""What cannot be honoured is refused in OpenAI's shape, with the field named, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.server.conftest import running_server
from tests.server.fake_engine import MODEL, FakeEngine
from tieredkv.errors import RequestError
from tieredkv.hashing import tenant_salt
from tieredkv.server.entrance import match_key
from tieredkv.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def refused(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


def alive(http):
    assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**80}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop.0"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [260]}, "stop_token_ids"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 1, "007": 2}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_json": {}}, "guided_json"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"model": 5}, "model"),
]
BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages.0.content.0",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages.0.name"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template": "x"}, "chat_template"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_bad_completions_name_their_field(http, engine, body, param):
    given = {"prompt": "x"} | body if param != "prompt" else body
    refused(http.post(COMPLETIONS, json=given), 400, param)
    assert not engine.submitted


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_bad_chats_name_their_field(http, engine, body, param):
    refused(http.post(CHAT, json={"messages": MESSAGES} | body), 400, param)
    assert not engine.submitted


@pytest.mark.parametrize("body", [
    {"tools": [], "tool_choice": "none"},
    {"tool_choice": "auto"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"},
    {"no_such_field": {"deep": [1]}},
    {"temperature": 0, "top_p": 1},
    {"best_of": 1, "use_beam_search": False, "prompt_logprobs": None, "length_penalty": 1.0},
])  # fmt: skip
def test_fields_that_ask_for_nothing_are_accepted(http, body):
    assert http.post(CHAT, json={"messages": MESSAGES} | body).status_code == 200


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": [1] * 512}),
    (COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 20}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}),
])  # fmt: skip
def test_too_long_says_so_with_both_numbers(http, path, body):
    error = refused(http.post(path, json=body), 400, "max_tokens", "context_length_exceeded")
    assert "512" in error["message"]


RAW_BODIES = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\x00"}',
    b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"prompt": "x", "a": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b'\xef\xbb\xbf{"prompt": "x"}',
]


@pytest.mark.parametrize("raw", RAW_BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_invalid_json_is_a_400(http, path, raw):
    assert http.post(path, content=raw, headers=JSON).status_code == 400
    alive(http)


def test_escaped_null_bytes_and_duplicate_keys_are_harmless(http, engine):
    assert http.post(COMPLETIONS, content=b'{"prompt": "a", "prompt": "\\u0000b"}', headers=JSON).status_code == 200
    assert engine.submitted[0].prompt_token_ids == [0, 98]


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_media_types_are_refused(http, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    refused(http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 415)


def test_compressed_bodies_are_refused(http):
    refused(http.post(COMPLETIONS, content=b"x", headers=JSON | {"content-encoding": "gzip"}), 415)


def test_a_body_over_the_limit_is_a_413(http):
    refused(http.post(COMPLETIONS, json={"prompt": "x" * 70_000}), 413, code="request_too_large")
    alive(http)


def test_a_chunked_body_over_the_limit_is_a_413(server, http):
    """Without a content-length, and without an end: the server stops reading by itself."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                raw.sendall(chunk)
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413")
    alive(http)


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"GET /", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 600),
        (b"GET /health HTTP/1.1\r\na: ", b"x" * 4096),
        (
            b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n1;",
            b"x" * 4096,
        ),
    ],
    ids=["path", "headers", "header", "chunk extension"],
)
def test_an_endless_head_is_cut_off(server, http, start, endless):
    with socket.create_connection(("127.0.0.1", server.port), 20) as raw, pytest.raises(ConnectionError):
        raw.sendall(start + endless * 10_000)
    alive(http)


@pytest.mark.parametrize(
    "raw", [b"\r\n" * 9, b"nonsense\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200)]
)
def test_malformed_http_closes_the_connection(server, http, raw):
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    alive(http)


def test_too_many_sequences_are_refused(http, engine):
    refused(http.post(COMPLETIONS, json={"prompt": ["x"] * 1025}), 400, "prompt")
    refused(http.post(COMPLETIONS, json={"prompt": ["x"] * 100, "n": 11}), 400, "n")
    assert not engine.submitted


def test_unknown_models(http, client):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES}), ("/tokenize", {"prompt": "x"})):
        refused(http.post(path, json={"model": "other", **body}), 404, "model", "model_not_found")
    refused(http.get("/v1/models/other"), 404, "model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/", 404),
    ("GET", "/v1", 404),
    ("GET", "/v1/models/", 404),
    ("POST", "/v1/embeddings", 404),
    ("GET", COMPLETIONS, 405),
    ("DELETE", CHAT, 405),
    ("POST", "/health", 405),
    ("POST", "/v1/models", 405),
])  # fmt: skip
def test_unknown_paths_and_methods(http, method, path, status):
    response = http.request(method, path)
    refused(response, status, "model" if path == "/v1/models/" else None)
    assert ("allow" in response.headers) == (status == 405)


def test_a_full_queue_is_a_429_with_retry_after(http, engine):
    engine.full = True
    response = http.post(COMPLETIONS, json={"prompt": "x", "n": 3})
    refused(response, 429, code="rate_limit_exceeded")
    assert response.headers["retry-after"] == "7"
    engine.full = False
    alive(http)


def test_a_sick_engine_is_a_503(http, engine):
    engine.unhealthy = "the engine has stopped"
    for response in (http.get("/health"), http.post(COMPLETIONS, json={"prompt": "x"})):
        error = refused(response, 503)
        assert "the engine has stopped" in error["message"]
        assert response.headers["retry-after"]
    assert http.get("/metrics").status_code == 200


def test_an_engine_failure_is_a_500_and_frees_all_choices(http, engine):
    engine.fail_after = 2
    error = refused(http.post(COMPLETIONS, json={"prompt": ["x", "y"], "n": 2}), 500)
    assert error["message"] == "it broke"
    engine.wait_for(lambda: not engine.running)


def test_an_engine_failure_in_a_stream_is_an_event_before_done(http, engine):
    engine.fail_after = 2
    response = http.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    *_, error, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "it broke"


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unforeseen_exception_is_a_500_without_its_text(http, engine, streaming, caplog):
    def broken(request):
        raise ZeroDivisionError("a secret")

    engine.check, original = broken, engine.check
    try:
        response = http.post(COMPLETIONS, json={"prompt": "x", "stream": streaming})
        refused(response, 500)
        assert "secret" not in response.text
        assert "a secret" in caplog.text
    finally:
        engine.check = original
    alive(http)


def test_request_ids_are_echoed_or_made(http):
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 129, "ü"):
        made = http.get("/health", headers=[(b"x-request-id", bad.encode())]).headers["x-request-id"]
        assert len(made) == 32


@pytest.fixture(scope="module")
def keyed():
    with running_server(FakeEngine(), api_key=["key-a", "schlüssel"]) as server:
        yield server


class TestKeys:
    @pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer key", "Bearer key-aa", "Basic key-a", "key-a"])
    @pytest.mark.parametrize("path", ["/v1/models", COMPLETIONS, "/tokenize", "/detokenize", "/nowhere"])
    def test_everything_else_needs_a_key(self, keyed, header, path):
        headers = {} if header is None else {"authorization": header}
        response = httpx.post(keyed.url + path, json={"prompt": "x"}, headers=headers)
        refused(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
    def test_probes_need_none(self, keyed, path):
        assert httpx.get(keyed.url + path).status_code == 200

    def test_each_key_is_a_tenant_and_a_salt_splits_it_further(self, keyed):
        keyed.engine.reset()
        for key, salt in (("key-a", None), ("schlüssel", None), ("key-a", "s"), ("schlüssel", "s")):
            body = {"prompt": "x", "cache_salt": salt}
            headers = {"authorization": b"bearer " + key.encode()}
            assert httpx.post(keyed.url + COMPLETIONS, json=body, headers=headers).status_code == 200
        tenants = [r.tenant for r in keyed.engine.submitted]
        assert len(set(tenants)) == 4
        assert tenants[0] == tenant_salt(api_key="key-a")
        assert tenants[3] == tenant_salt(api_key="schlüssel", cache_salt="s")

    def test_the_official_client(self, keyed):
        with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="key-a", max_retries=0) as good:
            assert good.models.list().data[0].id == MODEL
        bad = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="nope", max_retries=0)
        with bad, pytest.raises(openai.AuthenticationError):
            bad.models.list()

    def test_every_key_is_compared(self):
        assert match_key([b"a", b"b", b"a"], b"a") == 2
        assert match_key([b"a"], b"") is None
        assert match_key([], b"a") is None


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({f for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody) for f in kind.model_fields})
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=6)
PATHS = st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
GOOD = {"prompt": "x", "messages": MESSAGES, "tokens": [1]}


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PATHS, BODIES, st.booleans())
def test_no_body_makes_a_500(http, path, body, with_good):
    response = http.post(path, content=json.dumps((GOOD if with_good else {}) | body).encode(), headers=JSON)
    assert response.status_code in (200, 400, 404), response.text


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PATHS, st.binary(max_size=200))
def test_no_bytes_make_a_500(http, path, raw):
    assert http.post(path, content=raw, headers=JSON).status_code in (200, 400, 404)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "stop_token_ids", ["x"] * 5000),
        ("/v1/completions", "stop", [1] * 5000),
        ("/v1/completions", "logit_bias", {str(i): "x" for i in range(3000)}),
        ("/detokenize", "tokens", ["x"] * 5000),
    ],
)
def test_a_long_list_of_mistakes_is_one_mistake(path, field, value):
    kind = {"/v1/completions": CompletionBody, "/detokenize": DetokenizeBody}[path]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"prompt": "x", field: value})
    assert caught.value.error_count() == 1
    with pytest.raises(RequestError) as answer:
        parse(kind, {"prompt": "x", field: value})
    assert answer.value.param.startswith(field)
