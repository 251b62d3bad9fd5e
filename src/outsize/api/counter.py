"""The events of a step as they happen: calls of modules, work, gradients, live bytes."""

from __future__ import annotations

import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from outsize.move.memory import LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES
from outsize.planning.machine import CPU, Machine
from outsize.run.operations import Operation
from outsize.run.wrappers import known_parameters

# Note [Layers alike]
# Of the children of a list that are alike only the first is counted. Each further call gives results of the same shapes
# at once, and its backward gradients of the inputs. In the end what was counted of the first stands for it, with its
# own modules and parameters. Alike: of one class, with parameters, inputs and simple attributes that are the same, but
# for numbers that say which layer it is.

HOLES = 0.5
"""Of small blocks: what the allocator loses between them."""


@dataclass(frozen=True)
class Live:
    """Bytes that operations have made: in the heap of the process, which keeps what is freed, and in blocks too large
    for it, which go back to the system."""

    heap: int = 0
    mapped: int = 0

    @classmethod
    def of(cls, nbytes: int, on_cpu: bool) -> Live:
        """Of one block."""
        return cls(mapped=nbytes) if on_cpu and nbytes >= MOST_BLOCK_BYTES else cls(nbytes)

    @property
    def nbytes(self) -> int:
        return self.heap + self.mapped

    def __add__(self, other: Live) -> Live:
        return Live(self.heap + other.heap, self.mapped + other.mapped)

    def __sub__(self, other: Live) -> Live:
        return Live(self.heap - other.heap, self.mapped - other.mapped)

    def at_least_none(self) -> Live:
        return Live(max(self.heap, 0), max(self.mapped, 0))


NONE_LIVE = Live()


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
    live: Live = NONE_LIVE
    most: Live = NONE_LIVE


