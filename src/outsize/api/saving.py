"""`save`: the state of a prepared model, its optimizer and the random numbers becomes a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import Prepared, check_types, its_turn, require
from outsize.api.ranks import everywhere, in_each_stage
from outsize.api.refusing import check_state_dict
from outsize.checkpoint.background import Saving
from outsize.checkpoint.directory import check_in_series, next_saved_at, no_longer_kept, remove_all, set_all_aside
from outsize.checkpoint.folder import check_not_current, check_replaceable, target_of
from outsize.checkpoint.manifest import GroupRecord, OptimizerRecord, of_all_stages
from outsize.checkpoint.peers import Cut, Peers, together
from outsize.checkpoint.rank_state import RankState, can_hold, check_buffers
from outsize.checkpoint.rng import capture_rng, check_capturable
from outsize.checkpoint.unit_files import UnsyncedError
from outsize.checkpoint.values import encode, inline
from outsize.checkpoint.writer import SavedGrad, Snapshot, UnfinishedCheckpoint
from outsize.move.comm import Ranks, exchange
from outsize.move.disk import RUN_PREFIX
from outsize.move.generations import Generations, crc32c
from outsize.move.grad_ops import GradOps
from outsize.move.gradients import GradShard
from outsize.move.memory import bytes_on
from outsize.optim.worker import NO_OPTIONS
from outsize.planning.layout import Slot
from outsize.run.buffers import KEPT
from outsize.run.engine import Engine
from outsize.run.grads import RestingGrad
from outsize.run.local import is_repeated, local, local_gradient, part_of
from outsize.run.unit import Unit
from outsize.run.wrappers import is_wrapper, known_parameters

logger = logging.getLogger("outsize")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    frozen: bool = True,
) -> Saving:
    """Write a checkpoint: the folder `path`, which appears complete or not at all; see `docs/checkpoint-format.md`.

    Args:
        path: parents are created. A checkpoint that is there is replaced once the new one is complete; any other
            directory or file is never overwritten (`FileExistsError`).
        optimizer: the prepared one. Without it weights and buffers alone are of use to `load`.
        extra: whatever else the run needs to go on (a scheduler's `state_dict()`, the step): dict, list, tuple, str,
            int, float, bool, None and tensors, nested. Anything else is a `TypeError` that names its place, also in
            what a module's `get_extra_state()` gives, which is saved too.
        keep: how many checkpoints of the series stay (the folders beside `path` whose names differ in their last digits
            only); the oldest beyond it are removed once this one is complete, and what it shares with the run was read
            and found whole (`verify`). Default: all.
        frozen: False leaves out the units in which nothing is or was trained, as the base of adapters. `load` leaves
            them as they are then, so the program that loads has them from where this one had them.

    An update that is still owed runs first. State on disk becomes the checkpoint by hard links where `path` is on the
    same file system, whatever its size; the next update writes new files, for which there must be room now. State in
    memory beyond 64 MiB is written behind the training from where it lies. What is updated before that is copied, or
    waited for where `host_memory` leaves no room. The `Saving` that is returned has `wait()` and `done()`. The next
    `save` or `load` waits too, and so does the end of the process. Memory: the largest gradient that is saved.

    Raises `OSError` with path and errno if the disk is full or fails; then nothing is left behind and the earlier
    checkpoint is as it was. What goes wrong later is logged, and raised by `wait()`, the next `save` and `load`.

    >>> saving = outsize.save("ckpt/step-100", model, optimizer, extra={"step": 100}, keep=3)
    >>> saving.wait()
    """
    with its_turn(model, "save"):
        return _save(path, model, optimizer, extra, keep, frozen)


def _save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    keep: int | None,
    frozen: bool,
) -> Saving:
    prepared = whole(model, optimizer, "save")
    resources, ranks, target = prepared.resources, prepared.ranks, target_of(path)
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep is {keep!r}; it must be the number of checkpoints that stay, at least 1, or None")
    peers, copies, everyone = Peers(ranks), ranks and ranks.copies, [] if ranks is None else ranks.everyone()
    buffers = buffers_of(model)
    first: Collection[str] = buffers  # those that no rank before this one has

    def look() -> tuple[RankState, list[Path], str, OptimizerRecord | None, Mapping[str, BufferSum]]:
        resources.settle_saving()
        take_state(prepared)
        if keep is not None:
            check_in_series(target, keep)
        check_buffers(buffers)
        _check_place(prepared, target)
        check_not_current(target)
        check_replaceable(target)
        check_capturable()
        resources.note_saves(target.parent)
        record = optimizer_record(prepared, optimizer, encoded=True)
        sums = {} if ranks is None else {name: _sum(value) for name, (value, _) in buffers.items()}
        outdated = no_longer_kept(target, keep) if keep is not None and not peers.rank else []
        extra_states = {name: module.get_extra_state() for name, module in with_own(model, "get_extra_state").items()}
        return RankState(peers.number, extra, extra_states), outdated, next_saved_at(target.parent), record, sums

    # What may fail on one rank comes here, where it fails on all.
    state, outdated, saved_at, record, sums = everywhere(ranks, look, "save")
    reduction = prepared.engine.reduction
    if reduction is not None:
        said = sorted(exchange(everyone, (peers.number, target.name, sums), "save"), key=itemgetter(0))
        names = [name for _, name, _ in said]
        if len(set(names)) > 1:
            raise ValueError(f"the ranks save to different places: {', '.join(names)}; name one shared folder")
        every = [each for _, _, each in said[: peers.size]]
        first = {name for name in sums if peers.number == next(at for at, each in enumerate(every) if name in each)}
        before = {name: each for sums in reversed(every) for name, each in sums.items()}
        buffers = {name: each for name, each in buffers.items() if name in first or _is_own(name, sums, before)}
        stages = in_each_stage(ranks, (shapes_in_stage(prepared), record), "save")
        refuse_same_names([shapes for shapes, _ in stages], "save")
        record = of_all_stages([of for _, of in stages])
        reduction.complete()
    settle(prepared)
    every_unit = prepared.engine.parameters.units
    units = [unit for unit in every_unit if frozen or _trained(unit)]
    left_out = {name for unit in every_unit if unit not in units for name in unit.parameters}
    give_own_params(units, ranks, "save")
    state.add(buffers, first, capture_rng(prepared.config.compute_device))
    states = [state]
    if copies is not None:
        if copies.rank:
            state.file.bring_to_host()
        states += copies.collect(state if copies.rank else None, "save")[1:]
    # What is whole on every data-parallel rank is saved by the first.
    shards = [unit.shard for unit in units if peers.leads or unit.shard.ranks > 1]
    grads = {"grad": _gradients(prepared), "held": _held(prepared)} if optimizer is not None else {}
    not_held = None if frozen else frozenset().union(*in_each_stage(ranks, left_out, "save"))
    snapshot = Snapshot(shards, grads, record, states, saved_at, peers, cuts_of(prepared), not_held)
    return _write(prepared, target, snapshot, ranks, outdated)


def _trained(unit: Unit) -> bool:
    """Whether a parameter of the unit is trained, or was before it was frozen for a while."""
    return (
        unit.was_trained or bool(unit.shard.stated()) or any(param.requires_grad for param in unit.parameters.values())
    )


def _write(
    prepared: Prepared, target: Path, snapshot: Snapshot, ranks: Ranks | None, outdated: Sequence[Path]
) -> Saving:
    """Take the state while the training stands still, and write what is left of it behind the training."""
    everyone = [] if ranks is None else ranks.everyone()
    saves = snapshot.peers.number < snapshot.peers.size  # the first copy of the model does
    begun: list[UnfinishedCheckpoint] = []

    def begin() -> bool:
        if not saves:
            return False
        try:
            begun.append(UnfinishedCheckpoint(target, snapshot, *_room(prepared), [*outdated, target]))
        except UnsyncedError as error:
            prepared.engine.streamer.live.stop(error)
            raise
        return begun[0].pending

    try:
        pending = any(together(everyone, begin, "save"))
    except BaseException:
        for unfinished in begun:
            unfinished.give_up()
        raise
    files = [file for shard in snapshot.shards for file in shard.generations()] if saves else []
    # Older checkpoints go only when the files that the new one shares with the run were read, and found as written.
    unread = [generation.hold() for each in begun for generation in each.linked if outdated and prepared.config.verify]
    going: list[Path] = []

    def publish() -> None:
        for unfinished in begun:
            replaced = unfinished.finish(behind=pending)
            going.extend([replaced] if replaced is not None else [])

    def complete(alive: Engine = prepared.engine) -> None:  # it lives as long as its memory is written
        try:
            together(everyone, publish, "save", behind=pending)
        except BaseException:
            for unfinished in begun:
                unfinished.abandon()
            for generation in unread:
                generation.let_go()
            raise

    def tidy() -> None:
        try:
            for generation in unread:
                generation.check_rest()
            remove_all([*going, *set_all_aside(outdated)])
        except OSError as error:
            logger.error("%s stays: %s", outdated[0], str(error))
        finally:
            while unread:
                unread.pop().let_go()

    saving = prepared.resources.saving = Saving(target)
    if pending:
        _reserve(files)
        saving.go_on_behind(complete, tidy)
        return saving
    saving.complete(complete)
    if any(file.frozen for file in files) and _reserve(files):
        saving.go_on_behind(lambda: None, tidy)
    else:
        tidy()  # what goes makes room
        _reserve(files)
    return saving


def take_state(prepared: Prepared) -> None:
    """What the user has put in place of `optimizer.state` is the state."""
    if prepared.stepper is not None:
        prepared.stepper.state.take()


def cuts_of(prepared: Prepared) -> dict[str, Cut]:
    """The parts that this rank has of the parameters that tensor parallelism has split."""
    found = {name: part_of(param) for name, param in prepared.placed.parameters.items()}
    return {name: Cut(*part) for name, part in found.items() if part is not None}


BufferSum = tuple[tuple[int, ...], str, int]
"""(shape, dtype, checksum)."""


def _sum(value: torch.Tensor) -> BufferSum:
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())  # of what is expanded
    return tuple(value.shape), str(value.dtype), crc32c(value[distinct].resolve_conj().resolve_neg())


def _is_own(name: str, sums: Mapping[str, BufferSum], firsts: Mapping[str, BufferSum]) -> bool:
    """Whether a buffer has values of this rank's own, where the first rank has one of the same shape and dtype."""
    return name in firsts and firsts[name][:2] == sums[name][:2] and firsts[name] != sums[name]


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
"""Of buffers by name; None of parameters."""


def shapes_in_stage(prepared: Prepared) -> Shapes:
    """What this stage of a pipeline has to say of the names in it."""
    buffers = {name: (tuple(value.shape), value.dtype) for name, (value, _) in buffers_of(prepared.model).items()}
    return {**buffers, **dict.fromkeys(prepared.placed.parameters)}


def refuse_same_names(stages: Sequence[Shapes], verb: str) -> None:
    """Raise `ValueError` where one name is that of two parameters of a pipeline, or of two buffers that are unlike."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {}
    for shapes in stages:
        twice = next(
            (name for name, each in shapes.items() if name in found and (each is None or each != found[name])), None
        )
        found |= shapes
        if twice is None:
            continue
        what = "a parameter" if shapes[twice] is None else "a buffer of another shape or dtype,"
        raise ValueError(
            f"outsize.{verb} writes all stages of the pipeline into one folder, and several have {what} "
            f"{twice!r}: give prepare a module whose layers have the names of the whole model, or the mesh without "
            f"its pipeline dimension, and each stage a folder"
        )


def _reserve(files: Sequence[Generations]) -> bool:
    """Take the space of the next generations. The checkpoint is safe by now, so a failure is for the next update to
    raise, if the reason is still there."""
    try:
        for file in files:
            if file.frozen:
                file.reserve()
    except OSError as error:
        logger.warning("no room for the next update yet: %s", str(error))  # not the error: a log may keep its frames
        return False
    return True


def _check_place(prepared: Prepared, target: Path) -> None:
    """Raise `ValueError` for a folder that goes with the run, or that the next run takes for a dead one's."""
    runs = [run.resolve() for run in prepared.resources.run_directories]
    if target.name.startswith(RUN_PREFIX) or any(run == target or run in target.parents for run in runs):
        raise ValueError(
            f"{target} is where outsize keeps a run's own files, which are removed with it; choose another"
        )


def _room(prepared: Prepared) -> tuple[int, int]:
    """Bytes of memory and of disk that the budgets leave beside what training has needed at most so far."""
    budgets, peak = prepared.placed.budgets, prepared.resources.ledger.peak
    copies = budgets.host - bytes_on(budgets.sharing("host"), peak, but=(KEPT,))
    return max(copies, 0), max((budgets.disk or 0) - bytes_on(("disk",), peak), 0)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer | None, verb: str) -> Prepared:
    """As `ready`, of a model that still has the parameters which `prepare` took, none in the place of another. Else
    `ValueError` that names them: files have the names of `prepare`."""
    prepared = ready(model, optimizer, verb)
    here = {id(param): name for name, param in known_parameters(model)}
    names = prepared.placed.parameters
    taken = {id(param): name for name, param in names.items()}
    changes = {
        "came after it": [name for key, name in here.items() if key not in taken],
        "are no longer in the model": [name for key, name in taken.items() if key not in here],
        "stand where another one stood": [
            name for key, name in here.items() if name != taken.get(key, name) and name in names
        ],
    }
    problems = [f"{len(found)} {what}: {', '.join(found)}" for what, found in changes.items() if found]
    if problems:
        raise ValueError(
            f"outsize.{verb}: the model's parameters are not those that outsize.prepare took: {'; '.join(problems)}. "
            f"Add, replace, move and remove modules before outsize.prepare, or after outsize.release(model), and "
            f"prepare the model again"
        )
    return prepared


