"""8-bit states: the torch operations and the kernel give the same bytes."""

import math

import pytest
import torch

from outsize.move.codes import BLOCK, CODE_DTYPES, blocks_of, decode, decode_formula, encode, encode_formula


def values_of(kind: str, numel: int, exponent: int) -> torch.Tensor:
    torch.manual_seed(numel)
    values = torch.randn(numel) * torch.randn(numel).exp() * 2.0**exponent
    values[torch.rand(numel) < 0.05] = 0.0
    return values.square() if kind == "root" else values


@pytest.mark.parametrize("kind", CODE_DTYPES)
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 100_000])
@pytest.mark.parametrize("exponent", [-120, -70, -62, 0, 50])
def test_torch_operations_have_the_bytes_of_the_kernel(kind: str, numel: int, exponent: int) -> None:
    root, values = kind == "root", values_of(kind, numel, exponent)
    results = []
    for encoder, decoder in ((encode, decode), (encode_formula, decode_formula)):
        codes, scales = torch.empty(numel, dtype=CODE_DTYPES[kind]), torch.empty(blocks_of(numel))
        encoder(values, codes, scales, root)
        results.append((codes, scales, decoder(codes, scales, root)))
    for native, plain in zip(*results, strict=True):
        assert torch.equal(native, plain)


@pytest.mark.parametrize("kind", CODE_DTYPES)
def test_both_show_what_is_not_finite(kind: str) -> None:
    values = torch.ones(3 * BLOCK + 5)
    values[7], values[BLOCK] = math.inf, math.nan
    for encoder, decoder in ((encode, decode), (encode_formula, decode_formula)):
        codes, scales = torch.empty(values.numel(), dtype=CODE_DTYPES[kind]), torch.empty(blocks_of(values.numel()))
        encoder(values, codes, scales, kind == "root")
        found = decoder(codes, scales, kind == "root")
        assert found[: 2 * BLOCK].isnan().all()
        assert (found[2 * BLOCK :] == 1).all()


def test_nothing_encodes_to_nothing() -> None:
    codes, scales = torch.empty(0, dtype=torch.int8), torch.empty(0)
    encode(torch.empty(0), codes, scales, False)
    assert decode(codes, scales, False).numel() == 0
