"""The shortest way to see what this project is for: `make demo`.

Starts the server on a free port (or talks to the one at `--url`), sends one long prompt twice, and prints for both times
what was computed, what was reused and from which tier, and how long the first token took. The server that it started is
stopped again, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

# Run as `python scripts/demo.py`, only this folder is on the path; the code that starts servers lies beside it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import servers

DOCUMENT = """
The harbour library of Port Maren

The library of Port Maren stands where the old customs house stood, at the end of the long pier, and it has been open to
everybody since the spring of 1871. Its first keeper was Ida Holm, a pilot's widow, who owned four hundred books and no
room to put them in. The harbour board gave her the upper floor of the customs house for a rent of one loaf of bread a
week, and it is said that the rent is still paid, although nobody has seen the loaf for a long time.

Ida Holm made three rules. A book may be taken by anyone who says a name, true or not. A book must come back before the
borrower's ship has sailed twice. A borrower who loses a book brings two others. In her day book she noted that in nine
years sixty-one books were lost and one hundred and twenty-two came instead, so that the library grew by its losses. The
day book is kept in the reading room, open at the page for the night of the great storm.

On that night, the third of November 1880, the sea took the lower floor. The clerks of the customs house had fled to the
church on the hill, but Ida Holm and her son Anders carried the books, shelf by shelf, to the lamp room under the roof.
They worked from eight in the evening until four in the morning, by the light of the harbour lamp, which Anders had to
turn by hand because its clockwork had stopped. When the water fell, two thousand and ninety books were dry, and the one
book that was wet was a treatise on pumps. It is shown to schoolchildren to this day.

The customs office never came back. The harbour board rebuilt the house in brick, with the library on both floors, a
reading room to the south and a store to the north, and above them the lamp room, which serves as the keeper's office.
The brick came as ballast from Lindhaven, in ships that went out with salted fish. Because ballast is not chosen for its
colour, the walls are red, yellow and grey, and from the sea they look like a page of print. Fishermen steer by them.

The second keeper was Anders Holm, who had learned more about lamps than about books, and who brought order into both.
He gave each shelf a letter and each place on it a number, and he wrote the letter and the number on a slip that stayed
in the place when the book went out. A slip without a book was a question, he used to say, and a book without a slip was
an answer to nothing. Every Saturday he walked along the shelves and read the slips aloud. Whoever knew where a missing
book was could call out, and usually somebody did. The custom is called the Saturday reading and takes twenty minutes.

In 1912 the library received its largest gift. Captain Rosa Lind, who had sailed the grain route for thirty years, left
it eleven crates of books in nine languages, a brass telescope, and the sum of five thousand crowns for a heated room.
The heated room was built on the east side. It has one stove, two tables and twelve chairs, and in winter it is never
empty. The telescope stands at its window. By an agreement with the pilots, the person who sits nearest to it reports any
ship that shows a signal for help, and in return the pilots bring the coal. In a hundred and ten winters the telescope
has found seven ships in distress, and all of the crews but one came home.

The third keeper, Mette Aas, was the first who had studied her trade. She counted the books, which took a year, and found
eighteen thousand four hundred and six. She also measured which of them were asked for, and made a discovery that she
described in a letter to the harbour board. One book in twenty, she wrote, makes up two thirds of all the loans; and the
book that somebody asked for yesterday is the likeliest to be asked for today. She therefore kept four hundred books on
a rolling shelf beside her desk, the recent ones in front. When the shelf was full, the book at the far end went back to
the reading room, and when the reading room was full, the one that had waited longest went to the store. Nothing was
thrown away, and a book that was fetched from the store went to the front of the rolling shelf again. Borrowers noticed
only that the wait had become shorter. The board noticed that Mette Aas had time to read, and raised her salary.

During the hard winters of the forties the store was closed because its roof leaked. Mette Aas moved its books to the
salt house across the water, which was dry and cold, and a boy with a boat fetched what was wanted, twice a day. It took
half a day to get a book from the salt house, but to write or print it anew would have taken much longer, and so people
waited. The boy with the boat, Jonas Berg, became the fourth keeper. He never liked to hear that a thing was slow. It
depends, he said, on what you would do otherwise.

