"""`load`: a checkpoint becomes the state of a prepared model again, whatever its tiers and units."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared, first_prepared
from outsize.api.ranks import check_same, everywhere, in_each_stage
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
from outsize.checkpoint.arrays import Readable, place
from outsize.checkpoint.background import Saving
from outsize.checkpoint.differences import Live, together
from outsize.checkpoint.directory import checkpoints_in, is_checkpoint
from outsize.checkpoint.opened import Opened
from outsize.checkpoint.peers import Peers
from outsize.checkpoint.reader import LATEST, open_checkpoint
from outsize.checkpoint.rng import restore_rng
from outsize.formats.dcp_metadata import is_dcp
from outsize.formats.dcp_reading import open_dcp
from outsize.formats.hugging import is_safetensors, open_safetensors
from outsize.move.progress import progress_over
from outsize.move.store import DTYPES
from outsize.run.owner import outside_inference
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

    >>> saving = outsize.save("ckpt/step-100", model, optimizer, extra={"step": 100})
    >>> outsize.load("ckpt", model, optimizer)
    {'step': 100}
    """
    prepared = _prepared(model, optimizer)
    with outside_inference(), prepared.engine.owner.turn("outsize.load"):
        return _load(prepared, os.fspath(path), model, optimizer, strict)


def _load(
    prepared: Prepared, label: str, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, strict: bool
) -> Any:
    prepared.resources.settle_saving()
    path, ranks = Path(os.path.realpath(label)), prepared.ranks
    Saving.settle_at(path)
    own = everywhere(ranks, partial(_live, prepared, model, optimizer), "load")
    live = together(in_each_stage(ranks, own, "load"))
    opened = everywhere(ranks, partial(_open, prepared, live, path, model, optimizer, label, strict), "load")
    try:
        if ranks is not None:
            # A directory's newest checkpoint may be another one where a file system shows it later.
            check_same(ranks.everyone(), "what they load", {"the checkpoint": opened.name}, "load")
        for what, names in opened.passed_over.items():
            logger.warning("%s: %d %s, passed over: %s", path, len(names), what, ", ".join(names))
        settle(prepared)
        if model is not None:
            filled = (
                unit for unit in prepared.engine.parameters.units if unit.parameters.keys() & opened.weights.keys()
            )
            give_own_params([*filled], ranks, "load")
        with prepared.engine.streamer.live.changing("outsize.load"), _gathered_anew(prepared):
            everywhere(ranks, partial(_fill, prepared, opened, model, optimizer), "load")
        prepared.resources.synchronize()
        return opened.extra
    finally:
        opened.close()


def _open(
    prepared: Prepared,
    live: Live,
    path: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    label: str,
    strict: bool,
) -> Opened:
    """What is at the path, found to be whole and to fit."""
    cuts = cuts_of(prepared)
    if is_checkpoint(path) or not (is_safetensors(path) or is_dcp(path)):
        return open_checkpoint(path, live, label, strict, Peers(prepared.ranks), cuts)
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
    if is_safetensors(path):
        if model is None or optimizer is not None:
            raise ValueError(f"{path} holds weights alone: load it with outsize.load(path, model)")
        optional: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
        return open_safetensors(path, live, optional, strict)
    return open_dcp(path, live, label, strict)


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
    if optimizer is None and prepared.stepper is not None:
        for unit in prepared.engine.parameters.units:
            prepared.stepper.expect_stepped(unit.parameters.values())
    whole_shapes = {name: tuple(param.shape) for name, param in prepared.placed.parameters.items()}
    slots = (slot for unit in prepared.engine.parameters.units for slot in unit.shard.whole.slots)
    parameters = {slot.name: (whole_shapes[slot.name], DTYPES[slot.dtype]) for slot in slots}
    record = optimizer_record(prepared, optimizer, encoded=False)
    aliases = tied_names(prepared.model)
    if model is None:
        return Live(parameters, None, record, aliases=aliases)
    buffers = buffers_of(prepared.model)
    persistent = {name: (tuple(value.shape), value.dtype) for name, (value, kept) in buffers.items() if kept}
    return Live(parameters, persistent, record, [*with_own(model, "set_extra_state")], aliases)


def _prepared(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Prepared:
    if model is not None:
        return whole(model, optimizer, "load")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"outsize.load needs a prepared model, a prepared optimizer or both, not {optimizer!r}")
    prepared = first_prepared(param for group in optimizer.param_groups for param in group["params"])
    if prepared is None:
        raise ValueError("the optimizer is not prepared; call outsize.prepare(model, optimizer) first")
    return ready(prepared.model, optimizer, "load")


