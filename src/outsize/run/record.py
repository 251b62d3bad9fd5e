"""What one checkpointed call of a layer has saved and given, for its second forward to be held against."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch
from torch.utils._pytree import tree_flatten

from outsize.run.costs import Lease, Measurement
from outsize.run.selective import Counting


@final
class Record:
    """What the forwards of a checkpointed call saved. It lives as long as anything that the call saves."""

    def __init__(self, lease: Lease | None, measurement: Measurement | None, samples: bool) -> None:
        """`samples`: a second forward must give what the first one gives."""
        self.versions: list[int] = []  # of the tensors that a second one saved, in order, when it saved them
        self._lease = lease
        self._measurement = measurement
        self._samples = samples
        self._saved = 0  # tensors, by the first forward
        self._given: list[Sample] | None = None
        self.is_other = False  # whether the second forward has given something else than the first

    @property
    def compares(self) -> bool:
        """Whether a second forward is compared with the first one."""
        return self._given is not None

    def save(self, tensor: torch.Tensor) -> int:
        """An operation of the first forward saves this; its number."""
        if self._measurement is not None:
            self._measurement.save(tensor)
        self._saved += 1
        return self._saved - 1

    def forward(self, run: Callable[[], Any]) -> Any:
        if self._measurement is None:
            result = run()
        else:
            counting = Counting(self._measurement) if self._measurement.counts_products else nullcontext()
            with counting:
                result = self._measurement.forward(run)
        if self._samples:
            self._given = _samples(result)
        return result

    def again(self, run: Callable[[], Any]) -> Any:
        """The second forward. It may end by an exception: the last tensor that it saves may be all that is wanted. The
        first one may not be over: it may ask for a gradient inside."""
        self.versions.clear()
        result = run() if self._measurement is None else self._measurement.again(run)
        told_by_torch = len(self.versions) != self._saved  # it did other operations
        if self._given is not None and not told_by_torch:
            self.is_other = not _are_close(self._given, _samples(result))
        return result


SAMPLES = 64
"""Elements of each result of a layer that are compared."""

MOST_UNLIKE = SAMPLES // 20
"""Kernels of accelerators may round differently the second time, and then choose differently here and there."""


Sample = tuple[torch.Size, torch.Tensor]


def _samples(result: Any) -> list[Sample]:
    """The shape of each tensor of floating-point numbers, and copies of some of its elements."""
    found = []
    for each in tree_flatten(result)[0]:
        if type(each) is torch.Tensor and each.is_floating_point() and each.layout is torch.strided:
            flat = each.detach().reshape(-1)
            found.append((each.shape, flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES].clone()))
    return found


def _are_close(given: list[Sample], again: list[Sample]) -> bool:
    """Up to rounding."""
    for (shape, one), (other_shape, other) in zip(given, again, strict=False):
        if shape != other_shape or one.dtype != other.dtype:
            return False
        most = 1e-4 if one.dtype in (torch.float32, torch.float64) else 3e-2
        near = torch.isclose(one, other, rtol=most, atol=most * _mean_size(one), equal_nan=True)
        if int((~near).sum()) > MOST_UNLIKE:
            return False
    return len(given) == len(again)


def _mean_size(values: torch.Tensor) -> float:
    return float(values.float().abs().nan_to_num(posinf=0.0).mean()) if values.numel() else 0.0
