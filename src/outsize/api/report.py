"""`memory`: what a prepared model takes, and what that has cost."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from outsize.api.assemble import require
from outsize.move.memory import bytes_on
from outsize.planning.sizes import format_bytes
from outsize.planning.text import html_lines, html_table, text_table


@dataclass(frozen=True)
class MemoryReport:
    """A snapshot. `now` and `peak` map "tier/kind" to bytes; seconds and disk bytes count from `prepare` on. It prints
    as a table."""

    now: MappingProxyType[str, int]
    peak: MappingProxyType[str, int]
    wait_seconds: float
    update_seconds: float
    bytes_read: int
    bytes_written: int
    state_bytes: int
    skipped_steps: int
    predicted: int
    mispredicted: int
    budgets: MappingProxyType[str, int]
    """Bytes by tier. With computation on the CPU, device and host are one "memory"."""
    rows: int = 0
    """Of tables: the distinct rows that batches have asked for, how many of them were among the hot rows, how many of
    these on an accelerator, and how many `lookahead` had read."""
    row_hits: int = 0
    rows_on_device: int = 0
    rows_ahead: int = 0

    def bytes_on(self, *tiers: str) -> int:
        """Bytes in use now on these tiers."""
        return bytes_on(tiers, self.now)

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """(bytes now, budget) of each tier that has a budget."""
        inside = {"memory": ("device", "host")}
        return {tier: (self.bytes_on(*inside.get(tier, (tier,))), budget) for tier, budget in self.budgets.items()}

    def __str__(self) -> str:
        tiers = [
            f"{tier:<8}{format_bytes(now)} of {format_bytes(budget)}" for tier, (now, budget) in self.by_tier.items()
        ]
        return "\n".join([*text_table(self._kinds(), "<>>"), *tiers, *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        tiers = [("tier", "now", "budget")]
        tiers += [(tier, format_bytes(now), format_bytes(budget)) for tier, (now, budget) in self.by_tier.items()]
        return "\n".join([html_table(self._kinds(), "<>>"), html_table(tiers, "<>>"), html_lines(self._remarks())])

    def _kinds(self) -> list[tuple[str, str, str]]:
        rows = [(name, format_bytes(self.now[name]), format_bytes(self.peak[name])) for name in sorted(self.peak)]
        return [("tier/kind", "now", "peak"), *rows]

    def _remarks(self) -> list[str]:
        lines = [
            f"model states {format_bytes(self.state_bytes)}; disk read {format_bytes(self.bytes_read)}, written "
            f"{format_bytes(self.bytes_written)}; waited {self.wait_seconds:.2f} s, updates {self.update_seconds:.2f} s"
        ]
        if self.rows:
            near = f", {self.rows_on_device / self.rows:.1%} on the device" if self.rows_on_device else ""
            lines.append(f"rows of tables: {self.rows:,} asked for, {self.row_hits / self.rows:.1%} hot{near}")
        if self.skipped_steps:
            lines.append(f"{self.skipped_steps} steps skipped because a gradient was not finite")
        return lines


def memory(model: nn.Module) -> MemoryReport:
    """Bytes per tier and kind, now and at their peak; waits, update time and disk traffic since `prepare`.

    >>> report = outsize.memory(model)  # prints as a table
    >>> report.skipped_steps
    0
    """
    prepared = require(model)
    prepared.choice.settle()
    ledger, schedule = prepared.resources.ledger, prepared.engine.streamer.schedule
    counts = [table.rows.counts for table in prepared.engine.tables.values()]
    return MemoryReport(
        now=MappingProxyType(dict(ledger.now)),
        peak=MappingProxyType(dict(ledger.peak)),
        wait_seconds=prepared.engine.streamer.live.wait_seconds,
        update_seconds=prepared.updater.seconds if prepared.updater is not None else 0.0,
        bytes_read=prepared.resources.bytes_read,
        bytes_written=prepared.resources.bytes_written,
        state_bytes=prepared.placed.state_bytes,
        skipped_steps=prepared.stepper.skipped_steps if prepared.stepper is not None else 0,
        predicted=schedule.right,
        mispredicted=schedule.wrong,
        rows=sum(each.wanted for each in counts),
        row_hits=sum(each.hits for each in counts),
        rows_on_device=sum(each.on_device for each in counts),
        rows_ahead=sum(each.ahead for each in counts),
        budgets=MappingProxyType(prepared.placed.budgets.by_tier),
    )
