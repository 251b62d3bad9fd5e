"""What the ranks that share a model do together: collectives, in one order on all, and agreement on what comes next."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, final
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outsize.move.transfer import Transfer
from outsize.move.watch import Wait, Watch

logger = logging.getLogger("outsize")

# Note [One order of collectives]
# The collectives of one group must start in the same order on every rank. Where they do not, gloo ends the process (two
# sizes meet) or mixes two units (two of one size), and NCCL hangs or mixes. Nothing may be found out by starting them.
#
# Gathers, reductions and what the user's loop asks for run beside each other, so each kind is a lane: a group of its
# own, with an order of its own. A collective takes its turn in the lane when it is asked for, by the thread that uses
# the model, though the conveyor may start it later.
#
# In each step the ranks compare the order of every lane (a checksum, with what the step does). Where all were alike,
# the next step is expected to repeat it: a collective that is the expected one starts at once. Any other one is agreed
# on first, by an exchange of a few bytes on a kind of gloo collective that carries nothing else. So two ranks never
# start two collectives as if they were one: they were both expected, and then they are the same, or both were agreed
# on. A rank that goes another way waits for an agreement to which nobody comes, the others wait for a collective to
# which it does not come, and the watch finds that out (Note [Nobody hangs]). No byte has moved to a wrong place then,
# in whatever mode updates run.
#
# On an accelerator the host does not wait for gathers and reductions: streams do. A gather begins behind the stream
# that fills the buffers, a reduction behind the backward that made its gradients. Before the host reads what came out,
# it waits for the last one, and looks after the others meanwhile (`Ranks.await_device`).

GATHER, REDUCE, CONTROL, SAVE = LANES = "gather", "reduce", "control", "save"

CONNECTING = timedelta(minutes=2)
"""All ranks have come to `prepare`, and make their groups."""

PATIENCE = timedelta(days=7)
"""Of the groups themselves: how long to wait is decided here."""

LOOK = timedelta(seconds=0.25)
"""How often a rank that waits looks whether the others are still there."""

LOOK_WHETHER_WANTED = timedelta(seconds=0.02)

STUCK_SECONDS = 1.5
"""After so long a wait a rank says what it waits for."""

GRACE_SECONDS = 1.0
"""A rank that ends has given its part to the last collective; the others may still be receiving it."""

DEVICE_POLL_SECONDS = 0.001
"""NCCL ends a communicator if one waits for it for a limited time, so the host asks."""

MEETING = timedelta(minutes=10)
"""How far apart ranks may come to `prepare`."""

MEETING_POLL_SECONDS = 0.02
MEETING_WORD_SECONDS = 10.0
"""After so long a wait for the others the log says for whom."""

MOST_TURNS = 1 << 16
"""A lane remembers no more of a step, so memory stays bounded where no step comes."""

MOST_WORDS = 192
"""Bytes of what one rank says in an error."""


class RanksError(RuntimeError):
    """The ranks of a run do not go together any more: one has gone another way, has failed or is gone."""


@dataclass(frozen=True)
class Turn:
    """A place in the order of a lane, the same on every rank."""

    lane: str
    number: int
    kind: str
    unit: int = -1
    numel: int = 0
    expected: bool = False
    """Whether all ranks know that this is what comes here."""

    @property
    def key(self) -> int:
        return crc32(f"{self.kind} {self.unit} {self.numel}".encode())


@final
class Lane:
    """The order of one kind of collectives. See Note [One order of collectives]."""

    def __init__(self, name: str, agreeing: Any, moving: Any) -> None:
        """`agreeing`: gloo's group; `moving`: the group that moves what the lane is for."""
        self.agreeing, self.moving = agreeing, moving
        self.name = name
        self.before = 0  # turns in earlier steps
        self.come: list[int] = []  # the keys of this one
        self._known: list[int] = []  # those of the last one, if all ranks had the same
        self._expected = True  # whether this step has repeated the last one so far
        self.waits: dict[int, tuple[float, Turn, bool]] = {}  # by thread: since when, for what, behind the loop

    def next(self, kind: str, unit: int = -1, numel: int = 0, fixed: bool = False) -> Turn:
        """The turn of what comes next here."""
        if len(self.come) == MOST_TURNS:
            self.step(alike=False)
        at = len(self.come)
        key = Turn(self.name, 0, kind, unit, numel).key
        self.come.append(key)
        self._expected = self._expected and at < len(self._known) and self._known[at] == key
        return Turn(self.name.rsplit("/")[-1], self.before + at, kind, unit, numel, self._expected or fixed)

    def step(self, alike: bool) -> None:
        """The next step begins; `alike`: all ranks had the same turns in this one."""
        self._known = self.come if alike else []
        self.before += len(self.come)
        self.come, self._expected = [], True

    @contextmanager
    def waiting(self, turn: Turn, behind: bool) -> Iterator[None]:
        thread = threading.get_ident()
        self.waits[thread] = time.monotonic(), turn, behind
        try:
            yield
        finally:
            del self.waits[thread]


