"""`probe`: measures what bounds a step on this machine, once, and remembers it in a file of the user's cache."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outsize.config import Config
from outsize.move.codes import CODE_DTYPES, blocks_of
from outsize.move.comm import Broadcasts
from outsize.move.disk import naming, nearest, open_direct
from outsize.move.generations import sums_of
from outsize.move.grad_ops import AS_IT_IS
from outsize.move.memory import HostBuffer, memory_of, own_cores, zero
from outsize.move.shard import SlotState
from outsize.move.store import MASTER_DTYPE
from outsize.optim.native import AdamRule
from outsize.optim.rules import Piece
from outsize.planning.machine import CPU, Curve, Machine, typical_machine
from outsize.planning.sizes import format_bytes

logger = logging.getLogger("outsize")

BLOCK_BYTES = 4 << 20
THREADS = 2  # requests in flight, as where a small staging arena has one being updated and one being written
LONE_READS, LONE_BYTES, LEAST_SECONDS = 64, 1 << 20, 10e-6
MEGABYTES = 512
COPIED_BYTES = 128 << 20
UPDATED_NUMEL = 1 << 24
"""Larger than the caches of a server, as a real update is."""
DTYPES = ("float32", "bfloat16")
WIDTHS, MOST_TOKENS = (128, 512, 2048), 512
"""Of the products that are timed: their weights are square."""
MOST_SECONDS, GROWTH = 0.5, 16
"""Of one step of a layer; how many times as long the next width takes."""
SMALL_OPERATIONS = 100
SUSTAINED_SECONDS, LEAST_TIMES = 0.25, 3
GATHERED_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
DISK = ("disk_read", "disk_write", "disk_mixed", "disk_seconds")
LINKS = ("to_device", "from_device", "both_ways")
PAGES = ("new_memory",)
RANKS = ("collectives",)


def probe(
    disk: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    again: bool = False,
    megabytes: int = MEGABYTES,
) -> Machine:
    """The figures of this machine that bound a step, and of the drive of the folder `disk`; prints as a table.

    What was measured before on this machine and drive is read from a file (`$XDG_CACHE_HOME/outsize`, or
    `~/.cache/outsize`), unless `again`. Otherwise it is measured, in about 20 s: products of the `device` by dtype and
    size, small operations, copies of memory, the kernel of the update, on an accelerator copies from and to it, of
    the drive `megabytes` written, read, and both at once, and single reads; with several ranks all-gathers, which all
    ranks measure together. Figures that were not measured are usual values, and marked so: those of a drive without
    `disk`.

    Raises `OSError` for a disk that cannot be used.

    >>> machine = outsize.probe(disk="/mnt/nvme")  # doctest: +SKIP
    """
    where = Config(device=device).compute_device
    found = typical_machine(where.type, own_cores())
    if megabytes < 1:
        raise ValueError(f"megabytes is {megabytes}; it must be at least 1")
    if disk is not None and not isinstance(disk, (str, os.PathLike)):
        raise TypeError(f"disk is {disk!r}; outsize.probe measures the drive of one folder: call it for each")
    parts: list[tuple[str, Callable[[], Mapping[str, Any]]]] = [(_machine_key(where), lambda: _compute(where))]
    if disk is not None:
        folder = nearest(Path(disk))
        parts.append((_disk_key(folder), lambda: _disk(folder, max(1, (megabytes << 20) // BLOCK_BYTES))))
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts.append((f"ranks-{dist.get_world_size()}-{_machine_key(where)}", lambda: _collectives(where)))
    for key, measure in parts:
        known = None if again else _remembered(key)
        if key.startswith("ranks"):  # all measure, or none
            knows: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(knows, known is not None)
            known = known if all(knows) else None
        if known is None:
            known = measure()
            _remember(key, known)
        found = _with(found, known)
    return _without(found, (), dist.get_world_size() if dist.is_initialized() else 1)


def recall(device: torch.device, disk: Path | None, ranks: int = 1) -> Machine:
    """What was measured before; usual values for all else. Measures nothing."""
    found = typical_machine(device.type, own_cores())
    keys = [_machine_key(device), f"ranks-{ranks}-{_machine_key(device)}"]
    with suppress(OSError):
        keys += [] if disk is None else [_disk_key(nearest(disk))]
    for key in keys:
        known = _remembered(key)
        found = found if known is None else _with(found, known)
    return _without(found, () if disk is not None else DISK, ranks)


def _without(found: Machine, unused: Collection[str], ranks: int) -> Machine:
    """Figures that there are no uses of are not typical either."""
    unused = {*unused, *(() if ranks > 1 else RANKS), *(LINKS if found.device == CPU else PAGES)}
    return replace(found, typical=found.typical - unused)


def _with(found: Machine, known: Mapping[str, Any]) -> Machine:
    return Machine.of_json({**found.as_json(), **known, "typical": found.typical - set(known)})


# -- the file ----------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "outsize")


def _machine_key(device: torch.device) -> str:
    name = device.type
    if device.type != CPU and torch.accelerator.is_available():
        name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device)
    processor: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    threads = f"{own_cores()} {torch.get_num_threads()}"
    words = f"{platform.node()} {processor or platform.machine()} {name} {torch.__version__} {threads}"
    return f"machine-2-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _disk_key(folder: Path) -> str:
    words = f"{platform.node()} {os.stat(folder).st_dev} {os.statvfs(folder).f_blocks}"
    return f"disk-3-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _remembered(key: str) -> Mapping[str, Any] | None:
    """None where nothing usable is there."""
    try:
        known: Mapping[str, Any] = json.loads((_folder() / f"{key}.json").read_text(encoding="utf-8"))
        _with(typical_machine(CPU, 1), known)
        return known
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # the last: there is no home
        return None


def _remember(key: str, figures: Mapping[str, Any]) -> None:
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), delete=False, encoding="utf-8") as file:
            json.dump(figures, file)
        os.replace(file.name, _folder() / f"{key}.json")
    except (OSError, RuntimeError) as error:
        logger.warning(
            "what was measured could not be written to %s/outsize (%s): plans take usual figures in its place. Set "
            "XDG_CACHE_HOME to a folder that can be written, for the plans too",
            os.environ.get("XDG_CACHE_HOME") or "~/.cache",
            error,
        )


# -- computing ---------------------------------------------------------------------------------------------------------


def _compute(device: torch.device) -> Mapping[str, Any]:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    measured: dict[str, Any] = {
        "memory": 2 * COPIED_BYTES / _usual_seconds(lambda: target.copy_(source), device),
        "updates": {kind: _update_rates(kind) for kind in ("float32", "bfloat16", "compact")},
    }
    measured["host_memory"] = measured["memory"]
    measured["checksums"] = _checksums()
    if device.type == CPU:
        measured["new_memory"] = _new_memory()
    else:
        pinned, other = (torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        measured["host_memory"] = 2 * COPIED_BYTES / _usual_seconds(lambda: other.copy_(pinned))
        measured["to_device"] = COPIED_BYTES / _usual_seconds(lambda: target.copy_(pinned, non_blocking=True), device)
        measured["from_device"] = COPIED_BYTES / _usual_seconds(lambda: other.copy_(source, non_blocking=True), device)
        aside = torch.Stream(device)

        def both() -> None:
            target.copy_(pinned, non_blocking=True)
            with aside:
                other.copy_(source, non_blocking=True)

        measured["both_ways"] = 2 * COPIED_BYTES / _usual_seconds(both, device)
    measured["products"] = {dtype: _products(getattr(torch, dtype), device) for dtype in DTYPES}
    measured["operation_seconds"] = _small_operation(device)
    return measured


def _new_memory() -> float:
    """Bytes a second, beside those of filling it."""
    buffer = HostBuffer(COPIED_BYTES)
    fill = partial(zero, buffer.bytes)
    fill()
    again = _usual_seconds(fill)

    def fill_anew() -> None:
        buffer.drop()
        fill()

    return COPIED_BYTES / max(_usual_seconds(fill_anew) - again, again / 10)


def _checksums() -> float:
    content = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    return COPIED_BYTES / _usual_seconds(lambda: sums_of(content))


def _products(dtype: torch.dtype, device: torch.device) -> Curve:
    """Seconds by FLOPs: the mean of the three products of a layer in a step, whose operands lie differently."""
    curve: list[tuple[float, float]] = []
    for width in WIDTHS:
        tokens = min(width, MOST_TOKENS)
        layer = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        x = torch.ones(tokens, width, device=device, dtype=dtype, requires_grad=True)
        grad = torch.ones(tokens, width, device=device, dtype=dtype)
        seconds = _usual_seconds(lambda: layer(x).backward(grad), device)  # noqa: B023
        curve.append((2.0 * tokens * width**2, seconds / 3))
        if seconds > MOST_SECONDS / GROWTH:
            break
    return tuple(curve)


def _small_operation(device: torch.device) -> float:
    """Seconds of an operation that does nearly nothing, in Python, torch and autograd."""
    one = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        x = one
        for _ in range(SMALL_OPERATIONS):
            x = x * 1.0
        x.backward()

    return _usual_seconds(chain, device) / (2 * SMALL_OPERATIONS)


def _update_rates(kind: str) -> tuple[float, float]:
    """Elements a second of AdamW on half of the cores and on all."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    rule, numel, cores = AdamRule(amsgrad=False, decoupled=True), UPDATED_NUMEL, own_cores()
    states = {name: torch.full((numel,), 1e-3) for name in rule.arrays}
    scales = {}
    if kind == "compact":
        states = {name: torch.ones(numel, dtype=CODE_DTYPES[code]) for name, code in rule.codes.items()}
        scales = {name: torch.full((blocks_of(numel),), 1e-3) for name in states}
    master = torch.zeros(numel, dtype=MASTER_DTYPE["bfloat16"]) if kind == "bfloat16" else None
    param, grad = torch.full((numel,), 0.5, dtype=dtype), torch.full((numel,), 1e-3, dtype=dtype)
    hyper: dict[str, object] = dict(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])
    del hyper["params"]
    state = SlotState({"step": 3.0}, initialised=True)

    def rate(threads: int) -> float:
        piece = Piece(param, master, states, grad, AS_IT_IS, hyper, state, threads, scales)
        return numel / _usual_seconds(lambda: rule.apply(piece))

    half = rate(max(cores // 2, 1))
    return half, max(half, rate(cores))


def _usual_seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    """The median of a while of work: the best time is not what a training gets. The first time is not counted."""
    seconds: list[float] = []
    while sum(seconds[1:]) < SUSTAINED_SECONDS or len(seconds) <= LEAST_TIMES:
        began = time.perf_counter()
        work()
        if device is not None and device.type != CPU:
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _collectives(device: torch.device) -> Mapping[str, Any]:
    """Of an all-gather of the default group; each rank calls it."""
    curve = []

    def gather() -> None:
        if device.type == CPU:
            Broadcasts(dist.group.WORLD, whole.chunk(dist.get_world_size())).wait()
        else:
            dist.all_gather_into_tensor(whole, mine)

    for nbytes in GATHERED_BYTES:
        mine = torch.ones(max(nbytes // dist.get_world_size(), 1), dtype=torch.uint8, device=device)
        whole = torch.empty(mine.numel() * dist.get_world_size(), dtype=torch.uint8, device=device)
        curve.append((nbytes, _usual_seconds(gather, device)))
    return {"collectives": curve}


# -- the drive ---------------------------------------------------------------------------------------------------------


def _disk(folder: Path, blocks: int) -> Mapping[str, Any]:
    """Of a file that is removed again."""
    nbytes = blocks * BLOCK_BYTES
    with naming(folder, f"measuring the drive with a file of {format_bytes(nbytes)}"):
        free = os.statvfs(folder)
        if nbytes > free.f_bavail * free.f_frsize:  # before others find it full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _with_file(folder, blocks, nbytes)


def _with_file(folder: Path, blocks: int, nbytes: int) -> Mapping[str, Any]:
    handle, name = tempfile.mkstemp(prefix="outsize-probe-", dir=folder)
    os.close(handle)
    try:
        descriptor = open_direct(name, os.O_RDWR)
    finally:
        os.unlink(name)
    try:
        # The memory of a run: where huge pages back it, a drive may be three times as fast.
        arena = HostBuffer(THREADS * BLOCK_BYTES)
        memory = memory_of(arena.bytes)
        memory[:] = os.urandom(1 << 16) * (THREADS * BLOCK_BYTES >> 16)
        buffers = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]

        def write(block: int, buffer: memoryview) -> int:
            return os.pwrite(descriptor, buffer, block * BLOCK_BYTES)

        def read(block: int, buffer: memoryview) -> int:
            return os.preadv(descriptor, [buffer], block * BLOCK_BYTES)

        _run_blocks(blocks, write, buffers)  # fresh blocks and holes have other speeds
        os.fsync(descriptor)
        began = time.perf_counter()
        _run_blocks(blocks, write, buffers)
        os.fsync(descriptor)
        written = time.perf_counter() - began
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        readings = _run_blocks(blocks, read, buffers)
        both = _run_blocks(blocks, lambda block, buffer: (read, write)[block // THREADS % 2](block, buffer), buffers)
        alone = []
        for count in range(LONE_READS):
            began = time.perf_counter()
            os.preadv(descriptor, [memory[:LONE_BYTES]], count * 7 % (blocks * BLOCK_BYTES // LONE_BYTES) * LONE_BYTES)
            alone.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    latency = max(median(alone) - LONE_BYTES * readings / nbytes, LEAST_SECONDS)
    return dict(zip(DISK, (nbytes / readings, nbytes / written, nbytes / both, latency), strict=True))


def _run_blocks(blocks: int, move: Callable[[int, memoryview], int], buffers: list[memoryview]) -> float:
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
