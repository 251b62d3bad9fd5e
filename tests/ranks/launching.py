"""Runs a function on several ranks: processes forked from a server that has the modules, a store in this one."""

from __future__ import annotations

import faulthandler
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from outsize.move import meeting, watch

LIMIT_SECONDS = 60.0
QUICK = True
"""Whether ranks look after each other more often than they do elsewhere."""

context = multiprocessing.get_context("forkserver")
"""Starts processes that have imported all that the tests did."""


def fork_server() -> None:
    """Fork the server of `context` from this process, which has no threads yet. Python would start an interpreter, and
    each process would import torch and the module of its test."""
    resource_tracker.ensure_running()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library stops by itself
            pid = os.fork()
        if not pid:
            os.close(ours)
            _serve(listener.detach(), alive)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid


def _serve(listener: int, alive: int) -> None:
    """Without what pytest has set: warnings are no errors, what is logged or raised in a thread is printed, and a crash
    prints no stacks."""
    faulthandler.disable()
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)  # as Python has it
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    logging.getLogger().handlers.clear()
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: what the function returned, or the error it raised, or neither where it was killed."""

    value: Any = None
    error: str | None = None
    kind: str = ""
    trace: str = ""
    seconds: float = 0.0
    killed: bool = False


def run_on_ranks(ranks: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS) -> list[Any]:
    """`function(*args)` on each rank; what each returned. Raises what a rank raised, with its trace."""
    ends = ends_on_ranks(ranks, function, *args, limit=limit)
    for rank, end in enumerate(ends):
        if end.error is not None or end.killed:
            raise AssertionError(f"rank {rank}: {end.error or 'was killed'}\n{end.trace}")
    return [end.value for end in ends]


def in_turn(*calls: tuple[Any, ...]) -> list[Any]:
    """For `run_on_ranks`: functions with their arguments, one after the other, as to start ranks takes longer than most
    of them. What each returned."""
    return [function(*args) for function, *args in calls]


def ends_on_ranks(ranks: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS) -> list[Ended]:
    """How each rank ended. Raises `TimeoutError` if one did not end within `limit` seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps it: here
    started = []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, (store.port, rank, ranks, QUICK), function, args), daemon=True
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    until = time.monotonic() + limit
    ends = []
    try:
        for process, pipe in started:
            if not pipe.poll(max(until - time.monotonic(), 0)):
                raise TimeoutError(f"a rank hangs in {function.__name__}{args}")
            ends.append(_receive(pipe))
            process.join(max(until - time.monotonic(), 1))
            if process.is_alive():
                raise TimeoutError(f"a rank does not end after {function.__name__}{args}")
    finally:
        for process, _ in started:
            process.kill()
    return ends


def _receive(pipe: Connection) -> Ended:
    try:
        end: Ended = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        return Ended(killed=True)
    return end


def _run(
    pipe: Connection, place: tuple[int, int, int, bool], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    port, rank, ranks, quick = place
    if quick:
        watch.BEAT_SECONDS, watch.SILENT_SECONDS, meeting.STUCK_SECONDS = 0.1, 2.0, 0.5  # tests have no slow networks
        watch.STILL_SECONDS = 2.0
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    dist.barrier()  # so that a rank that is quick to end does not end before the others have met it
    began = time.monotonic()
    try:
        end = Ended(function(*args))
    except BaseException as error:
        end = Ended(None, str(error), type(error).__name__, traceback.format_exc(), time.monotonic() - began)
    content = io.BytesIO()
    torch.save(end, content)  # by value: the process is gone when it is read
    pipe.send_bytes(content.getvalue())
    pipe.close()
