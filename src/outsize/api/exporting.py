"""`export`: weights that other libraries open, in the Hugging Face layout and under its key names."""

from __future__ import annotations

import copy
import errno
import os
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared, its_turn
from outsize.api.saving import (
    buffers_of,
    cuts_of,
    refuse_same_names,
    settle,
    shapes_in_stage,
    take_state,
    tied_names,
    whole,
)
from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.folder import NewFolder, check_not_current, check_replaceable, target_of
from outsize.checkpoint.peers import Peers, together
from outsize.formats.pieces import (
    in_memory,
    of_ranks,
    parameter_at_rest,
    tensor_parallel_parameter,
)
from outsize.formats.weights import files_of, merged_folder, runs_of, write_shards
from outsize.move.comm import Ranks, exchange
from outsize.move.progress import Progress
from outsize.move.store import DTYPES, TRAINED_DTYPES
from outsize.optim.worker import NO_OPTIONS
from outsize.planning.sizes import parse_bytes

MAX_SHARD_SIZE = "5GB"
"""As in the Hugging Face libraries."""

FORMATS = ("safetensors", "dcp")
DTYPES_OUT = TRAINED_DTYPES.values()


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
    format: str = "safetensors",
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write the model's weights as safetensors into the folder `path`, for `from_pretrained` and everything else.

    Args:
        path: parents are created; in a folder that exists other files (a tokenizer) stay, weights are replaced.
        max_shard_size: bytes of weights in one file; a larger single tensor is a file of its own. Default: `"5GB"`.
        dtype: of floating-point weights; default their own. With bf16 compute, `torch.float32` gives the fp32 masters.
        format: `"safetensors"`, or `"dcp"`: a new folder of `torch.distributed.checkpoint`, which FSDP2, torchtitan and
            other programs open: weights under the names of `model.state_dict()`.
        optimizer: with `format="dcp"`, the prepared one, whose state is written too, under `optimizer.state`.

    An update that is still owed runs first. Names are the model's own; a tied weight is written once. A model with a
    `config` gets its `config.json` and generation configuration. Memory: 64 MiB, whatever the size of the model, its
    files and its parameters (twice the largest one that tensor parallelism has split). Raises `TypeError` for a
    buffer that safetensors cannot store, before anything is written, and `OSError` with path and errno if the disk is
    full; then nothing is left behind.

    >>> outsize.export("weights", model)
    """
    if dtype is not None and dtype not in DTYPES_OUT:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, DTYPES_OUT))} or None")
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(map(repr, FORMATS))}")
    if format == "dcp" and max_shard_size is not None:
        raise ValueError("max_shard_size is for safetensors; torch.distributed.checkpoint writes one file a rank")
    if format != "dcp" and optimizer is not None:
        raise ValueError("safetensors holds weights alone; give the optimizer with format='dcp', or use outsize.save")
    with its_turn(model, "export"):
        if format == "dcp":
            _export_dcp(target_of(path), model, dtype, optimizer)
        else:
            _export(target_of(path), model, dtype, MAX_SHARD_SIZE if max_shard_size is None else max_shard_size)


def _export(target: Path, model: nn.Module, dtype: torch.dtype | None, max_shard_size: int | str) -> None:
    prepared = whole(model, None, "export")
    _refuse_wrappers(prepared)
    ranks = prepared.ranks
    peers, everyone = Peers(ranks), [] if ranks is None else ranks.everyone()
    exchange(everyone, None, "export")
    shard_bytes = parse_bytes(max_shard_size, "max_shard_size")
    weights = _weights(prepared, model, dtype)
    files = files_of(weights, shard_bytes)
    settle(prepared)
    kind = next((each.dtype for each in weights.values() if each.dtype in DTYPES_OUT), None)

    def write() -> None:
        runs = runs_of(files)
        try:
            if not peers.rank:
                total = sum(weight.nbytes for weight in weights.values())
                with (
                    merged_folder(target) as folder,
                    closing(Progress("outsize.export", total, prepared.config.progress)) as progress,
                ):
                    write_shards(folder, files, progress.over(runs, lambda run: run.nbytes))
                    _write_config(folder, model, kind)
        finally:  # give the others what this rank has of the weights, so that none waits, after a failure too
            for _ in runs if peers.size > 1 else ():
                continue

    first = peers.number < peers.size  # the first copy of the model is exported
    together(everyone, lambda: write() if first else None, "export")


def _export_dcp(
    target: Path, model: nn.Module, dtype: torch.dtype | None, optimizer: torch.optim.Optimizer | None
) -> None:
    from outsize.formats.dcp_writing import Place, optimizer_content, write_dcp  # takes seconds to import

    prepared = whole(model, optimizer, "export")
    _refuse_wrappers(prepared)
    if prepared.ranks is not None:
        raise ValueError(
            "format='dcp' is written from one rank: outsize.save the model, load it on one rank and export it there"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "format='dcp' needs a new or an empty folder", str(target))
    check_not_current(target)
    check_replaceable(target)
    take_state(prepared)
    settle(prepared)
    tensors: dict[Place, Readable] = {}
    values: dict[Place, object] = {}
    shards = [unit.shard for unit in prepared.engine.parameters.units]
    if optimizer is not None:
        name_of = prepared.engine.parameters.name_of
        groups = [
            {key: value for key, value in group.items() if key not in NO_OPTIONS}
            | {"params": [name_of(param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        tensors, values = optimizer_content(shards, groups)
    for shard in shards:
        for slot in shard.layout.slots:
            tensors[slot.name,] = parameter_at_rest(shard, slot.name, dtype or DTYPES[slot.dtype])
    tensors |= {(alias,): tensors[name,] for alias, name in tied_names(model).items()}
    tensors |= {(name,): buffer for name, buffer in _buffers(model, dtype).items()}
    folder = NewFolder(target)
    try:
        write_dcp(folder.path, tensors, values)
        folder.publish()
    except BaseException:
        folder.abandon()
        raise


def _refuse_wrappers(prepared: Prepared) -> None:
    name = min(prepared.placed.inside, default=None)
    if name is not None:
        raise ValueError(
            f"outsize.export writes weights under the names of the model's parameters, and {name!r} is inside a "
            f"quantized one. Save adapters with `model.save_pretrained(folder)`, a checkpoint with outsize.save; a "
            f"quantized base stays in the folder it came from"
        )


def _weights(prepared: Prepared, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Readable]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    found, cuts, ranks = {}, cuts_of(prepared), prepared.ranks
    for name, param in _chosen_names(model).items():
        unit, slot = prepared.engine.parameters.unit_of(param)
        out = dtype or DTYPES[slot.dtype]
        found[name] = parameter_at_rest(unit.shard, slot.name, out)
        if unit.shard.ranks > 1:
            assert ranks is not None
            join = partial(ranks.combine, kind="export")
            own, shape = found[name], unit.shard.whole_slots[slot.name].shape
            found[name] = of_ranks(own, slot.first, shape, out, own.run, join)
        if slot.name in cuts:
            assert ranks is not None and ranks.tensor is not None
            join = partial(ranks.tensor.combine, kind="export")
            found[name] = tensor_parallel_parameter(found[name], tuple(param.shape), cuts[slot.name], join)
    found |= _buffers(model, dtype)
    found = {name: weight for name, weight in found.items() if name not in ignored}
    return found if ranks is None or ranks.stages is None else _of_all_stages(found, prepared, ranks.stages)


def _of_all_stages(found: dict[str, Readable], prepared: Prepared, stages: Ranks) -> dict[str, Readable]:
    refuse_same_names(stages.collect(shapes_in_stage(prepared), "export"), "export")
    said = stages.collect({name: (each.shape, each.dtype, each.run) for name, each in found.items()}, "export")
    join, whole = partial(stages.combine, kind="export"), {}
    for stage, weights in enumerate(said):
        for name, (shape, dtype, run) in weights.items():
            if name not in whole:
                own = found[name] if stage == stages.rank else None
                whole[name] = of_ranks(own, 0, shape, dtype, run, join)
    return whole


def _buffers(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Readable]:
    return {
        name: in_memory(value, dtype if dtype is not None and value.is_floating_point() else value.dtype)
        for name, (value, persistent) in buffers_of(model).items()
        if persistent
    }


def _chosen_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter under one name: of a tied one the first, unless transformers derives that one from another."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    derived = [re.compile(pattern) for pattern in tied]
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
        names.setdefault(param, []).append(name)
    found = {}
    for param, candidates in names.items():
        own = (name for name in candidates if not any(pattern.search(name) for pattern in derived))
        found[next(own, candidates[0])] = param
    return found


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
