"""`release`: a prepared model becomes a plain one again."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared
from outsize.api.budgets import available_memory
from outsize.api.saving import ready, settle, take_state
from outsize.planning.sizes import format_bytes
from outsize.run import hooks
from outsize.run.grads import RestingGrad
from outsize.run.local import is_distributed, like
from outsize.run.owner import outside_inference


def release(model: nn.Module) -> None:
    """Turn a prepared model, in place, back into the plain model that it was; its optimizer too.

    The model, its parameters and the optimizer stay the same objects, tied parameters stay tied. Values and gradients
    lie on the computing device, and `optimizer.state` holds plain tensors: training goes on as in plain torch. So the
    model may be changed (`resize_token_embeddings`, adapters, surgery) and prepared again with a new optimizer or the
    same one. The run's files on disk are removed. An update that is still owed runs first.

    With a 16-bit `compute_dtype` the parameters are the rounded weights, and what completes the fp32 masters goes: take
    `optimizer.state_dict()` before, which has them, and load it after the next `outsize.prepare`. With `delayed_update`
    the gradients of the last step go, which the next step would have applied.

    Every rank calls it, and each gets the whole values. Raises `ValueError`, with nothing changed, for a model that is
    not prepared and where memory does not hold all values at once; `RuntimeError` inside a forward or a `gathered`
    block.

    >>> outsize.release(model)
    >>> model.head = torch.nn.Linear(8, 100)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = outsize.prepare(model, optimizer, host_memory="4GiB", disk="disk")
    """
    prepared = ready(model, None, "release")
    engine = prepared.engine
    with outside_inference(), engine.owner.turn("outsize.release"):
        if any(unit.holds for unit in engine.parameters.units):
            raise RuntimeError("outsize.release was called inside a forward or a gathered block; call it after that")
        for table in engine.tables.values():
            if table.unit.owners is not None and table.param.grad is not None:
                raise RuntimeError(
                    f"outsize.release: the gradient of table {table.name!r} is of this rank's batch alone until "
                    f"optimizer.step(); call step() or zero_grad() before. Nothing was changed"
                )
        prepared.resources.settle_saving()
        take_state(prepared)
        if engine.reduction is not None:
            engine.reduction.complete()
        settle(prepared)
        _check_memory(prepared)
        with engine.streamer.room.excess.untold():
            states = _states(prepared)
            values = _values(prepared)
        hooks.remove(model)
        if prepared.attached is not None:
            prepared.attached.detach(states)
        for param, (value, grad) in values.items():
            _become_plain(param, value, grad)
        for unit in engine.parameters.units:
            for each in unit.inside:
                each.give_back()
        engine.forget()
    prepared.resources.close()


def _check_memory(prepared: Prepared) -> None:
    """Raise `ValueError` unless the values fit beside what there is."""
    device = prepared.config.compute_device
    placed = prepared.placed
    needed = sum(unit.total * placed.split_of(index)[1] for index, unit in enumerate(placed.unit_bytes))
    free = available_memory(device)
    if needed > free:
        raise ValueError(
            f"outsize.release needs {format_bytes(needed)} for the values, gradients and states of the whole model, "
            f"and {format_bytes(free)} of {device.type} memory are free: use outsize.export, or outsize.save, and go "
            f"on where there is more memory. Nothing was changed"
        )


Values = dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor | None]]


def _values(prepared: Prepared) -> Values:
    """(value, gradient) of each parameter, as plain tensors."""
    found: Values = {}
    for unit in prepared.engine.parameters.units:
        with prepared.engine.hold([unit], modify=False):
            for name, param in unit.parameters.items():
                grad = param.grad
                if isinstance(grad, RestingGrad):
                    grad = None if grad.spent else grad.home.resting.value(grad)
                with torch.no_grad():
                    found[param] = like(param, unit.shard.param(name).clone()), grad
    return found


def _states(prepared: Prepared) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state with whole arrays, on the device where torch keeps them."""
    stepper, reduction = prepared.stepper, prepared.engine.reduction
    found: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    if stepper is None:
        return found
    optimizer: Any = prepared.optimizer
    for unit in prepared.engine.parameters.units:
        for name, param in unit.parameters.items():
            if param not in optimizer.state:
                continue
            entry = optimizer.state[param].plain()
            for key, value in entry.items():
                by_row = key in unit.shard.row_values
                if not (by_row or key in unit.shard.arrays) or not isinstance(value, torch.Tensor):
                    continue
                as_it_is = param.dtype is torch.float64 or value.dtype.itemsize < torch.float32.itemsize
                dtype = value.dtype if as_it_is else torch.float32
                if unit.shard.ranks > 1 and reduction is not None:
                    value = value.to(param.dtype if param.dtype is torch.float64 else torch.float32)
                    shape = unit.shard.whole_slots[name].shape
                    width = prod(shape[1:]) if by_row else 1
                    whole = reduction.whole(unit.shard, name, value.reshape(-1), width)
                    value = whole.view(shape[:1] if by_row else shape)
                entry[key] = value.to(prepared.config.compute_device, dtype)
            found[param] = entry
    return found


def _become_plain(param: nn.Parameter, value: torch.Tensor, grad: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        param.grad = None
        torch.autograd.graph.increment_version(param)  # a graph of before must not be used
        if is_distributed(param):
            from torch.distributed.tensor import DTensor

            param._local_tensor = value._local_tensor  # type: ignore[attr-defined]
            param.__class__ = DTensor  # type: ignore[assignment]
        else:
            torch.Tensor.data.__set__(param, value)  # type: ignore[attr-defined]
            param.__class__ = nn.Parameter
        param.grad = grad
