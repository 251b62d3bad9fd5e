"""Saves that fail, and saves that get in each other's way; the oracle is a run that never saved."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.checkpoint import background, directory, folder, writer
from outsize.checkpoint.files import DataWriter, PlannedFile
from outsize.checkpoint.manifest import sealed
from outsize.checkpoint.reader import Checkpoint
from outsize.move import disk
from outsize.move.memory import PAGE_BYTES
from tests.api.generation_runs import Run
from tests.comparing import assert_same
from tests.conftest import no_file_above
from tests.scripts import run_script


def run_of(tmp: Path, tier: str = "disk", seed: int = 0) -> Run:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
    return Run(tmp, seed, layers, params=tier, grads=tier, states=tier)


@pytest.fixture(autouse=True, params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "large":
        monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)
    return str(request.param)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "somewhere")


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the arrays in memory": lambda patch: patch.setattr(PlannedFile, "write", full),
    "the manifest": lambda patch: patch.setattr(writer, "write_text", full),
    "the rename": lambda patch: patch.setattr(folder.os, "rename", full),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_save_that_fails_leaves_the_run_as_if_it_had_never_been_asked(
    failure: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run = run_of(tmp_path, tier).train(), run_of(tmp_path, tier).train()
    with monkeypatch.context() as patch:
        FAILURES[failure](patch)
        with pytest.raises(OSError, match="No space left"):
            run.save(tmp_path / "ckpt")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk"]
    assert not any(file.frozen for file in run.files)
    for each in (plain, run):
        each.train()
    run.save(tmp_path / "ckpt")  # neither hangs nor raises what is over
    run.load(tmp_path / "ckpt")
    for each in (plain, run):
        each.train()
    assert_same(plain.values(), run.values())


def test_a_full_disk_after_the_checkpoint_is_complete_is_the_next_updates_to_raise(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, run = run_of(tmp_path).train(), run_of(tmp_path).train()
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "posix_fallocate", full)
        run.save(tmp_path / "ckpt")
    assert ("no room for the next update" in caplog.text) == (size == "large")
    for each in (plain, run):
        each.train()  # there is room again
    assert_same(plain.values(), run.values())
    run.save(tmp_path / "ckpt")
    if size == "large":
        with monkeypatch.context() as patch:
            for file in run.files:
                file._next.let_go()
                file._next = None
            patch.setattr(disk.os, "posix_fallocate", full)
            with pytest.raises(OSError, match="No space left"):
                run.train(2)
    other = run_of(tmp_path, seed=1).load(tmp_path / "ckpt")
    assert_same(plain.values(), other.values())


@pytest.mark.parametrize("size", ["large"], indirect=True)  # small state is read back and compared instead
def test_what_did_not_reach_the_drive_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")

    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output error"):
            run.save(tmp_path / "step-2")
    with pytest.raises(RuntimeError, match="no longer whole"):
        run.train()
    other = run_of(tmp_path, seed=1).load(tmp_path)
    assert other.count == 1


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_after_the_rename_leaves_the_earlier_checkpoint_as_it_was(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    run = run_of(tmp_path).train().save(tmp_path / "ckpt")
    saved, plain = run.values(), folder.sync
    run.train()

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        plain(path)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "sync", sync)
        for name in ("ckpt", "other"):
            with pytest.raises(OSError, match="Input/output error"):
                run.save(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ckpt", "disk"]
    run.train()
    run.load(tmp_path / "ckpt")
    assert_same(saved, run.values())


def test_what_appears_at_the_target_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path).train()
    plain = writer.write_text

    def write_text(path: Path, text: str) -> None:
        (tmp_path / "ckpt").mkdir()
        (tmp_path / "ckpt" / "thesis.tex").write_text("precious")
        plain(path, text)

    monkeypatch.setattr(writer, "write_text", write_text)
    with pytest.raises(FileExistsError, match="not an outsize checkpoint"):
        run.save(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / "thesis.tex").read_text() == "precious"


def test_two_runs_may_save_to_the_same_names(tmp_path: Path) -> None:
    plain, one, two = run_of(tmp_path), run_of(tmp_path), run_of(tmp_path, seed=1)
    for _ in range(4):
        for each in (plain, one, two):
            each.train()
        one.save(tmp_path / "ckpt")
        two.save(tmp_path / "ckpt")
    for each in (plain, one):
        each.train()
    assert_same(plain.values(), one.values())


def test_a_path_of_more_folders_than_python_recurses_is_saved_to(tmp_path: Path, size: str) -> None:
    run, deep = run_of(tmp_path), tmp_path.joinpath(*["a"] * sys.getrecursionlimit())
    run.train(1)
    try:
        if size == "small":
            run.save(deep / "checkpoint")
            run.load(deep / "checkpoint")
        else:
            outsize.export(deep / "weights", run.model)
    finally:
        for child in deep.iterdir() if deep.exists() else ():
            shutil.rmtree(child)
        for folder in (deep, *deep.parents):
            if folder == tmp_path:
                break
            if folder.exists():
                folder.rmdir()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (tmp_path / "runs").write_text("notes")
    for write in (run.save, lambda path: outsize.export(path, run.model)):
        with pytest.raises(FileExistsError) as caught:
            write(tmp_path / "runs" / "ckpt")
        assert caught.value.filename == str(tmp_path / "runs")


def test_a_reader_keeps_what_it_opened_when_the_checkpoint_goes(tmp_path: Path) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")
    files = [open(file, "rb") for file in sorted((tmp_path / "step-1").iterdir())]  # noqa: SIM115
    before = [file.read() for file in files]
    for step in (2, 3, 4):
        run.save(tmp_path / f"step-{step}", keep=1)
        run.train()
    for file, content in zip(files, before, strict=True):
        file.seek(0)
        assert file.read() == content
        file.close()


def test_keep_leaves_links_and_whatever_else_lies_in_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path).train()
    ckpts = tmp_path / "ckpts"
    for step in (1, 2, 3):
        run.save(ckpts / f"step-{step}")
    shutil.move(ckpts / "step-1", tmp_path / "best")
    (ckpts / "step-1").symlink_to(tmp_path / "best")
    (ckpts / "step-2" / "eval.json").write_text("precious")
    with caplog.at_level(logging.WARNING, "outsize"):
        run.save(ckpts / "step-4", keep=1)
    assert sorted(each.name for each in ckpts.iterdir()) == ["step-1", "step-2", "step-4"]
    assert "it also holds eval.json" in caplog.text
    run.load(ckpts / "step-1")


def test_a_clock_that_was_set_back_does_not_make_the_newest_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")

    class Back(directory.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2001, 1, 1, tzinfo=tz)

    monkeypatch.setattr(directory, "datetime", Back)
    run.train().save(tmp_path / "step-2", keep=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "step-2"]


@pytest.mark.parametrize("text", ["zzz", "9999-12-31T23:59:59.999999+00:00", "2026-01-01T00:00:00"])
def test_a_neighbour_of_an_impossible_time_is_the_oldest(text: str, tmp_path: Path) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")
    manifest = tmp_path / "step-1" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["saved_at"] = text
    manifest.write_text(sealed(json.dumps(content)))
    run.train().save(tmp_path / "step-2", keep=2)
    assert outsize.load(tmp_path, run.model, run.optimizer) == 2
    run.save(tmp_path / "step-3", keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "step-2", "step-3"]


def test_keep_counts_only_what_can_be_opened(tmp_path: Path) -> None:
    run = run_of(tmp_path).train()
    for step in (1, 2, 3, 4):
        run.save(tmp_path / f"step-{step}")
    os.truncate(tmp_path / "step-4" / "model.bin", 10)
    (tmp_path / "step-1" / "manifest.json").write_text("{")
    run.save(tmp_path / "step-5", keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "step-1", "step-3", "step-4", "step-5"]


@pytest.mark.parametrize("name", [".step-1", ".zz.new-0123456789ab"])
def test_a_name_that_begins_with_a_dot_is_refused(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path).train()
    with pytest.raises(ValueError, match="begins with a dot"):
        run.save(tmp_path / name)
    with pytest.raises(ValueError, match="begins with a dot"):
        outsize.export(tmp_path / name, run.model, format="dcp")
    assert [each.name for each in tmp_path.iterdir()] == ["disk"]


@pytest.mark.parametrize("where", ["mkdir", "flock", "fsync"])
def test_an_interrupted_save_leaves_nothing_open_and_nothing_behind(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    made = Path.mkdir

    def interrupted_after(path: Path, *args: Any, **fields: Any) -> None:
        made(path, *args, **fields)
        if ".new-" in path.name:
            raise KeyboardInterrupt

    place = {"mkdir": (Path, "mkdir"), "flock": (folder.fcntl, "flock"), "fsync": (os, "fsync")}
    with monkeypatch.context() as patch:
        patch.setattr(*place[where], interrupted_after if where == "mkdir" else interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save(tmp_path / "step-2")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "step-1"]
    assert len(os.listdir("/proc/self/fd")) == before
    run.save(tmp_path / "step-2")


def test_a_runs_own_directories_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path).train()
    own = next((tmp_path / "disk").iterdir())
    for place in (own, own / "ckpt", tmp_path / "outsize-run-1"):
        with pytest.raises(ValueError, match="keeps a run's own files"):
            run.save(place)


@pytest.mark.parametrize("size", ["large"], indirect=True)  # small state is not written behind the training
def test_a_forked_child_does_not_wait_for_what_its_parent_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "host").train().save(tmp_path / "step-1")
    gate_in, gate_out = os.pipe()
    plain, here = DataWriter.write, threading.get_ident()

    def write(file: Any, offset: int, content: torch.Tensor) -> None:
        if threading.get_ident() != here:
            os.read(gate_in, 1)
            os.write(gate_out, b"x")
        plain(file, offset, content)

    monkeypatch.setattr(DataWriter, "write", write)
    saving = outsize.save(tmp_path / "step-2", run.model, run.optimizer, run.count)
    child = os.fork()
    if not child:
        signal.alarm(30)
        background.Saving.settle_at(tmp_path / "step-2")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.write(gate_out, b"x")
    saving.wait()
    os.close(gate_in)
    os.close(gate_out)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_forked_child_saves_and_loads_nothing(tier: str, tmp_path: Path) -> None:
    """Its parent does not know what it links or freezes, and would write over it. Right after a step an update may be
    on its way, which nobody brings in the child: that is no reason to wait for ever."""
    run = run_of(tmp_path, tier).train().save(tmp_path / "good").train()
    child = os.fork()
    if not child:
        signal.alarm(30)
        said = 0
        for action in (run.save, run.load, lambda path: outsize.export(path, run.model), lambda _: run.values()):
            try:
                action(tmp_path / "good")
            except RuntimeError as error:
                said += "forked child" in str(error)
        os._exit(said)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status >= 3 and sorted(path.name for path in tmp_path.glob("*")) == ["disk", "good"]
    run.train()
    run.load(tmp_path / "good")


AT_EXIT = """
import atexit, pathlib, sys, torch, outsize
from outsize.checkpoint import writer
writer.AT_ONCE_BYTES = -1
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
tiers = dict.fromkeys(("params", "grads", "states"), "host")
outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", **tiers)
atexit.register(lambda: outsize.save(sys.argv[1], model, optimizer, 7))
"""

AFTER_THE_MAIN_THREAD = """
import sys, threading, torch, outsize
from pathlib import Path
folder = Path(sys.argv[1])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
tiers = dict.fromkeys(("params", "states"), "disk")
outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", disk=folder / "disk", **tiers)
def work():
    threading.main_thread().join()
    outsize.save(folder / "ckpt", model, optimizer).wait()
    outsize.load(folder / "ckpt", model, optimizer)
    outsize.export(folder / "weights", model)
