"""Runs that are killed at any instant and started again. `python -m benchmarks.checkpoint_kills DIRECTORY SEED KILLS`.

One process imports torch and forks a child for every life of a run: before it has any thread, and so a life costs no
import. A life ends by SIGKILL from outside after a random delay, or from within at a random system call of its saves.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_runs import KEEP, MIXED, ON_DISK, Places, TinyRun, link_and_copy_always
from outsize.checkpoint import folder
from outsize.checkpoint.background import Saving

SAVING_CALLS = (
    "fsync",
    "rename",
    "link",
    "pwrite",
    "open",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
    "posix_fallocate",
)
STEPS = 10
MAX_DELAY_SECONDS = 0.4
MAX_CALLS = 160
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of the process that forks: a library's thread pool is a thread, too."""


@dataclass(frozen=True)
class Manner:
    """How a run saves: where its state rests, how often, to a name of its own each time (or always to the same), and
    whether the file system can exchange two names."""

    places: Places
    every: int = 1
    series: bool = True
    exchange: bool = True

    def target(self, step: int) -> str:
        return f"step-{step}" if self.series else "last-0"

    def kept(self, steps: int) -> set[str]:
        """The checkpoints that are left in the end."""
        return {self.target(steps), self.target(steps - self.every)}


MANNERS = {
    "disk": Manner(ON_DISK),
    "mixed": Manner(MIXED, every=2),
    "replacing": Manner(ON_DISK, series=False),
    "renaming": Manner(MIXED, series=False, exchange=False),
}


@dataclass(frozen=True)
class Life:
    """One attempt to reach the last step. `fatal_call` counts system calls from the first save on; 0: none is fatal."""

    folder: Path
    manner: Manner
    steps: int = STEPS
    fatal_call: int = 0
    kill_after_call: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        """Lines of what was done: load N, loss N BITS, saved N, end DIGEST."""
        return self.folder / "log"

    def live(self) -> None:
        """Load the newest checkpoint, train and save to the end."""
        if not self.manner.exchange:
            folder._exchange = lambda one, other: False
        run = TinyRun(_made(self.folder / "disk"), self.manner.places)
        diary = Diary(self.log)
        try:
            run.load(self.checkpoints)
        except FileNotFoundError:
            run.steps = 0
        diary.note("load", run.steps)
        while run.steps < self.steps:
            diary.note("loss", run.steps, run.step().hex())
            diary.note_complete()
            if run.steps % self.manner.every == 0:
                self._arm()
                self._save(run, diary)
        self._save(run, diary)  # which sweeps what a killed one has left
        diary.wait()
        diary.note("end", run.digest())
        run.close()

    def _save(self, run: TinyRun, diary: Diary) -> None:
        diary.expect(run.steps, run.save(self.checkpoints / self.manner.target(run.steps), keep=KEEP))

    def _arm(self) -> None:
        if self.fatal_call and not hasattr(os.fsync, "fatal"):
            Reaper(self.fatal_call, self.kill_after_call).arm()


class Diary:
    """The log of all lives of one run; each line is written in one call."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write = os.write
        self._saving: tuple[int, Saving] | None = None

    def note(self, *words: object) -> None:
        self._write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def expect(self, step: int, saving: Saving) -> None:
        self.wait()
        self._saving = step, saving
        self.note_complete()

    def note_complete(self) -> None:
        """Note the checkpoint on its way once it is complete: from then on no later life may begin before it."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        if self._saving is not None:
            self._saving[1].wait()
            self.note("saved", self._saving[0])
            self._saving = None


class Reaper:
    """Kills its own process at the n-th system call of a save, right before the call or right after it."""

    def __init__(self, fatal_call: int, after: bool) -> None:
        self._left = fatal_call
        self._after = after

    def arm(self) -> None:
        for name in SAVING_CALLS:
            setattr(os, name, self._fatal(getattr(os, name)))
        folder._exchange = self._fatal(folder._exchange)

    def _fatal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **fields: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **fields)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        counted.fatal = True  # type: ignore[attr-defined]
        return counted


