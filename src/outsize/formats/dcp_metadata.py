"""The metadata of a folder of `torch.distributed.checkpoint`: a pickle, read without doing what it asks for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch

from outsize.checkpoint.files import read_manifest
from outsize.checkpoint.regions import MAX_DIMS
from outsize.formats.dcp_boxes import Box, Shape

# Note [Inert metadata]
# A pickle is a program that calls what it names. torch runs it, and so would run what somebody wrote into the file.
# Here nothing is imported, called or changed: a name, a call and an object are each a `_Node`, which keeps references
# to what it was made from. So the result takes memory in proportion to the file, however often one part is named
# again. The one in Python, since the one in C takes memory for whatever index a nine-byte file may name.

_PACKAGES = ("torch", "pathlib", "collections")
"""Where all names of real metadata come from. Others are refused: torch would run what they name."""

_OPCODES = (
    *(pickle.PROTO + pickle.FRAME + pickle.MARK + pickle.STOP + pickle.POP + pickle.POP_MARK),
    *(pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1),
    *(pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.TUPLE),
    *(pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT),
    *(pickle.GLOBAL + pickle.STACK_GLOBAL),
    *(pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE + pickle.BINGET + pickle.LONG_BINGET),
)

_MOST_SHOWN = 200
"""Characters of a value in an error."""


@final
@dataclass(eq=False)
class _Node:
    """Stands for what the pickle names, or for an object that it makes of it."""

    name: str
    arguments: Any = ()
    state: Any = None

    def fields(self, kind: str) -> dict[str, Any]:
        if self.name != kind or type(self.state) is not dict:
            raise ValueError(f"a {self.name} stands where a {kind} should")
        return self.state


@final
class _Reader(pickle._Unpickler):
    """See Note [Inert metadata]."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _PACKAGES:
            raise _RefusedError(f"{module}.{name}"[:_MOST_SHOWN])
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else _Node(name)

    def load_other(self) -> None:
        raise ValueError("it holds what no metadata does")

    def load_call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.append({} if called.name == "OrderedDict" else _Node(called.name, arguments))

    def load_build(self) -> None:
        state, node = self.stack.pop(), self.stack[-1]
        if type(node) is not _Node:
            raise ValueError(f"a {type(node).__name__} is given fields")
        node.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        """Keys are plain: to find the hash of a tuple Python goes into it without looking how deep it is."""
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, _Node):
                raise ValueError(f"a key is a {type(key).__name__}")
            self.stack[-1][key] = value

    dispatch: ClassVar[Any] = {
        **dict.fromkeys(range(256), load_other),
        **{code: pickle._Unpickler.dispatch[code] for code in _OPCODES},
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


class _RefusedError(Exception):
    """A pickle that asks for what no metadata needs."""


@final
class DcpMetadata:
    """What the folder holds, by key, and where. Raises `ValueError` that names the file, for a damaged one too.

    `tensors` maps keys to (shape, dtype); `values` are the keys of what is no tensor.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._read(_Reader(io.BytesIO(read_manifest(file)), fix_imports=False).load())
        except OSError:
            raise
        except _RefusedError as error:
            raise ValueError(
                f"{file} asks for {error}, which no metadata of torch.distributed.checkpoint needs; it was not loaded"
            ) from error
        except Exception as error:  # what a damaged pickle raises is not limited
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error

    def _read(self, found: _Node) -> None:
        fields = found.fields("Metadata")
        self._levels = fields.get("planner_data")
        self._chunks: dict[str, Any] = {}
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self.values: set[str] = set()
        for key, record in fields["state_dict_metadata"].items():
            if type(key) is not str:
                raise ValueError("an entry has no name")
            if record.name == "BytesStorageMetadata":
                self.values.add(key)
                continue
            tensor = record.fields("TensorStorageMetadata")
            dtype = next(iter(tensor["properties"].state))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{shown(key)} has no dtype")
            self.tensors[key] = _shape(tensor["size"]), dtype
            self._chunks[key] = tensor["chunks"]
        self._places: dict[tuple[str, Shape | None], _Node] = {}
        for index, place in fields["storage_data"].items():
            named = index.fields("MetadataIndex")
            if type(named["fqn"]) is not str:
                raise ValueError("a piece belongs to no entry")
            offset = named.get("offset")
            self._places[named["fqn"], offset and _shape(offset)] = place

    def level(self, key: str) -> tuple[Any, ...]:
        """The place of the dict in which the value stood when it was saved: () at the top, or where it is unknown."""
        place = self._levels.get(key) if type(self._levels) is dict else None
        return tuple(place[:-1]) if isinstance(place, (tuple, list)) else ()

    def boxes(self, key: str) -> list[Box]:
        """Those in which the tensor is stored."""
        chunks = [chunk.fields("ChunkStorageMetadata") for chunk in self._chunks[key]]
        return [(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in chunks]

    def place(self, key: str, offsets: Shape | None) -> tuple[str, int, int]:
        """(file, first byte, length) of a value's archive, or of that of the box of a tensor at `offsets`."""
        info = self._places[key, offsets].fields("_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError(
                f"{key!r} went through {shown(info['transform_descriptors'])}, which outsize does not undo"
            )
        name, first, length = info["relative_path"], info["offset"], info["length"]
        if type(name) is not str or type(first) is not int or type(length) is not int or min(first, length) < 0:
            raise ValueError(f"{key!r} is said to lie at {shown(first)} of {shown(name)}, {shown(length)} bytes long")
        return name, first, length


def _shape(node: _Node) -> Shape:
    """The numbers of a torch.Size, as they stand there: no copy."""
    (numbers,) = node.arguments or ((),)
    if node.name != "Size" or type(numbers) is not tuple or len(numbers) > MAX_DIMS:
        raise ValueError("a shape is no tuple of numbers")
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers):
        raise ValueError("a shape is not made of whole numbers that a size can be")
    return numbers


def shown(value: object) -> str:
    """A value of the metadata for an error: what is not plain can be short in the file and endless in print."""
    return repr(value)[:_MOST_SHOWN] if type(value) is str or type(value) is int else f"a {type(value).__name__}"
