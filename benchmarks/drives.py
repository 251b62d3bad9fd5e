"""A drive of its own for each process, as far as one drive can stand for several: the kernel holds each process to a
part of what the drive gives. So it does with memory. Needs root and the controllers of cgroups, version 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


def can_limit() -> bool:
    return os.geteuid() == 0 and all((GROUPS / name).exists() for name in LIMITS)


@contextmanager
def limited(directory: str, bytes_a_second: float) -> Iterator[None]:
    """This process reads and writes so fast on the drive under the directory, in each direction, and no faster."""
    number = os.stat(directory).st_dev
    group = GROUPS / f"outsize-{os.getpid()}"
    group.mkdir()
    try:
        for name in LIMITS:
            (group / name).write_text(f"{os.major(number)}:{os.minor(number)} {bytes_a_second:.0f}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextmanager
def within(nbytes: int) -> Iterator[None]:
    """This process takes no more memory, cached files included."""
    group = MEMORY_GROUPS / f"outsize-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (MEMORY_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        (group / "memory.force_empty").write_text("0")
        group.rmdir()
