"""Writing a checkpoint: the files that hold the state on disk, copies of what is in memory, then the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, Gradients, RestingArray, copy_out
from outsize.checkpoint.files import DataWriter, file_record
from outsize.checkpoint.folder import NewFolder, sync, write_text
from outsize.checkpoint.joint import Cut, Peers, folder_of, merged_parts, own_name, together
from outsize.checkpoint.joint import Part as RankPart
from outsize.checkpoint.library import require_safetensors, storing
from outsize.checkpoint.manifest import (
    MANIFEST_NAME,
    BufferRecord,
    FilePlan,
    FileRecord,
    GradRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
)
from outsize.checkpoint.parts import CopyRoom, FrozenCopy, Part, Present, UnitPlaces, sync_all, take
from outsize.checkpoint.regions import Region
from outsize.checkpoint.shelf import check_room
from outsize.checkpoint.values import DTYPE_NAMES, INLINE_NUMEL, encode, inline
from outsize.move.generations import Generation, Generations
from outsize.move.gradients import GradOps, GradShard
from outsize.move.memory import HostBuffer
from outsize.move.shard import UnitShard
from outsize.plan.layout import Slot

MODEL_FILE = "model.bin"
GRADS_FILE = "grads.bin"
AT_ONCE_BYTES = 64 << 20
"""State of so many bytes is simply written before `save` returns. What is larger is linked, or written
behind the training."""

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
        if tensor.dtype is torch.complex128:
            raise TypeError(f"{path} is a tensor of {tensor.dtype}, which safetensors cannot store; convert it first")
        self.tensors[path] = tensor
        return path


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. The shards are settled; `held` are the gradients that a delayed update holds
    back; `buffers` maps names to (values, persistent): on a further rank those that differ from the first one's."""

    shards: Sequence[UnitShard]
    grads: Mapping[str, GradAtRest]
    held: Mapping[str, GradAtRest]
    buffers: Mapping[str, tuple[torch.Tensor, bool]]
    optimizer: OptimizerRecord | None
    rng: Any
    extra: Extra
    saved_at: str
    peers: Peers | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole parameters, where `peers` have other slices of them."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Which part along a dimension this rank has, of the parameters that tensor parallelism has split."""

    @property
    def rank(self) -> int:
        return 0 if self.peers is None else self.peers.rank


@dataclass(frozen=True)
class Room:
    """What a save may take: memory for copies of what changes before it is written, and `disk` for the generations that
    follow files which are copied behind it; `going` are the checkpoints that are removed once this one is complete."""

    copy_bytes: int
    disk_bytes: int
    going: Sequence[Path] = ()


