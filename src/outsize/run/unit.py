"""One unit's life: AT_REST -> FETCHING -> RESIDENT and back. Each transition is one method with one check."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import final

import torch

from outsize.move.comm import Ranks
from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.owners import Owners
from outsize.move.shard import Gathering, Pending, UnitShard, fetch_steps
from outsize.move.tracing import begun, ended
from outsize.optim.update import ChunkUpdater
from outsize.planning.trace import IN
from outsize.run.local import is_distributed
from outsize.run.wrappers import Inner

# Note [Open units]
# While a call of its module runs, a unit is open: its parameters are ordinary ones. They cost nothing, and compilers
# understand them. Nothing sees what is done with them. So a view of them keeps the unit in memory until it is gone. A
# write to them would be lost: it shows in their versions when the unit closes. `param.data` has a version of its own.


class Residency(Enum):
    AT_REST = "at rest"
    FETCHING = "fetching"
    RESIDENT = "resident"


@final
class Unit:
    """The parameters that are fetched, released, reduced, updated and saved as a whole.

    `holds` counts the forwards and `gathered` blocks that use the unit; `shown` the blocks, `writable` those that may
    modify it. `pending`
    is the update that it owes: the next fetch pays it; `updates` counts those that it was given.
    `held` is the gradient of the last step where updates are delayed by one.
    """

    def __init__(
        self,
        shard: UnitShard,
        parameters: dict[str, torch.nn.Parameter],
        ranks: Ranks | None = None,
        inside: Sequence[Inner] = (),
    ) -> None:
        """`inside`: where the parameters are that a wrapper has. See Note [Wrappers]."""
        self.shard = shard
        self.inside = inside
        self._ranks = ranks if shard.ranks > 1 else None
        self.owners: Owners | None = None  # of a table that is split
        if self._ranks is not None and shard.rows is not None:
            self.owners = Owners(shard, self._ranks)
        self.parameters = parameters
        self.index = shard.layout.index
        self.name = shard.layout.name or "model"  # as the plan has it
        self.always_resident = shard.params is None
        self.unframed = self.resident  # no module opens it, not even when it is unfrozen and its state rests elsewhere
        self.state = Residency.AT_REST
        self.pending: Pending = {}
        self.held: Pending = {}
        self.updates = 0
        self.was_trained = False  # before the checkpoint that it was loaded from
        self.holds = 0
        self.shown = 0
        self.writable = 0
        self.opened = False
        self._versions: list[tuple[str, torch.Tensor, int]] = []  # what the open unit's parameters were
        self.parts: dict[str, torch.Tensor] = {}  # the gathered values of each parameter, as tensors that are none
        self.job: Job | None = None  # the last one
        self._gather: Gathering | None = None  # at the end of the job
        self._began = 0.0  # the fetch

    @property
    def nbytes(self) -> int:
        return self.shard.buffer.nbytes

    @property
    def fetch_bytes(self) -> int:
        """What the next fetch takes."""
        return 0 if self.shard.tile_rows and self.pending else self.nbytes

    @property
    def resident(self) -> bool:
        """Whether the unit never leaves the device and autograd keeps its gradients: nothing ever moves."""
        return self.shard.on_device and all(slot.dtype in ("float32", "float64") for slot in self.shard.layout.slots)

    @property
    def split(self) -> bool:
        """Whether each rank has a part, and a fetch ends with a collective."""
        return self._ranks is not None

    @property
    def current(self) -> bool:
        """Whether the gathered values are in place and owe no update."""
        return self.state is Residency.RESIDENT and not self.pending

    @property
    def settled(self) -> bool:
        """Whether the unit owes no update, and none is under way."""
        return not self.pending and self.state is not Residency.FETCHING

    @property
    def written(self) -> bool:
        """Whether nothing of this unit is on its way to a store any more."""
        return self.job is None or self.job.written.done()

    def adopt(self) -> None:
        """The buffer has just been filled by `prepare`: AT_REST -> RESIDENT."""
        self._expect(Residency.AT_REST)
        self.parts = {name: self.shard.param(name) for name in self.parameters}
        self.state = Residency.RESIDENT

    def fetch(self, conveyor: Conveyor, updater: ChunkUpdater | None, slab_bytes: int) -> None:
        """Start to bring the unit in, and to run the update that it owes; AT_REST or RESIDENT -> FETCHING.

        A unit that is used in tiles only pays what it owes, if it owes an update.
        """
        assert self.state is not Residency.FETCHING and not self.current, "nothing to fetch"
        if self.shard.tile_rows and self.pending:
            return self._pay(conveyor, updater, slab_bytes)
        fetch = self.state is Residency.AT_REST
        self._began = begun()
        self.shard.begin_filling()
        pending, self.pending = self.pending, {}
        steps: Iterator[Step]
        if pending:
            assert updater is not None
            lanes = self.shard.lanes
            if lanes is not None and any(owed.loose is not None for owed in pending.values()):
                lanes.follow(lanes.incoming, lanes.outgoing)
            steps = updater.steps(self.shard, pending, fetch)
        else:
            steps = fetch_steps(self.shard, slab_bytes)
        steps, alone = self._gathered(steps), self._ranks is None
        if alone and not pending and not self._unwritten() and self.shard.is_copied:
            self.job = Job(steps)
            self.job.run()
        else:
            self.submit(conveyor, steps, light=alone and updater is not None and updater.is_light(self.shard))
        self.state = Residency.FETCHING

    def _pay(self, conveyor: Conveyor, updater: ChunkUpdater | None, slab_bytes: int) -> None:
        assert updater is not None
        pending, self.pending = self.pending, {}
        self.submit(conveyor, updater.steps(self.shard, pending, fetch=False))
        if self.state is Residency.RESIDENT:  # somebody has gathered it
            self.submit(conveyor, self._gathered(fetch_steps(self.shard, slab_bytes)))
        self.state = Residency.FETCHING

    def _gathered(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Steps that bring this rank's part, and then those of the others."""
        if self._ranks is None:
            return steps
        self._gather = Gathering(self.shard, self._ranks)
        return chain(steps, [Step(finish=self._gather.start)])

    def regather(self, conveyor: Conveyor) -> None:
        """Start to bring the parts of the other ranks in anew; RESIDENT -> FETCHING."""
        self._expect(Residency.RESIDENT)
        self.submit(conveyor, self._gathered(iter(())))
        self.state = Residency.FETCHING

    def arrive(self) -> None:
        """Block until the values are in place; FETCHING -> RESIDENT."""
        self._expect(Residency.FETCHING)
        if self.job is not None:
            self.job.wait()
        if self._gather is not None:
            self._gather.arrive()
            self._gather = None
        ended(IN, self.name, self._began)
        self.state = Residency.RESIDENT if self.shard.buffer.resident else Residency.AT_REST

    @property
    def fetched(self) -> bool:
        """Whether `arrive` would return at once."""
        return (self.job is None or self.job.done()) and (self._gather is None or self._gather.arrived)

    def submit(self, conveyor: Conveyor, steps: Iterator[Step], light: bool = False) -> Job:
        """Run steps of this unit (fetches, gradients to disk, modified values back) in order."""
        self.job = conveyor.submit(Job(steps, after=self._unwritten()), light)
        return self.job

    def await_written(self) -> None:
        """Block until all that was on its way to the stores has arrived there."""
        if self.job is not None:
            self.job.written.wait()

    def let_go(self) -> None:
        """One who held the unit does so no more."""
        self.holds -= 1
        if not self.holds:
            self.leave()

    def leave(self) -> None:
        """The unit is not used for now, unless somebody holds a view of it."""
        if self.shard.lanes is not None and not self.viewed:
            self.shard.buffer.leave()

    @property
    def viewed(self) -> bool:
        """Whether somebody holds a view of the gathered values."""
        return self.shard.buffer.viewed

    def open(self, kind: type) -> None:
        """Make the parameters ordinary ones, of class `kind`. See Note [Open units]."""
        self.opened = True
        for name, param in self._plain:
            param.__class__ = kind
            self._versions.append((name, param, param._version))
        for inner in self.inside:
            inner.show()

    @cached_property
    def _plain(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, param) for name, param in self.parameters.items() if not is_distributed(param)]

    def lend(self, param: torch.Tensor, data: torch.Tensor) -> None:
        """The user has `param.data`."""
        name = next(name for name, each in self.parameters.items() if each is param)
        self._versions.append((name, data, data._version))

    def close(self, kind: type) -> str | None:
        """Make the parameters guarded ones, of class `kind`. Returns the name of one that was written to."""
        written = None
        for name, each, version in self._versions:
            if each._version != version:
                written = written or name
        for _, param in self._plain:
            param.__class__ = kind
        for inner in self.inside:
            inner.hide()
        self._versions = []
        self.opened = False
        return written

    def part_at(self, byte: int) -> tuple[int, str]:
        """The parameter that has this byte of the gathered buffer, with its first byte there."""
        return self._starts[bisect_right(self._starts, byte, key=itemgetter(0)) - 1]

    @cached_property
    def _starts(self) -> list[tuple[int, str]]:
        parts = {name: (int(part.storage_offset()) * part.itemsize, part.numel()) for name, part in self.parts.items()}
        return [(parts[name][0], name) for name in sorted(parts, key=parts.__getitem__)]

    def release(self, heir: Unit | None = None) -> None:
        """Drop the gathered values; nothing is written. RESIDENT -> AT_REST. `heir`: what is fetched next."""
        self._expect(Residency.RESIDENT)
        assert not self.always_resident and not self.holds and self.written
        self.shard.buffer.drop(heir.shard.buffer if heir is not None and heir.fetch_bytes else None)
        self.state = Residency.AT_REST

    def forgo(self) -> None:
        """The unit, for which others were released, is not fetched now."""
        self.shard.buffer.forgo()

    def _unwritten(self) -> tuple[Job, ...]:
        return () if self.job is None or (self.job.written.done() and not self.job.broken) else (self.job,)

    def _expect(self, state: Residency) -> None:
        assert self.state is state, f"unit {self.name!r} is {self.state.value}, not {state.value}"
