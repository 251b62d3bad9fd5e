"""A parameter that is too large to be gathered is used in tiles: some of its rows at a time.

Memory-centric tiling of ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1.3), here without a change to the model: the
operation that uses the parameter passes the gate, and runs tile by tile. The next tile is read meanwhile. In the
backward the tiles come again, and the gradient of each goes to rest before the next one is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from outsize.move.buffer import Buffer
from outsize.move.conveyor import Conveyor, Job
from outsize.move.memory import Ledger
from outsize.move.shard import read_tile
from outsize.move.store import DTYPES
from outsize.plan.layout import page_range
from outsize.run.stacks import Part, Products, is_stack, part_of, reads_stack
from outsize.run.vocabulary import Largest, Losses

if TYPE_CHECKING:
    from outsize.run.engine import Engine
    from outsize.run.streamer import Streamer
    from outsize.run.unit import Unit
    from outsize.run.unit_gradients import UnitGradients

Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Run = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Runs an operation: on `x`, and with a bias."""

Wanted = tuple[bool, bool, bool]
"""Whether the gradient is wanted: of the weight, of `x`, of the bias."""

Found = tuple[torch.Tensor | None, torch.Tensor | None]
"""The gradients of `x` and of the bias."""

_CONVOLUTIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # by function, the dimensions of its images


def can_use_tiles(module: nn.Module, param: torch.Tensor) -> bool:
    """Whether the module's operation on this parameter runs in tiles."""
    if is_stack(module, param):
        return True
    if param.dim() < 2 or param is not getattr(module, "weight", None):
        return False
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.groups == 1
    return isinstance(module, nn.Linear)


class Tile(NamedTuple):
    """Rows [start, end) of a parameter."""

    start: int
    end: int


