"""The engine: decides for each operation, forward and backward what must be gathered, held and released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, final

import torch
from torch import nn

from outsize.run import refusals
from outsize.run.activations import in_backward
from outsize.run.backward import Backward
from outsize.run.beside_the_gate import in_transform, on_copies, see_script_functions
from outsize.run.embedding import Table
from outsize.run.grads import RestingGrad
from outsize.run.guard import Classes, hear_no_more, hear_of_gradients
from outsize.run.local import is_distributed, local_gradient
from outsize.run.owner import FORWARD, GATHERED, Owner, outside_inference
from outsize.run.parameters import Parameters, Reference, grad_of, set_grad
from outsize.run.reduction import Reduction, StageGrad
from outsize.run.saved import hooks_allowed, left_alone_by_dynamo, saving_by_reference
from outsize.run.streamer import Streamer
from outsize.run.tiles import Tiles
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients


@final
class Frame:
    """One forward that is running. In the block the units that its module owns are open, and what it acquires is held
    until the block ends, however it ends. See Note [Open units] in run/unit.py."""

    @left_alone_by_dynamo
    def __init__(self, engine: Engine, module: nn.Module, again: bool = False) -> None:
        """A forward of `module`. `again`: it is one of a pass that may have ended, and no pass begins with it."""
        self.module = module
        self.held: list[Unit] = []
        self._engine = engine
        self._again = again
        self._copies: AbstractContextManager[None] | None = None
        self._opened: list[Unit] = []
        self._pushed = False
        self._caches = torch.is_autocast_cache_enabled()

    @left_alone_by_dynamo
    def __enter__(self) -> None:
        engine = self._engine
        if torch._C._get_tracing_state() is not None and not torch.onnx.is_in_onnx_export():
            refusals.torchscript()
        transformed = in_transform()
        if transformed and not all(unit.holds or unit.resident for unit in engine.parameters.units):
            raise RuntimeError(
                "a forward of a prepared model runs inside torch.func (grad, vjp, jvp or what is made of them), which "
                "takes parameters where outsize cannot see it: open `with outsize.gathered(model):` around it"
            )
        engine.owner.take(FORWARD)
        try:
            if not engine.frames and not self._again and not in_backward():
                engine.begin_pass()
            engine.frames.append(self)
            if transformed:
                self._copies = on_copies(self.module, engine.may_rest)
                self._copies.__enter__()
            elif hooks_allowed():
                self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _open(self) -> None:
        """The units that the module owns are opened."""
        engine = self._engine
        for unit in engine.owned.get(id(self.module), ()):
            if not unit.opened and not unit.shown:
                self._opened.append(unit)
                engine.streamer.acquire(unit)
                self.hold(unit)
                unit.shard.buffer.use()
                unit.open(engine.classes.open)
        if self._opened:
            torch.set_autocast_cache_enabled(False)  # it keeps the cast of every weight until its outermost block ends
            hooks = saving_by_reference(engine)
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                self._pushed = True

    def hold(self, unit: Unit) -> None:
        """Keep the unit gathered until the block ends."""
        self.held.append(unit)
        unit.holds += 1

    @left_alone_by_dynamo
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine = self._engine
        try:
            if self._copies is not None:
                self._copies.__exit__(kind, error, trace)
            if self._opened:
                self._close(error)
            if error is None and engine.reduction is not None and id(self.module) == engine.root and not in_backward():
                engine.streamer.end_pass("forward")
        finally:
            if self in engine.frames:
                engine.frames.remove(self)
            for unit in self.held:
                unit.let_go()
            engine.owner.give()

    def _close(self, error: BaseException | None) -> None:
        if self._pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_autocast_cache_enabled(self._caches)
        closed = [(unit, unit.close(self._engine.classes.guarded)) for unit in self._opened]
        for unit, written in closed:  # after an exception too, which is how a checkpoint ends what it runs again
            if written is not None and not unit.writable:
                self._engine.refuse_write(written)
        if isinstance(error, RuntimeError) and "yet support saved tensor hooks" in str(error):
            raise RuntimeError(
                f"{type(self.module).__name__} uses torch.func (grad, vjp, jacrev or hessian) in its forward, which "
                f"torch refuses beside saved-tensor hooks: open `with outsize.gathered(model):` around the forward"
            ) from error


@final
@dataclass(eq=False, repr=False)
class Engine:
    """Implements the gate of the parameters and the frames of the modules.

    A unit stays gathered as long as a frame holds it: the outermost running forward of a module that lies in the unit,
    else the innermost running forward. In the backward it stays while the node runs that uses it, and may go when its
    gradients are complete.
    """

    parameters: Parameters
    gradients: Sequence[UnitGradients]
    streamer: Streamer
    backward: Backward
    owner: Owner
    _scopes: Sequence[frozenset[int]]  # by unit: the ids of the modules all of whose parameters are the unit's
    owned: Mapping[int, Sequence[Unit]]  # by the id of a module: the units that its calls open
    reduction: Reduction | None = None  # None with one rank
    root: int = 0  # the id of the whole model

    def __post_init__(self) -> None:
        see_script_functions()
        self.classes = Classes(self)
        self.frames: list[Frame] = []
        self.listing = False  # while `state_dict` takes views of parameters, each use of which passes the gate
        self.tiles: dict[int, Tiles] = {}  # by the parameter's id: those that are used in tiles
        self.tables: dict[int, Table] = {}  # those that are used by rows

    # -- the gate ----------------------------------------------------------------------------------------------------

    def admit(self, tensor: torch.Tensor, operation: str, writes: bool) -> None:
        """Bring the tensor's unit in for an operation, or raise because its values may not be touched here."""
        unit = self.parameters.unit_with(self.parameters.key_of(tensor))
        if self.owner.is_other:
            refusals.use_by_other_thread(self.parameters.name_of(tensor), operation)
        if writes and not unit.writable:
            self.refuse_write(self.parameters.name_of(tensor), operation)
        if unit.holds and unit.current:
            if self.frames and unit is not self.streamer.room.last:
                self.streamer.acquire(unit)
        elif self.frames:
            self.streamer.acquire(unit)
            scope = self._scopes[unit.index]
            next((each for each in self.frames if id(each.module) in scope), self.frames[-1]).hold(unit)
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
        if not (self.frames or in_backward()):
            tier = self.parameters.unit_of(param)[0].shard.tiers.params
            refusals.read_at_rest(self.parameters.name_of(param), tier, operation)

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

    def refuse_write(self, name: str, operation: str = "") -> NoReturn:
        refusals.write(name, operation, in_forward=bool(self.frames))

    # -- forwards ----------------------------------------------------------------------------------------------------

    def has_opened(self, units: Sequence[Unit]) -> bool:
        """Whether a call of a module that owns these units needs no frame: one around it has opened them all."""
        for unit in units:
            if not unit.opened:
                return False
        return len(units) > 0 and not self.owner.is_other

    def may_rest(self, param: torch.Tensor) -> bool:
        return self.parameters.owns(param) and not self.parameters.unit_of(param)[0].resident

    def begin_pass(self) -> None:
        self.backward.end_interrupted()
        self.streamer.end_round()
        self.streamer.room.return_excess()
        self.streamer.schedule.begin("train" if torch.is_grad_enabled() else "eval")

    # -- around the loop ---------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, units: Sequence[Unit], modify: bool) -> Iterator[None]:
        """Keep units gathered, in any nesting; with `modify` they may be written and are stored on leaving."""
        held: list[Unit] = []
        self.owner.take(GATHERED)
        try:
            with outside_inference():
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
            with outside_inference():
                for unit in held:
                    unit.let_go()
                    unit.shown -= 1
                    unit.writable -= modify
                    if not unit.shown:
                        self.parameters.show_together(unit)
            self.streamer.room.return_excess()
            self.owner.give()

    def any_shown(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Whether a `gathered` block has parameters that one of the modules owns."""
        return any(unit.shown for module in modules for unit in self.owned.get(id(module), ()))

    def adopt_gradient(self, name: str, grad: torch.Tensor) -> None:
        """Take over a gradient that the user's parameter had before `prepare`."""
        unit = self.parameters.home[name]
        param = unit.parameters[name]
        grad = local_gradient(param, grad)
        grad = grad.to(device=param.device, dtype=param.dtype)
        if unit.shard.on_device and param.dtype in (torch.float32, torch.float64):
            set_grad(param, grad)
            self.show_in_stage(param)
        elif (collector := self.gradients[unit.index].collector) is not None:  # each rank has that of its own batch
            param.grad = collector.collect(name, grad, None)
        else:
            self.gradients[unit.index].adopt(name, grad)

    def take_over(self, unit: Unit, param: torch.Tensor) -> None:
        """The parameter is of this engine from now on."""
        self.classes.take(param)
        if unit.resident and not is_distributed(param):
            param.__class__ = self.classes.resident
        if unit.shard.rows is not None:  # autograd keeps gradients of rows itself
            return
        if not (unit.shard.on_device and param.dtype in (torch.float32, torch.float64)):  # autograd keeps these itself
            hear_of_gradients(param, self.backward.gradient_arrived)
        elif self.reduction is not None:
            hear_of_gradients(param, self.show_in_stage)

    def show_in_stage(self, param: torch.Tensor) -> None:
        """Autograd keeps the parameter's gradient, which may be one of a stage of a pipeline."""
        if self.reduction is not None:
            self.reduction.show_in_stage(param)

    def gradient_set(self, param: torch.Tensor) -> None:
        """The script, or a zero-bubble schedule, has set the gradient of a parameter in a stage of a pipeline."""
        grad = grad_of(param)
        if grad is not None and not isinstance(grad, (RestingGrad, StageGrad)) and grad.layout is torch.strided:
            self.adopt_gradient(self.parameters.name_of(param), grad)

    def forget(self) -> None:
        """The parameters are plain ones from now on."""
        self.parameters.forget()
        for unit in self.parameters.units:
            for param in unit.parameters.values():
                hear_no_more(param)
