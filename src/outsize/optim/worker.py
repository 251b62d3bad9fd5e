"""One step of the user's optimizer on parameters of our choosing."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

# Note [A worker optimizer]
# The user's optimizer object keeps its class, its param_groups and its hooks. The arithmetic is done by a worker: an
# object of the same class whose only parameter is the piece at hand (as fp32 master), whose state is the piece's state
# and whose hyper-parameters are those of the step being run. It calls the class's own step function below torch's
# profiling wrapper, so that hooks which the user registered fire once a step and not once a piece. What the user has
# hung on a parameter (a factor for its learning rate) is on the worker's parameter too. What the step keeps anywhere
# but in that parameter's state would be lost or mixed up between pieces, and is an error.


@dataclass
class Subject:
    """One parameter that the worker steps on."""

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)


class Unsuited(RuntimeError):
    """A step that cannot run on one piece or one parameter at a time; the text is the reason."""


@final
class Worker:
    """Runs `type(optimizer).step`. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._worker = _worker_of(optimizer)
        self._step = _plain_step(type(optimizer))

    def run(self, subjects: Sequence[Subject], hyper: Mapping[str, object], attributes: Mapping[str, object]) -> None:
        """One step on these parameters; their values and states change in place."""
        worker = self._worker
        worker.state = defaultdict(dict)
        leaves = []
        for subject in subjects:
            leaf = subject.param.detach().requires_grad_()
            leaf.grad = subject.grad
            leaf.__dict__.update(attributes)
            if subject.state:
                worker.state[leaf] = subject.state
            leaves.append(leaf)
        group = {**hyper, "params": leaves}
        worker.param_groups = [group]
        try:
            with torch.no_grad():
                self._step(worker)
            for subject, leaf in zip(subjects, leaves, strict=True):
                if leaf.data_ptr() != subject.param.data_ptr():  # it put another tensor in place of the values
                    subject.param.copy_(leaf)
                subject.state = dict(worker.state.get(leaf, {}))
                _expect_same(vars(leaf), attributes, "sets attributes of its parameters")
            _expect_same({key: value for key, value in group.items() if key != "params"}, hyper, _CHANGES)
            known = {id(leaf) for leaf in leaves}
            foreign = [key for key in worker.state if id(key) not in known]
            if foreign:
                name = "a tensor" if isinstance(foreign[0], torch.Tensor) else repr(foreign[0])
                raise Unsuited(f"its step() keeps state under {name}, which is no parameter")
        finally:
            worker.state = defaultdict(dict)
            worker.param_groups = []


_CHANGES = "changes its param_groups"


def _expect_same(now: Mapping[str, object], before: Mapping[str, object], what: str) -> None:
    keys = [key for key, value in before.items() if differs(now.get(key), value)]
    keys = keys or sorted(map(str, now.keys() - before.keys()))
    if keys:
        raise Unsuited(f"its step() {what} ({', '.join(map(repr, keys))})")


def differs(now: object, before: object) -> bool:
    """Whether an option is another one; NaN is the same as NaN."""
    if now is before:
        return False
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return not same_values(now, before)
    if isinstance(now, float) and isinstance(before, float) and now != now and before != before:
        return False
    return bool(now != before)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and values; NaN is the same as NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def attributes_of(param: torch.Tensor) -> dict[str, object]:
    """What the user has hung on a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return {key: value for key, value in vars(param).items() if key not in _OF_TORCH}


_OF_TORCH = {"_is_param", "_local_tensor", "_spec"}


def _worker_of(optimizer: torch.optim.Optimizer) -> Any:
    worker = object.__new__(type(optimizer))
    worker.__dict__.update(optimizer.__dict__)
    for patched in ("step", "state_dict", "load_state_dict", "add_param_group", "zero_grad"):
        worker.__dict__.pop(patched, None)
    for name, value in worker.__dict__.items():
        if "hooks" in name and isinstance(value, (dict, OrderedDict)):
            worker.__dict__[name] = OrderedDict()
    return worker


def _plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
