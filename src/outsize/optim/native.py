"""Pieces as the one-pass kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outsize import _native
from outsize.optim.rules import Piece, refuse_new_array

_CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}


def runs_natively(piece: Piece) -> bool:
    """Whether the kernels serve the piece; torch's own operations serve every other."""
    tensors = (piece.param, piece.grad)
    return all(each.device.type == "cpu" and each.dtype in _CODES and each.is_contiguous() for each in tensors)


def native_arrays(piece: Piece, names: Sequence[str]) -> _native.Arrays:
    """The piece's memory with the states `names`, in the order that the kernel wants."""
    return _native.Arrays(
        param=piece.param.data_ptr(),
        param_dtype=_CODES[piece.param.dtype],
        master=0 if piece.master is None else piece.master.data_ptr(),
        grad=piece.grad.data_ptr(),
        grad_dtype=_CODES[piece.grad.dtype],
        states=[piece.states[name].data_ptr() for name in names],
        scales=[piece.scales[name].data_ptr() for name in names if name in piece.scales],
        numel=piece.param.numel(),
        grad_scale=0.0 if piece.ops.zero else piece.ops.scale,
        clamp_min=piece.ops.low,
        clamp_max=piece.ops.high,
    )


def expect_arrays(piece: Piece, names: Sequence[str]) -> None:
    """Raise `RuntimeError` if the optimizer's options need an array that `prepare` did not make."""
    for name in names:
        if name not in piece.states:
            refuse_new_array(name)
