"""Plans of 1,024 ranks against the code of a run, on torch's fake process group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import outsize
from outsize.api.assemble import require
from outsize.move.comm import Ranks
from outsize.move.watch import Watch
from outsize.planning.layout import slice_of
from outsize.planning.tables import Plan

RANKS = 1024
FIELDS: dict[str, Any] = {"host_memory": "1GiB", "device": "cpu", "compute_dtype": torch.bfloat16}


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self, *_: object) -> bool:
        return True


class Alike:
    """A fake group in which every rank gives what this one gives; torch's own leaves out who trades with whom, and its
    work never says that it is over."""

    def __init__(self, rank: int) -> None:
        self._fake = FakeProcessGroup._create_internal(rank, RANKS, FakeProcessGroup.Options())

    def alltoall_base(self, every: torch.Tensor, own: torch.Tensor, *_: object) -> Done:
        every.copy_(own)
        return Done()

    def __getattr__(self, name: str) -> Any:
        def call(*given: object) -> Done:
            getattr(self._fake, name)(*given)
            return Done()

        return call


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(side, 2048) for side in (2048, 2048)), nn.Linear(2048, 77))


def check(rank: int, stage: int, planned: Plan) -> None:
    """Prepare as this rank; compare with the plan, and its parts with what the layout gives to this rank."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=RANKS)
    try:
        with mock.patch.object(dist, "get_default_backend_for_device", return_value="gloo"):
            own = model()
            outsize.prepare(own, torch.optim.AdamW(own.parameters()), stage=stage, **FIELDS)
        found = outsize.plan(own)
        assert [(each.name, each.size, each.tiers) for each in found.units] == [
            (each.name, each.size, each.tiers) for each in planned.units
        ]
        resources = require(own).resources
        for shard in resources.shards:
            assert shard.layout == slice_of(shard.whole, rank, RANKS)
        resources.close()
    finally:
        dist.destroy_process_group()


def test_a_rank_of_1024_has_what_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_connected", lambda self, store: Alike(self.rank))
    monkeypatch.setattr(Watch, "missing", lambda self: [])
    for rank, stage in ((0, 1), (300, 3), (RANKS - 1, 3)):
        check(rank, stage, outsize.plan(model(), ranks=RANKS, stage=stage, **FIELDS))
