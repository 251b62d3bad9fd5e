"""The memory that tensors lie in: its bytes counted once, and what was made of it found again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


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


@final
class MadeOf(Generic[T]):
    """Looks at both weakly: neither the tensor's storage nor what was made of it is kept alive."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Any, T] = weakref.WeakValueDictionary()
        self._storages: dict[Any, StorageWeakRef] = {}  # another storage may get the number of one that is gone

    def get(self, tensor: torch.Tensor, place: Any, make: Callable[[], T]) -> T:
        """What was made of the tensor's storage before, at this `place` in it and with these values; else `make()`."""
        for key in [key for key in self._storages if key not in self._made]:
            del self._storages[key]
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, place)
        found = self._made.get(key)
        if found is not None and not self._storages[key].expired():
            return found
        made = make()
        if made is not None:
            self._made[key], self._storages[key] = made, StorageWeakRef(storage)
        return made
