"""Each wait, event and mark on the way to an accelerator and back is removed in turn: some run must show it.

Left out, for they are redundant: `leave` where a unit is fetched or complete (it lets bytes come earlier; whoever fills
memory or gives it back leaves it first), and `dispatch` (without it a run stands still).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.move import outbox as leaving
from outsize.move.buffer import Buffer
from outsize.move.device import EventTransfer, Lanes
from outsize.move.gradients import GradShard
from outsize.move.outbox import Outbox
from outsize.move.shard import UnitShard
from outsize.move.transfer import ARRIVED
from outsize.optim.update import ChunkUpdater
from tests.accelerator import sim as simulator
from tests.accelerator.test_outsize import on_sim, stack, values
from tests.conftest import adamw, batches, prepared, squared_error, squeeze, take_step, train
from tests.ranks.launching import context
from tests.small_models import Stack

Weights = dict[str, Tensor]
Run = Callable[[Path], Weights]

# -- runs that use all of the path -----------------------------------------------------------------------------------


def made(folder: Path, params: str, grads: str, states: str, units: int = 2) -> tuple[nn.Module, Any]:
    model = stack()
    optimizer = adamw(model)
    tiers = {"params": params, "grads": grads, "states": states}
    outsize.prepare(model, optimizer, device="sim", host_memory="64MiB", disk=folder, **tiers)
    squeeze(model, units)
    return model, optimizer


def training(*tiers: str, units: int = 2) -> Run:
    def run(folder: Path) -> Weights:
        model, optimizer = made(folder, *tiers, units=units)
        train(model, optimizer, on_sim(batches(4)), clip=0.5)
        return values(model)

    return run


def accumulation(folder: Path) -> Weights:
    model, optimizer = made(folder, "host", "host", "host")
    for batch in on_sim(batches(3)):
        squared_error(model, batch).backward()
        take_step(squared_error(model, batch), optimizer, clip=(model.parameters(), 0.5))
    return values(model)


def gradients_larger_than_the_ring(folder: Path) -> Weights:
    torch.manual_seed(0)
    model = Stack(hidden=4096, depth=2)
    optimizer = adamw(model)
    outsize.prepare(
        model, optimizer, device="sim", host_memory="3MiB", disk=folder, params="disk", grads="disk", states="disk"
    )
    train(model, optimizer, on_sim(batches(2)), clip=0.5)
    return values(model)


def evaluation_beside(folder: Path, units: int = 5) -> Weights:
    model, optimizer = made(folder, "disk", "host", "host", units)
    beside = torch.Stream("sim")
    shown = []
    for x, y in on_sim(batches(3)):
        train(model, optimizer, [(x, y)])
        beside.wait_stream(torch.accelerator.current_stream())
        with beside, torch.no_grad():
            shown.append(model(x))
        with torch.no_grad():
            model(x)
        torch.accelerator.current_stream().wait_stream(beside)
    return {str(index): value.cpu() for index, value in enumerate(shown)}


def evaluation_beside_with_little_room(folder: Path) -> Weights:
    return evaluation_beside(folder, 3)


def checkpoint(folder: Path) -> Weights:
    model, optimizer = made(folder, "device", "device", "device")
    train(model, optimizer, on_sim(batches(2)))
    outsize.save(folder / "ckpt", model, optimizer).wait()
    train(model, optimizer, on_sim(batches(2)))
    outsize.load(folder / "ckpt", model, optimizer)
    train(model, optimizer, on_sim(batches(1)))
    return values(model)


def modification(folder: Path) -> Weights:
    """The user writes what the next update takes from the device."""
    model, optimizer = made(folder, "device", "device", "host")
    for batch in on_sim(batches(3)):
        squared_error(model, batch).backward()
        with outsize.gathered(model, modify=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(1.01)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def fetched_before_the_step(folder: Path) -> Weights:
    """Weights are on their way when the update is about to change them."""
    model, optimizer = made(folder, "host", "host", "host", units=5)
    for batch in on_sim(batches(3)):
        squared_error(model, batch).backward()
        prepared(model).engine.streamer.drop_idle()
        prepared(model).engine.streamer.prefetch()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def state_by_hand(folder: Path) -> Weights:
    """The optimizer's state is read and written right behind a step on the device."""
    model, optimizer = made(folder, "device", "device", "device")
    for batch in on_sim(batches(3)):
        take_step(squared_error(model, batch), optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    return values(model)


def closing(folder: Path) -> Weights:
    """The model goes while its weights are on their way."""
    model, optimizer = made(folder, "host", "host", "host", units=5)
    train(model, optimizer, on_sim(batches(2)))
    prepared(model).engine.streamer.drop_idle()
    prepared(model).engine.streamer.prefetch()
    return {}


RUNS: dict[str, Run] = {
    "accumulation": accumulation,
    "host": training("host", "host", "host"),
    "disk": training("disk", "disk", "disk"),
    "states on the host": training("device", "device", "host"),
    "states on the device": training("host", "host", "device"),
    "device": training("device", "device", "device"),
    "gradients larger than the ring": gradients_larger_than_the_ring,
    "modification": modification,
    "fetched before the step": fetched_before_the_step,
    "state by hand": state_by_hand,
    "evaluation beside": evaluation_beside,
    "evaluation beside, little room": evaluation_beside_with_little_room,
    "checkpoint": checkpoint,
    "closing": closing,
}

# -- faults ----------------------------------------------------------------------------------------------------------


def nothing(*args: Any, **kwargs: Any) -> None: ...


def use_without_waiting(memory: Any) -> None:
    stream = memory._lanes.current()
    memory._users[stream.stream_id] = stream


def nothing_for_states(memory: Any) -> None:
    if "states" not in memory._account:
        _use(memory)


def forget_users(memory: Any) -> None:
    memory._users.clear()


def await_nobody(memory: Any) -> None:
    memory.leave()
    memory._left.clear()


def grow_without_event(memory: Any) -> None:
    before = getattr(memory, "_filled", None)  # of an accelerator's
    _materialize(memory)
    memory._filled = before


def fetch_without_waiting(memory: Any, first: int, out: Tensor) -> Any:
    return memory._lanes.bring_home(memory.flat[first : first + out.numel()], out)


def send_and_forget(outbox: Any, source: Tensor, target: Tensor, ops: Any, norm: Any = None) -> Any:
    job = _send(outbox, source, target, ops, norm)
    outbox._pieces[:] = [(None, land) for _, land in outbox._pieces]
    return job


_read = threading.Event()


def read_at_once(shard: Any) -> None:
    _read.set()


def land_late(pieces: Any) -> Any:
    """A conveyor that is slow: it lands once somebody has read, or after a while."""
    _read.wait(0.05)
    _read.clear()
    return _land_all(pieces)


_land_all = leaving._land_all


def dispatch_at_once(outbox: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "sent", lambda lanes: ARRIVED)
        _dispatch(outbox)


_dispatch = Outbox.dispatch


def fill_and_forget(memory: Any, first: int, source: Tensor) -> Any:
    _fill(memory, first, source)
    return ARRIVED


_fill = Buffer.write
_use = Buffer.use
_materialize = Buffer.materialize
_send = Outbox.send
_steps = ChunkUpdater.steps


def steps_without_change(updater: Any, shard: Any, pending: Any, fetch: bool) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitShard, "before_change", nothing)
        steps = _steps(updater, shard, pending, fetch)
        first = next(steps)
    yield first
    yield from steps


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a stream does not wait for what was filled": (Buffer, "use", use_without_waiting),
    "an operation does not say that it uses the buffer": (Buffer, "use", nothing),
    "the users of memory are forgotten": (Buffer, "leave", forget_users),
    "memory is filled before its users are through": (Buffer, "_await_users", await_nobody),
    "memory that was given back is used before its last reader is through": (Buffer, "materialize", grow_without_event),
    "bytes are fetched before they are written": (Buffer, "read", fetch_without_waiting),
    "a gradient leaves before it is computed": (Lanes, "follow", nothing),
    "nobody waits for an event": (EventTransfer, "wait", nothing),
    "a copy passes for done": (Lanes, "sent", lambda lanes: ARRIVED),
    "a slab is used again before it was copied": (Buffer, "write", fill_and_forget),
    "parameters change while they are copied": (Buffer, "await_sources", nothing),
    "the update does not wait for copies of what it changes": (ChunkUpdater, "steps", steps_without_change),
    "gradients are laid to rest before they have arrived": (Outbox, "dispatch", dispatch_at_once),
    "a gradient's memory goes before it was copied": (Outbox, "send", send_and_forget),
    "the ring is used again before it is empty": (Outbox, "_overlaps", lambda outbox, first, end: False),
    "gradients are read before they have landed": (GradShard, "await_landed", read_at_once),
    "states on the device do not know who uses them": (Buffer, "use", nothing_for_states),
    "an engine is closed while copies run": (Lanes, "synchronize", nothing),
}


