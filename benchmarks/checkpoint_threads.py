"""Saves from a second thread while training goes on. `python -m benchmarks.checkpoint_threads DIRECTORY SAVES`.

Every save must be refused, or load and be one step's state to the bit. The oracle is a run of the same steps that never
saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize

WIDTH = 32


@dataclass
class Tally:
    """What came of the saves."""

    saves: int = 0
    steps: int = 0
    refused: int = 0
    unreadable: int = 0
    mixed: int = 0
    distinct_steps: set[int] = field(default_factory=set)

    @property
    def wrong(self) -> int:
        return self.unreadable + self.mixed


class Run:
    """A small model that trains on the same batches each time."""

    def __init__(self, disk: Path, tier: str) -> None:
        disk.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        places = dict.fromkeys(("params", "grads", "states"), tier)
        outsize.prepare(self.model, self.optimizer, host_memory="64MiB", disk=disk, device="cpu", **places)
        self.steps = 0

    def step(self) -> None:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.steps))
        self.model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def digest(self) -> str:
        """Of all weights and states."""
        found = hashlib.sha256()
        with outsize.gathered(self.model):
            for param in self.model.parameters():
                found.update(param.detach().numpy().tobytes())
        for entry in self.optimizer.state_dict()["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                found.update(entry[key].numpy().tobytes())
        return found.hexdigest()


def save_beside_training(root: Path, saves: int, tier: str = "disk") -> Tally:
    """Train in this thread while another one saves so often."""
    tally = Tally()
    run = Run(root / "disk", tier)
    run.step()
    over = threading.Event()

    def save_all() -> None:
        for number in range(saves):
            try:
                outsize.save(root / f"save-{number}", run.model, run.optimizer)
                tally.saves += 1
            except RuntimeError:
                tally.refused += 1
        over.set()

    thread = threading.Thread(target=save_all)
    thread.start()
    while not over.is_set():
        run.step()
    thread.join()
    tally.steps = run.steps
    _judge(Run(root / "again", tier), root, tally)
    return tally


def _judge(again: Run, root: Path, tally: Tally) -> None:
    known: dict[str, int] = {}
    while again.steps < tally.steps:
        again.step()
        known[again.digest()] = again.steps
    for path in root.glob("save-*"):
        try:
            outsize.load(path, again.model, again.optimizer)
        except (OSError, ValueError):
            tally.unreadable += 1
            continue
        found = known.get(again.digest())
        if found is None:
            tally.mixed += 1
        else:
            tally.distinct_steps.add(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("saves", type=int)
    options = parser.parse_args()
    for tier in ("disk", "host"):
        tally: dict[str, Any] = asdict(save_beside_training(options.directory / tier, options.saves, tier))
        print(json.dumps({"tier": tier, **tally, "distinct_steps": len(tally["distinct_steps"])}))


if __name__ == "__main__":
    main()
