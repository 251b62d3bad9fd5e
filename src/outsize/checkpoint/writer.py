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
from outsize.checkpoint.folder import NewFolder, check_present, sync, write_text
from outsize.checkpoint.joint import Cut, Peers, folder_of, merged_parts, own_name, together
from outsize.checkpoint.joint import Part as RankPart
from outsize.checkpoint.manifest import (
    MANIFEST_NAME,
    FilePlan,
    FileRecord,
    GradRecord,
    Manifest,
    OptimizerRecord,
    ParameterRecord,
)
from outsize.checkpoint.own import MODEL_FILE, ModelFile, Own, Stored, write_own
from outsize.checkpoint.parts import CopyRoom, FrozenCopy, Part, Present, UnitPlaces, sync_all, take, take_sums
from outsize.checkpoint.regions import Region
from outsize.checkpoint.shelf import check_room
from outsize.checkpoint.values import encode
from outsize.move.generations import Generation, Generations
from outsize.move.grad_ops import GradOps
from outsize.move.gradients import GradShard
from outsize.move.memory import HostBuffer
from outsize.move.shard import UnitShard
from outsize.plan.layout import Slot

GRADS_FILE = "grads.bin"
AT_ONCE_BYTES = 64 << 20
"""State of so many bytes is simply written before `save` returns. What is larger is linked, or written
behind the training."""


@dataclass(frozen=True)
class GradAtRest:
    """A gradient as it rests: in a gradient shard of its unit, or as `content`."""

    ops: GradOps = field(default_factory=GradOps)
    norms: Mapping[float, float] = field(default_factory=dict)
    content: torch.Tensor | None = None
    resting: GradShard | None = None


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. The shards are settled; `held` are the gradients that a delayed update holds back."""

    shards: Sequence[UnitShard]
    grads: Mapping[str, GradAtRest]
    held: Mapping[str, GradAtRest]
    optimizer: OptimizerRecord | None
    own: Own
    saved_at: str
    of_copies: Sequence[Own] = ()
    """Of the ranks at this one's place in the further copies of the model, in order."""
    peers: Peers | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole parameters, where `peers` have other slices of them."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Which part along a dimension this rank has, of the parameters that tensor parallelism has split."""

    @property
    def rank(self) -> int:
        return 0 if self.peers is None else self.peers.rank

    @property
    def ranks(self) -> int:
        """Of one copy of the model."""
        return 1 if self.peers is None else self.peers.size


@dataclass(frozen=True)
class Room:
    """What a save may take: memory for copies of what changes before it is written, and `disk` for the generations that
    follow files which are copied behind it; `going` are the checkpoints that are removed once this one is complete."""

    copy_bytes: int
    disk_bytes: int
    going: Sequence[Path] = ()
    threads: int = 0
    """For the checksums of what is in memory, while the training stands still; 0: they are taken behind it."""


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
            self._take_memory(places, small, room)
            self._write_grads()
            self._own = write_own(self._folder.path, snapshot.own, snapshot.rank, self._model, self._files)
            self._of_copies = self._write_those_of_copies()
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

    def _take_memory(self, places: Sequence[UnitPlaces], small: bool, room: Room) -> None:
        held, copies = [], CopyRoom(room.copy_bytes)
        for each in places:
            image = each.image(copies)
            if image is None:
                continue
            if not small and each.hold(image):
                self._parts.append(image)
                held.append(image)
            else:
                self._write(image)
        if held and room.threads:
            take_sums(held, room.threads)

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

    def _write_those_of_copies(self) -> list[Stored]:
        found = []
        for at, own in enumerate(self._snapshot.of_copies, start=1):
            rank = at * self._snapshot.ranks + self._snapshot.rank
            file = ModelFile(own_name(MODEL_FILE, rank))
            found.append(write_own(self._folder.path, own, rank, file, self._files))
        return found

    @property
    def linked(self) -> Sequence[Generation]:
        """The generations of the run whose files it shares."""
        return self._linked

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
        return self._publish(self._manifest(self._files, Records(self._plans)))

    def _publish(self, manifest: Manifest) -> Path | None:
        write_text(self._folder.path / MANIFEST_NAME, manifest.to_text())
        check_present(self._folder.path, manifest.files)
        return self._folder.publish()

    def _finish_with(self, peers: Peers) -> Path | None:
        """See Note [One checkpoint of several ranks]."""

        def own() -> RankPart:
            self._write_parts()
            if peers.rank:
                sync(self._folder.path)
            records = dict(Records(self._plans))
            asides = [each.to_json() for each in (self._own, *self._of_copies)]
            return RankPart(self._files, records, self._snapshot.shapes, asides, self._snapshot.cuts)

        def publish() -> Path | None:
            if peers.rank:
                return None
            files, records = merged_parts(parts, peers.tensor)
            of_first, *of_copies = zip(*(part.asides for part in parts), strict=True)
            manifest = replace(
                self._manifest(files, records),
                world_size=peers.size,
                tensor_ranks=peers.tensor,
                ranks=of_first[1:],
                copies=of_copies,
            )
            return self._publish(manifest)

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
            buffers=self._own.buffers,
            optimizer=snapshot.optimizer,
            rng=self._own.rng,
            extra=self._own.extra,
            extra_states=self._own.extra_states,
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


def _versions() -> dict[str, str]:
    try:
        own = version("outsize")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"outsize": own, "torch": torch.__version__}
