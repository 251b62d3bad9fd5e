"""The only file that changes `nn.Module` objects: calls get frames, and moves of prepared parameters are refused.

So are steps of another optimizer than the model's own.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache, partial, wraps
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outsize.run import refusals
from outsize.run.activations import FRAME, Activations
from outsize.run.engine import Engine, Frame
from outsize.run.logits import Head
from outsize.run.positions import PositionTiles
from outsize.run.saved import left_alone_by_dynamo
from outsize.run.tiles import runner
from outsize.run.wrappers import known

# Note [The frame is around the call]
# A module's frame is an attribute `_call_impl` of the instance, which `nn.Module.__call__` looks up. So the user, or a
# library, may replace `forward` before `prepare` or after it. `module.forward(x)` called directly has no frame: there
# each module inside opens its own, and a parameter that `forward` uses itself is refused with the remedy.

# Note [A copy with our attributes]
# `_call_impl` and `forward` belong to one module. Who copies attributes (`copy.copy`, the clones of meta-learning
# libraries) copies them too, and a call of that copy would compute the original. `nn.Module.__call__` does not pass
# `self` to an attribute of the instance: so the frame that calls tells whose call it is. So it does for `copy.deepcopy`
# and `state_dict`, which act for the copy.

_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__
_DEEPCOPY, _STATE_DICT = copy.deepcopy.__code__, nn.Module.state_dict.__code__
_NOTHING = object()
Attributes = dict[str, Any]
Call = Callable[..., Any]


def install(
    engine: Engine,
    model: nn.Module,
    framed: Mapping[nn.Module, bool],
    layers: Mapping[nn.Module, str],
    activations: Activations,
    heads: Container[nn.Module],
    wide: Mapping[nn.Module, int],
    methods: Mapping[str, Call],
) -> None:
    """Put frames around the calls of modules, on the instances; classes and torch itself stay as they are.

    `framed` says of each whether it lies inside another one, which opens the same unit; `layers`, what is done with the
    activations of some; `heads`, linear layers whose results may be computed late; `wide`, how many bytes one call of
    some may take, which else runs in tiles of the sequence; `methods`, what takes the place of the model's own.
    """
    names = {id(module): name for name, module in model.named_modules()}
    moves = _checked_moves(model)
    for module in model.modules():
        ours: Attributes = {}
        again = None
        if any(True for _ in module.parameters()):
            ours[FRAME] = partial(Frame, engine, module)
        if module in wide and module._compiled_call_impl is None:
            ours["forward"] = PositionTiles(module, repr(names[id(module)]), wide[module])
        if module in layers:
            again = partial(activations.around, module, layers[module], names[id(module)])
            if module._compiled_call_impl is None:
                ours["forward"] = again(ours.get("forward", module.forward))
        elif isinstance(module, nn.Linear) and module in heads:
            frame, unchanged = partial(Frame, engine, module, again=True), partial(_unchanged, engine)
            ours["forward"] = Head(module, frame, unchanged, partial(runner, engine, module.weight))
        if module in framed:
            ours |= _calls(engine, module, framed[module], again)
            if any(True for _ in module.parameters(recurse=False)):
                ours |= _encoders(engine, module, framed[module])
        elif "forward" in ours:
            ours["_call_impl"] = _unframed(module)
        if isinstance(module, nn.RNNBase):
            ours["flatten_parameters"] = lambda: None  # it lets cuDNN move weights to memory of its own
        if any(True for _ in module.parameters()):
            ours |= {"_apply": _checked_apply(engine, module), "_load_from_state_dict": _checked_load(module)}
            ours["_save_to_state_dict"] = _listed(engine, module)
            ours["__prepare_scriptable__"] = refusals.torchscript
        if module is model:
            ours |= {**moves, **methods}
        if ours:
            before = {name: module.__dict__.get(name, _NOTHING) for name in (*ours, "__deepcopy__")}
            _put(module, {**ours, "__deepcopy__": partial(_copied, before, module)})


def _unchanged(engine: Engine, weight: torch.Tensor) -> Callable[[], None]:
    """A function that raises where a parameter has changed since."""
    with torch._C.DisableTorchFunctionSubclass():
        reference = engine.parameters.reference(weight)
    return (lambda: None) if reference is None else partial(engine.parameters.check, reference)


def remove(model: nn.Module) -> None:
    """Give every module back what it had before `install`."""
    for module in model.modules():
        copier = module.__dict__.get("__deepcopy__")
        if isinstance(copier, partial) and copier.func is _copied:
            _put(module, copier.args[0])


def _put(module: nn.Module, attributes: Attributes) -> None:
    for name, value in attributes.items():
        if value is _NOTHING:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _copied(before: Attributes, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy is a plain module: its parameters copy themselves, where they are gathered."""
    module = _asked(module, _DEEPCOPY, "x")
    ours = {name: module.__dict__.get(name, _NOTHING) for name in before}
    _put(module, before)
    plain = "__deepcopy__" not in module.__dict__ and not hasattr(type(module), "__deepcopy__")
    if plain:  # else a wrapper that passes attributes on, as PEFT's, would copy what it wraps in its own place
        module.__dict__["__deepcopy__"] = None
    try:
        copied = copy.deepcopy(module, memo)
    finally:
        _put(module, ours)
    if plain:
        copied.__dict__.pop("__deepcopy__", None)
    return copied


