"""What keeps bytes at rest on a tier. The store holds the truth; whatever is read from it is only a copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from outsize.move.generations import Generations
from outsize.move.memory import PAGE_BYTES, HostBuffer, Ledger
from outsize.move.transfer import Transfer
from outsize.plan.layout import round_up

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
        return content[start - first : start - first + nbytes]

    def put(self, start: int, source: torch.Tensor) -> None:
        """Overwrite any bytes with `source`; their neighbours on the same pages stay. Blocks."""
        first, content = self.pages(start, source.numel())
        content[start - first : start - first + source.numel()].copy_(source)
        self.write(first, content).wait()


@final
class DiskStore(Store):
    """One array at rest in a unit's file. Never touched space is a hole and costs nothing."""

    def __init__(self, file: Generations, base: int, nbytes: int, ledger: Ledger, kind: str) -> None:
        super().__init__(nbytes)
        self.file = file
        self.base = base
        self._ledger = ledger
        self._account = f"disk/{kind}"
        self._held = 0
        self.hold(nbytes)

    def hold(self, nbytes: int) -> None:
        """So many bytes of it are used; the rest stays a hole."""
        self._ledger.add(self._account, nbytes - self._held)
        self._held = nbytes

    def preallocate(self, start: int, nbytes: int) -> None:
        self.file.preallocate(self.base + start, nbytes)

    def in_place(self, start: int, nbytes: int) -> None:
        return None

    def use(self) -> None:
        return

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        return self.file.read(self.base + start, out)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        return self.file.write(self.base + start, source)

    def drop(self) -> None:
        self.hold(0)
