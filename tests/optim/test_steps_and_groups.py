"""What a step changes of its groups and of the optimizer, and what it reads there, is as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same, weights
from tests.conftest import Workshop, batches, squared_error, train
from tests.optim.test_trial import Settings
from tests.run.test_third_party import Plain
from tests.small_models import Stack

# -- counts in groups and on the optimizer ---------------------------------------------------------------------------


class InGroups(Plain):
    """Counts its steps in its groups, as most optimizers of pytorch_optimizer do; the first count makes the state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("rates", []).append(group["lr"] / group["step"])
            for param in group["params"]:
                if param.grad is not None:
                    if group["step"] == 1:
                        self.state[param]["v"] = torch.zeros_like(param)
                    self.state[param]["v"].lerp_(param.grad, 0.5)
                    param.sub_(self.state[param]["v"], alpha=sum(group["rates"][-2:]))


class OnItself(Plain):
    """Acts on a count of its own, late."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.count += 1
        for group, param in self.stepped():
            param.sub_(param.grad * group["lr"] * (1.0 if self.count <= 4 else 0.1))


def in_two_groups(kind: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return kind([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}])  # type: ignore[no-any-return]

    return make


@pytest.mark.parametrize("kind", [InGroups, OnItself])
@pytest.mark.parametrize("update", ["fetch", "backward"])
def test_steps_are_counted_once_a_step(workshop: Workshop, tier: str, kind: Any, update: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(kind), tier, update=update)
    for _ in range(6):
        pair.train(batches(1), rel=2e-6)
        mine, theirs = ([{**group, "params": 0} for group in each.param_groups] for _, each in pair.both)
        assert mine == theirs
    assert getattr(pair.optimizer, "count", 6) == 6


class OfItsOwnFormat(InGroups):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("is not called")


class Nested(OfItsOwnFormat):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def test_a_state_dict_that_only_its_class_can_load_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(OfItsOwnFormat), "host")
    pair.train(batches(1))
    with pytest.raises(ValueError, match=r"OfItsOwnFormat also has \['inner'\], for the load_state_dict of its class"):
        pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.train(batches(1))
    other = workshop.pair(lambda: Stack(depth=2), in_two_groups(Nested), "host")
    with pytest.raises(ValueError, match=r"a dict with 'param_groups' and 'state', this has \['inner'\]"):
        other.optimizer.state_dict()


def test_a_group_without_gradients_counts_as_in_torch(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(InGroups), "host")
    for model, optimizer in pair.both:
        for _ in range(3):
            squared_error(model, batches(1)[0]).backward()
            for param in optimizer.param_groups[1]["params"]:
                param.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[1]["step"] == 3
    pair.check()


def test_a_step_that_is_refused_is_not_counted(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(InGroups), "host")
    pair.train(batches(1))
    squared_error(pair.model, batches(1)[0]).backward()
    next(pair.model.parameters()).grad.mul_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError):
        pair.optimizer.step()
    assert pair.optimizer.param_groups[0]["step"] == 1
    pair.optimizer.zero_grad()
    pair.train(batches(2))


class WhereUsed(InGroups):
    """Counts a group's steps where one of its parameters has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + any(param.grad is not None for param in group["params"])
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["step"])


@pytest.mark.parametrize("kind", [InGroups, WhereUsed])
def test_a_delayed_step_counts_for_the_gradients_that_it_applies(workshop: Workshop, tier: str, kind: Any) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(kind), tier, delayed_update=1)
    held: list[Tensor | None] = []
    for step, batch in enumerate(batches(6)):
        for model, optimizer in pair.both:
            squared_error(model, batch).backward()
            for param in optimizer.param_groups[1]["params"] if step == 3 else ():
                param.grad = None
        params = list(pair.plain.parameters())
        fresh = [param.grad for param in params]
        for param, grad in zip(params, held if step else fresh, strict=False):
            param.grad = grad
        if step != 1:  # the step that begins the delay has nothing to apply
            pair.plain_optimizer.step()
        held = fresh if step else []
        pair.plain_optimizer.zero_grad()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        mine, theirs = ([group["step"] for group in each.param_groups] for _, each in pair.both)
        assert mine == theirs
    pair.check()


def test_counts_in_groups_come_back_from_a_checkpoint(workshop: Workshop, tier: str, tmp_path: Path) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(InGroups), tier)
    pair.train(batches(2))
    outsize.save(tmp_path / "two", pair.model, pair.optimizer).wait()
    other = workshop.pair(lambda: Stack(depth=2), in_two_groups(InGroups), "host")
    outsize.load(tmp_path / "two", other.model, other.optimizer)
    assert other.optimizer.param_groups[1]["step"] == 2
    pair.train(batches(3))
    train(other.model, other.optimizer, batches(3))
    assert_same(weights(pair.model), weights(other.model))


class Later(InGroups):
    """The second count of a group makes a further array, and the next ones need it."""

    begins = 2

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        for group, param in self.stepped():
            if group["step"] == self.begins:
                self.state[param]["slow"] = param.clone()
            if group["step"] > self.begins:
                param.lerp_(self.state[param]["slow"].lerp_(param, 0.5), 0.5)


class MuchLater(Later):
    """After more counts than the trial makes."""

    begins = 9


@pytest.mark.parametrize(("kind", "before"), [(Later, 0), (Later, 1), (MuchLater, 0)])
def test_a_checkpoint_of_later_steps_is_gone_on_with(
    workshop: Workshop, tmp_path: Path, kind: type[Later], before: int
) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(kind), "disk")
    pair.train(batches(kind.begins + 2))
    outsize.save(tmp_path / "later", pair.model, pair.optimizer).wait()
    other = workshop.pair(lambda: Stack(depth=2), in_two_groups(kind), "host")
    other.train(batches(before))
    outsize.load(tmp_path / "later", other.model, other.optimizer)
    pair.train(batches(3))
    train(other.model, other.optimizer, batches(3))
    assert_same(weights(pair.model), weights(other.model))


