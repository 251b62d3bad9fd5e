"""Reading a checkpoint: everything is checked first, then arrays go by parameter name into any live layout."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, copy_in, place_weights
from outsize.checkpoint.differences import Differences, Live, check_match
from outsize.checkpoint.directory import checkpoints_in, lookalikes_in, was_removed
from outsize.checkpoint.files import open_manifest
from outsize.checkpoint.folder import locate
from outsize.checkpoint.manifest import MANIFEST_NAME, Manifest
from outsize.checkpoint.peers import Cut, Peers, name_of_rank
from outsize.checkpoint.rank_state import MODEL_FILE
from outsize.checkpoint.regions import Region
from outsize.checkpoint.rng import check_rng, is_known
from outsize.checkpoint.values import decode, from_inline
from outsize.move.memory import HostBuffer
from outsize.move.shard import SlotState, UnitShard
from outsize.move.store import DTYPES
from outsize.optim.rules import join_master
from outsize.plan.layout import Slot

LATEST = "latest"
LOOKS = 10
"""How often a directory is looked through that another process changes meanwhile."""

logger = logging.getLogger("outsize")


def number_at_place(manifest: Manifest, peers: Peers | None) -> int:
    """The number of the rank that saved where this one stands in its job; in a job cut otherwise, the first of all."""
    if peers is None or (peers.size, peers.tensor) != (manifest.world_size, manifest.tensor_ranks):
        return 0  # what one rank had of its own belongs to nobody in particular any more
    return peers.number if peers.copies * peers.size == len(manifest.ranks) else peers.rank


def find_checkpoint(path: Path) -> Path:
    """The folder to load: `path`, or the newest complete checkpoint in it (also as `path/latest`).

    What is passed over is logged. Raises `FileNotFoundError` where there is none.
    """
    folder = locate(path)
    if (folder / MANIFEST_NAME).is_file():
        return folder
    if not folder.exists() and path.name == LATEST and path.parent.is_dir():
        folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(path))
    for entry, why in lookalikes_in(folder).items():
        logger.warning("passed over %s: %s", entry, why)
    for newest in checkpoints_in(folder):
        try:
            open_manifest(newest)[1].close()
        except (ValueError, OSError) as error:
            if not was_removed(newest, error):
                logger.warning("passed over %s: %s", newest, str(error))
        else:
            logger.info("%s: the newest complete checkpoint is %s", path, newest)
            return newest
    raise FileNotFoundError(
        errno.ENOENT,
        "not a complete checkpoint, and it holds none: the manifest is written last and is missing; load another one",
        str(folder / MANIFEST_NAME),
    )


@final
class Checkpoint:
    """A checkpoint opened for reading, its values decoded. Close it after use.

    Raises `FileNotFoundError` where there is none, `ValueError` that names the file for a damaged one.
    """

    def __init__(self, folder: Path, peers: Peers | None = None, cuts: Mapping[str, Cut] | None = None) -> None:
        """`cuts`: of the parameters of which this rank has a part along a dimension; `records` are those parts."""
        self.folder = folder
        self.passed_over: Differences = {}
        self._scalar_regions: list[Region] = []
        self.manifest, self.data = open_manifest(folder)
        self._number = number_at_place(self.manifest, peers)
        self.records = {
            name: record.of_part(cut.dim, cut.first, cut.count)
            if (cut := (cuts or {}).get(name)) is not None and cut.fits(record.shape)
            else record
            for name, record in self.manifest.parameters.items()
        }
        try:
            models = {name_of_rank(MODEL_FILE, number) for number in (0, self._number)}
            self.data.verify(files=sorted(models & self.manifest.files.keys()))
            try:
                self._decode()
            except OSError:
                raise
            except Exception as error:  # whatever damage leads to
                raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
        except BaseException:
            self.data.close()
            raise

    def verify(self, weights: bool, state: bool) -> None:
        """Compare the arrays that are going to be read with their checksums. Raises `ValueError` that names file and
        chunk. The files that were decoded were compared before that."""
        regions = [*self.buffers.values(), *self._scalar_regions]
        for record in self.manifest.parameters.values():
            regions += record.leaves(weights, state)
        self.data.verify(regions)

    def _decode(self) -> None:
        manifest = self.manifest
        first, own = manifest.ranks[0], manifest.ranks[self._number]
        self.buffers = dict(manifest.buffers)
        for name, value in own["buffers"].items():
            region, firsts = Region.from_json(value), manifest.buffers[name]
            manifest.check(region)
            if (region.shape, region.dtype) != (firsts.shape, firsts.dtype):
                raise ValueError(
                    f"buffer {name!r} of rank {self._number} has another shape or dtype than the first rank's"
                )
            self.buffers[name] = region
        if own["extra_states"].keys() != first["extra_states"].keys():
            raise ValueError(f"rank {self._number} has the extra states of other modules than the first rank")
        self._unread = sum(file.nbytes for name, file in manifest.files.items() if name.endswith(MODEL_FILE))
        self.extra = decode(own["extra"], self._tensor)
        self.extra_states = {name: decode(state, self._tensor) for name, state in own["extra_states"].items()}
        self.rng: dict[str, Any] = {
            kind: decode(own["rng"][kind], self._tensor) for kind in own["rng"] if is_known(kind)
        }
        check_rng(self.rng)
        groups = manifest.optimizer.groups if manifest.optimizer is not None else ()
        self.hyper: list[dict[str, Any]] = [decode(group.hyper, from_inline) for group in groups]
        if any(type(values) is not dict or {"params", "param_names"} & values.keys() for values in self.hyper):
            raise ValueError("the options of a parameter group are no dict, or hold its parameters")
        self.scalars: dict[str, dict[str, Any]] = {
            name: dict(decode(record.scalars, self._scalar))
            for name, record in manifest.parameters.items()
            if record.scalars is not None
        }

    def _tensor(self, value: Any) -> torch.Tensor:
        """A tensor among the values of a rank.

        All that are read are together no larger than the files that they lie in, so a damaged manifest in which many
        values share one array takes no more memory than that.
        """
        region = Region.from_json(value)
        self.manifest.check(region)
        self._unread -= region.nbytes
        if self._unread < 0:
            raise ValueError("the values of the ranks and parameters are more bytes than the files that hold them")
        return self.data.read(region)

    def _scalar(self, value: Any) -> torch.Tensor:
        """A tensor among the optimizer's values of a parameter, from the manifest itself or from a file."""
        if "values" in value:
            return from_inline(value)
        self._scalar_regions.append(Region.from_json(value))
        return self._tensor(value)

    @property
    def steps(self) -> int:
        """That the optimizer has taken."""
        return 0 if self.manifest.optimizer is None else self.manifest.optimizer.steps

    def close(self) -> None:
        self.data.close()

    def load_weights(self, shard: UnitShard) -> None:
        """Place the unit's parameters, and the rest of their masters; one that is not here keeps its values."""

        def as_it_rests(key: str, slot: Slot, start: int, end: int) -> torch.Tensor | None:
            record = self.records[slot.name]
            if record.dtype is not DTYPES[slot.dtype] or key not in record.arrays:
                return None
            return self.data.read(record.arrays[key], start, end)

        def exact_values(name: str, start: int, end: int) -> torch.Tensor:
            record = self.records[name]
            stored = self.data.read(record.weight, start, end)
            if record.master is None:
                return stored
            return join_master(stored, self.data.read(record.master, start, end))

        place_weights(shard, self.records, exact_values, as_it_rests)

    def stated(self, shard: UnitShard) -> set[str]:
        """Those of the unit's parameters that have optimizer state here."""
        return {name for name in shard.slots if name in self.records and name in self.scalars}

    def load_state(self, shard: UnitShard) -> None:
        """Place the unit's optimizer arrays and scalars; a parameter that had none has none again.

        There is room for those that have.
        """
        slab = HostBuffer(SLAB_BYTES)
        known = {name for name in shard.slots if name in self.records}
        filled = self.stated(shard)
        stale = {name for name in known if name in shard.slot_states and shard.slot_states[name].initialised}
        for array in shard.arrays.values():
            if array.public:

                def source(slot: Slot, start: int, end: int, key: str = f"state.{array.name}") -> torch.Tensor:
                    if slot.name not in filled:
                        return torch.zeros(end - start, device="cpu")
                    return self.data.read(self.records[slot.name].arrays[key], start, end)

                wanted = dict.fromkeys(filled | stale)
                copy_in(States(shard, array), wanted, slab, source, keep=len(known) < len(shard.slots))
        for name in known:
            shard.slot_states.pop(name, None)
        for name in filled:
            shard.slot_states[name] = SlotState(self.scalars[name], initialised=True)


def open_checkpoint(
    path: Path, live: Live, label: str, strict: bool, peers: Peers | None, cuts: Mapping[str, Cut]
) -> Checkpoint:
    """The checkpoint at `path`, or the newest one there, found to be whole and to fit what is `live`."""
    looks = 0
    while True:
        looks += 1
        names = _names_beside(path)
        try:
            checkpoint = Checkpoint(find_checkpoint(path), peers, cuts)
            try:
                checkpoint.passed_over = check_match(checkpoint.manifest, live, label, strict)
                checkpoint.verify(weights=live.buffers is not None, state=live.optimizer is not None)
            except BaseException:
                checkpoint.close()
                raise
            return checkpoint
        except FileNotFoundError:
            # A run that saves with `keep` may just have removed what was the newest.
            if looks == LOOKS or names == _names_beside(path):
                raise


def _names_beside(path: Path) -> set[str]:
    folder = path if path.is_dir() else path.parent
    return set(os.listdir(folder)) if folder.is_dir() else set()
