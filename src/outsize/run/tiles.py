"""A parameter that is too large to be gathered is used in tiles: some of its rows at a time.

Memory-centric tiling of ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1.3), here without a change to the model: the
operation that uses the parameter passes the gate, and runs tile by tile. The next tile is read meanwhile. In the
backward the tiles come again, and the gradient of each goes to rest before the next one is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn
from torch.nn import functional as F

from outsize.move.buffer import Buffer
from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.memory import Ledger
from outsize.move.shard import Gathering, read_steps
from outsize.move.store import DTYPES
from outsize.planning.layout import page_range
from outsize.run.buffers import collecting_dtype
from outsize.run.embedding import LOOKUPS, distinct, row_of_padding
from outsize.run.once import differentiable_once
from outsize.run.stacks import Cut, Part, Products, is_stack, linear, part_of, reads_stack
from outsize.run.vocabulary import Largest, Losses

if TYPE_CHECKING:
    from outsize.run.engine import Engine
    from outsize.run.reduction import Reduction
    from outsize.run.streamer import Streamer
    from outsize.run.unit import Unit
    from outsize.run.unit_gradients import UnitGradients

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
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return module.max_norm is None and not module.sparse
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.groups == 1
    return isinstance(module, nn.Linear)


Tile = range
"""Rows of a parameter."""


@final
@dataclass(eq=False, repr=False)
class Tiles:
    """The tiles of one parameter. `token` stands for the parameter in graphs: its gradient arrives when the gradients
    of all tiles are at rest, however often the parameter was used."""

    unit: Unit
    _gradients: UnitGradients
    _streamer: Streamer
    _conveyor: Conveyor
    _ledger: Ledger
    _reduction: Reduction | None  # None with one rank

    def __post_init__(self) -> None:
        unit = self.unit
        ((self.name, self.param),) = unit.parameters.items()
        slot, ranks = unit.shard.whole_slots[self.name], unit.shard.ranks
        self._slot, self._row, self.rows = slot, slot.numel // slot.shape[0], slot.shape[0]
        self._share = self.rows if ranks == 1 else unit.shard.layout.numel // self._row  # rows of a rank
        step = unit.shard.tile_rows
        self._parts = [Tile(low, min(low + step, self._share)) for low in range(0, self._share, step)]
        of_ranks = [
            Tile(*(min(rank * self._share + row, self.rows) for row in (part.start, part.stop)))
            for part in self._parts
            for rank in range(ranks)
        ]
        self.all = [tile for tile in of_ranks if tile]
        self._collected: tuple[Tile, torch.Tensor] | None = (
            None  # the gradients of ranks' rows, before they are reduced
        )
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

    # Note [Tiles of several ranks]
    # Each rank has a run of whole rows of the parameter. A part is some rows of every run; it is gathered at once, so
    # all ranks start the same collectives. What a rank of a part has is a tile: operations see rows that are
    # neighbours. The gradients of a part are collected, and reduced so that each rank has those of its own rows.

    def weights(self, wanted: Sequence[Tile]) -> Iterator[tuple[Tile, torch.Tensor]]:
        """The tiles in turn, each as a tensor that is gone when the next one is asked for. See Note [Tiles of several
        ranks]: those of one part follow each other."""
        shard, dtype = self.unit.shard, DTYPES[self._slot.dtype]
        parts: dict[Tile, list[Tile]] = {}
        for tile in wanted:
            parts.setdefault(self._part_with(tile), []).append(tile)
        order = list(parts)
        nbytes = max((self._numel(part) for part in order), default=0) * dtype.itemsize
        buffers = [Buffer(nbytes, self._ledger, shard.lanes) for _ in order[:2]]
        self._streamer.use_tiles(self.unit, nbytes * len(buffers))
        with ExitStack() as undo:
            going: dict[int, tuple[Job, Gathering | None]] = {}
            for buffer in buffers:
                undo.callback(buffer.drop)
            undo.callback(_await, going)
            for place, part in enumerate(order):
                for ahead in range(max(place, len(going) and place + 1), min(place + 2, len(order))):
                    going[ahead] = self._read(order[ahead], buffers[ahead % 2])
                job, gathering = going.pop(place)
                with self._streamer.live.waiting():
                    job.wait()
                if gathering is not None:
                    gathering.arrive()
                buffer = buffers[place % 2]
                buffer.use()
                values = buffer.values[: self._numel(part) * dtype.itemsize].view(dtype)
                for tile in parts[part]:
                    first = self._place(tile, part)
                    found = values[first : first + len(tile) * self._row]
                    yield tile, found.view(len(tile), *self._slot.shape[1:])
                    del found
                del values
                buffer.leave()

    def _read(self, part: Tile, buffer: Buffer) -> tuple[Job, Gathering | None]:
        buffer.materialize()
        shard, gathering = self.unit.shard, None
        start, end = self._span(part)
        steps = read_steps(shard, shard.segment_at(start), start, end, self._conveyor.slab_bytes, buffer)
        if shard.ranks > 1 and self._reduction is not None:
            gathering = Gathering(shard, self._reduction.ranks, (buffer, self._numel(part), part.start))
            steps = chain(steps, [Step(finish=gathering.start)])
        return self.unit.submit(self._conveyor, steps), gathering

    def _part_with(self, tile: Tile) -> Tile:
        """The rows of each rank among which a tile is, counted from the first of a rank."""
        if self.unit.shard.ranks == 1:
            return tile
        return self._parts[tile.start % self._share // self.unit.shard.tile_rows]

    def _span(self, part: Tile) -> tuple[int, int]:
        """The whole pages of a part, in elements of what rests here."""
        return page_range(part.start * self._row, part.stop * self._row)

    def _numel(self, part: Tile) -> int:
        """The elements of a part of all ranks, in whole pages."""
        start, end = self._span(part)
        return self.unit.shard.ranks * (end - start)

    def _place(self, tile: Tile, part: Tile) -> int:
        """The first element of a tile among those of its part."""
        start, end = self._span(part)
        return tile.start // self._share * (end - start) + tile.start % self._share * self._row - start

    def with_rows(self, rows: set[int]) -> list[Tile]:
        """The tiles that these rows lie in; other ranks may ask for others, so all of them there."""
        if self.unit.shard.ranks > 1:
            return self.all
        if self.is_stack:  # only these matrices are read
            return [Tile(row, row + 1) for row in sorted(rows)]
        return [self.all[index] for index in sorted({row // self.unit.shard.tile_rows for row in rows})]

    def with_row(self, row: int) -> Tile:
        """The tile that the row lies in."""
        return next(tile for tile in self.all if row in tile)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Around what calls `take`."""
        self._collected = None  # of a backward that did not end
        yield
        self._reduce()

    def take(self, tile: Tile, grad: torch.Tensor) -> None:
        """The gradient of a tile goes to rest, that of several ranks when the next part comes."""
        part = self._part_with(tile)
        if self._reduction is None:
            return self._gradients.take_tile(self.name, part.start * self._row, grad)
        if self._collected is None or self._collected[0] != part:
            self._reduce()
            dtype = collecting_dtype(self._slot.dtype, self._reduction.dtype)
            self._collected = part, torch.zeros(self._numel(part), dtype=dtype, device=grad.device)
        first = self._place(tile, part)
        self._collected[1][first : first + grad.numel()] += grad.reshape(-1)

    def _reduce(self) -> None:
        """The mean of what the ranks have collected; this rank's rows go to rest."""
        if self._collected is None or self._reduction is None:
            return
        (part, own), self._collected = self._collected, None
        for ranks, split in (self._reduction.ranks, self.unit.shard.ranks > 1), (self._reduction.ranks.copies, False):
            if ranks is not None:
                going, own = ranks.reduce(own, self.unit.index, split, row=part.start)
                going.wait()
                ranks.await_device()
                own.div_(ranks.size)
        self._gradients.take_tile(self.name, part.start * self._row, own[: self._own_numel(part)])

    def _own_numel(self, part: Tile) -> int:
        """Elements of a part that rest here: the parameter may end before."""
        left = self.unit.shard.slots[self.name].numel - part.start * self._row
        return max(min(len(part) * self._row, left), 0)

    def take_nothing(self) -> None:
        """The gradient of tiles that no rank has used in a backward is zero."""
        for part in self._parts:
            if part.start * self._row not in self._gradients.place.tiles:
                zeros = torch.zeros(self._own_numel(part), dtype=DTYPES[self._slot.dtype], device="cpu")
                self._gradients.take_tile(self.name, part.start * self._row, zeros)


