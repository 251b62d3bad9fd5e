"""What an operation saves for the backward: views of gathered buffers as references that bring their unit back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from outsize.run.wrappers import Taken, is_wrapper

if TYPE_CHECKING:
    from outsize.run.engine import Engine

Function = TypeVar("Function", bound=Callable[..., Any])

_top: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

hooks_allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
_disable_dynamo: Callable[[Any], Any] = getattr(torch, "_disable_dynamo", lambda function: function)


@_disable_dynamo
def _untraced(function: Callable[[Any], Any], argument: Any) -> Any:
    """`torch.compile` traces hooks too, and takes the version of a tensor from a copy that it makes of it."""
    return function(argument)


def left_alone_by_dynamo(function: Function) -> Function:
    """The function, which `torch.compile` compiles no more than what it calls: streams are none of its business."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
Packed = tuple[bool, Any, int]
"""Whether it is a reference; the reference or the tensor; the writes that the tensor had seen when it was saved."""


def refuse_written(tensor: torch.Tensor, version: int) -> None:
    """With hooks autograd does not look at this itself."""
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            f"instead. An operation saved this tensor for the backward, and a later one wrote to it: make the later "
            f"one not in-place"
        )


def refusing_writes(hooks: Hooks | None) -> Hooks:
    """These hooks, or such as keep what they get. What is kept as a tensor must be as it was when it is asked for."""
    pack, unpack = hooks or (_as_it_is, _as_it_is)

    def noted(tensor: torch.Tensor) -> tuple[Any, int | None]:
        content = pack(tensor)
        return content, content._version if isinstance(content, torch.Tensor) else None

    def checked(packed: tuple[Any, int | None]) -> torch.Tensor:
        content, version = packed
        if version is not None:
            refuse_written(content, version)
        found: torch.Tensor = unpack(content)
        return found

    return noted, checked


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def top_hooks() -> Hooks | None:
    """The (pack, unpack) of the innermost saved-tensor hooks, the user's own among them."""
    return None if _top is None else _top(True)


