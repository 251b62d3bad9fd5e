"""Tensors on their way out, piece by piece: from the stores of one rank, from several, or from memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import final

import torch

from outsize.checkpoint.joint import Cut
from outsize.checkpoint.reader import Masters
from outsize.move.memory import COPIED_NUMEL
from outsize.move.shard import DTYPES, MASTER, MASTER_BYTES, OWN_BYTES, StateArray, UnitShard
from outsize.move.transfer import Transfer
from outsize.plan.layout import PAGE_ELEMENTS, Slot

SLAB_BYTES = 4 << 20

JOINED_NUMEL = 1 << 19
"""Elements of a piece that ranks put together: with its master and page ends it fits a slab."""


class Piece(ABC):
    """Consecutive elements of one tensor on their way to a file."""

    @abstractmethod
    def begin(self, slab: torch.Tensor) -> None:
        """Start to read into `slab` (uint8 [SLAB_BYTES]), which is the piece's until its values have been used."""

    @abstractmethod
    def values(self) -> Iterator[torch.Tensor]:
        """The elements, 1-D, once they have arrived, in runs that are valid until the next one is asked for."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing touches the slab any more; raises nothing."""


TypedPiece = tuple[Piece, torch.dtype]
"""A piece and the dtype to store it as."""


@dataclass(frozen=True)
class NamedWeight:
    """One tensor of the export; `pieces` gives its elements in order, to be stored as `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Piece]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def parameter_pieces(shard: UnitShard, slot: Slot, dtype: torch.dtype, masters: Masters) -> Iterator[Piece]:
    """A parameter at rest; for another dtype than its own the values are those of its fp32 master, where it has one."""
    if not slot.numel:  # it may lie behind the last segment
        return
    master = shard.array(MASTER, slot) if dtype is not DTYPES[slot.dtype] else None
    element_bytes = OWN_BYTES[slot.dtype] + (MASTER_BYTES[slot.dtype] if master is not None else 0)
    numel = SLAB_BYTES // element_bytes // PAGE_ELEMENTS * PAGE_ELEMENTS
    for start in range(slot.offset // numel * numel, slot.end, numel):
        low, high = max(start, slot.offset), min(start + numel, slot.end)
        yield _ParameterPiece(shard, slot, low, high, master, masters)


@final
class _ParameterPiece(Piece):
    """The elements [low, high) of a unit's element space, which belong to `slot`."""

    def __init__(
        self, shard: UnitShard, slot: Slot, low: int, high: int, master: StateArray | None, masters: Masters
    ) -> None:
        self._shard, self._slot, self._low, self._high = shard, slot, low, high
        self._master, self._masters = master, masters
        self._transfers: list[Transfer] = []
        self._parts: list[torch.Tensor] = []  # the weight and, where there is one, what completes its master

    def begin(self, slab: torch.Tensor) -> None:
        shard = self._shard
        first_page, end_page = shard.pages(self._low, self._high)
        first, nbytes = shard.param_layout.span(first_page, end_page)
        read = shard.buffer.fetch if shard.params is None else shard.params.read
        at = shard.buffer_span(first_page, end_page)[0] if shard.params is None else first
        self._start(read, at, slab[:nbytes], DTYPES[self._slot.dtype], first_page)
        if self._master is not None:
            first, more = self._master.layout.span(first_page, end_page)
            rest = slab[nbytes : nbytes + more]
            self._start(self._master.store.read, first, rest, self._master.dtype(self._slot.dtype), first_page)

    def _start(
        self,
        read: Callable[[int, torch.Tensor], Transfer],
        first: int,
        out: torch.Tensor,
        dtype: torch.dtype,
        first_page: int,
    ) -> None:
        self._transfers.append(read(first, out))
        self._parts.append(out.view(dtype)[self._low - first_page : self._high - first_page])

    def values(self) -> Iterator[torch.Tensor]:
        for transfer in self._transfers:
            transfer.wait()
        if self._master is None:
            yield self._parts[0]
            return
        weight, rest = self._parts
        for own, more in zip(weight.split(COPIED_NUMEL), rest.split(COPIED_NUMEL), strict=True):
            yield self._masters.join(own, more)  # small enough for memory that is at hand

    def drain(self) -> None:
        drain_all(self._transfers)


