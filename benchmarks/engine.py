"""The engine's figures: parity, tiers, memory, step time, overhead, disk. `python -m benchmarks.engine [row ...]`.

Rows: parity tiers masters memory scale overhead init steady disk. Ratios are taken within one run.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import PeakRss, Row, plain_disk_bandwidth, rss_bytes, run_child, run_rows
from benchmarks.models import checkpointed, llama, timed_steps, tokens, train_step

DISK_PLACES = {"params": "disk", "grads": "disk", "states": "disk"}
GB = 1e9


def small_llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    return llama(3, hidden=128, mlp=256, vocabulary=512).to(dtype)


def curve(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[tuple[float, float]]:
    return [train_step(model, optimizer, tokens(step, 512, 2, 64)) for step in range(steps)]


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, **options)


def weights(model: nn.Module) -> list[torch.Tensor]:
    with outsize.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def parity(disk: str) -> list[Row]:
    """fp32, one rank, everything on disk, against plain torch."""
    plain = small_llama()
    expected = curve(plain, adamw(plain), 50)
    model = small_llama()
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, disk=disk, host_memory="8MiB", **DISK_PLACES)
    found = curve(model, optimizer, 50)
    loss = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(found, expected, strict=True))
    norm = max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(found, expected, strict=True))
    weight = max((a - b).abs().max().item() for a, b in zip(weights(model), plain.parameters(), strict=True))
    return [
        Row("losses of 50 steps against plain torch, fp32", f"{loss:.1e} relative", "<= 1e-6", loss <= 1e-6),
        Row("gradient norms", f"{norm:.1e} relative", "<= 1e-6", norm <= 1e-6),
        Row("weights after 50 steps", f"{weight:.1e}", "<= 1e-5", weight <= 1e-5),
    ]


def tiers(disk: str) -> list[Row]:
    """Every mixture of tiers gives the same bits."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for params, grads, states in itertools.product(("device", "host", "disk"), repeat=3):
            model = small_llama(dtype)
            optimizer = adamw(model)
            outsize.prepare(model, optimizer, disk=disk, host_memory="64MiB", params=params, grads=grads, states=states)
            results.append((curve(model, optimizer, 6), weights(model)))
            del model, optimizer
            gc.collect()
        first = results[0]
        same = sum(
            losses == first[0] and all(torch.equal(a, b) for a, b in zip(found, first[1], strict=True))
            for losses, found in results
        )
        rows.append(
            Row(f"tier mixtures with bit-identical losses and weights, {dtype}", f"{same} of 27", "27", same == 27)
        )
    return rows


