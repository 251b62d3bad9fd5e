"""`gathered`: full values of parameters (and gradients) for a while, written back where they were modified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from outsize.api.assemble import Prepared, prepared_of
from outsize.api.ranks import check_same
from outsize.move.generations import crc32c
from outsize.move.shard import UnitShard
from outsize.move.store import MASTER
from outsize.run.grads import RestingGrad
from outsize.run.owner import outside_inference
from outsize.run.parameters import grad_of, set_grad
from outsize.run.unit import Unit
from outsize.run.wrappers import known

Target = nn.Module | torch.Tensor | Iterable["nn.Module | torch.Tensor"]


@contextmanager
def gathered(target: Target, *, modify: bool = False, grads: bool = False) -> Iterator[None]:
    """Hold the full values of parameters in memory inside the block.

    Args:
        target: a module (all its parameters), a parameter, or an iterable of these. Nesting is fine.
        modify: in-place changes (`param.copy_(...)`, `nn.init.*`) are allowed and stored on leaving, on every tier.
        grads: `param.grad` shows the gradient's values ([param.shape], the parameter's dtype) instead of the gradient
            at rest; with `modify` changes of it are stored too, without it they are refused on leaving
            (`RuntimeError`), except on the device where nothing is at rest.

    With several ranks that have parts of the parameters (stages 1 to 3) every rank enters the block; `grads` and
    `modify` need all of them at any stage, and changes that differ are a `ValueError` on all, which ends the run. A
    pending update of the parameters runs first, so the values are those after the last `optimizer.step()`. Memory: the
    units of the target, above the budget if need be. Raises `ValueError` for parameters of a model that is not
    prepared, and `RuntimeError` with `modify` between a backward that updates (`update="backward"`) and its step.

    >>> with outsize.gathered(model):
    ...     norm = model.head.weight.norm().item()
    >>> with outsize.gathered(model.head.bias, modify=True), torch.no_grad():
    ...     bias = model.head.bias.zero_()
    """
    params = list(_parameters(target))
    prepared = _common(params)
    if prepared is None:
        yield
        return
    engine = prepared.engine
    units = list(dict.fromkeys(engine.parameters.unit_of(param)[0] for param in params))
    if modify and prepared.stepper is not None:
        prepared.stepper.expect_stepped(params)
    with engine.hold(units, modify):
        before = {unit: _exact_before(unit) for unit in units} if modify else {}
        with outside_inference():
            shown = _show_gradients(prepared, params) if grads else {}
        ended = False
        try:
            yield
            ended = True
        finally:
            written = [
                each for each, (_, value, first) in shown.items() if each.grad is value and value._version != first
            ]
            for param, (resting, value, _) in shown.items():
                _hide_gradient(prepared, param, resting, value, modify)
            try:
                if ended:
                    _check_alike(prepared, params if modify else [])
                for unit, values in before.items():
                    _store(unit, values)
            except (OSError, ValueError) as error:
                engine.streamer.live.stop(error)
                raise
        if written and not modify:
            raise RuntimeError(
                f"the gradient of {engine.parameters.name_of(written[0])!r} was written to inside gathered(..., "
                f"grads=True), and the change is lost: pass modify=True too"
            )


def _check_alike(prepared: Prepared, params: Iterable[torch.Tensor]) -> None:
    """Raise `ValueError` on every rank unless all have made the same changes."""
    if prepared.ranks is not None:
        places = (prepared.engine.parameters.unit_of(param) for param in params)
        sums = {slot.name: f"{crc32c(unit.shard.param(slot.name)):08x}" for unit, slot in places}
        what = "what they wrote inside gathered(..., modify=True), by its checksum"
        remedy = "make the same change on every rank (torch.distributed.broadcast it inside the block)"
        if sums:
            check_same(prepared.ranks.alike(), what, sums, "gathered", remedy)


def _parameters(target: Target) -> Iterator[torch.Tensor]:
    if isinstance(target, nn.Module):
        yield from known(target.parameters())
    elif isinstance(target, torch.Tensor):
        yield from known([target])
    elif isinstance(target, Iterable):
        for each in target:
            yield from _parameters(each)
    else:
        raise TypeError(f"gathered takes a module, a parameter or a list of them, not {type(target).__name__}")


def _common(params: list[torch.Tensor]) -> Prepared | None:
    """The prepared model that all parameters belong to; None if there are no parameters."""
    found: Prepared | None = None
    for param in params:
        prepared = prepared_of(param)
        if prepared is None:
            raise ValueError(
                f"a tensor of shape {tuple(param.shape)} is not a parameter of a model that outsize.prepare "
                f"prepared. Call outsize.prepare(model, ...) first. Where a parameter was added or replaced since, "
                f"call outsize.release(model), change the model, and prepare it again"
            )
        if found is not None and prepared is not found:
            raise ValueError("the parameters belong to two prepared models; use one gathered block for each")
        found = prepared
    return found


def _exact_before(unit: Unit) -> dict[str, torch.Tensor]:
    """Copies of the parameters whose master holds more bits than they show."""
    slots = unit.shard.whole_slots.values()
    return {
        slot.name: unit.shard.param(slot.name).clone()
        for slot in slots
        if slot.numel and unit.shard.array(MASTER, slot)
    }


def _store(unit: Unit, before: dict[str, torch.Tensor]) -> None:
    shard = unit.shard
    unit.await_written()
    for name, old in before.items():
        _reset_master(shard, name, old)
    if shard.params is not None:
        shard.write_params()


def _reset_master(shard: UnitShard, name: str, old: torch.Tensor) -> None:
    """A value that was modified is its own master from now on; the others keep theirs bit for bit."""
    slot = shard.slots[name]
    value = shard.own(name, shard.param(name))
    changed = (value.view(torch.int16) != shard.own(name, old).view(torch.int16)).cpu()
    if changed.any():
        array = shard.arrays[MASTER]
        master = shard.read_array(array, slot.offset, slot.end)
        own = torch.zeros_like(master) if slot.dtype == "bfloat16" else value.to("cpu", master.dtype)
        shard.write_array(array, slot.offset, slot.end, torch.where(changed, own, master))


def _show_gradients(
    prepared: Prepared, params: list[torch.Tensor]
) -> dict[torch.Tensor, tuple[RestingGrad, torch.Tensor, int]]:
    """By parameter: (the gradient at rest, the values in its place, their version)."""
    shown = {}
    for param in params:
        if isinstance(param.grad, RestingGrad):
            resting = param.grad
            value = resting.home.resting.value(resting)
            unit, slot = prepared.engine.parameters.unit_of(param)
            prepared.engine.gradients[unit.index].shown[slot.name] = resting
            set_grad(param, value)
            prepared.engine.show_in_stage(param)
            seen = grad_of(param)
            assert seen is not None
            shown[param] = (resting, seen, seen._version)
    return shown


def _hide_gradient(
    prepared: Prepared, param: torch.Tensor, resting: RestingGrad, value: torch.Tensor, modify: bool
) -> None:
    unit, slot = prepared.engine.parameters.unit_of(param)
    gradients = prepared.engine.gradients[unit.index]
    gradients.shown.pop(slot.name, None)
    if param.grad is not value:
        return  # the user replaced or removed it
    param.grad = resting
    if modify:
        gradients.adopt(slot.name, value)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside the block add up gradients on their own rank; the next one outside reduces the sum over ranks.

    For gradient accumulation: all micro-batches but the last go inside. Memory: the whole gradients of the model on
    each rank, in `reduce_dtype`. Where the budget does not hold these, and with `unused="sync"`, every backward
    reduces its own, as outside, and sums are rounded accordingly: `outsize.plan` says which. With one rank, and inside
    another such block, it changes nothing. Raises `ValueError` for a model that is not prepared.

    >>> with outsize.no_sync(model):
    ...     model(loader[0]).mean().backward()
    >>> model(loader[1]).mean().backward()
    >>> optimizer.step()
    """
    prepared = _common(list(known(model.parameters()))) if isinstance(model, nn.Module) else None
    if prepared is None:
        raise ValueError("no_sync takes a model that outsize.prepare prepared")
    if prepared.config.update == "backward":
        raise ValueError("no_sync adds gradients up, and update='backward' applies each at once; use update='fetch'")
    if prepared.engine.reduction is None:
        yield
        return
    with prepared.engine.reduction.paused():
        yield
