"""Parameters that fetch themselves: the class that every prepared parameter takes on.

A prepared parameter keeps its identity, shape, dtype and `numel()`. Each operation that touches its values passes the
gate, which brings its unit in, or raises a clear error where the values may not be read.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from outsize.run import refusals
from outsize.run.activations import in_backward
from outsize.run.embedding import look_up
from outsize.run.local import is_distributed
from outsize.run.saved import left_alone_by_dynamo, run_saving
from outsize.run.tiles import edge_of_tiles, run_in_tiles, runner

if TYPE_CHECKING:
    from outsize.run.engine import Engine

# Note [Every operation passes the gate]
# A parameter is guarded while its unit is not open (see Note [Open units] in run/unit.py). Hooks on modules miss
# parameters that are used functionally (`x @ self.embed.weight.T`), through custom methods, or by a layer that reads
# another's weights. An operation on a parameter cannot be missed: the parameter's class has `__torch_function__`. While
# the operation runs, saved-tensor hooks replace each view of a gathered buffer that autograd saves by a reference that
# brings the unit back in the backward. Everything else goes to the saved-tensor hooks that the user has in place.


# Note [Classes that outlive their engine]
# Dynamo keeps each class that it has seen in the globals of what it compiled, until the process ends. A class that held
# its engine would keep the model's memory, thread and files as long. So the classes know it weakly; it lives as long as
# a module that has parameters of it (run/hooks.py), its optimizer, or a graph that waits for its backward.


def _functions(names: Iterable[str]) -> set[Any]:
    found = set()
    for name in names:
        entry = getattr(torch.Tensor, name, None)
        if entry is None:
            continue
        getter, setter = getattr(entry, "__get__", None), getattr(entry, "__set__", None)
        if callable(entry) and setter is None:
            found.add(entry)
        else:
            found.update(each for each in (getter, setter) if each is not None)
    return found


_METADATA_NAMES = """
    shape dtype device layout requires_grad grad is_leaf names ndim itemsize nbytes grad_fn _version is_cuda
    is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xpu is_xla is_ipu
    is_vulkan is_hpu is_maia is_mtia output_nr retains_grad _backward_hooks _post_accumulate_grad_hooks _base
    _grad name size stride dim numel nelement element_size is_contiguous storage_offset is_floating_point
    is_complex get_device is_signed is_inference is_shared is_pinned is_conj is_neg _is_view _is_zerotensor
    dim_order ndimension retain_grad register_hook register_post_accumulate_grad_hook requires_grad_ __len__
    __hash__ __dir__ is_same_size new_empty new_zeros new_ones new_full new_empty_strided _is_param has_names
"""

METADATA = _functions(_METADATA_NAMES.split()) | {
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_same_size,
    torch._has_compatible_shallow_copy_type,
}

TO_NUMPY = _functions(["numpy", "__array__"])
_PICKLE = _functions(["__reduce_ex__"])
_SET_DATA = {torch.Tensor.data.__set__}  # type: ignore[attr-defined]
_VMAP = "torch._functorch.vmap"
_COMPUTE = {torch.nn.functional.linear, torch.nn.functional.embedding, torch.nn.functional.layer_norm}
"""The most frequent operations whose result is never a view of a parameter."""


_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_TO_ITSELF = {torch.Tensor.view_as, torch.Tensor.expand_as}
"""`param.view_as(param).grad_fn` is how torch asks for the node that accumulates a gradient."""
_CASTS = _functions(("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"))
_NO_VALUES = _AUTOGRAD | _TO_ITSELF | _CASTS | _SET_DATA
"""What may do without values, as its arguments tell."""


def _keeps(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the cast or move gives the tensor itself: found out by one without elements."""
    if kwargs.get("memory_format") is not None:
        return False
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    try:
        return func(like, *args[1:], **kwargs) is like
    except (RuntimeError, AssertionError, TypeError, ValueError):  # the operation itself says what is wrong
        return False