class CountsMatrices(Plain):
    """Counts the steps of matrices alone in their state, as a Muon beside an Adam does."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        average = state.setdefault("average", torch.zeros_like(param))
        if group.get("counts"):
            state["step"] = state.get("step", 0) + 1
        return average.lerp_(grad, 0.5) / state.get("step", 1)


def test_a_checkpoint_may_count_the_steps_of_some_groups_alone(workshop: Workshop, tier: str, tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return CountsMatrices([{"params": [each], "counts": each.ndim > 1} for each in model.parameters()])

    pair = workshop.pair(lambda: Stack(depth=2), make, tier)
    pair.train(batches(2))
    outsize.save(tmp_path / "two", pair.model, pair.optimizer).wait()
    pair.train(batches(1))
    outsize.load(tmp_path / "two", pair.model, pair.optimizer)
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    train(pair.model, pair.optimizer, batches(1))
    torch.testing.assert_close(weights(pair.model), weights(pair.plain))


def test_counts_in_groups_go_to_torch_and_back(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), in_two_groups(InGroups), "host")
    pair.train(batches(2))
    plain, mine = copy.deepcopy(pair.plain_optimizer.state_dict()), pair.optimizer.state_dict()
    pair.plain_optimizer.load_state_dict(mine)
    pair.optimizer.load_state_dict(plain)
    pair.train(batches(3))


def test_what_a_step_begins_to_change_later_is_an_error(workshop: Workshop) -> None:
    class Late(Plain):
        def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
            state = self.state[param]
            state["n"] = state.get("n", 0) + 1
            if state["n"] > 7:
                group["decayed"] = True
            return grad

    pair = workshop.pair(lambda: Stack(depth=2), lambda model: Late(model.parameters()), "host")
    with pytest.raises(RuntimeError, match="begun to change 'decayed'"):
        pair.train(batches(9))


# -- attributes of the optimizer -------------------------------------------------------------------------------------


class Trusting(Plain):
    """Reads a factor from itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.trust: Any = 1.0

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        trust = self.trust[0] if isinstance(self.trust, list) else self.trust
        return grad / grad.norm() if trust == "norm" else grad * trust


class MarkedTrusting(Trusting):
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_attribute_of_the_optimizer_is_seen_as_it_is_at_the_step(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: Trusting(model.parameters()), tier)
    trusts: list[Any] = [1.0, 0.5, [0.1], torch.tensor(0.3, device="cpu")]
    for trust in trusts:
        for _, optimizer in pair.both:
            optimizer.trust = trust  # type: ignore[attr-defined]
        pair.train(batches(1))
    for _, optimizer in pair.both:
        optimizer.trust.mul_(0.5)  # type: ignore[attr-defined]
    pair.train(batches(2))


def test_an_attribute_that_needs_whole_parameters_is_refused_before_anything_changes(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: MarkedTrusting(model.parameters()), "host")
    pair.train(batches(1))
    before = weights(pair.model)
    pair.optimizer.trust = "norm"  # type: ignore[attr-defined]
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="Nothing was updated"):
        pair.optimizer.step()
    assert_same(weights(pair.model), before)


class Subclassed(torch.optim.AdamW):
    """Sets what torch sets of itself in a step."""


def test_what_torch_notes_on_an_optimizer_is_no_attribute_of_it(workshop: Workshop) -> None:
    workshop.pair(
        lambda: Stack(depth=2), lambda model: Subclassed(model.parameters(), lr=1e-2, fused=True), "host"
    ).train(batches(3), rel=2e-6)


def test_an_attribute_may_be_anything(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: Trusting(model.parameters()), "host")
    for value in (Settings([1.0]), {"a": torch.ones(3)}, {1, 2}, numpy.ones(3), float("nan"), lambda: 1):
        for _, optimizer in pair.both:
            optimizer.other = value  # type: ignore[attr-defined]
        pair.train(batches(2))


def test_the_scale_that_a_scaler_leaves_on_the_optimizer_is_no_attribute_of_it(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: Subclassed(model.parameters(), lr=1e-2), "host")
    for _ in range(3):
        for model, optimizer in pair.both:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(squared_error(model, batches(1)[0])).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
    pair.check()


class FirstGroupsRate(Plain):
    """Steps on all groups with the options of the first."""

    def step(self, closure: Any = None) -> None:
        for _, param in self.stepped():
            param.data.add_(param.grad, alpha=-self.param_groups[0]["lr"])


class CountsGroups(Plain):
    count = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.count += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] / self.count)


@pytest.mark.parametrize("kind", [FirstGroupsRate, CountsGroups])
def test_a_step_that_depends_on_other_groups_is_refused(workshop: Workshop, kind: Any) -> None:
    model = Stack()
    groups = [{"params": [param]} for param in model.parameters()]
    with pytest.raises(ValueError, match="depends on the others, or on the other groups"):
        workshop.prepare(model, kind(groups))
    workshop.prepare(model, kind(model.parameters()))


class CountsSteps(Plain):
    """In its groups and on itself, once a step."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] *= 0.5
        for group, param in self.stepped():
            param.data.add_(param.grad, alpha=-group["lr"] / self.count)


def test_groups_of_several_kinds_with_counts_run(workshop: Workshop) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return CountsSteps([{"params": [param], "lr": 0.1 + 2 * (param.ndim == 1)} for param in model.parameters()])

    workshop.pair(optimizer=make).train(batches(3))
