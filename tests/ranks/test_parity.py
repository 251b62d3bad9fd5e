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
SHORT = replace(BASE, steps=2)
MANNERS = {
    "plain": BASE,
    "unclipped": replace(SHORT, clip=None),
    "accumulated": replace(SHORT, accumulate=2),
    "accumulated without synchronisation": replace(SHORT, accumulate=2, no_sync=True),
    "uneven batches": replace(SHORT, uneven=True),
    "recomputed": replace(SHORT, fields={"activations": "recompute"}),
    "moved out": replace(SHORT, fields={"activations": "offload", "micro_batches": 2}),
    "updated in the backward": replace(SHORT, clip=None, fields={"update": "backward"}),
    "in small units": replace(SHORT, fields={"units": ["Linear", "LayerNorm"]}),
}


WITH_FOUR = ("plain", "accumulated without synchronisation", "uneven batches")


def tiers_of(stage: int) -> list[str]:
    return ["device", "host", "disk"] if stage in (1, 2) else ["device", "host", "disk", "squeezed"]


def settings_of(manners: dict[str, Setting], tiers: list[str], both: int = 0) -> list[tuple[str, Setting]]:
    """The first manner on every tier. Of the others each second one (`both`: which) in memory, the rest on the last
    tier. Those of one manner in a row."""
    first, found = next(iter(manners)), []
    for number, (name, manner) in enumerate(manners.items()):
        one = tiers[number % (len(tiers) - 1)] if number % 2 == both else tiers[-1]
        found += [(name, replace(manner, tiers=tier)) for tier in (tiers if name == first else [one])]
    return found


def assert_as_plain(found: Result, expected: Result, loss: float = 1e-6, weight: float = 1e-5) -> None:
    for mine, theirs in zip(found.losses + found.norms, expected.losses + expected.norms, strict=True):
        assert mine == pytest.approx(theirs, rel=loss)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=weight, atol=weight)


def assert_same_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses and one.norms == other.norms
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 4)])
def test_ranks_train_what_torch_trains_on_the_whole_batch_on_every_tier(stage: int, ranks: int, tmp_path: Path) -> None:
    manners = MANNERS if ranks == 2 else {name: MANNERS[name] for name in WITH_FOUR}
    tiers = tiers_of(stage) if ranks == 2 else ["device", tiers_of(stage)[-1]]
    settings = settings_of({name: replace(each, stage=stage) for name, each in manners.items()}, tiers, stage % 2)
    of_ranks = run_on_ranks(ranks, train_all, [setting for _, setting in settings], str(tmp_path))
    expected = {name: plain(each, ranks) for name, each in manners.items()}
    first: dict[str, Result] = {}
    for index, (name, setting) in enumerate(settings):
        found = of_ranks[0][index]
        for other in of_ranks[1:]:
            assert_same_bits(found, other[index])
        if not (setting.no_sync and setting.tiers == "squeezed"):  # which has no room for whole gradients
            assert_same_bits(found, first.setdefault(name, found))
        assert_as_plain(found, expected[name])


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_train_in_bf16_to_the_same_bits_on_every_tier(stage: int, tmp_path: Path) -> None:
    base = Setting(stage, clip=0.5, dtype=BF16)
    manners = {
        "plain": base,
        "compact": replace(base, fields={"state_format": "compact"}),
        "accumulated": replace(base, accumulate=2),
        "reduced as they are": replace(base, fields={"reduce_dtype": None}),
        "delayed": replace(base, fields={"delayed_update": 2}),
    }
    settings = settings_of(manners, tiers_of(stage))
    one, two = run_on_ranks(2, train_all, [setting for _, setting in settings], str(tmp_path))
    first: dict[str, Result] = {}
    for (name, _), found, other in zip(settings, one, two, strict=True):
        assert_same_bits(found, other)
        assert_same_bits(found, first.setdefault(name, found))
    assert_as_plain(one[0], plain(base, 2), loss=2e-2, weight=4e-2)


def test_ranks_of_a_mesh_train_copies_that_stay_alike(tmp_path: Path) -> None:
    once, twice = (replace(SHORT, uneven=True, accumulate=count) for count in (1, 2))
    settings = [replace(once, stage=3, mesh=mesh) for mesh in ((4,), (1, 4), (4, 1))] + [
        replace(once, stage=0, mesh=(1, 4))
    ]
    settings += [replace(twice, stage=stage, mesh=(2, 2)) for stage in (0, 2, 3)]
    expected = {each.accumulate: plain(each, 4) for each in (once, twice)}
    of_ranks = run_on_ranks(4, train_all, settings, str(tmp_path))
    for setting, *found in zip(settings, *of_ranks, strict=True):
        for other in found[1:]:
            assert_same_bits(found[0], other)
        assert_as_plain(found[0], expected[setting.accumulate])
