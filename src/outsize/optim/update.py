"""The update of a unit as steps of the conveyor: read chunk k+1 | update chunk k | write chunk k-1."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch

from outsize.move.conveyor import Step
from outsize.move.generations import Generations
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer, own_cores
from outsize.move.shard import (
    DEVICE_NUMEL,
    READ_NUMEL,
    Pending,
    Scales,
    SlotState,
    SlotUpdate,
    UnitShard,
    read_steps,
)
from outsize.move.store import DTYPES, MASTER, MASTER_BYTES, OWN_BYTES, STATE_BYTES, Store
from outsize.move.tracing import ended
from outsize.move.transfer import Promise, Transfer
from outsize.optim.rules import Piece, Rule
from outsize.planning.layout import (
    ALIGN_ELEMENTS,
    PAGE_ELEMENTS,
    ArrayLayout,
    Segment,
    Slot,
    page_range,
    round_up,
    slots_in,
)
from outsize.planning.trace import UPDATES

LIGHT_NUMEL = 1 << 17
"""Elements of a unit that our kernels have updated before a thread would have woken up."""

_NEVER_STEPPED = SlotState()

_KNOWN_PLANS = 8
"""Sets of parameters with gradients whose plan a unit remembers; most units have one."""
_KNOWN_CHUNKS = 16
"""Of a plan that is remembered. A larger one costs memory, and little of the time that its update takes."""


@final
class Chunk:
    """Whole pages of a unit that are updated at once, with all that is the same in every step."""

    def __init__(self, shard: UnitShard, slots: Sequence[Slot], start: int, end: int) -> None:
        self.start, self.end = start, end
        names = {slot.name for slot in slots}
        self.parts = [each for each in slots_in(shard.layout, start, end) if each[0].name in names]
        self.staged_bytes = staged_bytes(shard, start, end)
        self.lying: dict[str, torch.Tensor] = {}  # the bytes of arrays that are updated where they lie, by name
        self.moving: list[tuple[str, Store, int, int]] = []  # the other arrays, each with its first byte and bytes
        self.views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # all arrays of some elements, if all lie
        self.params: dict[tuple[int, int], torch.Tensor] = {}  # the parameters of some elements, if they lie
        self.compact = any(array.code is not None for array in shard.arrays.values())
        for name, array in shard.arrays.items():
            first, nbytes = array.layout.span(start, end)
            place = array.store.in_place if shard.updates_on_device else array.store.view
            view = place(first, nbytes)
            if view is not None:
                self.lying[name] = view
            elif nbytes:
                self.moving.append((name, array.store, first, nbytes))
        self.first, nbytes = shard.param_layout.span(start, end)
        self.in_buffer = shard.updates_in_buffer
        if self.in_buffer and shard.device.type == "cpu":
            self.lying["params"] = shard.param_bytes(start, end)
        view = None if self.in_buffer or shard.params is None else shard.params.view(self.first, nbytes)
        if view is not None:
            self.lying["params"] = view
        self.stages_params = not self.in_buffer and "params" not in self.lying


@final
class Plan(NamedTuple):
    """How the update of some parameters of a unit is cut."""

    segments: list[tuple[Segment, list[Chunk]]]
    empty: list[Slot]
    """The parameters without elements."""
    files: list[Generations]
    scales: list[Scales]
    """Those that must be gathered: a chunk's scales are no whole pages."""


