"""outsize: everything on disk, everything on host, or where it fits."""

from __future__ import annotations

from typing import Any

import torch

import outsize
from benchmarks.models import train_step
from benchmarks.peers.job import DECAY, LR, Step, Task, on_meta, run

BUDGETS = {"disk": "256MiB", "part": "640MiB", "host": "20GiB", "memory": "20GiB"}


def fields_of(task: Task) -> dict[str, Any]:
    """Variants: `disk` and `host`, with everything there, or `memory`, with room for all of it."""
    fields: dict[str, Any] = {"device": "cpu", "disk": task.disk, "host_memory": BUDGETS[task.variant]}
    if task.variant in ("disk", "host"):
        fields |= dict.fromkeys(("params", "grads", "states"), task.variant)
    return {**fields, "activations": "recompute", "compute_dtype": task.compute, **task.fields}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def make(task: Task) -> Step:
    fields = fields_of(task)
    with outsize.init(**{name: fields[name] for name in ("device", "disk", "host_memory")}):
        model = task.model()
    optimizer = adamw(model.train())
    outsize.prepare(model, optimizer, **fields)
    return lambda batch: train_step(model, optimizer, batch)[0]


def predicted(task: Task) -> dict[str, Any]:
    """By a plan on figures of this minute."""
    if not task.predict:
        return {}
    outsize.probe(disk=task.disk, device="cpu", again=True)
    model, batch = on_meta(task).train(), task.batch(0)
    example = {"input_ids": batch, "labels": batch}
    plan = outsize.plan(model, adamw(model), example=example, disk_space="1TB", **fields_of(task))
    return {"predicted": plan.step_seconds}


if __name__ == "__main__":
    run(make, predicted)
