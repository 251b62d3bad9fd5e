"""The heavy jobs of the checkpoint benchmark, each in a process of its own: `python -m benchmarks.checkpoint_jobs JOB`.

A stand-still is the time that `save` keeps the training from going on. The update that the last step left is run
before it, and timed on its own: the training would have had to run it anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import outsize
from benchmarks.models import llama, tokens, train_step
from benchmarks.optimizer_engine import settle
from outsize.api.assemble import prepared_of
from outsize.checkpoint.background import Saving
from outsize.checkpoint.unit_files import WRITE_BYTES
from outsize.move.generations import Generation
from outsize.move.memory import PAGE_BYTES, HostBuffer, memory_of
from outsize.planning.layout import round_up

ON_DISK: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "disk")
IN_HOST: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "host")


class Job:
    """A Llama in training."""

    def __init__(
        self,
        layers: int,
        disk: str,
        host_memory: str,
        places: dict[str, Any],
        batch: int = 1,
        hidden: int = 768,
        **fields: Any,
    ) -> None:
        self._batch = batch
        on_disk = places is ON_DISK
        with outsize.init(host_memory=host_memory, disk=disk) if on_disk else contextlib.nullcontext():
            self.model = llama(layers, hidden, 4 * hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.parameters = sum(param.numel() for param in self.model.parameters())
        fields = {"activations": "recompute", "disk": disk if on_disk else None, **places, **fields}
        outsize.prepare(self.model, self.optimizer, host_memory=host_memory, **fields)
        self.steps = 0

    def step(self) -> float:
        """Seconds of one step of the user's loop; its update may still be owed."""
        self.steps += 1
        return timed(lambda: train_step(self.model, self.optimizer, tokens(self.steps, batch=self._batch)))

    def settle(self) -> float:
        """Seconds of the update that is owed."""
        return timed(lambda: settle(self.model))

    def whole_step(self) -> float:
        """Seconds of a step with its update, from rest to rest."""
        return self.step() + self.settle()

    def save(self, folder: Path) -> tuple[float, Saving]:
        """(seconds that `save` took, the checkpoint on its way)."""
        path = folder / f"step-{self.steps}"
        began = time.perf_counter()
        saving = outsize.save(path, self.model, self.optimizer, {"step": self.steps}, keep=1)
        return time.perf_counter() - began, saving

    def state(self) -> list[torch.Tensor]:
        """The bytes at rest in host memory."""
        prepared = prepared_of(next(self.model.parameters()))
        assert prepared is not None
        found = []
        for shard in (unit.shard for unit in prepared.engine.parameters.units):
            stores = [array.store for array in shard.arrays.values()] + ([shard.params] if shard.params else [])
            found += [view for view in (store.view(0, store.nbytes) for store in stores) if view is not None]
        return found


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def disk(directory: str, layers: str, hidden: str, host_memory: str, rounds: str) -> dict[str, Any]:
    """Everything on disk, the checkpoints beside it: what a save costs, and the step after it."""
    job = Job(int(layers), directory, host_memory, ON_DISK, hidden=int(hidden))
    for _ in range(2):
        job.whole_step()
    plain, owed, stands, after = [], [], [], []
    for _ in range(int(rounds)):
        plain.append(job.whole_step())
        job.step()
        owed.append(job.settle())
        seconds, saving = job.save(Path(directory) / "checkpoints")
        stands.append(seconds)
        after.append(job.whole_step())
        saving.wait()
    medians = {"step": plain, "owed": owed, "stand": stands, "after": after}
    result = {name: statistics.median(values) for name, values in medians.items()}
    return {**result, "stands": stands, "parameters": job.parameters}


