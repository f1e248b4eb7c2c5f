"""The load generator against a small server that remembers prompts: what it sends, what it reports."""

from __future__ import annotations

import http.server
import json
import threading
from types import SimpleNamespace

import pytest

from tieredkv.bench import datasets
from tieredkv.bench.datasets import DATASETS, DatasetOptions
from tieredkv.cli.main import main
from tieredkv.errors import ConfigError


@pytest.fixture
def server():
    """Streams one word per token; a prompt seen before is cached but for its last word, first in host, then on the device."""
    asked, seen, running, most = [], {}, [0], [0]
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "small"}]}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append((self.path, self.headers.get("Authorization"), body))
                running[0] += 1
                most[0] = max(most[0], running[0])
            text = body.get("prompt") or json.dumps(body["messages"])
            tokens = len(text.split())
            limit = body.get("max_tokens") or body["max_completion_tokens"]
            with lock:
                times = seen[text] = seen.get(text, 0) + 1
            cached = 0 if times == 1 else tokens - 1
            tier = "host" if times == 2 else "device"
            chunks = [{"choices": [{"text": "word ", "delta": {"content": "word "}}]} for _ in range(limit)]
            usage = {
                "prompt_tokens": tokens,
                "completion_tokens": limit,
                "prompt_tokens_details": {"cached_tokens": cached},
                "tieredkv": {
                    **{f"{t}_tokens": 0 for t in ("device", "host", "disk")},
                    f"{tier}_tokens": cached,
                    "computed_tokens": tokens - cached,
                },
            }
            with lock:
                running[0] -= 1
            if "poison" in text:
                self.send_error(500)
                return
            self.send_response(200)
            self.end_headers()
            for chunk in [*chunks, {"choices": [], "usage": usage}]:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = False
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_port}", asked=asked, most=most)
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def bench(server, capsys, *flags):
    code = main(["bench", "serve", "--base-url", server.url, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)["passes"]


def test_a_second_pass_shows_what_the_cache_brings(server, capsys):
    code, (first, second) = bench(
        server, capsys, "--num-prompts", "5", "--input-len", "40", "--output-len", "3", "--repeat", "2"
    )
    assert code == 0
    assert (first["completed"], first["failed"], first["hit_rate"]) == (5, 0, 0.0)
    assert first["prompt_tokens"] == second["prompt_tokens"] == 200
    assert second["hit_rate"] == pytest.approx(39 / 40)
    assert second["tokens_by_source"] == {"device": 0, "host": 195, "disk": 0, "computed": 5}
    assert list(second["ttft_ms_by_source"]) == ["host"]
    assert first["output_tokens"] == 15
    assert set(first["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert len(server.asked) == 10


def test_same_seed_same_requests_other_seed_others(server, capsys):
    for seed in ("1", "1", "2"):
        bench(server, capsys, "--num-prompts", "3", "--input-len", "9", "--seed", seed)
    prompts = [sorted(body["prompt"] for _, _, body in server.asked[i : i + 3]) for i in (0, 3, 6)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_no_more_at_once_than_allowed(server, capsys):
    bench(server, capsys, "--num-prompts", "30", "--input-len", "5", "--max-concurrency", "2")
    assert server.most[0] <= 2


def test_conversations_grow_by_their_answers(server, capsys):
    code, _ = bench(
        server, capsys, "--dataset", "multi-turn", "--num-prompts", "6", "--num-turns", "3", "--input-len", "4",
        "--output-len", "2", "--backend", "openai-chat", "--api-key", "secret",
    )  # fmt: skip
    assert code == 0
    talks = [body["messages"] for path, key, body in server.asked if path.endswith("chat/completions") and key]
    assert sorted(map(len, talks)) == [1, 1, 3, 3, 5, 5]
    longest = max(talks, key=len)
    assert [m["role"] for m in longest] == ["user", "assistant"] * 2 + ["user"]
    assert longest[1]["content"] == "word word "
    assert longest[:3] in talks


def test_a_trace_keeps_its_times_and_its_shared_prefixes(server, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 9, "output_length": 5, "hash_ids": ids}
        for i, ids in enumerate([[1, 2], [1, 3]])
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, (only,) = bench(
        server, capsys, "--dataset", "timed-trace", "--dataset-path", str(trace), "--speedup", "20", "--output-len", "2",
        "--trace-block-tokens", "8",
    )  # fmt: skip
    one, other = (body["prompt"].split() for _, _, body in server.asked)
    assert code == 0
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    assert only["duration_s"] >= 0.05
    assert only["output_tokens"] == 4


def test_failures_are_counted_and_make_the_status_1(server, capsys, tmp_path):
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "a b c", "output_tokens": 2}\n{"prompt": "poison"}\n')
    code, (only,) = bench(server, capsys, "--dataset", "custom", "--dataset-path", str(custom))
    assert code == 1
    assert (only["completed"], only["failed"], len(only["errors"])) == (1, 1, 1)


def test_table_and_picture(server, capsys, tmp_path):
    picture = tmp_path / "run.png"
    flags = ["--num-prompts", "4", "--input-len", "5", "--repeat", "2", "--plot", str(picture)]
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("TTFT, p99", "TPOT, mean", "hit rate", "tokens from host", "last / first"))
    assert "tokens computed" in shown


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name not in ("custom", "timed-trace")])
def test_datasets_have_as_many_requests_as_asked_for(dataset):
    options = DatasetOptions(dataset=dataset, num_prompts=12, input_len=20, prefix_len=30, num_prefixes=3, num_turns=4)
    sessions = datasets.build(options)
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) == 12
    assert sessions == datasets.build(options)
    assert all(turn.prompt and turn.output_len >= 1 for turn in turns)


