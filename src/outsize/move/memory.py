"""Host memory that is reserved once and given back page by page, and the count of every byte in use."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from outsize import _native
from outsize.move.tracing import counted, tracing
from outsize.planning.layout import round_up

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
MAPPED_BYTES = 1 << 18
"""Smaller copies that live on come from the heap: a process may have 65,530 mappings."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# Note [Reserved memory]
# A host buffer is an anonymous private mapping of the buffer's full size. Its address never changes: views of it that
# autograd or the user hold stay valid while the pages behind it come and go. Pages appear when they are first touched
# and `drop` gives them back (MADV_DONTNEED), so a buffer at rest costs address space and nothing else. It is page
# aligned, so direct I/O reads into it without a bounce, and it has exactly the size asked for.
#
# The kernel merges neighbouring mappings into one, and a huge page laid across the border of two buffers comes back
# whole when one of them is touched: `drop` of that one then leaves the neighbour's part resident, about 2 MB a buffer.
# So huge pages are asked for inside a buffer only and forbidden at its ends.

# Note [Pages that are handed on]
# The kernel zeroes what comes again after a `drop`, and that takes as long as to copy the bytes that come. So a buffer
# that gives way to another one hands its huge pages on: addresses stay, and what is behind them moves (mremap with
# MREMAP_DONTUNMAP, Linux 5.7). Each part that has come so is a mapping of its own and moves alone. A process may have
# 65,530 mappings, so a buffer has few parts.

# Note [Colours]
# Inside huge pages equal offsets mean equal cache sets and memory banks. An update walks through five arrays at once;
# where all of them begin at the same offset it runs at 8 GB/s in place of 38. So buffers begin at different pages,
# one after the other, within every 64 KiB.

_COLOURS = 16
_next_colour = itertools.count()

MOST_PARTS = 4
"""Mappings of the huge pages of one buffer."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.restype = _libc.mmap.restype = ctypes.c_void_p
_MREMAP_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP of <sys/mman.h>
_MAP_FIXED = 0x10
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15  # <sys/mman.h>


def give_back_pages(address: int, nbytes: int) -> None:
    """Free whole pages of anonymous memory; they read as zeros from now on."""
    if _libc.madvise(address, nbytes, _MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"could not give back {nbytes} bytes of memory: {os.strerror(code)}")


def pages_inside(address: int, nbytes: int) -> tuple[int, int]:
    """(address, bytes) of the whole pages inside some memory."""
    first = round_up(address, PAGE_BYTES)
    return first, max((address + nbytes) // PAGE_BYTES * PAGE_BYTES - first, 0)


def keep_huge_pages_inside(address: int, nbytes: int) -> tuple[int, int]:
    """Ask for huge pages where they fit into these pages, and forbid them where they would cross the ends. Returns
    where they begin and end.

    A kernel without transparent huge pages refuses, and the memory works all the same.
    """
    first = min(round_up(address, HUGE_BYTES), address + nbytes)
    last = first + (address + nbytes - first) // HUGE_BYTES * HUGE_BYTES
    _libc.madvise(address, first - address, _MADV_NOHUGEPAGE)
    _libc.madvise(first, last - first, _MADV_HUGEPAGE)
    _libc.madvise(last, address + nbytes - last, _MADV_NOHUGEPAGE)
    return first, last


_can_move_pages = True


def _moved_pages(source: int, target: int, nbytes: int) -> bool:
    """Move what is behind whole pages of one mapping to other addresses, of which it becomes a mapping; whether the
    system can. Where it cannot, there is new memory."""
    global _can_move_pages
    if _can_move_pages and _libc.mremap(source, nbytes, nbytes, _MREMAP_MOVE, target) != target:
        _can_move_pages = False
        # A move that has failed may have taken the target away.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _MAP_FIXED
        if _libc.mmap(target, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != target:
            code = ctypes.get_errno()
            raise OSError(code, f"could not reserve {nbytes} bytes of memory again: {os.strerror(code)}")
        _libc.madvise(target, nbytes, _MADV_HUGEPAGE)
    return _can_move_pages


class HostBuffer:
    """Page-aligned host memory of `nbytes` bytes whose pages exist only between first touch and `drop`."""

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._length = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        length = self._length + _COLOURS * PAGE_BYTES
        if pinned and not _registers():
            whole = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if pinned else _NORESERVE)
            whole = torch.frombuffer(mmap.mmap(-1, length, flags=flags), dtype=torch.uint8)
        colour = next(_next_colour) % _COLOURS * PAGE_BYTES  # see Note [Colours]
        first = (colour - whole.data_ptr()) % (_COLOURS * PAGE_BYTES)
        self.bytes = whole[first : first + nbytes].data  # [nbytes]; not a view that keeps another tensor of it alive
        _libc.madvise(whole.data_ptr(), length, _MADV_NOHUGEPAGE)  # all of it: small neighbours become one mapping
        huge, last = keep_huge_pages_inside(self.address, self._length)
        self._parts = [(huge, last)]  # of huge pages: see Note [Pages that are handed on]
        self._inherited = huge  # where those end that others have handed on
        self._pinned = pinned and _registers() and _register(self.bytes)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def drop(self) -> None:
        """Give all pages back; the contents are lost and read as zeros from now on."""
        assert not self._pinned, "pinned memory is kept until the end"
        give_back_pages(self.address, self._length)
        self._inherited = self._parts[0][0]

    def hand_on(self, heir: HostBuffer) -> None:
        """As `drop`, but `heir`, which is going to be filled, gets of the pages what it still lacks. Until it is filled
        it reads as anything. See Note [Pages that are handed on]."""
        last = heir._parts[-1][1]
        for start, end in self._parts:
            low, high = heir._inherited, min(heir._inherited + end - start, last)
            parts = [part for part in heir._parts_around(low, high) if part[0] < part[1]]
            if low == high or len(parts) > MOST_PARTS or not _moved_pages(start, low, high - low):
                break
            heir._parts, heir._inherited = parts, high
        self.drop()

    def _parts_around(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The parts, once [low, high) is one of them."""
        yield from ((start, min(end, low)) for start, end in self._parts)
        yield low, high
        yield from ((max(start, high), end) for start, end in self._parts)

    def close(self) -> None:
        """Unpin; the memory itself goes when the last view of it goes."""
        if self._pinned:
            _unregister(self.address)
            self._pinned = False


