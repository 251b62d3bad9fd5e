"""What the ranks that share a model do together: collectives, in one order on all, and agreement on what comes next."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import pickle
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
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
# Gathers, reductions and what the user's loop asks for run beside each other. So each kind is a lane: a group of its
# own, with an order of its own. The thread that uses the model gives out the turns of a lane, though the conveyor may
# start a collective later.
#
# In each step the ranks compare the order of every lane. Where all were alike, the next step is expected to repeat it:
# a collective that is the expected one starts at once. Any other one is agreed on first, by an exchange of a few bytes
# on a kind of gloo collective that carries nothing else. So two ranks never start two collectives as if they were one.
# A rank that goes another way waits for an agreement to which nobody comes, the others wait for a collective to which
# it does not come, and the watch finds that out (Note [Nobody hangs]). No byte has moved to a wrong place then.
# Rows of tables move by that kind too. So their lane has a second group, which moves them.

CONTROL, REDUCE, GATHER, SAVE = LANES = "control", "reduce", "gather", "save"
ROWS = "rows"
"""The lane of tables, where there are any."""

CONNECTING = timedelta(minutes=2)
"""All ranks have come to `prepare`, and make their groups."""

PATIENCE = timedelta(days=7)
"""Of the groups themselves: how long to wait is decided here."""

LOOK = timedelta(seconds=0.02)
"""How often a rank that waits looks whether the others are still there."""

STUCK_SECONDS = 1.5
"""After so long a wait a rank says what it waits for."""

GRACE_SECONDS = 1.0
"""A rank that ends has given its part to the last collective; the others may still be receiving it."""

MEETING = timedelta(minutes=10)
"""How far apart ranks may come to `prepare`."""

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

    lane: Lane
    number: int
    kind: str
    unit: int
    numel: int
    key: int
    expected: bool
    """Whether all ranks know that this is what comes here."""
    row: int = -1
    """With what row of a rank a tile begins."""


@dataclass(eq=False)
class Model:
    """What the groups of ranks that share one model have in common."""

    number: int
    """Every rank prepares its models in the same order."""
    sync: bool
    """Whether ranks come to what others need at other times, by design."""
    watch: Watch
    names: list[str] = field(default_factory=list)
    """Of the units, for errors."""
    step: int = 0
    lanes: list[Lane] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Elements that this rank has given to collectives, and "calls" of these, by kind."""

    def words(self, turn: Turn) -> str:
        unit = f" of unit {self.names[turn.unit]!r}" if 0 <= turn.unit < len(self.names) else ""
        unit += f" from row {turn.row}" if turn.row >= 0 else ""
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
        self.watch.tell(error)
        return error

    def leave_open(self) -> None:
        """Closing a group waits for its collectives, of which one may never end: it stays until the process ends."""
        for lane in self.lanes:
            for group in (lane.agreeing, lane.moving):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def close(self) -> None:
        """Leave the groups; safe to repeat."""
        self.watch.close()
        for lane in self.lanes:
            lane.agreeing = lane.moving = None


