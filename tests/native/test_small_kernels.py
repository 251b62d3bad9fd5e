"""The small kernels: norms, accumulation, split masters, 8-bit states."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outsize import _native
from tests.native.conftest import f32, split

SIZES = [1, 22, 64, 1023, pytest.param(1 << 18, marks=pytest.mark.slow)]
CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}

pytestmark = pytest.mark.usefixtures("instruction_set")

# The fixture sets the same instruction set for every example.
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("numel", [0, *SIZES])
def test_squared_norm_is_the_sum_of_squares(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel + 1).to(dtype)[1:]
    expected = math.fsum((values.double() ** 2).tolist())
    assert _native.squared_norm(values.data_ptr(), CODES[dtype], numel) == pytest.approx(expected, rel=1e-13)


def test_squared_norm_depends_neither_on_alignment_nor_on_threads_nor_on_the_instruction_set() -> None:
    values = torch.randn(300_003)
    moved = torch.zeros(300_004)
    moved[1:] = values
    norms = set()
    for each in _native.instruction_sets():
        _native.use_instruction_set(each)
        for threads in (1, 2, 3):
            norms |= {_native.squared_norm(x.data_ptr(), 0, x.numel(), threads) for x in (values, moved[1:])}
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
@pytest.mark.parametrize("numel", [*SIZES, 200_001])
@pytest.mark.parametrize("threads", [1, 3])
def test_accumulate_scales_and_adds(dtype: torch.dtype, scale: float, numel: int, threads: int) -> None:
    target, source = torch.randn(numel), torch.randn(numel).to(dtype)
    expected = target * f32(scale) + source.float()
    _native.accumulate(target.data_ptr(), source.data_ptr(), CODES[dtype], numel, scale, threads)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 65_537, 300_000])
def test_copies_every_byte_and_no_other(nbytes: int, threads: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.full((nbytes + 2,), 7, dtype=torch.uint8)
    _native.copy(target.data_ptr() + 1, source.data_ptr(), nbytes, threads)
    assert torch.equal(target[1:-1], source) and target[0] == target[-1] == 7


def split_natively(master: Tensor) -> tuple[Tensor, Tensor]:
    bf16, remainder = torch.zeros_like(master, dtype=torch.bfloat16), torch.zeros_like(master, dtype=torch.int16)
    _native.split_master(master.data_ptr(), bf16.data_ptr(), remainder.data_ptr(), master.numel())
    return bf16, remainder


def join_natively(bf16: Tensor, remainder: Tensor) -> Tensor:
    master = torch.zeros_like(bf16, dtype=torch.float32)
    _native.join_master(bf16.data_ptr(), remainder.data_ptr(), master.data_ptr(), master.numel())
    return master


@many
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


@many
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=100))
def test_the_split_weight_is_the_nearest_bf16(values: list[float]) -> None:
    master = torch.tensor(values)
    bf16, remainder = split_natively(master)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000  # torch rounds these to even, the split away from zero
    assert torch.equal(bf16[~ties], master.to(torch.bfloat16)[~ties])
    assert (remainder[ties] == -0x8000).all()


# --------------------------------------------------------------------------------------------------- 8-bit states

BLOCK = 64


def encode(values: Tensor, root: bool) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(values.numel(), dtype=torch.uint8 if root else torch.int8)
    scales = torch.zeros(-(-values.numel() // BLOCK))
    _native.encode(values.data_ptr(), codes.data_ptr(), scales.data_ptr(), values.numel(), root)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, root: bool) -> Tensor:
    values = torch.zeros(codes.numel())
    _native.decode(codes.data_ptr(), scales.data_ptr(), values.data_ptr(), codes.numel(), root)
    return values


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("root", [False, True])
@many
@given(values=st.lists(finite, min_size=1, max_size=150), exponent=st.integers(-150, 0))
def test_decoded_values_encode_to_the_same_bytes(root: bool, values: list[float], exponent: int) -> None:
    given_values = torch.tensor(values) * torch.tensor(2.0).pow(exponent)
    given_values = given_values.abs() if root else given_values
    codes, scales = encode(given_values, root)
    decoded = decode(codes, scales, root)
    again, same_scales = encode(decoded, root)
    assert torch.equal(again, codes)
    assert torch.equal(same_scales, scales)
    assert torch.equal(decode(again, same_scales, root), decoded)


@pytest.mark.slow
@pytest.mark.parametrize("root", [False, True])
def test_every_code_at_every_kind_of_scale_is_kept(root: bool) -> None:
    every = torch.arange(256).to(torch.uint8) if root else torch.arange(-127, 128).to(torch.int8)
    most = 255 if root else 127
    codes = torch.full((every.numel(), BLOCK), most).to(every.dtype)
    codes[:, 1] = every
    low, high = (-63, 64) if root else (-126, 128)
    torch.manual_seed(0)
    for exponent in range(low, high):
        scales = (1 + torch.rand(every.numel())) * 2.0**exponent
        again, same_scales = encode(decode(codes.view(-1), scales, root), root)
        assert torch.equal(again.view(-1, BLOCK), codes)
        assert torch.equal(same_scales, scales)


def test_codes_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    values = torch.randn(100 * BLOCK) * torch.randn(100 * BLOCK).exp()
    blocks = values.view(-1, BLOCK).double()
    top = blocks.abs().amax(1, keepdim=True)
    u = blocks / top
    exact = (127 * 2 * u / (1 + u.abs())).view(-1)
    codes, scales = encode(values, False)
    assert torch.equal(scales, top.view(-1).float())
    assert (codes - exact).abs().max() <= 0.5 + 1e-4
    squares = values.square()
    exact = 255 * (squares.view(-1, BLOCK).double().sqrt() / squares.view(-1, BLOCK).double().sqrt().amax(1, True))
    codes, _ = encode(squares, True)
    kept = codes > 1
    assert (codes - exact.view(-1))[kept].abs().max() <= 0.5 + 1e-4
    assert (codes > 0).all()


def test_what_decodes_is_near_what_was_encoded() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000 * BLOCK)
    scales = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    error = (decode(*encode(values, False), False) - values).view(-1, BLOCK).abs() / scales
    assert error.max() < 1 / 127
    roots = values.abs()
    error = ((decode(*encode(roots.square(), True), True).sqrt() - roots).view(-1, BLOCK) / scales).abs()
    assert error.max() < 1.001 / 255  # the smallest are rounded up to code 1
    assert error[roots.view(-1, BLOCK) > scales / 255].max() < 0.501 / 255


def test_zeros_stay_zeros_and_small_squares_do_not_vanish() -> None:
    for root in (False, True):
        codes, scales = encode(torch.zeros(100), root)
        assert not codes.any()
        assert not scales.any()
        assert not decode(codes, scales, root).any()
    squares = torch.zeros(BLOCK)
    squares[0], squares[1], squares[2] = 1.0, 1e-30, 1e-45
    decoded = decode(*encode(squares, True), True)
    assert (decoded[:3] > 0).all()
    assert not decoded[3:].any()
    assert (decode(*encode(torch.full((BLOCK,), 1e-45), True), True) > 0).all()


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_block(root: bool, special: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 7] = special
    decoded = decode(*encode(values, root), root).view(3, BLOCK)
    assert decoded[1].isnan().all()
    assert (decoded[[0, 2]] == 1).all()
    codes, scales = encode(decoded.view(-1), root)
    torch.testing.assert_close(decode(codes, scales, root), decoded.view(-1), equal_nan=True, rtol=0, atol=0)
