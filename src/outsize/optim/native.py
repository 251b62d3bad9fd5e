"""The optimizers that the one-pass kernels run, `Lion` among them, each with its formula in torch's own operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from outsize import _native
from outsize.move.codes import CodeKind, encode
from outsize.optim.rules import Opened, Options, Piece, Rule, opened

_CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}


def runs_natively(piece: Piece) -> bool:
    """Whether the kernels serve the piece; torch's own operations serve every other."""
    return all(each.is_cpu and each.dtype in _CODES and each.is_contiguous() for each in (piece.param, piece.grad))


def native_arrays(piece: Piece, names: Sequence[str]) -> _native.Arrays:
    """The piece's memory with the states `names`, in the order that the kernel wants."""
    return _native.Arrays(
        param=piece.param.data_ptr(),
        param_dtype=_CODES[piece.param.dtype],
        master=0 if piece.master is None else piece.master.data_ptr(),
        grad=piece.grad.data_ptr(),
        grad_dtype=_CODES[piece.grad.dtype],
        states=[piece.states[name].data_ptr() for name in names],
        scales=[piece.scales[name].data_ptr() for name in names if name in piece.scales],
        numel=piece.param.numel(),
        grad_scale=0.0 if piece.ops.zero else piece.ops.scale,
        clamp_min=piece.ops.low,
        clamp_max=piece.ops.high,
    )


_BUFFER = "momentum_buffer"


# The formulas are torch's own functions, for what the kernels do not serve; on an accelerator fused, one kernel a step.


def adam_formula(tensors: Opened, *, decoupled: bool, step: int, **options: Any) -> None:
    fuses = _fuses(tensors.param)
    averages, squares, largest = ([tensors.states[name]] if name in tensors.states else [] for name in _ADAM_KINDS)
    counts = [_count(step - 1, tensors.param if fuses else None)]
    options |= {"decoupled_weight_decay": decoupled, "foreach": False, "fused": fuses}
    adam([tensors.param], [tensors.grad], averages, squares, largest, counts, **options)


def sgd_formula(tensors: Opened, *, momentum: float, first: bool, **options: Any) -> None:
    buffers = [None if first or momentum == 0 else tensors.states[_BUFFER]]
    options |= {"momentum": momentum, "foreach": False, "fused": _fuses(tensors.param)}
    sgd([tensors.param], [tensors.grad], buffers, **options)
    if buffers[0] is not None and first:
        tensors.states[_BUFFER].copy_(buffers[0])


def adagrad_formula(tensors: Opened, *, step: int, **options: Any) -> None:
    sums = [tensors.states["sum"]]
    adagrad([tensors.param], [tensors.grad], sums, [_count(step - 1)], foreach=False, fused=False, **options)


def _fuses(param: torch.Tensor) -> bool:
    """Whether torch has a fused step for these values where they lie."""
    kind, supported = param.device.type, _get_fused_kernels_supported_devices()
    return kind != "cpu" and kind in supported and param.dtype in (torch.float32, torch.float64)


