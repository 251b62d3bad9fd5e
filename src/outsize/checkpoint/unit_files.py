"""The files of a unit in a checkpoint: the very files that hold it on disk, and one of what it has in memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.files import DataWriter
from outsize.checkpoint.manifest import CHUNK_BYTES, FileRecord
from outsize.checkpoint.peers import name_of_rank
from outsize.checkpoint.regions import AnyRegion, Region
from outsize.move.codes import blocks_of
from outsize.move.generations import ZERO_SUM, Generation, Generations, joined_sums, merged, sums_of
from outsize.move.memory import PAGE_BYTES, HostBuffer, copy
from outsize.move.shard import StateArray, UnitShard
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE, DiskStore, Store
from outsize.move.transfer import submitted
from outsize.planning.layout import ArrayLayout, Slot, round_up

WRITE_BYTES = 8 << 20
SYNC_THREADS = 16

Ranges = list[tuple[int, int]]
"""(first byte, bytes) of whole pages, in order."""

Place = tuple[str, int, int]
"""(file, byte in it, bytes from row to row where these lie in records, else 0)."""


class UnsyncedError(OSError):
    """What the run wrote did not reach the drive: nobody knows any more what its files hold."""


def sync_all(files: Iterable[Generations]) -> None:
    """Bring what was written to the drive. Several at a time: file systems commit them together.

    Raises `UnsyncedError`; the system tells of such a failure only once.
    """
    going = [file.now.file for file in files]
    try:
        with ThreadPoolExecutor(SYNC_THREADS, "outsize-sync") as pool:
            for syncing in [submitted(pool, file.sync) for file in going]:
                syncing.result()
    except OSError as error:
        raise UnsyncedError(error.errno, error.strerror, error.filename) from error


def record_of(generation: Generation) -> FileRecord:
    """The record of a file that does not change: out of the page sums, without a look at the data."""
    return FileRecord(generation.nbytes, tuple(joined_sums(generation.sums, generation.nbytes, CHUNK_BYTES)))


@final
class FrozenFile:
    """A file of the run that cannot be linked (another file system, stripes): copied, page sums compared."""

    def __init__(self, name: str, generation: Generation) -> None:
        self.name = name
        self._generation: Generation | None = generation.hold()

    def write(self, folder: Path) -> FileRecord:
        generation = self._generation
        assert generation is not None
        slab = HostBuffer(WRITE_BYTES)
        with DataWriter(folder / self.name, generation.nbytes, direct=True) as file:
            for start in range(0, generation.nbytes, WRITE_BYTES):
                end = min(start + WRITE_BYTES, generation.nbytes)
                if generation.touched[start // PAGE_BYTES : end // PAGE_BYTES].any():
                    content = slab.bytes[: end - start]
                    generation.read_checked(start, content)
                    file.write(start, content)
        return record_of(generation)

    def drop(self) -> None:
        """Let the run reuse the file's space; safe to repeat."""
        if self._generation is not None:
            self._generation.let_go()
            self._generation = None


# Note [Memory is written behind the training]
# A save holds what a unit has in memory, and a thread writes it from there. Whoever is about to change the unit calls
# `UnitShard.before_change`, which returns when the bytes are safe: written by then, copied where the budget has room
# for a copy, or else waited for. Weights whose place is the model's own memory may change at any time, and nobody is
# told: these are copied when the save begins, or written at once where there is no room for a copy.


