"""The attention that transformers calls: what it refuses, and that it reads what was written."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import nn

from tieredkv.attention import KVBatch, paged_attention
from tieredkv.batch import build_batch
from tieredkv.errors import InvariantError, UnsupportedModelError
from tieredkv.layout import KVLayout
from tieredkv.pool import KVPool
from tieredkv.sequence import ScheduledSequence, Sequence
from tieredkv.types import EngineRequest, SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, dtype="float32")


def sequence(num_tokens: int, block_ids: list[int]) -> Sequence:
    made = Sequence(EngineRequest("r", list(range(num_tokens)), SamplingParams()), b"")
    made.block_ids = array("i", block_ids)
    return made


def pool() -> KVPool:
    return KVPool(LAYOUT, 8, torch.device("cpu"), torch.float32)


class Attention(nn.Module):
    layer_idx = 1


def call(kv_batch: KVBatch | None, tokens: int, **kwargs):
    torch.manual_seed(tokens)
    q, k, v = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    return paged_attention(Attention(), q, k, v, kwargs.pop("mask", None), scaling=0.5, kv_batch=kv_batch, **kwargs)


def batch(length: int = 5) -> KVBatch:
    return KVBatch(build_batch([ScheduledSequence(sequence(length, [3]), 0, length)], 8), pool())


def test_a_lost_step_is_an_error():
    with pytest.raises(InvariantError, match="kv_batch"):
        call(None, 3)


@pytest.mark.parametrize("feature", [{"position_bias": torch.zeros(4)}, {"s_aux": torch.zeros(4)}])
def test_what_is_not_computed_is_refused(feature):
    with pytest.raises(UnsupportedModelError, match=next(iter(feature))):
        call(batch(), 5, **feature)


def test_a_mask_is_refused():
    with pytest.raises(UnsupportedModelError, match="mask"):
        call(batch(), 5, mask=torch.zeros(1, 1, 5, 5))


def test_an_inactive_feature_is_fine():
    out, weights = call(batch(), 5, sliding_window=None, softcap=None, dropout=0.0)
    assert out.shape == (1, 5, 4, 8)
    assert weights is None


def test_leftovers_of_a_former_owner_never_show():
    clean, dirty = pool(), pool()
    dirty.blocks.fill_(float("nan"))
    steps = [[(0, 11)], [(11, 1)], [(12, 4)], [(16, 1)], [(17, 3)]]
    owner = sequence(20, [5, 2, 7])
    for step in steps:
        parts = [ScheduledSequence(owner, start, new) for start, new in step]
        tokens = sum(new for _, new in step)
        outputs = [call(KVBatch(build_batch(parts, 8), memory), tokens)[0] for memory in (clean, dirty)]
        assert torch.isfinite(outputs[1]).all()
        assert torch.equal(*outputs)
    assert dirty.blocks[[0, 1, 3, 4, 6]].isnan().all()


def test_a_pool_needs_more_than_the_null_block():
    with pytest.raises(ValueError, match="null block"):
        KVPool(LAYOUT, 1, torch.device("cpu"), torch.float32)


def test_a_new_pool_is_zero_and_a_block_is_one_slab():
    fresh = pool()
    assert fresh.blocks.shape == (8, *LAYOUT.block_shape)
    assert not fresh.blocks.any()
    assert fresh.blocks[3].is_contiguous()
    assert fresh.blocks[3].nbytes == LAYOUT.block_nbytes
