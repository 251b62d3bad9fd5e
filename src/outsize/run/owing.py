"""What a step owes one parameter, made of the gradient that the parameter has."""

from __future__ import annotations

import torch

from outsize.move.grad_ops import GradOps
from outsize.move.shard import SlotUpdate
from outsize.run.grads import RestingGrad
from outsize.run.keeper import GradKeeper
from outsize.run.local import local_gradient
from outsize.run.unit import Unit


def expect_own(unit: Unit, name: str, grad: torch.Tensor | None, home: GradKeeper) -> None:
    """Raise for a gradient at rest that is another parameter's: the bytes that the update reads are this one's."""
    if isinstance(grad, RestingGrad) and (grad.label != name or grad.home is not home):
        raise RuntimeError(
            f"the gradient at rest of {grad.label!r} was made the gradient of {name!r} (unit {unit.name!r}), which has "
            f"a place of its own for it: copy the values, `with outsize.gathered([one, other], grads=True, "
            f"modify=True): other.grad.copy_(one.grad)`. Nothing was updated"
        )


def owed_to(unit: Unit, name: str, grad: torch.Tensor, hyper: dict[str, object]) -> SlotUpdate:
    """The update by this gradient, with the operations that were done to it so far."""
    if grad.layout is not torch.strided:
        raise TypeError(f"the gradient of {name!r} is sparse ({grad.layout}); use dense gradients")
    if isinstance(grad, RestingGrad):
        grad.home.check_current(grad)
        if not grad.ops.zero:
            grad.expect_unspent("applied again")
        return SlotUpdate(hyper, grad.ops, grad.loose, grad.shard)
    grad = unit.shard.part_of(name, local_gradient(unit.parameters[name], grad)).detach()
    return SlotUpdate(hyper, GradOps(), grad if unit.shard.on_device else grad.clone())  # the user's own may change
