"""Stacks of matrices, of experts say, that are too large to be gathered: an operation reads some of them at a time.

Models use a stack whole (`torch.bmm`, `matmul`, `einsum`, `grouped_mm`), or one of its matrices after the other
(`linear(x, stack[i])`). A part of a stack, or its transpose, has no values until an operation takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from outsize.run.placeholder import Placeholder

if TYPE_CHECKING:
    from outsize.run.tiles import Found, Tile, Tiles, Wanted


def is_stack(module: nn.Module, param: torch.Tensor) -> bool:
    """Whether the parameter may be a stack of matrices, each for some of the input. Modules of torch have none."""
    return param.dim() == 3 and not type(module).__module__.startswith("torch.nn.")


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation in tiles; `NotImplemented` where it needs the whole stack."""

Connect = Callable[["Part"], "Part"]
"""Puts a part into the graph, behind its stack: a custom function gives its gradient to the part itself."""


class Part(Placeholder):
    """One matrix of a stack, or all of them, maybe transposed; without values."""

    stack: torch.Tensor
    number: int | None
    transposed: bool
    run: Run
    connect: Connect

    @staticmethod
    def of(stack: torch.Tensor, number: int | None, transposed: bool, run: Run, connect: Connect) -> Part:
        with torch._C.DisableTorchFunctionSubclass():
            shape = list(stack.shape[1:] if number is not None else stack.shape)
            if transposed:
                shape[-1], shape[-2] = shape[-2], shape[-1]
            part: Part = torch.Tensor._make_wrapper_subclass(Part, shape, dtype=stack.dtype, device=stack.device)
            part.stack, part.number, part.transposed, part.run, part.connect = stack, number, transposed, run, connect
            return connect(part) if torch.is_grad_enabled() and stack.requires_grad else part

    def of_gradient(self) -> Callable[[Tile, torch.Tensor], torch.Tensor | None]:
        """A function of a tile and the part's gradient: that of the tile's matrices, None where it has none of them."""
        number, transposed = self.number, self.transposed  # the function holds no part: its graph would hold itself

        def of_tile(tile: Tile, grad: torch.Tensor) -> torch.Tensor | None:
            grad = grad.swapaxes(-2, -1) if transposed else grad
            if number is None:
                return grad[tile.start : tile.stop]
            if number not in tile:
                return None
            found = grad.new_zeros(len(tile), *grad.shape)
            found[number - tile.start] = grad
            return found

        return of_tile

    def values(self) -> torch.Tensor:
        """All of its values."""
        found = self.stack if self.number is None else self.run(_select, (self.stack, self.number), {})
        if found is NotImplemented:  # the stack is there
            found = self.stack.narrow(0, self.number or 0, 1).squeeze(0)
        return found.swapaxes(-2, -1) if self.transposed else found

    @classmethod
    def late(cls, func: Any, args: Any, kwargs: Any) -> Any:
        part = next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Part))
        name = getattr(func, "__name__", "")
        if "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            _refuse_write(name)
        view = part_of(func, args, kwargs, part.run, part.connect) if args and args[0] is part else None
        return part.run(func, args, kwargs) if view is None else view

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable and isinstance(args[0], Part):
            _refuse_write(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _refuse_write(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation!r} writes to a part of a parameter that is used in tiles, outside `outsize.gathered`: write to "
        f"the parameter inside `with outsize.gathered(param, modify=True):`"
    )


def part_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, connect: Connect) -> Any:
    """What an indexing or a transposition of a stack gives: parts without values. None where it is something else."""
    if kwargs:
        return None
    stack, number, transposed = _parts(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        count, dims = stack.shape[0], args[0].dim()
    dimensions = _TRANSPOSITIONS.get(func) if dims == 2 or func not in _OF_MATRICES else None
    if dimensions is not None and {each % dims for each in dimensions(*args[1:])} == {dims - 2, dims - 1}:
        return Part.of(stack, number, not transposed, run, connect)
    if number is not None:
        return None
    if func in (torch.Tensor.unbind, torch.unbind, torch.Tensor.__iter__) and args[1:] in ((), (0,)):
        every = tuple(Part.of(stack, each, transposed, run, connect) for each in range(count))
        return iter(every) if func is torch.Tensor.__iter__ else every
    if func is torch.Tensor.__getitem__ and _is_index(args[1]):
        at = int(args[1])
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of bounds for dimension 0 with size {count}")
        return Part.of(stack, at % count, transposed, run, connect)
    return None


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None, bool]:
    """(the stack, the number of the matrix that is meant or None for all, whether it is transposed)."""
    if isinstance(tensor, Part):
        return tensor.stack, tensor.number, tensor.transposed
    return tensor, None, False