@dataclass
class Counts:
    """Elements that this rank has given to collectives, by kind, and how many collectives there were."""

    elements: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, numel: int) -> None:
        self.elements[kind] = self.elements.get(kind, 0) + numel
        self.calls[kind] = self.calls.get(kind, 0) + 1


@dataclass(eq=False)
class Model:
    """What the groups of ranks that share one model have in common."""

    number: int
    """Every rank prepares its models in the same order."""
    watch: Watch
    names: list[str] = field(default_factory=list)
    """Of the units, for errors."""
    step: int = 0
    blocked: int = 0
    """Waits of the user's loop for the conveyor."""
    groups: list[Ranks] = field(default_factory=list)

    def words(self, turn: Turn) -> str:
        unit = f" of unit {self.names[turn.unit]!r}" if 0 <= turn.unit < len(self.names) else ""
        return f"{turn.kind}{unit} in step {self.step} ({turn.numel} elements)"

    def check(self, words: str, remedy: str = ": start the job again and load the last checkpoint") -> None:
        """Raise `RanksError` if there is nobody to wait for any more; `words` say for what."""
        if self.watch.closed:
            raise RanksError(f"outsize was closed while {named([dist.get_rank()])} was in {words}")
        if self.watch.apart:
            raise self.different_ways(self.watch.apart)
        if self.watch.said is not None and time.monotonic() - self.watch.since >= GRACE_SECONDS:
            raise self.gone(self.watch.said, words, remedy)

    def different_ways(self, words: Mapping[int, str]) -> RanksError:
        """The error of ranks of which each is about to do what its words say."""
        return self.failed(
            f"the ranks have gone different ways. {_who_says_what(words)}. Every rank must run the same modules in the "
            f"same order, take the same number of steps, and call prepare, save, load, export and gathered with the "
            f"others; the state at rest is that of the last completed step"
        )

    def gone(self, said: tuple[int | None, str] | None, words: str, remedy: str = "") -> RanksError:
        rank, what = said if said is not None else (None, "a rank is gone")
        who = "" if rank is None else f"{named([rank])} of {dist.get_world_size()} "
        return self.failed(f"{who}{what} while {named([dist.get_rank()])} was in {words}{remedy}")

    def failed(self, words: str) -> RanksError:
        """The error; the other ranks hear of it."""
        error = RanksError(words)
        self.watch.tell(f"RanksError: {error}")
        return error

    def close(self) -> None:
        self.watch.close()
        for group in self.groups:
            group._lanes = {}


@final
class Going(Transfer):
    """A collective on its way."""

    def __init__(self, ranks: Ranks, work: Any, turn: Turn, on_stream: bool) -> None:
        """`on_stream`: an accelerator's. To wait for it makes the current stream wait, not the host."""
        self._ranks, self._work, self._turn = ranks, work, turn
        self.on_stream = on_stream

    def wait(self) -> None:
        self._ranks._await(self._work, self._turn, self.on_stream)

    def done(self) -> bool:
        return self.on_stream or bool(self._work.is_completed())

    def over_unless_wanted(self) -> bool:
        """Wait, unless a rank waits for this one to meet it; whether it is over."""
        return self._ranks._await(self._work, self._turn, self.on_stream, unless_wanted=True)


