"""Tensors on their way out, as arrays that are read in ranges: from one rank or several, a checkpoint, or memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from outsize.checkpoint.arrays import RUN_NUMEL, Readable
from outsize.checkpoint.files import DataReader, host_copy
from outsize.checkpoint.manifest import Manifest, ParameterRecord
from outsize.checkpoint.peers import Cut
from outsize.move.shard import StateArray, UnitShard
from outsize.move.store import DTYPES, MASTER
from outsize.optim.rules import join_master
from outsize.planning.layout import Slot

EXPORT_NUMEL = 1 << 22
"""Elements of one read of what rests: a drive is busy with one large request, not with one small one."""

Join = Callable[[torch.Tensor], torch.Tensor]
"""Adds up bytes (uint8) over ranks, in place; every rank calls it for the same range."""


def parameter_at_rest(shard: UnitShard, name: str, dtype: torch.dtype) -> Readable:
    """What rests here of a parameter; in another dtype than its own the values of its fp32 master, where it has one."""
    slot = shard.slots[name]
    master = shard.array(MASTER, slot) if dtype is not DTYPES[slot.dtype] else None

    def read(start: int, end: int) -> torch.Tensor:
        values = shard.read_weight(name, start, end)
        if master is not None:
            values = join_master(values, shard.read_array(master, slot.offset + start, slot.offset + end))
        return values.to(dtype)

    return Readable(slot.shape, dtype, read, EXPORT_NUMEL)


def of_ranks(
    own: Readable | None, first: int, shape: tuple[int, ...], dtype: torch.dtype, run: int, join: Join
) -> Readable:
    """An array of which this rank has its `own` elements from `first` on, or none: each rank reads the same ranges, and
    gets all elements."""

    def read(start: int, end: int) -> torch.Tensor:
        values = torch.zeros(end - start, dtype=dtype, device="cpu")
        low, high = max(start, first), min(end, first + (0 if own is None else own.numel))
        if own is not None and low < high:
            values[low - start : high - start] = own.read(low - first, high - first)
        return join(values.view(torch.uint8)).view(dtype)

    return Readable(shape, dtype, read, run)


def tensor_parallel_parameter(own: Readable, shape: tuple[int, ...], cut: Cut, join: Join) -> Readable:
    """A parameter that tensor parallelism has split, in one run. Memory: all of it, and this rank's part again.

    Args:
        own: this rank's part.
        shape: of the whole parameter.
    """

    def read(start: int, end: int) -> torch.Tensor:
        values = torch.zeros(shape, dtype=own.dtype, device="cpu")
        values.narrow(cut.dim, cut.first, cut.count).copy_(own.whole())
        return join(values.view(-1).view(torch.uint8)).view(own.dtype)

    return Readable(shape, own.dtype, read, run=max(prod(shape), 1))


def state_at_rest(shard: UnitShard, array: StateArray, slot: Slot) -> Readable:
    """The values of an optimizer array that belong to a parameter."""

    def read(start: int, end: int) -> torch.Tensor:
        return shard.read_array(array, slot.offset + start, slot.offset + end)

    return Readable(slot.shape, array.value_dtype(slot.dtype), read, EXPORT_NUMEL)


def in_memory(value: torch.Tensor, dtype: torch.dtype) -> Readable:
    """A tensor in memory. One that is not contiguous is copied once."""
    run = RUN_NUMEL if value.is_contiguous() else max(value.numel(), 1)
    return Readable(
        tuple(value.shape), dtype, lambda start, end: host_copy(value.reshape(-1)[start:end]).to(dtype), run
    )


def stored_weights(manifest: Manifest, data: DataReader, dtype: torch.dtype | None) -> dict[str, Readable]:
    """Every parameter and persistent buffer, in `dtype` or its own; in another one it comes from the master."""
    records = dict(manifest.parameters)
    records |= {name: ParameterRecord({"weight": manifest.buffers[name]}) for name in manifest.persistent}
    return {name: _stored(data, record, dtype) for name, record in records.items()}


def _stored(data: DataReader, record: ParameterRecord, dtype: torch.dtype | None) -> Readable:
    # The option is for floating-point values; parameters are no others.
    out = dtype if dtype is not None and record.dtype.is_floating_point else record.dtype
    values = data.readable(record.weight) if out is record.dtype else data.exact(record)
    return Readable(record.shape, out, lambda start, end: values.read(start, end).to(out), EXPORT_NUMEL)
