"""Opening a checkpoint: everything is checked first, then arrays are there by parameter name for any live layout."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.differences import Differences, Live, check_match
from outsize.checkpoint.directory import checkpoints_in, lookalikes_in, was_removed
from outsize.checkpoint.files import open_manifest
from outsize.checkpoint.folder import locate
from outsize.checkpoint.manifest import GRADS, MANIFEST_NAME, Manifest, ParameterRecord
from outsize.checkpoint.opened import Opened
from outsize.checkpoint.peers import Cut, Peers, name_of_rank
from outsize.checkpoint.rank_state import MODEL_FILE
from outsize.checkpoint.regions import Region, narrow
from outsize.checkpoint.rng import check_rng, is_known
from outsize.checkpoint.values import decode, from_inline
from outsize.optim.worker import NO_OPTIONS

LATEST = "latest"
LOOKS = 10
"""How often a directory is looked through that another process changes meanwhile."""
MOST_TOLD = 4
"""Checkpoints that an error names."""

logger = logging.getLogger("outsize")


def number_at_place(manifest: Manifest, peers: Peers) -> int:
    """The number of the rank that saved where this one stands in its job; in a job cut otherwise, the first of all."""
    cut = (manifest.world_size, manifest.tensor_ranks, manifest.stages)
    if (peers.size, peers.tensor, peers.stages) != cut:
        return 0  # what one rank had of its own belongs to nobody in particular any more
    return peers.number if peers.copies * peers.size == len(manifest.ranks) else peers.rank


def find_checkpoint(path: Path) -> Path:
    """The folder to load: `path`, or the newest complete checkpoint in it (also as `path/latest`).

    What is passed over is logged. Raises `FileNotFoundError` where there is none, with what was passed over.
    """
    folder = locate(path)
    if (folder / MANIFEST_NAME).is_file():
        return folder
    if not folder.exists() and path.name == LATEST and path.parent.is_dir():
        folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(path))
    passed_over = lookalikes_in(folder)
    for entry, why in passed_over.items():
        logger.warning("passed over %s: %s", entry, why)
    for newest in checkpoints_in(folder):
        try:
            open_manifest(newest)[1].close()
        except (ValueError, OSError) as error:
            if not was_removed(newest, error):
                logger.warning("passed over %s: %s", newest, str(error))
                passed_over[newest] = str(error)
        else:
            logger.info("%s: the newest complete checkpoint is %s", path, newest)
            return newest
    if passed_over:
        told = [f"{entry.name}: {why}" for entry, why in passed_over.items()]
        more = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
        message = f"no checkpoint in it is complete ({'; '.join(told[:MOST_TOLD])}{more}); load another one"
        raise FileNotFoundError(errno.ENOENT, message, str(folder))
    raise FileNotFoundError(
        errno.ENOENT,
        "not a complete checkpoint, and it holds none: the manifest is written last and is missing; load another one",
        str(folder / MANIFEST_NAME),
    )


@final
class Checkpoint:
    """A checkpoint opened for reading, its values decoded. Close its `data` after use.

    Raises `FileNotFoundError` where there is none, `ValueError` that names the file for a damaged one.
    """

    def __init__(self, folder: Path, peers: Peers) -> None:
        self.folder = folder
        self._scalar_regions: list[Region] = []
        self.manifest, self.data = open_manifest(folder)
        self._number = number_at_place(self.manifest, peers)
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
        own = manifest.ranks[self._number]
        self.buffers = dict(manifest.buffers)
        for name, value in own["buffers"].items():
            region, firsts = Region.from_json(value), manifest.buffers[name]
            manifest.check(region)
            if (region.shape, region.dtype) != (firsts.shape, firsts.dtype):
                raise ValueError(
                    f"buffer {name!r} of rank {self._number} has another shape or dtype than the first rank's"
                )
            self.buffers[name] = region
        self._unread = sum(file.nbytes for name, file in manifest.files.items() if name.endswith(MODEL_FILE))
        states = manifest.extra_states(self._number)
        self.extra = decode(own["extra"], self._tensor)
        self.extra_states = {name: decode(state, self._tensor) for name, state in states.items()}
        self.rng: dict[str, Any] = {
            kind: decode(own["rng"][kind], self._tensor) for kind in own["rng"] if is_known(kind)
        }
        check_rng(self.rng)
        groups = manifest.optimizer.groups if manifest.optimizer is not None else ()
        self.hyper: list[dict[str, Any]] = [decode(group.hyper, from_inline) for group in groups]
        if any(type(values) is not dict or NO_OPTIONS & values.keys() for values in self.hyper):
            raise ValueError("the options of a parameter group are no dict, or hold its parameters")
        self.scalars: dict[str, dict[str, Any]] = {
            name: dict(decode(record.scalars, self._scalar))
            for name, record in manifest.parameters.items()
            if record.scalars is not None
        }

    def _tensor(self, value: Any) -> torch.Tensor:
        """A tensor among the values of a rank."""
        return self.data.read(self._region(value))

    def _region(self, value: Any) -> Region:
        """Where a tensor among the values of the ranks and parameters lies.

        All that are read are together no larger than the files that they lie in, so a damaged manifest in which many
        values share one array takes no more memory than that.
        """
        region = Region.from_json(value)
        self.manifest.check(region)
        self._unread -= region.nbytes
        if self._unread < 0:
            raise ValueError("the values of the ranks and parameters are more bytes than the files that hold them")
        return region

    def _scalar(self, value: Any) -> torch.Tensor | Readable:
        """A tensor among the optimizer's values of a parameter, from the manifest itself or from a file."""
        if "values" in value:
            return from_inline(value)
        self._scalar_regions.append(self._region(value))
        return self.data.readable(self._scalar_regions[-1])

    def opened(self, live: Live, cuts: Mapping[str, Cut], passed_over: Differences) -> Opened:
        """Its content for a live model; of the parameters in `cuts` the part along a dimension that this rank has."""
        manifest, readable = self.manifest, self.data.readable
        records = {name: _part_of(record, cuts.get(name)) for name, record in manifest.parameters.items()}
        return Opened(
            weights={name: self.data.exact(record) for name, record in records.items()},
            buffers={name: readable(region) for name, region in self.buffers.items()},
            passed_over=passed_over,
            close=self.data.close,
            resting={
                name: {"weight": readable(record.weight), "master": readable(record.master)}
                for name, record in records.items()
                if record.master is not None and name in live.parameters and record.dtype is live.parameters[name][1]
            },
            arrays={
                name: {key: readable(region) for key, region in record.state.items()}
                for name, record in records.items()
            },
            scalars=self.scalars,
            absent=live.parameters.keys() - records.keys(),
            hyper=self.hyper,
            steps=0 if manifest.optimizer is None else manifest.optimizer.steps,
            trained_alone=manifest.left_out is not None,
            name=f"{self.folder.name}, saved at {manifest.saved_at}",
            grads={
                key: {
                    name: (readable(record.arrays[key]), record.grads[key])
                    for name, record in records.items()
                    if key in record.grads
                }
                for key in GRADS
            },
            extra=self.extra,
            extra_states=self.extra_states,
            rng=self.rng,
        )


