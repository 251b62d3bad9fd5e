"""How a rank waits for the others: it asks again and again, looks after them meanwhile, and says what it waits for."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from outsize.move.purpose import Purpose
from outsize.move.watch import Standstill, Watch

logger = logging.getLogger("outsize")

# Note [Nobody hangs]
# A rank waits by asking again and again, never inside the library. Meanwhile a thread looks after the others: each rank
# counts in the store twice a second, and looks whether its neighbour counts; the word of a rank that has failed, ended
# or stopped counting is left for all, and ends the waiting of all others, with its number in the error. One that is
# slow but alive is waited for. Where every rank waits for others to agree, and each for one that is waiting elsewhere,
# nobody will ever come: each says what it waits for, and all end. What was agreed on is never a reason to end: all have
# begun it, and who is still at it may be short of time or memory.
# Who gives up leaves collectives behind that a rank which is alive, and does not answer, keeps from ending. Closing
# their groups would wait for them: they stay open until the process ends.

LANES = ("gather", "reduce", "control", "save")
MEET = "prepare"
"""Among the lanes, the place where ranks wait for each other to share one more model."""

STUCK_SECONDS = 3.0
"""Waiting for so long is worth telling the others about."""

GRACE_SECONDS = 1.0
"""A rank that ends has given its part to the last collective; the others may still be receiving it."""

LOOK = timedelta(seconds=0.25)
"""How often one who waits looks whether the others are still there."""

POLL_SECONDS = 0.0002
"""How often one who waits for an accelerator asks: its library takes the end of a wait for the end of the work."""

MEETING = timedelta(minutes=10)
"""How far apart ranks may come to `prepare`."""

MEETING_POLL_SECONDS = 0.02
MEETING_WORD_SECONDS = 10.0
"""After so long a wait for the others the log says for whom."""


class RanksError(RuntimeError):
    """The ranks of a run do not go together any more: one has gone another way, has failed or is gone."""


@final
class Waiting:
    """Of one rank for the others with which it shares a model."""

    def __init__(
        self,
        members: Sequence[int],
        number: int,
        stores: tuple[Any, Any],
        words: Callable[[Purpose], str],
        busy: Callable[[], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Meets the others. `members`: their ranks in the job; `number`: of the model; `stores`: the place of the model
        in that of the job, and once more on a connection of its own; `words`: for errors; `busy`: whether a gathering
        that was agreed on is not over here; `fail`: tells all ranks that this one cannot go on."""
        self.members = list(members)
        self.rank = self.members.index(dist.get_rank())
        self._number = number
        self._words, self._busy, self._fail = words, busy, fail
        self._agreeing: dict[str, tuple[float, Purpose]] = {}  # by lane: since when, and on what
        self._come = dict.fromkeys((*LANES, MEET), 0)  # how often this rank has come to agree
        self._promised = dict.fromkeys((*LANES, MEET), 0)  # how often its conveyor will have, once it has run its queue
        self._blocked = 0
        self._meet(stores[0])
        self.watch = Watch(stores[1], self.rank, len(self.members), self.stuck)
        with _lock:
            _all.add(self)

    def _meet(self, store: Any) -> None:
        """Wait until all ranks are here. Where they share a model already, its watch finds out if they never will."""
        store.set(f"come/{self.rank}", "1")
        purpose, began = Purpose(MEET), time.monotonic()
        with _lock:
            models = [each for each in _all if each.members == self.members and not each.watch.closed]
        shared = min(models, key=lambda each: each._number, default=None)
        if shared is not None:
            shared._come[MEET] += 1
            shared._agreeing[MEET] = began, purpose
        try:
            told = False
            while missing := [place for place in range(len(self.members)) if not store.check([f"come/{place}"])]:
                waited = time.monotonic() - began
                if shared is not None and not shared.watch.over:
                    shared.check(purpose)
                if waited > MEETING.total_seconds():
                    raise RanksError(
                        f"{self.named(missing)} did not come to outsize.prepare within {MEETING}: every rank must "
                        f"call it, as often as the others"
                    )
                if waited > MEETING_WORD_SECONDS and not told:
                    told = True
                    here, away = self.named([self.rank]), self.named(missing)
                    logger.warning("%s waits in outsize.prepare for %s, as every rank must call it", here, away)
                time.sleep(MEETING_POLL_SECONDS)
        finally:
            if shared is not None:
                del shared._agreeing[MEET]

    # -- what this rank says of itself -------------------------------------------------------------------------------

    @contextmanager
    def agreeing(self, lane: str, purpose: Purpose) -> Iterator[None]:
        """This rank has come to agree with the others in the block."""
        self._come[lane] += 1
        self._agreeing[lane] = time.monotonic(), purpose
        try:
            yield
        finally:
            del self._agreeing[lane]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The user's loop waits in the block for what the conveyor does."""
        self._blocked += 1
        try:
            yield
        finally:
            self._blocked -= 1

    def promise(self, lane: str, times: int) -> None:
        """The conveyor will come to agree so many times more, after what it was asked for before."""
        self._promised[lane] += times

    def stuck(self) -> Standstill | None:
        """What the user's loop has been waiting for, for some time, from these ranks, of whatever model; None while it
        goes on."""
        with _lock:
            models = [each for each in _all if each.members == self.members]
        come = {
            each._name_of(lane): max(count, each._promised[lane])
            for each in models
            for lane, count in each._come.items()
        }
        found = (each._stuck_here(come) for each in models)
        return next((each for each in found if each is not None), None)

    def _stuck_here(self, come: Mapping[str, int]) -> Standstill | None:
        if self._busy():
            return None  # slow at most: who waits for it waits for what was agreed on
        lanes = ("control", "reduce", MEET, "gather") if self._blocked else ("control", "reduce", MEET)
        for lane in lanes:
            since, purpose = self._agreeing.get(lane, (0.0, None))
            if purpose is not None and time.monotonic() - since > STUCK_SECONDS:
                of_this = f"{self._words(purpose)} of model {self._number}"
                words = "outsize.prepare of another model" if lane == MEET else of_this
                return Standstill(words, self._name_of(lane), self._come[lane], come)
        return None

    def _name_of(self, lane: str) -> str:
        return f"{self._number}/{lane}"

    # -- waiting -----------------------------------------------------------------------------------------------------

    def until_over(self, work: Any, purpose: Purpose, asking: bool) -> None:
        """Block until the collective is over. Raises `RanksError` where it never will be.

        `asking`: it is an accelerator's, whose library must not be waited in for a limited time."""
        pause = _pause_asking if asking else _pause
        while not work.is_completed():
            if not pause(work):
                self.check(purpose)

    def finish(self, work: Any, purpose: Purpose) -> None:
        """Take the result of a collective that is over. Raises `RanksError` where it went wrong."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(self.watch.find_gone(), purpose) from error

    def check(self, purpose: Purpose) -> None:
        """Raise `RanksError` if there is nobody to wait for any more."""
        if self.watch.closed:
            raise RanksError(f"outsize was closed while {self.named([self.rank])} was in {self._words(purpose)}")
        if self.watch.apart:
            raise self.different_ways(self.watch.apart)
        said = self.watch.said
        if said is None or time.monotonic() - self.watch.since < GRACE_SECONDS:  # what has begun may still arrive
            return
        raise self._gone(said, purpose)

    # -- errors ------------------------------------------------------------------------------------------------------

    def different_ways(self, words_of: Sequence[str]) -> RanksError:
        """The error of ranks of which each is about to do what its words say; the others hear of it."""
        error = RanksError(
            f"the ranks have gone different ways. {self.who_says_what(words_of)}. Every rank must run the same "
            f"modules in the same order, take the same number of steps, and call prepare, save, load, export and "
            f"gathered with the others; the state at rest is that of the last completed step"
        )
        self._fail(error)
        return error

    def _gone(self, said: tuple[int | None, str] | None, purpose: Purpose) -> RanksError:
        place, what = said if said is not None else (None, "a rank is gone")
        who = "" if place is None else f"{self.named([place])} of {dist.get_world_size()} "
        remedy = "" if purpose.kind == MEET else ": start the job again and load the last checkpoint"
        error = RanksError(f"{who}{what} while {self.named([self.rank])} was in {self._words(purpose)}{remedy}")
        self._fail(error)
        return error

    def named(self, places: Sequence[int]) -> str:
        """Members by their ranks in the job, which a mesh makes others than their places here."""
        ranks = [self.members[place] for place in places]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

    def who_says_what(self, words_of: Sequence[str]) -> str:
        """What each rank says, the ranks that say the same together."""
        said: dict[str, list[int]] = {}
        for place, words in enumerate(words_of):
            said.setdefault(words, []).append(place)
        return "; ".join(f"{self.named(places)}: {words}" for words, places in said.items())


def _pause(work: Any) -> bool:
    """Wait for some time; whether the work may be over."""
    try:
        work.wait(LOOK)
    except RuntimeError:  # the time is over, or it went wrong
        return bool(work.is_completed())
    return True


def _pause_asking(work: Any) -> bool:
    """As `_pause`, without a wait that has an end: NCCL gives the communicator up then."""
    until = time.monotonic() + LOOK.total_seconds()
    while time.monotonic() < until:
        if work.is_completed():
            return True
        time.sleep(POLL_SECONDS)
    return False


_all: weakref.WeakSet[Waiting] = weakref.WeakSet()
_lock = threading.Lock()  # the watches look at all
