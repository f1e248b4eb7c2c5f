"""Models, tokenize, detokenize, health, version, metrics."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import running_server
from tests.server.fake_engine import ASSISTANT, MODEL, USER, FakeEngine
from tieredkv import __version__


def test_models(client, engine):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tieredkv")
    assert model.max_model_len == engine.max_model_len
    assert client.models.retrieve(MODEL).id == MODEL


def test_all_served_names_work_and_are_answered_with():
    import httpx

    with (
        running_server(FakeEngine(), served_model_name=["org/one", "two"]) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["org/one", "two"]
        assert http.get("/v1/models/org/one").json()["id"] == "org/one"
        for name, told in (("org/one", "org/one"), ("two", "two"), (None, "org/one")):
            assert http.post("/v1/completions", json={"model": name, "prompt": "x"}).json()["model"] == told
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 404


def test_tokenize_a_prompt(http, engine):
    answer = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": engine.max_model_len, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_tokenize_messages(http):
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert http.post("/tokenize", json=body).json()["tokens"] == [USER, 97, ASSISTANT]
    assert http.post("/tokenize", json=body | {"add_generation_prompt": False}).json()["tokens"] == [USER, 97]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_tokenize_needs_one_of_both(http, body):
    assert http.post("/tokenize", json=body).status_code == 400


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=6000))
def test_detokenize_undoes_tokenize(http, text):
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize("tokens", [[-1], [260], [2**62], "x", [True], None])
def test_detokenize_checks_its_tokens(http, tokens):
    response = http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def test_health_tells_what_does_not_work_while_requests_are_served(http, engine):
    engine.worries = ["the disk tier does not work"]
    health = http.get("/health")
    assert (health.status_code, health.json()) == (200, {"warnings": engine.worries})


def test_probes(http):
    health = http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert http.get("/version").json() == {"version": __version__}
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "tieredkv:fake_total" in metrics.text
