"""Saved masks as bits, and saved indices no wider than they need: the backward gets the same values (Gist).

Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", section 3, without its lossy part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch

from outsize.move.storages import MadeOf, Storages
from outsize.run.saved import Hooks, refusing_writes

LEAST_BYTES = 64 << 10
"""What is smaller is not worth the calls."""

_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, as one number: its highest byte has their bits, the first byte's lowest."""

_WIDTHS = (torch.uint8, torch.int16, torch.int32)


@final
@dataclass(frozen=True)
class Packed:
    """The values of a contiguous tensor."""

    values: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensor(self) -> torch.Tensor:
        if self.dtype is not torch.bool:
            return self.values.to(self.dtype).view(self.shape)
        eight = _eights(self.values.device).index_select(0, self.values.int())
        return eight.view(torch.uint8)[: self.shape.numel()].view(torch.bool).view(self.shape)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether it is a large mask, or indices, alone in its memory."""
    if tensor.dtype not in (torch.bool, torch.int64) or type(tensor) is not torch.Tensor or tensor.is_nested:
        return False
    if tensor.dtype is torch.int64 and tensor.device.type != "cpu":  # to look at its values would wait for the device
        return False
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < LEAST_BYTES or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return tensor.untyped_storage().nbytes() == nbytes


def packed(tensor: torch.Tensor) -> Packed | None:
    """The values of a mask or of indices in fewer bytes; None for a tensor that stays as it is."""
    if not _is_simple(tensor):
        return None
    if tensor.dtype is torch.bool:
        flat = torch.nn.functional.pad(tensor.view(torch.uint8).view(-1), (0, -tensor.numel() % 8))
        return Packed(((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8), tensor.shape, tensor.dtype)
    least, most = (int(each) for each in tensor.aminmax())
    for dtype in _WIDTHS:
        limits = torch.iinfo(dtype)
        if limits.min <= least and most <= limits.max:
            return Packed(tensor.to(dtype), tensor.shape, tensor.dtype)
    return None


_known: dict[torch.device, torch.Tensor] = {}


def _eights(device: torch.device) -> torch.Tensor:
    """By eight bits the eight bytes, as one number each."""
    if device not in _known:
        bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
        _known[device] = bits.to(torch.uint8).view(torch.int64).view(-1).to(device)
    return _known[device]


@final
class Packing:
    """Saved-tensor hooks of one call. What is there anyway stays as it is; what is saved twice is packed once."""

    def __init__(self, there_anyway: Iterable[torch.Tensor]) -> None:
        self._there = Storages(there_anyway)
        self._done: MadeOf[Packed | None] = MadeOf()

    @property
    def hooks(self) -> Hooks:
        return refusing_writes((self._pack, _unpack))

    def _pack(self, tensor: torch.Tensor) -> Packed | torch.Tensor:
        found = None
        if _is_simple(tensor) and tensor not in self._there:
            found = self._done.get(tensor, (tensor.shape, tensor.dtype), lambda: packed(tensor))
        return tensor if found is None else found


def _unpack(content: Packed | torch.Tensor) -> torch.Tensor:
    return content.tensor if isinstance(content, Packed) else content
