"""The files of a unit in a checkpoint: the very files that hold it on disk, and an image of what is in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch

from outsize.checkpoint.files import naming
from outsize.checkpoint.joint import own_name
from outsize.checkpoint.manifest import CHUNK_BYTES, FileRecord
from outsize.checkpoint.regions import AnyRegion, CodedRegion, Region
from outsize.move.disk import DiskStore
from outsize.move.generations import ZERO_SUM, Generation, Generations, clone, joined_sums, link, merged, sums_of
from outsize.move.memory import PAGE_BYTES, HostBuffer, memory_of
from outsize.move.shard import BLOCK, DTYPES, MASTER, MASTER_DTYPE, StateArray, UnitShard
from outsize.move.store import Store
from outsize.plan.layout import ArrayLayout, Slot, round_up

WRITE_BYTES = 8 << 20
IN_PLACE_BYTES = 64 << 20
"""What is written from where it lies goes in large pieces: each wake of the writer costs the computation a barrier."""

SYNC_THREADS = 16

Ranges = list[tuple[int, int]]
"""(first byte, bytes) of whole pages, in order."""


class Part(ABC):
    """One file of a checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def write(self, folder: Path) -> FileRecord:
        """Bring the file into the folder and to the drive. Needs nothing that training changes meanwhile."""

    @abstractmethod
    def drop(self) -> None:
        """Give up what is held for `write`; safe to repeat."""


@final
class Present(Part):
    """A file that is in the folder already, linked or cloned."""

    def __init__(self, name: str, record: FileRecord) -> None:
        super().__init__(name)
        self._record = record

    def write(self, folder: Path) -> FileRecord:
        return self._record

    def drop(self) -> None:
        return


class UnsyncedError(OSError):
    """What the run wrote did not reach the drive: nobody knows any more what its files hold."""


@final
class FrozenCopy(Part):
    """A file of the run that cannot be linked here (another file system, stripes): copied, page sums compared."""

    def __init__(self, name: str, generation: Generation) -> None:
        super().__init__(name)
        self._generation: Generation | None = generation.hold()

    def write(self, folder: Path) -> FileRecord:
        generation = self._generation
        assert generation is not None
        slab = HostBuffer(WRITE_BYTES)
        with _NewFile(folder / self.name, generation.nbytes) as file:
            for start, nbytes in _touched(generation):
                content = slab.bytes[:nbytes]
                generation.read_checked(start, content)
                file.write(start, content)
        return record_of(generation)

    def drop(self) -> None:
        if self._generation is not None:
            self._generation.let_go()
            self._generation = None


