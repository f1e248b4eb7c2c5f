"""The identity of blocks: golden vectors, chaining, tenants, and independence from the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import hashing

NAMESPACE = bytes(range(32))
TOKENS = [0, 1, 2, 255, 256, 65535, 65536, 4294967295]

# Whoever changes one of these makes every stored block unreachable: raise HASH_SCHEME's version with it.
GOLDEN = {
    "root": "0a867728c00f6cc6ff6b2182a8a493edc46ea1f6be0979a1c374598968d1c220",
    "root of a tenant": "170a03ad92a3df2e7371607d4a8f8a97f4ac23c0c8816c83d3e4666b2f97d554",
    "first block": "1c561d6f67ab2ca34dd7c46c981d83aaae311d13f961e33ab60c2a2875388c35",
    "second block": "25ea960df8382028fdf1b1206118ccfe84e5b749a3b2f8e331c3e54ae67ddc9f",
    "salt of a key": "780c81e648b0f94e5d54b9fb77bfd481d9a6f486a27f7ffe2669e8d998b9c00c",
    "salt of a key and a cache_salt": "dd95cedfa93f9fd4383b6b01477a518caf43a409c76bade94780f18717fb4b5e",
    "salt of a cache_salt": "3fb80fbe3c3e68a7b1cac75c5efb0479b71e479bca257de0009c4a5d93166603",
}


GOLDEN_LABEL = "cc93a27fc146"


def vectors() -> dict[str, str]:
    root = hashing.root_hash(NAMESPACE)
    first = hashing.block_hash(root, TOKENS)
    return {
        "root": root.hex(),
        "root of a tenant": hashing.root_hash(NAMESPACE, b"tenant").hex(),
        "first block": first.hex(),
        "second block": hashing.block_hash(first, TOKENS).hex(),
        "salt of a key": hashing.tenant_salt(api_key="sk-1").hex(),
        "salt of a key and a cache_salt": hashing.tenant_salt(api_key="sk-1", cache_salt="x").hex(),
        "salt of a cache_salt": hashing.tenant_salt(cache_salt="x").hex(),
    }


def test_golden_vectors():
    assert vectors() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_do_not_depend_on_the_process(seed):
    code = "from tests.unit.test_hashing import vectors; print(vectors())"
    env = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(GOLDEN)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200), st.integers(1, 16), st.data())
def test_a_chain_grows_the_same_however_it_is_extended(tokens, block_size, data):
    full = len(tokens) // block_size
    root = hashing.root_hash(NAMESPACE)
    whole: list[bytes] = []
    hashing.extend_chain(whole, root, tokens, block_size, full)
    parts: list[bytes] = []
    for stop in sorted([*data.draw(st.lists(st.integers(0, full), max_size=4)), full]):
        hashing.extend_chain(parts, parts[-1] if parts else root, tokens, block_size, max(stop, len(parts)))
    one_by_one, parent = [], root
    for i in range(full):
        parent = hashing.block_hash(parent, tokens[i * block_size : (i + 1) * block_size])
        one_by_one.append(parent)
    assert whole == parts == one_by_one


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_any_changed_token_changes_its_block_and_all_behind(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] = (changed[at] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    root = hashing.root_hash(NAMESPACE)
    chains = []
    for each in (tokens, changed):
        chain: list[bytes] = []
        hashing.extend_chain(chain, root, each, 1, len(each))
        chains.append(chain)
    assert [a == b for a, b in zip(*chains, strict=True)] == [i < at for i in range(len(tokens))]


def test_domains_and_lengths_are_kept_apart():
    salts = {
        hashing.tenant_salt(),
        hashing.tenant_salt(api_key="a"),
        hashing.tenant_salt(cache_salt="a"),
        hashing.tenant_salt(api_key="a", cache_salt="b"),
        hashing.tenant_salt(api_key="ab"),
        hashing.tenant_salt(api_key="b", cache_salt="a"),
        hashing.tenant_salt(api_key=""),
    }
    assert len(salts) == 7
    roots = {hashing.root_hash(b"ab", b"c"), hashing.root_hash(b"a", b"bc"), hashing.root_hash(b"abc")}
    assert len(roots) == 3


def test_a_caller_cannot_reach_another_keys_cache():
    mine = {hashing.tenant_salt(api_key="mine", cache_salt=s) for s in (None, "", "theirs", "ktheirs", "x")}
    theirs = {hashing.tenant_salt(api_key="theirs", cache_salt=s) for s in (None, "", "mine", "kmine", "x")}
    assert not mine & theirs


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_packed_tokens_come_back(tokens):
    assert hashing.unpack_tokens(hashing.pack_tokens(tokens)) == tokens


def test_tokens_outside_32_bits_are_refused():
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            hashing.pack_tokens([bad])


def test_an_owner_has_a_label_that_does_not_tell_its_key():
    assert hashing.owner_label(None) == "shared"
    label = hashing.owner_label("sk-1")
    assert label == GOLDEN_LABEL
    assert len(label) == 12
    assert set(label) <= set("0123456789abcdef")
    assert hashing.owner_label("sk-2") != label
    assert not hashing.tenant_salt(api_key="sk-1").hex().startswith(label)
