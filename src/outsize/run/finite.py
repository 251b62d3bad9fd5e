"""Whether all gradients of a step are finite: by their norms, and where these are not, by their elements."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch

from outsize.move.shard import Pending
from outsize.run.grads import RestingGrad
from outsize.run.unit import Unit


def check_finite(pendings: Mapping[Unit, Pending], factor: float) -> None:
    """Raise unless all gradients are finite, and stay so when a loss scale's `factor` is taken out."""
    bad = not_finite(pendings) if isfinite(factor) else [name for pending in pendings.values() for name in pending]
    if bad:
        count = sum(len(pending) for pending in pendings.values())
        raise FloatingPointError(
            f"optimizer.step(): the gradient of {bad[0]!r} is not finite ({len(bad)} of {count} parameters; the "
            f"loss was NaN or infinite, or overflowed on the way). Nothing was updated. Call zero_grad() and go on "
            f"with another batch, or lower the learning rate"
        )


def not_finite(pendings: Mapping[Unit, Pending]) -> list[str]:
    """The parameters whose gradients are not."""
    names: list[tuple[Unit, str]] = []
    norms: list[torch.Tensor] = []
    plain: list[tuple[tuple[Unit, str], torch.Tensor]] = []
    for unit, pending in pendings.items():
        for name, owed in pending.items():
            grad = unit.parameters[name].grad
            if isinstance(grad, RestingGrad):
                names.append((unit, name))
                norms.append(grad.finite)
            elif owed.loose is not None and owed.loose.numel():
                plain.append(((unit, name), owed.loose))
    if plain:
        names += [name for name, _ in plain]
        norms += torch._foreach_norm([grad for _, grad in plain])
    good = torch.isfinite(torch.stack(norms)) if norms else torch.ones(0, device="cpu")
    if good.all():
        return []
    doubtful = [name for name, each in zip(names, good.tolist(), strict=True) if not each]
    return [name for unit, name in doubtful if not _is_finite(unit, name)]


def _is_finite(unit: Unit, name: str) -> bool:
    """The sum of squares of large elements may overflow: look at the elements."""
    grad = unit.parameters[name].grad
    assert grad is not None
    return grad.home.resting.all_finite(grad) if isinstance(grad, RestingGrad) else bool(torch.isfinite(grad).all())
