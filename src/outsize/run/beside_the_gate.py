"""What does not pass the gate of the parameters by itself: functions of TorchScript, and what `torch.func` wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.jit._fuser import optimized_execution

from outsize.run.guard import guarded_among, pass_gate

# Note [Functions of TorchScript]
# A function of `torch.jit.script` looks at no `__torch_function__` (its methods do): a parameter at rest would be read
# as it lies there. So the class of these functions is taught to, for guarded tensors alone; there is no other place
# from which such a call can be seen. What it saves for the backward goes through saved-tensor hooks as everything does.
# TorchScript optimizes a function after its first calls, and saves other tensors from then on, so that a recomputation
# does not match its forward: these calls run as they are written.

_script_function: Any = torch.jit.ScriptFunction
_call_plain = _script_function.__call__


def see_script_functions() -> None:
    """Let the functions of `torch.jit.script` pass the gate too. See Note [Functions of TorchScript]."""
    _script_function.__call__ = _call_script_function


@wraps(_call_plain)
def _call_script_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    guarded = guarded_among(args, kwargs)
    if not guarded or not torch._C._is_torch_function_enabled():
        return _call_plain(self, *args, **kwargs)
    with optimized_execution(False):
        return pass_gate(guarded[0].gate, self, args, kwargs)


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
