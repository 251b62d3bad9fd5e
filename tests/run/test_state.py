"""`optimizer.state` as users read it, write it and load it. Plain torch is the oracle."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict

import outsize
from outsize.move.shard import UnitShard
from tests.api.dcp_runs import plain_save
from tests.comparing import assert_same, weights
from tests.conftest import Pair, Workshop, adamw, batches, prepared, train

MASTER_KEY = "fp32_master"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """It keeps nothing for a parameter."""
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def entry(pair: Pair) -> dict[str, Any]:
    return pair.optimizer.state[pair.model.head.weight]


def through_items(pair: Pair) -> None:
    for _, state in pair.optimizer.state.items():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def through_values(pair: Pair) -> None:
    for state in pair.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def in_inference_mode(pair: Pair) -> None:
    with torch.inference_mode():
        entry(pair)["exp_avg"].zero_()


WRITES: dict[str, Callable[[Pair], Any]] = {
    "augmented": lambda pair: operator.imul(entry(pair)["exp_avg"], 0),
    "count": lambda pair: operator.isub(entry(pair)["step"], 1),
    "an array": lambda pair: entry(pair).__setitem__("exp_avg", torch.zeros(4, 16)),
    "update": lambda pair: entry(pair).update(exp_avg=torch.zeros(4, 16)),
    "pop": lambda pair: entry(pair).pop("exp_avg"),
    "rows": lambda pair: entry(pair)["exp_avg"].__setitem__(0, 0),
    "in place": lambda pair: entry(pair)["exp_avg"].zero_(),
    "out": lambda pair: torch.mul(entry(pair)["exp_avg"], 2, out=entry(pair)["exp_avg"]),
    "a row": lambda pair: entry(pair)["exp_avg"][0].zero_(),
    "a view": lambda pair: entry(pair)["exp_avg"].view(-1)[:3].fill_(1),
    "detached": lambda pair: entry(pair)["exp_avg"].detach().zero_(),
    "data": lambda pair: entry(pair)["exp_avg"].data.zero_(),
    "replaced data": lambda pair: setattr(entry(pair)["exp_avg"], "data", torch.zeros(4, 16)),
    "foreach": lambda pair: torch._foreach_mul_([entry(pair)["exp_avg"]], 2.0),
    "init": lambda pair: nn.init.zeros_(entry(pair)["exp_avg"]),
    "inference mode": in_inference_mode,
    "items": through_items,
    "values": through_values,
}


def test_a_write_into_an_entry_is_refused_with_the_remedy(pair: Pair) -> None:
    pair.train(batches(2))
    for how, write in WRITES.items():
        with pytest.raises(RuntimeError, match=r"is a copy .* write the whole entry"):
            write(pair)
            pytest.fail(f"{how} goes through")
        pair.train(batches(1))


def test_arrays_of_numpy_made_of_an_entry_cannot_be_written_to(workshop: Workshop) -> None:
    pair = workshop.pair(tier="host")
    pair.train(batches(1))
    for found in (entry(pair)["exp_avg"].numpy(), np.asarray(entry(pair)["exp_avg"])):
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 0


def test_what_is_computed_from_an_entry_is_plain(pair: Pair) -> None:
    pair.train(batches(2))
    found = entry(pair)["exp_avg"]
    expected = pair.plain_optimizer.state[pair.plain.head.weight]["exp_avg"]
    computed = [found.clone(), found * 1, found + 0.0, torch.stack([found])[0], copy.deepcopy(found)]
    computed += [pickle.loads(pickle.dumps(found)), torch.zeros_like(found).copy_(found)]
    for each in computed:
        assert type(each) is Tensor
        torch.testing.assert_close(each, expected)
        each.zero_()
    torch.testing.assert_close(found, expected)
    assert entry(pair)["step"].item() == 2 and float(entry(pair)["step"]) == 2.0


def test_an_entry_of_before_a_step_stays_as_it_was(pair: Pair) -> None:
    pair.train(batches(2))
    before = entry(pair)
    expected = {key: value.clone() for key, value in before.items()}
    pair.train(batches(2))
    assert_same(before, expected)
    assert not torch.equal(entry(pair)["exp_avg"], expected["exp_avg"])


def test_an_entry_is_written_as_a_whole(pair: Pair) -> None:
    pair.train(batches(2))
    for _, optimizer in pair.both:
        for param, state in list(optimizer.state.items()):
            optimizer.state[param] = {**state, "exp_avg": state["exp_avg"] * 0.5, "step": state["step"] - 1}
    pair.train(batches(2))


def test_a_state_dict_is_made_of_plain_tensors(pair: Pair, tmp_path: Path) -> None:
    pair.train(batches(2))
    state = pair.optimizer.state_dict()
    for values in state["state"].values():
        assert type(values) is dict
        assert {type(value) for value in values.values()} == {Tensor}
    torch.save(entry(pair), tmp_path / "entry.pt")
    loaded = torch.load(tmp_path / "entry.pt", weights_only=False)
    assert {type(value) for value in loaded.values()} == {Tensor}
    torch.save(state, tmp_path / "state.pt")
    pair.optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert type(copy.deepcopy(entry(pair))) is dict
    pair.train(batches(2))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_a_count_of_steps_has_torchs_dtype_whatever_the_default_is(workshop: Workshop, default: torch.dtype) -> None:
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.zeros(2)
    pair = workshop.pair(tier="host")
    pair.train(batches(1))
    pair.optimizer.state[pair.model.head.weight] = {**entry(pair), "step": 257.0}
    torch.set_default_dtype(default)
    try:
        optimizer = optim.AdamW([plain])
        optimizer.step()
        found = entry(pair)["step"]
        assert found.item() == 257
        assert found.dtype is optimizer.state[plain]["step"].dtype
    finally:
        torch.set_default_dtype(torch.float32)


# -- states of other optimizers --------------------------------------------------------------------------------------


def in_two_groups(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Options of the first group alone."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        blocks, head = list(model.blocks.parameters()), list(model.head.parameters())  # type: ignore[union-attr]
        return optim.RMSprop([{"params": blocks, **options}, {"params": head}], lr=1e-3)

    return make


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"centered": True}], ids=["momentum", "centered"])
def test_a_state_has_the_arrays_that_its_own_group_needs(
    workshop: Workshop, tier: str, options: dict[str, Any]
) -> None:
    pair = workshop.pair(optimizer=in_two_groups(**options), tier=tier)
    train(pair.plain, pair.plain_optimizer, batches(2))
    with outsize.gathered(pair.model, modify=True), torch.no_grad():
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            mine.copy_(theirs)
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    pair.train(batches(3))
    plain, weight = pair.plain_optimizer.state[pair.plain.head.weight], pair.model.head.weight
    pair.optimizer.state[weight] = {key: value.clone() for key, value in plain.items()}
    pair.train(batches(2))


def test_a_state_without_what_its_group_needs_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=in_two_groups(momentum=0.9), tier="host")
    train(pair.plain, pair.plain_optimizer, batches(2))
    state = pair.plain_optimizer.state_dict()
    del state["state"][0]["momentum_buffer"]
    with pytest.raises(ValueError, match="does not fit RMSprop: for 'blocks.0.norm.weight'"):
        pair.optimizer.load_state_dict(state)


def test_adamw_with_the_state_of_an_adam_decays_as_in_torch(workshop: Workshop, tier: str) -> None:
    donor = workshop.pair(optimizer=lambda model: optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1))
    train(donor.plain, donor.plain_optimizer, batches(2))
    pair = workshop.pair(tier=tier)
    pair.train(batches(2))
    for _, optimizer in pair.both:
        optimizer.load_state_dict(copy.deepcopy(donor.plain_optimizer.state_dict()))
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    pair.train(batches(4))


def test_adamw_with_a_folder_that_an_adam_has_saved_decays_as_in_torch(workshop: Workshop, tmp_path: Path) -> None:
    pair = workshop.pair(tier="disk")
    donor = copy.deepcopy(pair.plain)
    adam = optim.Adam(donor.parameters(), lr=1e-2, weight_decay=0.1)
    train(donor, adam, batches(2))
    weights, states = get_state_dict(donor, adam)
    plain_save({"model": weights, "optim": states}, tmp_path / "folder")
    outsize.load(tmp_path / "folder", pair.model, pair.optimizer)
    pair.plain.load_state_dict(donor.state_dict())
    pair.plain_optimizer.load_state_dict(adam.state_dict())
    assert pair.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    pair.train(batches(3))


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_state_dict_that_is_loaded_in_part_stops_the_run(
    pair: Pair, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train(batches(2))
    state = copy.deepcopy(pair.optimizer.state_dict())
    pair.train(batches(1))
    written: list[object] = []
    write = UnitShard.write_array

    def failing(self: UnitShard, *args: Any) -> None:
        written.append(args)
        if len(written) == 4:
            raise error("input or output")
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(UnitShard, "write_array", failing)
        with pytest.raises(error):
            pair.optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="training stopped after an error"):
        train(pair.model, pair.optimizer, batches(1))


def test_a_state_dict_that_is_refused_stops_nothing(pair: Pair) -> None:
    pair.train(batches(2))
    state = copy.deepcopy(pair.optimizer.state_dict())
    del state["state"][3]["exp_avg"]
    with pytest.raises(ValueError, match="does not fit AdamW"):
        pair.optimizer.load_state_dict(state)
    pair.train(batches(2))
    assert prepared(pair.model).stepper.steps == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tier", "make", "first", "dtype"),
    [
        ("device", adamw, "model", torch.bfloat16),
        ("device", sgd, "optimizer", torch.float16),
        ("host", adamw, "optimizer", torch.bfloat16),
        ("host", sgd, "model", torch.float16),
        ("disk", sgd, "model", torch.bfloat16),
        ("disk", adamw, "optimizer", torch.float16),
        ("squeezed", sgd, "optimizer", torch.bfloat16),
        ("squeezed", adamw, "model", torch.float16),
    ],
)  # each tier meets each value, and each combination of the other three comes once
def test_state_dicts_resume_16_bit_training_bit_for_bit(
    workshop: Workshop, tier: str, dtype: torch.dtype, first: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    pair = workshop.pair(optimizer=make, tier=tier, compute_dtype=dtype)
    data = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in batches(6)]
    train(pair.model, pair.optimizer, data[:3])
    with outsize.gathered(pair.model):
        of_model = {name: value.detach().clone() for name, value in pair.model.state_dict().items()}
    of_optimizer = copy.deepcopy(pair.optimizer.state_dict())
    train(pair.model, pair.optimizer, data[3:])

    model, optimizer = workshop.made(optimizer=make, tier=tier, seed=1, compute_dtype=dtype)

    def load_model() -> None:
        with outsize.gathered(model, modify=True):
            model.load_state_dict(of_model)

    loads = [load_model, lambda: optimizer.load_state_dict(of_optimizer)]
    for load in loads if first == "model" else reversed(loads):
        load()
    again = optimizer.state_dict()["state"]
    assert all(
        torch.equal(again[index][MASTER_KEY], state[MASTER_KEY]) for index, state in of_optimizer["state"].items()
    )
    train(model, optimizer, data[3:])
    ours, theirs = weights(model), weights(pair.model)
    assert_same(ours, theirs)
    exact = [each.state_dict()["state"][0][MASTER_KEY] for each in (optimizer, pair.optimizer)]
    assert torch.equal(*exact)


def test_torch_takes_a_state_dict_with_masters(workshop: Workshop) -> None:
    pair = workshop.pair(compute_dtype=torch.bfloat16)
    inputs, targets = batches(1)[0]
    train(pair.model, pair.optimizer, [(inputs.bfloat16(), targets.bfloat16())])
    pair.plain_optimizer.load_state_dict(pair.optimizer.state_dict())
    train(pair.plain, pair.plain_optimizer, batches(1))
