"""The update of a unit as steps of the conveyor: read chunk k+1 | update chunk k | write chunk k-1."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from outsize.move.conveyor import Step
from outsize.move.shard import DTYPES, REMAINDER, Pending, ReadStep, SlotState, SlotUpdate, UnitShard, read_numel
from outsize.move.store import Store
from outsize.move.transfer import Transfer
from outsize.optim.rules import Piece, Rule
from outsize.plan.layout import PAGE_ELEMENTS, Segment, Slot, round_up, slots_in


@dataclass
class UpdateClock:
    """Seconds spent in update arithmetic, over all threads."""

    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


@final
class ChunkUpdater:
    """Makes the steps that update a unit, for one rule and one size of chunk."""

    def __init__(self, rule: Rule, chunk_numel: int, slab_bytes: int, clock: UpdateClock) -> None:
        self.rule = rule
        self.clock = clock
        self._cores = len(os.sched_getaffinity(0))
        self.threads = max(self._cores // 2, 1)  # behind the computation, which has the others
        self._chunk_numel = chunk_numel
        self._slab_bytes = slab_bytes

    def steps(self, shard: UnitShard, pending: Pending, fetch: bool) -> Iterator[Step]:
        """In order of address: update steps where the update is owed, plain reads around them if `fetch`."""
        for segment in shard.layout.segments:
            low, high = _owed_range(shard, segment, pending)
            plain = read_numel(shard, segment.itemsize, self._slab_bytes)
            if fetch:
                yield from _reads(shard, segment.start, low, plain)
            for start in range(low, high, self._chunk_numel):
                yield UpdateStep(self, shard, pending, start, min(start + self._chunk_numel, high), fetch)
            if fetch:
                yield from _reads(shard, high, segment.end, plain)

    def update_in_place(self, shard: UnitShard, pending: Pending) -> None:
        """The whole update at once where everything lies on the computing device."""
        began = time.perf_counter()
        for name, owed in pending.items():
            slot = shard.slots[name]
            assert owed.loose is not None
            param = shard.param_piece(slot, slot.offset, slot.end)
            piece = _piece(shard, slot, owed, param, _arrays_in_memory(shard, slot), self._cores)
            piece.grad = owed.loose.reshape(-1)
            _apply(self.rule, shard, slot, True, piece)
        self.clock.add(time.perf_counter() - began)


def _owed_range(shard: UnitShard, segment: Segment, pending: Pending) -> tuple[int, int]:
    """The page-aligned range of the segment that holds all parameters with an update to run; empty if none."""
    slots = [shard.slots[name] for name in pending if shard.slots[name].numel]
    slots = [slot for slot in slots if segment.start <= slot.offset < segment.end]
    if not slots:
        return segment.end, segment.end
    low = min(slot.offset for slot in slots) // PAGE_ELEMENTS * PAGE_ELEMENTS
    return low, min(round_up(max(slot.end for slot in slots), PAGE_ELEMENTS), segment.end)


def _reads(shard: UnitShard, start: int, end: int, numel: int) -> Iterator[Step]:
    for low in range(start, end, numel):
        yield ReadStep(shard, low, min(low + numel, end))


def _arrays_in_memory(shard: UnitShard, slot: Slot) -> dict[str, torch.Tensor]:
    """A parameter's arrays where they lie; made once, since stores in memory never move."""
    views = shard.views.get(slot.name)
    if views is None:
        views = shard.views[slot.name] = _view_arrays(shard, slot)
    return dict(views)


def _view_arrays(shard: UnitShard, slot: Slot) -> dict[str, torch.Tensor]:
    views = {}
    for name, array in shard.arrays.items():
        first, nbytes = array.layout.span(slot.offset, slot.end)
        view = array.store.in_place(first, nbytes)
        assert view is not None
        views[name] = view.view(array.dtype(slot.dtype))
    return views


