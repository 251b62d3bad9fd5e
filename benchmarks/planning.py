"""The plan's step against a real one: seconds and peak memory, of eight models on four placements.

    python -m benchmarks.planning --disk DIR [row ...]

Each row is a model, in fp32 or bf16, without clipping. It is trained once on each placement: all in memory, host, disk,
a mixture, in a process of its own, as what ran before has its marks on the allocator. The second half of the steps
counts. `outsize.probe` measures before each model, as a drive that others use too changes all the time.
All rows take 5 to 9 minutes on 2 cores.
Figures are predicted / measured. Peak of the steps: resident memory beyond what the process had before the model was
made.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import PeakRss, Row, rss_bytes, run_child, run_rows
from benchmarks.models import llama

PLACEMENTS = "memory", "host", "disk", "mixed"
STEPS = 6
PROBED_MEGABYTES = 256  # about as many as a step moves
MOST_ERROR, MOST_MEDIAN, MOST_ABOVE = 0.25, 0.10, 0.10


def _mlp(width: int, layers: int) -> nn.Module:
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def _encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, activation="gelu", dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _convolutions(channels: int, blocks: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    first, last = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 100)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(first, nn.Sequential(*(block() for _ in range(blocks))), pool, last)


def _batch(length: int, vocabulary: int, sequences: int = 1) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (sequences, length))
    return {"input_ids": tokens, "labels": tokens}


def _small_llama(layers: int, width: int, length: int, vocabulary: int = 8000) -> tuple[nn.Module, Any]:
    return llama(layers, width, 4 * width, vocabulary), _batch(length, vocabulary)


Made = tuple[nn.Module, Any]
MODELS: dict[str, tuple[Callable[[], Made], torch.dtype]] = {
    "mlp": (lambda: (_mlp(2048, 10), (torch.randn(256, 2048),)), torch.float32),
    "wide-mlp": (lambda: (_mlp(4096, 3), (torch.randn(64, 4096),)), torch.float32),
    "encoder": (lambda: (_encoder(1024, 4), (torch.randn(2, 128, 1024),)), torch.float32),
    "convolutions": (lambda: (_convolutions(512, 8), (torch.randn(1, 3, 32, 32),)), torch.float32),
    "llama": (partial(_small_llama, 3, 1024, 128, 8000), torch.float32),
    "deep-llama": (partial(_small_llama, 12, 512, 128, 8000), torch.float32),
    "llama-bf16": (partial(_small_llama, 3, 1024, 64, 8000), torch.bfloat16),
    "mlp-bf16": (lambda: (_mlp(2048, 8), (torch.randn(64, 2048, dtype=torch.bfloat16),)), torch.bfloat16),
}


def fields(model: nn.Module, placement: str, directory: str, dtype: torch.dtype) -> dict[str, Any]:
    """Of `prepare` and `plan`. The mixture has room for a third of the state in memory."""
    wide = {"host_memory": "6GiB", "device": "cpu", "disk": directory, "compute_dtype": dtype}
    if placement == "mixed":
        state = sum(param.numel() for param in model.parameters()) * (16 if dtype is torch.float32 else 14)
        largest = max(
            sum(p.numel() for p in child.parameters()) for child in model.modules() if not list(child.children())
        )
        return {**wide, "host_memory": max(state // 3, 24 * largest) + (64 << 20)}
    if placement == "memory":
        return wide
    return {**wide, **dict.fromkeys(("params", "grads", "states"), placement)}


def _loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out.loss if hasattr(out, "loss") else out.float().sum()
    return loss


def _train(model: nn.Module, example: Any, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Of the second half of the steps: median and least seconds, processor seconds by core. The bytes that outsize says
    it has used."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = outsize.prepare(model, optimizer, **options)
    seconds, used = [], []
    gc.collect()
    with PeakRss() as memory:
        for _ in range(steps):
            began, before = time.perf_counter(), time.process_time()
            out = model(**example) if isinstance(example, dict) else model(*example)
            _loss(out).backward()
            del out
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            used.append(time.process_time() - before)
    late = seconds[steps // 2 :]
    return {
        "measured": statistics.median(late),
        "least": min(late),
        "processor": statistics.median(used[steps // 2 :]) / torch.get_num_threads(),
        "peak": memory.peak,
        "ledger": dict(outsize.memory(model).peak),
    }


def _trim() -> int:
    """Resident bytes when all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes()


