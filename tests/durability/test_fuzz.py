"""Damaged checkpoints: a load gives the right bits or an error that names the file, and leaves the run as it was."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoint_fuzz import KINDS, Specimen, Tally, flip_everywhere, fuzz
from benchmarks.checkpoint_mutations import pipe
from outsize.checkpoint.manifest import MANIFEST_NAME

INPUTS, FLIPS = 60, 24
ALL_OVER = 197
"""A number of bytes that is prime to every row, page and file."""


@pytest.fixture(scope="module", params=KINDS)
def specimen(request: pytest.FixtureRequest, swift: Path) -> Iterator[Specimen]:
    """A checkpoint to be damaged, and the run that it is loaded into."""
    specimen = Specimen(swift / str(list(KINDS).index(request.param)), KINDS[request.param])
    yield specimen
    specimen.run.close()


@pytest.mark.slow
def test_a_damaged_checkpoint_loads_right_or_not_at_all(specimen: Specimen) -> None:
    tally = Tally()
    fuzz(specimen, random.Random(11), INPUTS, tally)
    assert not tally.wrong
    assert tally.refused > INPUTS // 2 and tally.right


@pytest.mark.slow
def test_every_flipped_bit_of_data_that_matters_is_found(specimen: Specimen) -> None:
    tally = Tally()
    flip_everywhere(specimen, random.Random(12), FLIPS, tally)
    assert not tally.wrong
    assert tally.refused


def test_no_digit_of_a_manifest_can_change_unseen(specimen: Specimen) -> None:
    tally = Tally()
    text = specimen.files[MANIFEST_NAME]
    for at in range(0, len(text), ALL_OVER):
        specimen.lay_out()
        changed = bytearray(text)
        changed[at] ^= 1
        (specimen.folder / MANIFEST_NAME).write_bytes(changed)
        specimen.check(f"flip at {at}", specimen.folder, tally, must_fail=True)
    assert not tally.wrong


def test_a_pipe_for_a_manifest_does_not_hang_a_load_or_a_save(specimen: Specimen) -> None:
    tally = Tally()
    specimen.lay_out()
    pipe(specimen.folder / MANIFEST_NAME, random.Random())
    for path in (specimen.folder, specimen.shelf):
        specimen.check("a pipe", path, tally)
    assert not tally.wrong
    with pytest.raises(FileExistsError, match="not an outsize checkpoint"):
        specimen.run.save(specimen.folder)
