"""One step of the user's optimizer on parameters of our choosing."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch

# Note [A worker optimizer]
# The user's optimizer object keeps its class, its param_groups and its hooks. The arithmetic is done by a worker: an
# object of the same class whose only parameters are those at hand (as fp32 masters), with their state and with the
# options of the step being run. It calls the class's own step function below torch's profiling wrapper, so that hooks
# which the user registered fire once a step. What the user has hung on a parameter (a factor for its learning rate) is
# on the worker's parameter too. What the step keeps anywhere but in a parameter's state would be lost, and is an error.
# What it changes of its groups and of the optimizer is told to the caller.

# Note [Attributes of the optimizer]
# A step may read what the user sets on the optimizer between steps (`optimizer.trust = 0.1`). The update runs later
# than `step()`, so what the optimizer has is noted there, and the worker has it while it steps. torch's own bookkeeping
# is left out, and so is what a GradScaler leaves.

Values = Mapping[str, Any]
Group = tuple[Values, "Sequence[Subject]"]
"""Options, and the parameters that have them."""


@dataclass
class Subject:
    """One parameter that the worker steps on."""

    param: torch.Tensor
    grad: torch.Tensor | None
    state: dict[str, Any] = field(default_factory=dict)
    attributes: Values = field(default_factory=dict)


class Unsuited(RuntimeError):
    """A step that cannot run on one piece or one parameter at a time; the text is the reason."""


@final
class Worker:
    """Runs `type(optimizer).step`. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # a thread that updates must not keep it alive
        self._worker: Any = object.__new__(type(optimizer))
        self._of_torch = {
            key: type(value)() if key.endswith("_hooks") else value
            for key, value in vars(optimizer).items()
            if _is_torchs(key) and key not in {"state", "param_groups", *_PATCHED}
        }
        self._own: dict[str, Any] = {}
        self._step = plain_step(type(optimizer))

    def own(self) -> Values:
        """What the optimizer has as attributes now. See Note [Attributes of the optimizer]."""
        optimizer = self._optimizer()
        now = self._own if optimizer is None else _own_of(optimizer)
        if differs(now, self._own):
            self._own = snapshots(now)
        return self._own

    def run(
        self, groups: Sequence[Group], own: Values, closure: Callable[[], Any] | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """One step on these parameters, whose values and states change in place, with these attributes of the
        optimizer. Returns what the step has changed of each group and of the optimizer."""
        worker = self._worker
        vars(worker).clear()
        known: dict[int, Any] = {}  # what groups share (a list of the defaults) they share here too
        vars(worker).update(self._of_torch, **snapshots(own, known), state=defaultdict(dict))
        pairs = [(subject, _leaf_of(subject)) for _, subjects in groups for subject in subjects]
        leaves = iter(pairs)
        worker.param_groups = [
            {**snapshots(options, known), "params": [next(leaves)[1] for _ in subjects]} for options, subjects in groups
        ]
        worker.state.update({leaf: subject.state for subject, leaf in pairs if subject.state})
        after = list(worker.param_groups)
        before = [{**options, "params": group["params"]} for (options, _), group in zip(groups, after, strict=True)]
        try:
            # What a step makes of its own is in host memory, whatever device the user has made the default.
            on_host = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
            with torch.no_grad(), on_host:
                self._step(worker, *(() if closure is None else (closure,)))
            for subject, leaf in pairs:
                if leaf.data_ptr() != subject.param.data_ptr():  # it put another tensor in place of the values
                    subject.param.copy_(leaf)
                subject.state = dict(worker.state.pop(leaf, {}))
                hung = _changes(vars(leaf), subject.attributes)
                if hung:
                    raise Unsuited(f"its step() sets attributes of its parameters ({', '.join(map(repr, hung))})")
            for key in worker.state:
                name = "a tensor" if isinstance(key, torch.Tensor) else repr(key)
                raise Unsuited(f"its step() keeps state under {name}, which is no parameter")
            return [_changes(*each) for each in zip(after, before, strict=True)], _changes(_own_of(worker), own)
        finally:
            vars(worker).clear()


def _leaf_of(subject: Subject) -> torch.Tensor:
    leaf = subject.param.detach().requires_grad_()
    leaf.grad = subject.grad
    vars(leaf).update(subject.attributes)
    return leaf


def _changes(now: Values, before: Values) -> dict[str, Any]:
    gone = sorted(map(str, before.keys() - now.keys()))
    if gone:
        raise Unsuited(f"its step() removes {gone[0]!r}")
    return {key: value for key, value in now.items() if key not in before or differs(value, before[key])}


def differs(now: object, before: object) -> bool:
    """Whether a value, or anything inside of it, is another one; NaN is the same as NaN."""
    if now is before:
        return False
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        if (now.shape, now.dtype, now.device) != (before.shape, before.dtype, before.device):
            return True
        return not bool(((now == before) | ((now != now) & (before != before))).all())
    try:
        if isinstance(now, Mapping) and isinstance(before, Mapping):
            return now.keys() != before.keys() or any(differs(now[key], value) for key, value in before.items())
        if isinstance(now, _SEQUENCES) and isinstance(before, _SEQUENCES):
            return len(now) != len(before) or any(map(differs, now, before))
        if type(now) is type(before) and hasattr(now, "__dict__") and type(now).__eq__ is object.__eq__:
            return differs(vars(now), vars(before))
        return bool(now != before) and not (now != now and before != before)
    except (RuntimeError, ValueError):  # arrays compare by element
        return True


_SEQUENCES = (list, tuple, deque)


def inside(value: object, depth: int = 5) -> Iterator[Any]:
    """The value, and what its containers hold, keys included."""
    yield value
    if depth and isinstance(value, (Mapping, set, frozenset, *_SEQUENCES)):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from inside(each, depth - 1)


def snapshots(values: Values, known: dict[int, Any] | None = None) -> dict[str, Any]:
    """The values as they are now, whatever becomes of what holds them; `known`, by id: what has been copied already."""
    known = {} if known is None else known
    return {key: _snapshot(value, known) for key, value in values.items()}


def _snapshot(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a tensor, or of containers and those inside; two that were one are one in the copy."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        copied: Any = value.detach().clone()
    elif isinstance(value, (list, dict, set, deque)):
        copied = known[id(value)] = copy.copy(value)  # which may hold itself
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(each, (list, dict, set, deque)):
                copied[key] = _snapshot(each, known)
    else:
        return value
    known[id(value)] = copied
    return copied


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """What the user has hung on a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return {key: value for key, value in vars(param).items() if key not in _OF_TORCHS_PARAMETERS}


def _own_of(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if not _is_torchs(key)}


def _is_torchs(name: str) -> bool:
    return name in _PATCHED or name in _BOOKKEEPING or (name.startswith("_optimizer_") and name.endswith("_hooks"))


NO_OPTIONS = {"params", "param_names"}
"""What a group has of its parameters: a step is given one of them at a time, and none of their names."""

_OF_TORCHS_PARAMETERS = {"_is_param", "_local_tensor", "_spec"}
_PATCHED = {"step", "state_dict", "load_state_dict", "add_param_group", "zero_grad"}
_BOOKKEEPING = {
    "state",
    "param_groups",
    "grad_scale",
    "found_inf",
    "_opt_called",
    "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling",
    "_warned_capturable_if_run_uncaptured",
    "_zero_grad_profile_name",
}
"""Attributes of an optimizer that torch, a scheduler or a scaler sets."""


def plain_step(kind: type) -> Any:
    """Its step function without torch's profiling wrapper."""
    step: Any = getattr(kind, "step", None)
    return step.__wrapped__ if getattr(step, "hooked", False) else step
