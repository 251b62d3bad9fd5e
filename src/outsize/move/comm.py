"""The collectives of one rank: all-gather and reduce-scatter of one flat buffer, and agreement on what comes next."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outsize.move.purpose import AHEAD, OFFER, WANT, Purpose, Turn, decode, encode, turn_of, words_for
from outsize.move.watch import Standstill, Watch

logger = logging.getLogger("outsize")

# Note [Lanes]
# Collectives of one group must start in the same order on every rank. Those of the conveyor's thread, those of the
# backward and those that the user's loop asks for run beside each other, so each kind has a group of its own: a lane.
# Before a collective the lane agrees on what it is for (a few bytes): ranks that have gone different ways find out
# before a byte of one lands in the place of another.
# On an accelerator each lane's collectives have a stream of their own, which NCCL keeps. It begins behind what is in
# the stream that is current: for a gathering the one that fills the buffers, beside the computation; for a reduction
# the backward's, whose gradients it takes.

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

MEETING_POLL_SECONDS = 0.02

POLL_SECONDS = 0.0002
"""How often one who waits for an accelerator asks: its library takes the end of a wait for the end of the work."""

MEETING = timedelta(minutes=10)
"""How far apart ranks may come to `prepare`."""

MEETING_WORD_SECONDS = 10.0
"""After so long a wait for the others the log says for whom."""

PATIENCE = timedelta(days=7)
"""Of the groups themselves: how long to wait is decided here."""


class RanksError(RuntimeError):
    """The ranks of a run do not go together any more: one has gone another way, has failed or is gone."""


@dataclass
class Counts:
    """Elements that this rank has given to collectives, by kind, and how many collectives there were."""

    elements: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, numel: int) -> None:
        self.elements[kind] = self.elements.get(kind, 0) + numel
        self.calls[kind] = self.calls.get(kind, 0) + 1


class Giving(Protocol):
    """What a rank does for the others while it waits for them."""

    ready: set[int]
    """Units whose gradients are complete here."""

    def give(self, turn: Turn) -> None:
        """Take part in a gathering."""
        ...

    def busy(self) -> bool:
        """Whether a gathering that was agreed on is not over here."""
        ...

    def reduce(self, units: Sequence[int]) -> None:
        """Reduce what is ready on all ranks."""
        ...


@final
class Reducing:
    """A reduction on its way."""

    def __init__(self, ranks: Ranks, work: Any, purpose: Purpose, own: torch.Tensor) -> None:
        self.ranks, self._work, self._purpose, self._own = ranks, work, purpose, own

    def wait(self) -> torch.Tensor:
        """The mean, as far as this rank keeps it. Blocks."""
        self.ranks._await(self._work, self._purpose, moves=True)
        return self._own.div_(self.ranks.size)


@final
class Ranks:
    """The data-parallel ranks that share one model. All methods that move data block and are called by every rank."""

    def __init__(
        self, members: Sequence[int], backend: str = "gloo", copies: Sequence[int] = (), tensor: Sequence[int] = ()
    ) -> None:
        """`members`: the global ranks, this one among them; every rank of the job must make the group. `backend`: of
        what is moved; what is agreed on goes by gloo. `copies`: the ranks that hold the same part as this one, where
        the whole model is there several times (a second dimension of a mesh). `tensor`: those that hold other parts of
        the same parameters, by torch's tensor parallelism; outsize only agrees with them."""
        self.members = list(members)
        self.size = len(members)
        self.rank = self.members.index(dist.get_rank())
        self.names: list[str] = []  # of the units, for errors
        self.step = 0
        self.counts = Counts()
        self.giving: Giving | None = None  # where ranks use different units: see Note [Wanted units]
        number = next(_made)
        _listen_to_errors()
        store = _own_store(number, self.members)
        self._waiting: dict[str, tuple[float, Purpose]] = {}  # to agree, by lane: since when, and on what
        self._come = dict.fromkeys((*LANES, MEET), 0)  # how often this rank has come to agree
        self._promised = dict.fromkeys((*LANES, MEET), 0)  # how often its conveyor will have, once it has run its queue
        self._meet(store)
        self.copies = Ranks(copies, backend) if copies else None
        self.tensor = Ranks(tensor) if tensor else None
        self._of: weakref.ref[Ranks] | None = None  # the ranks whose `copies` or `tensor` these are
        for group in (self.copies, self.tensor):
            if group is not None:
                group._of = weakref.ref(self)
        self._agreeing: dict[str, Any] = {lane: self._open(lane, store) for lane in LANES}
        self._groups = dict(self._agreeing)
        if backend != "gloo":
            self._groups |= {lane: self._open_nccl(lane, store) for lane in LANES[:2]}
        self._gave_up = False
        self._blocked = 0
        self._watch = Watch(_own_store(number, self.members, apart=True), self.rank, self.size, self._stuck)
        self._number = number
        with _open_lock:
            _open.add(self)

    def _meet(self, store: Any) -> None:
        """Wait until all ranks are here. Where they share a model already, its watch finds out if they never will."""
        store.set(f"come/{self.rank}", "1")
        purpose, began = Purpose(MEET), time.monotonic()
        with _open_lock:
            models = [each for each in _open if each.members == self.members and not each._watch.closed]
        shared = min(models, key=lambda each: each._number, default=None)
        if shared is not None:
            shared._come[MEET] += 1
            shared._waiting[MEET] = began, purpose
        try:
            told = False
            while missing := [place for place in range(self.size) if not store.check([f"come/{place}"])]:
                waited = time.monotonic() - began
                if shared is not None:
                    shared._check_others(purpose)
                if waited > MEETING.total_seconds():
                    raise RanksError(
                        f"{self._named(missing)} did not come to outsize.prepare within {MEETING}: every rank must "
                        f"call it, as often as the others"
                    )
                if waited > MEETING_WORD_SECONDS and not told:
                    told = True
                    logger.warning(
                        "%s waits in outsize.prepare for %s, as every rank must call it",
                        self._named([self.rank]),
                        self._named(missing),
                    )
                time.sleep(MEETING_POLL_SECONDS)
        finally:
            if shared is not None:
                del shared._waiting[MEET]

    def _open(self, lane: str, store: Any) -> Any:
        own = distributed_c10d.PrefixStore(lane, store)
        try:
            group = dist.ProcessGroupGloo(own, self.rank, self.size, MEETING)
        except RuntimeError as error:
            raise RanksError(f"{_ranks(self.members)} could not be connected in outsize.prepare ({error})") from error
        group._set_default_timeout(PATIENCE)
        return group

    def _open_nccl(self, lane: str, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        own = distributed_c10d.PrefixStore(f"nccl-{lane}", store)
        return dist.ProcessGroupNCCL(own, self.rank, self.size, options)

    # -- what is moved -----------------------------------------------------------------------------------------------

    def all_gather(self, flat: torch.Tensor, unit: int, step: int) -> None:
        """Complete `flat` (1-D, a multiple of `size`), of which this rank has its own part in place.

        `step` is that in which it was asked for: it may run behind the user's loop.
        """
        purpose = Purpose("gather", unit, step, flat.numel())
        share = flat.numel() // self.size
        own = flat[self.rank * share : (self.rank + 1) * share]
        self._agree("gather", purpose)
        self._await(self._groups["gather"]._allgather_base(flat, own), purpose, moves=True)
        self.counts.add("gather", flat.numel())

    def reduce_scatter(self, flat: torch.Tensor, unit: int) -> Reducing:
        """Start to find this rank's part of the mean of `flat` over the ranks; `flat` is spent."""
        purpose = Purpose("reduce", unit, self.step, flat.numel())
        share = flat.numel() // self.size
        self._agree("reduce", purpose)
        group = self._groups["reduce"]
        self.counts.add("reduce", flat.numel())
        if flat.device.type == "cpu":  # gloo's own reduce-scatter takes twice the time of an all-reduce
            own = flat[self.rank * share : (self.rank + 1) * share]
            return Reducing(self, _all_reduce(group, flat), purpose, own)
        own = flat.new_empty(share)
        return Reducing(self, group._reduce_scatter_base(own, flat), purpose, own)

    def all_reduce(self, flat: torch.Tensor, unit: int) -> Reducing:
        """Start to replace `flat` by its mean over the ranks."""
        purpose = Purpose("reduce", unit, self.step, flat.numel())
        self._agree("reduce", purpose)
        self.counts.add("reduce", 2 * flat.numel())
        return Reducing(self, _all_reduce(self._groups["reduce"], flat), purpose, flat)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The user's loop waits in the block for what the conveyor does."""
        self._blocked += 1
        try:
            yield
        finally:
            self._blocked -= 1

    def _stuck(self) -> Standstill | None:
        """What the user's loop has been waiting for, for some time, from these ranks, of whatever model; None while it
        goes on."""
        with _open_lock:
            models = [each for each in _open if each.members == self.members]
        come = {
            each._name_of(lane): max(count, each._promised[lane])
            for each in models
            for lane, count in each._come.items()
        }
        found = (each._stuck_here(come) for each in models)
        return next((each for each in found if each is not None), None)

    def _stuck_here(self, come: Mapping[str, int]) -> Standstill | None:
        if self.giving is not None and self.giving.busy():
            return None  # slow at most: who waits for it waits for what was agreed on
        lanes = ("control", "reduce", MEET, "gather") if self._blocked else ("control", "reduce", MEET)
        for lane in lanes:
            since, purpose = self._waiting.get(lane, (0.0, None))
            if purpose is not None and time.monotonic() - since > STUCK_SECONDS:
                of_this = f"{purpose.words(self.names)} of model {self._number}"
                words = "outsize.prepare of another model" if lane == MEET else of_this
                return Standstill(words, self._name_of(lane), self._come[lane], come)
        return None

    def promise(self, lane: str, times: int) -> None:
        """The conveyor will come to agree so many times more, after what it was asked for before."""
        self._promised[lane] += times

    def _name_of(self, lane: str) -> str:
        return f"{self._number}/{lane}"

    # -- what is agreed on -------------------------------------------------------------------------------------------

    def combine(self, values: torch.Tensor, kind: str, op: str = "sum") -> torch.Tensor:
        """`values` (CPU) summed, or their largest or smallest, over the ranks; in place."""
        ops: Any = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        purpose = Purpose(kind, -1, self.step, values.numel())
        self._agree("control", purpose)
        self._await(_all_reduce(self._groups["control"], values, ops[op]), purpose)
        return values

    def collect(self, value: object, kind: str, lane: str = "control", step: int | None = None) -> list[Any]:
        """`value` of every rank, in the order of ranks. Small things that pickle. `step`: where it is not this one."""
        purpose = Purpose(kind, -1, self.step if step is None else step)
        self._agree(lane, purpose)
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        group = self._groups[lane]
        self._await(group._allgather_base(sizes, torch.tensor([content.numel()], device="cpu")), purpose)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded[: content.numel()] = content
        every = torch.empty(self.size, padded.numel(), dtype=torch.uint8, device="cpu")
        self._await(group._allgather_base(every.view(-1), padded), purpose)
        # What comes in was written by this very program on another rank of the job.
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(every, sizes.tolist(), strict=True)]

    def disagree(self, mine: Mapping[str, str]) -> NoReturn:
        """Raise on every rank: they do not mean the same by what they do. Names the first entry that differs."""
        every = self.collect(dict(mine), "step")
        names = sorted({name for each in every for name in each})
        name = next((name for name in names if len({each.get(name) for each in every}) > 1), "?")
        parts = self._who_says_what([each.get(name, "no gradient") for each in every])
        error = RanksError(
            f"the ranks take different steps in step {self.step}. For {name!r}: {parts}. Clip, scale and schedule "
            f"alike on every rank. Nothing was updated"
        )
        self.fail(error)
        raise error

    def everyone(self) -> list[Ranks]:
        """The groups whose members, one after the other, reach every rank of the job."""
        return [*self.alike(), *([] if self.tensor is None else [self.tensor])]

    def alike(self) -> list[Ranks]:
        """The groups that reach every rank which has the same parameters."""
        return [self] if self.copies is None else [self, self.copies]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, in whatever group, that this one cannot go on."""
        first = self if self._of is None else self._of() or self
        for group in first.everyone():
            group._watch.tell(f"{type(error).__name__}: {error}")

    def meet(self, kind: str) -> None:
        """Wait until all ranks are here, and give meanwhile what they want."""
        self._agree("control", Purpose(kind, -1, self.step))

    def offer(self) -> None:
        """Tell the others what is ready here, take part in what they want, and go on."""
        turn = turn_of(self._exchange("control", Purpose(OFFER, -1, self.step)))
        if turn is not None and self.giving is not None:
            self.giving.give(turn)

    def want(self, unit: int, kind: str = WANT, ahead: Sequence[int] = ()) -> Turn:
        """What all ranks are about to gather: this unit or one that comes first. See Note [Wanted units].

        `kind`: one of `WANTS`; `ahead`: what this rank expects next; those beyond the first `AHEAD` are not told."""
        turn = turn_of(self._exchange("control", Purpose(kind, unit, self.step, ahead=tuple(ahead[:AHEAD]))))
        assert turn is not None, "this rank wants one"
        return turn

    def _agree(self, lane: str, purpose: Purpose) -> None:
        while True:
            found = self._exchange(lane, purpose)
            if all(each == purpose for each in found):
                return
            turn = turn_of(found)
            if self.giving is not None and turn is not None:
                self.giving.give(turn)
            elif not any(each.kind == OFFER for each in found):
                raise self._different_ways([each.words(self.names) for each in found])

    def _exchange(self, lane: str, purpose: Purpose) -> list[Purpose]:
        """What every rank is about to do on the lane."""
        giving = self.giving if lane == "control" else None
        ready = () if giving is None else giving.ready
        mine = torch.tensor(encode(purpose, ready, 0 if giving is None else words_for(len(self.names))), device="cpu")
        every = torch.empty(self.size, len(mine), dtype=mine.dtype, device="cpu")
        work = self._agreeing[lane]._allgather_base(every.view(-1), mine)
        self._come[lane] += 1
        self._waiting[lane] = time.monotonic(), purpose
        try:
            self._await(work, purpose)
        finally:
            del self._waiting[lane]
        found, common = decode(every.tolist())
        if giving is not None and common:
            giving.reduce(common)
        return found

    def _different_ways(self, words_of: Sequence[str]) -> RanksError:
        error = RanksError(
            f"the ranks have gone different ways. {self._who_says_what(words_of)}. Every rank must run the same "
            f"modules in the same order, take the same number of steps, and call prepare, save, load, export and "
            f"gathered with the others; the state at rest is that of the last completed step"
        )
        self.fail(error)
        return error

    def _await(self, work: Any, purpose: Purpose, moves: bool = False) -> None:
        """`moves`: it is of a group that may be an accelerator's."""
        pause = self._pause_asking if moves and self._groups["gather"] is not self._agreeing["gather"] else self._pause
        try:
            while not work.is_completed():
                if not pause(work):
                    self._check_others(purpose)
        except BaseException:
            self._leave_open()
            raise
        self._guard(work.wait, purpose)

    def _pause(self, work: Any) -> bool:
        """Wait for some time; whether the work may be over."""
        try:
            work.wait(LOOK)
        except RuntimeError:  # the time is over, or it went wrong
            return bool(work.is_completed())
        return True

    def _pause_asking(self, work: Any) -> bool:
        """As `_pause`, without a wait that has an end: NCCL gives the communicator up then."""
        until = time.monotonic() + LOOK.total_seconds()
        while time.monotonic() < until:
            if work.is_completed():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _leave_open(self) -> None:
        """See Note [Nobody hangs]."""
        if self._gave_up:
            return
        self._gave_up = True
        for group in {*self._groups.values(), *self._agreeing.values()}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never to be closed

    def _guard(self, action: Any, purpose: Purpose) -> None:
        try:
            action()
        except RuntimeError as error:
            raise self._gone(self._watch.find_gone(), purpose) from error

    def _gone(self, said: tuple[int | None, str] | None, purpose: Purpose) -> RanksError:
        place, what = said if said is not None else (None, "a rank is gone")
        who = "" if place is None else f"{self._named([place])} of {dist.get_world_size()} "
        remedy = "" if purpose.kind == MEET else ": start the job again and load the last checkpoint"
        error = RanksError(f"{who}{what} while {self._named([self.rank])} was in {purpose.words(self.names)}{remedy}")
        self.fail(error)
        return error

    def _check_others(self, purpose: Purpose) -> None:
        if self._watch.closed:
            raise RanksError(f"outsize was closed while {self._named([self.rank])} was in {purpose.words(self.names)}")
        if self._watch.apart:
            raise self._different_ways(self._watch.apart)
        said = self._watch.said
        if said is None or time.monotonic() - self._watch.since < GRACE_SECONDS:  # what has begun may still arrive
            return
        raise self._gone(said, purpose)

    def _named(self, places: Sequence[int]) -> str:
        """Members by their ranks in the job, which a mesh makes others than their places here."""
        return _ranks([self.members[place] for place in places])

    def _who_says_what(self, words_of: Sequence[str]) -> str:
        """What each rank says, the ranks that say the same together."""
        said: dict[str, list[int]] = {}
        for place, words in enumerate(words_of):
            said.setdefault(words, []).append(place)
        return "; ".join(f"{self._named(places)}: {words}" for words, places in said.items())

    def close(self) -> None:
        """Leave the groups; safe to repeat."""
        self._watch.close()
        for group in self.everyone()[1:]:
            group.close()
        self._groups, self._agreeing = {}, {}


