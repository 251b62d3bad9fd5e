"""What tests compare: weights, gradients and states of a plain model and of its prepared copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import outsize
from outsize.api.assemble import prepared_of, require


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all values, whether the model is prepared or not."""
    if prepared_of(next(model.parameters())) is None:
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    with outsize.gathered(model):
        return {name: param.detach().clone().as_subclass(Tensor) for name, param in model.named_parameters()}


def exact_masters(model: nn.Module) -> dict[str, Tensor]:
    """Of a prepared model, by arithmetic: (bf16 bits << 16) + remainder, or what an fp16 weight has beside it. What has
    no master is its own."""
    found = weights(model)
    for unit in require(model).engine.parameters.units:
        unit.await_written()
        for name, slot in unit.shard.slots.items():
            value = found[name]
            if array := unit.shard.array("master", slot):
                rest = unit.shard.read_array(array, slot.offset, slot.end).view(slot.shape).to(value.device)
                joined = rest if rest.is_floating_point() else (value.view(torch.int16).int() << 16) + rest.int()
                value = joined.view(torch.float32)
            found[name] = value.float()
    return found


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients, whether the model is prepared or not."""
    if prepared_of(next(model.parameters())) is None:
        return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
    with outsize.gathered(model, grads=True):
        return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def assert_same(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> None:
    """Under the same names the same values, in the same dtypes."""
    assert found.keys() == expected.keys()
    assert [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    ] == []


def assert_same_runs(runs: Iterable[tuple[Any, Mapping[Any, Tensor]]]) -> None:
    """What each showed (losses, a trace) and what it came to have: all as of the first."""
    (shown, values), *others = runs
    for other, found in others:
        assert other == shown
        assert_same(found, values)


def assert_same_state(pair: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """The optimizers' states have the same entries, and near values."""
    mine, theirs = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    assert {at: entry.keys() for at, entry in mine.items()} == {at: entry.keys() for at, entry in theirs.items()}
    for at, entry in theirs.items():
        for key, value in entry.items():
            ours = torch.as_tensor(mine[at][key])
            torch.testing.assert_close(ours, torch.as_tensor(value, device=ours.device), rtol=rtol, atol=atol)


def assert_same_weights(model: nn.Module, plain: nn.Module, atol: float = 1e-5) -> None:
    ours, theirs = weights(model), weights(plain)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_gradients(model: nn.Module, plain: nn.Module, atol: float = 1e-7, rtol: float = 1e-6) -> None:
    ours, theirs = gradients(model), gradients(plain)
    for name, value in theirs.items():
        mine = ours[name]
        if value is None or mine is None:
            assert mine is value, f"{name}: one gradient is None"
        else:
            torch.testing.assert_close(mine, value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
