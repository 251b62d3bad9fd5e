"""Parameters under construction: a pager keeps them within a budget of memory, the rest on disk."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from outsize.move.disk import LARGEST_FILE, STRIPE_BYTES, RunDirectory, StripedFile, devices_of, open_engine
from outsize.move.memory import Ledger, give_back_pages, keep_huge_pages_inside, pages_inside
from outsize.move.transfer import Transfer
from outsize.planning.errors import BudgetError
from outsize.planning.sizes import format_bytes
from outsize.run.guard import METADATA, TO_NUMPY, among
from outsize.run.mapped_files import MappedFiles, is_modified

ACCOUNT = "host/parameters"

MIN_PAGED_BYTES = 8 << 10
"""Smaller parameters stay in memory: they need not hold a whole page of it."""

SMALL_BYTES = 64 << 10
"""Smaller parameters stay in memory as long as larger ones can go: they cost more requests than they free bytes."""

# Note [Paged in place]
# A parameter on disk keeps its memory's address: the values are written from where they are, then the pages that lie
# wholly inside go back to the system (MADV_DONTNEED). So nothing is copied, direct I/O finds aligned memory, addresses
# that code compares stay what they were, and an access that slips past the guard meets zeros instead of a fault.
# The pages go only while nothing but guarded parameters can reach them: not while a plain alias (`p.data`, a view, a
# NumPy array, a storage object) lives or autograd has saved the parameter. The use counts of the tensor and of its
# storage tell; what they are for an unshared parameter differs between versions of torch and is measured.

# Note [Room for the next parameter]
# The pager is told of a parameter when its memory is there already. So it keeps room for one more of the largest size
# seen so far, where there is a disk: memory exceeds the budget only while a parameter is made that is larger than all
# before it, by what it is larger, or where the budget does not hold two of them. A model that fits the budget without
# that room, and so was paged for nothing, is read back at the end. A parameter that is larger than the budget comes on
# top while it is in use, for torch makes it whole.


@final
@dataclass(eq=False)
class Page:
    """The storage of one parameter, or of several that share it. `[first, first + length)` can go to disk.

    `nbytes` is what it takes of the memory: nothing where it is a mapped file's.
    """

    key: int
    address: int
    nbytes: int
    first: int
    length: int
    mapped: bool = False  # a file's memory, which the system pages: see run/mapped_files.py
    name: str = "(unnamed)"
    holds: int = 0
    on_disk: bool = False
    start: int | None = None  # in the file, once it was written
    owners: dict[int, weakref.ref[nn.Parameter]] = field(default_factory=dict)

    @classmethod
    def of(cls, param: nn.Parameter, mapped: bool) -> Page:
        storage = param.untyped_storage()
        address, nbytes = storage.data_ptr(), 0 if mapped else storage.nbytes()
        first = length = 0
        if nbytes >= MIN_PAGED_BYTES and storage.resizable():  # else the memory is not torch's own
            first, length = pages_inside(address, nbytes)
        return cls(storage._cdata, address, nbytes, first, length, mapped)

    def holds_values_of(self, param: nn.Parameter) -> bool:
        storage = param.untyped_storage()
        nbytes = 0 if self.mapped else storage.nbytes()
        return (storage._cdata, storage.data_ptr(), nbytes) == (self.key, self.address, self.nbytes)

    def params(self) -> list[nn.Parameter]:
        return [param for ref in list(self.owners.values()) if (param := ref()) is not None]

    def can_leave(self, params: list[nn.Parameter], unshared: tuple[int, int, int]) -> bool:
        """Whether only `params`, its owners, reach it. See Note [Paged in place]."""
        if self.on_disk or self.holds or not self.length or len(params) != len(self.owners):
            return False
        for param in params:
            if not self.holds_values_of(param):
                return False
            param_uses, storage_references, storage_uses = use_counts(param)
            if (param_uses, storage_references, storage_uses - len(self.owners) + 1) != unshared:
                return False
        return True

    def inside(self, param: nn.Parameter) -> torch.Tensor:
        """The bytes that can go to disk, as uint8 [length]."""
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty.set_(param.untyped_storage(), self.first - self.address, (self.length,), (1,))


@final
class PageFile:
    """Disk space for parameters under construction, in a run directory of its own; none before the first `take`."""

    def __init__(self, directories: Sequence[Path], limit_bytes: int) -> None:
        self._directories = directories
        self.devices = devices_of(directories)
        self.takes_holes = False
        """Whether the file system frees a part of a file, which not every one does."""
        self._limit_bytes = min(limit_bytes, LARGEST_FILE)
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._file: StripedFile | None = None
        self._opened = ExitStack()
        self.close = weakref.finalize(self, self._opened.close)

    @property
    def file(self) -> StripedFile:
        if self._file is None:
            runs = [RunDirectory(directory) for directory in self._directories]
            for run in runs:
                self._opened.callback(run.close)
            engine = open_engine()
            self._opened.callback(engine.close)
            self._file = StripedFile(engine, [run.path for run in runs], "parameters", self._limit_bytes)
            self._opened.callback(self._file.close)
            self.takes_holes = self._file.give_back(0, min(self._file.nbytes, STRIPE_BYTES * len(runs)))
        return self._file

    def take(self, nbytes: int) -> int:
        """The start of free space in the file."""
        free = self._free.get(nbytes)
        start = free.pop() if free else self._end
        if start + nbytes > self._limit_bytes:
            raise BudgetError(
                f"the parameters need more than the {format_bytes(self._limit_bytes)} that may be used on disk; raise "
                f"disk_space, or name a directory with more free space",
                "disk_space",
                start + nbytes,
                self._limit_bytes,
            )
        self.file.preallocate(start, nbytes)
        self._end = max(self._end, start + nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        self.file.give_back(start, nbytes)
        self._free.setdefault(nbytes, []).append(start)


def use_counts(param: nn.Parameter) -> tuple[int, int, int]:
    """Who refers to the parameter's tensor, to its storage's Python object, and to its storage."""
    storage = param.untyped_storage()
    return param._use_count(), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@final
class Pager:
    """Keeps the parameters of a model under construction within `budget` bytes of memory. Thread-safe.

    See Note [Room for the next parameter] for the exact bound.
    """

    def __init__(self, budget: int, disk: PageFile | None) -> None:
        self.ledger = Ledger()
        self.ledger.add(ACCOUNT, 0)
        self.mapped = MappedFiles()
        self._budget = budget
        self.disk = disk
        self._building = True
        self._largest = 0  # bytes of a parameter
        self._pid = os.getpid()
        self._is_exiting = sys.is_finalizing  # taken now: an interpreter that ends empties its modules first
        self._lock = threading.Lock()
        self._page_of: dict[int, Page] = {}  # by the parameter's id
        self._pages: dict[int, Page] = {}  # by the storage's identity, least recently used first
        self._dead: deque[tuple[int, weakref.ref[nn.Parameter]]] = deque()
        self._class: Any = type("PagedParameter", (PagedParameter,), {"pager": self})
        self._unshared = use_counts(nn.Parameter(torch.empty(1, device="cpu")))

    def adopt(self, param: nn.Parameter) -> None:
        """Page a new parameter from now on. Raises `ValueError` if the model does not fit."""
        if type(param) is not nn.Parameter or param.device.type != "cpu" or param.layout is not torch.strided:
            return
        with self._alone():
            self.mapped.trim()
            self._track(param, "(unnamed)")
            param.__class__ = self._class

    def name(self, param: nn.Parameter | None, name: str) -> None:
        """What error messages call the parameter."""
        page = self._page_of.get(id(param))
        if page is not None and isinstance(param, self._class):
            page.name = name

    @contextmanager
    def in_memory(self, param: nn.Parameter, operation: str) -> Iterator[None]:
        """Keep the parameter in memory while an operation runs."""
        with self._alone():
            page = self._page_of[id(param)]
            self._check_building(param, page, operation)
            self.mapped.trim()
            self._pages[page.key] = self._pages.pop(page.key)  # the most recently used
            page.holds += 1
        try:
            with self._alone():
                if page.on_disk:
                    self._make_room(page.length)
                    self._read(page)
            yield
        finally:
            with self._alone():
                page.holds -= 1
                if page.mapped and is_modified(param):  # it takes memory, which is to be paged
                    param.data = param.data.clone()
                if not page.holds_values_of(param):  # the operation gave it another storage
                    self._disown(id(param))
                    self._track(param, page.name)

    def finish(self, failed: bool) -> None:
        """The model is built. Parameters that fit are plain from now on; the others wait on disk for `hand_over`."""
        with self._alone():
            self._building = False
            try:
                if not failed and sum(page.nbytes for page in self._pages.values()) > self._budget:
                    self._write(0)
                elif not failed:
                    for page in self._pages.values():
                        self._read(page)
            finally:
                for page in [page for page in self._pages.values() if not page.on_disk]:
                    self._make_plain(page)

    def hand_over(self, param: nn.Parameter) -> None:
        """Bring the parameter into memory for good. It and those that share its storage are plain from now on."""
        with self._alone():
            if self._building:
                raise RuntimeError("outsize.prepare was called inside the outsize.init block; leave the block first")
            page = self._page_of[id(param)]
            self._check_process(param, page, "outsize.prepare")
            self._read(page)
            self._make_plain(page)

    def held_on_disk(self, param: nn.Parameter, devices: frozenset[int]) -> int:
        """The bytes on these file systems that `hand_over` gives back, once all that share them were handed over."""
        page = self._page_of[id(param)]
        if page.start is None or self.disk is None or not self.disk.takes_holes or not self.disk.devices <= devices:
            return 0
        return page.length // len(page.owners)

    # ---------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._reap()
            try:
                yield
            finally:
                self._close_if_empty()

    @property
    def _used(self) -> int:
        return self.ledger.now[ACCOUNT]

    def _check_process(self, param: nn.Parameter, page: Page, operation: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{operation}: parameter {page.name!r} (shape {tuple(param.shape)}) is built under outsize.init by "
                f"another process, not by this fork; use the model there"
            )

    def _check_building(self, param: nn.Parameter, page: Page, operation: str) -> None:
        self._check_process(param, page, operation)
        if not self._building:
            raise RuntimeError(
                f"{operation}: parameter {page.name!r} (shape {tuple(param.shape)}) was built under outsize.init and "
                f"its values are on disk; call outsize.prepare(model, optimizer) first"
            )

    def _track(self, param: nn.Parameter, name: str) -> None:
        fresh = Page.of(param, self.mapped.holds(param))
        page = self._pages.setdefault(fresh.key, fresh)
        page.name = name
        key = id(param)
        page.owners[key] = weakref.ref(param, lambda ref: self._on_death(key, ref))
        self._page_of[key] = page
        if page is not fresh:
            return
        self._largest = max(self._largest, page.nbytes)
        self.ledger.add(ACCOUNT, page.nbytes)
        page.holds += 1
        try:
            self._make_room(0)
        except BaseException:
            self._disown(key)
            param.__class__ = nn.Parameter
            raise
        page.holds -= 1

    def _make_room(self, nbytes: int) -> None:
        """Write pages until `nbytes` more fit, and a quarter of the budget ahead of the need."""
        beyond = max((page.nbytes for page in self._pages.values() if page.holds), default=0)
        most = self._budget - nbytes + (beyond if beyond > self._budget else 0)  # such a one is in memory alone
        spare = self._largest if self.disk is not None else 0  # see Note [Room for the next parameter]
        ahead = self._budget // 4
        if self._used > most - spare:
            self._write(most - spare - ahead)
        if self._used > most - min(spare, SMALL_BYTES):
            self._write(most - SMALL_BYTES - ahead, small=True)
        if self._used > most:
            self._refuse(nbytes)

    def _refuse(self, nbytes: int) -> None:
        needed = format_bytes(self._used + nbytes)
        budget = format_bytes(self._budget)
        numbers = "host_memory", self._used + nbytes, self._budget
        if self.disk is None:
            raise BudgetError(
                f"the parameters built so far take {needed} but host_memory is {budget} and there is no disk; pass "
                f"disk='/path/on/a/fast/drive' to outsize.init, or raise host_memory",
                *numbers,
            )
        stuck = sum(page.nbytes - page.length for page in self._pages.values())
        if stuck > self._budget // 2:
            raise BudgetError(
                f"of {len(self._pages)} parameters {format_bytes(stuck)} cannot go to disk, which takes whole pages of "
                f"memory (none of a parameter below {format_bytes(MIN_PAGED_BYTES)}), and {needed} would be in memory, "
                f"but host_memory is {budget}; raise host_memory",
                *numbers,
            )
        raise BudgetError(
            f"parameters of {needed} are in use at the same time but host_memory is {budget}; raise host_memory, or "
            f"build smaller parameters and keep no aliases of them (views, .data, NumPy arrays, gradient graphs)",
            *numbers,
        )

    def _write(self, goal: int, small: bool = False) -> None:
        """Write `small` pages or the others, least recently used first, until those in memory take `goal` bytes."""
        if self.disk is None:
            return
        left = self._used
        with ExitStack() as writes:  # each is waited for, also when another fails
            for page in list(self._pages.values()):
                if left <= goal:
                    break
                params = page.params()
                if (page.nbytes < SMALL_BYTES) is small and page.can_leave(params, self._unshared):
                    if page.start is None:
                        page.start = self.disk.take(page.length)
                    source = page.inside(params[0])
                    writes.callback(self._drop, page, source, self.disk.file.write(page.start, source))
                    left -= page.length

    def _drop(self, page: Page, source: torch.Tensor, written: Transfer) -> None:
        """The memory's pages go when they are written; the address stays. `source` keeps the storage until then."""
        written.wait()
        give_back_pages(page.first, page.length)
        if page.length >= SMALL_BYTES:  # each call may split a mapping of the process, and those are limited
            keep_huge_pages_inside(page.first, page.length)  # they come back faster in huge pages
        page.on_disk = True
        self.ledger.remove(ACCOUNT, page.length)

    def _read(self, page: Page) -> None:
        params = page.params()
        if page.on_disk and params:
            assert self.disk is not None
            assert page.start is not None
            self.disk.file.read(page.start, page.inside(params[0])).wait()
            page.on_disk = False
            self.ledger.add(ACCOUNT, page.length)

    def _make_plain(self, page: Page) -> None:
        for param in page.params():
            self._disown(id(param))
            param.__class__ = nn.Parameter

    def _disown(self, key: int) -> None:
        """The parameter is no longer paged; its page goes with the last one."""
        page = self._page_of.pop(key)
        del page.owners[key]
        if page.owners:
            return
        del self._pages[page.key]
        self.ledger.remove(ACCOUNT, page.nbytes - (page.length if page.on_disk else 0))
        if page.start is not None and self.disk is not None and os.getpid() == self._pid:  # a fork has the same file
            self.disk.give(page.start, page.length)

    def _on_death(self, key: int, ref: weakref.ref[nn.Parameter]) -> None:
        """Runs where the last reference goes, perhaps while the lock is held: then its next holder reaps."""
        self._dead.append((key, ref))
        if not self._building and not self._is_exiting() and self._lock.acquire(blocking=False):
            try:
                self._reap()
                self._close_if_empty()
            finally:
                self._lock.release()

    def _reap(self) -> None:
        while self._dead:
            key, ref = self._dead.popleft()
            if key in self._page_of and self._page_of[key].owners[key] is ref:
                self._disown(key)

    def _close_if_empty(self) -> None:
        if not self._building and not self._pages and self.disk is not None:
            self.disk.close()


