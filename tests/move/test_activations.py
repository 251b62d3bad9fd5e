"""Saved tensors leave memory and come back as they were, whatever they view."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.move.activations import LEAST_BYTES, ActivationStore, DiskPlace, SavedCall
from outsize.move.conveyor import Conveyor, Job
from outsize.move.disk import StripedFile, open_engine
from outsize.move.memory import Ledger

PAGE, ROOM = 4096, 64


class Shelf:
    """A store of 64 pages, whose slabs have one page each."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.engine = Ledger(), open_engine()
        self.conveyor = Conveyor(PAGE, 2, self.ledger)
        place = DiskPlace(
            StripedFile(self.engine, [folder], "activations", ROOM * PAGE), self.conveyor, None, self.ledger
        )
        self.store = ActivationStore(torch.device("cpu"), None, place)

    @property
    def away(self) -> int:
        return self.ledger.now.get("disk/activations", 0) // PAGE

    def leave(self, call: SavedCall) -> list[SavedCall]:
        """Two further calls, after which what this one saved is away."""
        assert call is not None
        return [self.store.call(), self.store.call()]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    (tmp_path / "lock").touch()
    made = Shelf(tmp_path)
    yield made
    made.conveyor.close()
    made.store.close()
    made.engine.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_view_comes_back(shelf: Shelf, data: st.DataObject) -> None:
    """With any offset and strides, overlapping ones too, in any dtype, several of one storage."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
    storage = torch.randint(0, 2, (6000,)).to(dtype) if dtype == torch.bool else torch.randn(6000).to(dtype)
    call, views, packed = shelf.store.call(), [], []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
        stride = data.draw(st.lists(st.integers(0, 60), min_size=len(size), max_size=len(size)))
        view = storage.as_strided(size, stride, data.draw(st.integers(0, 4000)))
        views.append(view.clone())
        packed.append(call.pack(view))
    later = shelf.leave(call)
    del storage, view
    for one, expected in zip(packed, views, strict=True):
        found = call.unpack(one)
        assert torch.equal(found, expected) and found.dtype == dtype
    del later


def test_one_storage_moves_once_and_a_page_is_used_again(shelf: Shelf) -> None:
    tensor = torch.randn(PAGE)  # four pages
    first, values = shelf.store.call(), tensor.clone()
    packed = [first.pack(tensor), first.pack(tensor.view(64, 64).t())]
    second = shelf.store.call()
    packed.append(second.pack(tensor))
    later = shelf.leave(second)
    assert shelf.away == 4
    del tensor
    again = shelf.store.call()
    assert torch.equal(second.unpack(packed[2]), values)
    assert torch.equal(first.unpack(packed[1]), values.view(64, 64).t())
    assert torch.equal(first.unpack(packed[0]), values)
    assert torch.equal(first.unpack(packed[0]), values), "a graph may be used twice"
    del packed, first, second, later, again
    gc.collect()
    assert shelf.away == 0
    for _ in range(ROOM):  # more bytes in all than there is room
        call = shelf.store.call()
        one = call.pack(torch.randn(PAGE))
        shelf.leave(call)
    del one


def test_bytes_that_have_left_take_no_memory(shelf: Shelf) -> None:
    """Nor do they wait for the garbage collector."""
    gc.disable()
    try:
        call, tensor = shelf.store.call(), torch.randn(3 * PAGE)
        values, memory = tensor.clone(), StorageWeakRef(tensor.untyped_storage())
        packed = call.pack(tensor)
        later = shelf.leave(call)
        del tensor
        assert memory.expired()
        found = call.unpack(packed)
        assert torch.equal(found, values)
        memory = StorageWeakRef(found.untyped_storage())
        shelf.conveyor.submit(Job([])).wait()
        del found
        assert memory.expired()
    finally:
        gc.enable()
    del later


def test_the_newest_stays_and_what_is_small_or_no_plain_tensor(shelf: Shelf) -> None:
    call = shelf.store.call()
    small, parameter = torch.randn(LEAST_BYTES // 4 - 1), nn.Parameter(torch.randn(PAGE))
    sparse, meta = torch.eye(100).to_sparse(), torch.empty(PAGE, device="meta")
    for kept in (small, parameter, sparse, meta, torch.randn(PAGE, dtype=torch.complex64).conj()):
        assert call.unpack(call.pack(kept)) is kept or kept is small
    newest = torch.randn(PAGE)
    packed = call.pack(newest)
    assert shelf.away == 0
    assert call.unpack(packed).data_ptr() == newest.data_ptr()


def test_a_tensor_that_was_written_to_is_an_error(shelf: Shelf) -> None:
    tensor = torch.randn(PAGE)
    call = shelf.store.call()
    packed = call.pack(tensor)
    tensor.add_(1.0)
    with pytest.raises(RuntimeError, match="written to in place"):
        call.unpack(packed)
    tensor = torch.randn(PAGE)
    values, packed = tensor.clone(), call.pack(tensor)
    later = shelf.leave(call)
    tensor.add_(1.0)  # it has left already
    assert torch.equal(call.unpack(packed), values)
    del later
