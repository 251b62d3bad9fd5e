"""Any order of the loop's calls gives what plain torch gives, on every tier: an owed update owns its gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from tests.small_models import Built

TIERS = ("device", "host", "disk")


class Wide(
    Built,
    embed=lambda: nn.Embedding(7, 12),
    branches=lambda: nn.ModuleList(nn.Linear(12, 12) for _ in range(11)),
    head=(12, 3),
):
    """More units than are ever fetched ahead, some of whose backwards need no weight."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(sum(torch.tanh(branch(x)) for branch in self.branches))


class Loop:
    """A model, its optimizer and the calls that a user makes, each of which plain torch and outsize both do."""

    def __init__(self, prepare: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        torch.manual_seed(0)
        self.model = Wide()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.kept: list[torch.Tensor] = []
        self.seen: list[float] = []
        self.batch = 0
        prepare(self.model, self.optimizer)

    def loss(self) -> torch.Tensor:
        self.batch += 1
        tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(self.batch))
        return self.model(tokens).square().mean()

    @property
    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.model.parameters())

    def backward(self) -> None:
        self.loss().backward()

    def two_graphs(self) -> None:
        first, second = self.loss(), self.loss()
        second.backward()
        first.backward()

    def clip_norm(self) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)))

    def clip_value(self) -> None:
        if self.has_gradients:  # torch's own function wants some
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def scale(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def norms(self) -> None:
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        self.seen += [float(torch.nn.utils.get_total_norm(grads, order)) for order in (1.0, 2.0, float("inf"))]

    def step(self) -> None:
        if self.has_gradients:
            self.optimizer.step()

    def to_none(self) -> None:
        self.optimizer.zero_grad()

    def to_zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(float(self.loss()))

    def raise_in_forward(self) -> None:
        with pytest.raises(IndexError):
            self.model(torch.tensor([99]))


CALLS = tuple(
    name for name, each in vars(Loop).items() if callable(each) and not name.startswith("_") and name != "loss"
)


@pytest.mark.parametrize(("seed", "tier"), [(seed, TIERS[seed % len(TIERS)]) for seed in range(16)])
def test_any_order_of_calls_is_plain_torchs(seed: int, tier: str, tmp_path: Path) -> None:
    chosen = random.Random(seed).choices(CALLS, k=40)
    plain = Loop(lambda model, optimizer: None)
    ours = Loop(
        lambda model, optimizer: outsize.prepare(
            model, optimizer, disk=tmp_path, host_memory="4MiB", params=tier, grads=tier, states=tier
        )
    )
    for name in chosen:
        getattr(plain, name)()
        getattr(ours, name)()
    torch.testing.assert_close(ours.seen, plain.seen, rtol=1e-4, atol=1e-6)
    with outsize.gathered(ours.model):
        for (name, mine), theirs in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(
                mine.detach().clone(), theirs.detach(), rtol=0, atol=2e-5, msg=f"{name}: {chosen}"
            )
