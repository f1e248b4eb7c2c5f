"""The command line: one flag per setting, one line per mistake, nothing heavy before it is needed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tieredkv import __version__
from tieredkv.cli.main import main
from tieredkv.config import Config, ConfigError, settings

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environ):
    """The command line in a process of its own."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TIEREDKV_")}
    return subprocess.run(
        [sys.executable, "-m", "tieredkv", *arguments],
        cwd=ROOT,
        env=clean | {"COLUMNS": "200"} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def complaint(done) -> str:
    """The one line on stderr of a run that was refused."""
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("tieredkv: error: ")
    return line


def plain(text: str) -> str:
    """Text without escape codes and box lines, white space squeezed."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.fixture(scope="module")
def serve_help():
    done = run("serve", "--help")
    assert done.returncode == 0
    return plain(done.stdout)


def test_help_tells_every_setting_in_the_words_of_the_config_module(serve_help):
    for _, key, default, doc in settings():
        assert doc in serve_help, key
        if key != "model":
            assert f"--{key.replace('_', '-')}" in serve_help
        if isinstance(default, bool):
            assert f"--no-{key.replace('_', '-')}" in serve_help
    assert "tieredkv serve ./Qwen3-0.6B --port 9000" in serve_help


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"tieredkv {__version__}\n")


def test_no_command_shows_the_help():
    done = run()
    assert done.returncode == 0
    assert "serve" in done.stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from tieredkv.cli.main import main; main(['serve', '--help']); "
        "sys.exit(', '.join({'torch', 'transformers', 'starlette', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("arguments", "told"), [
    (["serve", "--port", "x"], "command line: port: must be a whole number, got 'x'"),
    (["serve", "--port", "70000"], "port: must be at most 65535"),
    (["serve", "--dtype", "int3"], "dtype: must be one of auto, float32, bfloat16, float16"),
    (["serve", "--block-size", "17"], "block_size: must be one of"),
    (["serve", "--kv-cache-memory", "lots"], "kv_cache_memory: must be a size"),
    (["serve", "--max-num-seqs", "0"], "max_num_seqs: must be at least 1"),
    (["serve", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens: must be at least"),
    (["serve", "--no-such-flag"], "--no-such-flag"),
    (["serve", "--port"], "--port"),
    (["serve", "one", "two"], "two"),
    (["serve", "--config", "/no/such/file.toml"], "/no/such/file.toml"),
    (["no-such-command"], "no-such-command"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, told):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("tieredkv: error: ")
    assert told in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1]}')
    for flags in (["--json"], []):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "tieredkv", "simulate", str(trace), "--policy", "lru", *flags]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("tieredkv: error: ")


def test_a_bad_file_is_named_with_its_key(capsys, tmp_path):
    file = tmp_path / "bad.toml"
    for text, told in (
        ("[server]\nprot = 1", "server.prot"),
        ("[server]\nport = true", "port"),
        ("[oops", "not valid TOML"),
    ):
        file.write_text(text)
        assert main(["serve", "--config", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(file) in line
        assert told in line


def test_a_bad_variable_is_named():
    assert "TIEREDKV_PORT" in complaint(run("serve", TIEREDKV_PORT="x"))
    assert "TIEREDKV_PROT" in complaint(run("serve", TIEREDKV_PROT="1"))


def test_a_missing_model_is_one_line():
    assert "no/such/model.gguf" in complaint(run("serve", "no/such/model.gguf", "--port", "0"))


def test_an_address_that_cannot_be_had_is_told_before_the_model_is_loaded():
    """The model does not exist: whoever looks at it first would say so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = complaint(run("serve", "no/such/model", "--port", port))
        assert f"port: cannot listen on 127.0.0.1:{port}" in line
    assert "192.0.2.1" in complaint(run("serve", "no/such/model", "--host", "192.0.2.1"))


def test_the_default_file_has_every_setting_with_its_default_and_its_description():
    file = ROOT / "configs" / "default.toml"
    text = file.read_text()
    assert Config.load(file=file) == Config.load()
    words = " ".join(text.replace("\n#", " ").split())
    for _, key, _, doc in settings():
        assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key
        assert doc in words, key


def test_the_examples_that_are_commented_out_are_valid_too(tmp_path):
    text = (ROOT / "configs" / "default.toml").read_text()
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    loaded = Config.load(file=file)
    for section, key, _, _ in settings():
        assert getattr(getattr(loaded, section), key) is not None


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads(file):
    try:
        Config.load(file=file)
    except ConfigError as error:
        pytest.fail(str(error))
