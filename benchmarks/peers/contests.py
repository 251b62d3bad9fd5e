"""What is compared: a contest is a training, and the jobs that do it. Results are files, one for each job and round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import FOLDER, OURS

RESULTS = FOLDER / "results"

QUICK = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"
"""Where a CPU has no instructions for bf16, torch takes ten times as long for it as for fp32."""


FEW: Mapping[str, int] = {} if QUICK == "bfloat16" else {"tokens": 16}
"""For what is in bf16 all the same."""


@dataclass(frozen=True)
class Job:
    """`module` runs it, in the environment of a peer; `says` is what a table says of its precision."""

    name: str
    module: str
    variant: str
    environment: str
    says: str = ""


MASTERS = "bf16 with fp32 masters"
ALL_JOBS = (
    Job("outsize, disk", "outsize_job", "disk", OURS, MASTERS),
    Job("outsize, 640 MiB", "outsize_job", "part", OURS, MASTERS),
    Job("outsize, host", "outsize_job", "host", OURS, MASTERS),
    Job("outsize, room for all", "outsize_job", "memory", OURS, MASTERS),
    Job("plain torch", "plain_job", "masters", "torch", MASTERS + ", kept by hand"),
    Job("plain torch, bf16 masters", "plain_job", "plain", "torch", "bf16 alone"),
    Job("FSDP2, CPU offload", "fsdp2_job", "offload", "torch", "fp32, cast to bf16 for each layer"),
    Job("Accelerate, FSDP2, CPU offload", "accelerate_fsdp_job", "offload", "accelerate", "as FSDP2"),
    Job("DeepSpeed, NVMe", "deepspeed_job", "disk", "deepspeed", MASTERS),
    Job("DeepSpeed, CPU", "deepspeed_job", "host", "deepspeed", MASTERS),
    Job("torchao, CPUOffloadOptimizer", "torchao_job", "offload", "torchao", "bf16 alone"),
    Job("all kept", "activations_job", "keep", "torch"),
    Job("transformers, recompute", "activations_job", "recompute", "torch"),
    Job("torch, save_on_cpu", "activations_job", "save_on_cpu", "torch"),
    Job("TRL, OffloadActivations", "activations_job", "trl", "trl"),
    Job("outsize, activations on host", "activations_job", "host", OURS),
    Job("outsize, activations on disk", "activations_job", "disk", OURS),
)
JOBS = {job.name: job for job in ALL_JOBS}
IN_MEMORY = (
    "outsize, host",
    "plain torch",
    "DeepSpeed, CPU",
    "FSDP2, CPU offload",
    "Accelerate, FSDP2, CPU offload",
    "torchao, CPUOffloadOptimizer",
)

SHAPES: Mapping[str, Mapping[str, int]] = {
    "0.16": {"layers": 12, "hidden": 768, "mlp": 3072},
    "0.5": {"layers": 16, "hidden": 1280, "mlp": 5120},
    "1": {"layers": 13, "hidden": 2048, "mlp": 8192},
    "2": {"layers": 18, "hidden": 2560, "mlp": 10240},
    "3": {"layers": 18, "hidden": 3200, "mlp": 12800},
    "4": {"layers": 24, "hidden": 3200, "mlp": 12800},
    "5": {"layers": 23, "hidden": 4096, "mlp": 11008},
    "7": {"layers": 34, "hidden": 4096, "mlp": 11008},
    "8": {"layers": 38, "hidden": 4096, "mlp": 11008},
}
"""Of Llamas with so many billions of parameters."""

TINY = {"layers": 3, "hidden": 128, "mlp": 256, "vocabulary": 512, "sequences": 2, "tokens": 64}


@dataclass(frozen=True)
class Contest:
    title: str
    jobs: Sequence[str]
    task: Mapping[str, Any]
    rounds: int = 1
    limit_seconds: int = 450
    """Of a job, which otherwise counts as one that did not end."""


def _alone(size: str, dtype: str, state_format: str = "exact") -> Contest:
    """The budget leaves room in 3 GiB for the interpreter, torch, and what a layer computes."""
    fields = {"host_memory": "1GiB", "state_format": state_format}
    task = {**SHAPES[size], "batches": 1, "warmup": 1, "steps": 2, "predict": True, "fields": fields, "dtype": dtype}
    few = FEW if dtype == "bfloat16" else {}
    return Contest(f"{size} B", ["outsize, disk"], {**task, **few}, limit_seconds=3600)


CONTESTS: Mapping[str, Contest] = {
    "disk": Contest(
        "162 M, everything on disk",
        ["outsize, disk", "outsize, 640 MiB", "DeepSpeed, NVMe"],
        {"steps": 4, "dtype": QUICK},
        2,
    ),
    "host": Contest("162 M, everything in host memory", IN_MEMORY, {"steps": 4, "dtype": QUICK}, 2),
    "fp32": Contest(
        "162 M in fp32: no offload is needed", ["outsize, room for all", *IN_MEMORY[1:-1]], {"dtype": "float32"}, 2
    ),
    "disk-1": Contest(
        "1.0 B, everything on disk",
        ["outsize, disk", "DeepSpeed, NVMe"],
        {**SHAPES["1"], "warmup": 1, "steps": 2, "dtype": QUICK},
        limit_seconds=900,
    ),
    "host-0.5": Contest(
        "0.5 B, everything in host memory", IN_MEMORY[:-1], {**SHAPES["0.5"], "warmup": 1, "steps": 2, "dtype": QUICK}
    ),
    "curve": Contest(
        "200 steps of a tiny model, fp32",
        ["plain torch", "outsize, disk", *IN_MEMORY[2:5], "DeepSpeed, NVMe"],
        {**TINY, "dtype": "float32", "steps": 200, "warmup": 0, "batches": 8},
    ),
    "curve-bf16": Contest(
        "200 steps of a tiny model, bf16",
        ["plain torch", "plain torch, bf16 masters", "outsize, disk", *IN_MEMORY[2:5], "DeepSpeed, NVMe"],
        {**TINY, "steps": 200, "warmup": 0, "batches": 8},
    ),
    "activations": Contest(
        "Llama of 8 layers, 4,096 tokens, fp32",
        [job.name for job in ALL_JOBS if job.module == "activations_job"],
        {"layers": 8, "hidden": 512, "mlp": 2048, "vocabulary": 4000, "tokens": 4096, "dtype": "float32"}
        | {"warmup": 1, "steps": 2},
    ),
    **{f"size-{size}": _alone(size, "bfloat16") for size in SHAPES},
    **{f"fp32-{size}": _alone(size, "float32") for size in SHAPES},
    **{f"compact-{size}": _alone(size, QUICK, "compact") for size in SHAPES},
}


def file_of(contest: str, job: str, number: int, results: Path = RESULTS) -> Path:
    return results / contest / f"{job.replace(', ', '-').replace(' ', '-')}.{number}.json"


def results_of(contest: str, results: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """By job: what its rounds gave. Empty for a contest that was not run."""
    rounds = range(CONTESTS[contest].rounds)
    found: dict[str, list[dict[str, Any]]] = {}
    for job in CONTESTS[contest].jobs:
        files = [file_of(contest, job, number, results) for number in rounds]
        if given := [json.loads(file.read_text()) for file in files if file.exists()]:
            found[job] = given
    return found
