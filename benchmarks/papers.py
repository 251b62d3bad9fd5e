"""The tables of the papers, from the planner: `docs/papers.md`. Arithmetic alone, in two minutes.

    python -m benchmarks.papers [--check]

With `--check` nothing is written; the exit code is 1 where the page is not what the planner says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from outsize.cli.largest import largest, member
from outsize.cli.planning import budgets_of
from outsize.planning.cluster import cluster_of
from outsize.planning.machine import Machine
from outsize.planning.tables import zero_rows
from tests.ranks import activations

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/papers.md", "pictures/papers-efficiency.svg"
GB, TIB, B = 1e9, 1 << 40, 1e9
ON_DEVICE, ON_HOST = (dict.fromkeys(("params", "grads", "states"), tier) for tier in ("device", "host"))
OFFLOAD = {"stage": 2, "params": "device", "grads": "host", "states": "host"}
BUDGETS = ("device_memory", "host_memory", "disk_space")
AT_ONCE = 1e18
PEAK = 70e12
"""FLOP/s of a V100 as ZeRO-Infinity measured them (section 4)."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def zero() -> str:
    """Memory by stage (Rajbhandari et al. 2020, figure 1 and table 1)."""
    published = {
        (7.5e9, 64): ("120", "31.4", "16.6", "1.88"),
        (128e9, 1024): ("2048", "513", "257", "2"),
        (1e12, 1024): ("16000", "4011", "2013", "15.6"),
    }
    rows = []
    for (parameters, ranks), papers in published.items():
        for (stage, formula, own), paper in zip(zero_rows(parameters, ranks), papers, strict=True):
            name = f"{count_of(parameters)}, {ranks} ranks"
            rows.append((name, str(stage), paper, f"{formula / GB:,.2f}", f"{own / GB:,.2f}"))
    return table(("model", "stage", "published, GB", "its formula", "outsize"), rows)


def largest_models() -> str:
    """ZeRO-Infinity, table 1 and figures 1 and 6; ZeRO-Offload, section 6."""
    one, many = "DGX-2", "32xDGX-2"
    cases: list[tuple[str, str, int, float, dict[str, Any]]] = [
        ("one GPU, plain", one, 1, 1.4, {**ON_DEVICE, "stage": 0}),
        ("one GPU, ZeRO-Offload", one, 1, 13, OFFLOAD),
        ("DGX-2, data parallel", one, 16, 1.4, {**ON_DEVICE, "stage": 0}),
        ("DGX-2, ZeRO-2", one, 16, 10, {**ON_DEVICE, "stage": 2}),
        ("DGX-2, ZeRO-Offload", one, 16, 13, OFFLOAD),
        ("DGX-2, ZeRO-3", one, 16, 20, ON_DEVICE),
        ("DGX-2, 3D parallelism", one, 16, 20, {**ON_DEVICE, "mesh": {"pp": 2, "tp": 8}}),
        ("DGX-2, ZeRO-Infinity, CPU", one, 16, 70, ON_HOST),
        ("DGX-2, ZeRO-Infinity, NVMe", one, 16, 1000, {}),
        ("32 DGX-2, ZeRO-Infinity, NVMe", many, 512, 32000, {}),
    ]
    rows = []
    for name, cluster, ranks, published, fields in cases:
        own = []
        for margins in (True, False):
            all_of_it = dict(zip(BUDGETS, cluster_of(cluster).share(ranks), strict=True)) if not margins else {}
            where = {
                **budgets_of(cluster_of(cluster), ranks),
                **all_of_it,
                "disk": ".",
                "compute_dtype": torch.bfloat16,
            }
            count = {} if "mesh" in fields else {"ranks": ranks}
            own.append(largest("gpt", **count, **where, **fields))
        first, second = own
        said = "" if first.next_error is None else first.next_error.field
        sizes = (count_of(each.parameters) for each in (first, second))
        rows.append((name, count_of(published * B), *sizes, f"{first.layers} x {first.width}", said))
    head = ("strategy", "published", "outsize", "without margins", "layers x width", "next needs more")
    return table(head, rows)


def count_of(parameters: float) -> str:
    return f"{parameters / 1e12:.3g} T" if parameters >= 1e12 else f"{parameters / B:.3g} B"


