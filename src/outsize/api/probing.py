"""`probe`: measures what bounds a step on this machine, once, and remembers it in a file of the user's cache."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from outsize.config import Config
from outsize.move.codes import CODE_DTYPES, blocks_of
from outsize.move.disk import nearest
from outsize.move.grad_ops import AS_IT_IS
from outsize.move.shard import SlotState
from outsize.move.store import MASTER_DTYPE
from outsize.optim.native import AdamRule
from outsize.optim.rules import Piece
from outsize.optim.update import update_threads
from outsize.plan.machine import CPU, Curve, Machine, typical_machine
from outsize.run.operations import EachOperation, Operation

BLOCK_BYTES = 8 << 20
THREADS = 4  # requests in flight: one alone does not fill a fast drive
SMALL_READS = 64
MEGABYTES = 512
COPIED_BYTES = 64 << 20
UPDATED_NUMEL = 1 << 22
WIDTHS = ((64, 64), (128, 256), (512, 512), (1024, 1024), (2048, 2048), (8192, 4096))
"""(tokens, elements of one) of the calls that are timed, from the smallest on."""
EXERCISE_SECONDS = {"float32": 8.0, "bfloat16": 6.0}
"""For the calls of one dtype, all sizes together; larger sizes are left out where they would take longer."""
GROWTH = 5
"""How many times as long the calls of the next size take."""
THIN, THIN_WIDTHS = 8, (256, 1024, 2048)
"""Rows of a product that is bound by the bytes of its weights, and elements of a row."""
GATHERED_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
DISK = ("disk_read", "disk_write", "disk_mixed", "disk_seconds")
LINKS = ("to_device", "from_device", "both_ways")
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
    `~/.cache/outsize`), unless `again`. Otherwise it is measured, in about 20 s: products and other operations of the
    `device` by dtype and size, copies of memory, the kernel of the update, on an accelerator copies from and to it, of
    the drive `megabytes` written, read, and both at once, and small reads; with several ranks all-gathers, which all
    ranks measure together. Figures that were not measured are usual values, and marked so: those of a drive without
    `disk`.

    Raises `OSError` for a disk that cannot be used.

    >>> machine = outsize.probe(disk="/mnt/nvme")  # doctest: +SKIP
    """
    where = Config(device=device).compute_device
    found = typical_machine(where.type, update_threads())
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
            known = _figures(measure())
            _remember(key, known)
        found = _with(found, known)
    return _without(found, (), dist.get_world_size() if dist.is_initialized() else 1)


def recall(device: torch.device, disk: Path | None, ranks: int = 1) -> Machine:
    """What was measured before; usual values for all else. Measures nothing."""
    found = typical_machine(device.type, update_threads())
    keys = [_machine_key(device), f"ranks-{ranks}-{_machine_key(device)}"]
    with suppress(OSError):
        keys += [] if disk is None else [_disk_key(nearest(disk))]
    for key in keys:
        known = _remembered(key)
        found = found if known is None else _with(found, known)
    return _without(found, () if disk is not None else DISK, ranks)


def _without(found: Machine, unused: Collection[str], ranks: int) -> Machine:
    """Figures that there are no uses of are not typical either."""
    unused = {*unused, *(() if ranks > 1 else RANKS), *(LINKS if found.device == CPU else ())}
    return replace(found, typical=found.typical - unused)


def _with(found: Machine, known: Mapping[str, Any]) -> Machine:
    return Machine.of_json({**found.as_json(), **known, "typical": found.typical - set(known)})


def _figures(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """As they are after a visit to the file."""
    figures: Mapping[str, Any] = json.loads(json.dumps(measured))
    return figures


# -- the file ----------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "outsize")


def _machine_key(device: torch.device) -> str:
    name = device.type
    if device.type != CPU and torch.accelerator.is_available():
        name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)(device)
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    words = f"{platform.node()} {model} {update_threads()} {name} {torch.__version__} {torch.get_num_threads()}"
    return f"machine-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _disk_key(folder: Path) -> str:
    words = f"{platform.node()} {os.stat(folder).st_dev} {os.statvfs(folder).f_blocks}"
    return f"disk-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _remembered(key: str) -> Mapping[str, Any] | None:
    """None where nothing usable is there."""
    try:
        known = json.loads((_folder() / f"{key}.json").read_text(encoding="utf-8"))
        _with(typical_machine(CPU, 1), known)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # the last: there is no home
        return None
    return known if isinstance(known, dict) else None


