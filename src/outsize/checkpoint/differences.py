"""Whether a checkpoint belongs to the live model and optimizer; every difference is listed before anything moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outsize.checkpoint.manifest import Manifest, OptimizerRecord, of_all_stages

LISTED = 10
_PASSABLE = ("missing", "unexpected")
_RESHAPED = "buffers of another shape"
CONVERTIBLE = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""A parameter may change between these: the fp32 master is kept exactly either way."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Differences = dict[str, list[str]]
"""What differs, such as "missing parameters", and the names."""


@dataclass(frozen=True)
class Live:
    """What the live side expects: shapes and dtypes by name, and its optimizer where one is to be loaded."""

    parameters: Shapes
    buffers: Shapes | None
    """None where buffers are not to be loaded."""
    optimizer: OptimizerRecord | None
    extra_states: Collection[str] | None = None
    """The names of those that modules take; None where they are not to be loaded."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The further names of tied parameters, each with the first one."""


def together(stages: Sequence[Live]) -> Live:
    """What all stages of a pipeline expect."""
    buffers = {name: each for live in stages for name, each in (live.buffers or {}).items()}
    extra = dict.fromkeys(name for live in stages for name in live.extra_states or ())
    return Live(
        {name: each for live in stages for name, each in live.parameters.items()},
        None if stages[0].buffers is None else buffers,
        of_all_stages([live.optimizer for live in stages]),
        None if stages[0].extra_states is None else extra.keys(),
        {alias: name for live in stages for alias, name in live.aliases.items()},
    )


def check_match(manifest: Manifest, live: Live, label: str, strict: bool) -> Differences:
    """Raise `ValueError` that lists what is missing, unexpected and different in the checkpoint `label`.

    With `strict` False, what is missing and unexpected is returned, and the rest must fit.
    """
    left_out = {name: live.parameters.get(name, ((), torch.float32)) for name in manifest.left_out or ()}
    stored = left_out | {name: (record.shape, record.dtype) for name, record in manifest.parameters.items()}
    found = _differences("parameter", stored, live.parameters)
    if live.buffers is not None:
        kept = {name: region for name, region in manifest.buffers.items() if name in manifest.persistent}
        persistent = {name: (region.shape, region.dtype) for name, region in kept.items()}
        found |= _differences("buffer", persistent, live.buffers)
    if live.extra_states is not None:
        found |= _one_sided("extra state", manifest.extra_states(), live.extra_states)
    passed_over = check_same_model(f"the checkpoint {label}", found, strict)
    if live.optimizer is not None:
        _check_optimizer(manifest, live.optimizer, label, strict)
    return passed_over


def _one_sided(kind: str, stored: Collection[str], live: Collection[str]) -> Differences:
    found = {
        f"missing {kind}s": [name for name in live if name not in stored],
        f"unexpected {kind}s": [name for name in stored if name not in live],
    }
    return {what: names for what, names in found.items() if names}


def _differences(kind: str, stored: Shapes, live: Shapes) -> Differences:
    return _one_sided(kind, stored, live) | unlike(kind, stored, live)


def unlike(kind: str, stored: Shapes, live: Shapes, convertible: Collection[torch.dtype] = CONVERTIBLE) -> Differences:
    """What both sides have in other shapes, or in dtypes between which a value may not change."""
    both = [name for name in live if name in stored]
    return {
        f"{kind}s of another shape": [
            f"{name} is {dims(stored[name][0])} there and {dims(live[name][0])} here"
            for name in both
            if stored[name][0] != live[name][0]
        ],
        f"{kind}s of another dtype": [
            f"{name} is {stored[name][1]} there and {live[name][1]} here"
            for name in both
            if stored[name][1] != live[name][1] and not {stored[name][1], live[name][1]} <= {*convertible}
        ],
    }


