"""What modules keep beside parameters and buffers goes with a checkpoint, as it does with torch's state dicts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.api.checkpoint_runs import prepare
from tests.conftest import take_step
from tests.small_models import Built


class Scaled(Built, inner=(20, 20), scale=lambda: 1.0, history=lambda: torch.zeros(4)):
    """As modules that compute in 8 bits do: a scale, and the history that it is taken from."""

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.history = state["scale"], state["history"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale *= 1.01
        self.history = self.history.roll(1) + self.scale
        return self.inner(x) * self.scale


class Opaque(Scaled):
    def get_extra_state(self) -> Any:
        return {"scale": object()}


def prepared(tmp: Path, *layers: nn.Module, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 20), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(model, optimizer, "disk", tmp)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return take_step(model(torch.ones(3, 20)).square().mean(), optimizer).item()


def test_extra_states_are_restored_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, Scaled(), Scaled())
    train(model, optimizer)
    outsize.save(tmp_path / "ckpt", model, optimizer, {"history": torch.ones(2)}).wait()
    expected = [train(model, optimizer) for _ in range(2)]
    other, others = prepared(tmp_path, Scaled(), Scaled(), seed=1)
    extra = outsize.load(tmp_path / "ckpt", other, others)
    assert torch.equal(extra["history"], torch.ones(2, device="cpu"))
    assert [train(other, others) for _ in range(2)] == expected


def test_an_extra_state_that_cannot_be_stored_is_refused_with_its_module(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, Opaque())
    with pytest.raises(TypeError, match=r"1\._extra_state\['scale'\] is a builtins.object"):
        outsize.save(tmp_path / "ckpt", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_what_only_one_side_has_is_refused_unless_it_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = prepared(tmp_path, Scaled())
    outsize.save(tmp_path / "with", model, optimizer).wait()
    plain = nn.Sequential()
    plain.inner = nn.Linear(20, 20)
    without, withouts = prepared(tmp_path, plain)
    outsize.save(tmp_path / "without", without, withouts).wait()
    with pytest.raises(ValueError, match="1 unexpected extra states: 1._extra_state"):
        outsize.load(tmp_path / "with", without, withouts)
    with pytest.raises(ValueError, match="1 missing extra states: 1._extra_state"):
        outsize.load(tmp_path / "without", model, optimizer)
    model[1].scale = 3.0
    with caplog.at_level(logging.WARNING, "outsize"):
        outsize.load(tmp_path / "without", model, optimizer, strict=False)
        outsize.load(tmp_path / "with", without, withouts, strict=False)
    assert model[1].scale == 3.0
    assert "1 missing extra states, passed over" in caplog.text


def test_the_optimizer_alone_leaves_extra_states(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, Scaled())
    outsize.save(tmp_path / "ckpt", model, optimizer).wait()
    model[1].scale = 3.0
    outsize.load(tmp_path / "ckpt", optimizer=optimizer)
    assert model[1].scale == 3.0
    outsize.load(tmp_path / "ckpt", model)
    assert model[1].scale == 1.0
