"""The staging arena: slabs of exact size, reserved once, that bytes pass through between tiers."""

from __future__ import annotations

from typing import final

import torch

from outsize.move.memory import HostBuffer, Ledger


@final
class Staging:
    """`count` slabs of `slab_bytes` bytes each, pinned where an accelerator reads them.

    Only the conveyor's thread takes and gives slabs, so there is nothing to lock; taking never blocks there because
    the conveyor first finishes what it has started.
    """

    def __init__(self, slab_bytes: int, count: int, ledger: Ledger, pinned: bool = False) -> None:
        self.slab_bytes = slab_bytes
        self.count = count
        self._ledger = ledger
        self._arena: HostBuffer | None = HostBuffer(slab_bytes * count, pinned)
        self._free = [self._arena.bytes[at * slab_bytes : (at + 1) * slab_bytes] for at in range(count)]
        ledger.add("host/staging", slab_bytes * count)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[torch.Tensor]:
        """`count` slabs (uint8 [slab_bytes]); the caller has checked that they are free."""
        assert count <= len(self._free), "staging slabs are taken only when they are free"
        return [self._free.pop() for _ in range(count)]

    def give(self, slabs: list[torch.Tensor]) -> None:
        self._free.extend(slabs)

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
            self._free = []
            self._ledger.remove("host/staging", self.slab_bytes * self.count)
