"""What a rule is: the update of one parameter's piece, given its state. Rules know nothing of tiers or chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from outsize import _native
from outsize.move.gradients import GradOps
from outsize.move.shard import SlotState


@dataclass
class Piece:
    """A run of elements of one parameter with all that the update needs; every tensor is 1-D of the same length.

    `param` is in the parameter's own dtype and is updated in place; `master` completes it to its fp32 master: the int16
    remainder of a bf16 parameter, the fp32 master of an fp16 one. `states` are in fp32 (fp64 for an fp64 parameter), or
    8-bit codes for the arrays that have `scales` (fp32, one for each block); `grad` is as it rests, `ops` not applied.
    Where the rule wants whole parameters, the tensors have the parameter's shape.
    """

    param: torch.Tensor
    master: torch.Tensor | None
    states: dict[str, torch.Tensor]
    grad: torch.Tensor
    ops: GradOps
    hyper: dict[str, object]
    state: SlotState
    threads: int = 1
    scales: dict[str, torch.Tensor] = field(default_factory=dict)


class Rule(ABC):
    """One optimizer's arithmetic."""

    arrays: tuple[str, ...]
    """The names of the per-element arrays, as in `torch.optim`'s state."""

    codes: ClassVar[dict[str, Literal["signed", "root"]]] = {}
    """The arrays that may rest as 8-bit codes, and how. See Note [Compact]."""

    whole: bool = False
    """Whether the update needs whole parameters, in their shape."""

    @abstractmethod
    def apply(self, piece: Piece) -> None:
        """Update the piece in place and set `piece.state.next_scalars`."""


def number(value: object) -> float:
    """A hyper-parameter as a float; torch admits tensors for some."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]


# Note [The 16-bit remainder]
# bits(master) = (bits(bf16) << 16) + remainder with remainder in [-2**15, 2**15): the bf16 value is the master rounded
# to nearest, ties up in bits. Both directions are exact, so the fp32 master costs two bytes beside the bf16 weight.


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its remainder. See Note [The 16-bit remainder]."""
    if param.device.type == "cpu":
        master = torch.empty(param.numel(), dtype=torch.float32)
        _native.join_master(param.data_ptr(), remainder.data_ptr(), master.data_ptr(), param.numel())
        return master
    bits = (param.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def split_master(master: torch.Tensor, param: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write the fp32 `master` into a bf16 parameter and its remainder. See Note [The 16-bit remainder]."""
    if param.device.type == "cpu":
        held = master.contiguous()
        _native.split_master(held.data_ptr(), param.data_ptr(), remainder.data_ptr(), param.numel())
        return
    bits = master.contiguous().view(torch.int32)
    high = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int32)
    param.copy_(high.to(torch.int16).view(torch.bfloat16))
    remainder.copy_((bits.to(torch.int64) - (high.to(torch.int64) << 16)).to(torch.int16))
