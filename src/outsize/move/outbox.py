"""How gradients leave an accelerator: through a ring of pinned memory, without a thread that waits for the device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.device import Lanes
from outsize.move.grad_ops import GradOps, accumulate_, vector_norm
from outsize.move.memory import HostBuffer, Ledger, copy, own_cores
from outsize.move.transfer import Transfer

# Note [Gradients leave]
# A gradient is copied into the ring on the outgoing stream, behind its kernels; the host goes on at once. The conveyor
# waits for the copy and puts the bytes where they rest. Its jobs run in order, so an update or a write that was asked
# for later finds them there; whoever else wants them waits for the job. The gradient itself lives until then. So the
# ring bounds two things: the gradients that still take memory on the device, and how far the host runs ahead of it.


JOBS = 4
"""A full ring is emptied by at least so many jobs. The host goes on when the oldest is over."""

Leaving = tuple[torch.Tensor | None, Callable[[], None]]
"""A piece of a gradient on its way, which must live until it was copied, and what lays it to rest."""


def _land_all(pieces: list[Leaving]) -> Sequence[Transfer]:
    """Put what has arrived in the ring where it rests."""
    for _, land in pieces:
        land()
    pieces.clear()
    return ()


def _land(
    memory: torch.Tensor,
    target: torch.Tensor,
    ops: GradOps | None,
    total: torch.Tensor,
    norm: torch.Tensor | None,
    threads: int,
) -> None:
    """Put a piece where it rests, added to what was there (`ops` was done to that); `norm` takes that of `total`."""
    if ops is None:
        copy(target, memory, threads)
    else:
        accumulate_(target, ops, memory, threads)
    if norm is not None:
        norm.copy_(vector_norm(total, 2.0))


@final
class Outbox:
    """`nbytes` of pinned memory, used again and again in order. One thread at a time sends."""

    def __init__(self, nbytes: int, lanes: Lanes, conveyor: Conveyor, ledger: Ledger) -> None:
        self.nbytes = nbytes
        self._lanes = lanes
        self._conveyor = weakref.ref(conveyor)  # from `param.grad` one comes here, out of the collector's sight
        self._ledger = ledger
        self._threads = max(own_cores() // 2, 1)  # as many as an update has while nobody waits
        self._ring: HostBuffer | None = HostBuffer(nbytes, pinned=True)
        self._taken: deque[tuple[int, int, Job]] = deque()  # (first byte, end, what empties it), oldest first
        self._next = 0
        self._pieces: list[Leaving] = []
        self._steps: list[Step] = []  # of the open job, which gets its only step with the last piece
        self._open = Job(self._steps)
        self._sent = 0  # bytes of the open job
        ledger.add("host/gradients leaving", nbytes)

    def send(
        self, source: torch.Tensor, target: torch.Tensor, ops: GradOps | None, norm: torch.Tensor | None = None
    ) -> Job:
        """Start to bring `source` (1-D) to `target` (1-D, in host memory); over when the job is, once `dispatch` was
        called. `ops`: what was done to `target`, to which it is added; None where it replaces what was there. `norm`:
        takes the norm of what `target` holds then, 0-d."""
        self._lanes.follow(self._lanes.outgoing)
        job, most = self._open, max(self.nbytes // JOBS // source.itemsize, 1)
        for start in range(0, source.numel(), most):
            part = source[start : start + most]
            memory = self._take(part.numel() * part.itemsize).view(part.dtype)
            self._lanes.send(part, memory)
            last = start + most >= source.numel()
            norm_of = norm if last else None
            land = partial(_land, memory, target[start : start + most], ops, target, norm_of, self._threads)
            self._pieces.append((part, land))
            self._sent += memory.numel() * memory.itemsize
            job = self._open
            if self._sent * JOBS >= self.nbytes:
                self.dispatch()
        return job

    def dispatch(self) -> None:
        """Let the conveyor have what was sent."""
        if self._pieces:
            sent = self._lanes.sent()
            self._steps.append(Step(lambda _: [sent], partial(_land_all, self._pieces)))
            conveyor = self._conveyor()
            assert conveyor is not None, "the model of these gradients is gone"
            conveyor.submit(self._open)
            self._pieces, self._steps, self._sent = [], [], 0
            self._open = Job(self._steps)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
            self._ledger.add("host/gradients leaving", -self.nbytes)

    def _take(self, nbytes: int) -> torch.Tensor:
        """The next bytes of the ring, once what was there has landed."""
        assert self._ring is not None and nbytes <= self.nbytes
        first = -(-self._next // 64) * 64
        if first + nbytes > self.nbytes:
            first = 0
        end = first + nbytes
        while self._taken and (self._taken[0][2].done() or self._overlaps(first, end)):
            job = self._taken.popleft()[2]
            if job is self._open:
                self.dispatch()
            job.wait()
        self._taken.append((first, end, self._open))
        self._next = end
        return self._ring.bytes[first:end]

    def _overlaps(self, first: int, end: int) -> bool:
        return any(first < taken_end and taken_first < end for taken_first, taken_end, _ in self._taken)
