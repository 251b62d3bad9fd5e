"""Faults on purpose, under the disk engine and under the system calls of a save, and what a run makes of each.

A trial is one run that meets one fault: at the k-th request or call of "step, save, step". Whatever happens, the run
shows the right bits or raises an error that says what failed, and the last complete checkpoint loads and goes on.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_runs import IN_MEMORY, Places, TinyRun
from outsize.api import resources
from outsize.checkpoint import folder, writer
from outsize.move.disk import DiskEngine, open_engine

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)
ENGINE_KINDS = ("refused", "torn", "late")
SYSTEM_KINDS = (
    "pwrite",
    "preadv",
    "fsync",
    "link",
    "rename",
    "open",
    "posix_fallocate",
    "ftruncate",
    "mkdir",
    "unlink",
    "renameat2",
)
_WITH_PATH = frozenset({"link", "rename", "open", "mkdir", "unlink", "renameat2"})
SECTOR_BYTES = 512
PATIENCE_SECONDS = 20
LATE_AFTER_QUESTIONS = 3
FIRST_STEP = 2


class Hung(BaseException):
    """Something did not come back."""


@contextmanager
def patience(seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Raise `Hung` in a block of the main thread that takes longer."""

    def ring(*_: object) -> None:
        raise Hung(f"nothing happened for {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Fault:
    """The `at`-th request or call of its kind fails with `code`; 0: none does, they are counted."""

    kind: str
    at: int = 0
    code: int = errno.EIO
    count: int = 0
    armed: bool = False
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def strikes(self) -> bool:
        """Count one request or call; whether it is the one that fails."""
        with self._lock:
            self.count += self.armed
            return self.armed and self.count == self.at

    def error(self, *path: str) -> OSError:
        return OSError(self.code, os.strerror(self.code), *path)

    def __str__(self) -> str:
        return f"{self.kind} {self.at}: {errno.errorcode[self.code]}"


class FaultyEngine:
    """The disk engine, of which one request fails (whole, or after its first half), or is late, as all others are.

    A late request begins when somebody waits for it, or has asked for it often enough: the order in which requests are
    handed in is not the order in which they are done.
    """

    def __init__(self, inner: DiskEngine, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault
        self._tickets: dict[int, _Request] = {}
        self._lock = threading.Lock()
        self._last = 0

    def read(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        return self._start(self._inner.read, fd, offset, address, nbytes)

    def write(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        return self._start(self._inner.write, fd, offset, address, nbytes)

    def _start(self, call: Callable[..., int], fd: int, offset: int, address: int, nbytes: int) -> int:
        request = _Request(lambda: call(fd, offset, address, nbytes))
        strikes = self._fault.strikes()
        if strikes and self._fault.kind == "refused":
            request = _Request(None, self._fault.error())
        elif strikes and self._fault.kind == "torn":
            half = nbytes // 2 // SECTOR_BYTES * SECTOR_BYTES
            request = _Request(lambda: call(fd, offset, address, half), self._fault.error())
        if not (self._fault.kind == "late" and self._fault.armed):
            request.begin()
        with self._lock:
            self._last += 1
            self._tickets[self._last] = request
            return self._last

    def wait(self, ticket: int) -> None:
        with self._lock:
            request = self._tickets.pop(ticket)
        inner = request.begin()
        if inner is not None:
            self._inner.wait(inner)
        if request.error is not None:
            raise request.error

    def done(self, ticket: int) -> bool:
        with self._lock:
            request = self._tickets[ticket]
        request.questions += 1
        if request.ticket is None and request.questions < LATE_AFTER_QUESTIONS:
            return request.call is None
        inner = request.begin()
        return inner is None or self._inner.done(inner)

    def close(self) -> None:
        self._inner.close()

    @property
    def bytes_read(self) -> int:
        return self._inner.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._inner.bytes_written


@dataclass
class _Request:
    call: Callable[[], int] | None
    error: OSError | None = None
    ticket: int | None = None
    questions: int = 0

    def begin(self) -> int | None:
        """Hand the request in, once; its ticket."""
        if self.ticket is None and self.call is not None:
            self.ticket = self.call()
        return self.ticket


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Put the fault under the engines that are opened in the block, or under the module `os`."""
    if fault.kind in ENGINE_KINDS:

        def open_faulty() -> Any:
            return FaultyEngine(open_engine(), fault)

        resources.open_engine = open_faulty  # type: ignore[attr-defined]
        try:
            yield
        finally:
            resources.open_engine = open_engine  # type: ignore[attr-defined]
        return
    owner, name = (folder, "_exchange") if fault.kind == "renameat2" else (os, fault.kind)
    call = getattr(owner, name)

    def failing(*args: Any, **fields: Any) -> Any:
        if fault.strikes():
            raise fault.error(*([os.fspath(args[0])] if fault.kind in _WITH_PATH else []))
        return call(*args, **fields)

    setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, call)


@dataclass(frozen=True)
class Manner:
    """Where the state rests, whether it counts as large, and whether the save replaces the earlier checkpoint."""

    places: Places
    large: bool = True
    replaces: bool = False

    def target(self, step: int) -> str:
        return "last-0" if self.replaces else f"step-{step}"


@dataclass
class Outcome:
    """What one trial came to; `wrong` says which promises were broken."""

    fault: Fault
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.fault}: {'; '.join(self.wrong) or 'right'} ({'; '.join(self.errors)})"


class Ground:
    """Where trials of one manner are made. Nothing of one trial is left to the next."""

    def __init__(self, root: Path, manner: Manner) -> None:
        self._root = root
        self._manner = manner
        self._origin = root / "origin"
        self._checkpoints = root / "checkpoints"
        self._disk = root / "disk"
        self._disk.mkdir(parents=True)
        self.checker = TinyRun(self._disk, IN_MEMORY)
        self._losses: list[float] = []
        self._digests = [self.checker.digest()]
        self._weights = {self.checker.digest(rng=False)}
        for step in range(FIRST_STEP + 4):
            if step == FIRST_STEP:
                self.checker.save(self._origin).wait()
            self._losses.append(self.checker.step())
            self._digests.append(self.checker.digest())
            self._weights.add(self.checker.digest(rng=False))
        gc.collect()
        gc.freeze()  # what lives now needs no look at each trial's end

    @cached_property
    def calls(self) -> dict[str, int]:
        """How many requests or calls of each kind "step, save, step" makes; the kinds of requests are alike."""
        counts = [Fault(kind) for kind in ("refused", *SYSTEM_KINDS)]
        outcome = self.trial(*counts)
        if outcome.errors or outcome.wrong:
            raise RuntimeError(f"without a fault: {outcome}")
        return {**dict.fromkeys(ENGINE_KINDS, counts[0].count), **{each.kind: each.count for each in counts[1:]}}

    def trial(self, *faults: Fault) -> Outcome:
        """Let one run meet the fault, or several. Raises `Hung` if anything does not come back."""
        outcome = Outcome(faults[0])
        self._checkpoints.mkdir()
        before, writer.AT_ONCE_BYTES = writer.AT_ONCE_BYTES, -1 if self._manner.large else 1 << 60
        try:
            with ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(injected(fault))
                stack.enter_context(patience())
                self._meet(faults, outcome)
            torch.ones((), requires_grad=True).backward()  # torch keeps the graph of an exception until the next one
            gc.collect()
            if os.listdir(self._disk):
                outcome.wrong.append(f"left in the disk directory: {os.listdir(self._disk)}")
            with patience():
                self._check_newest(outcome)
        finally:
            writer.AT_ONCE_BYTES = before
            shutil.rmtree(self._checkpoints)
        return outcome

    def _meet(self, faults: Sequence[Fault], outcome: Outcome) -> None:
        run = TinyRun(self._disk, self._manner.places)
        run.load(self._origin)
        run.save(self._checkpoints / self._manner.target(run.steps)).wait()
        for fault in faults:
            fault.armed = True
        whole = self._try(outcome, lambda: self._step(run, outcome))
        saved = self._try(outcome, lambda: run.save(self._checkpoints / self._manner.target(run.steps), keep=1).wait())
        if not saved and any(".new-" in entry.name for entry in self._checkpoints.iterdir()):
            outcome.wrong.append("a failed save leaves its folder behind")
        whole = whole and self._try(outcome, lambda: self._step(run, outcome))
        settled = self._try(outcome, lambda: self._digest_is_right(run, outcome)) if whole else False
        for fault in faults:
            fault.armed = False
        emergency = self._try(outcome, lambda: run.save(self._root / "emergency" / "step-0").wait())
        if settled and not (emergency and saved) and not outcome.errors:
            outcome.wrong.append("a save failed without an error")
        run.close()

    def _step(self, run: TinyRun, outcome: Outcome) -> None:
        if run.step() != self._losses[run.steps - 1]:
            outcome.wrong.append(f"another loss at step {run.steps}")

    def _digest_is_right(self, run: TinyRun, outcome: Outcome) -> None:
        if run.digest() != self._digests[run.steps]:
            outcome.wrong.append("other bits, and no error")

    def _try(self, outcome: Outcome, action: Callable[[], None]) -> bool:
        """Do it; whether it went well. An error must say what failed."""
        try:
            action()
        except (OSError, RuntimeError) as error:
            outcome.errors.append(f"{type(error).__name__}: {error}")
            if isinstance(error, OSError) and error.filename is None:
                outcome.wrong.append(f"an error without a path: {error}")
            return False
        return True

    def _check_newest(self, outcome: Outcome) -> None:
        """The newest complete checkpoint loads and goes on; the next save leaves nothing of the failed one."""
        self.checker.load(self._checkpoints)
        self._continues(outcome, "the newest checkpoint")
        self.checker.save(self._checkpoints / self._manner.target(self.checker.steps), keep=1).wait()
        left = sorted(entry.name for entry in self._checkpoints.iterdir())
        if left != [self._manner.target(self.checker.steps)]:
            outcome.wrong.append(f"left beside the checkpoints: {left}")
        self._check_emergency(outcome)

    def _continues(self, outcome: Outcome, what: str) -> None:
        steps = self.checker.steps
        if self.checker.digest() != self._digests[steps]:
            outcome.wrong.append(f"{what} holds other bits")
        elif self.checker.step() != self._losses[steps] or self.checker.digest() != self._digests[steps + 1]:
            outcome.wrong.append(f"{what} does not go on as it should")

    def _check_emergency(self, outcome: Outcome) -> None:
        """What could still be saved after the fault is a whole state, even in the middle of a step."""
        emergency = self._root / "emergency"
        with suppress(FileNotFoundError):
            self.checker.load(emergency)
            if self.checker.digest(rng=False) not in self._weights:
                outcome.wrong.append("what was saved after the fault is no whole state")
        shutil.rmtree(emergency, ignore_errors=True)

    def close(self) -> None:
        self.checker.close()


def trials(ground: Ground, kind: str, most: int) -> Iterator[Outcome]:
    """The kind's fault at every request or call, or at `most` of them, evenly spread; the errors take turns."""
    count = ground.calls[kind]
    places = range(1, count + 1) if count <= most else [1 + (2 * at + 1) * count // (2 * most) for at in range(most)]
    for turn, at in enumerate(places):
        yield ground.trial(Fault(kind, at, CODES[turn % len(CODES)]))
