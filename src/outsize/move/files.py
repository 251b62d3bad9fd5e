"""Weights that are read where they lie: in the files of others, which are never written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from outsize.move.disk import DiskEngine, DiskTransfer, open_direct
from outsize.move.store import Store
from outsize.move.transfer import Transfer

# Note [Read in place]
# The tensors of a safetensors file begin at any byte, and operations need them at a fixed distance from a page
# boundary (Note [Alignment] in planning/layout.py). So they are copied, by the disk engine: it reads whole blocks past
# the page cache, and puts any bytes of them anywhere in memory (Note [Direct reads of any bytes] in csrc/native.hpp).


@final
class SourceFile:
    """A file with weights, open for reading. What is read of it is what it held when it was opened, or an error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = open_direct(path, os.O_RDONLY | os.O_CLOEXEC)
        self._state = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self.number)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raise `OSError` if the file has been written to."""
        if self._now() != self._state:
            message = "the file was changed, and the model's weights are read from it in place; put it back and restart"
            raise OSError(errno.ESTALE, message, self.path)

    def close(self) -> None:
        os.close(self.number)


@dataclass(frozen=True)
class Part:
    """`nbytes` bytes of a store from its byte `start`: those of `file` from `offset`."""

    start: int
    nbytes: int
    file: SourceFile
    offset: int


@final
class FileStore(Store):
    """The parameters of a unit in files of others; zeros lie between the `parts`. Never written: who is about to change
    a parameter calls `UnitShard.own_params` first. See Note [Read in place]."""

    def __init__(self, nbytes: int, parts: Sequence[Part], engine: DiskEngine) -> None:
        super().__init__(nbytes)
        self._parts = sorted(parts, key=lambda part: part.start)
        self._engine = engine

    def in_place(self, start: int, nbytes: int) -> None:
        return None

    def use(self) -> None:
        return

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        end = start + out.numel()
        ranges = [
            (max(part.start, start), min(part.start + part.nbytes, end), part)
            for part in self._parts
            if part.start < end and start < part.start + part.nbytes
        ]
        files = {part.file for _, _, part in ranges}
        _check(files)
        transfer = DiskTransfer(self._engine, then=partial(_check, files))
        position = start
        for low, high, part in ranges:
            out[position - start : low - start].zero_()
            offset, address = part.offset + low - part.start, out.data_ptr() + low - start
            transfer.add(self._engine.read(part.file.number, offset, address, high - low), part.file.path)
            position = high
        out[position - start :].zero_()
        return transfer

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        raise AssertionError("weights that are read in place are never written")

    def drop(self) -> None:
        return


def _check(files: Iterable[SourceFile]) -> None:
    for file in files:
        file.check()
