"""`outsize plan`: what would go where for a model, without allocating it."""

from __future__ import annotations

import argparse
import math
import re
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
        "--parameters",
        type=_count,
        metavar="COUNT",
        help="so many parameters, such as 7.5e9 or 7.5B: only what the stages take of a rank, computing in bf16 unless "
        "--dtype says otherwise",
    )
    parser.add_argument("--ranks", type=_ranks, default=1, help="data-parallel ranks; budgets are those of one rank")
    disk = "folders on fast drives (default: none; --disk-space alone plans for a drive of that size)"
    add_memory_arguments(parser, _DEFAULTS, disk)
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


def _ranks(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 to {1 << 20}")
    return int(text)


_MULTIPLES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# The planner decides, unless told otherwise.
_DEFAULTS = Job(host_memory=None, params="auto", grads="auto", states="auto", activations="auto")


# What only a plan of layers can heed.
_OF_LAYERS = tuple(name for name in (*CONFIG_FIELDS, "disk", "delayed_update") if name != "state_format")


def run(args: argparse.Namespace) -> int:
    if args.parameters is not None:
        return _table(args)
    config = models.llama(args.shape) if args.shape else models.configuration(args.model)
    model = models.on_meta(config)
    dtype = args.dtype or _DEFAULTS.dtype
    fields: dict[str, Any] = {name: getattr(args, name) for name in CONFIG_FIELDS if getattr(args, name) is not None}
    if args.disk or args.disk_space is not None:
        fields["disk"] = [str(path) for path in args.disk] or ["."]  # a plan for `disk_space` looks at no folder
    optimizer = torch.optim.AdamW(model.parameters())
    fields["delayed_update"] = args.delayed_update or False
    print(outsize.plan(model, optimizer, ranks=args.ranks, compute_dtype=DTYPES[dtype], **fields))
    if args.ranks > 1:
        print()
        numel = sum(param.numel() for param in model.parameters())
        print(zero_table(numel, args.ranks, dtype, args.state_format))
    return 0


def _table(args: argparse.Namespace) -> int:
    """Of a number of parameters alone."""
    for name in _OF_LAYERS:
        if getattr(args, name) != getattr(_DEFAULTS, name):
            raise ValueError(
                f"--{name.replace('_', '-')} does not apply to --parameters, which knows no layers to place; give "
                f"--shape or --model"
            )
    print(zero_table(args.parameters, args.ranks, args.dtype or "bf16", args.state_format))
    return 0
