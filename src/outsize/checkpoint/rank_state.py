"""What each rank has of its own in a checkpoint: buffers, random numbers, `extra` and the modules' extra states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, final

import torch

from outsize.checkpoint.files import PlannedFile
from outsize.checkpoint.peers import name_of_rank
from outsize.checkpoint.regions import Region
from outsize.checkpoint.values import DTYPE_NAMES, encode

MODEL_FILE = "model.bin"
Buffers = Mapping[str, tuple[torch.Tensor, bool]]
"""The values of buffers by name, and whether each is persistent."""


@final
class RankState:
    """The values of one rank, encoded, and the file that their tensors go to."""

    def __init__(self, rank: int, extra: Any, extra_states: Mapping[str, Any]) -> None:
        """Raises `TypeError` or `ValueError` for what cannot be saved, with its place."""
        self.file = PlannedFile(name_of_rank(MODEL_FILE, rank))
        self.buffers: dict[str, Region] = {}
        self.first: Mapping[str, Region] = {}
        """Of the buffers, those that no rank before it has."""
        self.persistent: list[str] = []
        self._rng: Any = None
        self._extra = encode(extra, "extra", self.file.kept)
        self._states = {name: encode(state, name, self.file.kept) for name, state in extra_states.items()}

    def add(self, buffers: Buffers, first: Collection[str], rng: Any) -> None:
        """`buffers`: those of which no rank before it has the same values; `first`: those of them that none has."""
        kept = {name: self.file.keep(value) for name, (value, _) in buffers.items()}
        self.first = {name: region for name, region in kept.items() if name in first}
        self.buffers = {name: region for name, region in kept.items() if name not in first}
        self.persistent = [name for name in self.first if buffers[name][1]]
        self._rng = encode(rng, "the states of the random number generators", self.file.kept)

    def to_json(self) -> dict[str, Any]:
        buffers = {name: region.to_json() for name, region in self.buffers.items()}
        return {"rng": self._rng, "extra": self._extra, "extra_states": self._states, "buffers": buffers}


def check_buffers(buffers: Buffers) -> None:
    """Raise `TypeError` for a buffer that no checkpoint can hold."""
    for name, (value, _) in buffers.items():
        if not can_hold(value):
            raise TypeError(
                f"buffer {name!r} is a {value.layout} tensor of {value.dtype}; it cannot be saved. Register it with "
                f"persistent=False, which leaves it out, or register what it is made of"
            )


def can_hold(buffer: torch.Tensor) -> bool:
    """Whether a checkpoint can."""
    return buffer.layout is torch.strided and buffer.dtype in DTYPE_NAMES