def masters(disk: str) -> list[Row]:
    """bf16 compute with exact state against a plain bf16 model with fp32 masters kept by hand."""
    plain = small_llama(torch.bfloat16)
    held = [param.detach().float().clone() for param in plain.parameters()]
    by_hand = torch.optim.AdamW([nn.Parameter(master) for master in held], lr=3e-4, weight_decay=0.1, foreach=False)
    model = small_llama(torch.bfloat16)
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, disk=disk, host_memory="8MiB", **DISK_PLACES)
    kernel = small_llama(torch.float32)  # the same kernel on fp32 masters: what "by hand" means bit for bit
    with torch.no_grad():
        for param, master in zip(kernel.parameters(), held, strict=True):
            param.copy_(master)
    kernel_optimizer = adamw(kernel)
    outsize.prepare(kernel, kernel_optimizer, host_memory="1GiB")
    del by_hand
    for step in range(50):
        batch = tokens(step, 512, 2, 64)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(input_ids=batch, labels=batch).loss.backward()
        for param, master in zip(plain.parameters(), kernel.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        kernel_optimizer.step()
        kernel_optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(plain.parameters(), kernel.parameters(), strict=True):
                param.copy_(ties_up(master.detach().clone()))
    same = sum(torch.equal(a, b.detach()) for a, b in zip(weights(model), plain.parameters(), strict=True))
    count = len(list(plain.parameters()))
    what = "bf16 weights equal to hand-kept fp32 masters after 50 steps"
    return [Row(what, f"{same} of {count} tensors", f"{count}", same == count)]


def ties_up(master: torch.Tensor) -> torch.Tensor:
    """fp32 to the nearest bf16, ties up in bits."""
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def memory_child(disk: str, layers: str, steps: str, kind: str, threads: str) -> dict[str, Any]:
    """Peak RSS over imports and the median step of one Llama, all on disk or plain."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (an import, not the model's memory)

    torch.set_num_threads(int(threads))
    plain, base = kind == "plain", rss_bytes()
    with contextlib.nullcontext() if plain else outsize.init(host_memory="256MiB", disk=disk):
        model = llama(int(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)
    parameters = sum(param.numel() for param in model.parameters())
    if plain:
        model = checkpointed(model)
    else:
        outsize.prepare(model, optimizer, disk=disk, host_memory="256MiB", activations="recompute", **DISK_PLACES)
    gc.collect()
    trim()
    with PeakRss() as memory:
        result = timed_steps(model, optimizer, int(steps))
    result |= {"parameters": parameters, "rss": memory.peak - base}
    if not plain:
        report = outsize.memory(model)
        result |= {"moved": report.bytes_read + report.bytes_written, "waited": report.wait_seconds}
        result |= {"read": report.bytes_read, "written": report.bytes_written, "update": report.update_seconds}
        result["all_steps"] = steps + 2
    return result


def trim() -> None:
    """Give what building the model freed back to the system, so that the peak is training's own."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


def memory(disk: str) -> list[Row]:
    """The 162 M Llama, 1 x 128 tokens, fp32, all on disk, recompute, clipping."""
    plain, ours = interleaved(disk, 12)
    bandwidth = plain_disk_bandwidth(Path(disk) / "probe", 2 << 30, "mixed")
    os.remove(Path(disk) / "probe")
    floor = max(plain["seconds"], ours["moved"] / ours["all_steps"] / bandwidth)
    ratio = ours["seconds"] / floor
    detail = (
        f"{ours['seconds']:.2f} s; plain {plain['seconds']:.2f} s; {ours['moved'] / ours['all_steps'] / GB:.2f} GB "
        f"at {bandwidth / GB:.2f} GB/s; waited {ours['waited'] / ours['all_steps']:.2f} s a step"
    )
    rss = ours["rss"] / GB
    return [
        Row("162 M Llama, all on disk: peak RSS over imports", f"{rss:.2f} GB", "<= 0.60 GB", rss <= 0.60),
        Row("(plain torch)", f"{plain['rss'] / GB:.2f} GB", "", True),
        Row(f"its step time over the floor ({detail})", f"{ratio:.2f} x", "<= 1.25 x", ratio <= 1.25),
    ]


def interleaved(disk: str, layers: int, rounds: int = 2, steps: int = 5) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain and ours in turns, each in a process of its own; the run with the median step of each."""
    threads = str(torch.get_num_threads())
    plain, ours = [], []
    for _ in range(rounds):
        for kind, results in (("plain", plain), ("ours", ours)):
            arguments = ("--child", "memory", disk, str(layers), str(steps), kind, threads)
            results.append(run_child("benchmarks.engine", *arguments))
    return tuple(sorted(each, key=lambda r: r["seconds"])[len(each) // 2] for each in (plain, ours))  # type: ignore[return-value]


def scale(disk: str) -> list[Row]:
    """RSS and step time from 58 M to 1.0 B parameters with the same layer sizes."""
    threads = str(torch.get_num_threads())
    results = []
    for layers in (1, 12, 45, 101):
        arguments = ("--child", "memory", disk, str(layers), "3", "ours", threads)
        results.append(run_child("benchmarks.engine", *arguments))
    first, last = results[0], results[-1]
    rows = []
    for each in results:
        rows.append(
            Row(
                f"{each['parameters'] / 1e6:.0f} M: peak RSS over imports, seconds a step",
                f"{each['rss'] / GB:.2f} GB, {each['seconds']:.2f} s, "
                f"{each['seconds'] / each['parameters'] * 1e9:.1f} s per 1e9 parameters",
                "",
                True,
            )
        )
    growth = last["rss"] - first["rss"]
    allowed = 0.1 * GB + (last["parameters"] - first["parameters"]) * 0.02
    rows.append(
        Row(
            "RSS that 943 M more parameters add",
            f"{growth / GB:.2f} GB",
            f"<= {allowed / GB:.2f} GB",
            growth <= allowed,
        )
    )
    slope = (last["seconds"] / last["parameters"]) / (results[1]["seconds"] / results[1]["parameters"])
    rows.append(Row("seconds per parameter, 1.0 B against 162 M", f"{slope:.2f} x", "<= 1.15 x", slope <= 1.15))
    return rows


class Stack(nn.Module):
    """Eight equal blocks, each a unit; `rows` of input set how long one computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def overhead(_: str) -> list[Row]:
    """Everything in memory: the engine against plain torch, in turns."""
    rows = []
    for label, width, inputs, target in (("1 ms", 128, 256, 1.5), ("10 ms", 384, 768, 1.15)):
        ratio, unit_ms = in_turns(width, inputs)
        what = f"all in memory, about {label} of compute a unit (measured {unit_ms:.1f} ms)"
        rows.append(Row(what, f"{ratio:.2f} x plain", f"<= {target} x", ratio <= target))
    return rows


def in_turns(width: int, inputs: int, rounds: int = 30) -> tuple[float, float]:
    """(median ratio of a step to plain torch's, milliseconds of plain forward and backward a unit)."""
    torch.manual_seed(0)
    plain, ours = Stack(width), Stack(width)
    plain_optimizer, our_optimizer = adamw(plain), adamw(ours)
    outsize.prepare(ours, our_optimizer, host_memory="1GiB")
    x = torch.randn(inputs, width)
    ratios, computes = [], []
    for turn in range(rounds):
        seconds = []
        for model, optimizer in ((plain, plain_optimizer), (ours, our_optimizer)):
            began = time.perf_counter()
            model(x).square().mean().backward()
            if model is plain:
                computes.append((time.perf_counter() - began) / 8 * 1e3)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        if turn >= 5:
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios), statistics.median(computes)


