"""`load`: a checkpoint becomes the state of a prepared model again, whatever its tiers and units."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared, prepared_of
from outsize.api.ranks import check_same, everywhere
from outsize.api.saving import (
    buffers_of,
    cuts_of,
    give_own_params,
    optimizer_record,
    ready,
    settle,
    tied_names,
    whole,
    with_own,
)
from outsize.checkpoint.background import Saving
from outsize.checkpoint.differences import Live
from outsize.checkpoint.directory import checkpoints_in, is_checkpoint
from outsize.checkpoint.peers import Peers
from outsize.checkpoint.reader import LATEST, Checkpoint, open_checkpoint
from outsize.checkpoint.regions import AnyRegion
from outsize.checkpoint.rng import restore_rng
from outsize.formats.dcp_metadata import is_dcp
from outsize.formats.dcp_reading import DcpCheckpoint, open_dcp
from outsize.formats.hugging import SafetensorsWeights, is_safetensors, open_safetensors
from outsize.move.store import DTYPES
from outsize.run.unit import Unit

Opened = Checkpoint | SafetensorsWeights | DcpCheckpoint
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
            is passed over is logged. Or a folder of safetensors in the Hugging Face layout (weights alone), or
            one of `torch.distributed.checkpoint` (weights and optimizer state under their names in a state dict):
            these have no random numbers and no `extra`, so that None is returned.
        model: without `optimizer`, weights and buffers alone are restored; optimizer state, gradients and random
            numbers stay as they are. None: the optimizer's state alone.
        strict: with False, parameters, buffers and extra states of modules that only one side has are passed over;
            their names are logged as a warning. Shapes must fit either way.

    The tiers, the units, the budgets, the state format and the compute dtype (float32, bfloat16, float16) may differ
    from those of the run that saved: arrays are found by parameter name, and the fp32 masters stay exact either way.

    Every check comes before any change, that of all checksums included: `FileNotFoundError` where there is no complete
    checkpoint, `ValueError` for a damaged one (with file and chunk) and for one that does not match, with what is
    missing, unexpected and different. Memory: a fixed slab, and the largest gradient if the checkpoint holds gradients.
    """
    grad = torch.is_grad_enabled()
    # What is restored is trained on, wherever `load` is called: autograd takes no tensor of inference mode.
    prepared = _prepared(model, optimizer)
    with torch.inference_mode(False), torch.set_grad_enabled(grad), prepared.engine.owner.turn("outsize.load"):
        return _load(prepared, os.fspath(path), model, optimizer, strict)


