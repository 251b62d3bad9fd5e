"""Options with which no update can run: found by `step()`, named, with nothing changed. Plain torch is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import outsize
from tests.comparing import assert_same, weights
from tests.conftest import Pair, Workshop, batches, squared_error, train
from tests.small_models import Stack

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, foreach=False),
    "SGD": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2),
    "Lion": lambda params: outsize.optim.Lion(params, lr=1e-3),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2),
}
MISSING = object()
BAD: list[tuple[str, str, object]] = [
    ("AdamW", "betas", (1.0, 0.9)),
    ("AdamW", "betas", (0.9, 1.5)),
    ("AdamW", "betas", None),
    ("AdamW", "betas", (0.9,)),
    ("AdamW", "betas", ("a", 0.9)),
    ("AdamW", "lr", None),
    ("AdamW", "lr", "x"),
    ("AdamW", "lr", torch.tensor([1.0, 2.0])),
    ("AdamW", "lr", 10**400),
    ("AdamW", "lr", 1 + 2j),
    ("AdamW", "lr", float("nan")),
    ("AdamW", "lr", MISSING),
    ("AdamW", "eps", None),
    ("AdamW", "eps", -1.0),
    ("AdamW", "weight_decay", "x"),
    ("SGD", "momentum", None),
    ("SGD", "dampening", MISSING),
    ("Adagrad", "lr_decay", "x"),
    ("Lion", "betas", (0.9, 1.0)),
    ("NAdam", "lr", "x"),
    ("NAdam", "lr", 10**400),
    ("NAdam", "eps", MISSING),
]


@pytest.mark.parametrize(
    ("tier", "name", "key", "value"), [(("device", "squeezed")[index % 2], *each) for index, each in enumerate(BAD)]
)
def test_an_option_that_nothing_can_be_computed_with_is_an_error_of_step_and_can_be_repaired(
    workshop: Workshop, tier: str, name: str, key: str, value: object
) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return MAKE[name]([{"params": params[:4]}, {"params": params[4:]}])

    pair = workshop.pair(lambda: Stack(depth=2), grouped, tier)
    pair.train(batches(2))
    before = weights(pair.model)
    group = pair.optimizer.param_groups[1]
    good = group[key]
    if value is MISSING:
        del group[key]
    else:
        group[key] = value
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises((ValueError, TypeError, ArithmeticError, RuntimeError)) as caught:
        pair.optimizer.step()
    assert key in str(caught.value)
    assert "param_groups[1]" in str(caught.value)
    assert_same(weights(pair.model), before)
    group[key] = good
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    train(pair.plain, pair.plain_optimizer, batches(1))
    pair.check()
    pair.train(batches(2))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("AdamW", "lr", -1e-3),
        ("AdamW", "weight_decay", -0.1),
        ("AdamW", "maximize", "yes"),
        ("AdamW", "betas", [0.0, 0.0]),
        ("AdamW", "lr", torch.tensor([1e-3])),
        ("SGD", "momentum", 1.5),
        ("SGD", "momentum", -0.5),
        ("SGD", "dampening", 2),
        ("Lion", "lr", 0),
    ],
)
def test_an_option_that_torch_computes_with_is_none(workshop: Workshop, name: str, key: str, value: object) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: MAKE[name](model.parameters()), "squeezed")
    for _, optimizer in pair.both:
        optimizer.param_groups[0][key] = value
    pair.train(batches(3))


def test_the_options_of_a_group_that_is_not_stepped_do_not_matter(workshop: Workshop, tier: str) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        unused = model.unused.parameters()  # type: ignore[union-attr]
        return optim.AdamW([{"params": model.head.parameters()}, {"params": unused}], lr=1e-2)  # type: ignore[union-attr]

    class WithUnused(Stack):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.unused = nn.Linear(4, 4)

    pair = workshop.pair(WithUnused, grouped, tier)
    for _, optimizer in pair.both:
        optimizer.param_groups[1]["lr"] = None
    pair.train(batches(3))


def test_an_update_in_the_backward_has_looked_at_the_options_before_it_changes_anything(
    workshop: Workshop, tier: str
) -> None:
    pair = workshop.pair(tier=tier, update="backward")
    pair.train(batches(2))
    before = weights(pair.model)
    pair.optimizer.param_groups[0]["betas"] = (1.0, 0.9)
    with pytest.raises(ValueError, match=r"'betas' of optimizer.param_groups\[0\] .* not \(1.0, 0.9\)"):
        squared_error(pair.model, batches(1)[0]).backward()
        pair.optimizer.step()
    assert_same(weights(pair.model), before)
    pair.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    pair.optimizer.zero_grad()
    pair.train(batches(2))


def test_a_scaled_step_that_was_refused_may_be_tried_again(workshop: Workshop) -> None:
    pair = workshop.pair(tier="host")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(squared_error(pair.model, batches(1)[0])).backward()
    pair.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError, match="'lr' of"):
        scaler.step(pair.optimizer)
    pair.optimizer.param_groups[0]["lr"] = 1e-2
    scaler.step(pair.optimizer)
    scaler.update()
    pair.optimizer.zero_grad()
    train(pair.plain, pair.plain_optimizer, batches(1))
    pair.check()


# -- state dicts -----------------------------------------------------------------------------------------------------


def spoilt(state: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    state = copy.deepcopy(state)
    where = state["param_groups"][0] if key in state["param_groups"][0] else state["state"][0]
    if value is MISSING:
        del where[key]
    else:
        where[key] = value
    return state


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("step", MISSING, "'blocks.0.norm.weight' needs 'step'"),
        ("step", "x", "has 'x'"),
        ("step", [1], r"has \[1\]"),
        ("step", 1e308, "1e.308"),
        ("step", -1, "has -1"),
        ("step", torch.tensor(float("nan")), "nan"),
        ("exp_avg", torch.zeros(3), r"for 'blocks.0.norm.weight' .*'exp_avg': \(3,\)"),
        ("exp_avg", None, "for 'blocks.0.norm.weight'"),
        ("bogus", 1, "'bogus': 1"),
        ("lr", "x", r"'lr' of the state dict's param_groups\[0\] must be a number, not 'x'"),
        ("betas", (1.0, 0.9), "'betas' of the state dict's"),
    ],
)
def test_a_state_dict_that_cannot_be_computed_with_is_refused_by_name(
    workshop: Workshop, key: str, value: object, said: str
) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(2))
    before = pair.optimizer.state_dict()
    with pytest.raises((ValueError, TypeError), match=said):
        pair.optimizer.load_state_dict(spoilt(before, key, value))
    after = pair.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    pair.train(batches(2))


def test_a_streamed_optimizers_state_dict_that_does_not_count_is_refused_by_name(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=lambda model: MAKE["NAdam"](model.parameters()), tier="disk")
    pair.train(batches(2))
    state = pair.optimizer.state_dict()
    with pytest.raises(ValueError, match="'blocks.0.norm.weight' needs 'step'"):
        pair.optimizer.load_state_dict(spoilt(state, "step", MISSING))
    with pytest.raises(TypeError, match=r"NAdam raises with the options of the state dict's param_groups\[0\]"):
        pair.optimizer.load_state_dict(spoilt(state, "lr", "x"))
    pair.train(batches(2))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (None, TypeError, "a dict with 'param_groups' and 'state', not NoneType"),
        ([1], TypeError, "not list"),
        ({}, ValueError, "this has"),
        ({"param_groups": [1], "state": {}}, ValueError, r"param_groups\[0\] .* no dict"),
        ({"param_groups": [{"lr": 1}], "state": {}}, ValueError, "'params'"),
    ],
)
def test_what_is_no_state_dict_is_refused(workshop: Workshop, given: Any, kind: type[Exception], said: str) -> None:
    pair = workshop.pair(tier="disk")
    with pytest.raises(kind, match=said):
        pair.optimizer.load_state_dict(given)
    pair.train(batches(1))


def test_a_count_that_came_with_a_checkpoint_is_looked_at_by_the_next_step(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(2))
    unit = outsize.api.assemble.prepared_of(pair.model.head.weight).engine.parameters.units[-1]  # type: ignore[union-attr, arg-type]
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    outsize.load(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    unit.shard.slot_states["head.weight"].scalars["step"] = "x"  # as a manifest could have it
    before = weights(pair.model)
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(ValueError, match="'head.weight' needs 'step', a count of steps, and has 'x'"):
        pair.optimizer.step()
    assert_same(weights(pair.model), before)


# -- entries ---------------------------------------------------------------------------------------------------------


def test_get_gives_the_default_where_there_is_no_state(pair: Pair) -> None:
    marker = object()
    for model, optimizer in pair.both:
        assert optimizer.state.get(model.head.weight, marker) is marker
        assert optimizer.state.get(nn.Parameter(torch.zeros(1))) is None
        train(model, optimizer, batches(1))
        assert optimizer.state.get(model.head.weight, marker)["step"] == 1
    pair.check()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"exp_avg": torch.zeros(3)}, r"for 'head.weight' .*'exp_avg': \(3,\)"),
        ({"bogus": torch.zeros(4, 16)}, "for 'head.weight' .*'bogus'"),
        ({"bogus": 1}, "'bogus': 1"),
        (7, "of 'head.weight' must be a dict, not int"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_name(pair: Pair, entry: Any, said: str) -> None:
    pair.train(batches(2))
    with pytest.raises((ValueError, TypeError), match=said):
        pair.optimizer.state[pair.model.head.weight] = entry
    pair.train(batches(2))


def test_an_entry_for_what_is_no_parameter_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    for foreign in (nn.Parameter(torch.zeros(2, 3)), "head.weight"):
        with pytest.raises(ValueError, match="an entry for .*, which is no parameter of the model"):
            pair.optimizer.state[foreign] = {}  # type: ignore[index]