@final
class Lane:
    """One kind of collectives of a group of ranks. See Note [One order of collectives]."""

    def __init__(self, name: str, members: Sequence[int], model: Model, store: Any = None) -> None:
        """`store`: the lane's own."""
        self.name, self.members, self.model, self._store = name, members, model, store
        self.agreeing: Any = None  # gloo's group
        self.moving: Any = None  # the group that moves what the lane is for
        self.on_device = False  # whether that is an accelerator's
        self.before = 0  # turns in earlier steps
        self.come: list[int] = []  # the keys of this one
        self._known: list[int] = []  # those of the last one, if all ranks had the same
        self._expected = True  # whether this step has repeated the last one so far
        self.waits: dict[int, tuple[float, Turn]] = {}  # by thread: since when, for what
        model.lanes.append(self)

    def next(self, kind: str, unit: int = -1, numel: int = 0, fixed: bool = False, row: int = -1) -> Turn:
        """The turn of what comes next here; `fixed`: all ranks know it; `row`: of a tile."""
        if len(self.come) == MOST_TURNS:
            self.step(alike=False)
        at, key = len(self.come), crc32(f"{kind} {unit} {numel} {row}".encode())
        self.come.append(key)
        self._expected = self._expected and self._known[at : at + 1] == [key]
        return Turn(self, self.before + at, kind, unit, numel, key, self._expected or fixed, row)

    def step(self, alike: bool) -> None:
        """The next step begins; `alike`: all ranks had the same turns in this one."""
        self._known = self.come if alike else []
        self.before += len(self.come)
        self.come, self._expected = [], True

    def exchange(self, turn: Turn, *numbers: int) -> list[tuple[int, ...]]:
        """Agree that this is the turn of all: the numbers of each rank, padded to three. Raises if it is not."""
        said = self.model.words(turn).encode()[:MOST_WORDS].ljust(MOST_WORDS)
        row = struct.pack("5q", turn.key, turn.number, *numbers, *[0] * (3 - len(numbers))) + said
        own = torch.frombuffer(bytearray(row * len(self.members)), dtype=torch.uint8)
        every = torch.empty_like(own)
        self.model.counts["agreement calls"] += 1
        self.wait(self.agreeing.alltoall_base(every, own, [], []), turn)
        rows = [each.numpy().tobytes() for each in every.view(-1, len(row))]
        if any(each[:16] != row[:16] for each in rows):
            words = [each[40:].decode(errors="replace").strip() for each in rows]
            raise self.model.different_ways(dict(zip(self.members, words, strict=True)))
        return [struct.unpack("3q", each[16:40]) for each in rows]

    def wait(self, work: Any, turn: Turn, on_stream: bool = False, unless: Callable[[], bool] | None = None) -> bool:
        """Block until a collective is over, or make the current stream wait for it; False where it was not waited for
        because `unless` has come true."""
        try:
            with self.waiting(turn):
                while not on_stream and not work.is_completed():
                    with suppress(RuntimeError):  # the time is over, or it went wrong
                        work.wait(LOOK)
                    if not work.is_completed():
                        self.model.check(self.model.words(turn))
                        if unless is not None and unless():
                            return False
                        if self.model.sync and turn.kind == GATHER:
                            self.want(turn)
                if on_stream:
                    self.model.check(self.model.words(turn))
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self.model.gone(self.model.watch.find_gone(), self.model.words(turn)) from error
        except BaseException:
            self.model.leave_open()
            raise
        return True

    @contextmanager
    def waiting(self, turn: Turn) -> Iterator[None]:
        thread = threading.get_ident()
        self.waits[thread] = time.monotonic(), turn
        try:
            yield
        finally:
            del self.waits[thread]

    def want(self, turn: Turn) -> None:
        """Tell the other ranks that this one waits for them to come to the turn."""
        self._store.set("wanted", str(turn.number))

    def wanted(self) -> bool:
        """Whether a rank waits for this one to come to a turn, as far as ranks say so."""
        return self._store.check(["wanted"]) and int(self._store.get("wanted")) >= self.before + len(self.come)


@final
class Going(Transfer):
    """A collective on its way."""

    def __init__(self, ranks: Ranks, work: Any, turn: Turn, on_stream: bool) -> None:
        """`on_stream`: an accelerator's. To wait for it makes the current stream wait, not the host."""
        self._ranks, self._work, self._turn = ranks, work, turn
        self.on_stream = on_stream

    def wait(self) -> None:
        self._turn.lane.wait(self._work, self._turn, self.on_stream)

    def done(self) -> bool:
        return self.on_stream or bool(self._work.is_completed())

    def over_unless_wanted(self) -> bool:
        """Wait, unless a rank waits for this one to meet it; whether it is over."""
        return self._turn.lane.wait(self._work, self._turn, self.on_stream, self._ranks.wanted)


