"""update="backward": the same bits as the update at the fetch, less traffic, and a promise that is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import AT_REST_TIERS, Stack, Workshop, batches, squared_error, train, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_every_tier_and_schedule_gives_the_same_bits(workshop: Workshop, activations: str, dtype: torch.dtype) -> None:
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(6)]
    found = []
    for update in ("fetch", "backward"):
        for tier in ("device", "host", "disk", "squeezed"):
            torch.manual_seed(0)
            model = Stack()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            workshop.prepare(model, optimizer, tier, update=update, activations=activations, compute_dtype=dtype)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            found.append((train(model, optimizer, data, scheduler=scheduler).losses, weights(model)))
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(values[name], value) for name, value in found[0][1].items())


def test_it_trains_as_torch_does(workshop: Workshop, tier: str) -> None:
    workshop.pair(tier=tier, update="backward").train(batches(6))


def test_tied_and_unused_and_frozen_parameters(workshop: Workshop, tier: str) -> None:
    class Odd(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(16, 16)
            self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
            self.blocks[1].norm.weight.requires_grad_(False)  # type: ignore[union-attr]

    pair = workshop.pair(
        Odd, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), tier, update="backward"
    )
    pair.train(batches(5))


@pytest.mark.parametrize(("dtype", "grads"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
@pytest.mark.parametrize("update", ["fetch", "backward"])
def test_a_step_moves_twelve_bytes_a_parameter_and_the_gradient_at_most(
    workshop: Workshop, update: str, dtype: torch.dtype, grads: int
) -> None:
    """Exact state on disk, 12 B read and 12 B written; in the backward the gradients move nowhere."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    workshop.prepare(model, optimizer, "disk", update=update, units=nn.Linear, compute_dtype=dtype)
    data = [(torch.randn(4, 256).to(dtype), torch.randn(4, 256).to(dtype))]
    train(model, optimizer, data)
    workshop.settle(model)
    before = outsize.memory(model)
    train(model, optimizer, data)
    workshop.settle(model)
    after = outsize.memory(model)
    each = (12 if update == "backward" else 12 + grads) * sum(param.numel() for param in model.parameters())
    assert after.bytes_written - before.bytes_written == each
    assert after.bytes_read - before.bytes_read <= each


BROKEN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "clipping": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clipping by value": lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "a scaler": lambda _, optimizer: torch.amp.GradScaler("cpu").unscale_(optimizer),
    "accumulation": lambda model, _: squared_error(model, batches(1)[0]).backward(),
    "another learning rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=1.0),
    "another gradient": lambda model, _: setattr(model.head.weight, "grad", torch.ones(4, 16)),
    "zero_grad before step": lambda model, _: (model.zero_grad(), squared_error(model, batches(1)[0]).backward()),
}


@pytest.mark.parametrize("tier", AT_REST_TIERS)
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_promise_is_an_error(workshop: Workshop, tier: str, how: str) -> None:
    pair = workshop.pair(tier=tier, update="backward")
    scaler = torch.amp.GradScaler("cpu") if how == "a scaler" else None
    loss = squared_error(pair.model, batches(1)[0])
    (loss if scaler is None else scaler.scale(loss)).backward()

    def go_on() -> None:
        if scaler is not None:
            scaler.unscale_(pair.optimizer)
        else:
            BROKEN[how](pair.model, pair.optimizer)
        pair.optimizer.step()

    with pytest.raises(RuntimeError, match=r"update='backward'"):
        go_on()


def test_saving_between_backward_and_step_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", update="backward")
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"saved before optimizer.step\(\)"):
        outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    pair.optimizer.step()
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    again = workshop.pair(tier="host", update="backward")
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
    pair.optimizer.zero_grad()
    expected = train(pair.model, pair.optimizer, batches(3)).losses
    assert train(again.model, again.optimizer, batches(3)).losses == expected


def test_a_gradient_that_is_not_finite_is_an_error_before_its_unit_is_touched(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", update="backward")
    before = weights(pair.model)
    x, y = batches(1)[0]
    x[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        squared_error(pair.model, (x, y)).backward()
    assert all(torch.equal(value, before[name]) for name, value in weights(pair.model).items())


def test_the_field_is_checked(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match="update is 'soon'; it must be one of 'fetch', 'backward'"):
        outsize.Config(update="soon")
    with pytest.raises(ValueError, match="choose one"):
        outsize.Config(update="backward", delayed_update=True)


def test_the_update_has_run_before_step_is_called(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", update="backward")
    before = weights(pair.model)
    squared_error(pair.model, batches(1)[0]).backward()
    after = weights(pair.model)
    assert not any(torch.equal(value, before[name]) for name, value in after.items())
    pair.optimizer.step()
    assert all(torch.equal(value, after[name]) for name, value in weights(pair.model).items())


def test_state_that_fits_in_memory_moves_in_no_step(workshop: Workshop) -> None:
    """Placement by budgets keeps the states of some units in memory; only the others' go through the drive."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outsize.prepare(
        model, optimizer, host_memory="7MiB", disk=workshop.disk, device="cpu", grads="device", units=nn.Linear
    )
    workshop.watch(model)
    units = outsize.plan(model).units
    assert {unit.tiers.states for unit in units} == {"device", "disk"}
    on_disk = sum(unit.size.states for unit in units if unit.tiers.states == "disk")
    on_disk += sum(unit.size.params for unit in units if unit.tiers.params == "disk")
    data = [(torch.randn(4, 256), torch.randn(4, 256))]
    train(model, optimizer, data)
    workshop.settle(model)
    for _ in range(3):
        before = outsize.memory(model).bytes_written
        train(model, optimizer, data)
        workshop.settle(model)
        assert outsize.memory(model).bytes_written - before == on_disk
