"""Activation checkpointing of a unit (Chen et al. 2016): keep its inputs, recompute the rest in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outsize.run.layer_state import LayerState, version_of
from outsize.run.saved import top_hooks

# What `torch.utils.checkpoint` is given here cannot be traced: a compiled model runs its recomputed layers uncompiled.
_Forward = Callable[..., Any]
_outside_of_dynamo: Callable[[_Forward], _Forward] = getattr(torch, "_disable_dynamo", lambda function: function)


def recomputed(module: nn.Module, name: str) -> Callable[..., Any]:
    """`module.forward`, run under non-reentrant checkpointing whenever gradients are recorded.

    The random state is kept, so dropout repeats, and so is what the layer was: see `LayerState`. Inside a region that
    the user already checkpoints, and while such a region is recomputed, the forward runs as it is: once is enough.
    `RuntimeError` where the layer changes its input in place, which is the caller's and cannot be put back.
    """
    forward = module.forward
    layer = _Layer(module, name, forward)

    @_outside_of_dynamo
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward() or _inside_checkpoint():
            return forward(*args, **kwargs)
        if any(_filled_cache(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)  # earlier tokens are in it: recomputing would append them twice
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        return layer.checkpointed(args, kwargs)

    return run


@final
class _Layer:
    """What is recomputed as a whole, and what its last forward told about its buffers."""

    def __init__(self, module: nn.Module, name: str, forward: Callable[..., Any]) -> None:
        self._modules = list(module.modules())
        self._name = f"{name!r} ({type(module).__name__})"
        self._forward = forward
        self._copies_large = True

    def checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _tensors((*args, *kwargs.values()))
        versions = [version_of(each) for each in inputs]
        state = LayerState(self._modules, self._name, self._copies_large)
        contexts = (nullcontext(), state)
        forward = partial(self._forward, **kwargs)
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
        if versions != [version_of(each) for each in inputs] and self._has_backward(inputs):
            raise RuntimeError(
                f"layer {self._name} changes its input in place, so it cannot be recomputed, which "
                f'activations="recompute" asks for and "auto", the default, chooses for such layers: pass '
                f'activations="keep", or make the operation not in-place'
            )
        self._copies_large = state.settle()
        return result

    def _has_backward(self, inputs: list[torch.Tensor]) -> bool:
        return any(each.requires_grad for each in (*inputs, *self._modules[0].parameters()))


def _tensors(values: Iterable[Any], nested: bool = True) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, and in the lists, tuples and mappings among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif nested and isinstance(value, (list, tuple, Mapping)):
            found += _tensors(value.values() if isinstance(value, Mapping) else value, nested=False)
    return found


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _inside_checkpoint() -> bool:
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_cache(value: object) -> bool:
    """A key-value cache of transformers, recognised by what it offers."""
    return not isinstance(value, (torch.Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))


def _filled_cache(value: Any) -> bool:
    return _is_cache(value) and int(value.get_seq_length()) > 0


def can_recompute(module: nn.Module) -> bool:
    """Whether a second forward is nobody else's concern: batch norms of several ranks speak to each other."""
    return not any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
