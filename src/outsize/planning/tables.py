"""What a plan costs in bytes and in traffic, and the plan as a table that a person reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from outsize.planning.choice import Chosen
from outsize.planning.parallel import Parallel
from outsize.planning.placement import (
    KINDS,
    Budgets,
    UnitBytes,
    UnitTiers,
    UsedTogether,
    accumulates_whole,
    most_at_once,
    resting_bytes,
)
from outsize.planning.sizes import format_bytes
from outsize.planning.text import Rows, html_lines, html_table, text_table
from outsize.planning.time import Prediction

COMPACT_MOMENT_BYTES = 1 + 4 / 64
"""An 8-bit code, and its share of the fp32 scale of 64 of them."""

EXACT_BYTES = {"fp32": (4, 0, 8), "bf16": (2, 2, 8), "fp16": (2, 4, 8)}
"""Of a weight, of what completes it to its fp32 master, and of the moments, by compute dtype. The exponent of fp16 is
too short for a remainder: its master is kept whole."""


def own_bytes(stage: int, dtype: str = "bf16", state_format: str = "exact") -> tuple[float, float]:
    """Of outsize with AdamW, for one parameter: (bytes that every rank holds, bytes that the ranks share)."""
    weight, remainder, moments = EXACT_BYTES[dtype]
    total = 2 * weight + remainder + (moments if state_format == "exact" else 2 * COMPACT_MOMENT_BYTES)
    whole = {0: total, 1: weight, 2: weight, 3: 0}[stage]
    return whole, total - whole


def zero_bytes_per_device(parameters: float, ranks: int, stage: int) -> float:
    """Model states on one device with Adam, an fp32 master, and 2-byte parameters and gradients (ZeRO, Rajbhandari et
    al. 2020, sections 3 and 5): stage 1 divides the optimizer's 12 bytes by `ranks`, stage 2 the gradients too, stage 3
    the parameters too."""
    divided = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return parameters * (16 - divided + divided / ranks)


def zero_rows(
    parameters: float, ranks: int, dtype: str = "bf16", state_format: str = "exact"
) -> list[tuple[int, float, float]]:
    """(stage, bytes on a rank by the ZeRO paper, bytes with outsize) for each stage.

    The paper's 16 bytes a parameter (table 1), whatever `dtype` is; here the master is the weight and a remainder, and
    gradients are reduced unit by unit from stage 1 on.
    """
    rows = []
    for stage in range(4):
        whole, shared = own_bytes(stage, dtype, state_format)
        own = parameters * (whole + shared / ranks)
        rows.append((stage, zero_bytes_per_device(parameters, ranks, stage), own))
    return rows


def zero_table(parameters: float, ranks: int, dtype: str = "bf16", state_format: str = "exact") -> str:
    """`zero_rows` as a person reads them, in GB (1e9 bytes) as in the paper."""
    lines = [
        f"{parameters / 1e9:,.4g} B parameters, {ranks} rank{'s' if ranks > 1 else ''}: model states on each, GB",
        f"(parameters, gradients and AdamW states; outsize computes in {dtype} with {state_format} states, the "
        f"paper in fp16)",
        f"{'stage':<6} {'ZeRO, table 1':>14} {'outsize':>10}",
    ]
    for stage, paper, own in zero_rows(parameters, ranks, dtype, state_format):
        lines.append(f"{stage:<6} {paper / 1e9:>14,.2f} {own / 1e9:>10,.2f}")
    return "\n".join(lines)


TYPICAL = {"disk": 1.5e9, "host memory": 20e9, "device link": 20e9}
"""Bytes a second, assumed where none were measured; `outsize probe` measures them."""


@dataclass(frozen=True)
class PlannedUnit:
    """One unit: its bytes at rest by kind, where each rests, and what a step moves from and to disk."""

    name: str
    size: UnitBytes
    tiers: UnitTiers
    read_bytes: int
    written_bytes: int

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for units that differ in their number only."""
        pattern = re.sub(r"\d+", "#", self.name)
        return pattern, self.size.params, self.size.grads, self.size.states, self.tiers, self.in_place

    @property
    def in_place(self) -> bool:
        """Whether its parameters are read where somebody else keeps them."""
        return self.size.in_place and self.tiers.params == "disk"

    def bytes_on(self, tier: str, kinds: Sequence[str] = KINDS) -> int:
        """Bytes of its own at rest on a tier."""
        own = [kind for kind in kinds if not (self.in_place and kind == "params")]
        return sum(getattr(self.size, kind) for kind in own if getattr(self.tiers, kind) == tier)


