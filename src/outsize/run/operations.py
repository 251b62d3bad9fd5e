"""What one operation of torch is, in FLOPs and bytes: on memory or without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATTENTION = "_scaled_dot_product"
_GROUPED = torch.ops.aten._grouped_mm
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer


class Operation(NamedTuple):
    """Its dtype, the FLOPs of a product (0: none), the bytes that it reads and writes, its results that have memory of
    their own."""

    dtype: str
    flops: int
    nbytes: int
    made: tuple[torch.Tensor, ...]
    read: frozenset[int]
    """The storages of its inputs."""
    scratch: int
    """The bytes that its kernel on a CPU takes while it runs, beside these."""


class EachOperation(TorchDispatchMode):
    """Gives each operation that does work to `around`, which runs it: `around(run, describe)`."""

    def __init__(self, around: Callable[[Callable[[], Any], Callable[[Any], Operation | None]], Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # fake tensors are asked all the time
            return func(*args, **kwargs)
        fake = bool(args) and isinstance(args[0], FakeTensor)
        run = _WITHOUT_MEMORY.get(getattr(func, "_overloadpacket", None), func) if fake else func
        return self._around(lambda: run(*args, **kwargs), lambda out: describe(func, args, kwargs, out))


def describe(func: Any, args: Any, kwargs: Any, out: Any) -> Operation | None:
    """None for a view, which moves nothing."""
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    outputs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    packet = getattr(func, "_overloadpacket", None)
    there = frozenset(map(_home, inputs))
    made = tuple(each for each in outputs if _home(each) not in there)
    if not outputs or packet is None or not (made or func._schema.is_mutable):
        return None
    name, flops, tensors = packet.__name__, 0, [*inputs, *outputs]
    dtype = next((each.dtype for each in (*outputs, *inputs) if each.is_floating_point()), outputs[0].dtype)
    if name.startswith(_ATTENTION):
        name = f"attention{'_backward' * ('backward' in name)}"
        packet = getattr(torch.ops.aten, name.replace("attention", _FLASH))
    from torch.utils.flop_counter import flop_registry  # takes a while to import

    if packet is _GROUPED:
        a, b = args[:2]
        flops = 2 * (b.numel() * a.shape[-2] if a.dim() > b.dim() else a.numel() * b.shape[-1])
    elif packet is _RECURRENT:
        flops = 2 * args[0].shape[:-1].numel() * (args[1].numel() + args[2].numel())
    elif packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    if name in _OF_NO_WORK:
        tensors = []
    elif name in _LOOK_UPS:
        tensors = outputs * 2
    elif name.startswith("_embedding_bag") and "backward" not in name:
        tensors = [inputs[0][:1].expand(inputs[1].numel(), -1), *outputs]
    nbytes = sum(each.numel() * each.element_size() for each in tensors if each.layout is torch.strided)
    scratch = _bytes_laid_out_anew(name, inputs, outputs)
    return Operation(str(dtype).removeprefix("torch."), flops, nbytes, made, there, scratch)


def _bytes_laid_out_anew(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """oneDNN computes convolutions and recurrent layers in layouts of its own, with copies of the plain tensors."""
    if name == "convolution":
        return sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
    if name == "convolution_backward":  # of the inputs and of the weights, one after the other; sums in fp32
        return sum(each.numel() * 4 for each in inputs)
    if name.startswith("mkldnn_rnn_layer"):
        of_shape = [each for each in (*inputs, *outputs) if each.dtype is not torch.uint8]  # but for the workspace
        return sum(each.numel() * each.element_size() for each in of_shape)
    return 0


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of `grouped_mm` without memory, in each dtype that it computes in; torch's own has bf16 alone."""
    groups = [a.shape[0]] if a.dim() == b.dim() == 3 else [] if ends is None or a.dim() != b.dim() else [len(ends)]
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)


def _recurrent(x: torch.Tensor, w: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """The results of oneDNN's recurrent layer; of its workspace torch's own knows no size. Per element of the sequence
    it has about 9 values of the hidden size and 6.5 of the larger size."""
    out, hidden, cell, workspace = _RECURRENT(x, w, *others)
    width = w.shape[0] // 4
    values = round(9 * width + 6.5 * max(width, x.shape[-1]))
    return out, hidden, cell, workspace.new_empty(x.shape[:-1].numel() * values * x.element_size())


_WITHOUT_MEMORY: dict[Any, Callable[..., Any]] = {_GROUPED: _grouped, _RECURRENT: _recurrent}
_FLASH = "_scaled_dot_product_flash_attention"
_OF_NO_WORK = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
_LOOK_UPS = frozenset(("embedding", "index", "gather", "index_select"))
"""They read what they look up, not all that there is."""


def _home(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
