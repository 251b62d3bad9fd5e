"""Whether the other ranks are still there: each counts in the store of the job, and says what it waits for."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, ClassVar, final

BEAT_SECONDS = 0.5
SILENT_SECONDS = 6.0
"""While ranks connect, one whose count stands still for so long is gone. Once a connection broke, half as long."""

STILL_SECONDS = 60.0
"""A rank whose count stands still for so long is gone though no connection broke: stopped, or cut off. A rank that
reads gigabytes of pickles counts nothing meanwhile, so this may not be short."""

WORD_SECONDS = 30.0
"""After so long a wait for the same the log says for whom."""

ENDED = "has ended its run"

logger = logging.getLogger("outsize")


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: that all `members` come to the `turn`-th collective of `lane`, which is `key`."""

    words: str
    """For errors."""
    lane: str
    turn: int
    key: int
    members: Sequence[int]
    come: Mapping[str, tuple[int, Sequence[int]]]
    """By lane: how many collectives this rank had come to in earlier steps, and the keys of those in this step."""

    def has_come(self, other: Wait) -> bool:
        """Whether this rank has come to what the other one waits for."""
        before, keys = self.come.get(other.lane, (0, ()))
        at = other.turn - before
        return at < 0 or (at < len(keys) and keys[at] == other.key)


def apart(every: Mapping[int, Wait]) -> bool:
    """Whether each rank waits for one that waits itself, for something else: then nobody will ever go on.

    A rank to which all others have come is merely slow, however far they have gone since.
    """
    return all(
        any(rank in every and not every[rank].has_come(each) for rank in each.members) for each in every.values()
    )


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def await_closed() -> None:
    """When all watches are closed: block until their threads are over, `SILENT_SECONDS` at the most. One that comes
    back from torch's store when Python has ended aborts the process."""
    until = time.monotonic() + SILENT_SECONDS
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(max(until - time.monotonic(), 0))


_THREAD = "outsize-ranks"


