"""Stacked linear layers give what their modules gave, packed or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tieredkv.errors import InvariantError
from tieredkv.linear import StackedLinear


def modules(dtype: torch.dtype, biases: tuple[bool, ...]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(48, 32 + 16 * i, bias=bias).to(dtype) for i, bias in enumerate(biases)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [(False,), (True,), (True, False, True)])
@pytest.mark.parametrize("keep_rows", [False, True])
@torch.inference_mode()
def test_packing_changes_nothing_but_rounding(dtype, biases, keep_rows):
    linears = modules(dtype, biases)
    stacked = StackedLinear(linears)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    inputs = [torch.randn(rows, 48).to(dtype) for rows in (1, 2, 7, 300)]
    expected = [torch.cat([linear(x) for linear in linears], -1) for x in inputs]
    for x, y in zip(inputs, expected, strict=True):
        assert torch.equal(stacked(x), y)
    stacked.pack(keep_rows=keep_rows)
    for x, y in zip(inputs, expected, strict=True):
        residual = torch.randn_like(y)
        before = residual.clone()
        torch.testing.assert_close(stacked(x), y, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(stacked.add(x, residual), y + before, rtol=tolerance, atol=2 * tolerance)
        assert torch.equal(residual, before)


def test_packing_leaves_no_second_copy_in_the_modules():
    linears = modules(torch.float32, (True, False))
    StackedLinear(linears).pack()
    assert all(linear.weight.numel() == 0 for linear in linears)


def test_a_shared_weight_survives_packing():
    (linear,) = modules(torch.float32, (False,))
    before = linear.weight.clone()
    StackedLinear([linear]).pack(release=False)
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_can_be_read_gives_its_rows(dtype):
    linear = nn.Linear(64, 96, bias=False).to(dtype)
    before = linear.weight.detach().clone()
    stacked = StackedLinear([linear])
    can_be_read = stacked.can_be_read
    stacked.pack()
    numbers = torch.tensor([0, 95, 31, 32, 16, 15, 31])
    if can_be_read:
        assert torch.equal(stacked.weight_rows(numbers), before[numbers])
        assert stacked.weight_rows(numbers[:0]).shape == (0, 64)
    else:
        with pytest.raises(InvariantError):
            stacked.weight_rows(numbers)
