"""The kernels against a reference in plain torch operations: equal bits, for every size, dtype and alignment."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outsize import _native

SIZES = [1, 22, 64, 1023, pytest.param(1 << 20, marks=pytest.mark.slow)]
CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}


@dataclass(frozen=True)
class Options:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0
    clamp_min: float = -math.inf
    clamp_max: float = math.inf


@dataclass
class State:
    param: Tensor  # [numel], fp32 or bf16
    remainder: Tensor | None  # [numel] int16, with a bf16 param
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None

    def tensors(self) -> list[Tensor]:
        every = [self.param, self.remainder, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq]
        return [tensor for tensor in every if tensor is not None]

    def clone(self) -> "State":
        return State(*(None if tensor is None else tensor.clone() for tensor in vars(self).values()))


# ------------------------------------------------------------------------------------------------- the reference


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


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def exact_sqrt(value: Tensor) -> Tensor:
    """torch's own float32 square root may come from MKL, which is not always correctly rounded."""
    return value.double().sqrt().float()


def join(bf16: Tensor, remainder: Tensor) -> Tensor:
    return ((bf16.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    low = (bits - (high << 16) + 0x8000) % (1 << 16) - 0x8000
    return high.to(torch.int32).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def reference(state: State, grad: Tensor, options: Options, step: int) -> None:
    w = state.param if state.remainder is None else join(state.param, state.remainder)
    g = (grad.float() * f32(options.grad_scale)).clamp(options.clamp_min, options.clamp_max)
    if options.maximize:
        g = -g
    if options.decoupled:
        w = w * f32(1 - options.lr * options.weight_decay)
    elif options.weight_decay != 0:
        g = fma(f32(options.weight_decay), w, g)
    weight = f32(1 - options.beta1)
    m = state.exp_avg
    m = fma(weight, g - m, m) if weight < 0.5 else fma(weight - 1, g - m, g)
    v = fma(f32(1 - options.beta2) * g, g, state.exp_avg_sq * f32(options.beta2))
    largest = v if state.max_exp_avg_sq is None else torch.maximum(state.max_exp_avg_sq, v)
    denominator = exact_sqrt(largest) / f32((1 - options.beta2**step) ** 0.5) + f32(options.eps)
    w = w + f32(-(options.lr / (1 - options.beta1**step))) * m / denominator
    state.exp_avg.copy_(m)
    state.exp_avg_sq.copy_(v)
    if state.max_exp_avg_sq is not None:
        state.max_exp_avg_sq.copy_(largest)
    if state.remainder is None:
        state.param.copy_(w)
    else:
        bf16, remainder = split(w)
        state.param.copy_(bf16)
        state.remainder.copy_(remainder)


# ---------------------------------------------------------------------------------------------------- the kernel


def update(state: State, grad: Tensor, options: Options, step: int, threads: int = 1) -> None:
    _native.adamw(
        state.param.data_ptr(),
        CODES[state.param.dtype],
        0 if state.remainder is None else state.remainder.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        CODES[grad.dtype],
        grad.numel(),
        step=step,
        max_exp_avg_sq=0 if state.max_exp_avg_sq is None else state.max_exp_avg_sq.data_ptr(),
        threads=threads,
        **vars(options),
    )


def make_state(numel: int, param_dtype: torch.dtype, *, amsgrad: bool = False, shift: int = 0) -> State:
    """Random weights and fresh moments, each array starting `shift` elements into its allocation."""

    def shifted(values: Tensor) -> Tensor:
        room = values.new_zeros(shift + numel)
        room[shift:] = values
        return room[shift:]

    torch.manual_seed(numel)
    master = torch.randn(numel)
    bf16, remainder = split(master)
    split_param = param_dtype == torch.bfloat16
    return State(
        param=shifted(bf16 if split_param else master),
        remainder=shifted(remainder) if split_param else None,
        exp_avg=shifted(torch.zeros(numel)),
        exp_avg_sq=shifted(torch.zeros(numel)),
        max_exp_avg_sq=shifted(torch.zeros(numel)) if amsgrad else None,
    )


def assert_same_bits(actual: State, expected: State) -> None:
    for left, right in zip(actual.tensors(), expected.tensors(), strict=True):
        integers = torch.int32 if left.element_size() == 4 else torch.int16
        assert torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


def assert_updates_like_reference(state: State, grad_dtype: torch.dtype, options: Options, steps: int = 3) -> None:
    expected = state.clone()
    for step in range(1, steps + 1):
        grad = torch.randn(state.param.numel()).to(grad_dtype)
        update(state, grad, options, step)
        reference(expected, grad, options, step)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_size_and_dtype_gives_the_bits_of_the_formula(
    numel: int, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    assert_updates_like_reference(make_state(numel, param_dtype), grad_dtype, Options())


@pytest.mark.parametrize("shift", [1, 3, 5])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_an_unaligned_start_gives_the_bits_of_the_formula(shift: int, param_dtype: torch.dtype) -> None:
    assert_updates_like_reference(make_state(1023, param_dtype, shift=shift), torch.float32, Options())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        Options(decoupled=False),
        Options(decoupled=False, weight_decay=0.0),
        Options(weight_decay=0.0),
        Options(maximize=True),
        Options(beta1=0.3),
        Options(beta1=0.0),
        Options(grad_scale=1 / 65536),
        Options(grad_scale=3.0, clamp_min=-0.5, clamp_max=0.25),
        Options(decoupled=False, maximize=True, grad_scale=0.1, clamp_max=0.01),
    ],
    ids=str,
)
def test_every_option_gives_the_bits_of_the_formula(options: Options, amsgrad: bool) -> None:
    assert_updates_like_reference(make_state(1023, torch.float32, amsgrad=amsgrad), torch.float16, options)
    assert_updates_like_reference(make_state(1023, torch.bfloat16, amsgrad=amsgrad), torch.float32, options)


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1 << 20, (1 << 20) + 4097])
def test_threads_do_not_change_the_bits(param_dtype: torch.dtype, numel: int) -> None:
    alone = make_state(numel, param_dtype)
    together = alone.clone()
    for step in (1, 2):
        grad = torch.randn(numel)
        update(alone, grad, Options(), step, threads=1)
        update(together, grad, Options(), step, threads=2)
    assert_same_bits(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_hundred_steps_follow_torch(decoupled: bool, amsgrad: bool) -> None:
    options = Options(decoupled=decoupled)
    state = make_state(10_007, torch.float32, amsgrad=amsgrad)
    param = torch.nn.Parameter(state.param.clone())
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class(
        [param], lr=options.lr, weight_decay=options.weight_decay, amsgrad=amsgrad, foreach=False
    )
    for step in range(1, 101):
        param.grad = torch.randn(10_007)
        update(state, param.grad, options, step)
        optimizer.step()
    theirs = optimizer.state[param]
    # A few roundings of a weight near 1; the difference does not grow beyond that in a hundred steps.
    torch.testing.assert_close(state.param, param.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(state.exp_avg, theirs["exp_avg"], rtol=0, atol=1e-6)
    torch.testing.assert_close(state.exp_avg_sq, theirs["exp_avg_sq"], rtol=1e-5, atol=0)


def test_infinity_and_nan_in_the_gradient_stay_in_their_element() -> None:
    state = make_state(64, torch.bfloat16)
    expected = state.clone()
    grad = torch.randn(64)
    sound = grad.clone()
    grad[3], grad[40] = math.nan, math.inf
    update(state, grad, Options(clamp_min=-1.0), 1)
    update(expected, sound, Options(clamp_min=-1.0), 1)
    assert state.remainder is not None
    assert expected.remainder is not None
    ours, theirs = join(state.param, state.remainder), join(expected.param, expected.remainder)
    assert ours[3].isnan()
    assert ours[40].isnan()
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[[3, 40]] = False
    assert torch.equal(ours[untouched], theirs[untouched])


def test_a_split_param_trains_like_its_fp32_master() -> None:
    whole, halves = make_state(1023, torch.float32), make_state(1023, torch.bfloat16)
    for step in range(1, 21):
        grad = torch.randn(1023)
        update(whole, grad, Options(), step)
        update(halves, grad, Options(), step)
    assert halves.remainder is not None
    assert torch.equal(join(halves.param, halves.remainder), whole.param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"grad_dtype": 7}, "grad_dtype is 7"),
        ({"param_dtype": _native.BFLOAT16}, "without a remainder"),
        ({"exp_avg": 0}, "exp_avg is a null address"),
    ],
)
def test_a_bad_argument_is_refused(change: dict[str, int], message: str) -> None:
    state, grad = make_state(4, torch.float32), torch.zeros(4)
    arguments = {
        "param": state.param.data_ptr(),
        "param_dtype": _native.FLOAT32,
        "remainder": 0,
        "exp_avg": state.exp_avg.data_ptr(),
        "exp_avg_sq": state.exp_avg_sq.data_ptr(),
        "grad": grad.data_ptr(),
        "grad_dtype": _native.FLOAT32,
        "numel": 4,
        "step": 1,
    }
    with pytest.raises(ValueError, match=message):
        _native.adamw(**{**vars(replace(Options())), **arguments, **change})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- small kernels


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("numel", [0, *SIZES])
def test_squared_norm_is_the_sum_of_squares(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel + 1).to(dtype)[1:]
    expected = math.fsum((values.double() ** 2).tolist())
    assert _native.squared_norm(values.data_ptr(), CODES[dtype], numel) == pytest.approx(expected, rel=1e-13)


