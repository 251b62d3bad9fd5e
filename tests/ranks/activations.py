"""What a layer keeps for its backward, counted in bytes, beside the formulas of Korthikanti et al. 2022 (section 4)."""

from __future__ import annotations

from typing import Any

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

import outsize

LENGTH, BATCH, WIDTH, HEADS = 64, 2, 256, 8
UNIT = LENGTH * BATCH * WIDTH  # sbh


def dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]  # with a mask of a byte an element, as on accelerators


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            made.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.query(x), self.key(x), self.value(x))
        )
        weights = dropped(((query * (WIDTH // HEADS) ** -0.5) @ key.transpose(2, 3)).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    """As the paper has it: fp16 or bf16, dropout after softmax, attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

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


def kept_bytes(kind: str) -> float:
    """Bytes that one layer of a prepared model keeps on this rank, over sbh. `kind`: none, tensor or sequence."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).to(torch.bfloat16)
    fields: dict[str, Any] = {}
    length = LENGTH
    if kind != "none":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tp"))
        for layer in model:
            parallelize_module(layer, mesh["tp"], TENSOR if kind == "tensor" else SEQUENCE)
        fields["mesh"] = mesh
        length = LENGTH // dist.get_world_size() if kind == "sequence" else LENGTH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outsize.prepare(model, optimizer, host_memory="64MiB", params="host", activations="keep", **fields)
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        found: Any = getattr(tensor, "_local_tensor", tensor)
        found = found.wait() if hasattr(found, "wait") else found
        storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        alive.append(found)
        return tensor

    x = model[0](torch.randn(BATCH, length, WIDTH, dtype=torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model[1](x)
    out.float().square().mean().backward()
    return sum(storages.values()) / UNIT


def formula(kind: str, ranks: int, as_published: bool = False) -> float:
    """Bytes over sbh. With sequence parallelism torch keeps the two inputs that it has gathered, 4 bytes in place of
    the 4 / t that are published."""
    scores = 5 * HEADS * LENGTH / WIDTH
    if kind == "none":
        return 34 + scores
    if as_published and kind == "sequence":
        return 34 / ranks + scores / ranks
    return (10 + 24 / ranks if kind == "tensor" else 4 + 30 / ranks) + scores / ranks
