"""Parameters under construction: the class that they take on, and the memory and disk space behind them."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from outsize.move.disk import RunDirectory, StripedFile, open_engine
from outsize.move.memory import PAGE_BYTES, give_back_pages, keep_huge_pages_inside
from outsize.move.transfer import Transfer
from outsize.plan.layout import round_up
from outsize.plan.sizes import format_bytes
from outsize.run.guard import METADATA, TO_NUMPY

if TYPE_CHECKING:
    from outsize.run.pager import Pager

MIN_PAGED_BYTES = 8 << 10
"""Smaller parameters stay in memory: they need not hold a whole page of it."""

SMALL_BYTES = 64 << 10
"""Smaller parameters stay in memory as long as larger ones can go: they cost more requests than they free bytes."""

MAPPED_BYTES = 64 << 20
"""Resident pages of mapped files that may come together before they are given back."""

FILE_BYTES = 1 << 30
"""The disk space for parameters grows by sparse files of this size."""

# Note [Paged in place]
# A parameter on disk keeps its memory's address: the values are written from where they are, then the pages that lie
# wholly inside go back to the system (MADV_DONTNEED). So nothing is copied, direct I/O finds aligned memory, addresses
# that code compares stay what they were, and an access that slips past the guard meets zeros instead of a fault.
# The pages go only while nothing but guarded parameters can reach them: not while a plain alias (`p.data`, a view, a
# NumPy array, a storage object) lives or autograd has saved the parameter. The use counts of the tensor and of its
# storage tell; what they are for an unshared parameter differs between versions of torch and is measured.

# Note [Values that nobody reads]
# Filling operations replace every value of their target, so the old ones are not read from disk: models are often
# initialised twice, by their layers and then by themselves. Should the operation fail or write nothing after all (the
# target's version counter tells), the old values are read then.

_INITS = {nn.init.normal_, nn.init.uniform_, nn.init.constant_, nn.init.kaiming_uniform_}
_FILLS = _INITS | {getattr(torch.Tensor, name) for name in ("normal_", "uniform_", "zero_", "fill_", "copy_")}
_INIT_NAMES = {function.__name__ for function in _INITS}


class Place(Enum):
    MEMORY = "in memory"
    LEAVING = "in memory, being written"
    DISK = "on disk"


@final
@dataclass(eq=False)
class Page:
    """The storage of one parameter, or of several that share it. `[first, first + length)` can go to disk."""

    key: int
    address: int
    nbytes: int
    first: int
    length: int
    place: Place = Place.MEMORY
    holds: int = 0
    unread: bool = False  # See Note [Values that nobody reads]
    version: int = 0  # of the parameter whose values are unread
    slot: Slot | None = None
    transfer: Transfer | None = None
    bytes: torch.Tensor | None = None  # uint8 [length]; keeps the storage alive while it is written
    owners: list[Owner] = field(default_factory=list)

    @classmethod
    def of(cls, param: nn.Parameter) -> Page:
        storage = param.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        first, length = 0, 0
        if nbytes >= MIN_PAGED_BYTES and storage.resizable():  # else the memory is not torch's own
            first = round_up(address, PAGE_BYTES)
            length = (address + nbytes) // PAGE_BYTES * PAGE_BYTES - first
        return cls(storage._cdata, address, nbytes, first, length)

    def holds_values_of(self, param: nn.Parameter) -> bool:
        storage = param.untyped_storage()
        return (storage._cdata, storage.data_ptr(), storage.nbytes()) == (self.key, self.address, self.nbytes)

    def is_whole(self, param: nn.Parameter) -> bool:
        """Whether what replaces all values of this parameter replaces all of the page, countably."""
        alone = len(self.owners) == 1 and not param.is_inference()
        return alone and param.numel() * param.element_size() == self.nbytes

    def inside(self, param: nn.Parameter) -> torch.Tensor:
        """The bytes that can go to disk, as uint8 [length]."""
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty.set_(param.untyped_storage(), self.first - self.address, (self.length,), (1,))

    def give_back(self) -> None:
        """The memory's pages go; its address stays. See Note [Paged in place]."""
        give_back_pages(self.first, self.length)
        if self.length >= SMALL_BYTES:  # each call may split a mapping of the process, and those are limited
            keep_huge_pages_inside(self.first, self.length)  # they come back faster in huge pages


