"""A folder of `torch.distributed.checkpoint`, opened for reading: its metadata runs no code, its tensors come singly.

torch does the file work. Three things are ours: the metadata, which torch unpickles without restriction, goes through
an unpickler that knows the classes of real metadata only; plain values load as weights only; and nothing is read from
a place that was not checked. Importing this module imports `torch.distributed.checkpoint`, which takes seconds.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import pickle
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict

from outsize.checkpoint.files import read_manifest
from outsize.formats.dcp import METADATA_NAME, is_dcp

LARGEST_VALUE = 1 << 20
"""Bytes of a plain value: a learning rate, a list of parameter names."""

TAKES_NO_DIST = "no_dist" in inspect.signature(load).parameters
"""Whether torch's `load` and `save` can be told to run in this process alone; in torch 2.6 their forerunners can."""

_WARNINGS = (
    ("torch.distributed is", UserWarning),  # alone, which is meant
    (".*_state_dict` is deprecated", FutureWarning),  # what torch 2.6 needs
    ("TypedStorage is deprecated", UserWarning),  # torch 2.6 of itself
)
_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.3
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_OLD_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_COLLECTIONS = {("torch", "Size"), ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset")}
_LOOKUPS = {
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}
_UNUSED = (
    *(pickle.BYTEARRAY8 + pickle.NEXT_BUFFER + pickle.READONLY_BUFFER),  # the first takes memory before it reads
    *(pickle.EXT1 + pickle.EXT2 + pickle.EXT4 + pickle.PERSID + pickle.BINPERSID),
    *(pickle.INST + pickle.OBJ + pickle.NEWOBJ_EX),
)
_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)

Shape = tuple[int, ...]


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
        self._metadata = _read_metadata(self.file)
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
        """Raise unless the files have all bytes of these entries, in regular files of this folder.

        `ValueError` that names the file, or `FileNotFoundError`.
        """
        for key in keys:
            with self._sound():
                if key in self.values:
                    length = self._check_piece(key, None)
                    if length > LARGEST_VALUE:
                        raise ValueError(f"{key!r} has {length} bytes, too many for a plain value")
                    continue
                shape, _ = self.tensors[key]
                boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in self._record(key).chunks]
                if not _fills(shape, boxes):
                    raise ValueError(f"the pieces of {key!r} do not make up the whole tensor")
                for offsets, sizes in boxes:
                    if prod(sizes):
                        self._check_piece(key, offsets)

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
                if TAKES_NO_DIST:
                    load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
                else:
                    load_state_dict(wanted, reader, no_dist=True, planner=_Planner())
        except OSError:
            raise
        except Exception as error:
            names = ", ".join(sorted(wanted)[:3])
            raise ValueError(f"{self.folder} is damaged at {names}: {type(error).__name__}: {error}") from error

    def _record(self, key: str) -> TensorStorageMetadata:
        record = self._metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        return record

    def _check_piece(self, key: str, offsets: Shape | None) -> int:
        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key!r} went through {list(info.transform_descriptors)}, which outsize does not undo")
        name, first, length = info.relative_path, info.offset, info.length
        if type(name) is not str or type(first) is not int or type(length) is not int or min(first, length) < 0:
            raise TypeError(f"{key!r} is said to lie at {first!r} of {name!r}, {length!r} bytes long")
        nbytes = self._length_of(name)
        if first + length > nbytes:
            raise ValueError(
                f"{name!r} has {nbytes} bytes and {key!r} lies at {first} to {first + length} of it: the file was cut"
            )
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