def planned(
    size: UnitBytes, tiers: UnitTiers, update: str = "fetch", by_rows: bool = False, stays: bool = False
) -> PlannedUnit:
    """A unit with the disk traffic of one forward and one backward.

    The forward's fetch carries the update: whatever is on disk is read, and all but the gradient written back. The
    backward's fetch reads the weights again, and the gradients are written once, unless they are used where they arise
    (`update="backward"`). Frozen weights are only read. A weight in tiles is updated as a whole, and its tiles are read
    after that, so its gradients rest in every case. Weights of a unit that `stays` gathered are updated there and
    never read. Of a table `by_rows` only what a batch touches moves, and nobody knows how much that is.
    """
    if by_rows:
        return PlannedUnit(size.name, size, tiers, 0, 0)
    of_a_step = zip(KINDS, (size.params, size.moved_grads, size.states), strict=True)
    params, grads, states = (nbytes if getattr(tiers, kind) == "disk" else 0 for kind, nbytes in of_a_step)
    in_tiles = bool(size.tiles) and tiers.params != "device"
    times = 3 if in_tiles else 0 if stays else 2
    if not size.trained:
        return PlannedUnit(size.name, size, tiers, min(times, 2) * params, 0)
    changed = states + (0 if update == "backward" and not in_tiles else grads)
    return PlannedUnit(size.name, size, tiers, times * params + changed, params + changed)


