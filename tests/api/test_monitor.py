"""What a step took, as one dict: the oracle is `outsize.memory` before and after it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.api import monitor as monitoring
from tests.conftest import Workshop, batches, train
from tests.small_models import Stack

TIERS = ("device", "host", "disk")


def test_record_has_what_the_step_took_and_what_is_in_use(
    workshop: Workshop, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []  # those that the monitor took: the read-ahead goes on between two calls

    def noted(model: torch.nn.Module) -> Any:
        reports.append(outsize.memory(model))
        return reports[-1]

    monkeypatch.setattr(monitoring, "memory", noted)
    pair = workshop.pair(tier=tier)
    monitor = outsize.Monitor(pair.model)
    read = 0
    for step in (1, 2, 3):
        train(pair.model, pair.optimizer, batches(1))
        record = monitor.step()
        before, after = reports[-2:]
        assert record.pop("seconds") > 0
        assert record == {
            "step": step,
            **{f"{each}_bytes": after.bytes_on(each) for each in TIERS},
            "bytes_read": after.bytes_read - before.bytes_read,
            "bytes_written": after.bytes_written - before.bytes_written,
            "wait_seconds": after.wait_seconds - before.wait_seconds,
            "update_seconds": after.update_seconds - before.update_seconds,
            "state_bytes": after.state_bytes,
            "skipped_steps": 0,
        }
        read += record["bytes_read"]  # what is read ahead belongs to the step before
    assert (read > 0) == (tier in ("disk", "squeezed"))


def test_what_comes_before_begin_is_not_counted(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    monitor = outsize.Monitor(pair.model)
    pair.model(batches(1)[0][0])
    workshop.settle(pair.model)
    assert outsize.memory(pair.model).bytes_read > 0
    monitor.begin()
    assert monitor.step()["bytes_read"] == 0


def test_skipped_steps_are_counted(workshop: Workshop) -> None:
    pair = workshop.pair(tier="host")
    monitor, scaler = outsize.Monitor(pair.model), torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf")):
        loss = pair.model(batches(1)[0][0]).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
    assert monitor.step()["skipped_steps"] == 1


def test_lines_of_json_are_added_to_those_of_an_earlier_run(workshop: Workshop, tmp_path: Path) -> None:
    pair, path = workshop.pair(tier="host"), tmp_path / "steps.jsonl"
    first = outsize.Monitor(pair.model, jsonl=path).step(loss=torch.tensor(0.5))
    second = outsize.Monitor(pair.model, jsonl=path).step(step=7, lr=0.1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [first, second]
    assert (first["step"], first["loss"], second["step"], second["lr"]) == (1, 0.5, 7, 0.1)


def test_a_board_gets_each_figure_under_its_name(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == "runs/one"

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

        def flush(self) -> None:
            written.append(("flush", 0, 0))

    package: Any = types.ModuleType("torch.utils.tensorboard")
    package.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monitor = outsize.Monitor(workshop.pair(tier="host").model, tensorboard=Path("runs/one"))
    record = monitor.step(loss=0.5)
    assert written == [*((name, value, 1) for name, value in record.items()), ("flush", 0, 0)]


def test_a_board_that_is_not_installed_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        outsize.Monitor(workshop.pair(tier="host").model, tensorboard="runs")


def test_a_full_drive_is_told_with_the_file(workshop: Workshop) -> None:
    monitor = outsize.Monitor(workshop.pair(tier="host").model, jsonl="/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: free space there \(writing\): '/dev/full'"):
        monitor.step()


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not prepared"):
        outsize.Monitor(Stack())