def new_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes], contents undefined; in host memory on whole pages."""
    if device.type == "cpu":
        return HostBuffer(nbytes).bytes
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


# Note [Pinning]
# torch's `pin_memory` rounds up to a power of two. So exact bytes are registered with the accelerator's own runtime:
# that of CUDA and ROCm, or `host_register(address, nbytes)` and `host_unregister(address)` of the module of the device.
# Where there is neither, the buffer is memory that torch has pinned.


def _registers() -> bool:
    """Whether exact bytes can be pinned here."""
    runtime = torch.get_device_module()
    return hasattr(runtime, "cudart") or hasattr(runtime, "host_register")


def _register(memory: torch.Tensor) -> bool:
    """Pin exactly these bytes; whether there are any. See Note [Pinning]."""
    if not memory.numel():
        return False
    runtime: Any = torch.get_device_module()
    try:
        if hasattr(runtime, "cudart"):
            code = runtime.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if int(code) != 0:
                raise RuntimeError(f"cudaHostRegister gives the error {code!r}")
        else:
            runtime.host_register(memory.data_ptr(), memory.numel())
    except RuntimeError as error:
        raise OSError(
            errno.ENOMEM,
            f"{memory.numel()} bytes of host memory could not be pinned ({error}); lower host_memory, or raise the "
            f"limit of locked memory (ulimit -l)",
        ) from error
    return True


def _unregister(address: int) -> None:
    runtime: Any = torch.get_device_module()
    if hasattr(runtime, "cudart"):
        runtime.cudart().cudaHostUnregister(address)
    else:
        runtime.host_unregister(address)


# Note [Freed memory]
# glibc serves blocks of up to 32 MiB from its heap. Between two large temporaries of one size a small block that lives
# on splits the hole, the next large one takes fresh memory, and resident memory grows with the number of layers: 0.7 GB
# for three billion parameters, when all of them are on disk. A block that is a mapping of its own goes back when it is
# freed. Then the kernel zeroes what comes again: up to a third of a step.
#
# Where everything lies in memory, holes are kept for the next step, and wherever the budget has room for them beside
# all units. Elsewhere what is left of the budget is for holes, if little is trained: gradients that come and go leave
# more of them than is worth it (main job: 12 % faster, 40 MiB more). A block that takes more than half of that is a
# mapping, unless it fits into a hole: the heap is large where the model was made in it. So all holes go back before
# much may have come: the ledger knows what units and gradients take, the system knows the rest.

LOOK_BYTES = 16 << 20
"""The most that may come to memory before holes go back, and the least that may stay free at the end of the heap."""
LEAST_SECONDS, SECONDS_A_BYTE = 0.002, 5e-10
"""What it usually takes to give memory back, at most."""
LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES, MOST_BYTES = 256 << 10, 32 << 20, (1 << 31) - 1
"""Of blocks that glibc may be told to serve by mappings: the least, the most, and the most that it keeps free."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's <malloc.h>
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_kept: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Inside the block all freed memory goes back to the system at once."""
    _keep(0)
    try:
        yield
    finally:
        _settle()


def keep_freed_memory(owner: object, nbytes: int) -> None:
    """Let the allocator keep up to `nbytes` of freed memory for what comes next, until the owner lets it go."""
    _kept[owner] = nbytes
    _settle()


def let_go_of_freed_memory(owner: object) -> None:
    if _kept.pop(owner, None) is not None:
        _settle()


def trim_heap() -> None:
    """What is free now goes back to the system, unless the allocator is the user's."""
    trim = getattr(_libc, "malloc_trim", None)  # musl has none
    if trim is not None and not _is_set_by_user():
        trim(0)


