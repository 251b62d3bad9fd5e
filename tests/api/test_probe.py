"""The figures of a machine: measured once, remembered by machine and drive, usual values else."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import outsize
from outsize.api import probing
from outsize.api.probing import recall
from outsize.planning.machine import Machine, seconds_on, typical_machine

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one. What takes seconds is not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "_compute", lambda device: {"memory": 1e9, "products": {"float32": ((1e6, 1e-3),)}})
    return tmp_path / "outsize"


def test_a_machine_is_measured_once_and_its_drive_when_it_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = outsize.probe(device="cpu")
    assert first.memory == 1e9 and "memory" not in first.typical and "disk_read" in first.typical
    monkeypatch.setattr(probing, "_compute", lambda device: pytest.fail("measured again"))
    whole = outsize.probe(disk=tmp_path, device="cpu", megabytes=16)
    assert whole.memory == 1e9 and whole.disk_read > 0 and "disk_read" not in whole.typical
    assert outsize.probe(disk=tmp_path, device="cpu") == whole
    assert len(list(cache.iterdir())) == 2 and "GFLOP/s" in repr(whole)
    with pytest.raises(TypeError, match="measures the drive of one folder: call it for each"):
        outsize.probe(disk=[tmp_path])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="megabytes is 0; it must be at least 1"):
        outsize.probe(disk=tmp_path, megabytes=0)


def test_a_file_that_is_damaged_is_measured_again(cache: Path) -> None:
    outsize.probe(device="cpu")
    damaged = (
        "{",
        '{"memory": 0.0}',
        "[]",
        '{"memory": "x"}',
        '{"products": 3}',
        '{"operations": {}}',
        '{"products": {"float32": []}}',
    )
    for content in (*damaged, '{"products": {"float32": [[0, 0]]}}', '{"updates": {"float32": [1]}}'):
        (file,) = cache.iterdir()
        file.write_text(content)
        assert recall(CPU, None).memory != 1e9
        assert outsize.probe(device="cpu").memory == 1e9


def test_without_a_home_nothing_is_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert outsize.probe(device="cpu").memory == 1e9
    assert recall(CPU, None).memory != 1e9
    assert "could not be written to ~/.cache/outsize (Could not determine home" in caplog.text


def test_a_cache_that_cannot_be_written_is_told_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert outsize.probe(device="cpu").memory == 1e9
    (told,) = caplog.messages
    assert f"could not be written to {tmp_path}/file/outsize" in told and "Set XDG_CACHE_HOME" in told


def test_a_machine_of_which_all_is_measured_is_not_a_typical_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("memory", "updates", "host_memory", "checksums", "new_memory", "products", "operation_seconds")
    figures = {**typical_machine("cpu", 2).as_json(), "products": {"float32": [[1.0, 1e-9]]}}
    monkeypatch.setattr(probing, "_compute", lambda device: {name: figures[name] for name in names})
    assert not outsize.probe(device="cpu", disk=tmp_path, megabytes=16).typical
    assert recall(CPU, tmp_path).measured


def test_what_was_not_measured_is_marked_as_typical(cache: Path) -> None:
    assert not recall(CPU, None).measured
    assert recall(CPU, None).typical >= {"products", "memory"} and "typical" in repr(recall(CPU, None))


def test_rates_are_above_zero() -> None:
    for name in ("disk_read", "memory", "to_device"):
        with pytest.raises(ValueError, match=f"{name} of the machine is 0"):
            replace(typical_machine("cpu", 2), **{name: 0})
    with pytest.raises(ValueError, match="collectives of the machine is nan"):
        Machine(collectives=((1.0, float("nan")),))


def test_seconds_lie_between_those_that_were_measured() -> None:
    curve = ((1e3, 1e-3), (1e6, 1e-1))
    assert seconds_on(curve, 1e6) == pytest.approx(1e-1)
    assert seconds_on(curve, 1e9) == pytest.approx(1e2)
    assert 1e-3 < seconds_on(curve, 1e5) < 1e-1
    assert seconds_on(curve, 1.0) == pytest.approx(2e-4)


def test_a_drive_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.os, "pwrite", Mock(side_effect=AssertionError))
    with pytest.raises(
        OSError, match=rf"No space left on device: free space there \(measuring the drive.*PiB\): '{tmp_path}'"
    ):
        probing._disk(tmp_path, (1 << 50) // probing.BLOCK_BYTES)


def test_a_full_drive_is_told_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(probing.os, "pwrite", full)
    with pytest.raises(
        OSError, match=rf"No space left on device: free space there \(measuring the drive.*MiB\): '{tmp_path}'"
    ):
        probing._disk(tmp_path, 1)
    assert not [*tmp_path.iterdir()]
