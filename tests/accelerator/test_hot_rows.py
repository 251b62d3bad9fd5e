"""Hot rows of tables on the simulated accelerator: what a batch finds there does not move, and all bits are those of a
table that rests there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.checkpoint import writer
from tests.comparing import weights
from tests.conftest import Workshop, take_step
from tests.run.test_embedding import adagrad, rowwise, sgd, sparse_adam

# What torch's own Adagrad says of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WIDTH = 600, 32
ROW_BYTES = 4 * WIDTH

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Moved(TorchDispatchMode):
    """Counts the bytes that are copied to the accelerator and back inside."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_to_copy", "copy_"):
            source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
            if (source.device.type, result.device.type) == ("cpu", "sim"):
                self.to_device += source.nbytes
            elif (source.device.type, result.device.type) == ("sim", "cpu"):
                self.to_host += source.nbytes
        return result


def batches(count: int) -> list[Tensor]:
    """Some rows come in nearly every batch, most of them seldom."""
    made = torch.Generator().manual_seed(0)
    return [(torch.rand(60, generator=made, device="cpu") ** 4 * ROWS).long().to("sim") for _ in range(count)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    take_step(torch.tanh(model(ids)).sum(), optimizer)


def made(optimizer: Optimizer, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, WIDTH, sparse=True, device="cpu").to(device)
    return model, optimizer(model)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and the optimizer's state, in host memory."""
    (weight,), states = weights(model).values(), optimizer.state_dict()["state"].get(0, {})
    return [each.cpu() for each in (weight, *states.values()) if isinstance(each, Tensor)]


SMALL = {"device_memory": "96KiB"}
"""Room for a hundred rows with two moments, some of which give way."""


@pytest.mark.parametrize(
    ("optimizer", "sim"),
    [(sgd, "hold"), (adagrad, "hold"), (sparse_adam, "hold"), (rowwise, "hold"), (sparse_adam, "random")],
    indirect=["sim"],
)
def test_hot_rows_on_the_device_have_the_bits_of_a_table_that_rests_there(
    sim: Any, workshop: Workshop, optimizer: Optimizer
) -> None:
    plain = made(optimizer, "sim")
    for ids in batches(12):
        step(*plain, ids)
    expected = values(*plain)
    for tier in ("device", "host", "disk"):
        for fields in ({}, SMALL) if tier != "device" else ({},):
            model, own = made(optimizer)
            workshop.prepare(model, own, tier, **{"device": "sim", **fields})
            for ids in outsize.lookahead(batches(12), model):
                step(model, own, ids)
            report = outsize.memory(model)
            assert (report.rows_on_device > 0) == (tier != "device")
            assert report.peak.get("device/hot rows", 0) <= report.budgets["device"] // 2
            for mine, other in zip(values(model, own), expected, strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rows_that_are_on_the_device_do_not_move_and_others_move_once(sim: Any, workshop: Workshop, tier: str) -> None:
    model, optimizer = made(sparse_adam)
    workshop.prepare(model, optimizer, tier, device="sim")
    first, second = torch.arange(0, 300, 3).to("sim"), torch.arange(0, 330, 3).to("sim")
    with Moved() as moved:
        step(model, optimizer, first)
    assert moved.to_device == 100 * 3 * ROW_BYTES  # weights and two moments
    assert moved.to_host == 100 * 8  # the numbers of the rows
    with Moved() as moved:
        for _ in range(3):
            step(model, optimizer, first)
    assert moved.to_device == moved.to_host == 0
    with Moved() as moved:
        step(model, optimizer, second)
    assert (moved.to_device, moved.to_host) == (10 * 3 * ROW_BYTES, 10 * 8)
    report = outsize.memory(model)
    assert (report.rows, report.row_hits, report.rows_on_device) == (510, 400, 400)
    assert report.now["device/hot rows"] > 110 * 3 * ROW_BYTES
    with Moved() as moved:
        weights(model)
    assert moved.to_host >= 110 * 3 * ROW_BYTES, "what changed is brought to where the table rests"


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_checkpoint_has_the_truth_of_rows_on_the_device(
    sim: Any, workshop: Workshop, tmp_path: Path, tier: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # what is written behind the training is not what rows that give way write
        monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)
    data = batches(9)
    model, optimizer = made(adagrad)
    workshop.prepare(model, optimizer, tier, **{"device": "sim", **SMALL})
    for ids in data[:5]:
        step(model, optimizer, ids)
    saving = outsize.save(tmp_path / "saved", model, optimizer)
    for ids in data[5:]:
        step(model, optimizer, ids)
    saving.wait()
    other, own = made(adagrad)
    workshop.prepare(other, own, "disk", device="sim")
    step(other, own, data[8])
    outsize.load(tmp_path / "saved", other, own)
    for ids in data[5:]:
        step(other, own, ids)
    for mine, theirs in zip(values(other, own), values(model, optimizer), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_a_frozen_table_stay_on_the_device_and_get_a_state_there(sim: Any, workshop: Workshop) -> None:
    ids = torch.arange(0, 300, 3).to("sim")
    (model, own), plain = made(adagrad), made(adagrad, "sim")
    model.requires_grad_(False)
    workshop.prepare(model, own, "disk", device="sim")
    model(ids)
    with Moved() as moved:
        model(ids)
    assert moved.to_device == moved.to_host == 0
    taken = outsize.memory(model).now["device/hot rows"]
    model.requires_grad_(True)
    for each in (plain, (model, own)):
        step(*each, ids)
        step(*each, ids)
    assert 0 < outsize.memory(model).now["device/hot rows"] <= taken
    for mine, other in zip(values(model, own), values(*plain), strict=True):
        assert torch.equal(mine, other)


def test_too_few_hot_rows_to_move_less_stay_off_the_device(sim: Any, workshop: Workshop) -> None:
    for optimizer, kept in ((sparse_adam, False), (rowwise, True)):  # a sixth of the rows is the least with two moments
        model, own = made(optimizer)
        workshop.prepare(model, own, "host", device="sim", device_memory="64KiB")
        assert ("device/hot rows" in outsize.memory(model).now) == kept
        step(model, own, batches(1)[0])
