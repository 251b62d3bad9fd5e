"""Runs the tests in several processes, which are forked when all tests are collected: `pytest --workers 3`.

Imports and collection take up to twenty seconds of a processor, and are paid for once. The process that collected gets
the reports of its workers, and pytest treats them as its own. See Note [Forks before threads].
"""

# Note [Forks before threads]
# A fork has one thread, whatever its parent has. So nothing that starts threads may run before workers are forked: no
# backward, no simulated accelerator. torch computes on one thread from the first import on (tests/conftest.py).

from __future__ import annotations

import multiprocessing
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

LOOK_SECONDS = 1.0
"""How often workers that say nothing are looked after."""

ENDING_SECONDS = 60.0
"""How long a worker may take to end, when its tests are over."""

context = multiprocessing.get_context("fork")
_RANGE = struct.Struct("ii")


def run(session: pytest.Session, count: int, begin: Callable[[], None], *queues: list[range]) -> bool | None:
    """Run all tests and return True, or return None where pytest shall run them in this process. `begin` is called in
    each process that runs tests, before the first. The first worker takes ranges of tests from the queues in order, the
    others in the opposite order."""
    if session.testsfailed or session.config.option.collectonly:
        return None
    if min(count, len(session.items)) < 2:
        begin()
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all: it is emptied when made
    pipes = [_queue(ranges) for ranges in queues]
    workers = [_Worker(session, begin, pipes[::-1] if others else pipes) for others in range(count)]
    try:
        while workers:
            ready = wait([worker.pipe for worker in workers], LOOK_SECONDS)
            for worker in list(workers):
                if worker.pipe in ready:
                    worker.receive()
                elif not ready and not worker.process.is_alive():
                    worker.report_death()
                if worker.ended:
                    workers.remove(worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in workers:
            worker.process.kill()
    return True


def _queue(ranges: list[range]) -> int:
    """A pipe from which processes read ranges one by one."""
    readable, writable = os.pipe()
    os.write(writable, b"".join(_RANGE.pack(each.start, each.stop) for each in ranges))
    os.close(writable)
    return readable


class _Worker:
    """A process that runs tests."""

    def __init__(self, session: pytest.Session, begin: Callable[[], None], queues: list[int]) -> None:
        self.session = session
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(session, begin, queues, theirs))
        self.index: int | None = None
        self.ended = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library stops by itself
            self.process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            said = self.pipe.recv()
        except EOFError:
            self.report_death()
            return
        if said is None:
            self.process.join(ENDING_SECONDS)
            if self.process.exitcode != 0:
                self.report_death()
            self.ended = True
        elif isinstance(said, int):
            self.index = said
        else:
            config = self.session.config
            self._report(config.hook.pytest_report_from_serializable(config=config, data=said))

    def report_death(self) -> None:
        """Fail the test that ran last, and stop: other tests that the process had taken are lost."""
        self.process.kill()
        self.process.join()
        item = self.session.items[self.index or 0]
        why = f"the process that ran this test ended with {self.process.exitcode}"
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call"))
        self.session.shouldfail = why

    def _report(self, report: Any) -> None:
        hook = self.session.config.hook
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


class _Sender:
    """Sends the reports of this process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.pipe.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _work(session: pytest.Session, begin: Callable[[], None], queues: list[int], pipe: Connection) -> None:
    plugins = session.config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the other processes, too
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    plugins.register(_Sender(session.config, pipe))
    begin()
    mine = _mine(queues)
    following = next(mine, None)
    while following is not None and not session.shouldfail:
        index, following = following, next(mine, None)
        pipe.send(index)
        item, after = session.items[index], None if following is None else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    pipe.send(None)


def _mine(queues: list[int]) -> Iterator[int]:
    for queue in queues:
        while record := os.read(queue, _RANGE.size):
            yield from range(*_RANGE.unpack(record))
