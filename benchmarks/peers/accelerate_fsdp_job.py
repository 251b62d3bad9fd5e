"""Accelerate with FSDP2 and CPU offload, by its own plugin and its own loop."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.models import checkpointed
from benchmarks.peers.job import CLIP, DECAY, LR, Step, Task, alone, run


def make(task: Task) -> Step:
    alone()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_offload=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=task.compute, reduce_dtype=torch.float32),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = checkpointed(task.model(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


if __name__ == "__main__":
    run(make)
