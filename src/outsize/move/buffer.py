"""The gathered buffer of a unit on the computing device: a cache that comes and goes, at a fixed identity."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import final

import torch

from outsize.move.device import DeviceMemory, Lanes
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.transfer import ARRIVED, Transfer

# Note [Resized storage]
# Autograd's saved tensors and the parameters themselves are views of the buffer's storage, so the buffer must never be
# replaced, only emptied and refilled. On the CPU the pages are given back under an unchanging address (Note [Reserved
# memory]); on an accelerator the storage is resized to 0 and back. Either way the views stay what they are.


class DeviceBuffer(ABC):
    """`flat` (uint8 [nbytes]) holds a unit's parameters while it is resident."""

    def __init__(self, nbytes: int, ledger: Ledger) -> None:
        self.nbytes = nbytes
        self.resident = False
        self._ledger = ledger
        self._known_views = 0

    @property
    @abstractmethod
    def flat(self) -> torch.Tensor:
        """The buffer's bytes; they exist only while `resident`."""

    @property
    def values(self) -> torch.Tensor:
        """The same bytes, of which the parameters are views."""
        return self.flat

    @cached_property
    def _storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    @property
    def key(self) -> int:
        """The identity of the storage of `values`, the same for every view of it."""
        return int(self._storage._cdata)

    def note_views(self) -> None:
        """The views of `values` that there are now stay for as long as the buffer."""
        self._known_views = _references(self._storage)

    @property
    def viewed(self) -> bool:
        """Whether there are other views of `values`: then somebody still reads them."""
        return _references(self._storage) > self._known_views

    def materialize(self) -> None:
        if not self.resident:
            self._grow()  # raises where the accelerator has no memory: then nothing has changed
            self.resident = True
            self._ledger.add("device/resident", self.nbytes)

    def drop(self) -> None:
        if self.resident:
            self.resident = False
            self._ledger.remove("device/resident", self.nbytes)
            self._shrink()

    @abstractmethod
    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        """Start to copy `source` (uint8, host memory) into the buffer at byte `first`."""

    @abstractmethod
    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        """Start to copy the buffer's bytes from `first` into `out` (uint8, host memory)."""

    @abstractmethod
    def use(self) -> None:
        """The computation that is launched next may read or write the buffer; never blocks the host."""

    @abstractmethod
    def leave(self) -> None:
        """The computation that was launched so far was the last that uses the buffer, for now."""

    @abstractmethod
    def filling(self) -> AbstractContextManager[None]:
        """What is started in the block (a copy, a collective) writes into the buffer: after all that was started so
        before, and beside the computation."""

    @abstractmethod
    def await_sources(self) -> None:
        """Block until nothing is read any more that `fill` was given."""

    @abstractmethod
    def _grow(self) -> None: ...

    @abstractmethod
    def _shrink(self) -> None: ...


def _references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def alone(value: torch.Tensor, owner: object) -> torch.Tensor:
    """A tensor over the same memory whose storage has exactly the bytes of `value`. `owner` keeps that memory."""
    nbytes = value.numel() * value.itemsize
    if not nbytes:
        return torch.empty_like(value)
    if value.device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
    storage = torch._C._construct_storage_from_data_pointer(value.data_ptr(), value.device, nbytes)
    own = torch.empty(0, dtype=value.dtype, device=value.device)
    return own.set_(storage, 0, value.size(), value.stride())


@final
class HostDeviceBuffer(DeviceBuffer):
    """The buffer where computation runs on the CPU."""

    def __init__(self, nbytes: int, ledger: Ledger) -> None:
        super().__init__(nbytes, ledger)
        self._memory = HostBuffer(nbytes)
        self._values = alone(self.flat, self.flat)  # so that no transfer counts as a view

    @property
    def flat(self) -> torch.Tensor:
        return self._memory.bytes

    @property
    def values(self) -> torch.Tensor:
        return self._values

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        self.flat[first : first + source.numel()].copy_(source)
        return ARRIVED

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        out.copy_(self.flat[first : first + out.numel()])
        return ARRIVED

    def use(self) -> None:
        return

    def leave(self) -> None:
        return

    def filling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def await_sources(self) -> None:
        return

    def _grow(self) -> None:
        return  # pages appear when they are touched

    def _shrink(self) -> None:
        self._memory.drop()


@final
class AcceleratorBuffer(DeviceBuffer):
    """The buffer in an accelerator's memory."""

    def __init__(self, nbytes: int, ledger: Ledger, lanes: Lanes) -> None:
        super().__init__(nbytes, ledger)
        self._memory = DeviceMemory(nbytes, lanes)
        self._memory.shrink()

    @property
    def flat(self) -> torch.Tensor:
        return self._memory.bytes

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        return self._memory.fill(first, source)

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        return self._memory.fetch(first, out)

    def use(self) -> None:
        self._memory.use()

    def leave(self) -> None:
        self._memory.leave()

    def filling(self) -> AbstractContextManager[None]:
        return self._memory.filling()

    def await_sources(self) -> None:
        self._memory.await_filled()

    def _grow(self) -> None:
        # Resize, don't reallocate: autograd saved views. See Note [Resized storage].
        self._memory.grow()

    def _shrink(self) -> None:
        self._memory.shrink()


def open_buffer(nbytes: int, ledger: Ledger, lanes: Lanes | None) -> DeviceBuffer:
    """The kind of buffer that the device needs; an accelerator has `lanes`."""
    return HostDeviceBuffer(nbytes, ledger) if lanes is None else AcceleratorBuffer(nbytes, ledger, lanes)