class _Made:
    """The storages that operations have made and nobody has freed."""

    def __init__(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self.alive: dict[int, int] = {}
        self._live = self._most = NONE_LIVE  # but for small blocks
        self._small = self._most_small = 0

    @property
    def live(self) -> Live:
        return self._live + Live(self._most_small + round(HOLES * self._most_small))

    def add(self, storage: torch.UntypedStorage, counts: bool) -> None:
        if storage._cdata not in self.alive:
            nbytes = self.alive[storage._cdata] = storage.nbytes() if counts else 0
            self._count(nbytes, 1)
            weakref.finalize(storage, self.remove, storage._cdata)

    def live_of(self, result: torch.Tensor) -> Live:
        """Of what a layer returns, which may be a part of a block."""
        nbytes = result.numel() * result.element_size()
        dense = result.layout is torch.strided
        large = dense and Live.of(result.untyped_storage().nbytes(), self._on_cpu).mapped
        return Live(mapped=nbytes) if large else Live(nbytes)

    def remove(self, storage: int) -> None:
        self._count(self.alive.pop(storage, 0), -1)

    def _count(self, nbytes: int, sign: int) -> None:
        if self._on_cpu and nbytes < LEAST_BLOCK_BYTES:
            self._small += sign * nbytes
            self._most_small = max(self._most_small, self._small)
        else:
            block = Live.of(nbytes, self._on_cpu)
            self._live = self._live + block if sign > 0 else self._live - block

    def see(self, scratch: int) -> None:
        """What lives, and scratch memory of a kernel on a CPU beside it."""
        here = self.live + Live(scratch if self._on_cpu else 0)
        self._most = max(self._most, here, key=lambda live: live.nbytes)

    def take_most(self) -> Live:
        """The most that lived since the last call."""
        self.see(0)
        most, self._most = self._most, self.live
        return most


_Shape = tuple[tuple[int, ...], torch.dtype]


@final
class Counter:
    """Collects the events of one step."""

    def __init__(
        self,
        model: nn.Module,
        machine: Machine,
        device: torch.device | None = None,
        passed: torch.Tensor | None = None,
    ) -> None:
        """`device`: where the step runs, which is timed; None counts one without memory. `passed`: what goes through
        the caches in place of layers for which others stand, and of an update before the step."""
        self.events: list[Event] = []
        self.model, self.machine, self._device = model, machine, device
        self._passed = passed
        self._lap = 0.0
        self._names: dict[int, str] = {}  # of parameters, by storage
        self._named = {param: name for name, param in known_parameters(model)}
        self._held: list[Any] = []
        self._made = _Made(machine.device == CPU)
        self._seconds = 0.0
        self._used = ""
        self._forward = True
        self._path: list[str] = []
        self._first: dict[object, nn.Module] = {}  # of layers alike
        self._like: dict[nn.Module, nn.Module] = {}
        self._stands_in = False
        self._stood_in: bool | None = None  # last, in a forward or in a backward
        self._results: dict[nn.Module, Any] = {}

    @property
    def times(self) -> bool:
        """Whether the step runs on memory, and is timed."""
        return self._device is not None

    @property
    def path(self) -> str:
        """The module that runs."""
        return next((each for each in reversed(self._path) if each), "")

    def watch(
        self, twins: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], others: Sequence[Any]
    ) -> None:
        """What is there before the step."""
        for name, twin in twins.items():
            self._names[twin.untyped_storage()._cdata] = name
            if twin.requires_grad:
                twin.register_post_accumulate_grad_hook(partial(self._gradient, name))
        self._flush_caches()
        self._held = [each for each in (*twins.values(), *buffers.values(), *others) if isinstance(each, torch.Tensor)]
        self._made.alive = {each.untyped_storage()._cdata: 0 for each in self._held}
        self._lap = self._now()

    def _now(self) -> float:
        """When the device has done what it was given."""
        if self._device is not None and self._device.type != CPU:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _flush_caches(self) -> None:
        if self._passed is not None:
            self._passed.add_(1)

    def let_go(self) -> None:
        """The step is over. The collector does not see that twins hold the counter, by their hooks."""
        self._held = []
        self._results = {}

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
        if operation.nbytes and not self._stands_in:
            self._seconds += self.machine.seconds_of(*operation[:3])
        for tensor in operation.made:
            if tensor.layout is not torch.strided:  # its parts were made before
                continue
            self._made.add(tensor.untyped_storage(), not self._stands_in)
        self._made.see(0 if self._stands_in else operation.scratch)
        return out

    def _gradient(self, name: str, twin: torch.Tensor) -> None:
        self.flush()
        if twin.grad is not None and twin.grad.layout is torch.strided:  # from here on it is the step's
            self._made.remove(twin.grad.untyped_storage()._cdata)
        self.emit(Event("gradient", name=name))
        twin.grad = None

    def emit(self, event: Event) -> None:
        self.flush()
        if event.kind == "end":
            self._forward = False
        self.events.append(event)
        self._lap = time.perf_counter()

    def flush(self) -> None:
        """What was done since the last event."""
        if self._device is not None:
            self._seconds = self._now() - self._lap
        live, most = self._made.live, self._made.take_most()
        if self._seconds or most.nbytes > live.nbytes:
            self.events.append(Event("work", seconds=self._seconds, live=live, most=most))
        self._seconds = 0.0
        self._lap = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of all work that was counted itself."""
        return sum(event.seconds for event in self.events)

    @property
    def needed(self) -> set[str]:
        """The parameters of all but of layers for which others stand."""
        standing = {self._named[param] for module in self._like for param in module.parameters()}
        first = {self._named[param] for module in self._like.values() for param in module.parameters()}
        return {*self._named.values()} - (standing - first)

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """That a step takes where layers stand for others, computing in `dtype`."""
        width = 0 if dtype is None else dtype.itemsize
        sizes = {name: param.numel() * max(param.element_size(), width) for param, name in self._named.items()}
        return sum(sizes[name] for name in self.needed) + max((event.most.nbytes for event in self.events), default=0)

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._path.append(name)
        self.emit(Event("enter", module))

    def leave(self, listed: bool, module: nn.Module, args: Any, out: Any) -> None:
        self._path.pop()
        self.flush()
        first = next(iter(_graded(out)), None)
        self.emit(Event("leave", module, live=NONE_LIVE if first is None else self._made.live_of(first)))
        if listed and first is not None:
            first.register_hook(partial(self._passes, "backward", module))

    def _passes(self, kind: str, module: nn.Module, _: torch.Tensor) -> None:
        self.emit(Event(kind, module))
        self._used = ""

    # -- see Note [Layers alike] ---------------------------------------------------------------------------------------

    def call(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a child of a list."""
        self.flush()
        inputs = _graded((args, kwargs))
        key = module in self._results, _looks(module), tuple(map(_look, tree_leaves((args, kwargs))))
        first = self._first.setdefault(key, module) if inputs and torch.is_grad_enabled() else None
        before = _attributes(module)
        if first is None or first is module or first not in self._results:
            if first is module:
                inputs[0].register_hook(partial(self._passes, "past", module))
            self._lap = time.perf_counter()
            out = forward(*args, **kwargs)
            self.flush()
            if _attributes(module) == before:  # else others need what it left behind: each one runs
                self._results[module] = tree_map(
                    lambda x: (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, out
                )
            self._lap = time.perf_counter()
            return out
        self._like[module] = first
        self._results[module] = None
        leaves, form = tree_flatten(self._results[first], is_leaf=_is_shape)
        made = iter(_Like.apply(self, [each for each in leaves if _is_shape(each)], *inputs))
        return tree_unflatten([next(made) if _is_shape(each) else each for each in leaves], form)

    def stand_in(self, shapes: Sequence[_Shape]) -> tuple[torch.Tensor, ...]:
        """Results of which the bytes are counted elsewhere."""
        if self._stood_in is not self._forward:  # once in each direction
            self._flush_caches()
        self._stood_in = self._forward
        self._stands_in = True
        made = tuple(torch.zeros(shape, dtype=dtype, device=self._device or CPU) for shape, dtype in shapes)
        self._stands_in = False
        self._lap = self._now()
        return made

    def expanded(self) -> tuple[Event, ...]:
        """All events, those of layers that stood for others too."""
        if not self._like:
            return tuple(each for each in self.events if each.kind != "past")
        places: dict[tuple[str, nn.Module | None], tuple[int, Live]] = {}  # of the first, and what is alive before it
        live = NONE_LIVE
        for at, event in enumerate(self.events):
            places.setdefault((event.kind, event.module), (at, live))
            live = event.live if event.kind == "work" else live
        parts: dict[tuple[str, nn.Module], tuple[list[Event], Live]] = {}
        for first in set(self._like.values()):
            for begin, end in (("enter", "leave"), ("backward", "past")):
                if (begin, first) in places and (end, first) in places:
                    at, before = places[begin, first]
                    parts[begin, first] = self.events[at : places[end, first][0]], before
        found: list[Event] = []
        extra = live = NONE_LIVE
        for event in self.events:
            live = event.live if event.kind == "work" else live
            if event.kind == "work":
                event = replace(event, live=event.live + extra, most=event.most + extra)
            found.append(event)
            like = None if event.module is None else self._like.get(event.module)
            if like is not None and event.module is not None and (event.kind, like) in parts:
                own, added = self._as_of(event.module, like, *parts[event.kind, like], live + extra)
                found += own
                added = added if event.kind == "enter" else NONE_LIVE - (NONE_LIVE - added).at_least_none()
                extra = (extra + added).at_least_none()
        return tuple(each for each in found if each.kind != "past")

    def _as_of(
        self, module: nn.Module, first: nn.Module, events: Sequence[Event], before: Live, live: Live
    ) -> tuple[list[Event], Live]:
        """What was counted of `first` with `before` alive, as that of `module`; what it leaves."""
        modules = dict(zip(first.modules(), module.modules(), strict=True))
        names = {self._named[a]: self._named[b] for a, b in zip(first.parameters(), module.parameters(), strict=True)}
        works = [each for each in events if each.kind == "work"]
        own, more = [], live - before
        for each in events[1:]:
            if each.kind == "work":
                own.append(replace(each, live=each.live + more, most=each.most + more))
            else:
                itself = None if each.module is None else modules.get(each.module, each.module)
                own.append(replace(each, module=itself, name=names.get(each.name, each.name)))
        return own, (works[-1].live - before if works else NONE_LIVE)


class _Like(torch.autograd.Function):
    """Results of given shapes that depend on the inputs."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, shapes: Sequence[_Shape], *inputs: torch.Tensor) -> Any:
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


@contextmanager
def hooked(counter: Counter) -> Iterator[None]:
    """Hooks of each module's call, for as long as the block lasts; then the modules are as they were."""
    model, handles = counter.model, []
    kept = [each for module in model.modules() for each in (vars(module), *vars(module).values())]
    containers = [(each, each.copy()) for each in kept if type(each) in (dict, list, OrderedDict)]
    held = [each for each in tree_leaves([plain for _, plain in containers]) if type(each) is torch.Tensor]
    values = [(each, each.clone()) for each in held] if counter.times else []
    lists = (each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)))
    listed = {id(child) for each in lists for child in each.children()}
    try:
        for module in model.modules():
            if id(module) in listed and any(True for _ in module.children()) and any(True for _ in module.parameters()):
                module.forward = partial(counter.call, module, module.forward)
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(counter.enter, name)))
            handles.append(module.register_forward_hook(partial(counter.leave, id(module) in listed)))
        yield
    finally:
        counter.let_go()
        for handle in handles:
            handle.remove()
        for each, before in containers:  # tensors without memory must not stay in a cache of the model
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(before)
        with torch.no_grad():
            for value, earlier in values:  # that a pass may have written
                value.copy_(earlier)