def run_saving(gates: Iterable[Engine], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func`; what it saves for the backward is saved by reference where it views a buffer of one of the gates."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
        return _run_uncached(gates, func, args, kwargs)
    if not torch.is_grad_enabled():
        return func(*args, **kwargs)
    if not hooks_allowed():
        return _run_on_copies(gates, func, args, kwargs)
    hooks = top_hooks()
    if of_checkpoint(hooks):
        hooks = _below_checkpoint(hooks)
    else:
        for gate in gates:
            saving = Saving(gate, hooks)
            hooks = saving.pack, saving.unpack
    with nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks):
        return func(*args, **kwargs)


def _run_uncached(gates: Iterable[Engine], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autocast keeps the cast of every weight until its outermost block is left: a copy of the whole model."""
    torch.set_autocast_cache_enabled(False)
    try:
        return run_saving(gates, func, args, kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)


def _run_on_copies(gates: Iterable[Engine], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.func allows no hooks: what it saves must not view a buffer, which may be gone when the graph is used."""
    copies: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if all(gate.parameters.key_of(tensor) is None for gate in gates):
            return tensor
        copies.append(tensor.clone())
        return copies[-1]

    args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
    versions = [copy._version for copy in copies]
    result = func(*args, **kwargs)
    if versions != [copy._version for copy in copies]:
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(f"a parameter of a prepared model cannot be written in place ({name!r}) inside torch.func")
    return result


class Saving:
    """What is saved for the backward: views of gathered buffers as references that bring the unit back."""

    __slots__ = ("_gate", "_held", "outer")

    def __init__(self, gate: Engine, outer: Any, held: object = None) -> None:
        """`held` lives as long as anything that is saved."""
        self._gate = gate
        self._held = held
        self.outer = outer  # the (pack, unpack) of the user's own saved-tensor hooks

    @left_alone_by_dynamo
    def pack(self, tensor: torch.Tensor) -> Packed:
        return _untraced(self.pack_untraced, tensor) if torch.compiler.is_compiling() else self.pack_untraced(tensor)

    @left_alone_by_dynamo
    def unpack(self, packed: Packed) -> torch.Tensor:
        return (
            _untraced(self.unpack_untraced, packed) if torch.compiler.is_compiling() else self.unpack_untraced(packed)
        )

    @left_alone_by_dynamo
    def pack_untraced(self, tensor: torch.Tensor) -> Packed:
        known = self._gate.parameters.reference
        apart = type(tensor) is not torch.Tensor and is_wrapper(tensor)
        reference = Taken.of(tensor, known) if apart else known(tensor)
        if reference is not None:
            return True, reference, 0
        if tensor.requires_grad:  # TorchScript gives what it computed with its history: kept, it would keep itself
            tensor = tensor.detach()
        return False, tensor if self.outer is None else self.outer[0](tensor), tensor._version

    @left_alone_by_dynamo
    def unpack_untraced(self, packed: Packed) -> torch.Tensor:
        is_reference, content, version = packed
        if not is_reference:
            if self.outer is not None:
                return self.outer[1](content)  # type: ignore[no-any-return]
            if content._version != version:
                refuse_written(content, version)
            return content  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self._watch_node()
        bring_back = self._gate.bring_back
        return content.together(bring_back) if isinstance(content, Taken) else bring_back(content)

    def _watch_node(self) -> None:
        """create_graph: what the running node saves for a further backward needs the same care."""
        outer = top_hooks()
        if not is_ours(outer, self._gate):
            saving = Saving(self._gate, outer)  # autograd takes these hooks away again when the node has run
            torch._C._autograd._push_saved_tensors_default_hooks(saving.pack, saving.unpack)


def is_ours(hooks: Hooks | None, gate: Engine) -> bool:
    """Whether what these saved-tensor hooks save is saved by reference where it views a buffer of the gate."""
    saving = None if hooks is None else getattr(hooks[0], "__self__", None)
    return isinstance(saving, Saving) and saving._gate is gate


def of_checkpoint(hooks: Hooks | None) -> TypeGuard[Hooks]:
    """Whether these are the hooks of `torch.utils.checkpoint`, which keeps nothing that it can compute again."""
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def by_reference(gate: Engine, outer: Hooks | None) -> Hooks:
    """These hooks, but what views a buffer of the gate is saved by reference."""
    saving = Saving(gate, outer)
    return saving.pack_untraced, saving.unpack_untraced


def saving_with(gate: Engine, held: object, hooks: Hooks | None) -> AbstractContextManager[Any]:
    """In the block, what is saved is saved by reference where it views a buffer of the gate, and holds `held`.

    `hooks` get all else, unless the user has some.
    """
    outer = top_hooks()
    while outer is not None and is_ours(outer, gate):
        outer = outer[0].__self__.outer  # type: ignore[attr-defined]
    saving = Saving(gate, outer or hooks, held)
    return torch.autograd.graph.saved_tensors_hooks(saving.pack, saving.unpack)


def is_foreign(hooks: Hooks | None) -> bool:
    """Whether the user's own saved-tensor hooks see what is saved here."""
    while hooks is not None:
        saving = getattr(hooks[0], "__self__", None)
        if not isinstance(saving, Saving):
            return True
        hooks = saving.outer
    return False


def saving_by_reference(gate: Engine) -> Hooks | None:
    """Hooks by which what views a buffer of the gate is saved by reference. None where those in place do that."""
    outer = top_hooks()
    if not torch.is_grad_enabled() or is_ours(outer, gate):
        return None
    return _below_checkpoint(outer) if of_checkpoint(outer) else by_reference(gate, outer)


def _below_checkpoint(hooks: Hooks) -> Hooks | None:
    """Below these hooks of a checkpoint nothing is saved by reference: both of its forwards save the same.

    What it computes again in the backward it keeps until it is used, and shows that it does by views, of frozen
    parameters too. In its first forward it keeps nothing (None: leave its hooks in place).
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    keep, unpack = hooks
    return wraps(keep)(lambda tensor: keep(tensor.detach())), unpack
