"""The user's optimizer object after `prepare`: its `step`, `state_dict`, `load_state_dict` and `add_param_group`."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, final

import torch
from torch.optim import optimizer as torch_optimizer

from outsize.run.backward import Backward
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters
from outsize.run.stepping import Stepper
from outsize.run.unit import Unit


def refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer object whose `step` was replaced: it would not be called."""
    own = vars(optimizer).get("step")
    if getattr(own, "_wrapped_by_lr_sched", False):  # it counts the calls for a scheduler, as ours will
        own = getattr(own, "__wrapped__", None)
    if own is not None and getattr(own, "__func__", own) is not type(optimizer).step:
        raise ValueError(
            f"the `step` of this {type(optimizer).__name__} object was replaced by "
            f"{getattr(own, '__qualname__', type(own).__name__)!r}, which would not be called any more: call prepare "
            f"first, or make it a method of a subclass or a hook (register_step_pre_hook)"
        )


def _counted_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A plain step that a scheduler sees, as its own wrapper has it."""
    optimizer._opt_called = True
    return type(optimizer).step(optimizer, *args, **kwargs)


_counted_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


@final
class _ForScalers:
    """True for torch's GradScaler, which then tells us of the steps that it skips.

    False for others that ask: Lightning takes True for an optimizer whose gradients it may not clip.
    """

    def __bool__(self) -> bool:
        return str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")


@final
@dataclass(eq=False, repr=False)
class Attached:
    """Stands behind the methods of the user's optimizer object."""

    _optimizer: torch.optim.Optimizer
    _stepper: Stepper
    _parameters: Parameters
    _backward: Backward
    _owner: Owner

    def __post_init__(self) -> None:
        """Replace the methods on the instance; schedulers made before or after find what they look for."""
        optimizer: Any = self._optimizer
        attached = self

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # what a scheduler's own wrapper would record
            return attached.step((self, *args), kwargs)

        eager: Any = torch.compiler.disable(step)  # inside a compiled function, too
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if scheduled:
            eager._wrapped_by_lr_sched = True
        optimizer.step = types.MethodType(eager, optimizer)
        optimizer._step_supports_amp_scaling = _ForScalers()
        optimizer.load_state_dict = self.load_state_dict
        optimizer.state_dict = self.state_dict
        optimizer.add_param_group = self.add_param_group

    def detach(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Give the optimizer back what it had, with `states` as its state."""
        optimizer: Any = self._optimizer
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        for name in ("step", "state_dict", "load_state_dict", "add_param_group", "_step_supports_amp_scaling"):
            vars(optimizer).pop(name, None)
        optimizer.state = states
        if scheduled:
            optimizer.step = types.MethodType(_counted_step, optimizer)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark the update of every parameter that has a gradient. Raises, with nothing changed, if none has one or if
        one is not finite."""
        try:
            with self._owner.turn("optimizer.step()"):
                return self._step(args, kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(self._optimizer).pop(name, None)
            raise

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self._stepper.skipped_steps += 1
            return None
        optimizer: Any = self._optimizer
        before = (torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
        hooks = list(chain(*(each.values() for each in before)))
        factor = self._unscale_by() if len(hooks) > 1 else 1.0  # one is our own, and looks at no gradient
        with self._unscaled(factor if 0.0 < factor < inf else 1.0):
            for hook in hooks:
                replaced = hook(optimizer, args, kwargs)
                if replaced is not None:
                    args, kwargs = replaced
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            loss = None
            if closure is not None:
                self._stepper.check_closure()
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # only what parameters are, no values
                self._backward.end_interrupted()
                self._stepper.mark(self._unscale_by())
        after = (optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks)
        for hook in list(chain(*(each.values() for each in after))):
            hook(optimizer, args, kwargs)
        return loss

    # Note [Loss scaling]
    # `torch.amp.GradScaler` looks for what is not finite before it calls `step`, and gives what it found and the scale
    # that is still to be taken out to an optimizer that says it can deal with them, as attributes for the call. Where
    # the call raises it leaves them, and would multiply the next scale by the one of before. The scale is taken out
    # when nothing can refuse the step any more, so that a step that was refused leaves the gradients as they were. A
    # plain optimizer is not called for a step that is skipped, and its hooks see gradients without the scale: so do
    # these. Where the step is refused it is put back, within rounding.

    def _unscale_by(self) -> float:
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).double().reciprocal().float())

    @contextmanager
    def _unscaled(self, factor: float) -> Iterator[None]:
        """In the block gradients have no scale, and the optimizer says so."""
        if factor == 1.0:
            yield
            return
        self._multiply(factor)
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        try:
            yield
        except BaseException:
            self._multiply(1.0 / factor)
            raise

    def _multiply(self, factor: float) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param in chain(*(group["params"] for group in self._optimizer.param_groups)):
                if param.grad is not None:
                    param.grad.mul_(factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a plain optimizer's state dict: hyper-parameters, arrays and step counts.

        Raises `ValueError`, with nothing changed, for the state of another optimizer or of other parameters.
        """
        with self._owner.turn("optimizer.load_state_dict()"):
            self._stepper.state.load_state_dict(state_dict, self._stepper.forget)

    def state_dict(self) -> dict[str, Any]:
        """A plain optimizer's state dict, of one step."""
        with self._owner.turn("optimizer.state_dict()"):
            return self._stepper.state.state_dict()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """As in torch: train further parameters of the prepared model, with hyper-parameters of their own.

        Raises `ValueError` for a parameter that the model does not have, or that another group has already.
        """
        if not isinstance(group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(group)}")
        params = group["params"]
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        if not isinstance(params, set):  # which torch refuses
            group["params"] = given  # a generator can be read once
        given = [each[1] if isinstance(each, tuple) else each for each in given]
        for param in given:
            if isinstance(param, torch.Tensor) and not self._parameters.owns(param):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not in the model that outsize.prepare prepared; "
                    f"build the whole model before prepare, or call outsize.release(model), and prepare it again"
                )
        with torch._C.DisableTorchFunctionSubclass():
            type(self._optimizer).add_param_group(self._optimizer, group)
            try:
                names: dict[Unit, list[str]] = {}
                for unit, slot in map(self._parameters.unit_of, given):
                    names.setdefault(unit, []).append(slot.name)
                for unit, own in names.items():
                    self._stepper.make_room(unit, own)
            except BaseException:
                self._optimizer.param_groups.pop()
                raise
