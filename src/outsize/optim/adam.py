"""Adam and AdamW: the native one-pass kernel, and torch's own operations where the kernel does not run."""

from __future__ import annotations

from math import sqrt
from typing import Any, final

import torch

from outsize import _native
from outsize.optim.rules import Piece, Rule, join_master, number, split_master

_CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}


@final
class AdamRule(Rule):
    """Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with AMSGrad and maximize, as in torch."""

    def __init__(self, amsgrad: bool, decoupled: bool) -> None:
        self.arrays = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
        self._decoupled = decoupled

    def apply(self, piece: Piece) -> None:
        step = number(piece.state.scalars.get("step", 0.0)) + 1.0
        piece.state.next_scalars = {"step": step}
        scalars = self._scalars(piece.hyper, int(step))
        native = piece.param.device.type == "cpu" and piece.param.dtype in (torch.float32, torch.bfloat16)
        if native and piece.grad.dtype in _CODES and piece.grad.device.type == "cpu":
            self._apply_native(piece, scalars)
        else:
            adam_formula(piece, **scalars)

    def _scalars(self, hyper: dict[str, object], step: int) -> dict[str, Any]:
        betas = hyper["betas"]
        assert isinstance(betas, (tuple, list))
        return {
            "lr": number(hyper["lr"]),
            "beta1": number(betas[0]),
            "beta2": number(betas[1]),
            "eps": number(hyper["eps"]),
            "weight_decay": number(hyper["weight_decay"]),
            "decoupled": bool(hyper.get("decoupled_weight_decay", self._decoupled)),
            "maximize": bool(hyper.get("maximize", False)),
            "amsgrad": bool(hyper.get("amsgrad", False)),
            "step": step,
        }

    def _apply_native(self, piece: Piece, scalars: dict[str, Any]) -> None:
        amsgrad = scalars.pop("amsgrad")
        _native.adamw(
            piece.param.data_ptr(),
            _CODES[piece.param.dtype],
            0 if piece.master is None else piece.master.data_ptr(),
            piece.states["exp_avg"].data_ptr(),
            piece.states["exp_avg_sq"].data_ptr(),
            piece.grad.data_ptr(),
            _CODES[piece.grad.dtype],
            piece.param.numel(),
            grad_scale=0.0 if piece.ops.zero else piece.ops.scale,
            clamp_min=piece.ops.low,
            clamp_max=piece.ops.high,
            max_exp_avg_sq=piece.states["max_exp_avg_sq"].data_ptr() if amsgrad else 0,
            threads=piece.threads,
            **scalars,
        )


def adam_formula(
    piece: Piece,
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
    master = piece.param if piece.master is None else join_master(piece.param, piece.master)
    exact = torch.float64 if master.dtype is torch.float64 else torch.float32
    grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=exact, copy=True))
    grad = -grad if maximize else grad
    exp_avg, exp_avg_sq = piece.states["exp_avg"], piece.states["exp_avg_sq"]
    if weight_decay != 0:
        if decoupled:
            master.mul_(1 - lr * weight_decay)
        else:
            grad = grad.add(master, alpha=weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = exp_avg_sq
    if amsgrad:
        second = torch.maximum(piece.states["max_exp_avg_sq"], exp_avg_sq, out=piece.states["max_exp_avg_sq"])
    denominator = (second.sqrt() / sqrt(1 - beta2**step)).add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    if piece.master is not None:
        split_master(master, piece.param, piece.master)