@final
class CopyRoom:
    """The memory that copies of what is about to change may take, over all units of a save."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            fits = nbytes <= self._left
            self._left -= nbytes if fits else 0
        return fits

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes


# Note [Memory is written from where it lies]
# Between a save and the unit's next update nothing changes what a unit has in memory, so it is written from there, with
# no copy: fresh memory is slower to come by than a drive writes. Whoever is about to change the unit calls
# `UnitShard.before_change`, which lets go only when the bytes are safe: written by then, copied where there is room for
# a copy, or else waited for. Parameters whose place is the model's own memory can change at any time, with nobody told:
# these are copied when the save begins, or written at
# once where there is no room for a copy.
# The checksums are a pass over the same bytes at the speed of memory. Behind a computation on the same cores it costs
# more than in front of it, where all of them are idle (`take_sums`): a thread that is held up holds up its barrier.


@final
class Image(Part):
    """What one unit has in memory, as it is when the part is made. See Note [Memory is written from where it lies]."""

    def __init__(self, name: str, nbytes: int, entries: Iterable[MemoryEntry], room: CopyRoom) -> None:
        super().__init__(name)
        self._nbytes = nbytes
        self._left = deque(piece for entry in entries for piece in entry.pieces())
        self._room = room
        self._copied = 0
        self._borrowing = False  # whether the unit's own memory is being written
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._sums = torch.full((nbytes // PAGE_BYTES,), ZERO_SUM, dtype=torch.int32, device="cpu")

    def write(self, folder: Path) -> FileRecord:
        slab: HostBuffer | None = None
        with _NewFile(folder / self.name, self._nbytes) as file:
            while (piece := self._next()) is not None:
                start, content = piece.start, piece.content
                if content.device.type != "cpu":
                    slab = HostBuffer(WRITE_BYTES) if slab is None else slab
                    content = slab.bytes[: content.numel()].copy_(content)
                if not piece.summed:
                    self._sum(start, content)
                file.write(start, content)
        return FileRecord(self._nbytes, tuple(joined_sums(self._sums, self._nbytes, CHUNK_BYTES)))

    def _sum(self, start: int, content: torch.Tensor) -> None:
        page = start // PAGE_BYTES
        sums_of(content, self._sums[page : page + content.numel() // PAGE_BYTES])

    def unsummed(self) -> Iterator[Callable[[], None]]:
        """What takes the sums of the pieces in host memory, each; to be called before anything is written or changes.
        The others are summed when they are written."""
        for piece in self._left:
            if piece.content.device.type == "cpu":
                yield partial(self._sum_ahead, piece)

    def _sum_ahead(self, piece: Piece) -> None:
        self._sum(piece.start, piece.content)
        piece.summed = True

    def _next(self) -> Piece | None:
        """The piece to write now; the one before is written."""
        with self._changed:
            piece = self._left.popleft() if self._left else None
            self._borrowing = piece is not None and piece.copy is None
            self._changed.notify_all()
            return piece

    def secure_unsteady(self) -> bool:
        """Copy what may change with nobody told; False where there is no room, and nothing was copied."""
        with self._changed:
            return self._copy([piece for piece in self._left if not piece.steady])

    def _copy(self, pieces: Sequence[Piece]) -> bool:
        nbytes = sum(piece.content.numel() for piece in pieces)
        if not self._room.take(nbytes):
            return False
        try:
            copies = [_copy_of(piece.content) for piece in pieces]
        except BaseException:  # no memory, whatever the budget says
            self._room.give_back(nbytes)
            raise
        for piece, copy in zip(pieces, copies, strict=True):
            piece.copy = copy
        self._copied += nbytes
        return True

    def release(self) -> None:
        """The unit is about to change: block until its bytes are safe. Never raises."""
        if os.getpid() != self._pid:  # a forked child; its parent writes
            return
        with self._changed:
            with suppress(Exception):  # what cannot be copied is waited for
                self._copy([piece for piece in self._left if piece.copy is None])
            self._changed.wait_for(lambda: not self._borrowing and all(piece.copy is not None for piece in self._left))

    def drop(self) -> None:
        with self._changed:
            self._left.clear()
            self._borrowing = False
            self._room.give_back(self._copied)
            self._copied = 0
            self._changed.notify_all()


@dataclass(frozen=True)
class MemoryEntry:
    """One array in memory: where it goes in the image, the ranges of it that mean anything, and the bytes there.

    Those that may change with nobody told are not `steady`.
    """

    base: int
    ranges: Ranges
    bytes_at: Callable[[int, int], torch.Tensor]
    steady: bool

    def pieces(self) -> Iterator[Piece]:
        """The bytes where they lie."""
        for first, count in self.ranges:
            step = IN_PLACE_BYTES if self.bytes_at(first, count).device.type == "cpu" else WRITE_BYTES
            for at in range(first, first + count, step):
                yield Piece(self.base + at, self.bytes_at(at, min(step, first + count - at)), self.steady)


@dataclass
class Piece:
    """Bytes of a unit in memory, or their copy, and where they go in the image."""

    start: int
    lying: torch.Tensor
    steady: bool
    copy: torch.Tensor | None = None
    summed: bool = False
    """Whether its checksums were taken."""

    @property
    def content(self) -> torch.Tensor:
        return self.lying if self.copy is None else self.copy


def take_sums(images: Iterable[Image], threads: int) -> None:
    """Take the checksums of what is in host memory, on so many threads at once."""
    works = [work for image in images for work in image.unsummed()]
    try:
        with ThreadPoolExecutor(threads, "outsize-sums") as pool:
            for _ in pool.map(lambda work: work(), works):
                pass
    except RuntimeError:  # the interpreter is ending, and starts no threads any more: when they are written
        return


def _copy_of(content: torch.Tensor) -> torch.Tensor:
    """In host memory, on whole pages; copied on this thread alone, the cores may be busy."""
    copy = HostBuffer(content.numel()).bytes
    if content.device.type == "cpu":
        ctypes.memmove(copy.data_ptr(), content.data_ptr(), content.numel())
        return copy
    return copy.copy_(content)


def record_of(generation: Generation) -> FileRecord:
    """What the manifest says of a frozen file: out of the page sums, without a look at the data."""
    return FileRecord(generation.nbytes, tuple(joined_sums(generation.pages.sums, generation.nbytes, CHUNK_BYTES)))


def sync_all(files: Iterable[Generations]) -> None:
    """Bring what was written to the drive. Several at a time: file systems commit them together.

    Raises `UnsyncedError`; the system tells of such a failure only once.
    """
    going = [file.now.file for file in files]
    try:
        with ThreadPoolExecutor(SYNC_THREADS, "outsize-sync") as pool:
            for _ in pool.map(lambda file: file.sync(), going):
                pass
    except OSError as error:
        raise UnsyncedError(error.errno, error.strerror, error.filename) from error
    except RuntimeError:  # the interpreter is ending, and starts no threads any more
        for file in going:
            file.sync()


def take(files: Generations, folder: Path, name: str, room: int) -> Part:
    """Make a file of the run, which is synced, part of the checkpoint where the file system can, and freeze it.

    One that is to be copied is frozen where `room` bytes hold its next generation meanwhile.
    """
    generation = files.now
    if link(generation, folder / name):
        files.freeze()
        return Present(name, record_of(generation))
    if clone(generation, folder / name):  # the file system keeps the two apart
        return Present(name, record_of(generation))
    if files.has_next or files.reserved_bytes <= room:
        files.freeze()
    return FrozenCopy(name, generation)


@final
class UnitPlaces:
    """Where each array of one unit lies in the checkpoint: `files` of the run by name, and an image of the rest."""

    def __init__(self, shard: UnitShard, trained: Collection[str], rank: int = 0) -> None:
        stem = own_name(f"unit-{shard.layout.index:05d}", rank)
        self.files = {f"{stem}{f'-{at}' if at else ''}.bin": file for at, file in enumerate(shard.generations())}
        self.image_name = f"{stem}-memory.bin"
        self.image_bytes = 0
        self._shard = shard
        self._trained = trained
        self._names = {file: name for name, file in self.files.items()}
        self._entries: list[MemoryEntry] = []
        self._params = self._place_params()
        self._arrays = dict(shard.arrays)
        self._places = {
            name: self._place(array.store, partial(self._array_ranges, array)) for name, array in self._arrays.items()
        }
        self._scales = {
            name: self._place(array.scales.store, partial(_whole, array.scales.store))
            for name, array in self._arrays.items()
            if array.scales is not None
        }

    @property
    def file_bytes(self) -> int:
        """Bytes of the files on disk that may hold anything but zeros."""
        return sum(file.touched_bytes for file in self.files.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of memory that the image takes."""
        return sum(nbytes for entry in self._entries for _, nbytes in entry.ranges)

    def image(self, room: CopyRoom) -> Image | None:
        """What is in memory as it is now. It is to be held, or else written at once."""
        return Image(self.image_name, self.image_bytes, self._entries, room) if self._entries else None

    def hold(self, image: Image) -> bool:
        """Whoever changes the unit from now on asks the image first; False where that cannot be."""
        self._shard.before_change()
        if not image.secure_unsteady():
            return False
        self._shard.hold = image.release
        return True

    def weight(self, slot: Slot) -> Region:
        return self._region(self._params, self._shard.param_layout, slot, DTYPES[slot.dtype])

    def master(self, slot: Slot) -> Region | None:
        array = self._arrays.get(MASTER)
        if array is None or not array.layout.has(slot):
            return None
        return self._region(self._places[MASTER], array.layout, slot, MASTER_DTYPE[slot.dtype])

    def states(self, slot: Slot) -> dict[str, AnyRegion]:
        return {array.name: self._state(array, slot) for array in self._arrays.values() if array.public}

    def _state(self, array: StateArray, slot: Slot) -> AnyRegion:
        region = self._region(self._places[array.name], array.layout, slot, array.dtype(slot.dtype))
        if array.codec is None or array.scales is None or not array.compact(slot.dtype):
            return region
        blocks = (-(-slot.numel // BLOCK),)
        scales = self._region(self._scales[array.name], array.scales.layout, slot, torch.float32, blocks)
        return CodedRegion(region, scales, array.codec.kind)

    def _region(
        self,
        place: tuple[str, int],
        layout: ArrayLayout,
        slot: Slot,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
    ) -> Region:
        file, base = place
        first = layout.span(slot.offset, slot.end)[0] if slot.numel else 0
        return Region.at(file, base + first, dtype, slot.shape if shape is None else shape)

    def _place_params(self) -> tuple[str, int]:
        shard = self._shard
        nbytes = shard.layout.param_bytes
        if shard.params is None:
            ranges = [(each.byte_start, each.numel * each.itemsize) for each in shard.layout.segments]
            return self._in_memory(nbytes, ranges, partial(_in_buffer, shard), steady=False)
        return self._place(shard.params, lambda: [(0, nbytes)])

    def _place(self, store: Store, ranges: Callable[[], Ranges]) -> tuple[str, int]:
        """(file, byte in it) of a store's first byte."""
        if isinstance(store, DiskStore):
            assert isinstance(store.file, Generations)
            return self._names[store.file], store.base
        return self._in_memory(store.nbytes, ranges(), partial(_in_store, store))

    def _in_memory(
        self, nbytes: int, ranges: Ranges, bytes_at: Callable[[int, int], torch.Tensor], steady: bool = True
    ) -> tuple[str, int]:
        base = self.image_bytes
        self.image_bytes += round_up(nbytes, PAGE_BYTES)
        if ranges:
            self._entries.append(MemoryEntry(base, ranges, bytes_at, steady))
        return self.image_name, base

    def _array_ranges(self, array: StateArray) -> Ranges:
        """The pages of an array that belong to parameters with a state, or with a master."""
        slots = [
            slot
            for slot in self._shard.layout.slots
            if slot.numel and array.layout.has(slot) and (slot.name in self._trained or not array.public)
        ]
        return merged(array.layout.span(slot.offset, slot.end) for slot in slots)


def _whole(store: Store) -> Ranges:
    return [(0, store.nbytes)]


def _in_buffer(shard: UnitShard, first: int, nbytes: int) -> torch.Tensor:
    start, end = shard.param_layout.elements(first, nbytes)
    return shard.param_bytes(start, end)


def _in_store(store: Store, first: int, nbytes: int) -> torch.Tensor:
    content = store.in_place(first, nbytes)
    assert content is not None, "the store is memory"
    return content


def _touched(generation: Generation) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of what may hold anything but zeros, at most `WRITE_BYTES` each."""
    for start in range(0, generation.nbytes, WRITE_BYTES):
        end = min(start + WRITE_BYTES, generation.nbytes)
        if generation.pages.touched[start // PAGE_BYTES : end // PAGE_BYTES].any():
            yield start, end - start


@final
class _NewFile:
    """A new file of known length, written in whole pages past the page cache and synced when it is closed."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags & ~os.O_EXCL, 0o666)  # the failed attempt may have created it
        try:
            with naming(path, f"making a file of {nbytes} bytes"):
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, offset: int, content: torch.Tensor) -> None:
        left = memory_of(content)
        with naming(self._path, f"writing {len(left)} bytes at {offset}"):
            while left:
                written = os.pwrite(self._fd, left, offset)
                offset, left = offset + written, left[written:]

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                with naming(self._path, "syncing"):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)
