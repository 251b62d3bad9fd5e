"""Logits that are computed when they are needed, and for a loss tile by tile: they never exist as a whole.

Arctic Long Sequence Training (Bekman et al. 2025) computes the loss in tiles; here the model is not touched for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outsize.run.activations import in_backward, is_transformed
from outsize.run.once import differentiable_once
from outsize.run.placeholder import Placeholder
from outsize.run.saved import of_checkpoint, top_hooks
from outsize.run.tiles import Run
from outsize.run.vocabulary import Largest, Logits, Losses, Shares, add_product

LEAST_BYTES = 64 << 20
"""Smaller logits are computed at once."""

TILE_BYTES = 64 << 20
"""Of logits in fp32; softmax and gradient need as much again."""

PRODUCT_BYTES = 16 << 20
"""Of a weight's gradient in fp32, of some rows: so much is added to the sum at once. A processor's caches hold it."""

# Note [Logits that come late]
# The head of a language model returns a tensor with a shape and no values. Casts, views and slices of it are noted.
# `logsumexp` and `argmax` over the vocabulary take rows of the head's input tile by tile.
# `cross_entropy` takes rows of the head's input tile by tile. It computes their logits, their loss and at once the
# gradients, as the sum over rows admits it: the backward only scales them. Every other operation gets the computed
# logits. They are computed as they would have been in the head's call: with its autocast, with or without gradients,
# and from its weights, or not at all where these have changed.


@final
@dataclass(frozen=True)
class HeadCall:
    """One call of a head, whose logits are not computed."""

    module: nn.Linear
    forward: Callable[[torch.Tensor], torch.Tensor]
    frame: Callable[[], AbstractContextManager[None]]
    check: Callable[[], None]  # raises where the weights have changed since
    in_tiles: Callable[[], Run | None]  # of what runs an operation on the weight, where that is used in tiles
    grad: bool
    autocast: torch.dtype | None

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the block the module can be called as it was. Raises `RuntimeError` where its weights have changed."""
        try:
            self.check()
        except RuntimeError as error:
            raise RuntimeError(
                "these logits were not computed, because nothing but a loss had asked for them, and the model has "
                "changed since: use logits before optimizer.step(), or pass tiles=False to outsize.prepare"
            ) from error
        kind = self.module.weight.device.type
        cast = torch.autocast(kind, self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.grad), cast, self.frame():
            yield

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        with self.again():
            return self.forward(rows)

    def over_vocabulary(
        self, run: Run, rows: torch.Tensor, dtype: torch.dtype, make: Callable[[Logits], Losses | Largest]
    ) -> torch.Tensor:
        """A number for each row of logits of this dtype, [rows], tile by tile of the weight."""
        with self.again():
            raw, bias = self.dtype(rows), self.module.bias
            cast = None if bias is None else bias.clone().to(raw)
            return run(make(Logits(raw, dtype, TILE_BYTES)), rows.to(raw), cast)

    def whole(self) -> list[nn.Parameter]:
        """The parameters that get a gradient in one piece."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        return trained if self.in_tiles() is None else []

    def dtype(self, rows: torch.Tensor) -> torch.dtype:
        return rows.dtype if self.autocast is None else self.autocast


@final
class Head:
    """The `forward` of a linear layer whose result may be computed late. See Note [Logits that come late]."""

    def __init__(
        self,
        module: nn.Linear,
        frame: Callable[[], AbstractContextManager[None]],
        reference: Callable[[torch.Tensor], Callable[[], None]],
        in_tiles: Callable[[], Run | None],
    ) -> None:
        """`reference` gives a function that raises where a tensor's values have changed since; `in_tiles`, what runs
        an operation on the weight, where that is used in tiles."""
        self._module, self._forward, self._frame, self._reference = module, module.forward, frame, reference
        self._in_tiles = in_tiles
        self.__wrapped__ = module.forward

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        module = self._module
        nbytes = rows.numel() // max(rows.shape[-1], 1) * module.out_features * rows.itemsize
        if nbytes < LEAST_BYTES or type(rows) is not torch.Tensor or not _is_usual():
            return self._forward(rows)
        kind = rows.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        check = self._reference(module.weight)
        call = HeadCall(module, self._forward, self._frame, check, self._in_tiles, torch.is_grad_enabled(), autocast)
        return LateLogits.of(call, rows, call.dtype(rows))


def _is_usual() -> bool:
    """Whether nothing looks on that would have to see the operations themselves."""
    usual = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    return usual and not in_backward() and not is_transformed() and not of_checkpoint(top_hooks())


@final
class LateLogits(Placeholder):
    """Logits of a call that are not computed yet: [..., features] of the `rows` [..., inputs] of the head."""

    call: HeadCall
    rows: torch.Tensor
    value: torch.Tensor | None

    @staticmethod
    def of(call: HeadCall, rows: torch.Tensor, dtype: torch.dtype) -> LateLogits:
        shape = (*rows.shape[:-1], call.module.out_features)
        made: LateLogits = torch.Tensor._make_wrapper_subclass(LateLogits, shape, dtype=dtype, device=rows.device)
        made.call, made.rows, made.value = call, rows, None
        trained = rows.requires_grad or any(param.requires_grad for param in call.module.parameters())
        if not (call.grad and trained):
            return made
        with torch.enable_grad():
            token = torch.zeros((), device=rows.device, requires_grad=True)
            with torch._C.DisableTorchFunctionSubclass():
                return _InGraph.apply(rows, token, call, dtype, [made], *call.whole())  # type: ignore[no-any-return]

    def values(self) -> torch.Tensor:
        """The values, computed once."""
        if self.value is None:
            with torch._C.DisableTorchFunctionSubclass():
                dtype = self.dtype
            self.value = self.call.logits(self.rows).to(dtype)
        return self.value

    @classmethod
    def late(cls, func: Any, args: Any, kwargs: Any) -> Any:
        late, first = _LATE.get(func), args[0] if args else kwargs.get("input")
        is_late = isinstance(first, LateLogits) and first.value is None
        return late(*args, **kwargs) if late is not None and is_late and _takes(late, args, kwargs) else NotImplemented


def _takes(late: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the function knows these arguments by these names."""
    try:
        signature(late).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


