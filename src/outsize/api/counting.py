"""What one step of a model does, counted on tensors without memory: calls, seconds of work, gradients, live bytes."""

from __future__ import annotations

import inspect
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from outsize.move.memory import KEPT_BLOCK_BYTES
from outsize.plan.machine import CPU, Machine
from outsize.run.operations import EachOperation, Operation
from outsize.run.wrappers import known_parameters

# Note [Counted, not run]
# The forward and the backward run on fake tensors: torch's own, which have shapes and no memory. They say that they
# lie on the CPU, whatever the device is, for a device need not be there. So each operation is seen as torch would run
# it, with its FLOPs by the tables of torch's FlopCounterMode and the bytes of its tensors. The machine's figures make
# seconds of these. What lives is counted by storages. On a CPU small blocks stay with the process, whose allocator
# maps large ones alone: of small ones the most that there were counts.

# Note [Layers alike]
# Of the children of a list that are alike only the first is counted. Each further call gives results of the same shapes
# at once, and its backward gradients of the inputs. In the end what was counted of the first stands for it, with its
# own modules and parameters. Alike: of one class, with parameters, inputs and simple attributes that are the same, but
# for numbers that say which layer it is.


@dataclass(frozen=True)
class Event:
    """One thing that a step does.

    kind: "enter" and "leave" a call of `module`; "work" for `seconds`, with at most `most` bytes made by operations
    alive during it, and `live` after it; "use" of a parameter in the backward, by `name`; "gradient" of a parameter,
    which is complete; "backward" of a call of `module` begins; "end" of the forward.
    """

    kind: str
    module: nn.Module | None = None
    name: str = ""
    seconds: float = 0.0
    live: int = 0
    most: int = 0


@dataclass(frozen=True)
class Counted:
    """A step. `items`: how many `unit`s ("tokens", or "samples") the example has."""

    events: tuple[Event, ...]
    items: int
    unit: str

    @property
    def seconds(self) -> float:
        """Of all work."""
        return sum(event.seconds for event in self.events)


