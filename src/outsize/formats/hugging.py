"""Weights from a folder in the Hugging Face layout: checked as a whole, then streamed into any live layout."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, Readable
from outsize.checkpoint.differences import (
    Differences,
    Live,
    Shapes,
    check_same_model,
    described,
    differences_of_others,
    listed,
    names_in,
    with_aliases,
)
from outsize.checkpoint.files import OpenFiles, naming, read_exactly, read_manifest
from outsize.checkpoint.opened import Opened
from outsize.checkpoint.regions import MAX_DIMS
from outsize.formats.weights import DTYPE_NAMES, INDEX_NAME, LENGTH_BYTES, SINGLE_NAME
from outsize.move.memory import HostBuffer, memory_of
from outsize.move.store import TRAINED_DTYPES

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""

CONFIG_NAME = "config.json"
"""What transformers writes beside its weights."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NUMBERED = re.compile(r"(.*?\.)?\d+\.")


@dataclass(frozen=True)
class StoredWeight:
    """Where a tensor lies: `offset` bytes into `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def is_safetensors(folder: Path) -> bool:
    """Whether this is a folder of weights in the Hugging Face layout."""
    return (folder / SINGLE_NAME).is_file() or (folder / INDEX_NAME).is_file()


def open_safetensors(folder: Path, live: Live, optional: Collection[str], strict: bool) -> Opened:
    """Open a safetensors folder for the live model; every check is made here. Floating-point weights may be cast.

    Args:
        optional: names that the folder may lack, which then keep their values.
        strict: with False, what only one side has is passed over, unless it is the same under other names.

    Memory: two slabs, and the buffer at hand. Raises `FileNotFoundError` where there are no weights, `ValueError` for
    files that are damaged, lie outside the folder or belong to another model.
    """
    stored = find_weights(folder)
    there = {name: (weight.shape, weight.dtype) for name, weight in stored.items()}
    wanted = {**live.parameters, **(live.buffers or {})}
    unexpected = sorted(stored.keys() - with_aliases(wanted, live.aliases).keys())
    differences = differences_of_others(live, there, unexpected, optional, TRAINED_DTYPES.values())
    _check_renamed(folder, differences, wanted, there)
    passed_over = check_same_model(str(folder), differences, strict)
    files, slab = OpenFiles(), HostBuffer(SLAB_BYTES)

    def read(weight: StoredWeight, start: int, end: int) -> torch.Tensor:
        out = slab.bytes[: (end - start) * weight.dtype.itemsize]
        offset = weight.offset + start * weight.dtype.itemsize
        with naming(weight.file, f"reading weights at {offset}"):
            fd = files.at(weight.file)
            # The next piece comes while this one is placed.
            os.posix_fadvise(fd, offset + out.numel(), SLAB_BYTES, os.POSIX_FADV_WILLNEED)
            read_exactly(fd, offset, memory_of(out), weight.file)
        return out.view(weight.dtype)

    def readable(weight: StoredWeight) -> Readable:
        return Readable(weight.shape, weight.dtype, partial(read, weight))

    keys = names_in(live, there)
    found = {name: readable(stored[key]) for name, key in keys.items()}
    buffers = {name: found.pop(name) for name in keys if name not in live.parameters}
    return Opened(found, buffers, passed_over, files.close)


# Note [Names that transformers converts]
# For many architectures transformers keeps other names and shapes on the drive than in the model: experts one by one,
# heads and layers as they were called before. `save_pretrained` and `from_pretrained` convert; what they go by is no
# public interface, and some of it computes. So such a folder is refused with the remedy, and with strict=False too:
# passed over, the experts would stay as they were initialized. A conversion keeps the number of elements: of all that
# only one side has, or of what is missing in a numbered layer; or it concerns most of the model. A folder that is meant
# to differ, by its head or by adapters, does neither.


def _check_renamed(folder: Path, differences: Differences, live: Shapes, stored: Shapes) -> None:
    """Refuse a folder of transformers that has this model's weights under other names."""
    missing = differences["missing parameters"] + differences["missing buffers"]
    unexpected = differences["unexpected weights"]
    if not missing or not unexpected or not (folder / CONFIG_NAME).is_file():
        return
    lost, found = _by_layer(missing, live), _by_layer(unexpected, stored)
    in_a_layer = any(layer and found[layer] >= numel for layer, numel in lost.items())
    for_most = 2 * lost.total() > sum(prod(shape) for shape, _ in live.values()) and 2 * found.total() > lost.total()
    if lost.total() == found.total() or in_a_layer or for_most:
        one_sided = {"missing weights": missing, "unexpected weights": unexpected}
        raise ValueError(
            f"{folder} seems to have this model's weights under other names ({described(one_sided)}): transformers "
            f"converts many models as it saves and loads them, and outsize.load does not. Build the model with "
            f"`with outsize.init(...): model = Model.from_pretrained({str(folder)!r})` and prepare that; the weights "
            f"of a prepared model come back from folders of outsize.save and outsize.export. Nothing was changed"
        )


