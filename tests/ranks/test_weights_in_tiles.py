"""Weights that are larger than the budget, on several ranks: each rank has some rows of every tile."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import outsize
from outsize.run import logits as of_logits
from tests.ranks.launching import ends_on_ranks, run_on_ranks
from tests.ranks.training import assert_near, named_weights, prepared, same_bits

WIDTH, HIDDEN, WORDS, EXPERTS = 64, 2048, 2101, 33
STEPS = 2
MEMORY_BYTES = 1280 << 10
"""Holds no unit of the model whole, and few tiles, which each rank has some rows of."""


class Wide(nn.Module):
    """An embedding with a bag and a head tied to it, linear layers, a convolution and a stack of experts."""

    def __init__(self, penalty: bool) -> None:
        super().__init__()
        self.penalty = penalty
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.image = nn.Conv1d(WIDTH, HIDDEN, 1)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 10)
        self.head = nn.Linear(WIDTH, WORDS)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="max")
        self.head.weight = self.bag.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.bag(ids)[:, None] / 30 + self.down(torch.tanh(self.up(self.words(ids)))) / 30
        x = x + torch.bmm(x.flatten(0, 1).expand(EXPERTS, -1, -1), self.experts).mean(0).view_as(x)
        x = x + functional.linear(torch.tanh(x), self.experts[4].t())
        if self.penalty:  # needs all of a weight
            x = x * (1 + self.up.weight.square().mean())
        return self.head(x + self.image(x.transpose(1, 2)).mean(1, keepdim=True).transpose(1, 2))


def ids(step: int, rank: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, WORDS, (2, 5), generator=generator).to(device)


def make(penalty: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Wide(penalty)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, batches: list[Tensor], backwards: int = 2) -> list[float]:
    """So many backwards in the first step."""
    losses = []
    for step, batch in enumerate(batches):
        parts = (batch, batch.flip(1))[: backwards if step == 0 else 1]
        for part in parts:
            loss = functional.cross_entropy(model(part).flatten(0, 1), part.flatten(), label_smoothing=0.1)
            with outsize.no_sync(model) if prepared(model) and part is not parts[-1] else nullcontext():
                loss.backward()
            losses.append(loss.item())
        if backwards > 1:
            losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


IN_TILES = {"words.weight", "up.weight", "down.weight", "image.weight", "experts"}


@dataclass(frozen=True)
class Way:
    """One way to train."""

    ranks: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    backwards: int = 2
    penalty: bool = False
    mesh: tuple[int, ...] = ()
    steps: int = STEPS


WAYS = {
    "two": Way(),
    "three": Way(3, backwards=1, steps=1),
    "two copies of two": Way(4, mesh=(2, 2), backwards=1, steps=1),
    "in the backward": Way(fields={"update": "backward"}, backwards=1),
    "stage 0": Way(fields={"stage": 0}),
    "one is also used whole": Way(fields={"activations": "recompute"}, backwards=1, penalty=True),
}


def begin(disk: str, way: Way) -> tuple[Any, Any]:
    of_logits.LEAST_BYTES = 1
    model, optimizer = make(way.penalty)
    mesh = {"mesh": init_device_mesh("cpu", way.mesh, mesh_dim_names=("copies", "split"))} if way.mesh else {}
    outsize.prepare(model, optimizer, **{"host_memory": MEMORY_BYTES, "disk": disk, **way.fields, **mesh})
    assert {tiles.name for tiles in prepared(model).engine.tiles.values()} == IN_TILES
    return model, optimizer


def in_tiles(disk: str, way: Way) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = begin(disk, way)
    ledger = prepared(model).resources.ledger
    ledger.peak = dict(ledger.now)
    device = way.fields.get("device", "cpu")
    losses = train(model, optimizer, [ids(step, dist.get_rank(), device) for step in range(way.steps)], way.backwards)
    if not way.penalty:
        computing = ("device/", "host/") if device == "cpu" else ("device/",)
        assert sum(size for name, size in ledger.peak.items() if name.startswith(computing)) <= MEMORY_BYTES
    return losses, named_weights(model)


def on_the_whole_batch(way: Way) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = make(way.penalty)
    batches = [torch.cat([ids(step, rank) for rank in range(way.ranks)]) for step in range(way.steps)]
    return train(model, optimizer, batches, way.backwards), named_weights(model)


@pytest.mark.parametrize("way", WAYS)
def test_weights_in_tiles_train_as_the_whole_batch_does(tmp_path: Path, way: str) -> None:
    assert_as_the_whole_batch(run_on_ranks(WAYS[way].ranks, in_tiles, str(tmp_path), WAYS[way]), WAYS[way])


def assert_as_the_whole_batch(found: list[tuple[list[float], dict[str, Tensor]]], way: Way) -> None:
    losses, weights = on_the_whole_batch(way)
    means = [sum(each) / len(found) for each in zip(*(each for each, _ in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    for _, each in found:
        assert same_bits(each.values(), found[0][1].values())
        assert_near(each.values(), weights.values(), rtol=1e-3, atol=2e-5)


def saved(disk: str, folder: str) -> None:
    model, optimizer = begin(disk, Way())
    train(model, optimizer, [ids(0, dist.get_rank())])
    outsize.save(folder, model, optimizer)


def saved_again(disk: str, before: str, folder: str) -> None:
    model, optimizer = begin(disk, Way())
    outsize.load(before, model, optimizer)
    outsize.save(folder, model, optimizer)


def of_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Weights and momenta, by one rank without tiles."""
    model, optimizer = make()
    outsize.prepare(model, optimizer, host_memory="64MiB")
    outsize.load(folder, model, optimizer)
    state = optimizer.state_dict()["state"]
    return {**named_weights(model), **{str(key): each["momentum_buffer"] for key, each in state.items()}}


