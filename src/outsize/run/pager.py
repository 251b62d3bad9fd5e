"""The pager: keeps parameters under construction within a budget, the rest on disk."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from typing import Any, final

import torch
from torch import nn

from outsize.move.memory import Ledger
from outsize.plan.sizes import format_bytes
from outsize.run.paging import (
    MIN_PAGED_BYTES,
    SMALL_BYTES,
    MappedFiles,
    Owner,
    Page,
    PagedParameter,
    PageFile,
    Place,
    use_counts,
)

ACCOUNT = "host/parameters"

# Note [Room for the next parameter]
# The pager is told of a parameter when its memory is there already. So it keeps room for one more of the largest size
# seen so far, where there is a disk: memory exceeds the budget only while a parameter is made that is larger than all
# before it, by what it is larger, or where the budget does not hold two of them. A model that fits the budget without
# that room, and so was paged for nothing, is read back at the end.


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
        self._disk = disk
        self._building = True
        self._paging = False
        self._largest = 0  # bytes of a parameter
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owners: dict[int, Owner] = {}  # by the parameter's id
        self._pages: dict[int, Page] = {}  # by the storage's identity, least recently used first
        self._leaving: deque[Page] = deque()
        self._dead: deque[tuple[int, weakref.ref[nn.Parameter]]] = deque()
        self._class: Any = type("PagedParameter", (PagedParameter,), {"pager": self})
        self._unshared = use_counts(nn.Parameter(torch.empty(1, device="cpu")))

    # ---------------------------------------------------------------------------------- while the model is built

    def adopt(self, param: nn.Parameter) -> None:
        """Page a new parameter from now on. Raises `ValueError` if the model does not fit."""
        if type(param) is not nn.Parameter or param.device.type != "cpu" or param.layout is not torch.strided:
            return
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._reap()
            self.mapped.trim()
            self._track(param, "(unnamed)")
            param.__class__ = self._class

    def name(self, param: nn.Parameter | None, name: str) -> None:
        """What error messages call the parameter."""
        owner = self._owners.get(id(param))
        if owner is not None and owner.ref() is param:
            owner.name = name

    def hold(self, param: nn.Parameter, operation: str, fills: bool) -> Page:
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._reap()
            self.mapped.trim()
            self._check_building(param, operation)
            page = self._owners[id(param)].page
            self._pages[page.key] = self._pages.pop(page.key)
            page.holds += 1
            try:
                self._bring_in(page, param, read=not (fills and page.is_whole(param)))
            except BaseException:
                page.holds -= 1
                raise
            return page

    def release(self, param: nn.Parameter, page: Page, failed: bool) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            page.holds -= 1
            unread, page.unread = page.unread, False
            if unread and (failed or param._version == page.version):
                self._read(page, param)
            if not page.holds_values_of(param):  # the operation gave it another storage
                name = self._owners[id(param)].name
                self._disown(id(param))
                self._track(param, name)

    def finish(self, failed: bool) -> None:
        """The model is built. Parameters that fit are plain from now on; the others wait on disk for `hand_over`."""
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._reap()
            self._building = False
            try:
                fits = self._fits
                if self._paging and not failed and not fits:
                    self._start_leaving(self.ledger.now[ACCOUNT])
                while self._leaving:
                    self._finish_leaving(drop=not failed and not fits)
                if self._paging and not failed and fits:
                    self._bring_back()
            finally:
                for page in [page for page in self._pages.values() if page.place is Place.MEMORY]:
                    self._make_plain(page)
                self._close_if_empty()

    # ---------------------------------------------------------------------------------- after the model is built

    def hand_over(self, param: nn.Parameter) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._reap()
            page = self._owners[id(param)].page
            if self._building:
                raise RuntimeError("outsize.prepare was called inside the outsize.init block; leave the block first")
            if page.place is Place.DISK:
                self._read(page, param)
                page.place = Place.MEMORY
                self.ledger.add(ACCOUNT, page.length)
            self._make_plain(page)
            self._close_if_empty()

    # ---------------------------------------------------------------------------------------------------- inside

    @property
    def _fits(self) -> bool:
        """Whether all parameters together stay within the budget."""
        return sum(page.nbytes for page in self._pages.values()) <= self._budget

    def _bring_back(self) -> None:
        for page in self._pages.values():
            param = next((param for owner in page.owners if (param := owner.ref()) is not None), None)
            if page.place is Place.DISK and param is not None:
                self._read(page, param)
                page.place = Place.MEMORY
                self.ledger.add(ACCOUNT, page.length)

    def _check_building(self, param: nn.Parameter, operation: str) -> None:
        what = f"parameter {self._owners[id(param)].name!r} (shape {tuple(param.shape)})"
        if os.getpid() != self._pid:
            raise RuntimeError(f"{operation}: {what} is built under outsize.init by another process, not by this fork")
        if not self._building:
            raise RuntimeError(
                f"{operation}: {what} was built under outsize.init and its values are on disk; call "
                f"outsize.prepare(model, optimizer) first"
            )

    def _track(self, param: nn.Parameter, name: str) -> None:
        fresh = Page.of(param)
        page = self._pages.setdefault(fresh.key, fresh)
        key = id(param)
        owner = Owner(weakref.ref(param, lambda ref: self._on_death(key, ref)), page, name)
        self._owners[key] = owner
        page.owners.append(owner)
        if page is fresh:
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

    def _bring_in(self, page: Page, param: nn.Parameter, read: bool) -> None:
        if page.place is Place.LEAVING:
            self._leaving.remove(page)
            self._stay(page)
        if page.place is Place.DISK:
            self._make_room(page.length)
            if read:
                self._read(page, param)
            page.unread, page.version = not read, 0 if read else param._version
            page.place = Place.MEMORY
            self.ledger.add(ACCOUNT, page.length)

    def _read(self, page: Page, param: nn.Parameter) -> None:
        assert page.slot is not None
        page.slot.file.read(page.slot.start, page.inside(param)).wait()

    def _make_room(self, nbytes: int) -> None:
        """Let pages leave until `nbytes` more fit. Once the model is too large, writes start ahead of the need."""
        most = self._budget - nbytes
        spare = self._largest if self._disk is not None else 0  # see Note [Room for the next parameter]
        limit, needed = most - spare, most - min(spare, SMALL_BYTES)
        if self.ledger.now[ACCOUNT] <= limit and not self._paging:
            return
        while self._leaving and self._leaving[0].transfer is not None and self._leaving[0].transfer.done():
            self._finish_leaving()
        self._start_leaving(self._staying - (limit - self._budget // 4))
        if self._staying > needed:
            self._start_leaving(self._staying - (needed - self._budget // 4), small=True)
        while self.ledger.now[ACCOUNT] > limit:
            if not self._leaving:
                if self.ledger.now[ACCOUNT] > most:
                    self._refuse(nbytes)
                return
            self._finish_leaving()

    @property
    def _staying(self) -> int:
        """Bytes in memory that are not on their way out of it."""
        return self.ledger.now[ACCOUNT] - sum(page.length for page in self._leaving)

    def _refuse(self, nbytes: int) -> None:
        needed = format_bytes(self.ledger.now[ACCOUNT] + nbytes)
        budget = format_bytes(self._budget)
        if self._disk is None:
            raise ValueError(
                f"the parameters built so far take {needed} but host_memory is {budget} and there is no disk; pass "
                f"disk='/path/on/a/fast/drive' to outsize.init, or raise host_memory"
            )
        stuck = sum(page.nbytes - page.length for page in self._pages.values())
        if stuck > self._budget // 2:
            raise ValueError(
                f"of {len(self._pages)} parameters {format_bytes(stuck)} cannot go to disk, which takes whole pages of "
                f"memory (none of a parameter below {format_bytes(MIN_PAGED_BYTES)}), and {needed} would be in memory, "
                f"but host_memory is {budget}; raise host_memory"
            )
        raise ValueError(
            f"parameters of {needed} are in use at the same time but host_memory is {budget}; raise host_memory, or "
            f"build smaller parameters and keep no aliases of them (views, .data, NumPy arrays, gradient graphs)"
        )

    def _start_leaving(self, nbytes: int, small: bool = False) -> None:
        """Start to write `small` pages or the others, least recently used first, until they make up `nbytes`."""
        if self._disk is None or nbytes <= 0:
            return
        for page in list(self._pages.values()):
            if (page.nbytes < SMALL_BYTES) is not small:
                continue
            param = page.owners[0].ref()
            if param is None or not self._can_leave(page):
                continue
            self._paging = True
            if page.slot is None:
                page.slot = self._disk.take(page.length)
            page.bytes = page.inside(param)
            page.transfer = page.slot.file.write(page.slot.start, page.bytes)
            page.place = Place.LEAVING
            self._leaving.append(page)
            nbytes -= page.length
            if nbytes <= 0:
                return

    def _can_leave(self, page: Page) -> bool:
        """Whether only paged parameters reach the page. See Note [Paged in place]."""
        if page.place is not Place.MEMORY or page.holds or not page.length:
            return False
        for owner in page.owners:
            param = owner.ref()
            if param is None or not page.holds_values_of(param):
                return False
            param_uses, storage_references, storage_uses = use_counts(param)
            if (param_uses, storage_references, storage_uses - len(page.owners) + 1) != self._unshared:
                return False
        return True

    def _finish_leaving(self, drop: bool = True) -> None:
        page = self._leaving.popleft()
        self._stay(page)
        if drop:
            page.give_back()
            page.place = Place.DISK
            self.ledger.remove(ACCOUNT, page.length)

    def _stay(self, page: Page) -> None:
        """Wait for the page's write; its values are in memory whether that succeeded or not."""
        transfer, page.transfer = page.transfer, None
        assert transfer is not None
        try:
            transfer.wait()
        finally:
            page.bytes = None
            page.place = Place.MEMORY

    def _make_plain(self, page: Page) -> None:
        for owner in list(page.owners):
            param = owner.ref()
            if param is not None:
                self._disown(id(param))
                param.__class__ = nn.Parameter

    def _disown(self, key: int) -> None:
        """The parameter is no longer paged; its page goes with the last one."""
        owner = self._owners.pop(key)
        page = owner.page
        page.owners.remove(owner)
        if page.owners:
            return
        if page.place is Place.LEAVING:
            self._leaving.remove(page)
            with contextlib.suppress(OSError):
                self._stay(page)
        del self._pages[page.key]
        self.ledger.remove(ACCOUNT, page.nbytes - (page.length if page.place is Place.DISK else 0))
        if page.slot is not None and self._disk is not None:
            self._disk.give(page.slot)

    def _on_death(self, key: int, ref: weakref.ref[nn.Parameter]) -> None:
        """Runs where the last reference goes, perhaps while the lock is held: then its next holder reaps."""
        self._dead.append((key, ref))
        if not self._building and self._lock.acquire(blocking=False):
            try:
                self._reap()
                self._close_if_empty()
            finally:
                self._lock.release()

    def _reap(self) -> None:
        while self._dead:
            key, ref = self._dead.popleft()
            owner = self._owners.get(key)
            if owner is not None and owner.ref is ref:
                self._disown(key)

    def _close_if_empty(self) -> None:
        if not self._owners and self._disk is not None:
            self._disk.close()