@final
class Ranks:
    """The data-parallel ranks that share one model. Every method is called by all of them, in the same order."""

    def __init__(
        self,
        members: Sequence[int],
        backend: str = "gloo",
        copies: Sequence[int] = (),
        tensor: Sequence[int] = (),
        stages: Sequence[int] = (),
        everyone: Sequence[int] = (),
        sync: bool = False,
        model: Model | None = None,
    ) -> None:
        """`members`: the global ranks, this one among them; every rank of the job must make the group. `backend`: of
        what is moved; what is agreed on goes by gloo. `copies`: the ranks that hold the same part as this one, where
        the whole model is there several times (a second dimension of a mesh). `tensor`: those that hold other parts of
        the same parameters, by torch's tensor parallelism; inputs of layers are gathered from them. `stages`: those at
        this one's place in the stages of a pipeline, which have other parameters. `everyone`: all ranks of the job.
        `sync`: ranks come to what others need at other times, by design. `model`: of the group whose `copies`,
        `tensor` or `stages` these are."""
        self.members = list(members)
        self.size = len(members)
        self.rank = self.members.index(dist.get_rank())
        self.model = model or _meet(sorted(everyone or members), sync)
        self._last_on_device: Any = None
        self._store = _own_store(self.model.number, self.members)
        self._lanes = {name: self._open(name, backend) for name in LANES}
        self.copies = Ranks(copies, backend, model=self.model) if copies else None
        self.tensor = Ranks(tensor, backend, model=self.model) if tensor else None
        self.stages = Ranks(stages, model=self.model) if stages else None

    def _open(self, name: str, backend: str) -> Lane:
        store = distributed_c10d.PrefixStore(name, self._store)
        lane = Lane(f"{self.model.number}/{self.members[0]}-{self.members[-1]}/{name}", self.members, self.model, store)
        lane.agreeing = lane.moving = self._connected(store)
        if name == ROWS:
            lane.moving = self._connected(distributed_c10d.PrefixStore("moving", store))
        if backend != "gloo" and name in (GATHER, REDUCE):
            lane.moving = _open_on_device(backend, distributed_c10d.PrefixStore(backend, store), self.rank, self.size)
            lane.on_device = True
            self.model.watch.to_abort.append(lane.moving)
        return lane

    def _connected(self, store: Any) -> Any:
        try:
            group = dist.ProcessGroupGloo(store, self.rank, self.size, CONNECTING)
        except RuntimeError as error:
            raise RanksError(f"the ranks {self.members} could not be connected in outsize.prepare ({error})") from error
        group._set_default_timeout(PATIENCE)
        return group

    def open_rows(self) -> None:
        """Open the lane of `counts` and `trade`; safe to repeat."""
        if ROWS not in self._lanes:
            self._lanes[ROWS] = self._open(ROWS, "gloo")

    # -- what is moved -----------------------------------------------------------------------------------------------

    def turn_to_gather(self, unit: int, numel: int, row: int = -1) -> Turn:
        """The place of a gather that the conveyor will start. Called by the thread that uses the model."""
        return self._lanes[GATHER].next(GATHER, unit, numel, row=row)

    def all_gather(self, flat: torch.Tensor, turn: Turn) -> Going:
        """Start to complete `flat` (1-D, a multiple of `size`), of which this rank has its own part in place."""
        return self._start(turn, lambda group: group._allgather_base(flat, self._part(flat)), flat.numel())

    def reduce(
        self, flat: torch.Tensor, unit: int, split: bool, fixed: bool = False, row: int = -1
    ) -> tuple[Going, torch.Tensor]:
        """Start to add up `flat` over the ranks; the sum, or with `split` this rank's part of it, where it will be.
        `flat` is spent.

        `fixed`: it comes in the order of the model, whatever this rank has used; `row`: of a tile."""
        turn = self._lanes[REDUCE].next(REDUCE, unit, flat.numel(), fixed, row)
        sent = flat.numel() if split else 2 * flat.numel()
        own = self._part(flat) if split else flat
        if split and flat.device.type != "cpu":  # gloo's own reduce-scatter takes twice the time of an all-reduce
            own = torch.empty_like(own)
            return self._start(turn, lambda group: group._reduce_scatter_base(own, flat), sent), own
        return self._start(turn, lambda group: _all_reduce(group, flat), sent), own

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        """What is this rank's of a 1-D tensor."""
        share = flat.numel() // self.size
        return flat[self.rank * share : (self.rank + 1) * share]

    def most(self, flags: torch.Tensor, unit: int) -> Going:
        """Start to replace `flags` (in host memory) by the largest of any rank, behind the unit's reduction."""
        turn = self._lanes[REDUCE].next("presence", unit, flags.numel(), fixed=True)
        return self._start(turn, lambda group: _all_reduce(group, flags, dist.ReduceOp.MAX), on_host=True)

    def await_device(self) -> None:
        """Block until the collectives of the accelerator are over, before the host reads what came out of them."""
        work, self._last_on_device = self._last_on_device, None
        while work is not None and not work.is_completed():  # NCCL ends a communicator after a wait with a limit
            self.model.check("a collective")
            time.sleep(0.001)

    def _start(self, turn: Turn, start: Callable[[Any], Any], numel: int = 0, on_host: bool = False) -> Going:
        """`numel`: elements that this rank sends, for the count."""
        lane = turn.lane
        if not turn.expected:
            lane.exchange(turn)
        self.model.counts.update({turn.kind: numel, f"{turn.kind} calls": 1})
        group = lane.agreeing if on_host else lane.moving
        work, on_stream = start(group), lane.on_device and not on_host
        if on_stream:
            self._last_on_device = work
        return Going(self, work, turn, on_stream)

    # -- what is agreed on -------------------------------------------------------------------------------------------

    def combine(self, values: torch.Tensor, kind: str, op: str = "sum") -> torch.Tensor:
        """`values` (CPU) summed, or their largest or smallest, over the ranks; in place."""
        turn = self._lanes[CONTROL].next(kind, -1, values.numel())
        self._start(turn, lambda group: _all_reduce(group, values, getattr(dist.ReduceOp, op.upper()))).wait()
        return values

    def collect(self, value: object, kind: str, lane: str = CONTROL) -> list[Any]:
        """`value` of every rank, in the order of ranks. Small things that pickle."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        of, turn = self._lanes[lane], self._lanes[lane].next(kind)
        sizes = [size for size, *_ in of.exchange(turn, content.numel())]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: content.numel()] = content
        every = torch.empty(self.size, padded.numel(), dtype=torch.uint8, device="cpu")
        of.wait(of.agreeing._allgather_base(every.view(-1), padded), turn)
        # What comes in was written by this very program on another rank of the job.
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(every, sizes, strict=True)]

    def counts(self, own: torch.Tensor, kind: str, unit: int) -> torch.Tensor:
        """How many rows each rank is about to `trade` with each [size, size]; `own`: this one (int64 [size])."""
        every = torch.empty(self.size, self.size, dtype=torch.int64, device="cpu")
        turn = self._lanes[ROWS].next(kind, unit, every.numel())
        self._start(turn, lambda group: group._allgather_base(every.view(-1), own), own.numel()).wait()
        return every

    def trade(self, rows: torch.Tensor, sent: list[int], received: list[int], kind: str, unit: int) -> torch.Tensor:
        """Send each rank its rows of `rows` (CPU), as many as are `sent` to it, one after the other; those that come,
        in the order of ranks. It follows `counts`, so all ranks know of it."""
        turn = self._lanes[ROWS].next(kind, unit, fixed=True)
        came = rows.new_empty(sum(received), *rows.shape[1:])
        self._start(turn, lambda group: group.alltoall_base(came, rows, received, sent), rows.numel()).wait()
        return came

    def meet(self, kind: str, number: int = 0) -> list[int]:
        """Wait until all ranks are here; the `number` of each."""
        lane = self._lanes[CONTROL]
        turn = lane.next(kind)
        if number:
            lane.want(turn)
        return [each for each, *_ in lane.exchange(turn, number)]

    def wanted(self) -> bool:
        """Whether a rank waits for this one, to meet it with a number or to gather."""
        return self._lanes[CONTROL].wanted() or self._lanes[GATHER].wanted()

    def agree_on_step(self, told: Mapping[str, str], news: bool = False) -> bool:
        """Raise on every rank unless all are about to do the same step, which `told` describes. See Note [One order of
        collectives]. Returns whether any rank has `news`."""
        lanes = [lane for name, lane in self._lanes.items() if name != SAVE]
        turn = self._lanes[CONTROL].next("step")
        steps, orders = sorted(told.items()), [lane.come for lane in lanes]
        sums = (crc32(repr(each).encode()) for each in (steps, orders))
        rows = self._lanes[CONTROL].exchange(turn, *sums, int(news))
        if len({step for step, *_ in rows}) > 1:
            self._disagree(told)
        for lane in lanes:
            lane.step(alike=len({order for _, order, _ in rows}) == 1)
        return any(news for *_, news in rows)

    def _disagree(self, mine: Mapping[str, str]) -> NoReturn:
        """Name the first entry that differs."""
        every = self.collect(dict(mine), "step")
        names = sorted({name for each in every for name in each})
        name = next((name for name in names if len({each.get(name) for each in every}) > 1), "?")
        parts = _who_says_what(dict(zip(self.members, [each.get(name, "no gradient") for each in every], strict=True)))
        raise self.model.failed(
            f"the ranks take different steps in step {self.model.step}. For {name!r}: {parts}. Clip, scale, schedule "
            f"and call zero_grad alike on every rank, and set gradients to the same values. Nothing was updated"
        )

    @property
    def alone(self) -> bool:
        """Whether this rank has a stage of a pipeline, and no other one has parts of its parameters."""
        return self.stages is not None and self.size == 1 and self.copies is None and self.tensor is None

    # -- all groups --------------------------------------------------------------------------------------------------

    def everyone(self) -> list[Ranks]:
        """The groups whose members, one after the other, reach every rank of the job."""
        return [*self.in_stage(), *([] if self.stages is None else [self.stages])]

    def in_stage(self) -> list[Ranks]:
        """The groups that reach every rank with a part of the same parameters: all ranks of a stage."""
        return [*self.alike(), *([] if self.tensor is None else [self.tensor])]

    def alike(self) -> list[Ranks]:
        """The groups that reach every rank which has the same parameters."""
        return [self] if self.copies is None else [self, self.copies]


def _meet(everyone: list[int], sync: bool) -> Model:
    """Wait until all ranks are here. Where they share a model already, its watch finds out if they never will."""
    number, own = next(_made), dist.get_rank()
    shared = [each for each in _open_models() if each.watch.members == everyone and not each.watch.closed]
    watch = Watch(_own_store(number, everyone, apart=True), everyone, own, partial(_stuck, everyone))
    model = Model(number, sync, watch)
    lane = Lane("prepare", everyone, model)
    with _lock:
        _models.add(model)
    _listen_to_errors()
    began, told = time.monotonic(), False
    try:
        with lane.waiting(lane.next("outsize.prepare of another model", number)):
            while missing := watch.missing():
                if shared and not shared[0].watch.over:
                    shared[0].check("outsize.prepare", remedy="")
                waited = time.monotonic() - began
                if waited > MEETING.total_seconds():
                    raise RanksError(
                        f"{named(missing)} did not come to outsize.prepare within {MEETING}: every rank must call it, "
                        f"as often as the others"
                    )
                if waited > MEETING_WORD_SECONDS and not told:
                    told = True
                    here, away = named([own]), named(missing)
                    logger.warning("%s waits in outsize.prepare for %s, as every rank must call it", here, away)
                time.sleep(LOOK.total_seconds())
    except BaseException:
        model.close()
        raise
    return model


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _who_says_what(words: Mapping[int, str]) -> str:
    """What each rank says, the ranks that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, each in words.items():
        said.setdefault(each, []).append(rank)
    return "; ".join(f"{named(ranks)}: {each}" for each, ranks in said.items())