Today the library has thirty-one thousand books, four keepers who take turns, and a cat named Ballast. The first two of
Ida Holm's rules still hold. The third was changed in 1986: a borrower who loses a book now brings one other, and tells
the keeper why it is worth having. Visitors are asked to wipe their feet, to keep their voices low near the stove, and,
if they sit at the window of the heated room, to look up from time to time and out to sea.
"""
QUESTION = "In one sentence: who was the first keeper of the library of Port Maren?"
TIERS = ("device", "host", "disk")


RUN = secrets.token_hex(8)


@dataclass(slots=True)
class Answer:
    """One streamed answer. `sources` has prompt tokens by where their KV came from."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def num_computed(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


class DemoError(Exception):
    """What went wrong, in words for the terminal."""


def ask(client: httpx.Client, model: str, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """Send the conversation, print the answer as it streams, and return what the server said about it."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        # A cache of this run's own: what an earlier run left on disk would hide the difference.
        "cache_salt": RUN,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    began_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {response.read().decode()[:500]}")
        for message in events(response):
            if message.get("error"):
                raise DemoError(f"the server reported: {message['error']}")
            for choice in message.get("choices") or []:
                answer.ttft_s = answer.ttft_s or time.perf_counter() - began_s
                print(choice.get("delta", {}).get("content") or "", end="", flush=True)
            if usage := message.get("usage"):
                answer.num_prompt_tokens = usage["prompt_tokens"]
                answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                tokens = usage.get("tieredkv") or {}
                answer.sources = {tier: tokens.get(f"{tier}_tokens", 0) for tier in TIERS}
    answer.total_s = time.perf_counter() - began_s
    print()
    if not answer.num_prompt_tokens:
        raise DemoError("the answer ended without a usage report")
    return answer


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def report(answer: Answer) -> None:
    tiers = ", ".join(f"{count} from {tier}" for tier, count in answer.sources.items() if count)
    print(f"    prompt       {answer.num_prompt_tokens:6} tokens")
    print(f"    computed     {answer.num_computed:6} tokens")
    print(f"    reused       {answer.num_cached_tokens:6} tokens{f'  ({tiers})' if tiers else ''}")
    print(f"    first token  {1000 * answer.ttft_s:6.0f} ms")
    print(f"    whole answer {1000 * answer.total_s:6.0f} ms")


def show(url: str, max_tokens: int, timeout_s: float) -> None:
    """Ask twice and compare. Raises `DemoError` or `httpx.HTTPError`."""
    document = DOCUMENT.strip()
    messages = [
        # What comes first is what can be reused: the document, then the question.
        {"role": "system", "content": "Answer questions about the text that you are given."},
        {"role": "user", "content": f"{document}\n\n{QUESTION}"},
    ]
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        print(f"Model {model} at {url}. The prompt: a text of {len(document.split())} words, then a question.")
        answers = []
        for title in ("First time", "Second time, same prompt"):
            print(f"\n{title}\n    ", end="")
            answers.append(ask(client, model, messages, max_tokens))
            report(answers[-1])
    first, second = answers
    print(f"\nThe first token came {first.ttft_s / second.ttft_s:.1f} times sooner the second time.")
    if first.num_cached_tokens:
        print(
            f"(Even the first time, {first.num_cached_tokens} tokens were known to this server: it has seen the text before.)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Send a long prompt twice; show what is computed and what is reused.")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000; default: start one")
    parser.add_argument("--max-tokens", type=int, default=40, help="length of the answers (default: 40)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds to wait for the server (default: 240)")
    options = parser.parse_args()
    servers.leave_on_sigterm()
    try:
        with contextlib.ExitStack() as stack:
            url = options.url
            if url is None:
                print("Starting the server ...", flush=True)
                server = stack.enter_context(servers.tieredkv_server(start_timeout_s=options.timeout))
                url = server.url
                print(f"It is ready after {server.start_s:.1f} s.")
            show(url.rstrip("/"), options.max_tokens, options.timeout)
    except (DemoError, servers.ServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(f"demo: no proper answer from the server: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
