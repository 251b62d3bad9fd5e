"""Ranks that go different ways, fail or die: every other rank ends with an error that names them, and none hangs."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outsize
from outsize.move import meeting, watch
from tests.ranks.launching import Ended, ends_on_ranks, run_on_ranks
from tests.ranks.training import Setting, batch, made, prepared, same_bits, weights_of

DETECTED_SECONDS = 10.0
LONG = timedelta(seconds=DETECTED_SECONDS)
HOST = Setting(3, "host")
SQUEEZED = Setting(3, "squeezed")


class Run:
    """A training that goes wrong on one rank in its third step."""

    def __init__(self, setting: Setting, disk: str) -> None:
        self.clips = setting.fields.get("update") != "backward"
        self.rank = dist.get_rank()
        self.model, self.optimizer = made(setting, disk)
        self.disk = disk

    def step(self, number: int, forward: Callable[[Any], Any] | None = None, clip: bool = True) -> None:
        x, y = batch(number, self.rank)
        out = (forward or self.model)(x)
        nn.functional.mse_loss(out, y).backward()
        if clip and self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


def through(run: Run, number: int, blocks: list[Any]) -> None:
    run.model.forward = nn.Sequential(*blocks, run.model.head).forward  # type: ignore[arg-type, method-assign]
    run.step(number)


def other_order(run: Run, number: int) -> None:
    through(run, number, list(run.model.blocks)[::-1])  # type: ignore[arg-type]


def skipped_unit(run: Run, number: int) -> None:
    through(run, number, list(run.model.blocks)[:-1])  # type: ignore[arg-type]


def fewer_steps(run: Run, number: int) -> None:
    raise StopIteration


def failure(run: Run, number: int) -> None:
    raise RuntimeError("the data loader of this rank broke")


def killed(run: Run, number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_backward(run: Run, number: int) -> None:
    x, y = batch(number, run.rank)
    out = run.model(x)
    out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    nn.functional.mse_loss(out, y).backward()


def not_clipped(run: Run, number: int) -> None:
    run.step(number, clip=False)
    run.step(number, clip=False)


def one_more_forward(run: Run, number: int) -> None:
    with torch.no_grad():
        run.model(batch(number)[0])
    run.step(number)


def alone_in_gathered(run: Run, number: int) -> None:
    with outsize.gathered(run.model):
        pass
    run.step(number)


def alone_in_save(run: Run, number: int) -> None:
    outsize.save(Path(run.disk) / "alone", run.model, run.optimizer)
    run.step(number)


def alone_in_export(run: Run, number: int) -> None:
    outsize.export(Path(run.disk) / "alone", run.model)
    run.step(number)


def astray(wrong: Callable[[Run, int], None], setting: Setting, disk: str, who: int) -> str:
    run = Run(setting, disk)
    for number in range(5):
        if number == 2 and run.rank == who:
            try:
                wrong(run, number)
            except StopIteration:
                return "went home early"
        else:
            run.step(number)
    return "went right"


def check(ends: list[Ended], who: int, gone: bool) -> None:
    for rank, end in enumerate(ends):
        if rank == who:
            continue
        assert end.error is not None, f"rank {rank}: {end.value}"
        assert end.kind == "RanksError", end.trace
        assert re.search(rf"\branks? ([0-9, ]*, )?{who}\b", end.error) and "step" in end.error, end.error
        assert end.seconds < DETECTED_SECONDS
        if gone:
            assert f"rank {who}" in end.error


WRONG = [other_order, skipped_unit, not_clipped, one_more_forward, alone_in_gathered, alone_in_save, alone_in_export]
GONE = [fewer_steps, failure, killed, killed_in_the_backward]


@pytest.mark.parametrize(("wrong", "ranks"), [*zip(WRONG, (3, 3, 2, 2, 2, 3, 2), strict=True)])
def test_ranks_that_go_different_ways_say_so(wrong: Callable[[Run, int], None], ranks: int, tmp_path: Path) -> None:
    ends = ends_on_ranks(ranks, astray, wrong, SQUEEZED, str(tmp_path), 1)
    check(ends, 1, gone=False)
    assert ends[1].error is not None, ends[1].value
    if wrong is skipped_unit:  # as a mixture of experts does
        assert any("unused='sync'" in str(end.error) for end in ends)


@pytest.mark.parametrize(("wrong", "who"), [*zip(GONE, (0, 1, 0, 1), strict=True), (killed, 1)])
def test_a_rank_that_is_gone_ends_the_others(wrong: Callable[[Run, int], None], who: int, tmp_path: Path) -> None:
    check(ends_on_ranks(3, astray, wrong, HOST, str(tmp_path), who), who, gone=True)


@pytest.mark.parametrize("wrong", [other_order, skipped_unit], ids=lambda each: each.__name__)
def test_ranks_that_update_in_the_backward_say_so_too(wrong: Callable[[Run, int], None], tmp_path: Path) -> None:
    """Units of one size in another order, of which gloo itself would mix the gradients."""
    setting = Setting(3, "host", fields={"update": "backward"})
    check(ends_on_ranks(2, astray, wrong, setting, str(tmp_path), 1), 1, gone=False)


@pytest.mark.parametrize(("wrong", "stage"), [(skipped_unit, 0), (skipped_unit, 2), (fewer_steps, 0), (killed, 2)])
def test_whole_parameters_change_nothing_about_that(
    wrong: Callable[[Run, int], None], stage: int, tmp_path: Path
) -> None:
    check(ends_on_ranks(2, astray, wrong, Setting(stage, "host"), str(tmp_path), 1), 1, gone=wrong is not skipped_unit)


def other_model(what: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank if what == "seed" else 0)
    model = nn.Sequential(nn.Linear(8, 16 + rank if what == "shape" else 16), nn.Tanh())
    if what == "more" and rank:
        model.append(nn.Linear(16, 4))
    optimizer = (torch.optim.SGD if what == "optimizer" and rank else torch.optim.AdamW)(model.parameters(), lr=0.1)
    stage = 2 if what == "field" and rank else 3
    outsize.prepare(model, optimizer, host_memory="16MiB", stage=stage)


def other_models() -> list[str]:
    found = []
    for what in ("seed", "shape", "more", "optimizer", "field"):
        with pytest.raises(ValueError, match="differ") as raised:
            other_model(what)
        found.append(str(raised.value))
    return found


def test_ranks_that_prepare_different_things_say_so() -> None:
    for found in run_on_ranks(2, other_models):
        assert len(found) == 5 and all("rank 1" in said for said in found), found


def stopped(disk: str) -> None:
    """Rank 1 is stopped in its third step; rank 0 ends it once it has noticed."""
    run = Run(HOST, disk)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    try:
        for number in range(3):
            if number == 2 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            run.step(number)
    finally:
        if run.rank == 0:
            os.kill(pids[1], signal.SIGKILL)


def test_a_rank_that_stands_still_is_given_up(tmp_path: Path) -> None:
    first, second = ends_on_ranks(2, stopped, str(tmp_path))
    assert second.killed
    assert first.kind == "RanksError" and "rank 1 of 2 is gone" in str(first.error), first.trace
    assert first.seconds < DETECTED_SECONDS


def outlives_its_error(wrong: Callable[[Run, int], None], mesh: tuple[int, ...], disk: str) -> str:
    """The last rank goes in its third step. Each other one notices while all the others are still there."""
    run = Run(Setting(3, "host", mesh=mesh), disk)
    store = dist.distributed_c10d._get_default_store()
    others = dist.get_world_size() - 1
    try:
        for number in range(5):
            if number == 2 and run.rank == others:
                wrong(run, number)
            run.step(number)
    except RuntimeError:
        if store.add("noticed", 1) == others:
            store.set("all have noticed", "1")
        if run.rank != others:
            store.wait(["all have noticed"], timedelta(seconds=DETECTED_SECONDS))
        raise
    return "went right"


@pytest.mark.parametrize("wrong", [failure, killed], ids=lambda each: each.__name__)
def test_ranks_of_every_dimension_of_a_mesh_hear_of_it(wrong: Callable[[Run, int], None], tmp_path: Path) -> None:
    ends = ends_on_ranks(4, outlives_its_error, wrong, (2, 2), str(tmp_path))
    check(ends, 3, gone=True)


def slow(disk: str) -> str:
    """Rank 1 comes to its third step only when rank 0 has looked for it three times."""
    run = Run(HOST, disk)
    store = dist.distributed_c10d._get_default_store()
    reduction = prepared(run.model).engine.reduction
    looked: list[int] = []
    plain = reduction.ranks.model.check

    def look(words: str) -> None:
        looked.append(1)
        if len(looked) == 3:
            store.set("looked", "1")
        plain(words)

    reduction.ranks.model.check = look
    for number in range(3):
        if number == 2 and run.rank == 1:
            store.wait(["looked"])
        run.step(number)
    return "went right"


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    assert [end.value for end in ends_on_ranks(2, slow, str(tmp_path))] == ["went right"] * 2


def gone_beside_one_that_is_late(disk: str) -> None:
    """Rank 2 goes in its third step. Rank 1 comes to the next gather only when rank 0 has noticed."""
    watch.STILL_SECONDS = 10 * DETECTED_SECONDS  # a connection that breaks says so at once
    run = Run(SQUEEZED, disk)
    store = dist.distributed_c10d._get_default_store()

    def together(*_: Any) -> None:
        dist.barrier()
        if run.rank == 2:
            killed(run, 2)
        if run.rank == 1:
            store.wait(["noticed"], 2 * LONG)

    for number in range(3):
        if number == 2:
            run.model.blocks[0].register_forward_pre_hook(together)  # type: ignore[index, union-attr]
        try:
            run.step(number)
        except RuntimeError:
            store.set("noticed", "1")
            raise


def test_a_rank_that_is_gone_is_noticed_while_another_one_is_late(tmp_path: Path) -> None:
    check(ends_on_ranks(3, gone_beside_one_that_is_late, str(tmp_path)), 2, gone=True)


class HeldUp:
    """A collective that is over on this rank only when the others have waited for it for some time."""

    def __init__(self, work: Any, store: Any) -> None:
        self._work, self._store = work, store

    def is_completed(self) -> bool:
        return bool(self._store.check(["waited"]) and self._work.is_completed())

    def wait(self, timeout: timedelta = LONG) -> Any:
        if not self._store.check(["waited"]):  # its own wait takes 5 s where the time is over just when the key is set
            threading.Event().wait(timeout.total_seconds())
            raise RuntimeError("the time is over")
        return self._work.wait()


class HoldsUp:
    """A group whose gathers are held up."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group, self._store = group, store

    def broadcast(self, *given: Any) -> HeldUp:
        return HeldUp(self._group.broadcast(*given), self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def slow_in_a_collective(disk: str) -> str:
    """In its third step rank 1 is at a gathering for so long that rank 0 has looked ten times what holds it up."""
    run = Run(HOST, disk)
    store = dist.distributed_c10d._get_default_store()
    reduction = prepared(run.model).engine.reduction
    ranks = reduction.ranks
    watch, lane, looked = ranks.model.watch, ranks._lanes["gather"], []
    compare = watch._compare

    def look() -> None:
        looked.extend([1] if watch._stuck() is not None else [])
        if len(looked) == 10:
            store.set("waited", "1")
        compare()

    watch._compare = look if run.rank == 0 else compare
    for number in range(3):
        if number == 2 and run.rank == 1:
            lane.agreeing = lane.moving = HoldsUp(lane.moving, store)
        run.step(number)
    return "went right"


def test_a_rank_that_is_slow_at_what_was_agreed_on_is_waited_for(tmp_path: Path) -> None:
    ends = ends_on_ranks(2, slow_in_a_collective, str(tmp_path))
    assert [end.value for end in ends] == ["went right"] * 2, [end.error for end in ends]


def prepares_alone(stage: int, disk: str) -> None:
    """Both share a model; then one trains it while the other prepares another."""
    run = Run(Setting(stage, "host"), disk)
    run.step(0)
    if run.rank == 0:
        run.step(1)
    made(HOST, disk)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_that_prepares_another_model_ends_with_an_error_on_all(stage: int, tmp_path: Path) -> None:
    for end in ends_on_ranks(2, prepares_alone, stage, str(tmp_path)):
        assert end.kind == "RanksError", end.trace
        assert "rank 1: outsize.prepare of another model" in str(end.error)
        assert end.seconds < DETECTED_SECONDS


def prepares_after_an_error(disk: str) -> None:
    """One rank has left `prepare` with an error; the other one caught its own, and comes there too."""
    run = Run(HOST, disk)
    run.step(0)
    store = dist.distributed_c10d._get_default_store()
    if run.rank:
        with pytest.raises(RuntimeError, match="different ways"):
            run.step(1)
        store.wait(["left"])
        Run(HOST, disk)
    try:
        Run(HOST, disk)
    finally:
        store.set("left", "1")


def test_nobody_waits_for_a_rank_that_has_left_prepare(tmp_path: Path) -> None:
    first, second = ends_on_ranks(2, prepares_after_an_error, str(tmp_path))
    assert "rank 0: outsize.prepare of another model" in str(first.error), first.trace
    assert "rank 0 has left outsize.prepare with an error while this rank was in outsize.prepare: start" in str(
        second.error
    ), second.trace
    assert second.seconds < DETECTED_SECONDS


def what_is_said() -> list[str]:
    """What this rank logs from now on; the others may wait for the key "said"."""
    said: list[str] = []
    store, handler = dist.distributed_c10d._get_default_store(), logging.Handler()
    handler.emit = lambda record: (said.append(record.getMessage()), store.set("said", "1"))  # type: ignore[method-assign]
    logging.getLogger("outsize").addHandler(handler)
    return said


def comes_late(disk: str) -> list[str]:
    """The first rank waits for the other in `prepare`, and says so."""
    meeting.MEETING_WORD_SECONDS = 0.2
    said = what_is_said()
    if dist.get_rank():
        dist.distributed_c10d._get_default_store().wait(["said"])
    Run(HOST, disk).step(0)
    return said


def test_who_waits_in_prepare_says_for_whom(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, comes_late, str(tmp_path))
    assert first == ["rank 0 waits in outsize.prepare for rank 1, as every rank must call it"]
    assert second == []


def waits_outside(disk: str) -> list[str]:
    """One rank takes a step fewer, and waits for the other where outsize cannot see it, until that has said so."""
    watch.WORD_SECONDS = 0.2
    run = Run(HOST, disk)
    run.step(0)
    said = what_is_said()
    if dist.get_rank():
        dist.distributed_c10d._get_default_store().wait(["said"])
    run.step(1)
    return said


def test_who_waits_for_a_rank_that_waits_outside_says_so(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, waits_outside, str(tmp_path))
    assert re.fullmatch(r"rank 0 waits in .* in step 1 .* for rank 1 \(slow, stopped, or waiting .*", first[0])
    assert second == []


def never_comes(disk: str) -> None:
    meeting.MEETING = timedelta(seconds=0.5)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():
        store.wait(["over"])
        return
    try:
        Run(HOST, disk)
    finally:
        store.set("over", "1")


def test_a_rank_that_never_comes_to_prepare_is_named(tmp_path: Path) -> None:
    first, second = ends_on_ranks(2, never_comes, str(tmp_path))
    assert "rank 1 did not come to outsize.prepare within 0:00:00.5" in str(first.error)
    assert second.error is None


def raises_in_the_loop(disk: str) -> None:
    """As where nobody catches the error: the interpreter shows it, and ends."""
    run = Run(HOST, disk)
    for number in range(3):
        run.step(number)
    if run.rank:
        try:
            {}["mine"]
        except KeyError as error:
            error.__cause__ = error  # as `raise error from error` makes it
            sys.excepthook(KeyError, error, error.__traceback__)
            os._exit(1)
    run.step(3)


def test_an_error_of_the_loop_is_told_to_the_others(tmp_path: Path) -> None:
    first, second = ends_on_ranks(2, raises_in_the_loop, str(tmp_path))
    assert second.killed
    assert "rank 1 of 2 has failed (KeyError: 'mine')" in str(first.error), first.trace
    assert first.seconds < DETECTED_SECONDS


def zeroes_alone(setting: Setting, disk: str) -> None:
    """Two backwards a step; the first rank throws the gradients of the first one away."""
    run = Run(setting, disk)
    for part in range(2):
        x, y = batch(part, run.rank)
        nn.functional.mse_loss(run.model(x), y).backward()
        if part == 0 and run.rank == 0:
            run.optimizer.zero_grad()
    run.optimizer.step()


@pytest.mark.parametrize("unused", ["error", "sync"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_one_rank_has_thrown_away_are_missed(stage: int, unused: str, tmp_path: Path) -> None:
    for end in ends_on_ranks(2, zeroes_alone, Setting(stage, "host", fields={"unused": unused}), str(tmp_path)):
        assert end.kind == "RanksError", end.trace
        assert "rank 0: a gradient, the sum of 1," in str(end.error)
        assert "rank 1: a gradient, the sum of 2," in str(end.error)


def adds_up_unevenly(disk: str) -> list[torch.Tensor]:
    """As many micro-batches as a rank has, before all reduce."""
    run = Run(HOST, disk)
    with outsize.no_sync(run.model):
        for part in range(1 + run.rank):
            x, y = batch(part, run.rank)
            nn.functional.mse_loss(run.model(x), y).backward()
    run.step(5)
    return weights_of(run.model)


def test_ranks_may_add_up_other_numbers_of_micro_batches(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, adds_up_unevenly, str(tmp_path))
    assert same_bits(first, second)


def prepares_again(disk: str) -> None:
    """One rank's first model is gone when the second is made, the other's is still there."""
    run: Any = Run(HOST, disk)
    run.step(0)
    store = dist.distributed_c10d._get_default_store()
    if run.rank == 0:
        prepared(run.model).engine.reduction.ranks.model.close()  # as when it is collected
        store.wait(["waits"])
    else:
        store.set("waits", "1")
    Run(HOST, disk).step(1)


def test_a_model_that_is_gone_on_one_rank_is_no_reason_not_to_prepare_another(tmp_path: Path) -> None:
    ends = ends_on_ranks(2, prepares_again, str(tmp_path))
    assert all(end.error is None for end in ends), [end.trace for end in ends]


def chains_hooks(disk: str) -> int:
    """A library puts a hook of its own before ours; then another model is made."""
    shown: list[str] = []
    sys.excepthook = lambda kind, error, trace: shown.append(str(error))
    Run(HOST, disk).step(0)
    ours = sys.excepthook

    def library(kind: Any, error: Any, trace: Any) -> None:
        ours(kind, error, trace)

    sys.excepthook = library
    Run(HOST, disk).step(0)
    sys.excepthook(KeyError, KeyError("mine"), None)
    return len(shown)


def test_hooks_of_others_are_called_once(tmp_path: Path) -> None:
    assert run_on_ranks(2, chains_hooks, str(tmp_path)) == [1, 1]


def writes_otherwise(stage: int, mesh: tuple[int, ...], disk: str) -> None:
    run = Run(Setting(stage, "host", mesh=mesh), disk)
    with torch.no_grad(), outsize.gathered(run.model, modify=True):
        for param in run.model.parameters():
            param.mul_(0.5)  # the same on all
    run.step(0)
    with torch.no_grad(), outsize.gathered(run.model.head, modify=True):
        if run.rank == 0:
            run.model.head.weight.fill_(7.0)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("stage", "mesh"), [(0, ()), (3, ()), (3, (2, 1))], ids=str)
def test_other_changes_on_one_rank_are_an_error_on_all(stage: int, mesh: tuple[int, ...], tmp_path: Path) -> None:
    for end in ends_on_ranks(2, writes_otherwise, stage, mesh, str(tmp_path)):
        assert end.kind == "ValueError", end.trace
        assert "'head.weight' is " in str(end.error) and "make the same change on every rank" in str(end.error)
