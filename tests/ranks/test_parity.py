"""Several ranks train what plain torch trains on the whole batch; every tier to the same bits."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import Result, Setting, plain, train

BF16 = torch.bfloat16
BASE = Setting(clip=0.1, steps=2)
MANNERS = {
    "plain": BASE,
    "unclipped": replace(BASE, clip=None),
    "accumulated": replace(BASE, accumulate=2),
    "accumulated without synchronisation": replace(BASE, accumulate=2, no_sync=True),
    "uneven batches": replace(BASE, uneven=True),
    "recomputed": replace(BASE, fields={"activations": "recompute"}),
    "moved out": replace(BASE, fields={"activations": "offload", "micro_batches": 2}),
    "updated in the backward": replace(BASE, clip=None, fields={"update": "backward"}),
    "in small units": replace(BASE, fields={"units": ["Linear", "LayerNorm"]}),
}
"""All of them at stage 3. The first at every stage, and of the others each second one at stage 0, the rest at stage 1
or 2, which are the same to outsize."""

WITH_THREE = ("plain", "accumulated without synchronisation", "uneven batches")


def manners_of(stage: int, ranks: int) -> dict[str, Setting]:
    if ranks == 3:
        return {name: replace(MANNERS[name], stage=stage) for name in WITH_THREE}
    found = {}
    for number, (name, manner) in enumerate(MANNERS.items()):
        if stage == 3 or not number or number % 2 == bool(stage):
            found[name] = replace(manner, stage=2 if stage == 1 and number % 4 == 3 else stage)
    return found


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


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (3, 2), (3, 3)])
def test_ranks_train_what_torch_trains_on_the_whole_batch_on_every_tier(stage: int, ranks: int, tmp_path: Path) -> None:
    manners = manners_of(stage, ranks)
    tiers = tiers_of(stage) if ranks == 2 else ["device", tiers_of(stage)[-1]]
    settings = settings_of(manners, tiers, stage % 2)
    of_ranks = run_on_ranks(ranks, in_turn, *((train, setting, str(tmp_path)) for _, setting in settings))
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
    base = Setting(stage, clip=0.5, dtype=BF16, steps=2)
    manners = {
        "plain": base,
        "compact": replace(base, fields={"state_format": "compact"}),
        "accumulated": replace(base, accumulate=2),
        "reduced as they are": replace(base, fields={"reduce_dtype": None}),
        "delayed": replace(base, steps=3, fields={"delayed_update": 2}),
    }
    settings = settings_of(manners, tiers_of(stage))
    one, two = run_on_ranks(2, in_turn, *((train, setting, str(tmp_path)) for _, setting in settings))
    first: dict[str, Result] = {}
    for (name, _), found, other in zip(settings, one, two, strict=True):
        assert_same_bits(found, other)
        assert_same_bits(found, first.setdefault(name, found))
    assert_as_plain(one[0], plain(base, 2), loss=2e-2, weight=4e-2)


@pytest.mark.parametrize(
    ("meshes", "accumulate"),
    [({(2,): [3], (1, 2): [0, 3], (2, 1): [3]}, 1), ({(2, 2): [0, 2, 3]}, 2)],
    ids=["two ranks", "four ranks"],
)
def test_ranks_of_a_mesh_train_copies_that_stay_alike(
    meshes: dict[tuple[int, ...], list[int]], accumulate: int, tmp_path: Path
) -> None:
    """`meshes`: with the stages of each."""
    base = replace(BASE, uneven=True, accumulate=accumulate)
    settings = [replace(base, stage=stage, mesh=mesh) for mesh, stages in meshes.items() for stage in stages]
    ranks = prod(settings[0].mesh)
    expected = plain(base, ranks)
    calls = [(train, setting, str(tmp_path)) for setting in settings]
    for found, *others in zip(*run_on_ranks(ranks, in_turn, *calls), strict=True):
        for other in others:
            assert_same_bits(found, other)
        assert_as_plain(found, expected)
