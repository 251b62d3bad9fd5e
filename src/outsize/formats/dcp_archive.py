"""The archives in which torch keeps each tensor and value of a folder: looked into before anything is made of them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.files import read_exactly
from outsize.move.memory import memory_of

READ_BYTES = 1 << 20
LARGEST_DIRECTORY = 1 << 20
"""Bytes of the list of records, which the library turns into objects twenty times as large before one can look."""

# Note [Stored records]
# torch's archives are zip files whose records are stored as they are. Its reader inflates compressed ones too, checks
# no sum, and makes the whole storage behind a view. So records that are compressed, or together more than the archive,
# are refused, and the sums compared: what an archive takes in memory is no more than its bytes in the file.

# Note [Stored values]
# The values of a tensor are a record, and so lie in the file as they would in memory: any part of them can be read
# alone. Strides and offset come from what torch makes of the rest of the archive on the meta device.


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


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions in the order in which the elements lie."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


@final
@dataclass(frozen=True)
class StoredTensor:
    """Where the elements of a tensor lie in a file: side by side, in any order of the dimensions."""

    begin: int
    """In bytes."""
    strides: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    def read(self, fd: int, path: Path, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the elements of the box of its shape at `offsets`.

        Memory: as much again, where they do not lie in the order of `out`.
        """
        order = _order(self.strides)
        target = out.permute(order)
        content = target if target.is_contiguous() else torch.empty(target.shape, dtype=self.dtype, device="cpu")
        outer = [(out.shape[dim], self.strides[dim]) for dim in order if out.shape[dim] > 1]
        run = 1  # elements that lie side by side in the file too
        while outer and outer[-1][1] == run:
            run *= outer.pop()[0]
        first = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        memory, at, nbytes = memory_of(content), 0, run * self.dtype.itemsize
        for shifts in product(*(range(0, size * stride, stride) for size, stride in outer)):
            place = self.begin + (first + sum(shifts)) * self.dtype.itemsize
            read_exactly(fd, place, memory[at : at + nbytes], path)
            at += nbytes
        if content is not target:
            target.copy_(content)
        if self.conjugate:
            out.conj_physical_()
        if self.negative:
            out.neg_()


def archive_at(fd: int, first: int, length: int) -> io.BufferedReader:
    return io.BufferedReader(_Slice(fd, first, length))


def sound_records(file: io.BufferedReader, length: int) -> list[zipfile.ZipInfo]:
    """The records of an archive of `length` bytes. Raises `ValueError` where they are not sound.

    See Note [Stored records].
    """
    try:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if end is not None and end[zipfile._ECD_SIZE] > LARGEST_DIRECTORY:  # type: ignore[attr-defined]
            raise ValueError(f"its records have more than {LARGEST_DIRECTORY} bytes of names")
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("it has compressed records, which torch never writes")
            if sum(record.file_size for record in records) > length:
                raise ValueError("its records are more bytes than it has itself")
            for record in records:
                if record.CRC:  # torch can be told to leave the sums out
                    _read_through(archive, record)
            return records
    except OSError:
        raise
    except Exception as error:  # what a damaged archive raises is not limited
        raise ValueError(reason_of(error)) from error


def _read_through(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """The library compares the sum at the end."""
    with archive.open(record) as content:
        while content.read(READ_BYTES):
            continue


def stored_tensor(
    file: io.BufferedReader, place: int, length: int, shape: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    """Where the values are in an archive of `length` bytes at `place` of a file. See Note [Stored values].

    Raises `ValueError` unless it is sound and holds a tensor of this shape and dtype. Memory: what it has beside them.
    """
    records = sound_records(file, length)
    values = [record for record in records if _name_of(record).startswith("data/")]
    nbytes = prod(shape) * dtype.itemsize
    if len(values) != 1 or values[0].file_size < nbytes:
        raise ValueError("it holds no tensor of its shape and dtype")
    _check_byte_order(file, records)
    found = _on_meta(file)
    if not isinstance(found, torch.Tensor) or (tuple(found.shape), found.dtype) != (shape, dtype):
        raise ValueError("it holds no tensor of its shape and dtype")
    if type(found) not in (torch.Tensor, torch.nn.Parameter) or found.layout != torch.strided or found.is_quantized:
        raise ValueError("it holds no plain tensor")
    if not found.permute(_order(found.stride())).is_contiguous():
        raise ValueError("the elements of its tensor do not lie side by side; save tensor.contiguous()")
    begin, skipped = _begin_of(file, values[0]), int(found.storage_offset()) * dtype.itemsize
    if skipped + nbytes > values[0].file_size or begin + values[0].file_size > length:
        raise ValueError("it ends before its tensor does")
    return StoredTensor(place + begin + skipped, found.stride(), dtype, found.is_conj(), found.is_neg())


def _on_meta(file: io.BufferedReader) -> Any:
    """What the archive holds, without values."""
    try:
        file.seek(0)
        with torch.serialization.skip_data():  # until torch 2.10 the values are read for the meta device too
            return torch.load(file, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(reason_of(error)) from error


def _check_byte_order(file: io.BufferedReader, records: Sequence[zipfile.ZipInfo]) -> None:
    order = b"little"  # where it is not said
    for record in records:
        if _name_of(record) == "byteorder":
            file.seek(_begin_of(file, record))
            order = file.read(record.file_size)
    if order != sys.byteorder.encode():
        raise ValueError(
            "it was written on a machine with another byte order; load the folder with torch.distributed.checkpoint "
            "and save it again here"
        )


def _name_of(record: zipfile.ZipInfo) -> str:
    """Its name below the folder that an archive has all its records in."""
    return record.filename.partition("/")[2]


_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""(signature, bytes of the name, bytes of what else comes before the content)"""


def _begin_of(file: io.BufferedReader, record: zipfile.ZipInfo) -> int:
    """Where in the archive the content of a record begins."""
    file.seek(record.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise ValueError(f"it has no record at {record.header_offset}")
    _, name, more = _LOCAL_HEADER.unpack(header)
    return record.header_offset + _LOCAL_HEADER.size + int(name) + int(more)


def reason_of(error: Exception) -> str:
    """What is wrong, without torch's advice to load it with less care."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain values"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