def _is_index(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype not in (torch.bool, torch.uint8) and not value.is_floating_point()
    return isinstance(value, int) and not isinstance(value, bool)


_TRANSPOSITIONS: dict[Any, Callable[..., tuple[int, ...]]] = {
    torch.Tensor.transpose: lambda one, other: (one, other),
    torch.transpose: lambda one, other: (one, other),
    torch.Tensor.t: lambda: (0, 1),
    torch.t: lambda: (0, 1),
    torch.Tensor.mT.__get__: lambda *_: (-2, -1),  # type: ignore[attr-defined]
    torch.Tensor.T.__get__: lambda *_: (-2, -1),  # type: ignore[attr-defined]
}


_OF_MATRICES = {torch.Tensor.T.__get__}  # type: ignore[attr-defined]
"""What reverses all dimensions."""


class Cut(NamedTuple):
    """What of a tensor goes with some matrices: as many places of dimension `dim`, or the rows that end at `ends`."""

    dim: int
    ends: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor, tile: Tile) -> torch.Tensor:
        start, end = tile.start, tile.stop
        if self.ends:
            start, end = self.ends[start - 1] if start else 0, self.ends[end - 1]
        return tensor.narrow(self.dim, start, end - start)


class Products(NamedTuple):
    """Some rows of a weight, or some matrices of a stack, give a part of the result out of a part of `x`, or out of all
    of it; or one matrix gives all of it."""

    operation: Callable[[torch.Tensor, torch.Tensor, Tile, torch.Tensor | None], torch.Tensor]
    """With a bias: of rows that give places of the result along its dimension, counted from the end."""
    number: int | None = None
    of_x: Cut | None = None
    of_result: Cut | None = None
    dtype: torch.dtype | None = None
    """What autocast computes in."""
    casts: bool = True
    """Whether autocast has a say."""

    def forward(self, tiles: Tiles, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = None
        for tile, weight in tiles.weights(self._wanted(tiles)):
            part = self._part(x, weight, tile, None if bias is None else bias[tile.start : tile.stop])
            if self.of_result is None:
                result = part
                continue
            if result is None:
                shape = list(part.shape)
                shape[self.of_result.dim] = x.shape[0] if self.of_result.ends else tiles.rows
                result = part.new_zeros(shape) if self.of_result.ends else part.new_empty(shape)
            self.of_result.of(result, tile).copy_(part)
        assert result is not None
        return result

    def backward(self, tiles: Tiles, x: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        """The gradients of `x` and the bias; those of the rows or matrices go to rest."""
        parts = self._wanted(tiles)
        summed = torch.float32 if x.dtype.itemsize < 4 and len(parts) > 1 else x.dtype
        total = torch.zeros_like(x, dtype=summed) if wanted[1] else None
        for tile, weight in tiles.weights(parts) if wanted[0] or wanted[1] else ():
            of_part = grad if self.of_result is None else self.of_result.of(grad, tile)
            for_weight, for_x = self._gradients(x, weight, tile, of_part, wanted)
            if total is not None and for_x is not None:
                total += for_x.to(summed)  # torch adds unlike types a few times slower
            if for_weight is not None:
                tiles.take(tile, for_weight)
        total = None if total is None else total.to(x.dtype)
        if not wanted[2]:
            return total, None
        assert self.of_result is not None
        others = [dim for dim in range(grad.dim()) if dim != grad.dim() + self.of_result.dim]
        return total, grad.sum(others) if others else grad  # an empty list means all dimensions

    def _gradients(
        self, x: torch.Tensor, weight: torch.Tensor, tile: Tile, grad: torch.Tensor, wanted: Wanted
    ) -> Found:
        """Of the weight and of `x`."""
        if self.operation is linear:
            rows, places = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            cast = weight if self.dtype is None else weight.to(self.dtype)
            return rows.t() @ places if wanted[0] else None, grad @ cast if wanted[1] else None
        with torch.enable_grad():
            leaves = [weight.detach().requires_grad_(wanted[0]), x.detach().requires_grad_(wanted[1])]
            part = self._part(leaves[1], leaves[0], tile, None)
            found = iter(torch.autograd.grad(part, [leaf for leaf in leaves if leaf.requires_grad], grad))
        for_weight = next(found) if wanted[0] else None
        return for_weight, next(found) if wanted[1] else None

    def _wanted(self, tiles: Tiles) -> list[Tile]:
        return tiles.all if self.number is None else [tiles.with_row(self.number)]

    def _part(self, x: torch.Tensor, weight: torch.Tensor, tile: Tile, bias: torch.Tensor | None) -> torch.Tensor:
        part = x if self.of_x is None else self.of_x.of(x, tile)
        matrices = weight if self.number is None else weight[self.number - tile.start]
        return self.operation(part, matrices if self.dtype is None else matrices.to(self.dtype), tile, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, _: Tile, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def reads_stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(the products, `x`, the stack, None) of an operation on a stack or a part of it; None where it takes it all."""
    reader = _READERS.get(func) or (_grouped if getattr(func, "__name__", "") in _GROUPED else None)
    return None if reader is None else reader(*args, **kwargs)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    stack, number, transposed = _parts(weight)
    if number is None or bias is not None:
        return None

    def operation(x: torch.Tensor, matrix: torch.Tensor, *_: Any) -> torch.Tensor:
        return F.linear(x, matrix.t() if transposed else matrix)

    return Products(operation, number), input, stack, None


def _matmul(*args: torch.Tensor, **more: Any) -> Any:
    if len(args) != 2 or more:
        return None
    x, weight = args
    stack, number, transposed = _parts(weight)
    with torch._C.DisableTorchFunctionSubclass():
        fits = x.dim() >= 3 and x.shape[-3] == stack.shape[0] and stack.dim() == 3
    if isinstance(x, Part) or not (fits or number is not None):
        return None

    def operation(x: torch.Tensor, matrices: torch.Tensor, *_: Any) -> torch.Tensor:
        return x @ (matrices.swapaxes(-2, -1) if transposed else matrices)

    cut = None if number is not None else Cut(-3)
    return Products(operation, number, cut, cut), x, stack, None


def _einsum(equation: Any, *operands: Any, **more: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or more or len(operands) != 2 or "..." in equation or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    at = 0 if _is_whole(operands[0]) else 1
    x, (stack, number, transposed) = operands[1 - at], _parts(operands[at])
    letter = terms[at][:1]
    if number is not None or transposed or letter not in terms[1 - at] or letter not in result or isinstance(x, Part):
        return None

    def operation(x: torch.Tensor, matrices: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.einsum(equation, *((matrices, x) if at == 0 else (x, matrices)))

    return Products(operation, None, Cut(terms[1 - at].index(letter)), Cut(result.index(letter))), x, stack, None


def _is_whole(operand: Any) -> bool:
    return isinstance(operand, Part) or (isinstance(operand, nn.Parameter) and operand.dim() == 3)


def _grouped(*args: torch.Tensor, offs: torch.Tensor | None = None, **more: Any) -> Any:
    """Rows of `x` up to `offs[0]` with the first matrix, up to `offs[1]` with the second, and so on."""
    if len(args) != 2:
        return None
    x, weight = args
    stack, number, transposed = _parts(weight)
    if number is not None or offs is None or x.dim() != 2 or any(each is not None for each in more.values()):
        return None
    ends = tuple(offs.tolist())

    def operation(x: torch.Tensor, matrices: torch.Tensor, tile: Tile, *_: Any) -> torch.Tensor:
        starts = (0, *ends)
        lengths = [ends[each] - starts[each] for each in tile]
        each = (matrices.swapaxes(-2, -1) if transposed else matrices).unbind()
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(lengths), each, strict=True)])

    cut = Cut(0, ends)
    return Products(operation, None, cut, cut, casts=False), x, stack, None


def _select(stack: torch.Tensor, number: int) -> Any:
    """The values of one matrix, for an operation that is none of these."""

    def operation(_: torch.Tensor, matrix: torch.Tensor, *__: Any) -> torch.Tensor:
        return matrix.clone()

    return Products(operation, number, casts=False), torch.empty(0, device=stack.device), stack, None


_GROUPED = {"grouped_mm", "_grouped_mm"}
_READERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm), _matmul),
    **dict.fromkeys((torch.mm, torch.Tensor.mm), _matmul),
    _select: _select,
}
_select.__name__ = "indexing"  # for errors