Join = Callable[[torch.Tensor], torch.Tensor]
"""Adds up bytes (uint8) over ranks, in place; every rank calls it for the same piece."""


def joined_pieces(shard: UnitShard, name: str, dtype: torch.dtype, masters: Masters, join: Join) -> Iterator[Piece]:
    """As `parameter_pieces`, of a parameter that is split over ranks: every rank gets all elements."""
    slot, whole = shard.slots[name], shard.whole_slots[name]
    master = shard.array(MASTER, slot) if dtype is not DTYPES[slot.dtype] else None
    for start in range(0, whole.numel, JOINED_NUMEL):
        yield _JoinedPiece(shard, slot, start, min(start + JOINED_NUMEL, whole.numel), master, masters, join)


@final
class _JoinedPiece(Piece):
    """The elements [start, end) of a parameter, of which each rank has some or none."""

    def __init__(
        self,
        shard: UnitShard,
        slot: Slot,
        start: int,
        end: int,
        master: StateArray | None,
        masters: Masters,
        join: Join,
    ) -> None:
        self._start, self._numel, self._join = start, end - start, join
        self._dtype = DTYPES[slot.dtype] if master is None else torch.float32
        low, high = max(start, slot.first), min(end, slot.first + slot.numel)
        self._low = low
        shift = slot.offset - slot.first
        self._own = _ParameterPiece(shard, slot, shift + low, shift + high, master, masters) if low < high else None

    def begin(self, slab: torch.Tensor) -> None:
        if self._own is not None:
            self._own.begin(slab)

    def values(self) -> Iterator[torch.Tensor]:
        values = torch.zeros(self._numel, dtype=self._dtype, device="cpu")
        if self._own is not None:
            _fill(values, self._low - self._start, self._own.values())
        yield self._join(values.view(torch.uint8)).view(self._dtype)

    def drain(self) -> None:
        if self._own is not None:
            self._own.drain()


def _fill(out: torch.Tensor, at: int, runs: Iterator[torch.Tensor]) -> int:
    """Copy the runs behind each other into `out` (1-D) from element `at` on; returns where they end."""
    for run in runs:
        out[at : at + run.numel()] = run
        at += run.numel()
    return at


@final
@dataclass
class TensorPiece(Piece):
    """A parameter that tensor parallelism has split, in one piece. Memory: all of it, and this rank's part again."""

    pieces: Callable[[], Iterator[Piece]]
    """Those of this rank's part."""
    local: tuple[int, ...]
    """The shape of that part."""
    whole: tuple[int, ...]
    cut: Cut
    dtype: torch.dtype
    join: Join

    def begin(self, slab: torch.Tensor) -> None:
        self._slab = slab

    def values(self) -> Iterator[torch.Tensor]:
        own, at = torch.empty(prod(self.local), dtype=self.dtype, device="cpu"), 0
        for piece in self.pieces():
            piece.begin(self._slab)
            try:
                at = _fill(own, at, piece.values())
            finally:
                piece.drain()
        whole = torch.zeros(self.whole, dtype=self.dtype, device="cpu")
        whole.narrow(self.cut.dim, self.cut.first, self.cut.count).copy_(own.view(self.local))
        yield self.join(whole.view(-1).view(torch.uint8)).view(self.dtype)

    def drain(self) -> None:
        return


def buffer_pieces(value: torch.Tensor) -> Iterator[Piece]:
    """A tensor in memory. One that is not contiguous is copied once."""
    flat = value.detach().contiguous().view(-1)
    numel = SLAB_BYTES // flat.itemsize
    for start in range(0, flat.numel(), numel):
        yield _BufferPiece(flat[start : start + numel])


@final
class _BufferPiece(Piece):
    def __init__(self, content: torch.Tensor) -> None:
        self._content = content

    def begin(self, slab: torch.Tensor) -> None:
        return

    def values(self) -> Iterator[torch.Tensor]:
        yield self._content.cpu()

    def drain(self) -> None:
        return


def drain_all(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        with suppress(OSError):
            transfer.wait()
