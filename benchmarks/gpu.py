"""Figures on one GPU: `python -m benchmarks.gpu [NAME...] --disk DIR`. Each trains in a process of its own.

A Llama in bf16 with fp32 masters and activation recomputation, trained by outsize with its states in different places:

device        everything on the device.
zero-offload  weights on the device, gradients and states in host memory.
host          everything in host memory, the device as large as `--device-memory`.
disk          everything on the drive.

and by others, with layers that torch checkpoints:

plain         torch alone, fused AdamW on bf16 weights without masters: it takes less memory and does less.
fsdp2         FSDP2 with CPU offload, fp32 masters, fused AdamW on the CPU.
deepspeed-2   DeepSpeed's ZeRO-Offload: stage 2, optimizer on the CPU. Left out where it is not installed.
deepspeed-3   the same with stage 3, parameters on the CPU too.

The table: tokens a second; seconds of a step (median), those that a plan says after `outsize probe`, and those of the
update on the CPU; how much of a profiled step kernels compute; calls of a step that torch counts as synchronizing (not
among them: waits for events and for other threads); peak memory of the device and of the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import PeakRss, machine, run_child
from benchmarks.models import checkpointed, engine_step, llama, tokens, train_step

LR, DECAY, CLIP = 1e-4, 0.1, 1.0
PLACES: dict[str, dict[str, str]] = {
    "device": {"params": "device", "grads": "device", "states": "device"},
    "zero-offload": {"params": "device", "grads": "host", "states": "host"},
    "host": {"params": "host", "grads": "host", "states": "host"},
    "disk": {"params": "disk", "grads": "disk", "states": "disk"},
}
GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
Step = Callable[[torch.Tensor], float]


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, **how)


def fields_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"device": "cuda", "activations": "recompute", **PLACES[name]}
    if name in ("host", "disk"):
        fields["device_memory"] = options.device_memory
    return {**fields, "host_memory": options.host_memory, "disk": options.disk}


def ours(name: str, model: nn.Module, options: argparse.Namespace) -> Step:
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, **fields_of(name, options))
    return lambda batch: train_step(model, optimizer, batch)[0]


def predicted(name: str, options: argparse.Namespace) -> float:
    """Seconds of a step by a plan on what `outsize probe` has measured here."""
    with torch.device("meta"):
        model = llama(options.layers, options.hidden, options.hidden * 4).to(torch.bfloat16).train()
        batch = torch.zeros(options.batch, options.length, dtype=torch.int64)
    example = {"input_ids": batch, "labels": batch}
    plan = outsize.plan(model, adamw(model), example=example, disk_space="1TB", **fields_of(name, options))
    return plan.step_seconds or 0.0


def plain(name: str, model: nn.Module, options: argparse.Namespace) -> Step:
    model = checkpointed(model.cuda())
    optimizer = adamw(model, fused=True)
    return lambda batch: train_step(model, optimizer, batch)[0]


def fsdp2(name: str, model: nn.Module, options: argparse.Namespace) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(GROUP)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    model = checkpointed(model.float())
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: Any = {"mesh": init_device_mesh("cuda", (1,)), "mp_policy": precision, "offload_policy": CPUOffloadPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = adamw(model, fused=True)
    return lambda batch: train_step(model, optimizer, batch)[0]


def deepspeed(name: str, model: nn.Module, options: argparse.Namespace) -> Step:
    os.environ.update(GROUP)
    import deepspeed

    cpu = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 2, "offload_optimizer": cpu, "overlap_comm": True, "contiguous_gradients": True}
    if name == "deepspeed-3":
        zero |= {"stage": 3, "offload_param": cpu}
    made = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": zero,
    }
    model = checkpointed(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made)
    return engine_step(engine)


MAKERS = {**dict.fromkeys(PLACES, ours), "plain": plain, "fsdp2": fsdp2}
MAKERS |= dict.fromkeys(("deepspeed-2", "deepspeed-3"), deepspeed)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a fresh model for a few steps and say how it went."""
    torch.manual_seed(0)
    with torch.device("cuda"):  # draws faster
        model = llama(options.layers, options.hidden, options.hidden * 4)
    model = model.to("cpu", torch.bfloat16).train()
    parameters = sum(param.numel() for param in model.parameters())
    torch.cuda.empty_cache()
    began = time.perf_counter()
    with PeakRss() as memory:
        step = MAKERS[name](name, model, options)
        building = time.perf_counter() - began
        seconds, losses = [], []

        def train(number: int) -> None:
            batch = tokens(number, batch=options.batch, length=options.length).cuda()
            torch.cuda.synchronize()
            began = time.perf_counter()
            losses.append(step(batch))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)

        train(0)
        torch.cuda.reset_peak_memory_stats()
        for number in range(1, options.steps):
            train(number)
            if name in PLACES:
                print(f"{name} {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    report = outsize.memory(model) if name in PLACES else None
    result: dict[str, Any] = {
        "parameters": parameters,
        "building": building,
        "seconds": statistics.median(seconds[2:]),
        "all": seconds[:],
        "device": torch.cuda.max_memory_allocated(),
        "rss": memory.peak,
        "losses": losses[:],
        "update": report.update_seconds / (len(losses) - 1) if report is not None else 0.0,  # the last is not over
        "waited": report.wait_seconds / len(losses) if report is not None else 0.0,
    }
    with Synchronizing() as places:
        train(options.steps)
    result["calls"] = dict(places)
    result["predicted"] = predicted(name, options) if name in PLACES and not options.quick else 0.0
    if options.quick:
        return {**result, "kernel_share": 0.0}
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        train(options.steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(options.traces or folder, f"{name}.json")
        profile.export_chrome_trace(str(trace))
        result |= lanes(json.loads(trace.read_text())["traceEvents"], seconds[-1])
        if options.traces:
            subprocess.run(["gzip", "-f", str(trace)], check=True)
    return result


class Synchronizing:
    """Counts calls that torch takes for synchronizing, by their place."""

    def __enter__(self) -> Counter[str]:
        torch.cuda.set_sync_debug_mode("warn")
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        self.places: Counter[str] = Counter()
        warnings.simplefilter("always")
        warnings.showwarning = self._count  # type: ignore[assignment]
        return self.places

    def _count(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            self.places["/".join(Path(filename).parts[-3:]) + f":{line}"] += 1

    def __exit__(self, *failure: Any) -> None:
        self.caught.__exit__(*failure)
        torch.cuda.set_sync_debug_mode("default")


def lanes(events: list[dict[str, Any]], step_seconds: float) -> dict[str, float]:
    """Seconds in which kernels run and copies move, each as a share of the step, and the rates of copies."""
    spans: dict[str, list[tuple[float, float]]] = {}
    moved: Counter[str] = Counter()
    for event in events:
        kind = event.get("cat")
        if kind == "gpu_memcpy":
            kind = "in" if "HtoD" in event["name"] else "out" if "DtoH" in event["name"] else "inside"
            moved[kind] += event.get("args", {}).get("bytes", 0)
        if kind in ("kernel", "in", "out", "inside"):
            spans.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    busy = {kind: union(each) / 1e6 for kind, each in spans.items()}
    result = {f"{kind}_share": seconds / step_seconds for kind, seconds in busy.items()}
    return result | {f"{kind}_rate": nbytes / busy[kind] for kind, nbytes in moved.items() if busy[kind]}


def union(spans: list[tuple[float, float]]) -> float:
    """The length of what spans cover together."""
    covered, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return covered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(MAKERS)}; all if none is named")
    parser.add_argument("--disk", default=".", help="a directory on the drive to use")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--device-memory", default="16GiB")
    parser.add_argument("--traces", help="keep the profiles of torch in this directory")
    parser.add_argument("--quick", action="store_true", help="no plan, no profile")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; torch sees none")
        return 2
    if options.child:
        print(json.dumps(measure(options.names[0], options)))
        return 0
    there = importlib.util.find_spec("deepspeed") is not None
    names = options.names or [name for name in MAKERS if there or "deepspeed" not in name]
    if not options.quick:
        outsize.probe(disk=options.disk)
    print(machine(), torch.cuda.get_device_name())
    print("| trained by | tokens/s | step | plan | update | kernels run | calls | device memory | process |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory(dir=options.disk) as disk:
            try:
                made: Any = run_child("benchmarks.gpu", name, "--child", *passed(options), "--disk", disk)
            except RuntimeError as error:
                print(f"| {name} | failed | {str(error)[-1500:]} |", flush=True)
                failed = True
                continue
        speed, stopped = options.batch * options.length / made["seconds"], sum(made["calls"].values())
        seconds = " | ".join(f"{made[kind]:.3f} s" for kind in ("seconds", "predicted", "update"))
        memory = " | ".join(f"{made[kind] / 1e9:.1f} GB" for kind in ("device", "rss"))
        print(f"| {name} | {speed:,.0f} | {seconds} | {made['kernel_share']:.0%} | {stopped} | {memory} |", flush=True)
        print(name, json.dumps(made), file=sys.stderr, flush=True)
    return 1 if failed else 0


def passed(options: argparse.Namespace) -> list[str]:
    """The options of a child."""
    names = ("layers", "hidden", "batch", "length", "steps", "host_memory", "device_memory", "traces")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    words = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--quick"] if options.quick else words


if __name__ == "__main__":
    raise SystemExit(main())
