"""The terminal of a command, which may close before the command ends."""

import os
import sys
from collections.abc import Iterable


def open_closed() -> None:
    """Streams that the caller has closed go nowhere: a file that opens next would get the number of one, and what is
    printed without Python's knowing would go there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="backslashreplace"))  # noqa: SIM115


def terminals() -> list[int]:
    """Where words go to a terminal. Ask early: one that has closed is none any more."""
    return [number for number in (1, 2) if os.isatty(number)]


def leave(closed: Iterable[int]) -> None:
    """What is closed takes no more words: these go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in closed:
        os.dup2(nowhere, number)
    os.close(nowhere)
