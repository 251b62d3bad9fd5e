"""A tensor that stands for values which are not computed, or not read, until an operation needs them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class Placeholder(torch.Tensor):
    """It has a shape, a dtype and a device. `late` runs what needs no values; all else gets the `values`.

    A custom autograd function takes it past all of this, and gives it a gradient: so it must be in the graph.
    """

    @abstractmethod
    def values(self) -> torch.Tensor:
        """What it stands for."""

    @classmethod
    @abstractmethod
    def late(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation on placeholders that takes no values; `NotImplemented` where it takes some."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = cls.late(func, args, kwargs)
        if found is not NotImplemented:
            return found
        args, kwargs = tree_map_only(Placeholder, lambda each: each.values(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Placeholder, lambda each: each.values(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.values().__deepcopy__(memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(size={tuple(self.shape)}, dtype={self.dtype})"


_PROPERTIES = "shape dtype device layout requires_grad ndim itemsize nbytes is_cpu is_cuda"
_METHODS = "size dim numel nelement stride element_size is_floating_point __len__ ndimension get_device"
METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    torch.is_floating_point,
    torch.numel,
}
"""What is known without the values."""
