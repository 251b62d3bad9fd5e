"""Every instruction set that this processor has; references."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outsize import _native


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one instruction set for the test."""
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(before)


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    low = (bits - (high << 16) + 0x8000) % (1 << 16) - 0x8000
    return high.to(torch.int32).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
