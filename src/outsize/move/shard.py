"""One unit at rest: its gathered buffer and the stores of its parameters, gradients and optimizer arrays.

Here the rooms `run`, `optim` and `checkpoint` meet: they know units by their shards and nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from outsize.move.buffer import Buffer
from outsize.move.codes import CODE_DTYPES, CodeKind, blocks_of, decode, encode
from outsize.move.comm import Ranks
from outsize.move.conveyor import Step
from outsize.move.device import Lanes
from outsize.move.files import FileStore
from outsize.move.generations import Generations
from outsize.move.grad_ops import GradOps
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer
from outsize.move.rows import Rows
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE, OWN_BYTES, SCALE_BYTES, STATE_DTYPES, DiskStore, Store
from outsize.move.transfer import Transfer
from outsize.planning.layout import (
    PAGE_ELEMENTS,
    ArrayLayout,
    Segment,
    Slot,
    UnitLayout,
    array_layout,
)
from outsize.planning.placement import UnitTiers

SENT_AS = DTYPES | {"float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
"""What a gather takes the elements for: gloo has no collectives of 8-bit floats."""

READ_NUMEL = 1 << 21
"""Elements of one step: large requests keep the drive busy, and the end of a unit comes soon."""

DEVICE_NUMEL = 1 << 23
"""The same of an update for an accelerator, whose copies cost the conveyor's thread time of their own."""


@final
class Scales:
    """The scales of a compact array at rest. A chunk's scales are no whole pages, so they move as one."""

    def __init__(self, layout: ArrayLayout, store: Store) -> None:
        self.layout = layout
        self.store = store
        self.gathered: HostBuffer | None = None  # while an update runs on a store that the CPU cannot reach

    def part(self, start: int, end: int) -> torch.Tensor:
        """The scales of the elements [start, end), fp32, in memory or on an accelerator."""
        first, nbytes = self.layout.span(start, end)
        if self.gathered is not None:
            return self.gathered.bytes[first : first + nbytes].view(torch.float32)
        view = self.store.in_place(first, nbytes)
        assert view is not None, "the scales are not in memory"
        return view.view(torch.float32)

    def gather(self) -> Transfer:
        """Start to bring all of them into memory."""
        self.gathered = HostBuffer(self.layout.nbytes)
        return self.store.read(0, self.gathered.bytes)

    def give_back(self, kept: list[HostBuffer]) -> Transfer:
        """Start to write what was gathered, which must live in `kept` until it is written."""
        assert self.gathered is not None
        kept.append(self.gathered)
        self.gathered = None
        return self.store.write(0, kept[-1].bytes)


@final
@dataclass(eq=False)
class StateArray:
    """One optimizer array of a unit (for example `exp_avg`), one value an element, at rest in a store.

    A compact one holds codes; `scales` and `code` turn them into values.
    """

    name: str
    layout: ArrayLayout
    store: Store
    scales: Scales | None = None
    code: CodeKind | None = None

    @property
    def public(self) -> bool:
        """Whether the array is part of the optimizer's state as torch names it."""
        return self.name != MASTER

    def compact(self, param_dtype: str) -> bool:
        """Whether it holds codes where the parameter's dtype is this one."""
        return self.code is not None and param_dtype in SCALE_BYTES

    def dtype(self, param_dtype: str) -> torch.dtype:
        """The dtype of what rests."""
        if self.code is not None and self.compact(param_dtype):
            return CODE_DTYPES[self.code]
        return self.value_dtype(param_dtype)

    def value_dtype(self, param_dtype: str) -> torch.dtype:
        """The dtype of the values, decoded where they rest as codes."""
        return (STATE_DTYPES if self.public else MASTER_DTYPE)[param_dtype]

    def read(self, start: int, end: int, param_dtype: str) -> torch.Tensor:
        """A copy of the values [start, end), 1-D. Blocks."""
        rests = self.store.get(*self.layout.span(start, end)).view(self.dtype(param_dtype))
        if self.scales is None or not self.compact(param_dtype):
            return rests
        scales = self.scales.store.get(*self.scales.layout.span(start, end)).view(torch.float32)
        return decode(rests, scales, self.code == "root")

    def write(self, start: int, end: int, param_dtype: str, values: torch.Tensor) -> None:
        """Overwrite the values [start, end). Blocks."""
        if self.scales is not None and self.compact(param_dtype):
            codes = torch.empty(end - start, dtype=self.dtype(param_dtype), device="cpu")
            scales = torch.empty(blocks_of(codes.numel()), dtype=torch.float32, device="cpu")
            encode(values.float().cpu(), codes, scales, self.code == "root")
            self.scales.store.put(self.scales.layout.span(start, end)[0], scales.view(torch.uint8))
            values = codes
        self.store.put(self.layout.span(start, end)[0], _bytes_of(values, self.dtype(param_dtype)))


