"""Work on other threads, where there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

Result = TypeVar("Result")


def submitted(pool: Executor, work: Callable[..., Result], *arguments: object) -> Future[Result]:
    """The work, on its way. It is done here where the main thread has ended: the interpreter's pools take nothing more,
    while other threads of the user, and what runs at its exit, go on."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
    done: Future[Result] = Future()
    try:
        done.set_result(work(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done
