"""One thread at a time uses a prepared model: others wait for their turn, in the order in which they came."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

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


@contextmanager
def outside_inference() -> Iterator[None]:
    """What is made in the block is trained on, wherever the user asks for it: autograd takes no tensor of inference
    mode, or passes it by without a word."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@final
class Owner:
    """Who uses the model now, and who waits.

    A turn lasts from the start of a forward, a backward, a step, a save or their like to its end; in between another
    thread may come. So what a thread reads is of one step. A thread that has the turn may take it again inside.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: int | None = None
        self._depth = 0
        self._what = ""
        self._waiting: deque[object] = deque()

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
            if self._thread != thread and (self._thread is None or not _of_autograd()):
                if self._thread is not None or self._waiting:
                    self._await(what)
                self._thread, self._what = thread, what
            self._depth += 1

    def give(self) -> None:
        """The turn, or what was taken inside it, is over."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._thread = None
                if self._waiting:
                    self._changed.notify_all()

    def _await(self, what: str) -> None:
        if what == self._what == FORWARD and self._thread is not None:
            raise RuntimeError(
                "the model's forward was called from two threads at once; outsize streams one forward at a time: "
                "use one thread, or a lock around the calls"
            )
        if os.getpid() != self._pid:
            raise in_a_fork()
        me = object()
        self._waiting.append(me)
        try:
            while not self._changed.wait_for(lambda: self._thread is None and self._waiting[0] is me, PATIENCE_SECONDS):
                if self._what in _OPEN_ENDED:
                    raise RuntimeError(
                        f"{what} waits for {self._what} of another thread, which has gone on for "
                        f"{PATIENCE_SECONDS:.0f} s: one thread at a time uses a prepared model. Do this in that "
                        f"thread, or after it"
                    )
        finally:
            self._waiting.remove(me)
            self._changed.notify_all()  # somebody else may be the first now
