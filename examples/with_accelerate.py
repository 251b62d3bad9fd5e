"""Accelerate's own loop, on a model whose state rests on disk.

    python examples/with_accelerate.py DIRECTORY [STEPS]
    accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate.py DIRECTORY [STEPS]

Run it again with more steps: it goes on from the last state. Needs accelerate (`pip install accelerate`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outsize.integrations.accelerate import prepare

SAVE_EVERY = 10


def main(directory: Path, steps: int) -> float:
    """Returns the last loss."""
    on_cpu = not torch.accelerator.is_available()  # else ranks on CPUs do not find each other
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    inputs = torch.randn(4096, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.square().mean(1, keepdim=True)), batch_size=16)

    # In place of accelerator.prepare(model, optimizer, loader, scheduler):
    directory.mkdir(parents=True, exist_ok=True)
    budgets = {"host_memory": "8MiB", "disk": directory / "state", "params": "disk", "states": "disk"}
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, **budgets)

    done = max((int(each.name.removeprefix("step_")) for each in directory.glob("step_*")), default=0)
    if done:
        accelerator.load_state(directory / f"step_{done}")
    loss = torch.zeros(())
    for batch, (x, y) in enumerate(accelerator.skip_first_batches(loader, 2 * done), 2 * done + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if batch % (2 * SAVE_EVERY) == 0:
            accelerator.save_state(directory / f"step_{batch // 2}")
        if batch == 2 * steps:
            break
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"after {steps} steps on {accelerator.num_processes} ranks: loss {mean!r}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
