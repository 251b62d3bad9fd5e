"""The checkpoints of one directory: which are complete, which is the newest, which are not kept any longer."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from outsize.checkpoint.folder import set_aside
from outsize.checkpoint.manifest import FORMAT, MANIFEST_NAME
from outsize.move.generations import Generations
from outsize.plan.sizes import format_bytes

_HEAD_BYTES = 4096
_SAVED_AT = re.compile(r'"saved_at": "([^"]+)"')
_SERIES = re.compile(r"(.*?)\d+")


@dataclass(frozen=True)
class Shelved:
    """One checkpoint folder that has a manifest. `saved_at` orders by age."""

    path: Path
    saved_at: str


def checkpoints_in(parent: Path) -> list[Shelved]:
    """The folders with a manifest of ours, newest first. Reads their first lines only."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        saved_at = _saved_at(entry / MANIFEST_NAME) if not entry.name.startswith(".") else None
        if saved_at is not None:
            found.append(Shelved(entry, saved_at))
    return sorted(found, key=lambda each: (each.saved_at, each.path.name), reverse=True)


def incomplete_in(parent: Path) -> list[Path]:
    """Folders that look like checkpoints and have no manifest: a save that never ended, or a copy that was cut off."""
    return sorted(
        entry
        for entry in (parent.iterdir() if parent.is_dir() else ())
        if entry.is_dir() and not (entry / MANIFEST_NAME).exists() and any(entry.glob("unit-*.bin"))
    )


def no_longer_kept(target: Path, keep: int | None) -> list[Path]:
    """What goes once `target` is complete: the oldest of its series beyond `keep`, itself included.

    A series are the folders of one directory whose names differ in their last digits only: step-100, step-200.
    """
    series = _SERIES.fullmatch(target.name)
    if keep is None:
        return []
    if series is None:
        raise ValueError(
            f"keep={keep} needs a name that ends in a number, such as 'step-100'; {target.name!r} does not, and only "
            f"checkpoints of one series are removed"
        )
    same = [each for each in checkpoints_in(target.parent) if _stem(each.path.name) == series[1]]
    return [each.path for each in same if each.path != target][keep - 1 :]


def _stem(name: str) -> str | None:
    found = _SERIES.fullmatch(name)
    return found[1] if found else None


def _saved_at(manifest: Path) -> str | None:
    """When it was saved, out of the first lines of a manifest; None if it is not one of ours."""
    try:
        with open(manifest, encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    found = _SAVED_AT.search(head)
    return found[1] if found is not None and FORMAT in head else None


@final
class Discarded:
    """Checkpoints that nobody needs any more. Their files may serve as next generations before they are removed."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._spare: dict[tuple[int, int], list[Path]] = {}  # by (device, length)
        for folder in self._folders:
            for file in folder.glob("unit-*.bin"):
                status = file.lstat()
                if status.st_nlink == 1 and not file.is_symlink():
                    self._spare.setdefault((status.st_dev, status.st_size), []).append(file)

    def take(self, files: Generations) -> Path | None:
        """A file that may become the next generation of `files`."""
        single = files.now.file.single
        if single is None:
            return None
        spare = self._spare.get((os.fstat(single).st_dev, files.nbytes))
        return spare.pop() if spare else None

    def remove(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def set_all_aside(checkpoints: Iterable[Path]) -> list[Path]:
    """Hide checkpoints that go; one that somebody else has just removed is passed over."""
    hidden = []
    for checkpoint in checkpoints:
        with suppress(FileNotFoundError):
            hidden.append(set_aside(checkpoint))
    return hidden


def check_room(files: Iterable[Generations], freed: Iterable[Path], directories: Iterable[Path]) -> None:
    """Raise `OSError` (ENOSPC) unless the next generations have room, with what the removal of `freed` gives back."""
    needed = sum(each.reserved_bytes for each in files if not each.has_next)
    returned = sum(file.lstat().st_blocks * 512 for folder in freed for file in folder.glob("unit-*.bin"))
    free: dict[int, int] = {}
    for directory in directories:
        status = os.statvfs(directory)
        free[directory.stat().st_dev] = status.f_bavail * status.f_frsize
    room = sum(free.values())
    if free and needed > room + returned:
        raise OSError(
            errno.ENOSPC,
            f"no room to train on after this checkpoint: the next update writes {format_bytes(needed)} beside the "
            f"files that the checkpoint holds, and {format_bytes(room + returned)} are free; remove older checkpoints "
            f"(keep=), or save to another file system",
            str(next(iter(directories))),
        )
