"""Text comes out the same however the tokens arrive, and ends where a stop string begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.models_for_tests import VOCAB_SIZE, hf_tokenizer
from tieredkv.errors import ConfigError, RequestError
from tieredkv.tokenizer import Detokenizer, Tokenizer
from tieredkv.types import SamplingParams

TOKENIZER = Tokenizer(hf_tokenizer())
TOKENS = st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=40)
TEXT = st.text(st.sampled_from("ab the cache日é🙂\n"), max_size=30)


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a space marker and bytes for the rest, decoded as Llama 2's vocabulary is."""
    words = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    model = BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = BackendTokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


SENTENCEPIECE = sentencepiece_tokenizer()


def pushes(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    """The tokens cut into pushes at arbitrary places, empty ones among them."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def stream(tokenizer: Tokenizer, parts: list[list[int]], prompt: list[int], sampling: SamplingParams):
    """(text, stop string, tokens used) of a whole stream."""
    detokenizer = Detokenizer(tokenizer, prompt, sampling)
    text, used = "", 0
    for i, part in enumerate(parts):
        delta = detokenizer.push(part, finished=i == len(parts) - 1)
        text += delta.text
        used += delta.num_tokens_used
        if delta.stop is not None:
            return text, delta.stop, used
    return text, None, used


def cut_at_first_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Character by character: the text ends as soon as it contains a stop string, the longest one that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.booleans(), st.data())
def test_deltas_add_up_to_the_decoded_text(tokens, skip, data):
    sampling = SamplingParams(skip_special_tokens=skip)
    text, stop, used = stream(TOKENIZER, pushes(data, tokens), [5], sampling)
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=skip)
    assert (stop, used) == (None, len(tokens))


@settings(deadline=None, max_examples=400)
@given(
    st.one_of(TOKENS, TEXT.map(TOKENIZER.encode)),
    st.lists(st.text(st.sampled_from("ab the日🙂"), min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_text_ends_at_the_first_stop_string(tokens, stops, include, data):
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    text, stop, used = stream(TOKENIZER, pushes(data, tokens), [5], sampling)
    whole = TOKENIZER.decode(tokens)
    assert (text, stop) == cut_at_first_stop(whole, sampling.stop, include)
    if stop is not None and whole.isprintable() and "�" not in whole:
        assert stop in TOKENIZER.decode(tokens[:used])
        assert stop not in TOKENIZER.decode(tokens[: used - 1]).replace("�", "")


@settings(deadline=None, max_examples=200)
@given(TEXT, st.data())
def test_no_delta_shows_part_of_a_character(text, data):
    tokens = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams())
    for part in pushes(data, tokens):
        assert "�" not in detokenizer.push(part, finished=False).text
    assert detokenizer.push([], finished=True).text == ""


def test_an_unfinished_character_is_replaced_only_at_the_end():
    tokens = TOKENIZER.encode("a日")[:-1]
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams())
    assert detokenizer.push(tokens, finished=False).text == "a"
    assert detokenizer.push([], finished=True).text == "�"


def test_stop_strings_are_not_looked_for_within_min_tokens():
    tokens = [t for c in "abab" for t in TOKENIZER.encode(c)]
    assert len(tokens) == 4
    for min_tokens, expected in (
        (0, ("", "ab", 2)),
        (1, ("ab", "ab", 4)),
        (2, ("ab", "ab", 4)),
        (3, ("abab", None, 4)),
    ):
        sampling = SamplingParams(stop=("ab",), min_tokens=min_tokens)
        assert stream(TOKENIZER, [[t] for t in tokens] + [[]], [5], sampling) == expected


def test_nothing_follows_a_stop_string():
    detokenizer = Detokenizer(TOKENIZER, [5], SamplingParams(stop=("x",)))
    tokens = TOKENIZER.encode("ax") + TOKENIZER.encode("b")
    first = detokenizer.push(tokens, finished=False)
    assert (first.text, first.stop, first.num_tokens_used) == ("a", "x", len(tokens) - 1)
    assert detokenizer.push(tokens, finished=True).text == ""


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("ab日🙂 "), min_size=1, max_size=20), st.integers(0, 20), st.data())
def test_words_keep_their_spaces_after_a_prompt(text, at, data):
    tokens = SENTENCEPIECE.encode(text, add_special_tokens=False)
    at = min(at, len(tokens))
    prompt, output = tokens[:at], tokens[at:]
    if prompt and SENTENCEPIECE.decode(prompt).endswith("�"):
        return  # the prompt ends inside a character
    streamed, _, _ = stream(SENTENCEPIECE, pushes(data, output), prompt, SamplingParams())
    assert SENTENCEPIECE.decode(prompt) + streamed == SENTENCEPIECE.decode(tokens)


def test_an_answer_after_a_special_token_starts_a_new_text():
    answer = SENTENCEPIECE.encode("ab a")
    assert stream(SENTENCEPIECE, [answer], [SENTENCEPIECE.encode("b")[0], 2], SamplingParams())[0] == "ab a"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["a ab", "日 b", "🙂"])
def test_token_bytes_add_up_to_the_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(bytes(tokenizer.token_bytes(t)) for t in tokens)
    assert joined.decode().removeprefix(" ") == text
    assert "".join(tokenizer.token_text(t) for t in tokens if "�" not in tokenizer.token_text(t)).strip() in text


def test_unknown_ids_have_no_text():
    assert TOKENIZER.token_bytes(VOCAB_SIZE + 10) == []
    assert TOKENIZER.token_text(2**31) == ""
    assert TOKENIZER.decode([VOCAB_SIZE + 10]) == ""


def test_text_that_is_not_unicode_is_the_callers_error():
    with pytest.raises(RequestError) as caught:
        TOKENIZER.encode("a\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        TOKENIZER.apply_chat_template([{"role": "user", "content": "\udfff"}])
    assert caught.value.param == "messages"


def test_chat_template():
    messages = [{"role": "user", "content": "the cache"}]
    tokens = TOKENIZER.apply_chat_template(messages)
    expected = "<|im_start|>user\nthe cache<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == expected
    closed = TOKENIZER.apply_chat_template(messages, add_generation_prompt=False)
    assert TOKENIZER.decode(closed, skip_special_tokens=False) == "<|im_start|>user\nthe cache<|im_end|>\n"
    opened = TOKENIZER.apply_chat_template(
        [*messages, {"role": "assistant", "content": "It"}], add_generation_prompt=False, continue_final_message=True
    )
    assert TOKENIZER.decode(opened, skip_special_tokens=False).endswith("<|im_start|>assistant\nIt")


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([{"content": "no role"}], {}),
        ([{"role": "user"}], {}),
        ([{"role": "user", "content": "x"}], {"add_generation_prompt": True, "continue_final_message": True}),
        ([{"role": "user", "content": "x"}], {"variables": {"tokenize": True}}),
        ([{"role": "user", "content": "x"}], {"variables": {"self": 1}}),
        ([{"role": "user", "content": "x"}], {"variables": {"conversation": 1}}),
        ([{"role": "user", "content": "x"}], {"variables": {"chat_template": "x"}}),
    ],
)
def test_messages_that_do_not_fit_the_template(messages, options):
    with pytest.raises(RequestError):
        TOKENIZER.apply_chat_template(messages, **options)


def test_a_template_file_replaces_the_models_own(tmp_path):
    hf_tokenizer().save_pretrained(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] + thing }}")
    tokenizer = Tokenizer.from_folder(tmp_path / "model", str(template))
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], variables={"thing": "b"})
    assert tokenizer.decode(tokens) == "ab"
    with pytest.raises(ConfigError, match="chat_template"):
        Tokenizer.from_folder(tmp_path / "model", str(tmp_path / "missing"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[",
        # The sandbox keeps templates away from Python's insides.
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_that_fails_blames_the_messages(template):
    tokenizer = Tokenizer(hf_tokenizer(), template)
    with pytest.raises(RequestError, match="rejects"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_a_model_without_template_says_so():
    assert not SENTENCEPIECE.has_chat_template
    with pytest.raises(RequestError, match="chat template"):
        SENTENCEPIECE.apply_chat_template([{"role": "user", "content": "a"}])


def test_threads_share_one_tokenizer():
    texts = [f"the cache {i} 日🙂" * 20 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(TOKENIZER.encode, texts))
        assert list(pool.map(TOKENIZER.decode, tokens)) == texts


def test_special_token_ids_are_known():
    assert TOKENIZER.eos_token_ids == {2}
    assert TOKENIZER.special_token_ids == {0, 1, 2}
    assert TOKENIZER.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    "name",
    ["self", "messages", "tools", "documents", "conversation", "tokenize", "padding", "max_length", "return_dict"],
)
def test_template_variables_cannot_steer_the_templating(name):
    with pytest.raises(RequestError) as refused:
        TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}], variables={name: 1})
    assert refused.value.param == f"chat_template_kwargs.{name}"
