"""Files of a checkpoint: tensors' bytes at offsets, with every result checked and every error naming its file."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    ParameterRecord,
)
from outsize.checkpoint.regions import AnyRegion, Region
from outsize.checkpoint.values import INLINE_NUMEL, inline
from outsize.move.codes import BLOCK, decode
from outsize.move.disk import naming as naming
from outsize.move.disk import open_direct
from outsize.move.generations import crc32c
from outsize.move.memory import MAPPED_BYTES, HostBuffer, memory_of
from outsize.move.transfer import submitted
from outsize.optim.rules import join_master
from outsize.planning.layout import round_up
from outsize.planning.sizes import format_bytes

ALIGN_BYTES = 64
SPARE_FILES = 64
MOST_OPEN = 16
"""Files of others at a time. Those among which a layer was divided are read in turn."""

VERIFIERS = 4
GROUP = 64
"""Threads that compare chunks, and how many each takes in a row: a drive gives most to some long readings at once."""


@final
class DataWriter:
    """A new file of known length, written at any offsets and synced when it is closed without an error."""

    def __init__(self, path: Path, nbytes: int, direct: bool = False) -> None:
        """`direct`: in whole pages, of which the last may pass the end, past the page cache where the system can."""
        self._path, self._nbytes, self._direct = path, nbytes, direct
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = open_direct(str(path), flags) if direct else os.open(path, flags, 0o666)
        try:
            with naming(path, f"making a file of {format_bytes(nbytes)}"):
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, offset: int, content: torch.Tensor) -> None:
        left, direct = memory_of(content), self._direct
        with naming(self._path, f"writing {format_bytes(len(left))} at {offset}"):
            while left and offset < self._nbytes:
                try:
                    written = os.pwrite(self._fd, left, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct, written = False, 0  # blocks larger than pages, or a limit of the size that ends inside one
                    flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                offset, left = offset + written, left[written:]

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                with naming(self._path, "syncing"):
                    os.ftruncate(self._fd, self._nbytes)
                    os.fsync(self._fd)
        finally:
            fd, self._fd = self._fd, -1  # a write that an interrupt has left under way must not reach another file
            os.close(fd)


@final
class PlannedFile:
    """A file of arrays: each gets its place first, then all are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self._contents: list[tuple[Region, torch.Tensor | Callable[[], torch.Tensor]]] = []

    def keep(self, tensor: torch.Tensor) -> Region:
        """Where the tensor will lie; it must not change before `write`."""
        return self.keep_later(tensor.dtype, tuple(tensor.shape), tensor)

    def keep_later(
        self, dtype: torch.dtype, shape: tuple[int, ...], value: torch.Tensor | Callable[[], torch.Tensor]
    ) -> Region:
        """Where an array will lie whose elements `value` has, or gives when they are written."""
        region = Region.at(self.name, round_up(self.nbytes, ALIGN_BYTES), dtype, shape)
        self.nbytes = region.pieces[0].offset + region.nbytes
        self._contents.append((region, value))
        return region

    def small_or_kept(self, path: str, tensor: torch.Tensor) -> Any:
        """For `encode`: a small tensor in the manifest itself, any other in the file."""
        if tensor.numel() <= INLINE_NUMEL and not tensor.is_complex():
            return inline(path, tensor)
        return self.keep(tensor).to_json()

    def kept(self, path: str, tensor: torch.Tensor) -> Any:
        """For `encode`: a tensor in the file."""
        return self.keep(tensor).to_json()

    def bring_to_host(self) -> None:
        """So that another process can be sent all of it."""
        self._contents = [(region, host_copy(value)) for region, value in self._contents]

    def write(self, folder: Path, files: dict[str, FileRecord]) -> None:
        """Write the file, add its record to `files`, and let go of the tensors."""
        with DataWriter(folder / self.name, self.nbytes) as file:
            for region, value in self._contents:
                file.write(region.pieces[0].offset, host_copy(value))
        self._contents = []
        files[self.name] = file_record(folder / self.name)


