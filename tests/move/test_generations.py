"""Generations of one file: the next one is made once, whoever asks first, and only where it will be needed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outsize import _native
from outsize.move.disk import StripedFile
from outsize.move.generations import Generations

NBYTES = 8 * 4096


@pytest.fixture
def made() -> list[int]:
    """The numbers of the generations that were made."""
    return []


@pytest.fixture
def file(tmp_path: Path, made: list[int]) -> Iterator[Generations]:
    engine = _native.DiskEngine("threads")

    def make(number: int) -> StripedFile:
        made.append(number)
        return StripedFile(engine, [tmp_path], f"unit.{number}", NBYTES)

    generations = Generations(make)
    generations.preallocate(0, NBYTES)
    yield generations
    generations.close()
    engine.close()


def test_the_next_generation_is_made_once_whoever_asks_first(file: Generations, made: list[int]) -> None:
    file.freeze()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: file.reserve(), range(64)))
    assert made == [0, 1] and file.has_next
    file.begin_turn()
    file.end_turn()
    assert made == [0, 1] and not file.frozen and not file.has_next


def test_an_update_that_came_first_leaves_nothing_to_reserve(file: Generations, made: list[int]) -> None:
    file.freeze()
    file.begin_turn()
    file.end_turn()
    file.reserve()  # the save's thread, which comes late
    assert made == [0, 1] and not file.has_next


def test_nothing_is_made_for_a_run_that_has_ended(file: Generations, made: list[int], tmp_path: Path) -> None:
    file.freeze()
    file.close()
    file.reserve()
    assert made == [0] and not any(tmp_path.iterdir())
