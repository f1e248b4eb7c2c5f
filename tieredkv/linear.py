"""Linear layers for the CPU: several that read the same input as one product, with weights laid out once.

oneDNN multiplies fastest by a weight in a layout of its own. `F.linear` converts the weight in every call, which for a
few rows costs more than the product; packed once, it does not. Packing uses private operators of torch, so it is tried on
a small weight first, and where it does not work the stacked weight goes through `F.linear`. Where a kernel of our own
runs (`kernels.cpu_linear`), it takes oneDNN's place, and the weight is stored once, in that kernel's order.

Knows nothing of models. Invariant: packed or not, the numbers are those of the modules it was made from, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tieredkv.errors import InvariantError
from tieredkv.kernels import cpu_linear
from tieredkv.norm import Norm

# Number of rows for which the layout is chosen. Measured: 1, 16, 256 and 1024 give layouts that are equally fast at any number.
_ROWS_HINT = 256


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this CPU, multiplies by packed weights of `dtype` and gets the right result."""
    weight = torch.arange(64 * 32, dtype=torch.float32).sin().view(64, 32).to(dtype)
    x = torch.arange(8 * 32, dtype=torch.float32).cos().view(8, 32).to(dtype)
    try:
        expected = functional.linear(x, weight)
        packed = _pack(weight)
        plain = torch.allclose(_product(x, packed, None), expected, rtol=0.05, atol=0.05)
        return plain and torch.allclose(_product_add(x, packed, None, expected), 2 * expected, rtol=0.05, atol=0.1)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _product_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, "add")
    return result


class StackedLinear:
    """`y = x W^T + b` where W stacks the rows of one or more `nn.Linear` with the same input.

    Until `pack` it calls the modules, so that nothing is stored twice; afterwards the modules are empty shells.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._modules = list(modules)
        self._weight: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._packed = False
        # The weight in our own kernel's order, instead of `_weight`.
        self._own: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the modules' weights, before packing."""
        return sum(module.weight.nbytes for module in self._modules)

    def pack(self, *, release: bool = True, keep_rows: bool = False, gated: bool = False) -> None:
        """Stack and pack the weights.

        `release` empties the modules' own weights (False where someone else reads them too). `keep_rows` keeps a plain
        copy beside the packed one for single rows of bfloat16, see `_single_row`. `gated` promises that from now on only
        `gated` is called.
        """
        weights = [module.weight.detach() for module in self._modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if any(module.bias is not None for module in self._modules):
            self._bias = torch.cat([_bias(module) for module in self._modules])
        if _has_kernel(weight.dtype, *weight.shape):
            self._own = cpu_linear.pack(weight, gated=gated)
        else:
            self._packed = can_pack(weight.dtype)
            self._weight = _pack(weight) if self._packed else weight
        if self._packed and keep_rows and weight.dtype == torch.bfloat16:
            self._rows = weight
        if release:
            for module in self._modules:
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self._modules.clear()

    @property
    def can_be_read(self) -> bool:
        """Whether `weight_rows` will work once this is packed: oneDNN's layout hides them. Asked before packing."""
        return _has_kernel(
            self._modules[0].weight.dtype, sum(m.out_features for m in self._modules), self._modules[0].in_features
        )

    def weight_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the packed weight [out, in] by their numbers, int64 [T] -> [T, in]."""
        if self._own is None:
            raise InvariantError("this weight is not packed so that it can be read")
        return cpu_linear.unpacked_rows(self._own, numbers)

    def __call__(self, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """x [T, in], normalised first where there is a norm -> [T, out]."""
        if self._own is not None:
            before = None if norm is None else (norm.weight, norm.eps)
            return cpu_linear.linear(x, self._own, bias=self._bias, norm=before)
        if norm is not None:
            x = norm(x)
        weight = self._weight
        if weight is None:
            parts = [functional.linear(x, module.weight, module.bias) for module in self._modules]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._rows is not None and len(x) == 1:
            return _single_row(x, self._rows, self._bias)
        if self._packed:
            return _product(x, weight, self._bias)
        return functional.linear(x, weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` [T, out] plus the product; the sum is part of the product's kernel where that is possible."""
        if self._own is not None:
            return cpu_linear.linear(x, self._own, bias=self._bias, residual=residual)
        if self._packed and self._weight is not None and (self._rows is None or len(x) > 1):
            return _product_add(x, self._weight, self._bias, residual)
        return self(x).add_(residual)

    def gated(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`silu(gate) * up` of the normalised x [T, in] -> [T, out / 2]; the first half of the outputs is the gate."""
        if self._own is not None:
            return cpu_linear.linear(x, self._own, bias=self._bias, norm=(norm.weight, norm.eps), gated=True)
        gate, up = self(x, norm).chunk(2, -1)
        return functional.silu(gate).mul_(up)


def _has_kernel(dtype: torch.dtype, num_out: int, num_in: int) -> bool:
    """Whether our own kernel multiplies by a weight of this shape."""
    return dtype == torch.bfloat16 and cpu_linear.fits(num_out, num_in) and cpu_linear.can_run()


def _single_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of one row with a plain weight through torch's own kernel instead of oneDNN's.

    One row is a matter of reading the weight: torch's kernel reads at 33-36 GB/s what oneDNN reads at 22 (packed) or 15
    (plain). There is no way to name the kernel, only to hide oneDNN while it is chosen.
    """
    torch._C._set_mkldnn_enabled(False)
    try:
        return functional.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


def _bias(module: nn.Linear) -> torch.Tensor:
    """The module's bias, zeros when it has none."""
    bias: Any = module.bias
    return module.weight.new_zeros(module.out_features) if bias is None else bias.detach()
