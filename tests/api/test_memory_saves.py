"""State in memory is written behind the training, as it was when it was saved; oracle: a run that loads it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.checkpoint import unit_files
from outsize.checkpoint.files import DataWriter
from tests.api.generation_runs import (
    Run,
    assert_holds,
    digest,
    large,  # noqa: F401 (autouse)
)
from tests.comparing import assert_same


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the writing behind the training until it is set."""
    opened = threading.Event()
    plain = DataWriter.__init__

    def make(file: Any, path: Path, nbytes: int, direct: bool = False) -> None:
        assert not direct or opened.wait(60)
        plain(file, path, nbytes, direct)

    monkeypatch.setattr(DataWriter, "__init__", make)
    yield opened
    opened.set()


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as somebody who is about to change a unit has to wait for it to be written."""
    waits = threading.Event()
    plain = unit_files.HeldMemory.__init__

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                waits.set()
            return super().wait(timeout)

    def make(memory: Any, *args: Any) -> None:
        plain(memory, *args)
        memory._over = Watched()

    monkeypatch.setattr(unit_files.HeldMemory, "__init__", make)
    return waits


@pytest.mark.parametrize("tier", ["device", "host"])
def test_training_goes_on_while_memory_is_written_and_the_checkpoint_is_of_its_instant(
    tier: str, tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, params=tier, grads=tier, states=tier).train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    run.train(2)
    assert not saving.done()
    assert not (tmp_path / "ckpt").exists()
    gate.set()
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_without_room_for_copies_what_is_about_to_change_is_waited_for(
    tmp_path: Path, gate: threading.Event, held_back: threading.Event
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host", host_memory="1MiB").train()
    saved = run.values()
    run.prepared.resources.ledger.add("host/test", 1 << 20)
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    released = threading.Event()
    shard = run.prepared.engine.parameters.units[0].shard

    def change() -> None:
        shard.before_change()
        released.set()

    waiting = threading.Thread(target=change)
    waiting.start()
    assert held_back.wait(60) and not released.is_set()
    gate.set()
    waiting.join(60)
    assert released.is_set()
    run.train(2)
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_a_unit_that_changes_while_it_is_written_waits_for_the_piece_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened = threading.Event(), threading.Event()
    run = Run(tmp_path, params="host", grads="host", states="host")
    plain, here = DataWriter.write, threading.get_ident()

    def write(file: Any, offset: int, content: torch.Tensor) -> None:
        if threading.get_ident() != here:
            begun.set()
            assert opened.wait(60)
        plain(file, offset, content)

    monkeypatch.setattr(DataWriter, "write", write)
    monkeypatch.setattr(unit_files, "WRITE_BYTES", 4096)
    run.train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    assert begun.wait(60)
    changing = threading.Thread(target=run.prepared.engine.parameters.units[0].shard.before_change)
    changing.start()
    changing.join(0.05)
    assert changing.is_alive()
    opened.set()
    changing.join(60)
    run.train()
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_weights_on_the_device_that_the_user_changes_after_a_save_are_saved_as_they_were(
    tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, params="device", grads="device", states="host").train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)
    with outsize.gathered(list(run.model.parameters()), modify=True):
        for param in run.model.parameters():
            param.data.add_(1)
    gate.set()
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


@pytest.mark.parametrize("waiter", ["wait", "load", "save"])
def test_who_waits_for_a_checkpoint_and_is_interrupted_changes_nothing_in_it(
    waiter: str, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host").train()
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
    plain, waited = type(saving._promise).wait, []

    def open_and_wait(self: Any) -> None:
        waited.append(self)
        gate.set()
        plain(self)

    monkeypatch.setattr(type(saving._promise), "wait", open_and_wait)
    outsize.load(tmp_path / "first", run.model, run.optimizer)
    assert saving._promise in waited
    run.train()
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_what_cannot_be_copied_is_waited_for(
    tmp_path: Path, gate: threading.Event, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host").train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count)

    def no_memory(content: torch.Tensor) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(unit_files, "_copy_of", no_memory)

    def open_when_waited_for() -> None:
        if held_back.wait(60):
            gate.set()

    opener = threading.Thread(target=open_when_waited_for)
    opener.start()
    run.train(2)
    saving.wait()
    opener.join()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_without_room_weights_on_the_device_are_written_before_save_returns(tmp_path: Path) -> None:
    run = Run(tmp_path, params="device", grads="device", states="device", host_memory="64MiB").train()
    run.prepared.resources.ledger.add("host/test", 64 << 20)
    saved = run.values()
    assert outsize.save(tmp_path / "ckpt", run.model, run.optimizer, run.count).done()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


@pytest.mark.parametrize("waited", [True, False])
def test_a_failure_behind_the_training_is_logged_and_raised_once(
    waited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, params="host", grads="host", states="host").train()
    run.save(tmp_path / "ckpt")
    good = digest(tmp_path / "ckpt")
    run.train()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(unit_files.HeldMemory, "write", full)
        saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer)
        run.train()
        with pytest.raises(OSError, match="No space left"):
            saving.wait() if waited else run.save(tmp_path / "ckpt")
    assert "could not be completed" in caplog.text
    assert digest(tmp_path / "ckpt") == good
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ckpt", "disk"]
    run.save(tmp_path / "ckpt")
    assert digest(tmp_path / "ckpt") != good


@pytest.mark.parametrize("others", ["disk", "host"])
def test_a_model_may_go_while_its_checkpoint_is_written(others: str, tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path, params="host", grads=others, states=others).train()
    saved = run.values()
    saving = outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1)
    run.prepared.resources.close()
    del run
    gate.set()
    saving.wait()
    assert_holds(tmp_path / "ckpt", saved, tmp_path)


def test_a_load_waits_for_a_checkpoint_that_another_model_still_writes(tmp_path: Path, gate: threading.Event) -> None:
    run, other = Run(tmp_path, params="host"), Run(tmp_path, seed=1)
    run.train()
    outsize.save(tmp_path / "ckpt", run.model, run.optimizer, 1)
    threading.Timer(0.05, gate.set).start()
    other.load(tmp_path / "ckpt")
    assert_same(run.values(), other.values())
