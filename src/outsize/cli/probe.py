"""`outsize probe`: how fast this machine moves and multiplies, and what that means for a step."""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from outsize.cli.options import at_least

SUMMARY = "measure the disk folder, memory and compute"
DESCRIPTION = "Measure the bandwidth of a disk folder and of memory, and fp32 matrix products; takes a few seconds."
BLOCK_BYTES = 8 << 20
THREADS = 4  # requests in flight: one alone does not fill a fast drive
# A step of exact fp32 AdamW with everything on disk. Read: weight for the backward pass; for the update, which feeds
# the forward pass, weight, gradient and two moments. Written: gradient, weight and two moments.
STEP_READ_BYTES = 4 * (1 + 4)
STEP_WRITTEN_BYTES = 4 * (1 + 3)
GIGA = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", type=Path, default=Path("."), metavar="DIR", help="folder on the drive to measure")
    parser.add_argument("--megabytes", type=at_least(8), default=1024, help="how much to write and read back")


def run(args: argparse.Namespace) -> int:
    if not args.disk.is_dir():
        raise FileNotFoundError(f"--disk {args.disk}: no such folder")
    write, read, direct = _disk(args.disk, max(1, (args.megabytes << 20) // BLOCK_BYTES))
    source, matrix = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(1024, 1024)
    target = torch.empty_like(source)
    memory = 2 * source.numel() / _best_seconds(lambda: target.copy_(source))
    flops = 2 * len(matrix) ** 3 / _best_seconds(lambda: matrix @ matrix)
    way = "direct" if direct else "through the page cache: the file system has no direct I/O, figures may flatter"
    seconds = GIGA * (STEP_READ_BYTES / read + STEP_WRITTEN_BYTES / write)
    print(f"disk read    {read / GIGA:8.2f} GB/s  ({way})")
    print(f"disk write   {write / GIGA:8.2f} GB/s")
    print(f"memory       {memory / GIGA:8.2f} GB/s  (copy, read + write)")
    print(f"fp32 product {flops / GIGA:8.0f} GFLOP/s")
    print(
        f"A step moves {STEP_READ_BYTES} B read and {STEP_WRITTEN_BYTES} B written a parameter with everything on disk "
        f"in fp32: about {seconds:.1f} s for 1 B parameters."
    )
    return 0


def _disk(folder: Path, blocks: int) -> tuple[float, float, bool]:
    """(bytes/s written, bytes/s read, whether the page cache was passed by), on a file that is removed again."""
    handle, name = tempfile.mkstemp(prefix="outsize-probe-", dir=folder)
    os.close(handle)
    try:
        descriptor, direct = _open_direct(name)
    finally:
        os.unlink(name)
    try:
        buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(THREADS)]
        for buffer in buffers:
            buffer.write(os.urandom(1 << 16) * (BLOCK_BYTES >> 16))
        written = _run_blocks(blocks, lambda i, buffer: os.pwrite(descriptor, buffer, i * BLOCK_BYTES), buffers)
        start = time.perf_counter()
        os.fsync(descriptor)
        written += time.perf_counter() - start
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read = _run_blocks(blocks, lambda i, buffer: os.preadv(descriptor, [buffer], i * BLOCK_BYTES), buffers)
    finally:
        os.close(descriptor)
    return blocks * BLOCK_BYTES / written, blocks * BLOCK_BYTES / read, direct


def _open_direct(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError:  # tmpfs and some overlays refuse it
        return os.open(name, os.O_RDWR), False


def _run_blocks(blocks: int, move: Callable[[int, mmap.mmap], int], buffers: list[mmap.mmap]) -> float:
    """Seconds for all blocks, each thread with its own buffer."""

    def work(thread: int) -> None:
        for block in range(thread, blocks, len(buffers)):
            moved = move(block, buffers[thread])
            if moved != BLOCK_BYTES:
                raise OSError(f"the disk moved {moved} of {BLOCK_BYTES} bytes; is it full?")

    start = time.perf_counter()
    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(work, range(len(buffers))))
    return time.perf_counter() - start


def _best_seconds(work: Callable[[], object], times: int = 5) -> float:
    """The first time is not counted."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