def ready(model: nn.Module, optimizer: torch.optim.Optimizer | None, verb: str) -> Prepared:
    """The prepared model, at rest enough to be saved or loaded. Raises `ValueError`, `TypeError` or `RuntimeError`."""
    check_types(model, optimizer)
    prepared = require(model)
    prepared.resources.conveyor.check_process()
    if model is not prepared.model:
        raise ValueError(
            f"outsize.{verb} takes the model that was given to outsize.prepare ({type(prepared.model).__name__}), not "
            f"a part of it or a wrapper around it ({type(model).__name__})"
        )
    wrapped = getattr(optimizer, "optimizer", None)  # as Accelerate wraps it
    if optimizer is not None and prepared.optimizer not in (optimizer, wrapped):
        raise ValueError(
            f"outsize.{verb} was given an optimizer ({type(optimizer).__name__}) that is not the one that was prepared "
            f"with the model; pass the one that went through outsize.prepare"
        )
    for unit in prepared.engine.parameters.units:
        if unit.writable:
            raise RuntimeError(
                f"outsize.{verb} was called inside a gathered(..., modify=True) block that holds {unit.name!r}; its "
                f"changes are stored when the block is left: call outsize.{verb} after it"
            )
    return prepared


def settle(prepared: Prepared) -> None:
    """Run every update that is owed and wait until all of it has arrived where it rests."""
    prepared.engine.backward.end_interrupted()
    prepared.engine.streamer.settle_all(prepared.config.progress)
    for unit in prepared.engine.parameters.units:
        unit.await_written()
    prepared.resources.synchronize()


