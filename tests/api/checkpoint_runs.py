"""The run that the tests of checkpoints save and load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import PeakRss, rss_bytes
from outsize import load, save
from outsize.checkpoint.manifest import sealed
from tests.comparing import weights
from tests.conftest import random_state

KINDS = ("device", "host", "disk")
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1),
    "tensor_lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False),
}


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.2) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Tied embedding and head, dropout, buffers of both sorts, an empty and a frozen parameter, two blocks."""

    def __init__(self, width: int = 40, vocabulary: int = 130) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.scratch += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * (1 + self.frozen.mean())


class Small(nn.Module):
    """Two layers, a tied head, buffers of several kinds; the first weight is larger than a slab's piece."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(1031, 1033)
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_mean.fill_(seed)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, tier: str, tmp: Path, **fields: Any) -> None:
    """On one tier but for what `fields` say, in a folder `disk`."""
    (tmp / "disk").mkdir(exist_ok=True)
    places = {"params": tier, "grads": tier, "states": tier, "disk": tmp / "disk"}
    others = {"host_memory": "64MiB", "device": torch.get_default_device()}
    outsize.prepare(model, optimizer, **{**places, **others, **fields})


class Run:
    """A training run: model, optimizer, scheduler."""

    def __init__(self, tmp: Path, kinds: tuple[str, str, str], optimizer: Any = None, seed: int = 0, **fields: Any):
        torch.manual_seed(seed)
        self.model = Net()
        make = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=1e-2))
        decayed = [param for param in self.model.parameters() if param.ndim > 1]
        others = [param for param in self.model.parameters() if param.ndim <= 1]
        self.optimizer = make([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        places = dict(zip(("params", "grads", "states"), kinds, strict=True))
        prepare(self.model, self.optimizer, "disk", tmp, **{**places, **fields})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses: list[float] = []

    def backward(self) -> None:
        tokens = torch.randint(0, 130, (9,))
        loss = nn.functional.cross_entropy(self.model(tokens).float(), tokens.roll(1))
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.backward()
            self.step()
        return self

    def save(self, path: Path) -> Run:
        save(path, self.model, self.optimizer, {"scheduler": self.scheduler.state_dict(), "losses": self.losses})
        return self

    def load(self, path: Path) -> Run:
        extra = load(path, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.losses = extra["losses"]
        return self

    def result(self) -> dict[str, torch.Tensor]:
        """Everything that a later step depends on."""
        found: dict[str, torch.Tensor] = {"losses": torch.tensor(self.losses), "rng": random_state()}
        return found | everything(self.model, self.optimizer)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Copies of weights, buffers and optimizer state, whether the model is prepared or not."""
    found = {name: value.detach().clone() for name, value in model.named_buffers()} | weights(model)
    if optimizer is not None:
        for name, param in model.named_parameters():
            if param in optimizer.state:
                entries = optimizer.state[param].items()
                found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in entries}
    return found


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder."""
    from safetensors.torch import load_file

    return {
        name: value.to(torch.get_default_device())
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def peak_of(call: Any) -> int:
    """Bytes that the process's memory grew at its highest while `call` ran, without the pages of code that were used
    again: a system may take those back from a process that has not used them for a while."""
    with PeakRss() as memory:
        before, mapped = rss_bytes(), _mapped_bytes()
        call()
        stayed = _mapped_bytes() - mapped
    return memory.peak - before - max(stayed, 0)


def _mapped_bytes() -> int:
    """Of files, in memory."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def edit(path: Path, change: Callable[[Any], object]) -> Any:
    """Change the manifest of a checkpoint, under a checksum of its own."""
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    (path / "manifest.json").write_text(sealed(json.dumps(content)))
    return content
