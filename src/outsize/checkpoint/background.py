"""A checkpoint on its way to the drive while training goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, final

from outsize.move.transfer import Promise, Transfer

logger = logging.getLogger("outsize")


@final
class Saving(Transfer):
    """What `outsize.save` gives: `wait()` until the checkpoint is complete, `done()` to ask.

    Most checkpoints are complete when `save` returns. One that is still being written has no name yet: a crash leaves
    the one before it. The process does not end before it is written.
    """

    on_their_way: ClassVar[dict[Path, Saving]] = {}
    """By target: another model of this process may load what this one is still writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._promise = Promise()
        self._told = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @classmethod
    def settle_at(cls, path: Path) -> None:
        """Block until no checkpoint is on its way to `path`, or into that directory."""
        for saving in list(cls.on_their_way.values()):
            if path in (saving.path, saving.path.parent, saving.path.parent / "latest"):
                saving.settle()

    def wait(self) -> None:
        """Block until the checkpoint is complete and older ones are removed. Safe to repeat. Raises what went wrong."""
        try:
            self._promise.wait()
        except BaseException:
            self._told = self._promise.done()  # else it was the waiting that was interrupted
            raise
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> None:
        """As `wait`. An error that was raised before is not raised again; a forked child waits for nothing."""
        if not self._told and os.getpid() == self._pid:
            self.wait()

    def done(self) -> bool:
        return self._promise.done()

    def complete(self, work: Callable[[], None]) -> None:
        """Do the rest of the work here and now."""
        try:
            work()
        except BaseException as error:
            self._told = True
            self._promise.break_(error)
            raise
        self._promise.keep()

    def go_on_behind(self, work: Callable[[], None], tidy: Callable[[], None]) -> None:
        """Do the rest of the work, unless it is done, then what comes after it, on a thread of its own. The interpreter
        waits for that thread at its end."""

        def run() -> None:
            error: BaseException | None = None
            if not self._promise.done():
                try:
                    work()
                except BaseException as raised:
                    logger.error("the checkpoint %s could not be completed: %s", self.path, str(raised))
                    error = raised
                self.on_their_way.pop(self.path, None)
                if error is not None:
                    self._promise.break_(error)
                    return
                self._promise.keep()
            tidy()

        if not self.done():
            self.on_their_way[self.path] = self
        self._thread = _started(run)
        if self._thread is None:
            run()


def _started(work: Callable[[], None]) -> threading.Thread | None:
    """A thread that does the work; None where the interpreter is ending: until Python 3.11 a thread would begin there
    and not end, later ones refuse to begin."""
    if not threading.main_thread().is_alive():
        return None
    thread = threading.Thread(target=work, name="outsize-save", daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


# In a forked child nobody writes what its parent is still writing.
os.register_at_fork(after_in_child=Saving.on_their_way.clear)
