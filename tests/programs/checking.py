"""One program in several worlds, and what must be alike in them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.programs.operations import OPERATIONS
from tests.programs.programs import Call, Program
from tests.programs.worlds import PlainWorld, PreparedWorld, Shown, World

TOLERANCE = 2e-5
"""Of a value of 1, between plain torch and outsize."""

REFUSALS = ("RuntimeError", "FloatingPointError")
"""What may be wrong with a program in all worlds: nothing requires a gradient, or one is not finite."""

ENDING = (Call("read_gradients", {}), Call("read_weights", {"index": None}), Call("read_state", {}))
"""What every program ends with; on several ranks without the state, of which each has a part."""


@dataclass(frozen=True)
class Failure:
    """`kind`: what was broken, in a word; it stays the same while a program is shortened."""

    kind: str
    at: str
    said: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.at}: {self.said}"


@dataclass(frozen=True)
class Outcome:
    """What one world made of an operation: what it showed, or the error that it raised."""

    shown: Shown = field(default_factory=dict)
    error: str = ""
    said: str = ""


def check(program: Program, folder: Path | None = None, rank: int = 0) -> Failure | None:
    """Run a program in plain torch, where it has the same arithmetic, in outsize in memory, and in the places that
    it names. `folder` is shared by the ranks."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return check(program, Path(made), rank)
    gc.freeze()  # what lives now needs no look when the worlds end
    spec = program.spec
    worlds: dict[str, World] = {}
    try:
        if spec.follows_torch:
            worlds["torch"] = PlainWorld(spec, folder, rank, range(spec.ranks))
        if (in_memory := spec.place_in_memory) is not None:
            worlds["memory"] = PreparedWorld(spec, folder / "in-memory", rank, [in_memory])
        worlds["places"] = PreparedWorld(spec, folder / "in-places", rank, spec.places, spec.room)
    except (ValueError, TypeError, RuntimeError) as error:
        return Failure("prepare", "the beginning", f"{type(error).__name__}: {error}")
    failure = _run(program, worlds)
    left = [file for world in worlds.values() if isinstance(world, PreparedWorld) for file in world.leave()]
    if failure is None and left:
        return Failure("leftovers", "the end", f"files in the disk directory: {left}")
    return failure


def _run(program: Program, worlds: Mapping[str, World]) -> Failure | None:
    leader = next(iter(worlds.values()))
    ending = ENDING[: len(ENDING) - (program.spec.ranks > 1)]
    for call in (*program.calls, *ending):
        operation = OPERATIONS[call.name]
        if leader.has(operation.needs):
            outcomes = {name: _outcome(call, world) for name, world in worlds.items()}
            excess = worlds["places"].excess_bytes(excused=operation.gathers)
            broken = _difference_of_outcomes(outcomes) or (excess and ("budget", f"{excess} bytes above it"))
            if broken:
                return Failure(broken[0], repr(call), broken[1])
            error = outcomes["places"].error
            if error in REFUSALS:  # in all worlds: what an operation leaves behind that fails is its own affair
                return None
            if error:
                return Failure("program", repr(call), f"{error}: {outcomes['places'].said}")
    return None


def _outcome(call: Call, world: World) -> Outcome:
    try:
        return Outcome(OPERATIONS[call.name].run(world, **call.arguments) or {})
    except Exception as error:
        return Outcome(error=type(error).__name__, said=str(error))


def _difference_of_outcomes(outcomes: Mapping[str, Outcome]) -> tuple[str, str] | None:
    """(kind, words) of what is not alike; plain torch's values are alike within `TOLERANCE`."""
    if len({outcome.error for outcome in outcomes.values()}) > 1:
        return "errors", "; ".join(f"{name}: {each.error} {each.said}" for name, each in outcomes.items())
    for name, tolerance in (("memory", 0.0), ("torch", TOLERANCE)):
        if name in outcomes:
            difference = _difference(outcomes["places"].shown, outcomes[name].shown, tolerance)
            if difference:
                return f"other than {name}", difference
    return None


def _difference(ours: Shown, theirs: Shown, tolerance: float) -> str:
    """Where and by how much they differ; empty where they do not."""
    if ours.keys() != theirs.keys():
        return f"only one has {sorted(ours.keys() ^ theirs.keys())}"
    for name, value in ours.items():
        other = theirs[name]
        if value is None or other is None:
            if value is not other:
                return f"{name}: one is None"
        elif value.shape != other.shape:
            return f"{name}: shapes {tuple(value.shape)} and {tuple(other.shape)}"
        elif not _alike(value, other, tolerance):
            return f"{name}: apart by {(value.double() - other.double()).abs().max():.3g}"
    return ""


def _alike(value: Tensor, other: Tensor, tolerance: float) -> bool:
    if tolerance == 0.0 or not value.is_floating_point():
        return torch.equal(value.nan_to_num(), other.nan_to_num()) and torch.equal(value.isnan(), other.isnan())
    return torch.allclose(value, other, rtol=tolerance, atol=tolerance, equal_nan=True)