def _load(
    prepared: Prepared,
    label: str,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Any:
    prepared.resources.settle_saving()
    path, reduction = Path(os.path.realpath(label)), prepared.engine.reduction
    Saving.settle_at(path)
    ranks = None if reduction is None else reduction.ranks
    opened = everywhere(ranks, partial(_open, prepared, path, model, optimizer, label, strict), "load")
    try:
        own = opened if isinstance(opened, Checkpoint) else None
        if own is not None and ranks is not None:
            # A directory's newest checkpoint may be another one where a file system shows it later.
            mine = {"the checkpoint": f"{own.folder.name}, saved at {own.manifest.saved_at}"}
            check_same(ranks.everyone(), "what they load", mine, "load")
        for what, names in opened.passed_over.items():
            logger.warning("%s: %d %s, passed over: %s", path, len(names), what, ", ".join(names))
        settle(prepared)
        if model is not None:
            give_own_params(prepared, ranks, "load")
        with prepared.engine.streamer.live.changing("outsize.load"), _gathered_anew(prepared):
            everywhere(ranks, partial(_fill, prepared, opened, model, optimizer), "load")
        return None if own is None else own.extra
    finally:
        opened.close()


def _open(
    prepared: Prepared,
    path: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    label: str,
    strict: bool,
) -> Opened:
    """What is at the path, found to be whole and to fit."""
    live, cuts = _live(prepared, model, optimizer), cuts_of(prepared)
    ours = is_checkpoint(path)
    if not ours and (is_safetensors(path) or is_dcp(path)):
        for newest in checkpoints_in(path)[:1]:
            raise ValueError(
                f"{path} holds both weights of their own and checkpoints of outsize.save, the newest {newest.name!r}; "
                f"name the one that is meant: {newest}, {path / LATEST} for the newest one, or a folder of the weights "
                f"alone"
            )
        if cuts:
            raise ValueError(
                f"{path} cannot be loaded into tensor-parallel parameters: load it into the model before "
                f"parallelize_module, or load a checkpoint of outsize.save"
            )
    if not ours and is_safetensors(path):
        if model is None or optimizer is not None:
            raise ValueError(f"{path} holds weights alone: load it with outsize.load(path, model)")
        buffers = {name: value for name, (value, kept) in buffers_of(model).items() if kept}
        optional: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
        slots = [slot for unit in prepared.engine.parameters.units for slot in unit.shard.whole.slots]
        return open_safetensors(path, slots, buffers, tied_names(model), optional, strict)
    if not ours and is_dcp(path):
        return open_dcp(path, live, label, tied_names(prepared.model), strict)
    reduction = prepared.engine.reduction
    peers = None if reduction is None else Peers(reduction.ranks, "load")
    return open_checkpoint(path, live, label, strict, peers, cuts)


@contextmanager
def _gathered_anew(prepared: Prepared) -> Iterator[None]:
    """What is split over ranks is loaded where it rests; gathered values are of before, and go or are gathered anew."""
    split = [unit for unit in prepared.engine.parameters.units if unit.shard.ranks > 1]
    if split:
        prepared.engine.streamer.drop_idle()
    yield
    for unit in split:
        prepared.engine.streamer.regather(unit)


def _live(prepared: Prepared, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Live:
    """What is to be filled."""
    whole_shapes = {name: tuple(param.shape) for name, param in prepared.placed.parameters.items()}
    slots = (slot for unit in prepared.engine.parameters.units for slot in unit.shard.whole.slots)
    parameters = {slot.name: (whole_shapes[slot.name], DTYPES[slot.dtype]) for slot in slots}
    record = optimizer_record(prepared, optimizer, encoded=False)
    if model is None:
        return Live(parameters, None, record)
    buffers = buffers_of(prepared.model)
    persistent = {name: (tuple(value.shape), value.dtype) for name, (value, kept) in buffers.items() if kept}
    return Live(parameters, persistent, record, with_own(model, "set_extra_state").keys())


def _prepared(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Prepared:
    if model is not None:
        return whole(model, optimizer, "load")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"outsize.load needs a prepared model, a prepared optimizer or both, not {optimizer!r}")
    params = (param for group in optimizer.param_groups for param in group["params"])
    prepared = next((found for found in map(prepared_of, params) if found is not None), None)
    if prepared is None:
        raise ValueError("the optimizer is not prepared; call outsize.prepare(model, optimizer) first")
    return ready(prepared.model, optimizer, "load")


def _fill(prepared: Prepared, opened: Opened, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Overwrite the live state. Only a checkpoint of ours has gradients, extra states and random numbers."""
    own = opened if isinstance(opened, Checkpoint) else None
    for unit in prepared.engine.parameters.units:
        if optimizer is not None and not isinstance(opened, SafetensorsWeights):
            unit.shard.make_room(opened.stated(unit.shard))  # before the weights, whose masters lie there too
        if model is not None:
            opened.load_weights(unit.shard)
            unit.updates += 1  # a graph of before must not be used
        if optimizer is not None and not isinstance(opened, SafetensorsWeights):
            opened.load_state(unit.shard)
            _fill_gradients(prepared, own, unit)
    if model is not None:
        buffers = buffers_of(model)
        _fill_buffers(
            buffers, partial(_own_buffer, opened, buffers) if isinstance(opened, Checkpoint) else opened.buffer
        )
        extra_states = {} if own is None else own.extra_states
        for name, module in with_own(model, "set_extra_state").items():
            if name in extra_states:
                module.set_extra_state(extra_states[name])
    if optimizer is not None and not isinstance(opened, SafetensorsWeights):
        assert prepared.stepper is not None
        prepared.stepper.forget()
        prepared.stepper.state.keep()
        prepared.stepper.steps = opened.steps
        if prepared.engine.reduction is not None:
            prepared.engine.reduction.ranks.model.step = opened.steps
        for group, values in zip(optimizer.param_groups, opened.hyper, strict=True):
            group.update(values)
        prepared.stepper.state.put_options_right()
        if own is not None and model is not None:
            restore_rng(own.rng, prepared.config.compute_device)


def _own_buffer(
    checkpoint: Checkpoint, buffers: Mapping[str, tuple[torch.Tensor, bool]], name: str
) -> torch.Tensor | None:
    """Persistent buffers were checked to match; of the others those that do are restored too."""
    value, persistent = buffers[name]
    region = checkpoint.buffers.get(name)
    same = region is not None and (region.shape, region.dtype) == (tuple(value.shape), value.dtype)
    if region is not None and (persistent or same):
        return checkpoint.data.read(region)
    logger.info("buffer %r, which is not persistent, does not match the checkpoint and stays as it is", name)
    return None


# Note [Expanded buffers]
# The elements of an expanded view share memory, so that torch refuses to write them. The view stays where it has the
# stored values once all other buffers are filled (one of them may be what it views), and gets memory of its own where
# it has not: the run that saved may have replaced it. The tensor is the same object, so that all who share it see it.


def _fill_buffers(
    buffers: Mapping[str, tuple[torch.Tensor, bool]], stored: Callable[[str], torch.Tensor | None]
) -> None:
    """Give each buffer what `stored` has under its name; None: it keeps its values. See Note [Expanded buffers]."""
    expanded = {name for name, (value, _) in buffers.items() if _is_expanded(value)}
    for name in sorted(buffers, key=expanded.__contains__):
        value, found = buffers[name][0], stored(name)
        if found is None:
            continue
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if name not in expanded:
                value.copy_(found)
            elif not _has_bits(value, fresh := found.to(value.device, value.dtype)):
                value.data = fresh


def _is_expanded(value: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _has_bits(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(torch.empty_like(wanted).copy_(value).view(torch.uint8), wanted.view(torch.uint8))


def _fill_gradients(prepared: Prepared, checkpoint: Checkpoint | None, unit: Unit) -> None:
    """Drop the unit's gradients, and take those of the checkpoint."""
    gradients = prepared.engine.gradients[unit.index]
    gradients.place.flush_and_drop()
    for param in unit.parameters.values():
        param.grad = None
    if checkpoint is None:
        gradients.place.restore_held({})
        return
    found = {name: checkpoint.records[name] for name in unit.parameters if name in checkpoint.records}
    gradients.place.restore_held(
        {
            name: (_own_part(checkpoint, unit, name, record.arrays["held"]), record.grads["held"][0])
            for name, record in found.items()
            if "held" in record.grads
        }
    )
    for name, record in found.items():
        if "grad" not in record.grads:
            continue
        param, (ops, norms) = unit.parameters[name], record.grads["grad"]
        content = _own_part(checkpoint, unit, name, record.arrays["grad"]).to(param.device)
        if unit.shard.on_device and param.dtype in (torch.float32, torch.float64):
            param.grad = ops.apply_(content.to(param.dtype))
        else:
            # Norms of whole gradients are found anew where this is a part of one.
            gradients.restore(name, content, ops, norms if prepared.engine.reduction is None else {})
    gradients.finish()
    gradients.place.flush_and_drop()


def _own_part(checkpoint: Checkpoint, unit: Unit, name: str, region: AnyRegion) -> torch.Tensor:
    """What of an array rests with this rank."""
    if unit.shard.ranks == 1:
        return checkpoint.data.read(region)
    slot = unit.shard.slots[name]
    return checkpoint.data.read(region, slot.first, slot.first + slot.numel)
