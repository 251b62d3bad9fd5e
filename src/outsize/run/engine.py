"""The engine: decides for each operation, forward and backward what must be gathered, held and released."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import nn
from torch.autograd import Variable

from outsize.move.buffer import alone
from outsize.move.conveyor import Conveyor
from outsize.plan.layout import Slot
from outsize.run.activations import in_backward
from outsize.run.buffers import unused
from outsize.run.guard import Classes, hear_no_more, hear_of_gradients
from outsize.run.local import bind, is_distributed, local, local_gradient, shared_as
from outsize.run.owner import BACKWARD, FORWARD, GATHERED, Owner
from outsize.run.reduction import Reduction
from outsize.run.saved import hooks_allowed, left_alone_by_dynamo, saving_by_reference
from outsize.run.scripted import see_script_functions
from outsize.run.streamer import Streamer
from outsize.run.transforms import in_transform, on_copies
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients

logger = logging.getLogger("outsize")


@final
class Frame:
    """One forward that is running, and the units that it holds until it returns."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held: list[Unit] = []


@final
class Reference(NamedTuple):
    """A view of a gathered parameter, as it was when it was saved for the backward."""

    unit: Unit
    name: str
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    first: int
    """In bytes, from the parameter's first."""
    updates: int
    version: int
    spec: Any
    """How ranks share the view, where it is a DTensor."""


_NAMED = 3
"""How many parameters the message about one view names."""


