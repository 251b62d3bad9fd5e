"""Memory that holds a unit's bytes: on the host, or on an accelerator where several streams use it."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import final

import torch

from outsize.move.device import EventTransfer, Lanes
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.transfer import ARRIVED, Transfer

# Note [Resized storage]
# Autograd's saved tensors and the parameters themselves are views of the buffer's storage, so the buffer must never be
# replaced, only emptied and refilled. On the CPU the pages are given back under an unchanging address (Note [Reserved
# memory]); on an accelerator the storage is resized to 0 and back. Either way the views stay what they are.


class Buffer(ABC):
    """`flat` (uint8 [nbytes]), which holds bytes only while `resident`, and then counts under `account`.

    `values` are the same bytes, of which the parameters are views.
    """

    def __init__(self, flat: torch.Tensor, values: torch.Tensor, ledger: Ledger, account: str) -> None:
        self.nbytes = flat.numel()
        self.flat = flat
        self.values = values
        self.resident = False
        self._ledger = ledger
        self._account = account
        self._known_views = 0

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
            self._ledger.add(self._account, self.nbytes)

    def drop(self) -> None:
        if self.resident:
            self.resident = False
            self._ledger.add(self._account, -self.nbytes)
            self._shrink()

    @abstractmethod
    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        """Start to copy `source` (uint8, host memory) into the buffer at byte `first`."""

    @abstractmethod
    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        """Start to copy the buffer's bytes from `first` into `out` (uint8, host memory)."""

    @abstractmethod
    def use(self) -> None:
        """The current stream is about to read or write the buffer; never blocks the host."""

    @abstractmethod
    def leave(self) -> None:
        """The streams that use the buffer were given the last of their work with it, for now."""

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
class MemoryBuffer(Buffer):
    """Host memory. A `lasting` one is pinned where an accelerator reads it, and ends with its last view."""

    def __init__(self, nbytes: int, ledger: Ledger, account: str, lasting: bool = False, pinned: bool = False) -> None:
        self._memory = HostBuffer(nbytes, pinned)
        self._lasting = lasting
        flat = self._memory.bytes
        super().__init__(flat, alone(flat, flat), ledger, account)  # no transfer counts as a view of the values

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
        if self._lasting:
            self._memory.close()
        else:
            self._memory.drop()


@final
class AcceleratorBuffer(Buffer):
    """An accelerator's memory. See Note [Streams]."""

    def __init__(self, nbytes: int, ledger: Ledger, lanes: Lanes, account: str = "device/resident") -> None:
        self._lanes = lanes
        self._users: dict[int, torch.Stream] = {}  # by number: those that may have work with the memory in their queues
        self._left: dict[int, torch.Event] = {}  # where the users of before have left it
        self._filling: EventTransfer | None = None  # of what `fill` was given
        with lanes.on(lanes.incoming):
            flat = torch.empty(nbytes, dtype=torch.uint8, device=lanes.device)
            self._filled = lanes.incoming.record_event()  # what comes before anybody's use
        super().__init__(flat, flat, ledger, account)
        self._shrink()

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        with self.filling():
            self.flat[first : first + source.numel()].copy_(source, non_blocking=True)
        self._filling = EventTransfer(self._filled)
        return self._filling

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        outgoing = self._lanes.outgoing
        outgoing.wait_event(self._filled)
        for event in [*self._left.values(), *(stream.record_event() for stream in list(self._users.values()))]:
            outgoing.wait_event(event)
        return self._lanes.bring_home(self.flat[first : first + out.numel()], out)

    def use(self) -> None:
        stream = self._lanes.current()
        if stream.stream_id not in self._users:
            stream.wait_event(self._filled)
            self._users[stream.stream_id] = stream

    def leave(self) -> None:
        for number, stream in self._users.items():
            self._left[number] = stream.record_event()
        self._users.clear()

    @contextmanager
    def filling(self) -> Iterator[None]:
        self._await_users()
        with self._lanes.on(self._lanes.incoming):
            yield
            self._filled = self._lanes.incoming.record_event()

    def await_sources(self) -> None:
        if self._filling is not None:
            self._filling.wait()
            self._filling = None

    def _grow(self) -> None:
        # Resize, don't reallocate: autograd saved views. See Note [Resized storage].
        with self._lanes.on(self._lanes.incoming):
            self.flat.untyped_storage().resize_(self.nbytes)
            self._filled = self._lanes.incoming.record_event()

    def _shrink(self) -> None:
        self._await_users()
        with self._lanes.on(self._lanes.incoming):
            self.flat.untyped_storage().resize_(0)

    def _await_users(self) -> None:
        self.leave()
        for event in self._left.values():
            self._lanes.incoming.wait_event(event)
        self._left.clear()


def open_buffer(nbytes: int, ledger: Ledger, lanes: Lanes | None, account: str = "device/resident") -> Buffer:
    """The kind of buffer that the device needs; an accelerator has `lanes`."""
    return MemoryBuffer(nbytes, ledger, account) if lanes is None else AcceleratorBuffer(nbytes, ledger, lanes, account)