def _calls(engine: Engine, module: nn.Module, inside: bool, again: Callable[[Call], Call] | None) -> Attributes:
    """The ways into a module's call, each in a frame. What a compiler sees lies inside the frame, and inside what runs
    it `again` in the backward."""
    call, compiled = module._call_impl, module._compiled_call_impl
    forward = module.__dict__.get("forward", _NOTHING)

    def in_frame(compiled: Call) -> Call:
        return _framed(engine, module, compiled if again is None else again(compiled), inside)

    def compile_in_frame(*args: Any, **kwargs: Any) -> None:
        _put(module, {"forward": forward})
        module._compiled_call_impl = in_frame(torch.compile(call, *args, **kwargs))

    ours: Attributes = {"_call_impl": _framed(engine, module, call, inside), "compile": compile_in_frame}
    return ours if compiled is None else {**ours, "_compiled_call_impl": in_frame(compiled)}


def _encoders(engine: Engine, module: nn.Module, inside: bool) -> Attributes:
    """What `generate` of transformers calls before the first forward, each in a frame: LLaVA-NeXT's use a parameter."""
    named = {name: getattr(module, name, None) for name in ("get_image_features", "get_video_features")}
    return {name: wraps(call)(_framed(engine, module, call, inside)) for name, call in named.items() if callable(call)}


def _framed(engine: Engine, module: nn.Module, call: Call, inside: bool) -> Call:
    units = engine.owned.get(id(module), ())

    def run(*args: Any, **kwargs: Any) -> Any:
        if inside and torch.compiler.is_compiling():
            return call(*args, **kwargs)
        _refuse_copies(module)
        if engine.has_opened(units):
            return call(*args, **kwargs)
        with Frame(engine, module):
            return call(*args, **kwargs)

    return run


def _unframed(module: nn.Module) -> Call:
    """The call of a module whose `forward` is ours."""
    call = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_copies(module)
        return call(*args, **kwargs)

    return run


@left_alone_by_dynamo
def _refuse_copies(module: nn.Module) -> None:
    """In our `_call_impl`: see Note [A copy with our attributes]."""
    caller = sys._getframe(2)
    if caller.f_code is _WRAPPED_CALL and caller.f_locals["self"] is not module:
        refusals.call_of_a_copy(type(module).__name__)


def _asked(module: nn.Module, code: CodeType, name: str) -> nn.Module:
    """The module for which the function with this code has called ours: a copy with the module's attributes, or the
    module. `name`: what the function calls it. See Note [A copy with our attributes]."""
    caller = sys._getframe(2)
    found = caller.f_locals.get(name) if caller.f_code is code else None
    if isinstance(found, type(module)) and found.__dict__.get("_apply") is module.__dict__.get("_apply"):
        return found
    return module  # what passes attributes on has passed ours on


def _checked_load(module: nn.Module) -> Callable[..., None]:
    """`load_state_dict(assign=True)` would put other parameters in place of the prepared ones."""
    load: Callable[..., None] = module._load_from_state_dict

    @wraps(load)
    def checked(state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(..., assign=True) would replace the parameters of a prepared model: leave assign out, "
                "inside `with outsize.gathered(model, modify=True):`, or load before outsize.prepare"
            )
        load(state_dict, prefix, local_metadata, *args)

    return checked


