"""Weights in the Hugging Face layout: safetensors shards and their index, one shard in memory at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, Weights, copy_out
from outsize.checkpoint.folder import sync, write_text
from outsize.checkpoint.library import require_safetensors, storing
from outsize.checkpoint.reader import Masters
from outsize.move.memory import HostBuffer
from outsize.move.shard import DTYPES, MASTER, MASTER_BYTES, MASTER_DTYPE, UnitShard
from outsize.plan.layout import Slot

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class NamedWeight:
    """One tensor of the export; `read` gives its values (CPU, contiguous) when its shard is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_weight(shard: UnitShard, slot: Slot, dtype: torch.dtype, masters: Masters) -> torch.Tensor:
    """A parameter's values in `dtype` [slot.shape]; in another dtype than its own they come from its fp32 master."""
    slab = HostBuffer(SLAB_BYTES)
    own = DTYPES[slot.dtype]
    out = torch.empty(slot.numel, dtype=dtype)
    master = shard.arrays.get(MASTER) if slot.dtype in MASTER_BYTES and dtype is not own else None
    rest = torch.empty(slot.numel if master is not None else 0, dtype=MASTER_DTYPE.get(slot.dtype))

    def keep_rest(_: Slot, first: int, content: torch.Tensor) -> None:
        rest[first : first + content.numel()] = content

    def keep(_: Slot, first: int, content: torch.Tensor) -> None:
        end = first + content.numel()
        out[first:end] = content if master is None else masters.join(content, rest[first:end])

    if master is not None:
        copy_out(States(shard, master), {slot.name: slot}, slab, keep_rest)
    copy_out(Weights(shard), {slot.name: slot}, slab, keep)
    return out.view(slot.shape)


def write_shards(folder: Path, weights: Sequence[NamedWeight], max_shard_bytes: int) -> None:
    """Write the files and the index. Memory: `max_shard_bytes`, or the largest tensor if that is larger."""
    shards = list(_cut(weights, max_shard_bytes))
    names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_NAME]
    for name, shard in zip(names, shards, strict=True):
        with storing(folder / name):
            tensors = {weight.name: weight.read() for weight in shard}
            require_safetensors("outsize.export").save_file(tensors, folder / name, metadata={"format": "pt"})
            del tensors
        sync(folder / name)
    if len(shards) > 1:
        home = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(weight.nbytes for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))}
        write_text(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def _cut(weights: Iterable[NamedWeight], max_shard_bytes: int) -> Iterator[list[NamedWeight]]:
    shard: list[NamedWeight] = []
    nbytes = 0
    for weight in weights:
        if shard and nbytes + weight.nbytes > max_shard_bytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(weight)
        nbytes += weight.nbytes
    yield shard


@contextmanager
def merged_folder(target: Path) -> Iterator[Path]:
    """A folder for the block to fill, whose files then go to `target`, beside what it holds already.

    A new folder appears at once. In an existing one the files are replaced one by one, the weights of an earlier export
    that were not replaced are removed, and everything else stays.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the export; choose another path", str(target))
    exists = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside an existing folder, since that may be a file system of its own.
    fresh = (target if exists else target.parent) / f".{target.name}.new-{secrets.token_hex(6)}"
    fresh.mkdir()
    try:
        yield fresh
        sync(fresh)
        if exists:
            _merge(fresh, target)
        else:
            os.rename(fresh, target)
        sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _merge(fresh: Path, target: Path) -> None:
    new = {entry.name for entry in fresh.iterdir()}
    for name in sorted(new):
        os.replace(fresh / name, target / name)
    for entry in target.iterdir():
        if _WEIGHT_FILE.fullmatch(entry.name) and entry.name not in new:
            entry.unlink()
    sync(target)
