"""Masks and indices in fewer bytes are the same masks and indices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.run import packing
from outsize.run.packing import Packing, packed


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST_BYTES", 1)


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator("cpu").manual_seed(sum(shape)), device="cpu")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.floats(0, 1))
def test_masks_take_an_eighth(shape: list[int], share: float) -> None:
    mask = (random(*shape) < share).to(torch.get_default_device())
    found = packed(mask)
    assert found is not None
    assert found.values.numel() == -(-mask.numel() // 8)
    assert found.values.element_size() == 1
    assert torch.equal(found.tensor, mask) and found.tensor.dtype is torch.bool


@given(st.integers(-(1 << 40), 1 << 40), st.integers(0, 1 << 40))
def test_indices_take_what_they_need(least: int, length: int) -> None:
    indices = torch.tensor([[least, least + length // 2, least + length]], device="cpu")
    found = packed(indices)
    ranges = {1: (0, 255), 2: (-(1 << 15), (1 << 15) - 1), 4: (-(1 << 31), (1 << 31) - 1)}
    width = next((size for size, (low, high) in ranges.items() if low <= least <= least + length <= high), None)
    if width is None:
        assert found is None
        return
    assert found is not None
    assert found.values.element_size() == width
    assert torch.equal(found.tensor, indices) and found.tensor.dtype is torch.int64


def test_what_is_part_of_something_else_or_in_another_order_stays() -> None:
    mask = random(8, 8) < 0.5
    for each in (mask[:4], mask.t(), mask[:1].expand(8, 8), random(4, 4), torch.arange(9, dtype=torch.int32)):
        assert packed(each) is None


def test_a_call_packs_once_and_leaves_its_inputs() -> None:
    given_mask, mask = random(8, 8) < 0.5, random(8, 8) < 0.5
    pack, unpack = Packing([given_mask]).hooks
    first, second, third = pack(mask), pack(mask.detach()), pack(given_mask)
    assert first[0] is second[0]
    assert third[0] is given_mask
    mask.logical_not_()
    assert pack(mask)[0] is not first[0]
    assert torch.equal(unpack(first), ~mask)
    given_mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unpack(third)
    gone = StorageWeakRef(mask.untyped_storage())
    del mask
    assert gone.expired(), "what is packed is not kept"
