"""The request bodies: which fields are read, their types and defaults, and what is refused.

Types are strict (a string is never a number), null means the default, unknown fields are ignored as vLLM does, and a
known field that cannot be honoured is refused when it asks for something else than the default: silence would be a
wrong answer. Knows no tokenizer and no engine. Raises `RequestError` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from tieredkv.errors import RequestError
from tieredkv.types import MAX_LOGIT_BIAS, MAX_LOGPROBS

# Lists stop at their first wrong element: an error for each of a million would cost gigabytes.
OneOrMore = Annotated[
    list[str], FailFast(), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
LogitBias = Annotated[dict[str, float], BeforeValidator(lambda value: _bounded(value, MAX_LOGIT_BIAS))]
TokenIds = Annotated[list[int], FailFast()]
MAX_CACHE_KEY_CHARS = 256
ModelT = TypeVar("ModelT", bound="Body")

# Fields of OpenAI's and vLLM's APIs that this server cannot honour, with the values that ask for nothing.
_NOTHING: tuple[object, ...] = (False, "", [], {})
_REFUSED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": _NOTHING,
    "audio": _NOTHING,
    "bad_words": _NOTHING,
    "chat_template": (),
    "documents": _NOTHING,
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "prediction": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`: usage in a chunk of its own at the end, or in every chunk."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateBody(Body):
    """What completions and chat completions share. Ranges are checked by `SamplingParams`."""

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: OneOrMore = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    cache_control: Any = None
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_CACHE_KEY_CHARS)
    prompt_cache_retention: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    best_of: int | None = None


class CompletionBody(GenerateBody):
    """`POST /v1/completions`. `prompt` is checked by `prompts.parse_prompts`."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(GenerateBody):
    """`POST /v1/chat/completions`. `messages` is checked by `prompts.parse_messages`."""

    messages: Any = None
    max_completion_tokens: int | None = None
    echo: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TokenizeBody(Body):
    """`POST /tokenize`: a `prompt`, or `messages` put through the chat template."""

    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: TokenIds


def parse(kind: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """`body` as a `kind`. Raises `RequestError` that names the first field with a wrong type or an impossible wish."""
    given = {key: value for key, value in body.items() if value is not None}
    _refuse(given)
    try:
        result = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"Invalid value for '{param}': {first['msg']}.", param=param) from None
    if isinstance(result, GenerateBody):
        _check_generate(result)
    return result


def _bounded(value: Any, most: int) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"may hold at most {most} entries")
    return value


def _refuse(given: Mapping[str, Any]) -> None:
    for key in given.keys() & _REFUSED.keys():
        value = given[key]
        if not any(type(value) is type(fine) and value == fine for fine in _REFUSED[key]):
            raise RequestError(f"'{key}' is not supported by this server; leave it out.", param=key)


def _check_generate(body: GenerateBody) -> None:
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError("'best_of' is not supported unless it equals 'n'.", param="best_of")
    if body.cache_salt == "":
        raise RequestError("'cache_salt' must not be empty.", param="cache_salt")
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise RequestError("'echo' together with 'logprobs' is not supported.", param="echo")
    if isinstance(body, ChatBody):
        if body.echo:
            raise RequestError("'echo' is not supported in chat completions.", param="echo")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(f"'top_logprobs' must be in [0, {MAX_LOGPROBS}].", param="top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if body.continue_final_message and body.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )


def parse_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """OpenAI's `logit_bias`: token ids as texts. Raises `RequestError` for a key that is no token id, or names one twice."""
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RequestError(f"'logit_bias' keys must be token ids, got {key[:40]!r}.", param="logit_bias")
        if int(key) in parsed:
            raise RequestError(f"'logit_bias' names token {int(key)} twice, as {key!r} as well.", param="logit_bias")
        parsed[int(key)] = value
    return parsed
