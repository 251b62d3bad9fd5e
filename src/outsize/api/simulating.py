"""A step of training, simulated: the streamer, the room and the conveyor of a run, on units and transfers that only
take time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast, final

from torch import nn

from outsize.api.capacity import capacity_of, spare_of
from outsize.api.counting import Counted, Event
from outsize.api.modules import modules_of
from outsize.api.placed import PlacedModel
from outsize.config import Config
from outsize.move.conveyor import Belt, Conveyor, Job, Step
from outsize.move.grad_ops import AS_IT_IS
from outsize.move.memory import Ledger
from outsize.move.shard import READ_NUMEL, SlotUpdate
from outsize.move.transfer import Transfer
from outsize.optim.update import LIGHT_NUMEL
from outsize.plan.choice import cheapest
from outsize.plan.layout import PAGE_ELEMENTS, UnitLayout
from outsize.plan.machine import Machine, seconds_on
from outsize.plan.placement import UnitBytes, UnitTiers, pipeline_depth, slab_bytes
from outsize.plan.time import Drive, Lane, Prediction
from outsize.plan.trace import COLLECTIVES, COMPUTE, IN, OUT, READS, UPDATES, WRITES, Trace
from outsize.run.buffers import PASSING_UNITS
from outsize.run.live_state import LiveState
from outsize.run.room import Room
from outsize.run.streamer import Streamer
from outsize.run.unit import Residency, Unit

# Note [Two clocks]
# Two threads matter: the loop and the conveyor. Each has a clock here, and goes on by itself until it waits. While the
# loop computes, the belt is served up to the same time; while the loop waits for a unit, until the unit is there. What
# a lane is given has an end at once, so nothing ever waits for what is not yet known. On the CPU both threads compute
# on the same cores: what the conveyor does meanwhile takes longer, and so does the computation.

STEPS = 3
"""The first learns the order, the second pays the first updates, the third is like all that follow."""
MOST_CHUNKS = 24
"""Of a unit: those of larger ones are put together, which changes little of what overlaps."""
UNIT_SECONDS = 150e-6
"""Of Python, for a unit that comes or whose gradients are laid to rest."""
SLACK, SLACK_BYTES = 0.04, 2 << 20
"""Of the memory of a step on a CPU: scratch memory of kernels, holes of the allocator."""


@final
class _At(Transfer):
    """On its way until a time."""

    def __init__(self, world: _World, at: float) -> None:
        self._world, self._at = world, at

    def wait(self) -> None:
        self._world.belt_now = max(self._world.belt_now, self._at)

    def done(self) -> bool:
        return self._at <= self._world.belt_now


@final
class _World:
    """The clocks, the lanes and the belt. See Note [Two clocks]."""

    def __init__(self, machine: Machine, slabs: int) -> None:
        self.machine = machine
        self.trace: Trace | None = None  # of the last step
        self.ledger = Ledger()
        self.now = self.belt_now = self.waited = 0.0
        self.belt = Belt([cast(Any, None)] * slabs)
        self.drive = Drive(machine)
        self.lanes = {COMPUTE: Lane(), IN: Lane(), OUT: Lane(), UPDATES: Lane(), COLLECTIVES: Lane()}
        self.lanes |= {READS: self.drive.reads, WRITES: self.drive.writes}
        self.live = 0
        self.peak = {"device": 0, "host": 0, "disk": 0}
        self.on_cpu = machine.device == "cpu"
        self._waits = False
        self._stolen = 0.0

    def advance(self, seconds: float, name: str = "") -> None:
        """The loop computes for so long where nothing disturbs it."""
        began, end = self.now, self.now + seconds
        while self.belt.has_work and self.belt_now < end:
            before = self._stolen
            self.belt.serve()
            end += self._stolen - before
        self.now = end
        self.span(COMPUTE, name, began, end)
        self.lanes[COMPUTE].busy += seconds

    def work(self, half: float, whole: float, name: str) -> None:
        """The conveyor computes: seconds on half of the cores, and on all."""
        cores = self.machine.cores
        began, threads = self.belt_now, max(cores // 2, 1)
        if self._waits or not self.on_cpu:
            self.belt_now += whole
        else:
            self.belt_now += half * (cores + threads) / cores
            self._stolen += half * threads / cores
        self.lanes[UPDATES].busy += whole
        self.span(UPDATES, name, began, self.belt_now)

    def submit(self, steps: Iterator[Step], after: Sequence[Job]) -> Job:
        if not self.belt.has_work:
            self.belt_now = max(self.belt_now, self.now)
        job = Job(steps, after)
        self.belt.queue.append(job)
        return job

    def await_transfer(self, transfer: Transfer) -> None:
        """The loop lets the conveyor go on until the transfer is over; on the conveyor's clock."""
        self._waits = True
        while not transfer.done():
            self.belt.serve()
        self._waits = False

    def wait_until(self, when: float, name: str) -> None:
        """The loop stands still."""
        if when > self.now:
            self.waited += when - self.now
            self.span(COMPUTE, f"wait: {name}", self.now, when)
            self.now = when

    def move(self, lane: str, when: float, nbytes: float, name: str) -> float:
        """When so many bytes have passed the lane."""
        if lane in (READS, WRITES):
            began, end = self.drive.move(lane, when, nbytes)
        elif lane == COLLECTIVES:
            began, end = self.lanes[lane].take(when, seconds_on(self.machine.collectives, nbytes))
        else:
            other = self.lanes[OUT if lane == IN else IN]
            rate = self.machine.to_device if lane == IN else self.machine.from_device
            rate = min(rate, self.machine.both_ways / 2) if other.free > when else rate
            began, end = self.lanes[lane].take(when, nbytes / rate)
        if lane not in (IN, OUT):  # which show whole units
            self.span(lane, name, began, end)
        return end

    def span(self, lane: str, name: str, began: float, ended: float) -> None:
        if self.trace is not None and ended > began:
            self.trace.span(lane, name, began, ended)

    def note(self, most: int | None = None) -> None:
        """Remember the most bytes of each tier; operations have made `most`."""
        now: dict[str, int] = {"device": self.live if most is None else most, "host": 0, "disk": 0}
        for account, nbytes in self.ledger.now.items():
            now[account.partition("/")[0]] += nbytes
        if not self.on_cpu:
            self.peak = {tier: max(nbytes, now[tier]) for tier, nbytes in self.peak.items()}
        elif now["device"] + now["host"] > self.peak["device"] + self.peak["host"]:
            self.peak = now
        if self.trace is not None:
            for tier, nbytes in now.items():
                self.trace.count(tier, nbytes, self.now)