@dataclass
class SlotUpdate:
    """What one step owes one parameter: the hyper-parameters and gradient as they were at `optimizer.step()`."""

    hyper: dict[str, object]
    ops: GradOps
    loose: torch.Tensor | None = None
    """The gradient itself where it lies on the computing device."""
    resting: GradShard | None = None
    """Where the gradient rests otherwise."""
    in_memory: bool = False
    """Whether `resting` keeps its contents in memory until the update has run."""
    noted: object = None
    """What the optimizer's rule reads beside the hyper-parameters."""


@dataclass(frozen=True)
class SlotState:
    """The optimizer's per-parameter values that are not per element: the step count and its like."""

    scalars: dict[str, object] = field(default_factory=dict)
    initialised: bool = False


Pending = dict[str, SlotUpdate]
"""The update that a unit owes: by parameter name."""


@final
@dataclass(eq=False)
class UnitShard:
    """The stores of one unit and the buffer it is gathered into. `params` is None where the buffer is the store.

    `whole` is the layout of the gathered buffer. `layout` is that of what rests here: with several ranks this rank's
    slice of it (`rank`, and how many `ranks` share the unit), else the same.
    """

    layout: UnitLayout
    tiers: UnitTiers
    buffer: Buffer
    params: Store | None
    grad_shards: list[GradShard]
    device: torch.device
    whole: UnitLayout
    rank: int
    ranks: int
    shared: bool  # whether other ranks have the unit too, split or whole
    lanes: Lanes | None  # of an accelerator
    late: Callable[[UnitShard], None]  # replaces the arrays by longer ones with the same values
    moved: Callable[[UnitShard], None]  # replaces parameters that are read in place by a store with the same values
    tile_rows: int = 0  # rows of its parameter that a rank has of a tile, where the unit is used in tiles
    arrays: dict[str, StateArray] = field(default_factory=dict)
    has_late_room: bool = False  # whether there is room for the state of frozen parameters too
    slot_states: dict[str, SlotState] = field(default_factory=dict)
    hold: Callable[[], None] | None = None  # blocks until nobody needs the bytes in memory as they are
    known: dict[Hashable, Any] = field(default_factory=dict)  # to the update, of these stores
    rows: Rows | None = None  # of a table, of which only the rows that a batch touches move
    row_values: Collection[str] = ()  # of the optimizer: a table has one for each row that rests here, and no arrays

    def __post_init__(self) -> None:
        self.param_layout = array_layout(self.layout, OWN_BYTES)
        self.slots = {slot.name: slot for slot in self.layout.slots}
        self.whole_slots = {slot.name: slot for slot in self.whole.slots}
        self._whole_layout = array_layout(self.whole, OWN_BYTES)

    @property
    def grads(self) -> GradShard | None:
        """Where the gradients of the next backward come to rest; None where they stay on the device."""
        return self.grad_shards[0] if self.grad_shards else None

    @property
    def updates_in_buffer(self) -> bool:
        """Whether parameters are updated where they are gathered, or will be."""
        return self.updates_on_device if self.lanes is not None else not self.tile_rows

    @property
    def has_state(self) -> bool:
        """Whether the optimizer keeps arrays for the unit's parameters."""
        return any(array.public for array in self.arrays.values())

    @property
    def on_device(self) -> bool:
        """Whether parameters, gradients and states all lie on the computing device, and are this rank's alone."""
        return self.tiers.stay and not self.shared and self.rows is None

    @property
    def updates_on_device(self) -> bool:
        """Whether all that an update needs lies on an accelerator."""
        return self.lanes is not None and self.tiers.stay

    def array(self, name: str, slot: Slot) -> StateArray | None:
        """The optimizer array of this name, where it has values for the parameter."""
        array = self.arrays.get(name)
        return array if array is not None and array.layout.has(slot) else None

    def stated(self) -> list[Segment]:
        """The segments that optimizer arrays have room for. See Note [Frozen parameters] in api/shards.py."""
        return [segment for segment in self.layout.segments if segment.trainable or self.has_late_room]

    def has_room(self, names: Iterable[str]) -> bool:
        """Whether there is room for the optimizer's state of the parameters."""
        return self.has_late_room or all(self.layout.segments[self.slots[name].segment].trainable for name in names)

    def make_room(self, names: Iterable[str]) -> None:
        """Make sure that there is room for the optimizer's state of these parameters; nothing of the unit may be on its
        way. Raises `ValueError` or `OSError`, with nothing changed."""
        if not self.has_room(names):
            self.late(self)

    @property
    def in_place(self) -> bool:
        """Whether the parameters are read from files of others."""
        return isinstance(self.params, FileStore)

    def own_params(self) -> None:
        """Parameters are about to change, or to be linked into a checkpoint: make sure that the unit has a store of its
        own. Nothing of it may be on its way. Raises `ValueError` or `OSError`, with nothing changed. Blocks."""
        if self.in_place:
            self.moved(self)

    def before_change(self) -> None:
        """Parameters or states are about to change: wait for whoever still needs them as they are."""
        if self.rows is not None:
            self.rows.forget()
        self.before_update()

    def before_update(self) -> None:
        """As `before_change`, where rows of a table change in memory."""
        if self.hold is not None:
            self.hold()
            self.hold = None
        self.buffer.await_sources()

    def use(self) -> None:
        """The current stream is about to work with all that lies on its device."""
        self.buffer.use()
        for store in self.lasting_stores():
            store.use()

    def begin_filling(self) -> None:
        """The buffer is about to be filled; from a table on an accelerator after what the computation changes of it."""
        self.buffer.materialize()
        self.buffer.leave()
        if self.rows is not None and self.lanes is not None:
            self.lanes.follow(self.lanes.incoming)

    @property
    def is_copied(self) -> bool:
        """Whether the buffer is an accelerator's, filled from parameters in memory: that takes no thread's work."""
        return self.lanes is not None and self.params is not None and self.params.in_place(0, 0) is not None

    def param(self, name: str) -> torch.Tensor:
        """The whole parameter as a view of the gathered buffer, in its own dtype and shape."""
        slot = self.whole_slots[name]
        first, nbytes = self._whole_layout.span(slot.offset, slot.end)
        return self.buffer.values[first : first + nbytes].view(DTYPES[slot.dtype]).view(slot.shape)

    def own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The elements of a whole parameter, or of what has its shape, that rest here, 1-D."""
        slot = self.slots[name]
        return value.reshape(-1)[slot.first : slot.first + slot.numel]

    def part_of(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """A gradient in the shape of the parameter; where the parameter is split, what of it rests here, 1-D."""
        return grad if self.ranks == 1 else self.own(name, grad)

    def param_piece(self, slot: Slot, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) of what rests here, which belong to `slot`, as a 1-D view of the gathered buffer."""
        return self.param_bytes(low, high).view(DTYPES[slot.dtype])

    def param_bytes(self, start: int, end: int) -> torch.Tensor:
        """The bytes of the elements [start, end) of what rests here, in the gathered buffer."""
        first, nbytes = self.buffer_span(start, end)
        return self.buffer.flat[first : first + nbytes]

    def buffer_span(self, start: int, end: int) -> tuple[int, int]:
        """(first byte in the gathered buffer, bytes) of the elements [start, end) of what rests here."""
        first, nbytes = self.param_layout.span(start, end)
        if self.ranks == 1 or start == end:
            return first, nbytes
        for own, segment in zip(self.layout.segments, self.whole.segments, strict=True):
            if own.start <= start and end <= own.end:
                return segment.byte_start + (self.rank * own.numel + start - own.start) * own.itemsize, nbytes
        raise AssertionError("a range never crosses a segment")

    def read_array(self, array: StateArray, start: int, end: int) -> torch.Tensor:
        """A copy of the values [start, end) of an array, 1-D; they lie in one segment. Blocks.

        Where the array is compact, `start` is a multiple of `BLOCK`.
        """
        if start == end:  # an empty parameter may lie behind the last segment
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return array.read(start, end, self.segment_at(start).dtype)

    def write_array(self, array: StateArray, start: int, end: int, values: torch.Tensor) -> None:
        """Overwrite the values [start, end) of an array; its neighbours on the same pages stay. Blocks.

        Where the array is compact, `start` is a multiple of `BLOCK` and `end` is one too or ends a parameter.
        """
        if start < end:
            self.before_change()
            array.write(start, end, self.segment_at(start).dtype, values)

    def read_weight(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """The elements [start, end) of what rests here of a parameter, 1-D, in host memory: themselves where they rest
        there, else a copy. Blocks."""
        slot = self.slots[name]
        if not slot.numel:
            return torch.empty(0, dtype=DTYPES[slot.dtype], device="cpu")
        low, high = slot.offset + start, slot.end if end is None else slot.offset + end
        if self.params is None:
            self.buffer.use()
            return self.param_piece(slot, low, high).to("cpu")
        return self.params.get(*self.param_layout.span(low, high)).view(DTYPES[slot.dtype])

    def write_weight(self, name: str, value: torch.Tensor) -> None:
        """Overwrite what rests here of a parameter, and what of it is gathered. Blocks."""
        slot = self.slots[name]
        if not slot.numel:
            return
        self.before_change()
        if self.params is not None:
            self.params.put(self.param_layout.span(slot.offset, slot.end)[0], _bytes_of(value, DTYPES[slot.dtype]))
        if self.params is None or self.buffer.resident:
            self.buffer.use()
            self.param_piece(slot, slot.offset, slot.end).copy_(value)

    def write_params(self) -> None:
        """Store the gathered parameters, as far as they rest here. Blocks."""
        assert self.params is not None
        self.before_change()
        for segment in self.layout.segments:
            first, nbytes = self.buffer_span(segment.start, segment.end)
            content = self.buffer.flat[first : first + nbytes]
            if self.device.type != "cpu":
                content = HostBuffer(nbytes).bytes
                self.buffer.read(first, content).wait()
            self.params.write(segment.byte_start, content).wait()

    def segment_at(self, element: int) -> Segment:
        return next(s for s in self.layout.segments if s.start <= element < s.end)

    def lasting_stores(self) -> Iterator[Store]:
        """Those of parameters and optimizer state, in the order of the unit's file."""
        if self.params is not None:
            yield self.params
        for array in self.arrays.values():
            yield array.store
            if array.scales is not None:
                yield array.scales.store

    def generations(self) -> list[Generations]:
        """The files on disk that hold parameters and optimizer state, each once."""
        return list(dict.fromkeys(store.file for store in self.lasting_stores() if isinstance(store, DiskStore)))

    def close(self) -> None:
        self.known.clear()
        if self.rows is not None:
            self.rows.close()
        for store in self.lasting_stores():
            store.drop()
        for grads in self.grad_shards:
            grads.close()
        self.buffer.drop()


def _bytes_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values as they rest: their bytes in host memory, uint8."""
    return values.to("cpu", dtype).reshape(-1).contiguous().view(torch.uint8)


def _read_step(shard: UnitShard, start: int, end: int, tile: tuple[Buffer, int] | None = None) -> Step:
    """Parameters on their way from their store into the gathered buffer, or into that of a `tile`: with it the element
    of what rests here that would be its first."""
    params, buffer = shard.params, shard.buffer
    assert params is not None
    first, nbytes = shard.param_layout.span(start, end)
    if tile is None:
        into = shard.buffer_span(start, end)[0]
    else:
        buffer, into = tile[0], (start - tile[1]) * shard.segment_at(start).itemsize
    if shard.device.type == "cpu":  # straight into place
        return Step(lambda _: [params.read(first, buffer.flat[into : into + nbytes])])
    source = params.in_place(first, nbytes)
    taken: list[torch.Tensor] = []

    def begin(slabs: list[torch.Tensor]) -> Sequence[Transfer]:
        taken.append(slabs[0][:nbytes])
        return [params.read(first, taken[0])]

    def fill() -> Sequence[Transfer]:
        assert source is not None
        buffer.write(into, source)
        return ()  # memory at rest is waited for before it changes

    return Step(begin, lambda: [buffer.write(into, taken[0])], 1) if source is None else Step(finish=fill)


@final
class Gathering:
    """The parts of the other ranks on their way into the gathered buffer, of which this rank's part is in place."""

    def __init__(self, shard: UnitShard, ranks: Ranks, tile: tuple[Buffer, int, int] | None = None) -> None:
        """`tile`: the buffer of one, its elements, and the row of each rank that it begins with."""
        self._buffer, self._segments, row = shard.buffer, shard.whole.segments, -1
        if tile is not None:
            self._buffer, numel, row = tile
            self._segments = (replace(shard.whole.segments[0], numel=numel),)
        self._ranks = ranks
        self._turns = [ranks.turn_to_gather(shard.layout.index, segment.numel, row) for segment in self._segments]
        self._going: list[Transfer] = []

    def start(self) -> Sequence[Transfer]:
        """As the last step of what brings this rank's part."""
        with self._buffer.filling():  # behind the copies of this rank's part
            for segment, turn in zip(self._segments, self._turns, strict=True):
                end = segment.byte_start + segment.numel * segment.itemsize
                flat = self._buffer.flat[segment.byte_start : end]  # as many equal parts as there are ranks
                going = self._ranks.all_gather(flat.view(SENT_AS[segment.dtype]), turn)
                if going.on_stream:
                    going.wait()
                else:
                    self._going.append(going)
        return ()

    def arrive(self) -> None:
        """Block until the parts are in place; the conveyor has started to bring them and has gone on."""
        for going in self._going:
            going.wait()

    @property
    def arrived(self) -> bool:
        return all(going.done() for going in self._going)


def read_steps(
    shard: UnitShard, segment: Segment, start: int, end: int, slab_bytes: int, buffer: Buffer | None = None
) -> Iterator[Step]:
    """The elements [start, end) of a segment, whole pages, from their store into the gathered buffer. Into a `buffer`
    of their own: with several ranks to where this rank's part is among as many of each."""
    numel = READ_NUMEL  # of one read: large, but on an accelerator no more than a slab holds
    if shard.is_copied:
        numel = max(end - start, 1)
    elif shard.device.type != "cpu":
        numel = min(max(slab_bytes // segment.itemsize // PAGE_ELEMENTS * PAGE_ELEMENTS, PAGE_ELEMENTS), READ_NUMEL)
    tile = None if buffer is None else (buffer, start - shard.rank * (end - start))
    for low in range(start, end, numel):
        yield _read_step(shard, low, min(low + numel, end), tile)


def fetch_steps(shard: UnitShard, slab_bytes: int) -> Iterator[Step]:
    """The plain fetch of a unit: its store into its gathered buffer."""
    for segment in shard.layout.segments:
        yield from read_steps(shard, segment, segment.start, segment.end, slab_bytes)


def own_rows(shard: UnitShard, name: str, key: str) -> slice | None:
    """Which of the optimizer's values `key` rest here, where it has one for each row; None of any other value."""
    if key not in shard.row_values:
        return None
    slot, whole = shard.slots[name], shard.whole_slots[name]
    width = whole.numel // whole.shape[0]
    return slice(slot.first // width, (slot.first + slot.numel) // width)


def own_value(shard: UnitShard, name: str, key: str, value: Any) -> Any:
    """What rests here of an optimizer's value that is no array: given are all of it, or this."""
    rows = own_rows(shard, name, key)
    if rows is None or not isinstance(value, torch.Tensor) or value.numel() != shard.whole_slots[name].shape[0]:
        return value
    return value.detach().reshape(-1)[rows].cpu()
