"""torchao's `CPUOffloadOptimizer`. It needs CUDA or XPU; elsewhere its own words are the result."""

from __future__ import annotations

import torch
from torchao.optim import CPUOffloadOptimizer

from benchmarks.models import checkpointed, train_step
from benchmarks.peers.job import DECAY, LR, Step, Task, run


def make(task: Task) -> Step:
    model = checkpointed(task.model())
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, weight_decay=DECAY)
    return lambda batch: train_step(model, optimizer, batch)[0]


if __name__ == "__main__":
    run(make)