def measure(name: str, placement: str, directory: str) -> dict[str, Any]:
    """One training in this process; then the plan, which leaves memory there."""
    make, dtype = MODELS[name]
    for steps in (2, STEPS):  # the first warms up
        with tempfile.TemporaryDirectory(dir=directory) as own:
            torch.manual_seed(0)
            base = _trim()
            model, example = make()
            trained = _train(model, example, fields(model, placement, own, dtype), steps)
            del model
    with tempfile.TemporaryDirectory(dir=directory) as own:
        model, example = make()
        options = fields(model, placement, own, dtype)
        plan = outsize.plan(model, torch.optim.AdamW(model.parameters()), example=example, **options)
        assert plan.prediction is not None
        return {
            **trained,
            "peak": trained["peak"] - base,
            "predicted": plan.step_seconds,
            "peak_predicted": sum(plan.prediction.peak_bytes[tier] for tier in ("device", "host")),
            "busy": dict(plan.prediction.busy),
            "waits": plan.prediction.wait_seconds,
        }


def _rows(name: str, directory: str) -> list[Row]:
    outsize.probe(disk=directory, device="cpu", again=True, megabytes=PROBED_MEGABYTES)
    rows = []
    for placement in PLACEMENTS:
        found: dict[str, Any] = run_child("benchmarks.planning", "--child", f"{name} {placement}", directory)
        ratio, above = found["predicted"] / found["measured"], found["peak_predicted"] / found["peak"] - 1
        ERRORS.append(abs(ratio - 1))
        PEAKS.append(above)
        if placement == "memory":
            PROCESSOR.append(found["predicted"] / found["processor"])
        print(json.dumps({"model": name, "placement": placement, **found}), file=sys.stderr)
        seconds = f"{found['predicted']:.3f} / {found['measured']:.3f} ({ratio - 1:+.0%})"
        peaks = f"{found['peak_predicted'] / 2**20:.0f} / {found['peak'] / 2**20:.0f} ({above:+.0%})"
        what = f"{name}, {placement}"
        rows += [
            Row(f"{what}: seconds of a step", seconds, f"<= {MOST_ERROR:.0%}", ERRORS[-1] <= MOST_ERROR),
            Row(f"{what}: peak MiB", peaks, f"0 to {MOST_ABOVE:.0%} above", 0 <= above <= MOST_ABOVE),
        ]
    return rows


ERRORS: list[float] = []
PEAKS: list[float] = []
PROCESSOR: list[float] = []
"""Predicted seconds / processor seconds by core, all in memory: near 1 also where others use the machine."""


def _summary(_: str) -> list[Row]:
    if not ERRORS:
        return []
    found, worst, ratio = statistics.median(ERRORS), max(ERRORS), statistics.median(PROCESSOR)
    low, high = sum(each < 0 for each in PEAKS), sum(each > MOST_ABOVE for each in PEAKS)
    within = len(PEAKS) - low - high
    print(f"all in memory, predicted seconds / processor seconds by core: {ratio:.2f} (median of {len(PROCESSOR)})")
    print(
        f"summary of {len(ERRORS)} trainings: seconds, median error {found:.1%}, worst {worst:.0%}; "
        f"peaks: {within} within, {low} below, {high} above"
    )
    return [
        Row("median error of seconds", f"{found:.1%}", f"<= {MOST_MEDIAN:.0%}", found <= MOST_MEDIAN),
        Row("worst error of seconds", f"{worst:.0%}", f"<= {MOST_ERROR:.0%}", worst <= MOST_ERROR),
        Row("peaks 0 to 10 % above", f"{within} of {len(PEAKS)}", "all", within == len(PEAKS)),
    ]


def main() -> int:
    rows = {name: partial(_rows, name) for name in MODELS} | {"summary": _summary}
    children = {f"{name} {placement}": partial(measure, name, placement) for name in MODELS for placement in PLACEMENTS}
    return run_rows(__doc__, rows, children)


if __name__ == "__main__":
    sys.exit(main())
