"""Bytes per block, and the namespace: one field changed means no hit, ever."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes import Collector, make_core, request
from tieredkv import hashing
from tieredkv.errors import ConfigError
from tieredkv.layout import KVLayout, Namespace

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
BASE = Namespace(
    weights="w0",
    config={"model_type": "llama", "hidden_size": 576, "vocab_size": 49152},
    rope={"rope_type": "default", "rope_theta": 1e5},
    attention={"scaling": 0.125, "sliding_window": None, "softcap": None},
    layout=LAYOUT,
)

CHANGES = {
    "weights": {"weights": "w1"},
    "config": {"config": {**BASE.config, "hidden_size": 640}},
    "config key": {"config": {**BASE.config, "extra": None}},
    "rope theta": {"rope": {**BASE.rope, "rope_theta": 1e6}},
    "rope type": {"rope": {**BASE.rope, "rope_type": "linear"}},
    "attention scaling": {"attention": {**BASE.attention, "scaling": 0.25}},
    "sliding window": {"attention": {**BASE.attention, "sliding_window": 4096}},
    "softcap": {"attention": {**BASE.attention, "softcap": 50.0}},
    "layers": {"layout": dataclasses.replace(LAYOUT, num_layers=31)},
    "kv heads": {"layout": dataclasses.replace(LAYOUT, num_kv_heads=6)},
    "head dim": {"layout": dataclasses.replace(LAYOUT, head_dim=32)},
    "block size": {"layout": dataclasses.replace(LAYOUT, block_size=32)},
    "dtype": {"layout": dataclasses.replace(LAYOUT, dtype="float16")},
    "layout version": {"layout": dataclasses.replace(LAYOUT, version=2)},
    "adapter": {"adapter": "lora-7"},
    "hash scheme": {"hash_scheme": "another"},
}


def test_block_bytes():
    assert LAYOUT.token_nbytes == 30 * 2 * 3 * 64 * 2 == 22.5 * 1024
    assert LAYOUT.block_nbytes == 16 * LAYOUT.token_nbytes
    assert LAYOUT.block_shape == (30, 2, 16, 3, 64)


def test_the_change_matrix_names_every_field():
    fields = {f.name for f in dataclasses.fields(Namespace)}
    assert fields == {key for change in CHANGES.values() for key in change}
    layout_fields = {f.name for f in dataclasses.fields(KVLayout)}
    changed = {
        name
        for change in CHANGES.values()
        if "layout" in change
        for name in layout_fields
        if getattr(change["layout"], name) != getattr(LAYOUT, name)
    }
    assert changed == layout_fields


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_field_changes_the_digest(name):
    assert dataclasses.replace(BASE, **CHANGES[name]).digest != BASE.digest


def test_all_digests_differ_and_equal_fields_give_equal_digests():
    digests = {dataclasses.replace(BASE, **change).digest for change in CHANGES.values()}
    assert len(digests) == len(CHANGES)
    shuffled = dataclasses.replace(BASE, config=dict(reversed(BASE.config.items())))
    assert shuffled.digest == BASE.digest


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_field_means_no_hit(name):
    prompt = list(range(40))
    core, _ = make_core(namespace=BASE.digest)
    core.add(request("a", prompt))
    Collector(core).run()
    other, _ = make_core(namespace=dataclasses.replace(BASE, **CHANGES[name]).digest)
    # The other engine looks into the first one's blocks, as it would in a shared tier.
    other.cache.pool = core.pool
    other.add(request("b", prompt))
    sequence = next(iter(other.scheduler))
    assert other.cache.match(sequence).num_blocks == 0
    assert hashing.root_hash(BASE.digest) != sequence.root_hash


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("num_layers", 0), ("block_size", -1)])
def test_impossible_layouts_are_refused(field, value):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(LAYOUT, **{field: value})
    assert caught.value.key == field
