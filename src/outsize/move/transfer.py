"""One way to wait for everything that is on its way, and work on other threads, where there are any."""

from __future__ import annotations

import copy
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar, final

Result = TypeVar("Result")


class Transfer(ABC):
    """Something on its way: an event of the device, a disk request, a job of the conveyor."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the bytes are in place; safe to repeat. Raises what went wrong on the way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    def meanwhile(self) -> None:  # noqa: B027
        """Do what may be done while the bytes travel and would otherwise be left to `wait`; safe to repeat."""


def again(error: BaseException) -> BaseException:
    """A copy of a kept error, to raise: raising ties the frames that it passes, and all they hold, to an error."""
    return copy.copy(error)


def in_a_fork() -> RuntimeError:
    """What a forked child is told, in which none of our threads runs."""
    return RuntimeError(
        f"the model was prepared by another process and this is a forked child ({os.getpid()}): only the process that "
        f"called outsize.prepare can use the model"
    )


@final
class Promise(Transfer):
    """A transfer that another thread keeps (or breaks)."""

    _lock = threading.Lock()  # one for all: few wait, and a promise stays small
    _changed = threading.Condition(_lock)
    waiting = 0
    """Threads that wait for a promise now. Their cores are idle."""

    def __init__(self) -> None:
        self._over = False
        self._error: BaseException | None = None
        self._made_with = Promise._changed

    def keep(self) -> None:
        with Promise._lock:
            self._over = True
            if Promise.waiting:
                Promise._changed.notify_all()

    def break_(self, error: BaseException) -> None:
        self._error = error
        self.keep()

    @property
    def broken(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        if not self._over:
            if self._made_with is not Promise._changed:  # before a fork, and whoever keeps it is in the parent
                raise in_a_fork()
            with Promise._changed:
                Promise.waiting += 1
                try:
                    Promise._changed.wait_for(self.done)
                finally:
                    Promise.waiting -= 1
        if self._error is not None:
            raise again(self._error).with_traceback(self._error.__traceback__)

    def done(self) -> bool:
        return self._over

    @classmethod
    def forget_waiters(cls) -> None:
        """In a forked child nobody waits; the lock may have been held when the fork happened."""
        cls._lock = threading.Lock()
        cls._changed = threading.Condition(cls._lock)
        cls.waiting = 0


os.register_at_fork(after_in_child=Promise.forget_waiters)

ARRIVED = Promise()
"""A transfer that is over before it begins: memory that was copied at once."""
ARRIVED.keep()


def submitted(pool: Executor, work: Callable[..., Result], *arguments: object) -> Future[Result]:
    """The work, on its way. It is done here where the main thread ends: pools take nothing more then, and other threads
    of the user, and what runs at the exit, go on."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError as error:
        if not str(error).startswith("cannot schedule new futures"):  # of others the work may have begun
            raise
    done: Future[Result] = Future()
    try:
        done.set_result(work(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done