def _fill(prepared: Prepared, opened: Opened, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Overwrite the live state."""
    units, shown = prepared.engine.parameters.units, prepared.config.progress
    with progress_over("outsize.load", units, lambda unit: unit.nbytes, shown) as each_unit:
        for unit in each_unit:
            _fill_unit(prepared, opened, unit, model, optimizer)
    if model is not None:
        _fill_buffers(buffers_of(model), opened.buffers)
        for name, module in with_own(model, "set_extra_state").items():
            if name in opened.extra_states:
                module.set_extra_state(opened.extra_states[name])
    if optimizer is not None:
        assert prepared.stepper is not None
        prepared.stepper.forget()
        prepared.stepper.state.keep()
        prepared.stepper.steps = opened.steps
        if prepared.ranks is not None:
            prepared.ranks.model.step = opened.steps
        for group, values in zip(optimizer.param_groups, opened.hyper, strict=True):
            group.update(values)
        prepared.stepper.state.put_options_right()
        if opened.rng is not None and model is not None:
            restore_rng(opened.rng, prepared.config.compute_device)


def _fill_unit(
    prepared: Prepared, opened: Opened, unit: Unit, model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> None:
    shard = unit.shard
    if optimizer is not None:
        shard.make_room(opened.scalars.keys() & shard.slots.keys())  # before the weights, whose masters lie there
    weights = {} if model is None else opened.weights
    stated = () if optimizer is None else shard.slots.keys() - set(opened.absent)
    place(shard, weights, opened.resting, opened.arrays, opened.scalars, stated)
    if model is not None:
        unit.updates += 1  # a graph of before must not be used
        unit.was_trained |= opened.trained_alone and bool(unit.parameters.keys() & weights.keys())
    if optimizer is not None:
        _fill_gradients(prepared, opened, unit)


# Note [Expanded buffers]
# The elements of an expanded view share memory, so that torch refuses to write them. The view stays where it has the
# stored values once all other buffers are filled (one of them may be what it views), and gets memory of its own where
# it has not: the run that saved may have replaced it. The tensor is the same object, so that all who share it see it.


def _fill_buffers(buffers: Mapping[str, tuple[torch.Tensor, bool]], stored: Mapping[str, Readable]) -> None:
    """Give each buffer its stored values. Persistent ones were checked to match, the others keep theirs unless they do.
    See Note [Expanded buffers]."""
    expanded = {name for name, (value, _) in buffers.items() if _is_expanded(value)}
    for name in sorted(buffers.keys() & stored.keys(), key=expanded.__contains__):
        (value, persistent), found = buffers[name], stored[name]
        if not persistent and (found.shape, found.dtype) != (tuple(value.shape), value.dtype):
            logger.info("buffer %r, which is not persistent, does not match the checkpoint and stays as it is", name)
            continue
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if name not in expanded:
                value.copy_(found.whole())
            elif not _has_bits(value, fresh := found.whole().to(value.device, value.dtype)):
                value.data = fresh


def _is_expanded(value: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _has_bits(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(torch.empty_like(wanted).copy_(value).view(torch.uint8), wanted.view(torch.uint8))


def _fill_gradients(prepared: Prepared, opened: Opened, unit: Unit) -> None:
    """Drop the unit's gradients, and take those of the checkpoint."""
    gradients = prepared.engine.gradients[unit.index]
    gradients.place.flush_and_drop()
    for param in unit.parameters.values():
        param.grad = None
    held, grads = opened.grads.get("held", {}), opened.grads.get("grad", {})
    gradients.place.restore_held(
        {name: (_own_part(unit, name, held[name][0]), held[name][1][0]) for name in unit.parameters if name in held}
    )
    for name in (name for name in unit.parameters if name in grads):
        param, (stored, (ops, norms)) = unit.parameters[name], grads[name]
        content = _own_part(unit, name, stored).to(param.device)
        if unit.shard.on_device and param.dtype in (torch.float32, torch.float64):
            param.grad = ops.apply_(content.to(param.dtype))
            prepared.engine.show_in_stage(param)
        else:
            # Norms of whole gradients are found anew where this is a part of one.
            gradients.restore(name, content, ops, norms if prepared.ranks is None else {})
    if grads:
        gradients.finish()
        gradients.place.flush_and_drop()


def _own_part(unit: Unit, name: str, stored: Readable) -> torch.Tensor:
    """What of an array rests with this rank."""
    if unit.shard.ranks == 1:
        return stored.whole()
    slot = unit.shard.slots[name]
    return stored.read(slot.first, slot.first + slot.numel)
