"""Shortens a failing program: fewer calls, then a plainer configuration, as long as it fails alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.programs.checking import Failure
from tests.programs.programs import Program

PLAIN: Mapping[str, Any] = {
    "room": None,
    "elsewhere": {},
    "groups": 1,
    "late": False,
    "scheduler": None,
    "frozen": (),
    "large": False,
    "uneven": False,
}
"""The values of a `Spec` that ask for nothing."""


def shortened(program: Program, kind: str, check: Callable[[Program], Failure | None], seconds: float) -> Program:
    """The shortest program found in so many seconds that fails in this kind."""
    until = time.monotonic() + seconds

    def fails(candidate: Program) -> bool:
        found = check(candidate) if time.monotonic() < until else None
        return found is not None and found.kind == kind

    length = len(program.calls)
    while length:
        first = 0
        while first < len(program.calls):
            fewer = replace(program, calls=program.calls[:first] + program.calls[first + length :])
            if fails(fewer):
                program = fewer
            else:
                first += length
        length //= 2
    found: Program | None = program
    while found is not None:
        program = found
        plainer = (candidate for candidate in _plainer(program) if candidate != program)
        found = next((candidate for candidate in plainer if fails(candidate)), None)
    return program


def _plainer(program: Program) -> Iterator[Program]:
    """The program with one thing less in what is trained, and how."""
    spec = program.spec
    for name in [name for name in spec.fields if name != "stage"]:
        yield _with(program, fields={key: value for key, value in spec.fields.items() if key != name})
    for name, value in PLAIN.items():
        yield _with(program, **{name: value})
    for index in range(len(spec.net.layers)):
        layers = spec.net.layers[:index] + spec.net.layers[index + 1 :]
        yield _with(program, net=replace(spec.net, layers=layers or spec.net.layers))
    yield _with(program, net=replace(spec.net, tied=False))
    yield _with(program, net=replace(spec.net, shared=False))
    yield _with(program, net=replace(spec.net, twice=False))


def _with(program: Program, **changes: Any) -> Program:
    return replace(program, spec=replace(program.spec, **changes))
