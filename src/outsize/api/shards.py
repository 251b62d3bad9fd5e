"""Where one unit comes to rest: its file, its stores, its optimizer arrays, in the formats that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from outsize.api.resources import Resources
from outsize.api.survey import Survey
from outsize.config import Config
from outsize.move.buffer import open_buffer
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer
from outsize.move.shard import (
    BLOCK,
    CODE_BYTES,
    MASTER,
    MASTER_BYTES,
    SCALE_BYTES,
    STATE_BYTES,
    Codec,
    Scales,
    StateArray,
    UnitShard,
)
from outsize.move.store import DiskStore, MemoryStore, Store
from outsize.optim.compact import BlockCodec
from outsize.optim.rules import Rule
from outsize.plan.layout import ArrayLayout, Segment, Slot, UnitLayout, array_layout, page_range, slice_of
from outsize.plan.placement import UnitTiers
from outsize.plan.sizes import format_bytes
from outsize.run.buffers import KEPT


def open_shard(
    layout: UnitLayout,
    tiers: UnitTiers,
    plan: Survey,
    config: Config,
    rule: Rule | None,
    resources: Resources,
    shared: bool,
    late: LateArrays,
) -> UnitShard:
    """`layout` is the whole unit's; what rests here is this rank's slice of it."""
    whole, (rank, ranks) = layout, plan.split
    layout = slice_of(whole, rank, ranks)
    device, ledger = config.compute_device, resources.ledger
    codecs = _codecs(rule, config)
    trained = [segment for segment in layout.segments if segment.trainable]
    layouts = _array_layouts(layout, plan, codecs, trained)
    wide = array_layout(layout, STATE_BYTES).nbytes
    copies = 2 if config.delayed_update else 1
    sizes = {
        "params": layout.param_bytes,
        "grads": copies * wide,
        "states": sum(each.nbytes for _, each in layouts),
    }
    on_disk = {kind: nbytes if getattr(tiers, kind) == "disk" else 0 for kind, nbytes in sizes.items()}
    name = f"unit-{layout.index:05d}"
    file = UnitFile(resources, name, on_disk["params"] + on_disk["states"], config.verify)
    scratch = UnitFile(resources, f"{name}-grads", on_disk["grads"], config.verify, lasting=False)
    gathered = tiers.params == "device" and (ranks == 1 or config.stage < 3)  # then the buffer is the store
    params = None if gathered else file.open("params", tiers.params, layout.param_bytes, resources)
    grads = []
    if tiers.grads != "device":
        for _ in range(copies):
            disk = scratch.open_on_disk("grads", wide, resources) if tiers.grads == "disk" else None
            grads.append(GradShard(layout, disk, ledger, resources.outbox))
    buffer = open_buffer(whole.param_bytes, ledger, resources.lanes)
    lanes = resources.lanes
    shard = UnitShard(layout, tiers, buffer, params, grads, device, whole, rank, ranks, shared, lanes, late.open)
    shard.arrays = _open_arrays(shard, layouts, codecs, file, resources)
    _preallocate(shard, plan)
    return shard


def _codecs(rule: Rule | None, config: Config) -> dict[str, Codec]:
    """The arrays that rest as 8-bit codes, and how."""
    if rule is None or config.state_format != "compact":
        return {}
    return {name: BlockCodec(kind) for name, kind in rule.codes.items()}


def _array_layouts(
    layout: UnitLayout, plan: Survey, codecs: Mapping[str, Codec], segments: Sequence[Segment]
) -> list[tuple[tuple[str, bool], ArrayLayout]]:
    """((name, whether these are the scales of it), layout) of every array of a unit with values for these segments, in
    the order of its file."""
    found: list[tuple[tuple[str, bool], ArrayLayout]] = []
    for name in plan.kept.arrays:
        found.append(((name, False), array_layout(layout, CODE_BYTES if name in codecs else STATE_BYTES, 1, segments)))
        if name in codecs:
            found.append(((name, True), array_layout(layout, SCALE_BYTES, BLOCK, segments)))
    found.append(((MASTER, False), array_layout(layout, MASTER_BYTES, 1, segments)))
    return [each for each in found if each[1].nbytes]


def _open_arrays(
    shard: UnitShard,
    layouts: Sequence[tuple[tuple[str, bool], ArrayLayout]],
    codecs: Mapping[str, Codec],
    file: UnitFile,
    resources: Resources,
) -> dict[str, StateArray]:
    """The values that the shard's arrays have already are moved into them."""
    old = {(name, False): array.store for name, array in shard.arrays.items()}
    old |= {(name, True): array.scales.store for name, array in shard.arrays.items() if array.scales is not None}
    stores = {}
    for key, layout in layouts:
        store = file.open("states", shard.tiers.states, layout.nbytes, resources)
        if isinstance(store, DiskStore):
            store.preallocate(0, store.nbytes)
        if key in old:
            _copy(old[key], store)
            if not isinstance(old[key], DiskStore):  # whose bytes stay in the unit's file
                old[key].close()
        stores[key] = (layout, store)
    arrays = {}
    for (name, is_scales), (layout, store) in stores.items():
        if not is_scales:
            scales = Scales(*stores[name, True]) if (name, True) in stores else None
            arrays[name] = StateArray(name, layout, store, scales, codecs.get(name))
    return arrays


# Note [Frozen parameters]
# Arrays have values for the trainable parameters alone, which come first in a unit. When a frozen one gets a state (it
# is unfrozen and stepped, or comes by `add_param_group` or from a checkpoint), the unit's arrays are replaced by longer
# ones: the old values are their first bytes. The fp32 masters of those that had no room begin at the weights.


