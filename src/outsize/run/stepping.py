"""`optimizer.step()` on streamed state: it marks the update of each unit, which the unit's next fetch runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, final

import torch

from outsize.move.shard import Pending
from outsize.move.tracing import turned
from outsize.optim.rows import update_rows
from outsize.optim.update import ChunkUpdater
from outsize.run.grads import RestingGrad
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters, grad_of
from outsize.run.reduction import Reduction
from outsize.run.state import OptimizerState
from outsize.run.step_record import (
    average_rows,
    check_finite,
    check_finite_in_backward,
    check_masters,
    check_promises,
    hyper_of,
    owed_to,
    told,
    unscale,
)
from outsize.run.streamer import Streamer
from outsize.run.unit import Residency, Unit
from outsize.run.unit_gradients import UnitGradients

# Note [The update happens at the fetch]
# `step()` takes a snapshot of everything the update depends on: learning rates and the like, the factors that clipping
# put on each gradient, and which parameters have gradients at all. It then returns; `scheduler.step()` and
# `zero_grad()` may follow, and the next fetch of each unit runs its update in the order in which the next forward
# needs the units. A unit that still owes an update when the next step comes runs it before that step is marked.

# Note [Delayed update]
# ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2): after `warmup` exact steps one
# step's gradients are held back; from then on each step applies the gradients of the step before it, with the
# hyper-parameters of now. A step that has no gradients before it to apply changes nothing, no group's count either.

# Note [The update in the backward]
# Where the user promises that nothing happens to gradients between `backward` and `step` (update="backward"), the
# update of a unit starts as soon as its gradients are complete, out of memory: on disk they are neither written nor
# read. Where weights and gradients have no room together, it waits for the fetch. `step` then only checks the promise.
# Units that lie on the device altogether are updated by `step`.


@final
@dataclass(eq=False, repr=False)
class Stepper:
    """Records what each step does to each unit, and marks it; under update="backward" unit by unit."""

    _parameters: Parameters
    _gradients: Sequence[UnitGradients]
    _streamer: Streamer
    owner: InitVar[Owner]
    _reduction: Reduction | None  # None with one rank
    _optimizer: torch.optim.Optimizer
    _updater: ChunkUpdater
    _warmup: int | None

    def __post_init__(self, owner: Owner) -> None:
        self.steps = self.skipped_steps = 0
        own = self._parameters, self._streamer, owner, self._optimizer, self._updater.rule
        self.state = OptimizerState(*own, self.expect_stepped)
        self._group_of: dict[int, dict[str, Any]] = {}
        self._applied: dict[Unit, Pending] = {}  # in this backward. See Note [The update in the backward]

    def update_now(self, unit: Unit) -> bool:
        """The unit's gradients are complete: start its update out of memory. Returns whether it has started."""
        if unit.shard.on_device:
            return False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if unit in self._applied:
                raise RuntimeError(
                    f"a second backward reached {unit.name!r} before optimizer.step(): with update='backward' the "
                    f"first one was applied already; call step() after each, or use update='fetch' (the default) to "
                    f"accumulate gradients or to throw some away. If a backward has raised, load the last checkpoint"
                )
            if not self._applied:
                self.state.take()
                self._check_options(lambda param: param.requires_grad)
            groups, home = self._groups(), self._gradients[unit.index]
            pending = {
                name: owed_to(unit, name, param.grad, hyper_of(groups[id(param)]), home)
                for name, param in unit.parameters.items()
                if isinstance(param.grad, RestingGrad) and id(param) in groups
            }
            if not pending:
                return False
            self.make_room(unit, pending)
            check_finite_in_backward(unit, pending, self._applied, len(self._parameters.units))
            for name in pending:
                unit.parameters[name].grad.spent = True  # type: ignore[union-attr]
            self._applied[unit] = pending
            self._note(unit, pending)
            return self._streamer.update_now(unit, pending)

    def forget(self) -> None:
        """The state was replaced as a whole: nothing awaits a step."""
        self._applied.clear()

    def awaits_step(self, unit: Unit) -> bool:
        """Whether a backward has applied the unit's gradients and `step` was not called yet."""
        return unit in self._applied

    def expect_stepped(self, params: Iterable[torch.Tensor], what: str = "") -> None:
        """Raise before weights, or `what` of them, are written to where torch would update what was written."""
        for param in params:
            unit, slot = self._parameters.unit_of(param)
            if slot.name in self._applied.get(unit, {}):
                raise RuntimeError(
                    f"{what}{slot.name!r} cannot be written to between backward() and step(): with update='backward' "
                    f"it was updated already; call step() first, or use update='fetch' (the default)"
                )

    def mark(self, factor: float) -> None:
        """Mark the update of every parameter that has a gradient, a loss scale's `factor` taken out. Raises, with
        nothing changed, if none has one or if one is not finite."""
        turned("step")
        self.state.take()
        if self._reduction is not None:
            self._reduction.complete()
        check_promises(self._applied, self._groups() if self._applied else {})
        if self._reduction is None:
            self._check_options(self._is_stepped)  # before gradients are unscaled
        pendings = self._collect()
        if not any(pendings.values()) and not self._applied:
            raise RuntimeError(
                "optimizer.step() was called but no parameter has a gradient; call loss.backward() before it (and "
                "zero_grad() after it). A parameter that came after outsize.prepare (an adapter, a new layer) does not "
                "count: call outsize.release(model), and prepare the model again"
            )
        if self._reduction is not None:
            alone = self._reduction.ranks.alone  # then nobody has what it could be compared with
            self._reduction.check_step({} if alone else told(pendings, factor))
            self._check_options(self._is_stepped)  # behind what tells a rank apart that alone has such an option
            with self._streamer.live.waiting():
                average_rows(pendings, self._reduction)
        check_masters(pendings)
        check_finite(pendings, factor, self._reduction)
        for unit, pending in pendings.items():
            if unit.shard.rows is not None:
                self._expect_alone(unit, pending)
            elif pending or self._delays:
                self._streamer.settle(unit)  # what an earlier step has left fails before this one is marked
        change_groups = self._look_ahead(pendings)
        with self._streamer.live.changing("optimizer.step()"):
            self._mark_all(pendings, factor)
            if change_groups is not None:
                change_groups()
        self._streamer.schedule.step()
        self._streamer.prefetch()
        self._streamer.settle_seen()
        turned("loop")

    def check_closure(self) -> None:
        """Raise if the optimizer does more with a closure than to call it."""
        self._updater.rule.check_closure(list(map(hyper_of, self._optimizer.param_groups)))

    def _look_ahead(self, pendings: dict[Unit, Pending]) -> Callable[[], None] | None:
        """What the step makes of its groups. See Note [What a step changes of its groups] in optim/worker.py."""
        held = [(unit, unit.held) for unit in pendings]
        marked = held if self._delays else [*pendings.items(), *self._applied.items()]
        stepped = {id(unit.parameters[name]) for unit, names in marked for name in names}
        if not stepped:  # its gradients are held back. See Note [Delayed update]
            return None
        having = [any(id(param) in stepped for param in group["params"]) for group in self._optimizer.param_groups]
        return self._updater.rule.look_ahead(self._optimizer, list(map(hyper_of, self._optimizer.param_groups)), having)

    def _mark_all(self, pendings: dict[Unit, Pending], factor: float) -> None:
        self._applied.clear()
        self._group_of = {}  # groups may change between steps
        if factor != 1.0:
            unscale(pendings, factor, self._gradients)
        if self._delays:
            pendings = self._hold_back(pendings)
        for unit, pending in [each for each in pendings.items() if each[1]]:
            self._note(unit, pending)
            if unit.shard.rows is not None:
                self._update_rows(unit, pending)
            elif unit.shard.on_device:
                self._updater.update_in_place(unit.shard, pending)
                unit.updates += 1
            else:
                self._streamer.owe(unit, pending)
            # A graph of before must not be used.
            torch.autograd.graph.increment_version([unit.parameters[name] for name in pending])
        self.steps += 1
        if self._reduction is not None:
            self._reduction.ranks.model.step = self.steps

    def _expect_alone(self, unit: Unit, pending: Pending) -> None:
        """Nobody has gathered the table, which the update of rows would not reach."""
        if unit.holds or unit.viewed:
            raise RuntimeError(
                f"optimizer.step() while outsize.gathered shows table {unit.name!r}, or somebody holds a view of it; "
                f"call step() outside the block. Nothing was updated"
            )
        for name in pending:
            self._updater.rule.check_rows(pending[name].hyper, name, type(self._optimizer).__name__)
        if pending and unit.state is not Residency.AT_REST:
            self._streamer.room.release(unit)

    def _update_rows(self, unit: Unit, pending: Pending) -> None:
        for name, owed in pending.items():
            update_rows(self._updater.rule, unit.shard, name, owed)
            rows, grad = unit.shard.rows, unit.parameters[name].grad
            if rows is not None and grad is not None:
                rows.applied = weakref.ref(grad), grad._version
        unit.updates += 1

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
            hyper, rule = hyper_of(group), self._updater.rule
            rule.check(hyper, f"optimizer.param_groups[{index}]")
            missing = [name for name in rule.needs(hyper) if name not in rule.arrays]
            if missing:
                raise RuntimeError(
                    f"the optimizer needs {missing[0]!r} for each element since an option of a group was changed "
                    f"after outsize.prepare; set the option (a momentum, amsgrad) before prepare. Nothing was updated"
                )

    @property
    def _delays(self) -> bool:
        return self._warmup is not None and self.steps >= self._warmup

    def _hold_back(self, pendings: dict[Unit, Pending]) -> dict[Unit, Pending]:
        """Keep these gradients for the next step; returns those of the step before, with today's hyper-parameters."""
        ready: dict[Unit, Pending] = {}
        groups = self._groups()
        for unit, pending in pendings.items():
            self._streamer.settle(unit)  # it may still owe an exact update out of the same bytes
            pending = self._gradients[unit.index].keep_together(pending)
            ready[unit] = {
                name: replace(owed, hyper=hyper_of(groups[id(unit.parameters[name])]))
                for name, owed in unit.held.items()
                if id(unit.parameters[name]) in groups
            }
            unit.held = {
                name: owed if owed.loose is None else replace(owed, loose=owed.loose.clone())
                for name, owed in pending.items()
            }
            self._gradients[unit.index].place.turn()
        return ready

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by the parameter's id; looked up once for all units of a backward."""
        groups = self._optimizer.param_groups
        if len(self._group_of) != sum(len(group["params"]) for group in groups):
            self._group_of = {id(param): group for group in groups for param in group["params"]}
        return self._group_of

    def _collect(self) -> dict[Unit, Pending]:
        pendings: dict[Unit, Pending] = {unit: {} for unit in self._parameters.units}
        for index, group in enumerate(self._optimizer.param_groups):
            hyper = hyper_of(group)
            for param in group["params"]:
                if (grad := grad_of(param)) is not None:
                    if not self._parameters.owns(param):
                        raise ValueError(
                            f"optimizer.param_groups[{index}] has a parameter of shape {tuple(param.shape)} that is "
                            f"not in the model that outsize.prepare prepared: take it out, and build the whole model "
                            f"before prepare. Nothing was updated"
                        )
                    unit, slot = self._parameters.unit_of(param)
                    if slot.name not in self._applied.get(unit, {}):
                        pendings[unit][slot.name] = owed_to(unit, slot.name, grad, hyper, self._gradients[unit.index])
        for unit, pending in pendings.items():
            self.make_room(unit, pending)
        return pendings

    def make_room(self, unit: Unit, names: Collection[str]) -> None:
        """For the state of parameters that were frozen, or not the optimizer's, in `prepare`."""
        if not unit.shard.has_room(names):
            self._streamer.settle(unit)
            unit.await_written()
            unit.shard.make_room(names)
