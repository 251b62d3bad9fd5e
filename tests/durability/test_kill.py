"""A run that is killed again and again ends as one that was never killed; the oracle is that one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from benchmarks.checkpoint_full import live
from tests.ranks.launching import ends_on_ranks
from tests.scripts import run_script

KILLS = 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tally(swift: Path) -> dict[str, Any]:
    """Runs of every manner, killed at random instants and at random system calls of their saves."""
    status, said, errors = run_script("from benchmarks import checkpoint_kills as it; it.main()", swift, 3, KILLS)
    assert status == 0, errors
    found: dict[str, Any] = json.loads(said)
    return found


def test_a_run_that_is_killed_at_any_instant_ends_bit_for_bit_as_one_that_was_not(tally: dict[str, Any]) -> None:
    assert tally["kills"] == KILLS
    assert tally["kills_in_saves"] and tally["kills_in_saves"] < KILLS and tally["loads"]
    assert tally["identical_runs"] == tally["runs"]


def test_every_repeated_step_has_the_loss_that_it_had(tally: dict[str, Any]) -> None:
    assert not tally["other_losses"]


def test_no_completed_checkpoint_is_missed_by_the_next_life(tally: dict[str, Any]) -> None:
    assert not tally["lost_checkpoints"]


def test_killed_runs_leave_nothing_once_one_is_through(tally: dict[str, Any]) -> None:
    assert not tally["leftovers"]


@pytest.mark.slow
def test_prepare_sweeps_what_a_save_of_a_killed_run_left_before_it_counts_room(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (whole,), (killed,) = (ends_on_ranks(1, live, tmp_path, killed) for killed in (False, True))
    assert whole.error is None and not whole.killed and killed.killed
    assert len(list((tmp_path / "saves").glob(".step-*.new-*"))) == 1
    model = nn.Linear(2, 2)
    outsize.plan(model, torch.optim.SGD(model.parameters()), host_memory="64MiB", disk=tmp_path / "disk")
    assert [each.name for each in (tmp_path / "saves").iterdir()] == ["step-1"]
    assert not list((tmp_path / "disk").iterdir())
