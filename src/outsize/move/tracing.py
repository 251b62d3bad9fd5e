"""A trace of what goes on, in the format of Chrome and Perfetto: lanes of spans, and counters of memory."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from outsize.plan.time import LANES

MICRO = 1e6


@final
class Trace:
    """Spans and counts, with times in seconds of any one clock; thread-safe."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def span(self, lane: str, name: str, began: float, ended: float) -> None:
        """A lane of `LANES` did one thing."""
        event = {"ph": "X", "pid": 0, "tid": LANES.index(lane), "name": name, "ts": began, "dur": ended - began}
        with self._lock:
            self._events.append(event)

    def count(self, name: str, value: float, when: float) -> None:
        """So many bytes are in use."""
        event = {"ph": "C", "pid": 0, "name": f"{name} bytes", "ts": when, "args": {"bytes": value}}
        with self._lock:
            self._events.append(event)

    def write(self, path: str | os.PathLike[str], after: float = 0.0) -> None:
        """As a file of JSON; times begin at 0. What ended before `after` is left out."""
        kept = [each for each in self._events if each["ts"] + each.get("dur", 0.0) >= after]
        first = min((each["ts"] for each in kept), default=0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "outsize"}}]
        for number, lane in enumerate(LANES):
            names = {"ph": "M", "pid": 0, "tid": number}
            events.append({**names, "name": "thread_name", "args": {"name": lane}})
            events.append({**names, "name": "thread_sort_index", "args": {"sort_index": number}})
        for each in kept:
            event = {**each, "ts": (each["ts"] - first) * MICRO}
            if "dur" in each:
                event["dur"] = each["dur"] * MICRO
            events.append(event)
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


_open: list[Trace] = []
"""Those of `outsize.trace` that are being taken; the last one counts."""


def tracing() -> Trace | None:
    """The trace that is being taken, if there is one."""
    return _open[-1] if _open else None


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a trace of the steps in the block to the file `path`, for https://ui.perfetto.dev or chrome://tracing.

    Lanes of computation by unit, fetches (in), gradients on their way (out), disk reads and writes, updates and
    collectives, and counters of memory; of all prepared models of the process, on all their threads. A read or write
    ends where somebody looks after it. `outsize plan --trace` writes a simulated step in the same form.

    >>> with outsize.trace("steps.json"):
    ...     for batch in loader:
    ...         loss = model(batch).mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    found = Trace()
    Path(path).touch()  # a path that cannot be written fails now
    _open.append(found)
    try:
        yield
    finally:
        _open.remove(found)
        found.write(path)


def span(lane: str, name: str, began: float) -> None:
    """What began at this time of `time.perf_counter` is over, in the trace that is being taken."""
    found = tracing()
    if found is not None:
        found.span(lane, name, began, time.perf_counter())
