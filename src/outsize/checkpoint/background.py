"""A checkpoint on its way to the drive while training goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, final

from outsize.move.generations import Generation
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
        self._tidying: threading.Thread | None = None

    @classmethod
    def settle_at(cls, path: Path) -> None:
        """Block until no checkpoint is on its way to `path`, or into that directory."""
        for saving in list(cls.on_their_way.values()):
            if path in (saving.path, saving.path.parent, saving.path.parent / "latest"):
                saving.settle()

    def wait(self) -> None:
        """Block until the checkpoint is complete; safe to repeat. Raises what went wrong."""
        try:
            self._promise.wait()
        except BaseException:
            self._told = self._promise.done()  # else it was the waiting that was interrupted
            raise
        if self._tidying is not None:
            self._tidying.join()

    def settle(self) -> None:
        """As `wait`; what was raised before is not raised again."""
        if not self._told:
            self.wait()

    def done(self) -> bool:
        return self._promise.done()

    def completed(self) -> bool:
        """Block until it is over; whether the checkpoint is complete. What went wrong is for others to raise."""
        try:
            self._promise.wait()
        except BaseException:
            return False
        return True

    def run(self, work: Callable[[], None]) -> None:
        """Do the rest of the work here and now."""
        try:
            work()
        except BaseException as error:
            self._told = True
            self._promise.break_(error)
            raise
        self._promise.keep()

    def tidy_behind(self, tidy: Callable[[], None]) -> None:
        """Do what comes after it on a thread of its own; the checkpoint is complete already."""
        self._tidying = _started(tidy)
        if self._tidying is None:
            tidy()

    def run_behind(self, work: Callable[[], None]) -> None:
        """Do the rest of the work on a thread of its own, which the interpreter waits for at its end."""

        def guarded() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:
                logger.error("the checkpoint %s could not be completed: %s", self.path, str(raised))
                error = raised
            self.on_their_way.pop(self.path, None)
            if error is None:
                self._promise.keep()
            else:
                self._promise.break_(error)

        self.on_their_way[self.path] = self
        if _started(guarded) is None:
            guarded()


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


@final
class Saver:
    """The checkpoint of one prepared model that is on its way; there is one at a time."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._saving: Saving | None = None
        self._removing: list[tuple[threading.Thread, Sequence[Generation]]] = []

    def settle(self) -> None:
        """Block until no checkpoint is on its way. Raises what went wrong with the last one, once."""
        for each in list(self._removing):
            if all(generation.left.done() for generation in each[1]):
                each[0].join()
                self._removing.remove(each)
        saving = self._saving
        if saving is None:
            return
        try:
            if os.getpid() == self._pid:
                saving.settle()
        finally:
            if saving.done() or os.getpid() != self._pid:
                self._saving = None

    def close(self) -> None:
        """The run has ended: nobody waits for it any more."""
        for thread, _ in self._removing:
            if thread is not threading.current_thread():
                thread.join()
        self._removing.clear()

    def remove_when_read(
        self,
        saving: Saving,
        linked: Sequence[Generation],
        outdated: Sequence[Path],
        remove: Callable[[Sequence[Path]], None],
    ) -> None:
        """Remove older checkpoints once the training has read, and so checked, the files that a newer one links.

        Where it never does, since the run ends before, the older ones stay until the next save.
        """
        held = [generation.hold() for generation in linked]

        def work() -> None:
            try:
                try:
                    if not saving.completed():
                        return
                    for generation in held:
                        generation.left.wait()
                    for generation in held:
                        generation.check_rest()
                finally:
                    for generation in held:
                        generation.let_go()
                remove(outdated)
            except OSError as error:
                logger.error("%s stays: %s", outdated[0], str(error))
            except RuntimeError:  # the run has ended
                return

        thread = threading.Thread(target=work, name="outsize-keep", daemon=True)
        self._removing.append((thread, held))
        thread.start()

    def begin(self, path: Path) -> Saving:
        self._saving = Saving(path)
        return self._saving
