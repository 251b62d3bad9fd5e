"""The checkpoints of one directory: which are complete, which is the newest, which are not kept any longer."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from outsize.checkpoint.files import open_manifest
from outsize.checkpoint.folder import foreign_in, head_of, is_being_written, is_stranded, set_aside
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.planning.sizes import format_bytes

_SAVED_AT = re.compile(r'"saved_at": "([^"]+)"')
_SERIES = re.compile(r"(.*?)\d+")
_NO_TIME = datetime.min.replace(tzinfo=timezone.utc)
UNREADABLE = "there is no permission to read it"
_LAST_YEAR = 8999
"""A later time is of no clock, and what is saved next could not be newer."""


logger = logging.getLogger("outsize")


def checkpoints_in(parent: Path) -> list[Path]:
    """The folders with a manifest of ours, newest first. Reads their first lines only. Links are passed over."""
    return [path for _, _, path in _dated_in(parent)]


def _dated_in(parent: Path) -> list[tuple[datetime, str, Path]]:
    """(when it was saved, its name, the checkpoint), newest first."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        saved_at = _saved_at(entry / MANIFEST_NAME) if not _is_hidden(entry) else None
        if saved_at is not None:
            found.append((saved_at, entry.name, entry))
    return sorted(found, reverse=True)


def lookalikes_in(parent: Path) -> dict[Path, str]:
    """Folders with data of a checkpoint and no manifest that begins as one, each with the reason. Nothing removes them.

    Those are saves that never ended, copies that were cut off, damage, or not ours to read: nobody knows how old they
    are.
    """
    found = {}
    for entry in sorted(parent.iterdir() if parent.is_dir() else ()):
        manifest = entry / MANIFEST_NAME
        if not entry.is_dir():
            continue
        if not os.access(entry, os.R_OK | os.X_OK):
            if not _is_hidden(entry) and entry.name != "lost+found":  # which a file system has at its root
                found[entry] = UNREADABLE
            continue
        if not data_of(entry) or _saved_at(manifest) is not None:
            continue
        if os.path.lexists(manifest) and not _is_hidden(entry):
            found[entry] = "its manifest is damaged" if os.access(manifest, os.R_OK) else UNREADABLE
        elif not os.path.lexists(manifest) and not is_being_written(entry):
            found[entry] = "it has no manifest, so it was never completed"
    return {entry: why for entry, why in found.items() if entry.exists()}  # another run may have renamed it just now


def is_checkpoint(folder: Path) -> bool:
    """Whether it holds a manifest of ours, be it damaged."""
    manifest = folder / MANIFEST_NAME
    return _saved_at(manifest) is not None or bool(data_of(folder) and os.path.lexists(manifest))


def data_of(folder: Path) -> list[Path]:
    """The files of units."""
    with suppress(FileNotFoundError):  # another run has just renamed it
        return list(folder.glob("unit-*.bin"))
    return []


def was_removed(checkpoint: Path, error: Exception) -> bool:
    """Whether it could not be read because another run has just removed it (`keep=`): that is no damage."""
    return isinstance(error, FileNotFoundError) and not os.path.lexists(checkpoint)


def _is_hidden(entry: Path) -> bool:
    return entry.is_symlink() or (entry.name.startswith(".") and not is_stranded(entry))


def _saved_at(manifest: Path) -> datetime | None:
    """When it was saved, out of the first lines of a manifest; None if they are not those of one of ours. A time that
    cannot be makes it the oldest."""
    found = _SAVED_AT.search(head_of(manifest))
    if found is None:
        return None
    try:
        time = datetime.fromisoformat(found[1])
    except ValueError:
        return _NO_TIME
    return time if time.tzinfo is not None and time.year <= _LAST_YEAR else _NO_TIME


def next_saved_at(parent: Path) -> str:
    """The time, or just after the newest checkpoint of the directory where the clock was set back."""
    now = datetime.now(timezone.utc)
    for newest, _, _ in _dated_in(parent)[:1]:
        now = max(now, newest + timedelta(microseconds=1))
    return now.astimezone(timezone.utc).isoformat(timespec="microseconds")


def check_in_series(target: Path, keep: int) -> None:
    """Raise `ValueError` for a name that is of no series."""
    if _stem(target) is None:
        raise ValueError(
            f"keep={keep} needs a name that ends in a number, such as 'step-100'; {target.name!r} does not, and only "
            f"checkpoints of one series are removed"
        )


def no_longer_kept(target: Path, keep: int) -> list[Path]:
    """What goes once `target` is complete: the oldest of its series beyond `keep` whole ones, itself included.

    A series are the folders of one directory whose names differ in their last digits only: step-100, step-200.
    """
    others = [path for path in checkpoints_in(target.parent) if path != target and _stem(path) == _stem(target)]
    return without_foreign(beyond(others, keep - 1))


def _stem(path: Path) -> str | None:
    found = _SERIES.fullmatch(path.name)
    return None if found is None else found[1]


def beyond(checkpoints: Iterable[Path], keep: int) -> list[Path]:
    """Those that are older than the `keep` newest that can be opened: one that is damaged takes the place of none.

    `checkpoints` are newest first.
    """
    older = iter(checkpoints)
    while keep and (path := next(older, None)) is not None:
        with suppress(ValueError, OSError):
            open_manifest(path)[1].close()
            keep -= 1
    return list(older)


def without_foreign(checkpoints: Iterable[Path]) -> list[Path]:
    """Those that hold nothing but what is ours and are not write-protected; the others are not removed, and said so.

    Hidden, a folder that cannot be removed would take its space for good, and nobody would see it.
    """
    found = []
    for path in checkpoints:
        try:
            foreign = foreign_in(path)
        except FileNotFoundError:  # another run has just removed it
            continue
        if foreign:
            logger.warning("%s is not removed: it also holds %s", path, ", ".join(foreign[:10]))
        elif not os.access(path, os.W_OK | os.X_OK):
            logger.warning("%s is not removed: it is write-protected", path)
        else:
            found.append(path)
    return found


def set_all_aside(checkpoints: Iterable[Path]) -> list[Path]:
    """Hide checkpoints that go; one that somebody else has just removed is passed over. What cannot be hidden stays,
    with a warning: the checkpoint that makes it superfluous is complete."""
    hidden = []
    for checkpoint in checkpoints:
        try:
            hidden.append(set_aside(checkpoint))
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s is superfluous and could not be removed: %s", checkpoint, str(error))
    return hidden


def remove_all(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.lexists(folder):
            logger.warning("%s is superfluous and could not be removed; remove it by hand", folder)


def check_room(directory: Path, needed: int, going: Iterable[Path]) -> int:
    """Raise `OSError` (ENOSPC) unless the file system of the directory has room for the bytes that the checkpoint and
    the next update write there; gives the bytes that are left. The checkpoints `going` are removed in between."""
    free = os.statvfs(directory)
    room = free.f_bavail * free.f_frsize
    for file in (file for folder in going for file in data_of(folder)):
        with suppress(FileNotFoundError):
            status = file.lstat()
            room += status.st_blocks * 512 if status.st_nlink == 1 else 0
    if needed > room:
        raise OSError(
            errno.ENOSPC,
            f"no room for this checkpoint and the next update: {format_bytes(needed)} are written on this file system, "
            f"and {format_bytes(room)} are free; remove older checkpoints (keep=), or save to another file system",
            str(directory),
        )
    return room - needed
