"""Units and transfers that only take time: what the streamer, the room and the belt of a simulation work on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast, final

from outsize.api.counter import NONE_LIVE, Live
from outsize.api.placed import PlacedModel
from outsize.move.conveyor import Belt, Job, Step
from outsize.move.memory import HUGE_BYTES, Ledger
from outsize.move.shard import DEVICE_NUMEL, READ_NUMEL, SlotUpdate
from outsize.move.store import OWN_BYTES
from outsize.move.transfer import Transfer
from outsize.optim.update import LIGHT_NUMEL
from outsize.planning.layout import PAGE_ELEMENTS, UnitLayout, round_up
from outsize.planning.machine import Machine, seconds_on
from outsize.planning.placement import UnitBytes, UnitTiers
from outsize.planning.time import Drive, Lane
from outsize.planning.trace import COLLECTIVES, COMPUTE, IN, OUT, READS, UPDATES, WRITES, Trace
from outsize.run.unit import Residency

# Note [Two clocks]
# Two threads matter: the loop and the conveyor. Each has a clock here, and goes on by itself until it waits. While the
# loop computes, the belt is served up to the same time; while the loop waits for a unit, until the unit is there. What
# a lane is given has an end at once, so nothing ever waits for what is not yet known. On the CPU both threads compute
# on the same cores: what the conveyor does meanwhile takes longer, and so does the computation.

MOST_CHUNKS = 24
"""Of a unit: those of larger ones are put together, which changes little of what overlaps."""
GRAD_BYTES = 4
"""Of one element in staging, where gradients come from disk: as wide as they can be."""
UNIT_SECONDS = 150e-6
"""Of Python, for a unit that comes or whose gradients are laid to rest."""
PARAMETER_SECONDS = 30e-6
"""Of Python, for a parameter that is updated."""
CHUNK_SECONDS = 150e-6
"""Of Python, for a chunk that comes from the drive or goes there."""
TURN_SECONDS = 5e-3
"""After which Python lets another thread go on: the loop hears so late of what the conveyor's has done."""
KEPT = 1.1
"""Times the most that lived in a heap of which freed memory is kept: what comes does not fit all that is free."""


@final
class _At(Transfer):
    """On its way until a time."""

    def __init__(self, world: World, at: float) -> None:
        self._world, self._at = world, at

    def wait(self) -> None:
        self._world.belt_now = max(self._world.belt_now, self._at)

    def done(self) -> bool:
        return self._at <= self._world.belt_now


