"""The gathered buffer of a unit on the computing device: a cache that comes and goes, at a fixed identity."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch

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

    @property
    @abstractmethod
    def flat(self) -> torch.Tensor:
        """The buffer's bytes; they exist only while `resident`."""

    @property
    def key(self) -> int:
        """The identity of the storage, the same for every view of it."""
        return int(self.flat.untyped_storage()._cdata)

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
    def await_filled(self) -> None:
        """Let the computation that is launched next see all that was filled; never blocks the whole device."""

    @abstractmethod
    def filling(self) -> AbstractContextManager[None]:
        """What is started in the block (a copy, a collective) writes into the buffer: after all that was started so
        before, and beside the computation."""

    @abstractmethod
    def mark_written(self) -> None:
        """The computation has just written into the buffer: transfers that start from now on see it."""

    @abstractmethod
    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the computation had written of another tensor when it last called `mark_written`, in host memory."""

    @abstractmethod
    def _grow(self) -> None: ...

    @abstractmethod
    def _shrink(self) -> None: ...


def alone(value: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory whose storage has exactly the bytes of `value`."""
    nbytes = value.numel() * value.itemsize
    if not nbytes:
        return torch.empty_like(value)
    if value.device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
        memory.owner = value  # type: ignore[attr-defined]  # the storage keeps its memory
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

    @property
    def flat(self) -> torch.Tensor:
        return self._memory.bytes

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        self.flat[first : first + source.numel()].copy_(source)
        return ARRIVED

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        out.copy_(self.flat[first : first + out.numel()])
        return ARRIVED

    def await_filled(self) -> None:
        return

    def filling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark_written(self) -> None:
        return

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _grow(self) -> None:
        return  # pages appear when they are touched

    def _shrink(self) -> None:
        self._memory.drop()


@final
class EventTransfer(Transfer):
    """A copy on a side stream, over when its event has passed."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


@final
class AcceleratorBuffer(DeviceBuffer):
    """The buffer in an accelerator's memory."""

    def __init__(self, nbytes: int, device: torch.device, ledger: Ledger, lane: torch.Stream) -> None:
        super().__init__(nbytes, ledger)
        self._flat = torch.empty(nbytes, dtype=torch.uint8, device=device)  # [nbytes]
        self._lane = lane
        self._usable: torch.Event | None = None
        self._filled: torch.Event | None = None
        self._shrink()

    @property
    def flat(self) -> torch.Tensor:
        return self._flat

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        with self.filling():
            self._flat[first : first + source.numel()].copy_(source, non_blocking=True)
        assert self._filled is not None
        return EventTransfer(self._filled)

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        with self._on_lane():
            out.copy_(self._flat[first : first + out.numel()], non_blocking=True)
            return EventTransfer(self._lane.record_event())

    @contextmanager
    def filling(self) -> Iterator[None]:
        with self._on_lane():
            yield
            self._filled = self._lane.record_event()

    @contextmanager
    def _on_lane(self) -> Iterator[None]:
        with self._lane:
            if self._usable is not None:
                self._lane.wait_event(self._usable)
            yield

    def await_filled(self) -> None:
        if self._filled is not None:
            torch.accelerator.current_stream(self._flat.device).wait_event(self._filled)

    def mark_written(self) -> None:
        self._usable = torch.accelerator.current_stream(self._flat.device).record_event()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._on_lane():
            return tensor.cpu()

    def _grow(self) -> None:
        # Resize, don't reallocate: autograd saved views. See Note [Resized storage].
        self._flat.untyped_storage().resize_(self.nbytes)
        # The block may still be read by kernels queued before its last owner freed it: the lane waits for those.
        self.mark_written()

    def _shrink(self) -> None:
        self._flat.untyped_storage().resize_(0)


def open_buffer(nbytes: int, device: torch.device, ledger: Ledger, lane: torch.Stream | None = None) -> DeviceBuffer:
    """The kind of buffer that `device` needs; `lane` is the side stream for an accelerator's transfers."""
    if device.type == "cpu":
        return HostDeviceBuffer(nbytes, ledger)
    assert lane is not None, "an accelerator needs a lane"
    return AcceleratorBuffer(nbytes, device, ledger, lane)
