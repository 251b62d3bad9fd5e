"""How a rank waits: for an accelerator, for a rank that does not answer, for what its conveyor will do."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.checkpoint import background, writer
from outsize.move import meeting
from outsize.move.comm import Ranks
from outsize.move.lanes import LANES, Going, Lane, Model, RanksError
from outsize.move.watch import await_closed
from tests.conftest import take_step
from tests.ranks.launching import Ended, ends_on_ranks
from tests.ranks.training import Setting, batch, fields_of, made, make, prepared, same_bits

HOST = Setting(3, "host")


class OnAccelerator:
    """A collective of NCCL: whoever waits for it for a limited time, and too short a one, has ended it."""

    def __init__(self, asked: int, fails: bool = False) -> None:
        self._left, self._fails = asked, fails
        self.ended = False

    def is_completed(self) -> bool:
        self._left -= 1
        return self._left < 0 or self.ended

    def wait(self, timeout: object = None) -> bool:
        self.ended = self.ended or timeout is not None
        if self.ended or self._fails:
            raise RuntimeError("the communicator was aborted")
        return True


class NobodyGone:
    """The watch of a rank whose others count."""

    closed, apart, said, members = False, (), None, (0, 1)

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, error: BaseException) -> None:
        self.told.append(str(error))

    def find_gone(self) -> tuple[int, str]:
        return 1, "is gone (killed, ended or unreachable)"


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first of two ranks that share a model, without a job."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(meeting, "STUCK_SECONDS", -1.0)
    ranks: Any = Ranks.__new__(Ranks)
    ranks.model = Model(0, False, NobodyGone(), ["a layer"])  # type: ignore[arg-type]
    ranks._lanes = {name: Lane(f"0/{name}", [0, 1], ranks.model) for name in LANES}
    monkeypatch.setattr(meeting, "_models", {ranks.model})
    return ranks


def test_a_wait_for_an_accelerator_never_ends_what_it_waits_for(first_of_two: Any) -> None:
    looked: list[str] = []
    first_of_two.model.check = looked.append  # each time it asks it also looks after the others
    work = first_of_two._last_on_device = OnAccelerator(asked=40)
    first_of_two.await_device()
    assert not work.ended and len(looked) > 10


def test_what_went_wrong_on_an_accelerator_is_said(first_of_two: Any) -> None:
    turn = first_of_two.turn_to_gather(0, 8)
    with pytest.raises(RanksError, match=r"rank 1 of 2 is gone .* while rank 0 was in gather of unit 'a layer'"):
        Going(OnAccelerator(asked=3, fails=True), turn, on_stream=True).wait()
    assert "rank 1 of 2 is gone" in first_of_two.model.watch.told[0]


def test_a_collective_that_cannot_start_says_who_is_gone(first_of_two: Any) -> None:
    def begin(group: object) -> None:
        raise dist.DistBackendError("the communicator was aborted")

    turn = replace(first_of_two.turn_to_gather(0, 8), expected=True)
    with pytest.raises(RanksError, match=r"rank 1 of 2 is gone .* while rank 0 was in gather of unit 'a layer'"):
        first_of_two._start(turn, begin)


def stuck_of(ranks: Any) -> Any:
    return meeting._stuck(ranks.model.watch.members)


def test_the_loops_wait_counts_before_that_of_the_conveyor_which_counts_as_come_to(first_of_two: Any) -> None:
    turns = [first_of_two.turn_to_gather(0, 8) for _ in range(5)]
    control, gather = (first_of_two._lanes[name] for name in ("control", "gather"))
    with gather.waiting(turns[4]):
        assert stuck_of(first_of_two).words == "gather of unit 'a layer' in step 0 (8 elements)"
    with gather.waiting(turns[4]), control.waiting(control.next("step")):
        stuck = stuck_of(first_of_two)
    assert (stuck.lane, stuck.turn, stuck.words) == ("0/control", 0, "step in step 0 (0 elements)")
    assert len(stuck.come["0/gather"][1]) == 5
    assert stuck_of(first_of_two) is None


def test_a_rank_that_may_go_where_it_is_wanted_does_not_wait(first_of_two: Any) -> None:
    reduce, gather = (first_of_two._lanes[name] for name in ("reduce", "gather"))
    turn, wanted = first_of_two.turn_to_gather(0, 8), [False]
    with reduce.waiting(reduce.next("reduce", 0, 8), lambda: wanted[0]), gather.waiting(turn):
        assert stuck_of(first_of_two).lane == "0/reduce"
        wanted[0] = True
        assert stuck_of(first_of_two) is None


def test_what_all_did_in_the_last_step_is_expected_in_this_one(first_of_two: Any) -> None:
    lane = first_of_two._lanes["gather"]
    assert [lane.next("gather", unit).expected for unit in (0, 1, 2)] == [False] * 3
    lane.step(alike=True)
    assert [lane.next("gather", unit).expected for unit in (0, 1, 2, 3)] == [True, True, True, False]
    lane.step(alike=True)
    assert [lane.next("gather", unit).expected for unit in (0, 2, 2)] == [True, False, False], (
        "nothing after a surprise"
    )
    lane.step(alike=False)
    turn = lane.next("gather", 0)
    assert not turn.expected and turn.number == 10, "the ranks had others"


def gives_up(disk: str) -> float:
    """Rank 1 lives and does not answer; rank 0 gives it up, and ends its run before rank 1 goes on."""
    model, optimizer = made(HOST, disk)
    store = dist.distributed_c10d._get_default_store()
    inside = prepared(model)
    ranks = inside.engine.reduction.ranks
    if dist.get_rank() == 1:
        store.wait(["closed"])
        return 0.0
    ranks.model.watch.said = (1, "is gone (killed or unreachable)")
    began = time.monotonic()
    try:
        model(batch(0)[0])
    except RanksError:
        inside.resources.close()
        ranks.model.close()
        del model, optimizer, inside, ranks
        gc.collect()
        store.set("closed", "1")
        return time.monotonic() - began
    raise AssertionError("nobody was given up")


def test_who_gives_a_rank_up_does_not_wait_for_it_at_the_end(tmp_path: Path) -> None:
    first, second = ends_on_ranks(2, gives_up, str(tmp_path))
    assert first.error is None, first.trace
    assert second.error is None or second.kind == "RanksError"
    assert first.value < 10.0


def cannot_begin(what: str, mesh: tuple[int, ...], disk: str) -> str:
    """A save that cannot begin, on the first rank alone where it may; then the run goes on."""
    model, optimizer = make(HOST)
    fields = fields_of(HOST, disk)
    if mesh:
        fields["mesh"] = init_device_mesh("cpu", mesh)
    outsize.prepare(model, optimizer, **fields)
    rank, name = dist.get_rank(), "latest" if what == "name" else "step-1"
    if what == "listing" and rank == 0:
        from outsize.api import saving

        def broken(*_: object) -> list[Path]:
            raise OSError(5, "Input/output error", "the folder")

        whole, saving.no_longer_kept = saving.no_longer_kept, broken  # of this process alone
    try:
        outsize.save(f"{disk}/ckpts/{name}", model, optimizer, keep=3)
    except (ValueError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        return "was saved"
    if what == "listing" and rank == 0:
        saving.no_longer_kept = whole
    for step in range(2):
        x, y = batch(step, rank)
        take_step(torch.nn.functional.mse_loss(model(x), y), optimizer)
    outsize.save(f"{disk}/ckpts/step-2", model, optimizer).wait()
    outsize.load(f"{disk}/ckpts/step-2", model, optimizer)
    return said


@pytest.mark.parametrize("mesh", [(), (2, 1)], ids=str)
def test_a_save_that_cannot_begin_on_one_rank_fails_on_all_and_training_goes_on(
    mesh: tuple[int, ...], tmp_path: Path
) -> None:
    ends: list[Ended] = ends_on_ranks(2, cannot_begin, "name", mesh, str(tmp_path))
    assert all(str(end.value).startswith("ValueError: keep=3 needs a name that ends in a number") for end in ends), ends
    first, second = ends_on_ranks(2, cannot_begin, "listing", mesh, str(tmp_path))
    assert "OSError: [Errno 5] Input/output error: 'the folder'" in first.value, first.trace
    assert "outsize.save: rank 0 failed" in second.value and "Input/output error" in second.value, second.trace


def loads_from_a_folder_of_its_own(mesh: tuple[int, ...], folders: list[str], disk: str) -> str:
    """Only the first rank's folder is whole; then the run goes on with what it had."""
    model, optimizer = make(HOST)
    fields = fields_of(HOST, disk)
    if mesh:
        fields["mesh"] = init_device_mesh("cpu", mesh)
    outsize.prepare(model, optimizer, **fields)
    rank = dist.get_rank()
    with outsize.gathered(model):
        before = [param.detach().clone() for param in model.parameters()]
    try:
        outsize.load(folders[rank], model)
    except (ValueError, OSError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        return "was loaded"
    with outsize.gathered(model):
        assert same_bits(model.parameters(), before)
    x, y = batch(0, rank)
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return said


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("mesh", [(), (2, 1)], ids=str)
def test_weights_that_one_rank_cannot_load_are_loaded_by_none(
    mesh: tuple[int, ...], format: str, tmp_path: Path
) -> None:
    model, optimizer = make(HOST)
    outsize.prepare(model, optimizer, host_memory="64MiB", device="cpu")
    outsize.export(tmp_path / "whole", model, format=format)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    data = max((tmp_path / "cut").iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(data, 100)
    folders = [str(tmp_path / "whole"), str(tmp_path / "cut")]
    first, second = ends_on_ranks(2, loads_from_a_folder_of_its_own, mesh, folders, str(tmp_path))
    assert "outsize.load: rank 1 failed" in str(first.value), first.trace
    assert str(second.value).startswith("ValueError"), second.trace


def loads_what_is_not_there(disk: str) -> None:
    model, optimizer = made(HOST, disk)
    outsize.load(f"{disk}/nowhere", model, optimizer)


def test_a_checkpoint_that_is_not_there_is_no_other_ranks_fault(tmp_path: Path) -> None:
    for end in ends_on_ranks(2, loads_what_is_not_there, str(tmp_path)):
        assert end.kind == "FileNotFoundError" and "nowhere" in str(end.error), end.trace


def loads_what_was_just_saved(behind: bool, disk: str) -> None:
    """With copies of the model, of which the first alone saves."""
    if behind:
        writer.AT_ONCE_BYTES = -1
    model, optimizer = make(HOST)
    fields = fields_of(HOST, disk) | {"mesh": init_device_mesh("cpu", (2, 1))}
    outsize.prepare(model, optimizer, **fields)
    for step in range(3):
        outsize.save(f"{disk}/ckpts/step-{step}", model, optimizer).wait()
        outsize.load(f"{disk}/ckpts/step-{step}", model, optimizer)


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_is_over_on_every_copy_when_it_is_over_on_one(behind: bool, tmp_path: Path) -> None:
    ends = ends_on_ranks(2, loads_what_was_just_saved, behind, str(tmp_path))
    assert all(end.error is None for end in ends), [end.trace for end in ends]


def ends_after_a_save(disk: str) -> None:
    """As scripts end, on a machine that is busy: the thread that writes comes to its turn a little later."""
    writer.AT_ONCE_BYTES = -1
    begins, plain = threading.Event(), background._started

    def started(work: Callable[[], None]) -> threading.Thread | None:
        def after() -> None:
            begins.wait()
            work()

        return plain(after)

    background._started = started
    model, optimizer = make(HOST)
    fields = fields_of(HOST, disk) | {"mesh": init_device_mesh("cpu", (2, 1))}
    outsize.prepare(model, optimizer, **fields)
    saving = outsize.save(f"{disk}/ckpts/step-1", model, optimizer)
    dist.destroy_process_group()
    begins.set()
    saving.wait()


def test_the_end_of_the_process_group_does_not_cost_the_last_checkpoint(tmp_path: Path) -> None:
    ends = ends_on_ranks(2, ends_after_a_save, str(tmp_path))
    assert all(end.error is None for end in ends), [end.trace for end in ends]
    assert [path.name for path in (tmp_path / "ckpts").iterdir()] == ["step-1"]


def ends_while_it_connects(disk: str, killed: bool) -> int:
    """The first rank. Of the others the threads that look after the ranks when `prepare` has failed."""
    opened = Ranks._open

    def open_(self: Ranks, name: str) -> Lane:
        if dist.get_rank() == 0 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 0:
            raise MemoryError("no room for buffers")
        return opened(self, name)

    Ranks._open = open_  # type: ignore[method-assign]
    model, optimizer = make(HOST)
    said = "rank 0 of 3 is gone" if killed else "rank 0 (of 3 )?has failed.*no room for buffers"
    error, said = (RanksError, said) if dist.get_rank() else (MemoryError, "no room")
    with pytest.raises(error, match=said):
        outsize.prepare(model, optimizer, **fields_of(HOST, disk))
    await_closed()
    return [thread.name for thread in threading.enumerate()].count("outsize-ranks")


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_ends_while_the_ranks_connect_is_named(killed: bool, tmp_path: Path) -> None:
    ends = ends_on_ranks(3, ends_while_it_connects, str(tmp_path), killed)
    assert ends[0].killed == killed
    assert all((end.error, end.value) == (None, 0) for end in ends[killed:]), [end.error for end in ends]
    assert all(end.seconds < 20 for end in ends), "torch itself would wait for two minutes"