def is_alias(tensor: torch.Tensor, value: object) -> bool:
    """Whether `tensor.data = value` would change nothing: the same memory in the same shape."""
    if value is tensor:
        return True
    if not isinstance(value, torch.Tensor) or is_distributed(tensor) or is_distributed(value):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        alike = (tensor.dtype, tensor.device, tensor.layout) == (value.dtype, value.device, value.layout)
        return alike and tensor.is_set_to(value)


def _differentiate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward that names parameters: they go in as edges of the graph, so that none of their values is asked for."""
    given = dict(zip(inspect.signature(func).parameters, args, strict=False)) | kwargs
    inputs = given.get("inputs")
    materialize = given.get("materialize_grads", False)
    with torch._C.DisableTorchFunctionSubclass():
        given = {name: _unguarded(value) for name, value in given.items() if name != "inputs"}
        if inputs is not None:
            given["inputs"] = _edges(inputs, alone=func is torch.autograd.grad)
    if materialize:
        given |= {"materialize_grads": False, "allow_unused": True}
    result = func(**given)
    if not materialize:
        return result
    zeros = (torch.zeros_like(each, requires_grad=given.get("create_graph", False)) for each in inputs or ())
    return tuple(zero if grad is None else grad for grad, zero in zip(result, zeros, strict=True))


def _edges(inputs: Any, alone: bool) -> tuple[Any, ...]:
    """`alone`: one edge for each of them."""
    edges = []
    for each in [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else inputs:
        if not isinstance(each, Guarded):
            edges.append(each)
            continue
        tensor: Any = each
        edges.append(torch.autograd.graph.get_gradient_edge(tensor))
        if alone and runner(each.gate, tensor) is not None:
            refusals.gradient_of_tiles(each.gate.parameters.name_of(tensor))
        of_tiles = None if alone else edge_of_tiles(each.gate, tensor)
        if of_tiles is not None:
            edges.append(of_tiles)
    return tuple(edges)


def _unguarded(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(_unguarded(each) for each in value)
    if not isinstance(value, Guarded):
        return value
    tensor: Any = value
    return tensor if is_distributed(tensor) else torch.Tensor.as_subclass(tensor, torch.Tensor)


class _Managed:
    """What belongs to an engine."""

    gate_ref: Callable[[], Engine | None]
    """See Note [Classes that outlive their engine]."""

    @property
    def gate(self) -> Engine:
        return self.gate_ref() or _refuse_orphan()


class Guarded(_Managed):
    """A tensor each of whose operations passes the gate. See Note [Every operation passes the gate]."""

    @classmethod
    @left_alone_by_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return through_gate(cls.gate_ref(), func, args, kwargs or {})

    def as_subclass(self, cls: type) -> Any:
        """A guarded view: what carries another class would be read unseen."""
        if cls is not torch.Tensor:
            raise TypeError(
                f"a tensor of a prepared model cannot be seen as {cls.__name__}, as its values may be on disk: take a "
                f"copy, `tensor.clone().as_subclass({cls.__name__})`"
            )
        return pass_gate(self.gate, torch.Tensor.as_subclass, (self, cls), {})


class _View(Guarded):
    """A tensor that views a gathered buffer: as careful as the parameter it came from."""

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copy: torch.Tensor = self.clone()  # type: ignore[attr-defined]
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GuardedView(shape={tuple(self.shape)}, dtype={self.dtype})"  # type: ignore[attr-defined]


class ManagedParameter(_Managed):
    """A prepared parameter, whatever its tier."""

    @property
    def prepared(self) -> Any:
        """What `prepare` made of the model."""
        return self.gate.classes.prepared

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A plain parameter, where the values are gathered."""
        return memo.setdefault(id(self), self.gate.plain_copy(self))  # type: ignore[arg-type, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refusals.copy(self.gate.parameters.name_of(self), "pickled")  # type: ignore[arg-type]

    def _use_count(self) -> NoReturn:
        """What `torch.utils.swap_tensors` asks before it changes anything."""
        refusals.copy(self.gate.parameters.name_of(self), "swapped with another tensor")  # type: ignore[arg-type]

    def set_(self, source: object = None, *args: Any, **kwargs: Any) -> Any:
        """`register_parametrization` sets a parameter to itself, which is no write. Torch has no gate before `set_`."""
        if source is not self:
            refusals.set_data(self.gate.parameters.name_of(self))  # type: ignore[arg-type]
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """As torch's. See Note [The last to hear of a gradient]."""
        param: Any = self
        with torch._C.DisableTorchFunctionSubclass():
            handle = torch.Tensor.register_post_accumulate_grad_hook(param, hook)
            hooks = param._post_accumulate_grad_hooks
            if _LAST in hooks:
                hooks[_LAST] = hooks.pop(_LAST)
            return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Its name, shape, dtype and tier. Moves nothing."""
        param: Any = self
        shown, gate = f"shape={tuple(param.shape)}, dtype={param.dtype}", self.gate_ref()
        if gate is None or not gate.parameters.owns(param):  # its model is gone
            return f"Parameter({shown}, managed by outsize)"
        unit, slot = gate.parameters.unit_of(param)
        return f"Parameter({slot.name!r}, {shown}, tier={unit.shard.tiers.params!r})"

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else str(torch.Tensor.__format__(self, spec))  # type: ignore[arg-type]


# Note [The last to hear of a gradient]
# A hook of torch's on the parameter tells when autograd has left a gradient in it, and the gradient is laid to rest at
# once. The user's own hooks must have seen it before: ours stays the last in the parameter's dict of hooks. Torch holds
# that dict where the garbage collector cannot see it, so the hook knows the engine weakly.

_LAST = -1

_unguarded_call: Any = torch._C._disabled_torch_function_impl
"""Calls a function so that no operation in it passes the gate: at half of what `DisableTorchFunctionSubclass` costs."""


def hear_of_gradients(param: torch.Tensor, arrives: Callable[[torch.Tensor], None]) -> None:
    """Call a method, whose object may go, after autograd has left a gradient in the parameter."""
    known, own = weakref.WeakMethod(arrives), id(param)

    def arrived(param: torch.Tensor) -> None:
        if id(param) != own:  # torch gives it what the hook before it returned
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as torch says
        arrives = known()
        if arrives is not None:
            _unguarded_call(arrives, (), (param,))

    with torch._C.DisableTorchFunctionSubclass():
        if param._post_accumulate_grad_hooks is None:
            param._post_accumulate_grad_hooks = OrderedDict()  # torch's own function refuses a frozen parameter
        param._post_accumulate_grad_hooks[_LAST] = arrived


def hear_no_more(param: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        (param._post_accumulate_grad_hooks or {}).pop(_LAST, None)


def _unguarded_property(name: str, changed: Callable[[Any], None] | None = None) -> Any:
    """A property that concerns no values. Loops over all parameters ask for it; the gate takes ten times as long.
    `changed` is called with the parameter after it was set."""
    plain = getattr(torch.Tensor, name)
    get, change = plain.__get__, plain.__set__

    def set_and_tell(param: Any, value: Any) -> None:
        _unguarded_call(change, (), (param, value))
        if changed is not None:
            changed(param)

    return property(lambda param: _unguarded_call(get, (), (param,)), set_and_tell, plain.__delete__)


class GuardedParameter(ManagedParameter, Guarded):
    """A parameter that may be at rest."""

    grad = _unguarded_property("grad")
    requires_grad = _unguarded_property("requires_grad")


class ResidentParameter(ManagedParameter):
    """A parameter that lies on the device with its gradient and states: there is nothing to guard, and no cost.

    Its buffer is never dropped and its update runs inside `optimizer.step()`, so it is as readable as any parameter.
    """

    @property
    def data(self) -> torch.Tensor:
        value: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not is_alias(self, value):  # type: ignore[arg-type]
            refusals.set_data(self.gate.parameters.name_of(self))  # type: ignore[arg-type]


class OpenParameter(ResidentParameter):
    """A parameter while its module's call runs. See Note [Open units] in run/unit.py."""

    @property
    def data(self) -> torch.Tensor:
        value: torch.Tensor = ResidentParameter.data.fget(self)  # type: ignore[attr-defined]
        self.gate.parameters.unit_of(self)[0].lend(self, value)  # type: ignore[arg-type]
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        ResidentParameter.data.fset(self, value)  # type: ignore[attr-defined]


