"""What layers save for the backward: by torch's `save_on_cpu`, TRL's `OffloadActivations`, outsize, or none of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.models import checkpointed, train_step
from benchmarks.peers.job import DECAY, LR, Step, Task, run


def make(task: Task) -> Step:
    """Variants: `keep`, `recompute`, `save_on_cpu`, `trl`; `host` and `disk` by outsize."""
    model = task.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    around: AbstractContextManager[object] = nullcontext()
    if task.variant == "recompute":
        checkpointed(model)
    elif task.variant == "save_on_cpu":
        around = torch.autograd.graph.save_on_cpu(pin_memory=False)
    elif task.variant == "trl":
        from trl.models.activation_offloading import OffloadActivations

        around = OffloadActivations(use_pin_memory=False, use_streams=False)
    elif task.variant in ("host", "disk"):
        import outsize

        fields = {"activations": "offload", "activations_tier": task.variant, "disk": task.disk, "device": "cpu"}
        outsize.prepare(model, optimizer, host_memory="16GiB", **fields)

    def step(batch: torch.Tensor) -> float:
        with around:
            return train_step(model, optimizer, batch)[0]

    return step


if __name__ == "__main__":
    run(make)