def _part_of(record: ParameterRecord, cut: Cut | None) -> ParameterRecord:
    if cut is None or not cut.fits(record.shape):
        return record
    return record.changed(lambda _, region: narrow(region, cut.dim, cut.first, cut.count))


def open_checkpoint(path: Path, live: Live, label: str, strict: bool, peers: Peers, cuts: Mapping[str, Cut]) -> Opened:
    """The checkpoint at `path`, or the newest one there, found to be whole and to fit what is `live`."""
    looks = 0
    while True:
        looks += 1
        files = _files_beside(path)
        try:
            checkpoint = Checkpoint(find_checkpoint(path), peers)
            try:
                passed_over = check_match(checkpoint.manifest, live, label, strict)
                checkpoint.verify(weights=live.buffers is not None, state=live.optimizer is not None)
            except BaseException:
                checkpoint.data.close()
                raise
            return checkpoint.opened(live, cuts, passed_over)
        except FileNotFoundError:
            # A run that saves with `keep`, or to the same path, may just have removed what was the newest.
            if looks == LOOKS or files == _files_beside(path):
                raise


def _files_beside(path: Path) -> set[tuple[str, int]]:
    """Names and inodes: a checkpoint that is replaced has the same names."""
    folder = path if path.is_dir() else path.parent
    return {(entry.name, entry.inode()) for entry in os.scandir(folder)} if folder.is_dir() else set()
