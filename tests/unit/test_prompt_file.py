"""Prompt files: every line means what it says, and whatever is wrong with one names the file and the line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv import prompt_file
from tieredkv.errors import ConfigError
from tieredkv.prompt_file import PromptFile, parse_ttl
from tieredkv.types import Tier


def write(tmp_path, *lines: object):
    path = tmp_path / "prompts.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def test_lines_are_read_as_they_are(tmp_path):
    messages = [{"role": "user", "content": "hé"}]
    path = write(
        tmp_path,
        {"prompt": "one", "name": "first", "pin": True, "ttl": "5m", "cache_salt": "s", "tier": "host"},
        b"",
        {"messages": messages, "name": None, "ttl": 2.5},
        b"   ",
        {"tokens": [0, 1, 2**32 - 1]},
    )
    one, two, three = PromptFile(path)
    assert (one.number, one.prompt, one.name, one.pin, one.ttl_s, one.cache_salt, one.tier) == (
        1, "one", "first", True, 300.0, "s", Tier.HOST,
    )  # fmt: skip
    assert (two.number, two.messages, two.name, two.ttl_s, two.pin) == (3, messages, None, 2.5, False)
    assert (three.number, three.tokens, three.tier) == (5, [0, 1, 2**32 - 1], None)
    for line in (one, two, three):
        assert PromptFile(path).at(line.number, line.offset) == line


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    lines = list(PromptFile(path))
    assert [line.prompt for line in lines] == ["a", "b"]
    assert [PromptFile(path).at(line.number, line.offset).prompt for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"NaN", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ({}, "exactly one"),
        ({"prompt": None}, "exactly one"),
        ({"prompt": "a", "tokens": [1]}, "prompt and tokens"),
        ({"prompt": "a", "promt": 1}, "promt: unknown key"),
        ({"prompt": ""}, "prompt: must be text"),
        ({"prompt": ["a"]}, "prompt: must be text"),
        ({"messages": []}, "messages: must be"),
        ({"messages": "hi"}, "messages: must be"),
        ({"tokens": []}, "tokens: must be"),
        ({"tokens": [1, True]}, "tokens: must be"),
        ({"tokens": [1.0]}, "tokens: must be"),
        ({"tokens": [-1]}, "tokens: must be"),
        ({"tokens": [2**32]}, "tokens: must be"),
        ({"prompt": "a", "name": ""}, "name: must be"),
        ({"prompt": "a", "name": "n" * 201}, "name: must be"),
        ({"prompt": "a", "pin": 1}, "pin: must be true or false"),
        ({"prompt": "a", "ttl": 0}, "ttl: must be a time"),
        ({"prompt": "a", "ttl": True}, "ttl: must be a time"),
        ({"prompt": "a", "ttl": "1y"}, "ttl: must be a time"),
        ({"prompt": "a", "ttl": 1e12}, "ttl: must be a time"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt: must be"),
        ({"prompt": "a", "tier": "tape"}, "tier: must be one of device, host, disk"),
        ({"prompt": "a", "tier": ["disk"]}, "tier: must be one of"),
    ],
)
def test_what_is_wrong_names_file_and_line(tmp_path, line, words):
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as caught:
        list(PromptFile(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_line_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_file, "MAX_LINE_NBYTES", 1000)
    path = write(tmp_path, {"prompt": "fine"}, {"prompt": "x" * 2000})
    with pytest.raises(ConfigError, match=":2: longer than"):
        list(PromptFile(path))


def test_files_that_are_not_there_or_change(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        list(PromptFile(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(PromptFile(tmp_path))
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    last = list(PromptFile(path))[1]
    path.write_text("")
    with pytest.raises(ConfigError, match=":2: was changed"):
        PromptFile(path).at(last.number, last.offset)


def test_times():
    for text, seconds in {"30s": 30, "5m": 300, "1h": 3600, "7d": 604800, "90": 90, " 1.5h ": 5400}.items():
        assert parse_ttl(text) == seconds
    assert parse_ttl(10) == 10.0
    for wrong in ("", "h", "-1h", "1 week", "1e3", None, [], float("nan"), float("inf"), -1, "0s"):
        with pytest.raises(ValueError, match="must be a time"):
            parse_ttl(wrong)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=80), max_size=5))
def test_no_bytes_lead_to_another_error(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("fuzz") / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    problem = ""
    try:
        list(PromptFile(path))
    except ConfigError as error:
        problem = str(error)
    assert not problem or str(path) in problem
