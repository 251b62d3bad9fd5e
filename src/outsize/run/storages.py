"""The memory that tensors lie in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@final
class Storages:
    """Counts the bytes of memory that tensors lie in, each once."""

    def __init__(self, there_anyway: Iterable[torch.Tensor] = ()) -> None:
        self._seen: dict[int, StorageWeakRef] = {}  # as long as it is there, no other memory gets its number
        self.nbytes = 0
        for tensor in there_anyway:
            self.add(tensor)
        self.nbytes = 0

    def add(self, tensor: torch.Tensor) -> bool:
        """Whether it is new."""
        if tensor.layout is not torch.strided:
            self.nbytes += tensor.numel() * tensor.element_size()
            return True
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        is_new = self._seen.setdefault(reference.cdata, reference) is reference
        self.nbytes += storage.nbytes() if is_new else 0
        return is_new

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and StorageWeakRef(tensor.untyped_storage()).cdata in self._seen