def count_step(model: nn.Module, example: Any, machine: Machine, dtype: torch.dtype | None = None) -> Counted:
    """Count a step of training with an example batch, computing in `dtype`.

    Raises `TypeError` for an example that is no batch, `ValueError` with the reason where it does not fit the model.
    """
    args, kwargs = _call_of(model, example)
    counter = _Counter(model, machine)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), counter.hooks():
        twins = {name: _twin(param, dtype) for name, param in known_parameters(model)}
        buffers = {name: _twin(buffer, dtype, buffer=True) for name, buffer in model.named_buffers()}
        args, kwargs = tree_map(_without_memory, (args, kwargs))
        counter.watch(twins, buffers, tree_leaves((args, kwargs)))
        try:
            with EachOperation(counter.around):
                out = functional_call(model, {**twins, **buffers}, args, kwargs)
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
                f"({error}). Give a batch as the training loop does: a dict of keywords or a tuple for the model"
            ) from error
        del out, loss
    counter.flush()
    leaves = [each for each in tree_leaves(example) if isinstance(each, torch.Tensor)]
    numbers = next((each for each in leaves if not each.is_floating_point() and each.dim() > 1), None)
    items = leaves[0].shape[0] if numbers is None and leaves and leaves[0].dim() else 1
    if numbers is not None:
        return Counted(counter.expanded(), numbers.numel(), "tokens")
    return Counted(counter.expanded(), items, "samples")


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
    """A fake one of the same shape."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty(tuple(tensor.shape), dtype=kind, device=CPU)
    return made if buffer else nn.Parameter(made, tensor.requires_grad)


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


_Shape = tuple[tuple[int, ...], torch.dtype]


@final
class _Counter:
    """Collects the events of one step."""

    def __init__(self, model: nn.Module, machine: Machine) -> None:
        self.events: list[Event] = []
        self._model, self._machine = model, machine
        self._names: dict[int, str] = {}  # of parameters, by storage
        self._named = {param: name for name, param in known_parameters(model)}
        self._held: list[Any] = []
        self._alive: dict[int, int] = {}
        self._large = self._small = self._most_small = self._most = 0
        self._seconds = 0.0
        self._used = ""
        self._forward = True
        self._path: list[str] = []
        self._first: dict[object, nn.Module] = {}  # of layers alike
        self._like: dict[nn.Module, nn.Module] = {}
        self._stands_in = False
        self._results: dict[nn.Module, Any] = {}

    @property
    def path(self) -> str:
        """The module that runs."""
        return next((each for each in reversed(self._path) if each), "")

    def hooks(self) -> Any:
        return _Hooks(self._model, self)

    def watch(
        self, twins: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], others: Sequence[Any]
    ) -> None:
        """What is there before the step."""
        for name, twin in twins.items():
            self._names[twin.untyped_storage()._cdata] = name
            if twin.requires_grad:
                twin.register_post_accumulate_grad_hook(partial(self._gradient, name))
        self._held = [each for each in (*twins.values(), *buffers.values(), *others) if isinstance(each, torch.Tensor)]
        self._alive = {each.untyped_storage()._cdata: 0 for each in self._held}

    def around(self, run: Callable[[], Any], describe: Callable[[Any], Operation | None]) -> Any:
        out = run()
        operation = describe(out)
        if operation is None:
            return out
        if not self._forward:
            for number in operation.read:
                name = self._names.get(number, "")
                if name and name != self._used:
                    self._used = name
                    self.emit(Event("use", name=name))
        machine = self._machine
        if operation.nbytes:
            self._seconds += machine.operation_seconds + machine.seconds_of(*operation[:4])
        for tensor in operation.made:
            if tensor.layout is not torch.strided:  # its parts were made before
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                nbytes = self._alive[storage._cdata] = 0 if self._stands_in else storage.nbytes()
                self._count(nbytes)
                weakref.finalize(storage, self._freed, storage._cdata)
        self._most = max(self._most, self._live)
        return out

    def _freed(self, storage: int) -> None:
        self._count(-self._alive.pop(storage, 0))

    def _count(self, nbytes: int) -> None:
        if self._machine.device == CPU and abs(nbytes) < KEPT_BLOCK_BYTES:
            self._small += nbytes
            self._most_small = max(self._most_small, self._small)
        else:
            self._large += nbytes

    @property
    def _live(self) -> int:
        return self._large + self._most_small

    def _gradient(self, name: str, twin: torch.Tensor) -> None:
        self.emit(Event("gradient", name=name))
        twin.grad = None

    def emit(self, event: Event) -> None:
        self.flush()
        if event.kind == "end":
            self._forward = False
        self.events.append(event)

    def flush(self) -> None:
        """What was done since the last event."""
        if self._seconds or self._most > self._live:
            most = max(self._most, self._live)
            self.events.append(Event("work", seconds=self._seconds, live=self._live, most=most))
        self._seconds, self._most = 0.0, self._live

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._path.append(name)
        self.emit(Event("enter", module))

    def leave(self, listed: bool, module: nn.Module, args: Any, out: Any) -> None:
        self._path.pop()
        self.flush()
        first = next(iter(_graded(out)), None)
        self.emit(Event("leave", module, live=0 if first is None else first.numel() * first.element_size()))
        if listed and first is not None:
            first.register_hook(partial(self._passes, "backward", module))

    def _passes(self, kind: str, module: nn.Module, _: torch.Tensor) -> None:
        self.emit(Event(kind, module))
        self._used = ""

    # -- see Note [Layers alike] ---------------------------------------------------------------------------------------

    def call(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a child of a list."""
        inputs = _graded((args, kwargs))
        key = module in self._results, _looks(module), tuple(map(_look, tree_leaves((args, kwargs))))
        first = self._first.setdefault(key, module) if inputs and torch.is_grad_enabled() else None
        before = _attributes(module)
        if first is None or first is module or first not in self._results:
            if first is module:
                inputs[0].register_hook(partial(self._passes, "past", module))
            out = forward(*args, **kwargs)
            if _attributes(module) == before:  # else others need what it left behind: each one runs
                self._results[module] = tree_map(
                    lambda x: (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, out
                )
            return out
        self._like[module] = first
        self._results[module] = None
        leaves, form = tree_flatten(self._results[first], is_leaf=_is_shape)
        made = iter(_Like.apply(self, [each for each in leaves if _is_shape(each)], *inputs))
        return tree_unflatten([next(made) if _is_shape(each) else each for each in leaves], form)

    def stand_in(self, shapes: Sequence[_Shape]) -> tuple[torch.Tensor, ...]:
        """Results of which the bytes are counted elsewhere."""
        self._stands_in = True
        made = tuple(torch.empty(shape, dtype=dtype, device=CPU) for shape, dtype in shapes)
        self._stands_in = False
        return made

    def expanded(self) -> tuple[Event, ...]:
        """All events, those of layers that stood for others too."""
        if not self._like:
            return tuple(each for each in self.events if each.kind != "past")
        parts: dict[tuple[str, nn.Module], list[Event]] = {}
        for first in set(self._like.values()):
            for begin, end in (("enter", "leave"), ("backward", "past")):
                kinds = [(each.kind, each.module) for each in self.events]
                if (begin, first) in kinds and (end, first) in kinds:
                    at = kinds.index((begin, first)) + 1
                    parts[begin, first] = self.events[at - 1 : kinds.index((end, first), at)]
        found: list[Event] = []
        extra = live = 0
        for event in self.events:
            live = event.live if event.kind == "work" else live
            if event.kind == "work":
                event = replace(event, live=event.live + extra, most=event.most + extra)
            found.append(event)
            like = None if event.module is None else self._like.get(event.module)
            if like is not None and event.module is not None and (event.kind, like) in parts:
                own, added = self._as_of(event.module, like, parts[event.kind, like], live + extra)
                found += own
                extra = max(extra + (added if event.kind == "enter" else min(added, 0)), 0)
        return tuple(each for each in found if each.kind != "past")

    def _as_of(
        self, module: nn.Module, first: nn.Module, events: Sequence[Event], live: int
    ) -> tuple[list[Event], int]:
        """What was counted of `first`, as that of `module`; the bytes that it leaves."""
        modules = dict(zip(first.modules(), module.modules(), strict=True))
        names = {self._named[a]: self._named[b] for a, b in zip(first.parameters(), module.parameters(), strict=True)}
        works = [each for each in events if each.kind == "work"]
        before = self._before(events[0])
        own = []
        for each in events[1:]:
            if each.kind == "work":
                own.append(replace(each, live=each.live - before + live, most=each.most - before + live))
            else:
                itself = None if each.module is None else modules.get(each.module, each.module)
                own.append(replace(each, module=itself, name=names.get(each.name, each.name)))
        return own, (works[-1].live - before if works else 0)

    def _before(self, event: Event) -> int:
        """The bytes that were alive when it happened."""
        at = self.events.index(event)
        return next((each.live for each in reversed(self.events[:at]) if each.kind == "work"), 0)


class _Like(torch.autograd.Function):
    """Results of given shapes that depend on the inputs."""

    @staticmethod
    def forward(ctx: Any, counter: _Counter, shapes: Sequence[_Shape], *inputs: torch.Tensor) -> Any:
        ctx.counter, ctx.shapes = counter, [(tuple(each.shape), each.dtype) for each in inputs]
        return counter.stand_in(shapes)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.counter.stand_in(ctx.shapes)


def _graded(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and each.requires_grad]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


def _look(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


_NUMBERS_A_LAYER = re.compile("(^|_)(id|idx|index|layer)(_|$)|number")


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    return isinstance(value, (bool, int, float, str, torch.dtype, type(None)))


def _attributes(module: nn.Module) -> list[tuple[str, int]]:
    """Of all modules below, by identity."""
    return [(name, id(value)) for each in module.modules() for name, value in vars(each).items()]


def _looks(module: nn.Module) -> object:
    """What decides how a layer computes, as far as simple values and shapes say it."""
    parts = []
    for each in module.modules():
        simple = {
            name: value
            for name, value in vars(each).items()
            if _is_simple(value) and not (type(value) is int and _NUMBERS_A_LAYER.search(name))
        }
        own = [(name, _look(param)) for name, param in each.named_parameters(recurse=False)]
        parts.append((type(each), tuple(sorted(simple.items())), tuple(own)))
    return tuple(parts)


@final
class _Hooks:
    """Hooks of each module's call, for as long as the block lasts; then the modules are as they were."""

    def __init__(self, model: nn.Module, counter: _Counter) -> None:
        self._model, self._counter = model, counter
        self._handles: list[Any] = []
        kept = [each for module in model.modules() for each in (vars(module), *vars(module).values())]
        self._before = [(each, each.copy()) for each in kept if type(each) in (dict, list, OrderedDict)]

    def __enter__(self) -> None:
        listed = {
            id(child)
            for each in self._model.modules()
            if isinstance(each, (nn.ModuleList, nn.Sequential))
            for child in each.children()
        }
        for module in self._model.modules() if listed else ():
            if id(module) in listed and any(True for _ in module.children()) and any(True for _ in module.parameters()):
                module.forward = partial(self._counter.call, module, module.forward)
        for name, module in self._model.named_modules():
            before = partial(self._counter.enter, name)
            after = partial(self._counter.leave, id(module) in listed)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for each, before in self._before:  # tensors without memory must not stay in a cache of the model
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(before)
