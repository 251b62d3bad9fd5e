"""A file at rest whose bytes are never overwritten once a checkpoint holds them, and the checksums of its pages."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import final

import torch

from outsize import _native
from outsize.move.disk import Place, StripedFile
from outsize.move.memory import PAGE_BYTES, HostBuffer
from outsize.move.transfer import Transfer
from outsize.planning.layout import round_up

COPY_BYTES = 1 << 20
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)

# Note [Generations]
# A checkpoint on the same file system is made of the very files that hold the state: it takes hard links of them, and
# from then on they are frozen. The next update of a unit reads the frozen generation and writes the one that follows,
# chunk by chunk: the bytes that an update in place would move too. Pages that the update leaves alone are copied when
# it ends, and then the generations change places ("turn"). Whoever else writes to a frozen file turns it first, as a
# whole. So nothing that a checkpoint refers to is ever written again, whatever the run does and however it ends.
#
# Once linked, the file belongs to the checkpoint: the run gives up its own name for it and keeps it open. The space of
# a checkpoint that is deleted is free as soon as the run has turned. No file is ever used for a second generation: what
# has no name any more may still be open, in another run or in whoever reads the checkpoint.

# Note [Page sums]
# Each page's CRC-32C is taken from memory when it is written. A save needs no second look at the data, and a checkpoint
# says what the run meant to write, not what the drive made of it. Five bytes of memory for a page of 4096.


Pages = slice | torch.Tensor
"""Some pages of a file, by their numbers (int64)."""


def _pages(place: Place, content: torch.Tensor) -> Pages:
    """Those of `content`, whole pages."""
    if isinstance(place, int):
        return slice(place // PAGE_BYTES, (place + content.numel()) // PAGE_BYTES)
    return place


def sums_of(content: torch.Tensor) -> torch.Tensor:
    """The CRC-32C of each page of `content` (uint8): int32 [pages]."""
    out = torch.empty(-(-content.numel() // PAGE_BYTES), dtype=torch.int32, device="cpu")
    if content.numel():
        _native.page_sums(content.data_ptr(), content.numel(), PAGE_BYTES, out.data_ptr())
    return out


def crc32c(content: torch.Tensor | bytes) -> int:
    """The CRC-32C of these bytes, or of a tensor's."""
    if isinstance(content, bytes):
        content = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
    if not content.numel():
        return 0
    data = content.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    out = torch.empty(1, dtype=torch.int32, device="cpu")
    _native.page_sums(data.data_ptr(), data.numel(), data.numel(), out.data_ptr())
    return int(out.item()) & 0xFFFFFFFF


