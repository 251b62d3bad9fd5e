"""Files that loaders have mapped: parameters that lie there unchanged, and pages that are given back now and then."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from outsize.move.memory import PAGE_BYTES, give_back_pages, pages_inside, resident_bytes

MAPPED_BYTES = 64 << 20
"""Resident pages of mapped files that may come together before they are given back."""

PAGEMAP_BYTES = 8
"""What the system tells of one page: bit 63, it is in memory; 62, it is swapped out; 61, it is a file's."""

# Note [Mapped weights]
# Loaders map weights from files, and a page of the file counts as this process's memory from its first use until the
# file is closed: after reading a model of any size, all of it. A parameter may be a piece of such a mapping; one that
# was cast from it leaves no trace of its source. So the pages of whole mappings go (MADV_DONTNEED: they come back from
# the file if they are used again) whenever the resident pages of files have grown by a fixed amount. Only mappings that
# were made since the pager began or that a parameter lies in, and that hold no modified page, which would be lost.
#
# A mapping is private: who writes to it gets a page of memory in place of the file's. The system tells which page is
# which. So a parameter whose pages are all the file's, or not in memory, has the values of the file. The system
# does not tell a file's page from one of shared memory: at the place of a mapping that went, this counts as a file's.


@final
class MappedFiles:
    """Files that loaders have mapped, whose pages are given back now and then. See Note [Mapped weights]."""

    def __init__(self) -> None:
        self._others = {each.identity for each in _file_mappings(detailed=False)}
        self._limit = resident_bytes()[1] + MAPPED_BYTES
        self._listed: list[_Mapping] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is a file's. Its pages may go from now on."""
        if not _is_foreign(tensor):
            return False
        found = _mapping_of(tensor, self._listed) if _begins_in_file(tensor) else None
        if found is None:  # listed before it was mapped, or not a file's
            self._listed = _in_order()
            found = _mapping_of(tensor, self._listed)
        if found is not None:
            self._others.discard(found.identity)
        return found is not None

    def trim(self) -> None:
        """Give back what can be, if enough has come together."""
        if resident_bytes()[1] <= self._limit:
            return
        for each in _file_mappings(detailed=True):
            if each.unmodified and each.identity not in self._others:
                with suppress(OSError):  # locked by its owner: it stays
                    give_back_pages(each.address, each.nbytes)
        self._limit = resident_bytes()[1] + MAPPED_BYTES


@dataclass(frozen=True)
class _Mapping:
    """A private mapping of a file that is no program. `unmodified`: it holds pages, all of them the file's own."""

    address: int
    nbytes: int
    offset: int  # of its first byte in the file
    file: str  # device and inode
    path: str
    unmodified: bool

    @property
    def identity(self) -> tuple[int, str]:
        return self.address, self.file


@dataclass(frozen=True)
class FileRange:
    """Where a parameter's bytes lie in a file."""

    path: str
    offset: int


def ranges_in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, FileRange]:
    """Of the tensors that lie in mapped files, and have the values of these files: where. See Note [Mapped weights]."""
    foreign = {name: tensor for name, tensor in tensors.items() if _is_foreign(tensor) and tensor.is_contiguous()}
    mappings = _in_order() if foreign else []
    found = {}
    for name, tensor in foreign.items():
        mapping = _mapping_of(tensor, mappings)
        if mapping is not None and not is_modified(tensor) and _is_there(mapping):
            found[name] = FileRange(mapping.path, mapping.offset + tensor.data_ptr() - mapping.address)
    return found


def let_go(tensor: torch.Tensor) -> None:
    """The values were read: where they are a mapped file's, their pages go. They come back if they are used again."""
    if not _is_foreign(tensor):
        return
    first, nbytes = pages_inside(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    if nbytes and _mapping_of(tensor, _in_order()) is not None and not is_modified(tensor):
        give_back_pages(first, nbytes)


def _in_order() -> list[_Mapping]:
    return sorted(_file_mappings(detailed=False), key=lambda each: each.address)


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Whether torch did not allocate the memory: it may be a mapping's. To list the mappings takes milliseconds."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return False
    storage = tensor.untyped_storage()
    return type(storage) is torch.UntypedStorage and not storage.resizable()


def _mapping_of(tensor: torch.Tensor, mappings: list[_Mapping]) -> _Mapping | None:
    """The mapping that all of the tensor lies in."""
    start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    before = bisect_right(mappings, start, key=lambda each: each.address)
    mapping = mappings[before - 1] if before else None
    return mapping if mapping is not None and start + nbytes <= mapping.address + mapping.nbytes else None


def is_modified(tensor: torch.Tensor) -> bool:
    """Whether any page of it is memory in place of the file's; also where the system does not tell."""
    words = _page_words(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    if words is None:
        return True
    present, swapped, of_file = words < 0, words >> 62 & 1 == 1, words >> 61 & 1 == 1
    return bool((swapped | (present & ~of_file)).any())


def _begins_in_file(tensor: torch.Tensor) -> bool:
    """Whether its first page is a file's, as far as the system knows now: in memory, that of a file."""
    words = _page_words(tensor.data_ptr(), 1)
    return words is not None and bool(words[0] < 0 and words[0] >> 61 & 1)


def _page_words(address: int, nbytes: int) -> torch.Tensor | None:
    """What the system tells of each page (int64 [pages]); None where it does not."""
    first, end = address // PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            entries = os.pread(file.fileno(), (end - first) * PAGEMAP_BYTES, first * PAGEMAP_BYTES)
    except OSError:
        return None
    whole = len(entries) == (end - first) * PAGEMAP_BYTES
    return torch.frombuffer(bytearray(entries), dtype=torch.int64) if whole else None


def _is_there(mapping: _Mapping) -> bool:
    """Whether the path leads to the file that is mapped: its inode. The device has other numbers on some systems."""
    try:
        return os.stat(mapping.path).st_ino == int(mapping.file.split()[1])
    except OSError:
        return False


_HEAD = r"^([0-9a-f]+)-([0-9a-f]+) [r-][w-]-p ([0-9a-f]+) (\S+ [1-9]\d*)\b *(.*)\n"
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
    for low, high, offset, file, path, *kilobytes in (_SMAPS if detailed else _MAPS).findall(listing):
        resident, *changed = map(int, kilobytes or (0, 0))
        address = int(low, 16)
        unmodified = resident > 0 and not any(changed)
        yield _Mapping(address, int(high, 16) - address, int(offset, 16), file, path, unmodified)