@final
class UpdateStep(Step):
    """One chunk of a unit's update. Arrays in host memory are updated where they are, the others pass through slabs."""

    def __init__(
        self, updater: ChunkUpdater, shard: UnitShard, pending: Pending, start: int, end: int, fetch: bool
    ) -> None:
        self._updater = updater
        self._shard = shard
        self._pending = pending
        self._start, self._end = start, end
        self._fetch = fetch
        self._dtype = next(s.dtype for s in shard.layout.segments if s.start <= start < s.end)
        self._bytes: dict[str, torch.Tensor] = {}  # by array name, "params" and "grads" included
        self._staged: list[tuple[Store, int, torch.Tensor]] = []  # arrays to write back
        self.slabs = self._count_slabs()

    def begin(self, slabs: list[torch.Tensor]) -> Sequence[Transfer]:
        free = list(slabs)
        reads: list[Transfer] = []
        for name, array in self._shard.arrays.items():
            first, nbytes = array.layout.span(self._start, self._end)
            if not nbytes:
                continue
            view = array.store.view(first, nbytes)
            if view is None:
                view = free.pop()[:nbytes]
                reads.append(array.store.read(first, view))
                self._staged.append((array.store, first, view))
            self._bytes[name] = view
        reads += self._begin_grads(free)
        reads += self._begin_params(free)
        return reads

    def _count_slabs(self) -> int:
        arrays = self._shard.arrays.values()
        count = sum(array.store.view(0, 0) is None for array in arrays)
        count += self._grads_from_disk()
        return count + (self._shard.device.type != "cpu")

    def _grads_from_disk(self) -> bool:
        grads = self._shard.grads
        return grads is not None and grads.store is not None and self._grads_rest()

    def _grads_rest(self) -> bool:
        """Whether the update needs a gradient from the unit's gradient shard."""
        met = [self._pending.get(slot.name) for slot, _, _ in slots_in(self._shard.layout, self._start, self._end)]
        return any(owed is not None and owed.loose is None and not owed.ops.zero for owed in met)

    def _begin_grads(self, free: list[torch.Tensor]) -> list[Transfer]:
        grads = self._shard.grads
        if grads is None or not self._grads_rest():
            return []
        if grads.store is None:
            self._bytes["grads"] = grads.view(self._start, self._end)
            return []
        first, nbytes = grads.span(self._start, self._end)
        self._bytes["grads"] = free.pop()[:nbytes]
        return [grads.store.read(first, self._bytes["grads"])]

    def _begin_params(self, free: list[torch.Tensor]) -> list[Transfer]:
        shard = self._shard
        first, nbytes = shard.param_layout.span(self._start, self._end)
        if shard.device.type == "cpu":
            self._bytes["params"] = shard.param_bytes(self._start, self._end)
            if self._fetch:
                assert shard.params is not None
                return [shard.params.read(first, self._bytes["params"])]
            return []
        slab = free.pop()[:nbytes]
        self._bytes["params"] = slab
        if shard.params is None or not self._fetch:
            return [shard.buffer.fetch(first, slab)]
        return [shard.params.read(first, slab)]

    def finish(self) -> Sequence[Transfer]:
        began = time.perf_counter()
        for slot, low, high in slots_in(self._shard.layout, self._start, self._end):
            if slot.name in self._pending:
                self._update(slot, low, high)
        self._updater.clock.add(time.perf_counter() - began)
        return self._write_back()

    def _update(self, slot: Slot, low: int, high: int) -> None:
        owed = self._pending[slot.name]
        shard = self._shard
        arrays = {
            name: self._part(name, array.layout.span(self._start, low)[1], array.layout.span(low, high)[1]).view(
                array.dtype(slot.dtype)
            )
            for name, array in shard.arrays.items()
            if name in self._bytes
        }
        if owed.loose is not None:
            grad = owed.loose.reshape(-1)[low - slot.offset : high - slot.offset]
            grad = grad.cpu() if grad.device.type != "cpu" else grad
        elif owed.ops.zero:
            grad = torch.zeros(high - low)
        else:
            assert shard.grads is not None
            offset, nbytes = shard.grads.span(self._start, low)[1], shard.grads.span(low, high)[1]
            grad = self._part("grads", offset, nbytes).view(shard.grads.dtype(slot))
        offset, nbytes = shard.param_layout.span(self._start, low)[1], shard.param_layout.span(low, high)[1]
        param = self._part("params", offset, nbytes).view(DTYPES[slot.dtype])
        piece = _piece(shard, slot, owed, param, arrays, self._updater.threads)
        piece.grad = grad
        _apply(self._updater.rule, shard, slot, high == slot.end, piece)

    def _part(self, name: str, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[name][offset : offset + nbytes]

    def _write_back(self) -> list[Transfer]:
        shard = self._shard
        writes = [store.write(first, view) for store, first, view in self._staged]
        first, _ = shard.param_layout.span(self._start, self._end)
        if shard.params is not None:
            writes.append(shard.params.write(first, self._bytes["params"]))
        if shard.device.type != "cpu":
            writes.append(shard.buffer.fill(first, self._bytes["params"]))
        return writes


def _apply(rule: Rule, shard: UnitShard, slot: Slot, last: bool, piece: Piece) -> None:
    """Run the rule on one piece; the parameter's scalars move on when its `last` piece is done."""
    rule.apply(piece)
    state = shard.slot_states[slot.name]
    if last:
        assert state.next_scalars is not None
        state.scalars, state.next_scalars, state.initialised = state.next_scalars, None, True


def _piece(
    shard: UnitShard, slot: Slot, owed: SlotUpdate, param: torch.Tensor, arrays: dict[str, torch.Tensor], threads: int
) -> Piece:
    """All of a piece but its gradient."""
    state = shard.slot_states.setdefault(slot.name, SlotState())
    remainder = arrays.pop(REMAINDER, None)
    return Piece(param, remainder, arrays, param, owed.ops, owed.hyper, state, threads)
