"""`optimizer.step()` on streamed state: it marks the update of each unit, which the unit's next fetch runs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any, final

import torch
from torch.optim import optimizer as torch_optimizer

from outsize.move.shard import MASTER, Pending, SlotUpdate
from outsize.optim.update import ChunkUpdater
from outsize.optim.worker import differs
from outsize.run.engine import Engine
from outsize.run.grads import RestingGrad
from outsize.run.state_dict import WholeState, stopping_on_errors
from outsize.run.step_record import expect_own, hyper_of, owed_to, told
from outsize.run.unit import Unit

# Note [The update happens at the fetch]
# `step()` takes a snapshot of everything the update depends on: learning rates and the like, the factors that clipping
# put on each gradient, and which parameters have gradients at all. It then returns; `scheduler.step()` and
# `zero_grad()` may follow, and the next fetch of each unit runs its update in the order in which the next forward
# needs the units. A unit that still owes an update when the next step comes runs it before that step is marked.


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
class Stepper:
    """Stands behind the user's optimizer object: its `step`, its `state`, its `load_state_dict`."""

    # Note [Delayed update]
    # ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2): after `warmup` exact steps one
    # step's gradients are held back; from then on each step applies the gradients of the step before it, with the
    # hyper-parameters of now. A step that has no gradients before it to apply changes nothing.

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        updater: ChunkUpdater,
        warmup: int | None,
        in_backward: bool,
    ) -> None:
        self.steps = 0
        self.skipped_steps = 0
        self._engine = engine
        self._optimizer = optimizer
        self._updater = updater
        self._warmup = warmup
        self._group_of: dict[int, dict[str, Any]] = {}
        self._applied: dict[Unit, Pending] = {}  # in this backward. See Note [The update in the backward]
        if in_backward:
            for each in engine.gradients:
                each.update_now = self._update_now
        self.state = WholeState(engine, optimizer, updater)
        self._attach()

    def _attach(self) -> None:
        """Replace the methods on the instance; schedulers made before or after find what they look for."""
        optimizer: Any = self._optimizer
        stepper = self

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # what a scheduler's own wrapper would record
            return stepper.step((self, *args), kwargs)

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
        self.state.detach(states)
        if scheduled:
            optimizer.step = types.MethodType(_counted_step, optimizer)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark the update of every parameter that has a gradient. Raises, with nothing changed, if none has one or if
        one is not finite."""
        try:
            with self._engine.owner.turn("optimizer.step()"):
                return self._step(args, kwargs)
        except BaseException:
            self._forget_scaling()
            raise

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer: Any = self._optimizer
        hooks = (torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
        for hook in list(chain(*(each.values() for each in hooks))):
            replaced = hook(optimizer, args, kwargs)
            if replaced is not None:
                args, kwargs = replaced
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # only what parameters are, never their values
            if self._overflowed():
                self.skipped_steps += 1
            else:
                self._mark(self._unscale_by())
                self._engine.streamer.settle_viewed()
        hooks = (optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks)
        for hook in list(chain(*(each.values() for each in hooks))):
            hook(optimizer, args, kwargs)
        return loss

    # Note [The update in the backward]
    # Where the user promises that nothing happens to gradients between `backward` and `step` (update="backward"), the
    # update of a unit starts as soon as its gradients are complete, out of memory: on disk they are neither written nor
    # read. `step` then only checks the promise. Units that lie on the device altogether are updated by `step`.

    def _update_now(self, unit: Unit) -> bool:
        if unit.shard.on_device:
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if unit in self._applied:
                raise RuntimeError(
                    f"a second backward reached {unit.name!r} before optimizer.step(): with update='backward' every "
                    f"backward is a step; use update='fetch' (the default) to accumulate gradients"
                )
            if not self._applied:
                self.state.take()
                self._check_options(lambda param: param.requires_grad)
            groups = self._groups()
            pending = {
                name: self._owed_to(unit, name, param.grad, hyper_of(groups[id(param)]))
                for name, param in unit.parameters.items()
                if isinstance(param.grad, RestingGrad) and id(param) in groups
            }
            if not pending:
                return False
            self._check_finite_in_backward(unit, pending)
            for name in pending:
                unit.parameters[name].grad.spent = True  # type: ignore[union-attr]
            self._applied[unit] = pending
            self._note(unit, pending)
            return self._engine.streamer.update_now(unit, pending)

    def _check_finite_in_backward(self, unit: Unit, pending: Pending) -> None:
        bad = self._not_finite({unit: pending})
        if bad:
            updated = len(self._applied)
            self.forget()
            raise FloatingPointError(
                f"the gradient of {bad[0]!r} is not finite; with update='backward' the units before it in the backward "
                f"were updated already ({updated} of {len(self._engine.units)}). Load the last checkpoint, or use "
                f"update='fetch' (the default), where such a step changes nothing"
            )

    def forget(self) -> None:
        """The state was replaced as a whole: nothing awaits a step."""
        self._applied.clear()

    def awaits_step(self, unit: Unit) -> bool:
        """Whether a backward has applied the unit's gradients and `step` was not called yet."""
        return unit in self._applied

    def _check_promises(self) -> None:
        if not self._applied:
            return
        groups = self._groups()
        for unit, pending in self._applied.items():
            for name, applied in pending.items():
                param = unit.parameters[name]
                grad = param.grad
                own = isinstance(grad, RestingGrad) and grad.label == name
                if not own or not grad.spent or grad.ops != applied.ops:  # type: ignore[union-attr]
                    raise RuntimeError(
                        f"the gradient of {name!r} was replaced or removed between backward() and step(), after the "
                        f"backward had applied it (update='backward'); use update='fetch' (the default)"
                    )
                self._check_promise(name, applied, hyper_of(groups.get(id(param), {})))

    def _check_promise(self, name: str, applied: SlotUpdate, hyper: dict[str, object]) -> None:
        changed = [key for key, value in hyper.items() if differs(value, applied.hyper.get(key))]
        if changed:
            raise RuntimeError(
                f"{changed[0]!r} of a parameter group changed between backward() and step(), after the backward had "
                f"applied the gradient of {name!r} (update='backward'); change it before the backward"
            )

    # Note [Loss scaling]
    # `torch.amp.GradScaler` looks for what is not finite before it calls `step`, and gives what it found and the scale
    # that is still to be taken out to an optimizer that says it can deal with them, as attributes for the call. Where
    # the call raises it leaves them, and would multiply the next scale by the one of before. The scale is taken out
    # when nothing can refuse the step any more, so that a step that was refused leaves the gradients as they were.

    def _overflowed(self) -> bool:
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and bool(found)

    def _unscale_by(self) -> float:
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).double().reciprocal().float())

    def _forget_scaling(self) -> None:
        for name in ("grad_scale", "found_inf"):
            vars(self._optimizer).pop(name, None)

    def _mark(self, factor: float) -> None:
        self._engine.end_interrupted_backward()
        self.state.take()
        if self._engine.reduction is not None:
            self._engine.reduction.complete()
        self._check_promises()
        if self._engine.reduction is None:
            self._check_options(self._is_stepped)  # before gradients are unscaled
        pendings = self._collect()
        if not any(pendings.values()) and not self._applied:
            raise RuntimeError(
                "optimizer.step() was called but no parameter has a gradient; call loss.backward() before it (and "
                "zero_grad() after it)"
            )
        if self._engine.reduction is not None:
            self._engine.reduction.check_step(told(pendings, factor, counted=not self._engine.reduction.sync))
            self._check_options(self._is_stepped)  # behind what tells a rank apart that alone has such an option
        self._check_masters(pendings)
        self._check_finite(pendings, factor)
        for unit, pending in pendings.items():
            if pending or self._delays:
                self._engine.streamer.settle(unit)  # what an earlier step has left fails before this one is marked
        change_groups = self._look_ahead(pendings)
        with stopping_on_errors(self._engine, "optimizer.step()"):
            self._mark_all(pendings, factor)
            if change_groups is not None:
                change_groups()
        self._engine.streamer.schedule.step()
        self._engine.streamer.prefetch()

    def _look_ahead(self, pendings: dict[Unit, Pending]) -> Callable[[], None] | None:
        """What the step makes of its groups. See Note [What a step changes of its groups] in optim/worker.py."""
        marked = [pendings, self._applied]
        stepped = {id(unit.parameters[name]) for each in marked for unit, names in each.items() for name in names}
        groups = self._optimizer.param_groups
        having = [any(id(param) in stepped for param in group["params"]) for group in groups]
        return self._updater.rule.look_ahead(self._optimizer, [hyper_of(group) for group in groups], having)

    def _mark_all(self, pendings: dict[Unit, Pending], factor: float) -> None:
        self._applied.clear()
        self._group_of = {}  # groups may change between steps
        if factor != 1.0:
            self._unscale(pendings, factor)
        if self._delays:
            pendings = self._hold_back(pendings)
        for unit, pending in pendings.items():
            if not pending:
                continue
            self._note(unit, pending)
            if unit.shard.on_device:
                self._update_in_place(unit, pending)
            else:
                self._engine.streamer.owe(unit, pending)
        self.steps += 1
        if self._engine.reduction is not None:
            self._engine.reduction.ranks.model.step = self.steps

    def _unscale(self, pendings: dict[Unit, Pending], factor: float) -> None:
        """Take the loss scale out of the gradients, where the user sees them too."""
        for unit, pending in pendings.items():
            for name, owed in pending.items():
                grad = unit.parameters[name].grad
                assert grad is not None
                grad.mul_(factor)
                pending[name] = owed_to(unit, name, grad, owed.hyper)

    def _update_in_place(self, unit: Unit, pending: Pending) -> None:
        self._updater.update_in_place(unit.shard, pending)
        unit.updates += 1
        for name in pending:  # a graph of before must not be used
            torch.autograd.graph.increment_version(unit.parameters[name])

    def _note(self, unit: Unit, pending: Pending) -> None:
        for name, owed in pending.items():
            owed.noted = self._updater.rule.note(unit.parameters[name])

    def _is_stepped(self, param: torch.Tensor) -> bool:
        return param.grad is not None or self._delays

    def _check_options(self, stepped: Callable[[torch.Tensor], bool]) -> None:
        """Of groups with parameters that are `stepped`: the update must run with their options, and an option that was
        set after `prepare` may need an array that nobody made."""
        self.state.check_counts()
        for index, group in enumerate(self._optimizer.param_groups):
            if not any(map(stepped, group["params"])):
                continue
            hyper = hyper_of(group)
            self._updater.check(hyper, f"optimizer.param_groups[{index}]")
            missing = self._updater.missing(hyper)
            if missing:
                raise RuntimeError(
                    f"the optimizer needs {missing[0]!r} for each element since an option of a parameter group was "
                    f"changed after outsize.prepare; set the option (a momentum, amsgrad) before prepare. Nothing was "
                    f"updated"
                )

    def _check_masters(self, pendings: dict[Unit, Pending]) -> None:
        for unit, pending in pendings.items():
            if pending and unit.writable and MASTER in unit.shard.arrays:
                raise RuntimeError(
                    f"optimizer.step() inside gathered(..., modify=True) of {unit.name!r}: what the step changes and "
                    f"what you change could not be told apart, and its masters hold more bits than its weights show; "
                    f"call step() outside the block. Nothing was updated"
                )

    @property
    def _delays(self) -> bool:
        return self._warmup is not None and self.steps >= self._warmup

    def _hold_back(self, pendings: dict[Unit, Pending]) -> dict[Unit, Pending]:
        """Keep these gradients for the next step; returns those of the step before, with today's hyper-parameters."""
        ready: dict[Unit, Pending] = {}
        groups = self._groups()
        for unit, pending in pendings.items():
            self._engine.streamer.settle(unit)  # it may still owe an exact update out of the same bytes
            pending = self._engine.gradients[unit.index].keep_together(pending)
            ready[unit] = {
                name: replace(owed, hyper=hyper_of(groups[id(unit.parameters[name])]))
                for name, owed in unit.held.items()
                if id(unit.parameters[name]) in groups
            }
            unit.held = {
                name: owed if owed.loose is None else replace(owed, loose=owed.loose.clone())
                for name, owed in pending.items()
            }
            self._engine.gradients[unit.index].turn()
        return ready

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by the parameter's id; looked up once for all units of a backward."""
        groups = self._optimizer.param_groups
        if len(self._group_of) != sum(len(group["params"]) for group in groups):
            self._group_of = {id(param): group for group in groups for param in group["params"]}
        return self._group_of

    def _collect(self) -> dict[Unit, Pending]:
        pendings: dict[Unit, Pending] = {unit: {} for unit in self._engine.units}
        for index, group in enumerate(self._optimizer.param_groups):
            hyper = hyper_of(group)
            for param in group["params"]:
                if param.grad is not None:
                    if not self._engine.owns(param):
                        raise ValueError(
                            f"optimizer.param_groups[{index}] has a parameter of shape {tuple(param.shape)} that is "
                            f"not in the model that outsize.prepare prepared: take it out, and build the whole model "
                            f"before prepare. Nothing was updated"
                        )
                    unit, slot = self._engine.unit_of(param)
                    if slot.name in self._applied.get(unit, {}):
                        continue
                    pendings[unit][slot.name] = self._owed_to(unit, slot.name, param.grad, hyper)
        return pendings

    def _owed_to(self, unit: Unit, name: str, grad: torch.Tensor, hyper: dict[str, object]) -> SlotUpdate:
        expect_own(unit, name, grad, self._engine.gradients[unit.index])
        self._make_room(unit, [name])
        return owed_to(unit, name, grad, hyper)

    def _make_room(self, unit: Unit, names: Collection[str]) -> None:
        """For the state of parameters that were frozen, or not the optimizer's, in `prepare`."""
        if not all(unit.shard.has_room(name) for name in names):
            self._engine.streamer.settle(unit)
            unit.await_written()
            unit.shard.make_room(names)

    def _check_finite(self, pendings: dict[Unit, Pending], factor: float) -> None:
        """Raise unless all gradients are finite, and stay so when a loss scale's `factor` is taken out."""
        bad = self._not_finite(pendings)
        if not isfinite(factor):
            bad = [name for pending in pendings.values() for name in pending]
        if bad:
            count = sum(len(pending) for pending in pendings.values())
            raise FloatingPointError(
                f"optimizer.step(): the gradient of {bad[0]!r} is not finite ({len(bad)} of {count} parameters; the "
                f"loss was NaN or infinite, or overflowed on the way). Nothing was updated. Call zero_grad() and go on "
                f"with another batch, or lower the learning rate"
            )

    def _not_finite(self, pendings: dict[Unit, Pending]) -> list[str]:
        names: list[str] = []
        finite: list[torch.Tensor] = []
        plain: list[tuple[str, torch.Tensor]] = []
        for unit, pending in pendings.items():
            for name, owed in pending.items():
                grad = unit.parameters[name].grad
                if isinstance(grad, RestingGrad):
                    names.append(name)
                    finite.append(grad.finite)
                elif owed.loose is not None and owed.loose.numel():
                    plain.append((name, owed.loose))
        names += [name for name, _ in plain]
        if plain:
            finite += torch._foreach_norm([grad for _, grad in plain])
        good = torch.isfinite(torch.stack(finite)) if finite else torch.ones(0, device="cpu")
        if good.all():
            return []
        return [name for name, each in zip(names, good.tolist(), strict=True) if not each and not self._is_finite(name)]

    def _is_finite(self, name: str) -> bool:
        """The sum of squares of large elements may overflow: look at the elements."""
        unit = next(unit for unit in self._engine.units if name in unit.parameters)
        grad = unit.parameters[name].grad
        assert grad is not None
        return grad.home.all_finite(grad) if isinstance(grad, RestingGrad) else bool(torch.isfinite(grad).all())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a plain optimizer's state dict: hyper-parameters, arrays and step counts.

        Raises `ValueError`, with nothing changed, for the state of another optimizer or of other parameters.
        """
        with self._engine.owner.turn("optimizer.load_state_dict()"):
            self.state.load_state_dict(state_dict, self.forget)

    def state_dict(self) -> dict[str, Any]:
        """A plain optimizer's state dict, of one step."""
        with self._engine.owner.turn("optimizer.state_dict()"):
            return self.state.state_dict()

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
            if isinstance(param, torch.Tensor) and not self._engine.owns(param):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not in the model that outsize.prepare prepared; "
                    f"build the whole model before prepare"
                )
        with torch._C.DisableTorchFunctionSubclass():
            type(self._optimizer).add_param_group(self._optimizer, group)
            try:
                names: dict[Unit, list[str]] = {}
                for unit, slot in map(self._engine.unit_of, given):
                    names.setdefault(unit, []).append(slot.name)
                for unit, own in names.items():
                    self._make_room(unit, own)
            except BaseException:
                self._optimizer.param_groups.pop()
                raise