def joined_sums(pages: torch.Tensor, nbytes: int, chunk_bytes: int) -> list[int]:
    """The CRC-32C of each `chunk_bytes` out of those of the pages (int32 [pages]), which hold `nbytes` together."""
    count, group = pages.numel(), chunk_bytes // PAGE_BYTES
    if not count:
        return []
    out = torch.empty(-(-count // group), dtype=torch.int32, device="cpu")
    last = nbytes - (count - 1) * PAGE_BYTES
    _native.join_sums(pages.data_ptr(), count, PAGE_BYTES, last, group, out.data_ptr())
    return [each & 0xFFFFFFFF for each in out.tolist()]


ZERO_SUM = crc32c(bytes(PAGE_BYTES)) - (1 << 32)
"""Of a page of zeros, as an int32."""


@final
class Generation:
    """One generation's file, and for each page of it: its CRC-32C, whether it may hold anything but zeros, whether it
    was read and found as written. `hold` keeps it open for whoever still reads it after the run has moved on."""

    def __init__(self, file: StripedFile, summed: bool = True) -> None:
        self.file = file
        self.nbytes = file.nbytes
        count = file.nbytes // PAGE_BYTES if summed else 0
        self.sums = torch.full((count,), ZERO_SUM, dtype=torch.int32, device="cpu")  # [pages], the bits of a uint32
        self.touched = torch.zeros(count, dtype=torch.bool, device="cpu")  # [pages]
        self._checked = torch.zeros(count, dtype=torch.bool, device="cpu")  # [pages]
        self._holds = 1
        self._lock = threading.Lock()

    def hold(self) -> Generation:
        with self._lock:
            assert self._holds, "the generation is closed"
            self._holds += 1
        return self

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            last = not self._holds
        if last:
            self.file.unlink()
            self.file.close()

    def record(self, pages: Pages, source: torch.Tensor) -> None:
        """`source` is being written there."""
        self.sums[pages] = sums_of(source)
        self.touched[pages] = True
        self._checked[pages] = False

    def check(self, pages: Pages, content: torch.Tensor) -> None:
        """Raise `OSError` that names the page unless `content` is what was written there."""
        wrong = (sums_of(content) != self.sums[pages]).nonzero().view(-1)
        if wrong.numel():
            number = wrong[0] + pages.start if isinstance(pages, slice) else pages[wrong[0]]
            at = int(number) * PAGE_BYTES
            message = f"bad checksum: the {PAGE_BYTES} bytes at {at} are not those that were written"
            raise OSError(errno.EIO, message, self.file.path)
        self._checked[pages] = True

    def read_checked(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` and compare it with the checksums. Blocks; needs no engine."""
        self.file.read_now(start, out)
        self.check(_pages(start, out), out)

    def check_rest(self) -> None:
        """Read the pages that nobody has read since they were written. Raises `OSError` for one that is damaged."""
        for start, nbytes in page_runs(self.touched & ~self._checked):
            self.read_checked(start, HostBuffer(nbytes).bytes)


def page_runs(pages: torch.Tensor, most_bytes: int = COPY_BYTES) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of the pages that are set (bool [pages]), at most so many each."""
    numbers = pages.nonzero().view(-1).tolist()
    at = 0
    while at < len(numbers):
        end = at + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1 and end - at < most_bytes // PAGE_BYTES:
            end += 1
        yield numbers[at] * PAGE_BYTES, (end - at) * PAGE_BYTES
        at = end


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Whole pages that hold the ranges (first byte, bytes), in order, neighbours in one."""
    found: list[tuple[int, int]] = []
    for first, nbytes in sorted(ranges):
        low, high = first // PAGE_BYTES * PAGE_BYTES, round_up(first + nbytes, PAGE_BYTES)
        if found and low <= found[-1][0] + found[-1][1]:
            start, before = found[-1]
            found[-1] = (start, max(high, start + before) - start)
        else:
            found.append((low, high - low))
    return found


@final
class Generations:
    """One unit's file: that of its parameters and optimizer state (see Note [Generations]), or that of its gradients,
    which is never frozen and has no page sums unless reads are to be verified.

    `make` makes the file of the generation of a number, all zeros.
    """

    def __init__(self, make: Callable[[int], StripedFile], verify: bool = False, summed: bool = True) -> None:
        self._make = make
        self._verify = verify
        self._summed = summed or verify
        self._number = 0
        self.now = Generation(make(0), self._summed)
        self.frozen = False
        self._next: Generation | None = None
        self._turned: torch.Tensor | None = None  # [pages]: those that this turn has written
        self._reserved: list[tuple[int, int]] = []
        self._making = threading.Lock()  # a save reserves beside the thread that updates
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self.now.nbytes

    def preallocate(self, start: int, nbytes: int) -> None:
        """Take the blocks now, here and in every later generation."""
        self._reserved.append((start, nbytes))
        self.now.file.preallocate(start, nbytes)

    def read(self, place: Place, out: torch.Tensor) -> Transfer:
        check = partial(self.now.check, _pages(place, out), out) if self._verify else None
        return self.now.file.read(place, out, check)

    def touched(self, start: int, nbytes: int) -> torch.Tensor:
        """For each of these pages whether it may hold anything but zeros (bool [pages], a copy)."""
        return self.now.touched[start // PAGE_BYTES : (start + nbytes) // PAGE_BYTES].clone()

    def write(self, place: Place, source: torch.Tensor) -> Transfer:
        if self.frozen and self._turned is None:
            self.begin_turn()
            self.end_turn()
        if self._turned is None:
            return self._write(self.now, place, source)
        assert self._next is not None
        self._turned[_pages(place, source)] = True
        return self._write(self._next, place, source)

    def _write(self, generation: Generation, place: Place, source: torch.Tensor) -> Transfer:
        """The page sums are taken while the write is under way: the memory does not change before it is over."""
        record = partial(generation.record, _pages(place, source), source) if self._summed else None
        return generation.file.write(place, source, record)

    def freeze(self) -> None:
        """A checkpoint holds the bytes from now on."""
        self.frozen = True

    def unfreeze(self) -> None:
        """The checkpoint for which it was frozen, and no other, has come to nothing."""
        assert self._turned is None
        self.frozen = False

    @property
    def reserved_bytes(self) -> int:
        """Bytes on the drive that a generation is sure to take."""
        return sum(nbytes for _, nbytes in self._reserved)

    @property
    def touched_bytes(self) -> int:
        """Bytes that may hold anything but zeros."""
        return int(self.now.touched.sum()) * PAGE_BYTES

    @property
    def has_next(self) -> bool:
        return self._next is not None

    def reserve(self) -> None:
        """Make the next generation and take its space, so that no later step fails for want of it."""
        with self._making:
            if self._next is not None or not self.frozen or self._closed:
                return
            self._number += 1
            made = Generation(self._make(self._number), self._summed)
            try:
                for start, nbytes in merged(self._reserved):
                    made.file.preallocate(start, nbytes)
            except BaseException:
                made.let_go()
                raise
            self._next = made

    def begin_turn(self) -> None:
        """From now on writes go to the next generation, and reads still come from this one."""
        assert self._summed and self.frozen and self._turned is None
        self.reserve()
        self._turned = torch.zeros(self.nbytes // PAGE_BYTES, dtype=torch.bool, device="cpu")

    def end_turn(self) -> None:
        """What the turn did not write is copied; then the next generation is the present one. Blocks."""
        assert self._next is not None and self._turned is not None
        for start, nbytes in page_runs(self.now.touched & ~self._turned):
            content = HostBuffer(nbytes).bytes
            self.now.read_checked(start, content)
            self._write(self._next, start, content).wait()
        self.now.let_go()
        with self._making:
            self.now, self._next, self._turned, self.frozen = self._next, None, None, False

    def close(self) -> None:
        with self._making:
            self._closed = True
        self.now.let_go()
        if self._next is not None:
            self._next.let_go()
            self._next = None


def _umask() -> int:
    """The process's umask; to ask by setting it would change it for other threads meanwhile."""
    fields = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 8) for line in fields if line.startswith("Umask:")), 0o022)


def link(generation: Generation, target: Path) -> bool:
    """Give the file a second name; False where that cannot be done (another file system, a striped file)."""
    file = generation.file.single
    if file is None:
        return False
    try:
        os.fchmod(file, 0o666 & ~_umask())  # the run made it under the umask of that time
        # By its descriptor: after an earlier save the run has no name for it. Any `src_dir_fd` makes os.link follow it.
        os.link(f"/proc/self/fd/{file}", target, src_dir_fd=file)
    except OSError as error:
        if error.errno in _FATAL:
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        return False
    return True
