"""The record format: what was written comes back bit for bit, and nothing else ever does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.chains import NAMESPACE, ROOT, name
from tieredkv.storage.codec import RawCodec, ZstdCodec
from tieredkv.storage.medium import Medium
from tieredkv.storage.record import (
    HEADER_NBYTES,
    BadRecordError,
    check_record,
    decode_record,
    encode_record,
    max_record_nbytes,
    read_header,
)

CODECS = [RawCodec(), ZstdCodec(1), ZstdCodec(2), ZstdCodec(4)]
HASH = name("a", 1)
codecs = st.sampled_from(CODECS)
payloads = st.one_of(
    st.binary(max_size=600),
    st.tuples(st.binary(min_size=1, max_size=8), st.integers(1, 300)).map(lambda t: t[0] * t[1]),
)


def encode(payload: bytes, codec, block_hash: bytes = HASH, depth: int = 1) -> memoryview:
    out = memoryview(bytearray(max_record_nbytes(len(payload), codec)))
    length = encode_record(
        out,
        memoryview(payload),
        codec=codec,
        namespace=NAMESPACE,
        block_hash=block_hash,
        parent=ROOT,
        depth=depth,
    )
    return out[:length]


def decode(record: memoryview, nbytes: int, block_hash: bytes = HASH, namespace: bytes = NAMESPACE) -> bytes:
    target = memoryview(bytearray(nbytes))
    decode_record(record, target, block_hash, namespace, Medium())
    return bytes(target)


@given(payloads, codecs)
def test_what_was_written_comes_back(payload, codec):
    record = encode(payload, codec)
    assert decode(record, len(payload)) == payload
    header = check_record(record, HASH, Medium())
    assert (header.raw_nbytes, header.stored_nbytes) == (len(payload), len(record) - HEADER_NBYTES)
    assert (header.namespace, header.hash, header.parent, header.depth) == (NAMESPACE, HASH, ROOT, 1)


@given(payloads, codecs, st.data())
def test_any_flipped_bit_is_found(payload, codec, data):
    record = encode(payload, codec)
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadRecordError):
        decode(record, len(payload))
    with pytest.raises(BadRecordError):
        check_record(record, HASH, Medium())


@given(payloads.filter(len), codecs, st.data())
def test_any_truncation_or_extension_is_found(payload, codec, data):
    record = encode(payload, codec)
    short = record[: data.draw(st.integers(0, len(record) - 1))]
    long = memoryview(bytes(record) + data.draw(st.binary(min_size=1, max_size=9)))
    for damaged in (short, long):
        with pytest.raises(BadRecordError):
            decode(damaged, len(payload))


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}{getattr(c, '_width', '')}")
def test_a_record_is_refused_under_another_key_namespace_or_length(codec):
    record = encode(b"x" * 64, codec)
    for more in ({"block_hash": name("b", 1)}, {"namespace": name("other", 0)}, {"nbytes": 63}, {"nbytes": 65}):
        with pytest.raises(BadRecordError):
            decode(record, **({"nbytes": 64} | more))


def test_a_record_of_another_version_is_refused():
    record = encode(b"x" * 64, RawCodec())
    record[4] = 2
    with pytest.raises(BadRecordError):
        read_header(record, HASH, None, Medium())
