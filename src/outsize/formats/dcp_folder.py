"""A folder of `torch.distributed.checkpoint`, opened for reading: its metadata runs no code, tensors come in pieces.

The metadata, which torch unpickles without restriction, is read by `dcp_metadata`; plain values load as weights only;
and nothing is read from a place that was not checked, nor from an archive that `dcp_archive` has not looked into.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES
from outsize.checkpoint.files import naming
from outsize.formats.dcp import METADATA_NAME, is_dcp
from outsize.formats.dcp_archive import StoredTensor, archive_at, reason_of, sound_records, stored_tensor
from outsize.formats.dcp_boxes import Box, Shape, boxes_between, common, fills, span_of
from outsize.formats.dcp_metadata import DcpMetadata
from outsize.move.memory import HostBuffer

LARGEST_VALUE = 1 << 20
"""Bytes of a plain value (a learning rate, a list of parameter names), and of what an archive has beside its tensor."""

MOST_OPEN = 16
"""Files at a time. Those among which a layer was divided are read in turn."""

_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor in a file of its own, or together with others."""

    box: Box
    name: str
    stored: StoredTensor


@final
class _Chunks:
    """All parts of one tensor."""

    def __init__(self, shape: Shape, chunks: Sequence[_Chunk]) -> None:
        spans = sorted(((span_of(shape, chunk.box), chunk) for chunk in chunks), key=lambda each: each[0])
        self._chunks = [chunk for _, chunk in spans]
        self._firsts = [first for (first, _), _ in spans]
        self._ends = list(accumulate((end for (_, end), _ in spans), max))  # of all up to here

    def between(self, start: int, end: int) -> Sequence[_Chunk]:
        """Those that may have some of the elements [start, end) of the flattened tensor."""
        return self._chunks[bisect_right(self._ends, start) : bisect_left(self._firsts, end)]


@final
class DcpFolder:
    """What the folder holds, by key. Only what `check` was called for can be read. Close it after use.

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
        self._metadata = DcpMetadata(self.file)
        self.tensors, self.values, self.level = self._metadata.tensors, self._metadata.values, self._metadata.level
        self._lengths: dict[str, int] = {}
        self._chunks: dict[str, _Chunks] = {}  # of the tensors that were checked
        self._open: dict[str, int] = {}
        self._slab = HostBuffer(SLAB_BYTES)

    def check(self, keys: Iterable[str]) -> None:
        """Raise unless the files have all bytes of these entries, in regular files of this folder and sound archives.

        `ValueError` that names the file, or `FileNotFoundError`. All bytes are read; memory: the largest value.
        """
        value_bytes = 0
        for key in keys:
            with self._sound():
                if key in self.tensors:
                    self._chunks[key] = self._checked(key)
                    continue
                value_bytes += self._check_value(key)
                if value_bytes > sum(self._lengths.values()):
                    raise ValueError(f"the values up to {key!r} are more bytes than the files that hold them")

    def piece(self, key: str, start: int, end: int) -> torch.Tensor:
        """The elements [start, end) of the flattened tensor, 1-D, of at most `SLAB_BYTES`; valid until the next call.

        Memory: the slab, and as much again where they do not lie in this order.
        """
        shape, dtype = self.tensors[key]
        out = self._slab.bytes[: (end - start) * dtype.itemsize].view(dtype)
        at = 0
        for box in boxes_between(shape, start, end):
            numel = prod(box[1])
            part = out[at : at + numel].view(box[1])
            for chunk in self._chunks[key].between(start + at, start + at + numel):
                self._read(key, chunk, box, part)
            at += numel
        return out

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor on the CPU. Memory: its bytes, and those of a piece."""
        shape, dtype = self.tensors[key]
        out = torch.empty(shape, dtype=dtype, device="cpu")
        flat, most = out.view(-1), SLAB_BYTES // dtype.itemsize
        for start in range(0, flat.numel(), most):
            end = min(start + most, flat.numel())
            flat[start:end] = self.piece(key, start, end)
        return out

    def small(self, keys: Iterable[str]) -> dict[str, Any]:
        """Small tensors and plain values at once, by key. `ValueError` for a value that holds more than plain data."""
        return {key: self.tensor(key) if key in self.tensors else self._value(key) for key in keys}

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _read(self, key: str, chunk: _Chunk, box: Box, out: torch.Tensor) -> None:
        """Fill what the chunk has of a box of the tensor, of which `out` has all elements."""
        shared = common(box, chunk.box)
        if shared is None:
            return
        low, sizes = shared
        where = tuple(slice(at - first, at - first + size) for at, first, size in zip(low, box[0], sizes, strict=True))
        offsets = [at - first for at, first in zip(low, chunk.box[0], strict=True)]
        path = self.folder / chunk.name
        with naming(path, f"reading {key!r}"):
            chunk.stored.read(self._file(chunk.name), path, offsets, out[where])

    def _value(self, key: str) -> Any:
        name, first, length = self._place(key)
        with naming(self.folder / name, f"reading {key!r}"):
            try:
                return torch.load(archive_at(self._file(name), first, length), map_location="cpu", weights_only=True)
            except OSError:
                raise
            except Exception as error:
                raise ValueError(f"{self.folder} is damaged at {key}: {reason_of(error)}") from error

    def _file(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) == MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[name]

    def _checked(self, key: str) -> _Chunks:
        """The parts of a tensor, each found in its archive."""
        shape, dtype = self.tensors[key]
        boxes = self._metadata.boxes(key)
        if not fills(shape, boxes):
            raise ValueError(f"the pieces of {key!r} do not make up the whole tensor")
        chunks = []
        for box in boxes:
            nbytes = prod(box[1]) * dtype.itemsize
            if not nbytes:
                continue
            name, first, length = self._place(key, box[0], nbytes)
            with self._archive(key, name, first, length) as archive:
                chunks.append(_Chunk(box, name, stored_tensor(archive, first, length, box[1], dtype)))
        return _Chunks(shape, chunks)

    def _check_value(self, key: str) -> int:
        """The bytes of a plain value."""
        name, first, length = self._place(key)
        with self._archive(key, name, first, length) as archive:
            sound_records(archive, length)
        return length

    def _place(self, key: str, offsets: Shape | None = None, nbytes: int = 0) -> tuple[str, int, int]:
        """(file, first byte, length) of the archive of a plain value, or of a part of a tensor that has `nbytes`."""
        name, first, length = self._metadata.place(key, offsets)
        there = self._length_of(name)
        if first + length > there:
            raise ValueError(
                f"{name!r} has {there} bytes and {key!r} lies at {first} to {first + length} of it: the file was cut"
            )
        if length > LARGEST_VALUE + nbytes:
            raise ValueError(f"{key!r} has {length} bytes, too many for {'its tensor' if nbytes else 'a value'}")
        return name, first, length

    @contextmanager
    def _archive(self, key: str, name: str, first: int, length: int) -> Iterator[io.BufferedReader]:
        """An archive to look into; what is wrong with it is said with its place."""
        with naming(self.folder / name, f"reading {key!r}"):
            try:
                yield archive_at(self._file(name), first, length)
            except ValueError as error:
                raise ValueError(f"{key!r} at {first} of {name!r}: {error}") from error

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
