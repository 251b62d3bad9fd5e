"""What `prepare` and `plan` decide before a byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from outsize.move.codes import BLOCK, CodeKind
from outsize.move.store import CODE_BYTES, MASTER_BYTES, OWN_BYTES, SCALE_BYTES, STATE_BYTES
from outsize.planning.layout import PAGE_ELEMENTS, ParamInfo, UnitLayout, round_up
from outsize.planning.placement import (
    Budgets,
    UnitBytes,
    UnitTiers,
    UsedTogether,
    arena,
    most_at_work,
    resting_bytes,
    with_gradients_to_disk,
)
from outsize.run.mapped_files import FileRange
from outsize.run.wrappers import Inner

LEAST_HOLES, MOST_HOLES = 8 << 20, 32 << 20
LITTLE = 8
"""Of so many bytes of weights little is trained if one has a gradient."""
FIELDS = {"memory": "host_memory", "host": "host_memory", "device": "device_memory", "disk": "disk_space"}
"""That bound a tier, or the "memory" that device and host share on a CPU."""


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps: its per-element arrays, those of them that rest as 8-bit codes and how, and whether its
    update needs whole parameters."""

    arrays: tuple[str, ...] = ()
    codes: Mapping[str, CodeKind] = field(default_factory=dict)
    whole: bool = False
    row_values: tuple[str, ...] = ()
    """What tables have in place of arrays: one value a row, in host memory."""

    def nbytes(self, dtype: str, numel: int) -> int:
        """Bytes at rest of a parameter's state, the rest of its master included."""
        codes = len(self.codes)
        compact = CODE_BYTES[dtype] * numel + SCALE_BYTES.get(dtype, 0) * -(-numel // BLOCK)
        exact = STATE_BYTES[dtype] * numel
        return codes * compact + (len(self.arrays) - codes) * exact + MASTER_BYTES.get(dtype, 0) * numel

    def element_bytes(self, infos: Mapping[str, ParamInfo]) -> int:
        """The most that one element of any parameter takes in staging: its state, gradient and weight."""
        dtypes, arrays = {info.dtype for info in infos.values()}, len(self.arrays) + 1
        return max(STATE_BYTES.get(each, 0) * arrays + MASTER_BYTES.get(each, 0) + OWN_BYTES[each] for each in dtypes)

    def nbytes_of(self, layout: UnitLayout) -> int:
        """Bytes at rest of the state of a unit, with what pads it."""
        trained = [segment for segment in layout.segments if segment.trainable]
        scales = sum(SCALE_BYTES.get(each.dtype, 0) * (each.numel // BLOCK) for each in trained)
        padding = round_up(scales, PAGE_ELEMENTS) - scales
        return sum(self.nbytes(each.dtype, each.numel) for each in trained) + len(self.codes) * padding


@dataclass(frozen=True)
class PlacedModel:
    infos: dict[str, ParamInfo]
    parameters: dict[str, nn.Parameter]
    layouts: tuple[UnitLayout, ...]
    unit_bytes: tuple[UnitBytes, ...]
    tiers: tuple[UnitTiers, ...]
    budgets: Budgets
    kept: Kept
    split: tuple[int, int] = (0, 1)
    """(this rank, the ranks over which each unit is split)."""
    together: UsedTogether = field(default_factory=dict)
    tile_rows: Mapping[int, int] = field(default_factory=dict)
    """By the index of a unit that is used in tiles: how many rows of its parameter a tile has of each rank."""
    in_files: Mapping[str, FileRange] = field(default_factory=dict)
    """By name: the parameters of units that are read in place where they rest on disk."""
    beside: Mapping[int, int] = field(default_factory=dict)
    """By the index of a unit of adapters: that of the unit they were cut from."""
    tables: frozenset[int] = frozenset()
    """The indices of the units of which only the rows that a batch touches move."""
    dense_tables: tuple[tuple[str, int, int], ...] = ()
    """(name, bytes of weights and states that each step moves, rows) of large embeddings without sparse=True."""
    tables_split: tuple[int, int] = (0, 1)
    """(this rank, the ranks over which each table is split, at every stage)."""
    inside: Mapping[str, Sequence[Inner]] = field(default_factory=dict)
    """By name: where the parameters are that wrappers have. See Note [Wrappers]."""

    @property
    def state_bytes(self) -> int:
        return sum(unit.total for unit in self.unit_bytes)

    @property
    def on_disk(self) -> bool:
        """Whether anything passes through a drive: what rests there, or activations."""
        return self.budgets.offloads or any(tiers.on_disk for tiers in self.tiers)

    @property
    def arena(self) -> tuple[int, int]:
        """(bytes of a slab, slabs) of the staging arena. On a CPU host memory is updated where it is."""
        staged = self.on_disk or self.budgets.device is not None
        return arena(self.budgets.staging_bytes if staged else 0, self.kept.element_bytes(self.infos))

    @property
    def stays(self) -> bool:
        """Whether nothing moves in a step."""
        return not self.budgets.offloads and all(tiers.stay for tiers in self.tiers)

    @property
    def left_bytes(self) -> int:
        """What the computing budget leaves beside all that rests in that memory, and all units gathered at once."""
        memory, pairs = self.budgets.sharing("device"), zip(self.unit_bytes, self.tiers, strict=True)
        gathered = sum(unit.gathered for unit, tiers in pairs if unit.shared or tiers.params != "device")
        return self.budgets.computing[1] - resting_bytes(self.unit_bytes, self.tiers, memory) - gathered

    @property
    def stay_gathered(self) -> bool:
        """Whether no unit is ever released to make room, beside the gradients of any one."""
        return self.left_bytes >= 2 * max((unit.most("grads") for unit in self.unit_bytes), default=0)

    @property
    def kept_bytes(self) -> int:
        """Of freed memory that the allocator of the host may keep for the next step, where a CPU computes: what is
        left, if it holds as much again as the weights, or as the gradients of a step where they are more. 0: less is
        left, or activations must go to disk. See Note [Freed memory] in move/memory.py."""
        if self.budgets.device is not None or self.budgets.offloads:
            return 0
        if self.stays:
            return self.budgets.host
        left = self.left_bytes
        return left if left >= sum(max(unit.gathered, unit.most("grads")) for unit in self.unit_bytes) else 0

    @property
    def returns_freed_memory(self) -> bool:
        """Whether not all freed memory may be kept."""
        return self.budgets.device is None and self.on_disk and not self.kept_bytes

    @property
    def holes_bytes(self) -> int:
        """Of the computing budget, for what operations have freed where little is trained and not all of it is kept: an
        eighth of what units may take, as far as what is at work and a unit ahead of it leave room. 0: they leave none.
        See Note [Freed memory] in move/memory.py."""
        trained = sum(unit.most("grads") for unit in self.unit_bytes)
        if not self.returns_freed_memory or LITTLE * trained > sum(unit.gathered for unit in self.unit_bytes):
            return 0
        memory = self.budgets.sharing("device")
        room = self.budgets.computing[1] - resting_bytes(self.unit_bytes, self.tiers, memory)
        spare = room - most_at_work(self.unit_bytes, self.together)
        holes = min(room // 8, spare, MOST_HOLES)
        return holes if holes >= LEAST_HOLES else 0

    @property
    def passing_bytes(self) -> int | None:
        """Host memory for gradients of an accelerator on their way to disk; None without one."""
        if self.budgets.device is None:
            return None
        return self.budgets.passing_bytes(with_gradients_to_disk(self.unit_bytes, self.tiers))

    def split_of(self, index: int) -> tuple[int, int]:
        """(this rank, the ranks over which the unit is split)."""
        return self.tables_split if index in self.tables else self.split
