"""What keeps bytes at rest on a tier. The store holds the truth; whatever is read from it is only a copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch

from outsize.move.generations import Generations, page_runs
from outsize.move.memory import MAPPED_BYTES, PAGE_BYTES, HostBuffer, Ledger
from outsize.move.transfer import ARRIVED, Transfer
from outsize.planning.layout import round_up

TRAINED_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The parameter dtypes that can be trained, by the name that layouts use."""

_CODES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = TRAINED_DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
"""Those that can rest: the tensors inside quantized weights have others, too."""

OWN_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
STATE_DTYPES = TRAINED_DTYPES | {"bfloat16": torch.float32, "float16": torch.float32}
STATE_BYTES = {name: dtype.itemsize for name, dtype in STATE_DTYPES.items()}
MASTER = "master"
MASTER_DTYPE = {"bfloat16": torch.int16, "float16": torch.float32}
MASTER_BYTES = {name: dtype.itemsize for name, dtype in MASTER_DTYPE.items()}
"""What completes a 16-bit parameter to its fp32 master: the 16-bit rest of a bf16 one, the master itself of an fp16
one (DESIGN.md, "Exact state in 12 bytes")."""

CODE_BYTES = {"float32": 1, "float64": 8, "bfloat16": 1, "float16": 1}  # float64 stays exact
SCALE_BYTES = {"float32": 4, "bfloat16": 4, "float16": 4}

WINDOW_BYTES = 4 << 20
"""Of a file of records, at once."""

# Note [Records]
# A table on disk lies row by row: a record is a row's weights with its optimizer state behind them. So a row and its
# state share a page or two, and one request moves all of them (`Records` in move/rows.py). Each array still has a store
# of its own, which shows the array as if it lay in one piece: whatever moves a whole array (save, load, export,
# `gathered`) knows no records, but for the distance between rows in a checkpoint. A read moves the records whole. A
# write reads first the pages that it does not fill: few where `start_all` has all arrays of the same rows, as in `load`
# and `prepare`, and none that were never written. Each move is over when it returns: two on the same pages never meet.


class Store(ABC):
    """`nbytes` bytes at rest. Offsets and lengths are bytes; whole pages wherever the tier is disk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def in_place(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The bytes themselves (uint8 [nbytes]) on whatever memory holds them, an accelerator's too; None on disk."""

    @abstractmethod
    def read(self, start: int, out: torch.Tensor) -> Transfer:
        """Start to copy the bytes from `start` into `out` (uint8, host memory)."""

    @abstractmethod
    def write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start to store `source` (uint8, host memory) at `start`; `source` must live until the transfer is done."""

    @abstractmethod
    def use(self) -> None:
        """The current stream is about to work with the bytes in place; never blocks the host."""

    @abstractmethod
    def drop(self) -> None:
        """Give back what the store holds; safe to repeat."""

    def view(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The bytes themselves (uint8 [nbytes]) where the tier is memory that the CPU can reach, else None."""
        found = self.in_place(start, nbytes)
        return found if found is not None and found.device.type == "cpu" else None

    def pages(self, start: int, nbytes: int) -> tuple[int, torch.Tensor]:
        """(first byte, copy) of the whole pages that hold any bytes. Blocks."""
        first = start // PAGE_BYTES * PAGE_BYTES
        content = HostBuffer(min(round_up(start + nbytes, PAGE_BYTES), self.nbytes) - first).bytes
        self.read(first, content).wait()
        return first, content

    def get(self, start: int, nbytes: int) -> torch.Tensor:
        """A copy of any bytes, in host memory. Blocks."""
        first, content = self.pages(start, nbytes)
        found = content[start - first : start - first + nbytes]
        return found if nbytes >= MAPPED_BYTES else found.clone()

    def put(self, start: int, source: torch.Tensor) -> None:
        """Overwrite any bytes with `source`; their neighbours on the same pages stay. Blocks."""
        first, content = start, HostBuffer(source.numel()).bytes
        if start % PAGE_BYTES or source.numel() % PAGE_BYTES:
            first, content = self.pages(start, source.numel())
        content[start - first : start - first + source.numel()].copy_(source)
        self.write(first, content).wait()


