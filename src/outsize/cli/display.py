"""The run while it goes: a live panel on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import Any

from outsize.cli.metrics import Record, human, times_memory

LINE_SECONDS = 10.0  # the least time between two plain lines
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_STEPS = 48


class Display(ABC):
    """Shows records as they come, between entering and leaving it."""

    @abstractmethod
    def __enter__(self) -> Display: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def show(self, record: Record) -> None: ...


class NoDisplay(Display):
    """Of a rank that leaves showing to the first."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, record: Record) -> None:
        return


def open_display(steps: int, seconds: float | None) -> Display:
    """The live panel when stdout is a terminal, else plain lines."""
    return LiveDisplay(steps, seconds) if sys.stdout.isatty() else LineDisplay(steps)


class LineDisplay(Display):
    """One line for the first record and the last, between them at most one every `LINE_SECONDS`; held-out losses are
    never left out."""

    def __init__(self, steps: int, every_seconds: float = LINE_SECONDS) -> None:
        self._steps, self._every_seconds = steps, every_seconds
        self._last = float("-inf")
        self._unsaid: Record | None = None

    def __enter__(self) -> Display:
        return self

    def show(self, record: Record) -> None:
        now = time.monotonic()
        self._unsaid = record
        if now - self._last < self._every_seconds and record.held_out_loss is None and record.step < self._steps:
            return
        self._last = now
        self._say()

    def _say(self) -> None:
        if self._unsaid is not None:
            print(line(self._unsaid, self._steps), flush=True)
        self._unsaid = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say()


class LiveDisplay(Display):
    """A panel that is redrawn in place, with `rich`."""

    def __init__(self, steps: int, seconds: float | None) -> None:
        from rich.live import Live

        self._steps, self._seconds = steps, seconds
        self._losses: deque[float] = deque(maxlen=_SPARK_STEPS)
        self._held_out: tuple[int, float] | None = None
        self._live = Live(refresh_per_second=4)

    def __enter__(self) -> Display:
        self._live.__enter__()
        return self

    def show(self, record: Record) -> None:
        self._losses.append(record.loss)
        if record.held_out_loss is not None:
            self._held_out = (record.step, record.held_out_loss)
        self._live.update(self._panel(record))

    def _panel(self, record: Record) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        by_time = record.elapsed_seconds / self._seconds if self._seconds else 0.0
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        table.add_row("progress", ProgressBar(1.0, min(1.0, max(record.step / self._steps, by_time)), width=48))
        for label, text in panel_rows(record, self._held_out):
            table.add_row(label, Text(text))
        table.add_row("", Text(sparkline(list(self._losses)), style="cyan"))
        limit = f" of {clock(self._seconds)}" if self._seconds else ""
        title = f"step {record.step} of at most {self._steps} · {clock(record.elapsed_seconds)}{limit}"
        return Panel(table, title=title, title_align="left", expand=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def panel_rows(record: Record, held_out: tuple[int, float] | None) -> list[tuple[str, str]]:
    """What the panel says, as (label, text)."""
    held = f" · held-out {held_out[1]:.3f} at step {held_out[0]}" if held_out else ""
    held += f" · {record.skipped_steps} steps skipped" if record.skipped_steps else ""
    return [
        ("loss", f"{record.loss:.3f}{held} · gradient norm {record.grad_norm:.2f} · lr {record.lr:.1e}"),
        ("speed", f"{record.tokens_per_second:,.0f} tokens/s · {record.step_seconds:.2f} s a step"),
        ("step", _split(record)),
        ("disk", f"{human(record.bytes_read)} read, {human(record.bytes_written)} written a step"),
        ("", f"{human(record.total_read)} read, {human(record.total_written)} written in total"),
        ("memory", f"RSS {human(record.rss_over_imports)} over the imports, {human(record.rss_bytes)} in all"),
        ("state", f"{human(record.state_bytes)}{times_memory(record.state_bytes, record.rss_over_imports)}"),
    ]


def line(record: Record, steps: int) -> str:
    """The same on one line, for a log."""
    held = f" held-out {record.held_out_loss:.3f}" if record.held_out_loss is not None else ""
    held += f" ({record.skipped_steps} steps skipped)" if record.skipped_steps else ""
    return (
        f"step {record.step}/{steps} {clock(record.elapsed_seconds)} loss {record.loss:.3f}{held} "
        f"| {record.tokens_per_second:,.0f} tokens/s | {record.step_seconds:.2f} s: {_split(record)} "
        f"| disk {human(record.bytes_read)} read {human(record.bytes_written)} written "
        f"(total {human(record.total_read)}, {human(record.total_written)}) "
        f"| RSS {human(record.rss_over_imports)} over imports, state {human(record.state_bytes)}"
    )


def _split(record: Record) -> str:
    return (
        f"compute {record.compute_seconds:.2f} + wait for disk {record.wait_seconds:.2f}, "
        f"update {record.update_seconds:.2f} behind"
    )


def clock(seconds: float) -> str:
    """`6:05`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def sparkline(values: list[float]) -> str:
    """One bar for each value, the lowest value lowest; nothing for values that are not finite."""
    finite = [value for value in values if abs(value) != float("inf") and value == value]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in finite)
