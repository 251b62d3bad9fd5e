"""The terminal of a command, which may close before the command ends."""

import os
from collections.abc import Iterable


def terminals() -> list[int]:
    """Where words go to a terminal. Ask early: one that has closed is none any more."""
    return [number for number in (1, 2) if os.isatty(number)]


def leave(closed: Iterable[int]) -> None:
    """What is closed takes no more words: these go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in closed:
        os.dup2(nowhere, number)
    os.close(nowhere)