@final
class ModelFile:
    """The file of what is in memory anyway: buffers, the generators' states, and the optimizer's values of a parameter
    that are too large for the manifest (the factored moments of Adafactor)."""

    def __init__(self, name: str) -> None:
        self._plan = FilePlan(name)
        self._contents: list[tuple[Region, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes

    def keep(self, tensor: torch.Tensor) -> Region:
        """Where the tensor will lie; it must not change before `write`."""
        self._contents.append((self._plan.reserve(tensor.dtype, tuple(tensor.shape)), tensor))
        return self._contents[-1][0]

    def small_or_kept(self, path: str, tensor: torch.Tensor) -> Any:
        """For `encode`: a small tensor in the manifest itself, any other in the file."""
        if tensor.numel() <= INLINE_NUMEL and not tensor.is_complex():
            return inline(path, tensor)
        return self.keep(tensor).to_json()

    def write(self, folder: Path, files: dict[str, FileRecord]) -> None:
        """Write it, add its record to `files`, and let go of the tensors."""
        with DataWriter(folder / self._plan.name, self.nbytes) as file:
            for region, tensor in self._contents:
                file.write(region.pieces[0].offset, tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        self._contents.clear()
        files[self._plan.name] = file_record(folder / self._plan.name)


@final
class UnfinishedCheckpoint:
    """A checkpoint whose state is safe from the training and that `finish` brings to its place.

    Made while the training stands still. What is on disk is linked and frozen, or held; what is in memory is held, so
    that it does not change before it is written or copied.
    """

    def __init__(self, target: Path, snapshot: Snapshot, room: Room) -> None:
        self._snapshot = snapshot
        self._grads = FilePlan(own_name(GRADS_FILE, snapshot.rank))
        self._model = ModelFile(own_name(MODEL_FILE, snapshot.rank))
        self._parts: list[Part] = []
        self._files: dict[str, FileRecord] = {}
        self._frozen: list[Generations] = []  # by this save
        self._linked: list[Generation] = []
        self._folder = _new_folder(target, snapshot.peers)
        try:
            self._plans = [_UnitPlan(shard, snapshot, self._grads, self._model) for shard in snapshot.shards]
            places = [plan.places for plan in self._plans]
            small = sum(each.copied_bytes + each.file_bytes for each in places) <= AT_ONCE_BYTES
            self._check_room(places, small, room)
            self._take_files(places, small, room.disk_bytes)
            self._take_memory(places, small, CopyRoom(room.copy_bytes))
            self._write_grads()
            self._buffers, self._rng = _write_model(self._folder.path, snapshot, self._model, self._files)
            _write_extra(self._folder.path, snapshot, self._files)
        except BaseException:
            self.abandon()
            self._unfreeze()
            raise

    @property
    def pending(self) -> bool:
        """Whether anything large is still to be written."""
        return any(not isinstance(part, Present) for part in self._parts)

    def _check_room(self, places: Sequence[UnitPlaces], small: bool, room: Room) -> None:
        """Raise `OSError` now, while nothing has changed, if what is about to be written has no room."""
        here = self._folder.path.stat().st_dev
        needed = {here: self._grads.nbytes + self._model.nbytes + sum(each.copied_bytes for each in places)}
        pending = any(each.copied_bytes for each in places)
        for file in (file for each in places for file in each.files.values()):
            device = file.now.file.device
            if small or device != here:
                needed[here] += file.touched_bytes
                pending = True
            elif not file.has_next:
                needed[here] += file.reserved_bytes
        # What goes makes room only for what is written after it: the next generations, unless there is more to come.
        check_room([self._folder.target.parent], needed, room.going if not pending else ())

    def _take_files(self, places: Sequence[UnitPlaces], small: bool, disk_bytes: int) -> None:
        if not small:
            sync_all(file for each in places for file in each.files.values())
        for name, file in (item for each in places for item in each.files.items()):
            was_frozen = file.frozen
            part = FrozenCopy(name, file.now) if small else take(file, self._folder.path, name, disk_bytes)
            if file.frozen and not was_frozen:
                self._frozen.append(file)
            if isinstance(part, Present) and file.frozen:
                self._linked.append(file.now)
            if isinstance(part, Present) or file.frozen:
                self._parts.append(part)
            else:
                self._write(part)
            disk_bytes -= file.reserved_bytes if file.frozen and not isinstance(part, Present) else 0

    def _take_memory(self, places: Sequence[UnitPlaces], small: bool, room: CopyRoom) -> None:
        for each in places:
            image = each.image(room)
            if image is None:
                continue
            if not small and each.hold(image):
                self._parts.append(image)
            else:
                self._write(image)

    def _unfreeze(self) -> None:
        """Nobody refers to the files that this save has frozen: they need no next generation."""
        for file in self._frozen:
            if file.now.file.links <= 1:
                file.unfreeze()

    def _write(self, part: Part) -> None:
        try:
            self._files[part.name] = part.write(self._folder.path)
        finally:
            part.drop()

    def _write_grads(self) -> None:
        if not self._grads.nbytes:
            return
        path = self._folder.path / self._grads.name
        slab = HostBuffer(SLAB_BYTES)
        with DataWriter(path, self._grads.nbytes) as file:
            for plan in self._plans:
                plan.write_grads(file, slab)
        self._files[self._grads.name] = file_record(path)

    def finish(self) -> Path | None:
        """Write what is left, then the manifest, and publish; gives the folder that was replaced, if there was one."""
        try:
            replaced = self._finish_alone() if self._snapshot.peers is None else self._finish_with(self._snapshot.peers)
        except BaseException:
            self.abandon()
            raise
        self._frozen = []  # whatever comes now, the files are the checkpoint's
        for generation in self._linked:
            with suppress(OSError):  # then it has two names until the run ends
                generation.file.unlink()
        return replaced

    def _write_parts(self) -> None:
        while self._parts:
            self._write(self._parts.pop(0))

    def _finish_alone(self) -> Path | None:
        self._write_parts()
        write_text(self._folder.path / MANIFEST_NAME, self._manifest(self._files, Records(self._plans)).to_text())
        return self._folder.publish()

    def _finish_with(self, peers: Peers) -> Path | None:
        """See Note [One checkpoint of several ranks]."""

        def own() -> RankPart:
            self._write_parts()
            if peers.rank:
                sync(self._folder.path)
            records = dict(Records(self._plans))
            aside = {"rng": self._rng, "extra": self._snapshot.extra.encoded}
            if peers.rank and self._buffers:
                aside["buffers"] = {name: record.to_json() for name, record in self._buffers.items()}
            return RankPart(self._files, records, self._snapshot.shapes, aside, self._snapshot.cuts)

        def publish() -> Path | None:
            if peers.rank:
                return None
            files, records = merged_parts(parts, peers.tensor)
            asides = [part.aside for part in parts[1:]]
            manifest = replace(
                self._manifest(files, records), world_size=peers.size, tensor_ranks=peers.tensor, ranks=asides
            )
            write_text(self._folder.path / MANIFEST_NAME, manifest.to_text())
            return self._folder.publish()

        parts: list[RankPart] = together(peers, own, "writing the checkpoint")
        replaced: list[Path | None] = together(peers, publish, "publishing the checkpoint")
        return replaced[peers.rank]

    def finish_now(self) -> Path | None:
        """As `finish`, while the training stands still: on an error the files are as they were."""
        try:
            return self.finish()
        except BaseException:
            self._unfreeze()
            raise

    def give_up(self) -> None:
        """Leave nothing of it before anything was finished: another rank could not begin."""
        self.abandon()
        self._unfreeze()

    def abandon(self) -> None:
        """Leave nothing of it."""
        while self._parts:
            self._parts.pop().drop()
        self._folder.abandon()

    def _manifest(self, files: Mapping[str, FileRecord], records: Mapping[str, ParameterRecord]) -> Manifest:
        snapshot = self._snapshot
        return Manifest(
            files=dict(sorted(files.items())),
            parameters=records,
            buffers=self._buffers,
            optimizer=snapshot.optimizer,
            rng=self._rng,
            extra=snapshot.extra.encoded,
            written_by=_versions(),
            saved_at=snapshot.saved_at,
        )


class _UnitPlan:
    """Where each array of one unit goes."""

    def __init__(self, shard: UnitShard, snapshot: Snapshot, grads: FilePlan, model: ModelFile) -> None:
        self.slots = {slot.name: slot for slot in shard.layout.slots}
        self._scalars = self._encode_scalars(shard, model) if snapshot.optimizer is not None else {}
        self.places = UnitPlaces(shard, self._scalars, snapshot.rank)
        self._grads = _GradPlan(shard, snapshot.grads, grads)
        self._held = _GradPlan(shard, snapshot.held, grads)

    def write_grads(self, file: DataWriter, slab: HostBuffer) -> None:
        self._grads.write(file, slab)
        self._held.write(file, slab)

    @staticmethod
    def _encode_scalars(shard: UnitShard, model: ModelFile) -> dict[str, Any]:
        return {
            name: encode(state.scalars, f"the optimizer state of {name!r}", model.small_or_kept)
            for name, state in shard.slot_states.items()
            if state.initialised
        }

    def record(self, name: str) -> ParameterRecord:
        slot, trained = self.slots[name], name in self._scalars
        return ParameterRecord(
            weight=self.places.weight(slot),
            master=self.places.master(slot),
            state=self.places.states(slot) if trained else {},
            scalars=self._scalars.get(name),
            grad=self._grads.record(name),
            held=self._held.record(name),
        )


@final
class Records(Mapping[str, ParameterRecord]):
    """The parameters of all units, each made when it is asked for: thousands of them at once set off the garbage
    collector, which stands still for longer than the save."""

    def __init__(self, plans: Iterable[_UnitPlan]) -> None:
        self._plans = {name: plan for plan in plans for name in plan.slots}

    def __getitem__(self, name: str) -> ParameterRecord:
        return self._plans[name].record(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)


class _GradPlan:
    """Where one unit's gradients of one step go in the file of all gradients."""

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
                file.write(self._regions[name].pieces[0].offset, grad.content.detach().reshape(-1).cpu())
            elif grad.resting is not None:
                resting.setdefault(grad.resting, {})[name] = self._regions[name]
        for shard, regions in resting.items():
            _copy(Gradients(self._layout, shard), regions, slab, file)


def _copy(array: RestingArray, regions: Mapping[str, Region], slab: HostBuffer, file: DataWriter) -> None:
    def sink(slot: Slot, first: int, content: torch.Tensor) -> None:
        file.write(regions[slot.name].pieces[0].offset + (first - slot.first) * content.itemsize, content)

    copy_out(array, regions, slab, sink)


def _write_model(
    folder: Path, snapshot: Snapshot, file: ModelFile, files: dict[str, FileRecord]
) -> tuple[dict[str, BufferRecord], Any]:
    """The buffers and the states of the generators, behind what the units have put into the file."""
    buffers = {
        name: BufferRecord(file.keep(value), persistent) for name, (value, persistent) in snapshot.buffers.items()
    }
    where = "the states of the random number generators"
    rng = encode(snapshot.rng, where, lambda _, tensor: file.keep(tensor).to_json())
    file.write(folder, files)
    return buffers, rng


def _new_folder(target: Path, peers: Peers | None) -> NewFolder:
    if peers is None:
        return NewFolder(target)
    made: list[NewFolder] = []

    def make() -> Path:
        made.append(NewFolder(target))
        return made[0].path

    try:
        path = folder_of(peers, make)
    except BaseException:
        for each in made:
            each.abandon()
        raise
    return made[0] if made else NewFolder.of_another_rank(target, path)


def _write_extra(folder: Path, snapshot: Snapshot, files: dict[str, FileRecord]) -> None:
    extra = snapshot.extra
    if not extra.tensors:
        return
    path = folder / own_name(EXTRA_FILE, snapshot.rank)
    # Copies: the library refuses tensors that share memory.
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in extra.tensors.items()
    }
    with storing(path):
        require_safetensors("outsize.save with tensors in extra").save_file(tensors, path)
    sync(path)
    files[path.name] = file_record(path)


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
