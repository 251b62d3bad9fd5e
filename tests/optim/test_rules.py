"""The rules against torch.optim and against torch's own operations, for every form of a weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.move.codes import CODE_DTYPES, blocks_of, decode
from outsize.move.grad_ops import GradOps
from outsize.move.shard import SlotState
from outsize.optim import Lion
from outsize.optim.native import AdagradRule, AdamRule, LionRule, SGDRule
from outsize.optim.rules import Piece, Rule, join_master, split_master
from outsize.optim.streamed import StreamedRule

NUMEL = 1000


@dataclass
class Case:
    """A rule with the optimizer that it stands for."""

    rule: Callable[[], Rule]
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    exact: bool = True  # no square root, whose last bit torch may round otherwise

    def make(self, param: Tensor) -> torch.optim.Optimizer:
        return self.optimizer([param], **self.options)

    def hyper(self) -> dict[str, object]:
        group = self.make(torch.zeros(1, requires_grad=True)).param_groups[0]
        return {key: value for key, value in group.items() if key != "params"}


CASES = {
    "adamw": Case(lambda: AdamRule(False, True), torch.optim.AdamW, {"weight_decay": 0.1, "foreach": False}, False),
    "adam": Case(lambda: AdamRule(False, False), torch.optim.Adam, {"weight_decay": 0.1, "foreach": False}, False),
    "amsgrad": Case(lambda: AdamRule(True, True), torch.optim.AdamW, {"amsgrad": True, "foreach": False}, False),
    "sgd": Case(lambda: SGDRule(False), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "foreach": False}),
    "momentum": Case(
        lambda: SGDRule(True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": False}
    ),
    "nesterov": Case(
        lambda: SGDRule(True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}
    ),
    "adagrad": Case(AdagradRule, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "foreach": False}, False),
    "lion": Case(LionRule, Lion, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
}
every_case = pytest.mark.parametrize("name", CASES)


@dataclass
class Weight:
    """One parameter with its arrays, updated in pieces as the conveyor does."""

    rule: Rule
    param: Tensor
    master: Tensor | None
    states: dict[str, Tensor]
    scales: dict[str, Tensor]
    state: SlotState

    @classmethod
    def make(cls, rule: Rule, start: Tensor, dtype: torch.dtype, compact: bool = False) -> "Weight":
        masters = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
        param = start.to(dtype)
        master = torch.zeros(start.numel(), dtype=masters[dtype]) if dtype in masters else None
        if master is not None:
            split_master(start.clone(), param, master)
        kinds = {name: CODE_DTYPES[kind] if compact else start.dtype for name, kind in rule.codes.items()}
        states = {name: torch.zeros(start.numel(), dtype=kind) for name, kind in kinds.items()}
        scales = {name: torch.zeros(blocks_of(start.numel())) for name in states} if compact else {}
        return cls(rule, param, master, states, scales, SlotState())

    def step(self, grad: Tensor, hyper: dict[str, object], ops: GradOps | None = None, piece: int = 320) -> None:
        after: dict[str, object] = {}
        for at in range(0, grad.numel(), piece):
            own = slice(at, at + piece)
            after = self.rule.apply(
                Piece(
                    self.param[own],
                    None if self.master is None else self.master[own],
                    {name: each[own] for name, each in self.states.items()},
                    grad[own],
                    ops or GradOps(),
                    hyper,
                    self.state,
                    2,
                    {name: each[at // 64 : (at + piece) // 64] for name, each in self.scales.items()},
                )
            )
        self.state = SlotState(after, initialised=True)

    def whole(self) -> Tensor:
        return self.param if self.master is None else join_master(self.param, self.master)

    def values(self, name: str) -> Tensor:
        if name not in self.scales:
            return self.states[name]
        return decode(self.states[name], self.scales[name], self.rule.codes[name] == "root")


def grads(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(NUMEL).to(dtype) for _ in range(count)]


def start() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(NUMEL)


@every_case
def test_an_fp32_parameter_trains_like_torch(name: str) -> None:
    case = CASES[name]
    weight = Weight.make(case.rule(), start(), torch.float32)
    plain = torch.nn.Parameter(start())
    optimizer = case.make(plain)
    for grad in grads(20):
        weight.step(grad, case.hyper())
        plain.grad = grad.clone()
        optimizer.step()
    if case.exact:
        assert torch.equal(weight.param, plain)
    torch.testing.assert_close(weight.param, plain.detach(), rtol=0, atol=1e-6)
    for array in weight.rule.arrays:
        torch.testing.assert_close(weight.states[array], optimizer.state[plain][array], rtol=1e-6, atol=1e-7)
    for key, value in weight.state.scalars.items():
        assert optimizer.state[plain][key] == value


@every_case
def test_an_fp64_parameter_has_the_bits_of_torch(name: str) -> None:
    case = CASES[name]
    weight = Weight.make(case.rule(), start().double(), torch.float64)
    plain = torch.nn.Parameter(start().double())
    optimizer = case.make(plain)
    for grad in grads(5, torch.float64):
        weight.step(grad, case.hyper())
        plain.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(weight.param, plain.detach(), rtol=1e-15, atol=0)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_has_the_bits_of_its_fp32_master(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    case = CASES[name]
    half, whole = (Weight.make(case.rule(), start(), each) for each in (dtype, torch.float32))
    ops = GradOps(scale=0.37, low=-0.5, high=0.5)
    for grad in grads(5, grad_dtype):
        half.step(grad, case.hyper(), ops)
        whole.step(grad, case.hyper(), ops)
    assert torch.equal(half.whole(), whole.param)
    if dtype is torch.float16:
        assert torch.equal(half.param, whole.param.to(torch.float16))


@every_case
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_own_operations_agree_with_the_kernel(
    name: str, dtype: torch.dtype, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    native, plain = (Weight.make(case.rule(), start(), dtype, compact) for _ in range(2))
    ops = GradOps(scale=0.5)
    for grad in grads(5, torch.bfloat16):
        native.step(grad, case.hyper(), ops)
    monkeypatch.setattr("outsize.optim.native.runs_natively", lambda piece: False)
    for grad in grads(5, torch.bfloat16):
        plain.step(grad, case.hyper(), ops)
    same = (native.whole() == plain.whole()).float().mean()
    assert same == 1 if case.exact else same > 0.9
    torch.testing.assert_close(native.whole(), plain.whole(), rtol=0, atol=1e-6)
    for array in native.rule.arrays:
        torch.testing.assert_close(native.values(array), plain.values(array), rtol=1e-6, atol=1e-6)


@every_case
def test_compact_states_train_nearly_like_exact_ones(name: str) -> None:
    case = CASES[name]
    exact, compact = (Weight.make(case.rule(), start(), torch.float32, each) for each in (False, True))
    for grad in grads(20):
        exact.step(grad + 1, case.hyper())
        compact.step(grad + 1, case.hyper())
    moved = (exact.param - start()).norm()
    assert (exact.param - compact.param).norm() < 0.05 * moved


@every_case
def test_a_zeroed_gradient_is_zero_whatever_its_bytes(name: str) -> None:
    case = CASES[name]
    zeroed, zero = (Weight.make(case.rule(), start(), torch.bfloat16) for _ in range(2))
    zeroed.step(grads(1)[0], case.hyper(), GradOps(zero=True))
    zero.step(torch.zeros(NUMEL), case.hyper())
    assert torch.equal(zeroed.whole(), zero.whole())


@every_case
def test_a_learning_rate_may_be_a_tensor(name: str) -> None:
    case = CASES[name]
    number, tensor = (Weight.make(case.rule(), start(), torch.float32) for _ in range(2))
    number.step(grads(1)[0], {**case.hyper(), "lr": 0.25})
    tensor.step(grads(1)[0], {**case.hyper(), "lr": torch.tensor(0.25)})
    assert torch.equal(number.param, tensor.param)


def test_a_gradient_that_repeats_one_value_is_read_by_its_strides() -> None:
    case = CASES["sgd"]
    expanded, plain = (Weight.make(case.rule(), start(), torch.float32) for _ in range(2))
    expanded.step(torch.ones(()).expand(NUMEL), case.hyper())
    plain.step(torch.ones(NUMEL), case.hyper())
    assert torch.equal(expanded.param, plain.param)


# ------------------------------------------------------------------------------------------------- single rules


def test_momentum_that_is_set_after_steps_without_it_starts_as_in_torch() -> None:
    rule = SGDRule(momentum=True)  # another group has one
    weight = Weight.make(rule, start(), torch.float32)
    plain = torch.nn.Parameter(start())
    optimizer = torch.optim.SGD([plain], lr=0.1, foreach=False)
    for step, grad in enumerate(grads(6)):
        group = optimizer.param_groups[0]
        group["momentum"] = 0.9 if step in (2, 3, 5) else 0.0
        group["dampening"] = 0.5
        weight.step(grad, {key: value for key, value in group.items() if key != "params"})
        plain.grad = grad.clone()
        optimizer.step()
        assert torch.equal(weight.param, plain)
    assert torch.equal(weight.states["momentum_buffer"], optimizer.state[plain]["momentum_buffer"])


class Averaged(torch.optim.Optimizer):
    """Keeps a step count in host memory, and by whole rows an average beside the parameter."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["step"], state["rows"] = torch.zeros(()), torch.zeros(len(param), device=param.device)
            state["step"] += 1
            state["rows"].lerp_(param.grad.mean(1), 0.5)
            param.data.sub_(state["rows"].unsqueeze(1))


