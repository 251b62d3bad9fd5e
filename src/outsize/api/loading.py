"""`load`: a checkpoint becomes the state of a prepared model again, whatever its tiers and units."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared, prepared_of
from outsize.api.saving import MASTERS, buffers_of, optimizer_record, settle, whole
from outsize.checkpoint.background import Saving
from outsize.checkpoint.match import Differences, Live, check_match
from outsize.checkpoint.reader import Checkpoint, find_checkpoint
from outsize.checkpoint.rng import restore_rng
from outsize.move.shard import DTYPES
from outsize.optim.compact import codec_named
from outsize.run.unit import Unit

logger = logging.getLogger("outsize")


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Restore a checkpoint and return its `extra`. Going on is bit-identical to never having stopped.

    Args:
        path: a checkpoint, or a directory of checkpoints (also `directory/latest`): its newest complete one, and what
            is passed over is logged.
        model: without `optimizer`, weights and buffers alone are restored; optimizer state, gradients and random
            numbers stay as they are. None: the optimizer's state alone.
        strict: with False, parameters and buffers that only one side has are passed over; their names are logged as a
            warning. Shapes must fit either way.

    The tiers, the units, the budgets, the state format and the compute dtype (float32, bfloat16, float16) may differ
    from those of the run that saved: arrays are found by parameter name, and the fp32 masters stay exact either way.

    Every check comes before any change, that of all checksums included: `FileNotFoundError` where there is no complete
    checkpoint, `ValueError` for a damaged one (with file and chunk) and for one that does not match, with what is
    missing, unexpected and different. Memory: a fixed slab, and the largest gradient if the checkpoint holds gradients.
    """
    prepared = _prepared(model, optimizer)
    prepared.resources.saver.settle()
    source = Path(os.path.realpath(path))
    Saving.settle_at(source)
    checkpoint = Checkpoint(find_checkpoint(source), codec_named)
    try:
        parameters = {
            slot.name: (slot.shape, DTYPES[slot.dtype])
            for unit in prepared.engine.units
            for slot in unit.shard.layout.slots
        }
        buffers = buffers_of(prepared.model) if model is not None else {}
        persistent = {name: (tuple(value.shape), value.dtype) for name, (value, kept) in buffers.items() if kept}
        record = optimizer_record(prepared, optimizer, encoded=False)
        live = Live(parameters, persistent if model is not None else None, record)
        _tell(check_match(checkpoint.manifest, live, os.fspath(path), strict), checkpoint.folder)
        checkpoint.verify(weights=model is not None, state=optimizer is not None)
        settle(prepared)
        try:
            _restore(prepared, checkpoint, buffers, model, optimizer)
        except BaseException as error:
            interrupted = RuntimeError("outsize.load was interrupted")
            prepared.engine.streamer.stop(error if isinstance(error, Exception) else interrupted)
            raise
        return checkpoint.extra
    finally:
        checkpoint.close()


def _prepared(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Prepared:
    if model is not None:
        return whole(model, optimizer, "load")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"outsize.load needs a prepared model, a prepared optimizer or both, not {optimizer!r}")
    params = (param for group in optimizer.param_groups for param in group["params"])
    prepared = next((found for found in map(prepared_of, params) if found is not None), None)
    if prepared is None:
        raise ValueError("the optimizer is not prepared; call outsize.prepare(model, optimizer) first")
    return whole(prepared.model, optimizer, "load")


def _tell(passed_over: Differences, folder: Path) -> None:
    for what, names in passed_over.items():
        logger.warning("%s: %d %s, passed over: %s", folder, len(names), what, ", ".join(names))


def _restore(
    prepared: Prepared,
    checkpoint: Checkpoint,
    buffers: Mapping[str, tuple[torch.Tensor, bool]],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    for unit in prepared.engine.units:
        if model is not None:
            checkpoint.load_weights(unit.shard, MASTERS)
            if unit.shard.buffer.resident:
                unit.shard.buffer.await_filled()
        if optimizer is not None:
            checkpoint.load_state(unit.shard)
            _restore_gradients(prepared, checkpoint, unit)
    _restore_buffers(checkpoint, buffers)
    if optimizer is not None:
        assert prepared.stepper is not None and checkpoint.manifest.optimizer is not None
        prepared.stepper.forget()
        prepared.stepper.steps = checkpoint.manifest.optimizer.steps
        for group, hyper in zip(optimizer.param_groups, checkpoint.hyper, strict=True):
            group.update(hyper)
        if model is not None:
            restore_rng(checkpoint.rng, prepared.config.compute_device)


def _restore_buffers(checkpoint: Checkpoint, buffers: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    """Persistent buffers were checked to match; of the others those that do are restored too."""
    for name, (value, persistent) in buffers.items():
        stored = checkpoint.manifest.buffers.get(name)
        region = stored.region if stored is not None else None
        same = region is not None and (region.shape, region.dtype) == (tuple(value.shape), value.dtype)
        if region is not None and (persistent or same):
            with torch.no_grad():
                value.copy_(checkpoint.data.read(region))
        else:
            logger.info("buffer %r, which is not persistent, does not match the checkpoint and stays as it is", name)


def _restore_gradients(prepared: Prepared, checkpoint: Checkpoint, unit: Unit) -> None:
    keeper = prepared.engine.keepers[unit.index]
    keeper.flush_and_drop()
    for param in unit.parameters.values():
        param.grad = None
    stored = checkpoint.manifest.parameters
    records = {name: stored[name] for name in unit.parameters if name in stored}
    keeper.restore_held(
        {
            name: (checkpoint.data.read(record.held.region), record.held.ops)
            for name, record in records.items()
            if record.held is not None
        }
    )
    for name, param in unit.parameters.items():
        grad = records[name].grad if name in records else None
        if grad is None:
            continue
        content = checkpoint.data.read(grad.region).to(param.device)
        if unit.shard.on_device and param.dtype in (torch.float32, torch.float64):
            param.grad = grad.ops.apply_(content.to(param.dtype))
        else:
            keeper.restore(name, content, grad.ops, grad.norms)
    keeper.finish()
    keeper.flush_and_drop()