@final
class Engine:
    """Implements the gate of the parameters and the frames of the modules.

    A unit stays gathered as long as a frame holds it: the outermost running forward of a module that lies in the unit,
    else the innermost running forward. In the backward it stays while the node runs that uses it, and may go when its
    gradients are complete.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Sequence[UnitGradients],
        streamer: Streamer,
        conveyor: Conveyor,
        scopes: Sequence[frozenset[int]],
        owned: Mapping[int, Sequence[Unit]],
        owner: Owner,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> None:
        self.reduction = reduction  # None with one rank
        self._root = root  # the id of the whole model
        self.units = units
        self.gradients = gradients
        self.streamer = streamer
        self.conveyor = conveyor
        see_script_functions()
        self.classes = Classes(self)
        self._scopes = scopes  # by unit: the ids of the modules all of whose parameters are the unit's
        self._owned = owned  # by the id of a module: the units that its calls open
        self._by_key = {unit.shard.buffer.key: unit for unit in units}
        self._alone: dict[str, torch.Tensor] = {}  # by parameter. See Note [Storages of their own]
        self._names = {id(param): name for unit in units for name, param in unit.parameters.items()}
        self._in_parts = any(is_distributed(param) for unit in units for param in unit.parameters.values())
        self._home = {name: unit for unit in units for name in unit.parameters}
        self._frames: list[Frame] = []
        self.owner = owner
        self._task = -1

    # -- the gate ----------------------------------------------------------------------------------------------------

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of the unit whose buffer the tensor views; None for any other tensor."""
        try:
            key = int((local(tensor) if self._in_parts else tensor).untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, fake, functional
            return None
        return key if key in self._by_key else None

    def admit(self, tensor: torch.Tensor, operation: str, writes: bool) -> None:
        """Bring the tensor's unit in for an operation, or raise because its values may not be touched here."""
        key = self.key_of(tensor)
        assert key is not None
        unit = self._by_key[key]
        if self.owner.is_other:
            self._refuse_thread(tensor, operation)
        if writes and not unit.writable:
            self._refuse_write(self.name_of(tensor), unit, operation)
        if unit.holds and unit.current:
            if self._frames and unit is not self.streamer.last:
                self.streamer.acquire(unit)
        elif self._frames:
            self.streamer.acquire(unit)
            self._hold(unit)
        elif in_backward():
            self._acquire_in_backward(unit)
        elif unit.holds or unit.always_resident:
            self.streamer.bring(unit)
        else:
            self._refuse_read(tensor, unit, operation)
        unit.shard.buffer.use()

    def is_in_place(self, key: int) -> bool:
        """Whether the unit's values can be read now."""
        return self._by_key[key].current

    def lend_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """The user has `data`, through which the parameter of an open unit can be written to."""
        self.unit_of(tensor)[0].lend(tensor, data)

    def reference(self, tensor: torch.Tensor) -> Reference | None:
        """What says which part of a gathered buffer the tensor views, without keeping it; None for any other tensor."""
        key = self.key_of(tensor)
        if key is None:
            return None
        unit = self._by_key[key]
        view = local(tensor)
        byte = int(view.storage_offset()) * view.itemsize
        if key == unit.shard.buffer.key:
            name = unit.name_at(byte)
            part = unit.part(name)
            byte -= int(part.storage_offset()) * part.itemsize
        else:
            name = self._shown(key)
        version = local(unit.parameters[name])._version
        spec = tensor._spec if is_distributed(tensor) else None  # type: ignore[attr-defined]
        return Reference(unit, name, view.dtype, view.size(), view.stride(), byte, unit.updates, version, spec)

    def _shown(self, key: int) -> str:
        return next(name for name, own in self._alone.items() if _key(own) == key)

    def bring_back(self, reference: Reference) -> torch.Tensor:
        """For the backward: bring the unit in, return the view that the reference was made of.

        Raises `RuntimeError` if the unit was updated, or the parameter written to, since then.
        """
        if not self._names:
            raise RuntimeError(
                "outsize.release was called between the forward and this backward; call backward() before, or run the "
                "forward again"
            )
        unit, name = reference.unit, reference.name
        if unit.updates != reference.updates:
            raise RuntimeError(
                f"one of the variables needed for gradient computation was modified: optimizer.step() has updated, or "
                f"outsize.load replaced, {name!r} between the forward and this backward; call backward() before, or "
                f"run the forward again"
            )
        with torch._C.DisableTorchFunctionSubclass():
            version = local(unit.parameters[name])._version
        if version != reference.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation was modified: {name!r} was written to inside "
                f"outsize.gathered(..., modify=True) between the forward and this backward; call backward() before, or "
                f"run the forward again"
            )
        self._acquire_in_backward(unit)
        part = unit.part(name)
        if part.dtype != reference.dtype:
            part = part.view(-1).view(reference.dtype)
        first = part.storage_offset() + reference.first // part.itemsize
        return shared_as(reference.spec, part.as_strided(reference.size, reference.stride, first))

    def _acquire_in_backward(self, unit: Unit) -> None:
        self._watch_backward()
        self.streamer.acquire(unit)
        unit.shard.buffer.use()

    def plain_copy(self, tensor: torch.Tensor) -> nn.Parameter:
        """A copy of a gathered parameter, which outsize does not know. Raises where it is not gathered."""
        if not self.unit_of(tensor)[0].holds:
            self.refuse_copy(tensor, "copied with copy.deepcopy here")
        with torch.no_grad():
            values: torch.Tensor = tensor.detach().clone()
        return nn.Parameter(values, tensor.requires_grad)

    def refuse_copy(self, tensor: torch.Tensor, what: str) -> NoReturn:
        """Raise the error for copies and pickles of parameters."""
        raise RuntimeError(
            f"parameter {self.name_of(tensor)!r} is managed by outsize, so it cannot be {what}: its values may be on "
            f"disk. copy.deepcopy works inside `with outsize.gathered(model):` and gives a plain model; checkpoints "
            f"are for outsize.save, weights for outsize.export"
        )

    def refuse_vmap(self, tensor: torch.Tensor) -> None:
        """Raise unless the values stay for as long as they are looked at."""
        key = self.key_of(tensor)
        assert key is not None
        if torch.is_grad_enabled() or not self._by_key[key].holds:
            name = self.name_of(tensor)
            raise RuntimeError(
                f"torch.vmap takes {name!r} apart where outsize cannot see it, and its values may be on disk: pass a "
                f"copy, `{name}.clone()`, or without gradients open `outsize.gathered(param)` around it"
            )

    def refuse_data(self, tensor: torch.Tensor) -> NoReturn:
        """Raise the error for `param.data = value`."""
        raise RuntimeError(
            f"{self.name_of(tensor)}.data cannot be replaced: the parameter's memory belongs to outsize; write its "
            f"values with `with outsize.gathered(param, modify=True): param.copy_(...)`; device and dtype are set by "
            f"outsize.prepare(device=..., compute_dtype=...)"
        )

    def name_of(self, tensor: torch.Tensor) -> str:
        """The parameter's name; for a view of a gathered buffer the names of the parameters that it overlaps."""
        name = self._names.get(id(tensor))
        key = self.key_of(tensor) if name is None else None
        if key is None:
            return name or "?"
        unit = self._by_key[key]
        if key != unit.shard.buffer.key:
            return self._shown(key)
        start, end = _span(local(tensor))
        spans = {name: _span(local(param)) for name, param in unit.parameters.items()}
        names = [name for name, (first, last) in spans.items() if first < end and start < last]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more if names else f"a view of unit {unit.name}"

    def _refuse_read(self, tensor: torch.Tensor, unit: Unit, operation: str) -> NoReturn:
        found = f"parameter {self.name_of(tensor)!r} is at rest ({unit.shard.tiers.params}) and {operation!r} "
        if _is_being_wrapped():
            raise RuntimeError(
                f"{found}cannot read it: do not wrap a prepared model (DistributedDataParallel, FSDP), outsize "
                f"averages the gradients over ranks itself"
            )
        raise RuntimeError(
            f"{found}needs its values; outside a forward of the model read it inside `with outsize.gathered(param):`. "
            f"For a forward, call the module itself, not its `forward`. (Checkpoints: outsize.save; weights: "
            f"outsize.export; device, dtype and shape are fixed by prepare)"
        )

    def _refuse_thread(self, tensor: torch.Tensor, operation: str) -> NoReturn:
        raise RuntimeError(
            f"{operation!r} uses parameter {self.name_of(tensor)!r} while another thread uses the model; one thread at "
            f"a time may: open `with outsize.gathered(param):` around it, which waits for its turn"
        )

    def _refuse_write(self, name: str, unit: Unit, operation: str = "") -> NoReturn:
        how = f" by {operation!r}" if operation else ""
        again = (
            "the forward and backward() both, which runs a forward again unless it is prepared with activations='keep'"
        )
        raise RuntimeError(
            f"parameter {name!r} is written in place{how} outside `outsize.gathered(param, modify=True)`, where"
            f" the change would be lost; wrap {again if self._frames or in_backward() else 'it'} in that context"
        )

    # -- forwards ----------------------------------------------------------------------------------------------------

    def has_opened(self, module: nn.Module) -> bool:
        """Whether a call of `module` needs no frame: one around it has opened all that it owns."""
        units = self._owned.get(id(module), ())
        return len(units) > 0 and all(unit.opened for unit in units) and not self.owner.is_other

    @contextmanager
    @left_alone_by_dynamo
    def frame(self, module: nn.Module) -> Iterator[None]:
        """A forward of `module` runs; what it acquires is held until it returns, however it returns."""
        transformed = in_transform()
        if transformed and not all(unit.holds or unit.resident for unit in self.units):
            raise RuntimeError(
                "a forward of a prepared model runs inside torch.func (grad, vjp, jvp or what is made of them), which "
                "takes parameters where outsize cannot see it: open `with outsize.gathered(model):` around it"
            )
        self.owner.take(FORWARD)
        frame = Frame(module)
        try:
            if not self._frames and not in_backward():
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
                self._refuse_write(*written)

    def _open(self, unit: Unit, frame: Frame) -> None:
        self.streamer.acquire(unit)
        frame.held.append(unit)
        unit.holds += 1
        unit.shard.buffer.use()
        unit.open(self.classes.open)

    def _close(self, units: Iterable[Unit]) -> tuple[str, Unit] | None:
        """Returns a parameter that was written to where it may not be."""
        found = None
        for unit in units:
            written = unit.close(self.classes.guarded)
            if written is not None and not unit.writable:
                found = written, unit
        return found

    def _may_rest(self, param: torch.Tensor) -> bool:
        return self.owns(param) and not self.unit_of(param)[0].resident

    def end_interrupted_backward(self) -> None:
        """Bring to an end what a backward that raised has left."""
        if self._task != -1 and not in_backward():
            self._end_backward(complete=False)

    def _begin_pass(self) -> None:
        self.end_interrupted_backward()
        self.streamer.end_round()
        self.streamer.return_room()
        self.streamer.schedule.begin("train" if torch.is_grad_enabled() else "eval")

    def _hold(self, unit: Unit) -> None:
        scope = self._scopes[unit.index]
        frame = next((each for each in self._frames if id(each.module) in scope), self._frames[-1])
        frame.held.append(unit)
        unit.holds += 1

    # -- backwards ---------------------------------------------------------------------------------------------------

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """Autograd has just left a gradient in `param.grad`."""
        self._watch_backward()
        name = self._names[id(param)]
        unit = self._home[name]
        gradients = self.gradients[unit.index]
        complete = gradients.arrives(name)
        if complete:
            self.streamer.finished(unit)  # before the gradient is copied: the weights may make room for it
        gradients.take(name, complete)

    def _watch_backward(self) -> None:
        """See the end of this backward, whatever it uses of the model."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self.owner.take(BACKWARD)
            self._task = task
            over = partial(self._end_backward, True)  # autograd drops it with the backward, also after an error
            weakref.finalize(over, self.owner.give).atexit = False
            Variable._execution_engine.queue_callback(over)

    def _end_backward(self, complete: bool = True) -> None:
        self._task = -1
        for each in self.gradients:
            if each.collecting or each.deferred:
                each.end_of_backward(complete)
            else:
                each.finish()  # a hook of the user's may have added to a gradient that was complete
        if self.reduction is not None:
            self.reduction.no_more_comes(interrupted=not complete)
            self.streamer.end_pass("backward")
            self.reduction.end_of_backward() if complete else self.reduction.interrupted()

    # -- around the loop ---------------------------------------------------------------------------------------------

    # Note [Storages of their own]
    # Who writes or compares whole models tells tensors apart by their storages, and takes all views of one storage for
    # tied. So in a `gathered` block each parameter has a storage of exactly its own bytes, over the same memory. What
    # views it is known by that storage, in the block and after it.

    def _show_alone(self, unit: Unit) -> None:
        for name, param in unit.parameters.items():
            value = unit.shard.param(name)
            own = self._alone.get(name)
            if own is None or own.data_ptr() != value.data_ptr():
                if own is not None and unused(own):
                    self._by_key.pop(_key(own))
                own = self._alone[name] = alone(value, unit.shard.buffer.flat)
                self._by_key[_key(own)] = unit
            bind(param, own)

    def _show_together(self, unit: Unit) -> None:
        for name, param in unit.parameters.items():
            bind(param, unit.shard.param(name))

    @contextmanager
    def hold(self, units: Sequence[Unit], modify: bool) -> Iterator[None]:
        """Keep units gathered, in any nesting; with `modify` they may be written and are stored on leaving."""
        held: list[Unit] = []
        self.owner.take(GATHERED)
        try:
            for unit in units:
                self.streamer.show(unit)
                unit.shard.buffer.use()
                unit.holds += 1
                unit.shown += 1
                unit.writable += modify
                held.append(unit)
                if unit.shown == 1:
                    self._show_alone(unit)
            if self.reduction is not None and any(unit.split for unit in held):
                self.reduction.ranks.meet("gathered")  # even where all of it is here: another time it would not be
            yield
        finally:
            for unit in held:
                unit.let_go()
                unit.shown -= 1
                unit.writable -= modify
                if not unit.shown:
                    self._show_together(unit)
            self.streamer.return_room()
            self.owner.give()

    def unit_of(self, param: torch.Tensor) -> tuple[Unit, Slot]:
        name = self._names[id(param)]
        unit = self._home[name]
        return unit, unit.shard.slots[name]

    def adopt_gradient(self, name: str, grad: torch.Tensor) -> None:
        """Take over a gradient that the user's parameter had before `prepare`."""
        unit = self._home[name]
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
        if not (unit.shard.on_device and param.dtype in (torch.float32, torch.float64)):  # autograd keeps these itself
            hear_of_gradients(param, self)

    def forget(self) -> None:
        """The parameters are plain ones from now on."""
        self._names.clear()
        for unit in self.units:
            for param in unit.parameters.values():
                hear_no_more(param)

    def owns(self, param: torch.Tensor) -> bool:
        return id(param) in self._names


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [start, end) of its storage that a strided tensor reaches."""
    with torch._C.DisableTorchFunctionSubclass():
        start = int(tensor.storage_offset())
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + int(reach) + 1 if tensor.numel() else start
        return start * tensor.element_size(), end * tensor.element_size()


def _is_being_wrapped() -> bool:
    """Whether torch's own data parallelism asks, and not what runs inside it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = str(frame.f_globals.get("__name__"))
        if place.startswith(("torch.nn.parallel.", "torch.distributed.fsdp.")):
            return True
        if not place.startswith(("outsize.", "torch.")):
            break
        frame = frame.f_back
    return False
