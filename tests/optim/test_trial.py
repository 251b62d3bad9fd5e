"""What is found out about an optimizer by trying it: pieces, whole parameters, or a refusal with the reason."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.optim.choice import rule_for
from tests.comparing import weights
from tests.conftest import Workshop, batches, squared_error, train
from tests.run.test_third_party import Plain
from tests.small_models import Built, Stack


class Wrapper(torch.optim.Optimizer):
    """Shares its groups and its state with the optimizer inside, as LARC does."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.base.step()


class OwnList(Plain):
    """Keeps a list of the parameters beside its groups."""

    def __init__(self, params: Any) -> None:
        self.mine = {"all": [list(params)]}
        super().__init__(self.mine["all"][0])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for param in self.mine["all"][0]:
            if param.grad is not None:
                param.data.sub_(param.grad)


class InClosure(Plain):
    """Reaches the parameters where nobody can see it."""

    def __init__(self, params: Any) -> None:
        mine = list(params)
        self.every = lambda: mine
        super().__init__(mine)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for param in self.every():
            if param.grad is not None:
                param.data.sub_(param.grad)


class ByParameter(Plain):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.scales = {params[0]: 0.1}

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad * self.scales.get(param, 1.0)


class ById(Plain):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.param_groups[0]["no_decay"] = {id(params[0])}

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad if id(param) in group["no_decay"] else grad + param


