"""Tensor-parallel ranks keep a part each of what all of them have: inputs of layers that run again (ZeRO-R's P_a)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import outsize
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.small_models import Built

WIDTH, ROWS, DEPTH = 32, 65, 3


class Block(Built, norm=lambda: nn.LayerNorm(WIDTH), up=(WIDTH, 64), down=(64, WIDTH)):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * mask


class Blocks(nn.Module):
    """`seen`: the memory of each layer's input. `noise`: ranks have other inputs, from the given step on. `written`:
    from there on the mask changes when the layers have used it."""

    def __init__(self, noise: int, written: int) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.seen: list[StorageWeakRef] = []
        self.noise, self.written, self.step = noise, written, 0

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(ROWS, WIDTH)
        x = self.start(x)
        if self.step >= self.noise:
            x = x + 0.01 * dist.get_rank()
        self.step += 1
        self.seen.clear()
        for layer in self.layers:
            self.seen.append(StorageWeakRef(x.untyped_storage()))
            x = layer(x, mask)
        if self.step > self.written:
            mask.zero_()
        return x


def run(mode: str, noise: int, disk: str | None, written: int = 9) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Blocks(noise, written)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fields = {"disk": disk, "activations_tier": "disk"} if mode == "offload" else {}
    places = dict.fromkeys(("params", "grads", "states"), "host")
    outsize.prepare(model, optimizer, mesh=mesh, host_memory="16MiB", activations=mode, **places, **fields)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    losses, whole = [], 0
    for _ in range(3):
        loss = model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
        whole = sum(not each.expired() for each in model.seen)
        take_step(loss, optimizer)
        losses.append(loss.item())
    with outsize.gathered(model):
        values = [getattr(each, "_local_tensor", each).detach().double().sum().item() for each in model.parameters()]
    return {"losses": losses, "values": values, "whole": whole}


@pytest.mark.parametrize(("ranks", "modes"), [(2, ("recompute", "offload", "selective")), (4, ("auto",))])
def test_each_rank_keeps_a_part_and_the_bits_stay(ranks: int, modes: tuple[str, ...], tmp_path: Path) -> None:
    for kept, *found in run_on_ranks(ranks, in_turn, *((run, mode, 9, str(tmp_path)) for mode in ("keep", *modes))):
        assert kept["whole"] >= DEPTH - 1
        for each in found:
            assert each["losses"] == kept["losses"]
            assert each["values"] == kept["values"]
            assert each["whole"] == 0


def test_inputs_that_differ_between_ranks_are_kept_whole() -> None:
    for kept, found in run_on_ranks(2, in_turn, *((run, mode, 0, None) for mode in ("keep", "recompute"))):
        assert found["losses"] == kept["losses"]
        assert found["values"] == kept["values"]
        assert found["whole"] == DEPTH


def test_inputs_that_begin_to_differ_are_an_error() -> None:
    with pytest.raises(Exception, match="had the same input for layer 'layers.2' at first, and others later"):
        run_on_ranks(2, run, "recompute", 1, None)


def test_what_is_written_to_after_layers_have_used_it_is_an_error() -> None:
    with pytest.raises(Exception, match="modified by an inplace operation"):
        run_on_ranks(2, run, "recompute", 9, None, 2)