def host_copy(value: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor, or what gives one, as plain bytes in host memory: contiguous, nothing left to conjugate or negate."""
    found = value if isinstance(value, torch.Tensor) else value()
    return found.detach().cpu().resolve_conj().resolve_neg().contiguous()


@contextmanager
def descriptor(path: Path, flags: int = 0) -> Iterator[int]:
    """Of a file or folder, open for reading in the block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read_manifest(path: Path, most: int | None = None, folder: int | None = None) -> bytes:
    """The bytes of a manifest, or the first ones. Raises `ValueError` unless it is a regular file of a sane size.

    `folder` is an open descriptor of its folder.
    """
    fd = _open_regular(path, folder)
    with open(fd, "rb") as file:
        nbytes = os.fstat(fd).st_size
        if nbytes > MAX_MANIFEST_BYTES:
            raise ValueError(f"{path} is larger than {format_bytes(MAX_MANIFEST_BYTES)}")
        return file.read(nbytes if most is None else min(most, nbytes))  # memory for what there is, not for the most


def _open_regular(path: Path, folder: int | None) -> int:
    """A descriptor of a regular file. Raises `ValueError` for anything else: a pipe would block."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with naming(path, "opening"):
        try:
            fd = os.open(path if folder is None else path.name, flags, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link
                raise ValueError(f"{path} is not a regular file; the checkpoint is damaged") from error
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path} is not a regular file; the checkpoint is damaged")
    return fd


def file_record(path: Path) -> FileRecord:
    """The record of a finished file, which is read once more (out of the page cache if it was written just now)."""
    with descriptor(path) as fd:
        nbytes = os.fstat(fd).st_size
        return FileRecord(nbytes, tuple(_sums(fd, path, nbytes, range(-(-nbytes // CHUNK_BYTES)))))


def _sums(fd: int, path: Path, nbytes: int, chunks: Iterable[int]) -> Iterator[int]:
    """The checksums of these chunks of a file of so many bytes. Memory: a chunk."""
    slab = HostBuffer(CHUNK_BYTES)
    for at in chunks:
        content = slab.bytes[: min(CHUNK_BYTES, nbytes - at * CHUNK_BYTES)]
        _read(fd, at * CHUNK_BYTES, content, path)
        yield crc32c(content)


def _read(fd: int, offset: int, out: torch.Tensor, path: Path) -> None:
    content = memory_of(out)
    with naming(path, f"reading {format_bytes(len(content))} at {offset}"):
        read_exactly(fd, offset, content, path)


def read_exactly(fd: int, offset: int, out: memoryview, path: Path) -> None:
    """Fill `out` with the bytes from `offset` on. Raises `ValueError` that names the file where it ends before."""
    while out:
        count = os.preadv(fd, [out], offset)
        if not count:
            raise ValueError(f"{path} ends at {offset}; it was changed while it was being read")
        offset, out = offset + count, out[count:]


@final
class OpenFiles:
    """Files that are opened when they are first read. At most `MOST_OPEN` are open at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def at(self, path: Path) -> int:
        """The file's descriptor."""
        if path not in self._open:
            if len(self._open) == MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system when it is dropped; a large piece of the heap may be left in fragments."""
    nbytes = numel * dtype.itemsize
    if nbytes < MAPPED_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return HostBuffer(nbytes).bytes.view(dtype)  # [numel]


@final
class DataReader:
    """The data files of one checkpoint, all open: they are read whole even where another process removes or replaces
    the checkpoint meanwhile. Opening checks that every file has its length."""

    def __init__(self, folder: Path, manifest: Manifest, held: int) -> None:
        """`held`: a descriptor of the folder, through which the files are found."""
        self._folder = folder
        self._files = manifest.files
        self._open: dict[str, int] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(os.listdir("/proc/self/fd")) + len(manifest.files) + SPARE_FILES
        if resource.RLIM_INFINITY != soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
        try:
            for name, record in manifest.files.items():
                try:
                    self._open[name] = _open_regular(folder / name, held)
                except FileNotFoundError as error:
                    what = "a file of the checkpoint is missing; load an earlier one"
                    raise FileNotFoundError(error.errno, what, error.filename) from error
                os.posix_fadvise(self._open[name], 0, 0, os.POSIX_FADV_SEQUENTIAL)
                nbytes = os.fstat(self._open[name]).st_size
                if nbytes != record.nbytes:
                    raise ValueError(
                        f"{folder / name} has {nbytes} bytes and should have {record.nbytes}; the checkpoint is "
                        f"damaged: load an earlier one"
                    )
        except BaseException:
            self.close()
            raise

    def verify(self, regions: Iterable[Region] = (), files: Iterable[str] = ()) -> None:
        """Compare the bytes of the regions, and of whole files, with their checksums, each chunk once.

        Raises `ValueError` that names file and chunk. Memory: a chunk a thread.
        """
        wanted = {name: set(range(len(self._files[name].sums))) for name in files}
        for region in regions:
            for piece in filter(lambda piece: piece.numel, region.pieces):  # of an empty one there may be no file
                end = piece.offset + region.extent(piece.numel)
                numbers = range(piece.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))
                wanted.setdefault(piece.file, set()).update(numbers)
        chunks = {name: sorted(numbers) for name, numbers in sorted(wanted.items())}
        with ThreadPoolExecutor(VERIFIERS, "outsize-verify") as pool:  # one reads while another sums up
            groups = [
                submitted(pool, self._verify, name, numbers[at : at + GROUP])
                for name, numbers in chunks.items()
                for at in range(0, len(numbers), GROUP)
            ]
            try:
                for group in groups:
                    group.result()
            finally:
                for group in groups:
                    group.cancel()

    def _verify(self, name: str, numbers: Sequence[int]) -> None:
        record, path = self._files[name], self._folder / name
        for at, found in zip(numbers, _sums(self._open[name], path, record.nbytes, numbers), strict=True):
            if found != record.sums[at]:
                raise ValueError(
                    f"{path} is damaged: chunk {at} (the bytes from {at * CHUNK_BYTES}) has the checksum {found:08x} "
                    f"and should have {record.sums[at]:08x}; load an earlier checkpoint"
                )

    def read(self, region: AnyRegion, start: int = 0, end: int | None = None) -> torch.Tensor:
        """The elements [start, end) of an array, 1-D; the whole array in its shape if no range is given."""
        last = region.numel if end is None else end
        if not isinstance(region, Region):
            runs = [self.read(*run) for run in region.runs(start, last)]
            found = torch.cat(runs) if runs else _empty(0, region.dtype)
        elif region.scales is None:
            found = self._read_stored(region, start, last)
        else:
            first = start // BLOCK * BLOCK
            scales = self._read_stored(region.scales, first // BLOCK, -(-last // BLOCK))
            found = decode(self._read_stored(region, first, last), scales, region.codec == "root")[start - first :]
        return found.view(region.shape) if end is None else found

    def readable(self, region: AnyRegion) -> Readable:
        plain = region if isinstance(region, Region) and region.scales is None else None
        into = None if plain is None else partial(self._read_into, plain)
        return Readable(region.shape, region.dtype, partial(self.read, region), into=into)

    def exact(self, record: ParameterRecord) -> Readable:
        """The values of a parameter: those of its fp32 master, where it has one."""
        weight, master = record.weight, record.master
        if master is None:
            return self.readable(weight)

        def read(start: int, end: int) -> torch.Tensor:
            return join_master(self.read(weight, start, end), self.read(master, start, end))

        return Readable(record.shape, torch.float32, read)

    def _read_stored(self, region: Region, start: int, end: int) -> torch.Tensor:
        out = _empty(end - start, region.stored)
        self._read_into(region, start, out)
        return out

    def _read_into(self, region: Region, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D) with what is stored from element `start` on."""
        for piece, skipped, first in region.within(start, start + out.numel()):
            file, wanted = self._open[piece.file], out[first : first + piece.numel - skipped]
            if not region.stride:
                _read(file, piece.offset, wanted, self._folder / piece.file)
                continue
            content = _empty(-(-piece.numel // region.row) * region.stride, torch.uint8)
            _read(file, piece.offset, content[: region.extent(piece.numel)], self._folder / piece.file)
            rows = content.view(-1, region.stride)[:, : region.row * region.stored.itemsize]
            if wanted.numel() == rows.numel() // region.stored.itemsize:
                wanted.view(torch.uint8).view(rows.shape).copy_(rows)
            else:
                rows = rows.clone(memory_format=torch.contiguous_format).view(-1)
                wanted.copy_(rows.view(region.stored)[skipped : piece.numel])

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def open_manifest(folder: Path) -> tuple[Manifest, DataReader]:
    """The manifest and the files behind it, whose lengths are checked. Raises `ValueError` that names what is wrong."""
    file = folder / MANIFEST_NAME
    with naming(folder, "opening"), descriptor(folder, os.O_DIRECTORY) as held:
        content = read_manifest(file, folder=held)
        try:
            manifest = Manifest.from_text(content.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error
        return manifest, DataReader(folder, manifest, held)
