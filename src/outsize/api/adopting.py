"""Moves the values that a model has to where they rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outsize.checkpoint.arrays import place
from outsize.config import Config
from outsize.formats.pieces import in_memory
from outsize.move.generations import crc32c
from outsize.move.shard import UnitShard
from outsize.move.store import MASTER, MASTER_DTYPE, DiskStore
from outsize.optim.rules import split_master
from outsize.run.guard import Classes
from outsize.run.local import bind, local
from outsize.run.mapped_files import let_go
from outsize.run.state_entry import snapshot, store_entry
from outsize.run.unit import Unit
from outsize.run.wrappers import is_wrapper, move_wrapper

ORPHANS = Classes(None)


def adopt(
    unit: Unit,
    states: dict[Any, dict[str, Any]],
    load: Callable[[nn.Parameter], torch.Tensor],
    sums: dict[str, str] | None,
    swapped: bool,
) -> None:
    """Move one unit's values to where they rest; the parameters become views of the unit's gathered buffer. `swapped`:
    their space on disk is taken here, once `load` has given back what they had of it."""
    shard = unit.shard
    late = shard.params if swapped and isinstance(shard.params, DiskStore) else None
    if not shard.tile_rows or shard.lanes is not None:  # an accelerator's memory is only viewed while it is there
        shard.buffer.materialize()
        shard.buffer.use()
    if shard.device.type != "cpu" and not shard.tile_rows:  # what lies between parameters is stored and saved with them
        shard.buffer.flat.zero_()
    for name, param in unit.parameters.items():
        state = states.pop(param, None)
        with torch.no_grad():
            if not shard.in_place or sums is not None:
                value = local(load(param))
                if sums is not None:
                    sums[name] = f"{crc32c(value):08x}"
                if not shard.in_place and shard.tile_rows:
                    if late is not None:  # of this parameter alone
                        late.preallocate(0, late.nbytes)
                    _adopt_rows(shard, name, value, state or {})
                    state = None
                elif not shard.in_place:
                    _adopt_value(shard, name, value)
                let_go(value)
                del value
            param.grad = None
            bind(param, shard.param(name))
            ORPHANS.take(param)
        if state:
            store_entry(shard, name, state)
    unit.adopt()
    if shard.params is not None:
        if not shard.tile_rows and not shard.in_place:
            if late is not None:
                late.preallocate(0, late.nbytes)
            shard.write_params()
        unit.release()


def _adopt_value(shard: UnitShard, name: str, value: torch.Tensor) -> None:
    slot, target = shard.slots[name], shard.param(name)
    master = shard.array(MASTER, slot)
    if master is None or not target.numel():
        target.copy_(value)
        return
    on_cpu = target.device.type == "cpu"
    weight = target.view(-1) if on_cpu else torch.empty(target.numel(), dtype=target.dtype, device="cpu")
    rest = torch.empty(target.numel(), dtype=MASTER_DTYPE[slot.dtype], device="cpu")
    split_master(value.detach().cpu().reshape(-1), weight, rest)
    if not on_cpu:
        target.copy_(weight.view(target.shape))
    shard.write_array(master, slot.offset, slot.end, shard.own(name, rest))


def _adopt_rows(shard: UnitShard, name: str, value: torch.Tensor, state: dict[str, Any]) -> None:
    """A parameter that is never whole in memory, with its state, to where they rest."""
    if state:
        shard.make_room([name])
    arrays = {
        key: in_memory(local(each).reshape(-1), shard.arrays[key].value_dtype(shard.slots[name].dtype))
        for key, each in state.items()
        if key in shard.arrays and isinstance(each, torch.Tensor)
    }
    scalars = {key: snapshot(each) for key, each in state.items() if key not in arrays}
    weights = {name: in_memory(value.reshape(-1), value.dtype)}
    place(shard, weights, {}, {name: arrays}, {name: scalars} if state else {}, [name])


def move_wrappers(model: nn.Module, config: Config) -> None:
    """Quantized weights lie on the computing device from now on, wherever their values rest."""
    for param in model.parameters():
        if is_wrapper(param) and param.device.type != config.compute_device.type:
            move_wrapper(param, config.compute_device)


def cast_buffers(model: nn.Module, config: Config) -> None:
    """As `model.to(device, compute_dtype)` does with buffers. What a module without parameters keeps otherwise, as a
    metric of torchmetrics, moves too."""
    for module in model.modules():
        if type(module)._apply is not nn.Module._apply and not any(True for _ in module.parameters()):
            module._apply(lambda tensor: tensor.to(config.compute_device))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = config.compute_dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=config.compute_device, dtype=dtype)
