"""Which units are gathered, and when: acquire, prefetch in the learnt order, and room made by what is used last."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from outsize.move.comm import Ranks
from outsize.move.conveyor import Conveyor
from outsize.move.memory import Ledger
from outsize.move.shard import Pending
from outsize.move.transfer import again
from outsize.optim.update import ChunkUpdater
from outsize.plan.placement import Budgets
from outsize.plan.schedule import Schedule
from outsize.plan.sizes import format_bytes
from outsize.run.activations import in_backward
from outsize.run.buffers import PASSING_UNITS
from outsize.run.excess import Excess
from outsize.run.reduction import Reduction
from outsize.run.unit import Residency, Unit
from outsize.run.unit_gradients import UnitGradients

PREFETCH_UNITS = 8
"""How far ahead the streamer looks; memory usually allows less."""


@final
class Streamer:
    """Keeps gathered units within `capacity` bytes. See Note [Room]."""

    # Note [Room]
    # The gathered buffers and the gradients on their way to disk share one budget. A unit that must be there now takes
    # what it needs: first from gradients already written, then from the idle unit whose next use is furthest away
    # (Belady's rule; the learnt order tells the future), then by waiting for what gradients have taken. A prefetch
    # takes only free room or the room of a unit that is needed later than itself. Units in use are never touched; if
    # they alone exceed the budget (a `gathered` over everything, say), it is exceeded. That is logged when it begins,
    # and once more with the most that was needed, when less is. The capacity also leaves room for the gradient that
    # autograd is making; what takes only of that is no excess.

    # Note [The same on every rank]
    # Where units are split over ranks each fetch ends with a collective, so all must decide alike what is fetched, kept
    # and released. Then nothing is decided by what has arrived or been written by now: units count from the start
    # of their fetch to their release, a victim's writes are waited for, and the gradients of the last two units that
    # were reduced count as on their way to disk, whether they are or not, with what they take of the rank that has most
    # of them. They share the room of the units with the buffers in which gradients are collected. Outside a backward
    # both give way before any unit does.

    # Note [Room to collect]
    # Buffers for whole gradients are used again from unit to unit, so room for them is short only where units become
    # larger: at a head, at an embedding, whose gradients take more than a layer does. A unit that would be released
    # before its next use in any case makes room for them. A unit that would last is worth a read: then the backward
    # waits until the gradients that are on their way have come to rest.

    # Note [Units in the order of the model]
    # Where ranks use different units by design (`rounds`), each decides for itself what it keeps. A rank that needs a
    # unit which it has not says so, and all begin a round: every unit is gathered, in the order of the model, in a
    # backward from its end. Each rank starts these gathers when it needs a unit, or ahead while there is room. A rank
    # that has a unit takes part with what it has. A unit behind those of this round comes in another round. At the end
    # of a forward and of a backward a rank finishes its round, and takes part in others until nobody needs one.

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[UnitGradients],
        conveyor: Conveyor,
        updater: ChunkUpdater | None,
        slab_bytes: int,
        capacity: int,
        ledger: Ledger,
        budgets: Budgets,
        reduction: Reduction | None = None,
        rounds: Ranks | None = None,
        flight_room: int | None = None,
    ) -> None:
        """`flight_room`: bytes of host memory, beside an accelerator's, for gradients on their way to disk."""
        self.schedule = Schedule()
        self.wait_seconds = 0.0
        self._units = units
        self._gradients = gradients
        self._conveyor = conveyor
        self._updater = updater
        self._slab_bytes = slab_bytes
        self._planned_capacity = capacity
        self._ledger = ledger
        self._states = ("device/states", "host/states") if budgets.device is None else ("device/states",)
        self._planned_states = self._state_bytes()
        self._reduction = reduction  # None with one rank
        self._passing: deque[int] = deque(maxlen=PASSING_UNITS)  # bytes: see Note [The same on every rank]
        self._rounds = rounds  # see Note [Units in the order of the model]
        self._left: deque[Unit] = deque()  # what this round has still to gather
        self._lock = threading.RLock()
        self.last: Unit | None = None
        self._stopped: BaseException | None = None
        self._excess = Excess(budgets, ledger)
        self._flight_room = flight_room

    @property
    def _capacity(self) -> int:
        """Less what optimizer state has taken since: see Note [Frozen parameters] in api/shards.py."""
        return self._planned_capacity - (self._state_bytes() - self._planned_states)

    def _state_bytes(self) -> int:
        return sum(self._ledger.now.get(account, 0) for account in self._states)

    def acquire(self, unit: Unit) -> None:
        """Block until the unit's current values are gathered, its owed update included; then look ahead."""
        if unit is self.last and unit.current:
            return
        with self._lock:
            self._check_running()
            self.schedule.use(unit.index)
            self.last = unit
            while self._rounds is not None and unit.split and not self._has(unit):
                if self._left or self._another_round("backward" if in_backward() else "forward", needed=True):
                    self._take_part(self._left.popleft())
            self._bring(unit)
            self.prefetch()

    def bring(self, unit: Unit) -> None:
        """As `acquire`, for uses outside the model's own order (`gathered`, save, export): nothing is learnt."""
        with self._lock:
            self._check_running()
            self._bring(unit)

    def show(self, unit: Unit) -> None:
        """As `bring`, called by every rank for the same units."""
        with self._lock:
            self._check_running()
            if self._rounds is not None and unit.split:
                self._take_part(unit)
            self._bring(unit)

    def end_round(self) -> None:
        """Finish the round, if there is one."""
        with self._lock:
            while self._left:
                self._take_part(self._left.popleft())

    def end_pass(self, kind: str) -> None:
        """A forward or a backward is over. See Note [Units in the order of the model]."""
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
        if unit.state is Residency.FETCHING:
            self._arrive(unit)
        return unit.current

    def finished(self, unit: Unit) -> None:
        """The unit's gradients are complete: it is not needed before the next forward."""
        unit.leave()
        if self.last is unit:
            self.last = None

    def prefetch(self) -> None:
        """Start to fetch the units that the learnt order expects next, as far as room allows."""
        with self._lock:
            while self._left and (self._left[0].state is not Residency.AT_REST or self._room_for(self._left[0])):
                self._take_part(self._left.popleft())
            if self._rounds is not None:
                return
            for index in self.schedule.upcoming(PREFETCH_UNITS):
                unit = self._units[index]
                if unit.state is Residency.FETCHING or unit.current:
                    continue
                if unit.state is Residency.AT_REST and not self._room_for(unit):
                    return
                try:
                    unit.fetch(self._conveyor, self._updater, self._slab_bytes)
                except torch.OutOfMemoryError:  # nothing has changed, and nobody needs the unit yet
                    return

    def owe(self, unit: Unit, pending: Pending) -> None:
        """Mark an update that the unit's next fetch runs; one that it still owes is run first."""
        with self._lock:
            self._check_running()
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
            unit.fetch(self._conveyor, self._updater, self._slab_bytes)
            return True

    def settle(self, unit: Unit) -> None:
        """Run the update that the unit still owes."""
        with self._lock:
            self._check_running()
            if unit.pending:
                self._bring(unit)
            elif unit.state is Residency.FETCHING:
                self._arrive(unit)

    def settle_viewed(self) -> None:
        """Run the updates that are owed to what somebody holds a view of: the view shows the step at once."""
        for unit in self._units:
            if unit.state is not Residency.AT_REST and not unit.current and unit.viewed:
                self.settle(unit)
                unit.shard.buffer.use()

    def settle_all(self) -> None:
        """Run every update that is owed, several units on their way at once."""
        with self._lock:
            self._check_running()
            owing = [unit for unit in self._units if unit.pending]
            for position, unit in enumerate(owing):
                for ahead in owing[position + 1 : position + 1 + PREFETCH_UNITS]:
                    if ahead.pending and ahead.state is not Residency.FETCHING:
                        if ahead.state is Residency.AT_REST and not self._free_room(ahead.nbytes):
                            break
                        ahead.fetch(self._conveyor, self._updater, self._slab_bytes)
                self.settle(unit)
            for unit in self._units:
                self.settle(unit)

    def make_room(self, nbytes: int) -> None:
        """Make room for `nbytes` of gradients, waiting for writes if need be."""
        with self._lock:
            if self._reduction is None and self._flight_room is None:
                self._make_room(nbytes, None)
                return
            self._drop_written_grads()
            room = max(sum(self._passing), PASSING_UNITS * nbytes)  # more where sums are wider than gradients
            room = room if self._flight_room is None else self._flight_room
            while self._grads_in_flight + nbytes > room and self._flush_grads():
                continue

    def make_room_to_rest(self, nbytes: int) -> None:
        """With several ranks: a unit's gradients are about to be laid to rest, which takes so much of any rank."""
        assert self._reduction is not None
        with self._lock:
            if len(self._passing) == PASSING_UNITS:
                self._passing.popleft()
            if self._in_use + nbytes > self._capacity:
                self._reduction.buffers.drop_free()
            self._make_room(nbytes, None)
            self._passing.append(nbytes)

    def make_room_to_collect(self, nbytes: int) -> None:
        """Make room for a buffer in which gradients are collected. See Note [Room to collect]."""
        assert self._reduction is not None
        with self._lock:
            while self._in_use + nbytes > self._capacity:
                if self._reduction.buffers.drop_free():
                    continue
                victim = self._victim()
                if victim is None or self._would_last(victim):
                    break
                self._release(victim)
            else:
                return
            self._let_gradients_pass()
            self._make_room(nbytes, None)

    def return_room(self) -> None:
        """Release what units in use have taken above the budget, as far as they are not in use any more."""
        with self._lock:
            while self._in_use > self._capacity and (victim := self._victim()) is not None:
                self._release(victim)

    def drop_idle(self) -> None:
        """Release every unit that nothing uses; for tests and for memory that is wanted elsewhere."""
        with self._lock:
            for unit in self._units:
                if unit.state is Residency.FETCHING:
                    self._arrive(unit)
                if self._evictable(unit):
                    unit.await_written()
                    unit.release()

    def regather(self, unit: Unit) -> None:
        """What rests here of a unit was replaced on every rank: make a gathered copy that stays agree with it."""
        with self._lock:
            if self._rounds is not None:  # only what every rank has is gathered anew
                self.last = None
                if self._has(unit) and self._evictable(unit):
                    return self._release(unit)
            if unit.state is Residency.RESIDENT:
                unit.regather(self._conveyor)
                self._arrive(unit)

    def _bring(self, unit: Unit) -> None:
        if unit.state is Residency.FETCHING:
            self._arrive(unit)
        if unit.current:
            return
        self._fetch(unit)
        self._arrive(unit)

    def _take_part(self, unit: Unit) -> None:
        if unit.state is Residency.FETCHING:
            self._arrive(unit)
        if unit.current:
            unit.regather(self._conveyor)
        else:
            self._fetch(unit)

    def _fetch(self, unit: Unit) -> None:
        if unit.state is Residency.AT_REST:
            self._make_room(unit.nbytes, unit)
        while True:
            try:
                return unit.fetch(self._conveyor, self._updater, self._slab_bytes)
            except torch.OutOfMemoryError as error:  # activations may take more than the budget leaves them
                victim = self._victim()
                if victim is None or victim is unit:
                    raise torch.OutOfMemoryError(
                        f"no {format_bytes(unit.nbytes)} of memory are left on the device for unit {unit.name!r}: "
                        f"lower device_memory, so that more is left for activations, or recompute them with "
                        f"activations='recompute' ({error})"
                    ) from error
                self._release(victim)

    def _arrive(self, unit: Unit) -> None:
        began = time.perf_counter()
        try:
            unit.arrive()
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began

    def stop(self, error: BaseException) -> None:
        """The live state is no longer whole: refuse every further use of it."""
        if isinstance(error, Exception):
            self._stopped = self._stopped or again(error)

    def _check_running(self) -> None:
        if self._stopped is not None:
            cause = str(self._stopped) or type(self._stopped).__name__
            raise RuntimeError(
                f"training stopped after an error ({cause}); the state in memory is no longer whole: restart "
                f"and load the last checkpoint with outsize.load"
            ) from self._stopped

    @property
    def _in_use(self) -> int:
        resident = self._ledger.now.get("device/resident", 0)
        if self._reduction is None:
            return resident + (self._grads_in_flight if self._flight_room is None else 0)
        return resident + self._reduction.buffers.held + sum(self._passing)

    @property
    def _grads_in_flight(self) -> int:
        return self._ledger.now.get("host/grads in flight", 0)

    def _room_for(self, unit: Unit) -> bool:
        """Whether `unit` fits now, after releasing idle units that are needed later than it."""
        self._drop_written_grads()
        self._note_arrivals()
        when = self.schedule.next_use(unit.index)
        needed = unit.nbytes + self._still_to_pass()
        while self._in_use + needed > self._capacity:
            if self._give_way():
                continue
            victim = self._victim(written=True) if self._reduction is None else self._victim()
            if victim is None or self.schedule.next_use(victim.index) <= when:
                return False
            self._release(victim)
        return True

    def _free_room(self, nbytes: int) -> bool:
        """Whether so many bytes are free, after releasing idle units whose values are all written."""
        self._drop_written_grads()
        while self._in_use + nbytes > self._capacity:
            if self._give_way():
                continue
            victim = self._victim(written=self._reduction is None, arrived=True)
            if victim is None or victim.pending:
                return False
            self._release(victim)
        return True

    def _make_room(self, nbytes: int, keep: Unit | None) -> None:
        self._drop_written_grads()
        self._note_arrivals()
        while self._in_use + nbytes > self._capacity:
            if self._give_way():
                continue
            victim = (self._victim(written=True) if self._reduction is None else None) or self._victim()
            if victim is not None and victim is not keep:
                self._release(victim)
            elif not self._let_gradients_pass() and not self._await_prefetch(keep):
                wanted = None if keep is None else keep.name
                self._excess.note(nbytes, wanted, lambda: self._names_in_use(keep))
                return
        self._excess.log()

    def _still_to_pass(self) -> int:
        """What the running backward is going to take for the gradients of the unit in use and of the one before."""
        if self._reduction is None or self.last is None or not in_backward():
            return 0
        coming = PASSING_UNITS * self._gradients[self.last.index].passing_bytes
        return max(coming - self._reduction.buffers.held - sum(self._passing), 0)

    def _would_last(self, unit: Unit) -> bool:
        """Whether what is used before the unit's next use leaves room for it."""
        room = self._capacity - unit.nbytes
        for index in self.schedule.upcoming(len(self._units)):
            if index == unit.index:
                return True
            room -= self._units[index].nbytes
            if room < 0:
                break
        return False

    def _give_way(self) -> bool:
        """Outside a backward gradients keep nothing on their way; whether that has made room."""
        return self._reduction is not None and not in_backward() and self._let_gradients_pass()

    def _let_gradients_pass(self) -> bool:
        """Wait until gradients on their way have come to rest, or those of one unit; whether that has made room."""
        if self._reduction is None:
            return self._flush_grads()
        before = self._in_use
        self._reduction.flush()
        while self._flush_grads():
            continue
        self._passing.clear()
        self._reduction.buffers.drop_free()
        return self._in_use < before

    def _note_arrivals(self) -> None:
        """What was updated in the backward may be released once it is done."""
        if self._reduction is not None:
            return
        for unit in self._units:
            if unit.state is Residency.FETCHING and unit.fetched:
                self._arrive(unit)

    def _await_prefetch(self, keep: Unit | None) -> bool:
        """Let a unit that was prefetched arrive, so that it can be released; whether there was one."""
        for unit in self._units:
            if unit.state is Residency.FETCHING and unit is not keep and not unit.always_resident and not unit.holds:
                self._arrive(unit)
                return True
        return False

    def _release(self, unit: Unit) -> None:
        """Give up the room of an idle unit, which may still be on its way."""
        if unit.state is Residency.FETCHING:
            self._arrive(unit)
        self._await_written(unit)
        unit.release()

    def _await_written(self, unit: Unit) -> None:
        began = time.perf_counter()
        try:
            unit.await_written()
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _victim(self, written: bool = False, arrived: bool = False) -> Unit | None:
        """The idle unit whose next use is furthest away. With several ranks it may be on its way: who decides alike may
        not ask what has arrived, and a unit that is updated in the backward stays on its way until somebody asks."""
        states = (
            {Residency.RESIDENT} if self._reduction is None or arrived else {Residency.RESIDENT, Residency.FETCHING}
        )
        candidates = [
            unit for unit in self._units if unit.state in states and self._idle(unit) and (unit.written or not written)
        ]
        return max(candidates, key=lambda unit: self.schedule.next_use(unit.index), default=None)

    def _evictable(self, unit: Unit) -> bool:
        return unit.state is Residency.RESIDENT and self._idle(unit)

    def _idle(self, unit: Unit) -> bool:
        return not (unit.always_resident or unit.holds or unit is self.last or unit.viewed)

    def _drop_written_grads(self) -> None:
        for each in self._gradients:
            try:
                each.drop_if_written()
            except OSError as error:
                self.stop(error)
                raise

    def _flush_grads(self) -> bool:
        """Write out and drop the gradients of one unit; whether there was one."""
        began = time.perf_counter()
        try:
            return any(each.flush_and_drop() for each in self._gradients)
        except OSError as error:
            self.stop(error)
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _names_in_use(self, wanted: Unit | None) -> list[str]:
        return [unit.name for unit in self._units if self._in_the_way(unit) and unit is not wanted]

    def _in_the_way(self, unit: Unit) -> bool:
        return unit.state is not Residency.AT_REST and not unit.always_resident and not self._idle(unit)
