"""`param.grad` at rest: a tensor without bytes that knows its norm and remembers what was done to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from outsize.move.grad_ops import AS_IT_IS, GradOps, is_power_of_two, vector_norm
from outsize.move.gradients import GradShard
from outsize.run.activations import in_backward
from outsize.run.layer_state import version_of
from outsize.run.local import is_repeated

if TYPE_CHECKING:
    from outsize.run.unit_gradients import UnitGradients

aten = torch.ops.aten


@final
class RestingGrad(torch.Tensor):
    """A gradient at rest: shape, dtype and device of its parameter, and no storage.

    It answers norms, scaling, clamping and zeroing, which is what `clip_grad_norm_`, `clip_grad_value_`,
    `get_total_norm` and `zero_grad` do; they are remembered and applied inside the update. Everything else raises,
    except inside `outsize.gathered(..., grads=True)`, which shows the values.
    """

    label: str
    _home: weakref.ref[UnitGradients]
    ops: GradOps
    norms: dict[float, torch.Tensor]
    own_norm: torch.Tensor | None
    loose: torch.Tensor | None
    shard: GradShard | None
    spent: bool
    stale: bool
    repeated: bool
    reductions: int
    """With several ranks: how many it is the sum of, for comparison with the other ranks."""

    @staticmethod
    def __new__(
        cls, param: torch.Tensor, name: str, home: UnitGradients, norm: torch.Tensor, loose: torch.Tensor | None = None
    ) -> RestingGrad:
        self: RestingGrad = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device, requires_grad=False
        )
        self.label = name
        self.repeated = is_repeated(param)
        self._home = weakref.ref(home)  # a parameter's gradient is its own: autograd hides it from the collector
        self.ops = AS_IT_IS
        self.norms = {2.0: norm}  # the memory of this norm stays the gradient's own
        self.own_norm = None  # of what rests here, where `norms` are of the whole gradient on several ranks
        self.loose = loose
        self.shard = None
        self.spent = False
        self.stale = False  # whether another one is the parameter's gradient by now
        self.reductions = 0
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """What is done to the gradient at rest is done in fp32: a scaler may unscale the gradient of an fp16 parameter,
        which it refuses for a gradient in fp16."""
        own: torch.dtype = torch.Tensor.dtype.__get__(self)  # type: ignore[attr-defined]
        return torch.float32 if own is torch.float16 else own

    @property
    def home(self) -> UnitGradients:
        home = self._home()
        assert home is not None, "the model of this gradient is gone"
        return home

    @property
    def data(self) -> RestingGrad:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            raise RuntimeError(
                f"the gradient of {self.label!r} is at rest, and values put into its .data would be lost: write them "
                f"with `with outsize.gathered(param, grads=True, modify=True): param.grad.copy_(...)`"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Clipping asks each gradient: it gets its answer without a way through torch's dispatcher."""
        answer = _OFTEN.get(func)
        if answer is not None and type(args[0]) is cls:
            return _answered(answer, args[0], args, kwargs or {})
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        answer = _ANSWERS.get(func)
        if answer is None:
            raise _needs_values(func, (*args, *(kwargs or {}).values()))
        return _answered(answer, _one_of(args), args, kwargs or {})

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise _needs_values("numpy", (self,))

    def tolist(self) -> NoReturn:
        raise _needs_values("tolist", (self,))

    def __array__(self, *_: Any) -> NoReturn:
        raise _needs_values("numpy", (self,))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RestingGrad({self.label!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> RestingGrad:
        raise RuntimeError(f"the gradient of {self.label!r} is at rest and cannot be copied; see outsize.gathered")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(f"the gradient of {self.label!r} is at rest and cannot be pickled; use outsize.save")

    def become(self, norm: torch.Tensor | None, loose: torch.Tensor | None, shard: GradShard | None) -> None:
        """The bytes are others now, and lie in `shard` unless they are `loose`: only their norm is remembered. It is
        None where it is filled in before anybody asks for it."""
        self.ops = AS_IT_IS
        self.norms = {2.0: self.norms[2.0] if norm is None else self.norms[2.0].copy_(norm)}
        self.own_norm = None
        self.loose = loose
        self.shard = shard
        self.spent = False

    def expect_unspent(self, what: str) -> None:
        """Raise if the gradient was applied in the backward already."""
        if self.spent:
            raise RuntimeError(
                f"the gradient of {self.label!r} cannot be {what}: with update='backward' it was applied as soon as it "
                f"was complete; use update='fetch' (the default) for clipping, loss scaling and accumulation"
            )

    def norm_of(self, order: float) -> torch.Tensor:
        """The vector norm of the gradient as it is now, fp32 or fp64, 0-d."""
        resting = self.home.resting
        resting.look(self)
        if self.ops is AS_IT_IS and order in self.norms:
            return self.norms[order].clone()
        if self.ops.zero:
            return torch.zeros_like(self.norms[2.0])
        if self.ops.rounds or order not in self.norms:
            norm = resting.norm(self, order).to(
                self.norms[2.0].dtype
            )  # of a copy: an update that is owed still reads the bytes
            if self.ops.identity:
                self.norms[order] = norm
            return norm
        norm = self.norms[order]
        return norm.clone() if order == 0 or self.ops.scale == 1.0 else norm * abs(self.ops.scale)

    @property
    def finite(self) -> torch.Tensor:
        """0-d, finite only if all elements are; a clamp changes nothing about that."""
        self.home.resting.look(self)
        if self.ops.zero or not isfinite(self.ops.scale):
            return torch.full_like(self.norms[2.0], 0.0 if self.ops.zero else nan)
        return self.norms[2.0] if self.ops.scale == 1.0 else self.norms[2.0] * abs(self.ops.scale)

    def scale(self, factor: float) -> None:
        home = self.home
        home.resting.look(self)
        if self.spent:
            self.expect_unspent("scaled or clipped")
        ops = self.ops.scaled(factor)
        if ops is None:
            home.rewrite(self)
            ops = self.ops.scaled(factor)
            assert ops is not None
        self.ops = ops

    def divide_by(self, divisor: float) -> None:
        self.home.resting.look(self)
        self.expect_unspent("divided")
        if not self.ops.zero:
            self.home.rewrite(self, divisor)


def _answered(answer: Callable[..., Any], grad: RestingGrad, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner = grad.home.owner
    owner.take("an operation on gradients")
    try:
        return answer(*args, **kwargs)
    finally:
        owner.give()


class _Factors:
    """Turns 0-d factors into floats; the clip factor is one tensor for all gradients and is read once."""

    def __init__(self) -> None:
        self._last: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._value = 1.0

    def read(self, factor: object) -> float:
        if not isinstance(factor, torch.Tensor):
            return float(factor)  # type: ignore[arg-type]
        if factor.numel() != 1:
            raise RuntimeError(
                "a gradient at rest can be multiplied by one number only; for other factors write it inside `with "
                "outsize.gathered(param, grads=True, modify=True)`"
            )
        seen = self._last is not None and self._last() is factor and not factor.is_inference()
        if not seen or self._version != factor._version:
            self._last = weakref.ref(factor)
            self._version = version_of(factor)
            self._value = float(factor.item())
        return self._value


_factors = _Factors()


def _flat(values: Any) -> list[Any]:
    return [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else (value,))]


def _one_of(args: Any) -> RestingGrad:
    return next(each for each in _flat(args) if isinstance(each, RestingGrad))


def _needs_values(func: Any, args: Any) -> RuntimeError:
    grad = _one_of(args)
    return RuntimeError(
        f"the gradient of {grad.label!r} is at rest and {func} needs its values; read it inside "
        f"`with outsize.gathered(param, grads=True)`. They have no graph: where one is needed, use "
        f"`torch.autograd.grad(loss, params, create_graph=True)`"
    )


def _norm(grad: RestingGrad, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dim not in (None, []) or keepdim:
        raise RuntimeError(f"the gradient of {grad.label!r} is at rest: only the norm over all its elements is known")
    norm = grad.norm_of(float(ord))
    return grad.home.resting.of_stage(float(ord), norm if dtype is None else norm.to(dtype))


def _norms(grads: list[RestingGrad], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [_norm(grad, ord) if isinstance(grad, RestingGrad) else vector_norm(grad, ord) for grad in grads]


def _mul_(grad: RestingGrad, factor: Any) -> RestingGrad:
    grad.scale(_factors.read(factor))
    return grad


def _div_(grad: RestingGrad, divisor: Any) -> RestingGrad:
    value = _factors.read(divisor)
    if is_power_of_two(abs(value)):
        grad.scale(1.0 / value)
    else:  # no factor gives the bits of the quotient
        grad.divide_by(value)
    return grad


def _foreach_mul_(grads: list[Any], factor: Any) -> None:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(grads)
    for grad, each in zip(grads, factors, strict=True):
        grad.mul_(each)


def _zero_(grad: RestingGrad) -> RestingGrad:
    grad.home.resting.look(grad)
    grad.ops = GradOps(zero=True)
    grad.reductions = 0
    return grad


def _foreach_zero_(grads: list[Any]) -> None:
    for grad in grads:
        grad.zero_()


def _clamp_(grad: RestingGrad, min: Any = None, max: Any = None) -> RestingGrad:
    grad.home.resting.look(grad)
    grad.expect_unspent("clamped")
    low = -inf if min is None else _factors.read(min)
    high = inf if max is None else _factors.read(max)
    grad.ops = grad.ops.clamped(low, high)
    return grad


def _foreach_clamp(lower: bool) -> Callable[[list[Any], Any], None]:
    def clamp(grads: list[Any], bound: Any) -> None:
        for grad in grads:
            grad.clamp_(min=bound) if lower else grad.clamp_(max=bound)

    return clamp


def _unscale(grads: list[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """What `torch.amp.GradScaler` does before a step: note what is not finite, divide by the loss scale."""
    resting = [grad for grad in grads if isinstance(grad, RestingGrad)]
    plain = [grad for grad in grads if not isinstance(grad, RestingGrad)]
    finite, reduction = not not_finite(plain), resting[0].home.resting.reduction
    if plain and reduction is not None:  # rows of tables, of which each rank has others
        finite = reduction.everywhere([finite])[0]
    finite = finite and not not_finite(resting)
    if not (finite if reduction is None else reduction.in_every_stage(finite)):
        found_inf.fill_(1.0)
    for grad in grads:
        grad.mul_(inverse_scale)


def not_finite(grads: Sequence[torch.Tensor]) -> list[int]:
    """Which of some gradients are not finite, by number. A norm is of elements that are not finite, or of large ones
    whose squares overflow: then the elements tell."""
    norms = {at: grad.finite for at, grad in enumerate(grads) if isinstance(grad, RestingGrad)}
    plain = {at: grad for at, grad in enumerate(grads) if at not in norms and grad.numel()}
    norms |= zip(plain, torch._foreach_norm(list(plain.values())) if plain else (), strict=True)
    if not norms:
        return []
    # Some gradients may be in host memory, others on an accelerator.
    device = next((norm.device for norm in norms.values() if norm.device.type != "cpu"), torch.device("cpu"))
    good = torch.isfinite(torch.stack([norm.to(device) for norm in norms.values()]))
    doubtful = [at for at, each in zip(norms, good.tolist(), strict=True) if not each] if not good.all() else ()
    return [at for at in doubtful if not _is_finite(grads[at])]


def _is_finite(grad: torch.Tensor) -> bool:
    """By looking at the elements."""
    return grad.home.resting.all_finite(grad) if isinstance(grad, RestingGrad) else bool(torch.isfinite(grad).all())


# Note [What adds to a gradient at rest]
# Autograd adds a further contribution in place, `grad.add_(more)`, and where the backward keeps its graph out of place,
# `grad + more`, whose result takes the gradient's place: there the sum may be the gradient itself. Everywhere else
# `grad + more` leaves the gradient as it is, so its values are needed; so they are where it is added to another tensor.


def _add(grad: Any, more: Any, *, alpha: Any = 1) -> RestingGrad:
    if not (in_backward() and torch.is_grad_enabled()):
        raise _needs_values(aten.add.Tensor, (grad, more))
    return _add_(grad, more, alpha=alpha)


def _add_(grad: Any, more: Any, *, alpha: Any = 1) -> RestingGrad:
    """Add a tensor that is not at rest to a gradient that is. See Note [What adds to a gradient at rest]."""
    plain = isinstance(more, torch.Tensor) and not isinstance(more, RestingGrad)
    if not isinstance(grad, RestingGrad) or not plain or alpha != 1:
        raise _needs_values(aten.add_.Tensor, (grad, more))
    grad.home.add(grad, more if more.shape == grad.shape else more.expand(grad.shape).contiguous())
    return grad


_OFTEN: dict[Any, Callable[..., Any]] = {torch.linalg.vector_norm: _norm, torch.Tensor.mul_: _mul_}

_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten._foreach_mul_.Tensor: _foreach_mul_,
    aten._foreach_mul_.Scalar: _foreach_mul_,
    aten._foreach_mul_.ScalarList: _foreach_mul_,
    aten.zero_.default: _zero_,
    aten._foreach_zero_.default: _foreach_zero_,
    aten.clamp_.default: _clamp_,
    aten.clamp_min_.default: lambda grad, low: _clamp_(grad, min=low),
    aten.clamp_max_.default: lambda grad, high: _clamp_(grad, max=high),
    aten._foreach_clamp_min_.Scalar: _foreach_clamp(lower=True),
    aten._foreach_clamp_max_.Scalar: _foreach_clamp(lower=False),
    aten._foreach_maximum_.Scalar: _foreach_clamp(lower=True),
    aten._foreach_minimum_.Scalar: _foreach_clamp(lower=False),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.detach.default: lambda grad: grad,
    aten.detach_.default: lambda grad: grad,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_,
}
