"""The engine: decides for each operation, forward and backward what must be gathered, held and released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, final

import torch
from torch import nn

from outsize.run import refusals
from outsize.run.activations import in_backward
from outsize.run.backward import Backward
from outsize.run.beside_the_gate import in_transform, on_copies, see_script_functions
from outsize.run.embedding import Table
from outsize.run.guard import Classes, hear_no_more, hear_of_gradients
from outsize.run.local import is_distributed, local_gradient
from outsize.run.owner import FORWARD, GATHERED, Owner
from outsize.run.parameters import Parameters, Reference
from outsize.run.reduction import Reduction
from outsize.run.saved import hooks_allowed, left_alone_by_dynamo, saving_by_reference
from outsize.run.streamer import Streamer
from outsize.run.tiles import Tiles
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients


@final
class Frame:
    """One forward that is running, and the units that it holds until it returns."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held: list[Unit] = []


@final
class Engine:
    """Implements the gate of the parameters and the frames of the modules.

    A unit stays gathered as long as a frame holds it: the outermost running forward of a module that lies in the unit,
    else the innermost running forward. In the backward it stays while the node runs that uses it, and may go when its
    gradients are complete.
    """

    def __init__(
        self,
        parameters: Parameters,
        gradients: Sequence[UnitGradients],
        streamer: Streamer,
        backward: Backward,
        owner: Owner,
        scopes: Sequence[frozenset[int]],
        owned: Mapping[int, Sequence[Unit]],
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> None:
        self.parameters = parameters
        self.gradients = gradients
        self.streamer = streamer
        self.backward = backward
        self.owner = owner
        self.reduction = reduction  # None with one rank
        self._root = root  # the id of the whole model
        see_script_functions()
        self.classes = Classes(self)
        self._scopes = scopes  # by unit: the ids of the modules all of whose parameters are the unit's
        self._owned = owned  # by the id of a module: the units that its calls open
        self._frames: list[Frame] = []
        self.listing = (
            False  # `state_dict` takes views of parameters, at rest or not; each use of a view passes the gate
        )
        self.tiles: dict[int, Tiles] = {}  # by the parameter's id: those that are used in tiles
        self.tables: dict[int, Table] = {}  # those that are used by rows

    # -- the gate ----------------------------------------------------------------------------------------------------

    def admit(self, tensor: torch.Tensor, operation: str, writes: bool) -> None:
        """Bring the tensor's unit in for an operation, or raise because its values may not be touched here."""
        unit = self.parameters.unit_with(self.parameters.key_of(tensor))
        if self.owner.is_other:
            refusals.use_by_other_thread(self.parameters.name_of(tensor), operation)
        if writes and not unit.writable:
            self._refuse_write(self.parameters.name_of(tensor), operation)
        if unit.holds and unit.current:
            if self._frames and unit is not self.streamer.room.last:
                self.streamer.acquire(unit)
        elif self._frames:
            self.streamer.acquire(unit)
            self._hold(unit)
        elif in_backward():
            self._acquire_in_backward(unit)
        elif unit.holds or unit.always_resident:
            self.streamer.bring(unit)
        else:
            refusals.read_at_rest(self.parameters.name_of(tensor), unit.shard.tiers.params, operation)
        unit.shard.buffer.use()

    def check_use(self, param: torch.Tensor, operation: str) -> None:
        """Raise where a parameter that is used in tiles may not be used."""
        if self.owner.is_other:
            refusals.use_by_other_thread(self.parameters.name_of(param), operation)
        if not (self._frames or in_backward()):
            tier = self.parameters.unit_of(param)[0].shard.tiers.params
            refusals.read_at_rest(self.parameters.name_of(param), tier, operation)

    def is_in_place(self, key: int) -> bool:
        """Whether the unit's values can be read now."""
        return self.parameters.unit_with(key).current

    def lend_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """The user has `data`, through which the parameter of an open unit can be written to."""
        self.parameters.unit_of(tensor)[0].lend(tensor, data)

    def bring_back(self, reference: Reference) -> torch.Tensor:
        """For the backward: bring the unit in, return the view that the reference was made of.

        Raises `RuntimeError` if the unit was updated, or the parameter written to, since then.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self.parameters.check(reference)
        self._acquire_in_backward(reference.unit)
        return self.parameters.view(reference)

    def _acquire_in_backward(self, unit: Unit) -> None:
        self.backward.watch()
        self.streamer.acquire(unit)
        unit.shard.buffer.use()

    def plain_copy(self, tensor: torch.Tensor) -> nn.Parameter:
        """A copy of a gathered parameter, which outsize does not know. Raises where it is not gathered."""
        if not self.parameters.unit_of(tensor)[0].holds:
            refusals.copy(self.parameters.name_of(tensor), "copied with copy.deepcopy here")
        with torch.no_grad():
            values: torch.Tensor = tensor.detach().clone()
        return nn.Parameter(values, tensor.requires_grad)

    def refuse_vmap(self, tensor: torch.Tensor) -> None:
        """Raise unless the values stay for as long as they are looked at."""
        unit = self.parameters.unit_with(self.parameters.key_of(tensor))
        if torch.is_grad_enabled() or not unit.holds:
            refusals.vmap(self.parameters.name_of(tensor))

    def _refuse_write(self, name: str, operation: str = "") -> NoReturn:
        refusals.write(name, operation, again=bool(self._frames) or in_backward())

    # -- forwards ----------------------------------------------------------------------------------------------------

    def has_opened(self, module: nn.Module) -> bool:
        """Whether a call of `module` needs no frame: one around it has opened all that it owns."""
        units = self._owned.get(id(module), ())
        return len(units) > 0 and all(unit.opened for unit in units) and not self.owner.is_other

    @contextmanager
    @left_alone_by_dynamo
    def frame(self, module: nn.Module, again: bool = False) -> Iterator[None]:
        """A forward of `module` runs; what it acquires is held until it returns, however it returns. `again`: it is
        one of a pass that may have ended, and no pass begins with it."""
        transformed = in_transform()
        if transformed and not all(unit.holds or unit.resident for unit in self.parameters.units):
            raise RuntimeError(
                "a forward of a prepared model runs inside torch.func (grad, vjp, jvp or what is made of them), which "
                "takes parameters where outsize cannot see it: open `with outsize.gathered(model):` around it"
            )
        self.owner.take(FORWARD)
        frame = Frame(module)
        try:
            if not self._frames and not in_backward() and not again:
                self._begin_pass()
            self._frames.append(frame)
            with on_copies(module, self._may_rest) if transformed else self._opened(frame):
                yield
            if id(module) == self._root and self.reduction is not None and not in_backward():
                self.streamer.end_pass("forward")
        finally:
            if frame in self._frames:
                self._frames.remove(frame)
            for unit in frame.held:
                unit.let_go()
            self.owner.give()

    @contextmanager
    @left_alone_by_dynamo
    def _opened(self, frame: Frame) -> Iterator[None]:
        """The units that `frame`'s module owns are open. See Note [Open units] in run/unit.py."""
        units = [unit for unit in self._owned.get(id(frame.module), ()) if not unit.opened and not unit.shown]
        if not units or not hooks_allowed():
            yield
            return
        try:
            for unit in units:
                self._open(unit, frame)
            with saving_by_reference(self):
                yield
        except RuntimeError as error:
            if "yet support saved tensor hooks" not in str(error):
                raise
            raise RuntimeError(
                f"{type(frame.module).__name__} uses torch.func (grad, vjp, jacrev or hessian) in its forward, which "
                f"torch refuses beside saved-tensor hooks: open `with outsize.gathered(model):` around the forward"
            ) from error
        finally:  # an exception is how a checkpoint ends what it runs again: a write counts there too
            written = self._close(units)
            if written is not None:
                self._refuse_write(written)

    def _open(self, unit: Unit, frame: Frame) -> None:
        self.streamer.acquire(unit)
        frame.held.append(unit)
        unit.holds += 1
        unit.shard.buffer.use()
        unit.open(self.classes.open)

    def _close(self, units: Iterable[Unit]) -> str | None:
        """Returns a parameter that was written to where it may not be."""
        found = None
        for unit in units:
            written = unit.close(self.classes.guarded)
            if written is not None and not unit.writable:
                found = written
        return found

    def _may_rest(self, param: torch.Tensor) -> bool:
        return self.parameters.owns(param) and not self.parameters.unit_of(param)[0].resident

    def _begin_pass(self) -> None:
        self.backward.end_interrupted()
        self.streamer.end_round()
        self.streamer.room.return_excess()
        self.streamer.schedule.begin("train" if torch.is_grad_enabled() else "eval")

    def _hold(self, unit: Unit) -> None:
        scope = self._scopes[unit.index]
        frame = next((each for each in self._frames if id(each.module) in scope), self._frames[-1])
        frame.held.append(unit)
        unit.holds += 1

    # -- around the loop ---------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, units: Sequence[Unit], modify: bool) -> Iterator[None]:
        """Keep units gathered, in any nesting; with `modify` they may be written and are stored on leaving."""
        held: list[Unit] = []
        self.owner.take(GATHERED)
        try:
            for unit in units:
                if modify and unit.shard.in_place:
                    self.streamer.settle(unit)
                    unit.shard.own_params()
                self.streamer.show(unit)
                unit.shard.buffer.use()
                unit.holds += 1
                unit.shown += 1
                unit.writable += modify
                held.append(unit)
                if unit.shown == 1:
                    self.parameters.show_alone(unit)
            if self.reduction is not None and any(unit.split for unit in held):
                self.reduction.ranks.meet("gathered")  # even where all of it is here: another time it would not be
            yield
        finally:
            for unit in held:
                unit.let_go()
                unit.shown -= 1
                unit.writable -= modify
                if not unit.shown:
                    self.parameters.show_together(unit)
            self.streamer.room.return_excess()
            self.owner.give()

    def adopt_gradient(self, name: str, grad: torch.Tensor) -> None:
        """Take over a gradient that the user's parameter had before `prepare`."""
        unit = self.parameters.home[name]
        param = unit.parameters[name]
        grad = local_gradient(param, grad)
        grad = grad.to(device=param.device, dtype=param.dtype)
        if unit.shard.on_device and self.reduction is None and param.dtype in (torch.float32, torch.float64):
            param.grad = grad
        else:
            self.gradients[unit.index].take_over(name, grad)

    def take_over(self, unit: Unit, param: torch.Tensor) -> None:
        """The parameter is of this engine from now on."""
        distributed = is_distributed(param)
        if distributed:
            param.__class__ = self.classes.guarded_distributed
        else:
            param.__class__ = self.classes.resident if unit.resident else self.classes.guarded
        if unit.shard.rows is not None:  # autograd keeps gradients of rows itself
            return
        if not (unit.shard.on_device and param.dtype in (torch.float32, torch.float64)):  # autograd keeps these itself
            hear_of_gradients(param, self)

    def forget(self) -> None:
        """The parameters are plain ones from now on."""
        self.parameters.forget()
        for unit in self.parameters.units:
            for param in unit.parameters.values():
                hear_no_more(param)
