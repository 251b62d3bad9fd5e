"""Who of the ranks is still there: each counts in the store that all share, and looks whether the others count."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

BEAT_SECONDS = 0.5
SILENT_SECONDS = 6.0
"""Once a connection broke, a rank whose count stands still for half as long is the one that is gone."""

ENDED = "has ended its run"
STILL_SECONDS = 60.0
"""A rank whose count stands still for so long is gone though no connection broke: stopped, or cut off. Less would be
taken for it by one that reads gigabytes of pickles, in which no other thread of Python runs."""


@dataclass(frozen=True)
class Standstill:
    """What a rank waits for: the others, to agree with it for the `turn`-th time on `lane`."""

    words: str
    """For errors."""
    lane: str
    turn: int
    come: Mapping[str, int]
    """By lane, how often this rank has come to agree."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Standstill:
        return cls(**json.loads(text))


def apart(every: Sequence[Standstill]) -> bool:
    """Whether each rank waits for one that will not come, since it waits itself, elsewhere.

    A rank to which all others have come already is merely slow, however far they have gone meanwhile.
    """
    return all(any(other.come.get(each.lane, 0) < each.turn for other in every) for each in every)


@final
class Watch:
    """Counts in the store that all ranks share, and looks whether the others count."""

    def __init__(self, store: Any, rank: int, size: int, stuck: Callable[[], Standstill | None]) -> None:
        """`stuck`: what this rank has been waiting for, for some time; None while it goes on."""
        self._stuck, self._told_stuck = stuck, ""
        self._all_stuck: list[str] = []
        self.apart: list[str] = []  # what each rank waits for, where all wait and not for the same
        self._store = store
        self._pid = os.getpid()
        self._rank, self._size = rank, size
        self._beat = 0
        self._seen = (b"", 0.0)  # the neighbour's last count, and since when
        self._looked = 0.0  # when this rank looked last
        self._said: tuple[int | None, str] | None = None
        self.since = 0.0
        self._told = False
        self._closing = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="outsize-ranks", daemon=True)
        self._thread.start()

    @property
    def said(self) -> tuple[int | None, str] | None:
        """(place in the group, what became of it) of the first rank that cannot go on; None: it was no rank."""
        return self._said

    @said.setter
    def said(self, value: tuple[int | None, str]) -> None:
        if self._said is None:
            self._said, self.since = value, time.monotonic()

    @property
    def over(self) -> bool:
        """Whether a rank has come to the good end of its run with this model, this one or another."""
        return self.closed or (self._said is not None and self._said[1] == ENDED)

    @property
    def closed(self) -> bool:
        """Whether nobody looks any more."""
        return self._closing.is_set()

    def tell(self, message: str) -> None:
        """Leave word for the others, once."""
        if not self._told and os.getpid() == self._pid:
            self._told = True
            with suppress(RuntimeError):  # the store is gone, and with it the rank that kept it
                self._leave_word(self._rank, f"has failed ({message[:2000]})")

    def _leave_word(self, rank: int, what: str) -> None:
        """The first word stays, as far as ranks do not speak at the same moment."""
        if not self._store.check(["word"]):
            self._store.set("word", f"{rank} {what}")

    def find_gone(self) -> tuple[int | None, str] | None:
        """What there is to say of the rank that went first, once a connection broke. Looks until it is sure, and no
        longer than `SILENT_SECONDS`: a rank that broke off may count a little longer."""
        seen: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < until:
            if self.said is not None or not self._look_safely():
                break
            now = time.monotonic()
            for rank, beat in self._beats().items():
                if rank not in seen or seen[rank][0] != beat:
                    seen[rank] = (beat, now)
                elif rank != self._rank and now - seen[rank][1] > SILENT_SECONDS / 2:
                    self.said = (rank, "is gone (killed, ended or unreachable)")
            if self._closing.wait(BEAT_SECONDS):
                break
        return self.said

    def _run(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            self._beat += 1
            if not self._look_safely(f"beat/{self._rank}", str(self._beat)):
                return

    def _look_safely(self, *beat: str) -> bool:
        """Set `beat` and look around; False where there is nobody to ask any more."""
        try:
            if beat:
                self._store.set(*beat)
                self._compare()
            self._look()
        except Exception:  # the store went with the rank that kept it
            self.said = (None, "the store of this job, which rank 0 or the launcher keeps, is gone")
            return False
        return True

    def _look(self) -> None:
        """At the neighbour's count, and at what was left for all: as many requests however many ranks there are."""
        for key in ("word", "ended"):
            if self._store.check([key]):
                rank, what = self._store.get(key).decode(errors="replace").split(" ", 1)
                if int(rank) != self._rank:
                    self.said = (int(rank), what)
        neighbour = (self._rank + 1) % self._size
        key, now = f"beat/{neighbour}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        slept, self._looked = now - self._looked > SILENT_SECONDS, now
        if beat != self._seen[0] or slept:  # who has not looked has seen nothing
            self._seen = (beat, now)
        elif beat and now - self._seen[1] > STILL_SECONDS and not self._store.check(["ended"]):
            self._leave_word(neighbour, "is gone (killed or unreachable)")

    def _compare(self) -> None:
        """Look whether every rank waits, and what for, where this one does."""
        own = self._stuck()
        stuck = "" if own is None else own.to_text()
        if stuck != self._told_stuck:
            self._told_stuck = stuck
            self._store.set(f"stuck/{self._rank}", stuck or "-")  # a store keeps no empty values
        keys = [f"stuck/{rank}" for rank in range(self._size)]
        if not stuck or not self._store.check(keys):
            self._all_stuck = []
            return
        every = [self._store.get(key).decode() for key in keys]
        if "-" in every:
            every = []
        if every and every == self._all_stuck:
            found = [Standstill.from_text(each) for each in every]
            if apart(found):
                self.apart = [each.words for each in found]
        self._all_stuck = every

    def _beats(self) -> dict[int, int]:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        try:
            values = [self._store.get(key) for key in keys if self._store.check([key])]
        except RuntimeError:
            return {}
        return {rank: int(value) for rank, value in enumerate(values)} if len(values) == self._size else {}

    def close(self) -> None:
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        with suppress(RuntimeError):
            self._store.set("ended", f"{self._rank} {ENDED}")
