"""A part of an accelerator's memory for what layers keep from the forward to the backward.

What is kept long lies between things that are freed soon, and cuts the memory into pieces. In a pool of its own it does
not (ZeRO-R's memory defragmentation, M_D; Rajbhandari et al. 2020, section 5.3). The pool is torch's: `MemPool`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch

from outsize.move.storages import MadeOf

LEAST_BYTES = 1 << 20
"""torch takes what is smaller from segments for small things."""


@final
class Pool:
    """Copies of the inputs of layers."""

    def __init__(self, device: torch.device, inside: Callable[[], AbstractContextManager[None]]) -> None:
        """`inside`: a block in which what the thread allocates comes from the pool."""
        self._device, self._inside = device, inside
        self._copies: MadeOf[torch.Tensor] = MadeOf()

    def of_call(self, inputs: Iterable[torch.Tensor]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """The saved-tensor hooks of a call of a layer. They copy those of its inputs that earlier layers have made.

        Nobody else has such an input when the layer is over. Masks and positions are there all the time.
        """
        made = {each.untyped_storage()._cdata for each in inputs if self._is_ours(each) and each.requires_grad}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not self._is_ours(tensor) or tensor.untyped_storage()._cdata not in made:
                return tensor
            return self._copy(tensor)

        return pack, lambda packed: packed

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == self._device
        return plain and tensor.nbytes >= LEAST_BYTES

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """One for all calls that keep the tensor."""

        def copy() -> torch.Tensor:
            with self._inside():
                return tensor.clone()

        place = tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride()
        return self._copies.get(tensor, place, copy)


def open_pool(device: torch.device) -> Pool | None:
    """None where the device has no such pools, or has memory whose segments grow, which torch may not allow in one."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "MemPool"):
        return None
    try:
        # Another allocation may take the pool's free memory, before it fails.
        with module.device(device):
            inside = partial(module.use_mem_pool, module.MemPool(use_on_oom=True), device)
        with inside():
            torch.empty(1, device=device)
    except (RuntimeError, TypeError):
        return None
    return Pool(device, inside)
