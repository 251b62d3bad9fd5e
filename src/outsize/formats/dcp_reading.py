"""Loading a folder of `torch.distributed.checkpoint` into a live layout, whoever wrote it.

Model and optimizer stand under any names ("model.", "app.model.", at the top); optimizer states are found by the names
of their parameters, or by number as in a plain `optimizer.state_dict()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from outsize.checkpoint.differences import (
    Differences,
    Live,
    check_same_model,
    differences_of_others,
    dims,
    listed,
    names_in,
    refuse_optimizer,
    with_aliases,
    without_optimizer,
)
from outsize.checkpoint.opened import Opened
from outsize.formats.dcp_folder import DcpFolder

USUAL = ("", "model.", "state_dict.", "app.model.", "module.")
"""What stands before the names of weights in the folders of most programs, the first of them preferred."""

SMALL_NUMEL = 256
"""Elements of an optimizer's value that is not one per element of the parameter."""

_STATE, _GROUPS = "state.", "param_groups."


@dataclass
class _State:
    """One parameter's optimizer state: the keys of its arrays and of its other values; `scalars` has the latter."""

    arrays: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


def open_dcp(path: Path, live: Live, label: str, strict: bool) -> Opened:
    """Open a folder for the live model, and its optimizer if `live` has one; every check is made here.

    Args:
        live: where its `buffers` are None, the optimizer alone is loaded.
        strict: with False, what only one side has is passed over.

    Memory: three slabs at most, and the buffer at hand. Raises `ValueError` for a damaged folder and for one that does
    not match, with what is missing, unexpected and different.
    """
    folder = DcpFolder(path)
    try:
        return _opened(folder, live, label, strict)
    except BaseException:
        folder.close()
        raise


def _opened(folder: DcpFolder, live: Live, label: str, strict: bool) -> Opened:
    keys: dict[str, str] = {}
    passed_over: Differences = {}
    states: dict[str, _State] = {}
    hyper: list[dict[str, Any]] = []
    if live.buffers is not None:
        keys, passed_over = _find_model(folder, live, label, strict)
    if live.optimizer is not None:
        states, hyper = _find_optimizer(folder, live, keys.values(), label, strict)
    folder.check([*keys.values(), *(key for state in states.values() for key in state.arrays.values())])
    found = {name: folder.readable(key) for name, key in keys.items()}
    buffers = {name: found.pop(name) for name in keys if name not in live.parameters}
    return Opened(
        found,
        buffers,
        passed_over,
        folder.close,
        arrays={
            name: {part: folder.readable(key) for part, key in state.arrays.items()} for name, state in states.items()
        },
        scalars={name: state.scalars for name, state in states.items()},
        absent=set(passed_over.get("missing parameters", ())) - states.keys(),
        hyper=hyper,
        steps=max((int(state.scalars["step"]) for state in states.values() if "step" in state.scalars), default=0),
    )


# ------------------------------------------------------------------------------------------------------- the weights


def _find_model(folder: DcpFolder, live: Live, label: str, strict: bool) -> tuple[dict[str, str], Differences]:
    """The keys of parameters and buffers by name, and what is passed over. `ValueError` lists what does not match."""
    called = with_aliases([*live.parameters, *(live.buffers or {})], live.aliases)
    prefix = _prefix(folder, with_aliases(live.parameters, live.aliases), len(live.parameters), label)
    stored = {key.removeprefix(prefix): shape for key, shape in folder.tensors.items() if key.startswith(prefix)}
    keys = {name: prefix + each for name, each in names_in(live, stored).items()}
    unexpected = _unexpected(folder, prefix, keys.values(), called)
    where = f"under {prefix!r}" if prefix else "at the top"
    differences = differences_of_others(live, stored, unexpected)
    return keys, check_same_model(f"the checkpoint {label} ({where})", differences, strict)


