"""Quantized weights of the tests' own: 8-bit codes and a scale a row behind one parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Codes(Tensor):
    """What `__tensor_flatten__` promises, and no more: it computes below autograd, in `__torch_dispatch__`."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, value: Tensor) -> Codes:
        scale = value.abs().amax(1, keepdim=True) / 127
        return cls((value / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Codes:
        return cls(**inner)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("detach", "clone", "_to_copy"):
            return cls(func(args[0].codes), func(args[0].scale)) if name != "_to_copy" else args[0].moved(kwargs)
        if name == "copy_":
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*(each.dequantize() if isinstance(each, Codes) else each for each in args), **kwargs)

    def moved(self, kwargs: Any) -> Codes:
        return type(self)(self.codes.to(kwargs["device"]), self.scale.to(kwargs["device"]))

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.saved_tensors[0].dequantize(), None


class CodesAbove(Codes):
    """It computes above autograd, in `__torch_function__`, with a function that saves what is made of the weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return _Product.apply(args[0], args[1].detach() if torch.is_grad_enabled() else args[1]) + (
                0 if args[2] is None else args[2]
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Nested(CodesAbove):
    """Its scale is quantized too."""

    def __init__(self, codes: Tensor, scale: Any) -> None:
        super().__init__(codes, scale if isinstance(scale, Codes) else Codes.of(scale))

    def dequantize(self) -> Tensor:
        scale: Any = self.scale
        return self.codes.to(scale.dtype) * scale.dequantize()


KINDS = (Codes, CodesAbove, Nested)


class Adapted(nn.Module):
    """Two frozen layers, of which `kind` keeps the weights, and a small trainable detour around one."""

    def __init__(self, kind: Any, width: int = 64) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        for layer in (self.base, self.last):
            layer.requires_grad_(False)
            layer.weight = nn.Parameter(kind.of(layer.weight.detach()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.base(x) + self.up(self.down(x))))