def _by_layer(names: Sequence[str], shapes: Shapes) -> Counter[str]:
    """How many elements each numbered module has (`model.layers.3.`, the outermost one); under "" those in none."""
    counts: Counter[str] = Counter()
    for name in names:
        layer = _NUMBERED.match(name)
        counts[layer[0] if layer else ""] += prod(shapes[name][0])
    return counts


# ------------------------------------------------------------------------------------------- what the folder holds


def find_weights(folder: Path) -> dict[str, StoredWeight]:
    """All tensors of a folder by name, after every check that needs no live model."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if not os.path.lexists(single) and not os.path.lexists(index):
        raise FileNotFoundError(errno.ENOENT, f"there is neither {SINGLE_NAME} nor {INDEX_NAME}", str(folder))
    if os.path.lexists(single):
        return _read_header(_inside(folder, SINGLE_NAME))
    homes = _read_index(_inside(folder, INDEX_NAME))
    found: dict[str, StoredWeight] = {}
    for file in sorted(set(homes.values())):
        for name, weight in _read_header(_inside(folder, file)).items():
            if homes.get(name) != file:
                raise ValueError(f"{folder / file} holds {name!r}, which {INDEX_NAME} does not list there")
            found[name] = weight
    lost = [name for name in homes if name not in found]
    if lost:
        raise ValueError(f"{index} lists weights that the files lack: {listed(lost)}")
    return found


def _inside(folder: Path, name: str) -> Path:
    """The real path of a file of the folder. Raises `ValueError` where it leads out of it, but into the `blobs` of the
    Hub's cache, in whose folders `snapshots/REVISION` there are links alone."""
    if not name or "\0" in name or Path(name).name != name:
        raise ValueError(f"{folder / INDEX_NAME} names {name!r}, which is not a plain file name")
    path, here = Path(os.path.realpath(folder / name)), Path(os.path.realpath(folder))
    blobs = [each.parent / "blobs" for each in here.parents if each.name == "snapshots"]
    if not any(path.is_relative_to(home) for home in (here, *blobs)):
        raise ValueError(f"{folder / name} leads out of the folder, to {path}; copy the weights into it")
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, "weights are missing", str(folder / name))
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(f"{folder / name} is not a regular file")
    return path


def _read_index(path: Path) -> dict[str, str]:
    with naming(path, "reading"), _damaged(path):
        listed = json.loads(read_manifest(path), object_pairs_hook=_unique)["weight_map"]
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("weight_map does not give a file for each weight")
        return listed


def _read_header(path: Path) -> dict[str, StoredWeight]:
    """The tensors of one file, which cover it without gaps."""
    with naming(path, "reading"), open(path, "rb") as file, _damaged(path):
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if nbytes < LENGTH_BYTES or length > min(nbytes - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ValueError(f"a file of {nbytes} bytes has no header of {length}")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)  # free text
        begin = LENGTH_BYTES + length
        spans = sorted((_span(name, record), name) for name, record in header.items())
        position = 0
        for (start, end), name in spans:
            if start != position:
                raise ValueError(f"{name!r} begins at {start}, not where the tensor before it ends ({position})")
            position = end
        if begin + position != nbytes:
            raise ValueError(f"it has {nbytes} bytes and should have {begin + position}")
        return {
            name: StoredWeight(path, _DTYPES[header[name]["dtype"]], tuple(header[name]["shape"]), begin + start)
            for (start, _), name in spans
        }


def _span(name: str, record: Any) -> tuple[int, int]:
    shape, offsets = record["shape"], record["data_offsets"]
    if record["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} is of the unknown dtype {record['dtype']!r}")
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in (*shape, *offsets)):
        raise ValueError(f"the shape or place of {name!r} is not made of whole numbers that a size can be")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{name!r} has {len(shape)} dimensions, more than the {MAX_DIMS} that a tensor may have")
    start, end = offsets
    if end - start != prod(shape) * _DTYPES[record["dtype"]].itemsize:
        raise ValueError(f"{name!r} takes {end - start} bytes, which do not fit its shape and dtype")
    return start, end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Whatever a damaged file leads to is a `ValueError` that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
