"""Arrays that are read in ranges, and those of a unit at rest, written slab by slab whatever tier they are on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch

from outsize.move.memory import HostBuffer, copy, zero
from outsize.move.shard import SlotState, StateArray, UnitShard
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE, STATE_BYTES
from outsize.optim.rules import split_master
from outsize.plan.layout import Slot, UnitLayout, array_layout, chunk_ranges, page_range, slots_in

SLAB_NUMEL = 1 << 20
SLAB_BYTES = SLAB_NUMEL * 8
"""Loading holds one slab, whatever the size of the model."""

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

    def whole(self) -> torch.Tensor:
        """All elements in their shape, on the CPU. Memory: their bytes, and those of a run."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat, at = out.view(-1), 0
        for values in self.runs():
            flat[at : at + values.numel()] = values
            at += values.numel()
        return out


@final
class Weights:
    """The parameters that rest here. A gathered buffer is kept equal to the store behind it."""

    def __init__(self, shard: UnitShard) -> None:
        self.unit, self.layout = shard.layout, shard.param_layout
        self._shard = shard

    def dtype(self, slot: Slot) -> torch.dtype:
        return DTYPES[slot.dtype]

    def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8, whole pages) with the bytes from `first`. Blocks."""
        shard = self._shard
        if shard.params is None:
            shard.buffer.read(self._into(first, out.numel()), out).wait()
        else:
            shard.params.read(first, out).wait()

    def write(self, first: int, source: torch.Tensor) -> None:
        """Store `source` (uint8, whole pages) at byte `first`. Blocks."""
        shard = self._shard
        shard.before_change()
        if shard.params is not None:
            shard.params.write(first, source).wait()
        if shard.buffer.resident:
            shard.buffer.write(self._into(first, source.numel()), source).wait()

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

    def read(self, first: int, out: torch.Tensor) -> None:
        if self._array.code is None:
            self._array.store.read(first, out).wait()
            return
        start, end = self.layout.elements(first, out.numel())
        values = self._shard.read_array(self._array, start, end)
        out.view(values.dtype).copy_(values)

    def write(self, first: int, source: torch.Tensor) -> None:
        self._shard.before_change()
        if self._array.code is None:
            self._array.store.write(first, source).wait()
            return
        start, end = self.layout.elements(first, source.numel())
        dtype = self._array.value_dtype(self._shard.segment_at(start).dtype)
        self._shard.write_array(self._array, start, end, source.view(dtype))


Array = Weights | States
Source = Callable[[Slot, int, int], torch.Tensor]
"""Gives the elements [start, end) of a parameter, 1-D, in the array's dtype."""


def copy_in(array: Array, wanted: Mapping[str, object], slab: HostBuffer, source: Source, keep: bool = False) -> None:
    """Write the parts of an array that belong to the wanted parameters; others between them stay with `keep`, else
    become zero."""
    for start, end, parts in _chunks(array.unit, wanted):
        first, nbytes = array.layout.span(start, end)
        content = slab.bytes[:nbytes]
        if keep:
            array.read(first, content)
        elif sum(high - low for _, low, high in parts) < end - start:
            zero(content)
        for slot, low, high in parts:
            begin = slot.first - slot.offset
            copy(_part(array, content, slot, start, low, high), source(slot, begin + low, begin + high))
        array.write(first, content)


def _chunks(unit: UnitLayout, wanted: Mapping[str, object]) -> Iterator[tuple[int, int, list[tuple[Slot, int, int]]]]:
    """(first element, end, parts of wanted parameters) of whole pages that hold any, a slab at a time."""
    for segment in unit.segments:
        for start, end in chunk_ranges(segment, SLAB_NUMEL):
            parts = sorted(
                (part for part in slots_in(unit, start, end) if part[0].name in wanted), key=lambda part: part[1]
            )
            if parts:
                low, high = page_range(parts[0][1], parts[-1][2])
                yield low, high, parts


def _part(array: Array, content: torch.Tensor, slot: Slot, start: int, low: int, high: int) -> torch.Tensor:
    offset, nbytes = array.layout.span(start, low)[1], array.layout.span(low, high)[1]
    return content[offset : offset + nbytes].view(array.dtype(slot))


def place_weights(
    shard: UnitShard, weights: Mapping[str, Readable], resting: Mapping[str, Mapping[str, Readable]]
) -> None:
    """Place the settled unit's parameters that are in `weights`, and the rest of their masters. Others keep their
    values. Memory: a slab and what is read at a time.

    A 16-bit parameter with an fp32 master takes the values as its master, exactly. `resting` has "weight" and "master"
    themselves, of the parameters for which they are stored so.
    """
    slab = HostBuffer(SLAB_BYTES)
    known = {name: slot for name, slot in shard.slots.items() if name in weights}
    halves = {name: slot for name, slot in known.items() if shard.array(MASTER, slot)}
    keep = len(known) < len(shard.slots)

    def split(slot: Slot, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = weights[slot.name].read(start, end)
        weight = torch.empty_like(values, dtype=DTYPES[slot.dtype])
        rest = torch.empty_like(values, dtype=MASTER_DTYPE[slot.dtype])
        split_master(values.float(), weight, rest)
        return weight, rest

    def weight(slot: Slot, start: int, end: int) -> torch.Tensor:
        live = DTYPES[slot.dtype]
        if slot.name in resting:
            return resting[slot.name]["weight"].read(start, end)
        if slot.name in halves and weights[slot.name].dtype is not live:
            return split(slot, start, end)[0]
        return weights[slot.name].read(start, end).to(live)

    def rest(slot: Slot, start: int, end: int) -> torch.Tensor:
        found = resting.get(slot.name)
        return split(slot, start, end)[1] if found is None else found["master"].read(start, end)

    copy_in(Weights(shard), known, slab, weight, keep)
    if halves:
        copy_in(States(shard, shard.arrays[MASTER]), halves, slab, rest, keep)


def place_state(
    shard: UnitShard,
    arrays: Mapping[str, Mapping[str, Readable]],
    scalars: Mapping[str, Mapping[str, Any]],
    absent: Container[str],
) -> None:
    """Place the settled unit's optimizer arrays, for which there is room, and the optimizer's other values.

    A parameter that has none of these has none from now on; those in `absent` keep what they have.
    """
    slab = HostBuffer(SLAB_BYTES)
    known = {name for name in shard.slots if name not in absent}
    filled = known & scalars.keys()
    stale = {name for name in known if name in shard.slot_states and shard.slot_states[name].initialised}
    for array in shard.arrays.values():
        if array.public:

            def source(slot: Slot, start: int, end: int, name: str = array.name) -> torch.Tensor:
                found = arrays[slot.name].get(name) if slot.name in filled else None
                return torch.zeros(end - start, device="cpu") if found is None else found.read(start, end)

            wanted = dict.fromkeys(filled | stale)
            copy_in(States(shard, array), wanted, slab, source, keep=len(known) < len(shard.slots))
    for name in known:
        shard.slot_states.pop(name, None)
    for name in filled:
        shard.slot_states[name] = SlotState(dict(scalars[name]), initialised=True)
