"""What an optimizer keeps of a table in place of arrays: one value a row, each with the rank that has the row."""

from __future__ import annotations

from typing import Any

import torch

from outsize.move.shard import UnitShard


def own_rows(shard: UnitShard, name: str, key: str) -> slice | None:
    """Which of the optimizer's values `key` rest here, where it has one for each row; None of any other value."""
    if key not in shard.row_values:
        return None
    slot, whole = shard.slots[name], shard.whole_slots[name]
    width = whole.numel // whole.shape[0]
    return slice(slot.first // width, (slot.first + slot.numel) // width)


def own_value(shard: UnitShard, name: str, key: str, value: Any) -> Any:
    """What rests here of an optimizer's value that is no array: given are all of it, or this."""
    rows = own_rows(shard, name, key)
    if rows is None or not isinstance(value, torch.Tensor) or value.numel() != shard.whole_slots[name].shape[0]:
        return value
    return value.detach().reshape(-1)[rows].cpu()
