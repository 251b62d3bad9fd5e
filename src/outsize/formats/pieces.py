"""Tensors on their way out, piece by piece: from the stores of one rank or several, a checkpoint, or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import final

import torch

from outsize.checkpoint.files import DataReader
from outsize.checkpoint.manifest import Manifest, ParameterRecord
from outsize.checkpoint.peers import Cut
from outsize.move.memory import COPIED_NUMEL
from outsize.move.shard import StateArray, UnitShard
from outsize.move.store import DTYPES, MASTER, MASTER_BYTES, OWN_BYTES
from outsize.move.transfer import Transfer
from outsize.optim.rules import join_master
from outsize.plan.layout import PAGE_ELEMENTS, Slot, page_range

SLAB_BYTES = 4 << 20

JOINED_NUMEL = 1 << 19
"""Elements of a piece that ranks put together: with its master and page ends it fits a slab."""

Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class Arriving:
    """Consecutive elements of one tensor, whose reads have started."""

    runs: Callable[[], Iterator[torch.Tensor]]
    """Wait for the elements and give them, 1-D, in runs that are valid until the next one is asked for."""
    transfers: Sequence[Transfer] = ()
    """What touches the slab."""


Piece = Callable[[torch.Tensor], Arriving]
"""Starts to read into a slab (uint8 [SLAB_BYTES]), which is the piece's until its values have been used."""


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


