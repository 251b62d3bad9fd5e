"""Lion: the optimizer, in plain torch, and its rule with the native one-pass kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from outsize import _native
from outsize.optim.native import native_arrays, runs_natively
from outsize.optim.rules import Opened, Options, Piece, Rule, opened


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2).

    Each step moves every weight by `lr` in the direction of the sign of a momentum, so `lr` is usually 3 to 10 times
    smaller, and `weight_decay` (decoupled) as many times larger, than with AdamW. Works with and without outsize.
    """

    merges = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = _read(Options(group))
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                lion_formula(Opened(param, param.grad, state), **options)
        return loss


@final
class LionRule(Rule):
    """The update of `Lion`."""

    def __init__(self) -> None:
        self.arrays = ("exp_avg",)
        self.codes = {"exp_avg": "signed"}
        self.scalars = ()

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        _read(Options(hyper, where))

    def apply(self, piece: Piece) -> None:
        piece.state.next_scalars = {}
        options = _read(Options(piece.hyper))
        if runs_natively(piece):
            _native.lion(native_arrays(piece, self.arrays), **options, threads=piece.threads)
        else:
            with opened(piece, self.codes) as tensors:
                lion_formula(tensors, **options)


def _read(options: Options) -> _native.LionOptions:
    beta1, beta2 = options.betas()
    return {
        "lr": options.number("lr"),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": options.number("weight_decay"),
        "maximize": options.flag("maximize"),
    }


def lion_formula(
    tensors: Opened, *, lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool
) -> None:
    """Algorithm 2 in torch operations; `param` and `exp_avg` are updated in place."""
    param, exp_avg = tensors.param, tensors.states["exp_avg"]
    grad = -tensors.grad if maximize else tensors.grad
    param.mul_(1 - lr * weight_decay)
    direction = (exp_avg * beta1).add_(grad, alpha=1 - beta1).sign_()
    param.add_(direction, alpha=-lr)
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