@dataclass(frozen=True)
class Plan:
    """What goes where, and why. It prints as a table; the fields are for programs. All sizes are bytes."""

    units: tuple[PlannedUnit, ...]
    parameters: int
    budgets: Budgets
    update_bytes: int
    link_bytes: int
    together: UsedTogether = field(default_factory=dict)
    activations: Chosen | None = None
    """Of a prepared model, where `activations="auto"` has a choice."""
    parallel: Parallel | None = None
    """Of a rank among several."""
    tables: tuple[str, ...] = ()
    """Of which only the rows that a batch touches move."""
    dense_tables: tuple[tuple[str, int, int], ...] = ()
    """(name, bytes of weights and states that each step moves, rows) of embeddings that are updated as a whole."""

    prediction: Prediction | None = None
    """Of a step with an example batch."""

    @property
    def step_seconds(self) -> float | None:
        """Of a step with the example batch; None without one."""
        return None if self.prediction is None else self.prediction.step_seconds

    @property
    def peak_bytes(self) -> Mapping[str, int] | None:
        """The most bytes of each tier ("device", "host", "disk") in such a step; None without an example."""
        return None if self.prediction is None else self.prediction.peak_bytes

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state at rest, all tiers together."""
        return sum(unit.size.total for unit in self.units)

    def bytes_on(self, tier: str) -> int:
        """Bytes at rest on a tier; those that are read in place are on none."""
        return sum(unit.bytes_on(tier) for unit in self.units)

    @property
    def in_place_bytes(self) -> int:
        """Bytes of parameters that are read in place, from the folder that the model was loaded from."""
        return sum(unit.size.params for unit in self.units if unit.in_place)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: parameters and optimizer state, wherever they rest."""
        return sum(unit.size.params + unit.size.states for unit in self.units)

    @property
    def generation_bytes(self) -> int:
        """Bytes of `disk` that each checkpoint which is kept on its file system takes beside the state in use."""
        return sum(unit.bytes_on("disk", ("params", "states")) for unit in self.units)

    @property
    def read_bytes(self) -> int:
        """Bytes read from disk in one training step."""
        return sum(unit.read_bytes for unit in self.units)

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk in one training step."""
        return sum(unit.written_bytes for unit in self.units)

    @property
    def memory_bytes(self) -> int:
        """Host memory that the budget must hold while computing: what rests there, what is at work at once, staging."""
        sizes, tiers = [unit.size for unit in self.units], [unit.tiers for unit in self.units]
        resting = resting_bytes(sizes, tiers, self.budgets.sharing("host"))
        return resting + self._staging_bytes + (0 if self._all_resident else self._at_work[1])

    @property
    def _staging_bytes(self) -> int:
        """Without an accelerator, host memory is updated where it is: what goes to disk alone is staged."""
        on_disk = any(unit.tiers.on_disk for unit in self.units)
        staged = on_disk or self.budgets.offloads or self.budgets.device is not None
        return self.budgets.staging_bytes if staged else 0

    @property
    def _all_resident(self) -> bool:
        return all(unit.tiers.params == "device" for unit in self.units)

    @property
    def _at_work(self) -> tuple[str, int]:
        """What takes most memory at once while computing, in words, and how much: a unit, or several used together."""
        nbytes, name, several = most_at_once([unit.size for unit in self.units], self.together)
        words = "the units that one module uses at once" if several else "the largest unit at work"
        return f"{words}: {name!r} {format_bytes(nbytes)}", nbytes

    def seconds(self) -> dict[str, float]:
        """Seconds a step that each resource is busy moving bytes at typical rates, computation not counted."""
        moved = {
            "disk": self.read_bytes + self.written_bytes,
            "host memory": self.update_bytes,
            "device link": self.link_bytes,
        }
        return {name: nbytes / TYPICAL[name] for name, nbytes in moved.items()}

    @property
    def bound(self) -> str:
        """The resource that bounds the step at typical rates, unless the computation takes longer."""
        seconds = self.seconds()
        busiest = max(seconds, key=lambda name: seconds[name])
        return busiest if seconds[busiest] > 0 else "computation"

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """(bytes, budget) of each tier that has a budget. With computation on the CPU, device and host are one tier,
        "memory", with `memory_bytes`."""
        return {
            tier: (self.memory_bytes if tier == "memory" else self.bytes_on(tier), budget)
            for tier, budget in self.budgets.by_tier.items()
        }

    def __str__(self) -> str:
        return self._text(_rows(self.units))

    def __repr__(self) -> str:
        """As `str(plan)`, without the units in the middle of a long table."""
        return self._text(_rows(self.units, SHOWN_RUNS))

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        tiers = [("tier", "bytes", "budget")]
        tiers += [(tier, format_bytes(used), format_bytes(budget)) for tier, (used, budget) in self.by_tier.items()]
        tables = html_table(_rows(self.units, SHOWN_RUNS), ALIGN), html_table(tiers, "<>>")
        return "\n".join([html_lines([self._size]), *tables, html_lines([*self._remarks(), *self._movement()])])

    def _text(self, rows: Rows) -> str:
        tiers = [
            f"{tier:<8}{format_bytes(used)} of {format_bytes(budget)}{self._of_memory() if tier == 'memory' else ''}"
            for tier, (used, budget) in self.by_tier.items()
        ]
        head = [] if self.prediction is None else self.prediction.remark()
        return "\n".join([*head, *text_table(rows, ALIGN), "", self._size, *tiers, *self._remarks(), *self._movement()])

    @property
    def _size(self) -> str:
        return f"{self.parameters / 1e6:,.1f} M parameters; model states {format_bytes(self.state_bytes)}"

    def _of_memory(self) -> str:
        staging = f", staging {format_bytes(self._staging_bytes)}" if self._staging_bytes else ""
        if self._all_resident:
            return f" (what rests there{staging})"
        return f" (what rests there{staging}, and {self._at_work[0]}; what is left holds units fetched ahead)"

    def _remarks(self) -> list[str]:
        lines = []
        if self.in_place_bytes:
            lines.append(
                f"{format_bytes(self.in_place_bytes)} of weights are read in place from the model's own folder"
            )
        lines.append(f"a checkpoint is {format_bytes(self.checkpoint_bytes)}{self._sharing()}")
        collected = sum(unit.size.collected for unit in self.units)
        if collected and self.accumulates_whole:
            lines.append(f"inside no_sync each rank adds up whole gradients ({format_bytes(collected)})")
        elif collected:
            lines.append(
                f"inside no_sync each backward reduces its gradients: whole ones ({format_bytes(collected)}) do not "
                f"fit the memory"
            )
        return lines

    @property
    def accumulates_whole(self) -> bool:
        """Whether gradients are added up whole on each rank inside `no_sync`; otherwise each backward reduces them."""
        sizes, tiers = [unit.size for unit in self.units], [unit.tiers for unit in self.units]
        return accumulates_whole(sizes, tiers, self.budgets)

    def _sharing(self) -> str:
        if not self.generation_bytes:
            return ""
        return (
            f"; on the file system of disk it shares the files in use, and each one that is kept takes "
            f"{format_bytes(self.generation_bytes)} there as training goes on"
        )

    def _movement(self) -> list[str]:
        lines = ["nothing moves in a step; the computation bounds it"]
        if self.prediction is not None:
            lines = [
                f"a step reads {format_bytes(self.read_bytes)} and writes {format_bytes(self.written_bytes)} on disk",
                *self.prediction.lines(),
            ]
        elif self.bound != "computation":
            lines = [
                f"a step reads {format_bytes(self.read_bytes)} and writes {format_bytes(self.written_bytes)} on disk, "
                f"and updates {format_bytes(self.update_bytes)} in memory",
                f"the step is bound by {self.bound}: {self.seconds()[self.bound]:.3g} s at typical rates (measure "
                f"yours with `outsize probe`), or by the computation where that takes longer",
            ]
        lines += [] if self.parallel is None else self.parallel.lines()
        if self.activations is not None:
            lines.append(str(self.activations))
        lines += [
            f"table {name!r}: a step reads and writes the rows that its batch touches, which are not counted here"
            for name in self.tables
        ]
        lines += [
            f"embedding {name!r} is updated as a whole: each step reads and writes {format_bytes(nbytes)}, whichever "
            f"of its {rows:,} rows the batch touches; sparse=True with outsize.optim.LazyAdamW moves these alone"
            for name, nbytes, rows in self.dense_tables
        ]
        return lines


ALIGN = "<>>><<"
SHOWN_RUNS = 16
"""How many runs of units that are alike a cut table shows."""
LAST_RUNS = 4
"""How many of these are the last ones of the model."""


def _rows(units: Sequence[PlannedUnit], most: int | None = None) -> list[tuple[str, ...]]:
    """The head, then a row for each run of units that are alike. Of more than `most` runs, those in the middle are one
    row with their sums."""
    runs = [list(run) for _, run in groupby(units, key=lambda unit: unit.likeness)]
    first, middle, last = runs, [], []
    if most is not None and len(runs) > most:
        first, middle, last = runs[: most - LAST_RUNS], runs[most - LAST_RUNS : -LAST_RUNS], runs[-LAST_RUNS:]
    rows: list[tuple[str, ...]] = [("unit", "parameters", "gradients", "states", "tiers", "why")]
    rows += map(_row, first)
    if middle:
        left_out = [unit for run in middle for unit in run]
        sums = (format_bytes(sum(getattr(unit.size, kind) for unit in left_out)) for kind in KINDS)
        rows.append((f"... {len(left_out):,} more, in all", *sums, "", ""))
    return [*rows, *map(_row, last)]


def _row(run: Sequence[PlannedUnit]) -> tuple[str, ...]:
    first, *more = run
    name = f"{first.name} ... {more[-1].name} ({1 + len(more)})" if more else first.name
    tiers = ["in place" if first.in_place else first.tiers.params, first.tiers.grads, first.tiers.states]
    where = tiers[0] if len(set(tiers)) == 1 else "/".join(tiers)
    return (name, *(format_bytes(getattr(first.size, kind)) for kind in KINDS), where, first.tiers.why)
