"""What a rank does for the others while it waits for them, where ranks use different units by design."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

from outsize.move.purpose import Turn
from outsize.run.reduction import Reduction
from outsize.run.streamer import Streamer


@final
class Giver:
    """Knows the streamer and the reduction, and keeps neither alive: the ranks live as long as the process."""

    def __init__(self, streamer: Streamer, reduction: Reduction) -> None:
        self.ready: set[int] = set()
        self._streamer = weakref.ref(streamer)
        self._reduction = weakref.ref(reduction)

    def give(self, turn: Turn) -> None:
        streamer = self._streamer()
        assert streamer is not None, "it outlives whoever waits"
        streamer.give(turn)

    def busy(self) -> bool:
        streamer = self._streamer()
        return streamer is not None and streamer.fetching

    def reduce(self, units: Sequence[int]) -> None:
        reduction = self._reduction()
        assert reduction is not None, "it outlives whoever waits"
        self.ready.difference_update(units)
        for unit in units:
            reduction.collectors[unit].reduce()
