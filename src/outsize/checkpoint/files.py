"""Files of a checkpoint: tensors' bytes at offsets, with every result checked and every error naming its file."""

from __future__ import annotations

import ctypes
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch

from outsize.checkpoint.manifest import Manifest, Region
from outsize.move.memory import HostBuffer
from outsize.plan.sizes import format_bytes

MAX_OPEN_FILES = 16
MAPPED_BYTES = 1 << 18


@contextmanager
def naming(path: Path, doing: str) -> Iterator[None]:
    """Give an `OSError` of the block the path and what was being done, unless it names a file already."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)} ({doing})", str(path)) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor lives."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system when it is dropped; a large piece of the heap may be left in fragments."""
    nbytes = numel * dtype.itemsize
    if nbytes < MAPPED_BYTES:
        return torch.empty(numel, dtype=dtype)
    return HostBuffer(nbytes).bytes.view(dtype)  # [numel]


@final
class DataWriter:
    """A new file of known length, written at any offsets and synced when it is closed without an error."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with naming(path, f"making a file of {format_bytes(nbytes)}"):
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, offset: int, content: torch.Tensor) -> None:
        left = bytes_of(content)
        with naming(self._path, f"writing {format_bytes(len(left))} at {offset}"):
            while left:
                written = os.pwrite(self._fd, left, offset)
                offset, left = offset + written, left[written:]

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                with naming(self._path, "syncing"):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)


@final
class DataReader:
    """The data files of one checkpoint, open a few at a time. Opening checks that every file has its length."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        for name, nbytes in manifest.files.items():
            status = os.lstat(folder / name)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{folder / name} is not a regular file; the checkpoint is damaged")
            if status.st_size != nbytes:
                raise ValueError(
                    f"{folder / name} has {status.st_size} bytes and should have {nbytes}; the checkpoint is damaged: "
                    f"load an earlier one"
                )

    def read(self, region: Region, start: int = 0, end: int | None = None) -> torch.Tensor:
        """The elements [start, end) of a region, 1-D; the whole region in its shape if no range is given."""
        whole = end is None
        last = region.nbytes // region.dtype.itemsize if end is None else end
        out = _empty(last - start, region.dtype)
        offset = region.offset + start * region.dtype.itemsize
        path = self._folder / region.file
        left = bytes_of(out)
        with naming(path, f"reading {format_bytes(len(left))} at {offset}"):
            fd = self._file(region.file)
            while left:
                count = os.preadv(fd, [left], offset)
                if not count:
                    raise ValueError(f"{path} ends at {offset}; it was changed while it was being loaded")
                offset, left = offset + count, left[count:]
        return out.view(region.shape) if whole else out

    def _file(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
        else:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._open[name]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
