"""What a layer keeps for its backward, counted in bytes, beside the formulas of Korthikanti et al. 2022 (section 4)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import outsize
from tests.small_models import Built

LENGTH, BATCH, WIDTH, HEADS = 64, 2, 256, 8
UNIT = LENGTH * BATCH * WIDTH  # sbh


def dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]  # with a mask of a byte an element, as on accelerators


class Attention(nn.Module):
    """`fused`: in one operation, without dropout."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            made.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.query(x), self.key(x), self.value(x))
        )
        if self.fused:
            return self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        weights = dropped(((query * (WIDTH // HEADS) ** -0.5) @ key.transpose(2, 3)).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Mlp(Built, up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    """As the paper has it: fp16 or bf16, dropout after softmax, attention and MLP."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(fused), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropped(self.attention(self.norm_1(x)))
        return x + dropped(self.mlp(self.norm_2(x)))


WITHIN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
}
TENSOR = {**WITHIN, "attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
SEQUENCE = {
    **WITHIN,
    "norm_1": SequenceParallel(),
    "norm_2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=torch.distributed.tensor.Replicate()),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=torch.distributed.tensor.Replicate()),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


@final
class Made(TorchDispatchMode):
    """Knows the memory that operations make, as long as it is there."""

    def __init__(self, *first: Tensor) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(first, {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result, _storages((args, kwargs)))
        return result

    def _note(self, values: Any, viewed: Mapping[int, Any]) -> None:
        for key, each in _storages(values).items():
            if key not in viewed:
                self._storages[key] = StorageWeakRef(each), each.nbytes()

    def nbytes(self, beside: Tensor) -> int:
        """Of what is there still, `beside` one tensor."""
        there = {key: size for key, (ref, size) in self._storages.items() if not ref.expired()}
        return sum(there.values()) - sum(there[key] for key in _storages(beside))


def _storages(values: Any) -> dict[int, Any]:
    """Of the tensors among the values, on this rank."""
    local = [getattr(each, "_local_tensor", each) for each in tree_leaves(values) if isinstance(each, Tensor)]
    storages = [getattr(each, "elem", each).untyped_storage() for each in local]
    return {each._cdata: each for each in storages}


def kept_bytes(kind: str, mode: str = "keep", fused: bool = False) -> float:
    """Bytes that one layer of a prepared model keeps on this rank, over sbh. `kind`: none, tensor or sequence; `mode`:
    the way of its activations. The output is the next layer's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(fused) for _ in range(2)]).to(torch.bfloat16)
    fields: dict[str, Any] = {}
    length = LENGTH
    if kind != "none":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tp"))
        for layer in model:
            parallelize_module(layer, mesh["tp"], TENSOR if kind == "tensor" else SEQUENCE)
        fields["mesh"] = mesh
        length = LENGTH // dist.get_world_size() if kind == "sequence" else LENGTH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outsize.prepare(model, optimizer, host_memory="64MiB", params="host", activations=mode, **fields)
    x = model[0](torch.randn(BATCH, length, WIDTH, dtype=torch.bfloat16))
    made = Made(x)
    with made:
        out = model[1](x)
    del x
    expected = formula(kind, mode, dist.get_world_size() if kind != "none" else 1, fused)
    until = time.monotonic() + 10.0
    while abs(made.nbytes(out) / UNIT - expected) > 0.02 * expected and time.monotonic() < until:
        time.sleep(0)  # a thread of the collectives lets go of its tensors a moment after they ended: let it run
    return made.nbytes(out) / UNIT


def formula(kind: str, mode: str = "keep", ranks: int = 1, fused: bool = False) -> float:
    """Bytes over sbh that a layer keeps here.

    With sequence parallelism torch keeps the two inputs that it has gathered. "selective" keeps the layer's input and
    results of products. Those of two products are sums that ranks have still to add up: each has all of one.
    """
    scores = HEADS * LENGTH / WIDTH
    if mode == "recompute":
        return 2 / ranks
    if mode == "selective":
        return 18 / ranks + 4 + (4 * HEADS / WIDTH if fused else 2 * scores) / ranks
    return {"none": 34, "tensor": 10 + 24 / ranks, "sequence": 4 + 30 / ranks}[kind] + 5 * scores / ranks


def published(kind: str, mode: str = "keep", ranks: int = 1) -> float:
    """Bytes over sbh by Korthikanti et al., table 2, where "selective" computes attention's scores again."""
    if mode == "recompute":
        return 2
    scores = 5 * HEADS * LENGTH / WIDTH / ranks if mode == "keep" else 0
    return {"none": 34, "tensor": 10 + 24 / ranks, "sequence": 34 / ranks}[kind] + scores
