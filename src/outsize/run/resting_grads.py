"""The gradients at rest of one unit, as `param.grad` shows them: made once, and used again in every step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, final

import torch

from outsize.move.grad_ops import vector_norm, wide_dtype
from outsize.run.grads import RestingGrad
from outsize.run.local import like
from outsize.run.reduction import Reduction, StageNorm
from outsize.run.resting_place import RestingPlace
from outsize.run.unit import Unit

if TYPE_CHECKING:
    from outsize.run.unit_gradients import UnitGradients

# Note [Small things that live long]
# A small block that is allocated while a large temporary lies beside it, and outlives it, splits the hole that the
# temporary leaves: the next one of the same size takes fresh memory. One such block a unit and step made resident
# memory grow by a gradient for every layer. So what stays behind a gradient, its `RestingGrad` and norm, is made
# once, before training, and the norms of a unit lie in one tensor. Two serve each parameter in turn. One that the
# user has kept is replaced when its turn comes: were it filled again, it would pass for the gradient that it was.


@final
class RestingGrads:
    """By parameter the current gradient at rest and a spare one; none on the device, where each owns its bytes."""

    def __init__(self, unit: Unit, home: UnitGradients, place: RestingPlace, reduction: Reduction | None) -> None:
        self._unit = unit
        self._home = home
        self._place = place
        self.reduction = reduction  # None with one rank
        self._pairs: dict[str, list[RestingGrad]] = {}  # [current, spare]

    def make_ready(self) -> None:
        """Make what gradients at rest need; the parameters have taken on their final dtype and device."""
        if self._unit.shard.grads is None:
            return
        device, count = self._unit.shard.device, len(self._unit.parameters)
        norms = {dtype: torch.zeros(count, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
        for index, (name, param) in enumerate(self._unit.parameters.items()):
            norm = norms[torch.float64 if param.dtype is torch.float64 else torch.float32][index]
            self._pairs[name] = [
                RestingGrad(param, name, self._home, norm),
                RestingGrad(param, name, self._home, norm.clone()),
            ]

    def check_current(self, grad: RestingGrad) -> None:
        """Raise if the bytes behind a gradient at rest are another backward's by now."""
        if self._place.tiles:
            raise RuntimeError(
                f"a backward that did not end has changed a part of the gradient of {grad.label!r}: call zero_grad(), "
                f"and run the forward and the backward again"
            )
        if grad.stale:
            raise RuntimeError(
                f"this gradient of {grad.label!r} was at rest and a later backward has taken its place; to keep a "
                f"gradient, copy it: `with outsize.gathered(param, grads=True): kept = param.grad.clone()`"
            )

    def complete(self) -> None:
        """Make what a gradient at rest says of itself true of the whole gradient, on all ranks."""
        if self.reduction is not None:
            self.reduction.complete()
        self._place.await_norms()

    def look(self, grad: RestingGrad) -> None:
        """The gradient is about to be asked or changed. Raises if it is not the parameter's any more."""
        if grad.stale or self._place.tiles:
            self.check_current(grad)
        if self.reduction is not None or self._place.unknown:
            self.complete()

    def value(self, grad: RestingGrad) -> torch.Tensor:
        """A copy of the values in the parameter's dtype and shape, operations applied."""
        self.complete()
        dtype = self._unit.parameters[grad.label].dtype
        value = self.exact(grad)
        if self.reduction is not None:
            value = self.reduction.whole(self._unit.shard, grad.label, value)
        value = value.to(device=grad.device, dtype=dtype)
        return like(self._unit.parameters[grad.label], value.view(self._unit.shard.whole_slots[grad.label].shape))

    def exact(self, grad: RestingGrad) -> torch.Tensor:
        """A copy of what rests here of the values, in fp32 or wider, operations applied, 1-D."""
        self.check_current(grad)
        grad.expect_unspent("read")
        content = self._place.content(grad)
        return grad.ops.apply_(content.to(wide_dtype(content.dtype), copy=True))

    def norm(self, grad: RestingGrad, order: float) -> torch.Tensor:
        """The vector norm of the values, operations applied, fp32, 0-d."""
        own = self.exact(grad)  # a copy: an update that is owed still reads the bytes
        return vector_norm(own, order) if self.reduction is None else self.reduction.norm(own, order, grad.repeated)

    def all_finite(self, grad: RestingGrad) -> bool:
        """Whether all values are finite, by looking at them."""
        own = self.exact(grad)
        return bool(torch.isfinite(own).all()) if self.reduction is None else self.reduction.all_finite(own)

    def of_stage(self, order: float, norm: torch.Tensor) -> torch.Tensor:
        """The gradient's norm, as a part of the norm over all stages of a pipeline where there are several."""
        if self.reduction is None or self.reduction.ranks.stages is None:
            return norm
        return StageNorm.of(norm, order, 1, self.reduction)

    def next(self, name: str) -> RestingGrad | None:
        """What is the parameter's current gradient at rest from now on, yet to be filled; None on the device."""
        pair = self._pairs.get(name)
        if pair is None:
            return None
        if _held_by_others(pair):
            norm = torch.zeros_like(pair[1].norms[2.0])
            pair[1] = RestingGrad(self._unit.parameters[name], name, self._home, norm)
        pair.reverse()
        pair[0].stale, pair[1].stale = False, True
        return pair[0]

    def unfilled(self, name: str) -> RestingGrad:
        """What will be the gradient at rest, when it has been reduced."""
        self._place.unknown.pop(name, None)  # of an interrupted backward
        grad = self.next(name)
        if grad is None:
            param = self._unit.parameters[name]
            wide = torch.float64 if param.dtype is torch.float64 else torch.float32
            return RestingGrad(param, name, self._home, torch.zeros((), dtype=wide, device=self._unit.shard.device))
        grad.become(torch.zeros((), device="cpu"), None, None)
        grad.reductions = 0
        return grad


def _held_by_others(pair: list[RestingGrad]) -> bool:
    """Whether anybody but this list holds the spare gradient, in Python or as the `grad` of another tensor."""
    references = sys.getrefcount(pair[1])  # from the list and the call itself; a name would be a third
    return references > 2 or pair[1]._use_count() > 1  # type: ignore[attr-defined]
