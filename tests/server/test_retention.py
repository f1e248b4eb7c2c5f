"""What requests ask to keep: marks become tokens of the prompt, whatever the template does; nonsense is an error."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.fake_engine import MODEL, SYSTEM, USER, ByteTokenizer
from tieredkv.errors import RequestError
from tieredkv.server.breakpoints import locate, parse_breakpoints
from tieredkv.types import DEFAULT_PRIORITY, RETAINED_PRIORITY, Retention

MARK = {"type": "ephemeral"}


def text(words: str, mark: object = None) -> dict:
    return {"type": "text", "text": words} | ({} if mark is None else {"cache_control": mark})


def ask(http, messages, **more):
    return http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1, **more})


def test_a_marked_part_is_kept_up_to_its_end(http, engine):
    system = {"role": "system", "content": [text("rules"), text("manual", MARK), text("date")]}
    answer = ask(http, [system, {"role": "user", "content": [text("hi", {"type": "ephemeral", "ttl": "1h"})]}])
    assert answer.status_code == 200
    assert "cached_tokens" in answer.json()["usage"]["prompt_tokens_details"]
    (request,) = engine.submitted
    first, second = request.retention
    assert request.prompt_token_ids[: first.num_tokens] == [SYSTEM, *b"rules\nmanual"]
    assert request.prompt_token_ids[: second.num_tokens] == [SYSTEM, *b"rules\nmanual\ndate", USER, *b"hi"]
    assert (first.priority, first.ttl_s, second.ttl_s) == (RETAINED_PRIORITY, 300, 3600)
    assert RETAINED_PRIORITY > DEFAULT_PRIORITY


def test_a_whole_message_can_be_marked(http, engine):
    ask(http, [{"role": "user", "content": "abc", "cache_control": MARK}])
    assert engine.submitted[0].retention == (Retention(4, RETAINED_PRIORITY, 300),)


def test_a_whole_prompt_can_be_kept(http, engine):
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    marked = {"type": "ephemeral", "ttl": "5m", "priority": 80}
    assert http.post("/v1/completions", json=body | {"prompt_cache_retention": "24h"}).status_code == 200
    assert http.post("/v1/completions", json=body | {"prompt_cache_retention": "in_memory"}).status_code == 200
    assert http.post("/v1/completions", json=body | {"cache_control": marked}).status_code == 200
    assert [r.retention for r in engine.submitted] == [
        (Retention(5, RETAINED_PRIORITY, 86400),),
        (),
        (Retention(5, 80, 300),),
    ]


def test_the_cache_key_is_the_prompts_name(http, engine):
    ask(http, [{"role": "user", "content": "abc"}], prompt_cache_key="support-bot")
    ask(http, [{"role": "user", "content": "abc"}])
    assert [r.prefix_name for r in engine.submitted] == ["support-bot", None]
    assert {r.owner for r in engine.submitted} == {"shared"}


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ("ephemeral", "cache_control"),
        ({}, "cache_control"),
        ({"type": "eternal"}, "cache_control"),
        ({"type": "ephemeral", "ttl": "7d"}, "ttl"),
        ({"type": "ephemeral", "ttl": 300}, "ttl"),
        ({"type": "ephemeral", "priority": 101}, "priority"),
        ({"type": "ephemeral", "priority": True}, "priority"),
    ],
)
def test_wrong_marks_are_refused_by_name(http, mark, param):
    for answer in (
        ask(http, [{"role": "user", "content": [text("abc", mark)]}]),
        ask(http, [{"role": "user", "content": "abc"}], cache_control=mark),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].endswith(param)


def test_a_fifth_mark_is_refused(http):
    marked = {"role": "user", "content": [text("x", MARK)]}
    assert ask(http, [marked] * 4).status_code == 200
    assert ask(http, [marked] * 5).status_code == 400


@pytest.mark.parametrize("wrong", [{"prompt_cache_retention": "1h"}, {"prompt_cache_key": "x" * 1000}])
def test_wrong_fields_are_refused(http, wrong):
    answer = ask(http, [{"role": "user", "content": "abc"}], **wrong)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in wrong


def picky(messages, **more):
    """A template that takes conversations in pairs only, and ends every one with its number of messages."""
    if len(messages) % 2 or any(m["role"] != ("user", "assistant")[i % 2] for i, m in enumerate(messages)):
        raise RequestError("the template refuses")
    return [*ByteTokenizer().apply_chat_template(messages, **more), len(messages)]


def dated(messages, **more):
    """A template whose beginning tells how much comes behind it."""
    return [sum(len(m["content"]) for m in messages) % 200, *ByteTokenizer().apply_chat_template(messages)]


def test_a_template_that_refuses_half_a_conversation_is_asked_differently():
    chat = [{"role": "user", "content": [text("abc", MARK), text("def")]}, {"role": "assistant", "content": "yes"}]
    plain = [{"role": "user", "content": "abc\ndef"}, chat[1]]
    prompt = picky(plain)
    (found,) = locate(parse_breakpoints(chat), plain, prompt, picky)
    assert prompt[: found.num_tokens] == [USER, *b"abc\n"]


def test_what_shares_nothing_is_left_out():
    chat = [{"role": "user", "content": [text("abc", MARK), text("def")]}]
    plain = [{"role": "user", "content": "abc\ndef"}]
    assert locate(parse_breakpoints(chat), plain, dated(plain), dated) == ()


whole = functools.partial(ByteTokenizer().apply_chat_template, add_generation_prompt=False)
words = st.text("ab\n", max_size=5)


@given(
    contents=st.lists(st.lists(st.tuples(words, st.booleans()), min_size=1, max_size=3), min_size=1, max_size=4),
    render=st.sampled_from([whole, picky, dated]),
)
def test_what_is_kept_is_a_prefix_of_what_comes_before_the_mark(contents, render):
    left = 4
    chat, plain = [], []
    for index, parts in enumerate(contents):
        marked = []
        for content, mark in parts:
            marked.append(text(content, MARK if mark and left else None))
            left -= mark and left > 0
        role = ("user", "assistant")[index % 2]
        chat.append({"role": role, "content": marked})
        plain.append({"role": role, "content": "\n".join(part["text"] for part in marked)})
    points = parse_breakpoints(chat)
    try:
        prompt = render(plain)
    except RequestError:
        return
    found = locate(points, plain, prompt, render)
    assert len(found) <= len(points)
    for point in found:
        assert 0 < point.num_tokens <= len(prompt)
    if render is whole:
        for point, retention in zip(points, found, strict=True):
            before = [*plain[: point.message], {**plain[point.message], "content": point.text}]
            assert prompt[: retention.num_tokens] == render(before)
