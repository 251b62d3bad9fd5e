"""The order of collectives: turns of a lane, what ranks that wait look for, and the errors of ranks that part."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist

from outsize.move.tracing import begun, ended
from outsize.move.transfer import Transfer
from outsize.move.watch import Watch, named
from outsize.planning.trace import COLLECTIVES

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
# Rows of tables move by that kind too. So their lane has a second group, which moves them. On an accelerator it moves
# the numbers of rows, and a lane of its own moves their values.

CONTROL, REDUCE, GATHER, SAVE = LANES = "control", "reduce", "gather", "save"
ROWS, ROW_VALUES = "rows", "row values"
"""The lanes of tables, where there are any; the second one where values move on an accelerator."""

LOOK = timedelta(seconds=0.02)
"""How often a rank that waits looks whether the others are still there."""

GRACE_SECONDS = 1.0
"""A rank that ends has given its part to the last collective; the others may still be receiving it."""

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
            f"the ranks have gone different ways. {who_says_what(words)}. Every rank must run the same modules in the "
            f"same order, take the same number of steps, and call prepare, save, load, export and gathered with the "
            f"others. Ranks that use different modules by design (experts) need unused='sync'. The state at rest is "
            f"that of the last completed step"
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
        self.waits: dict[int, tuple[float, Turn, Callable[[], bool] | None]] = {}  # by thread: since when, for what
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
            with self.waiting(turn, None if on_stream else unless):
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

    def start(self, turn: Turn, begin: Callable[[], Any]) -> Any:
        """What `begin` returns: the collective of a turn, on its way. An accelerator's may connect the ranks first, or
        find that somebody is gone."""
        try:
            with self.waiting(turn):
                return begin()
        except RuntimeError as error:
            if not broke(error):
                raise
            self.model.leave_open()
            raise self.model.gone(self.model.watch.find_gone(), self.model.words(turn)) from error

    @contextmanager
    def waiting(self, turn: Turn, unless: Callable[[], bool] | None = None) -> Iterator[None]:
        thread = threading.get_ident()
        self.waits[thread] = time.monotonic(), turn, unless
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

    def __init__(self, work: Any, turn: Turn, on_stream: bool) -> None:
        """`on_stream`: an accelerator's. To wait for it makes the current stream wait, not the host."""
        self._work, self._turn = work, turn
        self.on_stream = on_stream
        self._began = begun()

    def wait(self) -> None:
        self._turn.lane.wait(self._work, self._turn, self.on_stream)
        ended(COLLECTIVES, f"{self._turn.kind} {self._turn.unit}", self._began)
        self._began = 0.0

    def done(self) -> bool:
        return self.on_stream or bool(self._work.is_completed())

    def over_unless(self, wanted: Callable[[], bool]) -> bool:
        """Wait, unless this rank is `wanted` elsewhere; whether it is over."""
        return self._turn.lane.wait(self._work, self._turn, self.on_stream, wanted)


def broke(error: BaseException | None) -> bool:
    """Whether the error comes from a connection of torch.distributed."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def who_says_what(words: Mapping[int, str]) -> str:
    """What each rank says, the ranks that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, each in words.items():
        said.setdefault(each, []).append(rank)
    return "; ".join(f"{named(ranks)}: {each}" for each, ranks in said.items())