def finding(run: Run, policy: str, folder: Path, expected: Weights | None) -> str | Weights:
    """What the run gives, or what shows that it is wrong."""
    folder.mkdir()
    try:
        with simulator.switched_on(policy, seed=5):
            found = run(folder)
            gc.collect()
    except (RuntimeError, AssertionError, FloatingPointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    if expected is not None:
        wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
        if wrong:
            return f"{wrong[0]!r} is wrong"
    return found


SLOW: dict[str, tuple[Any, str, Any]] = {
    "gradients are read before they have landed": (leaving, "_land_all", land_late)
}
"""What makes a fault show, however fast the threads are. It is no fault itself."""


SHOWN_BY = {
    "bytes are fetched before they are written": "state by hand",
    "states on the device do not know who uses them": "state by hand",
    "a slab is used again before it was copied": "disk",
    "parameters change while they are copied": "fetched before the step",
    "the update does not wait for copies of what it changes": "fetched before the step",
    "an engine is closed while copies run": "closing",
}
"""The run that is made first, as the one that shows the fault; the others follow where it does not."""


def find(fault: str, folder: Path) -> str | None:
    """What shows the fault; None where nothing does. The oracle of a run is what it gives without the fault."""
    first = SHOWN_BY.get(fault, "accumulation")
    for name in sorted(RUNS, key=lambda each: each != first):
        right = finding(RUNS[name], "hold", folder / name, None)
        assert not isinstance(right, str), f"{name} without a fault: {right}"
        with pytest.MonkeyPatch.context() as patch:
            for faulty in [table[fault] for table in (FAULTS, SLOW) if fault in table]:
                patch.setattr(*faulty)
            for policy in ("hold", "random", "now") if fault in FAULTS else ("random", "now"):
                found = finding(RUNS[name], policy, folder / f"{name}, {policy}", right)
                if isinstance(found, str):
                    return f"{name}, {policy}: {found}"
    return None


FOUND, NOT_FOUND = 10, 11


def say(fault: str, folder: Path) -> None:
    """Ends the process with what was found."""
    torch.set_num_threads(1)
    simulator.load()
    gc.collect()
    gc.freeze()  # each run collects: what was imported needs no look
    code = NOT_FOUND if find(fault, folder) is None else FOUND
    os._exit(code)  # what the fault has left behind need not end in order


def found_in_a_process(fault: str, folder: Path) -> bool:
    """A process of its own: a copy from memory that is gone may end it, which is a finding, too."""
    process = context.Process(target=say, args=(fault, folder), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run stands still"
    assert process.exitcode < 0 or process.exitcode in (FOUND, NOT_FOUND), "an error that is no finding"
    return process.exitcode != NOT_FOUND


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert found_in_a_process(fault, tmp_path)


@pytest.mark.slow
def test_without_a_fault_nothing_is_found(tmp_path: Path) -> None:
    assert not found_in_a_process("none", tmp_path)
