"""The weights of a checkpoint as an export wants them, without a live model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from outsize.checkpoint.files import DataReader
from outsize.checkpoint.manifest import Manifest, ParameterRecord
from outsize.formats.pieces import Arriving, NamedWeight, Piece
from outsize.optim.rules import join_master

PIECE_NUMEL = 1 << 20


def stored_weights(manifest: Manifest, data: DataReader, dtype: torch.dtype | None) -> list[NamedWeight]:
    """Every parameter and persistent buffer, in `dtype` or its own; in another one it comes from the master."""
    records = dict(manifest.parameters)
    records |= {name: ParameterRecord({"weight": manifest.buffers[name]}) for name in manifest.persistent}
    found = []
    for name, record in records.items():
        # The option is for floating-point values; parameters are no others.
        out = dtype if dtype is not None and record.dtype.is_floating_point else record.dtype
        found.append(NamedWeight(name, record.shape, out, partial(_pieces, data, record, out)))
    return found


def _pieces(data: DataReader, record: ParameterRecord, out: torch.dtype) -> Iterator[Piece]:
    master = record.master if out is not record.dtype else None

    def values(start: int) -> Iterator[torch.Tensor]:
        end = min(start + PIECE_NUMEL, record.weight.numel)
        weight = data.read(record.weight, start, end)
        yield weight if master is None else join_master(weight, data.read(master, start, end))

    for start in range(0, record.weight.numel, PIECE_NUMEL):
        yield lambda slab, start=start: Arriving(partial(values, start))  # type: ignore[misc]
