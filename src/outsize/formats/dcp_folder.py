"""A folder of `torch.distributed.checkpoint`, opened for reading: its metadata runs no code, its tensors come singly.

torch does the file work. Three things are ours: the metadata, which torch unpickles without restriction, is read by
`dcp_metadata`; plain values load as weights only; and nothing is read from a place that was not checked, nor from an
archive that `dcp_archive` has not looked into. Importing this module imports `torch.distributed.checkpoint`, which
takes seconds.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from outsize.checkpoint.files import naming
from outsize.formats.dcp import METADATA_NAME, is_dcp
from outsize.formats.dcp_archive import archive_at, check_records, check_tensor, reason_of
from outsize.formats.dcp_metadata import read_metadata, shown

LARGEST_VALUE = 1 << 20
"""Bytes of a plain value (a learning rate, a list of parameter names), and of what an archive has beside its tensor."""

LARGEST_TANGLE = 1 << 20
"""Pairs of pieces of one tensor that no cut through all of it parts. Those of a grid are all parted."""

_WARNINGS = (
    "torch.distributed is",  # alone, which is meant
    "TypedStorage is deprecated",  # older torch of itself
)
_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(offsets, sizes)"""


@final
class DcpFolder:
    """What the folder holds, by key. Nothing is read but the metadata until `tensor` or `small` is called.

    `tensors` maps keys to (shape, dtype); `values` are the keys of what is no tensor. Raises `FileNotFoundError` where
    there is no metadata, `ValueError` that names the file for a damaged or a suspicious one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / METADATA_NAME
        if not is_dcp(folder):
            raise FileNotFoundError(
                errno.ENOENT, "not a complete checkpoint: the metadata is written last and is missing", str(self.file)
            )
        self._metadata = read_metadata(self.file)
        self._lengths: dict[str, int] = {}
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self.values: set[str] = set()
        with self._sound():
            for key, record in self._metadata.state_dict_metadata.items():
                if isinstance(record, TensorStorageMetadata):
                    self.tensors[key] = tuple(record.size), _dtype(record)
                elif isinstance(record, BytesStorageMetadata):
                    self.values.add(key)
                else:
                    raise ValueError(f"{key!r} is a {type(record).__name__}")

    def level(self, key: str) -> tuple[Any, ...]:
        """The place of the dict in which the value stood when it was saved: () at the top, or where it is unknown."""
        places = self._metadata.planner_data
        place = places.get(key) if isinstance(places, Mapping) else None
        return tuple(place[:-1]) if isinstance(place, (tuple, list)) else ()

    def check(self, keys: Iterable[str]) -> None:
        """Raise unless the files have all bytes of these entries, in regular files of this folder and sound archives.

        `ValueError` that names the file, or `FileNotFoundError`. All bytes are read; memory: the piece at hand.
        """
        value_bytes = 0
        for key in keys:
            with self._sound():
                if key in self.values:
                    value_bytes += self._check_piece(key)
                    if value_bytes > sum(self._lengths.values()):
                        raise ValueError(f"the values up to {key!r} are more bytes than the files that hold them")
                    continue
                shape, dtype = self.tensors[key]
                boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in self._record(key).chunks]
                if not _fills(shape, boxes):
                    raise ValueError(f"the pieces of {key!r} do not make up the whole tensor")
                for offsets, sizes in boxes:
                    if prod(sizes):
                        self._check_piece(key, offsets, sizes, dtype)

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor on the CPU, put together from its pieces. Memory: twice its bytes while it is read."""
        shape, dtype = self.tensors[key]
        out = torch.empty(shape, dtype=dtype, device="cpu")
        self._load({key: out})
        return out

    def small(self, keys: Iterable[str]) -> dict[str, Any]:
        """Small tensors and plain values at once, by key. `ValueError` for a value that holds more than plain data."""
        wanted: dict[str, Any] = dict.fromkeys(keys)
        for key in wanted:
            if key in self.tensors:
                shape, dtype = self.tensors[key]
                wanted[key] = torch.empty(shape, dtype=dtype, device="cpu")
        self._load(wanted)
        return wanted

    def _load(self, wanted: dict[str, Any]) -> None:
        """Fill the tensors in place and the other values in the dict."""
        reader = _Reader(self.folder, self._metadata)
        try:
            with alone():
                load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
        except OSError:
            raise
        except Exception as error:
            names = ", ".join(sorted(wanted)[:3])
            raise ValueError(f"{self.folder} is damaged at {names}: {reason_of(error)}") from error

    def _record(self, key: str) -> TensorStorageMetadata:
        record = self._metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        return record

    def _check_piece(
        self, key: str, offsets: Shape | None = None, sizes: Shape = (), dtype: torch.dtype | None = None
    ) -> int:
        """The bytes of a piece of a tensor, or of a plain value where no `dtype` is given."""
        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key!r} went through {shown(info.transform_descriptors)}, which outsize does not undo")
        name, first, length = info.relative_path, info.offset, info.length
        if type(name) is not str or type(first) is not int or type(length) is not int or min(first, length) < 0:
            raise TypeError(f"{key!r} is said to lie at {shown(first)} of {shown(name)}, {shown(length)} bytes long")
        nbytes = self._length_of(name)
        if first + length > nbytes:
            raise ValueError(
                f"{name!r} has {nbytes} bytes and {key!r} lies at {first} to {first + length} of it: the file was cut"
            )
        if length > LARGEST_VALUE + (prod(sizes) * dtype.itemsize if dtype is not None else 0):
            raise ValueError(f"{key!r} has {length} bytes, too many for {'a value' if dtype is None else 'its tensor'}")
        with naming(self.folder / name, f"reading {key!r}"), open(self.folder / name, "rb") as file:
            archive = archive_at(file.fileno(), first, length)
            try:
                check_records(archive, length)
                if dtype is not None:
                    check_tensor(archive, sizes, dtype)
            except ValueError as error:
                raise ValueError(f"{key!r} at {first} of {name!r}: {error}") from error
        return length

    def _length_of(self, name: str) -> int:
        """Bytes of a data file, which must be a regular one inside the folder."""
        if name not in self._lengths:
            path = PurePosixPath(name)
            file, root = os.path.realpath(self.folder / name), os.path.realpath(self.folder)
            if not path.parts or path.is_absolute() or ".." in path.parts or os.path.commonpath([file, root]) != root:
                raise ValueError(f"the metadata names {name!r}, which lies outside of the folder")
            status = os.stat(self.folder / name)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name!r} is not a regular file")
            self._lengths[name] = status.st_size
        return self._lengths[name]

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Say which checkpoint is damaged, whatever was wrong with the metadata."""
        try:
            yield
        except _DAMAGE as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the checkpoint {self.folder} is damaged: {reason}") from error


def _dtype(record: TensorStorageMetadata) -> torch.dtype:
    dtype = record.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{shown(dtype)} is no dtype")
    return dtype


def _fills(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether the boxes (offsets, sizes) lie in the tensor, apart from each other, and make up all of it."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(low < 0 or size < 0 or low + size > end for low, size, end in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        return False
    return _apart([box for box in boxes if prod(box[1])], len(shape))


def _apart(boxes: list[Box], ndim: int) -> bool:
    """Whether no two boxes overlap. Cuts through all of them part those that need not be compared."""
    groups = [boxes]
    for dim in 2 * list(range(ndim)):
        groups = [slab for group in groups for slab in _slabs(group, dim)]
    if sum(len(group) * (len(group) - 1) for group in groups) > 2 * LARGEST_TANGLE:
        raise ValueError("a tensor is in pieces that are no grid, and too many to be told apart")
    return not any(_overlap(*pair) for group in groups for pair in combinations(group, 2))


def _slabs(boxes: list[Box], dim: int) -> Iterator[list[Box]]:
    """The boxes between one cut across the dimension and the next."""
    slab: list[Box] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if slab and box[0][dim] >= reach:
            yield slab
            slab = []
        slab.append(box)
        reach = max(reach, box[0][dim] + box[1][dim])
    if slab:
        yield slab


def _overlap(one: Box, other: Box) -> bool:
    return all(
        low < start + size and start < low + length
        for low, length, start, size in zip(one[0], one[1], other[0], other[1], strict=True)
    )


class _Reader(FileSystemReader):
    """torch's reader of files, given metadata that was read and checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Loads the keys as they are given, and plain values without unpickling more than plain data."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = found


@contextmanager
def alone() -> Iterator[None]:
    """For calls of the library in this process alone: without its warnings about it, with the errors themselves."""
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
