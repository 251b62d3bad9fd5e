"""`save`, `load` and `export`: the state of a prepared model, its optimizer and the random numbers, on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared
from outsize.api.public import require
from outsize.checkpoint.folder import check_replaceable
from outsize.checkpoint.manifest import GroupRecord, OptimizerRecord
from outsize.checkpoint.match import Live, check_match
from outsize.checkpoint.reader import Checkpoint, Masters
from outsize.checkpoint.rng import capture_rng, restore_rng
from outsize.checkpoint.values import encode, inline
from outsize.checkpoint.writer import Extra, GradAtRest, Snapshot, check_buffers, write_checkpoint
from outsize.move.shard import DTYPES
from outsize.optim.rules import join_master, split_master
from outsize.run.grads import RestingGrad
from outsize.run.unit import Unit

MASTERS = Masters(join_master, split_master)
_NOT_HYPER = ("params", "param_names")

logger = logging.getLogger("outsize")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Write a checkpoint: the folder `path`, which appears complete or not at all; see `docs/checkpoint-format.md`.

    Args:
        path: parents are created. A checkpoint that is there is replaced once the new one is complete; any other
            directory or file is never overwritten (`FileExistsError`).
        optimizer: the prepared one. Without it weights and buffers alone are of use to `load`.
        extra: whatever else the run needs to go on (a scheduler's `state_dict()`, the step): dict, list, tuple, str,
            int, float, bool, None and tensors, nested. Anything else is a `TypeError` that names its place.

    An update that is still owed runs first. Memory: a fixed slab, whatever the size of the model. Raises `OSError` with
    path and errno if the disk is full; then nothing is left behind and the earlier checkpoint is as it was.
    """
    prepared = whole(model, optimizer, "save")
    target = Path(os.path.realpath(path))
    stored = Extra(extra)
    check_replaceable(target)
    buffers = buffers_of(model)
    check_buffers(buffers)
    record = _optimizer_record(prepared, optimizer, encoded=True)
    settle(prepared)
    grads = _gradients(prepared) if optimizer is not None else {}
    held = _held(prepared) if optimizer is not None else {}
    shards = [unit.shard for unit in prepared.engine.units]
    rng = capture_rng(prepared.config.compute_device)
    write_checkpoint(target, Snapshot(shards, grads, held, buffers, record, rng, stored))


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Restore a checkpoint and return its `extra`. Going on is bit-identical to never having stopped.

    The tiers, the units, the budgets and the compute dtype (float32 or bfloat16) may differ from those of the run that
    saved: arrays are found by parameter name, and the fp32 masters stay exact either way. Without `optimizer` only
    weights and buffers are restored; optimizer state, gradients and random numbers stay as they are.

    Every check comes before any change: `FileNotFoundError` where there is no complete checkpoint, `ValueError` for a
    damaged one and for one that does not match, with what is missing, unexpected and different. Memory: a fixed slab,
    and the largest gradient if the checkpoint holds gradients.
    """
    prepared = whole(model, optimizer, "load")
    checkpoint = Checkpoint(Path(os.path.realpath(path)))
    try:
        parameters = {
            slot.name: (slot.shape, DTYPES[slot.dtype])
            for unit in prepared.engine.units
            for slot in unit.shard.layout.slots
        }
        buffers = buffers_of(model)
        persistent = {name: (tuple(value.shape), value.dtype) for name, (value, kept) in buffers.items() if kept}
        record = _optimizer_record(prepared, optimizer, encoded=False)
        check_match(checkpoint.manifest, Live(parameters, persistent, record), os.fspath(path))
        settle(prepared)
        try:
            _restore(prepared, checkpoint, buffers, optimizer)
        except BaseException as error:
            interrupted = RuntimeError("outsize.load was interrupted")
            prepared.engine.streamer.stop(error if isinstance(error, Exception) else interrupted)
            raise
        return checkpoint.extra
    finally:
        checkpoint.close()


def _restore(
    prepared: Prepared,
    checkpoint: Checkpoint,
    buffers: Mapping[str, tuple[torch.Tensor, bool]],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    for unit in prepared.engine.units:
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
    records = {name: checkpoint.manifest.parameters[name] for name in unit.parameters}
    keeper.restore_held(
        {
            name: (checkpoint.data.read(record.held.region), record.held.ops)
            for name, record in records.items()
            if record.held is not None
        }
    )
    for name, param in unit.parameters.items():
        grad = records[name].grad
        if grad is None:
            continue
        content = checkpoint.data.read(grad.region).to(param.device)
        if unit.shard.on_device and param.dtype in (torch.float32, torch.float64):
            param.grad = grad.ops.apply_(content.to(param.dtype))
        else:
            keeper.restore(name, content, grad.ops, grad.norms)
    keeper.finish()
    keeper.flush_and_drop()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer | None, verb: str) -> Prepared:
    """The prepared model, at rest enough to be saved or loaded. Raises `ValueError`, `TypeError` or `RuntimeError`."""
    prepared = require(model)
    if model is not prepared.model:
        raise ValueError(
            f"outsize.{verb} takes the model that was given to outsize.prepare ({type(prepared.model).__name__}), not "
            f"a part of it or a wrapper around it ({type(model).__name__})"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if optimizer is not None and optimizer is not prepared.optimizer:
        raise ValueError(
            f"outsize.{verb} was given an optimizer ({type(optimizer).__name__}) that is not the one that was prepared "
            f"with the model; pass the one that went through outsize.prepare"
        )
    for unit in prepared.engine.units:
        if unit.writable:
            raise RuntimeError(
                f"outsize.{verb} was called inside a gathered(..., modify=True) block that holds {unit.name!r}; its "
                f"changes are stored when the block is left: call outsize.{verb} after it"
            )
    return prepared


def settle(prepared: Prepared) -> None:
    """Run every update that is owed and wait until all of it has arrived where it rests."""
    device = prepared.config.compute_device
    prepared.engine.end_interrupted_backward()
    prepared.engine.streamer.settle_all()
    for unit in prepared.engine.units:
        unit.await_written()
    if device.type == "cuda":  # what the computation still writes is read on other streams
        torch.cuda.current_stream(device).synchronize()


def _gradients(prepared: Prepared) -> dict[str, GradAtRest]:
    found = {}
    for unit in prepared.engine.units:
        for name, param in unit.parameters.items():
            grad = param.grad
            if isinstance(grad, RestingGrad):
                if grad.spent:
                    assert prepared.stepper is not None
                    if prepared.stepper.awaits_step(unit):
                        grad.expect_unspent("saved before optimizer.step()")
                    continue
                norms = {order: norm.item() for order, norm in grad.norms.items()}
                found[name] = GradAtRest(grad.ops, norms, grad.loose, grad.shard)
            elif grad is not None:
                if grad.layout is not torch.strided:
                    raise TypeError(f"the gradient of {name!r} is sparse ({grad.layout}); it cannot be saved")
                found[name] = GradAtRest(content=grad)
    return found


def _held(prepared: Prepared) -> dict[str, GradAtRest]:
    """The gradients that a delayed update holds back until the next step."""
    return {
        name: GradAtRest(owed.ops, {}, owed.loose, owed.resting)
        for unit in prepared.engine.units
        for name, owed in unit.held.items()
    }


def _optimizer_record(
    prepared: Prepared, optimizer: torch.optim.Optimizer | None, encoded: bool
) -> OptimizerRecord | None:
    if optimizer is None:
        return None
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key not in _NOT_HYPER}
        path = f"optimizer.param_groups[{index}]"
        names = tuple(prepared.engine.name_of(param) for param in group["params"])
        groups.append(GroupRecord(encode(hyper, path, inline) if encoded else {}, names))
    assert prepared.stepper is not None
    delayed = prepared.config.warmup_steps is not None
    arrays = prepared.survey.kept.arrays
    return OptimizerRecord(type(optimizer).__name__, arrays, tuple(groups), prepared.stepper.steps, delayed)


def buffers_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """The model's buffers by their first name, and whether each is part of its state_dict."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return {name: (value, name in kept) for name, value in model.named_buffers()}
