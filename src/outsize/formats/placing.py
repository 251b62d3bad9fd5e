"""Weights of any folder into a live unit: in the live dtype, with what completes their masters."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, Weights, copy_in
from outsize.checkpoint.reader import Masters
from outsize.move.memory import HostBuffer
from outsize.move.shard import DTYPES, MASTER, MASTER_DTYPE, UnitShard
from outsize.plan.layout import Slot

Stored = Callable[[str, int, int], torch.Tensor]
"""The elements [start, end) of a parameter, 1-D, in the folder's dtype; valid until the next call."""


def place_weights(shard: UnitShard, names: Container[str], stored: Stored, masters: Masters) -> None:
    """Place the settled unit's parameters that are in `names`. Others keep their values. Memory: a slab and a piece.

    A 16-bit parameter with an fp32 master takes the stored values as its master, exactly.
    """
    slab = HostBuffer(SLAB_BYTES)
    known = {name: slot for name, slot in shard.slots.items() if name in names}
    halves = {name: slot for name, slot in known.items() if shard.array(MASTER, slot)}
    keep = len(known) < len(shard.slots)

    def split(values: torch.Tensor, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.empty_like(values, dtype=DTYPES[slot.dtype])
        rest = torch.empty_like(values, dtype=MASTER_DTYPE[slot.dtype])
        masters.split(values.float(), weight, rest)
        return weight, rest

    def weight(slot: Slot, start: int, end: int) -> torch.Tensor:
        values, live = stored(slot.name, start, end), DTYPES[slot.dtype]
        return values.to(live) if values.dtype is live or slot.name not in halves else split(values, slot)[0]

    def rest(slot: Slot, start: int, end: int) -> torch.Tensor:
        return split(stored(slot.name, start, end), slot)[1]

    copy_in(Weights(shard), known, slab, weight, keep)
    if halves:
        copy_in(States(shard, shard.arrays[MASTER]), halves, slab, rest, keep)