def infinity_states() -> str:
    """ZeRO-Infinity, figure 2a: sequences of 1024, 32 a node of 16 GPUs."""
    published = {
        (80, 10240): (0.10, 1.83, 0.05, None),
        (100, 20480): (0.50, 9.16, 0.12, 6.25),
        (128, 25600): (1.01, 18.31, 0.20, 9.77),
        (195, 65536): (10.05, 182.81, 0.76, 64),
        (315, 163840): (101.47, 1845.70, 3.08, 400),
    }
    budgets = {**budgets_of(cluster_of("32xDGX-2"), 512), "disk": ".", "compute_dtype": torch.bfloat16}
    rows = []
    for (layers, width), (trillions, states, inputs, working) in published.items():
        bare = outsize.plan(member("gpt", width, layers), device="cpu", host_memory="9PB", compute_dtype=torch.bfloat16)
        work = outsize.plan(member("gpt", width, 2), ranks=512, **{**budgets, "disk_space": "9PB"})
        most = max(unit.size.working for unit in work.units)
        own = 2 * 32 * 1024 * width * layers / TIB
        rows.append(
            (
                f"{layers} x {width}",
                f"{trillions} / {bare.parameters / 1e12:.2f}",
                f"{states:,} / {bare.state_bytes / TIB:,.2f}",
                f"{inputs} / {own:.2f}",
                f"{'-' if working is None else working} / {most / 2**30:.2f}",
            )
        )
    head = ("layers x width", "T parameters", "states, TiB", "inputs of layers, TiB", "at work on a GPU, GiB")
    return table(head, rows)


def _stack(width: int, pairs: int) -> nn.Module:
    """Of 8 x width x width parameters a pair."""
    with torch.device("meta"):
        each = (
            nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
            for _ in range(pairs)
        )
        return nn.Sequential(*each).to(torch.bfloat16)


def formula(intensity: float, rate: float) -> float:
    """ZeRO-Infinity, section 4: `intensity` in FLOPs a byte."""
    return intensity * rate / (intensity * rate + PEAK)


def simulated(sequences: int, rate: float) -> float:
    """The part of a step that computes, where parameters and gradients come and go at this rate, all else at once."""
    width, pairs, rows = 4096, 8, 1024 * sequences
    machine = Machine(
        "accelerator",
        products={"bfloat16": ((1e6, 1e6 / PEAK),)},
        memory=AT_ONCE,
        host_memory=AT_ONCE,
        operation_seconds=1 / AT_ONCE,
        updates={"": (AT_ONCE, AT_ONCE)},
        to_device=rate,
        from_device=rate,
        both_ways=2 * rate,
    )
    plan = outsize.plan(
        _stack(width, pairs),
        example=torch.zeros(rows, width, dtype=torch.bfloat16, device="meta"),
        machine=machine,
        device="meta",
        device_memory=4 * 8 * width * width,
        host_memory="64GB",
        activations="keep",
        **ON_HOST,
    )
    flops = 2 * rows * width * width * 8 * pairs * 3
    assert plan.step_seconds is not None
    return flops / PEAK / plan.step_seconds


RATES = (1e9, 3e9, 10e9, 30e9, 70e9, 150e9)


def efficiency() -> str:
    rows = [
        ("parameters and gradients, batch 1, 70 GB/s", "0.506", f"{formula(1024, 70e9):.3f}"),
        ("optimizer states, batch 2, 1.5 TB/s", "0.916", f"{formula(2 * 1024 / 4, 1.5e12):.3f}"),
        ("activation checkpoints, width 2048, 2 GB/s", "0.58", f"{formula(24 * 2048, 2e9):.3f}"),
        ("activation checkpoints, width 8192, 1 GB/s", "0.74", f"{formula(24 * 8192, 1e9):.3f}"),
    ]
    own = [
        (
            f"{rate / GB:g}",
            *(f"{each:.2f}" for size in (1, 4) for each in (formula(1024 * size, rate), FOUND[size, rate])),
        )
        for rate in RATES
    ]
    first = table(("what moves", "published", "its formula"), rows)
    head = ("GB/s", "formula, batch 1", "outsize, batch 1", "formula, batch 4", "outsize, batch 4")
    return f"{first}\n\n{table(head, own)}"


FOUND: dict[tuple[int, float], float] = {}


