"""What was made of tensors, found again for as long as they have the same bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


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
