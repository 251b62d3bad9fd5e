"""Activations on the simulated accelerator: inputs of layers that move out, or have memory of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.accelerator import sim as simulator
from tests.accelerator.test_outsize import on_sim
from tests.conftest import Workshop, adamw, batches, squared_error, train
from tests.small_models import Built, Stack

KIB = 1 << 10


def moved_out(workshop: Workshop, **fields: Any) -> tuple[list[float], dict[str, int]]:
    """The losses with inputs of 1 MiB a layer, and the peaks of memory."""
    model, optimizer = workshop.made(lambda: Stack(depth=12), tier="device", device="sim", **fields)
    trace = train(model, optimizer, on_sim(batches(2, rows=1 << 14)))
    return trace.losses, dict(outsize.memory(model).peak)


def test_inputs_that_the_host_has_no_room_for_go_to_disk(sim: Any, workshop: Workshop) -> None:
    expected, _ = moved_out(workshop, activations="keep")
    losses, all_on_host = moved_out(workshop, activations="offload", disk=workshop.disk)
    assert losses == expected
    assert all_on_host["host/activations"] == 11 << 20 and "disk/activations" not in all_on_host
    little = {"activations": "offload", "host_memory": "5MiB"}
    losses, peak = moved_out(workshop, disk=workshop.disk, **little)
    assert losses == expected
    assert 0 < peak["host/activations"] < 5 << 20 and peak["disk/activations"] > 6 << 20
    with pytest.raises(OSError, match=r"raise host_memory by [\d.]+ KiB at least, name a disk"):
        moved_out(workshop, **little)


def test_inputs_that_move_out_take_as_much_of_the_device_whatever_the_depth(sim: Any, workshop: Workshop) -> None:
    """At most three of them beside what one layer takes that keeps all."""
    rows = 1 << 13
    nbytes = rows * 16 * 4

    def most(depth: int, **fields: Any) -> int:
        model = Stack(depth=depth)
        workshop.prepare(model, adamw(model), "device", device="sim", disk=workshop.disk, **fields)
        (batch,) = on_sim(batches(1, rows=rows))
        before = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        squared_error(model, batch).backward()
        return (
            int(sim.max_memory_allocated()) - before - sum(max(param.numel() * 4, 512) for param in model.parameters())
        )

    alone = most(1, activations="keep")
    for place, depths in (("host", (12, 48)), ("disk", (12, 48))):
        taken = [most(depth, activations="offload", activations_tier=place) for depth in depths]
        assert max(taken) <= alone + 3 * nbytes, [(each - alone) / nbytes for each in taken]


class WithMemory(Built, encoder=(16, 16), layers=lambda: nn.ModuleList(Attending() for _ in range(6)), head=(16, 4)):
    """Each layer gets the result of the one before it, and what all layers get."""

    def forward(self, x: Tensor) -> Tensor:
        memory, mask = self.encoder(x), torch.ones_like(x)
        for layer in self.layers:
            x = layer(x, memory, mask)
        return self.head(x)


class Attending(Built, mixed=(16, 16)):
    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.mixed(x) * memory * mask)


def in_pool(sim: Any, workshop: Workshop, make: Any, **fields: Any) -> tuple[list[float], int]:
    """The losses of two steps, and the bytes in pools between forward and backward; none are there afterwards."""
    model, optimizer = workshop.made(make, tier="host", device="sim", **fields)
    losses, most = [], 0
    for x, y in on_sim(batches(2, rows=1 << 14)):
        loss = squared_error(model, (x, y))
        most = max(most, sim.pooled())
        loss.backward()
        losses.append(loss.item())
        assert sim.pooled() == 0
        optimizer.step()
        optimizer.zero_grad()
    return losses, most


@pytest.mark.parametrize("sim", ["random"], indirect=True)
def test_inputs_that_stay_on_the_device_have_memory_of_their_own(
    sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-R's M_D. What earlier layers have made is there once, and what the model's forward keeps anyway is not."""
    mib, tiers = 1 << 20, {"tiles": False}
    deep = partial(Stack, depth=6)
    expected = in_pool(sim, workshop, deep, activations="keep", **tiers)
    assert expected[1] == 0
    for mode in ("recompute", "selective"):
        losses, most = in_pool(sim, workshop, deep, activations=mode, **tiers)
        assert losses == expected[0]
        assert most == 5 * mib
    assert in_pool(sim, workshop, deep, activations="offload", **tiers) == expected
    losses, most = in_pool(sim, workshop, WithMemory, activations="recompute", **tiers)
    assert losses == in_pool(sim, workshop, WithMemory, activations="keep", **tiers)[0]
    assert most == (5 + 1) * mib
    monkeypatch.delattr(simulator, "MemPool")
    assert in_pool(sim, workshop, deep, activations="recompute", **tiers) == expected


def test_memory_whose_segments_grow_has_no_pool(sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses one then, in some versions."""

    def refuse(use_on_oom: bool = False) -> None:
        raise RuntimeError("MemPool does not support expandable segments")

    monkeypatch.setattr(simulator, "MemPool", refuse)
    assert in_pool(sim, workshop, partial(Stack, depth=6), activations="recompute")[1] == 0


class Rewritten(Built, encoder=(16, 16), mixed=Attending, head=(16, 4)):
    """What its layer has used changes before the backward, once `rewrites` says so."""

    rewrites = False

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.encoder(x), torch.ones_like(x)
        y = self.mixed(x, x, mask)
        if self.rewrites:
            mask.zero_()
        return self.head(y)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("sim", ["random"], indirect=True)
def test_what_is_written_to_after_a_layer_has_used_it_is_an_error(sim: Any, workshop: Workshop, mode: str) -> None:
    """Torch's own, also where what the layer keeps goes by hooks, and where it is known to give the same again."""
    model = Rewritten()
    workshop.prepare(model, adamw(model), "host", device="sim", activations=mode, tiles=False, units=["mixed"])
    for _ in range(2):
        model(torch.randn(8, 16).to("sim")).sum().backward()
    model.rewrites = True
    loss = model(torch.randn(8, 16).to("sim")).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|written to in place"):
        loss.backward()
