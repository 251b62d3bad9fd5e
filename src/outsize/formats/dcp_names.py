"""Which keys of a `torch.distributed.checkpoint` folder are the live model and its optimizer, whoever wrote them.

Model and optimizer stand under any names ("model.", "app.model.", at the top); optimizer states are found by the names
of their parameters, or by number as in a plain `optimizer.state_dict()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, final

import torch

from outsize.checkpoint.differences import LISTED, Live, check_same_model, dims, listed, unlike
from outsize.checkpoint.manifest import OptimizerRecord
from outsize.formats.dcp_folder import DcpFolder

USUAL = ("", "model.", "state_dict.", "app.model.", "module.")
"""What stands before the names of weights in the folders of most programs, the first of them preferred."""

SMALL_NUMEL = 256
"""Elements of an optimizer's value that is not one per element of the parameter."""

_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True)
class StoredModel:
    """The keys of the live parameters and persistent buffers, by name."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    passed_over: Mapping[str, list[str]] = field(default_factory=dict)
    """What only one side has, such as "missing parameters", and the names."""


@dataclass(frozen=True)
class StoredState:
    """One parameter's optimizer state: the keys of its arrays, and its other values as torch keeps them."""

    arrays: Mapping[str, str]
    scalars: Mapping[str, Any]


@dataclass(frozen=True)
class StoredOptimizer:
    """The states by parameter name, and the options of each live group as far as the folder tells them."""

    states: Mapping[str, StoredState]
    hyper: Sequence[Mapping[str, Any]]

    def array_keys(self) -> list[str]:
        return [key for state in self.states.values() for key in state.arrays.values()]

    def steps(self) -> int:
        """The largest count of steps of any parameter."""
        return max((int(state.scalars["step"]) for state in self.states.values() if "step" in state.scalars), default=0)


def find_model(folder: DcpFolder, live: Live, aliases: Mapping[str, str], label: str, strict: bool) -> StoredModel:
    """Raises `ValueError` that lists what is missing, unexpected and different.

    With `strict` False, what is missing and unexpected is passed over, and the rest must fit.
    """
    prefix = _prefix(folder, live, aliases, label)
    buffers = live.buffers or {}
    wanted = {**live.parameters, **buffers}
    called = {name: name for name in wanted}
    called.update({alias: name for alias, name in aliases.items() if name in wanted})
    keys: dict[str, str] = {}
    for each, name in called.items():
        if prefix + each in folder.tensors:
            keys.setdefault(name, prefix + each)
    one_sided = {
        "missing parameters": [name for name in live.parameters if name not in keys],
        "missing buffers": [name for name in buffers if name not in keys],
        "unexpected weights": _unexpected(folder, prefix, keys.values(), called),
    }
    # A tied parameter is loaded from one name; under the others, where the folder has them, it must fit too.
    shapes = {each: folder.tensors[prefix + each] for each in called if prefix + each in folder.tensors}
    differences = unlike("tensor", shapes, {each: wanted[name] for each, name in called.items()})
    where = f"under {prefix!r}" if prefix else "at the top"
    passed_over = check_same_model(f"the checkpoint {label} ({where})", one_sided | differences, strict)
    return StoredModel(
        {name: keys[name] for name in live.parameters if name in keys},
        {name: keys[name] for name in buffers if name in keys},
        passed_over,
    )


def _prefix(folder: DcpFolder, live: Live, aliases: Mapping[str, str], label: str) -> str:
    """What stands before the names of most live parameters."""
    called = {name: name for name in live.parameters}
    called.update({alias: name for alias, name in aliases.items() if name in live.parameters})
    found: dict[str, set[str]] = {}
    for key in folder.tensors:
        for name in _endings(key):
            if name in called:
                found.setdefault(key[: len(key) - len(name)], set()).add(called[name])
    most = max(map(len, found.values()), default=0)
    best = [prefix for prefix, names in found.items() if len(names) == most]
    usual = [prefix for prefix in USUAL if prefix in best]
    if len(best) > 1 and not usual and most == len(live.parameters):
        raise ValueError(
            f"the checkpoint {label} holds the model's weights more than once: under {listed(map(repr, best))}. Save "
            f"the one that is meant under 'model.', or alone. Nothing was changed"
        )
    return (usual or best or [""])[0]


def _unexpected(folder: DcpFolder, prefix: str, found: Iterable[str], known: Container[str]) -> list[str]:
    """What stands beside the weights that were found, as the model's own. A counter is no weight."""
    levels = {folder.level(key) for key in found}
    return [
        key[len(prefix) :]
        for key, (shape, dtype) in folder.tensors.items()
        if key.startswith(prefix)
        and key[len(prefix) :] not in known
        and folder.level(key) in levels
        and (shape or dtype.is_floating_point)
        and _root_of(key, _STATE) is None
        and _root_of(key, _GROUPS) is None
    ]


