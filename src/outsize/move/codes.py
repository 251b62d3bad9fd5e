"""8-bit optimizer states: one byte an element and one fp32 scale per block (after FlashOptim)."""

from __future__ import annotations

from typing import Literal

import torch

from outsize import _native

BLOCK = 64
"""Elements that share a scale. A piece starts at a multiple of it; the last block of a piece may be shorter."""

CodeKind = Literal["signed", "root"]
"""How an array is kept: int8 codes of signed values, or uint8 codes of the square roots of values >= 0."""

CODE_DTYPES = {"signed": torch.int8, "root": torch.uint8}

# Note [8-bit codes]
# signed: code = round(127 * compand(x / scale)) with compand(u) = 2u / (1 + |u|), scale = max |x| of the block;
# root: code = round(255 * sqrt(x) / scale), at least 1 where x > 0, scale = max sqrt(x) of the block.
# What was decoded encodes to the same bytes. A block with a value that is not finite decodes to NaN. The kernels do the
# same operations in the same order (loops_impl.hpp, which gives the reasons), so every device has the same bits.

_SMALLEST_SCALE = 2.0**-126
_SMALLEST_ROOT = 2.0**-63
_ROOT_STEP = torch.tensor(1 / 255, dtype=torch.float32, device="cpu").item()


def blocks_of(numel: int) -> int:
    """The number of scales of an array."""
    return -(-numel // BLOCK)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, root: bool) -> None:
    """Write fp32 `values` [numel] into `codes` [numel] (int8; uint8 with `root`) and fp32 `scales` [blocks]."""
    if values.device.type == "cpu":
        held = values.contiguous()
        _native.encode(held.data_ptr(), codes.data_ptr(), scales.data_ptr(), held.numel(), root)
    else:
        encode_formula(values, codes, scales, root)


def decode(codes: torch.Tensor, scales: torch.Tensor, root: bool) -> torch.Tensor:
    """The fp32 values [numel] of `codes` [numel] and `scales` [blocks]."""
    if codes.device.type != "cpu":
        return decode_formula(codes, scales, root)
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    _native.decode(codes.data_ptr(), scales.data_ptr(), values.data_ptr(), values.numel(), root)
    return values


def encode_formula(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, root: bool) -> None:
    """`encode` in torch operations, on any device."""
    blocks = _in_blocks(values)  # [blocks, BLOCK]
    if root:
        # torch's own fp32 root may come from MKL on a CPU, which is not always correctly rounded.
        blocks = blocks.double().sqrt().float() if values.device.type == "cpu" else blocks.sqrt()
    most = blocks.abs().amax(1, keepdim=True)
    if root:
        most = torch.where((most > 0) & (most < _SMALLEST_ROOT), _SMALLEST_ROOT, most)
    else:
        most = torch.where(most < _SMALLEST_SCALE, 0.0, most)
    most = torch.where(most.isfinite(), most, torch.nan)
    if root:
        coded = blocks * torch.where(most == 0, 0.0, 255.0 / most)
        coded = torch.where((blocks > 0) & (coded < 1), 1.0, coded)
    else:
        u = blocks * torch.where(most == 0, 0.0, 1.0 / most)
        coded = 254.0 * u / (1.0 + u.abs())
    coded = torch.where(most.isfinite(), coded, 0.0).round()
    codes.copy_(coded.view(-1)[: values.numel()].to(codes.dtype))
    scales.copy_(most.view(-1))


def decode_formula(codes: torch.Tensor, scales: torch.Tensor, root: bool) -> torch.Tensor:
    """`decode` in torch operations, on any device."""
    blocks = _in_blocks(codes.float())
    if root:
        roots = blocks * _ROOT_STEP * scales.view(-1, 1)
        values = roots * roots
    else:
        values = blocks / (254.0 - blocks.abs()) * scales.view(-1, 1)
    return values.view(-1)[: codes.numel()]


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    return padded.view(-1, BLOCK)
