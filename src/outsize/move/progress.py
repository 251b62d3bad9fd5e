"""Signs of life: what takes longer than two seconds says how far it is."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar, final

from outsize.planning.sizes import format_bytes

logger = logging.getLogger("outsize")

QUIET_SECONDS = 2.0
"""What is over by then says nothing."""

BAR_SECONDS, LOG_SECONDS = 0.2, 10.0
"""Between two changes of the bar, and between two lines of the log."""

WIDTH = 24
"""Of the bar, in characters."""

Item = TypeVar("Item")


@final
class Progress:
    """How far a call is: a bar on a terminal, else lines in the log (`INFO`). Of several ranks the first one shows it.

    >>> with closing(Progress("outsize.load", total=nbytes)) as progress:
    ...     progress.add(4096)
    """

    def __init__(self, name: str, total: int = 0, shown: bool = True) -> None:
        """`total`: bytes in all; 0: not known. `shown=False`: nothing is ever said."""
        self._name, self._total = name, total
        self._shown = shown and os.environ.get("RANK", "0") == "0"
        self._bar = self._shown and sys.stderr is not None and sys.stderr.isatty()
        self._done = self._drawn = 0
        self._began = time.monotonic()
        self._next = self._began + QUIET_SECONDS

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if self._shown and (now := time.monotonic()) >= self._next:
            self._next = now + (BAR_SECONDS if self._bar else LOG_SECONDS)
            self._say(self._words(now - self._began))

    def over(self, items: Iterable[Item], nbytes: Callable[[Item], int]) -> Iterator[Item]:
        """The items, each of which is done when the next one is asked for."""
        for item in items:
            done = nbytes(item)
            yield item
            del item  # it may be large, and the next one takes memory
            self.add(done)

    def _words(self, seconds: float) -> str:
        rate = self._done / seconds
        speed = f"{format_bytes(round(rate))}/s"
        if not self._total:
            return f"{self._name}: {format_bytes(self._done)}, {speed}"
        part = min(self._done / self._total, 1.0)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate and part < 1 else ""
        amount = f"{part:4.0%} of {format_bytes(self._total)}, {speed}{left}"
        full = round(part * WIDTH)
        bar = f"[{'=' * full}{' ' * (WIDTH - full)}] " if self._bar else ""
        return f"{self._name}: {bar}{amount}"

    def _say(self, words: str) -> None:
        if not self._bar:
            logger.info("%s", words)
            return
        sys.stderr.write(f"\r{words:<{self._drawn}}")
        sys.stderr.flush()
        self._drawn = len(words)

    def close(self) -> None:
        """Take the bar away; safe to repeat."""
        if self._drawn:
            sys.stderr.write(f"\r{' ' * self._drawn}\r")
            sys.stderr.flush()
            self._drawn = 0


@contextmanager
def progress_over(
    name: str, items: Sequence[Item], nbytes: Callable[[Item], int], shown: bool
) -> Iterator[Iterator[Item]]:
    """For a loop over items of so many bytes."""
    with closing(Progress(name, sum(map(nbytes, items)), shown)) as progress:
        yield progress.over(items, nbytes)