threading.Thread(target=work).start()
"""


AS_THE_MAIN_THREAD_ENDS = """
import os, sys, threading, torch, outsize
from concurrent.futures import thread
model = torch.nn.Linear(1024, 6000)  # six pieces of 4 MiB
outsize.prepare(model, None, device="cpu", host_memory="64MiB")
write, begun, here = os.pwrite, threading.Event(), threading.Event()
def slow(file, content, at):
    begun.set()
    if threading.current_thread() is export:
        here.set()
    elif at:  # a thread of the pool goes on when the export does its work itself, or fails
        here.wait()
    while not thread._shutdown:
        os.sched_yield()
    return write(file, content, at)
def failed(failure):
    here.set()
    threading.__excepthook__(failure)
os.pwrite, threading.excepthook = slow, failed
export = threading.Thread(target=outsize.export, args=(sys.argv[1], model))
export.start()
begun.wait()
"""


def test_an_export_goes_on_as_the_main_thread_ends(tmp_path: Path) -> None:
    status, _, errors = run_script(AS_THE_MAIN_THREAD_ENDS, tmp_path / "weights")
    assert status == 0 and not errors
    assert (tmp_path / "weights" / "model.safetensors").stat().st_size > 1024 * 6000 * 4


def test_a_thread_that_outlives_the_main_one_saves_loads_and_exports(tmp_path: Path) -> None:
    status, _, errors = run_script(AFTER_THE_MAIN_THREAD, tmp_path)
    assert status == 0 and not errors
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_a_save_while_the_interpreter_ends_is_complete(tmp_path: Path) -> None:
    status, _, errors = run_script(AT_EXIT, tmp_path / "ckpt")
    assert status == 0, errors
    assert (tmp_path / "ckpt" / "manifest.json").is_file()
    run = run_of(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "disk"]
    with pytest.raises(ValueError, match="another model"):
        run.load(tmp_path / "ckpt")


def test_a_full_disk_of_the_run_is_named_by_a_save(tmp_path: Path) -> None:
    run = run_of(tmp_path, "disk")
    with no_file_above(1), pytest.raises(OSError, match=r"File too large.*disk/.*/"):
        run.save(tmp_path / "ckpt")


def test_a_write_after_the_end_reaches_no_other_file(tmp_path: Path) -> None:
    """As of a thread that an interrupt has left."""
    with DataWriter(tmp_path / "data", PAGE_BYTES) as file:
        pass
    with open(tmp_path / "other", "wb") as other, pytest.raises(OSError, match="Bad file descriptor"):
        file.write(0, torch.ones(PAGE_BYTES, dtype=torch.uint8))
    assert not (tmp_path / "other").stat().st_size and other.closed


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_file_has_the_mode_that_the_umask_says(tier: str, tmp_path: Path) -> None:
    """Those on disk were made under another one."""
    run = run_of(tmp_path, tier)
    before = os.umask(0o027)
    try:
        outsize.save(tmp_path / "ckpt", run.model, run.optimizer, {"x": torch.ones(3)}).wait()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "ckpt").iterdir()}
    assert "model.bin" in modes and set(modes.values()) == {0o640}


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_what_cannot_be_removed_is_no_failure_of_the_save(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")
    plain_rename, plain_sync = os.rename, folder.sync

    def rename(source: Any, target: Any) -> None:
        if call == "rename" and ".gone-" in str(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        plain_rename(source, target)

    def sync(path: Path) -> None:
        if call == "fsync" and path == tmp_path and list(tmp_path.glob(".*.gone-*")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        plain_sync(path)

    monkeypatch.setattr(folder.os, "rename", rename)
    monkeypatch.setattr(folder, "sync", sync)
    run.train().save(tmp_path / "step-2", keep=1)
    monkeypatch.undo()
    left = {"step-1"} if call == "rename" else set()
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "step-2", *left}
    assert ("could not be removed" in caplog.text) == (call == "rename")
    expected = run.values()
    run.train()
    run.load(tmp_path / "step-2")
    assert_same(expected, run.values())


def test_a_manifest_that_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "ckpts" / "step-1").save(tmp_path / "ckpts" / "step-2")
    manifest = tmp_path / "ckpts" / "step-2" / "manifest.json"
    manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="manifest.json is not a regular file"):
        run.load(tmp_path / "ckpts" / "step-2")
    manifest.unlink()
    os.mkfifo(manifest)
    outsize.load(tmp_path / "ckpts", run.model, run.optimizer)  # the other one, and at once


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = run_of(tmp_path), run_of(tmp_path, seed=1)
    run.train().save(tmp_path / "ckpt")
    saved, plain = run.values(), Checkpoint.verify

    def verify(checkpoint: Checkpoint, *given: Any, **fields: Any) -> None:
        plain(checkpoint, *given, **fields)
        run.train().save(tmp_path / "ckpt")
        run.train()  # whose updates may take the files of the one that went

    monkeypatch.setattr(Checkpoint, "verify", verify)
    other.load(tmp_path / "ckpt")
    assert_same(saved, other.values())


def test_a_write_protected_checkpoint_stays_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path).train().save(tmp_path / "step-1")
    plain = os.access
    # Whoever runs the tests may be root, who may write anywhere.
    monkeypatch.setattr(directory.os, "access", lambda path, mode: Path(path).name != "step-1" and plain(path, mode))
    for step in (2, 3):
        run.save(tmp_path / f"step-{step}", keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "step-1", "step-3"}
    assert "step-1 is not removed: it is write-protected" in caplog.text


def test_a_folder_that_is_still_there_when_it_should_be_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory.shutil, "rmtree", lambda folder, ignore_errors: None)
    (tmp_path / ".step-1.gone-0123456789ab").mkdir()
    directory.remove_all([tmp_path / ".step-1.gone-0123456789ab", tmp_path / "nowhere"])
    assert caplog.text.count("could not be removed") == 1
    assert ".step-1.gone-0123456789ab is superfluous" in caplog.text


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_folders_is_written_to(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = run_of(tmp_path), os.fsync
    run.train()

    def of_files_alone(fd: Any) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        plain(fd)

    monkeypatch.setattr(folder.os, "fsync", of_files_alone)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            run.save(tmp_path / "ckpt")
        return
    run.save(tmp_path / "ckpt")
    outsize.export(tmp_path / "weights", run.model)
    run.load(tmp_path / "ckpt")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_that_cannot_be_synced_is_an_error(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").touch()
    monkeypatch.setattr(folder.os, "fsync", fsync)
    folder.sync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)):
        folder.sync(tmp_path / "file")


def test_a_folder_that_another_run_has_swept_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system whose locks hold for each machine alone."""
    run, plain = run_of(tmp_path), PlannedFile.write
    run.train().save(tmp_path / "step-1")
    values = run.values()

    def write(file: Any, path: Path, files: Any) -> None:
        plain(file, path, files)
        for each in path.iterdir():
            each.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(PlannedFile, "write", write)
        with pytest.raises(FileNotFoundError, match="was removed while the checkpoint was written"):
            run.save(tmp_path / "step-2", keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "step-1"}
    run.train()
    run.load(tmp_path / "step-1")
    assert_same(values, run.values())


@pytest.mark.parametrize("size", ["large"], indirect=True)
def test_what_ends_before_it_writes_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "host").train()
    with monkeypatch.context() as patch:
        patch.setattr(writer.UnfinishedCheckpoint, "finish", full)
        with pytest.raises(OSError, match="No space left"):
            run.save(tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    run.train()  # nothing is held any more
    run.save(tmp_path / "ckpt")
