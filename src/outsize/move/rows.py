"""The rows of a table at rest: some of them are read and written at a time, and the hot ones stay in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import gcd
from typing import final

import torch

from outsize.move.generations import Generations
from outsize.move.memory import PAGE_BYTES, HostBuffer, Ledger
from outsize.move.store import DiskStore, Store
from outsize.move.transfer import Transfer

WAYS = 8
MOVED_ROWS = 1024
"""Rows whose pages are in memory at once where nobody reads ahead."""

MOST_AHEAD_BYTES = 64 << 20

# Note [Hot rows]
# Rows of a table on disk lie in memory in sets of `WAYS` places. A row's number tells its set, so the memory for
# finding rows grows with the cache and not with the table. In a set the row that was used longest ago gives way. A row
# that was changed is written when it gives way, or when somebody wants the truth on the drive (`flush`). A batch of
# which more rows meet in a set than it has places reads and writes the others past the cache.

# Note [A row is in one place]
# A row is in the cache, or on its way out of a read-ahead, or nowhere but on the drive. Whoever wants a row that is on
# its way lets that read-ahead land in the cache first. So a row is changed in one place only, and is read after it was
# written. Pages are written when no read is under way, and read when no write is.


Values = dict[str, torch.Tensor]
"""By array: rows [n, width]."""


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
        return Reading(self, pages, groups.view(-1), content, self._file.read_pages(pages, content))

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
        return self._file.write_pages(reading.pages, reading.content)

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


@final
class Cache:
    """See Note [Hot rows]."""

    def __init__(self, arrays: Mapping[str, RowArray], nbytes: int) -> None:
        place = sum(array.row_bytes for array in arrays.values()) + 17
        most = max((array.rows for array in arrays.values()), default=0)
        self._sets = min(nbytes // place, 2 * most) // WAYS
        count = self._sets * WAYS
        self.nbytes = count * place
        self.values = {
            name: HostBuffer(count * array.row_bytes).bytes.view(array.dtype).view(count, array.width)
            for name, array in arrays.items()
        }
        self.ids = torch.full((count,), -1, dtype=torch.int64, device="cpu")
        self.used = torch.full((count,), -1, dtype=torch.int64, device="cpu")
        self.changed = torch.zeros(count, dtype=torch.bool, device="cpu")

    def _ways(self, ids: torch.Tensor) -> torch.Tensor:
        """The places [n, WAYS] of the sets of these rows. A multiplication spreads what comes in steps."""
        spread = (ids * 0x9E3779B1 & 0x7FFFFFFFFFFF) >> 15
        return (spread % self._sets * WAYS)[:, None] + torch.arange(WAYS, device="cpu")

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Where each row is; -1 where it is not here."""
        if not self._sets:
            return torch.full_like(ids, -1)
        ways = self._ways(ids)
        here = self.ids[ways] == ids[:, None]
        return torch.where(here.any(1), ways.gather(1, here.byte().argmax(1, keepdim=True)).view(-1), -1)

    def choose(self, ids: torch.Tensor, now: int) -> torch.Tensor:
        """Places for rows that are not here: those in their sets that were used longest ago, before `now`; else -1."""
        if not self._sets:
            return torch.full_like(ids, -1)
        ways = self._ways(ids)
        order = ways[:, 0].argsort(stable=True)
        ways = ways[order]
        sets = ways[:, 0].contiguous()
        rank = torch.arange(ids.numel(), device="cpu") - torch.searchsorted(sets, sets)
        oldest = ways.gather(1, self.used[ways].argsort(1)).gather(1, rank.clamp(max=WAYS - 1)[:, None]).view(-1)
        chosen = torch.full_like(ids, -1)
        chosen[order] = torch.where((rank < WAYS) & (self.used[oldest] < now), oldest, -1)
        return chosen


@dataclass
class RowCounts:
    """What was asked for, by distinct rows; those of them that were in memory; those asked for ahead."""

    wanted: int = 0
    hits: int = 0
    ahead: int = 0


