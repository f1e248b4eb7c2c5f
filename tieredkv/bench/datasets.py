"""What a load generator sends: prompts, lengths of answers, and when.

    random             independent prompts of random words
    sharegpt           JSON list of {"conversations": [{"from", "value"}, ...]}; turn 0 is sent, turn 1 gives the length
    prefix-repetition  a few long prefixes, each with many different ends
    long-doc-qa        long documents, each asked several questions, in shuffled order
    multi-turn         conversations that grow by each answer; the next turn waits for the last one's end
    custom             JSON lines with `prompt` and `output_tokens`
    timed-trace        JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: equal ids become equal
                       text, at the trace's own times

Everything is text (or `messages`), so any server can be asked; lengths in tokens are met as far as a common English word
is one token. Knows no HTTP. Invariant: the same arguments and seed make the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.prompt_file import json_objects

# Common words, most of them one token each.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name president team minute idea body information back parent face others level office door
health person art war history party result change morning reason research girl guy moment air teacher force education
"""
# Milliseconds since 1970 in the year 5138: what is beyond is no time of a trace.
MOST_TIME_MS = 1e14
SHAREGPT_FILE = "python_docs_sharegpt.json"
QUESTIONS = (
    "What is this text about?",
    "Which word comes first in it?",
    "How would you name it?",
    "Summarise it in one sentence.",
    "Whom might it interest, and why?",
    "What is missing in it?",
    "Which part matters most?",
    "What would you ask its author?",
)


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Sizes in tokens (words). Which of them count depends on the dataset."""

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 100
    input_len: int = 512
    output_len: int = 64
    prefix_len: int = 512
    num_prefixes: int = 4
    num_turns: int = 4
    trace_block_tokens: int = 16
    speedup: float = 1.0
    max_input_len: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Turn:
    """One request. `at_s` is when a trace sends it, in seconds from the start. `messages` grow within a conversation."""

    prompt: str
    output_len: int
    at_s: float | None = None


@dataclass(slots=True)
class Session:
    """Turns that follow each other; most datasets have one each. With `grows`, a turn is sent with all before it."""

    turns: list[Turn] = field(default_factory=list)
    grows: bool = False


def build(options: DatasetOptions) -> list[Session]:
    """The sessions of a dataset, in the order in which they begin. Raises `ConfigError` naming what is wrong with the file."""
    try:
        maker = DATASETS[options.dataset]
    except KeyError:
        raise ConfigError(f"must be one of {', '.join(DATASETS)}, got {options.dataset!r}", key="dataset") from None
    sessions = maker(options, random.Random(options.seed))
    if not sessions:
        raise ConfigError("holds no usable prompts", key="dataset", source=str(options.path or options.dataset))
    return sessions


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=max(count, 1)))


def _random(options: DatasetOptions, rng: random.Random) -> list[Session]:
    return [Session([Turn(_words(rng, options.input_len), options.output_len)]) for _ in range(options.num_prompts)]


def _prefix_repetition(options: DatasetOptions, rng: random.Random) -> list[Session]:
    prefixes = [_words(rng, options.prefix_len) for _ in range(options.num_prefixes)]
    return [
        Session([Turn(f"{prefixes[i % len(prefixes)]}\n{_words(rng, options.input_len)}", options.output_len)])
        for i in range(options.num_prompts)
    ]


def _long_doc_qa(options: DatasetOptions, rng: random.Random) -> list[Session]:
    documents = [_words(rng, options.prefix_len) for _ in range(options.num_prefixes)]
    asked = [
        f"{document}\n\n{QUESTIONS[(i // len(documents)) % len(QUESTIONS)]}"
        for i in range(options.num_prompts)
        for document in (documents[i % len(documents)],)
    ]
    rng.shuffle(asked)
    return [Session([Turn(prompt, options.output_len)]) for prompt in asked]


def _multi_turn(options: DatasetOptions, rng: random.Random) -> list[Session]:
    num_sessions = -(-options.num_prompts // options.num_turns)
    system = _words(rng, options.prefix_len)
    sessions = []
    for _ in range(num_sessions):
        turns = [Turn(_words(rng, options.input_len), options.output_len) for _ in range(options.num_turns)]
        turns[0].prompt = f"{system}\n{turns[0].prompt}"
        sessions.append(Session(turns, grows=True))
    return sessions


def _sharegpt(options: DatasetOptions, rng: random.Random) -> list[Session]:
    path = options.path
    text = _read(path) if path else resources.files("tieredkv.bench").joinpath("data", SHAREGPT_FILE).read_text("utf-8")
    where = str(path or SHAREGPT_FILE)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", source=where) from None
    if not isinstance(document, list):
        raise ConfigError("must be a JSON list of conversations", source=where)
    sessions = []
    for index, entry in enumerate(document):
        talk = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(talk, list) or not all(isinstance(turn, dict) for turn in talk):
            raise ConfigError('must have "conversations": a list of objects', source=f"{where}, entry {index}")
        values = [turn.get("value") for turn in talk]
        if len(values) < 2 or not all(isinstance(value, str) and value for value in values[:2]):
            continue
        length = options.output_len or max(len(values[1].split()), 4)
        sessions.append(Session([Turn(values[0], length)]))
    rng.shuffle(sessions)
    return [_cut(session, options) for session in sessions[: options.num_prompts]]


def _custom(options: DatasetOptions, rng: random.Random) -> list[Session]:
    sessions = []
    for where, line in _json_lines(options):
        prompt, length = line.get("prompt"), line.get("output_tokens", options.output_len)
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError("prompt must be text", source=where)
        if type(length) is not int or length < 1:
            raise ConfigError(f"output_tokens must be a positive whole number, got {length!r}", source=where)
        sessions.append(_cut(Session([Turn(prompt, length)]), options))
    return sessions[: options.num_prompts]


def _timed_trace(options: DatasetOptions, rng: random.Random) -> list[Session]:
    texts: dict[int, str] = {}
    sessions: list[Session] = []
    start_ms: float | None = None
    for where, line in _json_lines(options):
        ids, time_ms, length = (
            line.get("hash_ids"),
            line.get("timestamp", 0),
            line.get("output_length", options.output_len),
        )
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ConfigError("hash_ids must be a list of whole numbers", source=where)
        if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or type(length) is not int:
            raise ConfigError("timestamp and output_length must be numbers", source=where)
        if abs(time_ms) > MOST_TIME_MS or length < 0:
            raise ConfigError(f"timestamp {time_ms} and output_length {length} are out of range", source=where)
        start_ms = time_ms if start_ms is None else start_ms
        for block in ids:
            if block not in texts:
                texts[block] = _words(random.Random(f"{options.seed}/{block}"), options.trace_block_tokens)
        prompt = " ".join(texts[block] for block in ids)
        at_s = max(time_ms - start_ms, 0) / 1000 / options.speedup
        sessions.append(_cut(Session([Turn(prompt, max(min(length, options.output_len), 1), at_s)]), options))
        if len(sessions) >= options.num_prompts:
            break
    return sessions


DATASETS: dict[str, Callable[[DatasetOptions, random.Random], list[Session]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix-repetition": _prefix_repetition,
    "long-doc-qa": _long_doc_qa,
    "multi-turn": _multi_turn,
    "custom": _custom,
    "timed-trace": _timed_trace,
}


def _cut(session: Session, options: DatasetOptions) -> Session:
    """Prompts longer than `max_input_len` words lose their end."""
    most = options.max_input_len
    if most is not None:
        for i, turn in enumerate(session.turns):
            words = turn.prompt.split(" ")
            if len(words) > most:
                session.turns[i] = replace(turn, prompt=" ".join(words[:most]))
    return session


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8: {error.reason}", source=str(path)) from error


def _json_lines(options: DatasetOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    if options.path is None:
        raise ConfigError(f"{options.dataset} needs a file", key="dataset_path")
    for number, line in json_objects(options.path):
        yield f"{options.path}:{number}", line
