"""Settings from file, environment and flags: precedence, and errors that name key, value and source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.config import Config, format_size, parse_size, settings
from tieredkv.errors import ConfigError


def test_later_sources_win(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[server]\nport = 1\nhost = "a"\n[cache]\nblock_size = 32\n')
    config = Config.load({"port": 3, "seed": None}, file=file, environ={"TIEREDKV_PORT": "2", "TIEREDKV_HOST": "b"})
    assert (config.server.port, config.server.host, config.cache.block_size) == (3, "b", 32)


def test_keys_are_unique_over_all_sections():
    keys = [key for _, key, _, _ in settings()]
    assert len(keys) == len(set(keys))
    assert all(doc.endswith(".") for *_, doc in settings())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"prot": 1}, ["prot", "unknown"]),
        ({"port": "x"}, ["port", "'x'", "whole number"]),
        ({"port": 70000}, ["port", "65535"]),
        ({"port": True}, ["port"]),
        ({"device": "tpu"}, ["device", "cpu", "'tpu'"]),
        ({"block_size": 17}, ["block_size", "16"]),
        ({"kv_cache_memory": "4 apples"}, ["kv_cache_memory", "4GiB"]),
        ({"enable_prefix_caching": "maybe"}, ["enable_prefix_caching"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization"]),
        ({"api_key": [1]}, ["api_key"]),
        ({"host": ""}, ["host"]),
        ({"seed": 2**130}, ["seed"]),
        ({"disk_size": "1KiB"}, ["disk_size"]),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, ["max_num_batched_tokens", "16"]),
    ],
)
def test_a_bad_value_is_named_with_its_source(overrides, words):
    with pytest.raises(ConfigError) as caught:
        Config.load(overrides, source="flag")
    assert all(word in str(caught.value) for word in words)


def test_bad_environment_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="TIEREDKV_PROT"):
        Config.load(environ={"TIEREDKV_PROT": "1"})
    with pytest.raises(ConfigError, match=r"TIEREDKV_PORT.*'x'"):
        Config.load(environ={"TIEREDKV_PORT": "x"})
    Config.load(environ={"TIEREDKV_REEXEC": "1", "TIEREDKV_CACHE_DIR": "/x", "OTHER": "1"})
    file = tmp_path / "c.toml"
    for text, words in [
        ("port = 1", "unknown table"),
        ("[serv]\nport = 1", "serv"),
        ("[server]\nprot = 1", r"server\.prot"),
        ("[cache]\nport = 1", r"cache\.port"),
        ("[server]\nport = [", "valid TOML"),
        ('[server]\nport = "y"', "'y'"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            Config.load(file=file)
        assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(file=tmp_path / "missing.toml")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        Config.load(file=file)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        (7, 7),
        ("1k", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2 TB", 2**41),
        ("10MB", 10 * 2**20),
        ("5b", 5),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("bad", ["", "x", "-1", -1, "1.2.3", "1 GiBB", True, None, "nan", "inf"])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match=r"size|negative"):
        parse_size(bad)


@given(st.integers(0, 2**60))
def test_sizes_are_printed_close_to_what_they_are(nbytes):
    assert parse_size(format_size(nbytes).replace(" ", "")) == pytest.approx(nbytes, rel=0.06, abs=1)


def test_lists_and_none_from_text():
    config = Config.load(environ={"TIEREDKV_API_KEY": "a, b", "TIEREDKV_MAX_MODEL_LEN": "auto"})
    assert config.server.api_key == ("a", "b")
    assert config.model.max_model_len is None
    assert Config.load({"served_model_name": ["x", "y"]}).model.served_model_name == ("x", "y")


def test_values_come_from_files_that_variables_name(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    config = Config.load(environ={"TIEREDKV_API_KEY_FILE": str(keys), "TIEREDKV_ADMIN_KEY": "three"})
    assert (config.server.api_key, config.admin.admin_key) == (("one", "two"), ("three",))
    for environ, words in (
        ({"TIEREDKV_API_KEY_FILE": str(tmp_path / "none")}, "API_KEY_FILE.*cannot be read"),
        ({"TIEREDKV_API_KEY_FILE": str(keys), "TIEREDKV_API_KEY": "x"}, "set one of them"),
        ({"TIEREDKV_PORT_FILE": str(keys)}, "TIEREDKV_PORT_FILE: port"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config.load(environ=environ)
