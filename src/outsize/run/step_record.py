"""What a step records, each parameter's gradient and each group's options; and what is checked before it is marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch.utils._pytree import tree_map

from outsize.move.generations import crc32c
from outsize.move.grad_ops import AS_IT_IS
from outsize.move.shard import Pending, SlotUpdate
from outsize.move.store import MASTER
from outsize.optim.worker import NO_OPTIONS, differs
from outsize.run.buffers import collecting_dtype
from outsize.run.grads import RestingGrad, not_finite
from outsize.run.local import expect_dense, is_distributed, local_gradient
from outsize.run.parameters import grad_of
from outsize.run.reduction import Reduction
from outsize.run.state_entry import snapshot
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients


def owed_to(unit: Unit, name: str, grad: torch.Tensor, hyper: dict[str, object], home: UnitGradients) -> SlotUpdate:
    """The update by this gradient, with the operations that were done to it so far. Raises for one at rest that is
    another parameter's: the bytes that the update reads are this one's."""
    if isinstance(grad, RestingGrad):
        if grad.label != name or grad.home is not home:
            raise RuntimeError(
                f"the gradient at rest of {grad.label!r} was made the gradient of {name!r} (unit {unit.name!r}), which "
                f"has a place of its own for it: copy the values, `with outsize.gathered([one, other], grads=True, "
                f"modify=True): other.grad.copy_(one.grad)`. Nothing was updated"
            )
        home.resting.check_current(grad)
        if not grad.ops.zero:
            grad.expect_unspent("applied again")
        return SlotUpdate(hyper, grad.ops, grad.loose, grad.shard)
    if unit.shard.rows is not None:
        return _owed_to_rows(name, grad, hyper)
    expect_dense(name, grad)
    grad = unit.shard.part_of(name, local_gradient(unit.parameters[name], grad)).detach()
    return SlotUpdate(hyper, AS_IT_IS, grad if unit.shard.on_device else grad.clone())  # the user's own may change


def _owed_to_rows(name: str, grad: torch.Tensor, hyper: dict[str, object]) -> SlotUpdate:
    """The update of a table's rows by this gradient."""
    if grad.layout is not torch.sparse_coo:
        raise RuntimeError(
            f"the gradient of table {name!r}, an embedding with sparse=True, is dense: its weight was also used "
            f"without sparse=True. Nothing was updated"
        )
    return SlotUpdate(hyper, AS_IT_IS, grad.detach())


def told(pendings: Mapping[Unit, Pending], factor: float) -> dict[str, str]:
    """What a step does, for comparison with other ranks: by parameter its operations, a loss scale's `factor` after
    them, hyper-parameters, and how many reductions the gradient is the sum of, which differs where a rank alone has
    thrown some away."""
    said: dict[str, str] = {}
    known: dict[int, str] = {}  # a group's hyper-parameters are one record for all its parameters
    for unit, pending in pendings.items():
        for name, owed in pending.items():
            grad = unit.parameters[name].grad
            sums = f", the sum of {grad.reductions}," if isinstance(grad, RestingGrad) else ""
            whole = isinstance(grad, torch.Tensor) and grad.layout is torch.strided and not is_distributed(grad)
            if grad is not None and whole and not isinstance(grad, RestingGrad):  # no rows of a table, and no part
                content = grad.detach().as_subclass(torch.Tensor).cpu().contiguous()
                sums = f" that was set, not left by a backward, with checksum {crc32c(content):08x},"
            hyper = known.get(id(owed.hyper))
            if hyper is None:
                values = {key: _plain(value) for key, value in owed.hyper.items()}
                hyper = known[id(owed.hyper)] = ", ".join(f"{key}={value}" for key, value in values.items())
            said[name] = (
                f"a gradient{sums} times {owed.ops.scale * factor!r} in [{owed.ops.low}, {owed.ops.high}], {hyper}"
            )
            if owed.ops.zero:
                said[name] = f"a zero gradient, {hyper}"
    return said


