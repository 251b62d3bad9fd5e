"""Writing a folder that `torch.distributed.checkpoint.load` opens; torch does the file work, one tensor in memory.

Importing this module imports `torch.distributed.checkpoint`, which takes seconds.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from outsize.checkpoint.arrays import SLAB_BYTES, States, copy_out
from outsize.formats.dcp_metadata import is_dcp
from outsize.formats.pieces import fill, parameter_pieces
from outsize.move.memory import HostBuffer
from outsize.move.shard import DTYPES, StateArray, UnitShard
from outsize.plan.layout import Slot

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
# and reads nothing ahead.


@dataclass(frozen=True)
class DcpEntry:
    """One tensor of the folder; `read` gives its values (CPU, contiguous, of this shape and dtype) at its turn.

    Each read makes a tensor of its own, whose memory is given back once it is written.
    """

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def key(self) -> str:
        return key_of(self.place)


@dataclass(frozen=True)
class DcpGroup:
    """A parameter group: its options as plain values or small tensors, and the names of its parameters."""

    hyper: Mapping[str, object]
    parameters: Sequence[str]


@dataclass(frozen=True)
class DcpContent:
    """What goes into a folder. The shards are settled, and stay so until it is written.

    `dtype` is that of floating-point weights, default their own: in another they come from the fp32 masters. `buffers`
    are the persistent ones, `aliases` maps further names of tied parameters to the first; `groups` is None where the
    optimizer is left out.
    """

    shards: Sequence[UnitShard]
    dtype: torch.dtype | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[DcpGroup] | None = None


def key_of(place: Place) -> str:
    return ".".join(map(str, place))


def below(place: Place, *parts: str | int) -> Place:
    return (*place, *parts)


def write_dcp(folder: Path, entries: Sequence[DcpEntry], values: Mapping[Place, object] | None = None) -> None:
    """Write a folder that holds no checkpoint yet; the metadata comes last, after all data is on the disk.

    `values` are small: plain data or tensors. Memory: the tensor at hand. Raises `OSError` with
    path and errno; what was written until then stays, without metadata.
    """
    if is_dcp(folder):
        raise FileExistsError(errno.EEXIST, "a checkpoint is there already", str(folder))
    contents: dict[str, object] = {entry.key: _on_meta(entry) for entry in entries}
    contents.update({key_of(place): value for place, value in (values or {}).items()})
    places = {entry.key: entry.place for entry in entries} | {key_of(place): place for place in values or {}}
    if len(contents) != len(entries) + len(values or {}):
        raise ValueError("two values of the checkpoint have the same key; give the model or the optimizer another name")
    planner = _Planner(entries, places)
    try:
        with _alone():
            save(contents, storage_writer=_Writer(folder), planner=planner, no_dist=True)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)} (writing a checkpoint)", str(folder)) from error


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


def _on_meta(entry: DcpEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when it is written; see Note [Written tensors]."""

    def __init__(self, entries: Sequence[DcpEntry], places: Mapping[str, Place]) -> None:
        super().__init__()
        self._entries = {entry.key: entry for entry in entries}
        self._places = dict(places)
        self._written = torch.UntypedStorage(0)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict  # flat already
        self.mappings = self._places
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self._entries.get(index.fqn)
        if entry is None:
            return super().lookup_object(index)
        self._written.resize_(0)
        tensor = entry.read()
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.key
        self._written = tensor.untyped_storage()
        assert self._written.nbytes() == tensor.nbytes, "the memory of a tensor is all its own"
        return tensor


class _Writer(FileSystemWriter):
    """torch's writer of files: one file, synced, nothing read ahead, and no word of where it was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def entries_of(content: DcpContent) -> tuple[list[DcpEntry], dict[Place, object]]:
    """The tensors and the plain values of a prepared model, for `write_dcp`. Nothing is read yet."""
    reading = _Reading()
    entries = list(_weights(content, reading))
    values: dict[Place, object] = {}
    if content.groups is not None:
        root = (OPTIMIZER,)
        for shard in content.shards:
            states, plain = _states(shard, reading, (*root, "state"))
            entries += states
            values.update(plain)
        values.update(_options(content.groups, root))
    return entries, values


def _weights(content: DcpContent, reading: _Reading) -> Iterator[DcpEntry]:
    further: dict[str, list[str]] = {}
    for alias, name in content.aliases.items():
        further.setdefault(name, []).append(alias)
    for shard in content.shards:
        for slot in shard.layout.slots:
            dtype = content.dtype or DTYPES[slot.dtype]
            read = partial(reading.weight, shard, slot, dtype)
            for name in (slot.name, *further.get(slot.name, ())):
                yield DcpEntry((name,), slot.shape, dtype, read)
    for name, value in content.buffers.items():
        dtype = content.dtype if content.dtype is not None and value.is_floating_point() else value.dtype
        yield DcpEntry((name,), tuple(value.shape), dtype, partial(_copied, value, dtype))


def _states(shard: UnitShard, reading: _Reading, root: Place) -> tuple[list[DcpEntry], dict[Place, object]]:
    """The optimizer's arrays of the parameters that have state, and their other values as torch keeps them."""
    entries, values = [], dict[Place, object]()
    for slot in shard.layout.slots:
        state = shard.slot_states.get(slot.name)
        if state is None or not state.initialised:
            continue
        for key, value in state.scalars.items():
            counted = torch.tensor(value, device="cpu") if key == "step" and isinstance(value, float) else value
            values[below(root, slot.name, key)] = counted
        for array in shard.arrays.values():
            if array.public and array.name not in state.scalars:  # SGD without momentum has None there
                dtype = array.value_dtype(slot.dtype)
                read = partial(reading.state, shard, array, slot)
                entries.append(DcpEntry((*root, slot.name, array.name), slot.shape, dtype, read))
    return entries, values


def _options(groups: Sequence[DcpGroup], root: Place) -> dict[Place, object]:
    """The options of the groups in both forms that torch knows; see Note [Keys]."""
    values: dict[Place, object] = {}
    for index, group in enumerate(groups):
        values[below(root, "param_groups", index, "params")] = list(group.parameters)
        for key, value in group.hyper.items():
            values[below(root, "param_groups", index, key)] = value
            for name in group.parameters:
                values[below(root, f"param_groups.{name}.{key}")] = value
    return values


def _copied(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.detach().to("cpu", dtype, copy=True).contiguous()


@final
class _Reading:
    """Reads whole parameters and optimizer arrays out of their stores, through one slab."""

    def __init__(self) -> None:
        self._slab = HostBuffer(SLAB_BYTES)

    def weight(self, shard: UnitShard, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        """The parameter's values in `dtype` [slot.shape]; in another than its own they come from its fp32 master."""
        out = torch.empty(slot.numel, dtype=dtype, device="cpu")
        fill(out, parameter_pieces(shard, slot, dtype), self._slab.bytes)
        return out.view(slot.shape)

    def state(self, shard: UnitShard, array: StateArray, slot: Slot) -> torch.Tensor:
        """The values of an optimizer array [slot.shape]."""
        out = torch.empty(slot.numel, dtype=array.value_dtype(slot.dtype), device="cpu")

        def keep(_: Slot, first: int, content: torch.Tensor) -> None:
            out[first : first + content.numel()] = content

        copy_out(States(shard, array), {slot.name: slot}, self._slab, keep)
        return out.view(slot.shape)
