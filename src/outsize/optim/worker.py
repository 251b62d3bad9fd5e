"""One step of the user's optimizer on parameters of our choosing."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

# Note [A worker optimizer]
# The user's optimizer object keeps its class, its param_groups and its hooks. The arithmetic is done by a worker: an
# object of the same class whose only parameter is the piece at hand (as fp32 master), whose state is the piece's state
# and whose hyper-parameters are those of the step being run. It calls the class's own step function below torch's
# profiling wrapper, so that hooks which the user registered fire once a step and not once a piece. What the user has
# hung on a parameter (a factor for its learning rate) is on the worker's parameter too. What the step keeps anywhere
# but in that parameter's state would be lost or mixed up between pieces, and is an error. What it changes of its groups
# and of the optimizer is told to the caller. See Note [What a step changes of its groups].

# Note [Attributes of the optimizer]
# A step may read what the user sets on the optimizer between steps (`optimizer.trust = 0.1`). The update runs later
# than `step()`, so what the optimizer has is noted there, and the worker has it while it steps. torch's own bookkeeping
# is left out, and so is what a GradScaler leaves.

# Note [What a step changes of its groups]
# Many optimizers count steps in their groups (`group["step"] += 1`) or on themselves. Here every parameter is stepped
# alone and later. So a pilot, a further object of the user's class with one small parameter a group, steps once when
# the user calls `step()`, and what it makes of the groups is put into the user's own. Every parameter's step starts
# from the groups as they were before. The trial has shown that these changes do not depend on the parameters.


@dataclass
class Subject:
    """One parameter that the worker steps on."""

    param: torch.Tensor
    grad: torch.Tensor | None
    state: dict[str, Any] = field(default_factory=dict)


class Unsuited(RuntimeError):
    """A step that cannot run on one piece or one parameter at a time; the text is the reason."""


@final
class Worker:
    """Runs `type(optimizer).step`. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # a thread that updates must not keep it alive
        self._worker = _worker_of(optimizer)
        self._of_torch = {key: value for key, value in vars(self._worker).items() if not _is_own(key)}
        self._own: dict[str, object] = {}
        self._step = plain_step(type(optimizer))

    def own(self) -> Mapping[str, object]:
        """What the optimizer has as attributes now. See Note [Attributes of the optimizer]."""
        optimizer = self._optimizer()
        now = self._own if optimizer is None else _own_of(optimizer)
        if differs(now, self._own):
            self._own = {key: taken(value) for key, value in now.items()}
        return self._own

    def run(
        self,
        subjects: Sequence[Subject],
        hyper: Mapping[str, object],
        attributes: Mapping[str, object],
        own: Mapping[str, object],
    ) -> tuple[dict[str, object], dict[str, object]]:
        """One step on these parameters; their values and states change in place.

        `attributes`: of the parameters; `own`: of the optimizer. Returns what the step has changed of the group and of
        the optimizer.
        """
        [changes], of_optimizer = self.run_groups([(hyper, subjects)], attributes, own)
        return changes, of_optimizer

    def run_groups(
        self,
        groups: Sequence[tuple[Mapping[str, object], Sequence[Subject]]],
        attributes: Mapping[str, object],
        own: Mapping[str, object],
    ) -> tuple[list[dict[str, object]], dict[str, object]]:
        """As `run`, with several groups."""
        worker = self._worker
        vars(worker).clear()
        vars(worker).update(self._of_torch, **{key: taken(value) for key, value in own.items()})
        worker.state = defaultdict(dict)
        worker.param_groups = []
        pairs = []
        for hyper, subjects in groups:
            leaves = []
            for subject in subjects:
                leaf = subject.param.detach().requires_grad_()
                leaf.grad = subject.grad
                leaf.__dict__.update(attributes)
                if subject.state:
                    worker.state[leaf] = subject.state
                leaves.append(leaf)
                pairs.append((subject, leaf))
            worker.param_groups.append({**{key: taken(value) for key, value in hyper.items()}, "params": leaves})
        before = [
            {**hyper, "params": group["params"]} for (hyper, _), group in zip(groups, worker.param_groups, strict=True)
        ]
        after = list(worker.param_groups)
        try:
            with torch.no_grad(), _host_by_default():
                self._step(worker)
            for subject, leaf in pairs:
                if leaf.data_ptr() != subject.param.data_ptr():  # it put another tensor in place of the values
                    subject.param.copy_(leaf)
                subject.state = dict(worker.state.get(leaf, {}))
                hung = _changes(vars(leaf), attributes)
                if hung:
                    raise Unsuited(f"its step() sets attributes of its parameters ({', '.join(map(repr, hung))})")
            known = {id(leaf) for _, leaf in pairs}
            foreign = [key for key in worker.state if id(key) not in known]
            if foreign:
                name = "a tensor" if isinstance(foreign[0], torch.Tensor) else repr(foreign[0])
                raise Unsuited(f"its step() keeps state under {name}, which is no parameter")
            return [_changes(*each) for each in zip(after, before, strict=True)], _changes(_own_of(worker), own)
        finally:
            worker.state = defaultdict(dict)
            worker.param_groups = []


