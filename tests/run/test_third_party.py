"""Optimizers of third parties: they train as in torch, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.comparing import weights
from tests.conftest import Workshop, batches, squared_error, take_step, train
from tests.small_models import Built


class Plain(torch.optim.Optimizer):
    """Descends by what `direction` makes of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group, param in self.stepped():
            param.sub_(self.direction(group, param, param.grad) * group["lr"])

    def stepped(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Clipping(Plain):
    """Clips each gradient to a norm that those of a small probe do not reach."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * (10 / (grad.norm() + 1e-6)).clamp(max=1)


class Stable(Plain):
    """AdamW with update clipping (Wortsman et al. 2023): looks at all elements once some gradients have grown."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["v"] = torch.zeros_like(param)
        state["v"].mul_(0.9).addcmul_(grad, grad, value=0.1)
        rms = grad.square().div(state["v"].clamp(min=1e-12)).mean().sqrt()
        return grad / (state["v"].sqrt() + 1e-6) / (rms / 4).clamp(min=1)


class SmallWeights(Plain):
    """A trust ratio that is capped, as in LARS, where weights are large."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * (param.norm() / 20).clamp(min=1)


class ByAttribute(Plain):
    """A learning rate for each parameter, hung on it."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * param.lr_scale


class Masked(Plain):
    """Keeps masks, signs and a narrow average for each element."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["seen"] = torch.zeros_like(param, dtype=torch.bool)
            state["signs"] = torch.zeros_like(param, dtype=torch.int8)
            state["average"] = torch.zeros_like(param, dtype=torch.bfloat16)
        state["seen"] |= grad > 0
        state["signs"] += grad.sign().to(torch.int8)
        state["average"].lerp_(grad.bfloat16(), 0.5)
        return grad * state["seen"] + state["signs"].float() * 1e-3 + state["average"].float()


class Failing(Plain):
    """Raises in a later step, at a parameter in the middle."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 5 and param.numel() == 640 and not torch.equal(grad, param):
            raise ArithmeticError("no way on")
        return grad


class Tall(Built, layer=lambda: nn.Linear(1500, 1400, bias=False)):
    """One matrix of more elements than a piece has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("kind", [Clipping, Stable, SmallWeights])
def test_a_threshold_that_small_gradients_do_not_reach_is_applied_to_whole_parameters(
    workshop: Workshop, kind: type[Plain]
) -> None:
    pair = workshop.pair(Tall, lambda model: kind(model.parameters(), lr=1e-3), "host", host_memory="512MiB")
    for step in range(3):
        for model, optimizer in pair.both:
            take_step(model(torch.ones(4, 1500) * (step + 1)).square().sum() * 0.1, optimizer)
    pair.check()


def test_what_the_user_hangs_on_parameters_is_seen_as_it_is_at_the_step(workshop: Workshop, tier: str) -> None:
    def scaled(model: nn.Module) -> torch.optim.Optimizer:
        for index, param in enumerate(model.parameters()):
            param.lr_scale = 0.1 * (index % 7)  # type: ignore[attr-defined]
        return ByAttribute(model.parameters())

    pair = workshop.pair(optimizer=scaled, tier=tier)
    pair.train(batches(2))
    for model, optimizer in pair.both:
        for param in model.parameters():
            param.lr_scale = torch.tensor(0.5)  # type: ignore[attr-defined]
        squared_error(model, batches(1)[0]).backward()
        optimizer.step()
        for param in model.parameters():
            param.lr_scale.fill_(100.0)  # type: ignore[attr-defined, operator]
        optimizer.zero_grad()
    pair.check()


def test_masks_and_narrow_states_keep_their_dtype_within_the_step(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=lambda model: Masked(model.parameters(), lr=1e-2), tier=tier)
    pair.train(batches(4))
    outsize.release(pair.model)  # the state has its dtypes again
    pair.train(batches(2))


def test_an_option_may_be_nan(workshop: Workshop) -> None:
    def unused(model: nn.Module) -> torch.optim.Optimizer:
        return Plain(model.parameters(), best=float("nan"))

    pair = workshop.pair(optimizer=unused, tier="disk")
    pair.train(batches(2))
    for _, optimizer in pair.both:
        optimizer.param_groups[0]["worst"] = torch.tensor(float("nan"))
    pair.train(batches(2))


def test_a_step_that_raises_on_the_way_stops_the_run_on_every_tier(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=lambda model: Failing(model.parameters()), tier=tier)
    pair.train(batches(4))
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    with pytest.raises(ArithmeticError, match="no way on"):
        train(pair.model, pair.optimizer, batches(1))
        weights(pair.model)
    with pytest.raises(RuntimeError, match="training stopped after an error .*no way on.* load the last checkpoint"):
        outsize.save(workshop.disk.parent / "half", pair.model, pair.optimizer)
    with pytest.raises(RuntimeError, match="training stopped after an error"):
        train(pair.model, pair.optimizer, batches(1))
    again = workshop.pair(optimizer=lambda model: Failing(model.parameters()), tier=tier)
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
