"""The weights of a checkpoint as an export wants them, without a live model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import final

import torch

from outsize.checkpoint.files import DataReader
from outsize.checkpoint.manifest import Manifest, ParameterRecord
from outsize.checkpoint.reader import Masters
from outsize.formats.pieces import NamedWeight, Piece
from outsize.formats.weights import DTYPE_NAMES

PIECE_NUMEL = 1 << 20


def stored_weights(
    manifest: Manifest, data: DataReader, masters: Masters, dtype: torch.dtype | None
) -> list[NamedWeight]:
    """Every parameter and persistent buffer, in `dtype` or its own; another dtype than its own comes from the master.

    Raises `TypeError` for one that safetensors cannot store.
    """
    found = []
    for name, record in manifest.parameters.items():
        out = dtype or record.dtype
        found.append(NamedWeight(name, record.shape, out, partial(_pieces, data, record, masters, out)))
    for name, buffer in manifest.buffers.items():
        if buffer.persistent:
            own = buffer.region.dtype
            out = dtype if dtype is not None and own.is_floating_point else own
            record = ParameterRecord(buffer.region)
            found.append(NamedWeight(name, record.shape, out, partial(_pieces, data, record, masters, out)))
    for weight in found:
        if weight.dtype not in DTYPE_NAMES:
            raise TypeError(f"{weight.name!r} is of {weight.dtype}, which safetensors cannot store")
    return found


def _pieces(data: DataReader, record: ParameterRecord, masters: Masters, out: torch.dtype) -> Iterator[Piece]:
    for start in range(0, record.weight.numel, PIECE_NUMEL):
        yield _StoredPiece(data, record, start, min(start + PIECE_NUMEL, record.weight.numel), masters, out)


@final
class _StoredPiece(Piece):
    def __init__(
        self, data: DataReader, record: ParameterRecord, start: int, end: int, masters: Masters, out: torch.dtype
    ) -> None:
        self._data, self._record, self._masters = data, record, masters
        self._range = start, end
        self._exact = out is not record.dtype

    def begin(self, slab: torch.Tensor) -> None:
        return

    def values(self) -> Iterator[torch.Tensor]:
        weight = self._data.read(self._record.weight, *self._range)
        master = self._record.master
        if self._exact and master is not None:
            weight = self._masters.join(weight, self._data.read(master, *self._range))
        yield weight

    def drain(self) -> None:
        return
