"""Adagrad: the native one-pass kernel, and torch's own operations where the kernel does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from outsize import _native
from outsize.move.codes import encode
from outsize.optim.native import native_arrays, runs_natively
from outsize.optim.rules import Opened, Options, Piece, Rule, number, opened


@final
class AdagradRule(Rule):
    """Adagrad (Duchi et al. 2011) with learning-rate decay, coupled decay and maximize, as in torch."""

    merges = True

    def __init__(self) -> None:
        self.arrays = ("sum",)
        self.codes = {"sum": "root"}
        self.counts = self.scalars = ("step",)

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        self._read(Options(hyper, where), 1)

    def apply(self, piece: Piece) -> None:
        state = piece.state
        step = number(state.scalars.get("step", 0.0)) + 1.0
        options = self._read(Options(piece.hyper), int(step))
        state.next_scalars = {"step": step}
        if not state.initialised:
            _fill_sum(piece, _initial_sum(Options(piece.hyper)))
        if runs_natively(piece):
            _native.adagrad(native_arrays(piece, self.arrays), **options, threads=piece.threads)
        else:
            with opened(piece, self.codes) as tensors:
                adagrad_formula(tensors, **options)

    def _read(self, options: Options, step: int) -> _native.AdagradOptions:
        _initial_sum(options)
        return {
            "lr": options.number("lr"),
            "lr_decay": options.number("lr_decay", least=0),
            "eps": options.number("eps", least=0),
            "weight_decay": options.number("weight_decay"),
            "maximize": options.flag("maximize"),
            "step": step,
        }


def _initial_sum(options: Options) -> float:
    return options.number("initial_accumulator_value", least=0, default=0.0)


def _fill_sum(piece: Piece, value: float) -> None:
    total = piece.states["sum"]
    if "sum" in piece.scales:
        encode(torch.full_like(total, value, dtype=torch.float32), total, piece.scales["sum"], True)
    else:
        total.fill_(value)


def adagrad_formula(
    tensors: Opened, *, lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool, step: int
) -> None:
    """torch's own sequence of operations (`torch.optim.adagrad`), for what the kernel does not serve."""
    grad = -tensors.grad if maximize else tensors.grad
    if weight_decay != 0:
        grad = grad.add(tensors.param, alpha=weight_decay)
    total = tensors.states["sum"].addcmul_(grad, grad, value=1)
    tensors.param.addcdiv_(grad, total.sqrt().add_(eps), value=-lr / (1 + (step - 1) * lr_decay))
