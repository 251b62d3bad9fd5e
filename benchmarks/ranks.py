"""The figures of several ranks: `python -m benchmarks.ranks [row ...] --disk DIR`. Rows: speed memory disk drives
weights astray small activations.

Ranks are processes of this machine that speak by gloo; ratios are taken within one run.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks import ranks_jobs
from benchmarks.common import Row, run_rows
from benchmarks.drives import can_limit
from benchmarks.models import TOKENS, llama
from tests.ranks import activations, launching, test_astray
from tests.ranks.launching import ends_on_ranks, run_on_ranks
from tests.ranks.training import Setting

LAYERS = 4
DRIVES = (0.1e9, 0.2e9)
"""Bytes a second of a rank's own drive: so slow that two ranks do not reach what one drive of a machine gives."""
ROUNDS = 3
PARTS = {
    "seconds": "a step",
    "forward": "the forward of a step, in which all is read and updated,",
    "waited": "the part of a step in which the computation waits for the disk or the others",
}
PAIRS = (("stage 0", "ddp"), ("stage 3", "fsdp2"))
GB = 1e9


def speed(directory: str) -> list[Row]:
    """All in memory, beside what torch has."""
    rows = []
    for ranks in (2, 4):
        for kinds in PAIRS:
            for batch in (1, 4):
                every = run_on_ranks(ranks, ranks_jobs.compare, kinds, LAYERS, 10, batch, directory, limit=1500.0)
                found = every[0]
                what = f"{kinds[0]} over {kinds[1]}, {ranks} ranks, {batch * TOKENS:,} tokens a rank and step"
                detail = (
                    f"({found['seconds']:.2f} s, {found['theirs']:.2f} s; losses {found['losses apart']:.0e} apart)"
                )
                rows.append(Row(f"{what} {detail}", f"{found['ratio']:.2f} x", "<= 1.05 x", found["ratio"] <= 1.05))
    return rows


def memory(directory: str) -> list[Row]:
    """The most memory that a rank takes while it trains."""
    rows = []
    for ranks in (2, 4):
        for kinds in PAIRS:
            mine, theirs = (
                max(run_on_ranks(ranks, ranks_jobs.peak, kind, LAYERS, directory, limit=900.0)) for kind in kinds
            )
            what = (
                f"peak memory of {kinds[0]} over {kinds[1]}, {ranks} ranks ({mine / GB:.2f} GB, {theirs / GB:.2f} GB)"
            )
            rows.append(Row(what, f"{mine / theirs:.2f} x", "<= 1 x", mine <= theirs))
    return rows


def disk(directory: str) -> list[Row]:
    """All on disk: each of two ranks reads and writes half."""
    folders = [str(Path(directory) / name) for name in ("one", "two")]
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    rows = []
    for memory in ("384MiB", "448MiB", "512MiB", "1GiB"):
        alone = run_on_ranks(1, ranks_jobs.on_disk, 12, folders, memory, limit=900.0)[0]
        two = run_on_ranks(2, ranks_jobs.on_disk, 12, folders, memory, limit=900.0)
        read, written = (sum(each[name] for each in two) / alone[name] for name in ("read", "written"))
        moved = sum(each["read"] + each["written"] for each in two) / (alone["read"] + alone["written"])
        seconds = max(each["seconds"] for each in two)
        what = (
            f"bytes to and from disk in a step, {memory}, 2 ranks over 1 (read {read:.3f} x, written {written:.3f} x)"
        )
        rows.append(Row(what, f"{moved:.2f} x", "1 x, to 2 %", abs(moved - 1) <= 0.02))
        what = f"(a step of 2 ranks, {seconds:.2f} s, over one of 1 rank, {alone['seconds']:.2f} s, one thread each)"
        rows.append(Row(what, f"{seconds / alone['seconds']:.2f} x", "", True))
    return rows


def drives(directory: str) -> list[Row]:
    """All on disk, where the disk is all that a step waits for, and each rank has one of its own."""
    if not can_limit():
        return [
            Row(
                "a step of 2 ranks with a drive each: needs root and the blkio controller", "-", "0.5 x, to 10 %", False
            )
        ]
    folders = [str(Path(directory) / name) for name in ("one", "two")]
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    rows = []
    for rate in DRIVES:
        found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for _ in range(ROUNDS):
            for ranks, each in found.items():
                ends = run_on_ranks(ranks, ranks_jobs.on_own_drive, LAYERS, folders, rate, limit=900.0)
                each.append(max(ends, key=lambda end: end["seconds"]))
        for part in PARTS:
            alone, two = (statistics.median(each[part] for each in found[ranks]) for ranks in (1, 2))
            ratio = two / alone
            what = f"{PARTS[part]} of 2 ranks ({two:.2f} s) over that of 1 rank ({alone:.2f} s)"
            what = f"{what}, each with a drive of {rate / GB:.1f} GB/s, {ROUNDS} rounds"
            rows.append(Row(what, f"{ratio:.2f} x", "0.5 x, to 10 %", ratio <= 0.55))
    return rows


