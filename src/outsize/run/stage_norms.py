"""The norm over all stages of a pipeline, where `clip_grad_norm_` asks each rank for the norm of its own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from outsize.run.reduction import Reduction


@final
class StageNorm(torch.Tensor):
    """The norm of one gradient ([]), or of several, stacked ([gradients]), where other stages have more of them.

    `clip_grad_norm_` and `get_total_norm` stack the norms of all gradients and take the norm of the stack. This one is
    over all stages, so every rank must ask. The norm of fewer gradients, and all else, is as with plain tensors.
    """

    order: float
    names: frozenset[str]
    reduction: Reduction

    @staticmethod
    def of(norm: torch.Tensor, order: float, names: frozenset[str], reduction: Reduction) -> StageNorm:
        self: StageNorm = norm.as_subclass(StageNorm)
        self.order, self.names, self.reduction = order, names, reduction
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is torch.stack:
            return _stacked(args[0], result)
        if func is torch.Tensor.to:
            return cls.of(result, args[0].order, args[0].names, args[0].reduction)
        if func is torch.linalg.vector_norm:
            return _total(args[0], result, *args[1:2], **(kwargs or {}))
        return result


def _stacked(norms: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    parts = [each for each in norms if isinstance(each, StageNorm)]
    if len(parts) < len(norms) or any(each.order != parts[0].order for each in parts):
        return result
    names = frozenset[str]().union(*(each.names for each in parts))
    return StageNorm.of(result, parts[0].order, names, parts[0].reduction)


def _total(norms: StageNorm, result: torch.Tensor, ord: float = 2, **_: Any) -> torch.Tensor:
    reduction = norms.reduction
    if float(ord) == norms.order and norms.names == reduction.names():
        return reduction.over_stages(result, norms.order)
    return result
