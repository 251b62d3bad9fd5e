"""outsize on the simulated accelerator: every mixture of tiers trains like torch, whenever the copies run."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.move.conveyor import Job, Step
from outsize.move.memory import HostBuffer
from tests.conftest import Stack, Trace, Workshop, adamw, batches, prepared, squared_error, squeeze, train, weights

KIB = 1 << 10
POLICIES = ("now", "hold", "random")
TIERS = ("device", "host", "disk")
MIXTURES = list(itertools.product(TIERS, repeat=3))
anytime = pytest.mark.parametrize("sim", POLICIES, indirect=True)


def on_sim(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to("sim"), y.to("sim")) for x, y in data]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in weights(model).items()}


def trained(workshop: Workshop, tiers: tuple[str, str, str], **fields: Any) -> tuple[Trace, dict[str, Tensor]]:
    """What a run shows, and the weights that it ends with, with room for two units only."""
    model = stack()
    optimizer = adamw(model)
    kinds = dict(zip(("params", "grads", "states"), tiers, strict=True))
    workshop.prepare(model, optimizer, device="sim", disk=workshop.disk, **kinds, **fields)
    squeeze(model)
    trace = train(model, optimizer, on_sim(batches(5)), clip=0.5)
    return trace, values(model)


@anytime
@pytest.mark.parametrize("tiers", MIXTURES, ids="-".join)
def test_every_mixture_of_tiers_trains_like_torch(sim: Any, workshop: Workshop, tiers: tuple[str, str, str]) -> None:
    trace, mine = trained(workshop, tiers)
    plain = stack().to("sim")
    trace.close_to(train(plain, adamw(plain), on_sim(batches(5)), clip=0.5))
    torch.testing.assert_close(mine, values(plain), rtol=0, atol=1e-5)


def test_host_and_disk_give_the_same_bits(sim: Any, workshop: Workshop) -> None:
    mixtures = [tiers for tiers in MIXTURES if tiers != ("device", "device", "device")]
    results = [trained(workshop, tiers) for tiers in mixtures]
    for trace, found in results[1:]:
        assert trace == results[0][0]
        assert all(torch.equal(value, results[0][1][name]) for name, value in found.items())


# -- streams ---------------------------------------------------------------------------------------------------------


def prepared_stack(workshop: Workshop, tier: str = "host", units: int = 2, **fields: Any) -> tuple[nn.Module, Any]:
    model = stack()
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, tier, device="sim", **fields)
    squeeze(model, units)
    return model, optimizer


@anytime
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("units", [2, 3, 5])
def test_evaluation_on_a_second_stream_sees_the_weights(sim: Any, workshop: Workshop, tier: str, units: int) -> None:
    """The stream waits for the step, as in torch; weights that still arrive, and those to come, are ours to order."""
    model, optimizer = prepared_stack(workshop, tier, units)
    plain = stack().to("sim")
    plain_optimizer = adamw(plain)
    beside = torch.Stream("sim")
    for x, y in on_sim(batches(4)):
        shown = []
        for each, stepped in ((model, optimizer), (plain, plain_optimizer)):
            train(each, stepped, [(x, y)])
            beside.wait_stream(torch.accelerator.current_stream())
            with beside, torch.no_grad():
                shown.append(each(x))
                again = each(x)
            with torch.no_grad():
                each(x)  # on the first stream, which takes units from the second
            torch.accelerator.current_stream().wait_stream(beside)
            assert torch.equal(again, shown[-1])
        torch.testing.assert_close(shown[0].cpu(), shown[1].cpu(), rtol=0, atol=1e-5)


@anytime
def test_a_loop_on_a_stream_of_its_own_trains_alike(sim: Any, workshop: Workshop) -> None:
    model, optimizer = prepared_stack(workshop)
    expected = trained(workshop, ("host", "host", "host"))[0]
    data = on_sim(batches(5))
    own = torch.Stream("sim")
    own.wait_stream(torch.accelerator.current_stream())
    with own:
        assert train(model, optimizer, data[:3], clip=0.5).losses == expected.losses[:3]
    torch.accelerator.current_stream().wait_stream(own)
    assert train(model, optimizer, data[3:], clip=0.5).losses == expected.losses[3:]


# -- the host never waits --------------------------------------------------------------------------------------------


def stops(sim: Any) -> dict[str, int]:
    """What has stopped the training thread, and what the conveyor, by kind."""
    found: dict[str, int] = {}
    for stop in sim.counts():
        name = stop.kind if "conveyor" not in stop.thread else f"conveyor: {stop.kind}"
        found[name] = found.get(name, 0) + stop.calls
    return found


@pytest.mark.parametrize("units", [2, 5])
@pytest.mark.parametrize(
    "tiers", [("host", "host", "host"), ("device", "device", "host"), ("disk", "disk", "disk")], ids="-".join
)
def test_a_step_stops_the_host_for_two_numbers(
    sim: Any, workshop: Workshop, tiers: tuple[str, str, str], units: int
) -> None:
    """The norm of the gradients and whether they are finite: nothing for each unit."""
    kinds = dict(zip(("params", "grads", "states"), tiers, strict=True))
    model, optimizer = prepared_stack(workshop, units=units, disk=workshop.disk, **kinds)
    data = on_sim(batches(8))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        squared_error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for batch in data[:3]:
        step(batch)
    sim.reset_counts()
    for batch in data[3:]:
        step(batch)
    found = stops(sim)
    conveyor = {kind: found.pop(kind) for kind in list(found) if kind.startswith("conveyor")}
    assert found == {"item": 2 * 5}
    assert not conveyor.keys() - {"conveyor: event"}


def test_gradients_without_elements_are_not_waited_for(sim: Any, workshop: Workshop) -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.none.sum()

    model = Odd()
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, "host", device="sim")
    for batch in on_sim(batches(2)):
        squared_error(model, batch).backward()
        squared_error(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_an_optional_fetch_that_finds_no_memory_is_given_up(sim: Any, workshop: Workshop) -> None:
    """The budget has room for the next units, and somebody else has taken it for a moment."""
    expected = trained(workshop, ("host", "host", "host"))[1]
    model, optimizer = prepared_stack(workshop, units=5)
    for batch in on_sim(batches(5)):
        squared_error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        streamer = prepared(model).engine.streamer
        streamer.drop_idle()
        sim.set_memory_cap(sim.memory_allocated() + KIB)
        streamer.prefetch()
        sim.set_memory_cap(1 << 30)
        optimizer.zero_grad()
    assert sim.memory_stats()["num_ooms"] >= 5
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


def test_a_unit_for_which_there_is_no_memory_names_the_remedy(sim: Any, workshop: Workshop) -> None:
    model, _ = prepared_stack(workshop)
    x = on_sim(batches(1))[0][0]
    sim.set_memory_cap(sim.memory_allocated() + KIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"unit 'blocks.0': lower device_memory.*activations='recompute'"):
        model(x)
    sim.set_memory_cap(1 << 30)
    model(x)


def test_gradients_on_their_way_to_disk_take_nothing_of_the_device(sim: Any, workshop: Workshop) -> None:
    model, _ = prepared_stack(workshop, "disk", units=5)
    engine = prepared(model).engine
    engine.streamer._planned_capacity = sum(unit.nbytes for unit in engine.units)
    squared_error(model, on_sim(batches(1))[0]).backward()
    assert all(unit.shard.buffer.resident for unit in engine.units)


@pytest.mark.parametrize("tier", TIERS)
def test_what_lies_between_parameters_is_zero(sim: Any, workshop: Workshop, tier: str) -> None:
    """It is stored and saved with them: what the device's memory held before must not get into a checkpoint."""
    model, optimizer = prepared_stack(workshop, tier)
    train(model, optimizer, on_sim(batches(2)))
    workshop.settle(model)
    for unit in prepared(model).engine.units:
        shard = unit.shard
        content = HostBuffer(shard.layout.param_bytes).bytes
        read = shard.buffer.fetch if shard.params is None else shard.params.read
        for segment in shard.layout.segments:
            end = segment.byte_start + segment.numel * segment.itemsize
            read(segment.byte_start, content[segment.byte_start : end]).wait()
        for slot in shard.layout.slots:
            first, nbytes = shard.param_layout.span(slot.offset, slot.end)
            content[first : first + nbytes] = 0
        assert not content.any()


