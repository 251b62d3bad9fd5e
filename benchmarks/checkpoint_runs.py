"""A tiny run whose every bit is determined by its step number: what the trials of checkpoints train, save and load."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from outsize.checkpoint import writer
from outsize.checkpoint.background import Saving

WIDTH = 24
KEEP = 2

Places = Mapping[str, Any]
"""Keywords of `prepare` that say where the state rests."""

ON_DISK: Places = dict.fromkeys(("params", "grads", "states"), "disk")
MIXED: Places = {"params": "disk", "grads": "host", "states": "host"}
IN_MEMORY: Places = dict.fromkeys(("params", "grads", "states"), "device")
TIERS: Mapping[str, Places] = {"disk": ON_DISK, "mixed": MIXED}


class Block(nn.Module):
    """A residual block that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.drop(self.down(torch.tanh(self.up(x))))
        return x + added


class Net(nn.Module):
    """Two blocks, a norm with buffers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def link_and_copy_always() -> None:
    """Treat state of any size as a large one: files are linked, memory is copied and written behind the training."""
    writer.AT_ONCE_BYTES = -1


class TinyRun:
    """One run: the same seed and the same steps give the same bits, wherever its state rests."""

    def __init__(self, disk: Path, places: Places, seed: int = 0, **fields: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        chosen: dict[str, Any] = {
            "host_memory": "64MiB",
            "device": torch.get_default_device(),
            "disk": disk,
            "activations": "keep",
        }
        outsize.prepare(self.model, self.optimizer, **{**chosen, **places, **fields})
        self.steps = 0

    def backward(self) -> float:
        """The forward and backward pass of the step that is due; its loss."""
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(6, WIDTH, generator=generator)
        dtype = next(self.model.parameters()).dtype
        loss = (self.model(x.to(dtype)).float() - x[:, :4]).square().mean()
        loss.backward()
        return float(loss.item())

    def step(self) -> float:
        """One step of the user's loop; its loss."""
        loss = self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss

    def save(self, path: Path, keep: int | None = None, **extra: Any) -> Saving:
        return outsize.save(path, self.model, self.optimizer, {"steps": self.steps, **extra}, keep=keep)

    def load(self, path: Path) -> Any:
        extra = outsize.load(path, self.model, self.optimizer)
        self.steps = extra["steps"]
        return extra

    def digest(self, rng: bool = True) -> str:
        """A hash of everything that a later step depends on; without the random numbers, of what a step changes."""
        found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes() if rng else b"")
        with outsize.gathered(self.model, grads=rng):
            for name, param in self.model.named_parameters():
                if rng and param.grad is not None:
                    _add(found, f"gradient of {name}", param.grad)
            for name, value in (*self.model.named_parameters(), *(self.model.named_buffers() if rng else ())):
                _add(found, name, value)
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                _add(
                    found, f"{name}/{key}", torch.as_tensor(value).clone()
                )  # plain: an entry's tensors watch each call
        for group in self.optimizer.param_groups:
            found.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
        return found.hexdigest()

    def close(self) -> None:
        """Let go of everything, files included."""
        del self.model, self.optimizer
        gc.collect()


def _add(found: Any, name: str, value: torch.Tensor) -> None:
    found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
    found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
