"""Programs on several ranks, each of which compares what it sees with plain torch on the batches of all."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.programs.checking import Failure, check
from tests.programs.programs import Program
from tests.ranks.launching import ends_on_ranks

SECONDS = 60.0
"""In which a group of programs has ended, whatever goes wrong."""

Found = tuple[Program, Failure]


def first_failure(programs: Sequence[Program]) -> Found | None:
    """Run programs one after the other, on ranks that are started once; the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ends = ends_on_ranks(programs[0].spec.ranks, _until_one_fails, programs, folder, limit=SECONDS)
        except TimeoutError as error:
            return programs[0], Failure("hang", "one of these programs", str(error))
    for rank, end in enumerate(ends):
        if end.error is not None or end.killed:
            return programs[0], Failure("crash", "one of these programs", f"rank {rank}: {end.error}\n{end.trace}")
    found = [end.value for end in ends if end.value is not None]
    # Where one rank stops, the others are told so, which says less.
    found.sort(key=lambda each: "RanksError" in each[1].said)
    return found[0] if found else None


def _until_one_fails(programs: Sequence[Program], folder: str) -> Found | None:
    for index, program in enumerate(programs):
        failure = check(program, Path(folder, str(index)), dist.get_rank())
        if failure is not None:
            return program, failure
    return None
