"""A step of training, simulated: the streamer, the room and the conveyor of a run, on units and transfers that only
take time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast, final

from torch import nn

from outsize.api.capacity import capacity_of, spare_of
from outsize.api.counter import NONE_LIVE, Event, Live
from outsize.api.counting import Counted
from outsize.api.modules import modules_of
from outsize.api.placed import PlacedModel
from outsize.api.simulated import UNIT_SECONDS, SimulatedPlace, SimulatedUnit, World
from outsize.config import Config
from outsize.move.conveyor import Conveyor
from outsize.move.grad_ops import AS_IT_IS
from outsize.move.memory import LOOK_BYTES
from outsize.move.shard import SlotUpdate
from outsize.planning.choice import cheapest
from outsize.planning.machine import Machine
from outsize.planning.time import Prediction
from outsize.planning.trace import COLLECTIVES, IN, READS, Trace
from outsize.run.live_state import LiveState
from outsize.run.room import Room
from outsize.run.streamer import Streamer
from outsize.run.unit import Residency, Unit
from outsize.run.unit_gradients import WAITING_BYTES

STEPS = 3
"""The first learns the order, the second pays the first updates, the third is like all that follow."""
SLACK, SLACK_BYTES = 0.055, 2 << 20
"""On a CPU. Of the memory of a step: scratch memory of kernels."""
HOLES = 0.5
"""Of gradients that leave the heap to where they rest: what the allocator loses between them. They lie where operations
make and free the rest of a heap that is kept, or between two looks at one that is given back."""


@dataclass
class _Layer:
    """A layer: its events [first, last] in the forward, what it saves, and whether it runs again."""

    first: int
    last: int = 0
    saved: Live = NONE_LIVE
    seconds: float = 0.0
    again: bool = False


@final
class Simulation:
    """Steps of training of a placed model."""

    def __init__(
        self, model: nn.Module, placed: PlacedModel, config: Config, counted: Counted, machine: Machine
    ) -> None:
        self._slab, slabs = placed.arena
        self._world = world = World(machine, slabs, self._slab, config.verify)
        self._events, self._config, self._placed, self._counted = counted.events, config, placed, counted
        units = zip(placed.layouts, placed.unit_bytes, placed.tiers, strict=True)
        self._units = [SimulatedUnit(world, *each, placed) for each in units]
        self._places = [SimulatedPlace(world, unit) for unit in self._units]
        as_units = cast(Sequence[Unit], self._units)
        _, self._owned, _, layers = modules_of(model, as_units, placed, config, "auto")
        capacity = capacity_of(placed, as_units, 0)
        world.holes = placed.holes_bytes
        spare = spare_of(as_units, placed, capacity) if "auto" in layers.values() else 0
        capacity -= spare
        world.keeps = world.on_cpu and not placed.returns_freed_memory
        budgets = placed.budgets
        places = cast(Any, self._places)
        self._rest()
        live = LiveState()
        room = Room(as_units, places, live, capacity, world.ledger, budgets, None, placed.passing_bytes)
        conveyor = cast(Conveyor, SimpleNamespace(slab_bytes=self._slab))
        self._streamer = Streamer(as_units, room, live, conveyor, None)
        self._layers = self._find_layers(layers, spare)
        self._home = {name: unit for unit in self._units for name in unit.parameters}
        self._opened: dict[nn.Module, list[SimulatedUnit]] = {}
        self._missing: dict[int, set[str]] = {}
        self._dropped = NONE_LIVE  # what layers which run again have not kept
        self._name, self._again = "", False

    def _rest(self) -> None:
        ledger = self._world.ledger
        for unit in self._units:
            for kind in ("params", "states"):
                nbytes, tier = getattr(unit.size, kind), getattr(unit.tiers, kind)
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
        live, seconds = NONE_LIVE, 0.0
        began: dict[nn.Module, tuple[Live, float]] = {}
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
                layer.saved = (live - before - event.live).at_least_none()
        autos = [layer for module, layer in found.items() if modes[module] == "auto"]
        chosen = cheapest([[(each.saved.nbytes, 0.0), (0, each.seconds)] for each in autos], spare) if autos else []
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
            self._dropped = NONE_LIVE
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
        """With what nobody counts: on the CPU, what kernels and the allocator take."""
        world, peak = self._world, dict(self._world.peak)
        if world.on_cpu:
            leave = sum(unit.heap_grads for unit in self._units if unit.tiers.grads != "device")
            peak["device"] += SLACK_BYTES + round(SLACK * (peak["device"] + peak["host"]))
            peak["device"] += round(HOLES * min(leave, world.most_heap if world.keeps else LOOK_BYTES))
        return peak

    def _happen(self, event: Event) -> None:
        world, module = self._world, event.module
        if event.kind == "work":
            world.note((event.most - self._dropped).at_least_none())
            world.live = (event.live - self._dropped).at_least_none()
            world.advance(event.seconds, self._name)
        elif event.kind == "enter" and module is not None:
            for each in self._owned.get(id(module), ()):
                unit = cast(SimulatedUnit, each)
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
            nbytes = unit.parameters[event.name].numel() * unit.itemsize
            if unit.tiers.grads == "device":  # where autograd made it
                world.ledger.add("device/grads", nbytes if unit.on_device else nbytes // unit.ranks)
            elif missing and unit.lays_down_parts:
                unit.waiting += unit.moved(nbytes)
                if unit.waiting >= WAITING_BYTES:
                    self._open(unit).fill(unit.waiting)
                    unit.waiting = 0
                    self._streamer.room.make_way()
                world.note(world.live + Live.of(nbytes, world.on_cpu))
            if not missing:
                self._complete(unit, nbytes)

    def _use(self, unit: SimulatedUnit) -> None:
        if unit.resident:
            self._name = unit.name
            return
        if unit is not cast(Any, self._streamer.room.last) or not unit.current:
            self._world.advance(UNIT_SECONDS, f"{unit.name} opens")
        self._name = unit.name
        if unit.shard.tile_rows:
            self._streamer.use_tiles(cast(Unit, unit), unit.tile_bytes)
            lane = READS if unit.tiers.params == "disk" else IN
            world, nbytes = self._world, unit.size.params
            summed = world.summing(nbytes) if lane == READS else 0.0
            world.wait_until(world.move(lane, world.now, nbytes, unit.name) + summed, unit.name)
            return
        self._streamer.acquire(cast(Unit, unit))

    def _complete(self, unit: SimulatedUnit, last: int = 0) -> None:
        """The unit's gradients are in; the last one of so many bytes is there twice while it is copied."""
        self._missing[unit.index] = set()
        if not unit.size.grads or unit.resident:
            self._world.note()
            return
        place = self._places[unit.index]
        self._streamer.finished(cast(Unit, unit))
        if unit.tiers.grads == "disk":
            self._open(unit).close()
        unit.lay_down(last)
        in_backward, update = self._config.update == "backward", {"": SlotUpdate({}, AS_IT_IS)}
        if in_backward and self._streamer.room.holds_beside_gradients(cast(Unit, unit)):
            unit.keeps_grads = place.held
            self._streamer.update_now(cast(Unit, unit), update)
            return
        if place.held:
            unit.write_grads()
        if in_backward:
            self._streamer.owe(cast(Unit, unit), update)

    def _open(self, unit: SimulatedUnit) -> SimulatedPlace:
        """Gradients of the unit come to memory on their way to disk."""
        place = self._places[unit.index]
        if not place.held:
            self._streamer.room.make(place.passing_bytes)
        place.open()
        return place

    def _step(self) -> None:
        world, streamer = self._world, self._streamer
        world.wait_until(world.lanes[COLLECTIVES].free, "collectives")
        for unit in self._units:
            if unit.index in self._placed.tables or not unit.size.trained:
                continue  # of a table only the rows of a batch are updated, which are not counted
            if unit.on_device:
                world.advance(unit.step_seconds(), "update")
            elif self._config.update != "backward":
                streamer.owe(cast(Unit, unit), {"": SlotUpdate({}, AS_IT_IS)})
        world.ledger.now["device/grads"] = 0  # as `zero_grad` leaves it
        streamer.schedule.step()
        streamer.prefetch()
