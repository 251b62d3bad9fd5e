"""The options of `outsize train`, and those of memory, which `outsize plan` shares; the run that they name."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from outsize.config import Activations, Tier

SUMMARY = "train a language model beyond memory"
DESCRIPTION = (
    "Train a language model whose parameters, gradients and optimizer state rest on disk. Without options: a Llama of "
    "120 M parameters on the source of the Python standard library, with 256 MiB for model states."
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RUNS = "runs"
FIXED = ("text", "model", "batch", "seq_len", "seed")
"""The options that a run keeps from its first step to its last: what it learns, and from what."""
CONFIG_FIELDS = (
    *("device", "device_memory", "host_memory", "disk", "disk_space"),
    *("stage", "params", "grads", "states", "activations", "micro_batches", "state_format"),
)
"""The options that are fields of `outsize.Config` under the same name."""


def run(args: argparse.Namespace) -> int:
    from outsize.cli.train import run  # imports what only training needs

    return run(args)


def at_least(least: float, kind: type[Any] = int, most: float = math.inf) -> Callable[[str], Any]:
    """The type of an option that is a number."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not math.isfinite(value) or value < least:
            raise argparse.ArgumentTypeError(f"it is {text}; it must be {least} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"it is {text}; it must be {most} or less")
        return value

    parse.__name__ = "number"
    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to train").add_argument
    path = os.path.abspath
    add("--text", type=path, nargs="+", metavar="PATH", help="text (default: the Python standard library's source)")
    add("--model", type=path, help="config.json, or its folder with weights and tokenizer (default: a 120 M Llama)")
    add_memory_arguments(parser, disk="default: a folder inside the run's", activations="recompute", tier="disk")
    parser.set_defaults(host_memory="256MiB")
    add = parser.add_argument_group("recipe").add_argument
    add("--steps", type=at_least(1), default=150, help="steps of the run; the learning rate falls over them")
    add("--minutes", type=at_least(0, float), default=8.0, help="stop this command after so long; 0: never")
    add("--batch", type=at_least(1), default=4, help="sequences a step, over all ranks")
    add("--seq-len", type=at_least(2), default=128, help="tokens a sequence")
    add("--lr", type=at_least(1e-12, float), default=1e-3, help="highest learning rate of AdamW")
    add("--warmup", type=at_least(0), default=10, help="steps of linear warm-up")
    add("--weight-decay", type=at_least(0, float), default=0.1, help="of matrices")
    add("--clip", type=at_least(0, float), default=1.0, help="largest gradient norm; 0: no clipping")
    add("--seed", type=at_least(0, most=2**32 - 1), default=0, help="of weights, data order and dropout")
    add = parser.add_argument_group("files").add_argument
    add("--run", type=path, metavar="DIR", help=f"folder of a new run (default: {RUNS}/default, or default-2 ...)")
    add(
        "--resume",
        nargs="?",
        const=path(RUNS),
        metavar="RUN",
        type=path,
        help=f"go on with a run, from its newest checkpoint or from RUN/checkpoint-N (default: the run in {RUNS}/ that "
        f"saved last). The run's options hold; others win, but for "
        + ", ".join(f"--{name.replace('_', '-')}" for name in FIXED),
    )
    add("--save-every", type=at_least(1), default=100, help="steps between checkpoints; the two newest stay")
    add("--eval-every", type=at_least(1), default=50, help="steps between looks at held-out text")


def add_memory_arguments(
    parser: argparse.ArgumentParser, disk: str, activations: str = "auto", tier: str = "auto"
) -> None:
    """Budgets and tiers."""
    add = parser.add_argument_group("memory").add_argument
    add("--device", help="cpu, cuda, xpu, ... (default: the accelerator, else cpu)")
    add("--device-memory", help="budget, such as 8GiB")
    add("--host-memory", help="budget for model states, such as 4GiB")
    add("--disk", type=os.path.abspath, nargs="+", metavar="DIR", help=f"folders on fast drives ({disk})")
    add("--disk-space", help="budget on disk")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage, with several ranks")
    for kind in ("params", "grads", "states"):
        add(f"--{kind}", choices=get_args(Tier), default=tier, help="tier")
    add("--activations", default=activations, choices=get_args(Activations), help="of layers, until the backward")
    add("--micro-batches", type=at_least(1), default=1, help="parts of the batch, computed layer by layer")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of the computation")
    add("--state-format", choices=("exact", "compact"), default="exact", help="fp32 moments, or 8-bit moments")
    add("--delayed-update", type=at_least(0), default=0, help="exact steps before updates come one late; 0: never")


def config_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `outsize.init`, `prepare` and `plan`."""
    given = {name: getattr(options, name) for name in CONFIG_FIELDS if getattr(options, name) is not None}
    return {**given, "compute_dtype": DTYPES[options.dtype], "delayed_update": options.delayed_update or False}


def find_run(args: argparse.Namespace) -> tuple[argparse.Namespace, Path, str | None]:
    """The options that hold, the run's folder, and the checkpoint that it goes on from. Writes nothing."""
    if args.resume is None:
        run = Path(args.run) if args.run else _unused(Path(RUNS, "default").absolute())
        check_new(run)
        return args, run, None
    if args.run is not None:
        raise ValueError(f"--run {args.run} names a new run, and --resume {args.resume} one that is there: give one")
    run, checkpoint = _to_resume(Path(args.resume))
    stored = stored_in(run)
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    parser.set_defaults(**stored)
    options = parser.parse_args(args.words)
    for name in FIXED:
        if getattr(options, name) != stored[name]:
            raise ValueError(
                f"{run} was made with --{name.replace('_', '-')} {stored[name]}, not {getattr(options, name)}; "
                "give the same or leave it out"
            )
    return options, run, checkpoint


def check_new(run: Path) -> None:
    """Raise `ValueError` where the folder holds a run, or is a file."""
    from outsize.integrations.transformers import last_checkpoint

    if run.exists() and not run.is_dir():
        raise ValueError(f"--run {run} is a file; name a folder")
    if not options_file(run).exists():
        return
    if last_checkpoint(run) is None:
        raise ValueError(
            f"--run {run} holds a run that has saved no checkpoint; remove the folder if that run has ended, or name "
            f"another"
        )
    raise ValueError(f"--run {run} holds a run already; go on with it by --resume {run}, or name another")


def options_file(run: Path) -> Path:
    return run / "options.json"


def _unused(run: Path) -> Path:
    numbered = (run.with_name(f"{run.name}-{number}") for number in range(2, 1 << 30))
    return run if not options_file(run).exists() else next(each for each in numbered if not options_file(each).exists())


def _to_resume(path: Path) -> tuple[Path, str]:
    from outsize.integrations.transformers import is_complete, last_checkpoint

    if is_complete(path):
        return path.parent, str(path)
    runs = [path] if options_file(path).exists() else [file.parent for file in path.glob("*/options.json")]
    found = [checkpoint for checkpoint in map(last_checkpoint, runs) if checkpoint is not None]
    if not found:
        raise FileNotFoundError(f"--resume: no complete checkpoint in {path}; name another folder, or begin a new run")
    newest = max(found, key=lambda checkpoint: Path(checkpoint, "trainer_state.json").stat().st_mtime)
    return Path(newest).parent, newest


def stored_in(run: Path) -> dict[str, Any]:
    """The options that a run was made with. Raises `ValueError`."""
    try:
        stored = json.loads(options_file(run).read_text(encoding="utf-8"))
        return {**stored, **{name: stored[name] for name in FIXED}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{options_file(run)} does not hold the options of a run ({error!r})") from error
