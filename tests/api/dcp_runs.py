"""What the tests of torch.distributed.checkpoint folders train, write and read."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import outsize
from tests.api.checkpoint_runs import Block, prepare
from tests.conftest import take_step

Chunk = tuple[Sequence[int], Tensor]
"""(offsets, values)"""

TIERS = ("device", "host", "disk")


class Net(nn.Module):
    """Buffers of both sorts, a scalar, an empty and a frozen parameter, two blocks."""

    def __init__(self, width: int = 24, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, drop=0.0), Block(width, drop=0.0)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.norm(x)) * self.scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in trained if param.ndim > 1]
    others = [param for param in trained if param.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "lr": 2e-2}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 50, (9,))
        losses.append(take_step(nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)), optimizer).item())
    return losses


def plain_run(
    steps: int = 2, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    train(model, optimizer, steps)
    return model, optimizer


def other_run(
    tier: str, tmp: Path, steps: int = 1, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **fields: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A prepared run with other weights, which has trained a little."""
    torch.manual_seed(1)
    model = Net()
    optimizer = make(model)
    prepare(model, optimizer, tier, tmp, **fields)
    train(model, optimizer, steps, seed=7)
    return model, optimizer


def load(
    folder: Path, model: nn.Module | None, optimizer: torch.optim.Optimizer | None = None, strict: bool = True
) -> None:
    assert outsize.load(folder, model, optimizer, strict=strict) is None  # such a folder has no `extra`


def plain_save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


def plain_load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)


def write_chunks(folder: Path, tensors: Mapping[str, tuple[Sequence[int], Sequence[Chunk]]]) -> None:
    """A folder as any number of ranks may write it: of each tensor the shape, and the parts in three files."""
    folder.mkdir()
    records: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"__{at}_0.distcp").open("wb")) for at in range(3)]
        for key, (shape, chunks) in tensors.items():
            for at, (offsets, value) in enumerate(chunks):
                file = files[at % len(files)]
                content = io.BytesIO()
                torch.save(value, content)
                name, length = Path(file.name).name, len(content.getvalue())
                places[MetadataIndex(key, torch.Size(offsets))] = _StorageInfo(name, file.tell(), length)
                file.write(content.getvalue())
            parts = [ChunkStorageMetadata(torch.Size(offsets), value.shape) for offsets, value in chunks]
            kind = TensorProperties(dtype=chunks[0][1].dtype)
            records[key] = TensorStorageMetadata(kind, torch.Size(shape), parts)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(records, storage_data=places)))


def changed(folder: Path, change: Callable[[Metadata], None]) -> None:
    file = folder / ".metadata"
    found: Metadata = pickle.loads(file.read_bytes())
    change(found)
    file.write_bytes(pickle.dumps(found))


def replaced(folder: Path, key: str, content: bytes) -> None:
    """Put other bytes at the end of the file in place of an entry."""
    data = folder / "__0_0.distcp"
    at = data.stat().st_size
    with data.open("ab") as file:
        file.write(content)

    def point(found: Metadata) -> None:
        for index, info in found.storage_data.items():
            if index.fqn == key:
                info.offset, info.length = at, len(content)

    changed(folder, point)


def saved_run(
    folder: Path, flat: bool = False, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain run that torch has saved."""
    model, optimizer = plain_run(make=make)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    plain_save({"model": weights, "optim": states}, folder)
    return model, optimizer
