"""What goes on, in the format of Chrome and Perfetto: lanes of spans, and counters of memory."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, final

COMPUTE, IN, OUT, READS, WRITES = "compute", "in", "out", "disk reads", "disk writes"
UPDATES, COLLECTIVES = "updates", "collectives"
LANES = (COMPUTE, IN, OUT, READS, WRITES, UPDATES, COLLECTIVES)
"""The rows of a trace: computation by unit, fetches of units, gradients on their way, and what each takes."""
MICRO = 1e6


@final
class Trace:
    """Spans and counts, with times in seconds of any one clock; thread-safe."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}
        self._work: tuple[str, float] = "loop", 0.0

    def span(self, lane: str, name: str, began: float, ended: float) -> None:
        """A lane of `LANES` did one thing, as far as it had done with what came before."""
        with self._lock:
            began = max(began, self._ends.get(lane, began))
            self._ends[lane] = max(ended, began)
            if ended > began:
                event = {"ph": "X", "pid": 0, "tid": LANES.index(lane), "name": name, "ts": began, "dur": ended - began}
                self._events.append(event)

    def turn(self, name: str, now: float) -> str:
        """The loop goes over to other work, which may be to wait. Returns what it was at."""
        before, began = self._work
        self._work = name, now
        if began:
            self.span(COMPUTE, before, began, now)
        return before

    def count(self, name: str, value: float, when: float) -> None:
        """So many bytes are in use."""
        event = {"ph": "C", "pid": 0, "name": f"{name} bytes", "ts": when, "args": {"bytes": value}}
        with self._lock:
            self._events.append(event)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a file of JSON; times begin at 0."""
        first = min((each["ts"] for each in self._events), default=0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "outsize"}}]
        for number, lane in enumerate(LANES):
            names = {"ph": "M", "pid": 0, "tid": number}
            events.append({**names, "name": "thread_name", "args": {"name": lane}})
            events.append({**names, "name": "thread_sort_index", "args": {"sort_index": number}})
        for each in self._events:
            event = {**each, "ts": (each["ts"] - first) * MICRO}
            if "dur" in each:
                event["dur"] = each["dur"] * MICRO
            events.append(event)
        try:
            with Path(path).open("w", encoding="utf-8") as file:
                json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