@final
class Reducing:
    """A reduction on its way."""

    def __init__(self, ranks: Ranks, going: Going, own: torch.Tensor) -> None:
        self.ranks, self.going, self._own = ranks, going, own

    def wait(self) -> torch.Tensor:
        """The mean, as far as this rank keeps it. Blocks."""
        self.going.wait()
        return self._own.div_(self.ranks.size)


@final
class Ranks:
    """The data-parallel ranks that share one model. Every method is called by all of them, in the same order."""

    def __init__(
        self,
        members: Sequence[int],
        backend: str = "gloo",
        copies: Sequence[int] = (),
        tensor: Sequence[int] = (),
        everyone: Sequence[int] = (),
        model: Model | None = None,
    ) -> None:
        """`members`: the global ranks, this one among them; every rank of the job must make the group. `backend`: of
        what is moved; what is agreed on goes by gloo. `copies`: the ranks that hold the same part as this one, where
        the whole model is there several times (a second dimension of a mesh). `tensor`: those that hold other parts of
        the same parameters, by torch's tensor parallelism; outsize only agrees with them. `everyone`: all ranks that
        have a part of the model. `model`: of the group whose `copies` or `tensor` these are."""
        self.members = list(members)
        self.size = len(members)
        self.rank = self.members.index(dist.get_rank())
        self.counts = Counts()
        self.says_wanted = False  # whether ranks come to what others need at other times, by design
        self._last_on_device: Any = None
        self._gave_up = False
        number = next(_made) if model is None else model.number
        self._store = store = _own_store(number, self.members)
        self.model = self._meet(number, everyone or members) if model is None else model
        self._place = f"{number}/{members[0]}-{members[-1]}/"
        self._lanes: dict[str, Lane] = {}
        for name in LANES:
            lane = self._open(name, store, backend)
            self._lanes[name] = lane
            if lane.moving is not lane.agreeing:
                self.model.watch.to_abort.append(lane.moving)
        self.model.groups.append(self)  # the watch looks at its lanes from now on
        self.copies = Ranks(copies, backend, model=self.model) if copies else None
        self.tensor = Ranks(tensor, model=self.model) if tensor else None

    def _open(self, name: str, store: Any, backend: str) -> Lane:
        try:
            group = dist.ProcessGroupGloo(distributed_c10d.PrefixStore(name, store), self.rank, self.size, CONNECTING)
        except RuntimeError as error:
            raise RanksError(f"the ranks {self.members} could not be connected in outsize.prepare ({error})") from error
        group._set_default_timeout(PATIENCE)
        moves = backend != "gloo" and name in (GATHER, REDUCE)
        return Lane(self._place + name, group, self._open_on_device(name, store, backend) if moves else group)

    def _open_on_device(self, name: str, store: Any, backend: str) -> Any:
        own = distributed_c10d.PrefixStore(f"{backend}-{name}", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            return dist.ProcessGroupNCCL(own, self.rank, self.size, options)
        plugin = dist.Backend._plugins.get(backend.upper())
        if plugin is None or plugin.extended_api:
            raise ValueError(f"outsize cannot open groups of torch.distributed's backend {backend!r} yet; use one rank")
        return plugin.creator_fn(own, self.rank, self.size, PATIENCE)

    # -- coming to prepare -------------------------------------------------------------------------------------------

    def _meet(self, number: int, everyone: Sequence[int]) -> Model:
        """Wait until all ranks are here. Where they share a model already, its watch finds out if they never will."""
        everyone, own = sorted(everyone), dist.get_rank()
        store = _own_store(number, everyone)
        store.set(f"come/{own}", "1")
        shared = [each for each in _open_models() if each.watch.members == everyone and not each.watch.closed]
        lane, began, told = Lane("prepare", None, None), time.monotonic(), False
        _meetings.append((lane, everyone))
        try:
            with lane.waiting(lane.next("prepare", number), behind=False):
                while missing := [rank for rank in everyone if not store.check([f"come/{rank}"])]:
                    if shared and not shared[0].watch.over:
                        shared[0].check("outsize.prepare", remedy="")
                    waited = time.monotonic() - began
                    if waited > MEETING.total_seconds():
                        raise RanksError(
                            f"{named(missing)} did not come to outsize.prepare within {MEETING}: every rank must call "
                            f"it, as often as the others"
                        )
                    if waited > MEETING_WORD_SECONDS and not told:
                        told = True
                        here, away = named([own]), named(missing)
                        logger.warning("%s waits in outsize.prepare for %s, as every rank must call it", here, away)
                    time.sleep(MEETING_POLL_SECONDS)
        finally:
            _meetings.remove((lane, everyone))
        watch = Watch(_own_store(number, everyone, apart=True), everyone, own, lambda: _stuck(everyone))
        model = Model(number, watch)
        with _lock:
            _models.add(model)
        _listen_to_errors()
        return model

    # -- what is moved -----------------------------------------------------------------------------------------------

    def turn_to_gather(self, unit: int, numel: int) -> Turn:
        """The place of a gather that the conveyor will start. Called by the thread that uses the model."""
        return self._lanes[GATHER].next(GATHER, unit, numel)

    def all_gather(self, flat: torch.Tensor, turn: Turn) -> Going:
        """Start to complete `flat` (1-D, a multiple of `size`), of which this rank has its own part in place."""
        share = flat.numel() // self.size
        own = flat[self.rank * share : (self.rank + 1) * share]
        self.counts.add(GATHER, flat.numel())
        return self._start(turn, lambda group: group._allgather_base(flat, own))

    def reduce_scatter(self, flat: torch.Tensor, unit: int, fixed: bool = False) -> Reducing:
        """Start to find this rank's part of the mean of `flat` over the ranks; `flat` is spent.

        `fixed`: it comes in the order of the model, whatever this rank has used."""
        turn = self._lanes[REDUCE].next(REDUCE, unit, flat.numel(), fixed)
        share = flat.numel() // self.size
        self.counts.add(REDUCE, flat.numel())
        if flat.device.type == "cpu":  # gloo's own reduce-scatter takes twice the time of an all-reduce
            own = flat[self.rank * share : (self.rank + 1) * share]
            return Reducing(self, self._start(turn, lambda group: _all_reduce(group, flat)), own)
        own = flat.new_empty(share)
        return Reducing(self, self._start(turn, lambda group: group._reduce_scatter_base(own, flat)), own)

    def all_reduce(self, flat: torch.Tensor, unit: int, fixed: bool = False) -> Reducing:
        """Start to replace `flat` by its mean over the ranks. `fixed`: as above."""
        turn = self._lanes[REDUCE].next(REDUCE, unit, flat.numel(), fixed)
        self.counts.add(REDUCE, 2 * flat.numel())
        return Reducing(self, self._start(turn, lambda group: _all_reduce(group, flat)), flat)

    def most(self, flags: torch.Tensor, unit: int) -> Going:
        """Start to replace `flags` (in host memory) by the largest of any rank, behind the unit's reduction."""
        lane = self._lanes[REDUCE]
        turn = lane.next("presence", unit, flags.numel(), fixed=True)
        return self._start(turn, lambda _: _all_reduce(lane.agreeing, flags, dist.ReduceOp.MAX), on_host=True)

    def await_device(self) -> None:
        """Block until the collectives of the accelerator are over, before the host reads what came out of them."""
        work, self._last_on_device = self._last_on_device, None
        while work is not None and not work.is_completed():
            self.model.check("a collective")
            time.sleep(DEVICE_POLL_SECONDS)

    def _start(self, turn: Turn, start: Callable[[Any], Any], on_host: bool = False) -> Going:
        lane = self._lanes[turn.lane]
        if not turn.expected:
            self._exchange(turn, behind=turn.kind == GATHER)
        work = start(lane.moving)
        on_stream = lane.moving is not lane.agreeing and not on_host
        if on_stream:
            self._last_on_device = work
        return Going(self, work, turn, on_stream)

    # -- what is agreed on -------------------------------------------------------------------------------------------

    def combine(self, values: torch.Tensor, kind: str, op: str = "sum") -> torch.Tensor:
        """`values` (CPU) summed, or their largest or smallest, over the ranks; in place."""
        ops: Any = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        turn = self._lanes[CONTROL].next(kind, -1, values.numel())
        self._start(turn, lambda group: _all_reduce(group, values, ops[op])).wait()
        return values

    def collect(self, value: object, kind: str, lane: str = CONTROL) -> list[Any]:
        """`value` of every rank, in the order of ranks. Small things that pickle."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        turn = self._lanes[lane].next(kind)
        sizes = [row[2] for row in self._exchange(turn, content.numel())]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: content.numel()] = content
        every = torch.empty(self.size, padded.numel(), dtype=torch.uint8, device="cpu")
        self._await(self._lanes[lane].agreeing._allgather_base(every.view(-1), padded), turn)
        # What comes in was written by this very program on another rank of the job.
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(every, sizes, strict=True)]

    def meet(self, kind: str, number: int = 0) -> list[int]:
        """Wait until all ranks are here; the `number` of each."""
        turn = self._lanes[CONTROL].next(kind)
        if number:
            self._store.set(f"wanted/{CONTROL}", str(turn.number))
        return [row[2] for row in self._exchange(turn, number)]

    def wanted(self) -> bool:
        """Whether a rank waits for this one, to meet it with a number or to gather, as far as ranks say so."""
        for name in (CONTROL, GATHER):
            lane, key = self._lanes[name], f"wanted/{name}"
            if self._store.check([key]) and int(self._store.get(key)) >= lane.before + len(lane.come):
                return True
        return False

    def agree_on_step(self, told: Mapping[str, str]) -> None:
        """Raise on every rank unless all are about to do the same step, which `told` describes. See Note [One order of
        collectives]."""
        turn = self._lanes[CONTROL].next("step")
        lanes = [self._lanes[name] for name in (GATHER, REDUCE, CONTROL)]
        digests = [crc32(repr(each).encode()) for each in (sorted(told.items()), [lane.come for lane in lanes])]
        rows = self._exchange(turn, *digests)
        if len({row[2] for row in rows}) > 1:
            self._disagree(told)
        for lane in lanes:
            lane.step(alike=len({row[3] for row in rows}) == 1)

    def _disagree(self, mine: Mapping[str, str]) -> NoReturn:
        """Name the first entry that differs."""
        every = self.collect(dict(mine), "step")
        names = sorted({name for each in every for name in each})
        name = next((name for name in names if len({each.get(name) for each in every}) > 1), "?")
        parts = _who_says_what(dict(zip(self.members, [each.get(name, "no gradient") for each in every], strict=True)))
        raise self.model.failed(
            f"the ranks take different steps in step {self.model.step}. For {name!r}: {parts}. Clip, scale, schedule "
            f"and call zero_grad alike on every rank. Nothing was updated"
        )

    def _exchange(self, turn: Turn, *numbers: int, behind: bool = False) -> list[list[int]]:
        """Agree that this is the turn of all: by rank [key, number, *numbers]. Raises on every rank if it is not."""
        own = [turn.key, turn.number, *numbers, 0, 0][:4]
        rows = self._show(turn, torch.tensor(own, device="cpu"), behind).tolist()
        if all(row[:2] == own[:2] for row in rows):
            return rows
        words = torch.zeros(MOST_WORDS, dtype=torch.uint8, device="cpu")
        said = self.model.words(turn).encode()[:MOST_WORDS]
        words[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        every = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._show(turn, words, behind).tolist()]
        raise self.model.different_ways(dict(zip(self.members, every, strict=True)))

    def _show(self, turn: Turn, own: torch.Tensor, behind: bool) -> torch.Tensor:
        """`own` of every rank; by a kind of collective that moves nothing else. See Note [One order of collectives]."""
        every = torch.empty(self.size, len(own), dtype=own.dtype, device="cpu")
        group = self._lanes[turn.lane].agreeing
        self.counts.add("agreement", len(own))
        self._await(group.alltoall_base(every.view(-1), own.repeat(self.size), [], []), turn, behind=behind)
        return every

    def _await(
        self, work: Any, turn: Turn, on_stream: bool = False, behind: bool = False, unless_wanted: bool = False
    ) -> bool:
        """Block until a collective is over, or make the current stream wait for it; False where it was not waited for
        because a rank waits for this one to meet it."""
        try:
            with self._lanes[turn.lane].waiting(turn, behind):
                while not on_stream and not work.is_completed():
                    with suppress(RuntimeError):  # the time is over, or it went wrong
                        work.wait(LOOK_WHETHER_WANTED if self.says_wanted else LOOK)
                    if not work.is_completed():
                        self.model.check(self.model.words(turn))
                        if unless_wanted and self.wanted():
                            return False
                        if self.says_wanted and turn.kind == GATHER:
                            self._store.set(f"wanted/{GATHER}", str(turn.number))
                if on_stream:
                    self.model.check(self.model.words(turn))
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self.model.gone(self.model.watch.find_gone(), self.model.words(turn)) from error
        except BaseException:
            self._leave_open()
            raise
        return True

    def _leave_open(self) -> None:
        """Closing a group waits for its collectives, of which one may never end: it stays until the process ends."""
        if not self._gave_up:
            self._gave_up = True
            for group in {each for lane in self._lanes.values() for each in (lane.agreeing, lane.moving)}:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # -- all groups --------------------------------------------------------------------------------------------------

    def everyone(self) -> list[Ranks]:
        """The groups whose members, one after the other, reach every rank of the job."""
        return [*self.alike(), *([] if self.tensor is None else [self.tensor])]

    def alike(self) -> list[Ranks]:
        """The groups that reach every rank which has the same parameters."""
        return [self] if self.copies is None else [self, self.copies]

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, in whatever group, that this one cannot go on."""
        self.model.watch.tell(f"{type(error).__name__}: {error}")

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The user's loop waits in the block for what the conveyor does."""
        self.model.blocked += 1
        try:
            yield
        finally:
            self.model.blocked -= 1

    def close(self) -> None:
        """Leave the groups; safe to repeat."""
        self.model.close()


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _who_says_what(words: Mapping[int, str]) -> str:
    """What each rank says, the ranks that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, each in words.items():
        said.setdefault(each, []).append(rank)
    return "; ".join(f"{named(ranks)}: {each}" for each, ranks in said.items())


def _stuck(members: Sequence[int]) -> Wait | None:
    """What the user's loop has been waiting for, for some time, of whatever model these ranks share."""
    lanes: list[tuple[Lane, Sequence[int], Model | None]] = [(lane, each, None) for lane, each in list(_meetings)]
    for model in _open_models():
        if model.watch.members == members:
            lanes += [(lane, group.members, model) for group in model.groups for lane in list(group._lanes.values())]
    come = {lane.name: (lane.before, list(lane.come)) for lane, _, _ in lanes}
    for lane, those, of in lanes:
        for since, turn, behind in sorted(lane.waits.values(), key=lambda each: each[1].number):
            if turn.lane.endswith(SAVE) or (behind and (of is None or not of.blocked)):
                continue
            if time.monotonic() - since > STUCK_SECONDS:
                words = "outsize.prepare of another model" if of is None else of.words(turn)
                return Wait(words, lane.name, turn.number, turn.key, those, come)
    return None


def _all_reduce(group: Any, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([values], options)


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


_models: weakref.WeakSet[Model] = weakref.WeakSet()
_lock = threading.Lock()  # the watches look at all
_meetings: list[tuple[Lane, Sequence[int]]] = []


def _open_models() -> list[Model]:
    with _lock:
        return sorted(_models, key=lambda each: each.number)


def _tell_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An error ends this process: say so to the others, who wait for it."""
    for model in _open_models():
        model.watch.tell(f"{kind.__name__}: {error}")
    _excepthook(kind, error, trace)


def _listen_to_errors() -> None:
    global _excepthook
    if _excepthook is None:  # once: whoever has chained to it meanwhile is called before it
        _excepthook, sys.excepthook = sys.excepthook, _tell_all


_excepthook: Any = None


def _close_all() -> None:
    for model in _open_models():
        model.close()


atexit.register(_close_all)
