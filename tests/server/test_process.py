"""The serving process with the real engine on a tiny model: start, answer, drain on SIGTERM, exit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models_for_tests import build
from tieredkv.server.protocol import CompletionBody

ROOT = Path(__file__).resolve().parents[2]
LONG = "one two three four five six seven eight nine ten, " * 4


class Process:
    """`tieredkv serve` on a free port; `url` is read from the table that it prints."""

    def __init__(self, model: Path, *flags: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TIEREDKV_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tieredkv", "serve", str(model), "--port", "0", "--dtype", "float32",
             "--num-gpu-blocks-override", "200", *flags],
            cwd=ROOT, env=environ | {"COLUMNS": "200", "TIEREDKV_DISK_PATH": "none"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.table = ""
        self.errors: list[str] = []
        # The pipe must be read on, or a chatty process would block.
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.popen.stderr))
        self._reader.start()
        for line in self.popen.stdout:
            self.table += line
            if found := re.search(r"address.*(http://\S+)", line):
                self.url = found[1]
                return
        self.stop()
        raise AssertionError("".join(self.errors))

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(60)
        finally:
            self.popen.kill()
            self._reader.join()
            self.popen.stdout.close()
            self.popen.stderr.close()


@contextlib.contextmanager
def serving(model: Path, *flags: str):
    process = Process(model, *flags)
    try:
        yield process
    finally:
        process.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def served(model):
    """One process for the tests that leave it running."""
    with serving(model) as process, httpx.Client(base_url=process.url, timeout=60) as http:
        yield http


TOKENS = st.integers(0, 319)
VALID = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4)},
    optional={
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 400) | st.just(2**62),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "min_tokens": st.integers(0, 4),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(TOKENS.map(str), st.floats(-100, 100), max_size=3),
        "stop": st.lists(st.text(min_size=1, max_size=2), max_size=3),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "logprobs": st.none() | st.integers(0, 20),
    },
)
WRONG = st.dictionaries(
    st.sampled_from(sorted(CompletionBody.model_fields)),
    st.none() | st.booleans() | st.floats(-3, 3) | st.sampled_from([2**31, -(2**62), 1e300, -1e300, "", [], {}]),
    max_size=1,
)
PROMPTS = (
    st.text(min_size=1, max_size=20)
    | st.lists(TOKENS, min_size=1, max_size=40)
    | st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROMPTS, VALID, WRONG)
def test_no_parameters_break_the_engine(served, prompt, sampling, wrong):
    sampling = sampling | wrong
    response = served.post("/v1/completions", json={"prompt": prompt} | sampling)
    assert response.status_code in ((200, 400) if wrong or "min_tokens" in sampling else (200,)), response.text
    assert ('{"error"' in response.text) == (response.status_code == 400)
    if response.status_code == 200 and not sampling.get("stream"):
        usage = response.json()["usage"]
        assert sum(usage["tieredkv"].values()) == usage["prompt_tokens"]
    assert served.get("/health").status_code == 200


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=50))
def test_any_text_survives_the_tokenizer(served, text):
    tokens = served.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert served.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_metrics_tell_what_was_served(served):
    served.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2}).raise_for_status()
    text = served.get("/metrics").text
    assert "tieredkv:prefix_cache_queries_total" in text
    assert "tieredkv:request_success_total{" in text


def test_serve_answer_reuse_drain_exit(model):
    with serving(model, "--served-model-name", "tiny", "--drain-timeout", "60") as process:
        for told in ("tiny", "float32", "cpu", "200 of 16 tokens", "3,184"):
            assert told in process.table
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0)
        with client:
            first, again = (
                client.completions.create(model="tiny", prompt=LONG, temperature=0, max_tokens=8) for _ in range(2)
            )
            assert first.choices[0].text == again.choices[0].text
            assert first.usage.prompt_tokens_details.cached_tokens == 0
            assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 17
            for usage in (first.usage, again.usage):
                assert sum(usage.model_extra["tieredkv"].values()) == usage.prompt_tokens
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": LONG}], max_tokens=3, logprobs=True, top_logprobs=2
            )
            assert chat.usage.completion_tokens <= 3
            assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2

            stream = client.completions.create(
                model="tiny", prompt=LONG, max_tokens=1200, stream=True, extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )  # fmt: skip
            next(iter(stream))
            process.popen.send_signal(signal.SIGTERM)
            _wait_for_status(f"{process.url}/health", 503)
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model="tiny", prompt="x")
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]
            last = list(stream)[-1]
            assert last.usage.completion_tokens == 1200
        assert process.popen.wait(60) == 0
        process.stop()
        first, last = process.errors
        assert "stopping: 1 running" in first
        assert "stopped" in last


def test_the_drain_has_a_deadline_and_a_second_signal_ends_at_once(model):
    with serving(model, "--drain-timeout", "0") as process:
        with httpx.stream("POST", f"{process.url}/v1/completions", json=_endless(), timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error"' in rest[-2]
        assert process.popen.wait(60) == 0

    with (
        serving(model, "--drain-timeout", "600") as process,
        httpx.stream("POST", f"{process.url}/v1/completions", json=_endless(), timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGINT)
        _wait_for_status(f"{process.url}/health", 503)
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(60) == 128 + signal.SIGINT


def _endless() -> dict:
    return {"prompt": [5] * 100, "max_tokens": 1900, "ignore_eos": True, "stream": True}


def _wait_for_status(url: str, status: int) -> None:
    """Ask until the answer is `status`; each question is a round trip, and the process's own deadline ends a wait in vain."""
    for _ in range(10_000):
        if httpx.get(url).status_code == status:
            return
    raise AssertionError(f"{url} never answered {status}")
