"""Several ranks train what plain torch trains on the whole batch; every tier to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ranks.launching import run_on_ranks
from tests.ranks.training import Result, Setting, plain, train_all

BF16 = torch.bfloat16
BASE = Setting(clip=0.1)
MANNERS = {
    "plain": BASE,
    "unclipped": Setting(),
    "accumulated": replace(BASE, accumulate=3),
    "accumulated without synchronisation": replace(BASE, accumulate=3, no_sync=True),
    "uneven batches": replace(BASE, uneven=True),
    "recomputed": replace(BASE, fields={"activations": "recompute"}),
    "updated in the backward": Setting(fields={"update": "backward"}),
    "in small units": replace(BASE, fields={"units": ["Linear", "LayerNorm"]}),
}


WITH_FOUR = ("plain", "accumulated", "accumulated without synchronisation", "uneven batches")


def tiers_of(stage: int) -> list[str]:
    return ["device", "host", "disk"] if stage in (1, 2) else ["device", "host", "disk", "squeezed"]


def assert_as_plain(found: Result, expected: Result, loss: float = 1e-6, weight: float = 1e-5) -> None:
    for mine, theirs in zip(found.losses + found.norms, expected.losses + expected.norms, strict=True):
        assert mine == pytest.approx(theirs, rel=loss)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=weight, atol=weight)


def assert_same_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses and one.norms == other.norms
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_train_what_torch_trains_on_the_whole_batch_on_every_tier(stage: int, ranks: int, tmp_path: Path) -> None:
    manners = MANNERS if ranks == 2 else {name: MANNERS[name] for name in WITH_FOUR}
    every_tier = tiers_of(stage) if ranks == 2 else ["device", tiers_of(stage)[-1]]
    settings = [replace(each, stage=stage, tiers=tier) for each in manners.values() for tier in every_tier]
    of_ranks = run_on_ranks(ranks, train_all, settings, str(tmp_path))
    expected = {name: plain(each, ranks) for name, each in manners.items()}
    tiers = len(every_tier)
    for index in range(len(settings)):
        name = list(manners)[index // tiers]
        found = of_ranks[0][index]
        for other in of_ranks[1:]:
            assert_same_bits(found, other[index])
        if settings[index].no_sync and settings[index].tiers == "squeezed":  # there is no room for whole gradients
            assert_same_bits(found, of_ranks[0][index - tiers])
        else:
            assert_same_bits(found, of_ranks[0][index // tiers * tiers])
        assert_as_plain(found, expected[name])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_train_in_bf16_to_the_same_bits_on_every_tier(stage: int, tmp_path: Path) -> None:
    base = Setting(stage, clip=0.5, dtype=BF16)
    manners = [base, replace(base, fields={"state_format": "compact"}), replace(base, accumulate=2)]
    manners += [replace(base, fields={"reduce_dtype": None}), replace(base, fields={"delayed_update": 2})]
    tiers = tiers_of(stage)
    settings = [replace(each, tiers=tier) for each in manners for tier in tiers]
    first, second = run_on_ranks(2, train_all, settings, str(tmp_path))
    for index in range(len(settings)):
        assert_same_bits(first[index], second[index])
        assert_same_bits(first[index], first[index // len(tiers) * len(tiers)])
    assert_as_plain(first[0], plain(base, 2), loss=2e-2, weight=4e-2)


def test_ranks_of_a_mesh_train_copies_that_stay_alike(tmp_path: Path) -> None:
    base = replace(BASE, accumulate=2, uneven=True)
    settings = [replace(base, stage=stage, mesh=mesh) for stage in (0, 2, 3) for mesh in ((2, 2), (4,), (1, 4), (4, 1))]
    expected = plain(base, 4)
    for found in zip(*run_on_ranks(4, train_all, settings, str(tmp_path)), strict=True):
        for other in found[1:]:
            assert_same_bits(found[0], other)
        assert_as_plain(found[0], expected)
