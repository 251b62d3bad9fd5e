"""What the ranks of the benchmark run; see `benchmarks/ranks.py`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import outsize
from benchmarks.drives import limited
from benchmarks.models import llama, tokens, train_step

Step = Callable[[torch.Tensor], float]


def _loss_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return lambda batch: train_step(model, optimizer, batch)[0]


def ours(layers: int, stage: int, tier: str, disk: str) -> tuple[Step, nn.Module]:
    """At stage 3 within a budget that lets gathered layers go after use, as FSDP2 does."""
    budget = {2: "1152MiB", 4: "768MiB"}[dist.get_world_size()] if stage == 3 else "8GiB"
    torch.manual_seed(0)
    model = llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = dict.fromkeys(("params", "grads", "states"), tier)
    outsize.prepare(model, optimizer, host_memory=budget, disk=disk, stage=stage, activations="keep", **places)
    return _loss_step(model, optimizer), model


def ddp(layers: int) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(llama(layers))
    return _loss_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def fsdp2(layers: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = llama(layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loss_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def make(kind: str, layers: int, disk: str) -> Step:
    if kind == "ddp":
        return ddp(layers)
    if kind == "fsdp2":
        return fsdp2(layers)
    return ours(layers, int(kind.removeprefix("stage ")), "device", disk)[0]


def compare(kinds: tuple[str, str], layers: int, rounds: int, batch: int, disk: str) -> dict[str, float]:
    """Steps of two kinds in turns, in the same processes."""
    torch.set_num_threads(1)
    steps = {kind: make(kind, layers, disk) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        for kind, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[kind] = step(tokens(number * 8 + dist.get_rank(), batch=batch))
            dist.barrier()
            if number:
                seconds[kind].append(time.perf_counter() - began)
    one, other = (statistics.median(seconds[kind]) for kind in kinds)
    ratios = [mine / theirs for mine, theirs in zip(seconds[kinds[0]], seconds[kinds[1]], strict=True)]
    apart = abs(losses[kinds[0]] - losses[kinds[1]]) / losses[kinds[1]]
    return {"seconds": one, "theirs": other, "ratio": statistics.median(ratios), "losses apart": apart}


class Small(nn.Module):
    """A unit of six small parameters: what is measured is what the ranks do around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def small_units(steps: int, disk: str) -> dict[str, float]:
    """Median seconds of a step of 24 small units: with room for all, with units that go after use, by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    found = {}
    budgets = {"room": "64MiB", "no room": {2: "7MiB", 4: "5MiB"}[dist.get_world_size()], "fsdp2": ""}
    for kind, budget in budgets.items():
        torch.manual_seed(0)
        model = nn.Sequential(*[Small() for _ in range(24)])
        if budget:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            places = dict.fromkeys(("params", "grads", "states"), "host")
            fields: dict[str, Any] = {"units": [Small], "activations": "keep", **places}
            outsize.prepare(model, optimizer, host_memory=budget, disk=disk, stage=3, device="cpu", **fields)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for each in model:
                fully_shard(each, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        seconds = []
        for number in range(steps):
            rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(8 * number + dist.get_rank()))
            dist.barrier()
            began = time.perf_counter()
            model(rows).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        found[kind] = statistics.median(seconds[5:])
    return found


def peak(kind: str, layers: int, disk: str) -> float:
    """Bytes of memory that training takes at most, over what the process had before."""
    torch.set_num_threads(1)
    gc.collect()
    before = _status("VmRSS")
    step = make(kind, layers, disk)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: the whole model was there before
    for number in range(3):
        step(tokens(number + dist.get_rank()))
    return float(_status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {field}")


def on_disk(layers: int, directories: list[str], memory: str = "512MiB") -> dict[str, float]:
    """Everything on disk: this rank's seconds and bytes of a step, those of its forward, and those it waited."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    with outsize.init(host_memory=memory, disk=directories[rank]):
        model = llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, host_memory=memory, disk=directories[rank], **places)
    forwards: list[float] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(time.perf_counter()))
    model.register_forward_hook(lambda *_: forwards.append(time.perf_counter() - forwards.pop()))
    step = _loss_step(model, optimizer)
    seconds, read, written, waited = [], [], [], []
    for number in range(4):
        before, began = outsize.memory(model), time.perf_counter()
        step(tokens(number + rank))
        after = outsize.memory(model)
        seconds.append(time.perf_counter() - began)
        read.append(after.bytes_read - before.bytes_read)
        written.append(after.bytes_written - before.bytes_written)
        waited.append(after.wait_seconds - before.wait_seconds)
    medians = {"seconds": seconds, "read": read, "written": written, "forward": forwards, "waited": waited}
    return {name: statistics.median(values[1:]) for name, values in medians.items()}


def on_own_drive(layers: int, directories: list[str], bytes_a_second: float) -> dict[str, float]:
    """As `on_disk`, on a drive of this rank's own."""
    with limited(directories[0], bytes_a_second):
        return on_disk(layers, directories)


def begin_from_weights(how: str, folder: str, directory: str) -> dict[str, float]:
    """Begin training with the weights of a folder: bytes that this rank got from the drive and from files, and keeps.

    `how`: "from_pretrained", or "load": into a model that was built without its weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.barrier()
    before = _own_io()
    with outsize.init(host_memory="8GiB", disk=directory):
        if how == "load":
            model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
        else:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    outsize.prepare(model, optimizer, host_memory="8GiB", disk=directory, stage=3, params="host")
    if how == "load":
        outsize.load(folder, model)
    after = _own_io()
    kept = outsize.memory(model).now["host/params"]
    return {name: after[name] - before[name] for name in after} | {"kept": kept}


def _own_io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
