"""SGD: the native one-pass kernel, and torch's own operations where the kernel does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from outsize import _native
from outsize.optim.native import expect_arrays, native_arrays, runs_natively
from outsize.optim.rules import Opened, Options, Piece, Rule, opened

_BUFFER = "momentum_buffer"

# Note [No momentum yet]
# torch has no momentum_buffer before the first step with momentum; that step copies the gradient, without dampening.
# Here the array exists from the start. A parameter that was never stepped has no momentum yet; one that was stepped
# without momentum says so as torch's state does, by the scalar momentum_buffer = None.


@final
class SGDRule(Rule):
    """SGD with momentum, dampening, Nesterov momentum (Sutskever et al. 2013), coupled decay and maximize, as in torch.

    `momentum`: whether any parameter group has one.
    """

    merges = True

    def __init__(self, momentum: bool) -> None:
        self.arrays = (_BUFFER,) if momentum else ()
        self.codes = {_BUFFER: "signed"} if momentum else {}
        self.scalars = (_BUFFER,)

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        self._read(Options(hyper, where), False)

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        return (_BUFFER,) if Options(hyper).number("momentum") != 0 else ()

    def apply(self, piece: Piece) -> None:
        state = piece.state
        first = not state.initialised or _BUFFER in state.scalars
        options = self._read(Options(piece.hyper), first)
        names = (_BUFFER,) if options["momentum"] != 0 else ()
        expect_arrays(piece, names)
        state.next_scalars = {_BUFFER: None} if self.arrays and first and not names else {}
        if runs_natively(piece):
            _native.sgd(native_arrays(piece, names), **options, threads=piece.threads)
        else:
            with opened(piece, self.codes) as tensors:
                sgd_formula(tensors, **options)

    def _read(self, options: Options, first: bool) -> _native.SgdOptions:
        return {
            "lr": options.number("lr"),
            "momentum": options.number("momentum"),
            "dampening": options.number("dampening"),
            "weight_decay": options.number("weight_decay"),
            "nesterov": options.flag("nesterov"),
            "maximize": options.flag("maximize"),
            "first": first,
        }


def sgd_formula(
    tensors: Opened,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """torch's own sequence of operations (`torch.optim.sgd`), for what the kernel does not serve."""
    grad = -tensors.grad if maximize else tensors.grad
    if weight_decay != 0:
        grad = grad.add(tensors.param, alpha=weight_decay)
    if momentum != 0:
        buffer = tensors.states[_BUFFER]
        if first:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
        grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
    tensors.param.add_(grad, alpha=-lr)