@final
class _MetadataUnpickler(pickle._Unpickler):
    """Knows the classes that real metadata holds; a class that is not among them is never even imported.

    The one in Python: the one in C takes memory for whatever index a nine-byte file may name. A record is made empty
    and given its fields, nothing changes a class, and what is made takes memory in proportion to the file: see
    Note [Elements cost bytes].
    """

    # Note [Elements cost bytes]. A file can name one long tuple again and again, two bytes each time, and have a
    # torch.Size, a set or the fields of a record made from it each time. Real metadata writes the elements of each of
    # them out, at a byte or more an element, so all of them together have no more elements than the file has bytes.

    stack: list[Any]
    append: Callable[[Any], None]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False)
        self._elements_left = len(content)

    def find_class(self, module: str, name: str) -> Any:
        place = module, name
        if place in _RECORDS:
            return super().find_class(module, name)
        if place in _COLLECTIONS:
            return _Callable(partial(self._collect, super().find_class(module, name)))
        if place in _LOOKUPS:
            return _Callable(partial(_look_up, super().find_class(module, name)))
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _Callable(_forget_path)
        raise _RefusedError(f"{module}.{name}, which could run code")

    def load_reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, _Callable):
            raise _RefusedError(f"a call of {_name(called)}")
        self.append(called.call(*arguments))

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type) or arguments != ():
            raise _RefusedError(f"a new {_name(kind)} with arguments")
        self.append(object.__new__(kind))

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if isinstance(record, type) or not is_dataclass(record):
            raise _RefusedError(f"a change of {_name(record)}")
        set_state = getattr(type(record), "__setstate__", None)
        if set_state is not None and _is_flat(state):
            set_state(record, state)
        elif set_state is None and type(state) is dict and all(type(key) is str for key in state):
            self._count(state)
            vars(record).update(state)
        else:
            raise _RefusedError(f"a {_name(record)} with a {type(state).__name__} of unknown fields")

    def load_unused(self) -> None:
        raise _RefusedError("buffers, extensions, persistent objects or calls of old classes")

    def load_unknown(self) -> None:
        raise pickle.UnpicklingError("it holds a byte that means nothing in a pickle")

    dispatch: ClassVar[Any] = {
        **dict.fromkeys(range(256), load_unknown),
        **pickle._Unpickler.dispatch,
        **dict.fromkeys(_UNUSED, load_unused),
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
    }

    def _collect(self, kind: Callable[[Collection[Any]], Any], items: Collection[Any] = ()) -> Any:
        self._count(items)
        return kind(items)

    def _count(self, items: Collection[Any]) -> None:
        self._elements_left -= len(items)
        if self._elements_left < 0:
            raise _RefusedError("more elements than it has bytes")


@final
class _Callable:
    """Stands for what metadata calls, so that a file never holds the class or the function itself."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class _RefusedError(Exception):
    """A pickle that asks for what no metadata needs."""


def _look_up(find: Callable[[Any], Any], name: Any) -> Any:
    """A layout or memory format. An error prints the name, and what prints long can be short in the file: no lists."""
    if type(name) not in (str, int):
        raise TypeError(f"a layout or memory format is a {type(name).__name__}")
    return find(name)


def _forget_path(*parts: Any) -> None:
    """Where the folder was when it was written: of no use, and perhaps of another system."""


def _is_flat(state: Any) -> bool:
    """Whether it is what `TensorProperties` takes, whose error prints it."""
    return type(state) is tuple and all(isinstance(each, (torch.dtype, torch.layout, bool, Enum)) for each in state)


def _name(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__


def _read_metadata(file: Path) -> Metadata:
    content = read_manifest(file)
    try:
        found = _MetadataUnpickler(content).load()
    except _RefusedError as error:
        raise ValueError(
            f"{file} asks for {error}, which no metadata of torch.distributed.checkpoint needs; it was not loaded"
        ) from error
    except Exception as error:  # what a damaged pickle raises is not limited
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    fields = found.__dict__ if isinstance(found, Metadata) else {}
    if not isinstance(fields.get("state_dict_metadata"), dict) or not isinstance(fields.get("storage_data"), dict):
        raise ValueError(f"{file} is not the metadata of a torch.distributed.checkpoint folder with its files")
    assert isinstance(found, Metadata)
    return found


def _dtype(record: TensorStorageMetadata) -> torch.dtype:
    dtype = record.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    return dtype


def _fills(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether the boxes (offsets, sizes) lie in the tensor, apart from each other, and make up all of it."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(low < 0 or size < 0 or low + size > end for low, size, end in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        return False
    active: list[tuple[Shape, Shape]] = []  # those that reach past where the sweep along the first dimension stands
    for box in sorted(box for box in boxes if prod(box[1])):
        active = [other for other in active if shape and other[0][0] + other[1][0] > box[0][0]]
        if any(_overlap(box, other) for other in active):
            return False
        active.append(box)
    return True


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
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
            for message, kind in _WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=kind)
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
