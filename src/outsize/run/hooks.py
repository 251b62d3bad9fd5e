"""The only file that changes `nn.Module` objects: forwards get frames, and moves of a prepared model are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from outsize.run.activations import recomputed
from outsize.run.engine import Engine


def install(engine: Engine, model: nn.Module, framed: Iterable[nn.Module], recompute: Iterable[nn.Module]) -> None:
    """Wrap the forwards of these modules on the instances; classes and torch itself stay as they are."""
    for module in recompute:
        module.forward = recomputed(module.forward)
    for module in framed:
        module.forward = _framed(engine, module, module.forward)
    _refuse_moves(model)


def _framed(engine: Engine, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with engine.frame(module):
            return forward(*args, **kwargs)

    return run


def _refuse_moves(model: nn.Module) -> None:
    """`model.to(...)`, `.half()`, `.cuda()` would replace every parameter; what changes nothing is let through."""
    to: Callable[..., nn.Module] = model.to

    def refuse(*args: Any, **kwargs: Any) -> nn.Module:
        raise RuntimeError(
            "a prepared model cannot be moved or cast (.to, .cuda, .half, ...): outsize keeps its parameters. Choose "
            "with outsize.prepare(..., device=..., compute_dtype=...) instead, or cast the model before prepare"
        )

    @wraps(to)
    def checked_to(*args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        first = next(model.parameters())
        same_device = device is None or device == first.device or (device.type == first.device.type == "cpu")
        if device is not None and device.index is None and device.type == first.device.type:
            same_device = True
        floats = {param.dtype for param in model.parameters()}
        if same_device and (dtype is None or floats == {dtype}) and memory_format is None:
            return model
        return refuse()

    model.to = checked_to  # type: ignore[method-assign]
    model._apply = refuse  # type: ignore[method-assign]
