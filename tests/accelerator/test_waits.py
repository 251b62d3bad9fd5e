"""The training thread on the simulated accelerator: it waits for few numbers, and not for what has no elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.move import outbox
from tests.accelerator.test_outsize import on_sim, prepared_stack
from tests.conftest import Workshop, adamw, batches, squared_error, take_step
from tests.small_models import linears


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
@pytest.mark.parametrize("manner", ["plain", "accumulated", "scaled"])
def test_a_step_stops_the_host_for_few_numbers(
    sim: Any, workshop: Workshop, tiers: tuple[str, str, str], units: int, manner: str
) -> None:
    """The norm of the gradients and whether they are finite, and the scale of the loss: nothing for each unit."""
    kinds = dict(zip(("params", "grads", "states"), tiers, strict=True))
    model, optimizer = prepared_stack(workshop, units=units, disk=workshop.disk, **kinds)
    scaler = torch.amp.GradScaler("sim", init_scale=64.0, enabled=manner == "scaled")
    data = on_sim(batches(8))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        for _ in range(3 if manner == "accumulated" else 1):
            scaler.scale(squared_error(model, batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for batch in data[:3]:
        step(batch)
    sim.reset_counts()
    for batch in data[3:]:
        step(batch)
    found = stops(sim)
    conveyor = {kind: found.pop(kind) for kind in list(found) if kind.startswith("conveyor")}
    numbers = {"plain": 2, "accumulated": 2, "scaled": 5}[manner]
    assert found.pop("item") <= numbers * 5
    assert not found
    assert not conveyor.keys() - {"conveyor: event"}


def test_gradients_leave_in_quarters_of_the_ring(sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linears(64, 4, bias=False)
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, "host", device="sim", units=[nn.Sequential])
    landed: list[int] = []
    land = outbox._land_all
    monkeypatch.setattr(outbox, "_land_all", lambda pieces: landed.append(len(pieces)) or land(pieces))
    model(torch.ones(2, 64, device="sim")).sum().backward()
    with outsize.gathered(model, grads=True):  # waits until they have landed
        assert landed == [1, 1, 1, 1]


def test_gradients_without_elements_are_not_waited_for(sim: Any, workshop: Workshop) -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.none.sum()

    model, optimizer = workshop.made(Odd, tier="host", device="sim")
    for batch in on_sim(batches(2)):
        squared_error(model, batch).backward()
        take_step(squared_error(model, batch), optimizer)
