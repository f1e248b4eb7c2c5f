"""Export and import: what arrives is what left, whatever happens to the file on the way."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.chains import assert_sound
from tieredkv import hashing, transport
from tieredkv.cli.main import main
from tieredkv.errors import StorageError
from tieredkv.prefix_file import FileHeader, PrefixFileError, PrefixFileReader, PrefixFileWriter
from tieredkv.storage.codec import RawCodec, ZstdCodec
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.pins import PinRecord
from tieredkv.storage.tier import NEVER, BlockRecord, LoadOutcome
from tieredkv.types import Tier

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = hashlib.sha256(b"one model").digest()
OTHER = hashlib.sha256(b"another model").digest()
ABOUT = {"model": "tiny", "dtype": "bfloat16", "block_size": 4}
SIZE, NBYTES = 4, 3000


def payload_of(block_hash: bytes) -> bytes:
    return random.Random(block_hash).randbytes(NBYTES // 2) + bytes(NBYTES - NBYTES // 2)


def chain(tokens, namespace=NAMESPACE, tenant=b"") -> list[BlockRecord]:
    """The blocks of a prompt, as an engine would store them."""
    hashes: list[bytes] = []
    root = hashing.root_hash(namespace, tenant)
    hashing.extend_chain(hashes, root, tokens, SIZE, len(tokens) // SIZE)
    return [
        BlockRecord(
            block_hash,
            hashes[i - 1] if i else root,
            i,
            namespace,
            memoryview(payload_of(block_hash)),
            hashing.pack_tokens(tokens[i * SIZE : (i + 1) * SIZE]),
        )
        for i, block_hash in enumerate(hashes)
    ]


HEAD = list(range(40))
PROMPTS = [[*HEAD, *range(100 + i, 130 + i)] for i in range(3)] + [list(range(500, 520))]


def open_store(path, nbytes=8 << 20, **more) -> DiskStore:
    return DiskStore.open(path, nbytes, **more)


def fill(store, prompts=PROMPTS, **more) -> set[bytes]:
    held = set()
    for prompt in prompts:
        blocks = chain(prompt, **more)
        assert all(outcome.resident for outcome in store.put(blocks))
        held |= {block.hash for block in blocks}
    return held


def pin(store, tokens, name, number=1) -> None:
    hashes = tuple(block.hash for block in chain(tokens))
    record = PinRecord(
        bytes([number]) * 8, NAMESPACE, b"", "shared", name, Tier.DISK, 0, NEVER, hashes, hashing.pack_tokens(tokens)
    )
    store.pin(record)


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "source")
    fill(made)
    fill(made, [list(range(30))], namespace=OTHER)
    made.describe_namespace(NAMESPACE, json.dumps(ABOUT))
    yield made
    made.close()


@pytest.fixture
def target(tmp_path):
    made = open_store(tmp_path / "target")
    yield made
    made.close()


def export(store, path, ends=None, codec=None, **more):
    return transport.export_prefixes(store, path, NAMESPACE, ends, codec=codec or RawCodec(), about=ABOUT, **more)


def contents(store, namespace=NAMESPACE) -> dict[bytes, bytes]:
    """All blocks of a namespace, each loaded and verified."""
    with store.listing(namespace) as listing:
        rows = {h: listing.row(h) for h, num_children in listing.scan() if num_children is not None}
    found = {}
    for block_hash, row in rows.items():
        payload = memoryview(bytearray(row.raw_nbytes))
        assert store.load(block_hash, namespace, payload, token_ids=row.token_ids) is LoadOutcome.LOADED
        found[block_hash] = bytes(payload)
    return found


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(2)], ids=["raw", "zstd"])
@pytest.mark.parametrize("target_codec", [RawCodec(), ZstdCodec(4)], ids=["to-raw", "to-zstd"])
def test_what_arrives_is_what_left(store, tmp_path, codec, target_codec):
    path = tmp_path / "x.tkv"
    report = export(store, path, codec=codec)
    assert report.num_blocks == len(contents(store)) == 10 + 3 * 7 + 5
    assert (report.nbytes, report.num_gone) == (path.stat().st_size, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    target = open_store(tmp_path / "target", codec=target_codec)
    done = transport.import_prefixes(target, path)
    assert (done.problem, done.num_imported, done.num_present) == (None, report.num_blocks, 0)
    assert done.num_verified == done.num_kept == report.num_blocks
    assert contents(target) == contents(store)
    assert_sound(target)
    (space,) = target.inspect().namespaces
    assert json.loads(space.description) == ABOUT
    again = transport.import_prefixes(target, path)
    assert (again.problem, again.num_imported, again.num_present) == (None, 0, report.num_blocks)
    target.close()


def test_only_what_was_chosen_leaves_with_all_before_it(store, target, tmp_path):
    end = chain(PROMPTS[1])[-1].hash
    export(store, tmp_path / "x", {end})
    transport.import_prefixes(target, tmp_path / "x")
    assert set(contents(target)) == {block.hash for block in chain(PROMPTS[1])}
    with pytest.raises(StorageError, match="nothing to export"):
        export(store, tmp_path / "y", {b"?" * 32})
    assert not (tmp_path / "y").exists()


def test_only_regular_files_are_replaced(store, target, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "to-file").symlink_to("file")
    for name in ("fifo", "to-fifo", "."):
        with pytest.raises(StorageError, match="no regular file"):
            export(store, tmp_path / name)
    assert (tmp_path / "fifo").is_fifo()
    export(store, tmp_path / "to-file")
    assert (tmp_path / "to-file").is_symlink()
    assert transport.import_prefixes(target, tmp_path / "file").problem is None
    assert sorted(os.listdir(tmp_path)) == sorted(["fifo", "file", "source", "target", "to-fifo", "to-file"])


def test_pins_and_names_choose(store, tmp_path):
    pin(store, PROMPTS[0], "tools", 1)
    # A pin whose end is not there: as much of it as is.
    pin(store, [*PROMPTS[3], *range(900, 950)], "half", 2)
    last = chain(PROMPTS[2])[-1].hash
    store.label({("name", last): "called", ("name", b"?" * 32): "gone"})
    assert transport.find_named(store, NAMESPACE, "called") == {last}
    assert transport.find_named(store, NAMESPACE, "gone") == set()
    assert transport.find_named(store, NAMESPACE, "tools") == {chain(PROMPTS[0])[-1].hash}
    report = export(store, tmp_path / "x", transport.find_pinned(store, NAMESPACE))
    assert report.num_blocks == len(chain(PROMPTS[0])) + len(chain(PROMPTS[3]))


def test_labels_arrive(store, target, tmp_path):
    last = chain(PROMPTS[2])[-1].hash
    root = hashing.root_hash(NAMESPACE)
    store.label({("name", last): "called", ("root", root): "shared"})
    export(store, tmp_path / "x")
    transport.import_prefixes(target, tmp_path / "x")
    with target.listing(NAMESPACE) as listing:
        assert listing.label("name", last) == "called"
        assert listing.label("root", root) == "shared"


def test_a_prefix_is_found_by_the_beginning_of_its_hash(store):
    wanted = chain(PROMPTS[0])[3].hash
    for length in (64, 20):
        assert transport.find_prefix(store, NAMESPACE, wanted.hex()[:length]) == wanted
    for wrong in ("", "zz", "ff" * 33, "é"):
        with pytest.raises(StorageError, match="begin with"):
            transport.find_prefix(store, NAMESPACE, wrong)


def test_namespaces_are_told_apart(store, tmp_path):
    with pytest.raises(StorageError, match="2 models"):
        transport.find_namespace(store, None)
    assert transport.find_namespace(store, NAMESPACE.hex()[:8]) == (NAMESPACE, json.dumps(ABOUT))
    with pytest.raises(StorageError, match="no blocks of namespace"):
        transport.find_namespace(store, "0" * 64)


def test_a_foreign_model_is_refused_unless_wanted(store, target, tmp_path):
    export(store, tmp_path / "x")
    fill(target, namespace=OTHER)
    with pytest.raises(PrefixFileError, match="tiny, bfloat16"):
        transport.import_prefixes(target, tmp_path / "x")
    assert contents(target) == {}
    assert transport.import_prefixes(target, tmp_path / "x", any_model=True).problem is None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    source = open_store(folder / "source")
    fill(source)
    export(source, folder / "x")
    whole = contents(source)
    source.close()
    return folder / "x", whole


def import_bytes(folder, data: bytes):
    path = folder / "file"
    path.write_bytes(data)
    target = open_store(folder / "target")
    try:
        try:
            report = transport.import_prefixes(target, path)
        except PrefixFileError:
            assert contents(target) == {}
            return None, {}
        assert_sound(target)
        return report, contents(target)
    finally:
        target.close()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_gives_a_true_beginning_or_nothing(exported, tmp_path_factory, data):
    path, whole = exported
    original = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "drop", "double"]))
    at = data.draw(st.integers(0, len(original) - 1))
    damaged = {
        "cut": original[:at],
        "flip": original[:at] + bytes([original[at] ^ (1 << data.draw(st.integers(0, 7)))]) + original[at + 1 :],
        "insert": original[:at] + data.draw(st.binary(min_size=1, max_size=40)) + original[at:],
        "drop": original[:at] + original[at + 1 + data.draw(st.integers(0, 4000)) :],
        "double": original + original[at:],
    }[kind]
    if damaged == original:
        return
    report, held = import_bytes(tmp_path_factory.mktemp("damaged"), damaged)
    assert held.items() <= whole.items()
    if report is not None:
        assert report.problem
        assert report.num_kept == report.num_imported == len(held) <= report.num_verified


def test_a_file_cut_anywhere_gives_all_that_is_whole(exported, tmp_path_factory):
    path, whole = exported
    original = path.read_bytes()
    frame = (len(original) - original.index(b"BLCK") - 44) // len(whole)
    start = original.index(b"BLCK")
    for count in (0, 1, 7, len(whole) - 1, len(whole)):
        report, held = import_bytes(tmp_path_factory.mktemp("cut"), original[: start + count * frame + 5])
        assert (len(held), report.num_kept) == (count, count)
        assert "ends here" in report.problem


def forge(folder, blocks, header=None):
    """A file whose every digest is right, with whatever blocks."""
    path = folder / "forged"
    header = header or FileHeader(NAMESPACE, SIZE, NBYTES, len(blocks), {})
    with path.open("wb") as file:
        writer = PrefixFileWriter(file, header, RawCodec())
        for block in blocks:
            writer.add(block.hash, block.parent, block.depth, block.token_ids, block.payload)
        writer.end()
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: [b[0], dataclasses.replace(b[1], token_ids=bytes(16)), *b[2:]], "hash is not that of its tokens"),
        (lambda b: [b[0], dataclasses.replace(b[1], hash=b[2].hash), *b[2:]], "hash is not that of its tokens"),
        (lambda b: [b[0], dataclasses.replace(b[1], parent=b[2].hash), *b[2:]], "hash is not that of its tokens"),
        (lambda b: [b[0], *b[2:]], "the block before it is not in the file"),
        (lambda b: [b[0], dataclasses.replace(b[1], depth=7), *b[2:]], "the block before it is not in the file"),
        (lambda b: [b[0], dataclasses.replace(b[1], depth=0), *b[2:]], "has no depth"),
        (lambda b: [b[0], dataclasses.replace(b[1], token_ids=bytes(20)), *b[2:]], "impossible length"),
        (lambda b: [b[0], dataclasses.replace(b[1], payload=memoryview(bytes(99))), *b[2:]], "were expected"),
    ],
)
def test_no_block_enters_under_a_wrong_name(target, tmp_path, change, words):
    blocks = chain(PROMPTS[0])
    report = transport.import_prefixes(target, forge(tmp_path, change(blocks)))
    assert words in report.problem
    assert set(contents(target)) == {blocks[0].hash}


@pytest.mark.parametrize(
    "header",
    [
        FileHeader(NAMESPACE, 0, NBYTES, 1),
        FileHeader(NAMESPACE, SIZE, 1 << 40, 1),
    ],
)
def test_impossible_headers_are_refused(target, tmp_path, header):
    path = tmp_path / "x"
    with path.open("wb") as file:
        small = dataclasses.replace(header, block_nbytes=min(header.block_nbytes, NBYTES))
        writer = PrefixFileWriter.__new__(PrefixFileWriter)
        writer._file, writer._state = file, hashlib.blake2b(digest_size=32)
        from tieredkv.prefix_file import _HEADER, MAGIC, VERSION

        writer._write(_HEADER.pack(MAGIC, VERSION, 0, small.block_size, header.block_nbytes, 1, NAMESPACE, 2), b"{}")
    with pytest.raises(PrefixFileError, match="impossible size"):
        transport.import_prefixes(target, path)


def test_what_is_no_such_file_is_refused(target, tmp_path):
    for content in (b"", b"TKVX", b"GGUF" * 100, os.urandom(1000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PrefixFileError):
            transport.import_prefixes(target, tmp_path / "x")
    with pytest.raises(StorageError, match="cannot be read"):
        transport.import_prefixes(target, tmp_path / "none")


def test_a_store_that_is_too_small_keeps_a_beginning_and_says_so(store, tmp_path):
    export(store, tmp_path / "x")
    small = open_store(tmp_path / "small", 512 * 1024)
    fill(store, [list(range(1000 + 100 * i, 1090 + 100 * i)) for i in range(12)])
    export(store, tmp_path / "large")
    report = transport.import_prefixes(small, tmp_path / "large")
    held = contents(small)
    assert report.problem == "the store is too small for all of it"
    assert report.num_kept == report.num_imported == len(held) < report.num_announced
    assert held.items() <= contents(store).items()
    assert_sound(small)
    small.close()


def test_blocks_that_go_while_they_are_exported_take_their_children_along(store, target, tmp_path):
    victim = chain(PROMPTS[0])[10].hash
    whole = contents(store)

    def progress(done, total):
        if done == 5:
            store.remove([victim])

    report = export(store, tmp_path / "x", progress=progress)
    assert report.num_gone == 7
    transport.import_prefixes(target, tmp_path / "x")
    assert contents(target).items() <= whole.items()
    assert len(contents(target)) == len(whole) - 7


def test_a_store_that_another_process_uses(store, tmp_path):
    """Export from and import into stores that stay open elsewhere."""
    target = open_store(tmp_path / "target")
    for command in (
        ["export", "--disk-path", str(store.directory), "--out", str(tmp_path / "x"), "--all", "--namespace",
         NAMESPACE.hex()],
        ["import", str(tmp_path / "x"), "--disk-path", str(target.directory)],
    ):  # fmt: skip
        subprocess.run([sys.executable, "-m", "tieredkv", *command], check=True, cwd=ROOT, timeout=60)
    assert contents(target) == contents(store)
    target.close()


def test_the_commands_answer_with_exit_codes(store, tmp_path, capsys):
    source, target = str(store.directory), str(tmp_path / "new")
    store.close()
    out = str(tmp_path / "x.tkv")
    base = ["export", "--disk-path", source, "--out", out, "--namespace", NAMESPACE.hex()[:10]]
    assert main([*base, "--all", "--pinned"]) == 2
    assert main(base) == 2
    assert main([*base, "--name", "nobody"]) == 2
    assert main([*base, "--pinned"]) == 2
    assert main([*base, "--all", "--compress", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_blocks"] == 36
    assert main(["import", out, "--disk-path", target, "--disk-size", "4MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_imported"] == 36
    assert main(["import", out, "--disk-path", target]) == 0
    assert main(["verify", target]) == 0
    Path(out).write_bytes(Path(out).read_bytes()[:-1])
    assert main(["import", out, "--disk-path", str(tmp_path / "third")]) == 1
    assert "incomplete" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "none"), "--disk-path", target]) == 2
    assert main(["import", __file__, "--disk-path", target]) == 2


def test_a_reader_holds_one_block_at_a_time(exported):
    path, whole = exported
    with path.open("rb") as file:
        blocks = iter(PrefixFileReader(file))
        first = next(blocks)
        assert file.tell() < path.stat().st_size
        assert whole[first.hash] == bytes(first.payload)