def _settle() -> None:
    """As was asked for; else as glibc comes to do it by itself, which keeps two of the largest blocks."""
    _keep(min(_kept.values(), default=2 * MOST_BLOCK_BYTES))


def _keep(nbytes: int) -> None:
    mallopt = getattr(_libc, "mallopt", None)  # musl has none
    if mallopt is not None and not _is_set_by_user():
        mallopt(_M_MMAP_THRESHOLD, min(max(nbytes // 2, LEAST_BLOCK_BYTES), MOST_BLOCK_BYTES))
        mallopt(_M_TRIM_THRESHOLD, min(max(nbytes, LOOK_BYTES), MOST_BYTES))


def _is_set_by_user() -> bool:
    return any(os.environ.get(name) for name in _SETTINGS)


def resident_bytes() -> tuple[int, int]:
    """Of this process: memory of its own, and of files and shared; (0, 0) on a system that does not tell."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0
    try:
        _, whole, shared, *_ = map(int, os.read(file, 200).split())
    finally:
        os.close(file)
    return (whole - shared) * PAGE_BYTES, shared * PAGE_BYTES


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor lives."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


# Note [Threads of torch]
# torch's operations share one team of threads for each thread that calls them. A second team makes more threads than
# cores, and then OpenMP lets all of them sleep as soon as they have nothing to do: each operation of the computation
# wakes its team up first (a backward of small layers took 1.5 x as long). So units that come and go beside it are
# copied in native code, or in pieces of `COPIED_NUMEL`, below the size from which torch takes threads.

COPIED_NUMEL = 1 << 15


def own_cores() -> int:
    """The cores that this process may use, shared with the other ranks of the machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1), 1)


def copy(target: torch.Tensor, source: torch.Tensor, threads: int = 1) -> None:
    """Copy 1-D values, cast if need be, on this thread alone: see Note [Threads of torch]. In CPU memory what needs no
    cast may take more `threads`, those of kernels: an accelerator brings bytes faster than one thread moves them."""
    on_cpu = target.is_cpu and source.is_cpu
    if on_cpu and target.dtype is source.dtype and target.is_contiguous() and source.is_contiguous():
        assert target.numel() == source.numel()
        _native.copy(target.data_ptr(), source.data_ptr(), target.numel() * target.itemsize, threads)
        return
    torch._foreach_copy_(target.split(COPIED_NUMEL), source.split(COPIED_NUMEL))


def zero(content: torch.Tensor) -> None:
    """Fill contiguous CPU memory with zeros on this thread alone."""
    ctypes.memset(content.data_ptr(), 0, content.numel() * content.itemsize)


@final
class FreedMemory:
    """What operations have freed and the allocator keeps. It goes back when `most` bytes have come to memory, or
    resident memory has grown by as much beside what is known. A heap of very many pieces takes long to look through. It
    is looked through less often: what is beyond the usual time is a twentieth. See Note [Freed memory]."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._coming = 0
        self._least = MOST_BYTES << 32
        self._next = 0.0  # when it may go back again

    def make_way(self, nbytes: int, known: int) -> None:
        """So many bytes come to memory, to those that are known."""
        self._coming += nbytes
        resident, began = resident_bytes()[0], time.monotonic()
        if (self._coming >= self._most or resident - known > self._least + self._most) and began >= self._next:
            self._coming, worked = 0, time.thread_time()
            trim_heap()
            worked, left = time.thread_time() - worked, resident_bytes()[0]
            too_long = worked - LEAST_SECONDS - max(resident - left, 0) * SECONDS_A_BYTE
            self._next = began + 20 * max(too_long, 0)
            self._least, resident = left - known, left
        self._least = min(self._least, resident - known)


@dataclass
class Ledger:
    """Bytes in use, now and at their peak, by "tier/kind"; thread-safe. `freed`: what may make way for them."""

    freed: FreedMemory | None = None
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, account: str, nbytes: int) -> None:
        with self._lock:
            value = self.now.get(account, 0) + nbytes
            assert value >= 0, f"{account} fell below zero"
            self.now[account] = value
            self.peak[account] = max(self.peak.get(account, 0), value)
            if tracing():
                tier = account.partition("/")[0]
                counted(tier, bytes_on((tier,), self.now))
        if nbytes > 0 and not account.startswith("disk/"):
            self.make_way(nbytes)

    def remove(self, account: str, nbytes: int) -> None:
        self.add(account, -nbytes)

    def make_way(self, nbytes: int = 0) -> None:
        """Freed memory makes way for what comes, the `nbytes` that were added and what nobody counts."""
        if self.freed is not None:
            self.freed.make_way(nbytes, bytes_on(("device", "host"), self.now) - nbytes)


def bytes_on(tiers: Collection[str], accounts: Mapping[str, int], but: Collection[str] = ()) -> int:
    """The bytes of all accounts "tier/kind" of some tiers. Other threads may add an account meanwhile."""
    return sum(size for name, size in list(accounts.items()) if name.partition("/")[0] in tiers and name not in but)
