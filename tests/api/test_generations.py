"""What a checkpoint refers to is never written again, and space is bounded; oracles: inodes, bytes, a plain run."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.assemble import Prepared, prepared_of
from outsize.api.saving import settle
from outsize.checkpoint import parts, shelf, writer
from outsize.move import generations
from outsize.move.generations import Generations

DISK = {"params": "disk", "grads": "disk", "states": "disk"}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save is done as that of a large state."""
    monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)


class Run:
    """Three layers, the middle one half frozen, AdamW with its state on disk unless told otherwise."""

    def __init__(self, tmp: Path, seed: int = 0, model: nn.Module | None = None, **fields: Any) -> None:
        torch.manual_seed(seed)
        (tmp / "disk").mkdir(exist_ok=True)
        self.model = model or nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 90), nn.Linear(90, 3))
        if model is None:
            self.model[1].weight.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        given = {**DISK, "disk": tmp / "disk", "host_memory": "64MiB", "device": "cpu"}
        outsize.prepare(self.model, self.optimizer, **{**given, **fields})
        self.count = 0

    @property
    def prepared(self) -> Prepared:
        found = prepared_of(next(self.model.parameters()))
        assert found is not None
        return found

    @property
    def files(self) -> list[Generations]:
        return [file for unit in self.prepared.engine.units for file in unit.shard.generations()]

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.count += 1
            inputs = torch.randn(4, 70, generator=torch.Generator().manual_seed(self.count))
            self.model(inputs.to(next(self.model.parameters()).dtype)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        with outsize.gathered(self.model):
            found = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}/{key}"] = torch.as_tensor(value).clone()
        return found

    def save(self, path: Path, **options: Any) -> None:
        outsize.save(path, self.model, self.optimizer, self.count, **options).wait()

    def load(self, path: Path, **options: Any) -> None:
        self.count = outsize.load(path, self.model, self.optimizer, **options)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def inodes(folder: Path) -> set[int]:
    return {file.stat().st_ino for file in folder.rglob("*") if file.is_file()}


def blocks(folder: Path, seen: set[int]) -> int:
    """Bytes on the drive, each file once, however many names it has."""
    total = 0
    for file in folder.rglob("*"):
        status = file.lstat()
        if file.is_file() and status.st_ino not in seen:
            seen.add(status.st_ino)
            total += status.st_blocks * 512
    return total


