"""One parameter's entry in `optimizer.state` after `prepare`: a copy that refuses to be written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, final

import torch
from torch.utils._pytree import tree_map_only

from outsize.run.guard import TO_NUMPY

# Note [Copies that refuse writes]
# In torch an entry of `optimizer.state` is the state itself, and scripts write to it: `state[p]["step"] -= 1`,
# `state[p]["exp_avg"][rows] = 0`. Here an entry is a copy, so that such a write would be lost without a word. The
# tensors of an entry are therefore of a class each of whose operations looks whether it has written to one of them, by
# the count of writes that torch keeps for autograd. What an operation gives is a plain tensor, unless it shares their
# memory. A step changes no entry that was read before it. (DTensors have a class of their own, and are not watched.)


@final
class EntryTensor(torch.Tensor):
    """A tensor of an entry. See Note [Copies that refuse writes]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copies: list[torch.Tensor] = []

        def opened(tensor: EntryTensor) -> torch.Tensor:
            copies.append(plain(tensor))
            return copies[-1]

        def closed(result: torch.Tensor) -> torch.Tensor:
            return guarded(result) if any(_share_memory(result, each) for each in copies) else result

        if func == _SET_DATA and isinstance(args[0], EntryTensor):
            refuse_write()
        given, named = tree_map_only(EntryTensor, opened, (args, kwargs or {}))
        versions = list(map(_version, copies))
        result = func(*given, **named)
        if versions != list(map(_version, copies)):
            refuse_write()
        if func in TO_NUMPY:
            result.setflags(write=False)
        return tree_map_only(torch.Tensor, closed, result)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def guarded(value: Any) -> Any:
    """The value as an entry holds it."""
    return value.as_subclass(EntryTensor) if type(value) is torch.Tensor else value


def plain(value: Any) -> Any:
    """The value with the class that it has outside of entries; the memory is the same."""
    if not isinstance(value, EntryTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # torch does not count writes to what inference mode made


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def refuse_write(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "optimizer.state[param] is a copy after outsize.prepare, and a change of it would be lost: write the whole "
        "entry, `optimizer.state[param] = {**optimizer.state[param], key: value}` (a tensor of it changes as a "
        "`clone()`)"
    )


@final
class StateEntry(dict[str, Any]):
    """A copy of one parameter's state, which says so where another value is put in or a tensor of it is written to."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: guarded(value) for key, value in (values or {}).items()})

    def __setitem__(self, key: str, value: Any) -> None:
        known = self.get(key)
        if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.shape == known.shape:
            same = torch.equal(value.to(known.device, known.dtype), known)
        else:
            same = value is known
        if not same:
            refuse_write()

    __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = refuse_write

    def plain(self) -> dict[str, Any]:
        """What a state dict has of it."""
        return {key: plain(value) for key, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (self.plain(),)