def test_states_that_come_from_a_checkpoint_go_where_the_parameter_is() -> None:
    accelerator = torch.device("meta")
    rule = StreamedRule(Averaged([torch.zeros(4, 3, requires_grad=True)], {}))
    param, grad = torch.empty(4, 3, device=accelerator), torch.empty(4, 3, device=accelerator)
    state = SlotState({"step": torch.ones(()), "rows": torch.ones(4)}, initialised=True)
    after = rule.apply(Piece(param, None, {}, grad, GradOps(), {}, state))
    places = {name: value.device for name, value in after.items() if isinstance(value, Tensor)}
    assert places == {"step": torch.device("cpu"), "rows": accelerator}


@pytest.mark.parametrize("compact", [False, True])
def test_adagrad_starts_from_its_initial_value(compact: bool) -> None:
    weight = Weight.make(AdagradRule(), start(), torch.float32, compact)
    weight.step(torch.zeros(NUMEL), {**CASES["adagrad"].hyper(), "initial_accumulator_value": 4.0, "weight_decay": 0})
    assert (weight.values("sum") == 4.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_splitting_and_joining_a_master_returns_it(dtype: torch.dtype) -> None:
    whole = torch.cat([start(), torch.tensor([1e5, -1e30, math.inf, 1e-30, 0.0])])
    param = torch.zeros(whole.numel(), dtype=dtype)
    master = torch.zeros(whole.numel(), dtype=torch.int16 if dtype is torch.bfloat16 else torch.float32)
    split_master(whole, param, master)
    assert torch.equal(join_master(param, master), whole)
    torch.testing.assert_close(param, whole.to(dtype), rtol=2**-7, atol=0)
    values = param.clone()
    split_master(values, param, master)  # of values that have 16 bits themselves
    assert torch.equal(param, values)
    assert torch.equal(join_master(param, master), values.float())