@final
class Classes:
    """The classes that the parameters of one engine take on, and the views of them; nothing hangs on a parameter.

    Without an engine: of parameters whose values have moved and that none has taken over. Where `prepare` fails then,
    they refuse to be used.
    """

    def __init__(self, gate: Engine | None) -> None:
        self._own: dict[str, object] = {"gate_ref": staticmethod(lambda: None) if gate is None else weakref.ref(gate)}
        if gate is not None and gate.reduction is not None and gate.reduction.ranks.stages is not None:
            self._own["grad"] = _unguarded_property("grad", lambda param: param.gate.gradient_set(param))
        self.prepared: Any = None
        self.guarded = self._made(GuardedParameter, nn.Parameter)
        self.resident = self._made(ResidentParameter, nn.Parameter)
        self.open = self._made(OpenParameter, nn.Parameter)
        self.view = self._made(_View, torch.Tensor)

    def _made(self, kind: type, base: type, more: Mapping[str, object] | None = None) -> type:
        return type(kind.__name__, (kind, base), {**self._own, **(more or {})})

    @cached_property
    def distributed(self) -> tuple[type, type]:
        """`guarded` and `view`, of DTensors. See Note [Tensor-parallel parameters]."""
        from torch.distributed.tensor import DTensor

        more = _guarded_local(DTensor)
        return self._made(GuardedParameter, DTensor, more), self._made(_View, DTensor, more)

    def take(self, param: torch.Tensor) -> None:
        """The parameter is guarded from now on."""
        param.__class__ = self.distributed[0] if is_distributed(param) else self.guarded

    def guard(self, view: torch.Tensor) -> torch.Tensor:
        """The same view of a gathered buffer, guarded; no other tensor of it, which would be a node of its own."""
        view.__class__ = self.distributed[1] if is_distributed(view) else self.view
        return view


