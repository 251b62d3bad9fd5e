"""Two ranks, each with a simulated accelerator of its own: what plain torch gives on the whole batch, and no race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.collectives import on_sim, train_all_on_sim
from tests.ranks import test_tables as tables
from tests.ranks.launching import run_on_ranks
from tests.ranks.test_parity import assert_as_plain, assert_same_bits
from tests.ranks.test_weights_in_tiles import Way, assert_as_the_whole_batch, in_tiles
from tests.ranks.training import Result, Setting, assert_near, plain, same_bits

BASE = Setting(clip=0.1, device="sim", steps=2)
MANNERS = {
    "plain": BASE,
    "accumulated": replace(BASE, accumulate=2),
    "updated in the backward": replace(BASE, clip=None, fields={"update": "backward"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "policy"), [(0, "hold"), (1, "random"), (2, "random"), (3, "hold"), (3, "random")])
def test_ranks_train_what_torch_trains_on_the_whole_batch(stage: int, policy: str, tmp_path: Path) -> None:
    """One manner on two tiers, the others on one of them, which is the other one at the next stage."""
    some = ("host", "disk") if policy == "hold" else ("device", "disk")
    cases = [("plain", some[0]), ("plain", some[1])]
    cases += [("accumulated", some[stage % 2]), ("updated in the backward", some[1 - stage % 2])]
    settings = [replace(MANNERS[name], stage=stage, tiers=tier) for name, tier in cases]
    of_ranks = run_on_ranks(2, train_all_on_sim, settings, str(tmp_path), policy, limit=120)
    expected = {name: plain(replace(each, device="cpu"), 2) for name, each in MANNERS.items()}
    at_rest: dict[str, Result] = {}
    for (name, tier), mine, theirs in zip(cases, *of_ranks, strict=True):
        assert_as_plain(mine, expected[name])
        assert_same_bits(mine, theirs)
        if tier != "device":  # which steps by torch's formulas
            assert_same_bits(mine, at_rest.setdefault(name, mine))


def trained_in_tiles(disk: str, policy: str) -> Any:
    with on_sim(policy):
        way = Way(fields={"device": "sim", "device_memory": "1MiB", "host_memory": "64MiB"})
        return in_tiles(disk, way)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hold", "random"])
def test_weights_in_tiles_train_as_the_whole_batch_does(policy: str, tmp_path: Path) -> None:
    assert_as_the_whole_batch(run_on_ranks(2, trained_in_tiles, str(tmp_path), policy, limit=120), Way())


def trained_tables(ways: list[tables.Way], disk: str, policy: str) -> Any:
    with on_sim(policy):
        return tables.trained(ways, disk)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tables_that_are_split_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    sim = {"device": "sim"}
    ways = [
        *(tables.Way(tables.adagrad, tier, fields=sim) for tier in ("host", "disk")),
        tables.Way(tables.adagrad, "disk", fields={"device_memory": "256KiB", **sim}),
        tables.Way(tables.rowwise, "disk", ahead=True, fields=sim),
        tables.Way(tables.rowwise, "device", fields={"stage": 2, **sim}),
        tables.Way(tables.rowwise, "device", fields={"grads": "disk", "states": "host", **sim}),
    ]
    for found in run_on_ranks(2, trained_tables, ways, str(tmp_path), "hold", limit=120):
        assert all(same_bits(found[0][1].values(), other[1].values()) for other in found[1:3])
        for way, (losses, weights, counts) in zip(ways, found, strict=True):
            assert (counts["near"] > 0) == (way.tier != "device")  # hot rows
            expected, others = tables.plain(way, 2)
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
            assert_near(weights.values(), others.values())