_ONCE = "large logits and their loss are computed late, which has no second derivative: prepare with tiles=False"


class _InGraph(torch.autograd.Function):
    """Late logits in the graph. What knows of them goes past this; a custom function gives them a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        token: torch.Tensor,
        call: HeadCall,
        dtype: torch.dtype,
        made: list[LateLogits],
        *whole: nn.Parameter,
    ) -> LateLogits:
        ctx.call, ctx.dtype, ctx.whole = call, dtype, whole
        ctx.save_for_backward(rows)
        return made[0]  # no argument of its own: autograd would return a view of it

    @staticmethod
    @differentiable_once(_ONCE)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        leaf = rows.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            logits = ctx.call.logits(leaf).to(ctx.dtype)
            if ctx.call.in_tiles() is not None:
                torch.autograd.backward(logits, grad)  # that of the weight goes where it always goes
                return leaf.grad, *[None] * (4 + len(ctx.whole))
            wanted = [each for each in (leaf, *ctx.whole) if each.requires_grad]
            found = iter(torch.autograd.grad(logits, wanted, grad))
        of_rows, *of_whole = (next(found) if each.requires_grad else None for each in (leaf, *ctx.whole))
        return of_rows, None, None, None, None, *of_whole


def _like(logits: LateLogits, rows: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> LateLogits:
    with torch._C.DisableTorchFunctionSubclass():
        dtype = logits.dtype if dtype is None else dtype
    return LateLogits.of(logits.call, logits.rows if rows is None else rows, dtype)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(logits: LateLogits) -> Any:
        return _like(logits, dtype=dtype)

    return cast


def _to(logits: LateLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1:
        return NotImplemented
    if isinstance(args[0], torch.dtype):
        return _like(logits, dtype=args[0]) if args[0].is_floating_point else NotImplemented
    try:
        same = torch.device(args[0]) == logits.rows.device
    except (TypeError, RuntimeError):
        return NotImplemented
    return logits if same else NotImplemented


def _view(logits: LateLogits, *shape: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    features = logits.call.module.out_features
    if not all(isinstance(size, int) for size in sizes) or sizes.count(-1) > 1 or not sizes:
        return NotImplemented
    if sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        if known <= 0 or logits.numel() // known != features:
            return NotImplemented
    elif sizes[-1] != features:
        return NotImplemented
    return _like(logits, logits.rows.reshape(*sizes[:-1], logits.rows.shape[-1]))


def _flatten(logits: LateLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = logits.rows.ndim
    if not 0 <= start_dim % dims <= end_dim % dims < dims - 1:
        return NotImplemented
    return _like(logits, logits.rows.flatten(start_dim, end_dim))


def _by_rows(
    function: Callable[..., torch.Tensor], in_tiles: Callable[[Logits], Losses | Largest]
) -> Callable[..., Any]:
    """A function that makes one number of each row of logits."""

    def reduced(logits: LateLogits, dim: Any = None, keepdim: bool = False) -> Any:
        call, rows = logits.call, logits.rows
        if dim not in (-1, rows.ndim - 1) or rows.ndim < 2:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            dtype = logits.dtype

        def of_tile(rows: torch.Tensor) -> torch.Tensor:
            return function(call.logits(rows).to(dtype), -1)

        run, flat = call.in_tiles(), rows.reshape(-1, rows.shape[-1])
        if run is not None and len(flat):
            found = call.over_vocabulary(run, flat, dtype, in_tiles)
            found = found.to(dtype) if found.is_floating_point() else found
        else:
            found = _in_turn(call, of_tile, flat)
        return found.view(*rows.shape[:-1], *([1] if keepdim else []))

    return reduced


def _tiles(call: HeadCall, *columns: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The rows of each, so many that their logits take `TILE_BYTES`."""
    most = max(TILE_BYTES // (4 * call.module.out_features), 1)
    return list(zip(*(each.split(most) for each in columns), strict=True))


def _in_turn(call: HeadCall, function: Callable[..., torch.Tensor], *columns: torch.Tensor) -> torch.Tensor:
    """What the function makes of the rows, of a tile after the other, and again in the backward."""
    run = partial(checkpoint, function, use_reentrant=False) if call.grad else function
    return torch.cat([run(*tile) for tile in _tiles(call, *columns)])


def _item(logits: LateLogits, index: Any) -> Any:
    """Slices and numbers for all dimensions but the last one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(each is Ellipsis or isinstance(each, (slice, int)) for each in parts) or parts.count(Ellipsis) > 1:
        return NotImplemented
    missing = logits.rows.ndim - (len(parts) - parts.count(Ellipsis))
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * missing
    if missing < 0 or parts[-1] != slice(None):
        return NotImplemented
    return _like(logits, logits.rows[tuple(parts)])


def _cross_entropy(
    input: LateLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rows, call = input.rows, input.call
    indices = isinstance(target, torch.Tensor) and not target.is_floating_point() and target.ndim == 1
    if rows.ndim != 2 or not indices or len(target) != len(rows) or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in ("mean", "sum", "none"):
        return NotImplemented
    loss = _Loss(call, input.dtype, weight, ignore_index, label_smoothing)
    run = call.in_tiles() if len(rows) else None
    if run is not None or reduction == "none":
        total = _in_turn(call, loss.of_each, rows, target) if run is None else loss.in_tiles(run, rows, target)
        if reduction == "none":
            return total
        total = total.sum()
    else:
        with call.again():
            total = _SumOfLosses.apply(rows, call.module.weight, call.module.bias, target, loss)
    return total if reduction == "sum" else total / loss.divisor(target)


@final
@dataclass(frozen=True)
class _Loss:
    """The cross entropy of logits of a call."""

    call: HeadCall
    dtype: torch.dtype
    weight: torch.Tensor | None
    ignore_index: int
    label_smoothing: float

    def of(self, logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.cross_entropy(
            logits.to(self.dtype),
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    def of_each(self, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.of(self.call.logits(rows), target, "none")

    def in_tiles(self, run: Run, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The losses of all rows, [rows], where the weight of the head is used in tiles."""
        classes, kept = self.call.module.out_features, target != self.ignore_index
        least, most = (int(each) for each in torch.where(kept, target, 0).aminmax())
        if least < 0 or most >= classes:
            raise IndexError(f"Target {least if least < 0 else most} is out of bounds: the head has {classes} classes")
        weight = torch.ones(classes, device=rows.device) if self.weight is None else self.weight
        weight = weight.to(torch.float64 if self.dtype is torch.float64 else torch.float32)
        of_target = (1 - self.label_smoothing) * kept * weight[torch.where(kept, target, 0)]
        of_all = self.label_smoothing / classes * weight if self.label_smoothing else None
        shares = Shares(target, kept, of_target, of_all)
        found = self.call.over_vocabulary(run, rows, self.dtype, lambda logits: Losses(logits, shares))
        return found if torch.is_autocast_enabled(rows.device.type) else found.to(self.dtype)

    def divisor(self, target: torch.Tensor) -> torch.Tensor:
        """The mean is the sum over this."""
        kept = target != self.ignore_index
        if self.weight is None:
            return kept.sum().to(self.dtype)
        return torch.where(kept, self.weight[torch.where(kept, target, 0)], 0).sum()


class _SumOfLosses(torch.autograd.Function):
    """The sum of the losses of all rows; its gradients are computed with it, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        loss: _Loss,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad if loss.call.grad else (False,) * 3
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        wide = torch.float32 if loss.dtype.itemsize < 4 else loss.dtype
        total, dtype = torch.zeros((), dtype=wide, device=rows.device), loss.dtype
        of_rows = torch.empty_like(rows) if wanted[0] else None
        tiles = _tiles(loss.call, rows.detach(), target)
        summed = weight.dtype if len(tiles) == 1 else torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=summed) if wanted[1] else None
        of_bias = None
        if bias is not None and wanted[2]:
            of_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        start = 0
        for some_rows, some_target in tiles:
            raw = functional.linear(some_rows, weight, bias).requires_grad_(any(wanted[:3]))
            with torch.enable_grad():
                part = loss.of(raw, some_target, "sum")
            total += part.detach()
            dtype = part.dtype  # autocast computes losses in fp32
            if any(wanted[:3]):
                (grad,) = torch.autograd.grad(part, raw)
                with torch.autocast(rows.device.type, enabled=False):
                    _add_gradients(grad, some_rows, weight, start, of_rows, of_weight, of_bias)
            start += len(some_rows)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        ctx.save_for_backward(of_rows, of_weight, of_bias)
        ctx.like = None if bias is None else bias.dtype
        return total.to(dtype)

    @staticmethod
    @differentiable_once(_ONCE)
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_rows, of_weight, of_bias = ctx.saved_tensors
        scaled = [None if each is None else each * scale for each in (of_rows, of_weight)]
        return *scaled, None if of_bias is None else (of_bias * scale).to(ctx.like), None, None


def _add_gradients(
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    of_rows: torch.Tensor | None,
    of_weight: torch.Tensor | None,
    of_bias: torch.Tensor | None,
) -> None:
    """Those of some rows, from the gradient of their logits."""
    if of_rows is not None:
        of_rows[start : start + len(rows)] = grad @ weight.to(grad.dtype)
    if of_weight is not None:
        on_cpu = grad.device.type == "cpu"  # elsewhere a launch costs more than a cache saves
        most = PRODUCT_BYTES if on_cpu else TILE_BYTES
        some = len(weight) if of_weight.dtype is grad.dtype else max(most // (4 * rows.shape[1]), 1)
        for total, part in zip(of_weight.split(some), grad.split(some, dim=1), strict=True):
            add_product(total, part.t(), rows.to(grad.dtype))
    if of_bias is not None:
        of_bias += grad.sum(0, dtype=of_bias.dtype)


_LATE: dict[Any, Callable[..., Any]] = {
    torch.Tensor.float: _cast(torch.float32),
    torch.Tensor.double: _cast(torch.float64),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: lambda logits: logits,
    torch.Tensor.view: _view,
    torch.Tensor.reshape: _view,
    torch.reshape: _view,
    torch.Tensor.__getitem__: _item,
    **dict.fromkeys((torch.Tensor.flatten, torch.flatten), _flatten),
    **dict.fromkeys((torch.Tensor.logsumexp, torch.logsumexp), _by_rows(torch.logsumexp, Losses)),
    **dict.fromkeys((torch.Tensor.argmax, torch.argmax), _by_rows(torch.argmax, Largest)),
    functional.cross_entropy: _cross_entropy,
}
