"""Activation checkpointing of a unit (Chen et al. 2016): keep its inputs, recompute the rest in the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, run under non-reentrant checkpointing whenever gradients are recorded.

    The random state is kept, so dropout repeats. Inside a region that the user already checkpoints, and while such a
    region is recomputed, the forward runs as it is: once is enough.
    """

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward() or _inside_checkpoint():
            return forward(*args, **kwargs)
        if any(_filled_cache(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)  # earlier tokens are in it: recomputing would append them twice
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return run


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _inside_checkpoint() -> bool:
    hooks = _top_hooks(True) if _top_hooks is not None else None
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_cache(value: object) -> bool:
    """A key-value cache of transformers, recognised by what it offers."""
    return not isinstance(value, (torch.Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))


def _filled_cache(value: Any) -> bool:
    return _is_cache(value) and int(value.get_seq_length()) > 0


def can_recompute(module: nn.Module) -> bool:
    """Whether a second forward changes nothing: no running statistics, no power iteration, anywhere in the module."""
    return not any(_changes_itself(each) for each in module.modules())


def _changes_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):  # batch and instance norms
        return module.track_running_stats
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
