"""`load`: a checkpoint becomes the state of a prepared model again, whatever its tiers and units."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from outsize.api.assemble import Prepared, prepared_of
from outsize.api.extra_states import takers_of
from outsize.api.ranks import check_same, everywhere
from outsize.api.saving import MASTERS, buffers_of, cuts_of, optimizer_record, ready, settle, tied_names, whole
from outsize.checkpoint.background import Saving
from outsize.checkpoint.match import Live, check_match
from outsize.checkpoint.peers import Peers
from outsize.checkpoint.reader import LATEST, LOOKS, Checkpoint, Masters, Place, find_checkpoint
from outsize.checkpoint.regions import AnyRegion
from outsize.checkpoint.rng import restore_rng
from outsize.checkpoint.shelf import checkpoints_in, is_checkpoint, was_removed
from outsize.formats.dcp import is_dcp
from outsize.formats.dcp_reading import open_dcp
from outsize.formats.hugging import is_safetensors, open_safetensors
from outsize.move.shard import DTYPES, UnitShard
from outsize.run.state_dict import stopping_on_errors
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
    source = Path(os.path.realpath(label))
    Saving.settle_at(source)
    ours = is_checkpoint(source)
    of_weights, of_dcp = not ours and is_safetensors(source), not ours and is_dcp(source)
    if of_weights or of_dcp:
        _check_alone(source)
    if (of_weights or of_dcp) and cuts_of(prepared):
        raise ValueError(
            f"{source} cannot be loaded into tensor-parallel parameters: load it into the model before "
            f"parallelize_module, or load a checkpoint of outsize.save"
        )
    if of_weights:
        return _load_safetensors(prepared, source, model, optimizer, strict)
    if of_dcp:
        return _load_dcp(prepared, source, model, optimizer, label, strict)
    checkpoint = _together(prepared, partial(_open, prepared, source, model, optimizer, label, strict))
    try:
        _check_same_checkpoint(prepared, checkpoint)
        settle(prepared)
        with stopping_on_errors(prepared.engine, "outsize.load"), _gathered_anew(prepared):
            _together(prepared, partial(_restore, prepared, checkpoint, model, optimizer))
        return checkpoint.extra
    finally:
        checkpoint.close()


def _check_alone(source: Path) -> None:
    """Raise `ValueError` for a folder of another library's that is a directory of checkpoints too."""
    newest = next((each.path for each in checkpoints_in(source)), None)
    if newest is not None:
        raise ValueError(
            f"{source} holds both weights of their own and checkpoints of outsize.save, the newest {newest.name!r}; "
            f"name the one that is meant: {newest}, {source / LATEST} for the newest one, or a folder of the weights "
            f"alone"
        )


T = TypeVar("T")


def _together(prepared: Prepared, action: Callable[[], T]) -> T:
    """`action` on every rank; where one fails, all raise."""
    reduction = prepared.engine.reduction
    return action() if reduction is None else everywhere(reduction.ranks, action, "load")


def _check_same_checkpoint(prepared: Prepared, checkpoint: Checkpoint) -> None:
    """A directory's newest checkpoint may be another one where a file system shows it later."""
    mine = {"the checkpoint": f"{checkpoint.folder.name}, saved at {checkpoint.manifest.saved_at}"}
    if prepared.engine.reduction is not None:
        check_same(prepared.engine.reduction.ranks.everyone(), "what they load", mine, "load")


def _open(
    prepared: Prepared,
    source: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    label: str,
    strict: bool,
) -> Checkpoint:
    """The checkpoint, found to be whole and to fit. In a directory another one is taken where that which was the newest
    is removed by a run that saves with `keep`."""
    looks = 0
    while True:
        looks += 1
        folder = find_checkpoint(source)
        try:
            return _opened(prepared, folder, model, optimizer, label, strict)
        except FileNotFoundError as error:
            if looks == LOOKS or not was_removed(folder, error):
                raise