def _all_reduce(group: Any, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([values], options)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_made = itertools.count()  # every rank makes its groups in the same order


def _own_store(number: int, members: Sequence[int], apart: bool = False) -> Any:
    """A place of its own in the store of the job. After a restart the store may still hold what the last try wrote.

    `apart`: on a connection of its own, which nobody else's waiting holds up."""
    store: Any = distributed_c10d._get_default_store()
    if apart:
        with suppress(AttributeError, RuntimeError, NotImplementedError):  # a store in memory or in a file has none
            store = store.clone()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = f"outsize/{attempt}/{number}/{members[0]}-{members[-1]}"
    return distributed_c10d.PrefixStore(place, store)


_open: weakref.WeakSet[Ranks] = weakref.WeakSet()
_open_lock = threading.Lock()  # the watches look at all


def _tell_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An error ends this process: say so to the others, who wait for it."""
    with _open_lock:
        every = list(_open)
    for ranks in every:
        ranks._watch.tell(f"{kind.__name__}: {error}")
    _excepthook(kind, error, trace)


def _listen_to_errors() -> None:
    if sys.excepthook is not _tell_all:
        global _excepthook
        _excepthook, sys.excepthook = sys.excepthook, _tell_all


_excepthook = sys.excepthook


def _close_all() -> None:
    with _open_lock:
        every = list(_open)
    for ranks in every:
        ranks.close()


atexit.register(_close_all)
