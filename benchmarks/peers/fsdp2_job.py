"""FSDP2 with CPU offload: fp32 masters, computation in the task's dtype, the layers and the model as its units."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from benchmarks.models import checkpointed, train_step
from benchmarks.peers.job import DECAY, LR, Step, Task, alone, run


def make(task: Task) -> Step:
    """Variants: `offload`, else without."""
    alone()
    torch.distributed.init_process_group("gloo")
    model = checkpointed(task.model(torch.float32))
    how = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=task.compute, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if task.variant == "offload" else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    return lambda batch: train_step(model, optimizer, batch)[0]


if __name__ == "__main__":
    run(make)
