"""Small files of a run, replaced as a whole: what is there stays until its successor is on the drive."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Raises `OSError`, on a full disk for one, with the file as it was. The name that it is first written under is
    random and new: a link that somebody has left in the folder is not followed."""
    fresh = path.with_name(f".{path.name}.new-{secrets.token_hex(6)}")
    try:
        with open(fresh, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
