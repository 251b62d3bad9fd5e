"""What a checkpoint refers to is never written again, and space is bounded; oracles: inodes, bytes, a plain run."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.saving import settle
from outsize.checkpoint import directory, writer
from outsize.move import generations
from tests.api.generation_runs import (
    Run,
    assert_holds,
    blocks,
    digest,
    inodes,
    large,  # noqa: F401 (autouse)
)
from tests.comparing import assert_same


def test_a_checkpoint_is_made_of_the_files_that_hold_the_state(tmp_path: Path) -> None:
    run = Run(tmp_path).train()
    run.values()
    before, written = inodes(tmp_path / "disk"), run.prepared.resources.bytes_written
    run.save(tmp_path / "ckpt")
    assert {file.stat().st_ino for file in (tmp_path / "ckpt").glob("unit-*.bin")} < before
    assert run.prepared.resources.bytes_written == written


def test_training_never_touches_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path).train()
    run.save(tmp_path / "ckpt")
    held, saved = digest(tmp_path / "ckpt"), run.values()
    run.train(3)
    with outsize.gathered(run.model, modify=True), torch.no_grad():
        run.model[0].weight.zero_()
    assert digest(tmp_path / "ckpt") == held
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": torch.bfloat16}, {"state_format": "compact"}])
def test_a_run_that_saves_is_bit_for_bit_one_that_does_not(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, saving = Run(tmp_path, **fields), Run(tmp_path, **fields)
    for step in range(4):
        plain.train()
        saving.train().save(tmp_path / f"step-{step}")
        if step == 2:
            saving.save(tmp_path / "again")  # no update in between
    assert_same(plain.values(), saving.values())
    assert_holds(tmp_path / "again", plain.values(), tmp_path, steps=1, **fields)


def test_an_update_of_frozen_files_moves_no_more_bytes_than_one_in_place(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(70, 300), nn.Linear(300, 300), nn.Linear(300, 3))
    run = Run(tmp_path, model=layers)
    moved = []
    for _ in range(3):
        before = run.prepared.resources.bytes_read + run.prepared.resources.bytes_written
        run.train()
        settle(run.prepared)
        moved.append(run.prepared.resources.bytes_read + run.prepared.resources.bytes_written - before)
        run.save(tmp_path / "ckpt")
    pages = 3 * 8 * 4096  # the unused ends of the units' arrays, copied once
    assert moved[2] <= moved[0] + pages


def test_a_checkpoint_may_be_deleted_before_the_next_step(tmp_path: Path) -> None:
    plain, run = Run(tmp_path).train(), Run(tmp_path).train()
    run.save(tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt")
    run.save(tmp_path / "other")  # the bytes have no name any more: they are copied
    for each in (plain, run):
        each.train()
    assert_same(plain.values(), run.values())


def test_keep_bounds_the_space_and_recycles_the_files(tmp_path: Path) -> None:
    run = Run(tmp_path, model=nn.Sequential(nn.Linear(70, 400), nn.Linear(400, 400), nn.Linear(400, 3))).train()
    settle(run.prepared)
    one = blocks(tmp_path / "disk", set())
    used: set[int] = set()
    for step in range(6):
        run.save(tmp_path / "ckpts" / f"step-{step}", keep=2)
        run.train()
        settle(run.prepared)
        run.prepared.resources.settle_saving()
        used |= inodes(tmp_path)
        seen: set[int] = set()
        assert blocks(tmp_path / "ckpts", seen) + blocks(tmp_path / "disk", seen) <= 3 * one + (1 << 20)
    assert sorted(each.name for each in (tmp_path / "ckpts").iterdir()) == ["step-4", "step-5"]
    units = {each for each in used if each in inodes(tmp_path / "ckpts") | inodes(tmp_path / "disk")}
    assert len([file for file in (tmp_path / "ckpts").rglob("unit-*.bin") if file.stat().st_ino in units]) == 6


def test_keep_removes_a_checkpoint_once_the_next_one_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    plain = generations.Generation.check_rest

    def check_rest(generation: generations.Generation) -> None:
        there.append((tmp_path / "step-1").exists() and (tmp_path / "step-2").exists())
        plain(generation)

    monkeypatch.setattr(generations.Generation, "check_rest", check_rest)
    run = Run(tmp_path).train()
    run.save(tmp_path / "step-1", keep=1)
    assert not there
    run.train().save(tmp_path / "step-2", keep=1)
    assert there == [True] * len(run.files)
    assert {each.name for each in tmp_path.iterdir()} == {"disk", "step-2"}


def test_keep_leaves_the_last_good_checkpoint_where_the_next_one_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path).train()
    run.save(tmp_path / "step-1", keep=1)
    run.train()
    saved = run.values()
    for file in (tmp_path / "disk").rglob("unit-*"):
        if "grads" not in file.name:
            os.truncate(file, 0)
            os.truncate(file, 1 << 20)
    run.save(tmp_path / "step-2", keep=1)
    assert "step-1 stays: " in caplog.text and "bad checksum" in caplog.text
    with pytest.raises((OSError, RuntimeError), match="bad checksum"):
        run.train(2)
    run.prepared.resources.close()
    assert (tmp_path / "step-1").exists()
    del saved


def test_keep_removes_its_own_series_only(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("best", "other-7", "a1-step-1", "step-1", "step-2", "step-3", "a2-step-1"):
        run.train().save(tmp_path / name, keep=1 if name in ("step-3", "a2-step-1") else None)
    run.train()
    settle(run.prepared)
    run.prepared.resources.settle_saving()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a1-step-1",
        "a2-step-1",
        "best",
        "disk",
        "other-7",
        "step-3",
    ]
    with pytest.raises(ValueError, match="ends in a number"):
        run.save(tmp_path / "best", keep=1)
    for keep in (0, -1, True, "2"):
        with pytest.raises(ValueError, match="keep is"):
            run.save(tmp_path / "step-4", keep=keep)


def test_a_save_without_room_for_the_next_update_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path).train()
    before = run.values()

    class Full:
        f_bavail, f_frsize = 1, 4096

    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "statvfs", lambda path: Full)
        with pytest.raises(OSError, match=r"no room for this checkpoint and the next update.*keep=") as raised:
            run.save(tmp_path / "ckpt")
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "ckpt").exists()
    assert_same(before, run.values())
    run.train().save(tmp_path / "ckpt")


def test_files_that_cannot_be_linked_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "link", lambda generation, target: False)
    plain, run = Run(tmp_path).train(), Run(tmp_path).train()
    run.save(tmp_path / "ckpt")
    assert all(file.frozen for file in run.files)
    for each in (plain, run):
        each.train()
    assert_same(plain.values(), run.values())
    assert_holds(tmp_path / "ckpt", plain.values(), tmp_path, steps=1)


@pytest.mark.parametrize("scarce", ["the budget", "the drive, which another mount of it does not link"])
def test_without_disk_space_for_a_second_generation_copies_are_made_before_save_returns(
    scarce: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "link", lambda generation, target: False)
    plan = outsize.plan(Run(tmp_path).model)
    run = Run(tmp_path, **({"disk_space": plan.bytes_on("disk")} if scarce == "the budget" else {}))
    if scarce != "the budget":
        free = SimpleNamespace(f_bavail=plan.checkpoint_bytes // 512 + 32, f_frsize=512)
        monkeypatch.setattr(directory.os, "statvfs", lambda path: free)
    run.train()
    settle(run.prepared)
    used = blocks(tmp_path / "disk", set())
    assert outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1).done()
    assert not any(file.frozen for file in run.files)
    run.train()
    settle(run.prepared)
    assert blocks(tmp_path / "disk", set()) <= used + 4096  # a line that says where the checkpoints are
    monkeypatch.undo()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")


def test_the_run_itself_never_takes_more_than_one_generation_where_files_are_linked(tmp_path: Path) -> None:
    run = Run(tmp_path).train()
    settle(run.prepared)
    one = blocks(tmp_path / "disk", set())
    for step in range(3):
        run.save(tmp_path / f"step-{step}")
        assert blocks(tmp_path / "disk", set()) <= one + (256 << 10)
        run.train()
        settle(run.prepared)
        assert blocks(tmp_path / "disk", set()) <= one + (256 << 10)


def test_the_plan_says_what_checkpoints_take(tmp_path: Path) -> None:
    run = Run(tmp_path)
    plan = outsize.plan(run.model)
    assert 0 < plan.generation_bytes == plan.checkpoint_bytes <= sum(file.nbytes for file in run.files)
    assert "each one that is kept takes" in str(plan)


def test_several_disks_are_copied_into_one_file(tmp_path: Path) -> None:
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
    run = Run(tmp_path, disk=disks).train()
    run.save(tmp_path / "ckpt")
    assert_holds(tmp_path / "ckpt", run.values(), tmp_path)


@pytest.mark.parametrize("verify", [True, False])
def test_verify_finds_a_byte_that_changed_on_the_disk(verify: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, verify=verify, host_memory="1MiB").train()
    settle(run.prepared)
    unit = run.prepared.engine.parameters.units[0]
    if unit.state.value == "resident":
        unit.release()
    file = unit.shard.generations()[0].now.file
    with open(file.path, "r+b") as raw:
        raw.seek(5000)
        byte = raw.read(1)[0]
        raw.seek(5000)
        raw.write(bytes([byte ^ 1]))
        os.fsync(raw.fileno())
    if verify:
        with pytest.raises(OSError, match=r"bad checksum: the 4096 bytes at 4096 .*unit-00000"):
            run.values()
    else:
        run.values()


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": torch.bfloat16}, {"state_format": "compact"}])
def test_verify_changes_nothing_else(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, checked = Run(tmp_path, verify=False, **fields), Run(tmp_path, verify=True, **fields)
    for run in (plain, checked):
        run.train(3)
    assert_same(plain.values(), checked.values())


def test_late_arrays_have_generations_too(tmp_path: Path) -> None:
    plain, run = Run(tmp_path).train(), Run(tmp_path).train()
    for each in (plain, run):
        each.model[1].weight.requires_grad_(True)
        each.optimizer.add_param_group({"params": [each.model[1].weight]})
    for step in range(3):
        run.save(tmp_path / f"step-{step}")
        for each in (plain, run):
            each.train()
    assert_same(plain.values(), run.values())
    run.save(tmp_path / "last")
    run.train()
    run.load(tmp_path / "last")
    assert_same(plain.values(), run.values())