@final
@dataclass(eq=False)
class Owner:
    """One paged parameter."""

    ref: weakref.ref[nn.Parameter]
    page: Page
    name: str


@final
@dataclass(frozen=True)
class Slot:
    file: StripedFile
    start: int
    nbytes: int


@final
class PageFile:
    """Disk space for parameters under construction, in a run directory of its own; none before the first `take`."""

    def __init__(self, directories: Sequence[Path], limit_bytes: int) -> None:
        self._directories = directories
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Slot]] = {}
        self._used_bytes = 0
        self._position = 0
        self._files: list[StripedFile] = []
        self._runs: list[RunDirectory] = []
        self._engine: list[Any] = []
        self._close = weakref.finalize(self, _close_all, self._engine, self._files, self._runs)

    def take(self, nbytes: int) -> Slot:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        if self._used_bytes + nbytes > self._limit_bytes:
            raise ValueError(
                f"the parameters need more than the {format_bytes(self._limit_bytes)} that may be used on disk; raise "
                f"disk_space, or name a directory with more free space"
            )
        if not self._engine:
            self._runs += [RunDirectory(directory) for directory in self._directories]
            self._engine.append(open_engine())
        if not self._files or self._position + nbytes > self._files[-1].nbytes:
            paths = [run.path for run in self._runs]
            name = f"parameters-{len(self._files):05d}"
            self._files.append(StripedFile(self._engine[0], paths, name, max(nbytes, FILE_BYTES)))
            self._position = 0
        self._files[-1].preallocate(self._position, nbytes)
        slot = Slot(self._files[-1], self._position, nbytes)
        self._position += nbytes
        self._used_bytes += nbytes
        return slot

    def give(self, slot: Slot) -> None:
        self._free.setdefault(slot.nbytes, []).append(slot)

    def close(self) -> None:
        """Remove the files; safe to repeat."""
        self._close()


def _close_all(engine: list[Any], files: list[StripedFile], runs: list[RunDirectory]) -> None:
    while engine:
        engine.pop().close()
    while files:
        files.pop().close()
    while runs:
        runs.pop().close()


def use_counts(param: nn.Parameter) -> tuple[int, int, int]:
    """Who refers to the parameter's tensor, to its storage's Python object, and to its storage."""
    storage = param.untyped_storage()
    return param._use_count(), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


class PagedParameter(nn.Parameter):
    """A parameter that was built under `outsize.init`. See Note [Paged in place]."""

    pager: Pager

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _run(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with _held([self], "copy.deepcopy", None), torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, built under outsize.init)"


def page_in(param: nn.Parameter) -> torch.Tensor:
    """The parameter's values, without gradient; one that was paged is a plain parameter from now on."""
    if isinstance(param, PagedParameter):
        param.pager.hand_over(param)
    return param.detach()


def _run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with its paged arguments in memory."""
    if not all(issubclass(kind, PagedParameter) for kind in types):
        return _run_beside_others(func, args, kwargs)
    found: list[PagedParameter] = []
    _collect((args, kwargs), found)
    params = {id(param): param for param in found}
    target = args[0] if args else kwargs.get("tensor")
    fills = _is_fill(func) and sum(param is target for param in found) == 1
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f".{func.__self__.__name__}"
    with torch._C.DisableTorchFunctionSubclass(), _held(params.values(), name, target if fills else None):
        if func in TO_NUMPY and not args[0].requires_grad:
            args = (args[0].detach(), *args[1:])  # the array keeps this alias, which the use counts show
        return func(*args, **kwargs)


def _is_fill(func: Any) -> bool:
    """See Note [Values that nobody reads]. Transformers puts functions of its own in the place of torch's."""
    if getattr(func, "__module__", "") == "transformers.initialization":
        return func.__name__ in _INIT_NAMES
    return func in _FILLS