@final
class Rows:
    """The rows of one table, over all of its arrays ("params" and the optimizer's). All ids are int64 on the host."""

    def __init__(self, arrays: Mapping[str, RowArray], ledger: Ledger) -> None:
        self.arrays = dict(arrays)
        self.count, self.width = arrays["params"].rows, arrays["params"].width
        self.counts = RowCounts()
        self._on_disk = {name: array for name, array in arrays.items() if array.on_disk}
        files: dict[Generations, dict[str, RowArray]] = {}
        for name, array in self._on_disk.items():
            assert isinstance(array.store, DiskStore)
            files.setdefault(array.store.file, {})[name] = array
        self._records = [Records(file, each) for file, each in files.items()]
        self._ledger = ledger
        self._cache = Cache(self._on_disk, 0)
        self._ahead_bytes = 0
        self._now = 0
        self._coming: list[Coming] = []
        self._writing: list[tuple[Transfer, Reading]] = []

    @property
    def on_disk(self) -> bool:
        """Whether any array is; the same on every rank."""
        return bool(self._on_disk)

    @property
    def disk_bytes(self) -> int:
        return sum(array.nbytes for array in self._on_disk.values())

    def use_memory(self, nbytes: int) -> int:
        """Take up to so many bytes, a quarter for what is read ahead, the others for hot rows. Returns how many."""
        self.forget()
        self._ledger.remove("host/hot rows", self._cache.nbytes)
        self._ahead_bytes = min(nbytes // 4, MOST_AHEAD_BYTES)
        self._cache = Cache(self._on_disk, nbytes - self._ahead_bytes)
        self._ledger.add("host/hot rows", self._cache.nbytes)
        return self._cache.nbytes + self._ahead_bytes

    def whole(self) -> Values | None:
        """All rows of all arrays, where they rest in one memory."""
        if self._on_disk:
            return None
        found = {name: array.whole() for name, array in self.arrays.items()}
        return found if len({each.device for each in found.values()}) == 1 else None

    def get(self, ids: torch.Tensor) -> Values:
        """Copies of these rows (ascending) of all arrays, in host memory. Blocks."""
        return self._get(ids, self.arrays)

    def get_params(self, ids: torch.Tensor) -> torch.Tensor:
        """As `get`, for a batch, which needs no state yet; that of rows on disk comes into the cache with them."""
        found = self._land_what_meets(ids)
        self.counts.wanted += ids.numel()
        self.counts.hits += int((found >= 0).sum())
        return self._get(ids, ("params",))["params"]

    def _get(self, ids: torch.Tensor, names: Iterable[str]) -> Values:
        in_memory = [name for name in names if not self.arrays[name].on_disk]
        found = {}
        for name in in_memory:
            whole = self.arrays[name].whole()
            found[name] = whole.index_select(0, ids.to(whole.device)).cpu()
        on_disk = [name for name in names if self.arrays[name].on_disk]
        return {**found, **self._get_from_disk(ids, on_disk)} if self._on_disk else found

    def put(self, ids: torch.Tensor, values: Values) -> None:
        """Other values for these rows (ascending) of all arrays. Blocks only where a row is not in memory."""
        for name, array in self.arrays.items():
            if not array.on_disk:
                whole = array.whole()
                whole.index_copy_(0, ids.to(whole.device), values[name].to(whole.device))
        if not self._on_disk:
            return
        places = self._land_what_meets(ids)
        here, others = (places >= 0).nonzero().view(-1), (places < 0).nonzero().view(-1)
        into, cache = places[here], self._cache
        for name in self._on_disk:
            own = values[name] if not others.numel() else values[name].index_select(0, here)
            cache.values[name].index_copy_(0, into, own)
        cache.changed[into] = True
        if others.numel():
            self._write(ids[others], {name: values[name].index_select(0, others) for name in self._on_disk})

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to read those of these rows (ascending) that are not in memory, as far as there is room."""
        if not self._on_disk:
            return
        self._now += 1
        places = self._cache.find(ids)
        self._cache.used[places[places >= 0]] = self._now
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
        """What was asked for ahead comes into the cache. Blocks."""
        while self._coming:
            self._land(self._coming[0])

    def flush(self) -> None:
        """Write what is only in memory. Blocks until it is written."""
        changed = self._cache.changed.nonzero().view(-1)
        order = changed[self._cache.ids[changed].argsort()]
        for places in order.split(MOVED_ROWS):
            values = {name: self._cache.values[name].index_select(0, places) for name in self._on_disk}
            self._write(self._cache.ids[places], values)
            self._cache.changed[places] = False
        self._await_writes()

    def forget(self) -> None:
        """Somebody else is about to change the arrays: nothing of them stays in memory. Blocks."""
        self.flush()
        for coming in self._coming:
            self._let_go(coming)
        self._coming = []
        self._cache.ids.fill_(-1)
        self._cache.used.fill_(-1)

    def close(self) -> None:
        """Wait for what is on its way, whatever comes of it. What was not flushed is lost."""
        reads = [reading.transfer for coming in self._coming for reading in coming.readings]
        for transfer in [*reads, *(transfer for transfer, _ in self._writing)]:
            with suppress(OSError):
                transfer.wait()
        self._ledger.remove("host/rows ahead", sum(coming.nbytes for coming in self._coming))
        self._ledger.remove("host/hot rows", self._cache.nbytes)
        self._coming, self._writing = [], []
        self._cache = Cache(self._on_disk, 0)

    # -- behind the cache ----------------------------------------------------------------------------------------------

    def _get_from_disk(self, ids: torch.Tensor, names: Sequence[str]) -> Values:
        self._now += 1
        places, cache = self._land_what_meets(ids), self._cache
        here, missing = (places >= 0).nonzero().view(-1), (places < 0).nonzero().view(-1)
        places = places[here]
        cache.used[places] = self._now
        if not missing.numel():
            return {name: cache.values[name].index_select(0, places) for name in names}
        found = {}
        for name in names:
            array = self.arrays[name]
            found[name] = torch.empty(ids.numel(), array.width, dtype=array.dtype, device="cpu")
            found[name].index_copy_(0, here, cache.values[name].index_select(0, places))
        for part in missing.split(MOVED_ROWS):
            self._await_writes()
            read = values_of([each.start(ids[part]) for each in self._records])
            for name in names:
                found[name].index_copy_(0, part, read[name])
            self._admit(ids[part], read)
        return found

    def _land_what_meets(self, ids: torch.Tensor) -> torch.Tensor:
        """Where each of these rows is in the cache, once none is on its way. See Note [A row is in one place]."""
        places = self._cache.find(ids)
        missing = ids[places < 0] if self._coming else ids[:0]
        met = [coming for coming in self._coming if missing.numel() and torch.isin(missing, coming.ids).any()]
        if not met:
            return places
        self._cache.used[places[places >= 0]] = self._now
        for coming in met:
            self._land(coming)
        return self._cache.find(ids)

    def _land(self, coming: Coming) -> None:
        values = values_of(coming.readings)
        self._let_go(coming)
        self._coming = [each for each in self._coming if each is not coming]
        self._admit(coming.ids, values)

    def _let_go(self, coming: Coming) -> None:
        for reading in coming.readings:
            reading.transfer.wait()
        self._ledger.remove("host/rows ahead", coming.nbytes)

    def _admit(self, ids: torch.Tensor, values: Values) -> None:
        """Take rows as they are on the drive into the cache, as far as there is room; what gives way is written."""
        cache = self._cache
        places = cache.choose(ids, self._now)
        taken = (places >= 0).nonzero().view(-1)
        into = places[taken]
        leaving = into[cache.changed[into]]
        if leaving.numel():
            leaving = leaving[cache.ids[leaving].argsort()]
            values_of = {name: cache.values[name].index_select(0, leaving) for name in self._on_disk}
            self._write(cache.ids[leaving], values_of)
            cache.changed[leaving] = False
        cache.ids[into], cache.used[into] = ids[taken], self._now
        for name, each in values.items():
            cache.values[name].index_copy_(0, into, each.index_select(0, taken))

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

    def _await_writes(self) -> None:
        while self._writing:
            self._writing[-1][0].wait()
            self._writing.pop()  # not before: the memory belongs to the drive


def _parts(count: int) -> Iterator[slice]:
    return (slice(first, min(first + MOVED_ROWS, count)) for first in range(0, count, MOVED_ROWS))


def distinct(many: Sequence[torch.Tensor]) -> torch.Tensor:
    """The distinct ids of some tensors, ascending, int64 in host memory."""
    if not many:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    found: torch.Tensor = torch.unique(torch.cat([each.detach().reshape(-1).to("cpu", torch.int64) for each in many]))
    return found
