"""The gradients of a unit: each is taken from autograd as soon as it exists, and laid to rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch

from outsize.move.conveyor import Conveyor, Job
from outsize.move.grad_ops import GradOps, add_contribution, vector_norm, vector_norms, wide_dtype
from outsize.move.gradients import GradShard, WriteGradsStep
from outsize.move.shard import Pending, SlotUpdate
from outsize.plan.layout import Slot
from outsize.run.activations import in_backward
from outsize.run.collecting import Collector
from outsize.run.grads import RestingGrad
from outsize.run.local import expect_dense, like, local_gradient
from outsize.run.owner import Owner
from outsize.run.reduction import Reduction
from outsize.run.unit import Unit

if TYPE_CHECKING:
    from outsize.run.streamer import Streamer


@final
class UnitGradients:
    """Owns the gradients of one unit between backward and update.

    On the device tier the gradient stays the tensor that autograd produced, held by its `RestingGrad`. On host and disk
    it is copied into the unit's `GradShard`; on disk the shard is written once all of the unit's gradients are in.
    """

    # Note [An owed update owns its gradients]
    # After `step()` the gradients' bytes belong to the update until it has run. Reading them is free; whatever changes
    # them (a further backward, a modification) first settles the unit, which runs the update that it still owes.

    def __init__(
        self,
        unit: Unit,
        conveyor: Conveyor,
        owner: Owner,
        streamer: Streamer,
        reduction: Reduction | None = None,
        resting_bytes: int = 0,
        sum_bytes: int = 0,
    ) -> None:
        """`resting_bytes`: memory that gradients take on their way to rest, on the rank that has most of the unit;
        `sum_bytes`: the same where they are added to others."""
        self.owner = owner
        self._reduction = reduction  # None with one rank
        self.collector = (
            None if reduction is None else Collector(unit, reduction, self, streamer, resting_bytes, sum_bytes)
        )
        self._unit = unit
        self._conveyor = conveyor
        self._streamer = streamer
        self._slots = unit.shard.slots
        self.update_now: Callable[[Unit], bool] | None = None  # where the update runs in the backward
        self.deferred = False  # whether the update waits for the end of the backward
        self._arrived: set[str] = set()
        self._awaited: set[str] = set()  # by the unit, in this backward
        self._writing: Job | None = None
        self._dirty = False
        self._resting: dict[str, list[RestingGrad]] = {}  # [current, spare] by parameter
        self._unknown: dict[str, RestingGrad] = {}  # whose norms are still to be found
        self.shown: dict[str, RestingGrad] = {}  # in whose place `param.grad` is a copy of the values for now

    # Note [Gradients of two steps]
    # Under the delayed update the gradients of one step are held back until the next. A unit then has two gradient
    # shards: `turn` gives the one that holds them to the held update, and the next backward fills the other. Each
    # gradient at rest knows in which of them its bytes lie.

    # Note [Small things that live long]
    # A small block that is allocated while a large temporary lies beside it, and outlives it, splits the hole that the
    # temporary leaves: the next one of the same size takes fresh memory. One such block a unit and step made resident
    # memory grow by a gradient for every layer. So what stays behind a gradient, its `RestingGrad` and norm, is made
    # once, before training, and the norms of a unit lie in one tensor. Two serve each parameter in turn. One that the
    # user has kept is replaced when its turn comes: were it filled again, it would pass for the gradient that it was.

    def make_ready(self) -> None:
        """Make what gradients at rest need; the parameters have taken on their final dtype and device."""
        if self._shard is None:
            return
        device = self._unit.shard.device
        norms = {
            dtype: torch.zeros(len(self._slots), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)
        }
        for index, (name, param) in enumerate(self._unit.parameters.items()):
            norm = norms[torch.float64 if param.dtype is torch.float64 else torch.float32][index]
            self._resting[name] = [RestingGrad(param, name, self, norm), RestingGrad(param, name, self, norm.clone())]

    @property
    def _shard(self) -> GradShard | None:
        """Where the gradients of this backward come to rest."""
        return self._unit.shard.grads

    @property
    def passing_bytes(self) -> int:
        """Bytes that the gradients of a backward take before they have come to rest; only with several ranks."""
        return 0 if self.collector is None else self.collector.passing_bytes

    def turn(self) -> None:
        """The gradients at rest are held back: the next backward uses the other shard."""
        if self._shard is not None:
            self.flush_and_drop()
            self._unit.shard.grad_shards.reverse()

    @property
    def collecting(self) -> bool:
        """Whether some gradients of a backward are in and others are not."""
        return bool(self._arrived)

    def arrives(self, name: str) -> bool:
        """Autograd has made this gradient; whether it is the last that the unit waits for."""
        if not self._arrived:
            params = self._unit.parameters.items()
            self._awaited = {each for each, param in params if param.requires_grad}
        self._arrived.add(name)
        return self._awaited <= self._arrived

    def take(self, name: str, complete: bool) -> None:
        """Lay the gradient that autograd has just left in `param.grad` to rest."""
        param = self._unit.parameters[name]
        grad = param.grad
        if grad is not None and not isinstance(grad, RestingGrad):
            grad = local_gradient(param, grad)
            collector = self.collector
            param.grad = self._rest(name, grad) if collector is None else collector.collect(name, grad, None)
        elif grad is not None and grad.requires_grad:
            grad.detach_()  # a gradient at rest has no graph, which would keep the parameter
        if complete and self.update_now is not None and self._frozen:
            self.deferred = True  # the frozen parameters may be needed until the backward is over
            self._arrived.clear()
        elif complete:
            self.end_of_backward()
            if self._reduction is not None:
                self._reduction.unit_complete(self._unit.index)

    @property
    def _frozen(self) -> bool:
        return not all(param.requires_grad for param in self._unit.parameters.values())

    def end_of_backward(self, complete: bool = True) -> None:
        """The unit's gradients of this backward are complete, or as many as an interrupted one has left."""
        self.deferred = False
        self._arrived.clear()
        if self._reduction is not None and self.collector is not None:
            if not complete:
                self.collector.abandon()
            elif self._reduction.sync:
                return  # see Note [Units that some ranks do not use]
            elif self._reduction.reducing:
                self.collector.reduce()
                if self.update_now is None:
                    return  # the rest follows when it is reduced
                self._reduction.flush()
        if self._shard is not None:
            self._shard.dispatch()
        if complete and self.update_now is not None and self.update_now(self._unit):  # out of memory: nothing to write
            self._writing = self._unit.job
            grads = [param.grad for param in self._unit.parameters.values()]
            if all(grad.spent for grad in grads if isinstance(grad, RestingGrad)):
                self._dirty = False
                return
        self.finish()

    def finish(self) -> None:
        """What came together goes to where it rests."""
        self._arrived.clear()
        shard = self._shard
        if shard is not None:
            shard.dispatch()
        self._find_norms()
        if shard is not None and shard.store is not None and shard.in_memory and self._dirty:
            self._start_writing(shard)

    def _start_writing(self, shard: GradShard) -> None:
        self._dirty = False
        self._writing = self._unit.submit(self._conveyor, iter([WriteGradsStep(shard)]))

    def drop_if_written(self) -> None:
        """Give back the memory of gradients that are on disk by now. Raises what went wrong with the writing."""
        if self._writing is not None and self._writing.written.done():
            self._writing.written.wait()
            self._writing = None
            if self._shard is not None and not self._dirty:
                self._shard.drop()

    def flush_and_drop(self) -> bool:
        """Write the gradients out now and give their memory back; whether there were any."""
        shard = self._shard
        if shard is None or shard.store is None or not shard.in_memory:
            return False
        if self._dirty:
            shard.dispatch()
            self._find_norms()
            self._start_writing(shard)
        self._await_writing()
        shard.drop()
        return True

    def _await_writing(self) -> None:
        if self._writing is not None:
            self._writing.written.wait()
            self._writing = None

    def add(self, grad: RestingGrad, more: torch.Tensor) -> None:
        """A further contribution to a gradient at rest."""
        more = local_gradient(self._unit.parameters[grad.label], more)
        if self.collector is None or not self.collector.expects(grad):
            self.check_current(grad)
        if not grad.ops.zero:
            grad.expect_unspent("added to")
        if self.collector is not None:
            self.collector.collect(grad.label, more, grad)
            return
        self._bring_here(grad)
        self._become(grad, *self._lay_down(grad.label, more, grad))
        if not in_backward():  # the user's own contribution: no end of a backward follows
            self.finish()

    def keep_together(self, pending: Pending) -> Pending:
        """Bring gradients of an earlier step, whose bytes lie in the other shard, to those of this step."""
        for name, owed in pending.items():
            grad = self._unit.parameters[name].grad
            if isinstance(grad, RestingGrad) and self._bring_here(grad):
                pending[name] = replace(owed, ops=grad.ops, loose=grad.loose, resting=self._shard)
        self.finish()
        return pending

    def _bring_here(self, grad: RestingGrad) -> bool:
        """Bring a gradient whose bytes belong to an update that is held back to where those of this step rest."""
        if grad.shard is self._shard or grad.ops.zero:
            return False
        self._replace(grad, self.exact(grad))
        return True

    def _replace(self, grad: RestingGrad, value: torch.Tensor) -> None:
        """Lay values (1-D) to rest in the gradient's place; `finish` must follow."""
        grad.ops = GradOps(zero=True)
        norm, loose = self._lay_down(grad.label, value if grad.loose is None else value.view_as(grad.loose), grad)
        self._become(grad, norm, loose)

    def value(self, grad: RestingGrad) -> torch.Tensor:
        """A copy of the values in the parameter's dtype and shape, operations applied."""
        self.complete()
        dtype = self._unit.parameters[grad.label].dtype
        value = self.exact(grad)
        if self._reduction is not None:
            value = self._reduction.whole(self._unit.shard, grad.label, value)
        value = value.to(device=grad.device, dtype=dtype)
        return like(self._unit.parameters[grad.label], value.view(self._unit.shard.whole_slots[grad.label].shape))

    def exact(self, grad: RestingGrad) -> torch.Tensor:
        """A copy of what rests here of the values, in fp32 or wider, operations applied, 1-D."""
        self.check_current(grad)
        grad.expect_unspent("read")
        content = self._content(grad)
        return grad.ops.apply_(content.to(wide_dtype(content.dtype), copy=True))

    def check_current(self, grad: RestingGrad) -> None:
        """Raise if the bytes behind a gradient at rest are another backward's by now."""
        resting = self._resting.get(grad.label)
        if resting is not None and grad is not resting[0]:
            raise RuntimeError(
                f"this gradient of {grad.label!r} was at rest and a later backward has taken its place; to keep a "
                f"gradient, copy it: `with outsize.gathered(param, grads=True): kept = param.grad.clone()`"
            )

    def rewrite(self, grad: RestingGrad, divisor: float = 1.0) -> None:
        """Apply the remembered operations to the bytes, then a division."""
        self.check_current(grad)
        self._streamer.settle(self._unit)
        value = self.exact(grad)
        if divisor != 1.0:
            value.div_(divisor)
        self._replace(grad, value)
        self.finish()

    def adopt(self, name: str, value: torch.Tensor) -> None:
        """Make `value` the parameter's gradient at rest, whatever there was; with several ranks all have the same."""
        value = local_gradient(self._unit.parameters[name], value)
        if self._reduction is not None:
            value = self._unit.shard.own(name, value).clone()
        self._unit.parameters[name].grad = self._rest(name, value)
        self.finish()

    def take_over(self, name: str, grad: torch.Tensor) -> None:
        """A gradient from before `prepare`; with several ranks each has that of its own batch."""
        if self.collector is None:
            self.adopt(name, grad)
        else:
            self._unit.parameters[name].grad = self.collector.collect(name, grad, None)

    def restore(self, name: str, content: torch.Tensor, ops: GradOps, norms: Mapping[float, float]) -> None:
        """Lay a gradient to rest as a checkpoint holds it: bytes as they rested, operations not yet applied, norms.

        `finish` must follow when all gradients of the unit are in.
        """
        grad = self._rest(name, content if self._reduction is None else content.reshape(-1))  # as it is collected
        grad.ops = ops
        self._find_norms()
        grad.norms.update({order: torch.full_like(grad.norms[2.0], norm) for order, norm in norms.items()})
        self._unit.parameters[name].grad = grad

    def restore_held(self, held: Mapping[str, tuple[torch.Tensor, GradOps]]) -> None:
        """Hold gradients back as a checkpoint has them: bytes as they rested, and operations not yet applied."""
        self._unit.held = {}
        shard = self._shard
        if held and shard is not None:
            shard.open(())
            for name, (content, _) in held.items():
                shard.put(self._slots[name], content, None)
            self._dirty = True
            self.finish()
            self.turn()
        for name, (content, ops) in held.items():
            loose = content.to(self._unit.shard.device) if shard is None else None
            self._unit.held[name] = SlotUpdate({}, ops, loose, shard)

    def _rest(self, name: str, grad: torch.Tensor) -> RestingGrad:
        norm, loose = self._lay_down(name, grad, None)
        resting = self._next(name)
        if resting is None:  # on the device a gradient owns its bytes, so that they go when it goes
            assert norm is not None, "it is found at once there"
            resting = RestingGrad(self._unit.parameters[name], name, self, norm, loose)
        self._become(resting, norm, loose)
        resting.reductions = 0
        return resting

    def _next(self, name: str) -> RestingGrad | None:
        """What is the parameter's current gradient at rest from now on, yet to be filled; None on the device."""
        resting = self._resting.get(name)
        if resting is None:
            return None
        if _held_by_others(resting):  # see Note [Small things that live long]
            norm = torch.zeros_like(resting[1].norms[2.0])
            resting[1] = RestingGrad(self._unit.parameters[name], name, self, norm)
        resting.reverse()
        return resting[0]

    def _become(self, grad: RestingGrad, norm: torch.Tensor | None, loose: torch.Tensor | None) -> None:
        if norm is None:
            self._unknown[grad.label] = grad
        else:
            self._unknown.pop(grad.label, None)
        grad.become(norm, loose, self._shard)
        if self._reduction is not None:
            self._reduction.changed()

    # -- several ranks -----------------------------------------------------------------------------------------------

    def unfilled(self, name: str) -> RestingGrad:
        """What will be the gradient at rest, when it has been reduced."""
        grad = self._next(name)
        if grad is None:
            param = self._unit.parameters[name]
            wide = torch.float64 if param.dtype is torch.float64 else torch.float32
            return RestingGrad(param, name, self, torch.zeros((), dtype=wide, device=self._unit.shard.device))
        self._unknown.pop(name, None)  # of an interrupted backward
        grad.become(torch.zeros((), device="cpu"), None, None)
        grad.reductions = 0
        return grad

    def rest_reduced(self, name: str, own: torch.Tensor, previous: RestingGrad | None, grad: RestingGrad) -> None:
        """Lay what is this rank's of a reduced gradient to rest as `grad`, added to what rests as `previous`."""
        if previous is not None:
            self._bring_here(previous)
        norm, loose = self._lay_down(name, own, previous)
        self._become(grad, norm, loose)

    def all_at_rest(self) -> None:
        """What was reduced is laid to rest."""
        if self.update_now is None:
            self.finish()

    def complete(self) -> None:
        """Make what a gradient at rest says of itself true of the whole gradient, on all ranks."""
        if self._reduction is not None:
            self._reduction.complete()
        self.await_norms()

    def await_norms(self) -> None:
        """Find the norms that are not known yet. Of sums of gradients from an accelerator it blocks until these are
        there."""
        self._find_norms()
        while self._unknown:
            name, grad = self._unknown.popitem()
            assert grad.shard is not None
            grad.norms[2.0].copy_(grad.shard.norm_of_sum(self._slots[name]), non_blocking=True)

    def _find_norms(self) -> None:
        """Those of gradients that lie in host memory, all at once: a call a gradient costs more than a small one."""
        if not self._unknown or self._unit.shard.device.type != "cpu":
            return
        grads, self._unknown = list(self._unknown.values()), {}
        values = [grad.shard.of(self._slots[grad.label]) for grad in grads if grad.shard is not None]
        torch._foreach_copy_([grad.norms[2.0] for grad in grads], vector_norms(values))

    def norm(self, grad: RestingGrad, order: float) -> torch.Tensor:
        """The vector norm of the values, operations applied, fp32, 0-d."""
        own = self.exact(grad)  # a copy: an update that is owed still reads the bytes
        return vector_norm(own, order) if self._reduction is None else self._reduction.norm(own, order, grad.repeated)

    def all_finite(self, grad: RestingGrad) -> bool:
        """Whether all values are finite, by looking at them."""
        own = self.exact(grad)
        return bool(torch.isfinite(own).all()) if self._reduction is None else self._reduction.all_finite(own)

    # -- where gradients rest ----------------------------------------------------------------------------------------

    def _lay_down(
        self, name: str, grad: torch.Tensor, previous: RestingGrad | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Store a contribution; returns the norm of the sum, or None where it comes later, and the sum itself where it
        stays on the device."""
        expect_dense(name, grad)
        if not self._unit.settled:
            self._streamer.settle(self._unit)  # see Note [An owed update owns its gradients]
        grad = grad.detach()
        ops = None if previous is None or previous.ops.zero else previous.ops
        if self._shard is None:
            loose = grad if ops is None or previous is None else self._add_loose(previous, grad)
            return vector_norm(loose, 2.0), loose
        slot = self._slots[name]
        self._open(slot, widens=ops is not None or grad.dtype.itemsize > self._shard.dtype(slot).itemsize)
        self._shard.put(slot, grad, ops)
        self._dirty = True
        on_cpu = self._unit.shard.device.type == "cpu"
        if ops is None and (not on_cpu or grad.dtype is not self._shard.dtype(slot)):
            return vector_norm(grad, 2.0), None  # on the device, where it is fast
        later = on_cpu or (grad.device.type != "cpu" and grad.numel() > 0)
        return None if later else vector_norm(self._shard.of(slot), 2.0), None

    def _add_loose(self, previous: RestingGrad, grad: torch.Tensor) -> torch.Tensor:
        assert previous.loose is not None
        return add_contribution(previous.loose, previous.ops, grad)

    def _open(self, slot: Slot, widens: bool) -> None:
        """Bring the gradients at rest that are still wanted into memory; one of them becomes a sum, or is one."""
        shard = self._shard
        assert shard is not None
        if shard.in_memory and shard.bytes_beside(slot):
            self._streamer.make_room(shard.bytes_beside(slot))  # as below
        shard.use(slot)
        if widens and not shard.wide:
            self._find_norms()  # of what is narrow still
        if shard.in_memory and widens and shard.store is not None and shard.sum_bytes > shard.nbytes:
            self._streamer.make_room(shard.sum_bytes - shard.nbytes)  # which may write these gradients out
        if shard.in_memory:
            self._await_writing()  # what is being written must not change under the write
            if shard.wide:
                shard.open(self._live())  # fp32 sums that nobody wants any more make room for plain gradients
            return
        if shard.store is not None:
            self._streamer.make_room(shard.sum_bytes if widens else shard.nbytes)
            self._unit.await_written()
        shard.open(self._live())

    def _live(self) -> Collection[str]:
        grads = {name: self.shown.get(name, param.grad) for name, param in self._unit.parameters.items()}
        return [name for name, grad in grads.items() if isinstance(grad, RestingGrad) and grad.shard is self._shard]

    def _content(self, grad: RestingGrad) -> torch.Tensor:
        """The gradient's values as they rest, 1-D."""
        if grad.loose is not None:
            return grad.loose.reshape(-1)
        assert grad.shard is not None
        if not grad.shard.in_memory:
            self._unit.await_written()
        return grad.shard.copy_of(self._slots[grad.label])  # to read changes nothing of what rests with it


def _held_by_others(resting: list[RestingGrad]) -> bool:
    """Whether anybody but this list holds the spare gradient, in Python or as the `grad` of another tensor."""
    references = sys.getrefcount(resting[1])  # from the list and the call itself; a name would be a third
    return references > 2 or resting[1]._use_count() > 1  # type: ignore[attr-defined]
