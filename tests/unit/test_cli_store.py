"""`tieredkv inspect` and `tieredkv verify`: what they say of a store, and the exit code that a script goes by."""

from __future__ import annotations

import json
import os

import lmdb
import pytest

from tieredkv.cli.main import main
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import BlockRecord


def digest(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def store(tmp_path):
    """A chain of four blocks in one namespace and a single block in another."""
    disk = DiskStore.open(tmp_path / "store", 16 << 20)
    chain = [
        BlockRecord(digest(i), digest(i - 1), i - 1, digest(90), memoryview(os.urandom(5000)), token_ids=bytes(64))
        for i in range(1, 5)
    ]
    single = BlockRecord(digest(50), digest(49), 0, digest(91), memoryview(os.urandom(5000)), token_ids=bytes(64))
    assert all(outcome.resident for outcome in disk.put([*chain, single]))
    disk.describe_namespace(digest(90), json.dumps({"model": "tiny", "dtype": "float32", "block_size": 16}))
    disk.close()
    return tmp_path / "store"


def damage(folder) -> None:
    with lmdb.open(str(folder), max_dbs=8) as env, env.begin(write=True) as txn:
        blocks = env.open_db(b"blocks", txn=txn)
        record = bytearray(txn.get(digest(3), db=blocks))
        record[2000] ^= 1
        txn.put(digest(3), bytes(record), db=blocks)


def test_inspect_shows_models_blocks_and_tokens(store, capsys):
    assert main(["inspect", str(store)]) == 0
    text = capsys.readouterr().out
    assert "blocks     5" in text
    assert "tiny (float32)" in text
    assert "unknown model" in text
    assert main(["inspect", str(store), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_blocks"] == 5
    spaces = {space["digest"]: space for space in found["namespaces"]}
    assert spaces[digest(90).hex()]["num_blocks"] == 4
    assert spaces[digest(90).hex()]["num_tokens"] == 64
    assert spaces[digest(90).hex()]["description"]["model"] == "tiny"


def test_verify_finds_and_mends_damage(store, capsys):
    assert main(["verify", str(store)]) == 0
    assert "all is well" in capsys.readouterr().out
    damage(store)
    assert main(["verify", str(store)]) == 1
    assert "--repair" in capsys.readouterr().out
    assert main(["verify", str(store), "--repair"]) == 0
    assert "2 blocks removed" in capsys.readouterr().out
    assert main(["verify", str(store)]) == 0
    assert "3 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_store_is_one_line_and_exit_code_2(command, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "file"):
        assert main([command, str(path)]) == 2
        errors = capsys.readouterr().err.strip().splitlines()
        assert len(errors) == 1
        assert str(path) in errors[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
