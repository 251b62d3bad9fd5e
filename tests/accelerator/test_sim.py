"""The simulated accelerator itself: right programs are right under every policy, and each kind of fault is caught."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import sim as simulator

POLICIES = ("now", "hold", "random")
COUNT = 1000


@pytest.fixture
def faulty(sim: Any) -> Iterator[Any]:
    """The device for a program that is wrong: what was found is the test's to look at."""
    yield sim
    sim._native.reset()


def pinned(value: float = 1.0) -> torch.Tensor:
    return torch.full((COUNT,), value).pin_memory()


@pytest.mark.parametrize("policy", POLICIES)
def test_training_gives_the_hosts_bits(policy: str) -> None:
    with simulator.switched_on(policy, seed=3):
        torch.manual_seed(0)
        host = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        device = copy.deepcopy(host).to("sim")
        batches = [torch.randn(5, 8) for _ in range(4)]
        for model in (host, device):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            at = next(model.parameters()).device
            for batch in batches:
                model(batch.pin_memory().to(at, non_blocking=True)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        for mine, theirs in zip(device.parameters(), host.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pipeline_with_its_waits_is_right(policy: str) -> None:
    with simulator.switched_on(policy, seed=1):
        lane = torch.Stream("sim")
        slab, out = pinned(), pinned(0.0)
        target = torch.empty(COUNT, device="sim")
        compute = torch.accelerator.current_stream()
        for step in range(5):
            slab.fill_(step)
            lane.wait_stream(compute)
            with lane:
                target.copy_(slab, non_blocking=True)
                arrived = lane.record_event()
            compute.wait_event(arrived)
            result = target * 2
            over = compute.record_event()
            lane.wait_event(over)
            with lane:
                out.copy_(result, non_blocking=True)
                result.record_stream(lane)
                home = lane.record_event()
            home.synchronize()
            assert out.eq(2 * step).all()


def test_a_missing_wait_is_caught(faulty: Any) -> None:
    lane = torch.Stream("sim")
    target = torch.zeros(COUNT, device="sim")
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        target.copy_(pinned(), non_blocking=True)
    with pytest.raises(RuntimeError, match=r"race: .*test_sim.py"):
        target.add(1)


def test_two_streams_that_write_are_caught(faulty: Any) -> None:
    lane = torch.Stream("sim")
    target = torch.zeros(COUNT, device="sim")
    lane.wait_stream(torch.accelerator.current_stream())
    target.add_(1)
    with lane, pytest.raises(RuntimeError, match="race"):
        target.add_(1)


def test_a_slab_overwritten_in_flight_is_caught(faulty: Any) -> None:
    slab = pinned()
    target = torch.empty(COUNT, device="sim")
    target.copy_(slab, non_blocking=True)
    slab.fill_(2)
    with pytest.raises(RuntimeError, match="overwritten in flight"):
        torch.accelerator.synchronize()


def test_a_result_read_before_its_event_is_poison(sim: Any) -> None:
    out = pinned()
    out.copy_(torch.zeros(COUNT, device="sim"), non_blocking=True)
    assert out.isnan().all()
    torch.accelerator.synchronize()
    assert out.eq(0).all()


def test_a_block_freed_early_is_caught(faulty: Any) -> None:
    lane = torch.Stream("sim")
    source = torch.zeros(COUNT, device="sim")
    out = pinned()
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        out.copy_(source, non_blocking=True)
    del source
    with pytest.raises(RuntimeError, match="new block"):
        torch.empty(COUNT, device="sim")


def test_unpinning_memory_in_flight_is_refused(faulty: Any) -> None:
    host = torch.ones(COUNT)
    faulty.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    target = torch.empty(COUNT, device="sim")
    target.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match="unpinned"):
        faulty.host_unregister(host.data_ptr())
    torch.accelerator.synchronize()
    faulty.host_unregister(host.data_ptr())


def test_the_cap_is_an_out_of_memory_error(sim: Any) -> None:
    before = sim.memory_allocated()  # of the tests that the process has run
    sim.set_memory_cap(before + (1 << 20))
    kept = torch.empty(3 << 18, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 19, dtype=torch.uint8, device="sim")
    del kept
    torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert sim.max_memory_allocated() - before == 1 << 20


def test_memory_that_is_given_back_leaves_its_neighbours(sim: Any) -> None:
    blocks = [torch.full((128,), float(index), device="sim") for index in range(64)]
    kept = blocks[1::2]
    del blocks
    sim.empty_cache()
    assert [block[0].item() for block in kept] == list(range(1, 64, 2))


def test_new_memory_is_poisoned_and_a_storage_comes_back(sim: Any) -> None:
    before = sim.memory_allocated()
    flat = torch.zeros(COUNT, device="sim")
    views = flat[:10]
    flat.untyped_storage().resize_(0)
    assert sim.memory_allocated() == before
    flat.untyped_storage().resize_(4 * COUNT)
    assert views.isnan().all()


def test_what_stops_the_host_is_counted(sim: Any) -> None:
    source = torch.zeros(COUNT, device="sim")
    source.sum().item()
    source.cpu()
    torch.accelerator.current_stream().record_event().synchronize()
    stops = {stop.kind: stop for stop in sim.counts()}
    assert {kind: stop.calls for kind, stop in stops.items()} == {"item": 1, "pageable copy": 1, "event": 1}
    assert all("test_sim.py" in stop.place for stop in stops.values())


def test_random_numbers_are_the_devices_own(sim: Any) -> None:
    before = torch.get_rng_state()
    state = sim.get_rng_state()
    first = nn.functional.dropout(torch.ones(100, device="sim"), 0.5).cpu()
    sim.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="sim"), 0.5).cpu(), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_scaler_work(sim: Any, dtype: torch.dtype) -> None:
    layer = nn.Linear(8, 4).to("sim")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=256.0)
    before = layer.weight.detach().cpu()
    with torch.autocast("sim", dtype=dtype):
        out = layer(torch.randn(3, 8, device="sim"))
    assert out.dtype is dtype
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight.detach().cpu(), before)


def test_the_clock_overlaps_a_copy_with_a_kernel(sim: Any) -> None:
    slab = pinned()
    target, other = torch.empty(COUNT, device="sim"), torch.zeros(COUNT, device="sim")
    lane = torch.Stream("sim")
    lane.wait_stream(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    sim.set_clock(1e12, memory=4 * COUNT / 0.05, to_device=4 * COUNT / 0.1)  # kernel: 0.1 s for 2 passes; copy: 0.1 s
    start, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    compute = torch.accelerator.current_stream()
    other.add_(1)
    start.record(compute)
    with lane:
        target.copy_(slab, non_blocking=True)
    other.add_(1)
    compute.wait_stream(lane)
    end.record(compute)
    torch.accelerator.synchronize()
    assert 0 < start.elapsed_time(end) < 150


def test_nothing_is_available_outside() -> None:
    assert not torch.accelerator.is_available()