def give_own_params(units: Sequence[Unit], ranks: Ranks | None, verb: str) -> None:
    """Weights that are read in place get files of their own, which may change, and which checkpoints may link. Nothing
    may be on its way."""

    def give() -> None:
        for unit in units:
            unit.shard.own_params()

    everywhere(ranks, give, verb)


def _is_applied(unit: Unit, grad: torch.Tensor) -> bool:
    """Whether the last step has applied this gradient of a table, as it is."""
    applied = None if unit.shard.rows is None else unit.shard.rows.applied
    return applied is not None and applied[0]() is grad and applied[1] == grad._version


def _gradients(prepared: Prepared) -> dict[str, SavedGrad]:
    found = {}
    for unit in prepared.engine.parameters.units:
        for name, param in unit.parameters.items():
            grad = param.grad
            if isinstance(grad, RestingGrad):
                if grad.spent:
                    assert prepared.stepper is not None
                    if prepared.stepper.awaits_step(unit):
                        grad.expect_unspent("saved before optimizer.step()")
                    continue
                grad.home.resting.complete()  # a norm may be on its way
                norms = {order: norm.item() for order, norm in grad.norms.items()}
                found[name] = _saved_grad(unit.shard.slots[name], grad.ops, norms, grad.loose, grad.shard)
            elif grad is not None:
                if grad.layout is not torch.strided:
                    if _is_applied(unit, grad):
                        continue
                    raise TypeError(
                        f"the gradient of {name!r} is sparse, and a checkpoint holds dense ones alone; call "
                        f"optimizer.step(), or zero_grad(), before outsize.save"
                    )
                value = unit.shard.part_of(name, local_gradient(param, grad))
                found[name] = SavedGrad(GradOps(), {}, value.dtype, value)
    return found