def _remember(key: str, figures: Mapping[str, Any]) -> None:
    """A cache that cannot be written costs a measurement the next time."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), delete=False, encoding="utf-8") as file:
            json.dump(figures, file)
        os.replace(file.name, _folder() / f"{key}.json")


# -- computing ---------------------------------------------------------------------------------------------------------


def _compute(device: torch.device) -> Mapping[str, Any]:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    measured: dict[str, Any] = {
        "memory": 2 * COPIED_BYTES / _best_seconds(lambda: target.copy_(source), device),
        "updates": {kind: _update_rates(kind) for kind in ("float32", "bfloat16", "compact")},
    }
    measured["host_memory"] = measured["memory"]
    if device.type != CPU:
        pinned, other = (torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        measured["host_memory"] = 2 * COPIED_BYTES / _best_seconds(lambda: other.copy_(pinned))
        measured["to_device"] = COPIED_BYTES / _best_seconds(lambda: target.copy_(pinned, non_blocking=True), device)
        measured["from_device"] = COPIED_BYTES / _best_seconds(lambda: other.copy_(source, non_blocking=True), device)
        aside = torch.Stream(device)

        def both() -> None:
            target.copy_(pinned, non_blocking=True)
            with aside:
                other.copy_(source, non_blocking=True)

        measured["both_ways"] = 2 * COPIED_BYTES / _best_seconds(both, device)
    curves: dict[str, dict[float, list[float]]] = {}
    with torch.random.fork_rng(devices=[]):
        for dtype, most in EXERCISE_SECONDS.items():
            began, kind = _now(), getattr(torch, dtype)
            _time_operations(device, *_made(device, kind, *WIDTHS[0]), {})  # what is done once is done now
            for width in THIN_WIDTHS:
                thin: dict[str, dict[float, list[float]]] = {}
                layer = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(device, kind)
                _time_operations(device, layer, torch.ones(THIN, width, dtype=kind, device=device), thin, by_bytes=True)
                for name, points in thin.items():
                    for nbytes, seconds in points.items() if name.startswith("mm") else ():
                        curves.setdefault(f"thin {name}", {}).setdefault(nbytes, []).extend(seconds)
            for tokens, width in WIDTHS:
                before = _now()
                _time_operations(device, *_made(device, kind, tokens, width), curves)
                if _since(began, device) + GROWTH * _since(before, device) > most:
                    break
    measured["operations"] = {name: _curve(points) for name, points in curves.items()}
    measured["operation_seconds"] = _gap(device, measured["operations"])
    return measured


def _curve(points: Mapping[float, list[float]]) -> Curve:
    """Amounts within a factor of two are one point."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for amount, seconds in points.items():
        groups.setdefault(round(amount).bit_length(), []).append((amount, min(seconds)))
    return tuple(
        sorted(
            (median(x for x, _ in each), median(x for x, _ in each) * median(y / x for x, y in each))
            for each in groups.values()
        )
    )


