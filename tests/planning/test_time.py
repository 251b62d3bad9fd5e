"""The simulated drive."""

from dataclasses import replace

import pytest

from outsize.planning.machine import CPU, typical_machine
from outsize.planning.time import Drive
from outsize.planning.trace import READS, WRITES

MACHINE = replace(typical_machine(CPU, 1), disk_read=4.0, disk_write=8.0, disk_mixed=4.0)


def test_a_read_and_a_write_at_once_share_the_drive() -> None:
    drive = Drive(MACHINE)
    assert drive.move(WRITES, 0.0, 32.0) == (0.0, 4.0)
    # 2 bytes a second each, for 4 seconds; then the other 24 bytes of the write, alone.
    assert drive.move(READS, 0.0, 8.0) == (0.0, 4.0)
    assert drive.writes.free == 4.0 + 24.0 / 8.0


def test_what_outlasts_the_other_goes_on_alone() -> None:
    drive = Drive(MACHINE)
    drive.move(WRITES, 0.0, 8.0)
    assert drive.move(READS, 0.0, 16.0) == (0.0, 4.0 + 8.0 / 4.0)
    assert drive.writes.free == 4.0
    assert drive.writes.busy == 4.0


def test_a_drive_that_does_both_at_once_slows_neither_down() -> None:
    drive = Drive(replace(MACHINE, disk_mixed=12.0))
    assert [drive.move(WRITES, 0.0, 16.0), drive.move(READS, 0.0, 16.0)] == [(0.0, 2.0), (0.0, 4.0)]
    assert drive.writes.free == 2.0


@pytest.mark.parametrize("mixed", [1.0, 3.0, 5.0, 20.0])
def test_all_that_was_asked_for_at_once_takes_what_both_rates_give(mixed: float) -> None:
    drive = Drive(replace(MACHINE, disk_mixed=mixed))
    for _ in range(20):
        drive.move(READS, 0.0, 3.0)
        drive.move(WRITES, 0.0, 3.0)
    least = max(120.0 / mixed, 60.0 / 4.0)
    end = max(drive.reads.free, drive.writes.free)
    assert least * 0.999 <= end <= least * 1.5