def _held(prepared: Prepared) -> dict[str, SavedGrad]:
    """The gradients that a delayed update holds back until the next step."""
    return {
        name: _saved_grad(unit.shard.slots[name], owed.ops, {}, owed.loose, owed.resting)
        for unit in prepared.engine.parameters.units
        for name, owed in unit.held.items()
    }


def _saved_grad(
    slot: Slot, ops: GradOps, norms: Mapping[float, float], loose: torch.Tensor | None, resting: GradShard | None
) -> SavedGrad:
    if loose is not None or resting is None:
        assert loose is not None
        return SavedGrad(ops, norms, loose.dtype, loose)
    dtype = resting.dtype(slot)
    return SavedGrad(ops, norms, dtype, partial(resting.copy_of, slot) if slot.numel else torch.empty(0, dtype=dtype))


def optimizer_record(
    prepared: Prepared, optimizer: torch.optim.Optimizer | None, encoded: bool
) -> OptimizerRecord | None:
    if optimizer is None:
        return None
    if encoded:
        check_state_dict(optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key not in NO_OPTIONS}
        path = f"optimizer.param_groups[{index}]"
        names = tuple(prepared.engine.parameters.name_of(param) for param in group["params"] if not is_wrapper(param))
        groups.append(GroupRecord(encode(hyper, path, inline) if encoded else {}, names))
    assert prepared.stepper is not None
    delayed = prepared.config.warmup_steps is not None
    arrays = prepared.placed.kept.arrays
    return OptimizerRecord(type(optimizer).__name__, arrays, tuple(groups), prepared.stepper.steps, delayed)


def buffers_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """The model's buffers by their first name, and whether each is part of its state_dict. One that is not, and that no
    checkpoint can hold (sparse), is the module's own to make."""
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        for own, value in module._buffers.items():
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            name = f"{prefix}.{own}" if prefix else own
            if not is_repeated(value):
                raise TypeError(f"buffer {name!r} is split over ranks (a DTensor); it cannot be saved or exported")
            persistent = own not in module._non_persistent_buffers_set
            if persistent or can_hold(local(value)):
                found[name] = (local(value), persistent)
    return found


def with_own(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """The modules that have a `get_extra_state` or `set_extra_state` of their own, by the names of their states in
    torch's state dicts (`layers.0._extra_state`)."""
    return {
        f"{prefix}._extra_state" if prefix else "_extra_state": module
        for prefix, module in model.named_modules()
        if getattr(type(module), method) is not getattr(nn.Module, method)
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters, each with the first one."""
    first = {id(param): name for name, param in known_parameters(model)}
    every = known_parameters(model, remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if name != first[id(param)]}