@final
class ChunkUpdater:
    """Makes the steps that update a unit, for one rule and one size of chunk."""

    def __init__(self, rule: Rule, slab_bytes: int, slabs: int) -> None:
        self.rule = rule
        self.seconds = 0.0
        """Spent in update arithmetic, over all threads."""
        self._cores = own_cores()
        self.staging_slabs = slabs
        self._slab_bytes = slab_bytes

    @property
    def threads(self) -> int:
        """For the next chunk: half of the cores, since the computation has the others; all while a thread waits."""
        return self._cores if Promise.waiting else max(self._cores // 2, 1)

    def is_light(self, shard: UnitShard) -> bool:
        """Whether all is in memory, and so little that a thread wakes up later than a kernel of ours has updated it."""
        if "light" not in shard.known:
            stores: list[Store | None] = [*shard.lasting_stores(), *(grads.store for grads in shard.grad_shards)]
            in_memory = all(store is None or store.view(0, 0) is not None for store in stores)
            light = self.rule.merges and shard.layout.numel <= LIGHT_NUMEL and shard.lanes is None and in_memory
            shard.known["light"] = light
        return bool(shard.known["light"])

    def steps(self, shard: UnitShard, pending: Pending, fetch: bool) -> Iterator[Step]:
        """In order of address: update steps where the update is owed, plain reads around them if `fetch`."""
        shard.before_change()
        if shard.updates_on_device:
            yield Step(finish=lambda: self._update_on_device(shard, pending, fetch))
            return
        plan = self._plan_of(shard, pending)
        turning = [file for file in plan.files if file.frozen]
        for file in turning:
            file.begin_turn()
        moving = plan.scales
        if moving:
            yield Step(lambda _: [each.gather() for each in moving])
        for segment, chunks in plan.segments:
            position = segment.start
            for chunk in chunks:
                if fetch:
                    yield from read_steps(shard, segment, position, chunk.start, self._slab_bytes)
                update = ChunkUpdate(self, shard, pending, chunk, fetch)
                yield Step(update.begin, update.finish, update.slabs)
                position = chunk.end
            if fetch:
                yield from read_steps(shard, segment, position, segment.end, self._slab_bytes)
        kept: list[HostBuffer] = []  # until they are written
        if moving:
            yield Step(finish=lambda: [each.give_back(kept) for each in moving])
        if turning:
            yield Step(finish=partial(_end_turns, turning))
        for slot in plan.empty:
            self._count_step(shard, slot, pending[slot.name])

    def _plan_of(self, shard: UnitShard, pending: Pending) -> Plan:
        names = tuple(pending)
        plan: Plan | None = shard.known.get(names)
        if plan is None:
            slots = [shard.slots[name] for name in names]
            filled = [slot for slot in slots if slot.numel]
            segments = [
                (segment, [Chunk(shard, filled, *each) for each in self._ranges(shard, segment, filled)])
                for segment in shard.layout.segments
            ]
            scales = [each.scales for each in shard.arrays.values() if each.scales is not None]
            moving = [each for each in scales if each.store.view(0, 0) is None]
            plan = Plan(segments, [slot for slot in slots if not slot.numel], shard.generations(), moving)
            if len(shard.known) > _KNOWN_PLANS:
                shard.known.clear()
            if sum(len(chunks) for _, chunks in segments) <= _KNOWN_CHUNKS:
                shard.known[names] = plan
        return plan

    def _ranges(self, shard: UnitShard, segment: Segment, slots: Sequence[Slot]) -> Iterator[tuple[int, int]]:
        """Whole pages of one segment that hold `slots`, in order, a chunk or (`whole`) a parameter each."""
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
        pages = (READ_NUMEL if shard.lanes is None else DEVICE_NUMEL) // PAGE_ELEMENTS
        pages = min(pages, self._slab_bytes // page) if page else pages
        numel = max(pages - 1 | 1, 1) * PAGE_ELEMENTS  # an odd number: see Note [Colours] in move/memory.py
        numel = high - low if shard.updates_on_device else numel
        for start in range(low, high, numel):
            yield start, min(start + numel, high)

    def update_in_place(self, shard: UnitShard, pending: Pending) -> None:
        """The whole update at once where everything lies on the computing device, by the calling thread."""
        shard.before_change()
        shard.use()
        plan = self._plan_of(shard, pending)
        for _, chunks in plan.segments:
            for chunk in chunks:
                step = ChunkUpdate(self, shard, pending, chunk, False, self._cores)
                step.begin([])
                step.finish()
        for slot in plan.empty:
            self._count_step(shard, slot, pending[slot.name])

    def _update_on_device(self, shard: UnitShard, pending: Pending, fetch: bool) -> Sequence[Transfer]:
        """The whole update of a unit on an accelerator, on the stream that fills its buffer. With several ranks this
        rank's part, which the others gather behind it."""
        with shard.buffer.filling():
            shard.use()
            for owed in pending.values():
                if owed.loose is not None and shard.lanes is not None:
                    owed.loose.record_stream(shard.lanes.incoming)
            if fetch:
                for mine, gathered in _resting_params(shard):
                    gathered.copy_(mine)
            self.update_in_place(shard, pending)
            for mine, gathered in _resting_params(shard):
                mine.copy_(gathered)
        return ()

    def _count_step(self, shard: UnitShard, slot: Slot, owed: SlotUpdate) -> None:
        """A parameter without elements has nothing to move, but its steps are counted."""
        arrays = {
            name: torch.empty(slot.shape if self.rule.whole else 0, dtype=each.value_dtype(slot.dtype), device="cpu")
            for name, each in shard.arrays.items()
            if each.public or slot.dtype in MASTER_BYTES
        }
        param = torch.empty(slot.shape if self.rule.whole else 0, dtype=DTYPES[slot.dtype], device="cpu")
        grad, state = torch.zeros_like(param), shard.slot_states.get(slot.name, _NEVER_STEPPED)
        piece = Piece(param, arrays.get(MASTER), arrays, grad, owed.ops, owed.hyper, state, noted=owed.noted)
        shard.slot_states[slot.name] = SlotState(self.rule.apply(piece), initialised=True)


def _end_turns(files: Sequence[Generations]) -> Sequence[Transfer]:
    """Of frozen files, which stay as they are: every earlier step has read what it needs and begun to write what it
    has. See Note [Generations]."""
    for file in files:
        file.end_turn()
    return ()


def staged_bytes(shard: UnitShard, start: int, end: int) -> int:
    """Staging that the elements [start, end) take on their way, gradients as wide as they can be."""
    if shard.updates_on_device:
        return 0
    arrays = [array.layout for array in shard.arrays.values() if array.store.view(0, 0) is None]
    nbytes = sum(layout.span(start, end)[1] for layout in arrays)
    dtype = shard.segment_at(start).dtype
    loose = shard.device.type != "cpu" and not shard.grad_shards
    if loose or any(grads.store is not None for grads in shard.grad_shards):
        nbytes += STATE_BYTES[dtype] * (end - start)
    lie = shard.updates_in_buffer or (shard.params is not None and shard.params.view(0, 0) is not None)
    return nbytes + (0 if lie else OWN_BYTES[dtype] * (end - start))


def _resting_params(shard: UnitShard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What rests here of the parameters, in an accelerator's memory, and its place in the buffer, where these are
    two."""
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
@dataclass(eq=False, repr=False)
class ChunkUpdate:
    """One chunk of a unit's update. Arrays in host memory are updated where they are, the others pass through slabs."""

    _updater: ChunkUpdater
    _shard: UnitShard
    _pending: Pending
    _chunk: Chunk
    _fetch: bool
    _threads: int | None = None

    def __post_init__(self) -> None:
        updater, chunk = self._updater, self._chunk
        self._grads = self._resting_grads()
        self._grads_in_memory = self._grads is not None and (
            self._grads.store is None or any(owed.in_memory for owed in self._pending.values())
        )
        self._bytes = dict(chunk.lying)  # by array name, "params" included; "grads" where they are not in memory
        self._loose: dict[str, torch.Tensor] = {}  # gradients that come from an accelerator, by parameter
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")  # what is left of the slab
        self.slabs = updater.staging_slabs if updater.rule.whole else int(chunk.staged_bytes > 0)

    def _resting_grads(self) -> GradShard | None:
        """Where the gradients lie that the update needs, None where it needs none from there."""
        found: GradShard | None = None
        for slot, _, _ in self._chunk.parts:
            owed = self._pending[slot.name]
            if owed.resting is not None and not owed.ops.zero:
                assert found is None or found is owed.resting, "the gradients of one update rest together"
                found = owed.resting
        return found

    def begin(self, slabs: list[torch.Tensor]) -> Sequence[Transfer]:
        if self._updater.rule.whole and self._chunk.staged_bytes:  # see Note [Whole parameters]
            self._free = HostBuffer(self._chunk.staged_bytes).bytes
        elif slabs:
            self._free = slabs[0]
        reads: list[Transfer] = []
        for name, store, first, nbytes in self._chunk.moving:
            self._bytes[name] = self._take(nbytes)
            reads.append(store.read(first, self._bytes[name]))
        return [*reads, *self._begin_grads(), *self._begin_params()]

    def _take(self, nbytes: int) -> torch.Tensor:
        """The next bytes of the staging slab."""
        assert nbytes <= self._free.numel(), "a chunk fits its slab"
        taken, self._free = self._free[:nbytes], self._free[nbytes:]
        return taken

    def _begin_grads(self) -> Sequence[Transfer]:
        grads, start, end = self._grads, self._chunk.start, self._chunk.end
        if grads is not None:
            if self._grads_in_memory or grads.store is None:
                return ()
            first, nbytes = grads.span(start, end)
            self._bytes["grads"] = self._take(nbytes)
            return [grads.store.read(first, self._bytes["grads"])]
        lanes = self._shard.lanes
        if lanes is None or self._shard.grad_shards or self._shard.updates_on_device:
            return ()
        nbytes = STATE_BYTES[self._shard.segment_at(start).dtype]
        room = self._take(nbytes * (end - start))
        for slot, low, high in self._chunk.parts:  # what lies on an accelerator comes to the host
            owed = self._pending[slot.name]
            if owed.loose is not None and not owed.ops.zero:
                part = owed.loose.reshape(-1)[low - slot.offset : high - slot.offset]
                home = room[nbytes * (low - start) :][: part.numel() * part.itemsize].view(part.dtype)
                self._loose[slot.name] = home
                lanes.send(part, home)
        return [lanes.sent()]

    def _begin_params(self) -> Sequence[Transfer]:
        shard, chunk, start, end = self._shard, self._chunk, self._chunk.start, self._chunk.end
        if chunk.in_buffer:
            if "params" not in self._bytes:
                self._bytes["params"] = shard.param_bytes(start, end)
            if not self._fetch:
                return ()
            assert shard.params is not None
            return [shard.params.read(chunk.first, self._bytes["params"])]
        if "params" in self._bytes:
            return ()
        self._bytes["params"] = slab = self._take(shard.param_layout.span(start, end)[1])
        if shard.params is None or not (self._fetch or shard.tile_rows):
            return [shard.buffer.read(shard.buffer_span(start, end)[0], slab)]
        return [shard.params.read(chunk.first, slab)]

    def finish(self) -> Sequence[Transfer]:
        began = time.perf_counter()
        for run in self._runs():
            self._update([slot for slot, _, _ in run], run[0][1], run[-1][2])
        self._updater.seconds += time.perf_counter() - began
        ended(UPDATES, self._shard.layout.name, began)
        return self._write_back()

    def _runs(self) -> Iterator[list[tuple[Slot, int, int]]]:
        """Neighbours whose updates differ in nothing but where they lie: they are updated as one. What lies between
        parameters is updated with them, and nobody reads it."""
        merges = self._updater.rule.merges and self._grads is not None and not self._chunk.compact
        run: list[tuple[Slot, int, int]] = []
        before: tuple[SlotUpdate, SlotState | None] | None = None
        for part in self._chunk.parts:
            owed, state = self._pending[part[0].name], self._shard.slot_states.get(part[0].name)
            if before is not None and not (
                merges
                and round_up(run[-1][2], ALIGN_ELEMENTS) == part[1]
                and owed.resting is before[0].resting is self._grads
                and owed.hyper is before[0].hyper
                and (owed.ops is before[0].ops or owed.ops == before[0].ops)
                and not owed.ops.zero
                and state == before[1]
            ):
                yield run
                run = []
            run.append(part)
            before = owed, state
        if run:
            yield run

    def _update(self, slots: Sequence[Slot], low: int, high: int) -> None:
        slot, shard, chunk = slots[0], self._shard, self._chunk
        owed = self._pending[slot.name]
        param, arrays = chunk.params.get((low, high)), chunk.views.get((low, high))
        if param is None:
            param = self._part("params", shard.param_layout, low, high).view(DTYPES[slot.dtype])
            if "params" in chunk.lying:
                chunk.params[low, high] = param
        if arrays is None:
            arrays = {
                name: self._part(name, array.layout, low, high).view(array.dtype(slot.dtype))
                for name, array in shard.arrays.items()
                if name in self._bytes and (array.public or slot.dtype in MASTER_BYTES)
            }
            if not chunk.moving:
                chunk.views[low, high] = arrays
        scales = {
            name: array.scales.part(low, high)
            for name, array in (shard.arrays.items() if chunk.compact else ())
            if array.scales is not None and array.compact(slot.dtype)
        }
        if owed.ops.zero:
            grad = torch.zeros_like(param)
        elif slot.name in self._loose:
            grad = self._loose[slot.name]
        elif owed.loose is not None:
            grad = owed.loose.reshape(-1)[low - slot.offset : high - slot.offset]
        else:
            assert self._grads is not None
            grads = self._grads
            held = "grads" not in self._bytes
            grad = grads.view(low, high) if held else self._part("grads", grads.contents, low, high)
            grad = grad.view(grads.dtype(slot))
        if self._updater.rule.whole:
            param, grad = param.view(slot.shape), grad.view(slot.shape)
            arrays = {name: array.view(slot.shape) for name, array in arrays.items()}
        threads, state = self._threads or self._updater.threads, shard.slot_states.get(slot.name, _NEVER_STEPPED)
        piece = Piece(param, arrays.get(MASTER), arrays, grad, owed.ops, owed.hyper, state, threads, scales, owed.noted)
        after = SlotState(self._updater.rule.apply(piece), initialised=True)
        for each in slots:
            if each.end <= high:  # else its scalars move on with its last chunk
                shard.slot_states[each.name] = after

    def _part(self, name: str, layout: ArrayLayout, low: int, high: int) -> torch.Tensor:
        """The bytes of the elements [low, high) of what is in memory of an array."""
        offset, nbytes = layout.span(self._chunk.start, low)[1], layout.span(low, high)[1]
        return self._bytes[name][offset : offset + nbytes]

    def _write_back(self) -> list[Transfer]:
        shard, chunk, params = self._shard, self._chunk, self._bytes["params"]
        writes = [store.write(first, self._bytes[name]) for name, store, first, _ in chunk.moving]
        if shard.params is not None and (chunk.stages_params or (chunk.in_buffer and not shard.updates_on_device)):
            writes.append(shard.params.write(chunk.first, params))
        if not chunk.in_buffer and not shard.tile_rows:
            filling = shard.buffer.write(shard.buffer_span(chunk.start, chunk.end)[0], params)
            writes += [filling] if chunk.stages_params else []  # memory at rest is waited for before it changes
        return writes