def _windows(begin: int, end: int, stride: int) -> Iterator[tuple[range, int, torch.Tensor]]:
    """Records [begin, end) of a file, some at a time: (which, the first byte of the pages that hold them, memory for
    these pages)."""
    for row in range(begin, end, most := max(WINDOW_BYTES // stride, 1)):
        last, first = min(row + most, end), row * stride // PAGE_BYTES * PAGE_BYTES
        yield range(row, last), first, HostBuffer(round_up(last * stride, PAGE_BYTES) - first).bytes


@final
class Cells:
    """One array of a file of records, under the addresses that it would have in one piece. See Note [Records]."""

    def __init__(self, file: Generations, base: int, nbytes: int, stride: int) -> None:
        """The array has `nbytes` in each record, the first ones from byte `base` of the file on."""
        self.file, self._base, self.nbytes, self.stride = file, base, nbytes, stride

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        for rows, first, content in _windows(*self.rows(start, out.numel()), self.stride):
            self.file.read(first, content).wait()
            cells, low, high, skipped = self.part(rows, first, content, start, out.numel())
            if high - low == cells.numel():
                out[low:high].view(cells.shape).copy_(cells)
            else:
                out[low:high] = cells.reshape(-1)[skipped : skipped + high - low]
        return ARRIVED

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        write_records([(self, start, source)])
        return ARRIVED

    def rows(self, start: int, nbytes: int) -> tuple[int, int]:
        """(first, end) of the rows that have these bytes."""
        return (start - self._base) // self.nbytes, -(-(start - self._base + nbytes) // self.nbytes)

    def part(
        self, rows: range, first: int, content: torch.Tensor, start: int, nbytes: int
    ) -> tuple[torch.Tensor, int, int, int]:
        """The array's bytes in a window [rows, bytes]; which of the wanted bytes these are, behind how many others."""
        at = int(content.storage_offset()) + rows.start * self.stride + self._base - first
        cells = content.as_strided((len(rows), self.nbytes), (self.stride, 1), at)
        start, before = start - self._base, rows.start * self.nbytes
        low, high = max(start, before), min(start + nbytes, rows.stop * self.nbytes)
        return cells, low - start, high - start, low - before


def write_records(writes: Sequence[tuple[Cells, int, torch.Tensor]]) -> None:
    """Write bytes of the same rows of some arrays, each record once. Blocks."""
    file, stride = writes[0][0].file, writes[0][0].stride
    ((begin, end),) = {cells.rows(start, source.numel()) for cells, start, source in writes}
    for rows, first, content in _windows(begin, end, stride):
        kept = file.touched(first, content.numel())
        if sum(cells.nbytes for cells, _, _ in writes) == stride:  # but the first and the last row may be cut
            whole = (rows.start + 1) * stride - first, (rows.stop - 1) * stride - first
            kept[round_up(whole[0], PAGE_BYTES) // PAGE_BYTES : whole[1] // PAGE_BYTES] = False
        for at, nbytes in page_runs(kept, content.numel()):
            file.read(first + at, content[at : at + nbytes]).wait()
        for each, start, source in writes:
            cells, low, high, skipped = each.part(rows, first, content, start, source.numel())
            values = source[low:high]
            if high - low < cells.numel():  # within rows
                values = cells.reshape(-1).clone()
                values[skipped : skipped + high - low] = source[low:high]
            cells.copy_(values.view(cells.shape))
        file.write(first, content).wait()


@final
class DiskStore(Store):
    """One array at rest in a unit's file. Never touched space is a hole and costs nothing."""

    def __init__(
        self,
        file: Generations,
        base: int,
        nbytes: int,
        ledger: Ledger,
        kind: str,
        record: tuple[int, int] | None = None,
    ) -> None:
        """`base`: where it begins. `record`: the bytes that it has in each record, and those of a record; None: it
        lies in one piece."""
        super().__init__(nbytes)
        self.file = file
        self.base = base
        self.stride = 0 if record is None else record[1]
        self.cells = None if record is None else Cells(file, base, *record)
        self._bytes = self.cells or file
        self._ledger = ledger
        self._account = f"disk/{kind}"
        self._held = 0
        self.hold(nbytes)

    def hold(self, nbytes: int) -> None:
        """So many bytes of it are used; the rest stays a hole."""
        self._ledger.add(self._account, nbytes - self._held)
        self._held = nbytes

    def preallocate(self, start: int, nbytes: int) -> None:
        if not self.stride:
            self.file.preallocate(self.base + start, nbytes)
        elif not self.base:  # the first array takes the records of all
            self.file.preallocate(0, self.file.nbytes)

    def in_place(self, start: int, nbytes: int) -> None:
        return None

    def use(self) -> None:
        return

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        return self._bytes.read(self.base + start, out)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        return self._bytes.write(self.base + start, source)

    def drop(self) -> None:
        self.hold(0)


Write = tuple[Store, int, torch.Tensor]
"""Bytes for a store (uint8, host memory, whole pages), from which of its bytes on."""


def start_all(writes: Iterable[Write]) -> list[Transfer]:
    """Start to store all of them. In a file of records they are of the same rows: each record is written once, now."""
    started: list[Transfer] = []
    files: dict[Generations, list[tuple[Cells, int, torch.Tensor]]] = {}
    for store, start, source in writes:
        if isinstance(store, DiskStore) and store.cells is not None:
            files.setdefault(store.file, []).append((store.cells, store.base + start, source))
        else:
            started.append(store.write(start, source))
    for records in files.values():
        write_records(records)
    return started