def run_life(life: Life, delay: float | None = None) -> bool:
    """Live in a forked child, killed after `delay` seconds; whether it was killed. Raises what went wrong in it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _live_and_exit(life, writing)
    os.close(writing)
    # The pipe ends with the child.
    if not select.select([reading], [], [], delay)[0]:
        os.kill(child, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        trouble = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if trouble or not (os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0):
        raise RuntimeError(f"a life of {life} ended with the status {status}:\n{trouble}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"a life of {life} crashed: signal {os.WTERMSIG(status)}")
    return os.WIFSIGNALED(status)


def _live_and_exit(life: Life, pipe: int) -> None:
    code = 1
    try:
        life.live()
        code = 0
    except BaseException:
        os.write(pipe, traceback.format_exc().encode())
    finally:
        os._exit(code)


@dataclass
class Tally:
    """What all runs came to."""

    kills: int = 0
    kills_in_saves: int = 0
    runs: int = 0
    loads: int = 0
    identical_runs: int = 0
    lost_checkpoints: int = 0
    other_losses: int = 0
    leftovers: int = 0

    @property
    def flawless(self) -> bool:
        return self.identical_runs == self.runs and not (self.lost_checkpoints or self.other_losses or self.leftovers)


def kill_often(root: Path, seed: int, kills: int, steps: int = STEPS) -> Tally:
    """Runs of every manner in turn, each killed again and again until it is through, until there were so many kills."""
    draw = random.Random(seed)
    tally = Tally()
    expected = _never_killed(Life(_made(root / "whole"), MANNERS["disk"], steps))
    assert threading.active_count() == 1, "only a process of one thread may be forked"
    while tally.kills < kills:
        name = list(MANNERS)[tally.runs % len(MANNERS)]
        life = Life(_made(root / f"{name}-{tally.runs}"), MANNERS[name], steps)
        share = max(kills // len(MANNERS), 1) if tally.runs < len(MANNERS) else kills
        _kill_until_through(life, draw, tally, min(share, kills - tally.kills))
        _judge(life, expected, tally)
        tally.runs += 1
    return tally


def _never_killed(life: Life) -> dict[str, str]:
    """What every run must show, wherever its state rests: each step's loss, and the digest at the end.

    This life is lived here, so that the children find everything imported that a life needs.
    """
    life.live()
    return _outcomes(life.log.read_text().splitlines())[0]


def _kill_until_through(life: Life, draw: random.Random, tally: Tally, kills: int) -> None:
    """Lives of one run, until one reaches the end; the first `kills` of them are to be killed."""
    killed = True
    while killed:
        delay, fatal_call, after = None, 0, draw.random() < 0.5
        if kills > 0 and draw.random() < 0.5:
            fatal_call = draw.randint(1, MAX_CALLS)
        elif kills > 0:
            delay = draw.uniform(0, MAX_DELAY_SECONDS)
        killed = run_life(replace(life, fatal_call=fatal_call, kill_after_call=after), delay)
        tally.kills += killed
        tally.kills_in_saves += killed and fatal_call > 0
        kills -= killed


def _outcomes(lines: list[str]) -> tuple[dict[str, str], int, int]:
    """(what was seen last by "loss N" and "end", repetitions that differ, checkpoints that a later life missed)."""
    seen: dict[str, str] = {}
    differing = lost = complete = 0
    for line in lines:
        what, *rest = line.split()
        if what == "load":
            lost += int(rest[0]) < complete
        elif what == "saved":
            complete = int(rest[0])
        else:
            key = f"loss {rest[0]}" if what == "loss" else what
            differing += seen.setdefault(key, rest[-1]) != rest[-1]
    return seen, differing, lost


def _judge(life: Life, expected: dict[str, str], tally: Tally) -> None:
    lines = life.log.read_text().splitlines()
    seen, differing, lost = _outcomes(lines)
    tally.identical_runs += seen == expected
    tally.other_losses += differing
    tally.lost_checkpoints += lost
    tally.loads += sum(line.startswith("load ") and line != "load 0" for line in lines)
    found, kept = {entry.name for entry in life.checkpoints.iterdir()}, life.manner.kept(life.steps)
    # An older checkpoint waits for an update that reads the next one; a kill before it makes two of them wait.
    waiting = {name for name in found - kept if not name.startswith(".")}
    tally.leftovers += len(found ^ kept) - min(len(waiting), 2)
    # A directory that is being made when its run dies has this suffix; later runs leave it for an hour.
    tally.leftovers += sum(entry.suffix != ".new" for entry in (life.folder / "disk").iterdir())


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def without_compiler() -> None:
    """Optimizers import torch's compiler, which they need not and which takes seconds."""
    kind: Any = torch.optim.Optimizer
    for name in ("zero_grad", "add_param_group"):
        setattr(kind, name, getattr(getattr(kind, name), "__wrapped__", getattr(kind, name)))


def in_a_process(root: Path, seed: int, kills: int) -> dict[str, Any]:
    """`kill_often` in a process that may fork: the fields of its tally."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_kills", str(root), str(seed), str(kills)]
    done = subprocess.run(command, env={**os.environ, **SINGLE_THREADED}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    root, seed, kills = sys.argv[1:]
    torch.set_num_threads(1)
    without_compiler()
    link_and_copy_always()
    tally = kill_often(Path(root), int(seed), int(kills))
    print(json.dumps({**asdict(tally), "flawless": tally.flawless}))


if __name__ == "__main__":
    main()
