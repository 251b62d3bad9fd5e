"""`prepare`: from a placed model to a running engine, unit by unit, with the user's two objects kept."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from outsize.api.adopting import adopt, cast_buffers, move_wrappers
from outsize.api.capacity import capacity_of, keep_hot_rows, most_open, spare_of
from outsize.api.modules import heads_of, modules_of, wide_modules
from outsize.api.placed import Kept, PlacedModel
from outsize.api.placing import place_model
from outsize.api.ranks import check_same, on_all, open_ranks
from outsize.api.refusing import (
    check_devices,
    check_existing,
    check_stages,
    check_tables,
    refuse_unseen,
    refuse_wrapped,
    warn_of_what_is_not_saved,
)
from outsize.api.resources import Resources
from outsize.api.shards import Shards
from outsize.config import Config
from outsize.move.activations import ActivationStore, DiskPlace, HostPlace
from outsize.move.comm import Ranks, combined
from outsize.move.disk import LARGEST_FILE, allow_open_files
from outsize.move.memory import LOOK_BYTES, FreedMemory, bytes_on, keep_freed_memory, trim_heap
from outsize.move.pool import open_pool
from outsize.move.progress import progress_over
from outsize.optim.choice import rule_for
from outsize.optim.rules import Rule
from outsize.optim.update import ChunkUpdater
from outsize.planning.choice import Chosen
from outsize.planning.placement import accumulates_whole
from outsize.run import hooks
from outsize.run.activations import Activations
from outsize.run.attached import Attached, refuse_own_step
from outsize.run.backward import Backward
from outsize.run.choice import Choice
from outsize.run.embedding import Table
from outsize.run.engine import Engine
from outsize.run.guard import ManagedParameter
from outsize.run.live_state import LiveState
from outsize.run.local import is_repeated
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters
from outsize.run.reduction import Reduction
from outsize.run.resting_place import RestingPlace
from outsize.run.room import Room
from outsize.run.saved import by_reference, saving_with
from outsize.run.split_inputs import SplitInputs
from outsize.run.stepping import Stepper
from outsize.run.streamer import Streamer
from outsize.run.tiles import Tiles
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients
from outsize.run.wrappers import known

logger = logging.getLogger("outsize")


@dataclass(frozen=True)
class Prepared:
    """A prepared model, as the other functions of the API see it."""

    model_ref: weakref.ref[nn.Module]  # the parameters know this record, and autograd may keep them alive unseen
    optimizer: torch.optim.Optimizer | None
    config: Config
    placed: PlacedModel
    resources: Resources
    engine: Engine
    stepper: Stepper | None
    attached: Attached | None
    updater: ChunkUpdater | None
    choice: Choice

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the model; None for a process that is alone."""
        return self.resources.ranks

    @property
    def chosen(self) -> Chosen | None:
        """What was chosen for the activations; None where nothing is left to choose."""
        return self.choice.chosen if self.choice.spare or self.choice.chosen.segment > 1 else None

    @property
    def model(self) -> nn.Module:
        model = self.model_ref()
        assert model is not None, "the prepared model is gone"
        return model


def prepared_of(param: torch.Tensor) -> Prepared | None:
    """What `prepare` made of the model that this parameter belongs to; None if it is not prepared."""
    if not isinstance(param, ManagedParameter):
        return None
    prepared: Prepared = param.prepared
    return prepared


def first_prepared(params: Iterable[torch.Tensor]) -> Prepared | None:
    """What `prepare` made of the model that any of these parameters belongs to; None if none is prepared."""
    return next((found for found in map(prepared_of, known(params)) if found is not None), None)


def check_types(model: object, optimizer: object = None) -> None:
    """Raise `TypeError` for what is no model, and for an optimizer that is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")


def require(model: nn.Module) -> Prepared:
    """The prepared model behind `model` or one of its sub-modules. Raises `ValueError` if it is not prepared."""
    check_types(model)
    prepared = first_prepared(model.parameters())
    if prepared is None:
        raise ValueError("the model is not prepared; call outsize.prepare(model, optimizer) first")
    return prepared


def its_turn(model: nn.Module, verb: str) -> AbstractContextManager[None]:
    """Around what a function of the public API does with a prepared model: one thread at a time."""
    return require(model).engine.owner.turn(f"outsize.{verb}")


def kept_by(rule: Rule | None, config: Config) -> Kept:
    """What the rule keeps in the format that the user asked for."""
    if rule is None:
        return Kept()
    codes = rule.codes if config.state_format == "compact" else {}
    return Kept(rule.arrays, codes, rule.whole, rule.row_values)


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    load: Callable[[nn.Parameter], torch.Tensor],
    methods: Mapping[str, Callable[..., Any]],
) -> Prepared:
    """Build the engine. `load` gives a parameter's present values, paging them in if `init` paged them out. `methods`
    are put in place of the model's own."""
    refuse_wrapped(model)
    with ExitStack() as undo:  # what an error ends
        ranks = open_ranks(config, list(model.parameters()))
        stages = None if ranks is None else ranks.stages
        if ranks is not None:
            undo.push(partial(_end_ranks, ranks))

        def place() -> tuple[Rule | None, PlacedModel]:
            rule = None
            if optimizer is not None:
                refuse_own_step(optimizer)
                rule = rule_for(optimizer, config.state_format)
                warn_of_what_is_not_saved(optimizer, rule)
            plan = place_model(model, optimizer, config, kept_by(rule, config), ranks=ranks)
            check_devices(plan, config)
            if config.update == "backward" and stages is not None:
                raise ValueError(
                    "update='backward' applies the gradients of each backward, and a step of a pipeline has several: "
                    "use update='fetch' (the default)"
                )
            check_existing(plan, optimizer)
            if rule is not None and optimizer is not None:
                check_tables(plan, rule, optimizer)
            return rule, plan

        rule, plan = on_all([] if stages is None else [stages], place)
        if stages is not None:
            check_stages(stages, model, plan.parameters, optimizer)
        resources = _open_resources(plan, config)
        undo.callback(resources.close)
        prepared = _build(model, optimizer, config, plan, rule, resources, load, methods, ranks)
        undo.pop_all()
    if config.compute_device.type == "cpu":
        trim_heap()  # of the weights that have moved
    return prepared


