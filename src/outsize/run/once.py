"""Functions of ours whose backward has no derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def differentiable_once(reason: str | Callable[[Any], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a `backward` that runs without a graph. A derivative through what it gives is an error with this `reason`.

    torch's `once_differentiable` takes the result for a constant where the gradient itself has no graph. But the result
    also depends on what the forward was given: the second derivative would lack that part, without a word.
    """

    def wrap(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def without_graph(ctx: Any, *grads: torch.Tensor) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return found
            given = found if isinstance(found, tuple) else (found,)
            why = reason if isinstance(reason, str) else reason(ctx)
            return tuple(
                None if each is None else _Last.apply(torch.zeros((), requires_grad=True), each, why) for each in given
            )

        return without_graph

    return wrap


class _Last(torch.autograd.Function):
    """A tensor whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, each: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return each.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(ctx.why)
