"""Random programs, beside plain torch, for as long as you like: `python -m benchmarks.programs SECONDS`.

Prints each program that fails, shortened. `--first SEED` begins elsewhere, `--ranks 2` runs on so many ranks;
`--seed SEED` runs and shortens one program; `--device sim` computes on the simulated accelerator.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
import warnings

import torch

from tests.accelerator import sim as simulator
from tests.programs.checking import Failure, check
from tests.programs.programs import Program, program_of
from tests.programs.ranks import first_failure
from tests.programs.shrinking import shortened


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=0.0, help="how long new programs are begun")
    parser.add_argument("--first", type=int, default=1000, help="the first seed (default: beyond those of the tests)")
    parser.add_argument("--seed", type=int, help="run this program alone")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shorten", type=float, default=120.0, metavar="SECONDS", help="for each failing program")
    parser.add_argument("--device", default="cpu", choices=("cpu", "sim"))
    options = parser.parse_args()
    if options.device == "sim":
        with simulator.switched_on("random"), torch.device("sim"):
            return hunt(options)
    return hunt(options)


def hunt(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("outsize").setLevel(logging.ERROR)
    until = time.monotonic() + options.seconds
    ran = failed = 0
    for seed in itertools.count(options.first) if options.seed is None else (options.seed,):
        program = program_of(seed, options.ranks)
        failure = check_anywhere(program)
        ran += 1
        if failure is not None:
            failed += 1
            report(program, failure, options.shorten)
        if time.monotonic() > until:
            break
    print(f"{ran} programs, of which {failed} failed")
    return int(failed > 0)


def check_anywhere(program: Program) -> Failure | None:
    if program.spec.ranks == 1:
        return check(program)
    found = first_failure([program])
    return None if found is None else found[1]


def report(program: Program, failure: Failure, seconds: float) -> None:
    print(f"seed {program.spec.seed}: {failure}", flush=True)
    short = shortened(program, failure.kind, check_anywhere, seconds)
    print(f"in short: {check_anywhere(short) or 'it does not fail each time'}\n{short}\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
