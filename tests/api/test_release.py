"""A released model is the plain model that it was, and goes on as in plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api import releasing
from tests.comparing import assert_same, weights
from tests.conftest import Pair, Workshop, adamw, batches, squared_error, train
from tests.small_models import Stack, linears


def assert_plain(pair: Pair, workshop: Workshop) -> None:
    for mine, theirs in zip(pair.model.modules(), pair.plain.modules(), strict=True):
        assert vars(mine).keys() == vars(theirs).keys()
    assert {type(param) for param in pair.model.parameters()} == {nn.Parameter}
    assert vars(pair.optimizer).keys() - {"_opt_called"} <= vars(pair.plain_optimizer).keys()  # which is a scheduler's
    assert not os.listdir(workshop.disk)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_released_model_and_its_optimizer_go_on_as_in_torch(
    workshop: Workshop, pair: Pair, clip: float | None
) -> None:
    pair.train(batches(3), clip=clip)
    before = list(pair.model.parameters())
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
    outsize.release(pair.model)
    assert_plain(pair, workshop)
    assert all(one is other for one, other in zip(before, pair.model.parameters(), strict=True))
    pair.train(batches(3), clip=clip)


def test_a_released_model_is_changed_and_prepared_again(workshop: Workshop, pair: Pair, tier: str) -> None:
    pair.train(batches(2))
    outsize.release(pair.model)
    for model, _ in pair.both:
        torch.manual_seed(5)
        model.head = nn.Linear(16, 6)
    pair.plain_optimizer, pair.optimizer = adamw(pair.plain), adamw(pair.model)
    workshop.prepare(pair.model, pair.optimizer, tier)
    pair.train(batches(3, out=6))


def test_a_release_of_weights_larger_than_the_budget_warns_of_no_training_that_goes_on(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(64, 4000), nn.Linear(4000, 4))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, host_memory="600KiB", device="cpu")
    outsize.release(model)
    assert not caplog.records
    assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())


def test_what_inference_mode_prepares_and_releases_trains_as_in_torch(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    pair = Pair(plain, adamw(plain), model, adamw(model))
    with torch.inference_mode():
        workshop.prepare(model, pair.optimizer, tier)
    pair.train(batches(2))
    with torch.inference_mode():
        outsize.release(model)
    expected, found = (train(*each, batches(2)) for each in pair.both)
    found.close_to(expected, 1e-6)


def test_the_same_optimizer_is_prepared_again(workshop: Workshop) -> None:
    pair = workshop.pair()
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (pair.plain_optimizer, pair.optimizer)]
    pair.train(batches(2))
    outsize.release(pair.model)
    pair.train(batches(2))
    workshop.prepare(pair.model, pair.optimizer)
    pair.train(batches(2))
    for schedule in schedules:
        schedule.step()


def test_tied_and_frozen_parameters_stay_so(workshop: Workshop) -> None:
    model = Stack(hidden=16)
    model.head.weight = model.blocks[0].up.weight
    model.head.bias = nn.Parameter(torch.zeros(16), requires_grad=False)
    optimizer = adamw(model)
    workshop.prepare(model, optimizer)
    train(model, optimizer, batches(2, out=16))
    outsize.release(model)
    assert model.head.weight is model.blocks[0].up.weight
    assert not model.head.bias.requires_grad


def test_masters_outlive_a_release_in_the_state_dict(workshop: Workshop) -> None:
    data: list[Any] = [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in batches(4)]
    through, straight = (workshop.pair(compute_dtype=torch.bfloat16) for _ in range(2))
    train(straight.model, straight.optimizer, data)
    train(through.model, through.optimizer, data[:2])
    state = through.optimizer.state_dict()
    outsize.release(through.model)
    workshop.prepare(through.model, through.optimizer, compute_dtype=torch.bfloat16)
    through.optimizer.load_state_dict(state)
    train(through.model, through.optimizer, data[2:])
    expected = weights(straight.model)
    assert_same(weights(through.model), expected)


def test_a_release_without_memory_says_how_much_and_changes_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    pair = workshop.pair()
    pair.train(batches(1))
    monkeypatch.setattr(releasing, "available_memory", lambda device: 1000)
    if device != "cpu":
        monkeypatch.setattr(torch.get_device_module(device), "mem_get_info", lambda _: (1000, 1000))
    with pytest.raises(ValueError, match=r"outsize.release needs .* KiB .* and 1000 B of \w+ memory are free"):
        outsize.release(pair.model)
    pair.train(batches(2))


def test_a_release_where_values_are_in_use_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair()
    with pytest.raises(RuntimeError, match="inside a forward or a gathered block"), outsize.gathered(pair.model):
        outsize.release(pair.model)
    with pytest.raises(ValueError, match="not prepared"):
        outsize.release(pair.plain)
    pair.train(batches(1))


def test_a_graph_that_outlives_a_release_takes_no_gradients(workshop: Workshop, pair: Pair, tier: str) -> None:
    loss = squared_error(pair.model, batches(1)[0])  # as a loop's variable, which keeps the graph
    outsize.release(pair.model)
    with pytest.raises(RuntimeError, match="between the forward and this backward|modified by an inplace"):
        loss.backward()
    pair.model.zero_grad()
    workshop.prepare(pair.model, pair.optimizer, tier)
    pair.train(batches(2))


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def test_small_tensors_that_are_read_or_released_take_no_mapping_each(workshop: Workshop, tier: str) -> None:
    """The system gives a process 65,530 of them; a model may have more states."""
    model, optimizer = workshop.made(lambda: linears(4, 100), tier=tier)
    squared_error(model, batches(1, width=4)[0]).backward()
    optimizer.step()
    before = _mappings()
    kept = optimizer.state_dict()
    assert len(kept["state"]) == 200
    outsize.release(model)
    assert _mappings() < before + 200  # 800 states
