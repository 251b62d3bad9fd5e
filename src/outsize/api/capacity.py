"""How many bytes of the computing budget are left for units, for rows of tables and for what layers keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from outsize.api.placed import PlacedModel
from outsize.planning.placement import accumulates_whole, resting_bytes
from outsize.run.buffers import PASSING_UNITS
from outsize.run.unit import Unit
from outsize.run.wrappers import known

UNBOUNDED = 1 << 62
"""The room of a model of which nothing ever moves."""


def capacity_of(plan: PlacedModel, units: Sequence[Unit], leaving: int) -> int:
    """Bytes for gathered buffers and, on a CPU, for gradients on their way to where they rest: the computing budget
    less what rests in that memory, less the gradient that autograd is making, those that are `leaving` the device, and
    what is for freed memory.
    """
    if all(unit.always_resident and unit.shard.tiers.grads != "disk" for unit in units):
        return UNBOUNDED  # nothing moves; the plan has seen to it that all fits
    resting = resting_bytes(plan.unit_bytes, plan.tiers, plan.budgets.sharing("device"))
    resting -= sum(plan.unit_bytes[unit.index].params for unit in units if unit.always_resident)  # in their buffers
    in_flight = max((_largest_gradient(unit, plan) for unit in units), default=0)
    return plan.budgets.computing[1] - resting - in_flight - leaving - plan.holes_bytes


def keep_hot_rows(units: Sequence[Unit], plan: PlacedModel, spare: int, leaving: int) -> int:
    """Give tables memory for their hot rows, each its share. Returns how much of what is `spare` it takes."""
    tables = [unit.shard.rows for unit in units if unit.shard.rows is not None and unit.shard.rows.disk_bytes]
    on_device = 0
    total = sum(rows.disk_bytes for rows in tables)
    on_cpu = plan.budgets.device is None
    if not on_cpu:
        on_device = _keep_on_device(units, spare // 2)  # the other half is for what layers keep
        spare = plan.budgets.host - plan.budgets.staging_bytes - leaving - (plan.passing_bytes or 0)
        spare -= resting_bytes(plan.unit_bytes, plan.tiers, ("host",))
    if not tables or spare <= 0:
        return on_device
    taken = [rows.use_memory(spare * rows.disk_bytes // total) for rows in tables]
    return sum(taken) if on_cpu else on_device


def _keep_on_device(units: Sequence[Unit], nbytes: int) -> int:
    """Give tables so much of an accelerator for hot rows."""
    far = [(each.shard.rows, each.shard.device) for each in units if each.shard.rows is not None]
    total = sum(rows.far_bytes for rows, _ in far)
    return sum(rows.use_device(nbytes * rows.far_bytes // total, device) for rows, device in far if rows.far_bytes)


def spare_of(units: Sequence[Unit], plan: PlacedModel, capacity: int) -> int:
    """Bytes that units which come and go never take: all of them fit at once, and their gradients on their way."""
    moving = [
        (unit, size)
        for unit, size in zip(units, plan.unit_bytes, strict=True)
        if not unit.always_resident and unit.shard.rows is None
    ]
    passing = sum(size.leaving for unit, size in moving if unit.shard.tiers.grads == "disk")
    least = PASSING_UNITS * max((size.leaving for _, size in moving), default=0)
    whole = [size.collected for size in plan.unit_bytes]  # gradients of several ranks
    collected = PASSING_UNITS * max(whole, default=0)
    if accumulates_whole(plan.unit_bytes, plan.tiers, plan.budgets):  # under `no_sync`
        collected = max(collected, sum(whole))
    return max(capacity - sum(unit.nbytes for unit, _ in moving) - max(passing, least) - collected, 0)


def most_open(layers: Iterable[nn.Module], units: Sequence[Unit], capacity: int) -> int:
    """How many layers may have their parameters gathered at once, beside two units on their way."""
    moving = {id(param): unit for unit in units if not unit.always_resident for param in unit.parameters.values()}
    within = [{moving[id(param)] for param in known(layer.parameters()) if id(param) in moving} for layer in layers]
    largest = max((sum(unit.nbytes for unit in each) for each in within), default=0)
    left = capacity - 2 * max((unit.nbytes for unit in moving.values()), default=0)
    return max(left // max(largest, 1), 1)


def _largest_gradient(unit: Unit, plan: PlacedModel) -> int:
    """Bytes that autograd takes for one gradient of the unit."""
    trained = [info.nbytes for info in map(plan.infos.__getitem__, unit.parameters) if info.trainable]
    return min(max(trained, default=0), plan.unit_bytes[unit.index].leaving)
