"""Text to token ids and back: one tokenizer per model, one detokenizer per output stream.

Knows text, tokens and chat templates; knows no engine. Every method of `Tokenizer` may be called from any thread. The
text of a token is made from its bytes, so a character spread over several tokens appears when its last byte does, and
U+FFFD only where the bytes can no longer become a character:

    pushed tokens ->| bytes of an unfinished character |-> text ->| may begin a stop string |-> emitted
"""

from __future__ import annotations

import codecs
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError, RequestError, UnsupportedModelError
from tieredkv.types import SamplingParams

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-F]{2})>$")


class Tokenizer:
    """A transformers tokenizer backed by the `tokenizers` library, without its padding and truncation state."""

    def __init__(self, hf_tokenizer: Any, chat_template: str | None = None) -> None:
        """`chat_template` is Jinja text to use instead of the tokenizer's own. Raises `UnsupportedModelError`."""
        if not getattr(hf_tokenizer, "is_fast", False):
            raise UnsupportedModelError("the model has no tokenizer of the `tokenizers` library (tokenizer.json)")
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat_template: str | None = chat_template
        self._vocab_size: int = len(hf_tokenizer)
        self._special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)
        self._is_byte_level = _is_byte_level(_decoder_settings(self._backend))
        self._bytes: dict[int, bytes | None] = {}
        # Names that would steer the templating call instead of reaching the template.
        self._template_arguments = frozenset(inspect.signature(hf_tokenizer.apply_chat_template).parameters) | {
            "self",
            "messages",
        }
        eos = hf_tokenizer.eos_token_id
        self._eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())

    @classmethod
    def from_folder(cls, folder: Path, chat_template_file: str | None = None) -> Tokenizer:
        """The tokenizer in `folder`; a chat template file replaces its own. Raises `ConfigError` if that is unreadable."""
        template = None
        if chat_template_file is not None:
            try:
                template = Path(chat_template_file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot be read: {error}", key="chat_template") from error
        from transformers import AutoTokenizer

        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        # A broken or missing tokenizer file comes out of transformers as any of these.
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            raise UnsupportedModelError(f"{folder.name}: its tokenizer cannot be used: {error}") from error
        return cls(hf_tokenizer, template)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out of the text."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template or self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `RequestError` for text that is not Unicode (unpaired surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("text holds an unpaired surrogate, which is not Unicode text", param="prompt") from None
        # One text as a batch, because only batches leave the interpreter to other threads: a long prompt must not hold up
        # the streams of everybody else.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary have none."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format. `variables` are passed to the template.

        The template runs in Jinja's sandbox. Raises `RequestError` on `messages` when the model has no template or the
        template refuses them.
        """
        if not self.has_chat_template:
            raise RequestError("the model has no chat template; give one with --chat-template", param="messages")
        if taken := sorted(self._template_arguments & (variables or {}).keys()):
            raise RequestError(
                f"{taken[0]} cannot be set as a template variable", param=f"chat_template_kwargs.{taken[0]}"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        # Templates are programs that come with the model: whatever they raise, the messages did not fit them.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RequestError(f"the chat template rejects these messages: {reason}", param="messages") from error
        try:
            return self.encode(text, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(str(error), param="messages") from None

    def token_text(self, token_id: int) -> str:
        """What one token looks like inside a text, leading space included; U+FFFD stands for a partial character."""
        known = self.byte_content(token_id)
        if known is not None:
            return known.decode("utf-8", "replace")
        # Decoders drop a space at the start of a text: the second of two equal tokens still has it.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def token_bytes(self, token_id: int) -> list[int]:
        """The token's bytes in UTF-8, exact also where they are only part of a character."""
        known = self.byte_content(token_id)
        return list(self.token_text(token_id).encode() if known is None else known)

    def byte_content(self, token_id: int) -> bytes | None:
        """The bytes a token stands for wherever it is; None if its text depends on its neighbours (SentencePiece words)."""
        try:
            return self._bytes[token_id]
        except KeyError:
            return self._bytes.setdefault(token_id, self._find_bytes(token_id))

    def _find_bytes(self, token_id: int) -> bytes | None:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if token is None:
            return b""
        if self._is_byte_level:
            mapped = [_BYTE_OF_CHAR.get(c) for c in token]
            return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        found = _BYTE_TOKEN.match(token)
        return bytes([int(found[1], 16)]) if found else None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one stream. `stop` is the stop string that ended it; then only `num_tokens_used` of the push count."""

    text: str
    stop: str | None
    num_tokens_used: int


class Detokenizer:
    """Turns one request's output tokens into text as they come, and ends it at the first stop string.

    Which stop string is first: the one that is complete first, the longest of those that end together. Text that may yet
    become one is held back. The texts of all deltas together do not depend on how the tokens were spread over pushes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if sampling.skip_special_tokens else frozenset()
        self._stops = sampling.stop
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The token before, for vocabularies whose words lose their space at the start of a text. After a special token
        # (the end of a chat prompt) a new text starts.
        last = prompt_token_ids[-1] if prompt_token_ids else None
        self._previous = None if last in tokenizer.special_token_ids else last
        self._num_tokens = 0
        self._held = ""
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], finished: bool) -> TextDelta:
        """Text that is certain after `token_ids`; all of it when `finished`. After a stop string there is no more."""
        if self._stop is not None:
            return TextDelta("", self._stop, 0)
        emitted: list[str] = []
        for used, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if self._take(self._text_of(token_id), emitted):
                return TextDelta("".join(emitted), self._stop, used)
        if finished:
            if not self._take(self._utf8.decode(b"", final=True), emitted):
                emitted.append(self._held)
            self._held = ""
        return TextDelta("".join(emitted), self._stop, len(token_ids))

    def _text_of(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        content = self._tokenizer.byte_content(token_id)
        previous, self._previous = self._previous, token_id
        if content is not None:
            return self._utf8.decode(content)
        return self._utf8.decode(b"", final=True) + self._word(previous, token_id)

    def _word(self, previous: int | None, token_id: int) -> str:
        decode = self._tokenizer.decode
        if previous is None:
            return decode([token_id], skip_special_tokens=False)
        before = decode([previous], skip_special_tokens=False)
        return decode([previous, token_id], skip_special_tokens=False)[len(before) :]

    def _take(self, text: str, emitted: list[str]) -> bool:
        """Move `text` through the hold to `emitted`; True when a stop string is complete."""
        if not self._stops or self._num_tokens <= self._min_tokens:
            emitted.append(text)
            return False
        if not text:
            return False
        held = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        if ends:
            end, start, self._stop = min(ends)
            emitted.append(held[: end if self._include_stop else start])
            self._held = ""
            return True
        keep = max(_overlap(held, stop) for stop in self._stops)
        emitted.append(held[: len(held) - keep])
        self._held = held[len(held) - keep :]
        return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _decoder_settings(backend: Any) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json describes it. Its own state says so: the whole tokenizer as text takes 0.1 s and 20 MB."""
    if backend.decoder is None:
        return None
    settings: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return settings


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: printable Latin-1 is itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