def test_prefixes_are_shared():
    options = DatasetOptions(dataset="prefix-repetition", num_prompts=12, input_len=20, prefix_len=30, num_prefixes=3)
    prompts = [session.turns[0].prompt for session in datasets.build(options)]
    assert len({" ".join(p.split()[:30]) for p in prompts}) == 3
    assert len(set(prompts)) == 12


def test_shipped_conversations_are_long_enough_for_blocks_to_matter():
    sessions = datasets.build(DatasetOptions(dataset="sharegpt", num_prompts=1000, output_len=0))
    assert len(sessions) > 100
    assert 60 < sum(len(s.turns[0].prompt.split()) for s in sessions) / len(sessions) < 400


def test_long_prompts_are_cut():
    options = DatasetOptions(dataset="sharegpt", num_prompts=50, max_input_len=30)
    assert max(len(s.turns[0].prompt.split(" ")) for s in datasets.build(options)) == 30


@pytest.mark.parametrize(
    ("dataset", "text", "complaint"),
    [
        ("sharegpt", "{}", "list of conversations"),
        ("sharegpt", '[{"conversations": 5}]', "entry 0"),
        ("sharegpt", "[]", "no usable prompts"),
        ("sharegpt", "nonsense", "not JSON"),
        ("custom", '{"prompt": 5}', "prompt must be text"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "output_tokens"),
        ("timed-trace", '{"hash_ids": "x"}', "hash_ids"),
        ("timed-trace", '{"hash_ids": [1], "timestamp": "x"}', "timestamp"),
        ("timed-trace", '{"hash_ids": [1], "timestamp": -1e308}', "timestamp"),
        ("timed-trace", '{"hash_ids": [1], "output_length": -5}', "output_length"),
    ],
)
def test_bad_files_are_named(tmp_path, dataset, text, complaint):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        datasets.build(DatasetOptions(dataset=dataset, path=path))
    assert "data.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset", "nonsense"],
        ["--dataset", "custom"],
        ["--dataset", "custom", "--dataset-path", "/does/not/exist"],
        ["--backend", "grpc"],
        ["--base-url", "127.0.0.1:8000"],
        ["--base-url", "http://127.0.0.1:9"],
        ["--num-prompts", "0"],
        ["--base-url", "http://127.0.0.1:9/a b"],
        ["--api-key", "a\r\nb", "--model", "m"],
        ["--plot", "/does/not/exist/x.png"],
        ["--plot", "/"],
        ["--model", "m", "--plot", "x.nonsense", "--num-prompts", "1", "--output-len", "1"],
    ],
)
def test_bad_flags_are_one_line_and_status_2(server, flags, capsys):
    where = [] if "--base-url" in flags else ["--base-url", server.url]
    assert main(["bench", "serve", *where, *flags]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("tieredkv: error: ")
    assert not server.asked


@pytest.mark.parametrize("answer", [b"{}", b'{"data": [{"id": null}]}', b"[" * 100_000, b"\xff"])
def test_a_server_that_names_no_model_is_one_line_and_status_2(answer, capsys):
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.handle_request)
        thread.start()
        assert main(["bench", "serve", "--base-url", f"http://127.0.0.1:{httpd.server_port}"]) == 2
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tieredkv: error: ")
