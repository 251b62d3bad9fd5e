"""The ranks of one `outsize train`: what the first decides all do, and it alone speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from outsize.api.ranks import join

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Team:
    """This rank among the others. Every rank calls each method but `say`, in the same order."""

    rank: int = 0
    size: int = 1

    @classmethod
    def open(cls) -> Team:
        """Join the job of a launcher, if there is one."""
        join()
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, *parts: Any) -> None:
        if self.first:
            print(*parts, flush=True)

    def share(self, value: T) -> T:
        """`value` of the first rank."""
        if self.size == 1:
            return value
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        shared: T = found[0]
        return shared

    def any(self, flag: bool) -> bool:
        """Whether a rank says so."""
        return self._reduced(float(flag), dist.ReduceOp.MAX) > 0

    def mean(self, value: float) -> float:
        """Over the ranks."""
        return self._reduced(value, dist.ReduceOp.SUM) / self.size

    def _reduced(self, value: float, op: Any) -> float:
        if self.size == 1:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op)
        return float(found[0])