def _prefix(folder: DcpFolder, called: Mapping[str, str], count: int, label: str) -> str:
    """What stands before the names of most of the `count` live parameters."""
    found: dict[str, set[str]] = {}
    for key in folder.tensors:
        for name in _endings(key):
            if name in called:
                found.setdefault(key.removesuffix(name), set()).add(called[name])
    most = max(map(len, found.values()), default=0)
    best = [prefix for prefix, names in found.items() if len(names) == most]
    usual = [prefix for prefix in USUAL if prefix in best]
    if len(best) > 1 and not usual and most == count:
        raise ValueError(
            f"the checkpoint {label} holds the model's weights more than once: under {listed(map(repr, best))}. Save "
            f"the one that is meant under 'model.', or alone. Nothing was changed"
        )
    return (usual or best or [""])[0]


def _unexpected(folder: DcpFolder, prefix: str, found: Iterable[str], known: Container[str]) -> list[str]:
    """What stands beside the weights that were found, as the model's own. A counter is no weight."""
    levels = {folder.level(key) for key in found}
    return [
        key.removeprefix(prefix)
        for key, (shape, dtype) in folder.tensors.items()
        if key.startswith(prefix)
        and key.removeprefix(prefix) not in known
        and folder.level(key) in levels
        and (shape or dtype.is_floating_point)
        and _root_of(key, _STATE) is None
        and _root_of(key, _GROUPS) is None
    ]


# ----------------------------------------------------------------------------------------------------- the optimizer


def _find_optimizer(
    folder: DcpFolder, live: Live, weights: Iterable[str], label: str, strict: bool
) -> tuple[dict[str, _State], list[dict[str, Any]]]:
    """The states by parameter name, and the options of each live group as far as the folder tells them.

    Small values are read here. Raises `ValueError` where there is no optimizer, or one that does not fit. With `strict`
    False, states of parameters that the live optimizer does not have are passed over.
    """
    assert live.optimizer is not None
    names = [name for group in live.optimizer.groups for name in group.parameters]
    called = {str(number): name for number, name in enumerate(names)} | with_aliases(names, live.aliases)
    keys = sorted({*folder.tensors, *folder.values} - {*weights})
    head = _state_head(keys, called)
    if head is None:
        raise without_optimizer(label)
    root = _root_of(head, _STATE)
    assert root is not None
    states, problems = _find_states(folder, live, called, keys, head, strict)
    if not problems:
        problems = _read_scalars(folder, states, live.optimizer.arrays)
    hyper, more = _read_groups(folder, live, called, keys, root + _GROUPS, head.removeprefix(root + _STATE))
    refuse_optimizer(label, [*problems, *more])
    return states, hyper


def _state_head(keys: Iterable[str], called: Container[str]) -> str | None:
    """What stands before the names of most parameters in the keys of their states, such as 'optim.state.'."""
    heads: Counter[str] = Counter()
    for key in keys:
        stem = key.rpartition(".")[0]
        for name in _endings(stem):
            head = stem.removesuffix(name)
            if name in called and _root_of(head, _STATE) is not None:
                heads[head] += 1
    if not heads:  # an optimizer without states has groups all the same
        roots = (_root_of(key, _GROUPS) for key in keys)
        heads.update(root + _STATE for root in roots if root is not None)
    return min(heads, key=lambda head: (-heads[head], head), default=None)


def _find_states(
    folder: DcpFolder, live: Live, called: Mapping[str, str], keys: Sequence[str], head: str, strict: bool
) -> tuple[dict[str, _State], list[str]]:
    """The states without their values, and what does not fit."""
    assert live.optimizer is not None
    states: dict[str, _State] = {}
    arrays, strange, problems = set(live.optimizer.arrays), list[str](), list[str]()
    for key in keys:
        if not key.startswith(head):
            continue
        stem, _, part = key.removeprefix(head).rpartition(".")
        name = called.get(stem)
        if name is None:
            strange.append(key.removeprefix(head))
            continue
        state = states.setdefault(name, _State())
        shape, dtype = folder.tensors.get(key, ((), None))
        expected = live.parameters[name][0]
        if dtype is None or (part not in arrays and (prod(shape) <= SMALL_NUMEL and (shape != expected or not shape))):
            state.others[part] = key
            continue
        state.arrays[part] = key
        if part in arrays and (shape != expected or not dtype.is_floating_point):
            problems.append(f"{part} of {name} is {dims(shape)} of {dtype} there and {dims(expected)} here")
    # Parameters of one group keep the same arrays; SGD has None for one that it did not need yet.
    kept = {name: set(state.arrays) | set(state.others) & arrays for name, state in states.items()}
    for group in live.optimizer.groups:
        most = set().union(*(kept.get(name, ()) for name in group.parameters))
        incomplete = [name for name in group.parameters if name in kept and kept[name] != most]
        problems += _noted("parameters with incomplete optimizer arrays", incomplete)
    stored = set().union(*kept.values())
    if kept and stored != arrays:
        problems.append(f"its optimizer keeps {listed(sorted(stored))}, this one {listed(live.optimizer.arrays)}")
    if strict:
        problems += _noted("states of parameters that this optimizer does not have", strange)
    return states, problems


