"""Where one unit comes to rest: its file, its stores, its optimizer arrays, in the formats that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from outsize.api.placed import FIELDS, PlacedModel
from outsize.api.resources import Resources
from outsize.config import Config
from outsize.move.buffer import Buffer
from outsize.move.codes import BLOCK
from outsize.move.files import FileStore, Part
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer, bytes_on
from outsize.move.rows import RowArray, Rows
from outsize.move.shard import Scales, StateArray, UnitShard
from outsize.move.store import (
    CODE_BYTES,
    DTYPES,
    MASTER,
    MASTER_BYTES,
    OWN_BYTES,
    SCALE_BYTES,
    STATE_BYTES,
    DiskStore,
    Store,
)
from outsize.planning.errors import BudgetError
from outsize.planning.layout import ArrayLayout, Segment, UnitLayout, array_layout, page_range, slice_of
from outsize.planning.placement import UnitTiers
from outsize.planning.sizes import format_bytes
from outsize.run.buffers import KEPT

COPIED_BYTES = 4 << 20
"""At once, from one store to another."""

Layouts = dict[str, tuple[ArrayLayout, ArrayLayout | None]]
"""Of the arrays of a unit, each with that of its scales where it holds codes, in the order of its file."""

# Note [Frozen parameters]
# Arrays have values for the trainable parameters alone, which come first in a unit. When a frozen one gets a state (it
# is unfrozen and stepped, or comes by `add_param_group` or from a checkpoint), the unit's arrays are replaced by longer
# ones: the old values are their first bytes. The fp32 masters of those that had no room begin at the weights.


@final
class Shards:
    """Opens the shards of a model, and later longer arrays for them. See Note [Frozen parameters]."""

    def __init__(self, plan: PlacedModel, config: Config, resources: Resources, shared: bool) -> None:
        self._plan = plan
        self._config = config
        self._resources = resources
        self._shared = shared

    def open(self, whole: UnitLayout, tiers: UnitTiers) -> UnitShard:
        """`whole` is the layout of the whole unit; what rests here is this rank's slice of it."""
        resources, config, (rank, ranks) = self._resources, self._config, self._plan.split_of(whole.index)
        layout, lanes, ledger = slice_of(whole, rank, ranks), resources.lanes, resources.ledger
        by_rows = layout.index in self._plan.tables
        layouts = self._layouts(layout, [segment for segment in layout.segments if segment.trainable])
        in_place = tiers.params == "disk" and whole.slots[0].name in self._plan.in_files
        nbytes = layout.param_bytes if tiers.params == "disk" and not in_place else 0
        nbytes += _bytes_of(layouts) if tiers.states == "disk" else 0
        record = self._record(layout, layouts, tiers.params == "disk", tiers.states == "disk")
        file = UnitFile(resources, _name_of(layout), nbytes, config.verify, record=record)
        params: Store | None = None  # where the gathered buffer is the store
        if in_place:
            params = self._in_files(layout)
        elif by_rows or tiers.params != "device" or (ranks > 1 and config.stage == 3):
            params = file.open("params", tiers.params, layout.param_bytes)
        grads, rows = [], self._plan.tile_rows.get(layout.index, 0)
        wide, copies = array_layout(layout, STATE_BYTES).nbytes, 2 if config.delayed_update else 1
        if tiers.grads != "device":
            name, on_disk = _name_of(layout, "-grads"), tiers.grads == "disk" and wide > 0  # 0: codes of weights alone
            scratch = UnitFile(resources, name, on_disk * copies * wide, config.verify, lasting=False)
            stores = [scratch.open_on_disk("grads", wide) if on_disk else None for _ in range(copies)]
            grads = [GradShard(layout, store, ledger, resources.outbox, rows > 0) for store in stores]
        buffer, device = Buffer(whole.param_bytes, ledger, lanes), config.compute_device
        late, moved = self.add_late_arrays, self._give_own_params
        shard = UnitShard(
            layout, tiers, buffer, params, grads, device, whole, rank, ranks, self._shared, lanes, late, moved, rows
        )
        shard.arrays = self._arrays(shard, layouts, file)
        if by_rows:
            shard.rows = self._rows(shard)
            shard.row_values = self._plan.kept.row_values
        self._preallocate(shard)
        return shard

    def _in_files(self, layout: UnitLayout) -> FileStore:
        """The parameters of a unit where others keep them."""
        span = array_layout(layout, OWN_BYTES).span
        parts = []
        for slot in layout.slots:
            if slot.numel:
                place, itemsize = self._plan.in_files[slot.name], OWN_BYTES[slot.dtype]
                file = self._resources.open_source(place.path)
                parts.append(Part(*span(slot.offset, slot.end), file, place.offset + slot.first * itemsize))
        assert self._resources.disk is not None
        return FileStore(layout.param_bytes, parts, self._resources.disk)

    def _give_own_params(self, shard: UnitShard) -> None:
        """Copy parameters that are read in place into a file of the unit's own."""
        assert shard.params is not None
        nbytes, name = shard.params.nbytes, shard.layout.name
        if not self._resources.run_directories:
            raise ValueError(
                f"the weights of unit {name!r} are read in place from the folder that the model was loaded from, and "
                f"must be written for this: pass disk= to outsize.prepare, where {format_bytes(nbytes)} for it will lie"
            )
        file = UnitFile(self._resources, _name_of(shard.layout, "-params"), nbytes, self._config.verify)
        store = file.open_on_disk("params", nbytes)
        store.preallocate(0, nbytes)
        _copy(shard.params, store)
        shard.params = store
        shard.known.clear()

    def _rows(self, shard: UnitShard) -> Rows:
        """The rows of a table, which is a unit of one parameter."""
        ((slot,), (whole,)) = shard.layout.slots, shard.whole.slots
        assert shard.params is not None
        width = whole.numel // whole.shape[0]
        count = slot.numel // width
        arrays = {"params": RowArray(shard.params, count, width, DTYPES[slot.dtype])}
        for name, array in shard.arrays.items():
            arrays[name] = RowArray(array.store, count, width, array.dtype(slot.dtype))
        return Rows(arrays, self._resources.ledger)

    def _record(self, layout: UnitLayout, layouts: Layouts, params: bool, states: bool) -> tuple[int, ...]:
        """The bytes of a row of a table in each array that lies on disk, in the order of its file, of which `params`
        and `states` are; nothing where these are no records. See Note [Records] in move/store.py."""
        if layout.index not in self._plan.tables:
            return ()
        width = self._plan.infos[layout.slots[0].name].shape[1]
        nbytes = [layout.param_bytes] * params + [each.nbytes for each, _ in layouts.values()] * states
        return tuple(each // layout.numel * width for each in nbytes) if len(nbytes) > 1 else ()

    def _layouts(self, layout: UnitLayout, segments: Sequence[Segment]) -> Layouts:
        """With values for these segments."""
        found: Layouts = {}
        kept = self._plan.kept
        for name in () if kept.row_values and layout.index in self._plan.tables else kept.arrays:
            scales = array_layout(layout, SCALE_BYTES, BLOCK, segments) if name in kept.codes else None
            bytes_of = STATE_BYTES if scales is None else CODE_BYTES
            found[name] = array_layout(layout, bytes_of, 1, segments), scales if scales and scales.nbytes else None
        found[MASTER] = array_layout(layout, MASTER_BYTES, 1, segments), None
        return {name: each for name, each in found.items() if each[0].nbytes}

    def _arrays(self, shard: UnitShard, layouts: Layouts, file: UnitFile) -> dict[str, StateArray]:
        """The values that the shard's arrays have already are moved into them."""

        def open_store(layout: ArrayLayout, old: Store | None) -> Store:
            store = file.open("states", shard.tiers.states, layout.nbytes)
            if isinstance(store, DiskStore):
                store.preallocate(0, store.nbytes)
            if old is not None:
                _copy(old, store)
                if not isinstance(old, DiskStore):  # whose bytes stay in the unit's file
                    old.drop()
            return store

        arrays = {}
        for name, (layout, scaling) in layouts.items():
            old = shard.arrays.get(name)
            store, scales = open_store(layout, None if old is None else old.store), None
            if scaling is not None:
                was = None if old is None or old.scales is None else old.scales.store
                scales = Scales(scaling, open_store(scaling, was))
            arrays[name] = StateArray(name, layout, store, scales, self._plan.kept.codes.get(name))
        return arrays

    def _preallocate(self, shard: UnitShard) -> None:
        """Take the disk space of what training will write, before anything is written. Weights that take the place of
        what `init` holds follow when that is given back."""
        if isinstance(shard.params, DiskStore) and not self._plan.unit_bytes[shard.layout.index].swapped:
            shard.params.preallocate(0, shard.params.nbytes)
        for slot in shard.layout.slots:
            for grads in shard.grad_shards if self._plan.infos[slot.name].trainable and slot.numel else ():
                if isinstance(grads.store, DiskStore):
                    grads.store.preallocate(*grads.span(*page_range(slot.offset, slot.end)))

    def add_late_arrays(self, shard: UnitShard) -> None:
        """Make room for the state of frozen parameters. Raises `ValueError` where the budget has no room, `OSError`
        where the disk has none."""
        shard.own_params()
        layouts = self._layouts(shard.layout, shard.layout.segments)
        needed, before = _bytes_of(layouts), shard.tiers
        shard.tiers = replace(before, states=self._late_tier(shard, needed))
        shard.before_change()
        shard.known.clear()  # or the arrays of before would stay in memory
        try:
            on_disk = needed if shard.tiers.states == "disk" else 0
            name, record = _name_of(shard.layout, "-states"), self._record(shard.layout, layouts, False, on_disk > 0)
            file = UnitFile(self._resources, name, on_disk, self._config.verify, record=record)
            shard.arrays = self._arrays(shard, layouts, file)
            if shard.rows is not None:
                memory, on_device = shard.rows.taken
                shard.rows.close()
                shard.rows = self._rows(shard)
                shard.rows.use_memory(memory)
                shard.rows.use_device(on_device, shard.device)
        except BaseException:
            shard.tiers = before
            raise
        shard.has_late_room = True
        for slot in shard.slots.values():
            master = shard.array(MASTER, slot)
            if master is not None and slot.numel and not shard.layout.segment_of(slot).trainable:
                weight = shard.read_weight(slot.name)
                rest = weight.float() if slot.dtype == "float16" else torch.zeros_like(weight, dtype=torch.int16)
                shard.write_array(master, slot.offset, slot.end, rest)

    def _late_tier(self, shard: UnitShard, needed: int) -> str:
        """The tier that was asked for. Where that is left to us: where the unit has arrays, if that has room, or disk,
        if there is one, as memory is planned already. Else where `place` would have put it."""
        budgets = self._plan.budgets
        tiers = [shard.tiers.states if shard.arrays else self._config.states]
        if self._config.states == "auto":
            tiers = tiers * bool(shard.arrays) + ["disk" if self._resources.run_directories else shard.tiers.states]
        # What is gone or given back when that room is needed; of weights all but those that rest there.
        passing = (KEPT, "host/grads in flight", "device/resident", "device/params")
        resting = sum(
            size.params
            for size, each in zip(self._plan.unit_bytes, self._plan.tiers, strict=True)
            if each.params == "device"
        )
        for tier in tiers:
            sharing = budgets.sharing(tier)
            name = "memory" if len(sharing) > 1 else tier
            field, room = FIELDS[name], budgets.by_tier.get(name, 0)
            used = bytes_on(sharing, self._resources.ledger.now, but=passing) + resting * ("device" in sharing)
            if tier == shard.tiers.states != "disk":  # one array after the other is replaced
                used -= sum(store.nbytes for store in shard.lasting_stores() if store is not shard.params)
            if used + needed <= room:
                return tier
        raise BudgetError(
            f"the optimizer's state for unit {shard.layout.name!r} needs {format_bytes(needed)}, but "
            f"{format_bytes(used)} of {field}={format_bytes(room)} are taken; raise {field}, or unfreeze all "
            f"parameters, and give them to the optimizer, before outsize.prepare",
            field,
            needed,
            room - used,
        )


@final
class UnitFile:
    """Hands out stores of one unit; those on disk lie behind each other in one file.

    A lasting file holds what a checkpoint holds: parameters and optimizer state. Gradients come and go in another.
    With a `record` the stores lie row by row, each with so many bytes of a row. See Note [Records] in move/store.py.
    """

    def __init__(
        self,
        resources: Resources,
        name: str,
        nbytes: int,
        verify: bool,
        lasting: bool = True,
        record: Sequence[int] = (),
    ) -> None:
        self._record, self._stride = list(record), sum(record)
        nbytes += self._stride  # what pads an array may end within a row
        self._file = resources.open_file(name, nbytes, verify, lasting) if nbytes else None
        self._resources = resources
        self._position = 0

    def open(self, kind: str, tier: str, nbytes: int) -> Store:
        if tier == "disk":
            return self.open_on_disk(kind, nbytes)
        lanes = self._resources.lanes
        on_device, account = lanes if tier == "device" else None, f"{tier}/{kind}"
        return Buffer(nbytes, self._resources.ledger, on_device, account, lasting=True, pinned=lanes is not None)

    def open_on_disk(self, kind: str, nbytes: int) -> DiskStore:
        assert self._file is not None
        own = self._record.pop(0) if self._record else nbytes
        record = (own, self._stride) if self._stride else None
        store = DiskStore(self._file, self._position, nbytes, self._resources.ledger, kind, record)
        self._position += own
        return store


def _name_of(layout: UnitLayout, kind: str = "") -> str:
    return f"unit-{layout.index:05d}{kind}"


def _bytes_of(layouts: Layouts) -> int:
    return sum(each.nbytes for pair in layouts.values() for each in pair if each is not None)


def _copy(old: Store, new: Store) -> None:
    """The bytes of one store to the beginning of another."""
    slab = HostBuffer(min(old.nbytes, COPIED_BYTES)).bytes
    for first in range(0, old.nbytes, COPIED_BYTES):
        part = slab[: min(COPIED_BYTES, old.nbytes - first)]
        old.read(first, part).wait()
        new.write(first, part).wait()