def test_the_optimizers_state_is_where_torch_has_it(sim: Any, workshop: Workshop) -> None:
    model, optimizer = prepared_stack(workshop)
    plain = stack().to("sim")
    plain_optimizer = adamw(plain)
    for each, stepped in ((model, optimizer), (plain, plain_optimizer)):
        train(each, stepped, on_sim(batches(1)))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        ours, torchs = optimizer.state[mine], plain_optimizer.state[theirs]
        assert {key: value.device for key, value in ours.items()} == {
            key: value.device for key, value in torchs.items()
        }
        torch.testing.assert_close(ours["exp_avg"].cpu(), torchs["exp_avg"].cpu(), rtol=1e-5, atol=1e-7)
    assert all(value.device.type == "cpu" for value in optimizer.state_dict()["state"][0].values())


class _Collects(Step):
    """A step on the conveyor's thread in which the collector runs, once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def begin(self, slabs: list[Tensor]) -> Any:
        return ()

    def finish(self) -> Any:
        assert self.may.wait(60)
        gc.collect()
        return ()


@anytime
def test_the_collector_may_close_the_engine_on_the_conveyors_thread(sim: Any, workshop: Workshop) -> None:
    model, optimizer = prepared_stack(workshop, "disk")
    train(model, optimizer, on_sim(batches(2)))
    resources = weakref.ref(prepared(model).resources)
    step = _Collects()
    job = prepared(model).resources.conveyor.submit(Job([step]))
    prepared(model).engine.streamer.prefetch()
    gc.disable()
    try:
        del model, optimizer
        step.may.set()
        job.wait()
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "outsize-close":
            thread.join()
    assert resources() is None or not resources().shards  # type: ignore[union-attr]
