"""A folder that appears at once: written beside its place under another name, synced, then renamed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import final

from outsize.checkpoint.files import descriptor, naming, read_manifest
from outsize.checkpoint.manifest import FORMAT, MANIFEST_NAME

HEAD_BYTES = 4096
_OURS = re.compile(r"manifest\.json|(rank-\d{4,}-)?(unit-.*|grads|model)\.bin")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>new|old|gone|export)-[0-9a-f]{12}")

# Note [One instant]
# The new folder is complete and on the disk before the rename. Where a checkpoint is replaced, old and new exchange
# names in one system call, so at every instant the path holds a complete checkpoint, the old or the new. File systems
# that cannot exchange (some network ones) get two renames: between them the old checkpoint lies beside its place under
# a name that `locate` knows. A folder that a killed save left is removed by the next save: it is known by its name and
# by a lock on it that the kernel released with the process. So is one that a killed export left.


@final
class NewFolder:
    """A fresh folder, `path`, that is to be at `target` once it is complete. Either `publish` or `abandon` follows."""

    def __init__(self, target: Path) -> None:
        self.target = target
        make_parents(target.parent)
        self.path, self._lock = make_locked(target.parent, f".{target.name}.new")

    def publish(self) -> Path | None:
        """Bring it to its place; gives the folder that was there, under a hidden name, for the caller to remove.

        Raises `FileExistsError` where something else has come to be there meanwhile.
        """
        sync(self.path)
        check_replaceable(self.target)
        replaced = _publish(self.path, self.target)
        try:
            sync(self.target.parent)
        except OSError:
            # The names as they were before: the new one may not survive a loss of power.
            if replaced == self.path:
                _exchange(self.path, self.target)
            else:
                os.rename(self.target, self.path)
                if replaced is not None:
                    os.rename(replaced, self.target)
            raise
        os.close(self._lock)
        self._lock = -1
        return replaced

    def abandon(self) -> None:
        """Leave nothing of it, unless it is published."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def make_parents(folder: Path) -> None:
    """Create a folder with its parents, and bring their names to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in (*reversed(missing), folder):  # pathlib's own way recurses once a folder
        each.mkdir(exist_ok=True)  # a file of its name is told by that name
    for each in missing:
        with suppress(OSError):  # a parent that cannot be opened is not ours
            sync(each.parent)


def make_locked(parent: Path, name: str) -> tuple[Path, int]:
    """A new folder, whose name begins so, and the lock on it. What killed processes left there is removed."""
    remove_leftovers(parent)
    while True:
        path = parent / f"{name}-{secrets.token_hex(6)}"
        try:
            path.mkdir()
            lock = locked(path)
        except BaseException:
            with suppress(OSError):
                path.rmdir()
            raise
        if lock >= 0:
            return path, lock


def locked(folder: Path) -> int:
    """The folder, open and locked until it is closed; -1 where somebody else has locked it, or removed it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    held = False
    try:
        held = _lock(lock) and folder.exists()
    finally:
        if not held:
            os.close(lock)
    return lock if held else -1


def _lock(fd: int) -> bool:
    """Lock a folder that nobody else has locked; whether it is not being swept."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: its leftovers are the user's to remove
        pass
    return True


def write_text(path: Path, text: str) -> None:
    """Write a file and bring it to the disk."""
    with naming(path, "writing"), open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names as far as its file system can, to the disk."""
    with descriptor(path) as fd:
        try:
            with naming(path, "syncing"):
                os.fsync(fd)
        except OSError as error:
            # Some file systems (shared folders of virtual machines, older network ones) sync no folders.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where what is written to `path` goes. Raises `ValueError` for one that begins with `~`, which a shell expands and
    nobody here does."""
    given = os.fspath(path)
    if isinstance(given, str) and given.startswith("~"):
        raise ValueError(
            f"{given!r} would be a folder called {given.split('/')[0]!r} in the current directory; pass "
            f"os.path.expanduser({given!r}), or './{given}' if that is meant"
        )
    return Path(os.path.realpath(path))


def check_not_current(target: Path) -> None:
    """Raise `ValueError` where the folder that is going to be replaced is the current directory: this process, and the
    shell that it was started from, would be left in the old one, which is removed."""
    if target.exists() and os.path.samefile(target, os.curdir):
        raise ValueError(f"{target} is the current directory, which cannot be replaced; name a folder in it")


def check_replaceable(target: Path) -> None:
    """Raise `FileExistsError` where a save would destroy anything but a checkpoint of ours, and `ValueError` for a
    hidden name."""
    if target.name.startswith("."):
        raise ValueError(f"{str(target)!r} begins with a dot, as what a killed save leaves does; choose another name")
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(errno.EEXIST, "a file is in the way of the checkpoint; choose another path", str(target))
    names, foreign = os.listdir(target), foreign_in(target)
    if names and not head_of(target / MANIFEST_NAME):
        raise FileExistsError(
            errno.EEXIST,
            "the directory is not an outsize checkpoint and is not overwritten; choose another",
            str(target),
        )
    if foreign:
        raise FileExistsError(
            errno.EEXIST,
            f"the checkpoint's directory also holds {', '.join(foreign[:10])}, which would be lost; move it away",
            str(target),
        )


def head_of(manifest: Path) -> str:
    """The first lines of a manifest of ours; "" of any other file."""
    try:
        head = read_manifest(manifest, HEAD_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return head if FORMAT in head else ""


def foreign_in(checkpoint: Path) -> list[str]:
    """The names of files that no save makes."""
    return sorted(name for name in os.listdir(checkpoint) if not _OURS.fullmatch(name))


def locate(path: Path) -> Path:
    """The folder to load: `path`, or what was there if a save was killed between its two renames."""
    if path.exists():
        return path
    asides = sorted(path.parent.glob(f".{glob.escape(path.name)}.old-*"))
    return asides[-1] if asides else path


def is_stranded(entry: Path) -> bool:
    """Whether this is a checkpoint that a save, killed between its two renames, left without its name."""
    found = _LEFTOVER.fullmatch(entry.name)
    return found is not None and found["kind"] == "old" and not (entry.parent / found["name"]).exists()


def _publish(fresh: Path, target: Path) -> Path | None:
    if not target.exists() or not any(target.iterdir()):
        os.rename(fresh, target)
        return None
    if _exchange(fresh, target):
        return fresh
    aside = target.parent / f".{target.name}.old-{secrets.token_hex(6)}"
    os.rename(target, aside)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(aside, target)
        raise
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves and exports left in a folder."""
    for entry in parent.glob(".*-*"):
        found = _LEFTOVER.fullmatch(entry.name)
        if found is None or entry.is_symlink() or is_stranded(entry):  # that is the only one: see Note [One instant]
            continue
        with suppress(OSError), descriptor(entry, os.O_DIRECTORY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)


def is_being_written(folder: Path) -> bool:
    """Whether a save that goes on has locked it."""
    with suppress(OSError), descriptor(folder, os.O_DIRECTORY) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def set_aside(checkpoint: Path) -> Path:
    """Take a checkpoint out of sight in one rename; gives its hidden name, under which it may be removed in peace."""
    hidden = checkpoint.parent / f".{checkpoint.name}.gone-{secrets.token_hex(6)}"
    os.rename(checkpoint, hidden)
    with suppress(OSError):  # then it may be there again after a loss of power
        sync(checkpoint.parent)
    return hidden
