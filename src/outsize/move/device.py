"""The streams on which bytes come to an accelerator and leave it."""

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
        the object, where another thread would find it.) The thread's current device is the same afterwards."""
        before, index = self.current(), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch._C._accelerator_maybeExchangeDevice(index)  # makes no context on a device that has none

    def follow(self, *lanes: torch.Stream) -> None:
        """What these lanes do from now on comes after all that the current stream was given."""
        event = self.current().record_event()
        for lane in lanes:
            lane.wait_event(event)

    def wait_for(self, event: torch.Event) -> None:
        """What the current stream is given from now on comes after the event."""
        self.current().wait_event(event)

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
        self.event = event

    def wait(self) -> None:
        if not self.event.query():
            self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())
