"""Whatever fails under a step or a save: the right bits or a clear error, and the last complete checkpoint goes on."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint_damage import try_often
from benchmarks.checkpoint_faults import ENGINE_KINDS, SYSTEM_KINDS, Fault, Ground, Manner, injected, patience, trials
from benchmarks.checkpoint_runs import IN_MEMORY, MIXED, ON_DISK, TinyRun
from outsize.checkpoint import folder
from tests.conftest import prepared

MANNERS = {
    "disk": Manner(ON_DISK),
    "mixed": Manner(MIXED),
    "small": Manner(ON_DISK, large=False),
    "replacing": Manner(ON_DISK, replaces=True),
}
MOST = {"disk": 6, "mixed": 1, "small": 1, "replacing": 2}
"""Trials of a kind, evenly spread over hundreds of requests and calls; the benchmark makes them all."""


@pytest.fixture(scope="module")
def grounds(swift: Path) -> Iterator[Any]:
    """A proving ground of each manner, made when it is first asked for."""
    made: list[Ground] = []

    @cache
    def ground(name: str) -> Ground:
        made.append(Ground(swift / name, MANNERS[name]))
        return made[-1]

    yield ground
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ENGINE_KINDS, *SYSTEM_KINDS])
@pytest.mark.parametrize("manner", MANNERS)
def test_a_fault_gives_the_right_bits_or_a_clear_error(grounds: Any, manner: str, kind: str) -> None:
    wrong = [str(outcome) for outcome in trials(grounds(manner), kind, MOST[manner]) if outcome.wrong]
    assert not wrong


def test_late_and_reordered_requests_are_no_errors(grounds: Any) -> None:
    for outcome in trials(grounds("disk"), "late", 2):
        assert not outcome.errors and not outcome.wrong


# -- one by one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir()
    return disk


def error_of(action: Callable[[], object]) -> OSError | None:
    """The system's error that came of it."""
    try:
        action()
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("places", [ON_DISK, MIXED, IN_MEMORY], ids=["disk", "mixed", "memory"])
@pytest.mark.parametrize("kind", ["fsync", "rename", "posix_fallocate"])
def test_a_save_after_a_failed_save_does_not_wait_for_it(tmp_path: Path, disk: Path, places: Any, kind: str) -> None:
    run = TinyRun(disk, places)
    fault = Fault(kind, at=1, armed=True)
    with injected(fault), patience():
        error = error_of(lambda: run.save(tmp_path / "step-0").wait())
        assert error is None or (error.errno == fault.code and error.filename is not None)
        if kind == "fsync" and places is not IN_MEMORY:  # nobody knows any more what the run's own files hold
            with pytest.raises(RuntimeError, match="no longer whole"):
                run.save(tmp_path / "step-1")
            return
        run.save(tmp_path / "step-1").wait()
        run.save(tmp_path / "step-2").wait()
        run.load(tmp_path / "step-2")
    assert not [entry for entry in tmp_path.iterdir() if ".new-" in entry.name]


def test_a_failed_save_stops_neither_the_training_nor_its_bits(tmp_path: Path, disk: Path) -> None:
    whole, run = TinyRun(disk, IN_MEMORY), TinyRun(disk, ON_DISK)
    for each in (whole, run):
        each.load(_saved(tmp_path / "origin", disk))
        each.step()
        if each is run:
            with injected(Fault("link", at=2, armed=True)), pytest.raises(OSError, match="unit-"):
                run.save(tmp_path / "step-1")
        each.step()
        expected = whole.digest()
    assert run.digest() == expected


def _saved(path: Path, disk: Path) -> Path:
    if not path.exists():
        TinyRun(disk, IN_MEMORY).save(path).wait()
    return path


def test_a_checkpoint_between_two_renames_is_found_in_its_directory(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    run = TinyRun(disk, ON_DISK)
    run.save(shelf / "last").wait()
    monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    calls = Fault("rename", at=2, armed=True)
    with injected(calls), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(calls, "error", _kill)
        run.save(shelf / "last")
    assert not (shelf / "last").exists()
    for path in (shelf, shelf / "last"):
        run.load(path)


def _kill(*_: str) -> BaseException:
    return KeyboardInterrupt()  # nothing in the way of a kill may look like an error of the system


# -- others at work ----------------------------------------------------------------------------------------------------


def test_files_that_another_run_still_reads_are_not_used_again(tmp_path: Path, disk: Path) -> None:
    shelf = tmp_path / "shelf"
    first = TinyRun(disk, ON_DISK)
    first.step()
    first.save(shelf / "step-1").wait()
    expected = first.digest(rng=False)
    second = TinyRun(disk, ON_DISK, seed=1)
    second.load(shelf)
    second.step()
    for step in (2, 3):
        second.save(shelf / f"step-{step}", keep=1).wait()
        second.step()
    second.digest()
    prepared(first.model).engine.streamer.drop_idle()
    assert first.digest(rng=False) == expected


@pytest.mark.slow
def test_a_damaged_page_is_found_before_its_value_is_used(swift: Path) -> None:
    tally = try_often(swift / "damage", 10)
    assert tally.found >= 5
    assert not tally.wrong
