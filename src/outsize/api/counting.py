"""What one step of a model does, counted on tensors without memory: calls, seconds of work, gradients, live bytes."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from outsize.api.counter import Counter, Event, hooked
from outsize.planning.machine import CPU, Machine
from outsize.run.operations import EachOperation
from outsize.run.wrappers import known_parameters

# Note [Counted, not run]
# The forward and the backward run on fake tensors: torch's own, which have shapes and no memory. They say that they
# lie on the CPU, whatever the device is, for a device need not be there. So each operation is seen as torch would run
# it, with its FLOPs by the tables of torch's FlopCounterMode and the bytes of its tensors. The machine's figures make
# seconds of these. What lives is counted by storages. On a CPU small blocks stay with the process, whose allocator
# maps large ones alone: of small ones the most that there were counts.


@dataclass(frozen=True)
class Counted:
    """A step. `items`: how many `unit`s ("tokens", or "samples") the example has."""

    events: tuple[Event, ...]
    items: int
    unit: str
    untimed: str = ""
    """Why the seconds are those of rates, where the step was to be timed."""


def count_step(
    model: nn.Module, example: Any, machine: Machine, dtype: torch.dtype | None, timing: Timing | None
) -> Counted:
    """Count a step of training with an example batch, computing in `dtype`. See Note [Timed layers] for `timing`.

    Raises `TypeError` for an example that is no batch, `ValueError` with the reason where it does not fit the model.
    """
    args, kwargs = _call_of(model, example)
    counter = Counter(model, machine)
    with FakeTensorMode(allow_non_fake_inputs=True):
        twins = {name: _twin(param, dtype) for name, param in known_parameters(model)}
        buffers = {name: _twin(buffer, dtype, buffer=True) for name, buffer in model.named_buffers()}
        batch = tree_map(_without_memory, (args, kwargs))
        _run_step(counter, twins, buffers, batch, EachOperation(counter.around))
    untimed = "" if timing is None else _try_to_time(counter, (args, kwargs), dtype, timing)
    leaves = [each for each in tree_leaves(example) if isinstance(each, torch.Tensor)]
    numbers = next((each for each in leaves if not each.is_floating_point() and each.dim() > 1), None)
    if numbers is not None:
        return Counted(counter.expanded(), numbers.numel(), "tokens", untimed)
    return Counted(counter.expanded(), leaves[0].shape[0] if leaves and leaves[0].dim() else 1, "samples", untimed)


def _run_step(
    counter: Counter,
    twins: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    watching: AbstractContextManager[object],
) -> None:
    """Forward and backward with these values in place of the model's own."""
    model = counter.model
    drawn = random.getstate()
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), hooked(counter):
        counter.watch(twins, buffers, tree_leaves(batch))
        try:
            with watching:
                out = functional_call(model, {**twins, **buffers}, *batch)
                loss = _loss_of(out)
                counter.emit(Event("end"))
                if loss is not None:
                    loss.backward()
        except Exception as error:
            where = f" in {counter.path!r}" if counter.path else ""
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                raise ValueError(
                    f"a step of {type(model).__name__} cannot be counted: what it does{where} depends on values of "
                    f"tensors ({error}), and plan(example=) has shapes alone. Leave example out"
                ) from error
            raise ValueError(
                f"the example does not fit the model: {type(model).__name__} raised {type(error).__name__}{where} "
                f"({error}). Give a batch as the training loop does: a dict of keywords or a tuple for the model. If "
                f"the model trains with this batch, leave example out: its forward does what tensors without values "
                f"cannot, such as Module.to()"
            ) from error
        finally:
            random.setstate(drawn)
        del out, loss
    counter.flush()


# Note [Timed layers]
# What a layer takes on this machine depends on more than a few rates say: on its shapes, on what the caches hold, on
# kernels that are good or bad. So where the plan is for this machine, the step runs on memory too, after it was
# counted, for about a second. Layers that stand for others run alone, as in the count: the memory is that of one layer
# of each kind. Weights are random numbers, in memory of their own. In a run, an update and many layers have passed the
# caches before a layer comes: other memory does so here, as much as the states take and the room holds. The seconds
# between two events of the count become those of the operations that were counted there. Where the memory or the time
# is too much, or a layer fails on random weights, rates say it all, and the plan says why.


@dataclass(frozen=True)
class Timing:
    """Where a step may be timed, and with how many bytes."""

    device: torch.device
    room: int


MOST_SECONDS = 10.0
"""Of the least passes together, as rates have it."""
ENOUGH_SECONDS, PASSES = 1.0, (3, 12)
"""Of all passes together; the least and the most of them. The first does not count."""
FILLED_AT_ONCE = 1 << 16
MOST_PASSED = 128 << 20
"""Bytes that pass the caches at most: more than most of them have."""


def _try_to_time(counter: Counter, batch: Any, dtype: torch.dtype | None, timing: Timing) -> str:
    """Time the step; why that could not be."""
    needed, seconds = counter.nbytes(dtype), counter.seconds * (PASSES[0] + 1)
    if needed > timing.room:
        return f"the layers take {needed >> 20} MiB to time, and {max(timing.room, 0) >> 20} MiB are free"
    if seconds > MOST_SECONDS:
        return f"the layers take about {seconds:.0f} s to time"
    states = 8 * sum(param.numel() for param in counter.model.parameters())
    try:
        _time_step(counter, batch, dtype, timing.device, min(states, MOST_PASSED, timing.room - needed))
    except (RuntimeError, ValueError) as error:  # also where memory is short after all
        return f"the layers could not be timed ({error})"
    finally:
        module: Any = None if timing.device.type == CPU else torch.get_device_module(timing.device)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
    return ""


