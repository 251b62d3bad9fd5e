"""What the jobs share: the model, the data, and how a step is measured.

A job is a process in the environment of its peer: `python -m benchmarks.peers.NAME_job TASK`, with the task as JSON.
Its last line of output is the result as JSON. All jobs compute on the CPU, with the same threads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import models
from benchmarks.common import PeakRss, rss_bytes

LR, DECAY, CLIP = 3e-4, 0.1, 1.0
Step = Callable[[torch.Tensor], float]


@dataclass(frozen=True)
class Task:
    """One training: what is the same for all peers, and the `variant` of the job."""

    variant: str = ""
    layers: int = 12
    hidden: int = 768
    mlp: int = 3072
    vocabulary: int = models.VOCABULARY
    sequences: int = 1
    tokens: int = models.TOKENS
    batches: int = 4
    dtype: str = "bfloat16"
    warmup: int = 2
    steps: int = 5
    threads: int = 2
    disk: str = "."
    fields: dict[str, Any] = field(default_factory=dict)
    """Of `outsize.prepare`."""
    predict: bool = False
    """Also what `outsize.plan` says of it."""

    @property
    def compute(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    def batch(self, step: int) -> torch.Tensor:
        return models.tokens(step % self.batches, self.vocabulary, self.sequences, self.tokens)

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The same values for all peers: drawn in fp32, then cast to the dtype, by default that of the computation."""
        return models.llama(self.layers, self.hidden, self.mlp, self.vocabulary).to(dtype or self.compute)


def run(make: Callable[[Task], Step], more: Callable[[Task], dict[str, Any]] | None = None) -> None:
    """`make` gives the step of a training: a batch in, its loss out. `more` adds to the result."""
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    models.llama(1, 64, 128, 64)  # what is imported at the first model
    before = rss_bytes()
    with PeakRss() as whole:
        step = make(task)
    torch.set_num_threads(task.threads)  # some peers set their own number
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with PeakRss() as memory:
        result = _measured(task, step)
    result |= {"rss": memory.peak - before, "building": whole.peak - before, "peak": max(memory.peak, whole.peak)}
    result["parameters"] = sum(param.numel() for param in on_meta(task).parameters())
    print(json.dumps({**result, **(more(task) if more else {})}))


def _measured(task: Task, step: Step) -> dict[str, Any]:
    seconds, processor, losses = [], [], []
    moved = (0, 0)
    for number in range(task.warmup + task.steps):
        if number == task.warmup:
            moved = _moved()
        began, used = time.perf_counter(), time.process_time()
        losses.append(step(task.batch(number)))
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
        if number < 10:
            print(f"step {number}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    read, written = (after - first for after, first in zip(_moved(), moved, strict=True))
    return {
        "seconds": statistics.median(seconds[task.warmup :]),
        "processor": statistics.median(processor[task.warmup :]),
        "read": read / task.steps,
        "written": written / task.steps,
        "losses": losses,
    }


def _moved() -> tuple[int, int]:
    """Bytes that this process has read from drives, and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def on_meta(task: Task) -> nn.Module:
    with torch.device("meta"):
        return task.model()


def alone() -> None:
    """A process group of this process alone, for the peers that need one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