def _read_scalars(folder: DcpFolder, states: Mapping[str, _State], arrays: Container[str]) -> list[str]:
    """Read the values that are no arrays; returns what they cannot be."""
    keys = [key for state in states.values() for key in state.others.values()]
    folder.check(keys)
    values, problems = folder.small(keys), []
    for name, state in states.items():
        for part, key in state.others.items():
            value = values[key]
            if part == "step" and isinstance(value, (int, float)):
                value = torch.tensor(float(value), device="cpu")  # as in torch's optimizers
            state.scalars[part] = value
            count = isinstance(value, torch.Tensor) and value.numel() == 1 and isfinite(value.item())
            if (part in arrays and value is not None) or (part == "step" and not count):
                problems.append(f"{part} of {name} is {value!r}, which it cannot be")
    return problems


def _read_groups(
    folder: DcpFolder, live: Live, called: Mapping[str, str], keys: Sequence[str], head: str, before: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options of each live group, {} where the folder does not tell them, and what does not fit.

    Args:
        head: such as 'optim.param_groups.'.
        before: what a wrapper of the model put before the names of parameters.
    """
    assert live.optimizer is not None
    groups = live.optimizer.groups
    options: dict[str, dict[str, str]] = {}
    for key in keys:
        if key.startswith(head) and (key in folder.values or prod(folder.tensors[key][0]) <= SMALL_NUMEL):
            owner, _, option = key.removeprefix(head).rpartition(".")
            options.setdefault(owner, {})[option] = key
    owners = sorted((each for each in options if each.isdigit() and "params" in options[each]), key=int)
    if owners and len(owners) != len(groups):
        return [], [f"its optimizer has {len(owners)} parameter groups, this one {len(groups)}"]
    if not owners:  # the flattened form repeats the options for each parameter
        for group in groups:
            names = [before + each for each, name in called.items() if name in group.parameters[:1]]
            owners.append(next((each for each in names if each in options), ""))
    home = {name: index for index, group in enumerate(groups) for name in group.parameters}
    hyper, moved, problems = [], list[str](), list[str]()
    for index, owner in enumerate(owners):
        wanted = options.get(owner, {})
        folder.check(wanted.values())
        small = folder.small(wanted.values())
        values = {option: small[key] for option, key in wanted.items()}
        members = values.pop("params", None)
        values.pop("param_names", None)
        hyper.append(values)
        # Groups are found by their order, so their parameters must be the live ones.
        names = list(members) if isinstance(members, (list, tuple)) else []
        if any(isinstance(name, int) for name in names) and len(names) != len(groups[index].parameters):
            problems.append(f"group {index} has {len(names)} parameters there, {len(groups[index].parameters)} here")
        found = [called.get(str(name).removeprefix(before)) for name in names]
        moved += [name for name in found if name is not None and home[name] != index]
    return hyper, problems + _noted("parameters in other parameter groups", moved)


def _root_of(key: str, part: str) -> str | None:
    """What stands before the last `part` ('state.') of a key that has it as a whole word; None if it does not."""
    at = f".{key}".rfind(f".{part}")
    return key[:at] if at >= 0 else None


def _endings(key: str) -> Iterator[str]:
    """The key, and what is left of it behind each dot."""
    words = key.split(".")
    return (".".join(words[at:]) for at in range(len(words)))


def _noted(what: str, found: Sequence[str]) -> list[str]:
    return [f"{len(found)} {what}: {listed(found)}"] if found else []
