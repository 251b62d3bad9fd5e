"""The memory that gathered units and gradients on their way share, and who gives way where it is short."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import final

from outsize.move.memory import Ledger, bytes_on
from outsize.planning.placement import Budgets, format_at_least
from outsize.planning.schedule import Schedule
from outsize.planning.sizes import format_bytes
from outsize.run.activations import in_backward
from outsize.run.buffers import PASSING_UNITS, collecting_sizes
from outsize.run.live_state import LiveState
from outsize.run.reduction import Reduction
from outsize.run.resting_place import RestingPlace
from outsize.run.unit import Residency, Unit

NAMED_UNITS = 4
"""How many units a warning names; it counts the others."""

logger = logging.getLogger("outsize")

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


@final
@dataclass(eq=False, repr=False)
class Room:
    """Keeps gathered units within `capacity` bytes."""

    _units: Sequence[Unit]
    _places: Sequence[RestingPlace]
    _live: LiveState
    planned_capacity: int
    ledger: Ledger
    budgets: InitVar[Budgets]
    _reduction: Reduction | None = None  # None with one rank
    _flight_room: int | None = None  # on the host of an accelerator, for gradients on their way to disk

    def __post_init__(self, budgets: Budgets) -> None:
        self.lock = threading.RLock()  # a backward may have several threads
        self.schedule = Schedule()
        self.last: Unit | None = None
        self.excess = OverBudget(budgets, self.ledger)
        self.started = dict.fromkeys(self._units)  # each unit that is not at rest, and few others
        self._states = ("device/states", "host/states") if budgets.device is None else ("device/states",)
        self._planned_states = self._state_bytes()
        self._passing: deque[int] = deque(maxlen=PASSING_UNITS)  # bytes: see Note [The same on every rank]

    @property
    def in_use(self) -> int:
        resident = self.ledger.now.get("device/resident", 0)
        if self._reduction is None:
            return resident + (self._grads_in_flight if self._flight_room is None else 0)
        return resident + self._reduction.buffers.held + sum(self._passing)

    @property
    def _capacity(self) -> int:
        """Less what optimizer state has taken since: see Note [Frozen parameters] in api/shards.py."""
        return self.planned_capacity - (self._state_bytes() - self._planned_states)

    def _state_bytes(self) -> int:
        return sum(self.ledger.now.get(account, 0) for account in self._states)

    @property
    def _here(self) -> Iterable[Unit]:
        """The units that are not at rest. To look at thousands takes longer than to read a small one."""
        self.started = {unit: None for unit in self.started if unit.state is not Residency.AT_REST}
        return self.started

    def holds_beside_gradients(self, unit: Unit) -> bool:
        """Whether the unit has room beside its own gradients on their way."""
        passing = self._places[unit.index].passing_bytes if self._flight_room is None else 0
        return self._reduction is not None or unit.nbytes + passing <= self._capacity

    # -- for units ---------------------------------------------------------------------------------------------------

    def fits(self, unit: Unit) -> bool:
        """Whether `unit` fits now, after releasing idle units that are needed later than it."""
        self._take_stock()
        when = self.schedule.next_use(unit.index)
        needed = unit.fetch_bytes + self._still_to_pass()
        while self.in_use + needed > self._capacity:
            if self._give_way():
                continue
            victim = self._victim(written=self._reduction is None)
            if victim is None or self.schedule.next_use(victim.index) <= when:
                unit.forgo()
                return False
            self.release(victim, unit)
        return True

    def fits_settling(self, nbytes: int) -> bool:
        """Whether so many bytes are free, after releasing idle units whose values are all written."""
        self._take_stock()
        while self.in_use + nbytes > self._capacity:
            if self._give_way():
                continue
            victim = self._victim(written=self._reduction is None, arrived=True)
            if victim is None or victim.pending:
                return False
            self.release(victim)
        return True

    def make_for(self, unit: Unit | None, nbytes: int) -> None:
        """Make room for a unit, or for gradients if that is None; above the budget if nothing else helps."""
        self._take_stock()
        while self.in_use + nbytes > self._capacity:
            if self._give_way():
                continue
            victim = (self._victim(written=True) if self._reduction is None else None) or self._victim()
            if victim is not None and victim is not unit:
                self.release(victim, unit)
            elif not self._let_gradients_pass() and not self._await_prefetch(unit):
                self.excess.note(nbytes, None if unit is None else unit.name, lambda: self._names_in_use(unit))
                return
        self.excess.log()

    def release_one(self, wanted: Unit) -> bool:
        """Release the idle unit whose next use is furthest away; whether there is one beside the `wanted`."""
        victim = self._victim()
        if victim is not None and victim is not wanted:
            self.release(victim)
        return victim is not None and victim is not wanted

    def return_excess(self) -> None:
        """Release what units in use have taken above the budget, as far as they are not in use any more."""
        with self.lock:
            while self.in_use > self._capacity and (victim := self._victim()) is not None:
                self.release(victim)

    def drop_idle(self) -> None:
        """Release every unit that nothing uses."""
        for unit in self._units:
            self.arrive(unit)
            if self.is_evictable(unit):
                self.release(unit)

    def release(self, unit: Unit, heir: Unit | None = None) -> None:
        """Give up the room of an idle unit, which may still be on its way. `heir`: what is fetched next."""
        self.arrive(unit)
        with self._live.waiting():
            unit.await_written()
        if unit.state is Residency.RESIDENT:  # one that is used in tiles may only have paid its update
            unit.release(heir)

    def arrive(self, unit: Unit) -> None:
        """Wait for the unit if it is on its way."""
        if unit.state is Residency.FETCHING:
            with self._live.waiting():
                unit.arrive()

    # -- for gradients -----------------------------------------------------------------------------------------------

    def make(self, nbytes: int) -> None:
        """Make room for `nbytes` of gradients, waiting for writes if need be."""
        with self.lock:
            if self._reduction is None and self._flight_room is None:
                return self.make_for(None, nbytes)
            self._take_stock()
            # More where sums are wider than gradients.
            room = max(sum(self._passing), PASSING_UNITS * nbytes) if self._flight_room is None else self._flight_room
            while self._grads_in_flight + nbytes > room and self._flush_grads():
                continue

    def make_to_rest(self, nbytes: int) -> None:
        """With several ranks: a unit's gradients are about to be laid to rest, which takes so much of any rank."""
        with self.lock:
            assert self._reduction is not None
            if len(self._passing) == PASSING_UNITS:
                self._passing.popleft()
            if self.in_use + nbytes > self._capacity:
                self._reduction.buffers.drop_free()
            self.make_for(None, nbytes)
            self._passing.append(nbytes)

    def make_to_collect(self, nbytes: int) -> None:
        """Make room for a buffer in which gradients are collected. See Note [Room to collect]."""
        with self.lock:
            assert self._reduction is not None
            while self.in_use + nbytes > self._capacity:
                if self._reduction.buffers.drop_free():
                    continue
                victim = self._victim()
                if victim is None or self._would_last(victim):
                    self._let_gradients_pass()
                    return self.make_for(None, nbytes)
                self.release(victim)

    @property
    def _grads_in_flight(self) -> int:
        return self.ledger.now.get("host/grads in flight", 0)

    def _still_to_pass(self) -> int:
        """What the running backward is going to take for the gradients of the unit in use and of the one before."""
        if self._reduction is None or self.last is None or not in_backward():
            return 0
        if not any(param.requires_grad for param in self.last.parameters.values()):
            return 0
        collected = sum(collecting_sizes(self.last.shard.whole, self._reduction.dtype))
        coming = PASSING_UNITS * (collected + self._places[self.last.index].passing_bytes)
        return max(coming - self._reduction.buffers.held - sum(self._passing), 0)

    def _give_way(self) -> bool:
        """Outside a backward gradients keep nothing on their way; whether that has made room."""
        return self._reduction is not None and not in_backward() and self._let_gradients_pass()

    def _let_gradients_pass(self) -> bool:
        """Wait until gradients on their way have come to rest, or those of one unit; whether that has made room."""
        if self._reduction is None:
            return self._flush_grads()
        before = self.in_use
        self._reduction.flush()
        while self._flush_grads():
            continue
        self._passing.clear()
        self._reduction.buffers.drop_free()
        return self.in_use < before

    def make_way(self) -> None:
        """Gradients that are on disk by now, and freed memory, make way for what operations and gradients take."""
        with self.lock:
            self._take_stock(of_units=False)
        self.ledger.make_way()

    def _take_stock(self, of_units: bool = True) -> None:
        """Gradients that are on disk by now take no memory. A unit that was updated in the backward may be released."""
        if self._grads_in_flight:
            with self._live.waiting():
                for each in self._places:
                    each.drop_if_written()
        for unit in self._here if of_units and self._reduction is None else ():
            if unit.state is Residency.FETCHING and unit.fetched:
                self.arrive(unit)

    def _flush_grads(self) -> bool:
        """Write out and drop the gradients of one unit; whether there was one."""
        with self._live.waiting():
            return any(each.flush_and_drop() for each in self._places)

    # -- who gives way -------------------------------------------------------------------------------------------------

    def _victim(self, written: bool = False, arrived: bool = False) -> Unit | None:
        """The idle unit whose next use is furthest away. With several ranks it may be on its way: who decides alike may
        not ask what has arrived, and a unit that is updated in the backward stays on its way until somebody asks."""
        arrived = arrived or self._reduction is None
        here = [unit for unit in self._here if unit.state is Residency.RESIDENT or not arrived]
        candidates = [unit for unit in here if self._idle(unit) and (unit.written or not written)]
        return max(candidates, key=lambda unit: (self.schedule.next_use(unit.index), -unit.index), default=None)

    def is_evictable(self, unit: Unit) -> bool:
        return unit.state is Residency.RESIDENT and self._idle(unit)

    def _idle(self, unit: Unit) -> bool:
        return not (unit.always_resident or unit.holds or unit is self.last or unit.viewed)

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

    def _await_prefetch(self, keep: Unit | None) -> bool:
        """Let a unit that was prefetched arrive, so that it can be released; whether there was one."""
        for unit in self._here:
            if unit.state is Residency.FETCHING and unit is not keep and not unit.always_resident and not unit.holds:
                self.arrive(unit)
                return True
        return False

    def _names_in_use(self, wanted: Unit | None) -> list[str]:
        return [unit.name for unit in self._here if not (unit is wanted or unit.always_resident or self._idle(unit))]


