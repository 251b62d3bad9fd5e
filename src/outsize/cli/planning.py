"""`outsize plan`: what would go where for a model, without allocating it."""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import outsize
from outsize.api.budgets import DEVICE_MARGIN, DISK_MARGIN, HOST_MARGIN, available_memory
from outsize.api.ranks import OTHER_NAMES, STAGE_NAMES, TENSOR_NAMES
from outsize.cli import models
from outsize.cli.largest import FAMILIES, largest, table
from outsize.cli.options import add_memory_arguments, at_least, config_fields
from outsize.planning.cluster import PRESETS, Cluster, cluster_of
from outsize.planning.sizes import format_bytes
from outsize.planning.tables import zero_table

T = TypeVar("T")
DATA_NAMES = ("dp", "data", "copies", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "hsdp", "ddp")
SUMMARY = "say what would go where, without allocating anything"
DESCRIPTION = (
    "Build a model on the meta device and print the plan: tiers, budgets, bytes moved a step. 70 B in seconds: "
    "outsize plan --shape 70b --disk-space 2TB"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a Hugging Face config.json or a folder that holds one")
    which.add_argument("--shape", choices=models.SHAPES, help="a Llama of this well-known size")
    which.add_argument(
        "--parameters",
        type=_count,
        metavar="COUNT",
        help="so many parameters, such as 7.5e9 or 7.5B: only what the stages take of a rank, computing in bf16 unless "
        "--dtype says otherwise",
    )
    which.add_argument(
        "--largest",
        choices=tuple(FAMILIES),
        help="the largest model of a family that fits, in bf16 unless --dtype says otherwise; of several budgets, such "
        "as --host-memory 16GiB,64GiB, one row each",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help=f"budgets and figures of one rank of {', '.join(PRESETS)}, of 32xDGX-2 for 32 nodes, or of a TOML or JSON "
        f"file; budgets that are given win",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        help="data-parallel ranks; budgets are those of one rank (default: 1, or all of --cluster)",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="SIZES",
        help="ranks by dimension, such as pp=4,dp=8,tp=2: the plan of a rank of the largest pipeline stage",
    )
    add = parser.add_argument_group("a step", "simulated on the figures that `outsize probe` has measured").add_argument
    add("--batch", type=at_least(1), default=1, help="sequences of a rank")
    add("--seq-len", type=at_least(2), metavar="TOKENS", help="of a sequence: simulate a step with so many")
    add("--trace", type=Path, metavar="FILE", help="write the simulated step for https://ui.perfetto.dev")
    add_memory_arguments(parser, disk="default: none; --disk-space alone plans for a drive of that size")
    parser.set_defaults(dtype=None)  # of a model its own, fp32; of --parameters bf16


def _count(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        value = float(match[1]) * _MULTIPLES[match[2].upper()] if match else math.nan
    except ValueError:  # such as 1.2.3
        value = math.nan
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of parameters; write it as 7500000000, 7.5e9 or 7.5B (K, M, B or T)"
        )
    return value


def _mesh(text: str) -> dict[str, int]:
    parts = text.split(",")
    sizes = dict(part.strip().partition("=")[::2] for part in parts)
    if len(sizes) < len(parts) or not all(name and size.isdigit() and int(size) for name, size in sizes.items()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write the size of each dimension: pp=4,dp=8,tp=2")
    unknown = [name for name in sizes if name not in (*STAGE_NAMES, *DATA_NAMES, *TENSOR_NAMES, *OTHER_NAMES)]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no dimension of a mesh; they are pp (stages), dp and copies (data), and tp (tensors)"
        )
    return {name: int(size) for name, size in sizes.items()}


_MULTIPLES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(args: argparse.Namespace) -> int:
    if args.parameters is not None:
        _refuse(args, "parameters", "cluster", "seq_len", "trace")
        return _table(args)
    if args.largest:
        _refuse(args, "largest", "seq_len", "trace")
        return _largest(args)
    cluster = _of_cluster(args)
    config = models.llama(args.shape) if args.shape else models.configuration(args.model)
    model = models.on_meta(config)
    optimizer = torch.optim.AdamW(model.parameters())
    example = None
    if args.seq_len is not None or args.trace is not None:
        tokens = torch.zeros(args.batch, args.seq_len or 128, dtype=torch.long)
        example = {"input_ids": tokens, "labels": tokens}
    machine = None if cluster is None else cluster.machine(_ranks(args))
    fields = {**_fields(args, "fp32" if cluster is None else "bf16"), "example": example, "machine": machine}
    plan = _planned(args, cluster, lambda: outsize.plan(model, optimizer, **fields))
    if args.trace is not None and plan.prediction is not None:
        plan.prediction.trace.write(args.trace)
    if cluster is not None and plan.prediction is None:
        print(f"planned for figures that were not measured: {cluster}")
    print(plan)
    for tier, there in _there(args, cluster, plan).items():
        print(f"the {tier} has {format_bytes(there)}, less than this peak: lower --batch, --seq-len or its budget")
    if args.ranks > 1:
        numel = sum(param.numel() for param in model.parameters())
        print(f"\n{zero_table(numel, args.ranks, args.dtype, args.state_format)}")
    return 0


def _fields(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Of `outsize.plan`. `dtype`: where none is given."""
    args.ranks, args.dtype = args.ranks or 1, args.dtype or dtype
    if args.disk_space is not None and not args.disk:
        args.disk = ["."]  # a plan for `disk_space` looks at no folder
    return {"ranks": args.ranks, "mesh": args.mesh, **config_fields(args)}


def _there(args: argparse.Namespace, cluster: Cluster | None, plan: outsize.Plan) -> dict[str, int]:
    """Tiers on which there is less than the peak, and what there is: of the cluster, or of this machine's memory."""
    if plan.peak_bytes is None:
        return {}
    if cluster is not None:
        shares = zip(("device", "host", "disk"), cluster.share(_ranks(args)), strict=True)
        return {tier: there for tier, there in shares if plan.peak_bytes[tier] > there}
    there = available_memory()
    on_cpu = plan.budgets.device is None
    return {"memory": there} if on_cpu and plan.peak_bytes["device"] + plan.peak_bytes["host"] > there else {}


def _ranks(args: argparse.Namespace) -> int:
    return math.prod(args.mesh.values()) if args.mesh else args.ranks or 1


def _of_cluster(args: argparse.Namespace) -> Cluster | None:
    """Its figures; the budgets of one rank are put where none are given, with the margins for what is free."""
    if args.cluster is None:
        return None
    cluster = cluster_of(args.cluster)
    if args.device is not None:
        raise ValueError(f"--cluster plans for accelerators that are not here; leave out --device {args.device}")
    args.ranks = args.ranks or (1 if args.mesh else cluster.ranks)
    for name, value in budgets_of(cluster, _ranks(args)).items():
        setattr(args, name, getattr(args, name) or value)
    return cluster


def budgets_of(cluster: Cluster, ranks: int) -> dict[str, Any]:
    """Of one of so many ranks; the fields of `outsize.plan`."""
    device, host, disk = cluster.share(ranks)
    memory = {"device_memory": int(device * DEVICE_MARGIN), "host_memory": int(host * HOST_MARGIN)}
    least = {name: max(nbytes, 1) for name, nbytes in memory.items()}  # too little, as the plan says with the figures
    return {"device": "meta", **least, "disk_space": int(disk * DISK_MARGIN) or None}


def _planned(args: argparse.Namespace, cluster: Cluster | None, make: Callable[[], T]) -> T:
    """An error has the numbers of the cluster, too."""
    try:
        return make()
    except outsize.BudgetError as error:
        if cluster is None:
            raise
        raise ValueError(f"{error} ({cluster}; {_ranks(args)} ranks share it)") from error


def _largest(args: argparse.Namespace) -> int:
    found = []
    for name, each in _each_of_several(args):
        cluster = _of_cluster(each)
        found.append((name, _planned(each, cluster, partial(largest, args.largest, **_fields(each, "bf16")))))
    if args.cluster:
        print("planned from the figures of clusters, which were not measured; a budget is that of one rank")
    print("\n".join(table(args.largest, found)))
    return 0


def _each_of_several(args: argparse.Namespace) -> Iterator[tuple[str, argparse.Namespace]]:
    """Each combination of what is given several times, with commas between; its name."""
    names = ("cluster", "device_memory", "host_memory", "disk_space")
    given = {name: getattr(args, name).split(",") for name in names if getattr(args, name)}
    for values in itertools.product(*given.values()):
        each = copy.copy(args)
        for name, value in zip(given, values, strict=True):
            setattr(each, name, value.strip())
        yield " ".join(values) or "this machine", each


def _refuse(args: argparse.Namespace, mode: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} does not apply to --{mode}, which runs no layers; give --shape or --model"
            )


def _table(args: argparse.Namespace) -> int:
    """Of a number of parameters alone."""
    parser = argparse.ArgumentParser()
    add_memory_arguments(parser, disk="")
    heeded = {"dtype": args.dtype, "state_format": args.state_format}
    for name, default in vars(parser.parse_args([])).items():
        if name not in heeded and getattr(args, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} does not apply to --parameters, which knows no layers to place; give "
                f"--shape or --model"
            )
    print(zero_table(args.parameters, args.ranks or 1, args.dtype or "bf16", args.state_format))
    return 0
