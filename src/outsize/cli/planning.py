"""`outsize plan`: what would go where for a model, without allocating it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import outsize
from outsize.cli import models
from outsize.cli.job import CONFIG_FIELDS, DTYPES, Job, add_memory_arguments
from outsize.plan.tables import zero_table

SUMMARY = "say what would go where, without allocating anything"
DESCRIPTION = (
    "Build a model on the meta device and print the plan: tiers, budgets, bytes moved a step. 70 B in seconds: "
    "outsize plan --shape 70b --disk-space 2TB"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="a Hugging Face config.json or a folder that holds one")
    which.add_argument("--shape", choices=models.SHAPES, help="a Llama of this well-known size")
    which.add_argument(
        "--parameters", type=_count, help="so many parameters, such as 7.5e9: only what the stages take of a rank"
    )
    parser.add_argument("--ranks", type=_ranks, default=1, help="data-parallel ranks; budgets are those of one rank")
    disk = "folders on fast drives (default: none; --disk-space alone plans for a drive of that size)"
    add_memory_arguments(parser, _DEFAULTS, disk)


def _count(text: str) -> float:
    value = float(text)
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is not a number of parameters")
    return value


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks")
    return value


# The planner decides, unless told otherwise.
_DEFAULTS = Job(host_memory=None, params="auto", grads="auto", states="auto", activations="auto")


def run(args: argparse.Namespace) -> int:
    if args.parameters is not None:
        print(zero_table(args.parameters, args.ranks))
        return 0
    config = models.llama(args.shape) if args.shape else models.configuration(args.model)
    model = models.on_meta(config)
    fields: dict[str, Any] = {name: getattr(args, name) for name in CONFIG_FIELDS if getattr(args, name) is not None}
    if args.disk:
        fields["disk"] = [str(path) for path in args.disk]
    optimizer = torch.optim.AdamW(model.parameters())
    fields["delayed_update"] = args.delayed_update or False
    print(outsize.plan(model, optimizer, ranks=args.ranks, compute_dtype=DTYPES[args.dtype], **fields))
    if args.ranks > 1:
        print()
        print(zero_table(sum(param.numel() for param in model.parameters()), args.ranks))
    return 0
