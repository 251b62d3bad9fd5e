"""With tensor parallelism every rank of a group has the input of a layer: each keeps a part until the backward.

ZeRO-R's partitioned activation checkpoints, P_a (Rajbhandari et al. 2020, section 5.1): the parts are gathered for the
layer's second forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch

from outsize.move.comm import Ranks
from outsize.run.saved import Hooks

LEAST_BYTES = 4096
"""What is smaller is kept whole."""


@final
class SplitInputs:
    """For the layers of a model whose `ranks` share each input."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._alike: dict[
            tuple[str, int], bool
        ] = {}  # by layer and number of an input: whether all ranks have the same

    def of_call(self, layer: str, inputs: Iterable[torch.Tensor], others: Hooks) -> Hooks:
        """The saved-tensor hooks of a call. Of its inputs those are split that the backward goes on with: what all
        layers get, a mask say, is there once. `others` get the parts, and what is not split."""
        split = {
            each.untyped_storage()._cdata
            for each in inputs
            if type(each) is torch.Tensor and each.requires_grad and each.is_floating_point()
        }

        numbers = itertools.count()

        def pack(tensor: torch.Tensor) -> Any:
            is_input = type(tensor) is torch.Tensor and tensor.is_floating_point()
            is_input = is_input and tensor.untyped_storage()._cdata in split
            if not is_input or not self._is_alike(layer, next(numbers), tensor) or tensor.nbytes < LEAST_BYTES:
                return None, others[0](tensor)
            return _Form(tensor.shape, _sum(tensor)), others[0](self._part_of(tensor))

        def unpack(packed: Any) -> torch.Tensor:
            form, content = packed
            found = others[1](content)
            return found if form is None else self._whole(layer, form, found)

        return pack, unpack

    def _is_alike(self, layer: str, number: int, tensor: torch.Tensor) -> bool:
        """Whether all ranks have these values: asked once for each input of a layer. Sizes must not decide whether to
        ask: they may differ between ranks."""
        key = layer, number
        if key not in self._alike:
            told = (str((key, tuple(tensor.shape), tensor.dtype)), int(_sum(tensor)))
            self._alike[key] = len(set(self._ranks.collect(told, "a layer's input"))) == 1
        return self._alike[key]

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part, as long as those of others."""
        share, flat = self._share(tensor.numel()), tensor.reshape(-1)
        part = flat[self._ranks.rank * share : (self._ranks.rank + 1) * share]
        return torch.nn.functional.pad(part, (0, share - part.numel())) if part.numel() < share else part.clone()

    def _share(self, numel: int) -> int:
        return -(-numel // self._ranks.size)

    def _whole(self, layer: str, form: _Form, part: torch.Tensor) -> torch.Tensor:
        flat = part.new_empty(part.numel() * self._ranks.size)
        flat[self._ranks.rank * part.numel() : (self._ranks.rank + 1) * part.numel()] = part
        self._ranks.all_gather(flat, self._ranks.turn_to_gather(-1, flat.numel())).wait()
        whole = flat[: form.shape.numel()].view(form.shape)
        if int(_sum(whole)) != int(form.sum):
            raise RuntimeError(
                f"the ranks of a tensor-parallel group had the same input for layer {layer} at first, and others "
                f"later. So each cannot keep a part of it: draw the same random numbers outside of layers on all of "
                f'them, or pass activations="keep"'
            )
        return whole


@final
@dataclass(frozen=True)
class _Form:
    """What a part is a part of."""

    shape: torch.Size
    sum: torch.Tensor


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of its elements taken for integers: equal values have equal sums."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
