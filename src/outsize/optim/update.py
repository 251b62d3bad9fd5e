"""The update of a unit as steps of the conveyor: read chunk k+1 | update chunk k | write chunk k-1."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch

from outsize.move.conveyor import Step
from outsize.move.generations import Generations
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer
from outsize.move.shard import READ_NUMEL, Pending, Scales, SlotState, SlotUpdate, UnitShard, read_numel, read_step
from outsize.move.store import DTYPES, MASTER, MASTER_BYTES, OWN_BYTES, STATE_BYTES, Store
from outsize.move.transfer import Promise, Transfer
from outsize.optim.rules import Piece, Rule, join_master, split_master
from outsize.plan.layout import (
    ALIGN_ELEMENTS,
    PAGE_ELEMENTS,
    ArrayLayout,
    Segment,
    Slot,
    page_range,
    round_up,
    slots_in,
)


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

    def __init__(self, rule: Rule, slab_bytes: int, slabs: int, clock: UpdateClock) -> None:
        self.rule = rule
        self.whole = rule.whole
        self.clock = clock
        self._cores = update_threads()
        self.staging_slabs = slabs
        self._slab_bytes = slab_bytes

    @property
    def threads(self) -> int:
        """For the next chunk: half of the cores, since the computation has the others; all while a thread waits."""
        return self._cores if Promise.waiting else max(self._cores // 2, 1)

    @property
    def counts(self) -> tuple[str, ...]:
        """The per-parameter values that count steps."""
        return self.rule.counts

    @property
    def scalars(self) -> tuple[str, ...] | None:
        """The per-parameter values that there can be; None: whatever the optimizer keeps."""
        return self.rule.scalars

    @property
    def optional(self) -> frozenset[str]:
        """The arrays that a parameter's state may be without."""
        return self.rule.optional

    def master_of(self, shard: UnitShard, name: str) -> torch.Tensor:
        """The fp32 values that a 16-bit parameter is the rounding of, as far as they rest here, 1-D."""
        slot = shard.slots[name]
        rest = shard.read_array(shard.arrays[MASTER], slot.offset, slot.end)
        return join_master(shard.read_weight(name), rest)

    def store_master(self, shard: UnitShard, name: str, value: torch.Tensor) -> None:
        """Make `value` (fp32, what rests here, 1-D) the parameter's master, and the parameter its rounding."""
        slot = shard.slots[name]
        array = shard.array(MASTER, slot)
        if array is None:
            shard.write_weight(name, value)
            return
        weight = torch.empty(slot.numel, dtype=DTYPES[slot.dtype], device="cpu")
        rest = torch.empty(slot.numel, dtype=array.dtype(slot.dtype), device="cpu")
        split_master(value, weight, rest)
        shard.write_weight(name, weight)
        shard.write_array(array, slot.offset, slot.end, rest)

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        """Raise, naming `where` the parameter group is, for options with which no update can run."""
        self.rule.check(hyper, where)

    def missing(self, hyper: Mapping[str, object]) -> list[str]:
        """The arrays that these hyper-parameters need and that were not made."""
        return [name for name in self.rule.needs(hyper) if name not in self.rule.arrays]

    def steps(self, shard: UnitShard, pending: Pending, fetch: bool) -> Iterator[Step]:
        """In order of address: update steps where the update is owed, plain reads around them if `fetch`."""
        moving = [
            array.scales
            for array in shard.arrays.values()
            if array.scales is not None and array.scales.store.view(0, 0) is None
        ]
        shard.before_change()
        turning = [file for file in shard.generations() if file.frozen]
        for file in turning:
            file.begin_turn()
        if shard.updates_on_device:
            yield Step(finish=partial(_update_on_device, self, shard, pending, fetch))
            return
        if moving:
            yield Step(lambda _: _gather_scales(moving))
        for segment in shard.layout.segments:
            plain = read_numel(shard, segment.itemsize, self._slab_bytes)
            position = segment.start
            for low, high in self._owed_ranges(shard, segment, pending):
                if fetch:
                    yield from _reads(shard, position, low, plain)
                update = ChunkUpdate(self, shard, pending, low, high, fetch)
                yield Step(update.begin, update.finish, update.slabs)
                position = high
            if fetch:
                yield from _reads(shard, position, segment.end, plain)
        if moving:
            yield Step(finish=partial(_return_scales, moving, []))
        if turning:
            yield Step(finish=partial(_end_turns, turning))
        for name, owed in pending.items():
            if not shard.slots[name].numel:
                self._update_empty(shard, shard.slots[name], owed)

    def _update_empty(self, shard: UnitShard, slot: Slot, owed: SlotUpdate) -> None:
        """A parameter without elements has nothing to move, but its steps are counted."""
        kept = [array for array in shard.arrays.values() if array.public or slot.dtype in MASTER_BYTES]
        arrays = {array.name: torch.empty(0, dtype=array.dtype(slot.dtype), device="cpu") for array in kept}
        scales = {array.name: torch.empty(0, device="cpu") for array in kept if array.compact(slot.dtype)}
        param = torch.empty(0, dtype=DTYPES[slot.dtype], device="cpu")
        self.update(
            shard, [slot], owed, slot.end, param, arrays, scales, torch.empty(0, dtype=param.dtype, device="cpu"), 1
        )

    def _owed_ranges(self, shard: UnitShard, segment: Segment, pending: Pending) -> Iterator[tuple[int, int]]:
        """Whole pages of one segment in which updates are owed, in order, a chunk or (`whole`) a parameter each."""
        slots = [shard.slots[name] for name in pending if shard.slots[name].numel]
        slots = [slot for slot in slots if segment.start <= slot.offset < segment.end]
        if not slots:
            return
        if self.rule.whole:
            for slot in sorted(slots, key=lambda slot: slot.offset):
                yield page_range(slot.offset, slot.end)
            return
        low = min(slot.offset for slot in slots) // PAGE_ELEMENTS * PAGE_ELEMENTS
        high = min(round_up(max(slot.end for slot in slots), PAGE_ELEMENTS), segment.end)
        page = staged_bytes(shard, segment.start, segment.start + PAGE_ELEMENTS)
        pages = READ_NUMEL // PAGE_ELEMENTS
        pages = min(pages, self._slab_bytes // page) if page else pages
        numel = max(pages - 1 | 1, 1) * PAGE_ELEMENTS  # an odd number: see Note [Colours] in move/memory.py
        for start in range(low, high, numel):
            yield start, min(start + numel, high)

    def update_in_place(self, shard: UnitShard, pending: Pending) -> None:
        """The whole update at once where everything lies on the computing device."""
        shard.before_change()
        shard.use()
        began = time.perf_counter()
        for name, owed in pending.items():
            slot = shard.slots[name]
            assert owed.loose is not None
            param = shard.param_piece(slot, slot.offset, slot.end)
            grad = torch.zeros_like(owed.loose).reshape(-1) if owed.ops.zero else owed.loose.reshape(-1)
            arrays = _arrays_in_memory(shard, slot)
            scales = {
                name: array.scales.in_place(slot.offset, slot.end)
                for name, array in shard.arrays.items()
                if array.scales is not None and array.compact(slot.dtype)
            }
            self.update(shard, [slot], owed, slot.end, param, arrays, scales, grad, update_threads())
        self.clock.add(time.perf_counter() - began)

    def update(
        self,
        shard: UnitShard,
        slots: Sequence[Slot],
        owed: SlotUpdate,
        end: int,
        param: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        scales: dict[str, torch.Tensor],
        grad: torch.Tensor,
        threads: int,
    ) -> None:
        """Run the rule on the elements of a parameter, or of neighbours, up to `end`; the scalars move on of those that
        end there."""
        slot, *_ = slots
        state = shard.slot_states.setdefault(slot.name, SlotState())
        master = arrays.pop(MASTER, None)
        if self.rule.whole:
            param, grad = param.view(slot.shape), grad.view(slot.shape)
            master = None if master is None else master.view(slot.shape)
            arrays = {name: array.view(slot.shape) for name, array in arrays.items()}
        self.rule.apply(Piece(param, master, arrays, grad, owed.ops, owed.hyper, state, threads, scales, owed.noted))
        after = state.next_scalars
        assert after is not None
        for each in slots:
            if each.end <= end:
                shard.slot_states[each.name] = SlotState(dict(after), True)


def staged_bytes(shard: UnitShard, start: int, end: int) -> int:
    """Staging that the elements [start, end) take on their way, gradients as wide as they can be."""
    arrays = [array.layout for array in shard.arrays.values() if array.store.view(0, 0) is None]
    nbytes = sum(layout.span(start, end)[1] for layout in arrays)
    dtype = shard.segment_at(start).dtype
    loose = shard.device.type != "cpu" and not shard.grad_shards
    if loose or any(grads.store is not None for grads in shard.grad_shards):
        nbytes += STATE_BYTES[dtype] * (end - start)
    return nbytes + (OWN_BYTES[dtype] * (end - start) if stages_params(shard) else 0)


def stages_params(shard: UnitShard) -> bool:
    """Whether parameters are updated in staging: where they rest in host memory they are updated in place."""
    if shard.device.type == "cpu":
        return False
    return shard.params is None or shard.params.view(0, 0) is None


def update_threads() -> int:
    """The cores that this process may use, shared with the other ranks of the machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1), 1)


def _reads(shard: UnitShard, start: int, end: int, numel: int) -> Iterator[Step]:
    for low in range(start, end, numel):
        yield read_step(shard, low, min(low + numel, end))


def _arrays_in_memory(shard: UnitShard, slot: Slot) -> dict[str, torch.Tensor]:
    """A parameter's arrays where they lie; made once, since stores in memory never move."""
    views = shard.views.get(slot.name)
    if views is None:
        views = shard.views[slot.name] = _view_arrays(shard, slot)
    return dict(views)


def _view_arrays(shard: UnitShard, slot: Slot) -> dict[str, torch.Tensor]:
    views = {}
    for name, array in shard.arrays.items():
        if not array.public and slot.dtype not in MASTER_BYTES:
            continue
        first, nbytes = array.layout.span(slot.offset, slot.end)
        view = array.store.in_place(first, nbytes)
        assert view is not None
        views[name] = view.view(array.dtype(slot.dtype))
    return views


def _gather_scales(scales: Sequence[Scales]) -> Sequence[Transfer]:
    """Start to bring the scales of a unit's compact arrays into memory."""
    reads = []
    for each in scales:
        each.gathered = HostBuffer(each.layout.nbytes)
        reads.append(each.store.read(0, each.gathered.bytes))
    return reads


def _return_scales(scales: Sequence[Scales], leaving: list[HostBuffer]) -> Sequence[Transfer]:
    """Start to write them back; what is `leaving` must live until it is written."""
    writes = []
    for each in scales:
        assert each.gathered is not None
        writes.append(each.store.write(0, each.gathered.bytes))
        leaving.append(each.gathered)
        each.gathered = None
    return writes


def _end_turns(files: Sequence[Generations]) -> Sequence[Transfer]:
    """The last step of an update that leaves frozen files as they are: every earlier one has read what it needs and
    begun to write what it has. See Note [Generations]."""
    for file in files:
        file.end_turn()
    return ()


def _update_on_device(updater: ChunkUpdater, shard: UnitShard, pending: Pending, fetch: bool) -> Sequence[Transfer]:
    """The whole update of a unit on an accelerator, on the stream that fills its buffer. With several ranks this rank's
    part, which the others gather behind it."""
    with shard.buffer.filling():
        shard.use()
        for owed in pending.values():
            if owed.loose is not None and shard.lanes is not None:
                owed.loose.record_stream(shard.lanes.incoming)
        for mine, gathered in _parts(shard) if fetch else ():
            gathered.copy_(mine)
        updater.update_in_place(shard, pending)
        for mine, gathered in _parts(shard):
            mine.copy_(gathered)
    return ()


def _parts(shard: UnitShard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What rests here of the parameters and its place in the buffer, where these are two."""
    if shard.params is None:
        return
    for segment in shard.layout.segments:
        mine = shard.params.in_place(*shard.param_layout.span(segment.start, segment.end))
        assert mine is not None
        yield mine, shard.param_bytes(segment.start, segment.end)


# Note [Whole parameters]
# An optimizer that is not elementwise sees one whole parameter at a time. Its arrays do not fit the staging slabs, so
# such a step brings memory of its own and takes all slabs: no two parameters are ever in memory at once.


@final
class ChunkUpdate:
    """One chunk of a unit's update. Arrays in host memory are updated where they are, the others pass through slabs."""

    def __init__(
        self, updater: ChunkUpdater, shard: UnitShard, pending: Pending, start: int, end: int, fetch: bool
    ) -> None:
        self._updater = updater
        self._shard = shard
        self._pending = pending
        self._start, self._end = start, end
        self._fetch = fetch
        self._grads = self._resting_grads()
        self._grads_in_memory = self._grads is not None and (
            self._grads.store is None or any(owed.in_memory for owed in pending.values())
        )
        self._bytes: dict[str, torch.Tensor] = {}  # by array name, "params" and "grads" included
        self._loose: dict[str, torch.Tensor] = {}  # gradients of an accelerator, by parameter
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")  # what is left of the slab
        self._staged: list[tuple[Store, int, torch.Tensor]] = []  # arrays to write back
        self._staged_bytes = staged_bytes(shard, start, end)
        self.slabs = updater.staging_slabs if updater.rule.whole else int(self._staged_bytes > 0)

    def begin(self, slabs: list[torch.Tensor]) -> Sequence[Transfer]:
        if self._updater.rule.whole:  # see Note [Whole parameters]
            self._free = HostBuffer(self._staged_bytes).bytes
        elif slabs:
            self._free = slabs[0]
        reads: list[Transfer] = []
        for name, array in self._shard.arrays.items():
            first, nbytes = array.layout.span(self._start, self._end)
            if not nbytes:
                continue
            view = array.store.view(first, nbytes)
            if view is None:
                view = self._take(nbytes)
                reads.append(array.store.read(first, view))
                self._staged.append((array.store, first, view))
            self._bytes[name] = view
        reads += self._begin_grads()
        reads += self._begin_params()
        reads += self._begin_loose()
        return reads

    def _take(self, nbytes: int) -> torch.Tensor:
        """The next bytes of the staging slab."""
        assert nbytes <= self._free.numel(), "a chunk fits its slab"
        taken, self._free = self._free[:nbytes], self._free[nbytes:]
        return taken

    def _resting_grads(self) -> GradShard | None:
        """Where the gradients lie that the update needs, None where it needs none from there."""
        met = [self._pending.get(slot.name) for slot, _, _ in slots_in(self._shard.layout, self._start, self._end)]
        found = {owed.resting for owed in met if owed is not None and not owed.ops.zero and owed.resting}
        assert len(found) <= 1, "the gradients of one update rest together"
        return next(iter(found), None)

    def _begin_grads(self) -> list[Transfer]:
        grads = self._grads
        if grads is None:
            return []
        if self._grads_in_memory or grads.store is None:
            self._bytes["grads"] = grads.view(self._start, self._end)
            return []
        first, nbytes = grads.span(self._start, self._end)
        self._bytes["grads"] = self._take(nbytes)
        return [grads.store.read(first, self._bytes["grads"])]

    def _begin_loose(self) -> list[Transfer]:
        """Gradients that lie on an accelerator come to the host."""
        lanes = self._shard.lanes
        if lanes is None or self._shard.grad_shards:
            return []
        dtype = self._shard.segment_at(self._start).dtype
        room = self._take(STATE_BYTES[dtype] * (self._end - self._start))
        for slot, low, high in slots_in(self._shard.layout, self._start, self._end):
            owed = self._pending.get(slot.name)
            if owed is not None and owed.loose is not None and not owed.ops.zero:
                part = owed.loose.reshape(-1)[low - slot.offset : high - slot.offset]
                at = (low - self._start) * STATE_BYTES[slot.dtype]
                home = room[at : at + part.numel() * part.itemsize].view(part.dtype)
                lanes.send(part, home)
                self._loose[slot.name] = home
        return [lanes.sent()]

    def _begin_params(self) -> list[Transfer]:
        shard = self._shard
        first, nbytes = shard.param_layout.span(self._start, self._end)
        into = shard.buffer_span(self._start, self._end)[0]
        if shard.device.type == "cpu":
            self._bytes["params"] = shard.param_bytes(self._start, self._end)
            if self._fetch:
                assert shard.params is not None
                return [shard.params.read(first, self._bytes["params"])]
            return []
        if shard.params is not None and not stages_params(shard):
            view = shard.params.view(first, nbytes)
            assert view is not None
            self._bytes["params"] = view
            return []
        slab = self._take(nbytes)
        self._bytes["params"] = slab
        if shard.params is None or not self._fetch:
            return [shard.buffer.read(into, slab)]
        return [shard.params.read(first, slab)]

    def finish(self) -> Sequence[Transfer]:
        began = time.perf_counter()
        for slots, low, high in self._runs():
            self._update(slots, low, high)
        self._updater.clock.add(time.perf_counter() - began)
        return self._write_back()

    def _runs(self) -> Iterator[tuple[list[Slot], int, int]]:
        """Neighbours that are updated as one, with the elements from the first to the last of them. What lies between
        parameters is updated with them, and nobody reads it."""
        run: list[Slot] = []
        first = last = 0
        for slot, low, high in slots_in(self._shard.layout, self._start, self._end):
            if slot.name not in self._pending:
                continue
            if run and not (round_up(last, ALIGN_ELEMENTS) == low and self._alike(run[0], slot)):
                yield run, first, last
                run = []
            first = first if run else low
            run.append(slot)
            last = high
        if run:
            yield run, first, last

    def _alike(self, one: Slot, other: Slot) -> bool:
        """Whether the updates of two parameters differ in nothing but where they lie."""
        rule, states, grads = self._updater.rule, self._shard.slot_states, self._grads
        mine, theirs = self._pending[one.name], self._pending[other.name]
        return (
            rule.merges
            and grads is not None
            and mine.resting is theirs.resting is grads
            and mine.hyper is theirs.hyper
            and mine.ops == theirs.ops
            and not mine.ops.zero
            and grads.dtype(one) is grads.dtype(other)
            and states.get(one.name) == states.get(other.name)
            and not any(array.compact(one.dtype) for array in self._shard.arrays.values())
        )

    def _update(self, slots: Sequence[Slot], low: int, high: int) -> None:
        slot = slots[0]
        shard, owed = self._shard, self._pending[slot.name]
        arrays = {
            name: self._part(name, array.layout, low, high).view(array.dtype(slot.dtype))
            for name, array in shard.arrays.items()
            if name in self._bytes and (array.public or slot.dtype in MASTER_BYTES)
        }
        scales = {
            name: array.scales.part(low, high)
            for name, array in shard.arrays.items()
            if array.scales is not None and array.compact(slot.dtype)
        }
        param = self._part("params", shard.param_layout, low, high).view(DTYPES[slot.dtype])
        grad = self._gradient(slot, owed, low, high)
        self._updater.update(shard, slots, owed, high, param, arrays, scales, grad, self._updater.threads)

    def _gradient(self, slot: Slot, owed: SlotUpdate, low: int, high: int) -> torch.Tensor:
        if owed.ops.zero:
            return torch.zeros(high - low, device="cpu")
        if owed.loose is not None:
            found = self._loose.get(slot.name)
            return owed.loose.reshape(-1)[low - slot.offset : high - slot.offset] if found is None else found
        assert self._grads is not None
        return self._part("grads", self._grads.contents, low, high).view(self._grads.dtype(slot))

    def _part(self, name: str, layout: ArrayLayout, low: int, high: int) -> torch.Tensor:
        """The bytes of the elements [low, high) of what is in memory of an array."""
        offset, nbytes = layout.span(self._start, low)[1], layout.span(low, high)[1]
        return self._bytes[name][offset : offset + nbytes]

    def _write_back(self) -> list[Transfer]:
        shard = self._shard
        writes = [store.write(first, view) for store, first, view in self._staged]
        first, _ = shard.param_layout.span(self._start, self._end)
        staged = shard.device.type == "cpu" or stages_params(shard)
        if shard.params is not None and staged:
            writes.append(shard.params.write(first, self._bytes["params"]))
        if shard.device.type != "cpu":
            into = shard.buffer_span(self._start, self._end)[0]
            filling = shard.buffer.write(into, self._bytes["params"])
            writes += [filling] if staged else []
        return writes
