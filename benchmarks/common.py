"""What the benchmarks share: the machine in words, memory in use, plain direct I/O to compare with, and rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

IO_BYTES = 4 << 20
IO_THREADS = 8


@dataclass(frozen=True)
class Row:
    """One figure: what was measured, the number, what it must reach, and whether it does."""

    what: str
    measured: str
    target: str
    reached: bool

    def __str__(self) -> str:
        return f"| {self.what} | {self.measured} | {self.target} | {'yes' if self.reached else 'NO'} |"


def print_rows(rows: list[Row]) -> None:
    print("| what | measured | must reach | reached |\n|---|---|---|---|")
    for row in rows:
        print(row)


def run_rows(
    description: str | None,
    rows: Mapping[str, Callable[[str], list[Row]]],
    children: Mapping[str, Callable[..., Mapping[str, object]]] | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """The `main` of a benchmark: the rows that the command line names, each in a directory of its own on the drive to
    measure. 0 where all reach what they must. `children`: parts that `run_child` runs, with words as arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"which of {', '.join(rows)}; all if none is named")
    parser.add_argument("--disk", default=".", help="a directory on the drive to measure")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.rows) - set(rows)):
        parser.error(f"no such row: {', '.join(unknown)}")
    if options.child:
        kind, *words = options.child
        print(json.dumps((children or {})[kind](*words)))
        return 0
    print(machine())
    good = True
    for name in options.rows or rows:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.disk) as directory:
            found = rows[name](directory)
        print_rows(found)
        print(f"({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)
        good = good and all(row.reached for row in found)
    return 0 if good else 1


def machine() -> str:
    """CPU, cores, memory and versions in one line."""
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory:.0f} GiB, torch {torch.__version__}, Python {platform.python_version()}"


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakRss:
    """`peak` is the kernel's own high-water mark of resident memory between entering and leaving."""

    peak = 0

    def __enter__(self) -> PeakRss:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        return self

    def __exit__(self, *_: object) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        self.peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def run_child(module: str, *arguments: str, timeout: int = 3600) -> dict[str, object]:
    """Run a part of a benchmark in a process of its own; its last line of output is its result as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def plain_disk_bandwidth(path: Path, nbytes: int, mode: str, repeats: int = 3) -> float:
    """Bytes a second of plain O_DIRECT requests of threads. Modes: "read", "write", "mixed" (half each), "new".

    The file is written once before anything is measured: holes and fresh blocks have other speeds. "new" measures just
    that: a file that is written for the first time, and synced.
    """
    from outsize.move.memory import HostBuffer, memory_of  # here: peers run the rest without outsize

    count = nbytes // IO_BYTES
    memory = HostBuffer(IO_THREADS * IO_BYTES)  # in huge pages, as outsize's own; into others it is slower
    pages = [memory_of(memory.bytes[at : at + IO_BYTES]) for at in range(0, IO_THREADS * IO_BYTES, IO_BYTES)]
    for page in pages:
        page[:] = os.urandom(IO_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def one(index: int) -> None:
        page = pages[index % IO_THREADS]
        if mode == "write" or (mode == "mixed" and index % 2):
            os.pwrite(fd, page, index * IO_BYTES)
        else:
            os.preadv(fd, [page], index * IO_BYTES)

    def fill(index: int) -> None:
        os.pwrite(fd, pages[index % IO_THREADS], index * IO_BYTES)

    rates = []
    with ThreadPoolExecutor(IO_THREADS) as pool:
        if os.fstat(fd).st_size < nbytes and mode != "new":
            list(pool.map(fill, range(count)))
        for _ in range(repeats):
            if mode == "new":
                os.ftruncate(fd, 0)
            began = time.perf_counter()
            list(pool.map(fill if mode == "new" else one, range(count)))
            if mode == "new":
                os.fsync(fd)
            rates.append(count * IO_BYTES / (time.perf_counter() - began))
    os.close(fd)
    return statistics.median(rates)