@final
class OverBudget:
    """Logs when the budget is exceeded for the first time, and once more with the most that was needed."""

    def __init__(self, budgets: Budgets, ledger: Ledger) -> None:
        self.logged = False
        self.most_needed = 0
        self._budgets = budgets
        self._ledger = ledger
        self._what: str | None = None  # what was in use at the most that was needed, if that is not logged yet

    def note(self, nbytes: int, wanted: str | None, in_use: Callable[[], Sequence[str]]) -> None:
        """What is in use exceeds the capacity by `nbytes` for the unit `wanted`, or for gradients if that is None.

        Nothing, if it is within the user's budget or has been more already. `in_use` gives the names of other units.
        """
        on_cpu = self._budgets.device is None
        needed = nbytes + bytes_on(self._budgets.sharing("device"), self._ledger.now)
        if needed <= max(self._budgets.host if on_cpu else self._budgets.computing[1], self.most_needed):
            return
        what = "gradients" if wanted is None else f"unit {wanted!r}"
        others = in_use()
        before = (
            f"{_listed(others)} in use at once, with {format_bytes(nbytes)} more" if others else format_bytes(nbytes)
        )
        self._what = f"{before} for {what}"
        self.most_needed = needed
        if not self.logged:
            self.log()

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Nothing is logged in the block: it takes what it needs, and no training goes on in it."""
        before = self.most_needed, self._what
        self.most_needed, self._what = sys.maxsize, None
        try:
            yield
        finally:
            self.most_needed, self._what = before

    def log(self) -> None:
        """Log the most that was needed, and the budget that would hold it, unless that was logged before."""
        if self._what is None:
            return
        self.logged = True
        on_cpu = self._budgets.device is None
        field, budget = ("host_memory", self._budgets.host) if on_cpu else self._budgets.computing
        staging = self._ledger.now.get("host/staging", 0) if on_cpu else 0
        logger.warning(
            "%s: that takes %s of %s=%s; going on, above the budget. Raise %s to at least %s, or use fewer of them in "
            "one forward or one outsize.gathered",
            self._what,
            format_bytes(self.most_needed),
            field,
            format_bytes(budget),
            field,
            format_at_least(self._budgets.least_beside_free_staging(self.most_needed - staging)),
        )
        self._what = None


def _listed(names: Sequence[str]) -> str:
    """One unit or more, up to four of them by name."""
    quoted = [repr(name) for name in names]
    if len(quoted) == 1:
        return f"unit {quoted[0]} is"
    if len(quoted) > NAMED_UNITS:
        quoted = [*quoted[:NAMED_UNITS], f"{len(quoted) - NAMED_UNITS} more"]
    return f"units {', '.join(quoted)} are"
