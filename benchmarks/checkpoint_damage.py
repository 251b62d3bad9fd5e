"""Pages of a run's files that are damaged between steps. `python -m benchmarks.checkpoint_damage DIRECTORY TRIALS`.

Each trial flips a byte of a page, zeroes it, or cuts the file there, then trains on. Either an error that names the
file comes before a value is used, or the values are those of a run without damage: the page was written before it was
read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import outsize
from outsize.api.assemble import prepared_of
from outsize.api.saving import settle

PAGE_BYTES = 4096
WIDTH = 64
WAYS = ("flip", "zero", "cut")


@dataclass
class Tally:
    """What came of the damage."""

    trials: int = 0
    found: int = 0
    harmless: int = 0
    wrong: int = 0


class Run:
    """A small model, all on disk, that trains on the same batches each time."""

    def __init__(self, disk: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        places = dict.fromkeys(("params", "grads", "states"), "disk")
        outsize.prepare(
            self.model, self.optimizer, host_memory="64MiB", disk=disk, device=torch.get_default_device(), **places
        )
        self.prepared = prepared_of(next(self.model.parameters()))
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(len(self.losses)))
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def rest(self) -> None:
        """Everything comes to rest, so that the next step reads it from disk."""
        assert self.prepared is not None
        settle(self.prepared)
        self.prepared.engine.streamer.drop_idle()


def damage(path: Path, page: int, way: str) -> bool:
    """Change one page; whether that changes what is there."""
    with open(path, "r+b") as file:
        file.seek(page * PAGE_BYTES)
        content = file.read(PAGE_BYTES)
        if way == "cut":
            file.truncate(page * PAGE_BYTES)
            return True
        changed = bytes(PAGE_BYTES) if way == "zero" else bytes([content[0] ^ 1]) + content[1:]
        file.seek(page * PAGE_BYTES)
        file.write(changed)
        file.flush()
        os.fsync(file.fileno())
        return changed != content


def try_often(root: Path, trials: int, seed: int = 0) -> Tally:
    """Damage a page so often, each time in a run of its own."""
    draw, tally = random.Random(seed), Tally()
    (root / "disk").mkdir(parents=True, exist_ok=True)
    whole = Run(root / "disk")
    whole.train(5)
    while tally.trials < trials:
        run = Run(root / "disk")
        run.train(draw.randint(1, 3))
        run.rest()
        assert run.prepared is not None
        folder = run.prepared.resources.run_directories[0]
        files = [path for path in sorted(folder.glob("unit-*")) if "grads" not in path.name]
        path = draw.choice(files)
        page = draw.randrange(path.stat().st_size // PAGE_BYTES)
        if damage(path, page, draw.choice(WAYS)):
            tally.trials += 1
            _judge(run, whole.losses, tally)
        run.prepared.resources.close()
    shutil.rmtree(root / "disk")
    return tally


def _judge(run: Run, expected: list[float], tally: Tally) -> None:
    try:
        run.train(5 - len(run.losses))
    except (OSError, RuntimeError):
        tally.found += run.losses == expected[: len(run.losses)]
        tally.wrong += run.losses != expected[: len(run.losses)]
        return
    same = run.losses == expected
    tally.harmless += same
    tally.wrong += not same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("trials", type=int)
    options = parser.parse_args()
    print(json.dumps(asdict(try_often(options.directory, options.trials))))


if __name__ == "__main__":
    main()
