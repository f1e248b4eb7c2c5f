"""Codecs are lossless, and hostile bytes cost nothing but an error."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.storage.autocodec import NUM_SAMPLES, AutoCodec, DiskRates, make_codec, measure_disk
from tieredkv.storage.codec import PLANES, ZstdCodec, decode, join_planes, split_planes


def encode(codec, payload: bytes) -> tuple[int, memoryview]:
    out = memoryview(bytearray(codec.max_stored_nbytes(len(payload))))
    code, length = codec.encode(memoryview(payload), out)
    return code, out[:length]


def kv_like(num_values: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).normal(size=num_values).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@given(st.sampled_from([1, 2, 4]), st.binary(max_size=400))
def test_planes_are_the_bytes_of_each_value(width, data):
    data = data[: len(data) // width * width]
    values = np.frombuffer(data, np.uint8)
    planes = [np.empty(len(data) // width, np.uint8) for _ in range(width)]
    split_planes(values, planes)
    assert all((plane == values[i::width]).all() for i, plane in enumerate(planes))
    joined = np.empty_like(values)
    join_planes(planes, joined)
    assert joined.tobytes() == data


@pytest.mark.parametrize("value_nbytes", [2, 4])
def test_zstd_shrinks_kv_and_restores_every_bit(value_nbytes):
    payload = kv_like(50_000)
    code, stored = encode(ZstdCodec(value_nbytes), payload)
    assert len(stored) < 0.9 * len(payload)
    target = memoryview(bytearray(len(payload)))
    decode(code, stored, target)
    assert target == payload


def test_what_does_not_shrink_is_stored_as_it_is():
    payload = np.random.default_rng(1).bytes(10_000)
    _, stored = encode(ZstdCodec(2), payload)
    assert len(stored) == len(payload) + 8


@given(st.sampled_from([*PLANES, 9, 200]), st.binary(max_size=200), st.integers(0, 64))
def test_garbage_raises_value_error_and_nothing_else(code, stored, nbytes):
    target = memoryview(bytearray(nbytes))
    try:
        decode(code, memoryview(stored), target)
    except ValueError:
        return
    assert nbytes == 0 or 4 * PLANES[code] + nbytes == len(stored) or code in PLANES


@pytest.mark.parametrize("claimed", [10, 1 << 40])
def test_a_frame_that_unpacks_to_more_or_less_is_refused(claimed):
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    stored = memoryview(struct.pack("<I", len(bomb)) + bomb)
    for nbytes in (1000, (1 << 20) + 1):
        with pytest.raises(ValueError):
            decode(1, stored, memoryview(bytearray(nbytes)))


def test_a_frame_that_asks_for_a_huge_window_is_refused():
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=params).compressobj()
    packed = frame.compress(bytes(100_000)) + frame.flush()
    with pytest.raises(ValueError):
        decode(1, memoryview(struct.pack("<I", len(packed)) + packed), memoryview(bytearray(100_000)))


@pytest.mark.parametrize(("rate", "choice"), [(1e6, "zstd"), (1e15, "raw")])
def test_auto_compresses_where_the_disk_is_the_slow_part(rate, choice):
    codec = AutoCodec(2, lambda: DiskRates(rate, rate))
    for seed in range(NUM_SAMPLES):
        payload = kv_like(20_000, seed)
        code, stored = encode(codec, payload)
        target = memoryview(bytearray(len(payload)))
        decode(code, stored, target)
        assert target == payload
    assert codec.choice is not None
    assert codec.choice.name == choice
    assert encode(codec, kv_like(1000))[0] == (0 if choice == "raw" else 2)


def test_auto_stores_raw_when_the_disk_cannot_be_measured(tmp_path):
    codec = AutoCodec(2, lambda: measure_disk(tmp_path / "missing"))
    for _ in range(NUM_SAMPLES):
        encode(codec, kv_like(100))
    assert codec.choice is not None
    assert codec.choice.name == "raw"


def test_the_disk_is_measured_and_nothing_stays(tmp_path):
    rates = measure_disk(tmp_path)
    assert rates.read > 0
    assert rates.write > 0
    assert not list(tmp_path.iterdir())


def test_a_codec_has_a_name(tmp_path):
    assert [make_codec(n, 2, tmp_path).name for n in ("raw", "zstd", "auto")] == ["raw", "zstd", "auto"]
    with pytest.raises(ValueError):
        make_codec("lz4", 2, tmp_path)
    with pytest.raises(ValueError):
        ZstdCodec(3)