def _opened(
    prepared: Prepared,
    folder: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    label: str,
    strict: bool,
) -> Checkpoint:
    checkpoint = Checkpoint(folder, _place_of(prepared), cuts_of(prepared))
    try:
        live = _live(prepared, model, optimizer)
        _tell(check_match(checkpoint.manifest, live, label, strict), checkpoint.folder)
        checkpoint.verify(weights=model is not None, state=optimizer is not None)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _place_of(prepared: Prepared) -> Place:
    if prepared.engine.reduction is None:
        return Place()
    ranks = prepared.engine.reduction.ranks
    peers, copies = Peers(ranks, "load"), ranks.copies
    copy, count = (0, 1) if copies is None else (copies.rank, copies.size)
    return Place(copy, peers.rank, peers.size, peers.tensor, count)


@contextmanager
def _gathered_anew(prepared: Prepared) -> Iterator[None]:
    """What is split over ranks is loaded where it rests; gathered values are of before, and go or are gathered anew."""
    split = [unit for unit in prepared.engine.units if unit.shard.ranks > 1]
    if split:
        prepared.engine.streamer.drop_idle()
    yield
    for unit in split:
        prepared.engine.streamer.regather(unit)


def _live(prepared: Prepared, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Live:
    """What is to be filled."""
    whole_shapes = {name: tuple(param.shape) for name, param in prepared.survey.parameters.items()}
    slots = (slot for unit in prepared.engine.units for slot in unit.shard.whole.slots)
    parameters = {slot.name: (whole_shapes[slot.name], DTYPES[slot.dtype]) for slot in slots}
    buffers = buffers_of(prepared.model)
    persistent = {name: (tuple(value.shape), value.dtype) for name, (value, kept) in buffers.items() if kept}
    record = optimizer_record(prepared, optimizer, encoded=False)
    if model is None:
        return Live(parameters, None, record)
    return Live(parameters, persistent, record, takers_of(model).keys())


def _load_safetensors(
    prepared: Prepared,
    source: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> None:
    """A folder in the Hugging Face layout: weights and buffers."""
    if model is None or optimizer is not None:
        raise ValueError(f"{source} holds weights alone: load it with outsize.load(path, model)")
    buffers = {name: value for name, (value, kept) in buffers_of(model).items() if kept}
    optional: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    slots = [slot for unit in prepared.engine.units for slot in unit.shard.whole.slots]
    names = tied_names(model)
    weights = _together(prepared, lambda: open_safetensors(source, slots, buffers, names, optional, strict))

    def place() -> None:
        for unit in prepared.engine.units:
            _place_weights(unit, weights)
        _fill_buffers(buffers_of(model), weights.buffer)

    _fill(prepared, weights, source, place)


def _load_dcp(
    prepared: Prepared,
    source: Path,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    label: str,
    strict: bool,
) -> None:
    """A folder of torch.distributed.checkpoint: it has no gradients, no random numbers and no `extra`."""
    live = _live(prepared, model, optimizer)
    names = tied_names(prepared.model)
    checkpoint = _together(prepared, lambda: open_dcp(source, live, label, names, strict))

    def place() -> None:
        for unit in prepared.engine.units:
            _place(prepared, unit, checkpoint, model, optimizer)
            if optimizer is not None:
                _drop_gradients(prepared, unit)
        if model is not None:
            _fill_buffers(buffers_of(model), checkpoint.buffer)
        if optimizer is not None:
            _restore_stepping(prepared, optimizer, checkpoint.steps, checkpoint.hyper)
            assert prepared.stepper is not None
            prepared.stepper.state.put_options_right()

    _fill(prepared, checkpoint, source, place)


class _Opened(Protocol):
    """A folder of another library's that was found to fit."""

    passed_over: Mapping[str, list[str]]

    def close(self) -> None: ...


def _fill(prepared: Prepared, opened: _Opened, source: Path, place: Callable[[], None]) -> None:
    """Overwrite the live state by `place`, on every rank or on none, and close what it comes from."""
    try:
        _tell(opened.passed_over, source)
        settle(prepared)
        with stopping_on_errors(prepared.engine, "outsize.load"), _gathered_anew(prepared):
            _together(prepared, place)
    finally:
        opened.close()


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


def _tell(passed_over: Mapping[str, list[str]], folder: Path) -> None:
    for what, names in passed_over.items():
        logger.warning("%s: %d %s, passed over: %s", folder, len(names), what, ", ".join(names))


class _Weights(Protocol):
    """What weights of any format offer for one unit."""

    def load_weights(self, shard: UnitShard, masters: Masters) -> None: ...


class _Source(_Weights, Protocol):
    """What a checkpoint of any format offers for one unit."""

    def stated(self, shard: UnitShard) -> set[str]: ...

    def load_state(self, shard: UnitShard) -> None: ...


def _restore(
    prepared: Prepared, checkpoint: Checkpoint, model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> None:
    for unit in prepared.engine.units:
        _place(prepared, unit, checkpoint, model, optimizer)
        if optimizer is not None:
            _restore_gradients(prepared, checkpoint, unit)
    if model is not None:
        buffers = buffers_of(model)
        _fill_buffers(buffers, partial(_stored_buffer, checkpoint, buffers))
        for name, module in takers_of(model).items():
            if name in checkpoint.extra_states:
                module.set_extra_state(checkpoint.extra_states[name])
    if optimizer is not None:
        assert checkpoint.manifest.optimizer is not None
        _restore_stepping(prepared, optimizer, checkpoint.manifest.optimizer.steps, checkpoint.hyper)
        if model is not None:
            restore_rng(checkpoint.rng, prepared.config.compute_device)


def _place(
    prepared: Prepared,
    unit: Unit,
    source: _Source,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """One unit's weights and states."""
    if optimizer is not None:
        unit.shard.make_room(source.stated(unit.shard))  # before the weights, whose masters lie there too
    if model is not None:
        _place_weights(unit, source)
    if optimizer is not None:
        source.load_state(unit.shard)


def _place_weights(unit: Unit, source: _Weights) -> None:
    source.load_weights(unit.shard, MASTERS)
    unit.updates += 1  # a graph of before must not be used


def _restore_stepping(
    prepared: Prepared, optimizer: torch.optim.Optimizer, steps: int, hyper: Sequence[Mapping[str, Any]]
) -> None:
    assert prepared.stepper is not None
    prepared.stepper.forget()
    prepared.stepper.state.keep()
    prepared.stepper.steps = steps
    if prepared.engine.reduction is not None:
        prepared.engine.reduction.ranks.model.step = steps
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        group.update(values)


def _stored_buffer(
    checkpoint: Checkpoint, buffers: Mapping[str, tuple[torch.Tensor, bool]], name: str
) -> torch.Tensor | None:
    """Persistent buffers were checked to match; of the others those that do are restored too."""
    value, persistent = buffers[name]
    stored = checkpoint.buffers.get(name)
    region = stored.region if stored is not None else None
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


def _restore_gradients(prepared: Prepared, checkpoint: Checkpoint, unit: Unit) -> None:
    _drop_gradients(prepared, unit)
    keeper = prepared.engine.keepers[unit.index]
    found = {name: checkpoint.records[name] for name in unit.parameters if name in checkpoint.records}
    keeper.restore_held(
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
            keeper.restore(name, content, ops, norms if prepared.engine.reduction is None else {})
    keeper.finish()
    keeper.flush_and_drop()


def _own_part(checkpoint: Checkpoint, unit: Unit, name: str, region: AnyRegion) -> torch.Tensor:
    """What of an array rests with this rank."""
    if unit.shard.ranks == 1:
        return checkpoint.data.read(region)
    slot = unit.shard.slots[name]
    return checkpoint.data.read(region, slot.first, slot.first + slot.numel)


def _drop_gradients(prepared: Prepared, unit: Unit) -> None:
    keeper = prepared.engine.keepers[unit.index]
    keeper.flush_and_drop()
    for param in unit.parameters.values():
        param.grad = None
    keeper.restore_held({})
