"""The archives in which torch keeps each tensor and value of a folder: looked into before torch itself opens them."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any, final

import torch

READ_BYTES = 1 << 20
LARGEST_DIRECTORY = 1 << 20
"""Bytes of the list of records, which the library turns into objects twenty times as large before one can look."""

# Note [Stored records]
# torch's archives are zip files whose records are stored as they are. Its reader inflates compressed ones too, checks
# no sum, and makes the whole storage behind a view. So records that are compressed, or together more than the archive,
# are refused, and the sums compared: what an archive takes in memory is no more than its bytes in the file.


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


def archive_at(fd: int, first: int, length: int) -> io.BufferedReader:
    return io.BufferedReader(_Slice(fd, first, length))


def check_records(file: io.BufferedReader, length: int) -> None:
    """Raise `ValueError` for an archive of `length` bytes whose records are not sound. See Note [Stored records]."""
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
    except OSError:
        raise
    except Exception as error:  # what a damaged archive raises is not limited
        raise ValueError(reason_of(error)) from error


def _read_through(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """The library compares the sum at the end."""
    with archive.open(record) as content:
        while content.read(READ_BYTES):
            continue


def check_tensor(file: io.BufferedReader, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `ValueError` unless the archive holds such a tensor. Memory: its bytes."""
    try:
        file.seek(0)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(reason_of(error)) from error
    if not isinstance(found, torch.Tensor) or (tuple(found.shape), found.dtype) != (shape, dtype):
        raise ValueError("it holds no tensor of its shape and dtype")


def reason_of(error: Exception) -> str:
    """What is wrong, without torch's advice to load it with less care."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain values"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
