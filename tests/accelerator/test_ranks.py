"""Two ranks, each with a simulated accelerator of its own: what plain torch gives on the whole batch, and no race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.collectives import on_sim, train_all_on_sim
from tests.ranks.launching import run_on_ranks
from tests.ranks.test_parity import assert_as_plain, assert_same_bits, tiers_of
from tests.ranks.test_weights_in_tiles import Way, assert_as_the_whole_batch, in_tiles
from tests.ranks.training import Setting, plain

BASE = Setting(clip=0.1, device="sim")
MANNERS = {
    "plain": BASE,
    "accumulated": replace(BASE, accumulate=2),
    "updated in the backward": Setting(device="sim", fields={"update": "backward"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "policy"), [(0, "hold"), (1, "random"), (2, "random"), (3, "hold"), (3, "random")])
def test_ranks_train_what_torch_trains_on_the_whole_batch(stage: int, policy: str, tmp_path: Path) -> None:
    tiers = [each for each in tiers_of(stage) if each != "squeezed"]
    settings = [replace(each, stage=stage, tiers=tier) for each in MANNERS.values() for tier in tiers]
    of_ranks = run_on_ranks(2, train_all_on_sim, settings, str(tmp_path), policy, limit=120)
    for index, name in enumerate(MANNERS):
        found = of_ranks[0][index * len(tiers) : (index + 1) * len(tiers)]
        expected = plain(replace(MANNERS[name], device="cpu"), 2)
        for each in found:
            assert_as_plain(each, expected)
        assert_same_bits(found[1], found[2])  # host and disk
    for mine, theirs in zip(*of_ranks, strict=True):
        assert_same_bits(mine, theirs)


def trained_in_tiles(disk: str, policy: str) -> Any:
    with on_sim(policy):
        way = Way(fields={"device": "sim", "device_memory": "1MiB", "host_memory": "64MiB"})
        return in_tiles(disk, way)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hold", "random"])
def test_weights_in_tiles_train_as_the_whole_batch_does(policy: str, tmp_path: Path) -> None:
    assert_as_the_whole_batch(run_on_ranks(2, trained_in_tiles, str(tmp_path), policy, limit=120), Way())