class PagedParameter(nn.Parameter):
    """A parameter that was built under `outsize.init`. See Note [Paged in place]."""

    pager: Pager

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _run(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with self.pager.in_memory(self, "copy.deepcopy"), torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, built under outsize.init)"


def held_on_disk(params: Mapping[str, torch.Tensor], directories: Sequence[Path]) -> dict[str, int]:
    """By name: the bytes on the file systems of these directories that `page_in` of the parameter gives back."""
    devices = devices_of(directories)
    paged = {name: param for name, param in params.items() if isinstance(param, PagedParameter)}
    return {name: param.pager.held_on_disk(param, devices) for name, param in paged.items()}


def page_in(param: nn.Parameter) -> torch.Tensor:
    """The parameter's values, without gradient; one that was paged is a plain parameter from now on."""
    if isinstance(param, PagedParameter):
        param.pager.hand_over(param)
    return param.detach()


def _run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with its paged arguments in memory."""
    if not all(issubclass(kind, PagedParameter) for kind in types):
        # Another guarded class takes part (a prepared model, say): show it plain aliases, so that its own guard runs.
        args, kwargs = tree_map_only(PagedParameter, lambda param: param.data, (args, kwargs))
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = f".{func.__self__.__name__}"
    with torch._C.DisableTorchFunctionSubclass(), ExitStack() as held:
        for param in {id(param): param for param in among(PagedParameter, (args, kwargs))}.values():
            held.enter_context(param.pager.in_memory(param, name))
        if func in TO_NUMPY and not args[0].requires_grad:
            args = (args[0].detach(), *args[1:])  # the array keeps this alias, which the use counts show
        return func(*args, **kwargs)
