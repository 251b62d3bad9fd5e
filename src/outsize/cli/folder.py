"""The folder of a run: every file that it leaves, and how it is found again."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.cli.job import FIXED, LATEST, Job
from outsize.cli.writing import replace_text

DEFAULT_NAME = "default"


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>`: every file that a run writes."""

    path: Path

    @staticmethod
    def choose(job: Job) -> RunFolder:
        """The folder of a new run, never one that holds a run already; the run's own when it is resumed."""
        if job.resume is not None:
            if job.name is not None:
                return RunFolder(job.out / job.name)
            return RunFolder.newest(job.out) if job.resume == LATEST else RunFolder.holding(Path(job.resume))
        folder = RunFolder(job.out / (job.name or DEFAULT_NAME))
        if not folder.metrics.exists():
            return folder
        if job.name is not None:
            raise ValueError(f"{folder.path} holds a run already; add --resume to go on, or choose another --name")
        number = 2
        while (numbered := RunFolder(job.out / f"{DEFAULT_NAME}-{number}")).metrics.exists():
            number += 1
        return numbered

    @staticmethod
    def newest(out: Path) -> RunFolder:
        """Of the runs in a folder that which has saved last."""
        saved = [(path.stat().st_mtime, path) for path in out.glob("*/checkpoints/step-*") if _is_step(path)]
        if not saved:
            raise FileNotFoundError(f"--resume: no run in {out} has a checkpoint; name one with --out and --name")
        return RunFolder(max(saved)[1].parent.parent)

    @staticmethod
    def of(checkpoint: Path) -> RunFolder | None:
        """The run whose folder, folder of checkpoints, or checkpoint this is; None where it is of none."""
        here = checkpoint.absolute()
        for run in (here, here.parent, here.parent.parent):
            if run / "checkpoints" in (here / "checkpoints", here, here.parent) and (run / "checkpoints").is_dir():
                return RunFolder(run)
        return None

    @staticmethod
    def holding(checkpoint: Path) -> RunFolder:
        """As `of`. Raises `ValueError` where it is of none."""
        run = RunFolder.of(checkpoint)
        if run is None:
            raise ValueError(
                f"--resume {checkpoint} is of no run (RUN/checkpoints/step-N); name the run that goes on from it with "
                f"--name"
            )
        return run

    @contextmanager
    def removed_if_untrained(self) -> Iterator[None]:
        """Leave nothing behind, of what was not there before, if no step is taken and nothing is saved."""
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            yield
        finally:
            if made and not self.metrics.exists() and not self.checkpoints():
                shutil.rmtree(self.path, ignore_errors=True)
                with suppress(OSError):  # somebody else has begun to use it
                    for parent in made[1:]:
                        parent.rmdir()

    @property
    def options(self) -> Path:
        return self.path / "options.json"

    def read_options(self) -> dict[str, Any]:
        """What the run was made with; empty where it is not known. Raises `ValueError` for what no run has written."""
        if not self.options.exists():
            return {}
        try:
            stored = json.loads(self.options.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._foreign(str(error)) from error
        if not isinstance(stored, dict):
            raise self._foreign("it is no JSON object")
        lacking = [name for name in FIXED if name not in stored]
        if lacking:
            raise self._foreign(f"it lacks {', '.join(lacking)}")
        return stored

    def _foreign(self, why: str) -> ValueError:
        return ValueError(
            f"{self.options} does not hold the options of a run ({why}); remove it, and give the options that the run "
            f"was made with"
        )

    def write_options(self, job: Job) -> None:
        replace_text(self.options, json.dumps(job.options(), indent=1) + "\n")

    def command(self, *more: str) -> str:
        """The command line that goes on with this run from its newest checkpoint."""
        out, name = str(self.path.parent), self.name
        return shlex.join(["outsize", "train", "--out", out, "--name", name, "--resume", *more])

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def disk(self) -> Path:
        return self.path / "disk"

    @property
    def corpus(self) -> Path:
        return self.path / "corpus"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"

    def checkpoints(self) -> list[Path]:
        """Those that are there, in the order of their steps."""
        found = [path for path in (self.path / "checkpoints").glob("step-*") if _is_step(path)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def to_resume(self, resume: str) -> Path:
        if resume != LATEST:
            if not Path(resume).is_dir():
                raise FileNotFoundError(f"--resume {resume}: no such checkpoint folder")
            folder = Path(resume)
            return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        if not self.checkpoints():
            raise FileNotFoundError(f"--resume: no checkpoint in {self.path / 'checkpoints'}")
        return self.path / "checkpoints"  # the newest complete one in it


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"step-\d+", path.name) is not None
