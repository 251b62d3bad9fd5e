"""The optimizer's figures. `python -m benchmarks.optimizer [row ...] --disk DIR`.

Rows: the kernels in memory: step bandwidth scaling error paper; in the engine: disk-update host-update compact. Ratios
are taken within one run, from medians. DeepSpeed's CPUAdam is measured beside ours where `deepspeed` can be imported.
Ours works on the memory that the host tier uses; torch and DeepSpeed on what torch allocates.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import optimizer_engine
from benchmarks.common import Row, machine, print_rows
from outsize import _native
from outsize.move.memory import HostBuffer

MI = 1 << 20
GB = 1e9
REPEATS = 5
TENSOR_NUMEL = 16 * MI
"""Elements of one parameter of the optimizers that take lists, about one layer's largest matrix."""

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
NATIVE: dict[str, Any] = {**HYPER, "decoupled": True, "maximize": False, "amsgrad": False}
TORCH: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16}


def all_threads() -> int:
    return len(os.sched_getaffinity(0))


def free_bytes() -> int:
    """Memory that new arrays may take."""
    with open("/proc/meminfo") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(int(available.split()[1]) * 1024 * 0.92)


def host_tensor(numel: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    """A tensor in memory as the host tier reserves it."""
    return HostBuffer(numel * dtype.itemsize).bytes.view(dtype).fill_(value)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(contenders: Mapping[str, Callable[[], Callable[[], object]]], nbytes: int) -> dict[str, float]:
    """Median seconds of each contender, in turns if all of them (`nbytes` together) fit the memory, else in a row."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    together = nbytes <= free_bytes()
    groups = [list(contenders)] if together else [[name] for name in contenders]
    for group in groups:
        works = {name: contenders[name]() for name in group}
        for turn in range(REPEATS + 1):
            for name, work in works.items():
                work()  # torch's threads wait actively after its last operation, and take a core from who comes next
                seconds = seconds_of(work)
                if turn:  # the first touches memory and starts threads
                    times[name].append(seconds)
        works.clear()
        gc.collect()
    return {name: statistics.median(each) for name, each in times.items()}


# ------------------------------------------------------------------------------------------------- the contenders


class Ours:
    """A bf16 gradient's norm, then one pass: scale, clip, AdamW, bf16 weight and remainder (28 bytes a parameter)."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.bfloat16, norm: bool = True, threads: int = 0) -> None:
        self.threads, self.norm, self.step = threads or all_threads(), norm, 0
        self.numel = numel  # how many of them a call updates
        self.param = host_tensor(numel, dtype, 0.5)
        self.grad = host_tensor(numel, dtype, 0.01)
        self.master = host_tensor(numel, torch.int16, 0) if dtype is torch.bfloat16 else None
        self.moments = [host_tensor(numel, torch.float32, 0) for _ in range(2)]

    def __call__(self) -> None:
        self.step += 1
        code, numel = CODES[self.param.dtype], self.numel
        scale = 1.0
        if self.norm:
            total = _native.squared_norm(self.grad.data_ptr(), code, numel, self.threads) ** 0.5
            scale = min(1.0 / total, 1.0)
        arrays = _native.Arrays(
            param=self.param.data_ptr(),
            param_dtype=code,
            master=0 if self.master is None else self.master.data_ptr(),
            grad=self.grad.data_ptr(),
            grad_dtype=code,
            states=[moment.data_ptr() for moment in self.moments],
            scales=[],
            numel=numel,
            grad_scale=scale,
        )
        _native.adam(arrays, **NATIVE, step=self.step, threads=self.threads)


class Theirs:
    """The same step from separate operations: cast, norm, scale, the optimizer on fp32 masters, cast back."""

    def __init__(self, numel: int, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        torch.set_num_threads(all_threads())
        sizes = [min(TENSOR_NUMEL, numel - at) for at in range(0, numel, TENSOR_NUMEL)]
        self.weights = [torch.full((size,), 0.5, dtype=torch.bfloat16) for size in sizes]
        self.grads = [torch.full((size,), 0.01, dtype=torch.bfloat16) for size in sizes]
        self.masters = [torch.nn.Parameter(weight.float()) for weight in self.weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def __call__(self) -> None:
        wide = [master.grad for master in self.masters if master.grad is not None]
        for grad, own in zip(wide, self.grads, strict=True):
            grad.copy_(own)
        total = torch.nn.utils.get_total_norm(wide).item()
        for grad in wide:
            grad.mul_(min(1.0 / total, 1.0))
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


class Bare:
    """An optimizer's step on fp32 parameters and gradients, nothing around it."""

    def __init__(self, numel: int, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        torch.set_num_threads(all_threads())
        sizes = [min(TENSOR_NUMEL, numel - at) for at in range(0, numel, TENSOR_NUMEL)]
        self.params = [torch.nn.Parameter(torch.full((size,), 0.5)) for size in sizes]
        for param in self.params:
            param.grad = torch.full_like(param, 0.01)
        self.optimizer = make(self.params)

    def __call__(self) -> None:
        self.optimizer.step()


def fused(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **TORCH)


def unfused(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=False, **TORCH)


def deepspeed_adam() -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **TORCH)


# --------------------------------------------------------------------------------------------------------- the rows


def step(numels: Sequence[int] = (64 * MI, 512 * MI)) -> list[Row]:
    """The whole mixed-precision step: norm of the bf16 gradient, unscale and clip, AdamW, bf16 weight."""
    rows = []
    for numel in numels:
        if 22 * numel > free_bytes():
            rows.append(Row(f"mixed-precision step, {numel // MI} Mi parameters", "does not fit the memory", "", True))
            continue
        contenders: dict[str, Callable[[], Callable[[], object]]] = {
            "ours": lambda numel=numel: Ours(numel),
            "torch fused": lambda numel=numel: Theirs(numel, fused),
        }
        if (cpu_adam := deepspeed_adam()) is not None:
            contenders["DeepSpeed"] = lambda numel=numel, make=cpu_adam: Theirs(numel, make)
        found = medians(contenders, (14 + 20 * (len(contenders) - 1)) * numel)
        for name, seconds in found.items():
            if name != "ours":
                ratio = seconds / found["ours"]
                what = f"mixed-precision step, {numel // MI} Mi parameters, against {name}"
                detail = f"{ratio:.2f} x faster ({found['ours'] * 1e3:.0f} ms, {seconds * 1e3:.0f} ms)"
                rows.append(Row(what, detail, ">= 2.5 x", ratio >= 2.5))
    return rows


def bandwidth() -> list[Row]:
    """Bytes a second of the update against copy and triad (STREAM's counting), same threads, in turns."""
    rows = []
    numel = 64 * MI
    for threads in sorted({1, all_threads()}):
        torch.set_num_threads(threads)
        a, b, c = (torch.ones(numel) for _ in range(3))
        half = Ours(numel, norm=False, threads=threads)
        whole = Ours(numel, torch.float32, norm=False, threads=threads)
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (8, lambda a=a, b=b: a.copy_(b)),
            "triad": (12, lambda a=a, b=b, c=c: torch.add(b, c, alpha=3.0, out=a)),
            "in place": (12, lambda a=a, b=b: a.add_(b, alpha=0.5)),
            "bf16 weight and gradient": (26, half),
            "fp32": (28, whole),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(2 * REPEATS + 1):
            for name, (_, work) in works.items():
                times[name].append(seconds_of(work))
        rates = {name: works[name][0] * numel / statistics.median(each[1:]) for name, each in times.items()}
        stream = max(rates["copy"], rates["triad"])
        for name in ("bf16 weight and gradient", "fp32"):
            ratio = rates[name] / stream
            what = f"AdamW, {name}, {threads} thread{'s' * (threads > 1)}: bandwidth over STREAM's"
            detail = ", ".join(f"{each} {rates[each] / GB:.1f}" for each in ("copy", "triad", "in place"))
            measured = f"{ratio:.0%} ({rates[name] / GB:.1f} GB/s; {detail})"
            rows.append(Row(what, measured, ">= 95 %", ratio >= 0.95))
    return rows


def scaling() -> list[Row]:
    """Time a parameter at growing sizes, and one thread against all."""
    rows = []
    numels = [n * MI for n in (1, 4, 16, 64, 256, 1024) if 14 * n * MI < free_bytes()]
    work = Ours(numels[-1], norm=False)
    times: dict[int, list[float]] = {numel: [] for numel in numels}
    for turn in range(REPEATS + 1):
        for work.numel in numels:
            calls = max(64 * MI // work.numel, 1)
            spent = sum(seconds_of(work) for _ in range(calls)) / calls
            if turn:
                times[work.numel].append(spent / work.numel)
    del work
    gc.collect()
    seconds = {numel: statistics.median(each) for numel, each in times.items()}
    in_memory = {numel: each for numel, each in seconds.items() if numel >= 64 * MI}  # smaller ones fit caches
    worst = max(in_memory.values()) / min(in_memory.values())
    text = ", ".join(f"{numel // MI} Mi: {each * 1e9:.3f}" for numel, each in seconds.items())
    rows.append(Row(f"ns a parameter ({text}), spread from 64 Mi on", f"{worst:.2f} x", "<= 1.05 x", worst <= 1.05))
    small = max(each for numel, each in seconds.items() if numel < 64 * MI) / seconds[64 * MI]
    rows.append(Row("the slowest smaller size over 64 Mi", f"{small:.2f} x", "<= 1.05 x", small <= 1.05))
    counts = [1 << k for k in range(all_threads().bit_length())]
    found = medians(
        {str(n): lambda n=n: Ours(64 * MI, norm=False, threads=n) for n in counts},  # type: ignore[misc]
        14 * 64 * MI * len(counts),
    )
    text = ", ".join(f"{n} threads: {found[str(n)] * 1e3:.0f} ms" for n in counts)
    rows.append(Row(f"64 Mi parameters ({text})", f"{found['1'] / found[str(counts[-1])]:.2f} x", "", True))
    return rows


def error(numel: int = 4096, steps: int = 1000) -> list[Row]:
    """Each of 1,000 steps against the same step in fp64 from the same state, in units of the weight's last place."""
    torch.manual_seed(0)
    ours = Ours(numel, torch.float32, norm=False, threads=1)
    start = torch.randn(numel)
    ours.param.copy_(start)
    param = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([param], foreach=False, **TORCH)
    exact = {
        name: [start.double(), torch.zeros(numel).double(), torch.zeros(numel).double()] for name in ("ours", "torch")
    }
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
    for number in range(1, steps + 1):
        grad = torch.randn(numel)
        for state in exact.values():
            adamw_fp64(state, grad.double(), number)
        ours.grad.copy_(grad)
        ours()
        param.grad = grad
        theirs.step()
        after = theirs.state[param]
        results = {
            "ours": [ours.param, *ours.moments],
            "torch": [param.detach(), after["exp_avg"], after["exp_avg_sq"]],
        }
        for name, tensors in results.items():
            place = torch.exp2(exact[name][0].abs().log2().floor() - 23)
            off = (tensors[0].double() - exact[name][0]).abs() / place
            found[name].append((off.mean().item(), off.max().item()))
            exact[name] = [tensor.double() for tensor in tensors]
    mean = {name: statistics.mean(each for each, _ in values) for name, values in found.items()}
    most = {name: max(each for _, each in values) for name, values in found.items()}
    text = (
        f"{mean['ours']:.3f} ulp (at most {most['ours']:.1f}); torch {mean['torch']:.3f} (at most {most['torch']:.1f})"
    )
    return [
        Row(
            "error of a step's weight against fp64, mean of 1,000 steps",
            text,
            "<= torch's + 0.01",
            mean["ours"] <= mean["torch"] + 0.01,
        )
    ]


def adamw_fp64(state: list[torch.Tensor], grad: torch.Tensor, number: int) -> None:
    """AdamW as published, in fp64; `state` is weight, exp_avg, exp_avg_sq."""
    lr, beta1, beta2, eps, decay = HYPER.values()
    weight, exp_avg, exp_avg_sq = state
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = (exp_avg_sq / (1 - beta2**number)).sqrt() + eps
    weight = weight - lr * decay * weight - lr * (exp_avg / (1 - beta1**number)) / denominator
    state[:] = [weight, exp_avg, exp_avg_sq]


def paper() -> list[Row]:
    """ZeRO-Offload's table of CPU-Adam: fp32 steps of 1 to 10 billion parameters, or of what the memory holds."""
    rows = []
    sizes = [numel for numel in (1e9, 2e9, 4e9, 8e9, 10e9) if 17 * numel < free_bytes()] or [0.25e9, 0.5e9]
    for numel in map(int, sizes):
        contenders: dict[str, Callable[[], Callable[[], object]]] = {
            "ours": lambda numel=numel: Ours(numel, torch.float32, norm=False),
            "torch": lambda numel=numel: Bare(numel, unfused),
            "torch fused": lambda numel=numel: Bare(numel, fused),
        }
        if (cpu_adam := deepspeed_adam()) is not None:
            contenders["DeepSpeed"] = lambda numel=numel, make=cpu_adam: Bare(numel, make)
        found = medians(contenders, 16 * numel * len(contenders))
        text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())
        ratio = found["torch"] / found["ours"]
        rows.append(
            Row(
                f"CPU-Adam table, {numel / 1e9:g} B parameters ({text})",
                f"{ratio:.1f} x torch",
                "6 x (paper)",
                ratio >= 6,
            )
        )
    return rows


KERNEL_ROWS: dict[str, Callable[[], list[Row]]] = {
    "step": step,
    "bandwidth": bandwidth,
    "scaling": scaling,
    "error": error,
    "paper": paper,
}


def main() -> int:
    every = [*KERNEL_ROWS, *optimizer_engine.ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"which of {', '.join(every)}; all if none is named")
    parser.add_argument("--disk", default=".", help="a directory on the drive to measure")
    options = parser.parse_args()
    print(f"{machine()}, {_native.instruction_set()}")
    rows = []
    for name in options.rows or every:
        rows += KERNEL_ROWS[name]() if name in KERNEL_ROWS else optimizer_engine.ROWS[name](options.disk)
    print_rows(rows)
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