def with_aliases(names: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """What a folder may call a parameter, with its name. `aliases` has the further names of tied ones, each with the
    first."""
    called = {name: name for name in names}
    return called | {alias: name for alias, name in aliases.items() if name in called}


def names_in(live: Live, stored: Shapes) -> dict[str, str]:
    """By live parameter and buffer the name under which a folder has it; those that it lacks are left out."""
    keys: dict[str, str] = {}
    for each, name in with_aliases([*live.parameters, *(live.buffers or {})], live.aliases).items():
        if each in stored:
            keys.setdefault(name, each)
    return keys


def differences_of_others(
    live: Live,
    stored: Shapes,
    unexpected: list[str],
    optional: Collection[str] = (),
    convertible: Collection[torch.dtype] = CONVERTIBLE,
) -> Differences:
    """What differs in a folder that others wrote. It may lack what is `optional`.

    A tied parameter is loaded from one name. Under the others, where the folder has them, it must fit too.
    """
    buffers, found = live.buffers or {}, {*names_in(live, stored), *optional}

    def called(wanted: Shapes) -> Shapes:
        return {each: wanted[name] for each, name in with_aliases(wanted, live.aliases).items()}

    return {
        "missing parameters": [name for name in live.parameters if name not in found],
        "missing buffers": [name for name in buffers if name not in found],
        "unexpected weights": unexpected,
        **unlike("weight", stored, called(live.parameters), convertible),
        **unlike("buffer", stored, called(buffers), convertible),
    }


def check_same_model(what: str, found: Differences, strict: bool) -> Differences:
    """Raise `ValueError` for the differences found in `what`. Returns those that `strict=False` passes over."""
    passed_over = {
        kind: names for kind, names in found.items() if not strict and kind.split()[0] in _PASSABLE and names
    }
    problems = described({kind: names for kind, names in found.items() if kind not in passed_over})
    if problems:
        passable = strict and all(kind.split()[0] in _PASSABLE for kind, names in found.items() if names)
        made_late = " Some buffers get their shape in a forward: run one before load." if found.get(_RESHAPED) else ""
        raise ValueError(
            f"{what} is of another model: {problems}. Load it into the model that was saved"
            f"{' or pass strict=False' if passable else ''}.{made_late} Nothing was changed"
        )
    return passed_over


def described(found: Differences) -> str:
    return "; ".join(f"{len(names)} {kind}: {listed(names)}" for kind, names in found.items() if names)


def _check_optimizer(manifest: Manifest, live: OptimizerRecord, label: str, strict: bool) -> None:
    stored = manifest.optimizer
    if stored is None:
        raise without_optimizer(label)
    problems = []
    if stored.kind != live.kind:
        problems.append(f"its optimizer is {stored.kind}, this one is {live.kind}")
    if not live.delayed and any("held" in record.arrays for record in manifest.parameters.values()):
        problems.append("it holds gradients of a delayed update, which only a run with delayed_update=True can apply")
    if set(stored.arrays) != set(live.arrays):
        problems.append(f"its optimizer keeps {listed(stored.arrays)}, this one {listed(live.arrays)}")
    if len(stored.groups) != len(live.groups):
        problems.append(f"its optimizer has {len(stored.groups)} parameter groups, this one {len(live.groups)}")
    else:
        problems += _moved(stored, live, strict)
    for name, record in manifest.parameters.items():
        scalars = record.scalars if isinstance(record.scalars, dict) else {}
        absent = {key for key, value in scalars.items() if value is None} - set(record.state)
        if record.scalars is not None and set(record.state) | absent & set(stored.arrays) != set(stored.arrays):
            problems.append(f"the optimizer arrays of {name!r} are incomplete")
    refuse_optimizer(label, problems)


def without_optimizer(label: str) -> ValueError:
    return ValueError(
        f"the checkpoint {label} was saved without an optimizer; load its weights with outsize.load(path, model)"
    )


def refuse_optimizer(label: str, problems: Sequence[str]) -> None:
    """Raise `ValueError` where there are any."""
    if problems:
        raise ValueError(
            f"the checkpoint {label} does not fit the optimizer: {'; '.join(problems[:LISTED])}. Build the optimizer "
            f"as it was when the checkpoint was saved, or load the weights alone with outsize.load(path, model). "
            f"Nothing was changed"
        )


def _moved(stored: OptimizerRecord, live: OptimizerRecord, strict: bool) -> list[str]:
    home = {name: index for index, group in enumerate(stored.groups) for name in group.parameters}
    here = {name: index for index, group in enumerate(live.groups) for name in group.parameters}
    names = home.keys() | here.keys() if strict else home.keys() & here.keys()
    moved = sorted(name for name in names if home.get(name) != here.get(name))
    return [f"{len(moved)} parameters are in other parameter groups: {listed(moved)}"] if moved else []


def listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return (", ".join(found[:LISTED]) or "nothing") + more


def dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
