"""Parameters that wrap several plain tensors, as torchao's quantized weights do: units know the tensors inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outsize.run.local import is_distributed
from outsize.run.placeholder import Placeholder

# Note [Wrappers]
# torchao keeps the codes, scales and zero points of a quantized weight behind one parameter: a wrapper, which has no
# bytes of its own. To the units the tensors inside are frozen parameters, each with its own dtype. Their names are
# those of the parameter and of the attribute ("0.weight.qdata"). So they rest, move and are saved as they are packed.
#
# The wrapper stays the user's parameter, of its own class. Only its attributes change. While a unit is open they are
# plain views of the gathered buffer, and torchao computes with them as it does without outsize. Else they are
# placeholders, whose values pass the gate. A wrapper's methods use them above `__torch_function__` and below it, so a
# placeholder is met on both ways.


@final
class AtRest(Placeholder):
    """Stands in a wrapper for one of its tensors, while the unit of that tensor is closed."""

    tensor: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> AtRest:
        with torch._C.DisableTorchFunctionSubclass():
            shape, strides = tensor.shape, tensor.stride()
            made: Any = torch.Tensor._make_wrapper_subclass(
                AtRest, shape, strides=strides, dtype=tensor.dtype, device=tensor.device
            )
        made.tensor = tensor
        return made  # type: ignore[no-any-return]

    def values(self) -> torch.Tensor:
        return self.tensor  # each of its operations passes the gate

    @classmethod
    def late(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return AtRest.of(args[0].tensor) if func in _ALIASES else NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:  # a state dict lists values that are at rest
            return AtRest.of(args[0].tensor)
        with torch._C._EnableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor.detach().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return repr(self)


_ALIASES = {torch.Tensor.detach, torch.ops.aten.detach.default, torch.ops.aten.alias.default}


@final
class Inner:
    """One plain tensor inside a wrapper."""

    def __init__(self, owner: torch.Tensor, attribute: str, tensor: torch.Tensor) -> None:
        self.owner, self.attribute, self.tensor = owner, attribute, tensor
        self._kind = type(tensor)
        self._at_rest: AtRest | None = None

    def show(self) -> None:
        """The wrapper has the values, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            setattr(self.owner, self.attribute, self.tensor.detach())

    def hide(self) -> None:
        """The values may go: uses of them pass the gate."""
        if self._at_rest is None:
            self._at_rest = AtRest.of(self.tensor)
        setattr(self.owner, self.attribute, self._at_rest)

    def give_back(self) -> None:
        """The tensor is a plain one again: the wrapper has it back."""
        self.tensor.__class__ = self._kind
        setattr(self.owner, self.attribute, self.tensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor wraps others. A DTensor is handled by its local part: see run/local.py."""
    return type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor) and not is_distributed(tensor)


def inside(name: str, wrapper: torch.Tensor) -> Iterator[tuple[str, Inner]]:
    """The plain tensors inside a wrapper, by their names."""
    shown: Any = wrapper
    for attribute in shown.__tensor_flatten__()[0]:
        own, found = f"{name}.{attribute}", getattr(wrapper, attribute)
        if is_wrapper(found):
            yield from inside(own, found)
        else:
            yield own, Inner(wrapper, attribute, found.tensor if isinstance(found, AtRest) else found)


def known_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters()`: what units know as parameters. In place of a wrapper it has what is inside."""
    seen: set[int] = set()
    for name, param in nn.Module.named_parameters(model, remove_duplicate=remove_duplicate):
        for own, tensor in _known(name, param):
            if not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield own, tensor


def known(params: Iterable[torch.Tensor | None]) -> Iterator[nn.Parameter]:
    """What units know of these parameters."""
    return (tensor for param in params if param is not None for _, tensor in _known("", param))


def _known(name: str, param: torch.Tensor) -> Iterator[tuple[str, nn.Parameter]]:
    if not is_wrapper(param):
        yield name, cast(nn.Parameter, param)
    else:
        for own, each in inside(name, param):
            yield own, cast(nn.Parameter, each.tensor)


def move_wrapper(wrapper: torch.Tensor, device: torch.device) -> None:
    """The wrapper says that it lies on `device`, where its tensors are about to go. It stays the same object."""
    _take_place(wrapper, wrapper.to(device))


def _take_place(wrapper: torch.Tensor, moved: torch.Tensor) -> None:
    shown: Any = wrapper
    for attribute in shown.__tensor_flatten__()[0]:
        if is_wrapper(getattr(wrapper, attribute)):
            _take_place(getattr(wrapper, attribute), getattr(moved, attribute))
    torch._C._swap_tensor_impl(wrapper, moved)


@final
@dataclass(frozen=True)
class Taken:
    """A wrapper that was saved for the backward, taken apart: what views a buffer is not kept."""

    kind: Any
    contents: dict[str, Any]
    """By attribute: a tensor, another wrapper that was taken apart, or what says which view it was."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, wrapper: torch.Tensor, reference: Callable[[torch.Tensor], Any]) -> Taken | None:
        """`reference` gives what stands for a view of a buffer. None where the wrapper has no such view."""
        shown: Any = wrapper
        contents, any_view = {}, False
        attributes, context = shown.__tensor_flatten__()
        for attribute in attributes:
            tensor = getattr(wrapper, attribute)
            found = cls.of(tensor, reference) if is_wrapper(tensor) else reference(tensor)
            any_view = any_view or found is not None
            contents[attribute] = tensor if found is None else found
        return cls(type(wrapper), contents, context, wrapper.size(), wrapper.stride()) if any_view else None

    def together(self, bring_back: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The wrapper, of the views that `bring_back` gives."""
        tensors = {}
        for attribute, content in self.contents.items():
            is_kept = isinstance(content, torch.Tensor)
            apart = isinstance(content, Taken)
            tensors[attribute] = content if is_kept else content.together(bring_back) if apart else bring_back(content)
        made: torch.Tensor = self.kind.__tensor_unflatten__(tensors, self.context, self.size, self.stride)
        return made
