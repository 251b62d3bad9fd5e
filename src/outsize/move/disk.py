"""The disk tier: a run's own directory, preallocated files in it, and transfers whose every result is checked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, final

import torch

from outsize import _native
from outsize._native import DiskEngine as DiskEngine
from outsize.move.memory import PAGE_BYTES, memory_of
from outsize.move.tracing import begun, ended
from outsize.move.transfer import Transfer
from outsize.planning.layout import round_up
from outsize.planning.sizes import format_bytes
from outsize.planning.trace import READS, WRITES

SPARE_FILES = 512
"""Open files that are left to the user's own program."""

LARGEST_FILE = 8 << 40
"""Bytes of a file that is a hole where nothing lies: every usual file system allows so many."""

ENGINE_VARIABLE = "OUTSIZE_DISK_ENGINE"
_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
}
STRIPE_BYTES = 4 << 20
RUN_PREFIX = "outsize-run-"
_NEW_SUFFIX = ".new"
_SAVES = "saves"
_RUN_NAME = re.compile(rf"{RUN_PREFIX}\d+-[0-9a-f]{{12}}(\{_NEW_SUFFIX})?")
_UNLOCKED_IS_DEAD_AFTER_SECONDS = 3600

_fallocate = ctypes.CDLL(None).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE in <linux/falloc.h>

Work = Callable[[], None]

Place = int | torch.Tensor
"""Where whole pages lie in a file: side by side from this byte on, or under these numbers (int64, ascending)."""

# Note [Whose directory]
# Each run works in a sub-directory of its own that holds a file named `lock`, under a POSIX lock for as long as the
# process lives; the kernel releases it however the process ends. POSIX locks are not inherited by forked data loader
# workers, so a worker that outlives the run does not keep the directory. A directory whose lock can be taken belongs
# to a dead run and is removed; the twelve random digits of its name are nobody else's. The lock says nothing between
# runs of one process, and goes when that process closes any descriptor of it. So each process knows its own
# directories, by device and inode, whatever the mount or the link through which it sees them. The directory gets its
# final name only once its lock is held.
# A directory without a `lock` is being made, or half removed, or a live run's from which something that cleans up has
# taken it: it is dead when nothing in it has changed for an hour. Cleaners go by age and nobody writes to a lock, so it
# is touched whenever the run makes a file.


class DiskDirectoryError(OSError, ValueError):
    """The directory given as `disk` cannot be used: a user's mistake or the system's, so it is both."""


def open_engine() -> DiskEngine:
    """The fastest disk engine that works here, or the one that the environment variable names."""
    wanted = os.environ.get(ENGINE_VARIABLE, "")
    if wanted not in ("", "uring", "threads"):
        raise ValueError(f"{ENGINE_VARIABLE} is {wanted!r}; it must be 'uring' or 'threads'")
    refused = 0 if wanted == "threads" else _native.probe_uring()
    if wanted == "uring" and refused:
        raise OSError(
            refused,
            f"{ENGINE_VARIABLE} is 'uring', and this kernel or container refuses io_uring ({os.strerror(refused)}); "
            f"unset it, or set it to 'threads'",
        )
    try:
        return DiskEngine("threads" if wanted == "threads" or refused else "uring")
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            "no thread can be started for the disk: raise the limit of processes (ulimit -u), or that of the container",
        ) from error


