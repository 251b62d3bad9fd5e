"""Who of the ranks is still there: each counts in the store that all share, and looks whether the others count."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

BEAT_SECONDS = 0.5
SILENT_SECONDS = 6.0
"""A rank whose count stands still for so long is gone: its process ended, was killed or lost the network."""


@final
class Watch:
    """Counts in the store that all ranks share, and looks whether the others count."""

    def __init__(self, store: Any, rank: int, size: int, stuck: Callable[[], str]) -> None:
        self._stuck, self._told_stuck = stuck, ""
        self._all_stuck: list[str] = []
        self.apart: list[str] = []  # what each rank waits for, where all wait and not for the same
        self._store = store
        self._pid = os.getpid()
        self._rank, self._size = rank, size
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._said: tuple[int, str] | None = None
        self.since = 0.0
        self._told = False
        self._closing = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="outsize-ranks", daemon=True)
        self._thread.start()

    @property
    def said(self) -> tuple[int, str] | None:
        """(rank, what became of it) of the first rank that cannot go on."""
        return self._said

    @said.setter
    def said(self, value: tuple[int, str]) -> None:
        if self._said is None:
            self._said, self.since = value, time.monotonic()

    @property
    def closed(self) -> bool:
        """Whether nobody looks any more."""
        return self._closing.is_set()

    def tell(self, message: str) -> None:
        """Leave word for the others, once."""
        if not self._told:
            self._told = True
            try:
                self._store.set(f"failed/{self._rank}", message[:2000])
            except RuntimeError:
                return

    def gone_soon(self) -> list[int]:
        """The ranks that do not count any more; looks for a moment."""
        before = self._beats()
        for _ in range(6):
            time.sleep(BEAT_SECONDS)
            if self.said is not None:
                return [self.said[0]]
        now = self._beats()
        return [rank for rank in before if rank != self._rank and now.get(rank) == before[rank]]

    def _run(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            try:
                self._beat += 1
                self._store.set(f"beat/{self._rank}", str(self._beat))
                self._look()
                self._compare()
            except Exception:  # the store went with the rank that kept it
                self.said = (0, "keeps the store of this job and is gone")
                return

    def _look(self) -> None:
        now = time.monotonic()
        for rank, beat in self._beats().items():
            if rank == self._rank:
                continue
            if self._store.check([f"failed/{rank}"]):
                message = self._store.get(f"failed/{rank}").decode(errors="replace")
                self.said = (rank, f"has failed ({message})")
            if self._store.check([f"ended/{rank}"]):
                self.said = (rank, "has ended its run")
            known = self._seen.get(rank)
            if known is None or known[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - known[1] > SILENT_SECONDS:
                self.said = (rank, "is gone (killed or unreachable)")

    def _compare(self) -> None:
        """Look whether every rank waits, and what for, where this one does."""
        stuck = self._stuck()
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
        if every and every == self._all_stuck and len(set(every)) > 1:
            self.apart = every
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
        try:
            self._store.set(f"ended/{self._rank}", "1")
        except RuntimeError:
            return
