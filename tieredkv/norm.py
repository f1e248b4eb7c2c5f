"""Root-mean-square normalisation on the CPU.

Knows nothing of layers. Invariant: equal to `torch.nn.functional.rms_norm` up to the rounding of the type.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

# A row whose mean square is this many times eps is normalised without eps: the difference of 1/2048 is a quarter of
# the rounding of bfloat16.
_EPS_MATTERS = 1024
_HAS_WEIGHT_NORM = hasattr(torch, "_weight_norm_interface")


@dataclass(slots=True)
class Norm:
    """Root-mean-square normalisation: `x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    weight: torch.Tensor
    eps: float
    scaled_weight: torch.Tensor = field(init=False)
    least_norm: float = field(init=False)

    def __post_init__(self) -> None:
        size = self.weight.numel()
        self.scaled_weight = (self.weight.float() * math.sqrt(size)).to(self.weight.dtype)
        self.least_norm = math.sqrt(_EPS_MATTERS * self.eps * size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and _HAS_WEIGHT_NORM and x.numel():
            # x / |x| in one pass is what weight normalisation computes; it knows no eps.
            rows = x.reshape(-1, x.shape[-1])
            unit, norms = torch._weight_norm_interface(rows, _ones(len(rows)), 0)
            if norms.min().item() >= self.least_norm:
                return unit.mul_(self.scaled_weight).view(x.shape)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@functools.lru_cache(maxsize=64)
def _ones(rows: int) -> torch.Tensor:
    return torch.ones((rows, 1), dtype=torch.bfloat16)