@final
class _Unit:
    """Answers what the streamer and the room ask of a `Unit`, and takes time in place of moving."""

    def __init__(
        self, world: _World, layout: UnitLayout, size: UnitBytes, tiers: UnitTiers, placed: PlacedModel
    ) -> None:
        self._world, self.size, self.tiers = world, size, tiers
        self.index, self.name = layout.index, layout.name or "model"
        _, self._ranks = placed.split_of(layout.index)
        self._numel = -(-layout.numel // self._ranks)
        self.nbytes, self.split = layout.param_bytes, self._ranks > 1 and size.params < layout.param_bytes
        self.always_resident = tiers.params == "device" and not self.split
        rows = placed.tile_rows.get(layout.index, 0)
        store = None if self.always_resident else self
        self.shard = SimpleNamespace(tile_rows=rows, rows=None, tiers=tiers, layout=layout, whole=layout, params=store)
        self.on_device = tiers.params == tiers.grads == tiers.states == "device" and placed.split[1] == 1
        self.resident = self.on_device
        self.parameters = {slot.name: placed.parameters[slot.name] for slot in layout.slots}
        dtype = layout.segments[0].dtype if layout.segments else "float32"
        self._kind = "compact" if placed.kept.compact else dtype
        self.padding = layout.numel / max(sum(slot.numel for slot in layout.slots), 1)
        self.state = Residency.AT_REST
        self.pending: dict[str, SlotUpdate] = {}
        self.updates = self.holds = 0
        self.viewed = self.opened = False
        self.keeps_grads = False  # in memory, for the update that follows
        self._has_grads = False
        self._job: Job | None = None
        self._ready = self._written = self._began = self.left = 0.0
        memory = {tier: tier != "disk" for tier in ("device", "host", "disk")}
        self._in_memory = memory[tiers.params] and memory[tiers.states] and memory[tiers.grads]
        per_element = (size.states + size.params + size.grads) / max(self._numel, 1) if not self._in_memory else 0
        self._chunk_bytes = per_element

    def chunks(self, slab: int) -> int:
        """How many there are of a fetch; as `ChunkUpdater` cuts them, but for `MOST_CHUNKS`."""
        numel = READ_NUMEL
        if self._chunk_bytes and slab:
            numel = min(numel, max(int(slab / self._chunk_bytes) // PAGE_ELEMENTS, 1) * PAGE_ELEMENTS)
        return min(max(-(-self._numel // numel), 1), MOST_CHUNKS)

    @property
    def fetch_bytes(self) -> int:
        return 0 if self.shard.tile_rows and self.pending else self.nbytes

    @property
    def current(self) -> bool:
        return self.state is Residency.RESIDENT and not self.pending

    @property
    def written(self) -> bool:
        return self._job is None or self._job.written.done()

    @property
    def fetched(self) -> bool:
        return self._job is None or self._job.done()

    def fetch(self, conveyor: Any, updater: Any, slab: int) -> None:
        world, fetch = self._world, self.state is Residency.AT_REST
        updates, self.pending, began = bool(self.pending), {}, world.now
        if fetch and not self.shard.tile_rows:
            world.ledger.add("device/resident", self.nbytes)
            world.note()
        if world.on_cpu and self._in_memory and self._numel <= LIGHT_NUMEL and not self.split:
            half, _ = self._seconds(updates, fetch, 1.0)
            world.advance(half, self.name)
            self._ready, self._job = world.now, None
        elif not world.on_cpu and self.tiers.params == "host" and not updates and not self.split:
            self._ready, self._job = world.move(IN, world.now, self.nbytes, self.name), None
        else:
            after = () if self.written else (cast(Job, self._job),)
            self._job = world.submit(self._steps(updates, fetch, self.chunks(slab)), after)
        self.state, self._began = Residency.FETCHING, began

    def _seconds(self, updates: bool, fetch: bool, part: float) -> tuple[float, float]:
        """Of the conveyor's thread for a part of the unit: on half of the cores, and on all."""
        machine, copied = self._world.machine, 0.0
        if self.tiers.params == "host" and self._world.on_cpu:
            copied = (fetch + updates) * 2 * self.size.params * part / machine.host_memory
        if not updates:
            return copied, copied
        numel = self._numel * part
        return tuple(copied + numel / machine.update_rate(self._kind, full) for full in (False, True))  # type: ignore[return-value]

    def _steps(self, updates: bool, fetch: bool, chunks: int) -> Iterator[Step]:
        world, size, tiers, name = self._world, self.size, self.tiers, self.name
        on_disk = {
            kind: getattr(size, kind) / chunks * (getattr(tiers, kind) == "disk")
            for kind in ("params", "states", "grads")
        }
        kept, self.keeps_grads = self.keeps_grads, False
        reads = on_disk["params"] if fetch else 0.0
        writes = 0.0
        if updates:
            reads += on_disk["states"] + (0 if kept else on_disk["grads"])
            writes = on_disk["states"] + on_disk["params"]

        def begin(_: object) -> Sequence[Transfer]:
            return [_At(world, world.move(READS, world.belt_now, reads, name))] if reads else ()

        def finish() -> Sequence[Transfer]:
            half, whole = self._seconds(updates, fetch, 1 / chunks)
            if half:
                world.work(half, whole, name)
            ends = []
            if not world.on_cpu and tiers.params != "device":
                ends.append(world.move(IN, world.belt_now, self.nbytes / chunks / self._ranks, name))
                self._ready = max(self._ready, ends[-1])
            if writes:
                ends.append(world.move(WRITES, world.belt_now, writes, name))
                self._written = ends[-1]
            self._ready = max(self._ready, world.belt_now)
            return [_At(world, end) for end in ends]

        slab = int(not self._in_memory and (updates or not world.on_cpu))
        for _ in range(chunks):
            yield Step(begin, finish, slab)
        if self.split:
            yield Step(finish=self._gather)

    def _gather(self) -> Sequence[Transfer]:
        self._ready = self._world.move(COLLECTIVES, self._world.belt_now, self.nbytes, self.name)
        return ()

    def arrive(self) -> None:
        if self._job is not None:
            self._world.await_transfer(self._job)
        self._world.wait_until(self._ready, self.name)
        self._world.span(IN, self.name, self._began, self._world.now)
        gone = self.shard.tile_rows and self.tiers.params != "device"
        self.state = Residency.AT_REST if gone else Residency.RESIDENT

    def await_written(self) -> None:
        if self._job is not None:
            self._world.await_transfer(self._job.written)
            self._world.wait_until(self._written, f"{self.name} is written")

    def release(self) -> None:
        self._world.ledger.remove("device/resident", self.nbytes)
        self.state = Residency.AT_REST

    def leave(self) -> None:
        return

    # -- gradients ---------------------------------------------------------------------------------------------------

    def lay_down(self) -> None:
        """The gradients of the unit come to where they rest, or to where they are written from."""
        world, grads = self._world, self.size.grads
        if self.split:
            world.move(COLLECTIVES, world.now, self.nbytes, f"{self.name} gradients")
        if self.tiers.grads == "device":
            world.ledger.add("device/grads", grads)
        else:
            account = "host/grads" if self.tiers.grads == "host" else "host/grads in flight"
            if account.endswith("flight") or not self._has_grads:
                world.ledger.add(account, grads)
            self._has_grads = True
            if not world.on_cpu:
                world.move(OUT, world.now, grads, self.name)
            else:
                world.advance(3 * grads / world.machine.host_memory + UNIT_SECONDS, f"{self.name} gradients")
        world.note()

    def write_grads(self) -> None:
        """To disk."""
        world, nbytes = self._world, self.size.grads
        self.left = world.now

        def finish() -> Sequence[Transfer]:
            self._written = world.move(WRITES, world.belt_now, nbytes, f"{self.name} gradients")
            return [_At(world, self._written)]

        after = () if self.written else (cast(Job, self._job),)
        self._job = world.submit(iter([Step(finish=finish)]), after)


@final
class _Place:
    """Answers what the room asks of a `RestingPlace`."""

    def __init__(self, world: _World, unit: _Unit) -> None:
        self._world, self._unit = world, unit
        self.passing_bytes = unit.size.grads if unit.tiers.grads == "disk" else 0
        self.held = False

    def drop_if_written(self) -> None:
        if self.held and self._unit.written and not self._unit.keeps_grads:
            self._world.ledger.remove("host/grads in flight", self.passing_bytes)
            self._world.span(OUT, self._unit.name, self._unit.left, self._world.now)
            self.held = False

    def flush_and_drop(self) -> bool:
        if not self.held:
            return False
        self._unit.await_written()
        self._unit.keeps_grads = False
        self.drop_if_written()
        return True


@dataclass
class _Layer:
    """A layer: its events [first, last] in the forward, what it saves, and whether it runs again."""

    first: int
    last: int = 0
    saved: int = 0
    seconds: float = 0.0
    again: bool = False


@final
class Simulation:
    """Steps of training of a placed model."""

    def __init__(
        self, model: nn.Module, placed: PlacedModel, config: Config, counted: Counted, machine: Machine, element: int,
    ) -> None:  # fmt: skip
        """`element`: bytes of one in staging."""
        staged = (
            any("disk" in (each.params, each.grads, each.states) for each in placed.tiers) or machine.device != "cpu"
        )
        staging = placed.budgets.staging_bytes if staged else 0
        slabs = pipeline_depth(staging)
        self._slab = slab_bytes(staging, element, slabs)
        self._world = world = _World(machine, slabs)
        self._events, self._config, self._placed, self._counted = counted.events, config, placed, counted
        pairs = [
            (layout, size, tiers)
            for layout, size, tiers in zip(placed.layouts, placed.unit_bytes, placed.tiers, strict=True)
        ]
        self._units = [_Unit(world, *each, placed) for each in pairs]
        self._places = [_Place(world, unit) for unit in self._units]
        as_units = cast(Sequence[Unit], self._units)
        _, self._owned, _, layers = modules_of(model, as_units, placed, config, "auto")
        capacity = capacity_of(placed, as_units, 0)
        spare = spare_of(as_units, placed, capacity) if "auto" in layers.values() else 0
        budgets = placed.budgets
        flight = None if budgets.device is None else budgets.passing_bytes(placed.unit_bytes)
        places = cast(Any, self._places)
        self._rest()
        live = LiveState()
        room = Room(as_units, places, live, capacity - spare, world.ledger, budgets, flight_room=flight)
        conveyor = cast(Conveyor, SimpleNamespace(slab_bytes=self._slab))
        self._streamer = Streamer(as_units, room, live, conveyor, None)
        self._layers = self._find_layers(layers, spare)
        self._home = {name: unit for unit in self._units for name in unit.parameters}
        self._opened: dict[nn.Module, list[_Unit]] = {}
        self._missing: dict[int, set[str]] = {}
        self._dropped = 0  # bytes that layers which run again have not kept
        self._name, self._again = "", False

    def _rest(self) -> None:
        ledger = self._world.ledger
        if self._world.belt.slabs and self._slab:
            ledger.add("host/staging", self._slab * self._world.belt.slabs)
        for unit in self._units:
            for kind in ("params", "states"):
                nbytes, tier = getattr(unit.size, kind), getattr(unit.tiers, kind)
                if kind == "states":  # with what pads them
                    nbytes = round(nbytes * unit.padding)
                if kind == "params" and unit.always_resident:
                    ledger.add("device/resident", unit.nbytes)
                    unit.state = Residency.RESIDENT
                elif not (unit.size.in_place and kind == "params" and tier == "disk"):
                    ledger.add(f"{tier}/{kind}", nbytes)
            if unit.tiers.grads == "disk":
                ledger.add("disk/grads", unit.size.grads)
        self._world.note()

    def _find_layers(self, modes: Mapping[nn.Module, str], spare: int) -> dict[nn.Module, _Layer]:
        """Those of which it is to be decided whether they run again: by the choice of `activations="auto"`, with the
        seconds that were counted."""
        found: dict[nn.Module, _Layer] = {}
        live = seconds = 0.0
        began: dict[nn.Module, tuple[float, float]] = {}
        for index, event in enumerate(self._events):
            if event.kind == "work":
                live, seconds = event.live, seconds + event.seconds
            elif event.kind == "enter" and modes.get(cast(nn.Module, event.module), "keep") != "keep":
                found.setdefault(cast(nn.Module, event.module), _Layer(index))
                began[cast(nn.Module, event.module)] = live, seconds
            elif event.kind == "leave" and event.module in began:
                before, then = began.pop(event.module)
                layer = found[event.module]
                layer.last, layer.seconds = index, seconds - then
                layer.saved = max(int(live - before) - event.live, 0)
        autos = [layer for module, layer in found.items() if modes[module] == "auto"]
        chosen = cheapest([[(each.saved, 0.0), (0, each.seconds)] for each in autos], spare) if autos else []
        for module, layer in found.items():
            layer.again = modes[module] != "auto"
        for layer, index in zip(autos, chosen, strict=True):
            layer.again = index == 1
        return found

    def run(self) -> Prediction:
        world, streamer = self._world, self._streamer
        for number in range(STEPS):
            if number == STEPS - 1:
                for lane in world.lanes.values():
                    lane.busy = 0.0
                world.waited, began, world.trace = 0.0, world.now, Trace()
            streamer.room.return_excess()
            streamer.schedule.begin("train")
            self._missing = {
                unit.index: {n for n, p in unit.parameters.items() if p.requires_grad} for unit in self._units
            }
            self._dropped = 0
            for event in self._events:
                self._happen(event)
            for unit in self._units:
                if self._missing[unit.index] and unit.size.grads:
                    self._complete(unit)
            self._step()
        busy = {name: lane.busy for name, lane in world.lanes.items()}
        return Prediction(
            world.now - began,
            self._peak(),
            busy,
            world.waited,
            self._counted.items,
            self._counted.unit,
            world.machine.measured,
            trace=world.trace or Trace(),
        )

    def _peak(self) -> dict[str, int]:
        """With what nobody counts: gradients of two units on their way where writes take longer, and on the CPU what
        kernels and the allocator take."""
        peak = dict(self._world.peak)
        largest = sorted((unit.size.grads for unit in self._units if unit.tiers.grads == "disk"), reverse=True)
        passing = self._world.ledger.peak.get("host/grads in flight", 0)
        peak["host"] += max(sum(largest[:PASSING_UNITS]) - passing, 0)
        if self._world.on_cpu:
            peak["device"] += SLACK_BYTES + round(SLACK * (peak["device"] + peak["host"]))
        return peak

    def _happen(self, event: Event) -> None:
        world, module = self._world, event.module
        if event.kind == "work":
            world.note(max(event.most - self._dropped, 0))
            world.live = max(event.live - self._dropped, 0)
            world.advance(event.seconds, self._name)
        elif event.kind == "enter" and module is not None:
            for each in self._owned.get(id(module), ()):
                unit = cast(_Unit, each)
                if not unit.opened:
                    unit.opened = True
                    self._use(unit)
                    unit.holds += 1
                    self._opened.setdefault(module, []).append(unit)
        elif event.kind == "leave" and module is not None:
            for unit in self._opened.pop(module, ()):
                unit.opened = False
                unit.holds -= 1
            layer = self._layers.get(module)
            if layer is not None and layer.again and not self._again:
                self._dropped += layer.saved
        elif event.kind == "backward" and module is not None:
            layer = self._layers.get(module)
            if layer is not None and layer.again:
                self._again = True
                for again in self._events[layer.first : layer.last + 1]:
                    if again.kind == "work":
                        world.advance(again.seconds, f"{self._name} again")
                    else:
                        self._happen(again)
                self._again = False
                self._dropped -= layer.saved
        elif event.kind == "use":
            self._use(self._home[event.name])
        elif event.kind == "gradient":
            unit = self._home[event.name]
            missing = self._missing[unit.index]
            missing.discard(event.name)
            if not missing:
                self._complete(unit)

    def _use(self, unit: _Unit) -> None:
        if unit.resident:
            self._name = unit.name
            return
        if unit is not cast(Any, self._streamer.room.last) or not unit.current:
            self._world.advance(UNIT_SECONDS, f"{unit.name} opens")
        self._name = unit.name
        if unit.shard.tile_rows:
            self._streamer.use_tiles(cast(Unit, unit), unit.size.tiles)
            lane = READS if unit.tiers.params == "disk" else IN
            self._world.wait_until(self._world.move(lane, self._world.now, unit.size.params, unit.name), unit.name)
            return
        self._streamer.acquire(cast(Unit, unit))

    def _complete(self, unit: _Unit) -> None:
        """The unit's gradients are in."""
        self._missing[unit.index] = set()
        if not unit.size.grads or unit.resident:
            if unit.size.grads:
                self._world.ledger.add("device/grads", unit.size.grads)
                self._world.note()
            return
        place = self._places[unit.index]
        self._streamer.finished(cast(Unit, unit))
        if unit.tiers.grads == "disk":
            self._streamer.room.make(unit.size.grads)
            place.held = True
        unit.lay_down()
        if self._config.update == "backward":
            unit.keeps_grads = place.held
            self._streamer.update_now(cast(Unit, unit), {"": SlotUpdate({}, AS_IT_IS)})
        elif place.held:
            unit.write_grads()

    def _step(self) -> None:
        world, streamer = self._world, self._streamer
        world.wait_until(world.lanes[COLLECTIVES].free, "collectives")
        for unit in self._units:
            if not unit.size.states and not unit.size.grads:
                continue
            if unit.on_device:
                moved = 2 * (unit.size.params + unit.size.states) + unit.size.grads
                rate = world.machine.update_rate(unit._kind, True)
                world.advance(unit._numel / rate if world.on_cpu else moved / world.machine.memory, "update")
            elif self._config.update != "backward":
                streamer.owe(cast(Unit, unit), {"": SlotUpdate({}, AS_IT_IS)})
        world.ledger.now["device/grads"] = 0  # as `zero_grad` leaves it
        streamer.schedule.step()
        streamer.prefetch()