def find_optimizer(
    folder: DcpFolder, live: Live, model: StoredModel, aliases: Mapping[str, str], label: str, strict: bool
) -> StoredOptimizer:
    """Small values are read here. Raises `ValueError` where there is no optimizer, or one that does not fit.

    With `strict` False, states of parameters that the live optimizer does not have are passed over.
    """
    assert live.optimizer is not None
    called = _called(live.optimizer, aliases)
    keys = {*folder.tensors, *folder.values} - {*model.parameters.values(), *model.buffers.values()}
    head = _state_head(keys, called)
    if head is None:
        raise ValueError(
            f"the checkpoint {label} was saved without an optimizer; load its weights with outsize.load(path, model)"
        )
    root = _root_of(head, _STATE)
    assert root is not None
    finder = _OptimizerFinder(folder, live, called, head, root)
    states = finder.states(sorted(keys), strict)
    hyper = finder.hyper(sorted(keys))
    if finder.problems:
        raise ValueError(
            f"the checkpoint {label} does not fit the optimizer: {'; '.join(finder.problems[:LISTED])}. Build the "
            f"optimizer as it was when the checkpoint was saved, or load the weights alone with outsize.load(path, "
            f"model). Nothing was changed"
        )
    return StoredOptimizer(states, hyper)


def _called(optimizer: OptimizerRecord, aliases: Mapping[str, str]) -> dict[str, str]:
    """What a folder may call a parameter of the optimizer: its names, and its number."""
    names = [name for group in optimizer.groups for name in group.parameters]
    numbers = {str(number): name for number, name in enumerate(names)}
    return numbers | {alias: name for alias, name in aliases.items() if name in names} | {name: name for name in names}


def _state_head(keys: Iterable[str], called: Container[str]) -> str | None:
    """What stands before the names of most parameters in the keys of their states, such as 'optim.state.'."""
    heads: Counter[str] = Counter()
    for key in keys:
        stem = key.rpartition(".")[0]
        for name in _endings(stem):
            head = stem[: len(stem) - len(name)]
            if name in called and _root_of(head, _STATE) is not None:
                heads[head] += 1
    if not heads:  # an optimizer without states has groups all the same
        roots = (_root_of(key, _GROUPS) for key in keys)
        heads.update(root + _STATE for root in roots if root is not None)
    return min(heads, key=lambda head: (-heads[head], head), default=None)


