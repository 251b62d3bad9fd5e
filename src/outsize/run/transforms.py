"""What `torch.func` hides from the engine, and how the engine works beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Note [Weights given to a transform]
# `torch.func.grad(loss)(dict(model.named_parameters()))` wraps the parameters: operations on a wrapper do not pass the
# gate, and torch.func lets nobody see what they save. If the parameters require gradients, torch also records them
# below the transform, for a backward of its result, which may come when the parameters are at rest again. So a forward
# computes with copies of such wrappers: what is saved are the copies, and gradients reach the parameters through them.

_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def in_transform() -> bool:
    """Whether torch.func differentiates what runs now. (It vectorizes without looking at what is not given to it.)"""
    running = torch._C._functorch.peek_interpreter_stack()
    return running is not None and running.key() in _DIFFERENTIATING


@contextmanager
def on_copies(module: nn.Module, is_managed: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """While a forward of `module` runs, copies stand for wrapped managed parameters that require gradients. See Note
    [Weights given to a transform]."""
    copies: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            given: dict[str, Any] = part._parameters
            for name, weight in given.items():
                if weight is None or not torch._C._functorch.is_functorch_wrapped_tensor(weight):
                    continue
                param = _unwrapped(weight)
                if param.requires_grad and is_managed(param):
                    if id(weight) not in copies:
                        copies[id(weight)] = weight.clone()
                    replaced.append((given, name, weight))
                    given[name] = copies[id(weight)]
        yield
    finally:
        for given, name, weight in replaced:
            given[name] = weight


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
