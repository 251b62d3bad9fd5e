"""An accelerator's memory that several streams use, and the streams on which bytes come to it and leave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from outsize.move.transfer import Transfer

# Note [Streams]
# The user computes on any stream, and on another one tomorrow. Bytes come in on one stream and leave on another, for
# the bus carries both at once. No host thread waits for any of that: each stream waits for events of the others.
#   use    The current stream is about to work with the memory. It waits, once, for what the incoming stream has
#          brought, and is remembered as a user.
#   leave  The users have finished with the memory for now: an event on each of them. Where that is known early, the
#          next bytes come in as soon as the last kernel is over that reads the old ones, however much the host has
#          queued behind it.
# The memory is taken from the pool of the incoming stream and given back to it, after its users. Then whoever takes it
# next is in the same queue behind them.


@final
class Lanes:
    """The streams of one model's transfers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.incoming = torch.Stream(device)
        self.outgoing = torch.Stream(device)

    def current(self) -> torch.Stream:
        """The stream on which the calling thread computes."""
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """What the calling thread starts in the block goes to the stream. (`with stream` keeps the stream of before in
        the object, where another thread would find it.)"""
        before = self.current()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def follow(self, *lanes: torch.Stream) -> None:
        """What these lanes do from now on comes after all that the current stream was given."""
        event = self.current().record_event()
        for lane in lanes:
            lane.wait_event(event)

    def send(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Start to copy what lies on the device into host memory, behind all that `outgoing` follows."""
        with self.on(self.outgoing):
            out.copy_(source, non_blocking=True)

    def sent(self) -> Transfer:
        """What was sent so far."""
        return EventTransfer(self.outgoing.record_event())

    def bring_home(self, source: torch.Tensor, out: torch.Tensor) -> Transfer:
        """Both."""
        self.send(source, out)
        return self.sent()

    def synchronize(self) -> None:
        """Block until nothing is on its way."""
        self.incoming.synchronize()
        self.outgoing.synchronize()


@final
class EventTransfer(Transfer):
    """A copy, over when its event has passed."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        if not self._event.query():
            self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


@final
class DeviceMemory:
    """`bytes` (uint8 [nbytes]), there only between `grow` and `shrink`. See Note [Streams]."""

    def __init__(self, nbytes: int, lanes: Lanes) -> None:
        self.nbytes = nbytes
        self._lanes = lanes
        self._users: dict[int, torch.Stream] = {}  # by number: those that may have work with the memory in their queues
        self._left: dict[int, torch.Event] = {}  # where the users of before have left it
        with lanes.on(lanes.incoming):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=lanes.device)
            self._filled = lanes.incoming.record_event()  # what comes before anybody's use
        self._filling: EventTransfer | None = None  # of what `fill` was given

    def grow(self) -> None:
        """Make the memory exist, its contents undefined. Raises `torch.OutOfMemoryError`, with nothing changed."""
        with self._lanes.on(self._lanes.incoming):
            self.bytes.untyped_storage().resize_(self.nbytes)
            self._filled = self._lanes.incoming.record_event()

    def shrink(self) -> None:
        """Give the memory back, and keep the storage, of which there are views."""
        self._await_users()
        with self._lanes.on(self._lanes.incoming):
            self.bytes.untyped_storage().resize_(0)

    def use(self) -> None:
        """The current stream is about to read or write the memory."""
        stream = self._lanes.current()
        if stream.stream_id not in self._users:
            stream.wait_event(self._filled)
            self._users[stream.stream_id] = stream

    def leave(self) -> None:
        """The streams that use the memory were given the last of their work with it."""
        for number, stream in self._users.items():
            self._left[number] = stream.record_event()
        self._users.clear()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """What is started in the block writes into the memory on the incoming stream, after all its users."""
        self._await_users()
        with self._lanes.on(self._lanes.incoming):
            yield
            self._filled = self._lanes.incoming.record_event()

    def fill(self, first: int, source: torch.Tensor) -> Transfer:
        """Start to copy `source` (uint8) into the memory at byte `first`."""
        with self.filling():
            self.bytes[first : first + source.numel()].copy_(source, non_blocking=True)
        self._filling = EventTransfer(self._filled)
        return self._filling

    def await_filled(self) -> None:
        """Block until nothing is read any more that `fill` was given."""
        if self._filling is not None:
            self._filling.wait()
            self._filling = None

    def fetch(self, first: int, out: torch.Tensor) -> Transfer:
        """Start to copy the bytes from `first` into `out` (uint8, host memory)."""
        outgoing = self._lanes.outgoing
        outgoing.wait_event(self._filled)
        for event in [*self._left.values(), *(stream.record_event() for stream in list(self._users.values()))]:
            outgoing.wait_event(event)
        return self._lanes.bring_home(self.bytes[first : first + out.numel()], out)

    def _await_users(self) -> None:
        self.leave()
        for event in self._left.values():
            self._lanes.incoming.wait_event(event)
        self._left.clear()