class Listed(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        last = self.state[param].setdefault("last", [])
        last[:] = [*last[-1:], grad.clone()]
        return sum(last) / len(last)


class InDict(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        kept = self.state[param].setdefault("kept", {})
        kept["v"] = kept.get("v", torch.zeros_like(param)) * 0.9 + grad
        return kept["v"]


class Flat(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["v"] = torch.zeros(param.numel())
        return state["v"].mul_(0.9).add_(grad.reshape(-1)).view(param.shape)


class OneForTwo(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["fast"] = state["slow"] = torch.zeros_like(param)
        state["fast"].mul_(0.9).add_(grad)
        return state["slow"]


class KeepsItself(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad + self.state[param].setdefault("start", param.data)


class Clock:
    ticks = 0


class HasClock(Plain):
    """Counts in an object, and acts on it late."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.clock = Clock()

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        self.clock.ticks += 1
        return grad / max(1, self.clock.ticks - 10_000)


class OnItsClass(Plain):
    """The same on its class."""

    ticks = 0

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        OnItsClass.ticks += 1
        return grad / max(1, self.ticks - 10_000)


class OnItsBase(OnItsClass):
    """On the class that has the step."""


class Eager(Plain):
    """Makes what its parameters keep before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["v"] = torch.zeros_like(param)

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return self.state[param]["v"].lerp_(grad, 0.5).clone()


class EagerInPart(Plain):
    """Makes a part of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for at, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["seed"] = at

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return self.state[param].setdefault("v", param.detach().clone()).lerp_(grad, 0.5).clone()


class Caching(Plain):
    """Keeps what it computes from the learning rate in a list of lists, which is one for all groups, as RAdam did."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, cache=[[None, None] for _ in range(10)])

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        cached = group["cache"][state["step"] % 10]
        if cached[0] != state["step"]:
            cached[:] = state["step"], 0.1 * group["lr"] / state["step"]
        return grad * cached[1]


def test_what_a_step_keeps_in_lists_of_lists_is_as_in_torch(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: Caching(model.parameters()), tier)
    pair.train(batches(8), rel=2e-6, atol=1e-6)
    assert pair.optimizer.param_groups[0]["cache"] == pair.plain_optimizer.param_groups[0]["cache"]


class ByName(Plain):
    """Steps on some parameters alone, by their names."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if "bias" not in name:
                    param.sub_(param.grad, alpha=group["lr"])


class InItsState(Plain):
    """Counts in its state, under no parameter, as SPAM of pytorch_optimizer does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["total_step"] = 0  # type: ignore[index]

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        self.state["total_step"] += 1  # type: ignore[index]
        return grad / self.state["total_step"]  # type: ignore[index]


class Common(Plain):
    """Counts its steps under a key of its own."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        common: Any = self.state["common"]  # type: ignore[index]
        common["count"] = common.get("count", 0) + 1
        return grad / common["count"]


class Marking(Plain):
    """Hangs what it learns on the parameters."""

    def direction(self, group: dict[str, Any], param: Any, grad: Tensor) -> Tensor:
        param.count = getattr(param, "count", 0) + 1
        return grad / param.count


class Wide(Plain):
    """Keeps an array that fp32 does not hold."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["count"] = torch.full_like(param, 2**24, dtype=group["dtype"])
        state["count"] += 1
        return grad * (state["count"] - 2**24)


class Noisy(Plain):
    """Langevin dynamics."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad) * 0.01


class Coupled(Plain):
    """Normalises the gradients of all parameters together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        params = [param for _, param in self.stepped()]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm)


class Counting(Plain):
    """Keeps in its param_groups what it estimates from all parameters, as Prodigy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, count=0)

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        group["count"] += float(grad.abs().sum())
        return grad


def named(params: Any) -> torch.optim.Optimizer:
    return ByName([(f"{at}.weight", param) for at, param in enumerate(params)])


def two_that_share(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return Caching([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}])


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "Wrapper": (Wrapper, "its attribute 'base' is another optimizer"),
    "OwnList": (OwnList, "its attribute 'mine' holds parameters"),
    "InClosure": (InClosure, "does not change the parameter that it is given"),
    "ByParameter": (ByParameter, "its attribute 'scales' holds parameters"),
    "ById": (ById, "'no_decay' of its param_groups holds parameters or their ids"),
    "Listed": (Listed, "it keeps 'last' for each element in a list"),
    "InDict": (InDict, "it keeps 'kept' for each element in a dict"),
    "Flat": (Flat, "it keeps 'v' for each element in another shape"),
    "OneForTwo": (OneForTwo, "it keeps 'slow' in the memory of 'fast'"),
    "HasClock": (HasClock, "counts in its attribute 'clock', and runs once a parameter here; count in its groups"),
    "OnItsClass": (OnItsClass, "counts in its class, and runs once a parameter"),
    "OnItsBase": (OnItsBase, "counts in its class"),
    "Eager": (Eager, "raised KeyError.'v'.; what a parameter keeps must be made in its first step"),
    "InItsState": (
        InItsState,
        "TypeError.*; its state has 'total_step', which is of no parameter: count in its groups",
    ),
    "ByName": (named, "raised KeyError.'param_names'.; a step is given one parameter, without its name"),
    "EagerInPart": (EagerInPart, r"has \['seed'\] and not \['v'\]; what a parameter keeps"),
    "Caching": (two_that_share, "depends on the others, or on the other groups"),
    "KeepsItself": (KeepsItself, "it keeps 'start' in the memory of the parameter"),
    "Common": (Common, "keeps state under 'common', which is no parameter"),
    "Marking": (Marking, "sets attributes of its parameters .'count'"),
    "int64": (lambda params: Wide(params, dtype=torch.int64), "it keeps 'count' as int64 for each element"),
    "float64": (lambda params: Wide(params, dtype=torch.float64), "it keeps 'count' as float64 for each element"),
    "Noisy": (Noisy, "draws random numbers"),
    "LBFGS": (torch.optim.LBFGS, "closure"),
    "Coupled": (Coupled, "depends on the others"),
    "Counting": (Counting, "changes of its param_groups .* depends on the parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_would_step_on_something_else_is_refused_and_nothing_moves(workshop: Workshop, name: str) -> None:
    model = Stack(depth=2)
    make, reason = REFUSED[name]
    optimizer = make(model.parameters())
    squared_error(model, batches(1)[0]).backward()
    before = {key: (param.detach().clone(), param.grad) for key, param in model.named_parameters()}
    drawn = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"{type(optimizer).__name__} can run neither on pieces .*{reason}"):
        outsize.prepare(model, optimizer, **workshop.fields("disk"))
    for key, param in model.named_parameters():
        value, grad = before[key]
        assert type(param) is nn.Parameter and torch.equal(param, value)
        assert param.grad is grad
    assert torch.equal(torch.get_rng_state(), drawn)


class SharpnessAware(Plain):
    """Looks at the gradients twice where it has a closure."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            closure()
            closure()
        super().step()


class ByLoss(Plain):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            self.param_groups[0]["lr"] = 0.1 * float(closure())
        super().step()


class FactorOfLoss(Plain):
    """Has a factor from the loss, whatever the learning rate is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * loss)


class ByLossIfAsked(FactorOfLoss):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None and not self.param_groups[0].get("by_loss"):
            closure()
            closure = None
        super().step(closure)


class Deaf(Plain):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        super().step()


@pytest.mark.parametrize("rate", [0.01, 0.0])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (SharpnessAware, "calls the closure more than once"),
        (ByLoss, "uses the loss"),
        (FactorOfLoss, "uses the loss"),
        (Deaf, "does not call the closure"),
    ],
)
def test_a_closure_that_is_not_called_once_alone_is_refused_before_it_is(
    workshop: Workshop, kind: Any, fault: str, rate: float
) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: kind(model.parameters()), "host")
    pair.train(batches(2))
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.param_groups[0]["lr"] = rate  # as a warm-up begins
    with pytest.raises(RuntimeError, match=fault):
        pair.optimizer.step(lambda: pytest.fail("called"))
    pair.train(batches(2))


def test_a_closure_is_looked_at_again_when_an_option_changes(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: ByLossIfAsked(model.parameters()), "host")
    pair.optimizer.param_groups[0]["by_loss"] = False
    squared_error(pair.model, batches(1)[0]).backward()
    pair.optimizer.step(lambda: 2.0)
    pair.optimizer.param_groups[0]["by_loss"] = True
    with pytest.raises(RuntimeError, match="uses the loss"):
        pair.optimizer.step(lambda: pytest.fail("called"))


class Scaled(Plain):
    """Reads what the user has hung on each parameter, and what it counts in a table of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.table = Counter(half=1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        type(self).warned = True
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad * param.scale * self.table["half"], alpha=0.01)
        return loss


def test_a_closure_is_called_where_parameters_have_attributes(workshop: Workshop) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        for param in model.parameters():
            param.scale = 0.5  # type: ignore[attr-defined]
        return Scaled(model.parameters())

    pair = workshop.pair(lambda: Stack(depth=2), make, "host")
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        for batch in batches(3):

            def closure(model: nn.Module = model, batch: Any = batch) -> Tensor:
                model.zero_grad()
                loss = squared_error(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    pair.check()


class Slow(Plain):
    """RAdam that waits until its variance is known: moves nothing in its first steps."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        state["v"] = state.get("v", torch.zeros_like(param)) * 0.9 + grad
        return state["v"] if state["step"] > 5 else torch.zeros_like(grad)


def test_one_that_only_collects_in_its_first_steps_trains_as_in_torch(workshop: Workshop) -> None:
    workshop.pair(lambda: Stack(depth=2), lambda model: Slow(model.parameters()), "host").train(batches(8))


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0), torch.tensor(0.1)])
def test_a_learning_rate_of_zero_is_no_reason_to_refuse(lr: float | Tensor) -> None:
    assert not rule_for(Marked([nn.Parameter(torch.ones(4, 6))], lr=lr)).whole


# -- on pieces or whole ----------------------------------------------------------------------------------------------


class Marked(Plain):
    """Plain descent, whose class says that pieces will do."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Inheriting(Marked):
    """Has the marked step."""


class Overriding(Marked):
    """Has a step of its own, which nobody has marked."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_only_a_marked_step_runs_on_pieces() -> None:
    params = [nn.Parameter(torch.ones(4, 6))]
    kinds: list[Any] = [Marked, Inheriting, Overriding, Plain, Large]
    assert [rule_for(kind(params)).whole for kind in kinds] == [False, False, True, True, True]


class Large(Plain):
    """Keeps the second moment of a matrix by rows and columns where both are above 16, as AdafactorBigVision does."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state, square = self.state[param], grad.square()
        if param.ndim == 2 and min(param.shape) > 16:
            rows = state.setdefault("rows", torch.zeros(len(param), device=param.device)).lerp_(square.mean(1), 0.5)
            columns = state.setdefault("columns", torch.zeros(param.shape[1], device=param.device)).lerp_(
                square.mean(0), 0.5
            )
            second = rows[:, None] * columns / rows.mean()
        else:
            second = state.setdefault("second", torch.zeros_like(param)).lerp_(square, 0.5)
        return grad / (second.sqrt() + 1e-8)


class Middling(Built, first=(16, 48), second=(48, 32), head=(32, 4)):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_what_a_step_does_above_a_size_alone_is_as_in_torch(workshop: Workshop, tier: str) -> None:
    workshop.pair(Middling, lambda model: Large(model.parameters(), lr=1e-3), tier).train(batches(4), rel=1e-5)


class Tied(Plain):
    """Scales large matrices by the norm of all gradients."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        norm = sum(each.grad.norm() for each in group["params"] if each.grad is not None)
        return grad / norm if grad.numel() > 10_000 else grad


class Estimating(Plain):
    """Estimates one rate from all parameters and leaves it in their states, as Prodigy does in its groups."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        self.state[param]["d"] = sum(float(each.grad.abs().sum()) for each in group["params"] if each.grad is not None)
        return grad


class Greedy(Plain):
    """Draws random numbers, and takes memory for each pair of elements."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        assert param.numel() < 1000, "nobody has so much memory"
        return grad + torch.rand_like(grad)


@dataclass(frozen=True)
class Settings:
    """Has no hash, though it says that it has."""

    rates: list[float]


class Odd(Plain):
    """Keeps an object that checkpoints do not."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        self.state[param].setdefault("of", Settings([1.0]))
        return grad


def test_what_a_save_will_refuse_is_logged_by_prepare(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    pair = workshop.pair(optimizer=lambda model: Odd(model.parameters()), tier="host")
    assert "outsize.save will refuse this Odd: the optimizer's state['of'] is a " in caplog.text
    pair.train(batches(2))


class Wrapped(torch.Tensor):
    pass


class Quantized(Plain):
    """Keeps a tensor subclass for large parameters of whole blocks, as 8-bit optimizers do."""

    least = 4096

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        kind = Wrapped if param.numel() >= self.least and param.numel() % 2048 == 0 else Tensor
        self.state[param].setdefault("code", torch.zeros_like(param).as_subclass(kind))
        return grad


class QuantizedIfHuge(Quantized):
    least = 20_000


class NarrowIfLarge(Plain):
    """Keeps large parameters' averages as 8-bit codes, as those of bitsandbytes do."""

    least = 4096

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        narrow = param.numel() >= self.least
        code = self.state[param].setdefault("code", torch.zeros_like(param, dtype=torch.uint8 if narrow else None))
        code.copy_((code + grad.abs()).clamp(max=255))
        return grad / (1 + code)


class NarrowIfHuge(NarrowIfLarge):
    least = 20_000


class NarrowGroup(Plain):
    """Keeps the averages of a group in the dtype that the group says."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        average = self.state[param].setdefault("average", torch.zeros_like(param, dtype=group.get("kept")))
        return average.lerp_(grad.to(average.dtype), 0.5).to(grad.dtype)


def narrow_group(params: Any) -> torch.optim.Optimizer:
    other = nn.Parameter(torch.ones(4, 6))
    return NarrowGroup([{"params": params}, {"params": [other], "kept": torch.bfloat16}])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NarrowIfLarge, "it keeps 'code' as float32 and as uint8, by the size, the group or the step"),
        (narrow_group, "it keeps 'average' as bfloat16 and as float32, by the size, the group or the step"),
        (Tied, "depends on the others"),
        (Estimating, "depends on the others"),
        (Greedy, "draws random numbers"),
        (Quantized, "'code' as a subclass of torch.Tensor.*state_format='compact'"),
    ],
)
def test_what_shows_at_large_sizes_or_in_states_is_refused(workshop: Workshop, kind: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rule_for(kind([nn.Parameter(torch.ones(4, 6))]))


@pytest.mark.parametrize(("kind", "kept"), [(NarrowIfHuge, "uint8"), (QuantizedIfHuge, "Wrapped")])
def test_another_array_than_was_tried_is_an_error(workshop: Workshop, kind: Any, kept: str) -> None:
    """And no codes that are taken for values."""
    model = nn.Linear(256, 256)
    optimizer = kind(model.parameters())
    outsize.prepare(model, optimizer, device="cpu", host_memory="8MiB")
    model(torch.ones(1, 256)).sum().backward()
    with pytest.raises(RuntimeError, match=f"it keeps 'code' as {kept}, which it did not do when it was tried"):
        optimizer.step()
        model(torch.ones(1, 256))


class OuterProduct(Plain):
    """Keeps a matrix for each vector, as Shampoo does."""

    lengths: ClassVar[list[int]] = []

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        if param.ndim == 1:
            self.lengths.append(len(param))
            return self.state[param].setdefault("matrix", torch.eye(len(param))).add_(grad.outer(grad)) @ grad
        return grad


@pytest.mark.parametrize(("longest", "tried"), [(100, 100), (5, 96), (10_000, 4096)])
def test_vectors_are_tried_at_no_greater_length_than_there_is(longest: int, tried: int) -> None:
    OuterProduct.lengths.clear()
    rule_for(OuterProduct([nn.Parameter(torch.ones(each)) for each in (3, longest)]))
    assert set(OuterProduct.lengths) == {tried}


# -- kinds of parameters ---------------------------------------------------------------------------------------------


class Centred(Plain):
    """Centres the gradients of convolutions (Yong et al. 2020)."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 3 else grad


class Tall(Plain):
    """A rate by the proportions of a matrix, as Muon has it."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        rows, columns = (param.shape[0], param.numel() // param.shape[0]) if param.ndim > 1 else (1, 1)
        return grad * max(1, rows / columns) ** 0.5


class Square(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad.T if grad.ndim == 2 and grad.shape[0] == grad.shape[1] else grad


class VectorNorm(Plain):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad / grad.norm() if grad.ndim == 1 else grad


class Convolving(
    Built,
    conv=lambda: nn.Conv2d(1, 4, 2),
    middle=(36, 36),
    tall=(36, 48),
    head=(48, 4),
    scale=lambda: nn.Parameter(torch.ones(())),
):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x.view(-1, 1, 4, 4))).flatten(1)
        return self.head(torch.tanh(self.tall(torch.tanh(self.middle(x))))) * self.scale


@pytest.mark.parametrize("kind", [Centred, Tall, Square, VectorNorm])
def test_one_that_looks_at_the_shape_gets_whole_parameters(
    workshop: Workshop, tier: str, kind: type[torch.optim.Optimizer]
) -> None:
    pair = workshop.pair(Convolving, lambda model: kind(model.parameters()), tier)
    pair.train(batches(3), rel=2e-6)


class Fused(torch.optim.Adam):
    """Its kernel rounds the last elements otherwise, which fill no vector."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, fused=True)


def test_all_kinds_of_parameters_run_on_pieces_where_the_arithmetic_is_elementwise() -> None:
    shapes = ((), (1,), (7,), (3, 5), (5, 3), (5, 5), (1, 9), (64, 3, 3, 3), (8, 64, 3, 3), (2, 3, 4, 5, 6), (0, 3))
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    kinds: list[Any] = [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Rprop, Fused]
    for kind in kinds:
        rule = rule_for(kind(params))
        assert not rule.whole
        assert not rule.optional


class VectorAverage(Plain):
    """Keeps an array for vectors alone, and matrices by a norm."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        if param.ndim > 1:
            return grad / grad.norm()
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        return average.lerp_(grad, 0.5).clone()


def test_an_array_of_vectors_takes_no_room_for_matrices(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: VectorAverage(model.parameters()), tier)
    pair.train(batches(3), rel=2e-6)
    assert not rule_for(VectorAverage(pair.plain.parameters())).arrays


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_say_in_what_is_found(workshop: Workshop, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = Stack(depth=2)
    model = copy.deepcopy(plain)
    expected, optimizer = (torch.optim.RMSprop(each.parameters(), lr=1e-3) for each in (plain, model))
    torch.set_default_dtype(dtype)
    try:
        workshop.prepare(model, optimizer, "host")
    finally:
        torch.set_default_dtype(torch.float32)
    train(model, optimizer, batches(20)).close_to(train(plain, expected, batches(20)))
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-6, atol=1e-7)


# -- arrays that come later ------------------------------------------------------------------------------------------


class Lookahead(Plain):
    """Slow weights every second step (Zhang et al. 2019)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group, param in self.stepped():
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            param.sub_(param.grad * group["lr"])
            if state["step"] % 2 == 0:
                if "slow" not in state:
                    state["slow"] = param.clone()
                state["slow"].lerp_(param, 0.5)
                param.copy_(state["slow"])


def lookahead(model: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(model.parameters())


def expect_same_keys(pair: Any) -> None:
    mine, theirs = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    assert {at: entry.keys() for at, entry in mine.items() if entry} == {
        at: entry.keys() for at, entry in theirs.items()
    }


def test_an_array_of_a_later_step_begins_as_in_torch(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lookahead, tier)
    for _ in range(4):
        pair.train(batches(1))
        expect_same_keys(pair)


def test_a_checkpoint_tells_which_arrays_there_are(workshop: Workshop, tier: str, tmp_path: Path) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lookahead, tier)
    pair.train(batches(1))
    outsize.save(tmp_path / "one", pair.model, pair.optimizer).wait()
    train(pair.model, pair.optimizer, batches(3))
    outsize.load(tmp_path / "one", pair.model, pair.optimizer)
    expect_same_keys(pair)
    pair.train(batches(4))


def test_a_state_dict_goes_to_torch_and_back_without_the_array(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lookahead, tier)
    pair.train(batches(1))
    plain, mine = copy.deepcopy(pair.plain_optimizer.state_dict()), pair.optimizer.state_dict()
    pair.plain_optimizer.load_state_dict(mine)
    pair.optimizer.load_state_dict(plain)
    pair.train(batches(3))


class MatricesAlone(Plain):
    """Keeps an array for matrices, and a count for all."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        state["seen"] = state.get("seen", 0) + 1
        if param.ndim > 1:
            grad = state.setdefault("average", torch.zeros_like(param)).lerp_(grad, 0.5)
        return grad / state["seen"]


@pytest.mark.parametrize("make", [lookahead, lambda model: MatricesAlone(model.parameters())])
def test_an_existing_state_is_taken_over_without_the_array(workshop: Workshop, make: Any) -> None:
    torch.manual_seed(0)
    plain = Stack(depth=2)
    expected = make(plain)
    train(plain, expected, batches(1))
    model = copy.deepcopy(plain)
    optimizer = make(model)
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    workshop.prepare(model, optimizer, "squeezed")
    train(model, optimizer, batches(4)).close_to(train(plain, expected, batches(4)))


class Momentum(torch.optim.SGD):
    """A subclass, which runs its own step."""


def test_a_momentum_that_a_group_gets_later_begins_as_in_torch(workshop: Workshop, tier: str) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        plain = {"params": params[3:], "momentum": 0.0, "dampening": 0.5}
        return Momentum([{"params": params[:3], "momentum": 0.9}, plain], lr=0.1)

    pair = workshop.pair(lambda: Stack(depth=2), grouped, tier)
    pair.train(batches(2))
    expect_same_keys(pair)
    for _, optimizer in pair.both:
        optimizer.param_groups[1]["momentum"] = 0.9
    pair.train(batches(3))
    expect_same_keys(pair)


class NoneAtFirst(Plain):
    """Has None where an array will be."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["v"] = None
            return grad
        state["v"] = grad.clone() if state["v"] is None else state["v"] * 0.9 + grad
        return state["v"]


def test_none_in_the_place_of_an_array_stays_none(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: NoneAtFirst(model.parameters()), tier)
    pair.train(batches(1))
    expect_same_keys(pair)
    pair.train(batches(3))


class Counts(Plain):
    """Counts in an attribute, which its state dict has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad * (1 + self.count % 2)

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}


def test_a_state_dict_that_has_more_than_a_checkpoint_is_not_saved(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pair = workshop.pair(optimizer=lambda model: Counts(model.parameters()), tier="host")
    said = r"the state dict of this Counts also has \['count'\], which outsize.save does not store"
    assert re.search("outsize.save will refuse this Counts: " + said, caplog.text)
    pair.train(batches(2))
    assert pair.optimizer.state_dict()["count"] == 2
    with pytest.raises(ValueError, match=said):
        outsize.save(tmp_path / "checkpoint", pair.model, pair.optimizer)
    assert not (tmp_path / "checkpoint").exists()


class Looks(Plain):
    """Its state dict looks at its first group."""

    def state_dict(self) -> dict[str, Any]:
        assert self.param_groups[0]["params"]
        return super().state_dict()


def test_a_state_dict_that_looks_at_parameters_is_saved(workshop: Workshop, tmp_path: Path) -> None:
    pair = workshop.pair(optimizer=lambda model: Looks(model.parameters()), tier="host")
    pair.train(batches(2))
    outsize.save(tmp_path / "checkpoint", pair.model, pair.optimizer)
    outsize.load(tmp_path / "checkpoint", pair.model, pair.optimizer)
    pair.train(batches(1))