def _end_ranks(ranks: Ranks, kind: object, error: BaseException | None, traceback: object) -> None:
    assert error is not None
    ranks.model.watch.tell(error)
    ranks.model.close()


def _open_resources(plan: PlacedModel, config: Config) -> Resources:
    on_disk = plan.on_disk
    leave = any(tiers.grads != "device" for tiers in plan.tiers)
    outbox = plan.budgets.outbox_bytes(plan.unit_bytes) if leave else 0
    found = Resources(config.directories if on_disk else (), *plan.arena, config.compute_device, outbox, on_disk)
    if plan.returns_freed_memory:
        found.ledger.freed = FreedMemory(min(plan.holes_bytes or LOOK_BYTES, LOOK_BYTES))
        keep_freed_memory(found, plan.holes_bytes)
    elif plan.kept_bytes:
        keep_freed_memory(found, plan.kept_bytes)
    return found


def _open_activations(
    plan: PlacedModel, config: Config, resources: Resources, ranks: Ranks | None, chosen: bool
) -> ActivationStore | None:
    """Where the inputs of layers go; None where they stay, for computation on the CPU has them in host memory.
    `chosen`: "auto" may move all that layers save, on disk where something of the model is on disk."""
    lanes, ledger = resources.lanes, resources.ledger
    if config.activations != "offload" and not chosen:
        return None

    def room(tier: str, budget: int) -> int:
        return budget - bytes_on((tier,), ledger.now)

    host = disk = None
    if lanes is not None and config.activations_tier != "disk":
        host = HostPlace(lanes, ledger, lambda: room("host", plan.budgets.host), ranks and ranks.await_device)
    may_use_disk = config.activations_tier != "host" and config.directories
    if plan.budgets.offloads or (may_use_disk and resources.disk is not None):
        file = resources.open_scratch("activations", max(min(room("disk", plan.budgets.disk or 0), LARGEST_FILE), 0))
        disk = DiskPlace(file, resources.conveyor, lanes, ledger)
    if host is None and disk is None:
        return None
    return ActivationStore(config.compute_device, host, disk)


