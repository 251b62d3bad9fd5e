"""Train, stop at any point, start again: the run goes on bit for bit, data included.

    python examples/resume.py DIRECTORY [STEPS]

Kill it in between and run it again, or run it with 50 steps and then with 100. (Once all steps are done it has nothing
to do and prints 0.0.) Needs torchdata and safetensors (`pip install torchdata safetensors`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import outsize


def main(directory: Path, steps: int) -> float:
    torch.manual_seed(0)
    data = torch.randn(1024, 64)
    own = torch.Generator().manual_seed(0)  # so that making an iterator draws nothing from the model's dropout
    loader = StatefulDataLoader(data, batch_size=16, shuffle=True, generator=own)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    (directory / "disk").mkdir(parents=True, exist_ok=True)
    outsize.prepare(model, optimizer, device="cpu", disk=directory / "disk", **outsize.presets["zero-infinity-nvme"])

    step, epoch, loss = 0, 0, torch.zeros(())
    if any((directory / "ckpts").glob("step-*")):
        extra = outsize.load(directory / "ckpts", model, optimizer)
        step, epoch = extra["step"], extra["epoch"]
        scheduler.load_state_dict(extra["scheduler"])
        loader.load_state_dict(extra["loader"])

    while step < steps:
        own.manual_seed(epoch)
        for batch in loader:
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == steps:
                extra = {"step": step, "epoch": epoch}
                extra |= {"scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
                outsize.save(directory / "ckpts" / f"step-{step}", model, optimizer, extra, keep=2)
            if step == steps:
                break
        epoch += 1
    return loss.item()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100))