def _guarded_local(kind: Any) -> dict[str, object]:
    """What a DTensor does besides operations, `to_local` and the like, passes the gate as an operation does; whatever
    else reads the local part must find it in place."""
    slot = kind._local_tensor
    shapes_only = threading.local()  # set while an operation asks for no values, in this thread

    def read(tensor: Any) -> torch.Tensor:
        found: torch.Tensor = slot.__get__(tensor)
        parameters = tensor.gate.parameters
        key = parameters.key_of(found)
        if key is not None and not parameters.unit_with(key).current and not getattr(shapes_only, "on", False):
            tensor.gate.admit(tensor, "to_local", False)
        return found

    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA and not (func in _TO_ITSELF and _is_itself(args)):
            return pass_gate(cls.gate_ref() or _refuse_orphan(), func, args, kwargs or {})
        before, shapes_only.on = getattr(shapes_only, "on", False), True
        try:
            return through_gate(cls.gate_ref(), func, args, kwargs or {})
        finally:
            shapes_only.on = before

    def through(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        @wraps(plain)
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return pass_gate(tensor.gate, plain, (tensor, *args), kwargs)

        return run

    methods = {name: through(name) for name in ("to_local", "full_tensor", "redistribute")}
    return {
        "_local_tensor": property(read, slot.__set__),
        "unguarded_local": staticmethod(slot.__get__),
        "__torch_function__": classmethod(torch_function),
        **methods,
    }


def through_gate(gate: Engine | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What every guarded tensor does with an operation: shape and the like are free, values pass the gate."""
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.dim and _asked_by_vmap():
                args[0].gate.refuse_vmap(args[0])  # its next step takes the memory, and no operation
            return func(*args, **kwargs)
    return pass_gate(gate or _refuse_orphan(), func, args, kwargs)


def _asked_by_vmap() -> bool:
    """Whether `torch.vmap` asks, be it through a mode (`torch.set_default_device`) that sees every operation."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _VMAP


def _refuse_orphan() -> NoReturn:
    raise RuntimeError(
        "this parameter has lost its values. Either the prepared model that it belonged to is gone, with its optimizer "
        "and all of its modules: keep the model for as long as its parameters are used. Or outsize.prepare failed "
        "while it moved them: build the model again"
    )


def pass_gate(gate: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, which has a guarded tensor among its arguments."""
    if func in _NO_VALUES:
        if func in _AUTOGRAD:
            return _differentiate(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TO_ITSELF and _is_itself(args):
                return _wrap((gate,), func(*args))
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(*args)  # its name
            if func in _CASTS and _keeps(func, args, kwargs):
                return args[0]
            if func in _SET_DATA and is_alias(*args):
                return None
        if func in _SET_DATA and isinstance(args[0], Guarded):
            refusals.set_data(args[0].gate.parameters.name_of(args[0]))  # type: ignore[arg-type]
    if gate.tables and (answer := look_up(gate, func, args, kwargs)) is not NotImplemented:
        return answer
    if gate.tiles:
        result = run_in_tiles(gate, func, args, kwargs)
        if result is not NotImplemented:
            return result
    name = _name_of(func)
    writes = _written(name, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        guarded = guarded_among(args, kwargs)
        gates = {gate}  # several where parameters of several models meet
        kept: list[torch.Tensor] = []  # views, with which a unit stays in a backward while the next one is fetched
        if gate.listing and func is torch.Tensor.detach and not is_distributed(args[0]):
            return _wrap(gates, func(*args, **kwargs))
        for tensor in guarded:
            owner = tensor.gate_ref() or _refuse_orphan()
            gates.add(owner)
            owner.admit(tensor, name, any(tensor is each for each in writes))
            if len(guarded) > 1 and in_backward():
                kept.append(tensor.detach())
        versions = [tensor._version for tensor in guarded]
        if func in _PICKLE:
            return args[0].clone().__reduce_ex__(*args[1:])
        result = run_saving(gates, func, args, kwargs)
        for tensor, version in zip(guarded, versions, strict=True):
            if tensor._version != version:  # a write that the operation's name does not tell
                tensor.gate.admit(tensor, name, True)
        if func in _COMPUTE:
            return result
        if func in TO_NUMPY:
            return result.copy()
        return _wrap(gates, result)


def _is_itself(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and args[0] is args[1]


def _name_of(func: Any) -> str:
    """`add_` for a method and for an operator, `data` for the getter of a property."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name).split(".")[0]


def guarded_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return among(Guarded, [*args, *kwargs.values()] if kwargs else args)


def among(kind: type, values: Iterable[Any], found: list[Any] | None = None) -> list[Any]:
    """The objects of this class among some values, in lists of any class, tuples and dicts too, which torch's functions
    take."""
    found = [] if found is None else found
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            among(kind, value, found)
        elif isinstance(value, dict):
            among(kind, value.values(), found)
    return found


_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__", "__iand__", "__ior__"}
_AUGMENTED |= {"__ixor__", "__ifloordiv__", "__ilshift__", "__irshift__", "__imatmul__", "__setitem__"}


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The guarded tensors that the operation of this name modifies."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
    return among(Guarded, [*([kwargs["out"]] if "out" in kwargs else ()), *(args[:1] if in_place else ())])


def _wrap(gates: Iterable[Engine], result: Any) -> Any:
    """Views of a gathered buffer leave the gate guarded; every other result as it is."""

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Guarded):
            return tensor
        owner = next((gate for gate in gates if gate.parameters.key_of(tensor) is not None), None)
        return tensor if owner is None else owner.classes.guard(tensor)

    if isinstance(result, torch.Tensor):
        return guard(result)
    if type(result) in (tuple, list):
        return tree_map_only(torch.Tensor, guard, result)
    return result
