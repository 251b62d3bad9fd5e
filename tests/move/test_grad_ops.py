"""Arithmetic on gradients that come to rest, beside torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.move.grad_ops import GradOps, accumulate_, add_contribution, vector_norm

LARGE = (1 << 16) + 3
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def drawn(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Copies(TorchDispatchMode):
    """Counts the elements of fp32 copies."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.linalg_vector_norm.default):
            self.numel += args[0].numel()
        return result


@HALF
@pytest.mark.parametrize("numel", [0, 1, 1000, 1 << 16])
def test_norms_of_small_gradients_are_torchs(dtype: torch.dtype, numel: int) -> None:
    grad = drawn(numel, dtype)
    assert torch.equal(vector_norm(grad, 2.0), torch.linalg.vector_norm(grad.float()))


@HALF
@pytest.mark.parametrize("shape", [(LARGE,), (257, 259)])
def test_norms_of_large_gradients_are_rounded_once_and_copy_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    grad = drawn(math.prod(shape), dtype).view(shape)
    with Copies() as copies:
        norm = vector_norm(grad, 2.0)
    assert copies.numel == 0
    assert torch.equal(norm, grad.double().square().sum().sqrt().float())
    assert norm.dtype is torch.float32 and norm.shape == ()
    torch.testing.assert_close(norm, torch.linalg.vector_norm(grad.float()), rtol=1e-5, atol=0)


def test_norms_of_large_gradients_show_what_is_not_finite_and_no_more() -> None:
    grad = torch.zeros(LARGE, dtype=torch.bfloat16)
    grad[7] = 1e30  # whose square is too large for fp32
    assert vector_norm(grad, 2.0) == grad[7]
    for special in (math.inf, -math.inf, math.nan):
        grad[-1] = special
        assert not vector_norm(grad, 2.0).isfinite()


@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_other_norms_and_strides_are_torchs(order: float) -> None:
    grad = drawn(2 * LARGE, torch.bfloat16)[::2]
    for each in (order, 2.0):
        assert torch.equal(vector_norm(grad, each), torch.linalg.vector_norm(grad, each, dtype=torch.float32))


@HALF
def test_a_sum_has_torchs_bits_and_copies_nothing(dtype: torch.dtype) -> None:
    total, grad = drawn(LARGE, torch.float32), drawn(LARGE, dtype, seed=1)
    ops = GradOps(scale=0.3, low=-0.5, high=0.4)
    expected = total.clone().mul_(0.3).clamp_(-0.5, 0.4).add_(grad.float())
    with Copies() as copies:
        found = accumulate_(total, ops, grad)
    assert found is total and copies.numel == 0
    assert torch.equal(found, expected)


@given(
    st.integers(0, 70), st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]), st.booleans()
)
def test_contributions_add_up_as_in_torch(numel: int, dtype: torch.dtype, strided: bool) -> None:
    step = 2 if strided else 1
    first, second = drawn(numel * step, dtype)[::step], drawn(numel * step, dtype, seed=1)[::step]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected = first.to(wide, copy=True).mul_(0.7).add_(second.to(wide))
    assert torch.equal(add_contribution(first.clone(), GradOps(scale=0.7), second), expected)