def test_any_other_ranks_load_what_ranks_with_tiles_have_saved(tmp_path: Path) -> None:
    run_on_ranks(2, saved, str(tmp_path), str(tmp_path / "saved"))
    run_on_ranks(3, saved_again, str(tmp_path), str(tmp_path / "saved"), str(tmp_path / "again"))
    model, optimizer = make()
    batches = [torch.cat([ids(0, rank) for rank in range(2)])]
    train(model, optimizer, batches)
    expected = {**named_weights(model)}
    expected.update({str(key): each["momentum_buffer"] for key, each in optimizer.state_dict()["state"].items()})
    found, again = (of_checkpoint(tmp_path / name) for name in ("saved", "again"))
    assert same_bits(found.values(), again.values())
    assert_near(found.values(), expected.values(), rtol=1e-3, atol=2e-5)


def hits_another(disk: str) -> None:
    model, _ = begin(disk, Way())
    x = torch.ones(1, WIDTH)
    model.forward = lambda: functional.linear(x, model.experts[dist.get_rank() * 16]).sum()  # type: ignore[assignment]
    model().backward()


def refused(disk: str) -> None:
    for fields in ({"unused": "sync"}, {"stage": 2}):
        model, optimizer = make()
        with pytest.raises(ValueError, match="do not fit|needs"):
            outsize.prepare(model, optimizer, host_memory="1MiB", disk=disk, **fields)


def test_what_ranks_cannot_do_in_tiles_is_said(tmp_path: Path) -> None:
    run_on_ranks(2, refused, str(tmp_path))
    for end in ends_on_ranks(2, hits_another, str(tmp_path)):
        assert end.error is not None and "the ranks have gone different ways" in end.error


def in_bf16(disk: str) -> list[dict[str, Tensor]]:
    """With tiles, and without."""
    found = []
    for memory in ("1MiB", "64MiB"):
        torch.manual_seed(0)
        model: Any = Wide(penalty=False).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-3)
        places = dict.fromkeys(("params", "grads", "states"), "disk") if memory == "64MiB" else {}
        outsize.prepare(model, optimizer, host_memory=memory, disk=disk, **places)
        assert bool(prepared(model).engine.tiles) == (memory == "1MiB")
        train(model, optimizer, [ids(step, dist.get_rank()) for step in range(STEPS)])
        found.append(named_weights(model))
    return found


def test_bf16_with_fp32_masters_trains_as_without_tiles(tmp_path: Path) -> None:
    for with_tiles, without in run_on_ranks(2, in_bf16, str(tmp_path)):
        assert_near(with_tiles.values(), without.values(), rtol=2e-2, atol=3e-3)
