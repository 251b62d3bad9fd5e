"""Where one unit comes to rest: its file, its stores, its optimizer arrays, in the formats that were asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from outsize.api.resources import Resources
from outsize.api.survey import Survey
from outsize.config import Config
from outsize.move.buffer import open_buffer
from outsize.move.disk import DiskStore, PagedFile
from outsize.move.gradients import GradShard
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
from outsize.move.store import DeviceStore, HostStore, Store
from outsize.optim.compact import BlockCodec
from outsize.optim.rules import Rule
from outsize.plan.layout import ArrayLayout, Slot, UnitLayout, array_layout, slice_of
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
) -> UnitShard:
    """`layout` is the whole unit's; what rests here is this rank's slice of it."""
    whole, (rank, ranks) = layout, plan.split
    layout = slice_of(whole, rank, ranks)
    device, ledger = config.compute_device, resources.ledger
    codecs = _codecs(rule, config)
    layouts = _array_layouts(layout, plan, codecs) if _is_optimized(layout, plan.optimized) else []
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
            disk = scratch.open("grads", tiers.grads, wide, resources) if tiers.grads == "disk" else None
            grads.append(GradShard(layout, disk, ledger, resources.outbox))
    buffer = open_buffer(whole.param_bytes, ledger, resources.lanes)
    shard = UnitShard(layout, tiers, buffer, params, grads, device, whole, rank, ranks, shared, resources.lanes)
    _open_arrays(shard, layouts, codecs, file, resources)
    _preallocate(shard, plan)
    return shard


def _is_optimized(layout: UnitLayout, optimized: Collection[str]) -> bool:
    return any(slot.name in optimized for slot in layout.slots)


def _codecs(rule: Rule | None, config: Config) -> dict[str, Codec]:
    """The arrays that rest as 8-bit codes, and how."""
    if rule is None or config.state_format != "compact":
        return {}
    return {name: BlockCodec(kind) for name, kind in rule.codes.items()}


def _array_layouts(
    layout: UnitLayout, plan: Survey, codecs: Mapping[str, Codec]
) -> list[tuple[tuple[str, bool], ArrayLayout]]:
    """((name, whether these are the scales of it), layout) of every array of a unit, in the order of its file."""
    found: list[tuple[tuple[str, bool], ArrayLayout]] = []
    for name in plan.kept.arrays:
        found.append(((name, False), array_layout(layout, CODE_BYTES if name in codecs else STATE_BYTES)))
        if name in codecs:
            found.append(((name, True), array_layout(layout, SCALE_BYTES, BLOCK)))
    if any(slot.dtype in MASTER_BYTES for slot in layout.slots):
        found.append(((MASTER, False), array_layout(layout, MASTER_BYTES)))
    return found


def _open_arrays(
    shard: UnitShard,
    layouts: Sequence[tuple[tuple[str, bool], ArrayLayout]],
    codecs: Mapping[str, Codec],
    file: UnitFile,
    resources: Resources,
) -> None:
    stores = {}
    for key, layout in layouts:
        store = file.open("states", shard.tiers.states, layout.nbytes, resources)
        stores[key] = (layout, store)
    for (name, is_scales), (layout, store) in stores.items():
        if not is_scales:
            scales = Scales(*stores[name, True]) if (name, True) in stores else None
            shard.arrays[name] = StateArray(name, layout, store, scales, codecs.get(name))


@final
class LateArrays:
    """Opens the arrays of units whose parameters come to the optimizer after `prepare` (`add_param_group`)."""

    def __init__(self, plan: Survey, config: Config, rule: Rule | None, resources: Resources) -> None:
        self._plan = plan
        self._config = config
        self._rule = rule
        self._resources = resources
        self._known = set(plan.optimized)

    def add(self, shard: UnitShard, names: Collection[str]) -> None:
        """Make sure that the unit, which is gathered and written, has room for the state of these parameters too.

        Their fp32 masters begin at what the unit shows of them: it may have had no room for more until now, and what
        shares a unit depends on the budget. Raises `ValueError` where the budget has no room, `OSError` where the disk
        has none.
        """
        fresh = [name for name in names if name not in self._known]  # who has only changed its group keeps its master
        if not shard.arrays:
            self._open(shard)
            fresh = list(shard.slots)  # what is saved and exported of any of them is the master now
        for name in fresh:
            self._begin_master(shard, shard.slots[name])
        self._known.update(names)

    def _begin_master(self, shard: UnitShard, slot: Slot) -> None:
        if slot.dtype not in MASTER_BYTES or not slot.numel:
            return
        weight = shard.own(slot.name, shard.param(slot.name)).cpu().reshape(-1)
        master = weight.float() if slot.dtype == "float16" else torch.zeros_like(weight, dtype=torch.int16)
        shard.write_array(shard.arrays[MASTER], slot.offset, slot.end, master)

    def _open(self, shard: UnitShard) -> None:
        codecs = _codecs(self._rule, self._config)
        layouts = _array_layouts(shard.layout, self._plan, codecs)
        needed = sum(layout.nbytes for _, layout in layouts)
        shard.tiers = replace(shard.tiers, states=self._tier(shard, needed))
        disk = needed if shard.tiers.states == "disk" else 0
        file = UnitFile(self._resources, f"unit-{shard.layout.index:05d}-states", disk, self._config.verify)
        _open_arrays(shard, layouts, codecs, file, self._resources)
        for array in shard.arrays.values():
            if isinstance(array.store, DiskStore):
                array.store.preallocate(0, array.store.nbytes)
            if array.scales is not None and isinstance(array.scales.store, DiskStore):
                array.scales.store.preallocate(0, array.scales.store.nbytes)

    def _tier(self, shard: UnitShard, needed: int) -> str:
        tier = self._config.states
        if tier == "auto":
            tier = "device" if shard.tiers.params == "device" or self._resources.disk is None else "disk"
        name, tiers, room = self._budget(tier)
        now = self._resources.ledger.now
        passing = (KEPT, "host/grads in flight")  # gone or given back when that room is needed
        used = sum(
            nbytes for account, nbytes in now.items() if account.split("/")[0] in tiers and account not in passing
        )
        if used + needed > room:
            raise ValueError(
                f"the optimizer's state for unit {shard.layout.name!r} needs {format_bytes(needed)}, but "
                f"{format_bytes(used)} of {name}={format_bytes(room)} are taken; raise {name}, or give the optimizer "
                f"all parameters before outsize.prepare"
            )
        return tier

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
        self._file: PagedFile | None = None
        self._position = 0
        if nbytes and (lasting or verify):
            self._file = resources.open_generations(name, nbytes, verify)
        elif nbytes:
            self._file = resources.open_file(name, nbytes)

    def open(self, kind: str, tier: str, nbytes: int, resources: Resources) -> Store:
        if tier == "disk":
            assert self._file is not None
            store = DiskStore(self._file, self._position, nbytes, resources.ledger, kind)
            self._position += nbytes
            return store
        if tier == "device" and resources.lanes is not None:
            return DeviceStore(nbytes, resources.ledger, kind, resources.lanes)
        return HostStore(nbytes, resources.ledger, kind, tier, pinned=resources.lanes is not None)


def _preallocate(shard: UnitShard, plan: Survey) -> None:
    """Take the disk space of everything that training will write, before anything is written."""
    if isinstance(shard.params, DiskStore):
        shard.params.preallocate(0, shard.params.nbytes)
    trained = [slot for slot in shard.layout.slots if plan.infos[slot.name].trainable and slot.numel]
    for slot in trained:
        low, high = shard.pages(slot.offset, slot.end)
        for grads in shard.grad_shards:
            if isinstance(grads.store, DiskStore):
                grads.store.preallocate(*grads.span(low, high))
        for array in shard.arrays.values():
            if isinstance(array.store, DiskStore):
                array.store.preallocate(*array.layout.span(low, high))
            if array.scales is not None and isinstance(array.scales.store, DiskStore):
                array.scales.store.preallocate(0, array.scales.layout.nbytes)
