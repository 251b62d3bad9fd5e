"""A folder of `torch.distributed.checkpoint`, opened for reading: nothing in it is run, tensors come in pieces."""

from __future__ import annotations

import io
import os
import pickle
import stat
import sys
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, Readable
from outsize.checkpoint.files import OpenFiles, naming, read_exactly
from outsize.formats.dcp_metadata import METADATA_NAME, Box, DcpMetadata, Place, Shape
from outsize.move.memory import HostBuffer, memory_of

LARGEST_VALUE = 1 << 20
"""Bytes of a plain value: a learning rate, a list of parameter names."""

# Note [Stored records]
# torch keeps each tensor in an archive: a zip file whose records are stored as they are. So any part of a tensor can
# be read alone. Its reader inflates compressed records too, checks no sum, and makes the whole storage behind a view.
# So compressed records are refused and the sums compared here; strides and offset come from torch's reader on the meta
# device.


@final
@dataclass(frozen=True)
class _Part:
    """A part of a tensor, and where its elements lie in a file: side by side, in any order of the dimensions."""

    box: Box
    file: str
    begin: int
    """In bytes."""
    strides: tuple[int, ...]
    """In elements."""

    def read(self, fd: int, path: Path, box: Box, out: torch.Tensor) -> None:
        """Fill what the part has of a box of the tensor, of which `out` has all elements.

        Memory: as much again, where they do not lie in the order of `out`.
        """
        low = tuple(map(max, box[0], self.box[0]))
        ends = (min(at + size, own + length) for at, size, own, length in zip(*box, *self.box, strict=True))
        out = out[tuple(slice(at - first, end - first) for at, end, first in zip(low, ends, box[0], strict=True))]
        order = _order(self.strides)
        target = out.permute(order)
        content = target if target.is_contiguous() else torch.empty(target.shape, dtype=out.dtype, device="cpu")
        outer = [(out.shape[dim], self.strides[dim]) for dim in order if out.shape[dim] > 1]
        run = 1  # elements that lie side by side in the file too
        while outer and outer[-1][1] == run:
            run *= outer.pop()[0]
        first = sum((at - own) * stride for at, own, stride in zip(low, self.box[0], self.strides, strict=True))
        memory, done, nbytes = memory_of(content), 0, run * out.itemsize
        for shifts in product(*(range(0, size * stride, stride) for size, stride in outer)):
            read_exactly(fd, self.begin + (first + sum(shifts)) * out.itemsize, memory[done : done + nbytes], path)
            done += nbytes
        if content is not target:
            target.copy_(content)


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions in the order in which the elements lie."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


@final
@dataclass(frozen=True)
class _Tensor:
    """A tensor in a grid of parts."""

    cuts: Sequence[Sequence[int]]
    """The first indices of the parts, by dimension."""
    parts: Mapping[Shape, _Part]
    """By their offsets."""

    def having(self, box: Box) -> Iterator[_Part]:
        """The parts that have some of a box."""
        along = (
            cuts[bisect_right(cuts, low) - 1 : bisect_left(cuts, low + size)]
            for cuts, low, size in zip(self.cuts, *box, strict=True)
        )
        yield from (self.parts[offsets] for offsets in product(*along))


def grid_cuts(shape: Shape, boxes: Sequence[Box]) -> list[list[int]] | None:
    """The first indices by dimension of boxes that make up a tensor as a grid; None if they do not."""
    if bool(boxes) != bool(prod(shape)) or any(not len(low) == len(size) == len(shape) for low, size in boxes):
        return None
    cuts = [sorted({low[dim] for low, _ in boxes}) for dim in range(len(shape))]
    sizes = [{a: b - a for a, b in pairwise([*along, end])} for along, end in zip(cuts, shape, strict=True)]
    whole = all(along[:1] in ([0], []) for along in cuts) and len({low for low, _ in boxes}) == len(boxes)
    fit = all(size == tuple(map(dict.__getitem__, sizes, low)) for low, size in boxes)
    return cuts if whole and fit and prod(map(len, cuts)) == len(boxes) else None


