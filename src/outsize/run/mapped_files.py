"""Files that loaders have mapped: their pages are given back now and then, so that `init` stays within its budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from outsize.move.memory import PAGE_BYTES, give_back_pages

MIN_COPIED_BYTES = 64 << 10
"""Smaller parameters may keep their piece of a mapping."""

MAPPED_BYTES = 64 << 20
"""Resident pages of mapped files that may come together before they are given back."""

# Note [Mapped weights]
# Loaders map weights from files, and a page of the file counts as this process's memory from its first use until the
# file is closed: after reading a model of any size, all of it. A parameter that is a piece of such a mapping is copied
# out of it; one that was cast from it leaves no trace of its source. So the pages of whole mappings go (MADV_DONTNEED:
# they come back from the file if they are used again) whenever the resident pages of files have grown by a fixed
# amount. Only mappings that were made since the pager began or that a parameter came from, and that hold no modified
# page, which would be lost.


@final
class MappedFiles:
    """Files that loaders have mapped, whose pages are given back now and then. See Note [Mapped weights]."""

    def __init__(self) -> None:
        self._others = {each.identity for each in _file_mappings(detailed=False)}
        self._limit = _resident_file_bytes() + MAPPED_BYTES

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that lies in a mapped file; any other tensor itself."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_COPIED_BYTES or storage.resizable():
            return tensor
        address = storage.data_ptr()
        for each in _file_mappings(detailed=False):
            if each.address <= address < each.address + each.nbytes:
                self._others.discard(each.identity)
                return tensor.detach().clone()
        return tensor

    def trim(self) -> None:
        """Give back what can be, if enough has come together."""
        if _resident_file_bytes() <= self._limit:
            return
        for each in _file_mappings(detailed=True):
            if each.unmodified and each.identity not in self._others:
                with suppress(OSError):  # locked by its owner: it stays
                    give_back_pages(each.address, each.nbytes)
        self._limit = _resident_file_bytes() + MAPPED_BYTES


@dataclass(frozen=True)
class _Mapping:
    """A private mapping of a file that is no program. `unmodified`: it holds pages, all of them the file's own."""

    address: int
    nbytes: int
    file: str  # device and inode
    unmodified: bool

    @property
    def identity(self) -> tuple[int, str]:
        return self.address, self.file


_HEAD = r"^([0-9a-f]+)-([0-9a-f]+) [r-][w-]-p \S+ (\S+ [1-9]\d*)\b.*\n"
_MAPS = re.compile(_HEAD, re.MULTILINE)
_SMAPS = re.compile(
    _HEAD + "".join(rf"(?:[A-Z].*\n)*?{key}: +(\d+) kB\n" for key in ("Rss", "Anonymous", "Swap")), re.M
)


def _file_mappings(detailed: bool) -> Iterator[_Mapping]:
    """Those of this process; `unmodified` is found out only in detail, which is slower. None where /proc has none."""
    try:
        listing = Path("/proc/self/smaps" if detailed else "/proc/self/maps").read_text(errors="replace")
    except OSError:
        return
    for low, high, file, *kilobytes in (_SMAPS if detailed else _MAPS).findall(listing):
        resident, *changed = map(int, kilobytes or (0, 0))
        address = int(low, 16)
        yield _Mapping(address, int(high, 16) - address, file, resident > 0 and not any(changed))


def _resident_file_bytes() -> int:
    """Of this process's memory what belongs to files and shared memory; 0 on a system that does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * PAGE_BYTES
    except OSError:
        return 0
