"""What finds faults must find those that are there."""

from dataclasses import replace

import pytest
import torch

from tests.programs.checking import check
from tests.programs.operations import OPERATIONS, Operation
from tests.programs.programs import Call, Program, program_of
from tests.programs.shrinking import shortened
from tests.programs.worlds import PlainWorld, Shown, World


def go_wrong(world: World, where: str, how: str) -> Shown:
    here = "torch" if isinstance(world, PlainWorld) else world.folder.name
    if here == where and how == "raise":
        raise ValueError("wrong")
    return {"value": torch.tensor(float(here == where) * 1e-4)}


@pytest.fixture(autouse=True)
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "go_wrong", Operation(go_wrong, 0, "nothing", False, {}))


def around(call: Call) -> Program:
    program = next(
        found for found in map(program_of, range(100)) if found.spec.follows_torch and found.spec.place_in_memory
    )
    return replace(program, calls=(*program.calls[:2], call, *program.calls[2:4]))


@pytest.mark.parametrize(
    ("where", "how", "kind"),
    [
        ("torch", "show", "other than torch"),
        ("in-memory", "show", "other than memory"),
        ("in-places", "raise", "errors"),
    ],
)
def test_what_is_wrong_in_one_world_is_found(where: str, how: str, kind: str) -> None:
    call = Call("go_wrong", {"where": where, "how": how})
    failure = check(around(call))
    assert failure is not None
    assert (failure.kind, failure.at) == (kind, repr(call))


def test_a_program_is_shortened_to_what_is_wrong() -> None:
    call = Call("go_wrong", {"where": "torch", "how": "show"})
    short = shortened(around(call), "other than torch", check, seconds=20.0)
    assert short.calls == (call,)
    assert not short.spec.fields
