"""update="backward": the same bits as the update at the fetch, less traffic, and a promise that is checked."""

from __future__ import annotations

import copy
import errno
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import outsize
from outsize.run.resting_place import RestingPlace
from tests.comparing import assert_same, assert_same_runs, assert_same_weights, weights
from tests.conftest import AT_REST_TIERS, Workshop, batches, prepared, squared_error, take_step, train
from tests.small_models import Stack, linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_every_tier_and_schedule_gives_the_same_bits(workshop: Workshop, activations: str, dtype: torch.dtype) -> None:
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(3)]
    found = []
    for update in ("fetch", "backward"):
        for tier in workshop.exact_tiers:
            model, optimizer = workshop.made(tier=tier, update=update, activations=activations, compute_dtype=dtype)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            found.append((train(model, optimizer, data, scheduler=scheduler).losses, weights(model)))
    assert_same_runs(found)


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
@pytest.mark.parametrize("update", ["fetch", "backward", "delayed"])
def test_a_step_moves_twelve_bytes_a_parameter_and_the_gradient_at_most(
    workshop: Workshop, update: str, dtype: torch.dtype, grads: int
) -> None:
    """Exact state on disk, 12 B read and 12 B written; in the backward the gradients move nowhere. Those of a delayed
    update are those of the step before."""
    how: dict[str, object] = {"delayed_update": 1} if update == "delayed" else {"update": update}
    model, optimizer = workshop.made(lambda: linears(256, 4, bias=False), units=nn.Linear, compute_dtype=dtype, **how)
    data = [(torch.randn(4, 256).to(dtype), torch.randn(4, 256).to(dtype))]
    train(model, optimizer, data * 2)
    workshop.settle(model)
    before = outsize.memory(model)
    train(model, optimizer, data)
    workshop.settle(model)
    after = outsize.memory(model)
    each = (12 if update == "backward" else 12 + grads) * sum(param.numel() for param in model.parameters())
    assert after.bytes_written - before.bytes_written == each
    assert sum(unit.written_bytes for unit in outsize.plan(model).units) == each
    assert after.bytes_read - before.bytes_read <= each


def test_weights_stay_for_their_update_where_room_is_short(workshop: Workshop) -> None:
    """But those of the first layer, which its backward does not need: its gradient is written and read."""
    square = partial(linears, 256, 4, bias=False)
    model, optimizer = workshop.made(square, tier="squeezed", update="backward", units=nn.Linear)
    data = [(torch.randn(4, 256), torch.randn(4, 256))]
    train(model, optimizer, data)
    for _ in range(3):
        workshop.settle(model)
        before = outsize.memory(model).bytes_written
        train(model, optimizer, data)
        workshop.settle(model)
        assert outsize.memory(model).bytes_written - before <= (4 * 12 + 4) * 256 * 256


BROKEN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "clipping": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clipping by value": lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "a scaler": lambda _, optimizer: torch.amp.GradScaler("cpu").unscale_(optimizer),
    "accumulation": lambda model, _: squared_error(model, batches(1)[0]).backward(),
    "another learning rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=1.0),
    "another gradient": lambda model, _: setattr(model.head.weight, "grad", torch.ones(4, 16)),
    "zero_grad(set_to_none=False)": lambda model, _: model.zero_grad(set_to_none=False),
    "zero_grad": lambda model, _: model.zero_grad(),
    "other weights": lambda model, _: model.load_state_dict({"head.weight": torch.ones(4, 16)}, strict=False),
    "two steps": lambda _, optimizer: optimizer.step(),
    "zero_grad and backward before step": lambda model, _: (
        model.zero_grad(),
        squared_error(model, batches(1)[0]).backward(),
    ),
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


@pytest.mark.parametrize("how", ["clear", "pop", "set", "replace"])
def test_a_state_that_the_backward_has_used_stays_until_step(workshop: Workshop, how: str) -> None:
    pair = workshop.pair(update="backward")
    data = batches(4)
    pair.train(data[:2])
    squared_error(pair.model, data[2]).backward()
    state, first = pair.optimizer.state, next(pair.model.parameters())
    with pytest.raises(RuntimeError, match=r"the optimizer's state of 'blocks\..* between backward\(\) and step\(\)"):
        if how == "clear":
            state.clear()
        elif how == "pop":
            state.pop(first)
        elif how == "set":
            state[first] = {**state[first]}
        else:
            pair.optimizer.state = defaultdict(dict)
            pair.optimizer.step()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    take_step(squared_error(pair.plain, data[2]), pair.plain_optimizer)
    pair.check()
    for _, optimizer in pair.both:
        optimizer.state.clear()
    pair.train(data[3:])


def test_saving_between_backward_and_step_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", update="backward")
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"saved before optimizer.step\(\)"):
        outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    pair.optimizer.step()
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    again = workshop.pair(tier="host", update="backward")
    squared_error(again.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"cannot be written to between backward\(\) and step\(\)"):
        outsize.load(workshop.disk.parent / "ckpt", again.model)
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
    assert_same(weights(pair.model), before)


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
    assert_same(weights(pair.model), after)


def test_state_that_fits_in_memory_moves_in_no_step(workshop: Workshop) -> None:
    """Placement by budgets keeps the states of some units in memory; only the others' go through the drive."""
    model = linears(256, 8, bias=False)
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