def init_child(disk: str, kind: str) -> dict[str, Any]:
    """Build 2 GB of parameters plainly or under a 256 MiB budget."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    base = rss_bytes()
    began = time.perf_counter()
    with PeakRss() as memory:
        if kind == "plain":
            model = llama(48)
        else:
            with outsize.init(host_memory="256MiB", disk=disk):
                model = llama(48)
        seconds = time.perf_counter() - began
    parameters = sum(param.numel() for param in model.parameters())
    return {"seconds": seconds, "rss": memory.peak - base, "bytes": 4 * parameters}


def init(disk: str) -> list[Row]:
    plain = run_child("benchmarks.engine", "--child", "init", disk, "plain")
    ours = run_child("benchmarks.engine", "--child", "init", disk, "ours")
    bandwidth = plain_disk_bandwidth(Path(disk) / "probe", 1 << 30, "write")
    os.remove(Path(disk) / "probe")
    rss = ours["rss"] / GB
    floor = max(2 * plain["seconds"], ours["bytes"] / bandwidth)
    seconds = ours["seconds"]
    what = f"init of {ours['bytes'] / GB:.1f} GB of parameters under 256 MiB"
    time_detail = f"{seconds:.1f} s (plain {plain['seconds']:.1f} s)"
    return [
        Row(f"{what}: peak RSS over imports", f"{rss:.2f} GB", "<= 0.45 GB", rss <= 0.45),
        Row(f"{what}: time", time_detail, f"<= {floor:.1f} s", seconds <= floor),
    ]


def steady(disk: str) -> list[Row]:
    """1,000 steps, all on disk: nothing grows."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 8))
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, disk=disk, host_memory="4MiB", activations="recompute", **DISK_PLACES)

    def usage() -> dict[str, int]:
        gc.collect()
        return {
            "RSS": rss_bytes(),
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "hooks": sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()),
            "files": sum(len(files) for _, _, files in os.walk(disk)),
        }

    before: dict[str, int] = {}
    for step in range(1100):
        if step == 100:
            before = usage()
        model(torch.randn(8, 64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = usage()
    growth = {name: after[name] - before[name] for name in after}
    good = growth.pop("RSS") < 2 << 20 and not any(growth.values())
    text = ", ".join(f"{name} {before[name]} -> {after[name]}" for name in after)
    return [Row("1,000 steps, all on disk", text, "no growth", good)]


def disk(directory: str) -> list[Row]:
    """The disk engine alone against plain O_DIRECT threads, in turns."""
    from outsize.move.disk import StripedFile, open_engine
    from outsize.move.memory import HostBuffer

    nbytes, piece = 1 << 30, 8 << 20
    engine = open_engine()
    file = StripedFile(engine, [Path(directory)], "engine", nbytes)
    buffers = [HostBuffer(piece) for _ in range(16)]

    def ours(mode: str) -> float:
        began = time.perf_counter()
        going: list[Any] = []
        for index in range(nbytes // piece):
            if len(going) >= len(buffers):
                going.pop(0).wait()
            memory = buffers[index % len(buffers)].bytes
            writes = mode == "write" or (mode == "mixed" and index % 2)
            going.append((file.write if writes else file.read)(index * piece, memory))
        for transfer in going:
            transfer.wait()
        return nbytes / (time.perf_counter() - began)

    rows = []
    for mode in ("write", "read", "mixed"):
        ratios = []
        for _ in range(5):
            plain = plain_disk_bandwidth(Path(directory) / "probe", nbytes, mode, repeats=1)
            ratios.append(ours(mode) / plain)
        ratio = statistics.median(ratios[1:])
        rows.append(
            Row(f"disk engine against plain O_DIRECT threads: {mode}", f"{ratio:.0%}", ">= 95 %", ratio >= 0.95)
        )
    engine.close()
    file.close()
    for name in ("probe", "engine"):
        os.remove(Path(directory) / name)
    return rows


ROWS: dict[str, Callable[[str], list[Row]]] = {
    "parity": parity,
    "tiers": tiers,
    "masters": masters,
    "overhead": overhead,
    "steady": steady,
    "disk": disk,
    "memory": memory,
    "init": init,
    "scale": scale,
}
CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {"memory": memory_child, "init": init_child}


def main() -> int:
    return run_rows(__doc__, ROWS, CHILDREN)


if __name__ == "__main__":
    raise SystemExit(main())