def _plain(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else str(tuple(value.shape))
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__


def hyper_of(group: dict[str, Any]) -> dict[str, object]:
    """The hyper-parameters of a group as they are now, whatever becomes of their tensors and lists."""
    return {
        key: tree_map(snapshot, value) if isinstance(value, (list, tuple, dict)) else snapshot(value)
        for key, value in group.items()
        if key not in NO_OPTIONS
    }


def check_masters(pendings: Mapping[Unit, Pending]) -> None:
    """Refuse a step on masters of weights that the user may be writing to."""
    for unit, pending in pendings.items():
        if pending and unit.writable and MASTER in unit.shard.arrays:
            raise RuntimeError(
                f"optimizer.step() inside gathered(..., modify=True) of {unit.name!r}: what the step changes and "
                f"what you change could not be told apart, and its masters hold more bits than its weights show; "
                f"call step() outside the block. Nothing was updated"
            )


def check_finite(pendings: Mapping[Unit, Pending], factor: float, reduction: Reduction | None) -> None:
    """Raise unless all gradients are finite, and stay so when a loss scale's `factor` is taken out."""
    bad = _bad_in(pendings) if isfinite(factor) else [name for pending in pendings.values() for name in pending]
    rows = [name for unit, pending in pendings.items() if unit.owners is not None for name in pending]
    if rows and reduction is not None:  # of which each rank has looked at its own
        good = reduction.everywhere([name not in bad for name in rows])
        bad += [name for name, each in zip(rows, good, strict=True) if not each and name not in bad]
    elsewhere = None if reduction is None else reduction.check_stages(bad)
    if elsewhere is not None and not bad:
        raise FloatingPointError(
            f"optimizer.step(): the gradient of {elsewhere[0]!r}, in the pipeline stage of rank {elsewhere[1]}, is not "
            f"finite. Nothing was updated in any stage. Call zero_grad() and go on with another batch, or lower the "
            f"learning rate"
        )
    if bad:
        count = sum(len(pending) for pending in pendings.values())
        raise FloatingPointError(
            f"optimizer.step(): the gradient of {bad[0]!r} is not finite ({len(bad)} of {count} parameters; the "
            f"loss was NaN or infinite, or overflowed on the way). Nothing was updated. Call zero_grad() and go on "
            f"with another batch, or lower the learning rate"
        )


def check_finite_in_backward(unit: Unit, pending: Pending, applied: dict[Unit, Pending], count: int) -> None:
    """Raises before an update in the backward, with `applied`, those before it, forgotten. `count`: of all units."""
    if bad := _bad_in({unit: pending}):
        updated = len(applied)
        applied.clear()
        raise FloatingPointError(
            f"the gradient of {bad[0]!r} is not finite; with update='backward' the units before it in the backward "
            f"were updated already ({updated} of {count}). Load the last checkpoint, or use update='fetch' (the "
            f"default), where such a step changes nothing"
        )


def average_rows(pendings: Mapping[Unit, Pending], reduction: Reduction) -> None:
    """The update of a table that is split is by the mean over the ranks, of the rows that rest here. Blocks."""
    for unit, pending in pendings.items():
        for name, owed in pending.items() if unit.owners is not None else ():
            assert unit.owners is not None and owed.loose is not None
            dtype = collecting_dtype(unit.shard.slots[name].dtype, reduction.dtype)
            pending[name] = replace(owed, loose=unit.owners.mean(owed.loose, dtype))


def _bad_in(pendings: Mapping[Unit, Pending]) -> list[str]:
    """The parameters whose gradients are not finite."""
    grads: dict[str, torch.Tensor] = {}
    for unit, pending in pendings.items():
        for name, owed in pending.items():
            grad = grad_of(unit.parameters[name])
            if isinstance(grad, RestingGrad):
                grads[name] = grad
            elif owed.loose is not None:
                grads[name] = owed.loose._values() if owed.loose.is_sparse else owed.loose
    names = list(grads)
    return [names[at] for at in not_finite(list(grads.values()))]


def check_promises(applied: Mapping[Unit, Pending], groups: Mapping[int, dict[str, Any]]) -> None:
    """Raise unless gradients and options are as the backward has `applied` them (update="backward"). `groups`: by the
    parameter's id."""
    for unit, pending in applied.items():
        for name, owed in pending.items():
            param = unit.parameters[name]
            _check_gradient(param, name, owed)
            _check_options(name, owed, hyper_of(groups.get(id(param), {})))


def _check_gradient(param: torch.Tensor, name: str, applied: SlotUpdate) -> None:
    grad = param.grad
    own = isinstance(grad, RestingGrad) and grad.label == name
    if not own or not grad.spent or grad.ops != applied.ops:  # type: ignore[union-attr]
        raise RuntimeError(
            f"the gradient of {name!r} was replaced or removed between backward() and step(), after the backward had "
            f"applied it (update='backward'); use update='fetch' (the default)"
        )


def _check_options(name: str, applied: SlotUpdate, hyper: Mapping[str, object]) -> None:
    changed = [key for key, value in hyper.items() if differs(value, applied.hyper.get(key))]
    if changed:
        raise RuntimeError(
            f"{changed[0]!r} of a parameter group changed between backward() and step(), after the backward had "
            f"applied the gradient of {name!r} (update='backward'); change it before the backward"
        )


def unscale(pendings: Mapping[Unit, Pending], factor: float, gradients: Sequence[UnitGradients]) -> None:
    """Take the loss scale out of the gradients, where the user sees them too."""
    for unit, pending in pendings.items():
        for name, owed in pending.items():
            grad = unit.parameters[name].grad
            assert grad is not None
            grad.mul_(factor)
            if unit.owners is not None and owed.loose is not None:
                owed.loose.mul_(factor)
            else:
                pending[name] = owed_to(unit, name, grad, owed.hyper, gradients[unit.index])
