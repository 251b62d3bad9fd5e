"""One thread at a time uses a prepared model: others wait for their turn, in the order in which they came."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from outsize.move.transfer import in_a_fork
from outsize.run.activations import in_backward

PATIENCE_SECONDS = 60.0
"""How long a thread waits for what runs the user's own code, which may itself wait for that thread."""

FORWARD, BACKWARD, GATHERED = "a forward", "a backward", "an outsize.gathered block"
_OPEN_ENDED = (FORWARD, BACKWARD, GATHERED)


def _of_autograd() -> bool:
    """Whether this is a thread of autograd's own, which works for the thread that called `backward`."""
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return (known is None or isinstance(known, threading._DummyThread)) and in_backward()


@dataclass(eq=False)
class _Waiter:
    thread: int
    what: str
    come: threading.Event = field(default_factory=threading.Event)


@final
class Owner:
    """Who uses the model now, and who waits.

    A turn lasts from the start of a forward, a backward, a step, a save or their like to its end; in between another
    thread may come. So what a thread reads is of one step. A thread that has the turn may take it again inside.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._depth = 0
        self._what = ""
        self._waiting: deque[_Waiter] = deque()

    @property
    def is_other(self) -> bool:
        """Whether another thread has the turn; autograd's own threads work for the thread that has it."""
        return self._thread not in (None, threading.get_ident()) and not _of_autograd()

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Wait for the turn; it ends with the block. `what`: the user's word for what is done."""
        self.take(what)
        try:
            yield
        finally:
            self.give()

    def take(self, what: str) -> None:
        """Wait for the turn. Raises `RuntimeError` where it may never come."""
        thread = threading.get_ident()
        with self._lock:
            if self._thread is None:
                self._thread, self._what = thread, what
            if self._thread == thread or _of_autograd():
                self._depth += 1
                return
            if what == self._what == FORWARD:
                raise RuntimeError(
                    "the model's forward was called from two threads at once; outsize streams one forward at a time: "
                    "use one thread, or a lock around the calls"
                )
            waiter = _Waiter(thread, what)
            self._waiting.append(waiter)
        try:
            self._await(waiter)
        except BaseException:
            self._withdraw(waiter)
            raise

    def give(self) -> None:
        """The turn, or what was taken inside it, is over."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._thread = None
            if self._waiting:
                following = self._waiting.popleft()
                self._thread, self._what, self._depth = following.thread, following.what, 1
                following.come.set()

    def _await(self, waiter: _Waiter) -> None:
        if os.getpid() != self._pid:
            raise in_a_fork()
        while not waiter.come.wait(PATIENCE_SECONDS):
            if self._what in _OPEN_ENDED:
                raise RuntimeError(
                    f"{waiter.what} waits for {self._what} of another thread, which has gone on for "
                    f"{PATIENCE_SECONDS:.0f} s: one thread at a time uses a prepared model. Do this in that thread, "
                    f"or after it"
                )

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            came = waiter.come.is_set()
            if not came:
                self._waiting.remove(waiter)
        if came:
            self.give()