def _stuck(members: Sequence[int]) -> Wait | None:
    """What this rank has been waiting for, for some time, of whatever model these ranks share."""
    models = [model for model in reversed(_open_models()) if model.watch.members == members]
    lanes = [lane for model in models for lane in list(model.lanes)]  # what the loop waits for comes before a gather
    lanes.sort(key=lambda lane: not lane.name.endswith(ROWS))
    come = {lane.name: (lane.before, list(lane.come)) for lane in lanes}
    for lane in lanes:
        for since, turn in sorted(lane.waits.values(), key=lambda each: each[1].number):
            if not lane.name.endswith(SAVE) and time.monotonic() - since > STUCK_SECONDS:
                return Wait(lane.model.words(turn), lane.name, turn.number, turn.key, lane.members, come)
    return None


def _open_on_device(backend: str, store: Any, rank: int, size: int) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(f"outsize cannot open groups of torch.distributed's backend {backend!r} yet; use one rank")
    return plugin.creator_fn(store, rank, size, PATIENCE)


def collectives() -> int:
    """How many collectives of torch's groups this process has begun: those of the user and of layers, none of ours."""
    groups: Iterable[Any] = distributed_c10d._world.pg_map if dist.is_available() and dist.is_initialized() else ()
    begun = 0
    for group in groups:
        with suppress(RuntimeError):  # this kind of group does not count
            begun += group._get_sequence_number_for_group()
    return begun


