"""What is warmed is what requests ask for: encoded lines are beginnings of the prompts that the server makes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models_for_tests import CHAT_TEMPLATE, hf_tokenizer
from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import owner_label, tenant_salt
from tieredkv.prompt_file import PromptFile
from tieredkv.server.prompts import encode_beginning, parse_messages
from tieredkv.server.warm import check_prompt_file, deferred_prompts, encode_line, encode_logged
from tieredkv.tokenizer import Tokenizer
from tieredkv.types import Tier

# The system message is part of the first question; roles must alternate; closed answers end with a token.
MERGING = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% if not rest %}{{ raise_exception('a user must speak first') }}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.index0 == 0 else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# What the assistant thinks is shown only behind the last question.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n</think>\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# One question, one answer, nothing else.
SINGLE = (
    "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    "{{ '<|im_start|>' + messages[0]['content'] }}"
)
TEMPLATES = {"chatml": CHAT_TEMPLATE, "merging": MERGING, "thinking": THINKING}


@pytest.fixture(scope="module")
def tokenizer():
    return lambda template=None: Tokenizer(hf_tokenizer(), template)


def message(role, content):
    return {"role": role, "content": content}


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(deadline=None, max_examples=60)
@given(
    head=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), min_size=1, max_size=4),
    system=st.booleans(),
    more=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), min_size=0, max_size=3),
)
def test_every_chat_that_starts_so_starts_with_it(tokenizer, template, head, system, more):
    """But for the last token: what follows may merge with it."""
    made = tokenizer(TEMPLATES[template])
    turns = [message(("user", "assistant")[i % 2], text) for i, text in enumerate(head)]
    start = ([message("system", "be brief")] if system else []) + turns
    ids = encode_beginning(made, start)
    chat = start + [message(("user", "assistant")[(len(turns) + i) % 2], text) for i, text in enumerate(more)]
    if chat[-1]["role"] == "assistant":
        chat.append(message("user", "and?"))
    whole = made.apply_chat_template(chat)
    assert whole[: len(ids) - 1] == ids[:-1]


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_holds_all_of_the_messages(tokenizer, template):
    made = tokenizer(TEMPLATES[template])
    start = [message("system", "be brief"), message("user", "what is a block?")]
    text = text_of(made, encode_beginning(made, start))
    assert "be brief" in text
    assert "what is a block?" in text
    system_only = text_of(made, encode_beginning(made, start[:1]))
    assert "be brief" in system_only
    assert "Why" not in system_only
    assert "7" not in system_only


def test_the_turn_of_the_assistant_belongs_to_it_only_where_all_chats_have_it(tokenizer):
    chatml = tokenizer()
    user = [message("user", "hi")]
    assert text_of(chatml, encode_beginning(chatml, user)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    thinking = tokenizer(THINKING)
    assert not text_of(thinking, encode_beginning(thinking, user)).endswith("<think>\n")
    single = tokenizer(SINGLE)
    assert encode_beginning(single, user) == single.apply_chat_template(user)
    with pytest.raises(RequestError, match="one message only"):
        encode_beginning(single, [message("system", "a"), message("user", "b")])


def write(tmp_path, *lines):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_are_encoded_as_requests_are(tokenizer, tmp_path):
    made = tokenizer()
    chat = [message("developer", "be brief"), message("user", [{"type": "text", "text": "hi"}])]
    path = write(tmp_path, {"prompt": "a text"}, {"messages": chat}, {"tokens": [7, 8]})
    one, two, three = (encode_line(made, path, line) for line in PromptFile(path))
    assert one == made.encode("a text")
    assert two == encode_beginning(made, parse_messages(chat))
    assert three == [7, 8]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text part"),
    ],
)
def test_bad_messages_are_found_before_a_model_is_loaded(tmp_path, line, words):
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError, match=rf"p\.jsonl:2: messages: .*{words}"):
        check_prompt_file(path)


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        check_prompt_file(write(tmp_path))


def test_each_key_gets_its_own(tokenizer, tmp_path):
    path = write(
        tmp_path,
        {"prompt": "a"},
        {"tokens": [1], "pin": True, "name": "n", "ttl": 9, "cache_salt": "s", "tier": "host"},
    )
    found = deferred_prompts(path, check_prompt_file(path), tokenizer(), ("key-1", "key-2"))
    assert [(item.number, item.pin) for item in found] == [(1, False), (1, False), (2, True), (2, True)]
    prompts = [item.load() for item in found]
    assert [prompt.owner for prompt in prompts] == [owner_label("key-1"), owner_label("key-2")] * 2
    assert prompts[3].tenant == tenant_salt(api_key="key-2", cache_salt="s")
    assert (prompts[3].name, prompts[3].ttl_s, prompts[3].tier, prompts[3].pin) == ("n", 9.0, Tier.HOST, True)
    (shared, _) = deferred_prompts(path, check_prompt_file(path), tokenizer(), ())
    assert (shared.load().tenant, shared.load().owner) == (b"", "shared")


def test_logged_requests_are_encoded_as_they_were_served(tokenizer):
    made = tokenizer()
    chat = [message("user", "hi")]
    assert encode_logged(made, {"messages": chat, "model": "m"}) == [made.apply_chat_template(chat)]
    assert encode_logged(made, {"prompt": ["a", "b"]}) == [made.encode("a"), made.encode("b")]
    assert encode_logged(made, {"prompt": [[1], [2, 3]]}) == [[1], [2, 3]]
    for wrong in ({}, {"prompt": 3}, {"messages": [1]}):
        with pytest.raises(RequestError):
            encode_logged(made, wrong)