@final
class _OptimizerFinder:
    """Takes the keys of one optimizer apart and notes what does not fit the live one."""

    def __init__(self, folder: DcpFolder, live: Live, called: Mapping[str, str], head: str, root: str) -> None:
        assert live.optimizer is not None
        self.problems: list[str] = []
        self._folder = folder
        self._live = live
        self._optimizer = live.optimizer
        self._called = called
        self._head = head
        self._groups = root + _GROUPS
        self._before = head[len(root + _STATE) :]  # what a wrapper of the model put before the names

    def states(self, keys: Sequence[str], strict: bool) -> dict[str, StoredState]:
        arrays: dict[str, dict[str, str]] = {}
        others: dict[str, dict[str, str]] = {}
        strange = []
        for key in keys:
            if not key.startswith(self._head):
                continue
            stem, _, part = key[len(self._head) :].rpartition(".")
            name = self._called.get(stem)
            if name is None:
                strange.append(key[len(self._head) :])
                continue
            is_array = key in self._folder.tensors and self._is_array(name, part, key)
            (arrays if is_array else others).setdefault(name, {})[part] = key
        if strict:
            self.problems += _noted("states of parameters that this optimizer does not have", strange)
        self._check_arrays(arrays, others)
        if self.problems:
            return {}
        return self._read(arrays, others)

    def _is_array(self, name: str, part: str, key: str) -> bool:
        """Whether the tensor has a value for each element of the parameter."""
        shape, dtype = self._folder.tensors[key]
        expected = self._live.parameters[name][0]
        if part not in self._optimizer.arrays:
            return prod(shape) > SMALL_NUMEL or (shape == expected and len(shape) > 0)
        if shape != expected or not dtype.is_floating_point:
            self.problems.append(f"{part} of {name} is {dims(shape)} of {dtype} there and {dims(expected)} here")
        return True

    def _check_arrays(self, arrays: Mapping[str, Mapping[str, str]], others: Mapping[str, Mapping[str, str]]) -> None:
        """Parameters of one group keep the same arrays; SGD has None for one that it did not need yet."""
        kept = {name: set(arrays.get(name, ())) for name in {**arrays, **others}}
        for name, more in others.items():
            kept[name] |= set(more) & set(self._optimizer.arrays)
        for group in self._optimizer.groups:
            sets = [kept[name] for name in group.parameters if name in kept]
            most = set().union(*sets)
            incomplete = [name for name in group.parameters if name in kept and kept[name] != most]
            self.problems += _noted("parameters with incomplete optimizer arrays", incomplete)
        stored = set().union(*kept.values())
        if kept and stored != set(self._optimizer.arrays):
            here = listed(self._optimizer.arrays)
            self.problems.append(f"its optimizer keeps {listed(sorted(stored))}, this one {here}")

    def _read(
        self, arrays: Mapping[str, Mapping[str, str]], others: Mapping[str, Mapping[str, str]]
    ) -> dict[str, StoredState]:
        keys = [key for more in others.values() for key in more.values()]
        self._folder.check(keys)
        values = self._folder.small(keys)
        states = {}
        for name in {**arrays, **others}:
            scalars = {part: _as_torch(part, values[key]) for part, key in others.get(name, {}).items()}
            wrong = [part for part in scalars if part in self._optimizer.arrays and scalars[part] is not None]
            wrong += ["step"] if "step" in scalars and not _is_count(scalars["step"]) else []
            self.problems += [f"{part} of {name} is {scalars[part]!r}, which it cannot be" for part in wrong]
            states[name] = StoredState(arrays.get(name, {}), scalars)
        return states

    def hyper(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The options of each live group; {} where the folder does not tell them."""
        options: dict[str, dict[str, str]] = {}
        for key in keys:
            if key.startswith(self._groups):
                owner, _, option = key[len(self._groups) :].rpartition(".")
                options.setdefault(owner, {})[option] = key
        numbered = [owner for owner in options if owner.isdigit() and "params" in options[owner]]
        groups = self._optimizer.groups
        if numbered and len(numbered) != len(groups):
            self.problems.append(f"its optimizer has {len(numbered)} parameter groups, this one {len(groups)}")
            return []
        owners = sorted(numbered, key=int) or [self._first_name(group.parameters, options) for group in groups]
        found = [self._values(options.get(owner, {})) for owner in owners]
        self._check_members([values.pop("params", None) for values in found])
        for values in found:
            values.pop("param_names", None)
        return found

    def _first_name(self, names: Sequence[str], options: Container[str]) -> str:
        """Under what name the flattened form has the options of a group: it repeats them for each parameter."""
        candidates = [self._before + each for each, name in self._called.items() if name in names[:1]]
        return next((each for each in candidates if each in options), "")

    def _values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        small = {
            option: key
            for option, key in keys.items()
            if key in self._folder.values or prod(self._folder.tensors[key][0]) <= SMALL_NUMEL
        }
        self._folder.check(small.values())
        values = self._folder.small(small.values())
        return {option: values[key] for option, key in small.items()}

    def _check_members(self, members: Sequence[Any]) -> None:
        """Groups are found by their order, so their parameters must be the live ones."""
        here = {name: index for index, group in enumerate(self._optimizer.groups) for name in group.parameters}
        moved = []
        for index, (group, found) in enumerate(zip(self._optimizer.groups, members, strict=True)):
            names = list(found) if isinstance(found, (list, tuple)) else []
            if any(isinstance(name, int) for name in names) and len(names) != len(group.parameters):
                self.problems.append(f"group {index} has {len(names)} parameters there, {len(group.parameters)} here")
            homes = [self._called.get(str(name).removeprefix(self._before)) for name in names]
            moved += [name for name in homes if name is not None and here[name] != index]
        self.problems += _noted("parameters in other parameter groups", moved)


def _as_torch(part: str, value: Any) -> Any:
    """Counts of steps are tensors in torch's optimizers."""
    return torch.tensor(float(value), device="cpu") if part == "step" and isinstance(value, (int, float)) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and isfinite(value.item())


def _root_of(key: str, part: str) -> str | None:
    """What stands before the last `part` ('state.') of a key that has it as a whole word; None if it does not."""
    at = f".{key}".rfind(f".{part}")
    return key[:at] if at >= 0 else None


def _endings(key: str) -> Iterator[str]:
    """The key, and what is left of it behind each dot."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


def _noted(what: str, found: Sequence[str]) -> list[str]:
    return [f"{len(found)} {what}: {listed(found)}"] if found else []