def test_gradients_of_a_checkpoint_wait_for_step(workshop: Workshop, tier: str) -> None:
    first = workshop.pair(tier="disk")
    squared_error(first.model, batches(1)[0]).backward()
    outsize.save(workshop.disk.parent / "ckpt", first.model, first.optimizer)
    again = workshop.pair(tier=tier, update="backward")
    squared_error(again.model, batches(1)[0]).backward()  # and what came before the load is forgotten
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
    assert_same(weights(again.model), weights(first.model))
    for pair in (first, again):
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    assert_same(weights(again.model), weights(first.model))
    expected = train(first.model, first.optimizer, batches(2)).losses
    assert train(again.model, again.optimizer, batches(2)).losses == expected


def test_gradients_from_before_prepare_wait_for_step(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for each in (plain, model):
        squared_error(each, batches(1)[0]).backward()
    workshop.prepare(model, optimizers[1], tier, update="backward")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    train(plain, optimizers[0], batches(2))
    train(model, optimizers[1], batches(2))
    assert_same_weights(model, plain)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_frozen_layers_inside_trained_units(workshop: Workshop, tier: str, activations: str) -> None:
    def partly_frozen() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            block.norm.requires_grad_(False)  # type: ignore[union-attr]
            block.up.bias.requires_grad_(False)  # type: ignore[union-attr]
        return model

    workshop.pair(partly_frozen, tier=tier, update="backward", activations=activations).train(batches(4))


def test_gradients_that_the_optimizer_does_not_know_stay(workshop: Workshop) -> None:
    def weights_only(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for param in model.parameters() if param.ndim == 2], lr=0.1)

    pair = workshop.pair(optimizer=weights_only, tier="squeezed", update="backward")
    for model, optimizer in pair.both:
        squared_error(model, batches(1)[0]).backward()
        optimizer.step()
    with torch.no_grad():
        for _ in range(3):
            pair.model(batches(1)[0][0])
    bias = pair.model.blocks[1].up.bias  # type: ignore[union-attr]
    with outsize.gathered(bias, grads=True):  # type: ignore[arg-type]
        torch.testing.assert_close(bias.grad, pair.plain.blocks[1].up.bias.grad)  # type: ignore[union-attr]


def test_after_a_gradient_that_is_not_finite_a_checkpoint_can_be_loaded(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", update="backward")
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    handle = pair.model.blocks[0].up.weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match=r"updated already \(\d of 4\). Load the last checkpoint"):
        squared_error(pair.model, batches(1)[0]).backward()
    handle.remove()
    outsize.load(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    pair.train(batches(3))


@pytest.mark.parametrize("updated", [False, True])
def test_a_batch_whose_backward_raises_is_skipped_or_a_checkpoint_can_be_loaded(
    workshop: Workshop, tier: str, updated: bool
) -> None:
    """Where no unit was updated, a loop that skips the batch goes on as torch does."""
    pair = workshop.pair(tier=tier, update="backward")
    data, saved = batches(4), workshop.disk.parent / "ckpt"
    pair.train(data[:2])
    outsize.save(saved, pair.model, pair.optimizer)
    weight = pair.model.blocks[0].up.weight if updated else pair.model.head.weight
    hook = weight.register_hook(Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        squared_error(pair.model, data[2]).backward()
    hook.remove()
    pair.optimizer.zero_grad()
    if updated and tier != "device":
        with pytest.raises(RuntimeError, match=r"a second backward .* If a backward has raised, load the last check"):
            squared_error(pair.model, data[2]).backward()
        pair.optimizer.zero_grad()
        outsize.load(saved, pair.model, pair.optimizer)
    pair.train(data[2:])


def test_a_unit_whose_gradients_find_no_room_is_not_in_use(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = workshop.pair(update="backward")
    data = batches(4)
    pair.train(data[:2])
    with monkeypatch.context() as patch:
        patch.setattr(RestingPlace, "dispatch", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            squared_error(pair.model, data[2]).backward()
    assert prepared(pair.model).engine.streamer.room.last is None
    pair.optimizer.zero_grad()
    pair.train(data[3:])


@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
def test_an_option_that_needs_an_array_nobody_made_is_refused_before_anything_changes(
    workshop: Workshop, kind: str
) -> None:
    model = Stack(depth=2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    workshop.prepare(model, optimizer, "disk", update="backward")
    before = weights(model)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match="momentum_buffer"):
        squared_error(model, batches(1)[0]).backward()
    assert_same(weights(model), before)


def test_gradients_that_were_swapped_between_parameters_are_refused(workshop: Workshop) -> None:
    pair = workshop.pair(update="backward")
    one, other = pair.model.blocks[0].up.weight, pair.model.blocks[1].up.weight
    squared_error(pair.model, batches(1)[0]).backward()
    one.grad, other.grad = other.grad, one.grad
    with pytest.raises(
        RuntimeError, match=r"'blocks.1.up.weight' was replaced or removed between backward\(\) and step"
    ):
        pair.optimizer.step()


def test_a_second_backward_of_one_graph_is_refused_with_the_reason(workshop: Workshop) -> None:
    pair = workshop.pair(update="backward")
    loss = squared_error(pair.model, batches(1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the backward before with update='backward', has updated"):
        loss.backward()
