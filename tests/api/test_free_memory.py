"""What is free follows from what the system tells, also within the control group of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from outsize.api import budgets

GIB = 1 << 30


def control_group(folder: Path, version: int, statistics: str | None) -> tuple[Path, str, str, str]:
    place = next(each for each in budgets.CONTROL_GROUPS if ("max" in each[1]) == (version == 2))
    (folder / place[1]).write_text(f"{8 * GIB}\n")
    (folder / place[2]).write_text(f"{6 * GIB}\n")
    if statistics is not None:
        (folder / "memory.stat").write_text(statistics)
    return folder, *place[1:]


@pytest.mark.parametrize(
    ("version", "statistics", "free"),
    [
        (2, f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\n", 6 * GIB),
        (1, f"inactive_file 4096\ntotal_inactive_file {3 * GIB}\n", 5 * GIB),
        (2, "anon 1\n\n", 2 * GIB),
        (2, "inactive_file lots\n", 2 * GIB),
        (2, None, 2 * GIB),
    ],
)
def test_cached_files_that_nobody_reads_again_are_free_in_a_container(
    version: int, statistics: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_meminfo_available", lambda: 100 * GIB)
    monkeypatch.setattr(budgets, "CONTROL_GROUPS", (control_group(tmp_path, version, statistics),))
    assert budgets.available_memory() == free


def test_a_machine_without_a_limit_has_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = control_group(tmp_path, 2, "inactive_file 1\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(budgets, "_meminfo_available", lambda: 100 * GIB)
    monkeypatch.setattr(budgets, "CONTROL_GROUPS", (place,))
    assert budgets.available_memory() == 100 * GIB
