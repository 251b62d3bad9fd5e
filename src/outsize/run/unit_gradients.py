"""The gradients of a unit: each is taken from autograd as soon as it exists, and laid to rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from outsize.move.grad_ops import GradOps
from outsize.move.shard import Pending
from outsize.move.store import OWN_BYTES
from outsize.planning.layout import Slot
from outsize.run.activations import in_backward
from outsize.run.collecting import Collector
from outsize.run.grads import RestingGrad
from outsize.run.local import expect_dense, local_gradient
from outsize.run.owner import Owner
from outsize.run.parameters import grad_of, requires_grad, set_grad
from outsize.run.reduction import Reduction
from outsize.run.resting_grads import RestingGrads
from outsize.run.resting_place import Laid, RestingPlace
from outsize.run.streamer import Streamer
from outsize.run.unit import Unit

WAITING_BYTES = 1 << 20
"""Gradients that wait to be laid to rest with the next ones of their unit take no more."""


# Note [An owed update owns its gradients]
# After `step()` the gradients' bytes belong to the update until it has run. Reading them is free; whatever changes
# them (a further backward, a modification) first settles the unit, which runs the update that it still owes.


@final
@dataclass(eq=False, repr=False)
class UnitGradients:
    """What `param.grad` is, for the parameters of one unit, between the backward and the update."""

    _unit: Unit
    place: RestingPlace
    owner: Owner
    _streamer: Streamer
    _reduction: Reduction | None  # None with one rank
    _updates: bool  # whether the update takes the gradients out of memory in the backward

    def __post_init__(self) -> None:
        several = None if self._reduction is None or self._reduction.ranks.alone else self._reduction
        self.collector = several and Collector(self._unit, several, self, self._streamer.room)
        self.deferred = False  # whether the update waits for the end of the backward
        self._missing: set[str] | None = None  # of this backward; None before the first gradient and after the last
        self._waiting: list[str] = []  # what has arrived and is not laid to rest
        self._waiting_bytes = 0
        self._with_graph = False  # of a backward with create_graph, of whose gradients a penalty may be made
        self.resting = RestingGrads(self._unit, self, self.place, self._reduction)
        self.shown: dict[str, RestingGrad] = {}  # in whose place `param.grad` is a copy of the values for now

    # -- the backward ------------------------------------------------------------------------------------------------

    @property
    def collecting(self) -> bool:
        """Whether some gradients of a backward are in and others are not."""
        return self._missing is not None

    def arrives(self, slot: Slot) -> bool:
        """Autograd has just left this gradient in `param.grad`; it is laid to rest at the latest when all are there.
        Whether it is the last that the unit waits for."""
        if self._missing is None:
            self._missing = {each for each, param in self._unit.parameters.items() if requires_grad(param)}
        self._with_graph = torch.is_grad_enabled()
        self._missing.discard(slot.name)
        self._waiting.append(slot.name)
        self._waiting_bytes += slot.numel * OWN_BYTES[slot.dtype]
        if self._missing and (self._waiting_bytes >= WAITING_BYTES or self.collector is not None):
            self._lay_waiting_down()
            self._streamer.room.make_way()
        return not self._missing

    def take_tile(self, name: str, first: int, grad: torch.Tensor) -> None:
        """Lay some elements of a gradient to rest, those from `first` on; `take` follows when all are there."""
        if self.collector is not None and self._reduction is not None and not self.place.tiles:
            self.collector.reduce()  # what other uses have left is added to
            self._reduction.flush()
        previous = self._unit.parameters[name].grad
        if previous is not None and not isinstance(previous, RestingGrad):
            self._lay_waiting_down()
            self.adopt(name, previous)
            previous = self._unit.parameters[name].grad
        ops = None
        if isinstance(previous, RestingGrad) and not previous.ops.zero:
            if not self.place.tiles:
                self.resting.check_current(previous)
                previous.expect_unspent("added to")
                self._bring_here(previous)
            ops = previous.ops
        self.place.lay_tile_down(name, first, grad, ops, self._streamer.room.make)

    def _lay_waiting_down(self) -> None:
        names, self._waiting, self._waiting_bytes = self._waiting, [], 0
        parameters, grads = self._unit.parameters, []
        for name in dict.fromkeys(names):
            param = parameters[name]
            grad = grad_of(param)
            if self.place.tiles:
                param.grad = self._at_rest(name, self.place.tiles_laid())
                if grad is not None and not isinstance(grad, RestingGrad):  # the parameter was also used whole
                    self.add(param.grad, grad)
            elif isinstance(grad, RestingGrad):
                if grad.requires_grad:
                    grad.detach_()  # a gradient at rest has no graph, which would keep the parameter
            elif grad is not None and self.collector is not None:
                param.grad = self.collector.collect(name, local_gradient(param, grad), None)
            elif grad is not None and not self._with_graph:
                grads.append((name, local_gradient(param, grad), None))
        for (name, _, _), laid in zip(grads, self._lay_down(grads), strict=True):
            set_grad(parameters[name], self._at_rest(name, laid))

    def defer(self) -> bool:
        """The unit's gradients are complete. Whether `end_of_backward` must wait until the backward is over: parameters
        without a gradient may still be needed, and an update would end that."""
        if not self._updates or all(param.requires_grad for param in self._unit.parameters.values()):
            return False
        self._lay_waiting_down()
        self.deferred, self._missing = True, None
        return True

    def end_of_backward(self, complete: bool) -> bool:
        """The unit's gradients of this backward are complete, or as many as an interrupted one has left.

        Returns whether they are at rest, and `finish` must follow. Otherwise they come to rest when they are reduced.
        """
        self._lay_waiting_down()
        self.deferred, self._missing = False, None
        if self._reduction is not None and self.collector is not None:
            if not complete:
                self.collector.abandon()
            elif self._reduction.sync:
                return False  # see Note [Units that some ranks do not use]
            elif self._reduction.reducing:
                self.collector.reduce()
                if not self._updates:
                    return False
                self._reduction.flush()
        self.place.dispatch()
        return True

    def given_to_update(self) -> None:
        """The update has started, in the backward. It takes the gradients out of memory."""
        if all(grad.spent for grad in map(grad_of, self._unit.parameters.values()) if isinstance(grad, RestingGrad)):
            self.place.give_to_update()

    def finish(self) -> None:
        """What came together goes to where it rests."""
        self._missing = None
        if self.place.tiles:  # of a backward that was interrupted: what they were added to is of no use
            self.place.tiles_laid()
            for name, param in self._unit.parameters.items():
                if isinstance(param.grad, RestingGrad):
                    self.resting.next(name)
        self.place.finish()

    # -- further contributions ---------------------------------------------------------------------------------------

    def add(self, grad: RestingGrad, more: torch.Tensor) -> None:
        """A further contribution to a gradient at rest."""
        more = local_gradient(self._unit.parameters[grad.label], more)
        if self.collector is None or not self.collector.expects(grad):
            self.resting.check_current(grad)
        if not grad.ops.zero:
            grad.expect_unspent("added to")
        if self.collector is not None:
            self.collector.collect(grad.label, more, grad)
            return
        self._bring_here(grad)
        self._become(grad, *self._lay_down([(grad.label, more, grad)]))
        if not in_backward():  # the user's own contribution: no end of a backward follows
            self.finish()

    def keep_together(self, pending: Pending) -> Pending:
        """Bring gradients of an earlier step, whose bytes lie in the other shard, to those of this step."""
        for name, owed in pending.items():
            grad = self._unit.parameters[name].grad
            if isinstance(grad, RestingGrad) and self._bring_here(grad):
                pending[name] = replace(owed, ops=grad.ops, loose=grad.loose, resting=self.place.shard)
        self.finish()
        return pending

    def _bring_here(self, grad: RestingGrad) -> bool:
        """Bring a gradient whose bytes belong to an update that is held back to where those of this step rest."""
        if grad.shard is self.place.shard or grad.ops.zero:
            return False
        self._replace(grad, self.resting.exact(grad))
        return True

    def _replace(self, grad: RestingGrad, value: torch.Tensor) -> None:
        """Lay values (1-D) to rest in the gradient's place; `finish` must follow."""
        grad.ops = GradOps(zero=True)
        value = value if grad.loose is None else value.view_as(grad.loose)
        self._become(grad, *self._lay_down([(grad.label, value, grad)]))

    def rewrite(self, grad: RestingGrad, divisor: float = 1.0) -> None:
        """Apply the remembered operations to the bytes, then a division."""
        self.resting.check_current(grad)
        self._streamer.settle(self._unit)
        value = self.resting.exact(grad)
        if divisor != 1.0:
            value.div_(divisor)
        self._replace(grad, value)
        self.finish()

    # -- gradients from elsewhere --------------------------------------------------------------------------------------

    def adopt(self, name: str, value: torch.Tensor) -> None:
        """Make `value` the parameter's gradient at rest, whatever there was; with several ranks all have the same."""
        value = local_gradient(self._unit.parameters[name], value)
        if self.collector is not None:
            value = self._unit.shard.own(name, value).clone()
        self._unit.parameters[name].grad = self._rest(name, value)
        self.finish()

    def restore(self, name: str, content: torch.Tensor, ops: GradOps, norms: Mapping[float, float]) -> None:
        """Lay a gradient to rest as a checkpoint holds it: bytes as they rested, operations not yet applied, norms.

        `finish` must follow when all gradients of the unit are in.
        """
        whole = content if self.collector is None else content.reshape(-1)  # as it is collected
        grad = self._rest(name, whole)
        grad.ops = ops
        self.place.find_norms()
        grad.norms.update({order: torch.full_like(grad.norms[2.0], norm) for order, norm in norms.items()})
        self._unit.parameters[name].grad = grad

    def rest_reduced(self, name: str, own: torch.Tensor, previous: RestingGrad | None, grad: RestingGrad) -> None:
        """Lay what is this rank's of a reduced gradient to rest as `grad`, added to what rests as `previous`."""
        if previous is not None:
            self._bring_here(previous)
        self._become(grad, *self._lay_down([(name, own, previous)]))

    def all_at_rest(self) -> None:
        """What was reduced is laid to rest."""
        if not self._updates:
            self.finish()

    # -- laying down -------------------------------------------------------------------------------------------------

    def _rest(self, name: str, grad: torch.Tensor) -> RestingGrad:
        """Lay a gradient down that is added to nothing."""
        return self._at_rest(name, *self._lay_down([(name, grad, None)]))

    def _at_rest(self, name: str, laid: Laid) -> RestingGrad:
        """The parameter's gradient from now on."""
        resting = self.resting.next(name)
        if resting is None:  # on the device a gradient owns its bytes, so that they go when it goes
            assert laid.norm is not None, "it is found at once there"
            resting = RestingGrad(self._unit.parameters[name], name, self, laid.norm, laid.loose)
        self._become(resting, laid)
        resting.reductions = 0
        return resting

    def _lay_down(self, grads: Sequence[tuple[str, torch.Tensor, RestingGrad | None]]) -> list[Laid]:
        if not grads:
            return []
        for name, grad, _ in grads:
            expect_dense(name, grad)
        if not self._unit.settled:
            self._streamer.settle(self._unit)  # see Note [An owed update owns its gradients]
        with torch.no_grad():
            return self.place.lay_down(grads, self._live, self._streamer.room.make)

    def _live(self) -> Collection[str]:
        grads = {name: self.shown.get(name, param.grad) for name, param in self._unit.parameters.items()}
        shard = self.place.shard
        return [name for name, grad in grads.items() if isinstance(grad, RestingGrad) and grad.shard is shard]

    def _become(self, grad: RestingGrad, laid: Laid) -> None:
        if laid.norm is None:
            self.place.unknown[grad.label] = grad
        else:
            self.place.unknown.pop(grad.label, None)
        grad.become(laid.norm, laid.loose, self.place.shard)
        if self._reduction is not None:
            self._reduction.changed()