@final
class LateArrays:
    """Opens arrays for frozen parameters too. See Note [Frozen parameters]."""

    def __init__(self, plan: Survey, config: Config, rule: Rule | None, resources: Resources) -> None:
        self._plan = plan
        self._config = config
        self._rule = rule
        self._resources = resources

    def open(self, shard: UnitShard) -> None:
        """Raises `ValueError` where the budget has no room, `OSError` where the disk has none."""
        codecs = _codecs(self._rule, self._config)
        layouts = _array_layouts(shard.layout, self._plan, codecs, shard.layout.segments)
        needed = sum(layout.nbytes for _, layout in layouts)
        before = shard.tiers
        shard.tiers = replace(before, states=self._tier(shard, needed))
        shard.before_change()
        try:
            disk = needed if shard.tiers.states == "disk" else 0
            file = UnitFile(self._resources, f"unit-{shard.layout.index:05d}-states", disk, self._config.verify)
            arrays = _open_arrays(shard, layouts, codecs, file, self._resources)
        except BaseException:
            shard.tiers = before
            raise
        shard.arrays = arrays
        shard.views.clear()
        shard.has_late_room = True
        for slot in shard.slots.values():
            if not shard.layout.segments[slot.segment].trainable:
                self._begin_master(shard, slot)

    def _begin_master(self, shard: UnitShard, slot: Slot) -> None:
        array = shard.array(MASTER, slot)
        if array is not None and slot.numel:
            weight = shard.read_weight(slot.name)
            master = weight.float() if slot.dtype == "float16" else torch.zeros_like(weight, dtype=torch.int16)
            shard.write_array(array, slot.offset, slot.end, master)

    def _tier(self, shard: UnitShard, needed: int) -> str:
        """The tier that was asked for. Where that is left to us: where the unit has arrays, if that has room, or disk,
        if there is one; memory is planned already."""
        tiers = [shard.tiers.states if shard.arrays else self._config.states]
        if self._config.states == "auto":
            tiers = tiers * bool(shard.arrays) + ["device" if self._resources.disk is None else "disk"]
        now = self._resources.ledger.now
        passing = (KEPT, "host/grads in flight", "device/resident")  # gone or given back when that room is needed
        for tier in tiers:
            name, sharing, room = self._budget(tier)
            used = sum(
                nbytes for account, nbytes in now.items() if account.split("/")[0] in sharing and account not in passing
            )
            if tier == shard.tiers.states != "disk":  # one array after the other is replaced
                used -= sum(store.nbytes for store in _stores_of(shard.arrays))
            if used + needed <= room:
                return tier
        raise ValueError(
            f"the optimizer's state for unit {shard.layout.name!r} needs {format_bytes(needed)}, but "
            f"{format_bytes(used)} of {name}={format_bytes(room)} are taken; raise {name}, or unfreeze all "
            f"parameters, and give them to the optimizer, before outsize.prepare"
        )

    def _budget(self, tier: str) -> tuple[str, tuple[str, ...], int]:
        """(the field, the tiers that share it, its bytes)."""
        budgets = self._plan.budgets
        if tier == "disk":
            return "disk_space", ("disk",), budgets.disk or 0
        if budgets.device is None:
            return "host_memory", ("device", "host"), budgets.host
        return (
            ("device_memory", ("device",), budgets.device)
            if tier == "device"
            else ("host_memory", ("host",), budgets.host)
        )


class UnitFile:
    """Hands out stores of one unit; those on disk lie behind each other in one file.

    A lasting file holds what a checkpoint holds: parameters and optimizer state. Gradients come and go in another.
    """

    def __init__(self, resources: Resources, name: str, nbytes: int, verify: bool, lasting: bool = True) -> None:
        self._file = resources.open_file(name, nbytes, verify, lasting) if nbytes else None
        self._position = 0

    def open(self, kind: str, tier: str, nbytes: int, resources: Resources) -> Store:
        if tier == "disk":
            return self.open_on_disk(kind, nbytes, resources)
        lanes = resources.lanes
        on_device = lanes if tier == "device" else None
        return MemoryStore(nbytes, resources.ledger, f"{tier}/{kind}", on_device, pinned=lanes is not None)

    def open_on_disk(self, kind: str, nbytes: int, resources: Resources) -> DiskStore:
        assert self._file is not None
        store = DiskStore(self._file, self._position, nbytes, resources.ledger, kind)
        self._position += nbytes
        return store


def _preallocate(shard: UnitShard, plan: Survey) -> None:
    """Take the disk space of everything that training will write, before anything is written."""
    if isinstance(shard.params, DiskStore):
        shard.params.preallocate(0, shard.params.nbytes)
    trained = [slot for slot in shard.layout.slots if plan.infos[slot.name].trainable and slot.numel]
    for slot in trained:
        low, high = page_range(slot.offset, slot.end)
        for grads in shard.grad_shards:
            if isinstance(grads.store, DiskStore):
                grads.store.preallocate(*grads.span(low, high))


def _stores_of(arrays: Mapping[str, StateArray]) -> list[Store]:
    return [
        store
        for array in arrays.values()
        for store in (array.store, None if array.scales is None else array.scales.store)
        if store is not None
    ]


def _copy(old: Store, new: Store) -> None:
    """The bytes of one store to the beginning of another."""
    slab = HostBuffer(min(old.nbytes, COPIED_BYTES)).bytes
    for first in range(0, old.nbytes, COPIED_BYTES):
        part = slab[: min(COPIED_BYTES, old.nbytes - first)]
        old.read(first, part).wait()
        new.write(first, part).wait()


COPIED_BYTES = 4 << 20
"""At once, from one store to another."""
