"""Arrays that are read in ranges, and those of a unit at rest, written slab by slab whatever tier they are on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch.utils._pytree import tree_map_only

from outsize.move.memory import HostBuffer, copy, zero
from outsize.move.shard import SlotState, StateArray, UnitShard, own_rows, own_value
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE, STATE_BYTES, Write, start_all
from outsize.move.transfer import Transfer
from outsize.optim.rules import split_master
from outsize.planning.layout import PAGE_ELEMENTS, Slot, UnitLayout, array_layout, chunk_ranges, page_range, slots_in

SLAB_NUMEL = 1 << 20
SLAB_BYTES = SLAB_NUMEL * 8
"""Loading holds one slab, whatever the size of the model; before, a chunk for each thread that compares checksums."""

RUN_NUMEL = 1 << 19
"""Elements of one read, unless an array says otherwise."""


@final
@dataclass(frozen=True)
class Readable:
    """An array that is read in ranges, wherever it lies: at rest, in a checkpoint, in a folder of others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    """Gives the elements [start, end) of the flattened array: 1-D, on the CPU, valid until the next call. Blocks."""
    run: int = RUN_NUMEL
    into: Callable[[int, torch.Tensor], None] | None = None
    """Where elements can come to their place without a copy: fills the tensor (1-D, CPU) with those from `start`."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def runs(self) -> Iterator[torch.Tensor]:
        """All elements in order, 1-D; each run is valid until the next one is asked for."""
        for start in range(0, self.numel, self.run):
            yield self.read(start, min(start + self.run, self.numel))

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, on the CPU) with the elements from `start`, cast to its dtype. Blocks."""
        if self.into is not None and out.dtype is self.dtype:
            self.into(start, out)
        else:
            copy(out, self.read(start, start + out.numel()))

    def whole(self) -> torch.Tensor:
        """All elements in their shape, on the CPU. Memory: their bytes, and those of a run."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = out.view(-1)
        for start in range(0, self.numel, self.run):
            self.fill(start, flat[start : start + self.run])
        return out


@final
class Weights:
    """The parameters that rest here. A gathered buffer is kept equal to the store behind it."""

    def __init__(self, shard: UnitShard) -> None:
        self.unit, self.layout = shard.layout, shard.param_layout
        self._shard = shard

    def dtype(self, slot: Slot) -> torch.dtype:
        return DTYPES[slot.dtype]

    def view(self, first: int, nbytes: int) -> torch.Tensor | None:
        """The bytes themselves where they rest in memory of the CPU."""
        shard = self._shard
        if shard.params is None:
            return shard.buffer.view(self._into(first, nbytes), nbytes)
        return shard.params.view(first, nbytes)

    def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8, whole pages) with the bytes from `first`. Blocks."""
        shard = self._shard
        if shard.params is None:
            shard.buffer.read(self._into(first, out.numel()), out).wait()
        else:
            shard.params.read(first, out).wait()

    def writes(self, first: int, source: torch.Tensor) -> Iterator[Write]:
        """What stores `source` (uint8, whole pages) at byte `first`."""
        shard = self._shard
        if shard.params is not None:
            yield shard.params, first, source
        if shard.buffer.resident:
            yield shard.buffer, self._into(first, source.numel()), source

    def _into(self, first: int, nbytes: int) -> int:
        """Where in the gathered buffer these bytes lie."""
        return self._shard.buffer_span(*self.layout.elements(first, nbytes))[0]


@final
class States:
    """One optimizer array, or the rest of the masters. A compact one shows its values, not its codes."""

    def __init__(self, shard: UnitShard, array: StateArray) -> None:
        values = array_layout(shard.layout, STATE_BYTES, segments=shard.stated())
        self.unit, self.layout = shard.layout, array.layout if array.code is None else values
        self._shard = shard
        self._array = array

    def dtype(self, slot: Slot) -> torch.dtype:
        return self._array.value_dtype(slot.dtype)

    def view(self, first: int, nbytes: int) -> torch.Tensor | None:
        return self._array.store.view(first, nbytes) if self._array.code is None else None

    def read(self, first: int, out: torch.Tensor) -> None:
        if self._array.code is None:
            self._array.store.read(first, out).wait()
            return
        start, end = self.layout.elements(first, out.numel())
        values = self._shard.read_array(self._array, start, end)
        out.view(values.dtype).copy_(values)

    def writes(self, first: int, source: torch.Tensor) -> Iterator[Write]:
        """As for weights; codes are written here."""
        if self._array.code is None:
            yield self._array.store, first, source
            return
        start, end = self.layout.elements(first, source.numel())
        dtype = self._array.value_dtype(self._shard.segment_at(start).dtype)
        self._shard.write_array(self._array, start, end, source.view(dtype))


Array = Weights | States
Source = Callable[[Slot, int, torch.Tensor], None]
"""Fills the tensor (1-D, on the CPU, in the array's dtype) with the elements of a parameter from `start` on."""


@final
@dataclass(frozen=True)
class Fill:
    """What comes into an array for the wanted parameters. Others between them stay with `keep`, else become zero."""

    array: Array
    wanted: Container[str]
    source: Source
    keep: bool