def _build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    plan: PlacedModel,
    rule: Rule | None,
    resources: Resources,
    load: Callable[[nn.Parameter], torch.Tensor],
    methods: Mapping[str, Callable[..., Any]],
    ranks: Ranks | None,
) -> Prepared:
    lasting = sum("disk" in (tiers.params, tiers.states) for tiers in plan.tiers)
    passing = sum(tiers.grads == "disk" for tiers in plan.tiers)
    allow_open_files((lasting + passing) * len(config.directories))
    shared = ranks is not None and not ranks.alone
    opening = Shards(plan, config, resources, shared)
    shards = [opening.open(layout, tiers) for layout, tiers in zip(plan.layouts, plan.tiers, strict=True)]
    resources.shards, resources.ranks = shards, ranks
    conveyor = resources.conveyor
    updater = None if rule is None else ChunkUpdater(rule, conveyor.slab_bytes, conveyor.slabs)
    units = [
        Unit(
            shard,
            {slot.name: plan.parameters[slot.name] for slot in shard.layout.slots},
            ranks,
            [each for slot in shard.layout.slots for each in plan.inside.get(slot.name, ())],
        )
        for shard in shards
    ]
    refuse_unseen(model, units)
    agree = ranks is None or (ranks.tensor is None and config.unused != "sync")
    scopes, owned, framed, layers = modules_of(model, units, plan, config, "auto" if agree else "recompute")
    leaving = 0 if resources.outbox is None else resources.outbox.nbytes
    capacity = capacity_of(plan, units, leaving)
    spare = spare_of(units, plan, capacity)
    hot = keep_hot_rows(units, plan, spare, leaving)
    if ranks is not None and plan.tables:  # the last ranks have fewer rows, and all decide alike what is gathered
        (hot,) = combined([ranks], [hot], "prepare", "max")
    capacity, spare = capacity - hot, spare - hot if "auto" in layers.values() else 0
    resources.activations = _open_activations(plan, config, resources, ranks, chosen=spare > 0)
    choice = Choice(
        spare,
        resources.ledger,
        config.compute_device,
        resources.activations,
        in_turn=ranks is None,
        recomputes=config.activations == "recompute",
        most_open=most_open(layers, units, capacity),
    )
    reduction = None
    if ranks is not None:
        ranks.model.names = [unit.name for unit in units]
        whole = accumulates_whole(plan.unit_bytes, plan.tiers, plan.budgets)
        adds_up = all(combined(ranks.in_stage(), [whole], "prepare"))
        reduction = Reduction(ranks, plan.split[1] > 1, config.reduce_dtype, resources.ledger, choice, adds_up)
    rounds = ranks if config.unused == "sync" and plan.split[1] > 1 else None
    owner, live = Owner(), LiveState()
    places = [RestingPlace(unit, conveyor) for unit in units]
    room = Room(
        units,
        places,
        live,
        capacity - spare,
        resources.ledger,
        plan.budgets,
        reduction if shared else None,
        plan.passing_bytes,
    )
    streamer = Streamer(units, room, live, conveyor, updater, rounds)
    in_backward = optimizer is not None and config.update == "backward"
    gradients = [
        UnitGradients(unit, place, owner, streamer, reduction, in_backward)
        for unit, place in zip(units, places, strict=True)
    ]
    if reduction is not None:
        reduction.units = units
        reduction.collectors += [each.collector for each in gradients if each.collector is not None]
    existing = {name: param.grad for name, param in plan.parameters.items() if param.grad is not None}
    states = dict(optimizer.state) if optimizer is not None else {}
    absent: dict[str, Any] = dict.fromkeys(sorted(rule.optional)) if rule is not None else {}
    states = {param: {**absent, **state} for param, state in states.items() if state}
    sums: dict[str, str] | None = None if ranks is None else {}
    move_wrappers(model, config)
    with progress_over("outsize.prepare", units, lambda unit: unit.nbytes, config.progress) as each_unit:
        for unit in each_unit:
            adopt(unit, states, load, sums, plan.unit_bytes[unit.index].swapped > 0)
    if ranks is not None and sums is not None:
        check_same(ranks.alike(), "the values of their parameters", sums)
        if ranks.tensor is not None:
            repeated = {name: sums[name] for name, param in plan.parameters.items() if is_repeated(param)}
            check_same([ranks.tensor], "the values of parameters that each has whole", repeated)
    cast_buffers(model, config)
    parameters = Parameters(units)
    stepper = None
    if optimizer is not None:
        assert updater is not None
        stepper = Stepper(parameters, gradients, streamer, owner, reduction, optimizer, updater, config.warmup_steps)
    backward = Backward(parameters, gradients, streamer, owner, reduction, stepper if in_backward else None)
    engine = Engine(parameters, gradients, streamer, backward, owner, scopes, owned, reduction, id(model))
    for unit in units:
        for param in unit.parameters.values():
            engine.take_over(unit, param)
        for inner in unit.inside:
            inner.hide()
        unit.shard.buffer.note_views()
    for each in gradients:
        each.resting.make_ready()
    attached = None
    if optimizer is not None and stepper is not None:
        attached = Attached(optimizer, stepper, parameters, backward, owner)
    for unit, each in zip(units, gradients, strict=True):
        if unit.shard.rows is not None:
            table = Table(unit, streamer)
            engine.tables[id(table.param)] = table
        elif unit.shard.tile_rows:
            tiles = Tiles(unit, each, streamer, conveyor, resources.ledger, reduction)
            tiles.hear(engine)
            engine.tiles[id(tiles.param)] = tiles
    activations = Activations(
        config.micro_batches,
        resources.activations,
        partial(by_reference, engine),
        partial(saving_with, engine),
        choice if agree else None,
        None if ranks is None or ranks.tensor is None else SplitInputs(ranks.tensor),
        open_pool(config.compute_device),
        engine.any_shown,
    )
    heads, wide = (heads_of(model), wide_modules(model, units, scopes, plan)) if config.tiles else ([], {})
    hooks.install(engine, model, framed, layers, activations, heads, wide, methods)
    prepared = Prepared(
        weakref.ref(model), optimizer, config, plan, resources, engine, stepper, attached, updater, choice
    )
    engine.classes.prepared = prepared
    for name, grad in existing.items():
        engine.adopt_gradient(name, grad)
    if reduction is not None:
        reduction.complete()
    hooks.refuse_other_optimizers(engine, optimizer)
    resources.synchronize()
    weakref.finalize(engine, resources.close)
    return prepared
