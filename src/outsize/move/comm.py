"""What the ranks that share a model do together: collectives, in one order on all, and agreement on what comes next."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn, final
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outsize.move.lanes import (
    CONTROL,
    GATHER,
    LANES,
    REDUCE,
    ROW_VALUES,
    ROWS,
    SAVE,
    Going,
    Lane,
    Model,
    RanksError,
    Turn,
    who_says_what,
)
from outsize.move.meeting import meet, own_store
from outsize.move.watch import BEAT_SECONDS, SILENT_SECONDS

CONNECTING = timedelta(minutes=2)
"""All ranks have come to `prepare`, and make their groups."""

PATIENCE = timedelta(days=7)
"""Of the groups themselves: how long to wait is decided here."""


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
        self.model = model or meet(sorted(everyone or members), sync)
        self._backend = backend
        self._last_on_device: Any = None
        self._store = own_store(self.model.number, self.members)
        try:
            self._lanes = {name: self._open(name) for name in LANES}
            self.copies = Ranks(copies, backend, model=self.model) if copies else None
            self.tensor = Ranks(tensor, backend, model=self.model) if tensor else None
            self.stages = Ranks(stages, model=self.model) if stages else None
        except BaseException as error:
            self.model.watch.tell(error)
            self.model.close()
            raise

    def _open(self, name: str) -> Lane:
        store = distributed_c10d.PrefixStore(name, self._store)
        lane = Lane(f"{self.model.number}/{self.members[0]}-{self.members[-1]}/{name}", self.members, self.model, store)
        lane.agreeing = lane.moving = self._connected(store)
        if name == ROWS:
            lane.moving = self._connected(distributed_c10d.PrefixStore("moving", store))
        if self.on_device and name in (GATHER, REDUCE, ROW_VALUES):
            own = distributed_c10d.PrefixStore(self._backend, store)
            lane.moving = _open_on_device(self._backend, own, self.rank, self.size)
            lane.on_device = True
            self.model.watch.to_abort.append(lane.moving)
        return lane

    def _connected(self, store: Any) -> Any:
        """A group of gloo's, which connects on a thread of its own: this one looks whether the others still count."""
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(dist.ProcessGroupGloo(store, self.rank, self.size, CONNECTING))
            except Exception as error:
                made.append(error)

        watch, thread = self.model.watch, Thread(target=connect, daemon=True)
        thread.start()
        while thread.is_alive() and watch.said is None:
            thread.join(BEAT_SECONDS)
            if thread.is_alive():
                watch.look(self.members, SILENT_SECONDS)
        group = made[0] if made else RanksError("they wait for each other")
        if not isinstance(group, Exception):
            group._set_default_timeout(PATIENCE)
            return group
        if (said := watch.find_gone()) is not None:
            raise self.model.gone(said, "outsize.prepare", ": start the job again") from group
        raise RanksError(f"the ranks {self.members} could not be connected in outsize.prepare ({group})") from group

    def open_rows(self) -> None:
        """Open the lanes of `counts` and `trade`; safe to repeat."""
        for name in (ROWS, ROW_VALUES) if self.on_device else (ROWS,):
            if name not in self._lanes:
                self._lanes[name] = self._open(name)

    @property
    def on_device(self) -> bool:
        """Whether parameters, gradients and rows move between accelerators, past the host."""
        return self._backend != "gloo"

    # -- what is moved -----------------------------------------------------------------------------------------------

    def turn_to_gather(self, unit: int, numel: int, row: int = -1) -> Turn:
        """The place of a gather that the conveyor will start. Called by the thread that uses the model."""
        return self._lanes[GATHER].next(GATHER, unit, numel, row=row)

    def all_gather(self, flat: torch.Tensor, turn: Turn) -> Going:
        """Start to complete `flat` (1-D, a multiple of `size`), of which this rank has its own part in place."""
        if not turn.lane.on_device:  # gloo's own all-gather takes memory for all of `flat`, and twice the time or more
            return self._start(turn, lambda group: Broadcasts(group, flat.chunk(self.size)), flat.numel())
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
        work, on_stream = lane.start(turn, lambda: start(group)), lane.on_device and not on_host
        if on_stream:
            self._last_on_device = work
        return Going(work, turn, on_stream)

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
        """Send each rank its rows of `rows`, as many as are `sent` to it, one after the other; those that come, in the
        order of ranks. It follows `counts`, so all ranks know of it. On an accelerator the current stream waits."""
        turn = self._lanes[ROWS if rows.device.type == "cpu" else ROW_VALUES].next(kind, unit, fixed=True)
        came = rows.new_empty(sum(received), *rows.shape[1:])
        self._start(turn, lambda group: group.alltoall_base(came, rows, received, sent), rows.numel()).wait()
        return came

    def meet(self, kind: str, number: int = 0) -> list[int]:
        """Wait until all ranks are here; the `number` of each."""
        lane = self._lanes[CONTROL]
        turn = lane.next(kind)
        if number or self.copies is not None:
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
        parts = who_says_what(dict(zip(self.members, [each.get(name, "no gradient") for each in every], strict=True)))
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


def exchange(groups: Iterable[Ranks], value: object, kind: str, lane: str = CONTROL) -> list[Any]:
    """`value` of every rank that the groups, one after the other, reach; small things that pickle."""
    every = [value]
    for group in groups:
        every = [each for found in group.collect(every, kind, lane) for each in found]
    return every


def combined(groups: Iterable[Ranks], values: Sequence[int], kind: str, op: str = "min") -> list[int]:
    """The smallest of each value, or the largest, on any rank that the groups, one after the other, reach."""
    found = torch.tensor(values, dtype=torch.int64, device="cpu")
    for group in groups:
        group.combine(found, kind, op)
    return found.tolist()


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


@final
class Broadcasts:
    """Each rank sends its part to all others, in place: as one piece of work."""

    def __init__(self, group: Any, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: of each rank one, in their order."""
        self._works = []
        self._failed = False
        for rank, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self._works.append(group.broadcast([part], options))

    def is_completed(self) -> bool:
        return self._failed or all(work.is_completed() for work in self._works)

    def wait(self, *limit: timedelta) -> None:
        """Where one has failed another may never be over, so those that are over come first."""
        for work in sorted(self._works, key=lambda each: not each.is_completed()):
            over = work.is_completed()
            try:
                work.wait(*limit)
            except RuntimeError:
                self._failed = over  # else the time is over
                raise


def _all_reduce(group: Any, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([values], options)