def boxes_between(shape: Shape, start: int, end: int) -> Iterator[Box]:
    """The boxes that hold the elements [start, end) of a flattened tensor, one behind the other.

    Each is 1 wide in its first dimensions and whole in its last ones, so that its elements lie side by side in a
    contiguous tensor. At most two for each dimension.
    """
    if not shape and start < end:
        yield (), ()
        return
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements from one index to the next
    while start < end:
        dim = next(dim for dim, step in enumerate(steps) if start % step == 0 and start + step <= end)
        offsets = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        count = min((end - start) // steps[dim], shape[dim] - offsets[dim])
        yield offsets, (*(1,) * dim, count, *shape[dim + 1 :])
        start += count * steps[dim]


@final
class DcpFolder:
    """What the folder holds, by key. Only what `check` was called for can be read. Close it after use.

    `tensors` maps keys to (shape, dtype); `values` are the keys of what is no tensor. Raises `ValueError` that names
    the file for damaged or suspicious metadata.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = DcpMetadata(folder / METADATA_NAME)
        self.tensors, self.values, self.level = self._metadata.tensors, self._metadata.values, self._metadata.level
        self._lengths: dict[str, int] = {}
        self._checked: dict[str, _Tensor] = {}
        self._files = OpenFiles()
        self._slab = HostBuffer(SLAB_BYTES)

    def check(self, keys: Iterable[str]) -> None:
        """Raise unless the files have all bytes of these entries, in regular files of this folder and sound archives.

        `ValueError` that names the file, or `FileNotFoundError`. All bytes are read; memory: the largest value.
        """
        for key in keys:
            try:
                if key in self.tensors:
                    self._checked[key] = self._found(key)
                else:
                    self._value(key)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{key!r} has no place" if isinstance(error, KeyError) else error
                raise ValueError(f"the checkpoint {self.folder} is damaged: {reason}") from error

    def piece(self, key: str, start: int, end: int) -> torch.Tensor:
        """The elements [start, end) of the flattened tensor, 1-D, of at most `SLAB_BYTES`; valid until the next call.

        Memory: the slab, and as much again where they do not lie in this order.
        """
        shape, dtype = self.tensors[key]
        out = self._slab.bytes[: (end - start) * dtype.itemsize].view(dtype)
        at = 0
        for box in boxes_between(shape, start, end):
            numel = prod(box[1])
            content = out[at : at + numel].view(box[1])
            for part in self._checked[key].having(box):
                with naming(self.folder / part.file, f"reading {key!r}"):
                    part.read(self._files.at(self.folder / part.file), self.folder / part.file, box, content)
            at += numel
        return out

    def readable(self, key: str) -> Readable:
        return Readable(*self.tensors[key], partial(self.piece, key))

    def small(self, keys: Iterable[str]) -> dict[str, Any]:
        """Small tensors and plain values at once, by key. `ValueError` for a value that holds more than plain data."""
        return {key: self.readable(key).whole() if key in self.tensors else self._value(key) for key in keys}

    def close(self) -> None:
        self._files.close()

    def _found(self, key: str) -> _Tensor:
        """A tensor, each part found in its archive."""
        shape, dtype = self.tensors[key]
        boxes = [box for box in self._metadata.boxes[key] if prod(box[1])]
        cuts = grid_cuts(shape, boxes)
        if cuts is None:
            raise ValueError(
                f"the pieces of {key!r} are no grid that makes up the whole tensor; load the folder with "
                f"torch.distributed.checkpoint and save it again"
            )
        parts = {}
        for box in boxes:
            place = self._metadata.places[key, box[0]]
            with self._archive(key, place) as (file, records):
                parts[box[0]] = _located(box, place, file, records, dtype)
        return _Tensor(cuts, parts)

    def _value(self, key: str) -> Any:
        place = self._metadata.places[key, None]
        if place[2] > LARGEST_VALUE:
            raise ValueError(f"{key!r} has {place[2]} bytes, too many for a value")
        with self._archive(key, place) as (file, _):
            return torch.load(file, map_location="cpu", weights_only=True)

    @contextmanager
    def _archive(self, key: str, place: Place) -> Iterator[tuple[IO[bytes], zipfile.ZipFile]]:
        """An archive whose records are sound, at its begin; what is wrong with it is said with its place."""
        name, first, length = place
        there = self._length_of(name)
        if first + length > there:
            raise ValueError(f"{name!r} has {there} bytes and {key!r} ends at {first + length}: the file was cut")
        with naming(self.folder / name, f"reading {key!r}"):
            try:
                file = io.BufferedReader(_Slice(self._files.at(self.folder / name), first, length))
                with zipfile.ZipFile(file) as records:
                    _check_records(records)
                    file.seek(0)
                    yield file, records
            except OSError:
                raise
            except Exception as error:  # what a damaged archive raises is not limited
                raise ValueError(f"{key!r} at {first} of {name!r}: {_reason_of(error)}") from error

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


@final
class _Slice(io.RawIOBase):
    """The bytes [first, first + length) of an open file, as a file."""

    def __init__(self, fd: int, first: int, length: int) -> None:
        self._fd, self._first, self._length = fd, first, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError("it ends too soon")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        left = memoryview(buffer)[: max(self._length - self._at, 0)]
        count = os.preadv(self._fd, [left], self._first + self._at)
        self._at += count
        return count


def _check_records(archive: zipfile.ZipFile) -> None:
    """Raise `ValueError` for records that are compressed or were changed. See Note [Stored records]."""
    for record in archive.infolist():
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it has compressed records, which torch never writes")
        if record.CRC:  # torch can be told to leave the sums out
            with archive.open(record) as content:
                while content.read(1 << 20):  # the library compares the sum at the end
                    continue


def _located(box: Box, place: Place, file: IO[bytes], archive: zipfile.ZipFile, dtype: torch.dtype) -> _Part:
    """Where the part is in its archive. Raises `ValueError` unless that holds a plain tensor of its shape and dtype."""
    sizes = {record.filename.partition("/")[2]: record.file_size for record in archive.infolist()}
    records = torch._C.PyTorchFileReader(file)
    if "byteorder" in sizes and records.get_record("byteorder") != sys.byteorder.encode():
        raise ValueError(
            "it was written on a machine with another byte order; load the folder with torch.distributed.checkpoint "
            "and save it again here"
        )
    file.seek(0)
    found: Any = None
    with torch.serialization.skip_data(), suppress(NotImplementedError):  # raised where a sparse tensor is looked at
        found = torch.load(file, map_location="meta", weights_only=True)  # torch before 2.10 reads values for meta too
    values = [name for name in sizes if name.startswith("data/")]
    nbytes = prod(box[1]) * dtype.itemsize
    fits = isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) == (box[1], dtype)
    if not fits or found.layout != torch.strided or len(values) != 1 or sizes[values[0]] < nbytes:
        raise ValueError("it holds no tensor of its shape and dtype")
    if found.is_quantized or found.is_conj() or found.is_neg():
        raise ValueError("it holds no plain tensor; save tensor.resolve_conj().resolve_neg()")
    if not found.permute(_order(found.stride())).is_contiguous():
        raise ValueError("the elements of its tensor do not lie side by side; save tensor.contiguous()")
    begin = records.get_record_offset(values[0])  # type: ignore[attr-defined]
    skipped = int(found.storage_offset()) * dtype.itemsize
    if skipped + nbytes > sizes[values[0]]:
        raise ValueError("it ends before its tensor does")
    return _Part(box, place[0], place[1] + begin + skipped, found.stride())


def _reason_of(error: Exception) -> str:
    """What is wrong, without torch's advice to load it with less care."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain values"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
