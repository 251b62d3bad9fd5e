"""The conveyor alone, with steps that the test finishes by hand, and gradients at rest, with torch as oracle."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.grad_ops import GradOps
from outsize.move.gradients import GradShard
from outsize.move.memory import Ledger
from outsize.move.transfer import ARRIVED, Promise, Transfer
from outsize.planning.layout import ParamInfo, UnitLayout, lay_out

PAGE = 4096


# -- the conveyor ----------------------------------------------------------------------------------------------------


class Held(Transfer):
    """A transfer that the test lets through."""

    def __init__(self) -> None:
        self.promise = Promise()

    def wait(self) -> None:
        self.promise.wait()

    def done(self) -> bool:
        return self.promise.done()


class Note:
    """What a step notes when it begins and finishes."""

    def __init__(
        self,
        log: list[str],
        name: str,
        slabs: int = 0,
        read: Transfer = ARRIVED,
        write: Transfer | None = None,
        fails: str = "",
    ) -> None:
        self.log, self.name, self.slabs = log, name, slabs
        self.read, self.write, self.fails = read, write, fails

    def begin(self, slabs: list[torch.Tensor]) -> Sequence[Transfer]:
        assert len(slabs) == self.slabs
        self.log.append(f"begin {self.name}")
        if self.fails == "begin":
            raise ValueError(self.name)
        return [self.read]

    def finish(self) -> Sequence[Transfer]:
        self.log.append(f"finish {self.name}")
        if self.fails == "finish":
            raise ValueError(self.name)
        return [self.write] if self.write is not None else []


def noting(*args: Any, **kwargs: Any) -> Step:
    note = Note(*args, **kwargs)
    return Step(note.begin, note.finish, note.slabs)


@pytest.fixture
def conveyor() -> Iterator[Conveyor]:
    conveyor = Conveyor(PAGE, 2, Ledger())
    yield conveyor
    conveyor.close()
    conveyor.close()


def test_jobs_run_in_order(conveyor: Conveyor) -> None:
    log: list[str] = []
    jobs = [conveyor.submit(Job([noting(log, f"{job}{step}") for step in "ab"])) for job in range(5)]
    for job in jobs:
        job.wait()
        job.written.wait()
    finished = [line for line in log if line.startswith("finish")]
    assert finished == [f"finish {job}{step}" for job in range(5) for step in "ab"]


def test_an_empty_job_is_done(conveyor: Conveyor) -> None:
    job = conveyor.submit(Job([]))
    job.wait()
    job.written.wait()
    assert job.done()


def test_reads_start_ahead_of_the_step_that_is_finished(conveyor: Conveyor) -> None:
    log: list[str] = []
    held = Held()
    job = conveyor.submit(Job([noting(log, "a", read=held), noting(log, "b"), noting(log, "c")]))
    deadline = time.monotonic() + 10
    while len(log) < 3 and time.monotonic() < deadline:
        os.sched_yield()
    assert log == ["begin a", "begin b", "begin c"]
    held.promise.keep()
    job.wait()


def test_a_job_is_ready_before_it_is_written(conveyor: Conveyor) -> None:
    held = Held()
    job = conveyor.submit(Job([noting([], "a", write=held)]))
    job.wait()
    assert not job.written.done()
    held.promise.keep()
    job.written.wait()


def test_steps_wait_for_slabs_and_give_them_back(conveyor: Conveyor) -> None:
    log: list[str] = []
    jobs = [conveyor.submit(Job([noting(log, str(index), slabs=2, write=ARRIVED)])) for index in range(10)]
    for job in jobs:
        job.written.wait()
    assert log == [f"{verb} {index}" for index in range(10) for verb in ("begin", "finish")]


def test_a_job_begins_after_those_it_follows_are_written(conveyor: Conveyor) -> None:
    log: list[str] = []
    held = Held()
    first = conveyor.submit(Job([noting(log, "first", write=held)]))
    first.wait()
    second = conveyor.submit(Job([noting(log, "second")], after=(first,)))
    assert "begin second" not in log
    held.promise.keep()
    second.wait()
    assert log[-1] == "finish second"


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_an_error_breaks_its_job_and_no_other(conveyor: Conveyor, where: str) -> None:
    log: list[str] = []
    bad = conveyor.submit(Job([noting(log, "bad", 1, fails=where), noting(log, "never", 1), noting(log, "never", 1)]))
    good = conveyor.submit(Job([noting(log, "good", 2)]))
    with pytest.raises(ValueError, match="bad"):
        bad.wait()
    with pytest.raises(ValueError, match="bad"):
        bad.written.wait()
    good.wait()
    assert bad.broken
    assert not good.broken
    assert "finish never" not in log


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_job_that_follows_a_broken_one_is_broken_too(conveyor: Conveyor, where: str) -> None:
    held = Held()
    first = conveyor.submit(Job([noting([], "first", **{where: held})]))
    log: list[str] = []
    second = conveyor.submit(Job([noting(log, "second")], after=(first,)))
    held.promise.break_(OSError(errno.EIO, "gone", "file"))
    with pytest.raises(OSError, match="gone"):
        first.written.wait()
    with pytest.raises(OSError, match="gone"):
        second.wait()
    assert not log


class Faulty(Transfer):
    """A transfer with a mistake in it, where nobody expects one."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        raise AssertionError("a mistake of ours")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_conveyor_that_a_fault_of_its_own_has_ended(conveyor: Conveyor) -> None:
    held = Held()
    writing = conveyor.submit(Job([noting([], "writing", read=held, write=Faulty())]))
    waiting = conveyor.submit(Job([noting([], "waiting", read=Held())]))
    held.promise.keep()
    for job in (writing.written, waiting.written):
        with pytest.raises(AssertionError, match="a mistake of ours"):
            job.wait()
    with pytest.raises(RuntimeError, match=r"stopped after a fault of its own \(AssertionError: a mistake of ours\)"):
        conveyor.submit(Job([noting([], "later")]))


