"""`outsize plan`: what would go where for a model, without allocating it."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import torch

import outsize
from outsize.cli import models
from outsize.cli.options import add_memory_arguments, at_least, config_fields
from outsize.plan.tables import zero_table

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
    parser.add_argument(
        "--ranks", type=at_least(1), default=1, help="data-parallel ranks; budgets are those of one rank"
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
    sizes = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not all(name and size.isdigit() and int(size) for name, size in sizes.items()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write the size of each dimension: pp=4,dp=8,tp=2")
    return {name: int(size) for name, size in sizes.items()}


_MULTIPLES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(args: argparse.Namespace) -> int:
    if args.parameters is not None:
        return _table(args)
    config = models.llama(args.shape) if args.shape else models.configuration(args.model)
    model = models.on_meta(config)
    args.dtype = args.dtype or "fp32"
    if args.disk_space is not None and not args.disk:
        args.disk = ["."]  # a plan for `disk_space` looks at no folder
    optimizer = torch.optim.AdamW(model.parameters())
    example = None
    if args.seq_len is not None or args.trace is not None:
        tokens = torch.zeros(args.batch, args.seq_len or 128, dtype=torch.long)
        example = {"input_ids": tokens, "labels": tokens}
    plan = outsize.plan(model, optimizer, ranks=args.ranks, mesh=args.mesh, example=example, **config_fields(args))
    if args.trace is not None and plan.prediction is not None:
        plan.prediction.trace.write(args.trace)
    print(plan)
    if args.ranks > 1:
        numel = sum(param.numel() for param in model.parameters())
        print(f"\n{zero_table(numel, args.ranks, args.dtype, args.state_format)}")
    return 0


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
    print(zero_table(args.parameters, args.ranks, args.dtype or "bf16", args.state_format))
    return 0