@final
class Pilot:
    """Steps ahead of the real parameters. See Note [What a step changes of its groups]."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, at_start: Callable[[Mapping[str, object]], dict[str, object]]
    ) -> None:
        """`at_start(options)`: these options as they were before the first step."""
        self._worker = Worker(optimizer)
        self._at_start = at_start
        self._states: list[dict[str, Any]] = []

    def look_ahead(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, object]], stepped: Sequence[bool]
    ) -> Callable[[], None]:
        """Step with these `groups`, of which `stepped` have gradients. What is returned makes the changes."""
        own = self._worker.own()
        states, changed_groups, changed_own = [], [], dict[str, object]()
        for at, (hyper, with_grad) in enumerate(zip(groups, stepped, strict=True)):
            if at == len(self._states):  # the first step, or a group that was added
                self._states.append({})
            generator = torch.Generator().manual_seed(0)
            start, grad = (torch.randn(_SHAPE, generator=generator, device="cpu", dtype=torch.float32) for _ in "ab")
            subject = Subject(start, grad if with_grad else None, copy.deepcopy(self._states[at]))
            try:
                of_group, of_optimizer = self._worker.run([subject], hyper, {}, own)
            except Exception:
                if subject.state or not with_grad:
                    raise
                # The groups have counted on without the pilot (a checkpoint was loaded): it makes its state first.
                self._worker.run([subject], self._at_start(hyper), {}, self._at_start(own))
                of_group, of_optimizer = self._worker.run([subject], hyper, {}, own)
            states.append(subject.state)
            changed_groups.append(of_group)
            changed_own.update(of_optimizer)

        def commit() -> None:
            self._states = states
            for group, changes in zip(optimizer.param_groups, changed_groups, strict=True):
                group.update(changes)
            vars(optimizer).update(changed_own)

        return commit


_SHAPE = (16, 16)
"""Of the pilot's parameters."""


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, object]:
    gone = sorted(map(str, before.keys() - now.keys()))
    if gone:
        raise Unsuited(f"its step() removes {gone[0]!r}")
    return {key: value for key, value in now.items() if key not in before or differs(value, before[key])}


@contextmanager
def _host_by_default() -> Iterator[None]:
    """What a step makes of its own is in host memory, whatever device the user has made the default."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def differs(now: object, before: object) -> bool:
    """Whether an option is another one; NaN is the same as NaN."""
    if now is before:
        return False
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.device != before.device or not same_values(now, before)
    if isinstance(now, float) and isinstance(before, float) and now != now and before != before:
        return False
    try:
        if isinstance(now, Mapping) and isinstance(before, Mapping):
            return now.keys() != before.keys() or any(differs(now[key], value) for key, value in before.items())
        if isinstance(now, (list, tuple, deque)) and isinstance(before, (list, tuple, deque)):
            return len(now) != len(before) or any(map(differs, now, before))
        if type(now) is type(before) and hasattr(now, "__dict__") and type(now).__eq__ is object.__eq__:
            return differs(vars(now), vars(before))
        return bool(now != before)
    except (RuntimeError, ValueError):  # arrays compare by element
        return True


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and values; NaN is the same as NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _own_of(optimizer: Any) -> dict[str, object]:
    return {key: value for key, value in vars(optimizer).items() if _is_own(key)}


def _is_own(name: str) -> bool:
    of_torch = name in _BOOKKEEPING or (name.startswith("_optimizer_") and name.endswith("_hooks"))
    return not of_torch


def taken(value: Any) -> Any:
    """The value as it is now, whatever becomes of what holds it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value


def attributes_of(param: torch.Tensor) -> dict[str, object]:
    """What the user has hung on a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return {key: value for key, value in vars(param).items() if key not in _OF_TORCH}


_OF_TORCH = {"_is_param", "_local_tensor", "_spec"}
_PATCHED = {"step", "state_dict", "load_state_dict", "add_param_group", "zero_grad"}
_BOOKKEEPING = _PATCHED | {
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


def _worker_of(optimizer: torch.optim.Optimizer) -> Any:
    worker = object.__new__(type(optimizer))
    worker.__dict__.update(optimizer.__dict__)
    for patched in _PATCHED:
        worker.__dict__.pop(patched, None)
    for name, value in worker.__dict__.items():
        if "hooks" in name and isinstance(value, (dict, OrderedDict)):
            worker.__dict__[name] = OrderedDict()
    return worker


def plain_step(kind: type) -> Any:
    """Its step function without torch's profiling wrapper."""
    step: Any = getattr(kind, "step", None)
    return step.__wrapped__ if getattr(step, "hooked", False) else step
