"""A module that computes each position alone runs over the sequence in tiles, where one call would exceed the budget.

The tiled MLP of Arctic Long Sequence Training (Bekman et al. 2025), here without a change to the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch.utils.weak import TensorWeakRef

from outsize.move.comm import collectives
from outsize.move.storages import Storages
from outsize.run.activations import Activations, Layer, is_transformed
from outsize.run.layer_state import LayerState, version_of
from outsize.run.parts import Parts, Random

LOOK = 16
"""A call whose widest result is smaller than this part of the budget is not looked at."""

# Note [Position by position]
# That a module computes each position alone is proven by watching it once on two positions. Every operation that gets
# what came from the input must be one that is known not to mix positions, and the result must come from these. What
# else they get has no positions: a weight, or one value for all. Reading the sizes is refused, as they differ in a
# tile. So is all that a second tile would find or leave in another way: random numbers that all positions share,
# attributes that change, results that are kept, hooks, collectives. An operation that nobody can watch gives a tensor
# that nobody knows. The same run counts the bytes that a position leaves for the backward. So a call's bytes are
# arithmetic on its shape: every rank, and the forward that runs again in the backward, decides alike.


def _named(names: str) -> frozenset[Any]:
    """The functions with these names, and the methods."""
    spaces = (torch, torch.Tensor, functional)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_FREE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "ndim")),
    *_named("dim is_floating_point"),
}
"""What is alike in a tile."""

_EACH = _named(
    "abs add add_ addcdiv addcmul bfloat16 celu clamp clamp_max clamp_min clip clone contiguous cos detach div div_ "
    "divide double dropout elu eq erf exp expm1 float ge gelu gt half hardsigmoid hardswish hardtanh le leaky_relu "
    "lerp log log1p logsigmoid lt masked_fill maximum minimum mish mul mul_ multiply nan_to_num ne neg negative pow "
    "reciprocal relu relu6 relu_ rsqrt rsub selu sigmoid sigmoid_ sign silu sin softplus softsign sqrt square sub sub_ "
    "subtract tanh tanh_ threshold to true_divide type_as where __add__ __iadd__ __imul__ __isub__ __itruediv__ "
    "__mul__ __neg__ __pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__"
)
"""Element by element."""

_PRODUCTS = _named("linear matmul __matmul__")
_NORMS = _named("layer_norm rms_norm")
_BY_DIM = {
    function: place
    for place, names in enumerate(("amax amin cat glu log_softmax logsumexp mean softmax std sum var", "chunk split"))
    for function in _named(names)
}
"""Over the last dimension, and which argument after the first one says so."""


@final
class _Watch(TorchFunctionMode):
    """In the block, what comes from `x` [..., positions, features] is followed. See Note [Position by position]."""

    def __init__(self, x: torch.Tensor, module: nn.Module) -> None:
        super().__init__()
        self._x = x
        self._leading = x.shape[:-1]
        self.followed = {id(x): x}
        self._known: dict[int, torch.Tensor] = {id(each): each for each in (*module.parameters(), *module.buffers())}
        self.kept = Storages([x])  # for the backward, and the result
        self.is_proven = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        others = [each for each in given if id(each) not in self.followed]
        meets = len(others) < len(given)
        drawn = None if meets else Random([self._x])
        written = [(each, version_of(each)) for each in others]
        allowed = all(id(each) in self._known for each in others)
        allowed = allowed and (not meets or func in _FREE or self._keeps_positions(func, args, kwargs, others))
        result = func(*args, **kwargs)
        results = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        if meets and func not in _FREE:
            new = {id(each): each for each in results}
            allowed = allowed and bool(new) and not (new.keys() & self._known.keys())
            allowed = allowed and all(each.shape[:-1] == self._leading for each in results)
            self.followed |= new
        else:
            self._known |= {id(each): each for each in results}
            allowed = allowed and (drawn is None or not drawn.is_drawn())
        self.is_proven &= allowed and all(version_of(each) == version for each, version in written)
        return result

    def _keeps_positions(self, func: Any, args: Any, kwargs: Any, others: Sequence[torch.Tensor]) -> bool:
        if func in _EACH:
            return all(each.ndim < 2 or set(each.shape[:-1]) == {1} for each in others)
        first = args[0] if args else None
        if func in _BY_DIM:
            place = _BY_DIM[func] + 1
            dim = kwargs.get("dim", args[place] if len(args) > place else -1 if func is functional.glu else None)
            dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
            return not others and isinstance(dim, int) and dim in (-1, len(self._leading))
        if id(first) not in self.followed:
            return False
        if func is torch.Tensor.__getitem__:
            return isinstance(args[1], tuple) and [type(each) for each in args[1]] == [type(...), slice]
        if func in _PRODUCTS:
            return len(others) == sum(isinstance(each, torch.Tensor) for each in (*args[1:], *kwargs.values()))
        return func in _NORMS and len(kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())) == 1

    def save(self, tensor: torch.Tensor) -> None:
        """Counts what has positions: weights, and their copies in another precision, have none."""
        if tensor.shape[:-1].numel() == self._leading.numel():
            self.kept.add(tensor)


def _bytes_of_position(forward: Callable[..., Any], modules: Sequence[nn.Module], name: str, x: torch.Tensor) -> int:
    """What a call takes for each position of `x`; 0 where it is not proven to compute each alone."""
    rows = x[:1, :2] if x.ndim == 3 else x[:2]
    with torch.inference_mode(False):
        few = rows.detach().clone().requires_grad_()
    watch, drawn, others = _Watch(few, modules[0]), Random([x]), (collectives(), random.getstate())
    tables = [dict(each.__dict__) for each in modules]
    try:
        with torch.no_grad(), LayerState(modules, name, True), _disable_current_modes():
            version = version_of(few)
            with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(watch.save, _unused), watch:
                result = forward(few)
            watch.save(result)
            proven = watch.is_proven and id(result) in watch.followed and version_of(few) == version
            proven = proven and (collectives(), random.getstate()) == others and all(map(_is_same, tables, modules))
            kept = [TensorWeakRef(each) for each in watch.followed.values() if each is not result and each is not few]
            watch.followed.clear()
            proven = proven and all(each() is None for each in kept)
            fits = proven and Parts(2, x.ndim - 2).fault(forward, (rows,), {}) is None
            return watch.kept.nbytes // 2 if fits else 0
    except Exception:  # the module's own: the call itself raises it, or does not
        return 0
    finally:
        drawn.restore()


def _unused(_: None) -> torch.Tensor:
    raise RuntimeError("a proof has no backward")


def _is_same(table: dict[str, Any], module: nn.Module) -> bool:
    now = module.__dict__
    return table.keys() == now.keys() and all(now[name] is value for name, value in table.items())


@final
class PositionTiles:
    """The `forward` of a module, in tiles where its working memory would exceed `budget` bytes."""

    def __init__(self, module: nn.Module, name: str, budget: int) -> None:
        self._modules, self._name, self._forward = list(module.modules()), name, module.forward
        self._budget = max(budget, 1)
        self._widest = max(each.out_features for each in self._modules if isinstance(each, nn.Linear))
        self._positions: dict[object, int] = {}  # bytes of a position, by what a call looks like
        self._layers: dict[tuple[int, int], Layer] = {}  # by the number of tiles, and the dimension
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs or not self._is_large(args[0]):
            return self._forward(*args, **kwargs)
        tiles = self._tiles(args[0])
        return self._forward(*args) if tiles == 1 else self._layer(tiles, args[0].ndim - 2)(*args)

    def _is_large(self, x: Any) -> bool:
        """Whether it is worth a look."""
        if type(x) is not torch.Tensor:
            return False
        with torch._C.DisableTorchFunction():  # a module around this one may be watched
            return x.dim() > 1 and x.nbytes * self._widest * LOOK > self._budget * x.shape[-1]

    def _tiles(self, x: torch.Tensor) -> int:
        """Each takes a quarter of the budget; 1 where the whole call fits, or may not be cut."""
        if x.ndim > 3 or x.shape[-2] < 2 or x.layout is not torch.strided or is_transformed():
            return 1
        if not x.is_floating_point() or any(map(_has_hooks, self._modules[1:])):
            return 1
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        look = x.dtype, x.ndim, x.shape[-1], cast, tuple(each.training for each in self._modules)
        if look not in self._positions:
            self._positions[look] = _bytes_of_position(self._forward, self._modules, self._name, x)
        working = self._positions[look] * (x.numel() // x.shape[-1])
        return 1 if working <= self._budget else max(-(-4 * working // self._budget), 2)

    def _layer(self, tiles: int, dim: int) -> Layer:
        if (tiles, dim) not in self._layers:
            of_module = self._modules[0], self._name, self._forward
            parts = Parts(tiles, dim, strict=True, proven=True)
            self._layers[tiles, dim] = Layer(*of_module, "recompute", parts, Activations())
        return self._layers[tiles, dim]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def may_have_tiles(module: nn.Module) -> bool:
    """Whether the module is made of linear layers, and none itself."""
    never = isinstance(module, (nn.Linear, nn.ModuleList, nn.ModuleDict))
    return not never and any(isinstance(each, nn.Linear) for each in module.modules())
