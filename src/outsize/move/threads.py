"""Work on other threads, where there are any."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

Result = TypeVar("Result")


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
