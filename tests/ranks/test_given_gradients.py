"""Gradients that no backward of a prepared model has made: set by the script, or there before `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import Setting, fields_of, weights_of

RANKS = 2
LR = 0.25


def build() -> nn.Sequential:
    """The slice of rank 0 ends within a weight, and no slice with one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 330), nn.Linear(330, 50, bias=False))


def gradient(param: Tensor, number: int) -> Tensor:
    return torch.arange(param.numel(), dtype=torch.float32).view(param.shape) / 1024 + number


def prepared(stage: int, tier: str, disk: str, model: nn.Module, unused: str = "error") -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outsize.prepare(model, optimizer, units=["Linear"], unused=unused, **fields_of(Setting(stage, tier), disk))
    return optimizer


def train_with_set_gradients(stage: int, tier: str, unused: str, disk: str) -> tuple[list[Tensor], list[Tensor]]:
    """(weights, after steps with gradients that the script has set; gradients that a checkpoint holds)."""
    model = build()
    optimizer = prepared(stage, tier, disk, model, unused)
    for number, param in enumerate(model.parameters()):
        param.grad = gradient(param, number)
    outsize.save(f"{disk}/ckpt", model, optimizer).wait()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 70)).sum().backward()
    with outsize.gathered(model, grads=True, modify=True):
        for number, param in enumerate(model.parameters()):
            param.grad = gradient(param, number)  # another tensor, of the same values on every rank
    optimizer.step()
    found = weights_of(model)
    outsize.load(f"{disk}/ckpt", model, optimizer)
    with outsize.gathered(model, grads=True):
        return found, [param.grad.clone() for param in model.parameters() if param.grad is not None]


PLACES = [(0, "device"), (0, "host"), (1, "host"), (2, "disk"), (3, "device"), (3, "host"), (3, "disk")]
CASES = [(*place, "error") for place in PLACES]
CASES += [(stage, tier, "sync") for stage, tier in ((0, "host"), (2, "disk"), (3, "device"), (3, "disk"))]


def found_on_ranks(train: Callable[[int, str, str, str], Any], disk: Path) -> Iterator[tuple[Any, Any]]:
    """(case, what a rank has found there)."""
    for found in run_on_ranks(RANKS, in_turn, *((train, *case, str(disk)) for case in CASES)):
        yield from zip(CASES, found, strict=True)


def test_a_gradient_that_the_script_sets_is_used_on_every_rank(tmp_path: Path) -> None:
    plain = [param.detach() for param in build().parameters()]
    given = [gradient(param, number) for number, param in enumerate(plain)]
    for case, (found, restored) in found_on_ranks(train_with_set_gradients, tmp_path):
        for param, grad, each, again in zip(plain, given, found, restored, strict=True):
            assert torch.allclose(each, param - LR * grad - LR * grad, rtol=1e-6), case
            assert torch.equal(again, grad), case


def train_with_earlier_gradients(stage: int, tier: str, unused: str, disk: str) -> list[Tensor]:
    model = build()
    rank = dist.get_rank()
    for number, param in enumerate(model.parameters()):
        if number != 1:  # one has none, on every rank
            param.grad = gradient(param, number) * (1 + 2 * rank)
    optimizer = prepared(stage, tier, disk, model, unused)
    optimizer.step()
    return weights_of(model)


def test_of_gradients_from_before_prepare_the_mean_is_used(tmp_path: Path) -> None:
    plain = [param.detach() for param in build().parameters()]
    expected: list[Any] = [
        param - LR * 2 * gradient(param, number) if number != 1 else param for number, param in enumerate(plain)
    ]
    for case, found in found_on_ranks(train_with_earlier_gradients, tmp_path):
        assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(found, expected, strict=True)), case


def train_with_additions(stage: int, tier: str, unused: str, disk: str) -> tuple[float, list[Tensor]]:
    """(norm, weights after a step) where each rank has added something of its own to a gradient."""
    model = build()
    optimizer = prepared(stage, tier, disk, model, unused)
    model(torch.ones(2, 70)).sum().backward()
    for number, param in enumerate(model.parameters()):
        assert param.grad is not None
        param.grad.add_(gradient(param, number) * (1 + 2 * dist.get_rank()))
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))
    optimizer.step()
    return norm, weights_of(model)


def test_what_the_script_adds_is_part_of_the_mean(tmp_path: Path) -> None:
    plain = build()
    plain(torch.ones(2, 70)).sum().backward()
    total = [param.grad + 2 * gradient(param, number) for number, param in enumerate(plain.parameters())]
    expected = [param.detach() - LR * grad for param, grad in zip(plain.parameters(), total, strict=True)]
    for case, (norm, found) in found_on_ranks(train_with_additions, tmp_path):
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(total)), rel=1e-5), case
        assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(found, expected, strict=True)), case


def earlier_gradients_by_rank(disk: str) -> str:
    model = build()
    if dist.get_rank():
        model[0].bias.grad = torch.ones(330)
    with pytest.raises(ValueError, match="the ranks differ") as found:
        prepared(3, "host", disk, model)
    return str(found.value)


def test_gradients_from_before_prepare_on_one_rank_alone_are_refused(tmp_path: Path) -> None:
    for said in run_on_ranks(RANKS, earlier_gradients_by_rank, str(tmp_path)):
        assert "'the gradient of 0.bias' is none on rank 0 and there on rank 1" in said
