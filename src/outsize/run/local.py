"""What one rank has of a parameter that torch's tensor parallelism has split: DTensors by their local part."""

from __future__ import annotations

from typing import Any

import torch

# Note [Tensor-parallel parameters]
# `parallelize_module` makes parameters DTensors: a shape for the user, and beside it the plain tensor of this rank, of
# which alone there are bytes. Everything below the parameter (units, slices, stores, gradients, updates) knows the
# local part only; it is bound into the gathered buffer as a plain parameter's memory is. The parameter's class passes
# the gate for each operation, as that of a plain parameter does, and the views that leave it are guarded too.


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor; asked without importing what few users need."""
    return hasattr(type(tensor), "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds what this rank has; a plain tensor is its own."""
    if not is_distributed(tensor):
        return tensor
    unguarded: Any = getattr(type(tensor), "unguarded_local", None)
    found: torch.Tensor = tensor._local_tensor if unguarded is None else unguarded(tensor)  # type: ignore[attr-defined]
    return found


def bind(param: torch.Tensor, view: torch.Tensor) -> None:
    """Make `view` the memory of what this rank has of the parameter."""
    if is_distributed(param):
        param._local_tensor = view.data  # type: ignore[attr-defined]  # whose writes are counted apart from fetches
        return
    with torch._C.DisableTorchFunctionSubclass():
        if not torch._has_compatible_shallow_copy_type(param, view):
            _move(param, view.device)
        torch.Tensor.data.__set__(param, view)  # type: ignore[attr-defined]


def _move(param: Any, device: torch.device) -> None:
    """Make the parameter one of this kind of device where `param.data = view` cannot: torch knows the kinds that are
    its own, and not those of other packages. The object and its hooks stay."""
    inside = torch.empty(0, dtype=param.dtype, device=device, requires_grad=param.requires_grad)
    torch._C._swap_tensor_impl(param, inside)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # which the inside has, too
        if getattr(param, hooks) is not None:
            setattr(param, hooks, getattr(param, hooks))


def local_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of what this rank has: summed over the tensor-parallel ranks where each has a part of the sum.

    A collective of these ranks if it is.
    """
    if not is_distributed(param) or not is_distributed(grad):
        return grad
    given: Any = grad
    wanted: Any = param
    if given.placements != wanted.placements:
        given = given.redistribute(placements=wanted.placements)
    found: Any = given._local_tensor
    own: torch.Tensor = found.wait() if hasattr(found, "wait") else found  # a collective may be on its way
    return own


def expect_dense(name: str, grad: torch.Tensor) -> None:
    """Raise if the gradient of the parameter `name` is sparse."""
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is sparse ({grad.layout}); use dense gradients (Embedding(sparse=False))"
        )


def like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, which is of this rank's part, as the user sees the parameter: a DTensor where that is one."""
    if not is_distributed(param):
        return value
    from torch.distributed.tensor import DTensor

    shown: Any = param
    made: torch.Tensor = DTensor.from_local(
        value, shown.device_mesh, shown.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def copy_like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As `like`, for a view: torch neither copies nor pickles a DTensor of what lies within a storage."""
    return like(param, value.clone()) if is_distributed(param) else value


def shared_as(spec: Any, value: torch.Tensor) -> torch.Tensor:
    """`value`, which this rank has, as the DTensor of this `spec`; as it is where there is none."""
    if spec is None:
        return value
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    shown: torch.Tensor = made(value, spec, requires_grad=False)
    return shown


def part_of(param: torch.Tensor) -> tuple[int, int, int] | None:
    """(dimension, first entry, entries) of what this rank has of the parameter; None where that is all of it."""
    if is_repeated(param):
        return None
    shown: Any = param
    dim = shown.placements[0].dim % param.ndim
    chunk = -(-param.shape[dim] // shown.device_mesh.size())
    first = min(shown.device_mesh.get_local_rank() * chunk, param.shape[dim])
    return dim, first, local(param).shape[dim]


def largest_part(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of the largest part that a tensor-parallel rank has of the parameter."""
    if is_repeated(param):
        return tuple(local(param).shape)
    shown: Any = param
    dim = shown.placements[0].dim % param.ndim
    return (*param.shape[:dim], -(-param.shape[dim] // shown.device_mesh.size()), *param.shape[dim + 1 :])


def is_repeated(param: torch.Tensor) -> bool:
    """Whether every tensor-parallel rank has the whole parameter."""
    if not is_distributed(param):
        return True
    shown: Any = param
    return all(each.is_replicate() for each in shown.placements) or shown.device_mesh.size() == 1
