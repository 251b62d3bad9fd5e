"""Adam and AdamW: the native one-pass kernel, and torch's own operations where the kernel does not run."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import final

import torch

from outsize import _native
from outsize.move.codes import CodeKind
from outsize.optim.native import expect_arrays, native_arrays, runs_natively
from outsize.optim.rules import Opened, Options, Piece, Rule, number, opened


@final
class AdamRule(Rule):
    """Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with AMSGrad and maximize, as in torch."""

    merges = True

    def __init__(self, amsgrad: bool, decoupled: bool) -> None:
        self.arrays = _arrays(amsgrad)
        self.codes = {name: _KINDS[name] for name in self.arrays}
        self.counts = self.scalars = ("step",)
        self._decoupled = decoupled

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        self._read(Options(hyper, where), 1)

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        return _arrays(Options(hyper).flag("amsgrad"))

    def apply(self, piece: Piece) -> None:
        step = number(piece.state.scalars.get("step", 0.0)) + 1.0
        piece.state.next_scalars = {"step": step}
        options = self._read(Options(piece.hyper), int(step))
        names = _arrays(options["amsgrad"])
        expect_arrays(piece, names)
        if runs_natively(piece):
            _native.adam(native_arrays(piece, names), **options, threads=piece.threads)
        else:
            with opened(piece, self.codes) as tensors:
                adam_formula(tensors, **options)

    def _read(self, options: Options, step: int) -> _native.AdamOptions:
        beta1, beta2 = options.betas()
        return {
            "lr": options.number("lr"),
            "beta1": beta1,
            "beta2": beta2,
            "eps": options.number("eps", least=0),
            "weight_decay": options.number("weight_decay"),
            "decoupled": options.flag("decoupled_weight_decay", self._decoupled),
            "maximize": options.flag("maximize"),
            "amsgrad": options.flag("amsgrad"),
            "step": step,
        }


_KINDS: dict[str, CodeKind] = {"exp_avg": "signed", "exp_avg_sq": "root", "max_exp_avg_sq": "root"}


def _arrays(amsgrad: bool) -> tuple[str, ...]:
    return tuple(_KINDS) if amsgrad else ("exp_avg", "exp_avg_sq")


def adam_formula(
    tensors: Opened,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    amsgrad: bool,
    step: int,
) -> None:
    """torch's own sequence of operations (`torch.optim.adam`), for what the kernel does not serve."""
    param, states = tensors.param, tensors.states
    grad = -tensors.grad if maximize else tensors.grad
    exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
    if weight_decay != 0:
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        else:
            grad = grad.add(param, alpha=weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = exp_avg_sq
    if amsgrad:
        second = torch.maximum(states["max_exp_avg_sq"], exp_avg_sq, out=states["max_exp_avg_sq"])
    denominator = (second.sqrt() / sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
