"""`outsize plan`: what would go where for a model, without allocating it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import outsize
from outsize.cli import models
from outsize.cli.job import CONFIG_FIELDS, DTYPES, Job, add_memory_arguments

SUMMARY = "say what would go where, without allocating anything"
DESCRIPTION = (
    "Build a model on the meta device and print the plan: tiers, budgets, bytes moved a step. 70 B in seconds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="a Hugging Face config.json or a folder that holds one")
    which.add_argument("--shape", choices=models.SHAPES, help="a Llama of this well-known size")
    add_memory_arguments(parser, _DEFAULTS)


# The planner decides, unless told otherwise.
_DEFAULTS = Job(host_memory=None, params="auto", grads="auto", states="auto", activations="auto")


def run(args: argparse.Namespace) -> int:
    config = models.llama(args.shape) if args.shape else models.configuration(args.model)
    model = models.on_meta(config)
    fields: dict[str, Any] = {name: getattr(args, name) for name in CONFIG_FIELDS if getattr(args, name) is not None}
    if args.disk:
        fields["disk"] = [str(path) for path in args.disk]
    optimizer = torch.optim.AdamW(model.parameters())
    fields["delayed_update"] = args.delayed_update or False
    print(outsize.plan(model, optimizer, compute_dtype=DTYPES[args.dtype], **fields))
    return 0
