"""ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2), with the schedule done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same_weights, weights
from tests.conftest import Pair, Workshop, batches, squared_error, train
from tests.small_models import Built, Stack

WARMUP = 3


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    held: dict[str, Tensor] | None = None,
    steps: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """`WARMUP` exact steps; then the gradients of step N are held, and step N + 1 applies them."""
    losses = []
    held = held or {}
    for step, batch in enumerate(data, steps + 1):
        loss = squared_error(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step > WARMUP:
            fresh = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
            for name, param in model.named_parameters():
                param.grad = held.get(name)
            held = fresh
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, held


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def test_it_follows_the_published_schedule(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, delayed_update=WARMUP)
    expected, _ = train_by_hand(pair.plain, pair.plain_optimizer, batches(9), decaying(pair.plain_optimizer))
    trace = train(pair.model, pair.optimizer, batches(9), clip=0.1, scheduler=decaying(pair.optimizer))
    assert trace.losses == pytest.approx(expected, rel=1e-6)
    pair.check()


def test_every_tier_gives_the_same_bits(workshop: Workshop) -> None:
    found = []
    for tier in ("device", "host", "disk", "squeezed"):
        model, optimizer = workshop.made(tier=tier, delayed_update=WARMUP, compute_dtype=torch.bfloat16)
        trace = train(model, optimizer, [(x.bfloat16(), y.bfloat16()) for x, y in batches(8)], clip=0.1)
        found.append((trace.losses, weights(model)))
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(values[name], value) for name, value in found[0][1].items())


def test_the_step_that_begins_the_delay_changes_nothing(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, delayed_update=1)
    data = batches(3)
    train(pair.model, pair.optimizer, data[:1])
    before = weights(pair.model)
    train(pair.model, pair.optimizer, data[1:2])
    assert all(torch.equal(value, before[name]) for name, value in weights(pair.model).items())
    train(pair.model, pair.optimizer, data[2:])
    assert not torch.equal(weights(pair.model)["head.weight"], before["head.weight"])


def test_true_means_forty_exact_steps(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=1), tier="host", delayed_update=True)
    pair.train(batches(40))
    before = weights(pair.model)
    train(pair.model, pair.optimizer, batches(1))
    assert all(torch.equal(value, before[name]) for name, value in weights(pair.model).items())


def test_gradients_accumulate_within_a_step(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, delayed_update=1)
    held: dict[str, Tensor] = {}
    data = batches(8)
    for step in range(4):
        for model in (pair.plain, pair.model):
            for batch in data[2 * step : 2 * step + 2]:
                squared_error(model, batch).backward()
        if step >= 1:
            fresh = {n: p.grad.clone() for n, p in pair.plain.named_parameters() if p.grad is not None}
            for name, param in pair.plain.named_parameters():
                param.grad = held.get(name)
            held = fresh
        for _, optimizer in pair.both:
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_without_zero_grad_later_gradients_add_to_those_that_are_held(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, delayed_update=1)
    data = batches(4)
    total: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for step, batch in enumerate(data):
        for model in (pair.plain, pair.model):
            squared_error(model, batch).backward()
        for name, param in pair.plain.named_parameters():
            assert param.grad is not None
            total[name] = total.get(name, torch.zeros_like(param)) + param.grad
            param.grad = held.get(name) if step >= 1 else total[name].clone()
        held = {name: value.clone() for name, value in total.items()} if step >= 1 else {}
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        pair.optimizer.step()
    pair.check()


def saved_in_mid_delay(workshop: Workshop, tier: str) -> Pair:
    pair = workshop.pair(tier=tier, delayed_update=WARMUP)
    train(pair.model, pair.optimizer, batches(6), clip=0.1)
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    return pair


def test_a_checkpoint_holds_the_gradients_that_are_held_back(workshop: Workshop, tier: str) -> None:
    pair = saved_in_mid_delay(workshop, tier)
    again = workshop.pair(tier="disk" if tier == "host" else "host", delayed_update=WARMUP)
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
    assert_same_weights(again.model, pair.model, atol=0.0)
    expected = train(pair.model, pair.optimizer, batches(4), clip=0.1)
    assert train(again.model, again.optimizer, batches(4), clip=0.1).losses == expected.losses
    assert_same_weights(again.model, pair.model, atol=0.0)


def test_a_run_without_the_delay_applies_what_was_held_back_with_its_first_step(workshop: Workshop) -> None:
    saved_in_mid_delay(workshop, "disk")
    again = workshop.pair(tier="disk")
    with pytest.raises(ValueError, match="holds gradients of a delayed update.*delayed_update=True"):
        outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)


def test_a_parameter_that_a_step_does_not_touch_keeps_its_gradient(workshop: Workshop, tier: str) -> None:
    """Without zero_grad, what one step leaves is there in the next, whichever parameters that one uses."""

    class Branches(
        Built, both=lambda: nn.ModuleDict({"left": nn.Linear(16, 4), "right": nn.Linear(16, 4)}), step=lambda: 0
    ):
        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.both["left"](x) + (self.both["right"](x) if self.step < 3 else 0)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    pair = workshop.pair(Branches, sgd, tier, delayed_update=1, units="both")
    grads: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for step, batch in enumerate(batches(6)):
        squared_error(pair.model, batch).backward()
        pair.optimizer.step()
        squared_error(pair.plain, batch).backward()
        for name, param in pair.plain.named_parameters():
            if param.grad is not None:
                grads[name] = grads.get(name, torch.zeros_like(param)) + param.grad
            param.grad = (held.get(name) if step else grads[name].clone()) if name in grads else None
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        held = {name: value.clone() for name, value in grads.items()} if step else {}
        pair.check(atol=1e-6)
