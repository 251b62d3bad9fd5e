"""Runs a script as `python -c` does, but in a process forked from the server of the ranks, which has torch already."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import types
import weakref
from multiprocessing.connection import Connection

from tests.ranks.launching import context

LIMIT_SECONDS = 180


class Script:
    """A process that runs `code` as its main module and then ends as every interpreter does."""

    def __init__(self, code: str, *arguments: object) -> None:
        theirs_in, ours_in = context.Pipe(duplex=False)
        ours_out, theirs_out = context.Pipe(duplex=False)
        ours_err, theirs_err = context.Pipe(duplex=False)
        theirs = (theirs_in, theirs_out, theirs_err)
        self._process = context.Process(
            target=_run, args=(code, [str(each) for each in arguments], theirs), daemon=True
        )
        self._process.start()
        for each in theirs:
            each.close()
        self._stdin = ours_in  # open: the script may read until its end
        self.stdout = os.fdopen(os.dup(ours_out.fileno()))
        self.stderr = os.fdopen(os.dup(ours_err.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[int | None, str, str]:
        """What the process ended with, and what it had still to say: to the standard output, and of errors."""
        with self._stdin, self.stdout, self.stderr:
            said, errors = self.stdout.read(), self.stderr.read()
            self._process.join()
        return self._process.exitcode, said, errors


def run_script(code: str, *arguments: object) -> tuple[int | None, str, str]:
    """The exit status, the standard output and the errors."""
    return Script(code, *arguments).end()


def _run(code: str, arguments: list[str], pipes: tuple[Connection, Connection, Connection]) -> None:
    signal.alarm(LIMIT_SECONDS)
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # Python 3.13 forgets it in a fork
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<script>", "exec"), vars(main))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    ctypes.pythonapi.Py_Exit(status)  # all that the end of an interpreter does; a forked process would leave it out