def _count(step: int, fused_beside: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's functions take it, which add one to it."""
    if fused_beside is None:
        return torch.tensor(float(step), dtype=torch.float64, device="cpu")
    return torch.full((), float(step), dtype=torch.float32, device=fused_beside.device)


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


class NativeRule(Rule):
    """A rule with a kernel; a formula serves the pieces that the kernel does not."""

    merges = True
    kernel: Callable[..., None]
    formula: Callable[..., None]

    _last: tuple[object, Mapping[str, Any], tuple[str, ...]] = (None, {}, ())
    """The options that were read last, which are one object for all parameters of a group and step; what they say."""

    @abstractmethod
    def read(self, options: Options) -> Mapping[str, Any]:
        """What the kernel and the formula are given beside arrays and counts."""

    def counted(self, piece: Piece) -> Mapping[str, Any]:
        """What they are given of the parameter's own values."""
        return {"step": piece.step} if self.counts else {}

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        self.read(Options(hyper, where))

    def start(self, piece: Piece) -> None:
        """Fill the arrays of a parameter that was never stepped, where zeros will not do."""

    def apply(self, piece: Piece) -> dict[str, object]:
        last = self._last
        if last[0] is not piece.hyper:
            self._last = last = piece.hyper, self.read(Options(piece.hyper)), self.needs(piece.hyper)
        options, names = {**last[1], **self.counted(piece)}, last[2]
        if not piece.state.initialised:
            self.start(piece)
        if runs_natively(piece):
            self.kernel(native_arrays(piece, names), **options, threads=piece.threads)
        else:
            with opened(piece, self.codes) as tensors:
                self.formula(tensors, **options)
        return self.next_scalars(options, names)

    def next_scalars(self, options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """The per-parameter values after the step."""
        return {"step": float(options["step"])} if "step" in options else {}


class AdamRule(NativeRule):
    """Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with AMSGrad and maximize, as in torch."""

    kernel, formula = staticmethod(_native.adam), staticmethod(adam_formula)

    def __init__(self, amsgrad: bool, decoupled: bool) -> None:
        """`decoupled`: whether the weight decay is, unless the group says it."""
        self.arrays = _adam_arrays(amsgrad)
        self.codes = {name: _ADAM_KINDS[name] for name in self.arrays}
        self.counts = self.scalars = ("step",)
        self._decoupled = decoupled

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        return _adam_arrays(Options(hyper).flag("amsgrad"))

    def read(self, options: Options) -> Mapping[str, Any]:
        return {
            **options.numbers("lr", "weight_decay"),
            **options.numbers("eps", least=0),
            **options.betas(),
            **options.flags("maximize", "amsgrad"),
            "decoupled": options.flag("decoupled_weight_decay", self._decoupled),
        }


_ADAM_KINDS: dict[str, CodeKind] = {"exp_avg": "signed", "exp_avg_sq": "root", "max_exp_avg_sq": "root"}


def _adam_arrays(amsgrad: bool) -> tuple[str, ...]:
    return tuple(_ADAM_KINDS) if amsgrad else ("exp_avg", "exp_avg_sq")


# Note [No momentum yet]
# torch has no momentum_buffer before the first step with momentum; that step copies the gradient, without dampening.
# Here the array exists from the start. A parameter that was never stepped has no momentum yet; one that was stepped
# without momentum says so as torch's state does, by the scalar momentum_buffer = None.


@final
class SGDRule(NativeRule):
    """SGD with momentum, dampening, Nesterov momentum (Sutskever et al. 2013), coupled decay and maximize, as in torch.

    `momentum`: whether any parameter group has one.
    """

    kernel, formula = staticmethod(_native.sgd), staticmethod(sgd_formula)

    def __init__(self, momentum: bool) -> None:
        self.arrays = (_BUFFER,) if momentum else ()
        self.codes = {_BUFFER: "signed"} if momentum else {}
        self.scalars = (_BUFFER,)

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        return (_BUFFER,) if Options(hyper).number("momentum") != 0 else ()

    def check_rows(self, hyper: Mapping[str, object], name: str, optimizer: str) -> None:
        options = Options(hyper)
        _refuse_options(name, momentum=options.number("momentum"), weight_decay=options.number("weight_decay"))

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        options = self.read(Options(piece.hyper))
        sgd([piece.param], [piece.grad], [None], has_sparse_grad=True, foreach=False, fused=False, **options)
        return self.next_scalars({"first": not piece.state.initialised}, ())

    def next_scalars(self, options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        return {_BUFFER: None} if self.arrays and options["first"] and not names else {}

    def read(self, options: Options) -> Mapping[str, Any]:
        return {
            **options.numbers("lr", "momentum", "dampening", "weight_decay"),
            **options.flags("nesterov", "maximize"),
        }

    def counted(self, piece: Piece) -> Mapping[str, Any]:
        return {"first": not piece.state.initialised or _BUFFER in piece.state.scalars}


class AdagradRule(NativeRule):
    """Adagrad (Duchi et al. 2011) with learning-rate decay, coupled decay and maximize, as in torch."""

    kernel, formula = staticmethod(_native.adagrad), staticmethod(adagrad_formula)

    def __init__(self) -> None:
        self.arrays = ("sum",)
        self.codes = {"sum": "root"}
        self.counts = self.scalars = ("step",)

    def start(self, piece: Piece) -> None:
        total, value = piece.states["sum"], initial_sum(Options(piece.hyper))
        if "sum" in piece.scales:
            encode(torch.full_like(total, value, dtype=torch.float32), total, piece.scales["sum"], True)
        else:
            total.fill_(value)

    def check_rows(self, hyper: Mapping[str, object], name: str, optimizer: str) -> None:
        _refuse_options(name, weight_decay=Options(hyper).number("weight_decay"))

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        tensors, options = Opened(piece.param, piece.grad, piece.states), self.read(Options(piece.hyper))
        adagrad_formula(tensors, step=piece.step, has_sparse_grad=True, **options)
        return {"step": float(piece.step)}

    def read(self, options: Options) -> Mapping[str, Any]:
        initial_sum(options)
        return {
            **options.numbers("lr", "weight_decay"),
            **options.numbers("lr_decay", "eps", least=0),
            **options.flags("maximize"),
        }


def _refuse_options(name: str, **values: float) -> None:
    """Raise `ValueError` where an option of the table's group changes rows that the batch does not touch."""
    for key, value in values.items():
        if value != 0:
            raise ValueError(
                f"{key} of the parameter group of table {name!r}, an embedding with sparse=True, is {value:g}, and "
                f"would change rows that the batch does not touch: give the table a group of its own with {key}=0, or "
                f"use outsize.optim.LazyAdamW, or sparse=False"
            )


def initial_sum(options: Options) -> float:
    return options.number("initial_accumulator_value", least=0, default=0.0)


class Stepped(torch.optim.Optimizer):
    """An optimizer of ours that updates each parameter alone, where outsize does not run it itself."""

    @abstractmethod
    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter, and its `state`, which is empty before its first step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss


class Lion(Stepped):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2).

    Each step moves every weight by `lr` in the direction of the sign of a momentum, so `lr` is usually 3 to 10 times
    smaller, and `weight_decay` (decoupled) as many times larger, than with AdamW. Works with and without outsize.

    >>> optimizer = outsize.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

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

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        lion_formula(Opened(param, grad, state), **LionRule().read(Options(group)))


@final
class LionRule(NativeRule):
    """The update of `Lion`."""

    kernel, formula = staticmethod(_native.lion), staticmethod(lion_formula)

    def __init__(self) -> None:
        self.arrays = ("exp_avg",)
        self.codes = {"exp_avg": "signed"}
        self.scalars = ()

    def read(self, options: Options) -> Mapping[str, Any]:
        return {**options.numbers("lr", "weight_decay"), **options.betas(), **options.flags("maximize")}
