"""What the user of `outsize train` asked for, checked."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_FORMATS = ("exact", "compact")
TIERS = ("auto", "device", "host", "disk")
LATEST = "latest"
CONFIG_FIELDS = (
    *("device", "device_memory", "host_memory", "disk_space"),
    *("stage", "params", "grads", "states", "activations", "state_format"),
)
"""The options that are fields of `outsize.Config` under the same name."""

FIXED = ("text", "model", "batch", "seq_len", "seed")
"""The options that a run keeps from its first step to its last: what it learns, and from what."""


@dataclass(frozen=True)
class Job:
    """One field for each option of `outsize train`; the defaults are the main job."""

    text: tuple[Path, ...] = ()
    model: Path | None = None
    device: str | None = None
    device_memory: str | None = None
    host_memory: str | None = "256MiB"
    disk: tuple[Path, ...] = ()
    disk_space: str | None = None
    stage: int = 3
    params: str = "disk"
    grads: str = "disk"
    states: str = "disk"
    activations: str = "recompute"
    dtype: str = "fp32"
    state_format: str = "exact"
    delayed_update: int = 0
    steps: int = 150
    minutes: float = 8.0
    batch: int = 4
    seq_len: int = 128
    lr: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 50
    save_every: int = 100
    seed: int = 0
    name: str | None = None
    out: Path = Path("runs")
    resume: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("seq_len", 2), ("warmup", 0), ("delayed_update", 0)):
            self._at_least(name, least)
        for name in ("eval_every", "save_every", "minutes", "clip", "weight_decay", "seed"):
            self._at_least(name, 0)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr is {self.lr}; it must be a positive number")
        if self.name is not None and not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", self.name):
            raise ValueError(f"--name is {self.name!r}; use letters, digits and the signs . _ + -")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")

    def check_ranks(self, ranks: int) -> None:
        if self.batch % ranks:
            raise ValueError(f"--batch {self.batch} cannot be shared by {ranks} ranks; give a multiple of {ranks}")

    @property
    def seconds(self) -> float | None:
        return self.minutes * 60 or None

    def config_fields(self, disk_of_run: Path) -> dict[str, Any]:
        """The keywords of `outsize.init`, `prepare` and `plan`; the disk tier is in the run's folder unless told."""
        given = {name: getattr(self, name) for name in CONFIG_FIELDS if getattr(self, name) is not None}
        disk = [str(path) for path in self.disk or (disk_of_run,)]
        delay = self.delayed_update or False
        return {**given, "disk": disk, "compute_dtype": DTYPES[self.dtype], "delayed_update": delay}

    def options(self) -> dict[str, Any]:
        """What a run is made with, as JSON holds it; paths are absolute."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("name", "out", "resume")
        }

    def resumed(self, words: Sequence[str], stored: Mapping[str, Any], name: str) -> Job:
        """The job of a run that was made with the `stored` options; those of the command line, `words`, win. Raises
        `ValueError` for another value of one that a run keeps."""
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        lists = {each: tuple(map(Path, stored[each])) for each in ("text", "disk") if each in stored}
        parser.set_defaults(**{**stored, **lists})
        job = Job.parse(parser.parse_args(words))
        for each, now in job.options().items():
            if each in FIXED and each in stored and now != stored[each]:
                option = "--" + each.replace("_", "-")
                made = (
                    f"with {option} {_words(stored[each])}" if stored[each] not in (None, []) else f"without {option}"
                )
                raise ValueError(f"run {name} was made {made}, not with {_words(now)}; give the same or leave it out")
        return job

    @staticmethod
    def parse(args: argparse.Namespace) -> Job:
        return Job(**{field.name: getattr(args, field.name) for field in fields(Job)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Job()
    _add_task(parser, default)
    add_memory_arguments(parser, default, "folders on fast drives (default: one inside the run's folder)")
    _add_recipe(parser, default)
    files = parser.add_argument_group("files")
    files.add_argument("--name", help="the run's folder in --out (default: 'default', or 'default-2' ... when taken)")
    files.add_argument("--out", type=Path, default=default.out, help="where runs are kept")
    files.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        metavar="CHECKPOINT",
        help="go on from this checkpoint, or from the latest of the run named by --name, or of the run in --out that "
        "saved last; the run's own options hold where no others are given, and --text, --model, --batch, --seq-len "
        "and --seed cannot be others",
    )
    files.add_argument(
        "--save-every",
        type=int,
        default=default.save_every,
        help="steps between checkpoints, of which the two newest stay; 0: at the end only",
    )
    files.add_argument("--eval-every", type=int, default=default.eval_every, help="steps; 0: before and after only")


def _add_task(parser: argparse.ArgumentParser, default: Job) -> None:
    task = parser.add_argument_group("what to train")
    task.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action=_Tuple,
        default=default.text,
        metavar="PATH",
        help="text files or folders (default: the source of the Python standard library)",
    )
    task.add_argument(
        "--model",
        type=Path,
        default=default.model,
        help="a Hugging Face config.json, or a folder with one and, if they are there, weights and tokenizer.json "
        "(default: a Llama of 120 M parameters)",
    )


def add_memory_arguments(parser: argparse.ArgumentParser, default: Job, disk_help: str) -> None:
    """Budgets and tiers; shared by `outsize train` and `outsize plan`."""
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--device",
        default=default.device,
        help="cpu, cuda, xpu, ... (default: the accelerator, else cpu)",
    )
    memory.add_argument("--device-memory", default=default.device_memory, help="budget, such as 8GiB")
    memory.add_argument("--host-memory", default=default.host_memory, help="budget for model states, such as 4GiB")
    memory.add_argument(
        "--disk",
        type=Path,
        nargs="+",
        action=_Tuple,
        default=default.disk,
        metavar="DIR",
        help=disk_help,
    )
    memory.add_argument("--disk-space", default=default.disk_space, help="budget on disk")
    memory.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=default.stage, help="ZeRO stage, with several ranks"
    )
    for kind in ("params", "grads", "states"):
        memory.add_argument(f"--{kind}", choices=TIERS, default=getattr(default, kind), help="tier")
    memory.add_argument("--activations", default=default.activations, help="keep, recompute, auto")
    memory.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default=default.dtype,
        help="dtype of the computation; fp16 trains with dynamic loss scaling",
    )
    memory.add_argument(
        "--state-format",
        choices=STATE_FORMATS,
        default=default.state_format,
        help="exact: fp32 moments; compact: 8-bit moments",
    )
    memory.add_argument(
        "--delayed-update",
        type=int,
        metavar="STEPS",
        default=default.delayed_update,
        help="exact steps before updates are delayed by one; 0: never",
    )


def _add_recipe(parser: argparse.ArgumentParser, default: Job) -> None:
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--steps", type=int, default=default.steps, help="the most steps to take")
    recipe.add_argument(
        "--minutes",
        type=float,
        default=default.minutes,
        help="time from the start of the command to the last step, the learning rate falls accordingly; 0: no limit",
    )
    recipe.add_argument("--batch", type=int, default=default.batch, help="sequences a step, over all ranks")
    recipe.add_argument("--seq-len", type=int, default=default.seq_len, help="tokens a sequence")
    recipe.add_argument("--lr", type=float, default=default.lr, help="peak learning rate of AdamW")
    recipe.add_argument("--warmup", type=int, default=default.warmup, help="steps of linear warm-up")
    recipe.add_argument("--weight-decay", type=float, default=default.weight_decay, help="of matrices")
    recipe.add_argument("--clip", type=float, default=default.clip, help="largest gradient norm; 0: no clipping")
    recipe.add_argument("--seed", type=int, default=default.seed, help="of weights, data order and dropout")


class _Tuple(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.path.abspath(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _words(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)
