"""Every two of what a loop may do with activations, in one of the modes: the values are those of plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outsize
from tests.comparing import gradients
from tests.conftest import Workshop
from tests.small_models import Built

MODES = ("keep", "recompute", "selective", "offload", "auto")
WAYS = (
    *("micro_batches", "tiled", "autocast", "scaler", "checkpoint", "compiled"),
    *("evaluation", "retain_graph", "double backward", "exception"),
)
PAIRS = [
    (one, other, MODES[(WAYS.index(one) + WAYS.index(other)) % len(MODES)])
    for one, other in itertools.combinations(WAYS, 2)
]
"""The sum of two numbers: each way meets each mode."""


class Mlp(Built, up=(16, 32), down=(32, 16)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixer(Built, norm=lambda: nn.LayerNorm(16), scores=(16, 16), mlp=Mlp):
    """Positions look at each other, rows do not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + (self.scores(y) @ y.transpose(1, 2)).softmax(-1) @ y
        return x + self.mlp(x)


class Model(Built, layers=lambda: nn.ModuleList([Mixer() for _ in range(3)]), head=(16, 4), checkpoints=lambda: False):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            again = self.checkpoints and number == 1
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return self.head(x)


class Stopped(Exception):
    """Raised in the middle of a pass."""


def stop(*_: Any) -> None:
    raise Stopped


class Loop:
    """A loop that does what the `ways` say."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, ways: tuple[str, str], device: str) -> None:
        self.model, self.optimizer, self.ways, self.device = model, optimizer, ways, device
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled="scaler" in ways)
        model.checkpoints = "checkpoint" in ways

    def step(self, x: Tensor, y: Tensor) -> list[float]:
        """The loss, and the size of each gradient."""
        if "exception" in self.ways:
            self._interrupted(x, y)
        loss = self._loss(x, y)
        seen = []
        if "evaluation" in self.ways:
            with torch.no_grad():
                seen.append(self._loss(x + 1, y).item())
        scaled = self.scaler.scale(loss)
        if "retain_graph" in self.ways:
            scaled.backward(retain_graph=True)
        scaled.backward()
        self.scaler.unscale_(self.optimizer)
        sizes = [0.0 if grad is None else grad.norm().item() for grad in gradients(self.model).values()]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return [loss.item(), *seen, *sizes]

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        twice = "double backward" in self.ways and torch.is_grad_enabled()
        x = x.clone().requires_grad_(twice)
        with torch.autocast(self.device, torch.bfloat16) if "autocast" in self.ways else nullcontext():
            loss = (self.model(x).float() - y).square().mean()
        if twice:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        return loss

    def _interrupted(self, x: Tensor, y: Tensor) -> None:
        with pytest.raises(Stopped), self._stopping():
            self._loss(x, y)
        loss = self._loss(x, y)
        loss.register_hook(stop)
        with pytest.raises(Stopped):
            loss.backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        self.optimizer.zero_grad()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        hook = self.model.layers[2].register_forward_hook(stop)
        try:
            yield
        finally:
            hook.remove()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(0)
    values = [
        torch.randn(4, 6, 20, generator=generator, device="cpu").to(torch.get_default_device()) for _ in range(count)
    ]
    return [(each[..., :16], each[..., 16:]) for each in values]


@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it looks at
@pytest.mark.parametrize(("one", "other", "mode"), PAIRS)
def test_two_at_once_train_as_plain_torch_does(workshop: Workshop, one: str, other: str, mode: str) -> None:
    ways = (one, other)
    fields: dict[str, Any] = {
        "activations": mode,
        "disk": workshop.disk,
        "micro_batches": 1 + ("micro_batches" in ways),
    }
    if mode == "offload":
        fields["activations_tier"] = "disk"
    pair = workshop.pair(Model, sgd, "host", **fields)
    for layer in pair.model.layers if "tiled" in ways else ():  # type: ignore[union-attr]
        outsize.tiled(layer.mlp, tiles=4)  # type: ignore[arg-type]
    if "compiled" in ways:
        pair.model.layers[0].compile(backend="eager")  # type: ignore[index, union-attr]
    loops = [Loop(model, optimizer, ways, workshop.device) for model, optimizer in pair.both]
    rel, atol = (3e-2, 1e-2) if "autocast" in ways else (1e-5, 1e-5)
    for x, y in data(2):
        expected, found = (loop.step(x, y) for loop in loops)
        assert found == pytest.approx(expected, rel=rel, abs=1e-6)
    pair.check(atol)
    torch._dynamo.reset()


def test_each_way_meets_each_mode() -> None:
    assert {(way, mode) for *ways, mode in PAIRS for way in ways} == set(itertools.product(WAYS, MODES))
