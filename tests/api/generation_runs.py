"""The runs whose checkpoints share files with the state, or are written behind the training; what to compare."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.assemble import Prepared, prepared_of
from outsize.checkpoint import writer
from outsize.move.generations import Generations
from tests.api.checkpoint_runs import everything, prepare
from tests.comparing import assert_same
from tests.conftest import take_step


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save is done as that of a large state."""
    monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)


class Run:
    """Three layers, the middle one half frozen, AdamW with its state on disk unless told otherwise."""

    def __init__(self, tmp: Path, seed: int = 0, model: nn.Module | None = None, **fields: Any) -> None:
        torch.manual_seed(seed)
        self.model = model or nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 90), nn.Linear(90, 3))
        if model is None:
            self.model[1].weight.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        prepare(self.model, self.optimizer, "disk", tmp, **fields)
        self.count = 0

    @property
    def prepared(self) -> Prepared:
        found = prepared_of(next(self.model.parameters()))
        assert found is not None
        return found

    @property
    def files(self) -> list[Generations]:
        return [file for unit in self.prepared.engine.parameters.units for file in unit.shard.generations()]

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            self.count += 1
            inputs = torch.randn(4, 70, generator=torch.Generator().manual_seed(self.count))
            take_step(self.model(inputs.to(next(self.model.parameters()).dtype)).square().mean(), self.optimizer)
        return self

    def values(self) -> dict[str, torch.Tensor]:
        return everything(self.model, self.optimizer)

    def save(self, path: Path, **options: Any) -> Run:
        outsize.save(path, self.model, self.optimizer, self.count, **options).wait()
        return self

    def load(self, path: Path, **options: Any) -> Run:
        self.count = outsize.load(path, self.model, self.optimizer, **options)
        return self


def assert_holds(path: Path, values: dict[str, torch.Tensor], tmp: Path, steps: int = 0, **fields: Any) -> None:
    """A run of another seed that loads this checkpoint, and trains for `steps`, has these values."""
    other = Run(tmp, seed=1, **fields).load(path).train(steps)
    assert_same(values, other.values())


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def inodes(folder: Path) -> set[int]:
    return {file.stat().st_ino for file in folder.rglob("*") if file.is_file()}


def blocks(folder: Path, seen: set[int]) -> int:
    """Bytes on the drive, each file once, however many names it has."""
    total = 0
    for file in folder.rglob("*"):
        status = file.lstat()
        if file.is_file() and status.st_ino not in seen:
            seen.add(status.st_ino)
            total += status.st_blocks * 512
    return total
