"""What `memory` returns: bytes per tier and kind, now and at their peak, and where time went."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from outsize.api.assemble import Prepared
from outsize.plan.sizes import format_bytes


@dataclass(frozen=True)
class MemoryReport:
    """A snapshot. `now` and `peak` map "tier/kind" to bytes; seconds and disk bytes count from `prepare` on."""

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

    def __str__(self) -> str:
        width = max(len(name) for name in self.peak) if self.peak else 10
        lines = [f"{'tier/kind':<{width}}  {'now':>10}  {'peak':>10}"]
        for name in sorted(self.peak):
            lines.append(f"{name:<{width}}  {format_bytes(self.now[name]):>10}  {format_bytes(self.peak[name]):>10}")
        lines.append(
            f"model states {format_bytes(self.state_bytes)}; disk read {format_bytes(self.bytes_read)}, written "
            f"{format_bytes(self.bytes_written)}; waited {self.wait_seconds:.2f} s, updates {self.update_seconds:.2f} s"
        )
        if self.skipped_steps:
            lines.append(f"{self.skipped_steps} steps skipped because a gradient was not finite")
        return "\n".join(lines)


def memory_of(prepared: Prepared) -> MemoryReport:
    ledger, schedule = prepared.resources.ledger, prepared.engine.streamer.schedule
    return MemoryReport(
        now=MappingProxyType(dict(ledger.now)),
        peak=MappingProxyType(dict(ledger.peak)),
        wait_seconds=prepared.engine.streamer.live.wait_seconds,
        update_seconds=prepared.clock.seconds,
        bytes_read=prepared.resources.bytes_read,
        bytes_written=prepared.resources.bytes_written,
        state_bytes=prepared.survey.state_bytes,
        skipped_steps=prepared.stepper.skipped_steps if prepared.stepper is not None else 0,
        predicted=schedule.right,
        mispredicted=schedule.wrong,
    )
