"""What modules keep beside parameters and buffers: `get_extra_state` and `set_extra_state`, as in torch's state dicts.

Named as there, `layers.0._extra_state`. As there, what has a getter of its own is saved, what has a setter is loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_SUFFIX = "_extra_state"


def extra_states_of(model: nn.Module) -> dict[str, Any]:
    """The states by name."""
    return {
        _name(prefix): module.get_extra_state()
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def takers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that take a state, by its name."""
    return {
        _name(prefix): module
        for prefix, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def _name(prefix: str) -> str:
    return f"{prefix}.{_SUFFIX}" if prefix else _SUFFIX