class _Exercise(nn.Module):
    """What layers of many models do, once each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8 * width, width)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, 8 * width, bias=False)
        channels = max(width // 4, 8)
        self.convolve, self.batch_norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers`: [sequences, tokens]."""
        x = self.table(numbers)
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, -1, min(64, width)).transpose(1, 2)
            for each in self.query(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        x = x + self.down(F.silu(self.gate(x)) * F.gelu(self.up(x)))
        channels = self.convolve.in_channels
        side = int((x.numel() // channels // batch) ** 0.5)
        image = x.reshape(batch, -1)[:, : channels * side * side].reshape(batch, channels, side, side)
        image = F.max_pool2d(F.relu(self.batch_norm(self.convolve(image))), 2)
        logits = self.head(F.dropout(torch.tanh(self.last_norm(x)), 0.1)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), numbers.flatten())
        return loss + image.float().mean() + torch.softmax(x, -1).float().sum()


def _made(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device(device):
        numbers = torch.randint(8 * width, (2, max(tokens // 2, 8)))
        return _Exercise(width).to(dtype), numbers


def _time_operations(
    device: torch.device,
    model: nn.Module,
    batch: torch.Tensor,
    curves: dict[str, dict[float, list[float]]],
    by_bytes: bool = False,
) -> None:
    """Add the seconds of each operation of a forward and a backward, by its FLOPs or by its bytes."""
    seen: dict[int, tuple[Operation, float]] = {}
    count = 0

    def around(run: Callable[[], Any], describe: Callable[[Any], Operation | None]) -> Any:
        nonlocal count
        _settle(device)
        began = _now()
        out = run()
        seconds, operation = _since(began, device), describe(out)
        if operation is not None:
            seen[count] = operation, min(seconds, seen[count][1] if count in seen else seconds)
            count += 1
        return out

    for _ in range(3):
        count = 0
        with EachOperation(around):
            model(batch).sum().backward()
        model.zero_grad()
    for operation, seconds in seen.values():
        key, amount = (
            f"{operation.name}/{operation.dtype}",
            float(operation.nbytes if by_bytes else operation.flops or operation.nbytes),
        )
        if amount:
            curves.setdefault(key, {}).setdefault(amount, []).append(seconds)


def _gap(device: torch.device, operations: Mapping[str, Curve]) -> float:
    """Seconds from one operation to the next, of Python and autograd."""
    model, numbers = _made(device, torch.float32, *WIDTHS[0])
    count, inside = 0, 0.0

    def around(run: Callable[[], Any], describe: Callable[[Any], Operation | None]) -> Any:
        nonlocal count, inside
        out = run()
        operation = describe(out)
        if operation is not None:
            count += 1
            inside += Machine(operations=operations).seconds_of(*operation[:4])
        return out

    with EachOperation(around):
        model(numbers).backward()
    whole = _best_seconds(lambda: model(numbers).backward(), device)
    return max((whole - inside) / max(count, 1), 1e-6)


def _update_rates(kind: str) -> tuple[float, float]:
    """Elements a second of AdamW on half of the cores and on all."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    rule, numel, cores = AdamRule(amsgrad=False, decoupled=True), UPDATED_NUMEL, update_threads()
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
        return numel / _best_seconds(lambda: rule.apply(piece))

    return rate(max(cores // 2, 1)), rate(cores)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float], device: torch.device) -> float:
    """Seconds, without those in which other processes had the cores of a CPU."""
    _settle(device)
    seconds, processor = (now - then for now, then in zip(_now(), began, strict=True))
    return min(seconds, processor) if device.type == CPU else seconds


def _settle(device: torch.device) -> None:
    if device.type != CPU:
        torch.accelerator.synchronize()


def _best_seconds(work: Callable[[], object], device: torch.device | None = None, times: int = 5) -> float:
    """The first time is not counted."""
    seconds = []
    for _ in range(times + 1):
        began = _now()
        work()
        seconds.append(_since(began, device or torch.device(CPU)))
    return min(seconds[1:])


def _collectives(device: torch.device) -> Mapping[str, Any]:
    """Of an all-gather of the default group; each rank calls it."""
    curve = []
    for nbytes in GATHERED_BYTES:
        mine = torch.ones(max(nbytes // dist.get_world_size(), 1), dtype=torch.uint8, device=device)
        whole = torch.empty(mine.numel() * dist.get_world_size(), dtype=torch.uint8, device=device)
        curve.append((nbytes, _best_seconds(lambda: dist.all_gather_into_tensor(whole, mine), device)))  # noqa: B023
    return {"collectives": curve}


# -- the drive ---------------------------------------------------------------------------------------------------------


def _disk(folder: Path, blocks: int) -> Mapping[str, Any]:
    """Of a file that is removed again."""
    handle, name = tempfile.mkstemp(prefix="outsize-probe-", dir=folder)
    os.close(handle)
    try:
        descriptor = _open_direct(name)
    finally:
        os.unlink(name)
    try:
        buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(THREADS)]
        for buffer in buffers:
            buffer.write(os.urandom(1 << 16) * (BLOCK_BYTES >> 16))

        def write(block: int, buffer: mmap.mmap) -> int:
            return os.pwrite(descriptor, buffer, block * BLOCK_BYTES)

        def read(block: int, buffer: mmap.mmap) -> int:
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
        page = mmap.mmap(-1, mmap.PAGESIZE)
        began = time.perf_counter()
        for count in range(SMALL_READS):
            os.preadv(descriptor, [page], count * 7919 % (blocks * BLOCK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE)
        small = (time.perf_counter() - began) / SMALL_READS
    finally:
        os.close(descriptor)
    nbytes = blocks * BLOCK_BYTES
    return dict(zip(DISK, (nbytes / readings, nbytes / written, nbytes / both, small), strict=True))


def _open_direct(name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:  # tmpfs and some overlays refuse it
        return os.open(name, os.O_RDWR)


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
