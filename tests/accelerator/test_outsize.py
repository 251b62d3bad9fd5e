"""outsize on the simulated accelerator: every mixture of tiers trains like torch, whenever the copies run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Stack, Trace, Workshop, adamw, batches, squeeze, train, weights

POLICIES = ("now", "hold", "random")
TIERS = ("device", "host", "disk")
MIXTURES = list(itertools.product(TIERS, repeat=3))
anytime = pytest.mark.parametrize("sim", POLICIES, indirect=True)


def on_sim(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to("sim"), y.to("sim")) for x, y in data]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in weights(model).items()}


def trained(workshop: Workshop, tiers: tuple[str, str, str], **fields: Any) -> tuple[Trace, dict[str, Tensor]]:
    """What a run shows, and the weights that it ends with, with room for two units only."""
    model = stack()
    optimizer = adamw(model)
    kinds = dict(zip(("params", "grads", "states"), tiers, strict=True))
    workshop.prepare(model, optimizer, device="sim", disk=workshop.disk, **kinds, **fields)
    squeeze(model)
    trace = train(model, optimizer, on_sim(batches(5)), clip=0.5)
    return trace, values(model)


@anytime
@pytest.mark.parametrize("tiers", MIXTURES, ids="-".join)
def test_every_mixture_of_tiers_trains_like_torch(sim: Any, workshop: Workshop, tiers: tuple[str, str, str]) -> None:
    trace, mine = trained(workshop, tiers)
    plain = stack().to("sim")
    trace.close_to(train(plain, adamw(plain), on_sim(batches(5)), clip=0.5))
    torch.testing.assert_close(mine, values(plain), rtol=0, atol=1e-5)


def test_host_and_disk_give_the_same_bits(sim: Any, workshop: Workshop) -> None:
    mixtures = [tiers for tiers in MIXTURES if tiers != ("device", "device", "device")]
    results = [trained(workshop, tiers) for tiers in mixtures]
    for trace, found in results[1:]:
        assert trace == results[0][0]
        assert all(torch.equal(value, results[0][1][name]) for name, value in found.items())