@final
class Watch:
    """A thread that counts in the store, looks whether others count, and compares what ranks wait for."""

    # Note [Nobody hangs]
    # A rank waits for a collective by asking again and again. Meanwhile this thread looks after the other ranks:
    # - each counts in the store twice a second, and looks whether the next one counts;
    # - a rank that fails, ends or stands still is named in the store, which ends the waiting of all others;
    # - where a rank has waited for some time it writes what it waits for, and its count, again and again. If all have,
    #   and look anew and write the same, and each waits for one that is waiting elsewhere, the ranks have parted, and
    #   all end. A rank that is slow is waited for, and after half a minute the log says so. What one wrote before it
    #   stood still counts for nothing, and one that may go where it is wanted does not wait.

    _said_last: ClassVar[str] = ""

    def __init__(self, store: Any, members: Sequence[int], rank: int, stuck: Callable[[], Wait | None]) -> None:
        """`members`: the ranks of the job that share the model, this one, `rank`, among them; `stuck`: what this rank
        has been waiting for, for some time."""
        self.apart: dict[int, str] = {}
        """What each rank waits for, where that will never come."""
        self.said: tuple[int | None, str] | None = None
        """(rank, what became of it) of the first one that cannot go on; None in place of a rank: it was the store."""
        self.since = 0.0
        self.to_abort: list[Any] = []
        """Groups of an accelerator. The host may wait inside their work when a rank is gone."""
        self.members = list(members)
        self._store, self._stuck, self._rank, self._pid = store, stuck, rank, os.getpid()
        self._beats, self._told, self._told_stuck = 0, False, ""
        self._stuck_since = 0.0
        self._all_stuck: list[bytes] = []  # what all ranks waited for when this one looked last
        self._counts: list[int] = []  # of each when this one saw that first
        self._neighbour = self.members[(self.members.index(rank) + 1) % len(members)]
        self._seen: dict[int, tuple[bytes, float]] = {}  # by rank: its last count, and since when
        self._looked = 0.0  # when this rank looked last
        self._closing = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether nobody looks any more."""
        return self._closing.is_set()

    @property
    def over(self) -> bool:
        """Whether a rank has come to the good end of its run with this model, this one or another."""
        return self.closed or (self.said is not None and self.said[1] == ENDED)

    def missing(self) -> list[int]:
        """The ranks that have not begun to count."""
        return [rank for rank in self.members if not self._store.check([f"beat/{rank}"])]

    def tell(self, error: BaseException) -> None:
        """Leave word for the others, once."""
        if not self._told and os.getpid() == self._pid:
            self._told = True
            with suppress(RuntimeError):  # the store is gone, and with it the rank that kept it
                self._leave_word(self._rank, f"has failed ({type(error).__name__}: {error})"[:2000])

    def find_gone(self) -> tuple[int | None, str] | None:
        """Who went first, once a connection broke. Looks until it is sure, or has looked often enough: a rank that
        broke off may count a little longer. No seconds are counted, as the machine may stand still meanwhile."""
        self._seen = {}
        for _ in range(ceil(1.5 * SILENT_SECONDS / BEAT_SECONDS)):
            if self.said is not None or not self.look(self.members, SILENT_SECONDS / 2):
                break
            if self._closing.wait(BEAT_SECONDS):
                break
        return self.said

    def close(self) -> None:
        """Look no more, and tell the others that this rank has come to its end; safe to repeat."""
        if self.closed or os.getpid() != self._pid:
            return
        self._closing.set()
        with suppress(RuntimeError):
            self._store.set("ended", f"{self._rank} {ENDED}")

    def beat(self) -> bool:
        """Count, and look around; False where there is nobody to ask any more."""
        self._beats += 1
        return self.look([self._neighbour], STILL_SECONDS, str(self._beats))

    def look(self, ranks: Sequence[int], patience: float, count: str = "") -> bool:
        """At what was left for all, at the counts of these ranks, and with a `count` at what the others wait for."""
        try:
            if count:
                self._store.set(f"beat/{self._rank}", count)
                self._compare()
            ended, word = self._get("ended"), self._get("word")  # a rank that fails leaves its word before it ends
            for content in (word, ended):
                if content:
                    rank, what = content.decode(errors="replace").split(" ", 1)
                    if int(rank) != self._rank:
                        self._hear(int(rank), what)
            self._look_at(ranks, patience)
        except Exception:  # the store went with the rank that kept it
            self._hear(None, "the store of this job, which rank 0 or the launcher keeps, is gone")
            return False
        return True

    def _look_at(self, ranks: Sequence[int], patience: float) -> None:
        now = time.monotonic()
        if now - self._looked > min(patience, SILENT_SECONDS):  # a rank that has not looked has seen nothing
            self._seen = {}
        self._looked = now
        for rank in ranks:
            beat = self._get(f"beat/{rank}")
            before, since = self._seen.setdefault(rank, (beat, now))
            if beat != before:
                self._seen[rank] = (beat, now)
            elif beat and rank != self._rank and now - since > patience and not self._get("ended"):
                self._leave_word(rank, "is gone (killed, ended or unreachable)")

    def _run(self) -> None:
        while not self._closing.wait(BEAT_SECONDS) and self.beat():
            pass

    def _hear(self, rank: int | None, what: str) -> None:
        if self.said is None:
            self.since = time.monotonic()
            self.said = rank, what
            self._abort()

    def _abort(self) -> None:
        for group in self.to_abort:
            with suppress(Exception):  # not every backend can
                group.abort()

    def _leave_word(self, rank: int, what: str) -> None:
        """The first word stays, as far as ranks do not speak at the same moment."""
        if not self._get("word"):
            self._store.set("word", f"{rank} {what}")

    def _compare(self) -> None:
        """Say what this rank waits for; if every rank does, and has looked anew since, see whether they parted."""
        own = self._stuck()
        stuck = "-" if own is None else json.dumps(asdict(own))
        if stuck != self._told_stuck:
            self._stuck_since = time.monotonic()
        if own is not None or stuck != self._told_stuck:
            self._store.set(f"stuck/{self._rank}", f"{self._beats} {stuck}")
        self._told_stuck = stuck
        before, self._all_stuck = self._all_stuck, []
        if own is None:
            return
        found = [(self._get(f"stuck/{rank}") or b"0 -").split(b" ", 1) for rank in self.members]
        counts, self._all_stuck = [int(count) for count, _ in found], [what for _, what in found]
        if self._all_stuck != before:
            self._counts = counts
        # The first count after that may come with what the rank had found before.
        elif b"-" not in before and all(now >= then + 2 for now, then in zip(counts, self._counts, strict=True)):
            every = {rank: Wait(**json.loads(each)) for rank, each in zip(self.members, before, strict=True)}
            if apart(every):
                self._store.set("apart", json.dumps({rank: each.words for rank, each in every.items()}))
        if (words := self._get("apart")) and not self.apart:
            self.apart = {int(rank): each for rank, each in json.loads(words).items()}
            self._abort()
        stuck_of = dict(zip(self.members, self._all_stuck, strict=True))
        elsewhere = [rank for rank in own.members if stuck_of[rank] == b"-"]
        if elsewhere and own.lane != "prepare" and time.monotonic() - self._stuck_since > WORD_SECONDS:
            self._say(own.words, elsewhere)

    def _say(self, words: str, elsewhere: Sequence[int]) -> None:
        """Once for what this rank waits in, however many models look, and whoever joins or leaves the others."""
        if words != Watch._said_last:
            Watch._said_last = words
            here, away = named([self._rank]), named(elsewhere)
            with suppress(Exception):  # whatever a handler of the user's does, the others are looked after
                logger.warning(
                    "%s waits in %s for %s (slow, stopped, or waiting outside of outsize)", here, words, away
                )

    def _get(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._store.check([key]) else b""
