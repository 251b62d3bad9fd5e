"""Quantized weights on several ranks: each rank has its part of the tensors inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from tests.conftest import take_step
from tests.ranks.launching import ends_on_ranks, run_on_ranks
from tests.ranks.training import assert_near
from tests.run.codes import Adapted, Nested

RANKS, WIDTH = 2, 64


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(Nested) for _ in range(3)))
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> list[float]:
    made, found = torch.Generator().manual_seed(5), []
    for x in torch.randn(3, 8, WIDTH, generator=made):
        found.append(take_step(model(x[rows]).square().mean(), optimizer).item())
    return found


def train(settings: list[tuple[int, str]], disk: str) -> list[tuple[list[float], Tensor, int]]:
    """(losses, the values of a quantized weight at the end, bytes of frozen parameters at rest) of each setting."""
    found = []
    for stage, tier in settings:
        model, optimizer = build()
        places: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), tier)
        outsize.prepare(
            model, optimizer, device="cpu", host_memory="64MiB", disk=disk, stage=stage, units=Adapted, **places
        )
        rank = dist.get_rank()
        own = losses(model, optimizer, slice(4 * rank, 4 * rank + 4))
        now = outsize.memory(model).now
        resting = sum(now.get(f"{each}/params", 0) for each in ("device", "host", "disk"))
        outsize.save(Path(disk) / f"saved-{stage}-{tier}", model, optimizer).wait()
        outsize.release(model)
        weight: Any = model[0].base.weight  # type: ignore[index,union-attr]
        assert type(weight) is Nested
        found.append((own, weight.dequantize(), resting))
    return found


def test_ranks_train_as_one_does_on_all_rows(tmp_path: Path) -> None:
    settings = [(3, "host"), (3, "disk"), (1, "device")]
    plain, optimizer = build()
    expected = losses(plain, optimizer, slice(None))
    weight: Any = plain[0].base.weight  # type: ignore[index,union-attr]
    ranks = run_on_ranks(RANKS, train, settings, str(tmp_path))
    for at in range(len(settings)):
        own = [found[at][0] for found in ranks]
        assert_near([torch.tensor(own).mean(0)], [torch.tensor(expected)], atol=1e-6)
        for found in ranks:
            assert torch.equal(found[at][1], weight.dequantize())
        assert own == [found[0][0] for found in ranks]  # the same bits at every stage, on every tier
    plan = outsize.plan(plain, optimizer, host_memory="64MiB", device="cpu", ranks=RANKS, units=Adapted)
    part = sum(unit.size.params for unit in plan.units)
    assert [resting for _, _, resting in ranks[0]][:2] == [part, part]
    model, one = build(1)  # one rank goes on
    outsize.prepare(model, one, device="cpu", host_memory="64MiB", disk=tmp_path, units=Adapted)
    outsize.load(tmp_path / "saved-3-disk", model, one)
    assert losses(model, one, slice(None)) == pytest.approx(losses(plain, optimizer, slice(None)), rel=1e-5)


def prepare_others(disk: str) -> None:
    model, _ = build(dist.get_rank())
    outsize.prepare(model, device="cpu", host_memory="64MiB", disk=disk)


def test_other_values_on_another_rank_are_refused(tmp_path: Path) -> None:
    for end in ends_on_ranks(RANKS, prepare_others, str(tmp_path)):
        assert "the ranks differ in the values of their parameters: '0.base.weight.codes'" in str(end.error)