def _all_reduce(group: Any, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([values], options)


_made = itertools.count()  # every rank makes its groups in the same order


def _own_store(number: int, members: Sequence[int], apart: bool = False) -> Any:
    """A place of its own in the store of the job. After a restart the store may still hold what the last try wrote.

    `apart`: on a connection of its own, which nobody else's waiting holds up."""
    store: Any = distributed_c10d._get_default_store()
    base = store
    while isinstance(base, distributed_c10d.PrefixStore):
        base = base.underlying_store
    if apart and type(base).__name__ == "TCPStore" and hasattr(store, "clone"):
        store = store.clone()  # a store in memory or in a file has no connection
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed_c10d.PrefixStore(f"outsize/{attempt}/{number}/{members[0]}-{members[-1]}", store)


_models: weakref.WeakSet[Model] = weakref.WeakSet()
_lock = threading.Lock()  # the watches look at all


def _open_models() -> list[Model]:
    with _lock:
        return sorted(_models, key=lambda each: each.number)


def _tell_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An error ends this process: say so to the others, who wait for it. Where one of torch's own connections broke
    (of pipelines, of tensor parallelism), first find out and say which rank is gone."""
    for model in _open_models():
        if _broke(error) and (gone := model.watch.find_gone()) is not None:
            rank, became = gone
            logger.error("%s%s", "" if rank is None else f"{named([rank])} of {dist.get_world_size()} ", became)
        model.watch.tell(error)
    _excepthook(kind, error, trace)


def _broke(error: BaseException | None) -> bool:
    """Whether the error comes from a connection of torch.distributed."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _listen_to_errors() -> None:
    global _excepthook
    if _excepthook is None:  # once: whoever has chained to it meanwhile is called before it
        _excepthook, sys.excepthook = sys.excepthook, _tell_all


_excepthook: Any = None


def _close_all() -> None:
    for model in _open_models():
        model.close()


atexit.register(_close_all)
