"""A run while it goes: the figures of each step, shown and kept; when it stops."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from transformers import TrainerCallback

import outsize
from outsize.cli.terminal import leave, terminals
from outsize.planning.sizes import format_bytes

LINE_SECONDS = 10.0  # the least time between two lines where there is no terminal
Record = dict[str, Any]


def process_memory(field: str = "VmRSS") -> int:
    """Bytes of memory of this process: `VmRSS` now, `VmHWM` at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows the Trainer's log of each step. Stops after `seconds`, at Ctrl-C and SIGTERM, and when the terminal closes.

    A stop comes after the step, evaluation or save at hand, on all ranks, with a checkpoint. A second Ctrl-C or SIGTERM
    ends it at once.
    """

    def __init__(self, trainer: Any, base_memory: int, tokens: int, seconds: float | None) -> None:
        self._trainer, self._base_memory, self._tokens = trainer, base_memory, tokens
        self._until = None if seconds is None else time.monotonic() + seconds
        self.signal: int | None = None
        self._seconds: deque[float] = deque(maxlen=20)  # of the last steps
        self._held_out: Record = {}
        self._shown = -LINE_SECONDS
        self._live: Any = None

    def __enter__(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._ask) for number in numbers}
        self._terminals = terminals()
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
        if number == signal.SIGHUP:  # the kernel says it, and the shell once more
            leave(self._terminals)
            return
        if second:
            raise KeyboardInterrupt
        print("\nfinishing what is at hand, then saving (once more: stop at once)", file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            state.log_history.append({"step": state.global_step, "resumed": True})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history.append({"step": state.global_step, "saved": True})
        control.should_training_stop |= self._shall_stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._shall_stop():
            control.should_training_stop = control.should_save = True

    on_evaluate = on_step_end

    def _shall_stop(self) -> bool:
        """Whether one of all ranks has been asked to."""
        accelerator = self._trainer.accelerator
        if self.signal is not None or (self._until is not None and time.monotonic() > self._until):
            accelerator.set_trigger()
        return bool(accelerator.check_trigger())

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = state.log_history[-1]
        if "eval_loss" in record:
            self._held_out = record
        elif "loss" in record:
            record["tokens_per_second"] = self._tokens / record["seconds"]
            record["process_bytes"] = process_memory() - self._base_memory
            self._seconds.append(record["seconds"])
            record["left_seconds"] = self._left(state.max_steps - state.global_step)
        else:
            return
        if state.is_world_process_zero:
            self._show(record, state.max_steps)

    def _left(self, steps: int) -> float:
        """Seconds until the run stops, by its last steps."""
        left = steps * sum(self._seconds) / len(self._seconds)
        return left if self._until is None else min(left, max(self._until - time.monotonic(), 0.0))

    def _show(self, record: Record, steps: int) -> None:
        if "loss" not in record:
            if self._live is None:
                print(f"step {record['step']}/{steps} | held-out loss {record['eval_loss']:.3f}", flush=True)
            return
        rows = figures(record, self._held_out, outsize.memory(self._trainer.model).by_tier)
        if self._live is not None:
            self._live.update(_panel(record, rows, steps))
        elif record["step"] == steps or time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            line = " | ".join(f"{name} {text}" for name, text in rows.items())
            print(f"step {record['step']}/{steps} | {line}", flush=True)


def figures(record: Record, held_out: Record, by_tier: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """What a step is said to have been, by subject. `by_tier`: bytes in use, and the budget."""
    held = f", held-out {held_out['eval_loss']:.3f} at step {held_out['step']}" if held_out else ""
    skipped = f", {record['skipped_steps']} steps skipped" if record["skipped_steps"] else ""
    moved = record["bytes_read"] + record["bytes_written"]
    compute = max(0.0, record["seconds"] - record["wait_seconds"])
    return {
        "loss": f"{record['loss']:.3f}{held}, gradient norm {record['grad_norm']:.2f}, "
        f"lr {record['learning_rate']:.1e}{skipped}",
        "step": f"{record['seconds']:.2f} s: compute {compute:.2f}, wait for disk {record['wait_seconds']:.2f}, "
        f"update {record['update_seconds']:.2f} behind; {record['tokens_per_second']:,.0f} tokens/s",
        "disk": f"{format_bytes(record['bytes_read'])} read, {format_bytes(record['bytes_written'])} written a step, "
        f"{format_bytes(round(moved / record['seconds']))}/s",
        "tiers": "; ".join(
            f"{tier} {format_bytes(now)} of {format_bytes(most)}" for tier, (now, most) in by_tier.items()
        ),
        "memory": f"{format_bytes(max(0, record['process_bytes']))} over the imports "
        f"for {format_bytes(record['state_bytes'])} of state",
        "left": f"{timedelta(seconds=round(record['left_seconds']))}",
    }


def _panel(record: Record, rows: dict[str, str], steps: int) -> Any:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    table.add_row("", ProgressBar(steps, record["step"]))
    for name, text in rows.items():
        table.add_row(name, text)
    return Panel(table, title=f"step {record['step']} of {steps}", title_align="left")
