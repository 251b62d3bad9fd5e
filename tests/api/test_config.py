"""What a wish means is settled when it is read."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from outsize.checkpoint import writer
from tests.conftest import take_step


def test_disk_directories_are_those_that_were_meant_when_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, several = outsize.Config(disk="fast"), outsize.Config(disk=["a", Path("b"), "/c/../d", "."])
    monkeypatch.chdir("/")
    assert one.directories == (tmp_path / "fast",)
    assert several.directories == (tmp_path / "a", tmp_path / "b", Path("/c/../d"), tmp_path)


def test_a_run_on_a_relative_directory_goes_on_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)  # as for large state
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    tiers = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, device=torch.get_default_device(), host_memory="64MiB", disk="disk", **tiers)
    monkeypatch.chdir("other")
    for step in range(2):
        take_step(model(torch.ones(1, 30)).sum(), optimizer)
        outsize.save(tmp_path / f"step-{step}", model, optimizer).wait()
    del model, optimizer
    gc.collect()
    assert not list((tmp_path / "disk").iterdir())
    assert not list((tmp_path / "other").iterdir())