def test_squared_norm_does_not_depend_on_alignment() -> None:
    values = torch.randn(100_003)
    moved = torch.zeros(100_004)
    moved[1:] = values
    norms = {_native.squared_norm(x.data_ptr(), _native.FLOAT32, 100_003) for x in (values, moved[1:])}
    assert len(norms) == 1


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_squared_norm_shows_what_is_not_finite(special: float) -> None:
    values = torch.ones(1000)
    values[777] = special
    assert not math.isfinite(_native.squared_norm(values.data_ptr(), _native.FLOAT32, 1000))


def test_every_half_precision_value_is_widened_exactly() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        source, target = every.view(dtype), torch.zeros(1 << 16)
        _native.accumulate(target.data_ptr(), source.data_ptr(), CODES[dtype], 1 << 16, 0.0)
        torch.testing.assert_close(target, source.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("numel", SIZES)
def test_accumulate_scales_and_adds(dtype: torch.dtype, scale: float, numel: int) -> None:
    target, source = torch.randn(numel), torch.randn(numel).to(dtype)
    expected = target * f32(scale) + source.float()
    _native.accumulate(target.data_ptr(), source.data_ptr(), CODES[dtype], numel, scale)
    assert torch.equal(target, expected)


def split_natively(master: Tensor) -> tuple[Tensor, Tensor]:
    bf16, remainder = torch.zeros_like(master, dtype=torch.bfloat16), torch.zeros_like(master, dtype=torch.int16)
    _native.split_master(master.data_ptr(), bf16.data_ptr(), remainder.data_ptr(), master.numel())
    return bf16, remainder


def join_natively(bf16: Tensor, remainder: Tensor) -> Tensor:
    master = torch.zeros_like(bf16, dtype=torch.float32)
    _native.join_master(bf16.data_ptr(), remainder.data_ptr(), master.data_ptr(), master.numel())
    return master


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=100))
def test_split_and_join_return_every_bit_pattern(patterns: list[int]) -> None:
    master = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    bf16, remainder = split_natively(master)
    expected_bf16, expected_remainder = split(master)
    assert torch.equal(bf16.view(torch.int16), expected_bf16.view(torch.int16))
    assert torch.equal(remainder, expected_remainder)
    assert torch.equal(join_natively(bf16, remainder).view(torch.int32), master.view(torch.int32))


@pytest.mark.slow
def test_split_and_join_return_every_upper_half_with_every_kind_of_lower_half() -> None:
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (high + low).to(torch.int32).view(torch.float32)
        bf16, remainder = split_natively(master)
        assert torch.equal(join_natively(bf16, remainder).view(torch.int32), master.view(torch.int32))


def test_infinity_splits_into_itself() -> None:
    bf16, remainder = split_natively(torch.tensor([math.inf, -math.inf]))
    assert bf16.tolist() == [math.inf, -math.inf]
    assert remainder.tolist() == [0, 0]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=100))
def test_the_split_weight_is_the_nearest_bf16(values: list[float]) -> None:
    master = torch.tensor(values)
    bf16, remainder = split_natively(master)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000  # torch rounds these to even, the split away from zero
    assert torch.equal(bf16[~ties], master.to(torch.bfloat16)[~ties])
    assert (remainder[ties] == -0x8000).all()
