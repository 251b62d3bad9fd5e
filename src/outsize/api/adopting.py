"""Moves the values that a model has to where they rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outsize.config import Config
from outsize.move.generations import crc32c
from outsize.move.shard import UnitShard
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE
from outsize.optim.rules import split_master
from outsize.plan.layout import PAGE_ELEMENTS, Slot, round_up
from outsize.run.local import bind, local
from outsize.run.mapped_files import let_go
from outsize.run.state_entry import store_entry
from outsize.run.unit import Unit
from outsize.run.wrappers import is_wrapper, move_wrapper

ADOPTED_NUMEL = 4 << 20
"""Elements of a parameter in tiles that are moved at once."""


def adopt(
    unit: Unit,
    states: dict[Any, dict[str, Any]],
    load: Callable[[nn.Parameter], torch.Tensor],
    sums: dict[str, str] | None,
) -> None:
    """Move one unit's values to where they rest; the parameters become views of the unit's gathered buffer."""
    shard = unit.shard
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
                if not shard.in_place:
                    _adopt_value(shard, name, value)
                let_go(value)
                del value
            param.grad = None
            bind(param, shard.param(name))
        if state:
            store_entry(shard, name, state)
    unit.adopt()
    if shard.params is not None:
        if not shard.tile_rows and not shard.in_place:
            shard.write_params()
        unit.release()


def _adopt_value(shard: UnitShard, name: str, value: torch.Tensor) -> None:
    slot = shard.slots[name]
    if shard.tile_rows:
        step, own = round_up(ADOPTED_NUMEL, PAGE_ELEMENTS), shard.own(name, value)
        for first in range(0, slot.numel, step):
            _adopt_part(shard, slot, first, own[first : first + step])
        return
    target = shard.param(name)
    master = shard.array(MASTER, slot)
    if master is None or not target.numel():
        target.copy_(value)
        return
    on_cpu = target.device.type == "cpu"
    weight = target.view(-1) if on_cpu else torch.empty(target.numel(), dtype=target.dtype, device="cpu")
    rest = torch.empty(target.numel(), dtype=MASTER_DTYPE[slot.dtype], device="cpu")
    split_master(value.detach().cpu().reshape(-1).float(), weight, rest)
    if not on_cpu:
        target.copy_(weight.view(target.shape))
    shard.write_array(master, slot.offset, slot.end, shard.own(name, rest))


def _adopt_part(shard: UnitShard, slot: Slot, first: int, value: torch.Tensor) -> None:
    """Elements of a parameter from `first` on, to where they rest."""
    assert shard.params is not None
    weight, master = torch.empty(value.numel(), dtype=DTYPES[slot.dtype], device="cpu"), shard.array(MASTER, slot)
    start, end = slot.offset + first, slot.offset + first + value.numel()
    if master is None:
        weight.copy_(value)
    else:
        rest = torch.empty(value.numel(), dtype=MASTER_DTYPE[slot.dtype], device="cpu")
        split_master(value.cpu().float(), weight, rest)
        shard.write_array(master, start, end, rest)
    shard.params.put(shard.param_layout.span(start, end)[0], weight.view(torch.uint8))


def move_wrappers(model: nn.Module, config: Config) -> None:
    """Quantized weights lie on the computing device from now on, wherever their values rest."""
    for param in model.parameters():
        if is_wrapper(param) and param.device.type != config.compute_device.type:
            move_wrapper(param, config.compute_device)


def cast_buffers(model: nn.Module, config: Config) -> None:
    """As `model.to(device, compute_dtype)` does with buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = config.compute_dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=config.compute_device, dtype=dtype)
