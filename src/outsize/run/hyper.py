"""The hyper-parameters of a step: as they are now, and as they are told to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from outsize.move.shard import Pending
from outsize.run.grads import RestingGrad
from outsize.run.state import snapshot
from outsize.run.unit import Unit


def told(pendings: Mapping[Unit, Pending], factor: float, counted: bool) -> dict[str, str]:
    """What a step does, for comparison with other ranks: by parameter its operations, a loss scale's `factor` after
    them, and hyper-parameters; `counted`: also how many reductions the gradient is the sum of, which differs where a
    rank alone has thrown some away."""
    said: dict[str, str] = {}
    known: dict[int, str] = {}  # a group's hyper-parameters are one record for all its parameters
    for unit, pending in pendings.items():
        for name, owed in pending.items():
            grad = unit.parameters[name].grad
            sums = f", the sum of {grad.reductions}," if counted and isinstance(grad, RestingGrad) else ""
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
        if key != "params"
    }
