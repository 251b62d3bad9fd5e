"""What keeps bytes at rest on a tier. The store holds the truth; whatever is read from it is only a copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from outsize.move.device import DeviceMemory, Lanes
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.transfer import ARRIVED, Transfer


class Store(ABC):
    """`nbytes` bytes at rest. Offsets and lengths are bytes; whole pages wherever the tier is disk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def view(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The bytes themselves (uint8 [nbytes]) where the tier is memory that the CPU can reach, else None."""

    def in_place(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The bytes themselves on whatever memory holds them, an accelerator's included; None on disk."""
        return self.view(start, nbytes)

    def use(self) -> None:  # noqa: B027
        """The current stream is about to work with the bytes in place."""

    @abstractmethod
    def read(self, start: int, out: torch.Tensor) -> Transfer:
        """Start to fill `out` (uint8, host memory) with the bytes from `start`."""

    @abstractmethod
    def write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start to store `source` (uint8, host memory) at `start`; `source` must live until the transfer is done."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the store holds; safe to repeat."""


@final
class HostStore(Store):
    """Bytes at rest in host memory, pinned where an accelerator reads them."""

    def __init__(self, nbytes: int, ledger: Ledger, kind: str, tier: str = "host", pinned: bool = False) -> None:
        super().__init__(nbytes)
        self._buffer: HostBuffer | None = HostBuffer(nbytes, pinned)
        self._ledger = ledger
        self._account = f"{tier}/{kind}"
        ledger.add(self._account, nbytes)

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        assert self._buffer is not None, "the store is closed"
        return self._buffer.bytes[start : start + nbytes]

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        out.copy_(self.view(start, out.numel()))
        return ARRIVED

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        self.view(start, source.numel()).copy_(source)
        return ARRIVED

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
            self._ledger.remove(self._account, self.nbytes)


@final
class DeviceStore(Store):
    """Bytes at rest in an accelerator's memory."""

    def __init__(self, nbytes: int, ledger: Ledger, kind: str, lanes: Lanes) -> None:
        super().__init__(nbytes)
        self._memory: DeviceMemory | None = DeviceMemory(nbytes, lanes)
        with self._memory.filling():
            self._memory.bytes.zero_()
        self._ledger = ledger
        self._account = f"device/{kind}"
        ledger.add(self._account, nbytes)

    @property
    def memory(self) -> DeviceMemory:
        assert self._memory is not None, "the store is closed"
        return self._memory

    def view(self, start: int, nbytes: int) -> torch.Tensor | None:
        return None

    def in_place(self, start: int, nbytes: int) -> torch.Tensor:
        return self.memory.bytes[start : start + nbytes]

    def use(self) -> None:
        self.memory.use()

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        return self.memory.fetch(start, out)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        return self.memory.fill(start, source)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.shrink()
            self._memory = None
            self._ledger.remove(self._account, self.nbytes)