def picture() -> str:
    """Efficiency against bandwidth, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "papers"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for size, colour in ((1, "tab:blue"), (4, "tab:orange")):
        gigabytes = [rate / GB for rate in RATES]
        axes.plot(gigabytes, [formula(1024 * size, rate) for rate in RATES], "--", color=colour)
        label = f"{size} x 1024 tokens"
        axes.plot(gigabytes, [FOUND[size, rate] for rate in RATES], "o-", color=colour, label=label)
    axes.set(xscale="log", xlabel="GB/s of parameters and gradients", ylabel="part of a step that computes")
    axes.legend(title="line: outsize, dashed: formula")
    path = PAGE.parent / PICTURE
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path.name


def scaling() -> str:
    """One trillion parameters, two sequences of 1024 tokens a GPU."""
    width, pairs, rows = 25600, 192, 2048
    found = []
    for nodes in (4, 8, 16, 32):
        ranks, cluster = 16 * nodes, cluster_of(f"{nodes}xDGX-2")
        plan = outsize.plan(
            _stack(width, pairs),
            ranks=ranks,
            example=torch.zeros(rows, width, dtype=torch.bfloat16, device="meta"),
            machine=cluster.machine(ranks),
            disk=".",
            **budgets_of(cluster, ranks),
        )
        assert plan.prediction is not None
        assert plan.step_seconds is not None
        rate = 6 * rows * width * width * 8 * pairs / plan.step_seconds
        found.append((nodes, ranks, plan, rate))
    least = found[0][3]
    return table(
        ("nodes", "GPUs", "seconds a step", "TFLOP/s a GPU", "over 4 nodes", "disk a GPU", "bound by"),
        [
            (
                str(nodes),
                str(ranks),
                f"{plan.step_seconds:,.0f}",
                f"{rate / 1e12:.1f}",
                f"{rate / least:.2f} x",
                f"{plan.bytes_on('disk') / GB:,.0f} GB",
                plan.prediction.bound,
            )
            for nodes, ranks, plan, rate in found
        ],
    )


def activation_bytes() -> str:
    """Of the layer whose bytes a test counts, over sbh (Korthikanti et al. 2022, table 2)."""
    rows = []
    for kind, mode, ranks in (
        ("none", "keep", 1),
        ("tensor", "keep", 4),
        ("sequence", "keep", 4),
        ("tensor", "selective", 4),
        ("sequence", "selective", 4),
        ("none", "recompute", 1),
    ):
        paper, own = activations.published(kind, mode, ranks), activations.formula(kind, mode, ranks)
        name = {"none": "one rank", "tensor": "tensor parallel", "sequence": "with sequence parallel"}[kind]
        rows.append((name, mode, str(ranks), f"{paper:.1f}", f"{own:.1f}"))
    return table(("layer", "activations", "ranks", "published formula", "outsize"), rows)


def depth() -> str:
    """L2L (Pudipeddi et al. 2020): what is on the device, by the number of layers."""
    width = 1024
    rows = []
    for layers in (12, 24, 48, 96):
        plan = outsize.plan(
            _stack(width, layers),
            example=torch.zeros(8, width, dtype=torch.bfloat16, device="meta"),
            device="meta",
            device_memory="96MiB",
            host_memory="64GB",
            machine=cluster_of("DGX-2").machine(1),
            activations="recompute",
            **ON_HOST,
        )
        assert plan.peak_bytes is not None
        held, rest = plan.peak_bytes["device"], plan.state_bytes
        rows.append((str(layers), f"{rest / 2**20:,.0f}", f"{held / 2**20:,.1f}"))
    return table(("layers", "model states, MiB", "peak on the device, MiB"), rows)


def page() -> str:
    FOUND.update({(size, rate): simulated(size, rate) for size in (1, 4) for rate in RATES})
    parts = {each.__name__: each() for each in (zero, largest_models, infinity_states, efficiency, scaling)}
    parts |= {each.__name__: each() for each in (activation_bytes, depth)}
    return TEXT.format(**parts, picture=PICTURE)


TEXT = (Path(__file__).parent / "papers.txt").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = page()
    if check:
        return int(made != PAGE.read_text())
    PAGE.write_text(made)
    picture()
    return 0


if __name__ == "__main__":
    sys.exit(main())
