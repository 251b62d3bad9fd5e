"""A run while it goes: the figures of each step, shown and kept; when it stops; the report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from transformers import TrainerCallback

from outsize.plan.sizes import format_bytes

LINE_SECONDS = 10.0  # the least time between two lines where there is no terminal
GIB = 1 << 30
Record = dict[str, Any]


def process_memory(field: str = "VmRSS") -> int:
    """Bytes of memory of this process: `VmRSS` now, `VmHWM` at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows the Trainer's log of each step. Stops after `seconds`, and at Ctrl-C and SIGTERM.

    A stop comes after the step at hand, on all ranks, with a checkpoint. A second signal ends the run at once.
    """

    def __init__(self, trainer: Any, base_memory: int, tokens: int, seconds: float | None) -> None:
        self._trainer, self._base_memory, self._tokens = trainer, base_memory, tokens
        self._until = None if seconds is None else time.monotonic() + seconds
        self.signal: int | None = None
        self._held_out: Record = {}
        self._shown = -LINE_SECONDS
        self._live: Any = None

    def __enter__(self) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._previous = {number: signal.signal(number, self._ask) for number in numbers}
        if sys.stdout.isatty() and self._trainer.is_world_process_zero():
            self._live = Live(refresh_per_second=4)
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        second, self.signal = self.signal is not None, number
        if second:
            raise KeyboardInterrupt
        print("\nfinishing this step, then saving (once more: stop at once)", file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator = self._trainer.accelerator
        if self.signal is not None or (self._until is not None and time.monotonic() > self._until):
            accelerator.set_trigger()
        if accelerator.check_trigger():  # on all ranks, where one has asked
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = state.log_history[-1]
        if "eval_loss" in record:
            self._held_out = record
        elif "loss" in record:
            record["tokens_per_second"] = self._tokens / record["seconds"]
            record["process_bytes"] = process_memory() - self._base_memory
        else:
            return
        if state.is_world_process_zero:
            self._show(record, state.max_steps)

    def _show(self, record: Record, steps: int) -> None:
        if "loss" not in record:
            if self._live is None:
                print(f"step {record['step']}/{steps} | held-out loss {record['eval_loss']:.3f}", flush=True)
            return
        rows = figures(record, self._held_out)
        if self._live is not None:
            self._live.update(_panel(record, rows, steps))
        elif record["step"] == steps or time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            line = " | ".join(f"{name} {text}" for name, text in rows.items())
            print(f"step {record['step']}/{steps} | {line}", flush=True)


def figures(record: Record, held_out: Record) -> dict[str, str]:
    """What a step is said to have been, by subject."""
    held = f", held-out {held_out['eval_loss']:.3f} at step {held_out['step']}" if held_out else ""
    skipped = f", {record['skipped_steps']} steps skipped" if record["skipped_steps"] else ""
    compute = max(0.0, record["seconds"] - record["wait_seconds"])
    return {
        "loss": f"{record['loss']:.3f}{held}, gradient norm {record['grad_norm']:.2f}, "
        f"lr {record['learning_rate']:.1e}{skipped}",
        "step": f"{record['seconds']:.2f} s: compute {compute:.2f}, wait for disk {record['wait_seconds']:.2f}, "
        f"update {record['update_seconds']:.2f} behind; {record['tokens_per_second']:,.0f} tokens/s",
        "disk": f"{format_bytes(record['bytes_read'])} read, {format_bytes(record['bytes_written'])} written a step",
        "memory": f"{format_bytes(max(0, record['process_bytes']))} over the imports "
        f"for {format_bytes(record['state_bytes'])} of state",
    }


def _panel(record: Record, rows: dict[str, str], steps: int) -> Any:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("", ProgressBar(steps, record["step"], width=48))
    for name, text in rows.items():
        table.add_row(name, text)
    return Panel(table, title=f"step {record['step']} of {steps}", title_align="left", expand=False)


def write_report(path: Path, history: Sequence[Record], base_memory: int) -> None:
    """Draw the Trainer's log: loss, time, memory and disk traffic of each step. Nothing where there was no step."""
    records = [record for record in history if "seconds" in record]
    if not records:
        return
    steps = [record["step"] for record in records]
    held_out = [(record["step"], record["eval_loss"]) for record in history if "eval_loss" in record]
    peak = max(process_memory("VmHWM") - base_memory, *(record["process_bytes"] for record in records))
    state = format_bytes(records[-1]["state_bytes"])
    gib = {
        name: [record[name] / GIB for record in records]
        for name in records[0]
        if name.endswith(("bytes", "read", "written"))
    }
    figure = Figure(figsize=(11, 7.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, seconds, memory, disk = figure.subplots(2, 2).flat
    figure.suptitle(f"{steps[-1]} steps, {state} of parameters, gradients and optimizer state", x=0.01, ha="left")
    loss.plot(steps, [record["loss"] for record in records], label="training")
    if held_out:
        loss.plot(*zip(*held_out, strict=True), marker="o", label="held-out")
    for name, label in (("seconds", "a step"), ("wait_seconds", "wait for disk"), ("update_seconds", "update, behind")):
        seconds.plot(steps, [record[name] for record in records], label=label)
    memory.plot(steps, gib["state_bytes"], label="parameters, gradients, optimizer state")
    memory.plot(steps, gib["process_bytes"], label="memory over the imports")
    memory.axhline(peak / GIB, linestyle=":", label=f"its peak, {format_bytes(peak)}")
    disk.plot(steps, gib["bytes_read"], label="read")
    disk.plot(steps, gib["bytes_written"], label="written")
    titles = ("Loss (nats a token)", "Time (s)", "Memory (GiB)", "Disk traffic of each step (GiB)")
    for chart, title in zip((loss, seconds, memory, disk), titles, strict=True):
        chart.set_title(title, loc="left", fontsize=10)
        chart.set_xlabel("step", fontsize=9)
        chart.spines[["top", "right"]].set_visible(False)
        chart.legend(frameon=False, fontsize=8)
        if chart is not loss:
            chart.set_ylim(bottom=0)
    figure.savefig(str(path))
