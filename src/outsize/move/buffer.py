"""Memory that holds a unit's bytes: the host's, or an accelerator's, where several streams use it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import final

import torch

from outsize.move.device import EventTransfer, Lanes
from outsize.move.memory import HostBuffer, Ledger, copy
from outsize.move.store import Store
from outsize.move.transfer import ARRIVED, Transfer

# Note [Resized storage]
# Autograd's saved tensors and the parameters themselves are views of the buffer's storage, so the buffer must never be
# replaced, only emptied and refilled. On the CPU the pages are given back under an unchanging address (Note [Reserved
# memory]); on an accelerator the storage is resized to 0 and back. Either way the views stay what they are.


@final
class Buffer(Store):
    """`flat` (uint8 [nbytes]), which holds bytes only while `resident`, and then counts under `account`. An
    accelerator's memory has `lanes`: see Note [Streams].

    `values` are the same bytes, of which the parameters are views. Transfers use `flat`, so none counts as a view.
    """

    def __init__(
        self,
        nbytes: int,
        ledger: Ledger,
        lanes: Lanes | None = None,
        account: str = "device/resident",
        lasting: bool = False,
        pinned: bool = False,
    ) -> None:
        """A `lasting` one holds bytes at rest, zeros at first, until it is closed, and then ends with its last view;
        `pinned`: an accelerator reads it."""
        super().__init__(nbytes)
        self.resident = False
        self._ledger, self._lanes, self._account, self._lasting = ledger, lanes, account, lasting
        self._known_views = 0
        self._users: dict[int, torch.Stream] = {}  # by number: those that may have work with the memory in their queues
        self._left: dict[int, torch.Event] = {}  # where the users of before have left it
        self._sources: Transfer = ARRIVED  # when the last bytes that `write` was given have been read
        with torch.inference_mode(False):  # other threads write to it
            if lanes is None:
                self._memory = HostBuffer(nbytes, pinned)
                self.flat = self._memory.bytes
                self.values = alone(self.flat, self.flat)
            else:
                with self._incoming():
                    self.values = torch.empty(nbytes, dtype=torch.uint8, device=lanes.device)
                self._shrink()
        if lasting:
            self.materialize()
            if lanes is not None:
                with self.filling():
                    self.flat.zero_()

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
            if self._lanes is not None:  # raises where the accelerator has no memory: then nothing has changed
                with self._incoming():
                    self._storage.resize_(self.nbytes)
                with torch.inference_mode(False):
                    self.flat = alone(self.values, self.values)
            self.resident = True
            self._ledger.add(self._account, self.nbytes)

    def drop(self, heir: Buffer | None = None) -> None:
        """`heir`: what is filled next, which may take the memory."""
        if self.resident:
            self.resident = False
            self._ledger.add(self._account, -self.nbytes)
            self._shrink(heir)

    def forgo(self) -> None:
        """Nothing comes after all: what others have left goes back."""
        if self._lanes is None and not self.resident:
            self._memory.drop()

    def _shrink(self, heir: Buffer | None = None) -> None:
        if self._lanes is not None:
            with self.filling():
                self._storage.resize_(0)
            self.flat = torch.empty(0, dtype=torch.uint8, device=self._lanes.device)
        elif self._lasting:
            self._memory.close()
            self.flat = self.values = torch.empty(0, dtype=torch.uint8, device="cpu")
            del self._memory
        elif heir is None or heir.resident:
            self._memory.drop()
        else:
            self._memory.hand_on(heir._memory)

    def in_place(self, start: int, nbytes: int) -> torch.Tensor:
        return self.flat[start : start + nbytes]

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        if self._lanes is None:
            target = self.flat[start : start + source.numel()]
            if target.data_ptr() != source.data_ptr():  # else it was filled in place
                copy(target, source)
        else:
            with self.filling():
                self.flat[start : start + source.numel()].copy_(source, non_blocking=True)
            self._sources = EventTransfer(self._filled)
        return self._sources

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        source = self.flat[start : start + out.numel()]
        if self._lanes is None:
            copy(out, source)
            return ARRIVED
        outgoing = self._lanes.outgoing
        outgoing.wait_event(self._filled)
        for event in [*self._left.values(), *(stream.record_event() for stream in list(self._users.values()))]:
            outgoing.wait_event(event)
        return self._lanes.bring_home(source, out)

    def use(self) -> None:
        if self._lanes is not None:
            stream = self._lanes.current()
            if stream.stream_id not in self._users:
                stream.wait_event(self._filled)
                self._users[stream.stream_id] = stream

    def leave(self) -> None:
        """The streams that use the buffer were given the last of their work with it, for now."""
        for number, stream in self._users.items():
            self._left[number] = stream.record_event()
        self._users.clear()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """What is started in the block (a copy, a collective) writes into the buffer: after all that was started so
        before, and beside the computation."""
        self._await_users()
        with self._incoming():
            yield

    def await_sources(self) -> None:
        """Block until nothing is read any more that `write` was given."""
        self._sources.wait()
        self._sources = ARRIVED

    @contextmanager
    def _incoming(self) -> Iterator[None]:
        """On the stream on which bytes come in. What is started in the block comes before anybody's use."""
        if self._lanes is None:
            yield
            return
        with self._lanes.on(self._lanes.incoming):
            yield
            self._filled = self._lanes.incoming.record_event()

    def _await_users(self) -> None:
        if self._lanes is not None:
            self.leave()
            for event in self._left.values():
                self._lanes.incoming.wait_event(event)
            self._left.clear()


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