def test_a_checkpoint_is_made_of_the_files_that_hold_the_state(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    run.values()
    before, written = inodes(tmp_path / "disk"), run.prepared.resources.bytes_written
    run.save(tmp_path / "ckpt")
    assert {file.stat().st_ino for file in (tmp_path / "ckpt").glob("unit-*.bin")} < before
    assert run.prepared.resources.bytes_written == written


def test_training_never_touches_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    run.save(tmp_path / "ckpt")
    held, saved = digest(tmp_path / "ckpt"), run.values()
    run.train(3)
    with outsize.gathered(run.model, modify=True), torch.no_grad():
        run.model[0].weight.zero_()
    assert digest(tmp_path / "ckpt") == held
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": torch.bfloat16}, {"state_format": "compact"}])
def test_a_run_that_saves_is_bit_for_bit_one_that_does_not(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, saving = Run(tmp_path, **fields), Run(tmp_path, **fields)
    for step in range(4):
        plain.train()
        saving.train()
        saving.save(tmp_path / f"step-{step}")
        if step == 2:
            saving.save(tmp_path / "again")  # no update in between
    assert_same(plain.values(), saving.values())
    other = Run(tmp_path, seed=1, **fields)
    other.load(tmp_path / "again")
    other.train()
    assert_same(plain.values(), other.values())


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
    plain, run = Run(tmp_path), Run(tmp_path)
    for each in (plain, run):
        each.train()
    run.save(tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt")
    run.save(tmp_path / "other")  # the bytes have no name any more: they are copied
    for each in (plain, run):
        each.train()
    assert_same(plain.values(), run.values())


def test_keep_bounds_the_space_and_recycles_the_files(tmp_path: Path) -> None:
    run = Run(tmp_path, model=nn.Sequential(nn.Linear(70, 400), nn.Linear(400, 400), nn.Linear(400, 3)))
    run.train()
    settle(run.prepared)
    one = blocks(tmp_path / "disk", set())
    used: set[int] = set()
    for step in range(6):
        run.save(tmp_path / "ckpts" / f"step-{step}", keep=2)
        run.train()
        settle(run.prepared)
        used |= inodes(tmp_path)
        seen: set[int] = set()
        assert blocks(tmp_path / "ckpts", seen) + blocks(tmp_path / "disk", seen) <= 3 * one + (1 << 20)
    assert sorted(each.name for each in (tmp_path / "ckpts").iterdir()) == ["step-4", "step-5"]
    units = {each for each in used if each in inodes(tmp_path / "ckpts") | inodes(tmp_path / "disk")}
    assert len([file for file in (tmp_path / "ckpts").rglob("unit-*.bin") if file.stat().st_ino in units]) == 6


def test_keep_removes_its_own_series_only(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("best", "other-7", "step-1", "step-2", "step-3"):
        run.train()
        run.save(tmp_path / name, keep=1 if name == "step-3" else None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best", "disk", "other-7", "step-3"]
    with pytest.raises(ValueError, match="ends in a number"):
        run.save(tmp_path / "best", keep=1)
    for keep in (0, -1, True, "2"):
        with pytest.raises(ValueError, match="keep is"):
            run.save(tmp_path / "step-4", keep=keep)


def test_a_save_without_room_for_the_next_update_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.train()
    before = run.values()

    class Full:
        f_bavail, f_frsize = 1, 4096

    with monkeypatch.context() as patch:
        patch.setattr(shelf.os, "statvfs", lambda path: Full)
        with pytest.raises(OSError, match=r"no room for this checkpoint and to train on.*keep=") as raised:
            run.save(tmp_path / "ckpt")
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "ckpt").exists()
    assert_same(before, run.values())
    run.train()
    run.save(tmp_path / "ckpt")


@pytest.mark.parametrize("way", ["reflink", "copy"])
def test_where_nothing_can_be_linked_the_files_are_cloned_or_copied(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(generation: generations.Generation, target: Path) -> bool:
        if way == "reflink":  # as the file system would, though it shares nothing
            shutil.copy(generation.file.path, target)
        return way == "reflink"

    monkeypatch.setattr(parts, "link", lambda generation, target: False)
    monkeypatch.setattr(parts, "clone", clone)
    plain, run = Run(tmp_path), Run(tmp_path)
    for each in (plain, run):
        each.train()
    run.save(tmp_path / "ckpt")
    assert [file.frozen for file in run.files] == [way == "copy"] * 3
    for each in (plain, run):
        each.train()
    assert_same(plain.values(), run.values())
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    other.train()
    assert_same(plain.values(), other.values())


def test_without_disk_space_for_a_second_generation_copies_are_made_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "link", lambda generation, target: False)
    at_rest = outsize.plan(Run(tmp_path).model).bytes_on("disk")
    run = Run(tmp_path, disk_space=at_rest)
    run.train()
    settle(run.prepared)
    used = blocks(tmp_path / "disk", set())
    assert outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1).done()
    assert not any(file.frozen for file in run.files)
    run.train()
    settle(run.prepared)
    assert blocks(tmp_path / "disk", set()) <= used
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")


def test_the_run_itself_never_takes_more_than_one_generation_where_files_are_linked(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
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
    run = Run(tmp_path, disk=disks)
    run.train()
    run.save(tmp_path / "ckpt")
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(run.values(), other.values())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the writing behind the training until it is set."""
    opened = threading.Event()
    plain = parts._NewFile.__init__

    def make(file: Any, path: Path, nbytes: int) -> None:
        assert opened.wait(60)
        plain(file, path, nbytes)

    monkeypatch.setattr(parts._NewFile, "__init__", make)
    yield opened
    opened.set()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_training_goes_on_while_memory_is_written_and_the_checkpoint_is_of_its_instant(
    tier: str, tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, params=tier, grads=tier, states=tier)
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    run.train(2)
    assert not saving.done()
    assert not (tmp_path / "ckpt").exists()
    gate.set()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_without_room_for_copies_what_is_about_to_change_is_waited_for(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host", host_memory="1MiB")
    run.train()
    saved = run.values()
    run.prepared.resources.ledger.add("host/test", 1 << 20)
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    released = threading.Event()
    shard = run.prepared.engine.units[0].shard

    def change() -> None:
        shard.before_change()
        released.set()

    waiting = threading.Thread(target=change)
    waiting.start()
    assert not released.wait(0.2)
    gate.set()
    waiting.join(60)
    assert released.is_set()
    run.train(2)
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_a_unit_that_changes_while_it_is_written_waits_for_the_piece_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened = threading.Event(), threading.Event()
    plain = parts._NewFile.write

    def write(file: Any, offset: int, content: torch.Tensor) -> None:
        begun.set()
        assert opened.wait(60)
        plain(file, offset, content)

    monkeypatch.setattr(parts._NewFile, "write", write)
    monkeypatch.setattr(parts, "IN_PLACE_BYTES", 4096)
    run = Run(tmp_path, params="host", grads="host", states="host")
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    assert begun.wait(60)
    changing = threading.Thread(target=run.prepared.engine.units[0].shard.before_change)
    changing.start()
    changing.join(0.2)
    assert changing.is_alive()
    opened.set()
    changing.join(60)
    run.train()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_weights_on_the_device_that_the_user_changes_after_a_save_are_saved_as_they_were(
    tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, params="device", grads="device", states="host")
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    with outsize.gathered(list(run.model.parameters()), modify=True):
        for param in run.model.parameters():
            param.data.add_(1)
    gate.set()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


@pytest.mark.parametrize("waiter", ["wait", "load", "save"])
def test_who_waits_for_a_checkpoint_and_is_interrupted_changes_nothing_in_it(
    waiter: str, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host")
    run.train()
    gate.set()
    outsize.save(tmp_path / "first", run.model, run.optimizer, run.count).wait()
    gate.clear()
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(saving._promise), "wait", interrupted)
        if waiter == "wait":
            saving.wait()
        elif waiter == "load":
            outsize.load(tmp_path / "first", run.model, run.optimizer)
        else:
            outsize.save(tmp_path / "second", run.model, run.optimizer)
    threading.Timer(0.2, gate.set).start()
    outsize.load(tmp_path / "first", run.model, run.optimizer)
    run.train()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_what_cannot_be_copied_is_waited_for(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host")
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)

    def no_memory(content: torch.Tensor) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(parts, "_copy_of", no_memory)
    threading.Timer(0.2, gate.set).start()
    run.train(2)
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_without_room_weights_on_the_device_are_written_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, params="device", grads="device", states="device", host_memory="64MiB")
    run.train()
    run.prepared.resources.ledger.add("host/test", 64 << 20)
    copied: list[int] = []
    plain = parts._copy_of

    def copy_of(content: torch.Tensor) -> torch.Tensor:
        copied.append(content.numel())
        return plain(content)

    monkeypatch.setattr(parts, "_copy_of", copy_of)
    saved = run.values()
    outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count).wait()
    assert not copied
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_a_model_that_goes_away_is_still_written(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host")
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    for unit in run.prepared.engine.units:
        unit.shard.close()
    gate.set()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


@pytest.mark.parametrize("waited", [True, False])
def test_a_failure_behind_the_training_is_logged_and_raised_once(
    waited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host")
    run.train()
    run.save(tmp_path / "ckpt")
    good = digest(tmp_path / "ckpt")
    run.train()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(parts._NewFile, "write", full)
        saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer)
        run.train()
        with pytest.raises(OSError, match="No space left"):
            saving.wait() if waited else run.save(tmp_path / "ckpt")
    assert "could not be completed" in caplog.text
    assert digest(tmp_path / "ckpt") == good
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ckpt", "disk"]
    run.save(tmp_path / "ckpt")
    assert digest(tmp_path / "ckpt") != good


def test_a_model_may_go_while_its_checkpoint_is_written(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path, params="host")
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1)
    run.prepared.resources.close()
    del run
    gate.set()
    saving.wait()
    other = Run(tmp_path, seed=1)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_a_load_waits_for_a_checkpoint_that_another_model_still_writes(tmp_path: Path, gate: threading.Event) -> None:
    run, other = Run(tmp_path, params="host"), Run(tmp_path, seed=1)
    run.train()
    outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1)
    threading.Timer(0.05, gate.set).start()
    other.load(tmp_path / "ckpt")
    assert_same(run.values(), other.values())


@pytest.mark.parametrize("verify", [True, False])
def test_verify_finds_a_byte_that_changed_on_the_disk(verify: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, verify=verify, host_memory="1MiB")
    run.train()
    settle(run.prepared)
    unit = run.prepared.engine.units[0]
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
    plain, checked = Run(tmp_path, **fields), Run(tmp_path, verify=True, **fields)
    for run in (plain, checked):
        run.train(3)
    assert_same(plain.values(), checked.values())


def test_late_arrays_have_generations_too(tmp_path: Path) -> None:
    plain, run = Run(tmp_path), Run(tmp_path)
    for each in (plain, run):
        each.train()
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
