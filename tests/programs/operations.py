"""What a user's loop does: functions that a world carries out, each with how often it comes and out of what its
arguments are drawn."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tests.programs.worlds import Need, Shown, World, copies

Run = Callable[..., Shown | None]
"""Carries an operation out, with its arguments; returns what the user sees of it."""

RunT = TypeVar("RunT", bound=Run)


@dataclass(frozen=True)
class Operation:
    """`gathers`: it may take memory above the budget."""

    run: Run
    often: float
    needs: Need
    gathers: bool
    arguments: Mapping[str, Sequence[Any]]


OPERATIONS: dict[str, Operation] = {}


def operation(
    often: float, needs: Need = "nothing", gathers: bool = False, **arguments: Sequence[Any]
) -> Callable[[RunT], RunT]:
    def enter(run: RunT) -> RunT:
        OPERATIONS[run.__name__] = Operation(run, often, needs, gathers, arguments)
        return run

    return enter


SEEDS, INDICES, FACTORS, EITHER = range(1000), range(50), (0.5, 0.9, 1.5), (False, True)
MAYBE_ALL = (*[None] * 10, *range(20))
"""All, or an index."""

ROUTES: Any = {"skipped": (-1, -1, 0, 1, 2), "by_side": EITHER}
BACKWARDS: Any = {
    "seed": SEEDS,
    **ROUTES,
    "paused": (False, False, True),
    "meanwhile": ("", "", "", "", "eval", "freeze", "read", "forward"),
    "hook": ("", "", "scores", "before", "after"),
}
CLIPS: Any = {"bound": (0.1, 0.5, 5.0), "order": (1.0, 2.0, 2.0, inf, None)}
ZEROS: Any = {"of_model": EITHER, "to_none": (False, True, True)}


def at(world: World, index: int) -> nn.Parameter:
    params = list(world.model.parameters())
    return params[index % len(params)]


# -- forwards and backwards --------------------------------------------------------------------------------------------


@operation(6, **BACKWARDS)
def backward(world: World, seed: int, skipped: int, by_side: bool, paused: bool, hook: str, meanwhile: str) -> Shown:
    """`paused`: ranks add up; `meanwhile`: what happens between forward and backward; `hook`: halves the gradient of
    the scores, or of one weight before or after it is in."""

    def on_part(part: int) -> Tensor:
        loss = world.loss(seed, part, skipped, by_side)
        with _meanwhile(world, part, meanwhile):
            world.share_of(loss).backward()
        return loss.detach()

    with world.no_sync() if paused else contextlib.nullcontext(), _hooked(world, hook):
        return world.on_parts(seed, on_part)


@contextmanager
def _meanwhile(world: World, part: int, what: str) -> Iterator[None]:
    param = at(world, 1)
    trained = param.requires_grad
    world.model.train(what != "eval")
    param.requires_grad_(trained and what != "freeze")
    if what == "read":
        with world.gathered(param):
            pass
    elif what == "forward":
        with torch.no_grad():
            world.loss(0, part)
    yield
    world.model.train()
    param.requires_grad_(trained)


def _hooked(world: World, hook: str) -> Any:
    weight = world.model.norm.weight
    if hook == "scores":
        return world.model.register_forward_hook(_halve_gradient_of_output)
    if hook == "before" and weight.requires_grad:
        return weight.register_hook(lambda grad: grad / 2)
    if hook == "after" and weight.requires_grad and world.spec.gradients_stay and world.spec.ranks == 1:
        return weight.register_post_accumulate_grad_hook(_halve_gradient)
    return contextlib.nullcontext()


def _halve_gradient_of_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad / 2)


def _halve_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@operation(1, seed=SEEDS, **ROUTES, joint=EITHER)
def two_forwards(world: World, seed: int, skipped: int, by_side: bool, joint: bool) -> Shown:
    """Two forwards, then one backward of both, or theirs in the other order."""

    def on_part(part: int) -> Tensor:
        first, second = (world.loss(each, part, skipped, by_side) for each in (seed, seed + 1))
        for loss in [first + second] if joint else [second, first]:
            world.share_of(loss).backward()
        return (first + second).detach()

    return world.on_parts(seed, on_part)


@operation(1, seed=SEEDS)
def two_backwards(world: World, seed: int) -> Shown:
    """Through one graph, which is kept."""

    def on_part(part: int) -> Tensor:
        loss = world.loss(seed, part)
        world.share_of(loss).backward(retain_graph=True)
        world.share_of(loss).backward()
        return loss.detach()

    return world.on_parts(seed, on_part)


@operation(1, seed=SEEDS)
def autograd_grad(world: World, seed: int) -> Shown:
    """Gradients as values, which leave `param.grad` alone."""

    def on_part(part: int) -> Tensor:
        params = chain(world.model.norm.parameters(), world.model.head.parameters())
        wanted = [param for param in params if param.requires_grad]
        loss = world.loss(seed, part)
        grads = torch.autograd.grad(loss, wanted) if wanted else ()
        return torch.cat([loss.detach().view(1), *(grad.float().flatten() for grad in grads)])

    return world.on_parts(seed, on_part)


MODES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "train": contextlib.nullcontext,
    "eval": torch.no_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": partial(torch.set_grad_enabled, False),
}


@operation(2, seed=SEEDS, **ROUTES, mode=tuple(MODES))
def forward(world: World, seed: int, skipped: int, by_side: bool, mode: str) -> Shown:
    """No backward follows."""
    world.model.train(mode != "eval")
    with MODES[mode]():
        shown = world.on_parts(seed, lambda part: world.loss(seed, part, skipped, by_side).detach())
    world.model.train()
    return copies(shown.items())


class Boom(Exception):
    """What a failing layer raises."""


@operation(1, seed=SEEDS, module=INDICES, in_backward=EITHER, keep=EITHER)
def failing(world: World, seed: int, module: int, in_backward: bool, keep: bool) -> Shown:
    """A layer raises; the loop goes on, and keeps the gradients that were in by then or not."""
    in_backward = in_backward and world.spec.gradients_stay

    def explode(*_: Any) -> None:
        raise Boom

    def prepare_to_explode(module: nn.Module, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(explode)

    def on_part(part: int) -> Tensor:
        try:
            loss = world.loss(seed, part)
            if in_backward:
                world.share_of(loss).backward()
        except Boom:
            return torch.tensor(1.0)
        return torch.tensor(0.0)

    modules = list(world.model.modules())
    with modules[module % len(modules)].register_forward_hook(prepare_to_explode if in_backward else explode):
        shown = world.on_parts(seed, on_part)
    if not (keep and world.spec.gradients_come_once):
        world.model.zero_grad()
    return shown


# -- around the step ---------------------------------------------------------------------------------------------------


@operation(4, needs="gradients")
def step(world: World) -> None:
    world.step()
    if world.scheduler is not None:
        world.scheduler.step()


@operation(3, **ZEROS)
def zero_grad(world: World, of_model: bool, to_none: bool) -> None:
    (world.model if of_model else world.optimizer).zero_grad(to_none)


@operation(2, needs="gradients", **CLIPS)
def clip(world: World, bound: float, order: float | None) -> Shown:
    """The norm, or each value where it is of no order."""
    params = [param for param in world.model.parameters() if param.numel()]  # torch knows no largest of nothing
    if order is None:
        torch.nn.utils.clip_grad_value_(params, bound / 10)
        return {}
    return {"norm": torch.nn.utils.clip_grad_norm_(params, bound, order).clone()}


@operation(5, **BACKWARDS, clips=EITHER, **CLIPS, of_model=EITHER)
def train_step(world: World, clips: bool, bound: float, order: float | None, of_model: bool, **backwards: Any) -> Shown:
    """A whole turn of the loop."""
    shown = backward(world, **backwards)
    if world.has("gradients"):
        if clips and world.spec.gradients_stay:
            shown |= clip(world, bound, order)
        step(world)
    zero_grad(world, of_model, to_none=True)
    return shown


@operation(1, index=INDICES)
def drop_gradient(world: World, index: int) -> None:
    at(world, index).grad = None


@operation(1, factor=FACTORS)
def scale_gradients(world: World, factor: float) -> None:
    for param in world.model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


@operation(1, index=INDICES, name=("lr", "weight_decay"), factor=FACTORS)
def change_group(world: World, index: int, name: str, factor: float) -> None:
    group = world.optimizer.param_groups[index % len(world.optimizer.param_groups)]
    if name in group:
        group[name] = group[name] * factor


@operation(1, index=MAYBE_ALL)
def freeze(world: World, index: int | None) -> None:
    """Stop training one parameter, or train all again."""
    if index is None:
        world.model.requires_grad_(True)
    else:
        at(world, index).requires_grad_(False)


@operation(1, needs="late parameters")
def add_group(world: World) -> None:
    world.extend()


# -- looking and changing ----------------------------------------------------------------------------------------------


@operation(3, gathers=True, index=MAYBE_ALL)
def read_weights(world: World, index: int | None) -> Shown:
    """One, or all with the buffers."""
    if index is not None:
        param = at(world, index)
        with world.gathered(param):
            return copies([("weight", param)])
    with world.gathered(world.model):
        return copies(chain(world.model.named_parameters(), world.model.named_buffers()))


@operation(1, gathers=True, first=INDICES, count=(1, 2, 3), through_data=EITHER)
def change_weights(world: World, first: int, count: int, through_data: bool) -> None:
    params = [at(world, first + further) for further in range(count)]
    with world.gathered(params, modify=True), torch.no_grad():
        for param in params:
            (param.data if through_data else param).mul_(0.75).add_(0.01)


@operation(0.5, gathers=True)
def load_own_state_dict(world: World) -> None:
    with world.gathered(world.model, modify=True):
        world.model.load_state_dict({name: value.clone() for name, value in world.model.state_dict().items()})


@operation(2, gathers=True)
def read_gradients(world: World) -> Shown:
    with world.gathered(world.model, grads=True):
        return copies((name, param.grad) for name, param in world.model.named_parameters())


@operation(1, gathers=True, factor=FACTORS)
def change_gradients(world: World, factor: float) -> None:
    with world.gathered(world.model, grads=True, modify=True):
        scale_gradients(world, factor)


@operation(1)
def read_state(world: World) -> Shown:
    shown: Shown = {}
    for name, param in world.model.named_parameters():
        entry = world.optimizer.state.get(param, {})
        shown |= copies((f"{key} of {name}", torch.as_tensor(value)) for key, value in entry.items())
    return shown


@operation(0.7, index=MAYBE_ALL)
def clear_state(world: World, index: int | None) -> None:
    if index is None:
        world.optimizer.state.clear()
    elif at(world, index) in world.optimizer.state:
        del world.optimizer.state[at(world, index)]


@operation(0.7, copied=EITHER)
def load_own_optimizer_state(world: World, copied: bool) -> None:
    state = world.optimizer.state_dict()
    world.optimizer.load_state_dict(copy.deepcopy(state) if copied else state)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@operation(2, wait=EITHER)
def save(world: World, wait: bool) -> None:
    world.save(wait)


@operation(1.5, needs="checkpoint")
def load(world: World) -> Shown:
    return world.load()


@operation(1.5, needs="checkpoint")
def load_elsewhere(world: World) -> Shown:
    """A fresh model in another place goes on from the checkpoint."""
    return world.load_elsewhere()


@operation(0.5)
def export(world: World) -> Shown:
    """What is trained: other weights are exported with the bits that 16-bit training keeps of them, or with all."""
    shown = world.exported()
    trained = {param for group in world.optimizer.param_groups for param in group["params"]}
    return {name: shown[name] for name, param in world.model.named_parameters() if param in trained}
