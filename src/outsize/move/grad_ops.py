"""Arithmetic on gradients that come to rest: what the user does to them, their sums and their norms."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from math import frexp, inf, sqrt

import torch

from outsize import _native

# Note [Gradients of 16 bits on the CPU]
# torch's norm of a bf16 or fp16 tensor makes an fp32 copy of it, twice the gradient's own bytes that no budget knows
# of, and takes 2 s for a billion gradients; its sum with an fp32 tensor makes one too. The native core does both in one
# pass without a copy. The sum has torch's bits. The norm is summed in double; torch sums it in fp32, in an order that
# depends on the processor. Of small gradients, whose copies are nothing, the norm is torch's.

_CODES = {torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}
_LARGE_NUMEL = 1 << 16


@dataclass(frozen=True)
class GradOps:
    """What the user did to a gradient at rest, not yet applied to its bytes: `clamp(scale * g, low, high)`, or zero."""

    scale: float = 1.0
    low: float = -inf
    high: float = inf
    zero: bool = False

    @property
    def identity(self) -> bool:
        return self is AS_IT_IS or self == AS_IT_IS

    @property
    def clamps(self) -> bool:
        return self.low > -inf or self.high < inf

    @property
    def rounds(self) -> bool:
        """Whether the norm is another than that of the bytes times `scale`, be it in the last bit."""
        return self.clamps or not is_power_of_two(abs(self.scale))

    def scaled(self, factor: float) -> GradOps | None:
        """These operations, then `g * factor`; None where one record cannot say it with the same rounding."""
        if self.zero:
            return self
        exact = self.scale == 1.0 or is_power_of_two(self.scale) or is_power_of_two(factor) or factor == 1.0
        return None if self.clamps or not exact else _scaling(self.scale * factor)

    def clamped(self, low: float, high: float) -> GradOps:
        """These operations, then a clamp to [low, high]."""
        if self.zero:
            return self
        return replace(self, low=min(max(self.low, low), high), high=max(min(self.high, high), low))

    def apply_(self, grad: torch.Tensor) -> torch.Tensor:
        """Apply to a gradient in place, each operation rounded once."""
        if self.zero:
            return grad.zero_()
        if self.scale != 1.0:
            grad.mul_(self.scale)
        if self.clamps:
            grad.clamp_(self.low, self.high)
        return grad


AS_IT_IS = GradOps()


@lru_cache(maxsize=8)
def _scaling(factor: float) -> GradOps:
    """One record for all gradients that are clipped by the same factor."""
    return GradOps(factor)


def is_power_of_two(value: float) -> bool:
    """Whether to multiply by it, and to divide, is exact."""
    return value >= sys.float_info.min and frexp(value)[0] == 0.5


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a second contribution is added."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def add_contribution(previous: torch.Tensor, ops: GradOps, grad: torch.Tensor) -> torch.Tensor:
    """`previous` with its operations applied, plus `grad`, in fp32 or wider; reuses `previous` where it can."""
    return accumulate_(previous.to(wide_dtype(previous.dtype)), ops, grad)


def accumulate_(total: torch.Tensor, ops: GradOps, grad: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Apply the operations to `total` (fp32 or wider) in place, then add `grad`, each operation rounded once."""
    ops.apply_(total)
    if _is_native(grad) and total.dtype is torch.float32 and total.is_contiguous():
        _native.accumulate(total.data_ptr(), grad.data_ptr(), _CODES[grad.dtype], grad.numel(), threads=threads)
        return total
    return total.add_(grad.to(total.dtype))


def vector_norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    """The norm that torch's clipping computes, in fp32 or wider. [] from any shape."""
    if order == 2.0 and grad.numel() > _LARGE_NUMEL and _is_native(grad):
        squares = _native.squared_norm(grad.data_ptr(), _CODES[grad.dtype], grad.numel())
        return torch.tensor(sqrt(squares), dtype=torch.float32, device="cpu")
    wide = grad.dtype if grad.dtype is torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(grad, order, dtype=wide)
    return norm


def vector_norms(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """`vector_norm` of order 2 of each."""
    for grad in grads:
        if grad.dtype is torch.float64 or (grad.numel() > _LARGE_NUMEL and _is_native(grad)):
            return [vector_norm(each, 2.0) for each in grads]
    return list(torch._foreach_norm(grads, 2.0, torch.float32))


def _is_native(grad: torch.Tensor) -> bool:
    """See Note [Gradients of 16 bits on the CPU]."""
    return grad.dtype in _CODES and grad.device.type == "cpu" and grad.is_contiguous()
