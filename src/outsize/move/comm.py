"""The collectives of one rank: all-gather and reduce-scatter of one flat buffer, and agreement on what comes next."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outsize.move.purpose import AHEAD, OFFER, WANT, Purpose, Turn, decode, encode, turn_of, words_for
from outsize.move.waiting import LANES, Waiting
from outsize.move.waiting import RanksError as RanksError  # whoever speaks to ranks expects it

# Note [Lanes]
# Collectives of one group must start in the same order on every rank. Those of the conveyor's thread, those of the
# backward and those that the user's loop asks for run beside each other, so each kind has a group of its own: a lane.
# Before a collective the lane agrees on what it is for (a few bytes): ranks that have gone different ways find out
# before a byte of one lands in the place of another.
# On an accelerator each lane's collectives have a stream of their own, which NCCL keeps. It begins behind what is in
# the stream that is current: for a gathering the one that fills the buffers, beside the computation; for a reduction
# the backward's, whose gradients it takes.

CONNECTING = timedelta(minutes=2)
"""All ranks have come to `prepare`, and make their groups."""

PATIENCE = timedelta(days=7)
"""Of the groups themselves: how long to wait is decided here."""


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
        self._of: weakref.ref[Ranks] | None = None  # the ranks whose `copies` or `tensor` these are
        _listen_to_errors()
        number = next(_made)
        stores = _own_store(number, self.members), _own_store(number, self.members, apart=True)
        self.waiting = Waiting(self.members, number, stores, self._words, self._busy, self.fail)
        self.copies = Ranks(copies, backend) if copies else None
        self.tensor = Ranks(tensor) if tensor else None
        for group in (self.copies, self.tensor):
            if group is not None:
                group._of = weakref.ref(self)
        self._agreeing: dict[str, Any] = {lane: self._open(lane, stores[0]) for lane in LANES}
        self._groups = dict(self._agreeing)
        if backend != "gloo":
            self._groups |= {lane: self._open_on_device(backend, lane, stores[0]) for lane in LANES[:2]}
        self._gave_up = False
        with _open_lock:
            _open.add(self)

    def _open(self, lane: str, store: Any) -> Any:
        own = distributed_c10d.PrefixStore(lane, store)
        try:
            group = dist.ProcessGroupGloo(own, self.rank, self.size, CONNECTING)
        except RuntimeError as error:
            raise RanksError(f"the ranks {self.members} could not be connected in outsize.prepare ({error})") from error
        group._set_default_timeout(PATIENCE)
        return group

    def _open_on_device(self, backend: str, lane: str, store: Any) -> Any:
        own = distributed_c10d.PrefixStore(f"{backend}-{lane}", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            return dist.ProcessGroupNCCL(own, self.rank, self.size, options)
        plugin = dist.Backend._plugins.get(backend.upper())
        if plugin is None or plugin.extended_api:
            raise ValueError(f"outsize cannot open groups of torch.distributed's backend {backend!r} yet; use one rank")
        return plugin.creator_fn(own, self.rank, self.size, PATIENCE)

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
        parts = self.waiting.who_says_what([each.get(name, "no gradient") for each in every])
        error = RanksError(
            f"the ranks take different steps in step {self.step}. For {name!r}: {parts}. Clip, scale, schedule and "
            f"call zero_grad alike on every rank. Nothing was updated"
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
            group.waiting.watch.tell(f"{type(error).__name__}: {error}")

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
                raise self.waiting.different_ways([self._words(each) for each in found])

    def _exchange(self, lane: str, purpose: Purpose) -> list[Purpose]:
        """What every rank is about to do on the lane."""
        giving = self.giving if lane == "control" else None
        ready = () if giving is None else giving.ready
        mine = torch.tensor(encode(purpose, ready, 0 if giving is None else words_for(len(self.names))), device="cpu")
        every = torch.empty(self.size, len(mine), dtype=mine.dtype, device="cpu")
        work = self._agreeing[lane]._allgather_base(every.view(-1), mine)
        with self.waiting.agreeing(lane, purpose):
            self._await(work, purpose)
        found, common = decode(every.tolist())
        if giving is not None and common:
            giving.reduce(common)
        return found

    def _await(self, work: Any, purpose: Purpose, moves: bool = False) -> None:
        """`moves`: it is of a group that may be an accelerator's."""
        asking = moves and self._groups["gather"] is not self._agreeing["gather"]
        try:
            self.waiting.until_over(work, purpose, asking)
        except BaseException:
            self._leave_open()
            raise
        self.waiting.finish(work, purpose)

    def _words(self, purpose: Purpose) -> str:
        return purpose.words(self.names)

    def _busy(self) -> bool:
        return self.giving is not None and self.giving.busy()

    def _leave_open(self) -> None:
        """See Note [Nobody hangs] in move/waiting.py."""
        if self._gave_up:
            return
        self._gave_up = True
        for group in {*self._groups.values(), *self._agreeing.values()}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never to be closed

    def close(self) -> None:
        """Leave the groups; safe to repeat."""
        self.waiting.watch.close()
        for group in self.everyone()[1:]:
            group.close()
        self._groups, self._agreeing = {}, {}


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


_open: weakref.WeakSet[Ranks] = weakref.WeakSet()
_open_lock = threading.Lock()  # the watches look at all


def _tell_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An error ends this process: say so to the others, who wait for it."""
    with _open_lock:
        every = list(_open)
    for ranks in every:
        ranks.waiting.watch.tell(f"{kind.__name__}: {error}")
    _excepthook(kind, error, trace)


def _listen_to_errors() -> None:
    global _excepthook
    if _excepthook is None:  # once: whoever has chained to it meanwhile is called before it
        _excepthook, sys.excepthook = sys.excepthook, _tell_all


_excepthook: Any = None


def _close_all() -> None:
    with _open_lock:
        every = list(_open)
    for ranks in every:
        ranks.close()


atexit.register(_close_all)
