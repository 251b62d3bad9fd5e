"""Damaged checkpoints: a load gives the right bits or an error that names the file, and leaves the run as it was."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoint_fuzz import KINDS, Specimen, Tally, flip_everywhere, fuzz
from benchmarks.checkpoint_mutations import pipe
from benchmarks.checkpoint_runs import ON_DISK, TinyRun
from outsize.checkpoint.manifest import MANIFEST_NAME
from tests.conftest import prepared

INPUTS, FLIPS, LIVE_FLIPS = 60, 24, 12
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


# -- verify=True: the live files ---------------------------------------------------------------------------------------


def test_verify_finds_every_flipped_bit_of_live_data_that_matters(swift: Path) -> None:
    draw = random.Random(13)
    disk = swift / "live"
    disk.mkdir()
    whole = TinyRun(disk, ON_DISK)
    whole.step()
    whole.step()
    expected, found = whole.digest(), 0
    whole.close()
    for _ in range(LIVE_FLIPS):
        run = TinyRun(disk, ON_DISK, verify=True)
        run.step()
        run.digest()
        prepared(run.model).engine.streamer.drop_idle()
        file = _flip(draw.choice(sorted(disk.glob("outsize-run-*/unit-?????.0"))), draw)
        seen = _step_or_error(run)
        if isinstance(seen, OSError):
            assert "bad checksum" in str(seen)
            assert seen.filename == str(file)
            found += 1
        else:
            assert seen == expected
        run.close()
    assert found > LIVE_FLIPS // 2


def _step_or_error(run: TinyRun) -> str | OSError:
    """The bits after one more step, or what stood in its way."""
    try:
        run.step()
        return run.digest()
    except OSError as error:
        return error.with_traceback(None)


def _flip(file: Path, draw: random.Random) -> Path:
    opened = os.open(file, os.O_RDWR)
    at = draw.randrange(os.fstat(opened).st_size)
    os.pwrite(opened, bytes([os.pread(opened, 1, at)[0] ^ 1 << draw.randrange(8)]), at)
    os.fsync(opened)
    os.close(opened)
    return file
