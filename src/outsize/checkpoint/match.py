"""Whether a checkpoint belongs to the live model and optimizer; every difference is listed before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from outsize.checkpoint.manifest import Manifest, OptimizerRecord, ParameterRecord

LISTED = 10
_CONVERTIBLE = {torch.float32, torch.bfloat16, torch.float16}
"""A parameter may change between these: the fp32 master is kept exactly either way."""


@dataclass(frozen=True)
class Live:
    """What the live side expects: shapes and dtypes by name, and its optimizer where one is to be loaded."""

    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    optimizer: OptimizerRecord | None


def check_match(manifest: Manifest, live: Live, label: str) -> None:
    """Raise `ValueError` that lists what is missing, unexpected and different in the checkpoint `label`."""
    problems = _differences("parameter", _shapes(manifest.parameters), live.parameters)
    persistent = {
        name: (record.region.shape, record.region.dtype)
        for name, record in manifest.buffers.items()
        if record.persistent
    }
    problems += _differences("buffer", persistent, live.buffers)
    if problems:
        raise ValueError(
            f"the checkpoint {label} is of another model: {'; '.join(problems)}. Load it into the model that was "
            f"saved. Nothing was changed"
        )
    if live.optimizer is not None:
        _check_optimizer(manifest, live.optimizer, label)


def _shapes(records: Mapping[str, ParameterRecord]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (record.shape, record.dtype) for name, record in records.items()}


def _differences(
    kind: str,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    live: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> list[str]:
    problems = []
    missing = [name for name in live if name not in stored]
    unexpected = [name for name in stored if name not in live]
    both = [name for name in live if name in stored]
    shapes = [
        f"{name} is {_dims(stored[name][0])} there and {_dims(live[name][0])} here"
        for name in both
        if stored[name][0] != live[name][0]
    ]
    dtypes = [
        f"{name} is {_name(stored[name][1])} there and {_name(live[name][1])} here"
        for name in both
        if stored[name][1] != live[name][1] and not {stored[name][1], live[name][1]} <= _CONVERTIBLE
    ]
    for what, found in (
        (f"missing {kind}s", missing),
        (f"unexpected {kind}s", unexpected),
        (f"{kind}s of another shape", shapes),
        (f"{kind}s of another dtype", dtypes),
    ):
        if found:
            problems.append(f"{len(found)} {what}: {_listed(found)}")
    return problems


def _check_optimizer(manifest: Manifest, live: OptimizerRecord, label: str) -> None:
    stored = manifest.optimizer
    if stored is None:
        raise ValueError(
            f"the checkpoint {label} was saved without an optimizer; load its weights with outsize.load(path, model)"
        )
    problems = []
    if stored.kind != live.kind:
        problems.append(f"its optimizer is {stored.kind}, this one is {live.kind}")
    if not live.delayed and any(record.held is not None for record in manifest.parameters.values()):
        problems.append("it holds gradients of a delayed update, which only a run with delayed_update=True can apply")
    if set(stored.arrays) != set(live.arrays):
        problems.append(f"its optimizer keeps {_listed(stored.arrays)}, this one {_listed(live.arrays)}")
    if len(stored.groups) != len(live.groups):
        problems.append(f"its optimizer has {len(stored.groups)} parameter groups, this one {len(live.groups)}")
    else:
        problems += _moved(stored, live)
    for name, record in manifest.parameters.items():
        if record.scalars is not None and set(record.state) != set(stored.arrays):
            problems.append(f"the optimizer arrays of {name!r} are incomplete")
    if problems:
        raise ValueError(
            f"the checkpoint {label} does not fit the optimizer: {'; '.join(problems[:LISTED])}. Build the optimizer "
            f"as it was when the checkpoint was saved, or load the weights alone with outsize.load(path, model). "
            f"Nothing was changed"
        )


def _moved(stored: OptimizerRecord, live: OptimizerRecord) -> list[str]:
    home = {name: index for index, group in enumerate(stored.groups) for name in group.parameters}
    here = {name: index for index, group in enumerate(live.groups) for name in group.parameters}
    moved = sorted(name for name in home.keys() | here.keys() if home.get(name) != here.get(name))
    return [f"{len(moved)} parameters are in other parameter groups: {_listed(moved)}"] if moved else []


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return (", ".join(found[:LISTED]) or "nothing") + more


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
