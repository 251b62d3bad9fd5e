"""The checkpoints' figures: what a save costs, and what they survive. `python -m benchmarks.checkpoint [row ...]`.

Rows: disk host verify kills faults fuzz, and export where `benchmarks/exporting.py` is there. Ratios are taken within
one run; each heavy row runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_faults import ENGINE_KINDS, SYSTEM_KINDS, Ground, Manner, trials
from benchmarks.checkpoint_fuzz import KINDS, Specimen, Tally, flip_everywhere, fuzz
from benchmarks.checkpoint_kills import in_a_process
from benchmarks.checkpoint_runs import MIXED, ON_DISK, link_and_copy_always
from benchmarks.common import Row, run_child, run_rows
from benchmarks.models import TOKENS

SMALL, LARGE = 12, 101
"""Layers of the Llamas of 162 M and 1.0 B parameters."""

STAND_STILL_SECONDS = 0.2
PAIRS = 40
KILLS, INPUTS, FLIPS = 200, 10_000, 2_000
GB = 1e9

Rows = Callable[[str], list[Row]]


SIZES = {"small": (SMALL, 768, "256MiB", 5), "deep": (LARGE, 768, "256MiB", 2), "wide": (SMALL, 2176, "2GiB", 2)}
"""(layers, hidden size, host memory, rounds). The deep one has more units than the small one, the wide one larger."""


def disk(directory: str) -> list[Row]:
    """State and checkpoints on one file system: a save links, whatever the size."""
    rows, stands = [], {}
    for name, numbers in SIZES.items():
        found: Any = run_child("benchmarks.checkpoint_jobs", "disk", directory, *map(str, numbers))
        size, stand = f"{found['parameters'] / GB:.2f} B ({name}), all on disk", found["stand"]
        stands[name] = stand
        detail = f"each {', '.join(f'{each:.3f}' for each in found['stands'])} s"
        limit, good = f"<= {STAND_STILL_SECONDS} s", stand <= STAND_STILL_SECONDS
        ratio = found["after"] / found["step"]
        rows += [
            Row(f"{size}: stand-still of a save ({detail})", f"{stand:.3f} s", limit, good),
            Row("(the update that was owed, run before it)", f"{found['owed']:.2f} s", "", True),
            Row(f"(the step after it over one without a save, {found['step']:.2f} s)", f"{ratio:.2f} x", "", True),
        ]
    for name, more in (("deep", "8 times the units"), ("wide", "units of 6 times the size")):
        grown = stands[name] - stands["small"]
        what = f"stand-still that 6 times the parameters add, in {more}"
        rows.append(Row(what, f"{grown:.3f} s", "nothing to speak of: <= 0.1 s", grown <= 0.1))
    return rows


def host(directory: str) -> list[Row]:
    """State in host memory: a save holds it as it is, and writes it behind the training."""
    rows = []
    for batch in (1, 8):
        found: Any = run_child("benchmarks.checkpoint_jobs", "host", directory, str(SMALL), "7", str(batch))
        stand, copy, overhead = found["stand"], found["copy"], found["during"] / found["step"] - 1
        plain = f"{found['beside'] / found['step'] - 1:+.0%}"
        size = f"0.16 B in host memory, steps of {batch * TOKENS:,} tokens"
        what = f"{size}: stand-still of a save ({found['bytes'] / GB:.2f} GB, {stand:.3f} s)"
        behind = f"a step while it is written ({found['written']:.1f} s) over one that is not ({found['step']:.2f} s)"
        rows += [
            Row(what, f"{stand / copy:.2f} x a copy by torch ({copy:.2f} s)", "<= 1 x", stand <= copy),
            Row(behind, f"{overhead:+.0%}", "<= 10 %", overhead <= 0.10),
            Row("(the same while a plain thread writes as many bytes, and does nothing else)", plain, "", True),
            Row("the checkpoint is complete and loads bit-equal", str(found["equal"]), "True", found["equal"]),
        ]
    return rows


def verify(directory: str) -> list[Row]:
    """What the checksums of pages cost, where they are only kept and where every read is compared with them."""
    found: Any = run_child("benchmarks.checkpoint_jobs", "verify", directory, str(SMALL), str(PAIRS))
    low, ratio, high = found["ratio"]
    shares = {kind: found[f"{kind} sums"] / found[kind] for kind in ("plain", "verify")}
    return [
        Row(
            f"0.16 B, all on disk: a step with verify=True over the one beside it without, median of {PAIRS} pairs "
            f"(quartiles {low:.2f} x, {high:.2f} x)",
            f"{ratio:.3f} x",
            "<= 1.03 x",
            ratio <= 1.03,
        ),
        Row(f"checksums' seconds over the step's ({found['plain']:.2f} s)", f"{shares['plain']:.1%}", "measured", True),
        Row(f"the same with verify=True ({found['verify']:.2f} s)", f"{shares['verify']:.1%}", "measured", True),
    ]


def kills(directory: str) -> list[Row]:
    """`kill -9` at random instants and inside saves, on every tier and in every manner of saving."""
    found = in_a_process(Path(directory), 17, KILLS)
    what = f"kills ({found['kills_in_saves']} of them inside a save) of {found['runs']} runs; loads after them"
    same = f"{found['identical_runs']} of {found['runs']}"
    flaws = {name: found[name] for name in ("lost_checkpoints", "other_losses", "leftovers")}
    return [
        Row(what, f"{found['kills']}; {found['loads']}", str(KILLS), found["kills"] >= KILLS),
        Row("runs that end bit-identical to one never killed", same, "all", found["identical_runs"] == found["runs"]),
        Row("completed checkpoints missed, other losses, leftovers", str(flaws), "0", not any(flaws.values())),
    ]


MANNERS = {
    "linked": Manner(ON_DISK),
    "linked and copied": Manner(MIXED),
    "written at once": Manner(ON_DISK, large=False),
    "in place of the last": Manner(ON_DISK, replaces=True),
}


def faults(directory: str) -> list[Row]:
    """Every request to the disk engine and every system call of "step, save, step" fails once."""
    rows = []
    for name, manner in MANNERS.items():
        ground = Ground(Path(directory) / name, manner)
        outcomes = [each for kind in (*ENGINE_KINDS, *SYSTEM_KINDS) for each in trials(ground, kind, 1 << 30)]
        ground.close()
        wrong = [str(each) for each in outcomes if each.wrong]
        errors = sum(bool(each.errors) for each in outcomes)
        right = sum(not (each.errors or each.wrong) for each in outcomes)
        what = f"faults under a step and a save, {name}: one at every request and call"
        shown = f"{len(outcomes)}: {errors} clear errors, {right} went right"
        rows.append(Row(what, "; ".join([shown, *wrong[:3]]), "0 wrong", not wrong))
    return rows


def fuzz_rows(directory: str) -> list[Row]:
    """Damaged manifests and data files, and single flipped bits."""
    rows, draw = [], random.Random(18)
    for at, (name, kind) in enumerate(KINDS.items()):
        specimen = Specimen(Path(directory) / str(at), kind)
        for what, trial, count in (("damaged checkpoints", fuzz, INPUTS), ("flipped bits", flip_everywhere, FLIPS)):
            tally = Tally()
            trial(specimen, draw, count // len(KINDS), tally)
            shown = f"{tally.refused} refused, {tally.right} right, {len(tally.wrong)} wrong"
            good = not tally.wrong
            rows.append(Row(f"{what}, {name}", "; ".join([shown, *tally.wrong[:3]]), "0 wrong", good))
        specimen.run.close()
    return rows


ROWS: dict[str, Rows] = {
    "disk": disk,
    "host": host,
    "verify": verify,
    "kills": kills,
    "faults": faults,
    "fuzz": fuzz_rows,
}
if importlib.util.find_spec("benchmarks.exporting") is not None:
    ROWS["export"] = importlib.import_module("benchmarks.exporting").export


def main() -> int:
    logging.disable(logging.ERROR)  # what is passed over, and what fails on purpose
    torch.set_num_threads(1)
    link_and_copy_always()
    return run_rows(__doc__, ROWS)


if __name__ == "__main__":
    raise SystemExit(main())
