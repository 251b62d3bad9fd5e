"""The trace that is being taken of this process, and the calls that add to it; without one they do nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outsize.planning.trace import Trace

_open: list[Trace] = []
"""Those of `outsize.trace` that are being taken; the last one counts."""


def tracing() -> bool:
    """Whether a trace is being taken."""
    return len(_open) > 0


def counted(name: str, value: float) -> None:
    """So many bytes are in use now."""
    if _open:
        _open[-1].count(name, value, time.perf_counter())


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a trace of the steps in the block to the file `path`, for https://ui.perfetto.dev or chrome://tracing.

    Lanes of computation by unit, fetches (in), gradients on their way (out), disk reads and writes, updates and
    collectives, and counters of memory; of all prepared models of the process, on all their threads. A read or write
    ends where somebody looks after it. The events are in memory until the block ends: trace a few steps. Several ranks
    write a trace each: give each a path of its own. `outsize plan --trace` writes a simulated step in the same form.

    >>> with outsize.trace("steps.json"):
    ...     for batch in loader:
    ...         loss = model(batch).mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    found = Trace()
    Path(path).open("a").close()  # a path that cannot be written fails now
    found.turn("loop", time.perf_counter())
    _open.append(found)
    try:
        yield
    finally:
        found.turn("", time.perf_counter())
        _open.remove(found)
        found.write(path)


def begun() -> float:
    """The time, if a trace is being taken."""
    return time.perf_counter() if _open else 0.0


def ended(lane: str, name: str, began: float) -> None:
    """What began then is over now."""
    if began and _open:
        _open[-1].span(lane, name, began, time.perf_counter())


def turned(name: str) -> str:
    """The loop goes over to other work. Returns what it was at."""
    return _open[-1].turn(name, time.perf_counter()) if _open else ""
