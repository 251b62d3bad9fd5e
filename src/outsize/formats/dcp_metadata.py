"""The metadata of a folder of `torch.distributed.checkpoint`: a pickle, read without running what it may ask for.

Importing this module imports `torch.distributed.checkpoint`, which takes seconds.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from outsize.checkpoint.files import read_manifest

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
_PLAIN = (str, int, float, bool, bytes, type(None))
"""What may be a key, and in a tuple that is one."""


@final
class MetadataUnpickler(pickle._Unpickler):
    """Knows the classes that real metadata holds; a class that is not among them is never even imported.

    The one in Python: the one in C takes memory for whatever index a nine-byte file may name. A record is made empty
    and given its fields, nothing changes a class, and what is made takes memory in proportion to the file: see
    Note [Elements cost bytes].
    """

    # Note [Elements cost bytes]. A file can name one long tuple again and again, two bytes each time, and have a
    # torch.Size, a set or the fields of a record made from it each time. Real metadata writes the elements of each of
    # them out, at a byte or more an element, so all of them together have no more elements than the file has bytes.

    # Note [Keys]. To find the hash of a tuple Python goes into it without looking how deep it is, and anew each time.
    # Keys of dicts and elements of sets are therefore plain values, flat tuples that are counted, or what names a piece
    # of a tensor.

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

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

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_additems(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise _RefusedError(f"elements in {_name(self.stack[-1])}")
        self.stack[-1].update(self._keys(items))

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(self._keys(items)))

    def _fill(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise _RefusedError(f"keys in {_name(self.stack[-1])}")
        self._keys(items[::2])
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

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
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }

    def _collect(self, kind: Callable[[Collection[Any]], Any], items: Collection[Any] = ()) -> Any:
        self._count(items)
        return kind(items if kind is torch.Size else self._keys(items))

    def _keys(self, items: Collection[Any]) -> Collection[Any]:
        """The same, if they may be keys. See Note [Keys]."""
        for item in items:
            parts: tuple[Any, ...] = (item.fqn, item.offset) if type(item) is MetadataIndex else (item,)
            for part in parts:
                if type(part) in (tuple, torch.Size) and all(type(each) in _PLAIN for each in part):
                    self._count(part)
                elif type(part) not in (*_PLAIN, frozenset):
                    raise _RefusedError(f"a key that is a {type(part).__name__}")
        return items

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


def read_metadata(file: Path) -> Metadata:
    """What the file of metadata holds. `ValueError` that names the file for a damaged or a suspicious one."""
    content = read_manifest(file)
    try:
        found = MetadataUnpickler(content).load()
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
    if not all(type(key) is str for key in found.state_dict_metadata):
        raise ValueError(f"{file} is damaged: an entry has no name")
    return found


def shown(value: object) -> str:
    """A value of the metadata for an error: what is not plain can be short in the file and endless in print."""
    return repr(value) if type(value) is str or type(value) is int else f"a {type(value).__name__}"