@final
class Tiles:
    """The tiles of one parameter. `token` stands for the parameter in graphs: its gradient arrives when the gradients
    of all tiles are at rest, however often the parameter was used."""

    def __init__(
        self, unit: Unit, gradients: UnitGradients, streamer: Streamer, conveyor: Conveyor, ledger: Ledger
    ) -> None:
        self.unit = unit
        ((self.name, self.param),) = unit.parameters.items()
        self._gradients = gradients
        self._streamer = streamer
        self._conveyor = conveyor
        self._ledger = ledger
        slot, rows = unit.shard.slots[self.name], unit.shard.tile_rows
        self._slot, self._row = slot, slot.numel // slot.shape[0]
        self.all = [Tile(start, min(start + rows, slot.shape[0])) for start in range(0, slot.shape[0], rows)]
        self.rows = slot.shape[0]
        self.is_stack = len(slot.shape) == 3
        self.token = torch.zeros((), device=unit.shard.device)

    def hear(self, engine: Engine) -> None:
        """The engine hears when the gradients of all tiles of a backward are at rest."""
        known, own, name = weakref.ref(engine), weakref.ref(self), self.name  # autograd hides what a hook holds

        def arrived(token: torch.Tensor) -> None:
            token.grad = None
            engine, tiles = known(), own()
            if engine is not None and tiles is not None:
                tiles.take_nothing()
                engine.backward.gradient_arrived(engine.parameters.home[name].parameters[name])

        self.token.requires_grad_().register_post_accumulate_grad_hook(arrived)

    def weights(self, wanted: Sequence[Tile]) -> Iterator[tuple[Tile, torch.Tensor]]:
        """The tiles in turn, each as a tensor that is gone when the next one is asked for."""
        shard = self.unit.shard
        itemsize = DTYPES[self._slot.dtype].itemsize
        nbytes = max((self._span(tile)[1] - self._span(tile)[0] for tile in wanted), default=0) * itemsize
        buffers = [Buffer(nbytes, self._ledger, shard.lanes) for _ in wanted[:2]]
        self._streamer.use_tiles(self.unit, nbytes * len(buffers))
        with ExitStack() as undo:
            going: dict[int, Job] = {}
            for buffer in buffers:
                undo.callback(buffer.drop)
            undo.callback(_await, going)
            for place, tile in enumerate(wanted):
                for ahead in range(max(place, len(going) and place + 1), min(place + 2, len(wanted))):
                    going[ahead] = self._read(wanted[ahead], buffers[ahead % 2])
                with self._streamer.live.waiting():
                    going.pop(place).wait()
                buffer = buffers[place % 2]
                buffer.use()
                first = (self._slot.offset + tile.start * self._row - self._span(tile)[0]) * itemsize
                numel = (tile.end - tile.start) * self._row
                values = buffer.values[first : first + numel * itemsize].view(DTYPES[self._slot.dtype])
                yield tile, values.view(tile.end - tile.start, *self._slot.shape[1:])
                buffer.leave()

    def _read(self, tile: Tile, buffer: Buffer) -> Job:
        buffer.materialize()
        steps = read_tile(self.unit.shard, *self._span(tile), buffer, self._conveyor.slab_bytes)
        return self.unit.submit(self._conveyor, steps)

    def _span(self, tile: Tile) -> tuple[int, int]:
        """The whole pages of a tile, in elements of the unit."""
        return page_range(self._slot.offset + tile.start * self._row, self._slot.offset + tile.end * self._row)

    def with_row(self, row: int) -> Tile:
        """The tile that the row lies in."""
        return self.all[row // self.unit.shard.tile_rows]

    def take(self, tile: Tile, grad: torch.Tensor) -> None:
        """The gradient of a tile goes to rest."""
        self._gradients.take_tile(self.name, tile.start * self._row, grad)

    def take_nothing(self) -> None:
        """The gradient of tiles that a backward did not use is zero."""
        for tile in self.all:
            if not self._gradients.place.has_tile(tile.start * self._row):
                shape = tile.end - tile.start, *self._slot.shape[1:]
                self.take(tile, torch.zeros(shape, dtype=DTYPES[self._slot.dtype], device="cpu"))


def _await(going: dict[int, Job]) -> None:
    for job in going.values():
        job.written.wait()


class _Sum(NamedTuple):
    """`y = x * w` whose rows of `w` give places of `y` along `dim`, from the end."""

    operation: Operation
    dim: int
    dtype: torch.dtype | None
    """What autocast computes in."""
    casts: bool = True

    def forward(self, tiles: Tiles, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts, result = tiles.all, torch.empty(0)
        for tile, weight in tiles.weights(parts):
            part = self._part(x, weight, None if bias is None else bias[tile.start : tile.end])
            if tile.start == 0:
                shape = list(part.shape)
                shape[self.dim] = parts[-1].end
                result = part.new_empty(shape)
            result.narrow(self.dim, tile.start, tile.end - tile.start).copy_(part)
        return result

    def _part(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.operation(x, weight if self.dtype is None else weight.to(self.dtype), bias)

    def backward(self, tiles: Tiles, x: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        """The gradients of `x` and the bias; those of the tiles go to rest."""
        total = None
        for tile, weight in tiles.weights(tiles.all) if wanted[0] or wanted[1] else ():
            part = grad.narrow(self.dim, tile.start, tile.end - tile.start)
            for_weight, for_x = self._gradients(x, weight, part, wanted)
            if for_x is not None:
                total = for_x if total is None else total.add_(for_x)
            if for_weight is not None:
                tiles.take(tile, for_weight)
        others = [dim for dim in range(grad.dim()) if dim != grad.dim() + self.dim]
        return total, grad.sum(others) if wanted[2] else None

    def _gradients(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, wanted: Wanted
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.operation is F.linear:
            rows, places = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            cast = weight if self.dtype is None else weight.to(self.dtype)
            return rows.t() @ places if wanted[0] else None, grad @ cast if wanted[1] else None
        with torch.enable_grad():
            leaves = [weight.detach().requires_grad_(wanted[0]), x.detach().requires_grad_(wanted[1])]
            result = self._part(leaves[1], leaves[0], None)
            found = iter(torch.autograd.grad(result, [leaf for leaf in leaves if leaf.requires_grad], grad))
        for_weight = next(found) if wanted[0] else None
        return for_weight, next(found) if wanted[1] else None


class _Rows(NamedTuple):
    """`y = w[ids]`."""

    padding: int | None

    def forward(self, tiles: Tiles, ids: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, width = tiles.all[-1].end, tiles.param.shape[1:]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise IndexError(f"index out of range in self: {tiles.name!r} has {rows} rows")
        result = torch.empty((*ids.shape, *width), dtype=DTYPES[tiles.unit.shard.slots[tiles.name].dtype])
        result = result.to(ids.device)
        touched = {int(each) for each in torch.unique(ids // tiles.unit.shard.tile_rows)}
        for tile, weight in tiles.weights([tiles.all[index] for index in sorted(touched)]):
            here = (ids >= tile.start) & (ids < tile.end)
            result[here] = weight[ids[here] - tile.start]
        return result

    def backward(self, tiles: Tiles, ids: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        padding = -1 if self.padding is None else self.padding
        for tile in tiles.all:
            here = (ids >= tile.start) & (ids < tile.end) & (ids != padding)
            rows = torch.ops.aten.embedding_dense_backward(
                grad[here], ids[here] - tile.start, tile.end - tile.start, -1, False
            )
            tiles.take(tile, rows)
        return None, None


class _InTiles(torch.autograd.Function):
    """An operation on a parameter, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        engine: Engine,
        tiles: Tiles,
        operation: _Sum | _Rows | Products | Losses | Largest,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.engine, ctx.tiles, ctx.operation = weakref.ref(engine), tiles, operation
        ctx.reference = engine.parameters.reference(tiles.param)
        ctx.save_for_backward(x)
        return operation.forward(tiles, x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        engine, (x,) = ctx.engine(), ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            engine.parameters.check(ctx.reference)
            engine.backward.watch()
            engine.streamer.settle(ctx.tiles.unit)
            for_weight, _, _, _, for_x, for_bias = ctx.needs_input_grad
            found = ctx.operation.backward(ctx.tiles, x, grad, (for_weight, for_x, for_bias))
        return grad.new_zeros(()) if for_weight else None, None, None, None, *found


class _Connected(torch.autograd.Function):
    """A part of a stack in the graph. Operations in tiles go past it; a custom function gives it a gradient."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, engine: Engine, tiles: Tiles, made: list[Part]) -> Part:
        (part,) = made  # no argument of its own: autograd would return a view of it
        ctx.engine, ctx.tiles = weakref.ref(engine), tiles
        ctx.reference = engine.parameters.reference(tiles.param)
        ctx.gradient_of = Part.of_gradient(part)
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        engine, tiles = ctx.engine(), ctx.tiles
        with torch._C.DisableTorchFunctionSubclass():
            engine.parameters.check(ctx.reference)
            engine.backward.watch()
            engine.streamer.settle(tiles.unit)
            for tile in tiles.all:
                of_tile = ctx.gradient_of(tile, grad)
                if of_tile is not None:
                    tiles.take(tile, of_tile)
        return grad.new_zeros(()), None, None, None


def run_in_tiles(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on a parameter that is used in tiles; `NotImplemented` where it needs all of it."""
    whole = engine.tiles.get(id(args[0])) if args else None
    if whole is not None and whole.is_stack and _is_usable(whole):

        def connect(part: Part) -> Part:
            return _Connected.apply(whole.token, engine, whole, [part])  # type: ignore[no-any-return]

        part = part_of(func, args, kwargs, partial(run_in_tiles, engine), connect)
        if part is not None:
            return part
    reader = _READERS.get(func)
    read = reads_stack(func, args, kwargs) or (None if reader is None else reader(*args, **kwargs))
    if read is None:
        return NotImplemented
    operation, x, weight, bias = read
    tiles = engine.tiles.get(id(weight))
    if tiles is None or not _is_usable(tiles):
        return NotImplemented
    engine.check_use(weight, func.__name__)
    if type(x) is not torch.Tensor:
        x = x.clone()  # a parameter may be at rest
    if bias is not None:
        bias = bias.clone()
    if not isinstance(operation, _Rows) and operation.casts and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operation, x, bias = operation._replace(dtype=dtype), x.to(dtype), None if bias is None else bias.to(dtype)
    return _run(engine, tiles, operation, x, bias)


def _run(engine: Engine, tiles: Tiles, operation: Any, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch.autocast(x.device.type, enabled=False):
        token = tiles.token if tiles.param.requires_grad else tiles.token.detach()
        return _InTiles.apply(token, engine, tiles, operation, x, bias)


def runner(engine: Engine, param: torch.Tensor) -> Run | None:
    """Runs an operation of ours, on tensors that are ready for it, on a parameter that is used in tiles now."""
    tiles = engine.tiles.get(id(param))
    return None if tiles is None or not _is_usable(tiles) else partial(_run, engine, tiles)


def _is_usable(tiles: Tiles) -> bool:
    """Whether the parameter is not there as a whole."""
    return not tiles.unit.current and torch._C._functorch.peek_interpreter_stack() is None


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Sum(F.linear, -1, None), input, weight, bias


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or weight.dim() != 2:
        return None
    negative = padding_idx is not None and padding_idx < 0
    return (
        _Rows(weight.shape[0] + padding_idx if negative and padding_idx is not None else padding_idx),
        input,
        weight,
        None,
    )


def _convolution(
    function: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if groups != 1:
        return None

    def operation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = function(x, weight, bias, stride, padding, dilation)
        return result

    return _Sum(operation, -1 - _CONVOLUTIONS[function], None), input, weight, bias


_READERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **{function: partial(_convolution, function) for function in _CONVOLUTIONS},
}