def parameter_pieces(shard: UnitShard, slot: Slot, dtype: torch.dtype) -> Iterator[Piece]:
    """A parameter at rest; for another dtype than its own the values are those of its fp32 master, where it has one."""
    if not slot.numel:  # it may lie behind the last segment
        return
    master = shard.array(MASTER, slot) if dtype is not DTYPES[slot.dtype] else None
    element_bytes = OWN_BYTES[slot.dtype] + (MASTER_BYTES[slot.dtype] if master is not None else 0)
    numel = SLAB_BYTES // element_bytes // PAGE_ELEMENTS * PAGE_ELEMENTS
    for start in range(slot.offset // numel * numel, slot.end, numel):
        low, high = max(start, slot.offset), min(start + numel, slot.end)
        yield partial(_read, shard, slot, low, high, master)


def _read(
    shard: UnitShard,
    slot: Slot,
    low: int,
    high: int,
    master: StateArray | None,
    slab: torch.Tensor,
) -> Arriving:
    """The elements [low, high) of a unit's element space, which belong to `slot`."""
    first_page, end_page = page_range(low, high)
    first, nbytes = shard.param_layout.span(first_page, end_page)
    own = slab[:nbytes]
    if shard.params is None:
        transfers = [shard.buffer.read(shard.buffer_span(first_page, end_page)[0], own)]
    else:
        transfers = [shard.params.read(first, own)]
    weight = own.view(DTYPES[slot.dtype])[low - first_page : high - first_page]
    if master is None:
        return Arriving(lambda: _waited(transfers, iter((weight,))), transfers)
    first, more = master.layout.span(first_page, end_page)
    completing = slab[nbytes : nbytes + more]
    try:
        transfers.append(master.store.read(first, completing))
    except BaseException:
        drain_all(transfers)
        raise
    rest = completing.view(master.dtype(slot.dtype))[low - first_page : high - first_page]
    parts = zip(weight.split(COPIED_NUMEL), rest.split(COPIED_NUMEL), strict=True)  # small enough for memory at hand
    return Arriving(lambda: _waited(transfers, (join_master(*part) for part in parts)), transfers)


def _waited(transfers: Iterable[Transfer], runs: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    for transfer in transfers:
        transfer.wait()
    yield from runs


Join = Callable[[torch.Tensor], torch.Tensor]
"""Adds up bytes (uint8) over ranks, in place; every rank calls it for the same piece."""


def joined_pieces(shard: UnitShard, name: str, dtype: torch.dtype, join: Join) -> Iterator[Piece]:
    """As `parameter_pieces`, of a parameter that is split over ranks: every rank gets all elements."""
    slot, whole = shard.slots[name], shard.whole_slots[name]
    master = shard.array(MASTER, slot) if dtype is not DTYPES[slot.dtype] else None
    stored = DTYPES[slot.dtype] if master is None else torch.float32
    shift = slot.offset - slot.first
    for start in range(0, whole.numel, JOINED_NUMEL):
        end = min(start + JOINED_NUMEL, whole.numel)
        low, high = max(start, slot.first), min(end, slot.first + slot.numel)
        own = partial(_read, shard, slot, shift + low, shift + high, master) if low < high else _nothing
        yield partial(_read_joined, own, low - start, end - start, stored, join)


def _nothing(slab: torch.Tensor) -> Arriving:
    return Arriving(lambda: iter(()))


def _read_joined(own: Piece, at: int, numel: int, dtype: torch.dtype, join: Join, slab: torch.Tensor) -> Arriving:
    """`numel` elements, of which this rank has those of `own`, from `at` on."""
    arriving = own(slab)

    def runs() -> Iterator[torch.Tensor]:
        values = torch.zeros(numel, dtype=dtype, device="cpu")
        _fill(values, at, arriving.runs())
        yield join(values.view(torch.uint8)).view(dtype)

    return Arriving(runs, arriving.transfers)


def _fill(out: torch.Tensor, at: int, runs: Iterator[torch.Tensor]) -> int:
    """Copy the runs behind each other into `out` (1-D) from element `at` on; returns where they end."""
    for run in runs:
        out[at : at + run.numel()] = run
        at += run.numel()
    return at


def fill(out: torch.Tensor, pieces: Iterable[Piece], slab: torch.Tensor) -> None:
    """Copy all elements into `out` (1-D), one piece after the other."""
    at = 0
    for piece in pieces:
        arriving = piece(slab)
        try:
            at = _fill(out, at, arriving.runs())
        finally:
            drain_all(arriving.transfers)


def tensor_pieces(
    pieces: Callable[[], Iterator[Piece]], part: Shape, whole: Shape, cut: Cut, dtype: torch.dtype, join: Join
) -> Iterator[Piece]:
    """A parameter that tensor parallelism has split, in one piece. Memory: all of it, and this rank's part again.

    Args:
        pieces: those of this rank's part, which has the shape `part`.
    """

    def runs(slab: torch.Tensor) -> Iterator[torch.Tensor]:
        own = torch.empty(prod(part), dtype=dtype, device="cpu")
        fill(own, pieces(), slab)
        values = torch.zeros(whole, dtype=dtype, device="cpu")
        values.narrow(cut.dim, cut.first, cut.count).copy_(own.view(part))
        yield join(values.view(-1).view(torch.uint8)).view(dtype)

    yield lambda slab: Arriving(lambda: runs(slab))


def state_pieces(shard: UnitShard, array: StateArray, slot: Slot) -> Iterator[Piece]:
    """The values of an optimizer array that belong to a parameter."""
    for start in range(slot.offset, slot.end, JOINED_NUMEL):
        end = min(start + JOINED_NUMEL, slot.end)
        yield partial(_at_once, partial(shard.read_array, array, start, end))


def buffer_pieces(value: torch.Tensor) -> Iterator[Piece]:
    """A tensor in memory. One that is not contiguous is copied once."""
    flat = value.detach().contiguous().view(-1)
    for part in flat.split(SLAB_BYTES // flat.itemsize) if flat.numel() else ():
        yield partial(_at_once, part.cpu)


def _at_once(read: Callable[[], torch.Tensor], slab: torch.Tensor) -> Arriving:
    return Arriving(lambda: iter((read(),)))


def drain_all(transfers: Iterable[Transfer]) -> None:
    """Wait until nothing touches the slab any more; raises nothing."""
    for transfer in transfers:
        with suppress(OSError):
            transfer.wait()


def stored_weights(manifest: Manifest, data: DataReader, dtype: torch.dtype | None) -> list[NamedWeight]:
    """Every parameter and persistent buffer, in `dtype` or its own; in another one it comes from the master."""
    records = dict(manifest.parameters)
    records |= {name: ParameterRecord({"weight": manifest.buffers[name]}) for name in manifest.persistent}
    found = []
    for name, record in records.items():
        # The option is for floating-point values; parameters are no others.
        out = dtype if dtype is not None and record.dtype.is_floating_point else record.dtype
        found.append(NamedWeight(name, record.shape, out, partial(_record_pieces, data, record, out)))
    return found


def _record_pieces(data: DataReader, record: ParameterRecord, out: torch.dtype) -> Iterator[Piece]:
    master = record.master if out is not record.dtype else None

    def values(start: int, end: int) -> torch.Tensor:
        weight = data.read(record.weight, start, end)
        return weight if master is None else join_master(weight, data.read(master, start, end))

    numel = record.weight.numel
    for start in range(0, numel, JOINED_NUMEL):
        yield partial(_at_once, partial(values, start, min(start + JOINED_NUMEL, numel)))