def copy_in(fills: Sequence[Fill], slab: torch.Tensor) -> None:
    """Write the parts of arrays of a unit that belong to the same wanted parameters, all arrays together.

    What rests in memory is filled there. For the rest, one half of the slab is filled while the other one is written.
    """
    halves, under_way = slab.chunk(2), deque[list[Transfer]]([[]])
    with ExitStack() as writing:  # each is waited for, also when another fails
        for start, end, parts in _chunks(fills[0].array.unit, fills[0].wanted, SLAB_NUMEL // 2 // len(fills)):
            writes: list[Write] = []
            at = 0
            for fill in fills:
                first, nbytes = fill.array.layout.span(start, end)
                content = in_place = fill.array.view(first, nbytes)
                if content is None:
                    content, at = halves[0][at : at + nbytes], at + nbytes
                if fill.keep:
                    if in_place is None:
                        fill.array.read(first, content)
                elif sum(high - low for _, low, high in parts) < end - start:
                    zero(content)
                for slot, low, high in parts:
                    begin = slot.first - slot.offset
                    fill.source(slot, begin + low, _part(fill.array, content, slot, start, low, high))
                writes += fill.array.writes(first, content)
            under_way.append(start_all(writes))
            for transfer in under_way[-1]:
                writing.callback(transfer.wait)
            for transfer in under_way.popleft():
                transfer.wait()
            halves = halves[::-1]


def _chunks(
    unit: UnitLayout, wanted: Container[str], numel: int
) -> Iterator[tuple[int, int, list[tuple[Slot, int, int]]]]:
    """(first element, end, parts of wanted parameters) of whole pages that hold any, so many elements at a time."""
    for segment in unit.segments:
        for start, end in chunk_ranges(segment, numel // PAGE_ELEMENTS * PAGE_ELEMENTS):
            parts = sorted(
                (part for part in slots_in(unit, start, end) if part[0].name in wanted), key=lambda part: part[1]
            )
            if parts:
                low, high = page_range(parts[0][1], parts[-1][2])
                yield low, high, parts


def _part(array: Array, content: torch.Tensor, slot: Slot, start: int, low: int, high: int) -> torch.Tensor:
    offset, nbytes = array.layout.span(start, low)[1], array.layout.span(low, high)[1]
    return content[offset : offset + nbytes].view(array.dtype(slot))


def place(
    shard: UnitShard,
    weights: Mapping[str, Readable],
    resting: Mapping[str, Mapping[str, Readable]],
    arrays: Mapping[str, Mapping[str, Readable]],
    scalars: Mapping[str, Mapping[str, Any]],
    stated: Collection[str],
) -> None:
    """Place parameters and state of the settled unit, all that goes into a record at once. Memory: a slab and what is
    read at a time.

    Args:
        weights: parameters get these values, others keep theirs. A 16-bit parameter with an fp32 master takes them as
            its master, exactly.
        resting: "weight" and "master" themselves, of the parameters for which they are stored so.
        arrays, scalars: the optimizer's arrays, for which there is room, and its other values, `Readable` or not.
        stated: the parameters that get the state that there is; where there is none they have none from now on.
    """
    known = [name for name in shard.slots if name in weights]
    halves = [name for name in known if shard.array(MASTER, shard.slots[name])]
    changed = [name for name in shard.slots if name in stated]
    filled = {name for name in changed if name in scalars}
    stale = {name for name in changed if name in shard.slot_states and shard.slot_states[name].initialised}
    keep = len(known) < len(shard.slots)

    def split(slot: Slot, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = weights[slot.name].read(start, end)
        weight = torch.empty_like(values, dtype=DTYPES[slot.dtype])
        rest = torch.empty_like(values, dtype=MASTER_DTYPE[slot.dtype])
        split_master(values, weight, rest)
        return weight, rest

    def weight(slot: Slot, start: int, out: torch.Tensor) -> None:
        if slot.name in resting:
            resting[slot.name]["weight"].fill(start, out)
        elif slot.name in halves and weights[slot.name].dtype is not out.dtype:
            copy(out, split(slot, start, start + out.numel())[0])
        else:
            weights[slot.name].fill(start, out)

    def rest(slot: Slot, start: int, out: torch.Tensor) -> None:
        if slot.name in resting:
            resting[slot.name]["master"].fill(start, out)
        else:
            copy(out, split(slot, start, start + out.numel())[1])

    def state(key: str, slot: Slot, start: int, out: torch.Tensor) -> None:
        found = arrays[slot.name].get(key) if slot.name in filled else None
        if found is None:
            zero(out)
        else:
            found.fill(start, out)

    fills = [Fill(Weights(shard), known, weight, keep)] if known else []
    for array in shard.arrays.values():
        if array.public and (filled or stale):
            fills.append(
                Fill(States(shard, array), filled | stale, partial(state, array.name), len(changed) < len(shard.slots))
            )
        elif not array.public and halves:
            fills.append(Fill(States(shard, array), halves, rest, keep))
    if fills:
        shard.before_change()
        slab = HostBuffer(SLAB_BYTES).bytes
        for together in [fills] if shard.rows is not None else [[fill] for fill in fills]:
            copy_in(together, slab)
    for name in changed:
        shard.slot_states.pop(name, None)
    for name in filled:
        values = {key: _own_value(shard, name, key, value) for key, value in scalars[name].items()}
        shard.slot_states[name] = SlotState(values, initialised=True)


def _own_value(shard: UnitShard, name: str, key: str, value: Any) -> Any:
    """What rests here of an optimizer's value that is no array. Blocks."""
    rows = own_rows(shard, name, key)
    if rows is not None and isinstance(value, Readable):
        return value.read(rows.start, rows.stop).clone()
    return own_value(shard, name, key, tree_map_only(Readable, Readable.whole, value))