def _listed(engine: Engine, module: nn.Module) -> Callable[..., None]:
    """`state_dict` of a model at rest: libraries ask for all of it to take a part (PEFT the adapters)."""
    save: Callable[..., None] = module._save_to_state_dict

    @wraps(save)
    def listed(*args: Any, **kwargs: Any) -> None:
        before, engine.listing = engine.listing, True
        asked = _asked(module, _STATE_DICT, "self")
        try:
            (save if asked is module else partial(type(asked)._save_to_state_dict, asked))(*args, **kwargs)
        finally:
            engine.listing = before

    return listed


_Optimizer = torch.optim.Optimizer
_OWN: weakref.WeakKeyDictionary[Engine, weakref.ref[_Optimizer] | None] = weakref.WeakKeyDictionary()
"""The optimizer that `prepare` was given, by engine."""


def refuse_other_optimizers(engine: Engine, optimizer: _Optimizer | None) -> None:
    """Refuse steps of optimizers that `prepare` was not given: they would change values that are at rest.

    What wraps the model's own optimizer has the same groups, and is let through to it. torch has one list of hooks for
    all optimizers, which must not change while one steps: so there is one hook, from the first `prepare` on.
    """
    _register_check()
    _OWN[engine] = None if optimizer is None else weakref.ref(optimizer)


@cache
def _register_check() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(stepping: _Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    for engine in (each() for each in _OWN.keyrefs()):  # a list: others may prepare meanwhile
        if engine is None:
            continue
        own = _OWN.get(engine)
        known = None if own is None else own()
        if stepping is known or (known and stepping.param_groups is known.param_groups):
            continue
        parameters = engine.parameters
        for param in (each for group in stepping.param_groups for each in group["params"]):
            if parameters.owns(param) and param.grad is not None and not parameters.unit_of(param)[0].resident:
                raise RuntimeError(
                    f"this {type(stepping).__name__} was not passed to outsize.prepare, and steps on "
                    f"{parameters.name_of(param)!r} of a prepared model: make the optimizer before, and pass it, "
                    f"`outsize.prepare(model, optimizer)`; a model has one optimizer, with several parameter groups if "
                    f"need be"
                )


def _checked_apply(engine: Engine, module: nn.Module) -> Callable[..., nn.Module]:
    """Moves of a part, or of what the model is a part of: those that leave the parameters alone are let through.

    By this every module with parameters keeps the engine. See Note [Classes that outlive their engine].
    """
    apply: Callable[..., nn.Module] = module._apply

    @wraps(apply)
    def checked(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        ours = (param for param in module.parameters() if any(map(engine.parameters.owns, known([param]))))
        if not _keeps_all(fn, ours):
            _refuse_move()
        return apply(fn, recurse)

    return checked


def _keeps_all(fn: Callable[[torch.Tensor], torch.Tensor], params: Iterable[torch.Tensor]) -> bool:
    """Whether the move would change no parameter: found out by tensors without elements."""
    for dtype, device in {(param.dtype, param.device) for param in params}:
        like = torch.empty(0, dtype=dtype, device=device)
        try:
            kept = fn(like) is like
        except (RuntimeError, AssertionError):  # to a device that is not there, for one
            kept = False
        if not kept or (device.type == "cpu" and like.is_shared()):
            return False
    return True


def _checked_moves(model: nn.Module) -> dict[str, Callable[..., nn.Module]]:
    """`model.to(...)`, `.half()`, `.cuda()` would replace every parameter; what changes nothing is let through."""
    to: Callable[..., nn.Module] = model.to

    @wraps(to)
    def checked_to(*args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None or not _is_already(model, device, dtype):
            _refuse_move()
        return model

    dtypes = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    moves = {name: partial(checked_to, dtype) for name, dtype in dtypes.items()}
    return {"to": checked_to, "cpu": partial(checked_to, "cpu"), **moves}


def _refuse_move() -> NoReturn:
    raise RuntimeError(
        "a prepared model cannot be moved or cast (.to, .cuda, .half, ...), nor can a part of it: outsize keeps its "
        "parameters. Choose with outsize.prepare(..., device=..., compute_dtype=...) instead, or cast the model before "
        "prepare"
    )


def _is_already(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Whether `model.to(device, dtype)` would change nothing."""
    params = list(model.parameters())
    here = params[0].device
    same_device = device is None or device == here or (device.type == here.type and device.index is None)
    same_device = same_device or (device is not None and device.type == here.type == "cpu")
    return same_device and (dtype is None or {param.dtype for param in params} == {dtype})