@contextmanager
def naming(path: str | Path, doing: str) -> Iterator[None]:
    """Give an `OSError` of the block the path and what was being done, unless it names a file already."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{explain(error)} ({doing})", str(path)) from error


def explain(error: OSError) -> str:
    """What an error says, and what to do about it where its words do not tell."""
    words = error.strerror or os.strerror(error.errno or 0)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{words}: {remedy}" if remedy else words


@final
class RunDirectory:
    """This run's own sub-directory of one `disk` directory. See Note [Whose directory]."""

    alive: ClassVar[set[tuple[int, int]]] = set()
    """(device, inode) of the directories of this process."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._saves: set[Path] = set()
        nearest(parent)
        remove_dead_runs(parent)
        self._pid = os.getpid()
        name = f"{RUN_PREFIX}{self._pid}-{secrets.token_hex(6)}"
        fresh = parent / (name + _NEW_SUFFIX)
        try:
            parent.mkdir(exist_ok=True)
            fresh.mkdir()
            self._lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = parent / name
            self._identity = _identity(fresh)
            RunDirectory.alive.add(self._identity)
            fresh.rename(self.path)
        except OSError as error:
            message = f"cannot write to the disk directory ({os.strerror(error.errno or 0)}); name one that is writable"
            raise DiskDirectoryError(error.errno, message, str(parent)) from error
        self._open = True

    def close(self) -> None:
        """Remove the directory and all in it; safe to repeat; does nothing in a forked child."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            RunDirectory.alive.discard(self._identity)
            os.close(self._lock)

    def note_saves(self, directory: Path) -> None:
        """Remember that the run saves into a directory: what a killed save leaves there shares files with the run."""
        if directory not in self._saves:
            path = self.path / _SAVES
            with suppress(FileNotFoundError), naming(path, "noting a save"), open(path, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(str(directory))}\n")  # where somebody has removed the folder, nobody looks
            self._saves.add(directory)


def dead_saves(parent: Path) -> list[Path]:
    """The directories into which dead runs of a `disk` directory have saved."""
    found: dict[Path, None] = {}
    for entry in _dead_runs(parent):
        with suppress(OSError, ValueError, TypeError):
            lines = (entry / _SAVES).read_text("utf-8").splitlines()
            found.update(dict.fromkeys(Path(json.loads(line)) for line in lines))
    return list(found)


def nearest(directory: Path) -> Path:
    """The `disk` directory, or where it does not exist yet the one in which it will be made. Raises
    `DiskDirectoryError` where neither is a directory."""
    found = directory if os.path.lexists(directory) else directory.parent
    if not found.exists():
        message = f"the disk directory cannot be made, because {found} does not exist; create {found} first"
        raise DiskDirectoryError(errno.ENOENT, message, str(directory))
    if not found.is_dir():
        raise DiskDirectoryError(errno.ENOTDIR, f"disk must be a directory, and {found} is none", str(directory))
    return found


def remove_dead_runs(parent: Path) -> None:
    """Remove what dead runs left in a `disk` directory. See Note [Whose directory]."""
    for entry in _dead_runs(parent):
        shutil.rmtree(entry, ignore_errors=True)


def _dead_runs(parent: Path) -> Iterator[Path]:
    for entry in list(parent.glob(f"{RUN_PREFIX}*")):
        dead = False
        with suppress(OSError):  # it is gone, or another user's: not ours to judge
            own = _identity(entry) in RunDirectory.alive
            dead = not own and bool(_RUN_NAME.fullmatch(entry.name)) and _is_dead(entry)
        if dead:
            yield entry


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _is_dead(entry: Path) -> bool:
    lock: int | None = None
    if not entry.name.endswith(_NEW_SUFFIX):
        with suppress(FileNotFoundError):
            lock = os.open(entry / "lock", os.O_RDWR | os.O_CLOEXEC)
    if lock is None:
        changed = max(each.stat().st_mtime for each in (entry, *entry.iterdir()))
        return time.time() - changed > _UNLOCKED_IS_DEAD_AFTER_SECONDS
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def free_bytes(directories: Sequence[Path]) -> int:
    """What may be written: the sum over distinct file systems, after the checks that each directory is usable."""
    free: dict[int, int] = {}
    for directory in directories:
        place = nearest(directory)
        remove_dead_runs(directory)
        status = os.statvfs(place)
        free[place.stat().st_dev] = status.f_bavail * status.f_frsize
    return sum(free.values())


def devices_of(directories: Sequence[Path]) -> frozenset[int]:
    """The file systems (`st_dev`) in which the directories lie, or will."""
    return frozenset(nearest(directory).stat().st_dev for directory in directories)