def _run_beside_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another guarded class takes part (a prepared model, say): show it plain aliases, so that its own guard runs."""
    args, kwargs = tree_map_only(PagedParameter, lambda param: param.data, (args, kwargs))
    return func(*args, **kwargs)


def _collect(value: Any, found: list[PagedParameter]) -> None:
    if isinstance(value, PagedParameter):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)


@contextmanager
def _held(params: Iterable[PagedParameter], operation: str, filled: Any) -> Iterator[None]:
    """Keep the parameters in memory while an operation runs, which replaces the values of `filled`."""
    held: list[tuple[Pager, PagedParameter, Page]] = []
    failed = True
    try:
        for param in params:
            held.append((param.pager, param, param.pager.hold(param, operation, param is filled)))
        yield
        failed = False
    finally:
        for pager, param, page in held:
            pager.release(param, page, failed)


# Note [Mapped weights]
# Loaders map weights from files, and a page of the file counts as this process's memory from its first use until the
# file is closed: after reading a model of any size, all of it. A parameter that is a piece of such a mapping is copied
# out of it; one that was cast from it leaves no trace of its source. So the pages of whole mappings go (MADV_DONTNEED:
# they come back from the file if they are used again) whenever the resident pages of files have grown by a fixed
# amount. Only mappings that were made since the pager began or that a parameter came from, and that hold no modified
# page, which would be lost.


@final
class MappedFiles:
    """Files that loaders have mapped, whose pages are given back now and then. See Note [Mapped weights]."""

    def __init__(self) -> None:
        self._others = {each.identity for each in _file_mappings(detailed=False)}
        self._limit = _resident_file_bytes() + MAPPED_BYTES

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that lies in a mapped file; any other tensor itself."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL_BYTES or storage.resizable():
            return tensor
        address = storage.data_ptr()
        for each in _file_mappings(detailed=False):
            if each.address <= address < each.address + each.nbytes:
                self._others.discard(each.identity)
                return tensor.detach().clone()
        return tensor

    def trim(self) -> None:
        """Give back what can be, if enough has come together."""
        if _resident_file_bytes() <= self._limit:
            return
        for each in _file_mappings(detailed=True):
            if each.unmodified and each.identity not in self._others:
                with suppress(OSError):  # locked by its owner: it stays
                    give_back_pages(each.address, each.nbytes)
        self._limit = _resident_file_bytes() + MAPPED_BYTES


@dataclass(frozen=True)
class _Mapping:
    """A private mapping of a file that is no program. `unmodified`: it holds pages, all of them the file's own."""

    address: int
    nbytes: int
    file: str  # device and inode
    unmodified: bool

    @property
    def identity(self) -> tuple[int, str]:
        return self.address, self.file


_HEAD = r"^([0-9a-f]+)-([0-9a-f]+) [r-][w-]-p \S+ (\S+ [1-9]\d*)\b.*\n"
_MAPS = re.compile(_HEAD, re.MULTILINE)
_SMAPS = re.compile(
    _HEAD + "".join(rf"(?:[A-Z].*\n)*?{key}: +(\d+) kB\n" for key in ("Rss", "Anonymous", "Swap")), re.M
)


def _file_mappings(detailed: bool) -> Iterator[_Mapping]:
    """Those of this process; `unmodified` is found out only in detail, which is slower. None where /proc has none."""
    try:
        listing = Path("/proc/self/smaps" if detailed else "/proc/self/maps").read_text(errors="replace")
    except OSError:
        return
    for low, high, file, *kilobytes in (_SMAPS if detailed else _MAPS).findall(listing):
        resident, *changed = map(int, kilobytes or (0, 0))
        address = int(low, 16)
        yield _Mapping(address, int(high, 16) - address, file, resident > 0 and not any(changed))


def _resident_file_bytes() -> int:
    """Of this process's memory what belongs to files and shared memory; 0 on a system that does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * PAGE_BYTES
    except OSError:
        return 0
