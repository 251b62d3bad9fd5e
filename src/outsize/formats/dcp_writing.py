"""Writing a folder that `torch.distributed.checkpoint.load` opens; torch does the file work, one tensor in memory.

Importing this module imports `torch.distributed.checkpoint`, which takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.files import naming
from outsize.formats.pieces import state_at_rest
from outsize.move.memory import FreedMemory, freed_memory_returned
from outsize.move.shard import UnitShard

_WARNINGS = (
    "torch.distributed is",  # alone, which is meant
    "TypedStorage is deprecated",  # older torch of itself
)

Place = tuple[str | int, ...]
"""Where a value stands in the nested dicts and lists; joined by dots it is the value's key in the folder."""

OPTIMIZER = "optimizer"
"""Where the optimizer stands. See Note [Keys]."""

# Note [Keys]
# Weights stand at the top under the names of `model.state_dict()`, as torchtitan writes them, so that a plain load of
# `model.state_dict()` opens them. The optimizer stands under its own name.
#
# `get_optimizer_state_dict` has two forms. The keys of the states are the same in both, `state.<name>.<array>`; the
# options of the groups are `param_groups.<index>.<option>` in one and `param_groups.<name>.<option>` in the flattened
# one, which torchtitan uses. A load fails where a key is missing and not where one is too many, so both are written.

# Note [Written tensors]
# torch's writer keeps every tensor of a file until the file is complete, and needs none of them again. So the planner
# takes back the memory of the tensor before, which is written when the next is asked for: the writer has one thread
# and reads nothing ahead. It goes back to the system at once: what the writer keeps lies between tensors in the heap,
# and cuts it into pieces that hold no other. A heap with holes from before serves tensors from them, one here and one
# there; where that shows the holes go back.

GROWN_BYTES = 4 << 20


def write_dcp(folder: Path, tensors: Mapping[Place, Readable], values: Mapping[Place, object] | None = None) -> None:
    """Write into a new folder; the metadata comes last, after all data is on the disk.

    `values` are small: plain data or tensors. Memory: a run and the tensor at hand. Raises `OSError` with path and
    errno; what was written until then stays, without metadata.
    """
    all_values = {**(values or {}), **tensors}
    places = {".".join(map(str, place)): place for place in all_values}
    if len(places) != len(tensors) + len(values or {}):
        raise ValueError("two values of the checkpoint have the same key; give the model or the optimizer another name")
    found = {key: all_values[place] for key, place in places.items()}
    arrays = {key: value for key, value in found.items() if isinstance(value, Readable)}
    contents = found | {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in arrays.items()}
    planner = _Planner(arrays, places)
    with naming(folder, "writing a checkpoint"), _alone(), freed_memory_returned():
        save(contents, storage_writer=_Writer(folder), planner=planner, no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """For a call of the library in this process alone: without its warnings about it, with the errors themselves."""
    try:
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            yield
    except CheckpointException as error:  # wraps even KeyboardInterrupt
        found = next(iter(error.failures.values()))[0]
        raise _system_error(found) or found from error


def _system_error(error: BaseException) -> OSError | None:
    """The `OSError` behind an error: torch's archive writer raises another one over it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when it is written; see Note [Written tensors]."""

    def __init__(self, tensors: Mapping[str, Readable], places: Mapping[str, Place]) -> None:
        super().__init__()
        self._tensors = tensors
        self._places = dict(places)
        self._written = torch.UntypedStorage(0)
        self._freed = FreedMemory(GROWN_BYTES)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict  # flat already
        self.mappings = self._places
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        weight = self._tensors.get(index.fqn)
        if weight is None:
            return super().lookup_object(index)
        self._written.resize_(0)
        self._freed.make_way(0, known=0)
        out = weight.whole()
        self._written = out.untyped_storage()
        return out


class _Writer(FileSystemWriter):
    """torch's writer of files: one file, synced, nothing read ahead, and no word of where it was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def optimizer_content(
    shards: Sequence[UnitShard], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[Place, Readable], dict[Place, object]]:
    """The optimizer's arrays and plain values, for `write_dcp`; nothing is read yet. See Note [Keys].

    Args:
        shards: settled until all is written.
        groups: the options, as torch keeps them, with the names of the parameters as "params".
    """
    arrays: dict[Place, Readable] = {}
    values: dict[Place, object] = {}
    for index, group in enumerate(groups):
        for key, value in group.items():
            values[OPTIMIZER, "param_groups", index, key] = value
            for name in group["params"] if key != "params" else ():
                values[OPTIMIZER, f"param_groups.{name}.{key}"] = value
    for shard in shards:
        for slot in shard.layout.slots:
            state = shard.slot_states.get(slot.name)
            if state is None or not state.initialised:
                continue
            for key, value in state.scalars.items():
                counted = torch.tensor(value, device="cpu") if key == "step" and isinstance(value, float) else value
                values[OPTIMIZER, "state", slot.name, key] = counted
            for array in shard.arrays.values():
                if array.public and array.name not in state.scalars:  # SGD without momentum has None there
                    arrays[OPTIMIZER, "state", slot.name, array.name] = state_at_rest(shard, array, slot)
    return arrays, values