def host(directory: str, layers: str, rounds: str, batch: str) -> dict[str, Any]:
    """Everything in host memory: what a save costs, and the steps while it is written behind them."""
    job = Job(int(layers), directory, "12GiB", IN_HOST, int(batch))
    folder = Path(directory) / "checkpoints"
    for _ in range(2):
        job.whole_step()
    stands, copies, plain, during, written, beside = [], [], [], [], [], []
    nbytes = sum(tensor.numel() for tensor in job.state())
    for _ in range(int(rounds)):
        beside += _steps_beside(job, PlainWriter(Path(directory) / "plain", nbytes))
        plain.append(job.whole_step())  # before a copy as before a save: memory just freed is quicker to come by
        copies.append(timed(lambda: [tensor.clone() for tensor in job.state()]))
        plain.append(job.whole_step())
        seconds, saving = job.save(folder)
        stands.append(seconds)
        began = time.perf_counter()
        during += _steps_while(job, saving)
        saving.wait()
        written.append(time.perf_counter() - began)
    medians = {"stand": stands, "copy": copies, "step": plain, "during": during, "written": written, "beside": beside}
    result = {name: statistics.median(values) for name, values in medians.items()}
    return {**result, "bytes": nbytes, "equal": _loads_equal(job, folder, directory, int(layers))}


def _steps_while(job: Job, saving: Saving) -> list[float]:
    """Whole steps that began while the checkpoint was on its way; at least one."""
    seconds = [job.whole_step()]
    while not saving.done():
        seconds.append(job.whole_step())
    return seconds


class PlainWriter(threading.Thread):
    """The least that any checkpoint would do: as many bytes past the page cache into a new file, and nothing else."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__()
        self._path, self._nbytes = path, nbytes
        self._piece = HostBuffer(WRITE_BYTES)
        self._piece.bytes.random_()

    def run(self) -> None:
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        content = memory_of(self._piece.bytes)
        for start in range(0, self._nbytes, WRITE_BYTES):
            os.pwrite(fd, content[: min(WRITE_BYTES, round_up(self._nbytes - start, PAGE_BYTES))], start)
        os.fsync(fd)
        os.close(fd)


def _steps_beside(job: Job, writer: PlainWriter) -> list[float]:
    """Whole steps that began while a plain program wrote as many bytes; at least one."""
    job.whole_step()
    writer.start()
    seconds = [job.whole_step()]
    while writer.is_alive():
        seconds.append(job.whole_step())
    writer.join()
    return seconds


def _loads_equal(job: Job, folder: Path, directory: str, layers: int) -> bool:
    """Whether the checkpoint of the present state is complete and gives the same bytes to another run."""
    job.save(folder)[1].wait()
    other = Job(layers, directory, "12GiB", IN_HOST)
    outsize.load(folder, other.model, other.optimizer)
    return all(torch.equal(one, two) for one, two in zip(job.state(), other.state(), strict=True))


class Stopwatch:
    """Adds up what the page checksums take, on whatever thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, name: str) -> None:
        inner = getattr(Generation, name)

        def measured(*args: Any) -> None:
            began = time.perf_counter()
            inner(*args)
            self.seconds += time.perf_counter() - began

        setattr(Generation, name, measured)


def verify(directory: str, layers: str, rounds: str) -> dict[str, Any]:
    """Everything on disk, twice: with and without `verify=True`, in turns."""
    watch = Stopwatch()
    watch.around("record")
    watch.around("check")
    jobs = {
        kind: Job(int(layers), directory, "256MiB", ON_DISK, verify=kind == "verify") for kind in ("plain", "verify")
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in jobs}
    sums: dict[str, list[float]] = {kind: [] for kind in jobs}
    for turn in range(int(rounds) + 1):
        order = list(jobs) if turn % 2 else list(reversed(jobs))  # the drive's state after one favours neither
        for kind in order:
            before = watch.seconds
            taken = jobs[kind].whole_step()
            if turn:
                seconds[kind].append(taken)
                sums[kind].append(watch.seconds - before)
    result: dict[str, Any] = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratios = [with_it / without for with_it, without in zip(seconds["verify"], seconds["plain"], strict=True)]
    result["ratio"] = statistics.quantiles(ratios, n=4)
    return {**result, **{f"{kind} sums": statistics.median(values) for kind, values in sums.items()}}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"disk": disk, "host": host, "verify": verify}


def main() -> None:
    name, directory, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        result = JOBS[name](folder, *rest)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
