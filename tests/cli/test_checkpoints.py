"""`outsize checkpoint`: lists, verifies, exports and prunes what `save` wrote; the oracle is the model that saved."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import outsize
from outsize.checkpoint.manifest import sealed
from outsize.cli import checkpoints, main
from tests.comparing import assert_same
from tests.conftest import take_step

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of a bf16 run, a folder that was never completed, and what a killed save left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / "disk").mkdir()
    outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", compute_dtype=torch.bfloat16)
    for step in (1, 2, 10):
        take_step(model(torch.ones(1, 30, dtype=torch.bfloat16)).sum(), optimizer)
        outsize.save(tmp_path / "ckpts" / f"step-{step}", model, optimizer)
    outsize.export(tmp_path / "expected", model)
    outsize.export(tmp_path / "expected-fp32", model, dtype=torch.float32)
    broken = tmp_path / "ckpts" / "step-11"
    shutil.copytree(tmp_path / "ckpts" / "step-10", broken)
    (broken / "manifest.json").unlink()
    shutil.copytree(broken, tmp_path / "ckpts" / ".step-12.new-0123456789ab")
    return tmp_path / "ckpts"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def test_ls_lists_the_newest_first_and_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-1" / "unit-00000-memory.bin").unlink()
    assert main(["checkpoint", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    left = ".step-12.new-0123456789ab"
    assert [line.split()[0] for line in lines] == ["checkpoint", "step-10", "step-2", "step-1", left, "step-11"]
    assert "1,322" in lines[1]
    assert "complete, AdamW" in lines[1]
    assert "damaged: " in lines[3]
    assert "incomplete: no manifest" in lines[4]
    assert main(["checkpoint", "ls", str(folder / "step-2")]) == 0
    assert main(["checkpoint", "ls", str(folder.parent / "disk")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_verify_finds_a_flipped_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("every checksum is right") == 3
    file = folder / "step-2" / "unit-00000-memory.bin"
    flip(file)
    assert main(["checkpoint", "verify", str(folder / "step-10"), str(folder / "step-2")]) == 1
    caught = capsys.readouterr()
    assert "step-10: " in caught.out
    assert f"{file} is damaged: chunk 0" in caught.err


@pytest.mark.parametrize("action", ["ls", "verify", "prune"])
def test_a_name_that_the_terminal_cannot_show_is_no_damage(
    action: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 10):
        (folder / f"step-{step}").rename(folder / f"läuft-{step}\x1b[2J")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    keep = ["--keep", "1", "--dry-run"] if action == "prune" else []
    assert main(["checkpoint", action, str(folder), *keep]) == 0
    sys.stdout.flush()
    assert rb"l\xe4uft-1\x1b[2J" in shown.getvalue()


def test_what_stops_the_listing_is_not_taken_for_damage(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Mock(write=full))
    assert main(["checkpoint", "verify", str(folder)]) == 2
    assert capsys.readouterr().err == "outsize: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_export_writes_what_the_model_itself_would_have(dtype: str | None, folder: Path) -> None:
    out = folder.parent / "out"
    arguments = ["checkpoint", "export", str(folder / "step-10"), str(out), "--max-shard-size", "2KB"]
    assert main([*arguments, *(["--dtype", dtype] if dtype else [])]) == 0
    expected = safetensors.load_file(folder.parent / f"expected{'-fp32' if dtype else ''}" / "model.safetensors")
    found = {key: value for file in out.glob("*.safetensors") for key, value in safetensors.load_file(file).items()}
    assert (out / "model.safetensors.index.json").exists()
    assert found.keys() == expected.keys()
    assert_same(found, expected)


def test_export_of_a_damaged_checkpoint_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "step-10" / "unit-00000-memory.bin")
    assert main(["checkpoint", "export", str(folder / "step-10"), str(folder.parent / "out")]) == 2
    assert "chunk 0" in capsys.readouterr().err
    assert not (folder.parent / "out").exists()


def test_prune_keeps_the_newest_and_sweeps_what_killed_saves_left(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(entry.name for entry in folder.iterdir())
    assert main(["checkpoint", "prune", str(folder), "--keep", "2", "--dry-run"]) == 0
    assert sorted(entry.name for entry in folder.iterdir()) == names
    assert main(["checkpoint", "prune", str(folder), "--keep", "2"]) == 0
    assert "step-1" in capsys.readouterr().out
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-10", "step-11", "step-2"]
    assert main(["checkpoint", "prune", str(folder), "--keep", "0"]) == 2
    assert main(["checkpoint", "prune", str(folder / "nowhere"), "--keep", "1"]) == 2


def test_prune_says_so_where_there_is_nothing_to_remove(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "prune", str(tmp_path / "empty"), "--keep", "1"]) == 0
    assert main(["checkpoint", "prune", str(folder), "--keep", "9"]) == 0
    none, some = capsys.readouterr().out.splitlines()
    assert none.endswith("empty: nothing to remove; it holds no checkpoints of outsize.save")
    assert some.endswith(": nothing to remove; it holds 3 checkpoints of outsize.save")


def test_prune_counts_only_what_can_be_opened(folder: Path) -> None:
    os.truncate(folder / "step-10" / "model.bin", 10)
    assert main(["checkpoint", "prune", str(folder), "--keep", "1"]) == 0
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-10", "step-11", "step-2"]


@pytest.mark.parametrize("text", ["", "{", "link"])
def test_a_checkpoint_with_a_damaged_manifest_is_seen_and_never_pruned(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = folder / "step-2" / "manifest.json"
    if text == "link":
        manifest.rename(folder.parent / "elsewhere.json")
        manifest.symlink_to(folder.parent / "elsewhere.json")
    else:
        manifest.write_text(text)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    caught = capsys.readouterr()
    assert caught.out.count("every checksum is right") == 2
    assert str(manifest) in caught.err and ("not a regular file" in caught.err) == (text == "link")
    assert main(["checkpoint", "ls", str(folder)]) == 0
    assert "damaged: " in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step-2 "))
    assert main(["checkpoint", "prune", str(folder), "--keep", "1"]) == 0
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-10", "step-11", "step-2"]


def test_ls_shows_a_directory_in_which_nothing_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-1", "step-2", "step-10"):
        shutil.rmtree(folder / name)
    assert main(["checkpoint", "ls", str(folder)]) == 0
    assert "incomplete: no manifest" in capsys.readouterr().out.splitlines()[-1]
    assert main(["checkpoint", "verify", str(folder)]) == 2


def test_ls_prints_nothing_that_a_terminal_obeys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder / "step-10" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["saved_at"], content["optimizer"]["class"] = "\ud800\x1b[2J", "\x1b]0;owned\a"
    manifest.write_text(sealed(json.dumps(content)))
    assert main(["checkpoint", "ls", str(folder)]) == 0
    found = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in found and r"\ud800\x1b[2J" in found


def test_export_does_not_hide_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(folder / "step-10"), str(folder / "step-10")]) == 2
    assert "holds a checkpoint" in capsys.readouterr().err
    assert not (folder / "step-10" / "model.safetensors").exists()


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_checkpoint_that_goes_meanwhile_is_not_damaged(
    action: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run that saves with `keep` removes it, before it is opened or while it is read."""
    plain, went = checkpoints.open_manifest, {folder / "step-2": True, folder / "step-10": False}

    def open_manifest(path: Path) -> Any:
        if went.get(path):
            shutil.rmtree(path)
        opened = plain(path)
        if path in went:
            shutil.rmtree(path)
        return opened

    monkeypatch.setattr(checkpoints, "open_manifest", open_manifest)
    assert main(["checkpoint", action, str(folder)]) == 0
    caught = capsys.readouterr()
    assert "step-1" in caught.out and "damaged" not in caught.out + caught.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_it_without_a_word(unbuffered: str, folder: Path) -> None:
    """As `head` does."""
    command = [sys.executable, "-m", "outsize", "checkpoint", "ls", str(folder)]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("words", [("checkpoint", "ls", "FOLDER"), ("--help",), ("plan", "--help"), ("--version",)])
def test_a_full_device_for_its_words_is_told_in_one_line(words: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "outsize", *(str(folder) if word == "FOLDER" else word for word in words)]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (2, b"outsize: [Errno 28] No space left on device\n")