@final
class DiskTransfer(Transfer):
    """Requests of the disk engine that belong together. `beside` is work for while they are under way, `then` for when
    they are over and nobody has used the bytes yet."""

    def __init__(
        self, engine: DiskEngine, beside: Work | None = None, then: Work | None = None, lane: str = READS
    ) -> None:
        self._lane, self._began = lane, begun()
        self._engine = engine
        self._parts: list[tuple[int, str]] = []  # (ticket, path)
        self._beside = beside
        self._then = then
        self._error: OSError | None = None

    def add(self, ticket: int, path: str) -> None:
        self._parts.append((ticket, path))

    def meanwhile(self) -> None:
        if self._beside is not None:
            self._beside()
            self._beside = None

    def wait(self) -> None:
        """Wait for every part before raising, so that the memory is free to use whatever happened."""
        self.meanwhile()
        while self._parts:
            ticket, path = self._parts.pop()
            try:
                self._engine.wait(ticket)
            except OSError as error:
                self._error = self._error or OSError(error.errno or errno.EIO, explain(error), path)
            if not self._parts:
                ended(self._lane, os.path.basename(path), self._began)
        if self._error is not None:
            raise self._error
        if self._then is not None:
            self._then()
            self._then = None

    def done(self) -> bool:
        return all(self._engine.done(ticket) for ticket, _ in self._parts)