def test_a_wake_that_ctrl_c_has_interrupted_takes_no_other_wake(conveyor: Conveyor) -> None:
    """See Note [Ctrl-C while the thread is woken]."""
    waiting: Any = conveyor._changed._waiters  # type: ignore[attr-defined]
    until = time.monotonic() + 10
    while not waiting:
        assert time.monotonic() < until
    left = threading.Lock()
    left.acquire()
    with conveyor._changed:
        waiting.appendleft(left)  # of a thread that has woken, and was not taken out
    job = conveyor.submit(Job(iter([])))
    while not job.done():
        assert time.monotonic() < until


def test_closing_breaks_what_has_not_begun_and_refuses_more() -> None:
    conveyor = Conveyor(PAGE, 1, Ledger())
    held = Held()
    log: list[str] = []
    running = conveyor.submit(Job([noting(log, "running", 1, read=held)]))
    while not log:
        os.sched_yield()
    waiting = [conveyor.submit(Job([noting([], "waiting", 1)])) for _ in range(8)]
    held.promise.keep()
    conveyor.close()
    running.wait()
    with pytest.raises(RuntimeError, match="has been closed"):
        conveyor.submit(Job([]))
    for job in waiting:
        assert job.done()


# -- gradients at rest -----------------------------------------------------------------------------------------------


def layout_of(dtype: str, itemsize: int) -> UnitLayout:
    infos = {name: ParamInfo(name, (3, 5), dtype, itemsize) for name in ("a", "b")}
    return lay_out({"unit": ("a", "b")}, infos)[0]


def test_a_second_bf16_contribution_is_added_in_fp32() -> None:
    layout = layout_of("bfloat16", 2)
    shard = GradShard(layout, None, Ledger())
    a, b = layout.slots
    first, second = torch.randn(15).bfloat16(), torch.randn(15).bfloat16()
    shard.open(())
    shard.put(a, first, None)
    shard.put(b, second, None)
    assert shard.of(a).dtype is torch.bfloat16
    shard.put(a, second, GradOps(scale=0.5))
    assert shard.of(a).dtype is torch.float32
    assert torch.equal(shard.of(a), first.float() * 0.5 + second.float())
    assert torch.equal(shard.of(b), second.float())
    shard.close()


def test_operations_on_a_gradient_are_those_of_torch() -> None:
    grad = torch.randn(100)
    ops = GradOps().scaled(0.3)
    assert ops is not None
    assert torch.equal(ops.apply_(grad.clone()), grad * 0.3)
    assert torch.equal(ops.clamped(-0.1, 0.2).apply_(grad.clone()), (grad * 0.3).clamp(-0.1, 0.2))
    assert ops.scaled(0.7) is None, "two roundings are not one"
    assert ops.clamped(-1, 1).scaled(2.0) is None, "a clamp does not commute with a scale"
    twice = ops.scaled(0.5)
    assert twice is not None
    assert torch.equal(twice.apply_(grad.clone()), grad * 0.3 * 0.5)
    assert not GradOps(zero=True).apply_(grad.clone()).any()
    assert torch.equal(ops.clamped(0.5, 1.0).clamped(-1.0, 0.2).apply_(grad.clone()), torch.full((100,), 0.2))
