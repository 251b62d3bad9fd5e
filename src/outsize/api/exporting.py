"""`export`: weights that other libraries open, in the Hugging Face layout and under its key names."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared
from outsize.api.saving import MASTERS, buffers_of, settle, whole
from outsize.checkpoint.library import require_safetensors
from outsize.checkpoint.weights import NamedWeight, merged_folder, read_weight, write_shards
from outsize.move.shard import DTYPES
from outsize.plan.sizes import parse_bytes

LARGEST_SHARD = 1 << 30
SMALLEST_SHARD = 64 << 20
DTYPES_OUT = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model's weights as safetensors into the folder `path`, for `from_pretrained` and everything else.

    Args:
        path: parents are created; in a folder that exists other files (a tokenizer) stay, weights are replaced.
        max_shard_size: bytes of one file, and so of memory (a larger single tensor is a file of its own). Default: the
            largest unit, between 64 MiB and 1 GiB.
        dtype: of floating-point weights; default their own. With bf16 compute, `torch.float32` gives the fp32 masters.

    An update that is still owed runs first. Names are the model's own; a tied weight is written once. A model with a
    `config` gets its `config.json` and generation configuration. Raises `ImportError` without the safetensors library.
    """
    require_safetensors("outsize.export")
    if dtype is not None and dtype not in DTYPES_OUT:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, DTYPES_OUT))} or None")
    prepared = whole(model, None, "export")
    shard_bytes = _shard_bytes(prepared, max_shard_size)
    settle(prepared)
    weights = _weights(prepared, model, dtype)
    with merged_folder(Path(os.path.realpath(path))) as folder:
        write_shards(folder, weights, shard_bytes)
        _write_config(folder, model, next((each.dtype for each in weights if each.dtype in DTYPES_OUT), None))


def _shard_bytes(prepared: Prepared, asked: int | str | None) -> int:
    if asked is not None:
        return parse_bytes(asked, "max_shard_size")
    largest = max(unit.nbytes for unit in prepared.engine.units)
    return min(max(largest, SMALLEST_SHARD), LARGEST_SHARD)


def _weights(prepared: Prepared, model: nn.Module, dtype: torch.dtype | None) -> list[NamedWeight]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found = []
    for name, param in _chosen_names(model).items():
        unit, slot = prepared.engine.unit_of(param)
        out = dtype or DTYPES[slot.dtype]
        found.append(NamedWeight(name, slot.shape, out, partial(read_weight, unit.shard, slot, out, MASTERS)))
    for name, (value, persistent) in buffers_of(model).items():
        if persistent:
            out = dtype if dtype is not None and value.is_floating_point() else value.dtype
            found.append(NamedWeight(name, tuple(value.shape), out, partial(_read_buffer, value, out)))
    return [weight for weight in found if weight.name not in ignored]


def _chosen_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter under one name: of a tied one the first, unless transformers derives that one from another."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    derived = [re.compile(pattern) for pattern in tied]
    names: dict[int, list[str]] = {}
    params: dict[int, torch.Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return {_own_name(candidates, derived): params[key] for key, candidates in names.items()}


def _own_name(candidates: list[str], derived: Iterable[re.Pattern[str]]) -> str:
    own = (name for name in candidates if not any(pattern.search(name) for pattern in derived))
    return next(own, candidates[0])


def _read_buffer(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.detach().to("cpu", dtype, copy=True).contiguous()


def _write_config(folder: Path, model: nn.Module, dtype: torch.dtype | None) -> None:
    """As transformers' `save_pretrained` does, on a copy of the configuration."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        field = "torch_dtype" if "torch_dtype" in vars(config) else "dtype"
        setattr(config, field, str(dtype).removeprefix("torch."))
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)