def _time_step(
    counter: Counter, batch: Any, dtype: torch.dtype | None, device: torch.device, passing_bytes: int
) -> None:
    """Put the seconds of a real step in place of those that were counted."""
    model, needed = counter.model, counter.needed
    cores = [] if device.type == CPU else [device]
    laps: list[list[float]] = []
    with torch.random.fork_rng(devices=cores, device_type=cores[0].type if cores else "cuda"):
        weights = {name: _filled(param, dtype, device, name in needed) for name, param in known_parameters(model)}
        buffers = {name: _copied(buffer, dtype, device) for name, buffer in model.named_buffers()}
        batch = tree_map(partial(_copied, dtype=None, device=device), batch)
        passed = torch.zeros(passing_bytes, dtype=torch.uint8, device=device)
        began = time.perf_counter()
        while len(laps) <= PASSES[0] or (len(laps) <= PASSES[1] and time.perf_counter() - began < ENOUGH_SECONDS):
            timer = Counter(model, counter.machine, device, passed)
            twins = {
                name: nn.Parameter(weight, param.requires_grad)
                for (name, param), weight in zip(known_parameters(model), weights.values(), strict=True)
            }
            _run_step(timer, twins, buffers, batch, nullcontext())
            if _anchors(timer.events) != _anchors(counter.events):
                return
            laps.append(_laps(timer.events))
    _retime(counter.events, laps[1:])


def _anchors(events: Sequence[Event]) -> list[tuple[str, nn.Module | None, str]]:
    """What a step on memory and one without have in common."""
    return [(each.kind, each.module, each.name) for each in events if each.kind not in ("work", "use")]


def _laps(events: Sequence[Event]) -> list[float]:
    """The seconds of work up to each anchor, and after the last one."""
    found = [0.0]
    for each in events:
        if each.kind == "work":
            found[-1] += each.seconds
        elif each.kind != "use":
            found.append(0.0)
    return found


def _retime(events: list[Event], passes: Sequence[Sequence[float]]) -> None:
    """Give work the seconds that it took. Between two anchors they are shared out as those that were counted."""
    took = [median(lap) for lap in zip(*passes, strict=True)]
    scale = median(map(sum, passes)) / (sum(took) or 1.0)
    counted, number, left = _laps(events), 0, took[0]
    for index, event in enumerate(events):
        if event.kind == "work":
            events[index] = replace(event, seconds=event.seconds / (counted[number] or 1.0) * left * scale)
        elif event.kind != "use":
            unspent = 0.0 if counted[number] else left  # where nothing was counted: it falls to what follows
            number += 1
            left = unspent + took[number]


def _filled(param: torch.Tensor, dtype: torch.dtype | None, device: torch.device, needed: bool) -> torch.Tensor:
    """Random values in the shape of a parameter; without memory where nothing is computed with them."""
    kind, shape = _kind_of(param, dtype), tuple(param.shape)
    if not needed:
        return torch.empty((), dtype=kind, device=device).expand(shape)
    twin = torch.zeros(shape, dtype=kind, device=device)
    if twin.is_floating_point():
        block = torch.randn(FILLED_AT_ONCE, device=device).mul_(0.02).to(kind)
        for part in twin.view(-1).split(FILLED_AT_ONCE):
            part.copy_(block[: part.numel()])
    return twin


def _copied(value: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A copy with memory of its own; zeros of what has none."""
    if not isinstance(value, torch.Tensor):
        return value
    kind = _kind_of(value, dtype)
    if value.device.type == "meta" or (device.type != CPU and not value.is_floating_point()):
        # An id that is out of range ends the use of an accelerator.
        return torch.zeros(tuple(value.shape), dtype=kind, device=device)
    return value.detach().to(device, kind, copy=True)


def _call_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        kwargs = {str(name): value for name, value in example.items()}
        parameters = inspect.signature(model.forward).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            unknown = [name for name in kwargs if name not in parameters]
            if unknown:
                raise ValueError(
                    f"the example does not fit the model: {type(model).__name__}.forward has no argument "
                    f"{unknown[0]!r}; it has {', '.join(parameters)}"
                )
        return (), kwargs
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise TypeError(f"example is a {type(example).__name__}; it must be a dict, a tuple or a tensor for the model")


def _twin(tensor: torch.Tensor, dtype: torch.dtype | None, buffer: bool = False) -> torch.Tensor:
    """A new one of the same shape."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty(tuple(tensor.shape), dtype=_kind_of(tensor, dtype), device=CPU)
    return made if buffer else nn.Parameter(made, tensor.requires_grad)


def _kind_of(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _without_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=CPU)


def _loss_of(out: Any) -> torch.Tensor | None:
    """What a training loop would call `backward` of: the output's `loss`, else the sum of what has gradients."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    found = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(out)
    parts = [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
    sums = [each if each.dim() == 0 else each.sum() for each in parts]
    return sum(sums[1:], start=sums[0]) if sums else None