def _await(going: dict[int, tuple[Job, Gathering | None]]) -> None:
    for job, gathering in going.values():
        job.written.wait()
        if gathering is not None:
            gathering.arrive()


class _Rows(NamedTuple):
    """`y = w[ids]`, of rows or of matrices."""

    def forward(self, tiles: Tiles, ids: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, width = tiles.rows, tiles.param.shape[1:]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise IndexError(f"index out of range in self: {tiles.name!r} has {rows} rows")
        result = torch.empty((*ids.shape, *width), dtype=DTYPES[tiles.unit.shard.slots[tiles.name].dtype])
        result = result.to(ids.device)
        for tile, weight in tiles.weights(tiles.with_rows(set(torch.unique(ids).tolist()))):
            here = (ids >= tile.start) & (ids < tile.stop)
            result[here] = weight[ids[here] - tile.start]
        return result

    def backward(self, tiles: Tiles, ids: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        for tile in tiles.all:
            here = (ids >= tile.start) & (ids < tile.stop)
            rows = grad[here].flatten(1), ids[here] - tile.start
            tiles.take(tile, torch.ops.aten.embedding_dense_backward(*rows, len(tile), -1, False))
        return None, None


class _Connection(NamedTuple):
    """Puts a part of a stack into the graph. Operations in tiles go past it; a custom function gives it a gradient."""

    made: list[Part]
    """The part, until it is in the graph: that would hold itself."""
    of_tile: Callable[[Tile, torch.Tensor], torch.Tensor | None]

    def forward(self, tiles: Tiles, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.made.pop()

    def backward(self, tiles: Tiles, x: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        for tile in tiles.all if wanted[0] else ():
            of_tile = self.of_tile(tile, grad)
            if of_tile is not None:
                tiles.take(tile, of_tile)
        return None, None


def _no_second_derivative(ctx: Any) -> str:
    return (
        f"{ctx.tiles.name!r} does not fit the budget and is used in tiles, which have no second derivative: raise the "
        f"budget, or open `outsize.gathered(param)` around the forward and the backwards"
    )


def _is_wanted(ctx: Any) -> bool:
    """Whether this backward asks for the gradient of the parameter: `torch.autograd.grad` asks for those of others."""
    return ctx.needs_input_grad[0] and torch._C._will_engine_execute_node(ctx.next_functions[0][0])


class _InTiles(torch.autograd.Function):
    """An operation on a parameter, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        engine: Engine,
        tiles: Tiles,
        operation: _Rows | _Connection | Products | Losses | Largest,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.engine, ctx.tiles, ctx.operation = weakref.ref(engine), tiles, operation
        ctx.reference = engine.parameters.reference(tiles.param)
        ctx.save_for_backward(x)
        return operation.forward(tiles, x, bias)

    @staticmethod
    @differentiable_once(_no_second_derivative)
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        engine, (x,) = ctx.engine(), ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            engine.parameters.check(ctx.reference)
            engine.backward.watch()
            engine.streamer.settle(ctx.tiles.unit)
            for_weight, (_, _, _, _, for_x, for_bias) = _is_wanted(ctx), ctx.needs_input_grad
            with ctx.tiles.taking():
                found = ctx.operation.backward(ctx.tiles, x, grad, (for_weight, for_x, for_bias))
        return grad.new_zeros(()) if for_weight else None, None, None, None, *found


def run_in_tiles(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on a parameter that is used in tiles; `NotImplemented` where it needs all of it."""
    whole = engine.tiles.get(id(args[0])) if args else None
    if whole is not None and whole.is_stack and _is_usable(whole):

        def connect(part: Part) -> Part:
            connection = _Connection([part], Part.of_gradient(part))
            return _run(engine, whole, connection, whole.token.detach(), None)  # type: ignore[no-any-return]

        part = part_of(func, args, kwargs, partial(run_in_tiles, engine), connect)
        if part is not None:
            return part
    if func in LOOKUPS:
        return _look_up(engine, func, LOOKUPS[func].bind(*args, **kwargs).arguments)
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


def _look_up(engine: Engine, func: Any, given: dict[str, Any]) -> Any:
    """torch's own lookup, in the rows that the batch needs."""
    tiles = engine.tiles.get(id(given["weight"]))
    if tiles is None or tiles.is_stack or not _is_usable(tiles):
        return NotImplemented
    if given.get("max_norm") is not None or given.get("sparse", False):
        return NotImplemented
    engine.check_use(tiles.param, func.__name__)
    wanted, among, padding = distinct(given["input"], row_of_padding(given, tiles.rows, tiles.name))
    rows = _run(engine, tiles, _Rows(), wanted, None)
    return func(**given | {"input": among, "weight": rows, "padding_idx": padding})


def _run(engine: Engine, tiles: Tiles, operation: Any, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), torch.autocast(x.device.type, enabled=False):
        token = tiles.token if tiles.param.requires_grad else tiles.token.detach()
        return _InTiles.apply(token, engine, tiles, operation, x, bias)


def runner(engine: Engine, param: torch.Tensor) -> Run | None:
    """Runs an operation of ours, on tensors that are ready for it, on a parameter that is used in tiles now."""
    tiles = engine.tiles.get(id(param))
    return None if tiles is None or not _is_usable(tiles) else partial(_run, engine, tiles)


def edge_of_tiles(engine: Engine, param: torch.Tensor) -> Any:
    """Where the gradient of a parameter arrives that is used in tiles; None for another one."""
    tiles = engine.tiles.get(id(param))
    return None if tiles is None else torch.autograd.graph.get_gradient_edge(tiles.token)


def _is_usable(tiles: Tiles) -> bool:
    """Whether the parameter is not there as a whole."""
    return not tiles.unit.current and torch._C._functorch.peek_interpreter_stack() is None


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return Products(linear, of_result=Cut(-1)), input, weight, bias


def _indexing(weight: torch.Tensor, index: Any) -> Any:
    """`weight[ids]` of several rows or matrices."""
    if isinstance(weight, Part) or not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64):
        return None
    return _Rows(), torch.where(index < 0, index + weight.shape[0], index), weight, None


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

    def operation(x: torch.Tensor, weight: torch.Tensor, _: Tile, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = function(x, weight, bias, stride, padding, dilation)
        return result

    return Products(operation, of_result=Cut(-1 - _CONVOLUTIONS[function])), input, weight, bias


_READERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.Tensor.__getitem__: _indexing,
    **dict.fromkeys(
        (torch.index_select, torch.Tensor.index_select),
        lambda input, dim, index: _indexing(input, index) if dim == 0 else None,
    ),
    **{function: partial(_convolution, function) for function in _CONVOLUTIONS},
}
