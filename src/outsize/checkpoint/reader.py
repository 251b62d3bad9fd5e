"""Reading a checkpoint: everything is checked first, then arrays go by parameter name into any live layout."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, Weights, copy_in
from outsize.checkpoint.files import DataReader, open_manifest
from outsize.checkpoint.folder import locate
from outsize.checkpoint.joint import Cut, own_name
from outsize.checkpoint.library import require_safetensors
from outsize.checkpoint.manifest import MANIFEST_NAME, BufferRecord, Manifest, ParameterRecord
from outsize.checkpoint.own import EXTRA_FILE, MODEL_FILE
from outsize.checkpoint.regions import AnyRegion, CodedRegion, Region
from outsize.checkpoint.rng import check_rng, is_known
from outsize.checkpoint.shelf import checkpoints_in, damaged_in, incomplete_in, was_removed
from outsize.checkpoint.values import decode, from_inline
from outsize.move.memory import HostBuffer
from outsize.move.shard import BLOCK, DTYPES, MASTER, MASTER_DTYPE, Codec, SlotState, UnitShard
from outsize.plan.layout import Slot

LATEST = "latest"
LOOKS = 10
"""How often a directory is looked through that another process changes meanwhile."""

MAX_RNG_BYTES = 1 << 20
"""Of all generators of a rank."""

Codecs = Callable[[str], Codec]
"""The codec of a kind of 8-bit array, by its name in checkpoints."""

logger = logging.getLogger("outsize")


@dataclass(frozen=True)
class Masters:
    """The two directions between an fp32 master and a 16-bit weight with what completes it; both are exact."""

    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    split: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job: which of the `copies` of the model it has a part of, and among its `ranks`."""

    copy: int = 0
    rank: int = 0
    ranks: int = 1
    tensor_ranks: int = 1
    copies: int = 1

    def among(self, manifest: Manifest) -> tuple[int, int]:
        """(copy, rank) of what was saved at this place; in a job cut otherwise, the first of all."""
        if (self.ranks, self.tensor_ranks) != (manifest.world_size, manifest.tensor_ranks):
            return 0, 0  # what one rank had of its own belongs to nobody in particular any more
        return (self.copy if self.copies == len(manifest.copies) + 1 else 0), self.rank


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
    for entry in incomplete_in(folder):
        logger.warning("passed over %s: it has no manifest, so it was never completed", entry)
    for entry in damaged_in(folder):
        logger.warning("passed over %s: its manifest is damaged", entry)
    for _ in range(LOOKS):
        names = _names_in(folder)
        newest = _newest_in(folder)
        if newest is not None:
            logger.info("%s: the newest complete checkpoint is %s", path, newest)
            return newest
        if names == _names_in(folder):
            break
    raise FileNotFoundError(
        errno.ENOENT,
        "not a complete checkpoint, and it holds none: the manifest is written last and is missing; load another one",
        str(folder / MANIFEST_NAME),
    )


def _names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _newest_in(folder: Path) -> Path | None:
    for shelved in checkpoints_in(folder):
        try:
            open_manifest(shelved.path)[1].close()
        except (ValueError, OSError) as error:
            if not was_removed(shelved.path, error):
                logger.warning("passed over %s: %s", shelved.path, str(error))
        else:
            return shelved.path
    return None


@contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Whatever a damaged checkpoint leads to is a `ValueError` that names it."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


