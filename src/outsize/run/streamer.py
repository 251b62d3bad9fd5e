"""Which units are gathered, and when: on demand, ahead in the learnt order, and with the updates that they owe."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from outsize.move.comm import Ranks, combined
from outsize.move.conveyor import Conveyor
from outsize.move.progress import progress_over
from outsize.move.shard import Pending
from outsize.move.tracing import turned
from outsize.optim.update import ChunkUpdater
from outsize.planning.sizes import format_bytes
from outsize.run.activations import in_backward
from outsize.run.live_state import LiveState
from outsize.run.room import Room
from outsize.run.unit import Residency, Unit

PREFETCH_UNITS = 8
"""How far ahead the streamer looks; memory usually allows less."""

# Note [Units in the order of the model]
# Where ranks use different units by design (`rounds`), each decides for itself what it keeps. A rank that needs a
# unit which it has not says so, and all begin a round: every unit is gathered, in the order of the model, in a
# backward from its end. Each rank starts these gathers when it needs a unit, or ahead while there is room. A rank
# that has a unit takes part with what it has. A unit behind those of this round comes in another round. At the end
# of a forward and of a backward a rank finishes its round, and takes part in others until nobody needs one.


@final
@dataclass(eq=False, repr=False)
class Streamer:
    """Brings units in, and runs the updates that they owe."""

    _units: Sequence[Unit]
    room: Room
    live: LiveState
    _conveyor: Conveyor
    _updater: ChunkUpdater | None
    _rounds: Ranks | None = None  # see Note [Units in the order of the model]

    def __post_init__(self) -> None:
        self.schedule = self.room.schedule
        self._left: deque[Unit] = deque()  # what this round has still to gather
        self._lock = self.room.lock

    # -- bringing in -------------------------------------------------------------------------------------------------

    def acquire(self, unit: Unit) -> None:
        """Block until the unit's current values are gathered, its owed update included; then look ahead."""
        if unit is self.room.last and unit.current:
            return
        with self._lock:
            self.live.check()
            self.schedule.use(unit.index)
            self.room.last = unit
            while self._rounds is not None and unit.split and not self._has(unit):
                if self._left or self._another_round("backward" if in_backward() else "forward", needed=True):
                    self._take_part(self._left.popleft())
            turned(unit.name)
            self.room.make_way()
            if unit.state is Residency.FETCHING and not unit.fetched:  # the unit before has room for the one behind
                self.prefetch()
            self._bring(unit)
            self.prefetch()

    def use_tiles(self, unit: Unit, nbytes: int) -> None:
        """Tiles of so many bytes are about to be used: block until the unit owes no update; then look ahead."""
        with self._lock:
            self.live.check()
            self.schedule.use(unit.index)
            self.settle(unit)
            self.room.make_way()
            self.room.last = None  # the unit before is in use no more, or a frame or a view says so
            self.room.make_for(None, nbytes)
            self.prefetch()

    def bring(self, unit: Unit) -> None:
        """As `acquire`, for uses outside the model's own order (`gathered`, save, export): nothing is learnt."""
        with self._lock:
            self.live.check()
            self._bring(unit)

    def show(self, unit: Unit) -> None:
        """As `bring`, called by every rank for the same units."""
        with self._lock:
            self.live.check()
            if self._rounds is not None and unit.split:
                self._take_part(unit)
            self._bring(unit)

    def finished(self, unit: Unit) -> None:
        """The unit's gradients are complete: it is not needed before the next forward."""
        unit.leave()
        if self.room.last is unit:
            self.room.last = None

    def prefetch(self) -> None:
        """Start to fetch the units that the learnt order expects next, as far as room allows."""
        with self._lock:
            while self._left and (self._left[0].state is not Residency.AT_REST or self.room.fits(self._left[0])):
                self._take_part(self._left.popleft())
            if self._rounds is not None:
                return
            for index in self.schedule.upcoming(PREFETCH_UNITS):
                unit = self._units[index]
                if unit.current or unit.state is Residency.FETCHING or (unit.shard.tile_rows and not unit.pending):
                    continue
                if unit.state is Residency.AT_REST and not self.room.fits(unit):
                    return
                try:
                    self._start(unit)
                except torch.OutOfMemoryError:  # nothing has changed, and nobody needs the unit yet
                    return

    def drop_idle(self) -> None:
        """Release every unit that nothing uses; for tests and for memory that is wanted elsewhere."""
        with self._lock:
            self.room.drop_idle()

    def regather(self, unit: Unit) -> None:
        """What rests here of a unit was replaced on every rank: make a gathered copy that stays agree with it."""
        with self._lock:
            if self._rounds is not None:  # only what every rank has is gathered anew
                self.room.last = None
                if self._has(unit) and self.room.is_evictable(unit):
                    return self.room.release(unit)
            if unit.state is Residency.RESIDENT:
                unit.regather(self._conveyor)
                self.room.arrive(unit)

    def _bring(self, unit: Unit) -> None:
        self.room.arrive(unit)
        if unit.shard.rows is not None:
            unit.shard.rows.flush()
        while not unit.current:
            self._fetch(unit)
            self.room.arrive(unit)

    def _fetch(self, unit: Unit) -> None:
        if unit.state is Residency.AT_REST:
            self.room.make_for(unit, unit.fetch_bytes)
        while True:
            try:
                return self._start(unit)
            except torch.OutOfMemoryError as error:  # activations may take more than the budget leaves them
                if not self.room.release_one(unit):
                    raise torch.OutOfMemoryError(
                        f"no {format_bytes(unit.nbytes)} of memory are left on the device for unit {unit.name!r}: "
                        f"lower device_memory, so that more is left for activations, or recompute them with "
                        f"activations='recompute', or run a large module, an MLP say, on one tile of the sequence "
                        f"after the other with outsize.tiled(module) ({error})"
                    ) from error

    def _start(self, unit: Unit) -> None:
        self.room.started[unit] = None
        unit.fetch(self._conveyor, self._updater, self._conveyor.slab_bytes)

    # -- rounds: see Note [Units in the order of the model] ------------------------------------------------------------

    def end_round(self) -> None:
        """Finish the round, if there is one."""
        with self._lock:
            while self._left:
                self._take_part(self._left.popleft())

    def end_pass(self, kind: str) -> None:
        """A forward or a backward is over."""
        if self._rounds is not None:
            self.end_round()
            while self._another_round(kind, needed=False):
                self.end_round()

    def _another_round(self, kind: str, needed: bool) -> bool:
        """Whether any rank needs another round, which then begins on all."""
        assert self._rounds is not None
        if not any(self._rounds.meet(kind, int(needed))):
            return False
        split = [unit for unit in self._units if unit.split]
        self._left.extend(reversed(split) if kind == "backward" else split)
        return True

    def _has(self, unit: Unit) -> bool:
        self.room.arrive(unit)
        return unit.current

    def _take_part(self, unit: Unit) -> None:
        if self._has(unit):
            unit.regather(self._conveyor)
        else:
            self._fetch(unit)

    # -- owed updates --------------------------------------------------------------------------------------------------

    def owe(self, unit: Unit, pending: Pending) -> None:
        """Mark an update that the unit's next fetch runs; one that it still owes is run first."""
        with self._lock:
            self.live.check()
            self.settle(unit)
            unit.pending = pending
            unit.updates += 1

    def update_now(self, unit: Unit, pending: Pending) -> bool:
        """Start the update of a unit whose values are in memory; otherwise its next fetch runs it. Returns which."""
        with self._lock:
            self.owe(unit, pending)
            if unit.state is not Residency.RESIDENT or unit.holds:
                return False
            for owed in pending.values():
                owed.in_memory = owed.resting is not None and owed.resting.in_memory
            self._start(unit)
            return True

    def settle(self, unit: Unit) -> None:
        """Run the update that the unit still owes."""
        with self._lock:
            self.live.check()
            self.room.arrive(unit)
            if unit.pending:
                self._fetch(unit)
                self.room.arrive(unit)
            if unit.shard.rows is not None:
                unit.shard.rows.flush()

    def settle_seen(self) -> None:
        """Run the updates that are owed to what is read without a fetch: units that somebody holds a view of, and those
        that no module opens. Where ranks use different units, each may hold views of others."""
        seen = [
            unit.state is not Residency.AT_REST and not unit.current and (unit.viewed or unit.unframed)
            for unit in self._units
        ]
        anywhere: Sequence[int] = seen
        if self._rounds is not None:
            anywhere = combined([self._rounds], seen, "views", "max")
        for unit, here, there in zip(self._units, seen, anywhere, strict=True):
            if there:
                self.settle(unit)
            if here:
                unit.shard.buffer.use()

    def settle_all(self, shown: bool = False) -> None:
        """Run every update that is owed, several units on their way at once; `shown`: where that takes seconds, say
        how far it is."""
        with self._lock:
            self.live.check()
            owing = [unit for unit in self._units if unit.pending]
            every = [*owing, *(unit for unit in self._units if not unit.pending)]
            looked_ahead = PREFETCH_UNITS if self._rounds is None else 0  # ranks have other units at hand
            with progress_over("outsize: updates", every, lambda unit: unit.nbytes, shown) as each_unit:
                for position, unit in enumerate(each_unit):
                    for ahead in owing[position + 1 : position + 1 + looked_ahead]:
                        if ahead.pending and ahead.state is not Residency.FETCHING:
                            if ahead.state is Residency.AT_REST and not self.room.fits_settling(ahead.fetch_bytes):
                                break
                            self._start(ahead)
                    self.settle(unit)
