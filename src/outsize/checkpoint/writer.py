"""Writing a checkpoint: the files that hold the state on disk, those of what is in memory, then the manifest."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.directory import check_room
from outsize.checkpoint.files import PlannedFile
from outsize.checkpoint.folder import NewFolder, sync, write_text
from outsize.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, OptimizerRecord, ParameterRecord
from outsize.checkpoint.peers import Cut, Peers, RankPart, merged_parts, name_of_rank, together
from outsize.checkpoint.rank_state import RankState
from outsize.checkpoint.regions import Region
from outsize.checkpoint.unit_files import FrozenFile, HeldMemory, UnitFiles, record_of, sync_all
from outsize.checkpoint.values import encode
from outsize.move.generations import Generation, Generations, link
from outsize.move.grad_ops import GradOps
from outsize.move.shard import UnitShard

GRADS_FILE = "grads.bin"
AT_ONCE_BYTES = 64 << 20
"""State of so many bytes is simply written before `save` returns. What is larger is linked, or written
behind the training."""


@dataclass(frozen=True)
class SavedGrad:
    """What rests here of a gradient: the values, or how to read them."""

    ops: GradOps
    norms: Mapping[float, float]
    dtype: torch.dtype
    value: torch.Tensor | Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. The shards are settled."""

    shards: Sequence[UnitShard]
    grads: Mapping[str, Mapping[str, SavedGrad]]
    """By the keys of `GRADS`, then by parameter."""
    optimizer: OptimizerRecord | None
    states: Sequence[RankState]
    """Of this rank, and of those at its place in the further copies of the model, in order."""
    saved_at: str
    peers: Peers
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Which part along a dimension this rank has, of the parameters that tensor parallelism has split."""
    left_out: frozenset[str] | None = None
    """The parameters that it does not hold, though the model has them."""


@final
class UnfinishedCheckpoint:
    """A checkpoint whose state is safe from the training and that `finish` brings to its place.

    Made while the training stands still. What is on disk is linked and frozen, or held; what is in memory is held, so
    that it does not change before it is written or copied.
    """

    def __init__(
        self, target: Path, snapshot: Snapshot, copy_bytes: int, disk_bytes: int, going: Sequence[Path]
    ) -> None:
        """The save may take memory of `copy_bytes` for what changes before it is written, and `disk_bytes` for the
        generations that follow files which are copied. `going` are removed once the checkpoint is complete."""
        self.linked: list[Generation] = []
        """The generations of the run whose files it shares."""
        self._snapshot = snapshot
        self._rank = snapshot.peers.rank
        self._later: list[FrozenFile | HeldMemory] = []
        self._files: dict[str, FileRecord] = {}
        self._frozen: list[Generations] = []  # by this save
        self._folder, self._path = _new_folder(target, snapshot.peers)
        try:
            self._grads = PlannedFile(name_of_rank(GRADS_FILE, self._rank))
            self._records: dict[str, ParameterRecord] = {}
            units = [self._plan(shard) for shard in snapshot.shards]
            files = {name: file for unit in units for name, file in unit.files.items()}
            in_memory = sum(unit.copied_bytes for unit in units)
            small = in_memory + sum(file.touched_bytes for file in files.values()) <= AT_ONCE_BYTES
            linked = {name for name, file in files.items() if not small and link(file.now, self._path / name)}
            disk_bytes = min(disk_bytes, self._check_room(in_memory, files, linked, going))
            if not small:
                sync_all(files.values())
            self._take_files(files, linked, small, disk_bytes)
            self._take_memory(units, small, copy_bytes)
            for file in (self._grads, *(state.file for state in snapshot.states)):
                if file.nbytes or file is not self._grads:
                    file.write(self._path, self._files)
        except BaseException:
            self.give_up()
            raise

    def _plan(self, shard: UnitShard) -> UnitFiles:
        """Where each array of a unit goes; their records are noted."""
        snapshot, file = self._snapshot, self._snapshot.states[0].file
        scalars: dict[str, Any] = {}
        rows: dict[str, dict[str, Region]] = {}
        for name, state in shard.slot_states.items() if snapshot.optimizer is not None else ():
            if state.initialised:
                others: dict[str, Any] = dict(state.scalars)
                rows[name] = {key: file.keep(others.pop(key)) for key in shard.row_values if key in others}
                scalars[name] = encode(others, f"the optimizer state of {name!r}", file.small_or_kept)
        unit = UnitFiles(shard, scalars, self._rank)
        for slot in shard.layout.slots:
            arrays = dict(unit.arrays_of(slot))
            grads = {key: found[slot.name] for key, found in snapshot.grads.items() if slot.name in found}
            for key, grad in grads.items():
                arrays[key] = self._grads.keep_later(grad.dtype, slot.shape, grad.value)
            notes = {key: (grad.ops, grad.norms) for key, grad in grads.items()}
            self._records[slot.name] = ParameterRecord(arrays, scalars.get(slot.name), notes, rows.get(slot.name, {}))
        return unit

    @property
    def pending(self) -> bool:
        """Whether anything large is still to be written."""
        return bool(self._later)

    def _check_room(
        self, in_memory: int, files: Mapping[str, Generations], linked: Collection[str], going: Sequence[Path]
    ) -> int:
        """Raise `OSError` now, while nothing has changed, if what is about to be written has no room. Gives the bytes
        that are left for the next generations of files which are copied."""
        here = self._path.stat().st_dev
        needed = self._grads.nbytes + sum(state.file.nbytes for state in self._snapshot.states) + in_memory
        pending, beside = in_memory > 0, False
        for name, file in files.items():
            if name not in linked:
                needed += file.touched_bytes
                pending = True
                beside |= here in file.now.file.devices
            elif not file.has_next:
                needed += file.reserved_bytes
        # What goes makes room only for what is written after it: the next generations, unless there is more to come.
        left = check_room(self._path.parent, needed, going if not pending else ())
        return left if beside else sys.maxsize

    def _take_files(
        self, files: Mapping[str, Generations], linked: Collection[str], small: bool, disk_bytes: int
    ) -> None:
        """Freeze the files that are linked, copy the others: now, or later if there is room for the generation that
        follows."""
        for name, file in files.items():
            now = file.now
            if name in linked:
                self._freeze(file)
                self.linked.append(now)
                self._files[name] = record_of(now)
            elif not small and (file.frozen or file.has_next or file.reserved_bytes <= disk_bytes):
                disk_bytes -= 0 if file.frozen or file.has_next else file.reserved_bytes
                self._freeze(file)
                self._later.append(FrozenFile(name, now))
            else:
                self._write(FrozenFile(name, now))

    def _freeze(self, file: Generations) -> None:
        if not file.frozen:
            file.freeze()
            self._frozen.append(file)

    def _take_memory(self, units: Sequence[UnitFiles], small: bool, copy_bytes: int) -> None:
        held = []
        for unit in units:
            memory = unit.memory()
            if memory is None:
                continue
            if small or memory.unsteady_bytes > copy_bytes:
                self._write(memory)
                continue
            copy_bytes -= memory.unsteady_bytes
            unit.shard.before_change()
            memory.copy_unsteady()
            unit.shard.hold = memory.secure
            held.append(memory)
            self._later.append(memory)
        for memory in held:
            memory.may_copy = memory.steady_bytes <= copy_bytes
            copy_bytes -= memory.steady_bytes if memory.may_copy else 0

    def _write(self, file: FrozenFile | HeldMemory) -> None:
        try:
            self._files[file.name] = file.write(self._path)
        finally:
            file.drop()

    def finish(self, behind: bool) -> Path | None:
        """Write what is left, then the manifest, and publish; gives the folder that was replaced, if there was one. See
        Note [One checkpoint of several ranks].

        Unless this is `behind` the training, the run's files are as they were on an error.
        """
        peers, cuts = self._snapshot.peers, self._snapshot.cuts
        shapes = {slot.name: slot.shape for shard in self._snapshot.shards for slot in shard.whole.slots}

        def write_part() -> RankPart:
            while self._later:
                self._write(self._later.pop(0))
            if self._rank:
                sync(self._path)
            first = self._snapshot.states[0]
            states = [state.to_json() for state in self._snapshot.states]
            return RankPart(self._files, self._records, shapes, first.first, first.persistent, states, cuts)

        def publish() -> Path | None:
            if self._folder is None:
                return None
            manifest = self._manifest(parts)
            write_text(self._path / MANIFEST_NAME, manifest.to_text())
            for name in manifest.files:
                # The lock on the folder may not count (network file systems lock for each machine alone).
                if not os.path.lexists(self._path / name):
                    said = "was removed while the checkpoint was written"
                    raise FileNotFoundError(errno.ENOENT, said, str(self._path / name))
            return self._folder.publish()

        try:
            parts = together(peers.groups, write_part, "save", "writing the checkpoint", behind)
            replaced = together(peers.groups, publish, "save", "publishing the checkpoint", behind)[self._rank]
        except BaseException:
            if behind:
                self.abandon()
            else:
                self.give_up()
            raise
        self._frozen = []  # whatever comes now, the files are the checkpoint's
        for generation in self.linked:
            with suppress(OSError):  # then it has two names until the run ends
                generation.file.unlink()
        return replaced

    def _manifest(self, parts: Sequence[RankPart]) -> Manifest:
        snapshot, peers = self._snapshot, self._snapshot.peers
        files = {name: record for part in parts for name, record in part.files.items()}
        return Manifest(
            files=dict(sorted(files.items())),
            parameters=merged_parts(parts, peers.tensor, peers.stages),
            buffers={name: region for part in parts for name, region in part.buffers.items()},
            persistent=frozenset(name for part in parts for name in part.persistent),
            optimizer=snapshot.optimizer,
            ranks=[state for copy in zip(*(part.states for part in parts), strict=True) for state in copy],
            written_by={"outsize": version("outsize"), "torch": torch.__version__},
            saved_at=snapshot.saved_at,
            world_size=len(parts),
            tensor_ranks=peers.tensor,
            stages=peers.stages,
            left_out=snapshot.left_out,
        )

    def give_up(self) -> None:
        """Leave nothing of it, while the training stands still."""
        self.abandon()
        for file in self._frozen:  # those that nobody refers to need no next generation
            if file.now.file.links <= 1:
                file.unfreeze()

    def abandon(self) -> None:
        """Leave nothing of it; the run's files stay frozen."""
        while self._later:
            self._later.pop().drop()
        if self._folder is not None:
            self._folder.abandon()


def _new_folder(target: Path, peers: Peers) -> tuple[NewFolder | None, Path]:
    """The hidden folder, which rank 0 makes, publishes and abandons; its path for all."""
    made: list[NewFolder] = []

    def make() -> str:
        if not peers.rank:
            made.append(NewFolder(target))
        return str(made[0].path) if made else ""

    try:
        path = together(peers.groups, make, "save", "making the checkpoint's folder")[0]
    except BaseException:
        for each in made:
            each.abandon()
        raise
    return made[0] if made else None, Path(path)