@final
class HeldMemory:
    """What one unit has in memory, as it is when this is made. See Note [Memory is written behind the training]."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.may_copy = False
        self._nbytes = nbytes
        self._left: deque[tuple[int, torch.Tensor]] = deque()  # (byte in the file, the bytes), not written yet
        self._unsteady: list[tuple[int, torch.Tensor]] = []
        self._writing = threading.Lock()  # held while anybody writes or copies a piece
        self._over = threading.Event()  # written, or given up
        self._pid = os.getpid()
        self._sums = torch.full((nbytes // PAGE_BYTES,), ZERO_SUM, dtype=torch.int32, device="cpu")

    def add(self, start: int, content: torch.Tensor, steady: bool) -> None:
        """`content` (whole pages) goes to byte `start`. If it is not `steady`, it may change with nobody told."""
        for at in range(0, content.numel(), WRITE_BYTES):
            piece = content[at : at + WRITE_BYTES]
            (self._left if steady else self._unsteady).append((start + at, piece))

    @property
    def unsteady_bytes(self) -> int:
        return sum(content.numel() for _, content in self._unsteady)

    @property
    def steady_bytes(self) -> int:
        return sum(content.numel() for _, content in self._left)

    def copy_unsteady(self) -> None:
        self._left.extend((start, _copy_of(content)) for start, content in self._unsteady)
        self._unsteady = []

    def write(self, folder: Path) -> FileRecord:
        with DataWriter(folder / self.name, self._nbytes, direct=True) as file:
            self._left.extend(self._unsteady)
            while self._left:
                with self._writing:
                    start, content = self._left.popleft()
                    if content.device.type != "cpu":
                        content = _copy_of(content)
                    page = start // PAGE_BYTES
                    self._sums[page : page + content.numel() // PAGE_BYTES] = sums_of(content)
                    file.write(start, content)
        return FileRecord(self._nbytes, tuple(joined_sums(self._sums, self._nbytes, CHUNK_BYTES)))

    def secure(self) -> None:
        """The unit is about to change: block until its bytes are safe. Never raises."""
        if os.getpid() != self._pid:  # a forked child; its parent writes
            return
        if self.may_copy:
            with suppress(Exception), self._writing:  # what cannot be copied is waited for
                self._left = deque([(start, _copy_of(content)) for start, content in self._left])
                return
        self._over.wait()

    def drop(self) -> None:
        """Nobody waits for the bytes any more; safe to repeat."""
        self._left.clear()
        self._over.set()


def _copy_of(content: torch.Tensor) -> torch.Tensor:
    """In host memory, on whole pages; copied on this thread alone, the cores may be busy."""
    target = HostBuffer(content.numel()).bytes
    copy(target, content)
    return target


@final
class UnitFiles:
    """Where each array of one unit lies in the checkpoint: in `files` of the run, by name, or in `memory`."""

    def __init__(self, shard: UnitShard, trained: Collection[str], rank: int) -> None:
        stem = name_of_rank(f"unit-{shard.layout.index:05d}", rank)
        self.shard = shard
        self.files = {f"{stem}{f'-{at}' if at else ''}.bin": file for at, file in enumerate(shard.generations())}
        self._names = {file: name for name, file in self.files.items()}
        self._trained = trained
        self._memory_name = f"{stem}-memory.bin"
        self._memory_bytes = 0
        self._in_memory: list[tuple[int, Ranges, Callable[[int, int], torch.Tensor], bool]] = []
        if shard.params is None:
            segments = [(each.byte_start, each.numel * each.itemsize) for each in shard.layout.segments]
            self._params = self._place_in_memory(shard.layout.param_bytes, segments, self._in_buffer, steady=False)
        else:
            self._params = self._place(shard.params, [(0, shard.params.nbytes)])
        self._arrays = dict(shard.arrays)
        self._places = {key: self._place(array.store, self._used(array)) for key, array in self._arrays.items()}
        self._scales = {
            key: self._place(array.scales.store, [(0, array.scales.store.nbytes)])
            for key, array in self._arrays.items()
            if array.scales is not None
        }

    @property
    def copied_bytes(self) -> int:
        """Bytes of memory that are written."""
        return sum(nbytes for _, ranges, _, _ in self._in_memory for _, nbytes in ranges)

    def memory(self) -> HeldMemory | None:
        """What is in memory as it is now; None if nothing is."""
        if not self._in_memory:
            return None
        held = HeldMemory(self._memory_name, self._memory_bytes)
        for base, ranges, bytes_at, steady in self._in_memory:
            for first, nbytes in ranges:
                held.add(base + first, bytes_at(first, nbytes), steady)
        return held

    def arrays_of(self, slot: Slot) -> Iterator[tuple[str, AnyRegion]]:
        """The arrays of one parameter, by their keys in a `ParameterRecord`."""
        yield "weight", self._region(self._params, self.shard.param_layout, slot, DTYPES[slot.dtype], slot.shape)
        for key, array in self._arrays.items():
            if not (slot.name in self._trained if array.public else array.layout.has(slot)):
                continue
            dtype = MASTER_DTYPE[slot.dtype] if key == MASTER else array.dtype(slot.dtype)
            region = self._region(self._places[key], array.layout, slot, dtype, slot.shape)
            if array.code is not None and array.scales is not None and array.compact(slot.dtype):
                blocks = (blocks_of(slot.numel),)
                scales = self._region(self._scales[key], array.scales.layout, slot, torch.float32, blocks)
                region = replace(region, codec=array.code, scales=scales)
            yield key if key == MASTER else f"state.{key}", region

    @staticmethod
    def _region(place: Place, layout: ArrayLayout, slot: Slot, dtype: torch.dtype, shape: tuple[int, ...]) -> Region:
        file, base, stride = place
        first = layout.span(slot.offset, slot.end)[0] if slot.numel else 0
        return replace(Region.at(file, base + first, dtype, shape), stride=stride)

    def _place(self, store: Store, ranges: Ranges) -> Place:
        """Where a store begins. `ranges`: of it that mean anything."""
        if isinstance(store, DiskStore):
            return self._names[store.file], store.base, store.stride
        return self._place_in_memory(store.nbytes, ranges, store.in_place)

    def _place_in_memory(
        self, nbytes: int, ranges: Ranges, bytes_at: Callable[[int, int], Any], steady: bool = True
    ) -> Place:
        base = self._memory_bytes
        self._memory_bytes += round_up(nbytes, PAGE_BYTES)
        if ranges:
            self._in_memory.append((base, ranges, bytes_at, steady))
        return self._memory_name, base, 0

    def _in_buffer(self, first: int, nbytes: int) -> torch.Tensor:
        return self.shard.param_bytes(*self.shard.param_layout.elements(first, nbytes))

    def _used(self, array: StateArray) -> Ranges:
        """The pages of an array that belong to parameters with a state, or with a master."""
        slots = [
            slot
            for slot in self.shard.layout.slots
            if slot.numel and array.layout.has(slot) and (slot.name in self._trained or not array.public)
        ]
        return merged(array.layout.span(slot.offset, slot.end) for slot in slots)
