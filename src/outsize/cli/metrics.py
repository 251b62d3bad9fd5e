"""What a run measures: one record a step, a line of metrics.jsonl, shown by the display and drawn in the report."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from outsize.cli.writing import replace_text


class Memory(Protocol):
    """What the command line reads of `outsize.memory(model)`. Bytes and seconds; counters only grow."""

    @property
    def now(self) -> Mapping[str, int]: ...
    @property
    def peak(self) -> Mapping[str, int]: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def update_seconds(self) -> float: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...


@dataclass(frozen=True)
class Record:
    """One step. `compute_seconds + wait_seconds = step_seconds`; the update runs behind them."""

    step: int
    elapsed_seconds: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_seconds: float
    wait_seconds: float
    update_seconds: float
    bytes_read: int  # in this step
    bytes_written: int
    total_read: int  # since the start of the run
    total_written: int
    rss_bytes: int
    base_rss_bytes: int  # after the imports, before the model
    state_bytes: int
    skipped_steps: int = 0  # since the start or the last resume
    held_out_loss: float | None = None
    memory: Mapping[str, int] = field(default_factory=dict)  # "tier/kind" -> bytes

    @property
    def compute_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.wait_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def rss_over_imports(self) -> int:
        return max(0, self.rss_bytes - self.base_rss_bytes)

    def with_held_out(self, loss: float) -> "Record":
        return replace(self, held_out_loss=loss)


@dataclass(frozen=True)
class Counters:
    """Cumulative figures at one moment; the difference of two is a step's."""

    wait_seconds: float
    update_seconds: float
    bytes_read: int
    bytes_written: int

    @staticmethod
    def of(memory: Memory) -> "Counters":
        return Counters(memory.wait_seconds, memory.update_seconds, memory.bytes_read, memory.bytes_written)

    def since(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.wait_seconds - earlier.wait_seconds,
            self.update_seconds - earlier.update_seconds,
            self.bytes_read - earlier.bytes_read,
            self.bytes_written - earlier.bytes_written,
        )


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[Record]:
    """All whole lines; a last line cut off by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            break
        records.append(Record(**fields))
    return records


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`: the run goes on from there."""
    if not path.exists():
        return
    kept = [record for record in read(path) if record.step <= step]
    replace_text(path, "".join(json.dumps(asdict(record)) + "\n" for record in kept))


def process_memory(field: str = "VmRSS") -> int:
    """Bytes of physical memory of this process: `VmRSS` now, `VmHWM` at its highest; 0 where /proc does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def times_memory(state_bytes: int, used_bytes: int) -> str:
    """`, 5.0 x the memory used`; nothing where the state is not the larger of the two."""
    if used_bytes <= 0 or state_bytes < used_bytes:
        return ""
    return f", {state_bytes / used_bytes:.1f} x the memory used"


def human(count: float) -> str:
    """`1.43 GB`: decimal units, three figures."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"
