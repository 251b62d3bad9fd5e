"""The rows of a table at rest: some of them are read and written at a time, and the hot ones stay at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import gcd
from typing import final

import torch

from outsize.move.generations import Generations
from outsize.move.hot_rows import HotRows, Values
from outsize.move.memory import PAGE_BYTES, HostBuffer, Ledger
from outsize.move.store import DiskStore, Store
from outsize.move.transfer import Transfer

MOVED_ROWS = 1024
"""Rows whose pages are in memory at once where nobody reads ahead."""

MOST_AHEAD_BYTES = 64 << 20

LEAST_SHARE = 1 / 4

# Note [Hot rows that are updated on the accelerator]
# An update in host memory moves each row in and its gradient out, whatever lies on the accelerator: a row that was
# updated there must come in anew. So hot rows lie on the accelerator with their state, and all rows of the table are
# updated there. Then the bits do not depend on which rows were hot. A hit moves nothing. A miss moves row and state in,
# and later out. Where all rows are used alike, this is less than without if the hot share of the rows is the state's
# share of the bytes (2/3 with two moments, 0 without state). By Zipf's law with 1.05 a quarter of that is enough.

# Note [A row is in one place]
# The truth of a row is on the accelerator if the row is there. Else it is among the hot rows of host memory, or on its
# way out of a read-ahead, or nowhere but where the table rests. Whoever wants a row that is on its way lets that
# read-ahead land first. So a row is changed in one place only, and is read after it was written. Pages are written when
# no read is under way, and read when no write is.
#
# Rows that leave the accelerator are written into memory at rest, also in a forward. Whoever reads that memory later (a
# save behind the training, a copy on its way) has flushed before, and the update that changed the rows has waited.


@final
class RowArray:
    """One array of a table: `width` values for each of `rows` rows."""

    def __init__(self, store: Store, rows: int, width: int, dtype: torch.dtype) -> None:
        self.store = store
        self.rows, self.width, self.dtype = rows, width, dtype
        self.row_bytes = width * dtype.itemsize

    @property
    def on_disk(self) -> bool:
        return isinstance(self.store, DiskStore)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def whole(self) -> torch.Tensor:
        """All rows [rows, width], in the memory where they rest."""
        found = self.store.in_place(0, self.nbytes)
        assert found is not None, "the array is on disk"
        self.store.use()
        return found.view(self.dtype).view(self.rows, self.width)


@final
class Records:
    """The arrays of a table in one file, row by row. See Note [Records] in move/store.py."""

    def __init__(self, file: Generations, arrays: Mapping[str, RowArray]) -> None:
        """`arrays`: all of the file, in its order."""
        self._file, self._arrays = file, arrays
        self.nbytes = sum(array.row_bytes for array in arrays.values())
        self._most_pages = 1 if PAGE_BYTES % self.nbytes == 0 else (self.nbytes - 2) // PAGE_BYTES + 2
        # Records are copied as numbers of so many bytes, in groups that never lie on two pages.
        size = gcd(8, *(array.row_bytes for array in arrays.values()))
        self._dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        self._group = gcd(self.nbytes, PAGE_BYTES)
        self._sizes = [array.row_bytes // size for array in arrays.values()]

    def pages_of(self, ids: torch.Tensor) -> torch.Tensor:
        """How many pages have each of these rows."""
        start = ids * self.nbytes
        return (start + self.nbytes - 1) // PAGE_BYTES - start // PAGE_BYTES + 1

    def start(self, ids: torch.Tensor) -> Reading:
        """Start to read the pages of these rows (int64, ascending)."""
        start = ids * self.nbytes
        first, last = start // PAGE_BYTES, (start + self.nbytes - 1) // PAGE_BYTES
        if self._most_pages == 1:
            pages = torch.unique_consecutive(first)
        else:
            each = first[:, None] + torch.arange(self._most_pages, device="cpu")
            pages = torch.unique(each[each <= last[:, None]])
        at = torch.searchsorted(pages, first) * PAGE_BYTES + start % PAGE_BYTES
        groups = (at // self._group)[:, None] + torch.arange(self.nbytes // self._group, device="cpu")
        content = HostBuffer(pages.numel() * PAGE_BYTES).bytes
        return Reading(self, pages, groups.view(-1), content, self._file.read(pages, content))

    def values_of(self, reading: Reading) -> Values:
        """The rows [n, width] of what was read. Blocks."""
        reading.transfer.wait()
        records = self._groups(reading).index_select(0, reading.groups).view(-1, sum(self._sizes))
        # Copied, a single row too: it is contiguous as it is, and may begin where no value of its dtype can.
        parts = (part.clone(memory_format=torch.contiguous_format) for part in records.split(self._sizes, 1))
        own = zip(self._arrays.items(), parts, strict=True)
        return {name: part.view(array.dtype) for (name, array), part in own}

    def write(self, reading: Reading, values: Values) -> Transfer:
        """Start to write other values [n, width] into the pages that were read."""
        reading.transfer.wait()
        records = torch.cat([values[name].contiguous().view(self._dtype) for name in self._arrays], 1)
        groups = self._groups(reading)
        groups.index_copy_(0, reading.groups, records.view(-1, groups.shape[1]))
        return self._file.write(reading.pages, reading.content)

    def _groups(self, reading: Reading) -> torch.Tensor:
        return reading.content.view(self._dtype).view(-1, self._group // self._dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Reading:
    """Pages of records on their way; `groups` says where in them the rows lie."""

    records: Records
    pages: torch.Tensor  # int64 [pages]
    groups: torch.Tensor  # int64
    content: torch.Tensor  # uint8 [pages * 4096]
    transfer: Transfer


def arrive(readings: Sequence[Reading]) -> None:
    """Wait for all, whatever comes of them, so that their memory is free. Raises the first error there was."""
    with ExitStack() as last_first:
        for reading in readings:
            last_first.callback(reading.transfer.wait)


def values_of(readings: Sequence[Reading]) -> Values:
    """The rows of all arrays that were read. Blocks."""
    arrive(readings)
    return {name: rows for each in readings for name, rows in each.records.values_of(each).items()}


@dataclass(frozen=True, eq=False)
class Coming:
    """Rows that were asked for ahead."""

    ids: torch.Tensor  # int64 [n], ascending
    readings: Sequence[Reading]

    @property
    def nbytes(self) -> int:
        return sum(reading.content.numel() for reading in self.readings)


@dataclass
class RowCounts:
    """What was asked for, by distinct rows; those of them that were in memory, and of these on the accelerator; those
    asked for ahead."""

    wanted: int = 0
    hits: int = 0
    on_device: int = 0
    ahead: int = 0


@final
class Rows:
    """The rows of one table, over all of its arrays ("params" and the optimizer's). Ids are int64, those of `get` and
    `put` on `device`, others on the host."""

    def __init__(self, arrays: Mapping[str, RowArray], ledger: Ledger) -> None:
        self.arrays = dict(arrays)
        self.count, self.width = arrays["params"].rows, arrays["params"].width
        self.counts = RowCounts()
        self._on_disk = {name: array for name, array in arrays.items() if array.on_disk}
        rests = {None if array.on_disk else array.whole().device for array in arrays.values()}
        self.device = (rests.pop() if len(rests) == 1 else None) or torch.device("cpu")
        """Where `get` gives rows, and where they are updated: an accelerator, if all rest there or it has hot rows."""
        files: dict[Generations, dict[str, RowArray]] = {}
        for name, array in self._on_disk.items():
            assert isinstance(array.store, DiskStore)
            files.setdefault(array.store.file, {})[name] = array
        self.applied: tuple[Callable[[], object], int] | None = None  # the gradient of the last step, and its version
        self._records = [Records(file, each) for file, each in files.items()]
        self._ledger = ledger
        self._hot = self._above_the_drive(0)
        self._near: HotRows | None = None  # on the accelerator
        self._from_rest = self._from_far = 0  # rows that were read from where the table rests; that came to the device
        self._ahead_bytes = 0
        self._coming: list[Coming] = []
        self._writing: list[tuple[Transfer, Reading]] = []

    @property
    def on_disk(self) -> bool:
        """Whether any array is; the same on every rank."""
        return bool(self._on_disk)

    @property
    def disk_bytes(self) -> int:
        return sum(array.nbytes for array in self._on_disk.values())

    @property
    def far_bytes(self) -> int:
        """Of the table, where an accelerator has none of it; else 0."""
        every = self.arrays.values()
        near = any(not array.on_disk and array.whole().device.type != "cpu" for array in every)
        return 0 if near else sum(array.nbytes for array in every)

    @property
    def taken(self) -> tuple[int, int]:
        """Bytes of host memory, and of an accelerator, that hot rows and those read ahead may take."""
        return self._hot.nbytes + self._ahead_bytes, 0 if self._near is None else self._near.nbytes

    def use_memory(self, nbytes: int) -> int:
        """Take up to so many bytes, a quarter for what is read ahead, the others for hot rows. Returns how many."""
        self.forget()
        self._ledger.remove("host/hot rows", self._hot.nbytes)
        self._ahead_bytes = min(nbytes // 4, MOST_AHEAD_BYTES)
        self._hot = self._above_the_drive(nbytes - self._ahead_bytes)
        self._ledger.add("host/hot rows", self._hot.nbytes)
        return self._hot.nbytes + self._ahead_bytes

    def use_device(self, nbytes: int, device: torch.device) -> int:
        """Take up to so many bytes of an accelerator for hot rows. Returns how many: none where they are too few. See
        Note [Hot rows that are updated on the accelerator]."""
        record = sum(array.row_bytes for array in self.arrays.values())
        state = 1 - self.arrays["params"].row_bytes / record
        if nbytes < self.count * record * state * LEAST_SHARE:
            return 0
        self.forget()
        near = HotRows(self.count, _shapes(self.arrays), nbytes, device, self._read_far, self._write_far)
        if near.nbytes:
            self._near, self.device = near, device
            self._ledger.add("device/hot rows", near.nbytes)
        return near.nbytes

    def whole(self) -> Values | None:
        """All rows of all arrays, where they rest in one memory."""
        if self._on_disk or self._near is not None:
            return None
        found = {name: array.whole() for name, array in self.arrays.items()}
        return found if len({each.device for each in found.values()}) == 1 else None

    def get(self, ids: torch.Tensor) -> Values:
        """Copies of these rows (ascending) of all arrays. Blocks."""
        return self._get(ids, self.arrays)

    def get_params(self, ids: torch.Tensor) -> torch.Tensor:
        """As `get`, for a batch, which needs no state yet; where rows come among the hot ones, that comes with them."""
        from_rest, from_far = self._from_rest, self._from_far
        found = self._get(ids, ("params",))["params"]
        self.counts.wanted += ids.numel()
        if self._near is not None:
            self.counts.on_device += ids.numel() - (self._from_far - from_far)
        if self._near is not None or self._on_disk:
            self.counts.hits += ids.numel() - (self._from_rest - from_rest)
        return found

    def put(self, ids: torch.Tensor, values: Values) -> None:
        """Other values for these rows (ascending) of all arrays. Blocks only where a row is not at hand."""
        if self._near is not None:
            self._near.put(ids, values)
        else:
            self._put_far(ids, values)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to read those of these rows (ascending) that are not in memory, as far as there is room."""
        if not self._on_disk:
            return
        if self._near is not None:
            self._near.begin()
            places = self._near.find(ids.to(self.device))
            self._near.use(places)
            ids = ids[(places < 0).cpu()]
        self._hot.begin()
        places = self._hot.find(ids)
        self._hot.use(places)
        missing = ids[places < 0]
        for coming in self._coming:
            missing = missing[~torch.isin(missing, coming.ids)]
        room = self._ahead_bytes - sum(each.nbytes for each in self._coming)
        pages = torch.stack([each.pages_of(missing) for each in self._records]).sum(0)  # or less: rows share pages
        missing = missing[pages.cumsum(0) * PAGE_BYTES <= room]
        if missing.numel():
            self._await_writes()
            coming = Coming(missing, [each.start(missing) for each in self._records])
            self._ledger.add("host/rows ahead", coming.nbytes)
            self._coming.append(coming)
            self.counts.ahead += missing.numel()

    def land(self) -> None:
        """What was asked for ahead comes among the hot rows. Blocks."""
        while self._coming:
            self._land(self._coming[0])

    def flush(self) -> None:
        """Write what is not yet where the table rests. Blocks until it is written."""
        if self._near is not None:
            self._near.flush(self.count)
        self._hot.flush(MOVED_ROWS)
        self._await_writes()

    def forget(self) -> None:
        """Somebody else is about to change the arrays: nothing of them stays at hand. Blocks."""
        self.flush()
        for coming in self._coming:
            self._let_go(coming)
        self._coming = []
        self._hot.forget()
        if self._near is not None:
            self._near.forget()

    def close(self) -> None:
        """Wait for what is on its way, whatever comes of it. What was not flushed is lost."""
        reads = [reading.transfer for coming in self._coming for reading in coming.readings]
        for transfer in [*reads, *(transfer for transfer, _ in self._writing)]:
            with suppress(OSError):
                transfer.wait()
        self._ledger.remove("host/rows ahead", sum(coming.nbytes for coming in self._coming))
        self._ledger.remove("host/hot rows", self._hot.nbytes)
        if self._near is not None:
            self._ledger.remove("device/hot rows", self._near.nbytes)
        self._coming, self._writing, self._near = [], [], None
        self._hot = self._above_the_drive(0)

    # -- below the accelerator -----------------------------------------------------------------------------------------

    def _get(self, ids: torch.Tensor, names: Iterable[str]) -> Values:
        if self._near is None:
            return self._get_far(ids, names)
        self._near.begin()
        return self._near.get(ids, names, self.count)

    def _read_far(self, ids: torch.Tensor) -> Values:
        self._from_far += ids.numel()
        self._from_rest += 0 if self._on_disk else ids.numel()
        found = self._get_far(ids.cpu(), self.arrays)
        return {name: each.to(self.device) for name, each in found.items()}

    def _write_far(self, ids: torch.Tensor, values: Values) -> None:
        self._put_far(ids.cpu(), {name: each.cpu() for name, each in values.items()})

    def _get_far(self, ids: torch.Tensor, names: Iterable[str]) -> Values:
        in_memory = [name for name in names if not self.arrays[name].on_disk]
        found = {}
        for name in in_memory:
            whole = self.arrays[name].whole()
            found[name] = whole.index_select(0, ids.to(whole.device)).to(self.device)
        on_disk = [name for name in names if self.arrays[name].on_disk]
        if self._on_disk:
            self._hot.begin()
            self._land_what_meets(ids)
            found |= self._hot.get(ids, on_disk, MOVED_ROWS)
        return found

    def _put_far(self, ids: torch.Tensor, values: Values) -> None:
        for name, array in self.arrays.items():
            if not array.on_disk:
                whole = array.whole()
                whole.index_copy_(0, ids.to(whole.device), values[name].to(whole.device))
        if self._on_disk:
            self._land_what_meets(ids)
            self._hot.put(ids, values)

    # -- above the drive -----------------------------------------------------------------------------------------------

    def _above_the_drive(self, nbytes: int) -> HotRows:
        return HotRows(self.count, _shapes(self._on_disk), nbytes, torch.device("cpu"), self._read, self._write)

    def _read(self, ids: torch.Tensor) -> Values:
        self._from_rest += ids.numel()
        self._await_writes()
        return values_of([each.start(ids) for each in self._records])

    def _write(self, ids: torch.Tensor, values: Values) -> None:
        """Start to write rows (ascending)."""
        for coming in self._coming:
            for reading in coming.readings:
                reading.transfer.wait()
        for part in _parts(ids.numel()):
            self._await_writes()
            own = {name: each[part] for name, each in values.items()}
            readings = [each.start(ids[part]) for each in self._records]
            arrive(readings)
            for reading in readings:
                self._writing.append((reading.records.write(reading, own), reading))

    def _land_what_meets(self, ids: torch.Tensor) -> torch.Tensor:
        """Where each of these rows is among the hot ones, once none is on its way. See Note [A row is in one place]."""
        places = self._hot.find(ids)
        missing = ids[places < 0] if self._coming else ids[:0]
        met = [coming for coming in self._coming if missing.numel() and torch.isin(missing, coming.ids).any()]
        if not met:
            return places
        self._hot.use(places)
        for coming in met:
            self._land(coming)
        return self._hot.find(ids)

    def _land(self, coming: Coming) -> None:
        values = values_of(coming.readings)
        self._let_go(coming)
        self._coming = [each for each in self._coming if each is not coming]
        self._hot.admit(coming.ids, values)

    def _let_go(self, coming: Coming) -> None:
        for reading in coming.readings:
            reading.transfer.wait()
        self._ledger.remove("host/rows ahead", coming.nbytes)

    def _await_writes(self) -> None:
        while self._writing:
            self._writing[-1][0].wait()
            self._writing.pop()  # not before: the memory belongs to the drive


def _shapes(arrays: Mapping[str, RowArray]) -> dict[str, tuple[int, torch.dtype]]:
    return {name: (array.width, array.dtype) for name, array in arrays.items()}


def _parts(count: int) -> Iterator[slice]:
    return (slice(first, min(first + MOVED_ROWS, count)) for first in range(0, count, MOVED_ROWS))


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], is_coalesced: bool) -> torch.Tensor:
    """A sparse gradient of a table of this size: `values` [n, width] of the rows `ids` [n]."""
    device = values.device  # whatever the default device
    return torch.sparse_coo_tensor(
        ids[None], values, size, device=device, is_coalesced=is_coalesced, check_invariants=False
    )


def distinct(many: Sequence[torch.Tensor]) -> torch.Tensor:
    """The distinct ids of some tensors, ascending, int64 in host memory."""
    if not many:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    found: torch.Tensor = torch.unique(torch.cat([each.detach().reshape(-1).to("cpu", torch.int64) for each in many]))
    return found
