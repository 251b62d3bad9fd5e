"""The norm over all stages of a pipeline, where `clip_grad_norm_` asks each rank for the norm of its own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from outsize.run.reduction import Reduction

# Note [One norm over all stages]
# `clip_grad_norm_` and `get_total_norm` ask each gradient for its norm, stack these, and take the norm of the stack.
# Where the stack has the norms of all gradients of a rank, the other stages have the rest, and the last norm is over
# all stages. So every rank must ask for it. The norm of fewer gradients, and all else, is as with plain tensors.


@final
class StageNorm(torch.Tensor):
    """The norm of one gradient ([]), or of several, stacked ([gradients]). See Note [One norm over all stages]."""

    order: float
    gradients: int
    reduction: Reduction

    @staticmethod
    def of(norm: torch.Tensor, order: float, gradients: int, reduction: Reduction) -> StageNorm:
        self: StageNorm = norm.as_subclass(StageNorm)
        self.order, self.gradients, self.reduction = order, gradients, reduction
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is torch.Tensor.to:
            return cls.of(result, args[0].order, args[0].gradients, args[0].reduction)
        if func is torch.stack:
            return _stacked(args[0], result)
        if func is torch.linalg.vector_norm and _order(*args, **(kwargs or {})) == args[0].order:
            whole = args[0].gradients == args[0].reduction.present()
            return args[0].reduction.over_stages(result, args[0].order) if whole else result
        return result


def _stacked(norms: Sequence[torch.Tensor], result: torch.Tensor) -> StageNorm:
    first = next(each for each in norms if isinstance(each, StageNorm))
    return StageNorm.of(result, first.order, len(norms), first.reduction)


def _order(_: Any, ord: float = 2.0, *__: Any, **___: Any) -> float:
    return float(ord)


@final
class StageGrad(torch.Tensor):
    """A gradient that autograd keeps on the device, whose norm is a part of that of all stages."""

    reduction: Reduction

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is torch.linalg.vector_norm and isinstance(args[0], cls):
            return StageNorm.of(result, _order(*args, **(kwargs or {})), 1, args[0].reduction)
        if func is torch._foreach_norm:
            order = _order(*args, **(kwargs or {}))
            of = next(each for each in args[0] if isinstance(each, cls)).reduction
            return [StageNorm.of(norm, order, 1, of) for norm in result]
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            ours = [each for each in args[0] if isinstance(each, cls)]
            if not any(hasattr(each, "_home") for each in args[0]):  # gradients at rest have asked already
                args[1].fill_(0.0 if ours[0].reduction.in_every_stage(not args[1].item()) else 1.0)
        return result
