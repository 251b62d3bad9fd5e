"""Figures on one GPU, in one command: `python -m benchmarks.gpu --disk DIR`.

A Llama in bf16 with activation recomputation, trained (a) with everything on the device, (b) gradients and states in
host memory, (c) parameters too, (d) everything on disk. Prints tokens a second, peak device memory, the time that the
computation waited for transfers, and the ratio to (a).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from typing import Any

import torch

import outsize
from benchmarks.common import machine
from benchmarks.models import llama, train_step

PLACES: dict[str, dict[str, str]] = {
    "device": {"params": "device", "grads": "device", "states": "device"},
    "zero-offload": {"params": "device", "grads": "host", "states": "host"},
    "host": {"params": "host", "grads": "host", "states": "host"},
    "disk": {"params": "disk", "grads": "disk", "states": "disk"},
}


def measure(place: str, options: argparse.Namespace, disk: str) -> dict[str, float]:
    """Train a fresh model for a few steps and say how it went."""
    device = torch.device("cuda")
    model = llama(options.layers, options.hidden, options.hidden * 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory: dict[str, Any] = {"host_memory": options.host_memory}
    if place in ("host", "disk"):
        memory["device_memory"] = options.device_memory
    outsize.prepare(model, optimizer, device=device, disk=disk, activations="recompute", **memory, **PLACES[place])
    batch = torch.randint(0, 32_000, (options.batch, options.length), device=device)
    torch.cuda.reset_peak_memory_stats()
    seconds, waited = [], []
    for _ in range(options.steps):
        before = outsize.memory(model).wait_seconds
        began = time.perf_counter()
        train_step(model, optimizer, batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        waited.append(outsize.memory(model).wait_seconds - before)
    result = {
        "tokens_per_second": options.batch * options.length / statistics.median(seconds[2:]),
        "peak_device_gb": torch.cuda.max_memory_allocated() / 1e9,
        "waited_seconds": statistics.median(waited[2:]),
        "step_seconds": statistics.median(seconds[2:]),
    }
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", default=".", help="a directory on the drive to use")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--device-memory", default="4GiB")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; torch sees none")
        return 2
    print(machine(), torch.cuda.get_device_name())
    print("| states on | tokens/s | of device | peak device memory | step | of it waiting for transfers |")
    print("|---|---|---|---|---|---|")
    first = 0.0
    for place in PLACES:
        with tempfile.TemporaryDirectory(dir=options.disk) as disk:
            result = measure(place, options, disk)
        first = first or result["tokens_per_second"]
        speed, share = result["tokens_per_second"], result["tokens_per_second"] / first
        seconds = f"{result['step_seconds']:.2f} s | {result['waited_seconds']:.2f} s"
        print(f"| {place} | {speed:,.0f} | {share:.0%} | {result['peak_device_gb']:.1f} GB | {seconds} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
