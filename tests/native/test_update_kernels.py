"""The update kernels against references in plain tensor arithmetic, and against torch.optim: equal bits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize import _native
from tests.native.conftest import f32, split

SIZES = [1, 22, 64, 1023, 4097, pytest.param(1 << 16, marks=pytest.mark.slow)]
CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}
PARAM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 64

pytestmark = pytest.mark.usefixtures("instruction_set")

# ------------------------------------------------------------------------------------------- the references' tools


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once: the product is exact in double, the sum is rounded to odd, only then to float."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)  # what the sum in double rounded away (Knuth's TwoSum)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(lost > 0, math.inf, -math.inf).double()
    odd = torch.where(even & (lost != 0) & total.isfinite(), torch.nextafter(total, toward), total)
    return odd.float()


def exact_sqrt(value: Tensor) -> Tensor:
    """torch's own float32 square root may come from MKL, which is not always correctly rounded."""
    return value.double().sqrt().float()


def join(bf16: Tensor, remainder: Tensor) -> Tensor:
    return ((bf16.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


# ---------------------------------------------------------------------------------------------------- the optimizers


@dataclass
class Optimizer:
    """One native function with its reference; `states` are the names of its arrays."""

    name: str
    states: tuple[str, ...]
    formula: Callable[..., Tensor]
    options: dict[str, Any]
    steps: bool = False  # whether it takes the number of the step
    roots: tuple[str, ...] = ()  # states that are compact by their roots

    def at(self, step: int) -> dict[str, Any]:
        return {**self.options, **({"step": step} if self.steps else {}), **self._first(step)}

    def _first(self, step: int) -> dict[str, bool]:
        return {"first": step == 1} if self.name == "sgd" else {}


def adam_formula(
    w: Tensor, g: Tensor, states: dict[str, Tensor], *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, amsgrad: bool, step: int,
) -> Tensor:  # fmt: skip
    g = -g if maximize else g
    if decoupled:
        w = w * f32(1 - lr * weight_decay)
    elif weight_decay != 0:
        g = fma(f32(weight_decay), w, g)
    weight = f32(1 - beta1)
    m = states["exp_avg"]
    m = fma(weight, g - m, m) if weight < 0.5 else fma(weight - 1, g - m, g)
    v = fma(f32(1 - beta2) * g, g, states["exp_avg_sq"] * f32(beta2))
    largest = torch.maximum(states["max_exp_avg_sq"], v) if amsgrad else v
    states["exp_avg"], states["exp_avg_sq"] = m, v
    if amsgrad:
        states["max_exp_avg_sq"] = largest
    denominator = exact_sqrt(largest) / f32((1 - beta2**step) ** 0.5) + f32(eps)
    return w + f32(-(lr / (1 - beta1**step))) * m / denominator


def sgd_formula(
    w: Tensor, g: Tensor, states: dict[str, Tensor], *, lr: float, momentum: float, dampening: float,
    weight_decay: float, nesterov: bool, maximize: bool, first: bool,
) -> Tensor:  # fmt: skip
    g = -g if maximize else g
    if weight_decay != 0:
        g = fma(f32(weight_decay), w, g)
    if momentum != 0:
        before = states["momentum_buffer"] * f32(momentum)
        buffer = states["momentum_buffer"] = g if first else fma(f32(1 - dampening), g, before)
        g = fma(f32(momentum), buffer, g) if nesterov else buffer
    return fma(f32(-lr), g, w)


def adagrad_formula(
    w: Tensor, g: Tensor, states: dict[str, Tensor], *, lr: float, lr_decay: float, eps: float, weight_decay: float,
    maximize: bool, step: int,
) -> Tensor:  # fmt: skip
    g = -g if maximize else g
    if weight_decay != 0:
        g = fma(f32(weight_decay), w, g)
    total = states["sum"] = fma(g, g, states["sum"])
    return w + f32(-(lr / (1 + (step - 1) * lr_decay))) * g / (exact_sqrt(total) + f32(eps))


def lion_formula(
    w: Tensor, g: Tensor, states: dict[str, Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float,
    maximize: bool,
) -> Tensor:  # fmt: skip
    g = -g if maximize else g
    m = states["exp_avg"]
    direction = fma(f32(1 - beta1), g, m * f32(beta1)).sign()
    states["exp_avg"] = fma(f32(1 - beta2), g, m * f32(beta2))
    return fma(f32(-lr), direction, w * f32(1 - lr * weight_decay))


def adam(amsgrad: bool = False, **change: Any) -> Optimizer:
    options = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True,
        "maximize": False, "amsgrad": amsgrad,
    }  # fmt: skip
    states = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    return Optimizer("adam", states, adam_formula, {**options, **change}, steps=True, roots=states[1:])


def sgd(**change: Any) -> Optimizer:
    options = {
        "lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False, "maximize": False,
    }  # fmt: skip
    options.update(change)
    return Optimizer("sgd", ("momentum_buffer",) if options["momentum"] else (), sgd_formula, options)


def adagrad(**change: Any) -> Optimizer:
    options = {"lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01, "maximize": False}
    return Optimizer("adagrad", ("sum",), adagrad_formula, {**options, **change}, steps=True, roots=("sum",))


def lion(**change: Any) -> Optimizer:
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "maximize": False}
    return Optimizer("lion", ("exp_avg",), lion_formula, {**options, **change})


EVERY = [adam(), adam(amsgrad=True), sgd(), sgd(momentum=0.0), adagrad(), lion()]
VARIANTS = [
    *(
        adam(amsgrad, **change)
        for amsgrad in (False, True)
        for change in (
            {"decoupled": False},
            {"decoupled": False, "weight_decay": 0.0},
            {"weight_decay": 0.0},
            {"maximize": True},
            {"decoupled": False, "maximize": True},
            {"beta1": 0.3},
            {"beta1": 0.0},
        )
    ),
    sgd(dampening=0.5),
    sgd(nesterov=True),
    sgd(maximize=True, weight_decay=0.0),
    sgd(maximize=True, nesterov=True),
    sgd(momentum=0.0, weight_decay=0.0),
    sgd(momentum=0.0, maximize=True),
    adagrad(lr_decay=0.0, weight_decay=0.0),
    adagrad(maximize=True),
    lion(weight_decay=0.0),
    lion(maximize=True, beta1=0.5),
]


def name_of(optimizer: Optimizer) -> str:
    plain = next(each for each in EVERY if each.name == optimizer.name)
    return "-".join([optimizer.name, *(f"{k}={v}" for k, v in optimizer.options.items() if plain.options[k] != v)])


# -------------------------------------------------------------------------------------------------------- the state


@dataclass
class State:
    param: Tensor  # [numel], fp32, bf16 or fp16
    master: Tensor | None  # [numel], int16 with bf16, fp32 with fp16
    states: dict[str, Tensor]
    scales: dict[str, Tensor] = field(default_factory=dict)  # [blocks], when the states are codes

    def clone(self) -> "State":
        copies = [{name: each.clone() for name, each in group.items()} for group in (self.states, self.scales)]
        return State(self.param.clone(), None if self.master is None else self.master.clone(), *copies)

    def weight(self) -> Tensor:
        if self.master is None:
            return self.param
        return join(self.param, self.master) if self.master.dtype is torch.int16 else self.master

    def put(self, weight: Tensor) -> None:
        if self.master is None:
            self.param.copy_(weight)
        elif self.master.dtype is torch.int16:
            bf16, remainder = split(weight)
            self.param.copy_(bf16)
            self.master.copy_(remainder)
        else:
            self.master.copy_(weight)
            self.param.copy_(weight.to(torch.float16))

    def tensors(self) -> list[Tensor]:
        own = [self.param] if self.master is None else [self.param, self.master]
        return [*own, *self.states.values(), *self.scales.values()]


def make_state(optimizer: Optimizer, numel: int, dtype: torch.dtype, *, shift: int = 0, compact: bool = False) -> State:
    """Random weights and zero states, each array starting `shift` elements into its allocation."""

    def zeros(dtype: torch.dtype, count: int = numel) -> Tensor:
        return torch.zeros(shift + count, dtype=dtype)[shift:]

    torch.manual_seed(numel)
    masters = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    state = State(zeros(dtype), zeros(masters[dtype]) if dtype in masters else None, {})
    state.put(torch.randn(numel))
    for name in optimizer.states:
        kind = torch.uint8 if name in optimizer.roots else torch.int8
        state.states[name] = zeros(kind if compact else torch.float32)
        if compact:
            state.scales[name] = zeros(torch.float32, -(-numel // BLOCK))
    return state


def arrays_of(state: State, grad: Tensor, **ops: float) -> _native.Arrays:
    return _native.Arrays(
        param=state.param.data_ptr(),
        param_dtype=CODES[state.param.dtype],
        master=0 if state.master is None else state.master.data_ptr(),
        grad=grad.data_ptr(),
        grad_dtype=CODES[grad.dtype],
        states=[each.data_ptr() for each in state.states.values()],
        scales=[each.data_ptr() for each in state.scales.values()],
        numel=grad.numel(),
        **ops,
    )


def update(
    optimizer: Optimizer, state: State, grad: Tensor, step: int, threads: int = 1, ops: dict[str, float] | None = None
) -> None:
    function = getattr(_native, optimizer.name)
    function(arrays_of(state, grad, **(ops or {})), threads=threads, **optimizer.at(step))


def reference(optimizer: Optimizer, state: State, grad: Tensor, step: int, ops: dict[str, float] | None = None) -> None:
    ops = {"grad_scale": 1.0, "clamp_min": -math.inf, "clamp_max": math.inf, **(ops or {})}
    g = (grad.float() * f32(ops["grad_scale"])).clamp(ops["clamp_min"], ops["clamp_max"])
    values = {name: each.clone() for name, each in state.states.items()}
    weight = optimizer.formula(state.weight(), g, values, **optimizer.at(step))
    for name, each in values.items():
        state.states[name].copy_(each)
    state.put(weight)


def assert_same_bits(actual: State, expected: State) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for left, right in zip(actual.tensors(), expected.tensors(), strict=True):
        bits = integers[left.element_size()]
        assert torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def assert_updates_like_reference(
    optimizer: Optimizer, state: State, grad_dtype: torch.dtype, ops: dict[str, float] | None = None, threads: int = 1
) -> None:
    expected = state.clone()
    for step in range(1, 4):
        room = torch.randn(state.param.numel() + 1).to(grad_dtype)
        grad = room[1:]  # at an unaligned address
        update(optimizer, state, grad, step, threads, ops)
        reference(optimizer, expected, grad, step, ops)
    assert_same_bits(state, expected)


# -------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("grad_dtype", CODES, ids=str)
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES, ids=str)
def test_every_size_and_dtype_gives_the_bits_of_the_formula(
    optimizer: Optimizer, numel: int, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    assert_updates_like_reference(optimizer, make_state(optimizer, numel, param_dtype), grad_dtype)


@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
@pytest.mark.parametrize("shift", [1, 3, 5])
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES, ids=str)
def test_an_unaligned_start_gives_the_bits_of_the_formula(
    optimizer: Optimizer, shift: int, param_dtype: torch.dtype
) -> None:
    assert_updates_like_reference(optimizer, make_state(optimizer, 1023, param_dtype, shift=shift), torch.float32)


@pytest.mark.parametrize("optimizer", VARIANTS, ids=name_of)
def test_every_option_gives_the_bits_of_the_formula(optimizer: Optimizer) -> None:
    for param_dtype, grad_dtype in zip(PARAM_DTYPES, reversed(CODES), strict=True):
        assert_updates_like_reference(optimizer, make_state(optimizer, 1023, param_dtype), grad_dtype)


@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
@pytest.mark.parametrize(
    "ops", [{"grad_scale": 1 / 65536}, {"grad_scale": 3.0, "clamp_min": -0.5, "clamp_max": 0.25}, {"clamp_max": 0.01}]
)
def test_the_gradient_is_scaled_and_then_clamped(optimizer: Optimizer, ops: dict[str, float]) -> None:
    assert_updates_like_reference(optimizer, make_state(optimizer, 1023, torch.bfloat16), torch.float16, ops)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES, ids=str)
def test_threads_do_not_change_the_bits(optimizer: Optimizer, param_dtype: torch.dtype, compact: bool) -> None:
    numel = (1 << 17) + 4097
    alone = make_state(optimizer, numel, param_dtype, compact=compact)
    others = {threads: alone.clone() for threads in (2, 3)}
    for step in (1, 2):
        grad = torch.randn(numel)
        update(optimizer, alone, grad, step, threads=1)
        for threads, other in others.items():
            update(optimizer, other, grad, step, threads=threads)
    for other in others.values():
        assert_same_bits(other, alone)


def torch_optimizer(optimizer: Optimizer, param: torch.nn.Parameter) -> torch.optim.Optimizer:
    options = dict(optimizer.options)
    if optimizer.name == "adam":
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
        kind = torch.optim.AdamW if options.pop("decoupled") else torch.optim.Adam
        return kind([param], foreach=False, **options)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    return kinds[optimizer.name]([param], foreach=False, **options)


@pytest.mark.parametrize("optimizer", [each for each in EVERY + VARIANTS if each.name == "sgd"], ids=name_of)
def test_sgd_has_the_bits_of_torch(optimizer: Optimizer) -> None:
    state = make_state(optimizer, 10_007, torch.float32)
    param = torch.nn.Parameter(state.param.clone())
    theirs = torch_optimizer(optimizer, param)
    for step in range(1, 11):
        param.grad = torch.randn(10_007)
        update(optimizer, state, param.grad, step)
        theirs.step()
        assert torch.equal(state.param, param)
    for name in optimizer.states:
        assert torch.equal(state.states[name], theirs.state[param][name])


ROOTED = [each for each in EVERY + VARIANTS if each.name in ("adam", "adagrad")]


@pytest.mark.parametrize("optimizer", ROOTED, ids=name_of)
def test_adam_and_adagrad_have_the_bits_of_torch_but_for_the_root(optimizer: Optimizer) -> None:
    """Every step starts from torch's own state, so that a root's last bit cannot add up."""
    state = make_state(optimizer, 10_007, torch.float32)
    param = torch.nn.Parameter(state.param.clone())
    theirs = torch_optimizer(optimizer, param)
    for step in range(1, 11):
        state.param.copy_(param.detach())
        param.grad = torch.randn(10_007)
        update(optimizer, state, param.grad, step)
        theirs.step()
        for name in optimizer.states:
            assert torch.equal(state.states[name], theirs.state[param][name])
        assert (state.param == param).float().mean() > 0.98
        torch.testing.assert_close(state.param, param.detach(), rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_param_trains_like_its_fp32_master(optimizer: Optimizer, param_dtype: torch.dtype) -> None:
    whole, halves = (make_state(optimizer, 1023, dtype) for dtype in (torch.float32, param_dtype))
    for step in range(1, 21):
        grad = torch.randn(1023)
        update(optimizer, whole, grad, step)
        update(optimizer, halves, grad, step)
    assert torch.equal(halves.weight(), whole.param)


def test_an_fp16_param_is_its_master_rounded_to_nearest_even_for_every_kind_of_value() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    every = every[every.isfinite()]
    steps = torch.tensor([0.0, 0.25, 0.5, 0.5000001, 0.75])
    spacing = torch.maximum(torch.exp2(torch.floor(torch.log2(every.abs().clamp_min(2**-14))) - 10), f32(2**-24))
    values = (every[:, None] + steps * spacing[:, None]).reshape(-1)
    values = torch.cat([values, torch.tensor([65519.9, 65520.0, -65520.0, 1e30, math.inf, 1e-8, 1e-40])])
    still = sgd(lr=0.0, momentum=0.0, weight_decay=0.0)
    state = State(torch.zeros(values.numel(), dtype=torch.float16), values.clone(), {})
    update(still, state, torch.zeros(values.numel()), 1)
    assert torch.equal(state.param.view(torch.int16), values.to(torch.float16).view(torch.int16))
    assert torch.equal(state.master, values)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [each for each in EVERY if each.name != "lion"], ids=name_of)
@pytest.mark.parametrize("param_dtype", PARAM_DTYPES, ids=str)
def test_infinity_and_nan_in_the_gradient_stay_in_their_element(optimizer: Optimizer, param_dtype: torch.dtype) -> None:
    state = make_state(optimizer, 64, param_dtype)
    expected = state.clone()
    grad = torch.randn(64)
    sound = grad.clone()
    grad[3], grad[40] = math.nan, math.inf
    update(optimizer, state, grad, 1, ops={"clamp_min": -1.0})
    update(optimizer, expected, sound, 1, ops={"clamp_min": -1.0})
    assert not state.weight()[[3, 40]].isfinite().any()
    assert not state.param[[3, 40]].isfinite().any()
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[[3, 40]] = False
    assert torch.equal(state.weight()[untouched], expected.weight()[untouched])


# --------------------------------------------------------------------------------------------------- compact states

COMPACT = [each for each in EVERY + VARIANTS if each.states]


def recoded(state: State, optimizer: Optimizer) -> State:
    """`state` with its codes decoded to fp32."""
    plain = state.clone()
    for name, codes in state.states.items():
        values = torch.zeros(codes.numel())
        arguments = (codes.data_ptr(), state.scales[name].data_ptr(), values.data_ptr(), codes.numel())
        _native.decode(*arguments, name in optimizer.roots)
        plain.states[name] = values
    plain.scales = {}
    return plain


def encoded(plain: State, optimizer: Optimizer, like: State) -> State:
    state = State(plain.param, plain.master, {}, {})
    for name, values in plain.states.items():
        state.states[name] = torch.zeros_like(like.states[name])
        state.scales[name] = torch.zeros_like(like.scales[name])
        addresses = (values.data_ptr(), state.states[name].data_ptr(), state.scales[name].data_ptr())
        _native.encode(*addresses, values.numel(), name in optimizer.roots)
    return state


@pytest.mark.parametrize("optimizer", COMPACT, ids=name_of)
@pytest.mark.parametrize("numel", [1, 22, 64, 1023, 4097])
def test_a_compact_update_decodes_updates_and_encodes(optimizer: Optimizer, numel: int) -> None:
    for param_dtype, grad_dtype in zip(PARAM_DTYPES, reversed(CODES), strict=True):
        state = make_state(optimizer, numel, param_dtype, shift=3, compact=True)
        for step in range(1, 4):
            plain = recoded(state, optimizer)
            grad = torch.randn(numel).to(grad_dtype)
            reference(optimizer, plain, grad, step)
            update(optimizer, state, grad, step)
            assert_same_bits(state, encoded(plain, optimizer, state))


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param_dtype": 7}, "param_dtype is 7"),
        ({"grad_dtype": -1}, "grad_dtype is -1"),
        ({"param": 0}, "param is a null address"),
        ({"grad": 0}, "grad is a null address"),
        ({"states": [1, 0]}, r"states\[1\] is a null address"),
        ({"scales": [1, 0]}, r"scales\[1\] is a null address"),
        ({"scales": [1]}, "scales has 1 addresses for 2 states"),
        ({"param_dtype": _native.BFLOAT16}, "master is a null address; a BFLOAT16 param"),
        ({"param_dtype": _native.FLOAT16}, "master is a null address; a FLOAT16 param"),
        ({"master": 1}, "master is given"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "param": 1, "param_dtype": _native.FLOAT32, "master": 0, "grad": 1, "grad_dtype": _native.FLOAT32,
        "states": [1, 1], "scales": [], "numel": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        _native.Arrays(**{**arguments, **change})


@pytest.mark.parametrize("optimizer", EVERY, ids=name_of)
def test_a_wrong_number_of_states_threads_or_steps_is_refused(optimizer: Optimizer) -> None:
    function, options = getattr(_native, optimizer.name), optimizer.at(1)
    state, grad = make_state(optimizer, 4, torch.float32), torch.zeros(4)
    for threads in (0, 1025):
        with pytest.raises(ValueError, match=f"threads is {threads}"):
            function(arrays_of(state, grad), threads=threads, **options)
    if optimizer.steps:
        with pytest.raises(ValueError, match="step is 0"):
            function(arrays_of(state, grad), **{**options, "step": 0})
    state.states["more"] = torch.zeros(4)
    with pytest.raises(ValueError, match=f"states has {len(state.states)} addresses"):
        function(arrays_of(state, grad), **options)


def test_nothing_to_update_is_no_error() -> None:
    for optimizer in EVERY:
        update(optimizer, make_state(optimizer, 0, torch.float32), torch.zeros(0), 1)


def test_an_instruction_set_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="name is 'mmx'"):
        _native.use_instruction_set("mmx")
    assert _native.instruction_set() in _native.instruction_sets()
