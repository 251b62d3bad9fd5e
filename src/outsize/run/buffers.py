"""Memory in which the whole gradients of a unit are collected before they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from outsize.move.memory import Ledger, give_back_pages, new_bytes, pages_inside
from outsize.move.store import DTYPES
from outsize.planning.layout import UnitLayout

TAKEN, KEPT = "device/whole gradients", "device/kept buffers"
PASSING_UNITS = 2
"""Units whose gradients are on their way at once: of one they are collected, of the one before reduced. So many
buffers are kept for the next units, for fresh memory is slow to come by."""


def collecting_sizes(whole: UnitLayout, dtype: torch.dtype | None) -> list[int]:
    """Bytes of a unit's whole gradients, by segment, where they are reduced in `dtype`, or in their own if None."""
    return [segment.numel * collecting_dtype(segment.dtype, dtype).itemsize for segment in whole.segments]


def collecting_dtype(own: str, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own != "float64" else DTYPES[own]


def unused(memory: torch.Tensor) -> bool:
    """Whether nobody has a view of this memory but through this very tensor."""
    return _uses(memory) == _ALONE


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _uses(torch.empty(1, device="cpu"))


@final
class Buffers:
    """Memory for whole gradients, used again for the next unit."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._free: list[torch.Tensor] = []
        self._spent: dict[int, list[torch.Tensor]] = {}  # by the address of what was taken
        self._returned: dict[int, int] = {}  # bytes, likewise

    @property
    def held(self) -> int:
        """Bytes, those of buffers that wait to be used again included."""
        return self._ledger.now.get(TAKEN, 0) + self.free

    @property
    def free(self) -> int:
        """Bytes of buffers that wait to be used again."""
        return self._ledger.now.get(KEPT, 0)

    def take(self, nbytes: int, device: torch.device, make_room: Callable[[int], None]) -> torch.Tensor:
        """uint8 [nbytes], contents undefined. Calls `make_room` before so many bytes are added to `held`."""
        found = next((index for index, memory in enumerate(self._free) if memory.numel() == nbytes), None)
        memory = None if found is None else self._free.pop(found)
        # Memory is shortest while the largest unit is collected: what is too small for it makes room.
        self._keep([each for each in self._free if each.numel() >= nbytes])
        if memory is not None:
            self._ledger.remove(KEPT, nbytes)
            self._ledger.add(TAKEN, nbytes)
            return memory
        make_room(nbytes)
        self._ledger.add(TAKEN, nbytes)
        return new_bytes(nbytes, device)

    def spend(self, memory: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """These parts of what was taken hold nothing any more."""
        if memory.device.type == "cpu":
            self._spent[memory.data_ptr()] = parts

    def give(self, memory: torch.Tensor, is_kept: bool = False) -> None:
        """Take back what was taken, unless it is kept: then it is somebody else's. On an accelerator torch keeps it."""
        self._spent.pop(memory.data_ptr(), None)
        returned = self._returned.pop(memory.data_ptr(), 0)
        self._ledger.remove(TAKEN, memory.numel() - returned)
        if not (is_kept or returned) and memory.device.type == "cpu":
            self._ledger.add(KEPT, memory.numel())
            self._free.append(memory)
            self._keep(self._free[-PASSING_UNITS:])

    def drop_free(self) -> bool:
        """Give back what waits to be used again and what is spent; whether there was anything."""
        before = self.held
        self._keep([])
        for taken, parts in self._spent.items():
            returned = sum(part.numel() * part.itemsize for part in parts)  # the same on every rank
            self._returned[taken] = returned
            for part in parts:
                first, nbytes = pages_inside(part.data_ptr(), part.numel() * part.itemsize)
                if nbytes:
                    give_back_pages(first, nbytes)
            self._ledger.remove(TAKEN, returned)
        self._spent.clear()
        return self.held < before

    def _keep(self, kept: list[torch.Tensor]) -> None:
        gone = sum(each.numel() for each in self._free) - sum(each.numel() for each in kept)
        self._free = kept
        self._ledger.remove(KEPT, gone)
