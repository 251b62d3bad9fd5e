"""The conveyor: one thread that keeps reads, the work on what was read, and writes all going at once.

A job is an ordered list of steps. For the steps of all queued jobs together the conveyor does what a chunk pipeline
does: start the reads of step k+1 and k+2, finish step k, let the writes of step k-1 run. Jobs run strictly in the order
in which they were submitted, so what one job writes a later one reads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

import torch

from outsize.move.device import Lanes
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.transfer import Promise, Transfer, in_a_fork

MAX_STARTED = 6
"""Steps whose reads may be on their way at once; staging usually admits fewer."""


@final
@dataclass(eq=False)
class Step:
    """One chunk's way through the conveyor. `begin` gets so many `slabs` of the staging arena and starts the reads.
    Once they are in place `finish` does the work and starts the writes; the slabs stay taken until these are done."""

    begin: Callable[[list[torch.Tensor]], Sequence[Transfer]] = lambda slabs: ()
    finish: Callable[[], Sequence[Transfer]] = lambda: ()
    slabs: int = 0
    job: Job | None = field(default=None, init=False)
    taken: list[torch.Tensor] = field(default_factory=list, init=False)  # the slabs
    moving: Sequence[Transfer] = field(default=(), init=False)  # its reads, then its writes


@final
class Job(Transfer):
    """Steps that belong together. `wait` waits until the last step is finished; `written` for its writes as well.

    `after`: jobs that must be written before the first step may begin.
    """

    def __init__(self, steps: Iterable[Step], after: Sequence[Job] = ()) -> None:
        self._steps: Iterator[Step] | None = iter(steps)
        self.after = after
        self._ready = Promise()
        self.written = Promise()
        self._open_steps = 0
        self._writes = 0

    def wait(self) -> None:
        self._ready.wait()

    def done(self) -> bool:
        return self._ready.done()

    @property
    def broken(self) -> bool:
        return self._ready.broken or self.written.broken

    def run(self) -> None:
        """Run all steps in the calling thread: they need no slabs, and what they start is over when it has begun."""
        steps, self._steps, self.after = self._steps or (), None, ()
        try:
            with torch.no_grad():
                for step in steps:
                    assert not step.slabs
                    error = _wait_all(step.begin([])) or _wait_all(step.finish())
                    if error is not None:
                        raise error
            self.settle()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def next_step(self) -> Step | None:
        """The next step to begin, None when there is no more. Called by the conveyor only, as all below."""
        self.after = ()
        step = None if self._steps is None else next(self._steps, None)
        if step is None:
            self._steps = None
        self.settle(steps=int(step is not None))
        return step

    def settle(self, steps: int = 0, writes: int = 0) -> None:
        """So many more steps and writes are under way."""
        self._open_steps += steps
        self._writes += writes
        if self._steps is None and not self._open_steps:
            if not self._ready.done():
                self._ready.keep()
            if not self._writes and not self.written.done():
                self.written.keep()

    def fail(self, error: BaseException) -> None:
        self._steps = None
        for promise in (self._ready, self.written):
            if not promise.done():
                promise.break_(error)


@final
class Belt:
    """The steps of all queued jobs, in order, on whatever thread calls `serve`. `free`: the slabs that no step has."""

    def __init__(self, free: list[torch.Tensor]) -> None:
        self.slabs = len(free)
        self.free = free
        self.queue: deque[Job] = deque()  # others add to it under the lock
        self.lock = threading.Condition()
        self._job: Job | None = None
        self._held: Step | None = None  # the next one, until there is room for it
        self._started: deque[Step] = deque()
        self._writing: deque[Step] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self._job or self._held or self._started or self._writing)

    def serve(self) -> None:
        """Go on by a step; there is one."""
        while self._writing and all(transfer.done() for transfer in self._writing[0].moving):
            self._reap_oldest()
        self._start_what_fits()
        for step in self._writing:  # the drive has its reads, so there is time
            for transfer in step.moving:
                transfer.meanwhile()
        if self._started:
            self._finish_oldest()
        elif self._writing:
            self._reap_oldest()

    def _start_what_fits(self) -> None:
        while len(self._started) < MAX_STARTED:
            self._held = self._held or self._next()
            if self._held is None:
                return
            assert self._held.slabs <= self.slabs, "a step never needs more than the whole staging arena"
            if self._held.slabs <= len(self.free):
                step, self._held = self._held, None
                self._begin(step)
            elif self._started:
                return
            else:
                self._reap_oldest()

    def _next(self) -> Step | None:
        """The next step in order, None when there is none or when it must wait for a step that has begun."""
        while True:
            if self._job is None:
                with self.lock:
                    if not self.queue:
                        return None
                    self._job = self.queue.popleft()
            job = self._job
            for earlier in job.after:
                while not earlier.written.done():
                    if self._started:
                        return None
                    self._reap_oldest()
                error = _wait_all([earlier.written])
                if error is not None:
                    job.fail(error)  # what it would read was never written
            try:
                step = job.next_step()
            except BaseException as error:
                job.fail(error)
                step = None
            if step is not None:
                step.job = job
                return step
            self._job = None

    def _begin(self, step: Step) -> None:
        step.taken = [self.free.pop() for _ in range(step.slabs)]
        try:
            step.moving = step.begin(step.taken)
            self._started.append(step)
        except BaseException as error:
            self._end(step, error, steps=-1)

    def _finish_oldest(self) -> None:
        step = self._started.popleft()
        error = _wait_all(step.moving)
        step.moving = ()
        assert step.job is not None
        if error is None and not step.job.broken:
            try:
                step.moving = step.finish()
            except BaseException as raised:
                error = raised
        if step.moving:
            step.job.settle(steps=-1, writes=1)
            self._writing.append(step)
        else:
            self._end(step, error, steps=-1)

    def _reap_oldest(self) -> None:
        """Wait for the writes of the step that finished first."""
        step = self._writing.popleft()
        self._end(step, _wait_all(step.moving), writes=-1)

    def _end(self, step: Step, error: BaseException | None, steps: int = 0, writes: int = 0) -> None:
        assert step.job is not None
        if error is not None:
            step.job.fail(error)
        step.job.settle(steps, writes)
        self.free += step.taken


@final
class Conveyor:
    """Runs jobs in order on its own thread. Nothing calls back up: whoever submitted a job waits on it.

    Its staging arena is `slabs` slabs of exactly `slab_bytes` bytes, reserved once and pinned where an accelerator
    reads them; bytes pass through it between tiers.
    """

    def __init__(self, slab_bytes: int, slabs: int, ledger: Ledger, lanes: Lanes | None = None) -> None:
        self.slab_bytes = slab_bytes
        self.slabs = slabs
        self._arena: HostBuffer | None = HostBuffer(slab_bytes * slabs, pinned=lanes is not None)
        self._belt = Belt([self._arena.bytes[at * slab_bytes : (at + 1) * slab_bytes] for at in range(slabs)])
        self._lanes = lanes
        self._ledger = ledger
        ledger.add("host/staging", slab_bytes * slabs)
        self._pid = os.getpid()
        self._changed = self._belt.lock
        self._closing = False
        self._idle = False  # the thread waits for a job
        self._error: BaseException | None = None  # a fault of ours, which has ended the thread
        self._unwritten: weakref.WeakSet[Job] = weakref.WeakSet()  # all that were submitted, and some that are over
        self._thread = threading.Thread(target=self._run, name="outsize-conveyor", daemon=True)
        self._thread.start()

    # Note [Ctrl-C while the thread is woken]
    # An exception inside `Condition.notify` leaves the entry of a thread that was woken already, and the next `notify`
    # wakes that in place of who waits: a close would wait for the thread for ever. `notify_all` passes over it.

    def submit(self, job: Job, light: bool = False) -> Job:
        """Run the job behind all that were submitted before. A `light` one copies little and waits for nothing: if
        nothing else goes on, the calling thread runs it at once."""
        self.check_process()
        with self._changed:
            if self._error is not None:
                raise RuntimeError(
                    f"outsize has stopped after a fault of its own ({type(self._error).__name__}: {self._error}); "
                    f"restart and load the last checkpoint"
                ) from self._error
            if self._closing:
                raise RuntimeError("outsize has been closed; the model cannot be used any more")
            if light and self._idle:
                job.run()
                return job
            self._idle = False
            self._belt.queue.append(job)
            self._unwritten.add(job)
            self._changed.notify_all()
        return job

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the conveyor's own."""
        return threading.current_thread() is self._thread

    def check_process(self) -> None:
        """Raise `RuntimeError` in a forked child."""
        if os.getpid() != self._pid:
            raise in_a_fork()

    def close(self) -> None:
        """Finish what has begun, break what has not, end the thread, give the arena back; safe to repeat."""
        with self._changed:
            self._closing = True
            queued, self._belt.queue = list(self._belt.queue), deque()
            self._changed.notify_all()
        for job in queued:
            job.fail(RuntimeError("outsize was closed before this transfer began"))
        if self._thread.is_alive():
            self._thread.join()
        if self._lanes is not None:
            with suppress(RuntimeError):  # an accelerator that has failed moves nothing any more
                self._lanes.synchronize()
        if self._arena is not None:
            self._arena.close()
            self._arena, self._belt.free = None, []
            self._ledger.add("host/staging", -self.slab_bytes * self.slabs)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # grad mode belongs to the thread
        try:
            if self._lanes is not None:  # so does the current device, and work for another one makes it use memory
                torch.accelerator.set_device_index(self._lanes.device)
            while self._await_work():
                self._belt.serve()
        except BaseException as error:  # nobody waits for a thread that is gone: all hear of the error
            with self._changed:
                self._error = error
                self._belt.queue.clear()
                jobs = list(self._unwritten)
            for job in jobs:
                job.fail(error)
            raise

    def _await_work(self) -> bool:
        with self._changed:
            while not (self._belt.has_work or self._closing):
                self._idle = True
                self._changed.wait()
            self._idle = False
            return self._belt.has_work


def _wait_all(transfers: Sequence[Transfer]) -> BaseException | None:
    """Wait for all, whatever happens, so that their memory is free; the first error if there was one."""
    first: BaseException | None = None
    for transfer in transfers:
        try:
            transfer.wait()
        except BaseException as error:
            first = first or error
    return first
