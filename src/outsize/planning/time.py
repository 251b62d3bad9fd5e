"""Time, simulated: lanes that do one thing after the other, a drive, and what a step was found to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from outsize.planning.machine import Machine
from outsize.planning.sizes import format_bytes
from outsize.planning.trace import READS, WRITES, Trace


@final
@dataclass
class Lane:
    """Does one thing after the other; `free` from then on, `busy` for so long in all."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, when: float, seconds: float) -> tuple[float, float]:
        """(begin, end) of what is given to the lane at `when`."""
        began = max(when, self.free)
        self.free = began + seconds
        self.busy += seconds
        return began, self.free


@final
class Drive:
    """Reads and writes at once share what the drive does of both."""

    def __init__(self, machine: Machine) -> None:
        self.reads, self.writes = Lane(), Lane()
        self._alone = {READS: machine.disk_read, WRITES: machine.disk_write}
        self._mixed = machine.disk_mixed
        self._latency = machine.disk_seconds

    def move(self, kind: str, when: float, nbytes: float) -> tuple[float, float]:
        """(begin, end) of a transfer that is asked for at `when`. It waits for its own lane. Where the other lane is at
        work, each has half of what the drive does of both, or what the other one cannot take: so that one ends later
        than it was told."""
        mine, other, its = (self.reads, self.writes, WRITES) if kind == READS else (self.writes, self.reads, READS)
        began = max(when, mine.free)
        left = max(other.free - began, 0.0) * self._alone[its]
        rate = min(self._alone[kind], max(self._mixed / 2, self._mixed - self._alone[its]))
        its_rate = min(self._alone[its], self._mixed - rate)
        both = min(nbytes / rate, left / its_rate) if left else 0.0
        if left:
            then = began + both + (left - its_rate * both) / self._alone[its]
            other.busy += then - other.free
            other.free = then
        latency = self._latency if mine.free < when else 0.0  # else it hides behind the transfer before
        return mine.take(when, both + (nbytes - rate * both) / self._alone[kind] + latency)


@dataclass(frozen=True)
class Prediction:
    """One step of training, simulated."""

    step_seconds: float
    peak_bytes: Mapping[str, int]
    """By tier: "device", "host" and "disk". Where the device is the CPU, those of the first two at the moment when
    they are the most together."""
    busy: Mapping[str, float]
    """Seconds of a step in which each lane works."""
    wait_seconds: float
    """In which the computation waits for bytes or updates."""
    items: int = 0
    unit: str = "tokens"
    measured: bool = True
    source: str = ""
    """Whose figures they are, where nobody measured them."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step that one more GiB of a tier would save."""
    assumed: tuple[str, ...] = ()
    """What the step does otherwise than it was simulated, in words."""
    trace: Trace = field(default_factory=Trace, repr=False, compare=False)
    """Of the simulated step: `trace.write(path)`."""

    @property
    def bound(self) -> str:
        """The lane that bounds the step: the one that works most of it."""
        return max(self.busy, key=lambda lane: self.busy[lane])

    @property
    def items_per_second(self) -> float:
        return self.items / self.step_seconds if self.step_seconds else 0.0

    def remark(self) -> list[str]:
        """What comes first, where no figures were measured."""
        if self.source:
            return [f"predicted from the figures of {self.source}, which were not measured"]
        return [] if self.measured else ["predicted from typical figures, not measured ones: run `outsize probe` first"]

    def lines(self) -> list[str]:
        busy = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.busy.items() if seconds > 0)
        peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in self.peak_bytes.items() if nbytes)
        lines = [
            f"a step takes {self.step_seconds:.3g} s ({self.items_per_second:,.4g} {self.unit} a second), bound by "
            f"{self.bound}; busy: {busy}; the computation waits {self.wait_seconds:.3g} s",
            f"peak of a step: {peaks}",
        ]
        if self.gains:
            gains = ", ".join(f"{tier} {seconds:.3g} s" for tier, seconds in self.gains.items())
            lines.append(f"one more GiB would save of a step: {gains}")
        return [*lines, *self.assumed]
