"""The functions of `torch.jit.script` pass the gate as every other operation does."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
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
