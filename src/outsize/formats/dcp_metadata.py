"""The metadata of a folder of `torch.distributed.checkpoint`: a pickle, read without doing what it asks for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, final

import torch

from outsize.checkpoint.files import read_manifest
from outsize.checkpoint.regions import MAX_DIMS

METADATA_NAME = ".metadata"

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(offsets, sizes)"""

Place = tuple[str, int, int]
"""(file, first byte, length)"""

_PACKAGES = ("torch", "pathlib", "collections")
"""Where all names of real metadata come from."""

_ENUMS = ("builtins", "getattr")
"""By which Python 3.11.0 to 3.11.3 pickles a value of an enum: a memory format, which we do not need."""


def is_dcp(folder: Path) -> bool:
    """Whether this is a complete folder of `torch.distributed.checkpoint`: the metadata is written last."""
    return (folder / METADATA_NAME).is_file()


class _Record:
    """Stands for an object of torch: it keeps its fields and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


@final
class _Reader(pickle._Unpickler):
    """Imports nothing: a pickle is a program that calls what it names, and here each name is an empty class.

    Keys are plain. To find the hash of a tuple Python goes into it without looking how deep it is.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _PACKAGES and (module, name) != _ENUMS:
            raise ImportError(f"{module}.{name}"[:200])
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        return (dict) if name == "OrderedDict" else type(name, (_Record,), {})

    def load_setitem(self) -> None:
        items = [self.stack.pop(), self.stack.pop()]
        self._fill(items[::-1])

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        if any(type(key) not in (str, int) and not isinstance(key, _Record) for key in items[::2]):
            raise ValueError("a key is not plain")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_other(self) -> None:
        raise ValueError("it holds what no metadata does")

    dispatch: ClassVar[Any] = {
        **pickle._Unpickler.dispatch,
        **dict.fromkeys(pickle.DICT + pickle.ADDITEMS + pickle.FROZENSET, load_other),
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


@final
class DcpMetadata:
    """What the folder holds, by key, and where. Raises `ValueError` that names the file, for a damaged one too.

    `tensors` maps keys to (shape, dtype), `boxes` to those in which the tensor is stored; `values` are the keys of what
    is no tensor; `places` has the archive of a value (key, None) and of a box (key, its offsets).
    """

    def __init__(self, file: Path) -> None:
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self.boxes: dict[str, list[Box]] = {}
        self.values: set[str] = set()
        self.places: dict[tuple[str, Shape | None], Place] = {}
        try:
            self._read(_Reader(io.BytesIO(read_manifest(file)), fix_imports=False).load())
        except OSError:
            raise
        except ImportError as error:
            raise ValueError(
                f"{file} asks for {error}, which no metadata of torch.distributed.checkpoint needs; it was not loaded"
            ) from error
        except Exception as error:  # what a damaged pickle raises is not limited
            reason = error if type(error) in (ValueError, KeyError) else type(error).__name__
            raise ValueError(f"{file} is damaged: {str(reason)[:200]}") from error

    def level(self, key: str) -> Shape:
        """The place of the dict in which the value stood when it was saved: () at the top, or where it is unknown."""
        place = self._levels.get(key) if type(self._levels) is dict else None
        return tuple(place[:-1]) if isinstance(place, (tuple, list)) else ()

    def _read(self, found: Any) -> None:
        fields = _fields(found, "Metadata")
        self._levels = fields.get("planner_data")
        for key, record in fields["state_dict_metadata"].items():
            if type(key) is not str:
                raise ValueError("an entry has no name")
            if type(record).__name__ == "BytesStorageMetadata":
                self.values.add(key)
            else:
                self._read_tensor(key, _fields(record, "TensorStorageMetadata"))
        for index, info in fields["storage_data"].items():
            named, offsets = _fields(index, "MetadataIndex"), vars(index).get("offset")
            self.places[named["fqn"], None if offsets is None else _shape(offsets)] = _place(named["fqn"], info)

    def _read_tensor(self, key: str, fields: dict[str, Any]) -> None:
        dtype = _fields(fields["properties"], "TensorProperties")["state"][0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key!r} has no dtype")
        self.tensors[key] = _shape(fields["size"]), dtype
        chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
        self.boxes[key] = [(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in chunks]


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"a {type(record).__name__} stands where a {kind} should")
    return vars(record)


def _place(key: str, info: Any) -> Place:
    fields = _fields(info, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{key!r} is compressed; load the folder with torch.distributed.checkpoint and save it again")
    name, first, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(name) is not str or type(first) is not int or type(length) is not int or min(first, length) < 0:
        raise ValueError(f"the place of {key!r} is not a file, an offset and a length")
    return name, first, length


def _shape(found: Any) -> Shape:
    if not isinstance(found, torch.Size) or len(found) > MAX_DIMS or not all(0 <= each < 1 << 62 for each in found):
        raise ValueError("a shape is not made of whole numbers that a size can be")
    return tuple(found)
