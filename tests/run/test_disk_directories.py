"""A disk directory that two models share, and one that refuses."""

import errno
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

import outsize
from tests.conftest import Workshop, batches
from tests.scripts import run_script


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    script = f"""
import resource, sys, torch, outsize
from torch import nn
limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "prepare":
    limit()
try:
    outsize.prepare(model, optimizer, host_memory="64MiB", disk={str(tmp_path)!r}, params="disk", states="disk")
    limit()
    outsize.save({str(tmp_path / "saved")!r}, model, optimizer)
except OSError as error:
    assert "ulimit -f" in str(error) and {str(tmp_path)!r} in str(error), error
    sys.exit(7)
"""
    for when in ("prepare", "save"):
        status, _, errors = run_script(script, when)
        assert status == 7, f"{when}: {errors}"


def test_a_disk_engine_that_the_kernel_refuses_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.move import disk

    monkeypatch.setenv("OUTSIZE_DISK_ENGINE", "uring")
    monkeypatch.setattr(disk._native, "probe_uring", lambda: errno.EPERM)
    with pytest.raises(
        OSError, match=r"refuses io_uring \(Operation not permitted\); unset it, or set it to 'threads'"
    ):
        disk.open_engine()


def test_threads_that_cannot_be_started_for_the_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.move import disk

    monkeypatch.setattr(disk, "DiskEngine", Mock(side_effect=BlockingIOError(errno.EAGAIN, "it is told")))
    with pytest.raises(BlockingIOError, match=r"no thread can be started for the disk: raise .* \(ulimit -u\)"):
        disk.open_engine()


def test_two_models_whose_directories_are_one_by_a_link_keep_their_files(workshop: Workshop, tmp_path: Path) -> None:
    first = workshop.pair()
    (tmp_path / "link").symlink_to(workshop.disk)
    second = workshop.pair(disk=tmp_path / "link")
    for pair in (first, second, first):
        pair.train(batches(2))


def test_two_models_whose_directories_are_one_by_a_mount_keep_their_files(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount shows the same inodes under another path, which no path tells."""
    first = workshop.pair()
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: Path("/elsewhere") / path.name)
    second = workshop.pair()
    monkeypatch.undo()
    for pair in (first, second, first):
        pair.train(batches(2))


def test_a_run_whose_folder_was_removed_under_it_saves_all_the_same(workshop: Workshop, tmp_path: Path) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(1))
    for folder in workshop.disk.iterdir():
        shutil.rmtree(folder)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    pair.train(batches(1))
    outsize.load(tmp_path / "saved", pair.model, pair.optimizer)
