"""Plain torch: with fp32 masters kept by hand in bf16, with torch's own bf16 masters, or in fp32."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import checkpointed, train_step
from benchmarks.peers.job import CLIP, DECAY, LR, Step, Task, run


def make(task: Task) -> Step:
    """Variants: `masters` (fp32 masters), else whatever the dtype gives."""
    model = checkpointed(task.model())
    weights = list(model.parameters())
    by_hand = task.variant == "masters" and task.compute is torch.bfloat16
    held = [nn.Parameter(weight.detach().float()) for weight in weights] if by_hand else weights
    optimizer = torch.optim.AdamW(held, lr=LR, weight_decay=DECAY, fused=True)

    def step(batch: torch.Tensor) -> float:
        if not by_hand:
            return train_step(model, optimizer, batch)[0]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for master, weight in zip(held, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(held, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(held, weights, strict=True):
                weight.copy_(master)
        return float(loss.item())

    return step


if __name__ == "__main__":
    run(make)