@final
class World:
    """The clocks, the lanes and the belt. See Note [Two clocks]."""

    def __init__(self, machine: Machine, slabs: int, slab_bytes: int, checks: bool) -> None:
        """`checks`: whether all that passes the drive has checksums."""
        self.machine, self.slab_bytes, self._checks = machine, slab_bytes, checks
        self.trace: Trace | None = None  # of the last step
        self.ledger = Ledger()
        self.now = self.belt_now = self.waited = 0.0
        self.belt = Belt([cast(Any, SimpleNamespace(touched=0)) for _ in range(slabs)])
        self.drive = Drive(machine)
        self.lanes = {COMPUTE: Lane(), IN: Lane(), OUT: Lane(), UPDATES: Lane(), COLLECTIVES: Lane()}
        self.lanes |= {READS: self.drive.reads, WRITES: self.drive.writes}
        self.live = NONE_LIVE
        self.keeps = False  # whether the allocator keeps what operations have freed, and gives gradients other memory
        self.holes = 0  # bytes of it that are kept where not all are
        self.most_heap = 0
        self.peak = {"device": 0, "host": 0, "disk": 0}
        self.untouched: dict[int, int] = {}  # by unit: memory for gradients of which the pages have not come
        self.on_cpu = machine.device == "cpu"
        if not self.on_cpu:  # pinned
            self.ledger.add("host/staging", slab_bytes * slabs)
        self._waits = False
        self._stolen = 0.0

    def advance(self, seconds: float, name: str) -> None:
        """The loop computes for so long where nothing disturbs it."""
        began, end = self.now, self.now + seconds
        while self.belt.has_work and self.belt_now < end:
            before = self._stolen
            self.belt.serve()
            end += self._stolen - before
        self.now = end
        self.span(COMPUTE, name, began, end)
        self.lanes[COMPUTE].busy += seconds

    def touch(self, slabs: Sequence[Any], nbytes: float) -> None:
        """Slabs hold so many bytes: their pages appear with the first bytes that come there, and stay."""
        for slab in slabs if self.on_cpu else ():
            more = min(round_up(int(nbytes), HUGE_BYTES), self.slab_bytes) - slab.touched
            if more > 0:
                slab.touched += more
                self.ledger.add("host/staging", more)
                self.note()

    def work(self, alone: float, half: float, whole: float, name: str) -> None:
        """The conveyor computes: seconds on one core, and then those of an update on half of the cores, or on all.
        Where the loop computes meanwhile, each of these cores has a thread of an operation too, and the operation is
        over when its last thread is."""
        began = self.belt_now
        if self._waits or not self.on_cpu:
            self.belt_now += alone + whole
        else:
            self.belt_now += 2 * (alone + half)
            self._stolen += alone + half
        self.lanes[UPDATES].busy += whole
        self.span(UPDATES, name, began, self.belt_now)

    def summing(self, nbytes: float) -> float:
        """Seconds of the checksums of what passes the drive, on one core."""
        return nbytes / self.machine.checksums if self._checks else 0.0

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

    def note(self, most: Live | None = None) -> None:
        """Remember the most bytes of each tier; operations have made `most`."""
        live = self.live if most is None else most
        self.most_heap = max(self.most_heap, live.heap)
        made = round(KEPT * self.most_heap) + live.mapped if self.keeps else live.nbytes + self.holes
        now: dict[str, int] = {"device": made, "host": -sum(self.untouched.values()), "disk": 0}
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
class SimulatedUnit:
    """Answers what the streamer and the room ask of a `Unit`, and takes time in place of moving."""

    def __init__(
        self, world: World, layout: UnitLayout, size: UnitBytes, tiers: UnitTiers, placed: PlacedModel
    ) -> None:
        self._world, self.size, self.tiers = world, size, tiers
        self.index, self.name = layout.index, layout.name or "model"
        _, self.ranks = placed.split_of(layout.index)
        self.numel = -(-layout.numel // self.ranks)
        self.nbytes, self.split = layout.param_bytes, self.ranks > 1 and size.params < layout.param_bytes
        self.always_resident = tiers.params == "device" and not self.split
        rows = placed.tile_rows.get(layout.index, 0)
        store = None if self.always_resident else self
        self.shard = SimpleNamespace(tile_rows=rows, rows=None, tiers=tiers, layout=layout, whole=layout, params=store)
        self.on_device = tiers.stay and placed.split[1] == 1
        self.resident = self.on_device
        self.parameters = {slot.name: placed.parameters[slot.name] for slot in layout.slots}
        dtype = layout.segments[0].dtype if layout.segments else "float32"
        self.itemsize = OWN_BYTES[dtype]
        gradients = [param.numel() * self.itemsize for param in self.parameters.values() if param.requires_grad]
        in_heap = sum(nbytes for nbytes in gradients if not Live.of(nbytes, world.on_cpu).mapped)
        self._gradient_bytes = max(sum(gradients), 1)  # as autograd makes them
        self.heap_grads = self.moved(in_heap)
        self.lays_down_parts = world.on_cpu and tiers.grads == "disk" and not self.split and not rows
        self.kind = "compact" if placed.kept.codes else dtype
        self.state = Residency.AT_REST
        self.pending: dict[str, SlotUpdate] = {}
        self.updates = self.holds = 0
        self._fresh = self.nbytes  # of the running fetch: memory that the system has to make
        self.inherited = 0  # bytes of memory that units have left which were released for this one
        self.viewed = self.opened = False
        self.keeps_grads = False  # in memory, for the update that follows
        self._has_grads = False
        self.waiting = 0  # bytes of gradients that are laid down with the next ones
        self._job: Job | None = None
        self._ready = self.wrote = self._began = self.left = 0.0
        self._chunk_bytes = self._staged_bytes() / max(self.numel, 1) if tiers.on_disk else 0.0

    def moved(self, nbytes: int) -> int:
        """What moves to where gradients rest, of so many bytes of what autograd makes."""
        return self.size.moved_grads * nbytes // self._gradient_bytes

    def _staged_bytes(self) -> float:
        """That pass through staging for an update of the unit; as `staged_bytes` has it of a part."""
        size, tiers = self.size, self.tiers
        if not self._world.on_cpu:
            return size.states + size.params + size.moved_grads
        staged = (tiers.states == "disk") * size.states + (tiers.grads == "disk") * self.numel * GRAD_BYTES
        return staged + (size.params if self.shard.tile_rows and tiers.params == "disk" else 0)

    def chunk_numel(self, slab: int, updates: bool) -> int:
        """Elements of a chunk of a fetch, as `ChunkUpdater` cuts them."""
        numel = DEVICE_NUMEL if updates and not self._world.on_cpu else READ_NUMEL
        if self._chunk_bytes and slab:
            numel = min(numel, max(int(slab / self._chunk_bytes) // PAGE_ELEMENTS, 1) * PAGE_ELEMENTS)
        return min(numel, max(self.numel, 1))

    @property
    def tile_bytes(self) -> int:
        """Of two tiles, one of which is on its way."""
        return min(2 * self.tile_numel * self.ranks * self.itemsize, self.nbytes)

    @property
    def tile_numel(self) -> int:
        """The elements of a tile that this rank has."""
        rows, tile = int(self.shard.layout.slots[0].shape[0]), int(self.shard.tile_rows)
        return -(-self.numel // rows) * min(tile * self.ranks, rows)

    @property
    def fetch_bytes(self) -> int:
        return 0 if self.shard.tile_rows and self.pending else self.nbytes

    @property
    def current(self) -> bool:
        return self.state is Residency.RESIDENT and not self.pending

    @property
    def written(self) -> bool:
        """By the loop's clock, which the conveyor's may be ahead of."""
        return self._job is None or (self._job.written.done() and self.wrote <= self._world.now)

    @property
    def fetched(self) -> bool:
        return self._job is None or self._job.done()

    def fetch(self, conveyor: Any, updater: Any, slab: int) -> None:
        world, fetch = self._world, self.state is Residency.AT_REST
        updates, self.pending, began = bool(self.pending), {}, world.now
        self._fresh, self.inherited = self.nbytes - self.inherited, 0
        if fetch and not self.shard.tile_rows:
            world.ledger.add("device/resident", self.nbytes)
            world.note()
        if world.on_cpu and not self.tiers.on_disk and self.numel <= LIGHT_NUMEL and not self.split:
            alone, half, _ = self._seconds(updates, fetch, 1.0)
            world.advance(alone + half, self.name)
            self._ready, self._job = world.now, None
        elif not world.on_cpu and self.tiers.params == "host" and not updates and not self.split:
            self._ready, self._job = world.move(IN, world.now, self.nbytes, self.name), None
        else:
            after = () if self.written else (cast(Job, self._job),)
            self._job = world.submit(self._steps(updates, fetch, self.chunk_numel(slab, updates)), after)
        self.state, self._began = Residency.FETCHING, began

    def _seconds(self, updates: bool, fetch: bool, part: float) -> tuple[float, float, float]:
        """Of the conveyor's thread for a part of the unit: on one core; and of the update on half of the cores, and on
        all."""
        machine, alone = self._world.machine, 0.0
        if fetch and self._world.on_cpu and not self.shard.tile_rows:
            alone = self._fresh * part / machine.new_memory
        if self.tiers.params == "host" and self._world.on_cpu:
            alone += (fetch + updates) * 2 * self.size.params * part / machine.host_memory
        if not updates:
            return alone, 0.0, 0.0
        numel, alone = self.numel * part, alone + PARAMETER_SECONDS * len(self.parameters) * part
        return alone, numel / machine.update_rate(self.kind, False), numel / machine.update_rate(self.kind, True)

    def _steps(self, updates: bool, fetch: bool, numel: int) -> Iterator[Step]:
        chunks = max(min(-(-self.numel // numel), MOST_CHUNKS), 1)
        world, size, tiers, name = self._world, self.size, self.tiers, self.name
        moved = {"params": size.params, "states": size.states, "grads": size.moved_grads}
        on_disk = {kind: nbytes / chunks * (getattr(tiers, kind) == "disk") for kind, nbytes in moved.items()}
        kept, self.keeps_grads = self.keeps_grads, False
        reads = on_disk["params"] if fetch else 0.0
        writes = 0.0
        if updates:
            reads += on_disk["states"] + (0 if kept else on_disk["grads"])
            writes = on_disk["states"] + on_disk["params"]

        def begin(slabs: Sequence[Any]) -> Sequence[Transfer]:
            world.touch(slabs, staged)
            return [_At(world, world.move(READS, world.belt_now, reads, name))] if reads else ()

        def finish() -> Sequence[Transfer]:
            alone, half, whole = self._seconds(updates, fetch, 1 / chunks)
            alone += world.summing(reads + writes) + (CHUNK_SECONDS if reads or writes else 0.0)
            if alone or half:
                world.work(alone, half, whole, name)
            ends = []
            if not world.on_cpu and tiers.params != "device":
                ends.append(world.move(IN, world.belt_now, self.nbytes / chunks / self.ranks, name))
                self._ready = max(self._ready, ends[-1])
            if writes:
                ends.append(world.move(WRITES, world.belt_now, writes, name))
                self.wrote = ends[-1]
            self._ready = max(self._ready, world.belt_now)
            return [_At(world, end) for end in ends]

        staged = self._chunk_bytes * numel
        slab = int(self.tiers.on_disk and (updates or not world.on_cpu))
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
            self._world.wait_until(self.wrote, f"{self.name} is written")

    def release(self, heir: SimulatedUnit | None = None) -> None:
        self._world.ledger.remove("device/resident", self.nbytes)
        self.state = Residency.AT_REST
        if heir is not None and heir.fetch_bytes:  # huge pages, of which a buffer has about one less than would fit
            handed_on = max(min(self.nbytes, heir.nbytes - heir.inherited) - HUGE_BYTES, 0)
            heir.inherited += handed_on

    def forgo(self) -> None:
        self.inherited = 0

    def leave(self) -> None:
        return

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def grads_at_once(self) -> int:
        """Bytes of gradients that leave at once: of a weight in tiles those of one."""
        of_unit = self.tile_numel * GRAD_BYTES if self.shard.tile_rows else self.size.moved_grads
        return min(of_unit, self.size.leaving)

    def step_seconds(self) -> float:
        """Of `step()`, which looks at the gradients of a unit on the device and updates it."""
        machine, grads = self._world.machine, self.size.moved_grads
        if not self._world.on_cpu:
            return (2 * (self.size.params + self.size.states) + grads) / machine.memory
        looked_at = grads / machine.memory + PARAMETER_SECONDS * len(self.parameters)
        return looked_at + self.numel / machine.update_rate(self.kind, True)

    def lay_down(self, last: int) -> None:
        """The gradients of the unit come to where they rest, or to where they are written from."""
        world, grads = self._world, self.size.moved_grads
        at_once = self.grads_at_once
        if self.split:
            world.move(COLLECTIVES, world.now, self.nbytes, f"{self.name} gradients")
        if self.tiers.grads != "device":  # else they stay where autograd made them
            if self.tiers.grads == "host" and not self._has_grads:
                world.ledger.add("host/grads", self.size.grads)
            self._has_grads = True
            if not world.on_cpu:
                world.move(OUT, world.now, grads, self.name)
            else:
                machine = world.machine
                seconds = 3 * grads / machine.host_memory + at_once / machine.new_memory + UNIT_SECONDS
                world.advance(seconds, f"{self.name} gradients")
        world.note(world.live + Live.of(0 if self.tiers.grads == "device" else min(last, at_once), world.on_cpu))

    def write_grads(self) -> None:
        """To disk."""
        world, nbytes = self._world, self.size.moved_grads
        self.left = world.now

        def finish() -> Sequence[Transfer]:
            world.work(world.summing(nbytes) + CHUNK_SECONDS, 0.0, 0.0, self.name)
            self.wrote = world.move(WRITES, world.belt_now, nbytes, f"{self.name} gradients")
            return [_At(world, self.wrote)]

        after = () if self.written else (cast(Job, self._job),)
        self._job = world.submit(iter([Step(finish=finish)]), after)


@final
class SimulatedPlace:
    """Answers what the room asks of a `RestingPlace`."""

    def __init__(self, world: World, unit: SimulatedUnit) -> None:
        self._world, self._unit = world, unit
        self.passing_bytes = unit.grads_at_once if unit.tiers.grads == "disk" else 0
        self.held = self.filling = False

    def open(self) -> None:
        """Gradients come to memory on their way to disk."""
        if not self.held:
            self._world.ledger.add("host/grads in flight", self.passing_bytes)
            self._world.untouched[self._unit.index] = self.passing_bytes
        self.held = self.filling = True

    def fill(self, nbytes: int) -> None:
        """So many of them are there."""
        left = self._world.untouched.get(self._unit.index, 0) - nbytes
        self._world.untouched[self._unit.index] = max(left, 0)

    def close(self) -> None:
        """No more come."""
        self._unit.waiting = 0
        self.fill(self.passing_bytes)
        self.filling = False

    def drop_if_written(self) -> None:
        heard = self._unit.written and self._unit.wrote + TURN_SECONDS <= self._world.now
        if self.held and not self.filling and heard and not self._unit.keeps_grads:
            self._drop()

    def flush_and_drop(self) -> bool:
        if not self.held:
            return False
        if self.filling:
            self.close()
            self._unit.write_grads()
        self._unit.await_written()
        self._unit.keeps_grads = False
        self._drop()
        return True

    def _drop(self) -> None:
        self._world.ledger.remove("host/grads in flight", self.passing_bytes)
        self._world.span(OUT, self._unit.name, self._unit.left, self._world.now)
        self.held = False