@final
class Checkpoint:
    """A checkpoint opened for reading, its values decoded. Close it after use.

    Raises `FileNotFoundError` where there is none, `ValueError` that names the file for a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        codecs: Codecs,
        place: Place | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """`cuts`: of the parameters of which this rank has a part along a dimension; `records` are those parts."""
        self.folder = folder
        self._codecs = codecs
        self._cuts = cuts or {}
        self._scalar_regions: list[Region] = []
        self.manifest, self.data = open_manifest(folder)
        self._copy, self._rank = (place or Place()).among(self.manifest)
        self._number = self._copy * self.manifest.world_size + self._rank
        try:
            others = {own_name(name, of) for name in (MODEL_FILE, EXTRA_FILE) for of in (0, self._number)}
            self.data.verify(files=sorted(others & self.manifest.files.keys()))
            with _naming_damage(folder):
                self._decode()
        except BaseException:
            self.data.close()
            raise

    def verify(self, weights: bool, state: bool) -> None:
        """Compare the arrays that are going to be read with their checksums. Raises `ValueError` that names file and
        chunk. The files that were decoded were compared before that."""
        regions = [record.region for record in self.buffers.values()] + self._scalar_regions
        for record in self.manifest.parameters.values():
            regions += record.weights() if weights else []
            regions += record.states() if state else []
        self.data.verify(regions)

    def _decode(self) -> None:
        manifest = self.manifest
        self.records = dict(manifest.parameters)
        for name, cut in self._cuts.items():
            if name in self.records and cut.fits(self.records[name].shape):
                self.records[name] = self.records[name].of_part(cut.dim, cut.first, cut.count)
        own = manifest.of_rank(self._copy, self._rank)
        self.buffers = dict(manifest.buffers)
        for name, value in own.get("buffers", {}).items():
            record, firsts = BufferRecord.from_json(value), manifest.buffers[name].region
            manifest.check(record.region)
            if (record.region.shape, record.region.dtype) != (firsts.shape, firsts.dtype):
                raise ValueError(
                    f"buffer {name!r} of rank {self._number} has another shape or dtype than the first rank's"
                )
            self.buffers[name] = record
        tensors: dict[str, torch.Tensor] = {}
        extra = own_name(EXTRA_FILE, self._number)
        if extra in manifest.files:
            mapped = require_safetensors("outsize.load of an extra with tensors").load_file(self.data.path(extra))
            # Copies: a mapped file keeps its space when it is removed, and ends who reads it when it is cut.
            tensors = {name: mapped.pop(name).clone() for name in list(mapped)}
        self.extra = decode(own["extra"], tensors.__getitem__)
        states = own.get("extra_states", {})
        if states.keys() != (manifest.extra_states or {}).keys():
            raise ValueError(f"rank {self._number} has the extra states of other modules than the first rank")
        self.extra_states = {name: decode(state, tensors.__getitem__) for name, state in states.items()}
        self._unread_rng = MAX_RNG_BYTES
        self.rng: dict[str, Any] = {
            kind: decode(own["rng"][kind], self._rng_tensor) for kind in own["rng"] if is_known(kind)
        }
        check_rng(self.rng)
        groups = manifest.optimizer.groups if manifest.optimizer is not None else ()
        self.hyper: list[dict[str, Any]] = [decode(group.hyper, from_inline) for group in groups]
        if any(type(values) is not dict or {"params", "param_names"} & values.keys() for values in self.hyper):
            raise ValueError("the options of a parameter group are no dict, or hold its parameters")
        self._unread = sum(file.nbytes for name, file in manifest.files.items() if name.endswith(MODEL_FILE))
        self.scalars: dict[str, dict[str, Any]] = {
            name: dict(decode(record.scalars, self._scalar))
            for name, record in manifest.parameters.items()
            if record.scalars is not None
        }

    def _rng_tensor(self, value: Any) -> torch.Tensor:
        region = Region.from_json(value)
        self.manifest.check(region)
        self._unread_rng -= region.nbytes
        if self._unread_rng < 0:
            raise ValueError(f"the states of the random number generators are more than {MAX_RNG_BYTES} bytes")
        return self.data.read(region)

    def _scalar(self, value: Any) -> torch.Tensor:
        """A tensor among the optimizer's values of a parameter, from the manifest itself or from a file.

        Those from files are together no larger than the files that they are written to, so a damaged manifest in which
        many parameters share one array takes no more memory than that.
        """
        if "values" in value:
            return from_inline(value)
        region = Region.from_json(value)
        self.manifest.check(region)
        self._unread -= region.nbytes
        if self._unread < 0:
            raise ValueError("the optimizer's values of the parameters are more bytes than the files that hold them")
        self._scalar_regions.append(region)
        return self.data.read(region)

    def close(self) -> None:
        self.data.close()

    def load_weights(self, shard: UnitShard, masters: Masters) -> None:
        """Place the unit's parameters, and the rest of their masters; memory: one slab and one piece.

        A parameter that the checkpoint has not got keeps its values.
        """
        slab = HostBuffer(SLAB_BYTES)
        master = shard.arrays.get(MASTER)
        known = {name: slot for name, slot in shard.slots.items() if name in self.records}
        halves = {name: slot for name, slot in known.items() if shard.array(MASTER, slot)}
        weights = _Weights(self.data, self.records, masters, halves)
        keep = len(known) < len(shard.slots)
        copy_in(Weights(shard), known, slab, weights.weight, keep)
        if master is not None:
            copy_in(States(shard, master), halves, slab, weights.master, keep)

    def stated(self, shard: UnitShard) -> set[str]:
        """Those of the unit's parameters that have optimizer state here."""
        return {name for name in shard.slots if name in self.records and name in self.scalars}

    def load_state(self, shard: UnitShard) -> None:
        """Place the unit's optimizer arrays and scalars; a parameter that had none has none again.

        There is room for those that have.
        """
        slab = HostBuffer(SLAB_BYTES)
        records = self.records
        known = {name for name in shard.slots if name in records}
        filled = self.stated(shard)
        stale = {name for name in known if name in shard.slot_states and shard.slot_states[name].initialised}
        for array in shard.arrays.values():
            if array.public:
                wanted = dict.fromkeys(filled | stale)

                def source(slot: Slot, start: int, end: int, key: str = array.name) -> torch.Tensor:
                    if slot.name not in filled:
                        return torch.zeros(end - start, device="cpu")
                    return self._state(records[slot.name].state[key], start, end)

                copy_in(States(shard, array), wanted, slab, source, keep=len(known) < len(shard.slots))
        for name in known:
            shard.slot_states.pop(name, None)
        for name in filled:
            shard.slot_states[name] = SlotState(self.scalars[name], initialised=True)

    def _state(self, region: AnyRegion, start: int, end: int) -> torch.Tensor:
        """The values [start, end) of an optimizer array, decoded where they are codes."""
        if isinstance(region, Region):
            return self.data.read(region, start, end)
        if not isinstance(region, CodedRegion):
            return region.read(start, end, self._state)
        first = start // BLOCK * BLOCK
        codes = self.data.read(region.codes, first, end)
        scales = self.data.read(region.scales, first // BLOCK, -(-end // BLOCK))
        return self._codecs(region.codec).decode(codes, scales)[start - first :]


class _Weights:
    """Pieces of parameters and of what completes their masters in the live dtype, whatever the checkpoint has."""

    def __init__(
        self, data: DataReader, records: Mapping[str, ParameterRecord], masters: Masters, halves: Collection[str]
    ) -> None:
        self._data = data
        self._records = records
        self._masters = masters
        self._halves = halves  # the 16-bit weights that have a master here

    def weight(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        record, live = self._records[slot.name], DTYPES[slot.dtype]
        if record.dtype is live:
            return self._data.read(record.weight, start, end)
        exact = self._exact_values(record, start, end)
        return self._split(exact, slot)[0] if slot.name in self._halves else exact.to(live)

    def master(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        record = self._records[slot.name]
        if record.dtype is DTYPES[slot.dtype] and record.master is not None:
            return self._data.read(record.master, start, end)
        return self._split(self._exact_values(record, start, end), slot)[1]

    def _exact_values(self, record: ParameterRecord, start: int, end: int) -> torch.Tensor:
        """The fp32 master where there is one, else the weight in fp32 or wider."""
        stored = self._data.read(record.weight, start, end)
        if record.master is not None:
            return self._masters.join(stored, self._data.read(record.master, start, end))
        return stored if stored.dtype is torch.float64 else stored.float()

    def _split(self, exact: torch.Tensor, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.empty_like(exact, dtype=DTYPES[slot.dtype])
        rest = torch.empty_like(exact, dtype=MASTER_DTYPE[slot.dtype])
        self._masters.split(exact.float(), weight, rest)
        return weight, rest
