"""What a prepared model holds of the system, and its orderly end."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import final

import torch

from outsize.checkpoint.background import Saving
from outsize.move.activations import ActivationStore
from outsize.move.comm import Ranks
from outsize.move.conveyor import Conveyor
from outsize.move.device import Lanes
from outsize.move.disk import DiskEngine, RunDirectory, StripedFile, open_engine
from outsize.move.files import SourceFile
from outsize.move.generations import Generations
from outsize.move.memory import Ledger, let_go_of_freed_memory
from outsize.move.outbox import Outbox
from outsize.move.shard import UnitShard
from outsize.move.tokens import TokenStore


@final
class Resources:
    """Directories, files, memory and the conveyor's thread of one prepared model; closed once, by its own process."""

    def __init__(
        self,
        directories: Sequence[Path],
        slab_bytes: int,
        slabs: int,
        device: torch.device,
        outbox_bytes: int,
        reads: bool,
    ) -> None:
        """`reads`: there is something on disk, be it only in files of others."""
        self.ledger = Ledger()
        self.lanes = None if device.type == "cpu" else Lanes(device)
        self.shards: list[UnitShard] = []
        self.ranks: Ranks | None = None
        self._pid = os.getpid()
        self._files: list[Generations] = []
        self._runs: list[RunDirectory] = []
        self._sources: dict[str, SourceFile] = {}
        self.saving: Saving | None = None  # the last one; there is one on its way at a time
        self.disk: DiskEngine | None = None
        self.activations: ActivationStore | None = None
        self.tokens: TokenStore | None = None
        try:
            for directory in directories:
                self._runs.append(RunDirectory(directory))
            if reads:
                self.disk = open_engine()
            self.conveyor = Conveyor(slab_bytes, slabs, self.ledger, self.lanes)
        except BaseException:
            self._close_disk()
            raise
        self.outbox = (
            Outbox(outbox_bytes, self.lanes, self.conveyor, self.ledger)
            if self.lanes is not None and outbox_bytes
            else None
        )

    def open_file(self, name: str, nbytes: int, verify: bool, summed: bool) -> Generations:
        """A unit's file; checkpoints may hold one that is `summed`."""
        make = partial(_make_file, self.disk, self.run_directories, name, nbytes)
        self._files.append(Generations(make, verify, summed))
        return self._files[-1]

    def open_source(self, path: str) -> SourceFile:
        """A file of others with weights that are read in place."""
        if path not in self._sources:
            self._sources[path] = SourceFile(path)
        return self._sources[path]

    def open_scratch(self, name: str, nbytes: int) -> StripedFile:
        """A file for bytes that nobody wants after the run."""
        return _make_file(self.disk, self.run_directories, name, nbytes, 0)

    def note_saves(self, directory: Path) -> None:
        """The run is about to save into a directory. See `RunDirectory.note_saves`."""
        for run in self._runs:
            run.note_saves(directory)

    def settle_saving(self) -> None:
        """Block until no checkpoint of the model is on its way. Raises what went wrong with the last one, once."""
        if self.saving is not None:
            try:
                self.saving.settle()
            finally:
                if self.saving.done():
                    self.saving = None

    def synchronize(self) -> None:
        """Block until an accelerator has done what it was given: whatever stream works with it next finds it there."""
        if self.lanes is not None:
            self.lanes.current().synchronize()
            self.lanes.synchronize()

    @property
    def run_directories(self) -> list[Path]:
        """This run's own directories, one for each `disk` directory."""
        return [run.path for run in self._runs]

    @property
    def bytes_read(self) -> int:
        return 0 if self.disk is None else self.disk.bytes_read

    @property
    def bytes_written(self) -> int:
        return 0 if self.disk is None else self.disk.bytes_written

    def close(self) -> None:
        """End the thread, remove the run's files; safe to repeat; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if self.conveyor.is_here:  # the collector runs on any thread; this one must end before its memory goes
            threading.Thread(target=self.close, name="outsize-close").start()
            return
        try:
            ranks = self.ranks and self.ranks.model
            for each in (ranks, self.conveyor, self.activations, self.tokens, *self.shards, self.outbox):
                if each is not None:
                    each.close()
            self.shards = []
        finally:
            let_go_of_freed_memory(self)
            self._close_disk()

    def _close_disk(self) -> None:
        for each in (self.disk, *self._files, *self._sources.values(), *self._runs):
            if each is not None:
                each.close()
        self._files, self._sources, self._runs = [], {}, []


def _make_file(
    engine: DiskEngine | None, directories: Sequence[Path], name: str, nbytes: int, number: int
) -> StripedFile:
    """One generation's file. Knows nothing of the `Resources`, which an error's traceback must not keep alive."""
    assert engine is not None
    return StripedFile(engine, directories, f"{name}.{number}", nbytes)