def weights(directory: str) -> list[Row]:
    """Beginning with the weights of a folder on the drive, of which nothing is in the page cache."""
    folder = Path(directory) / "weights"
    llama(8).save_pretrained(folder, max_shard_size="200MB")  # type: ignore[operator]
    files = list(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    rows = []
    for how in ("from_pretrained", "load"):
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = run_on_ranks(2, ranks_jobs.begin_from_weights, how, str(folder), directory, limit=300.0)
        read, kept = (sum(each[name] for each in found) / size for name in ("read_bytes", "kept"))
        what = f"{how} of {size / GB:.2f} GB on 2 ranks: read from the drive by both together (they keep {kept:.2f} x)"
        rows.append(Row(what, f"{read:.2f} x", "1 x, to 10 %", read <= 1.1))
    return rows


def small(directory: str) -> list[Row]:
    """Small units, of which all that the ranks do around them shows."""
    rows = []
    for ranks in (2, 4):
        found = run_on_ranks(ranks, ranks_jobs.small_units, 30, directory, limit=900.0)[0]
        for kind in ("room", "no room"):
            ratio = found[kind] / found["fsdp2"]
            times = f"({found[kind] * 1e3:.0f} ms, {found['fsdp2'] * 1e3:.0f} ms)"
            what = f"24 small units on host, stage 3 over FSDP2, {ranks} ranks, {kind} for gathered units {times}"
            rows.append(Row(what, f"{ratio:.2f} x", "<= 1.05 x", ratio <= 1.05))
    return rows


def activation_bytes(directory: str) -> list[Row]:
    """What a layer keeps for its backward, over sbh, against Korthikanti et al. 2022."""
    rows = []
    for kind, ranks in (("none", 1), ("tensor", 2), ("sequence", 2), ("tensor", 4), ("sequence", 4)):
        for mode in ("keep", "selective", "recompute"):
            found = run_on_ranks(ranks, activations.kept_bytes, kind, mode)[0]
            expected, paper = (each(kind, mode, ranks) for each in (activations.formula, activations.published))
            what = f"activations of a layer over sbh, {kind}, {mode}, {ranks} ranks (published: {paper:.1f})"
            rows.append(Row(what, f"{found:.1f}", f"{expected:.1f} within 2 %", abs(found / expected - 1) <= 0.02))
    return rows


def astray(directory: str) -> list[Row]:
    """Ranks that go wrong in every way that is known, at random."""
    launching.QUICK = False
    chosen = random.Random(0)
    ways = [*test_astray.WRONG, *test_astray.GONE]
    slowest, hangs, silent, count = 0.0, 0, 0, 100
    for _ in range(count):
        wrong, ranks = chosen.choice(ways), chosen.choice((2, 3, 4))
        who = chosen.randrange(ranks)
        setting = Setting(3, "squeezed")
        try:
            ends = ends_on_ranks(ranks, test_astray.astray, wrong, setting, directory, who, limit=60.0)
        except TimeoutError:
            hangs += 1
            continue
        others = [end for rank, end in enumerate(ends) if rank != who]
        silent += sum(end.kind != "RanksError" for end in others)
        slowest = max([slowest, *(end.seconds for end in others)])
    return [
        Row(f"{count} cases of ranks that go astray or die: hangs", str(hangs), "0", hangs == 0),
        Row("ranks that ended without an error that says so", str(silent), "0", silent == 0),
        Row("the longest time from the start to the error", f"{slowest:.1f} s", "<= 10 s", slowest <= 10),
    ]


ROWS: dict[str, Callable[[str], list[Row]]] = {"speed": speed, "memory": memory, "disk": disk, "drives": drives}
ROWS |= {"weights": weights, "astray": astray, "small": small, "activations": activation_bytes}


def main() -> int:
    return run_rows(__doc__, ROWS)


if __name__ == "__main__":
    raise SystemExit(main())
