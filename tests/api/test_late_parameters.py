"""A model whose parameters are not those that `prepare` took is neither saved, loaded nor exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.api.checkpoint_runs import prepare

TIERS = ("device", "host", "disk")


class Net(nn.Module):
    """Two layers and a head, whose weight is tied to the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.embed(x))
        return self.head(x) if hasattr(self, "head") else x


def prepared(tier: str, tmp: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, tier, tmp)
    return model, optimizer


def add(model: Any) -> None:
    model.probe = nn.Linear(8, 2)


def replace(model: Any) -> None:
    model.body = nn.Linear(8, 8)


def remove(model: Any) -> None:
    del model.body


def swap(model: Any) -> None:
    model.embed, model.body = model.body, model.embed


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(8, 8))


CHANGES: dict[Callable[[Any], None], str] = {
    add: "took: 2 came after it: probe.weight, probe.bias. Add",
    replace: "2 came after it: body.weight, body.bias; 2 are no longer in the model: body.weight, body.bias. Add",
    remove: "took: 2 are no longer in the model: body.weight, body.bias. Add",
    swap: "took: 4 stand where another one stood: embed.weight, embed.bias, body.weight, body.bias. Add",
    untie: "took: 1 came after it: head.weight. Add",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tier", TIERS)
def test_parameters_that_came_or_went_since_prepare_are_named(
    tier: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    model, optimizer = prepared(tier, tmp_path)
    outsize.save(tmp_path / "before", model, optimizer).wait()
    message = f"outsize.%s: .*{CHANGES[change]}.*before outsize.prepare"
    change(model)
    with pytest.raises(ValueError, match=message % "save"):
        outsize.save(tmp_path / "saved", model, optimizer)
    with pytest.raises(ValueError, match=message % "load"):
        outsize.load(tmp_path / "before", model)
    for format in ("safetensors", "dcp"):
        with pytest.raises(ValueError, match=message % "export"):
            outsize.export(tmp_path / "saved", model, format=format)
    assert not (tmp_path / "saved").exists()
    outsize.load(tmp_path / "before", optimizer=optimizer)  # which is what it was


@pytest.mark.parametrize("tier", TIERS)
def test_a_tied_parameter_that_loses_a_name_is_saved_as_before(tier: str, tmp_path: Path) -> None:
    model, optimizer = prepared(tier, tmp_path)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    del model.head
    with outsize.gathered(model):
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    outsize.save(tmp_path / "saved", model, optimizer).wait()
    other, _ = prepared(tier, tmp_path)
    outsize.load(tmp_path / "saved", other)
    with outsize.gathered(other):
        assert all(torch.equal(param.detach(), expected[name]) for name, param in other.named_parameters())