@final
class StripedFile:
    """Preallocated space on one or several directories, striped in blocks of `STRIPE_BYTES`.

    Opened with O_DIRECT where the file system has it; elsewhere (tmpfs, some overlays) through the page cache.
    """

    def __init__(self, engine: DiskEngine, directories: Sequence[Path], name: str, nbytes: int) -> None:
        self._engine = engine
        self.nbytes = round_up(nbytes, PAGE_BYTES)
        self._paths = [str(directory / name) for directory in directories]
        self._files: list[int] = []
        rows = -(-self.nbytes // (STRIPE_BYTES * len(directories)))
        file_bytes = self.nbytes if len(directories) == 1 else rows * STRIPE_BYTES
        try:
            for path in self._paths:
                self._files.append(open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
                with naming(path, f"a file of {format_bytes(file_bytes)}"):
                    os.ftruncate(self._files[-1], file_bytes)
            for directory in directories:
                with suppress(OSError):  # a new lock would not be under the run's. See Note [Whose directory]
                    os.utime(directory / "lock")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Where it lies, for messages."""
        return self._paths[0]

    @property
    def single(self) -> int | None:
        """The file descriptor where all bytes lie in one file, in order; None where they are striped."""
        return self._files[0] if len(self._files) == 1 else None

    @property
    def devices(self) -> set[int]:
        """The file systems (`st_dev`) in which it lies."""
        return {os.fstat(file).st_dev for file in self._files}

    @property
    def links(self) -> int:
        """How many names the file has."""
        return max(os.fstat(file).st_nlink for file in self._files)

    def preallocate(self, start: int, nbytes: int) -> None:
        """Take the blocks now, so that a full disk is an error before anything is written."""
        for index, offset, _, length in self._pieces(start, nbytes):
            with naming(self._paths[index], f"reserving {format_bytes(length)}"):
                os.posix_fallocate(self._files[index], offset, length)

    def give_back(self, start: int, nbytes: int) -> bool:
        """Let go of the blocks; whether they went. A file system that cannot keeps them until the file goes."""
        went = True
        for index, offset, _, length in self._pieces(start, nbytes) if self._files else ():
            went = not _fallocate(self._files[index], _PUNCH_HOLE, offset, length) and went
        return went

    def read(self, place: Place, out: torch.Tensor, then: Work | None = None) -> DiskTransfer:
        """Start to fill `out`; `then` runs before anybody uses it."""
        transfer, engine = DiskTransfer(self._engine, then=then), self._engine
        return self._start(transfer, engine.read if isinstance(place, int) else engine.read_pages, place, out)

    def write(self, place: Place, source: torch.Tensor, beside: Work | None = None) -> DiskTransfer:
        """Start to write `source`; `beside` runs meanwhile."""
        transfer, engine = DiskTransfer(self._engine, beside, lane=WRITES), self._engine
        return self._start(transfer, engine.write if isinstance(place, int) else engine.write_pages, place, source)

    def _start(
        self, transfer: DiskTransfer, begin: Callable[..., int], place: Place, memory: torch.Tensor
    ) -> DiskTransfer:
        address = memory.data_ptr()
        if isinstance(place, int):
            for index, offset, at, length in self._pieces(place, memory.numel()):
                transfer.add(begin(self._files[index], offset, address + at, length), self._paths[index])
            return transfer
        count = len(self._files)
        stripes = place // (STRIPE_BYTES // PAGE_BYTES) if count > 1 else torch.zeros_like(place[:1])
        at = 0
        for stripe, length in zip(*(each.tolist() for each in _runs_of(stripes, place.numel())), strict=True):
            row, index = divmod(stripe, count)  # each stripe lies in one file
            own = place[at : at + length] - (stripe - row) * (STRIPE_BYTES // PAGE_BYTES)
            ticket = begin(self._files[index], own.data_ptr(), length, address + at * PAGE_BYTES)
            transfer.add(ticket, self._paths[index])
            at += length
        return transfer

    def read_now(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` without the engine, so that other threads may read while it is being closed. Blocks."""
        for index, offset, at, length in self._pieces(start, out.numel()):
            left = memory_of(out)[at : at + length]
            while left:
                with naming(self._paths[index], f"reading {len(left)} bytes at {offset}"):
                    count = os.preadv(self._files[index], [left], offset)
                if not count:
                    raise OSError(errno.EIO, f"the file ends at {offset}", self._paths[index])
                offset, left = offset + count, left[count:]

    def sync(self) -> None:
        """Bring everything that was written to the drive."""
        for file, path in zip(self._files, self._paths, strict=True):
            with naming(path, "syncing"):
                os.fsync(file)

    def unlink(self) -> None:
        """Give up the name; the bytes stay readable until `close`. Safe to repeat. On a read-only file system the name
        stays."""
        for path in self._paths:
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EROFS):
                    raise

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """The range as (file, offset in it, offset in memory, length)."""
        assert start % PAGE_BYTES == 0 and nbytes % PAGE_BYTES == 0, "the disk tier moves whole pages"
        assert start + nbytes <= self.nbytes
        if len(self._files) == 1:
            yield from [(0, start, 0, nbytes)] if nbytes else []
            return
        position = start
        while position < start + nbytes:
            stripe, within = divmod(position, STRIPE_BYTES)
            length = min(STRIPE_BYTES - within, start + nbytes - position)
            row, index = divmod(stripe, len(self._files))
            yield index, row * STRIPE_BYTES + within, position - start, length
            position += length


def _runs_of(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(each run of equal values, how long it is); one value stands for all `count`."""
    if values.numel() <= 1:
        return values, torch.full_like(values, count)
    found: tuple[torch.Tensor, torch.Tensor] = torch.unique_consecutive(values, return_counts=True)
    return found


def open_direct(path: str, flags: int) -> int:
    """A file descriptor that passes by the page cache, where the file system has that."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags & ~os.O_EXCL, 0o666)  # the failed attempt may have created the file


def allow_open_files(files: int) -> None:
    """Raise this process's soft limit on open files where it does not admit those of so many files on disk: each one
    has at times another that follows it, or is copied.

    Raises `ValueError` where the system does not even allow the files themselves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    taken = len(os.listdir("/proc/self/fd")) + SPARE_FILES
    if taken + files > most:
        raise ValueError(
            f"the model's units are {files} files on disk, and of the {hard} that this process may have open in all, "
            f"{taken} are open or kept for others; raise the limit (ulimit -Hn), name fewer directories, or pass "
            f"units= for larger units"
        )
    if soft != resource.RLIM_INFINITY and soft < taken + 2 * files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(taken + 2 * files, most), hard))
