"""The device budget, on models of five kinds: what outsize takes of the device's memory, counted by the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import outsize
from outsize.planning.layout import PAGE_ELEMENTS
from tests.accelerator import sim as simulator
from tests.accelerator.test_outsize import on_sim, prepared_stack
from tests.conftest import Workshop, adamw, batches, prepared, squared_error, take_step, train
from tests.small_models import Built, Stack, linears

KIB = 1 << 10


class Tied(
    Built,
    embed=lambda: nn.Embedding(200, 32),
    layers=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4)]),
):
    """An embedding that is the head, too."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs() * 50).long().clamp(max=199)[:, :4]
        return self.layers(self.embed(rows)).mean(1) @ self.embed.weight.t()


def in_a_row(*widths: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers alike": lambda: Stack(16, 100, 8),
    "a large head": lambda: in_a_row(16, 32, 32, 32, 32, 600),
    "a large layer in the middle": lambda: in_a_row(16, 32, 300, 300, 32, 16),
    "many small layers": lambda: in_a_row(*[16] * 24),
    "tied weights": Tied,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    take_step(model(x).square().mean(), optimizer, clip=(model.parameters(), 1.0))


@pytest.mark.parametrize("tiers", [("host", "host", "host"), ("disk", "disk", "disk"), ("host", "host", "device")])
@pytest.mark.parametrize("kind", MODELS)
def test_the_budget_of_the_device_is_kept(sim: Any, workshop: Workshop, kind: str, tiers: tuple[str, str, str]) -> None:
    """What is taken beyond it is what the same step takes in plain torch beside weights, gradients and states."""
    torch.manual_seed(0)
    plain = MODELS[kind]().to("sim")
    x = torch.randn(8, 16, device="sim")
    optimizer = adamw(plain)
    for _ in range(2):
        step(plain, optimizer, x)
    gc.collect()
    sim.reset_peak_memory_stats()
    loss = plain(x).square().mean()
    beside = sim.memory_allocated() - sum(4 * param.numel() * 3 for param in plain.parameters())
    del loss, plain, optimizer
    gc.collect()
    before = sim.memory_allocated()

    model = MODELS[kind]()
    optimizer = adamw(model)
    kinds = dict(zip(("params", "grads", "states"), tiers, strict=True))
    fields = {"device": "sim", "disk": workshop.disk, **kinds}
    planned = outsize.plan(model, optimizer, host_memory="64MiB", device_memory="4MiB", **fields)
    sizes = [unit.size for unit in planned.units]
    budget = max(size.working for size in sizes) + 2 * max(size.params for size in sizes)
    slack = 16 * KIB
    if tiers[2] == "device":
        budget += sum(size.states for size in sizes)
        slack += len(sizes) * 2 * 4 * PAGE_ELEMENTS  # arrays rest in whole pages
    workshop.prepare(model, optimizer, device_memory=budget, **fields)
    sim.reset_peak_memory_stats()
    for _ in range(3):
        step(model, optimizer, x)
    workshop.settle(model)
    assert sim.max_memory_allocated() - before <= budget + beside + slack
    assert prepared(model).engine.streamer.room.excess.most_needed == 0


def test_the_budget_of_the_host_is_kept_by_gradients_on_their_way_to_disk(sim: Any, workshop: Workshop) -> None:
    def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = linears(512, 10)
        return model, adamw(model)

    fields: dict[str, Any] = {"device": "sim", "device_memory": "8MiB", "disk": workshop.disk}
    with pytest.raises(outsize.BudgetError, match=r"gradients on their way .* raise host_memory to at least") as caught:
        outsize.prepare(*wide(), host_memory="512KiB", **fields)
    model, optimizer = wide()
    workshop.prepare(model, optimizer, host_memory=caught.value.needed, **fields)
    for _ in range(3):
        step(model, optimizer, torch.randn(4, 512, device="sim"))
    workshop.settle(model)
    peak = outsize.memory(model).peak
    assert sum(nbytes for name, nbytes in peak.items() if name.startswith("host")) <= caught.value.needed


class Widened(Built, base=(16, 16), more=lambda: nn.Parameter(torch.zeros(16, 16))):
    """As adapters of single parameters do it: a parametrization for the time of the call."""

    def forward(self, x: Tensor) -> Tensor:
        class Plus(nn.Module):
            def forward(_, weight: Tensor) -> Tensor:
                return weight + self.more

        parametrize.register_parametrization(self.base, "weight", Plus())
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_weight_at_rest_that_is_set_to_itself_takes_no_memory(sim: Any, workshop: Workshop) -> None:
    data = [(x, x.tanh()) for x, _ in batches(3)]
    pair = workshop.pair(
        lambda: nn.Sequential(*[Widened() for _ in range(4)]), tier="squeezed", device="sim", units=nn.Linear
    )
    trace = train(pair.model, pair.optimizer, on_sim(data))
    trace.close_to(train(pair.plain, pair.plain_optimizer, data))


def test_a_unit_for_which_there_is_no_memory_names_the_remedy(sim: Any, workshop: Workshop) -> None:
    model, _ = prepared_stack(workshop)
    x = on_sim(batches(1))[0][0]
    sim.set_memory_cap(sim.memory_allocated() + KIB)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"unit 'blocks.0': lower device_memory.*activations='recompute'.*outsize.tiled"
    ):
        model(x)
    sim.set_memory_cap(1 << 30)
    model(x)


def test_gradients_on_their_way_to_disk_take_nothing_of_the_device(sim: Any, workshop: Workshop) -> None:
    model, _ = prepared_stack(workshop, "disk", units=5)
    engine = prepared(model).engine
    engine.streamer.room.planned_capacity = sum(unit.nbytes for unit in engine.parameters.units)
    squared_error(model, on_sim(batches(1))[0]).backward()
    assert all(unit.shard.buffer.resident for unit in engine.parameters.units)


def test_a_device_that_does_not_tell_of_its_memory_wants_a_budget(
    sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(simulator, "mem_get_info")
    with pytest.raises(ValueError, match="torch does not tell how much memory sim:0 has free: give device_memory"):
        workshop.prepare(nn.Linear(4, 4), device="sim")
    model = nn.Linear(4, 4)
    workshop.prepare(model, device="sim", device_memory="1MiB")
    outsize.release(model)


def test_state_that_comes_in_mid_run_takes_no_memory_of_a_full_device(sim: Any) -> None:
    """Without a disk it goes to host memory, where the rest of its unit is."""
    model = in_a_row(*[64] * 9)
    optimizer = adamw(model[:4])  # type: ignore[index]
    most = 64 * KIB  # of 130 KiB of weights
    outsize.prepare(model, optimizer, device="sim", device_memory=most, host_memory="64MiB")
    x = torch.randn(8, 64, device="sim")
    step(model, optimizer, x)
    optimizer.add_param_group({"params": list(model[4:].parameters())})  # type: ignore[index]
    for _ in range(2):
        step(model, optimizer, x)
    now = outsize.memory(model).now
    assert sum(nbytes for name, nbytes in now.items() if name.startswith("device/")) <= most
    assert now.get("device/states", 0) == 0
