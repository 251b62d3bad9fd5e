"""Writing a checkpoint: every array of every unit, slab by slab, then the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, Gradients, RestingArray, States, Weights, copy_out
from outsize.checkpoint.files import DataWriter
from outsize.checkpoint.folder import new_folder, sync, write_text
from outsize.checkpoint.library import require_safetensors, storing
from outsize.checkpoint.manifest import (
    MANIFEST_NAME,
    BufferRecord,
    FilePlan,
    GradRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
    Region,
)
from outsize.checkpoint.values import DTYPE_NAMES, encode, inline
from outsize.move.gradients import GradOps, GradShard
from outsize.move.memory import HostBuffer
from outsize.move.shard import DTYPES, MASTER, MASTER_BYTES, MASTER_DTYPE, UnitShard
from outsize.plan.layout import Slot

MODEL_FILE = "model.bin"
EXTRA_FILE = "extra.safetensors"


@dataclass(frozen=True)
class GradAtRest:
    """A gradient as it rests: in a gradient shard of its unit, or as `content`."""

    ops: GradOps = field(default_factory=GradOps)
    norms: Mapping[float, float] = field(default_factory=dict)
    content: torch.Tensor | None = None
    resting: GradShard | None = None


@final
class Extra:
    """The user's `extra`, checked and encoded before anything is written."""

    def __init__(self, value: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.encoded = encode(value, "extra", self._keep)
        if self.tensors:
            require_safetensors("outsize.save with tensors in extra")

    def _keep(self, path: str, tensor: torch.Tensor) -> str:
        self.tensors[path] = tensor
        return path


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. The shards are settled; `held` are the gradients that a delayed update holds
    back; `buffers` maps names to (values, persistent)."""

    shards: Sequence[UnitShard]
    grads: Mapping[str, GradAtRest]
    held: Mapping[str, GradAtRest]
    buffers: Mapping[str, tuple[torch.Tensor, bool]]
    optimizer: OptimizerRecord | None
    rng: Any
    extra: Extra


def write_checkpoint(target: Path, snapshot: Snapshot) -> None:
    """Write the folder `target` whole, or leave what was there. Memory: one slab, and one buffer on its way."""
    with new_folder(target) as folder:
        files: dict[str, int] = {}
        parameters: dict[str, ParameterRecord] = {}
        for shard in snapshot.shards:
            unit = _UnitPlan(shard, snapshot)
            unit.write(folder)
            files[unit.file.name] = unit.file.nbytes
            parameters.update(unit.records())
        buffers, rng = _write_model(folder, snapshot, files)
        _write_extra(folder, snapshot.extra, files)
        manifest = Manifest(files, parameters, buffers, snapshot.optimizer, rng, snapshot.extra.encoded, _versions())
        write_text(folder / MANIFEST_NAME, manifest.to_text())


class _UnitPlan:
    """Where each array of one unit goes in the unit's file."""

    def __init__(self, shard: UnitShard, snapshot: Snapshot) -> None:
        self.file = FilePlan(f"unit-{shard.layout.index:05d}.bin")
        self._shard = shard
        self._slots = shard.layout.slots
        self._scalars = self._encode_scalars() if snapshot.optimizer is not None else {}
        self._weights = {slot.name: self.file.reserve(DTYPES[slot.dtype], slot.shape) for slot in self._slots}
        halves = [slot for slot in self._slots if slot.dtype in MASTER_BYTES] if MASTER in shard.arrays else []
        self._masters = {slot.name: self.file.reserve(MASTER_DTYPE[slot.dtype], slot.shape) for slot in halves}
        trained = [slot for slot in self._slots if slot.name in self._scalars]
        self._states = {
            name: {slot.name: self.file.reserve(array.value_dtype(slot.dtype), slot.shape) for slot in trained}
            for name, array in shard.arrays.items()
            if array.public
        }
        self._grads = _GradPlan(shard, snapshot.grads, self.file)
        self._held = _GradPlan(shard, snapshot.held, self.file)

    def records(self) -> dict[str, ParameterRecord]:
        return {slot.name: self._record(slot.name) for slot in self._slots}

    def write(self, folder: Path) -> None:
        slab = HostBuffer(SLAB_BYTES)
        with DataWriter(folder / self.file.name, self.file.nbytes) as file:
            _copy(Weights(self._shard), self._weights, slab, file)
            if self._masters:
                _copy(States(self._shard, self._shard.arrays[MASTER]), self._masters, slab, file)
            for name, regions in self._states.items():
                _copy(States(self._shard, self._shard.arrays[name]), regions, slab, file)
            self._grads.write(file, slab)
            self._held.write(file, slab)

    def _encode_scalars(self) -> dict[str, Any]:
        states = self._shard.slot_states
        return {
            name: encode(state.scalars, f"the optimizer state of {name!r}", inline)
            for name, state in states.items()
            if state.initialised
        }

    def _record(self, name: str) -> ParameterRecord:
        return ParameterRecord(
            weight=self._weights[name],
            master=self._masters.get(name),
            state={array: regions[name] for array, regions in self._states.items() if name in regions},
            scalars=self._scalars.get(name),
            grad=self._grads.record(name),
            held=self._held.record(name),
        )


class _GradPlan:
    """Where one unit's gradients of one step go in the unit's file."""

    def __init__(self, shard: UnitShard, grads: Mapping[str, GradAtRest], file: FilePlan) -> None:
        self._layout = shard.layout
        self._grads = {slot.name: grads[slot.name] for slot in shard.layout.slots if slot.name in grads}
        self._regions: dict[str, Region] = {}
        for slot in shard.layout.slots:
            grad = self._grads.get(slot.name)
            if grad is not None and grad.content is not None:
                self._regions[slot.name] = file.reserve(grad.content.dtype, slot.shape)
            elif grad is not None and grad.resting is not None:
                self._regions[slot.name] = file.reserve(grad.resting.dtype(slot), slot.shape)

    def record(self, name: str) -> GradRecord | None:
        grad = self._grads.get(name)
        return None if grad is None else GradRecord(self._regions[name], grad.ops, grad.norms)

    def write(self, file: DataWriter, slab: HostBuffer) -> None:
        resting: dict[GradShard, dict[str, Region]] = {}
        for name, grad in self._grads.items():
            if grad.content is not None:
                file.write(self._regions[name].offset, grad.content.detach().reshape(-1).cpu())
            elif grad.resting is not None:
                resting.setdefault(grad.resting, {})[name] = self._regions[name]
        for shard, regions in resting.items():
            _copy(Gradients(self._layout, shard), regions, slab, file)


def _copy(array: RestingArray, regions: Mapping[str, Region], slab: HostBuffer, file: DataWriter) -> None:
    def sink(slot: Slot, first: int, content: torch.Tensor) -> None:
        file.write(regions[slot.name].offset + first * content.itemsize, content)

    copy_out(array, regions, slab, sink)


def _write_model(folder: Path, snapshot: Snapshot, files: dict[str, int]) -> tuple[dict[str, BufferRecord], Any]:
    """The buffers and the states of the generators, which are in memory anyway."""
    plan = FilePlan(MODEL_FILE)
    contents: list[tuple[Region, torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> Region:
        contents.append((plan.reserve(tensor.dtype, tuple(tensor.shape)), tensor))
        return contents[-1][0]

    buffers = {name: BufferRecord(keep(value), persistent) for name, (value, persistent) in snapshot.buffers.items()}
    rng = encode(snapshot.rng, "the states of the random number generators", lambda _, tensor: keep(tensor).to_json())
    with DataWriter(folder / MODEL_FILE, plan.nbytes) as file:
        for region, tensor in contents:
            file.write(region.offset, tensor.detach().cpu().contiguous())
    files[MODEL_FILE] = plan.nbytes
    return buffers, rng


def _write_extra(folder: Path, extra: Extra, files: dict[str, int]) -> None:
    if not extra.tensors:
        return
    path = folder / EXTRA_FILE
    # Copies: the library refuses tensors that share memory.
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in extra.tensors.items()
    }
    with storing(path):
        require_safetensors("outsize.save with tensors in extra").save_file(tensors, path)
    sync(path)
    files[EXTRA_FILE] = path.stat().st_size


def check_buffers(buffers: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    """Raise `TypeError` for a buffer that no checkpoint can hold."""
    for name, (value, _) in buffers.items():
        if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
            raise TypeError(f"buffer {name!r} is a {value.layout} tensor of {value.dtype}; it cannot be saved")


def _versions() -> dict[str, str]:
    try:
        own = version("outsize")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"outsize": own, "torch": torch.__version__}
