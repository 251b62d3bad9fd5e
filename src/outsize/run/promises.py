"""What a backward has applied before `step()`, and that the user has left it so (update="backward")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from outsize.move.shard import Pending, SlotUpdate
from outsize.optim.worker import differs
from outsize.run.grads import RestingGrad
from outsize.run.step_record import hyper_of
from outsize.run.unit import Unit


@final
class Applied:
    """By unit, what the backward since the last step has applied."""

    def __init__(self) -> None:
        self.pendings: dict[Unit, Pending] = {}

    def check(self, groups: Mapping[int, dict[str, Any]]) -> None:
        """Raise unless gradients and options are as they were applied. `groups`: by the parameter's id."""
        for unit, pending in self.pendings.items():
            for name, applied in pending.items():
                param = unit.parameters[name]
                _check_gradient(param, name, applied)
                _check_options(name, applied, hyper_of(groups.get(id(param), {})))


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
