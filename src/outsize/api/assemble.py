"""`prepare`: from a placed model to a running engine, unit by unit, with the user's two objects kept."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from outsize.api.placing import Kept, PlacedModel, element_bytes, place_model
from outsize.api.ranks import check_same, open_ranks
from outsize.api.resources import Resources
from outsize.api.shards import Shards
from outsize.checkpoint.values import NOT_HYPER, encode, inline
from outsize.config import Config
from outsize.move.activations import ActivationStore, DiskPlace, HostPlace
from outsize.move.comm import Ranks
from outsize.move.disk import allow_open_files
from outsize.move.generations import crc32c
from outsize.move.memory import return_freed_memory
from outsize.move.shard import UnitShard
from outsize.move.store import DTYPES, MASTER, MASTER_DTYPE
from outsize.optim.choice import rule_for
from outsize.optim.rules import Rule, split_master
from outsize.optim.update import ChunkUpdater, UpdateClock
from outsize.plan.choice import Chosen
from outsize.plan.layout import PAGE_ELEMENTS, Slot, round_up
from outsize.plan.placement import KINDS, accumulates_whole, pipeline_depth, slab_bytes
from outsize.run import hooks
from outsize.run.activations import Activations, can_recompute
from outsize.run.attached import Attached, refuse_own_step
from outsize.run.backward import Backward
from outsize.run.buffers import PASSING_UNITS
from outsize.run.choice import Choice
from outsize.run.embedding import Table
from outsize.run.engine import Engine
from outsize.run.guard import ManagedParameter
from outsize.run.live_state import LiveState
from outsize.run.local import bind, is_distributed, is_repeated, local
from outsize.run.mapped_files import let_go
from outsize.run.owner import Owner
from outsize.run.paging import PagedParameter
from outsize.run.parameters import Parameters
from outsize.run.positions import may_have_tiles
from outsize.run.reduction import Reduction
from outsize.run.resting_place import RestingPlace
from outsize.run.room import Room
from outsize.run.saved import by_reference, saving_with
from outsize.run.split_inputs import SplitInputs
from outsize.run.state_entry import store_entry
from outsize.run.stepping import Stepper
from outsize.run.streamer import Streamer
from outsize.run.tiles import Tiles
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients

logger = logging.getLogger("outsize")

LARGEST_FILE = 8 << 40
"""Bytes; file systems have limits. A file of activations is a hole where none lies."""

ADOPTED_NUMEL = 4 << 20
"""Elements of a parameter in tiles that are moved at once."""

UNBOUNDED = 1 << 62
"""The room of a model of which nothing ever moves."""


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
    clock: UpdateClock
    choice: Choice

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


def kept_by(rule: Rule | None, config: Config) -> Kept:
    """What the rule keeps in the format that the user asked for."""
    if rule is None:
        return Kept()
    return Kept(
        rule.arrays,
        frozenset(rule.codes) if config.state_format == "compact" else frozenset(),
        rule.whole,
        rule.tables_have_arrays,
    )


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    load: Callable[[nn.Parameter], torch.Tensor],
) -> Prepared:
    """Build the engine. `load` gives a parameter's present values, paging them in if `init` paged them out."""
    _refuse_wrapped(model)
    if optimizer is not None:
        refuse_own_step(optimizer)
    rule = rule_for(optimizer, config.state_format) if optimizer is not None else None
    if optimizer is not None and rule is not None:
        _warn_of_what_is_not_saved(optimizer, rule)
    with ExitStack() as undo:  # what an error ends
        ranks = open_ranks(config, list(model.parameters()))
        if ranks is not None:
            undo.push(partial(_end_ranks, ranks))
        plan = place_model(model, optimizer, config, kept_by(rule, config), ranks=ranks)
        _check_devices(plan, config)
        _check_existing(plan, optimizer)
        if rule is not None and optimizer is not None:
            _check_tables(plan, rule, optimizer)
        resources = _open_resources(plan, config)
        undo.callback(resources.close)
        prepared = _build(model, optimizer, config, plan, rule, resources, load, ranks)
        undo.pop_all()
    return prepared


def _end_ranks(ranks: Ranks, kind: object, error: BaseException | None, traceback: object) -> None:
    assert error is not None
    ranks.model.watch.tell(error)
    ranks.model.close()


def _open_resources(plan: PlacedModel, config: Config) -> Resources:
    on_disk = any("disk" in (tier.params, tier.grads, tier.states) for tier in plan.tiers) or _moves_to_disk(config)
    if on_disk and config.compute_device.type == "cpu":
        return_freed_memory()
    staged = on_disk or config.compute_device.type != "cpu"  # host memory is updated where it is
    staging = plan.budgets.staging_bytes if staged else 0
    depth = pipeline_depth(staging)
    slab = slab_bytes(staging, element_bytes(plan.infos, plan.kept), depth)
    leave = any(tiers.grads != "device" for tiers in plan.tiers)
    outbox = plan.budgets.outbox_bytes(plan.unit_bytes) if leave else 0
    return Resources(config.directories if on_disk else (), slab, depth, config.compute_device, outbox, on_disk)


def _moves_to_disk(config: Config) -> bool:
    """Whether activations may go to disk."""
    return config.activations == "offload" and config.activations_tier != "host" and bool(config.directories)


def _open_activations(
    plan: PlacedModel, config: Config, resources: Resources, ranks: Ranks | None, chosen: bool
) -> ActivationStore | None:
    """Where the inputs of layers go; None where they stay, for computation on the CPU has them in host memory.
    `chosen`: "auto" may move all that layers save, on disk where something of the model is on disk."""
    lanes, ledger = resources.lanes, resources.ledger
    if config.activations != "offload" and not chosen:
        return None

    def room(tier: str, budget: int) -> int:
        return budget - sum(size for name, size in list(ledger.now.items()) if name.startswith(f"{tier}/"))

    host = disk = None
    if lanes is not None and config.activations_tier != "disk":
        host = HostPlace(lanes, ledger, lambda: room("host", plan.budgets.host), ranks and ranks.await_device)
    if _moves_to_disk(config) or (chosen and resources.disk is not None and config.activations_tier != "host"):
        file = resources.open_scratch("activations", max(min(room("disk", plan.budgets.disk or 0), LARGEST_FILE), 0))
        disk = DiskPlace(file, resources.conveyor, lanes, ledger)
    if host is None and disk is None:
        return None
    return ActivationStore(config.compute_device, host, disk)


_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _warn_of_what_is_not_saved(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Not refused: the training is right, and weights can be exported."""
    try:
        encode(dict(rule.tried), "the optimizer's state", lambda *_: None)
        for at, group in enumerate(optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key not in NOT_HYPER}
            encode(hyper, f"optimizer.param_groups[{at}]", inline)
    except (TypeError, ValueError) as error:
        logger.warning("outsize.save will refuse this %s: %s", type(optimizer).__name__, str(error))


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        of_torch = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
        wrapper = next((name for name in of_torch if name in _WRAPPERS), None)
        if wrapper is not None:
            raise ValueError(
                f"{repr(name) if name else 'the model'} is wrapped in {wrapper}: do not wrap, outsize averages the "
                f"gradients over ranks and splits parameters itself; pass the plain module"
            )


def _refuse_unseen(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse modules that would read or write, where nothing sees it, parameters that come and go."""
    moving = {id(param) for unit in units if not unit.resident for param in unit.parameters.values()}
    for name, module in model.named_modules():
        if not any(id(param) in moving for param in module.parameters()):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {(name or type(module).__name__)!r} is of TorchScript (torch.jit.script, torch.jit.trace), "
                f"which would read parameters at rest as they lie there; use the plain module it was made from"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"module {name!r} has max_norm={module.max_norm}, which writes its weight in every forward; set "
                f"max_norm=None and renormalize after step() inside outsize.gathered(weight, modify=True)"
            )


def _check_devices(plan: PlacedModel, config: Config) -> None:
    for name, param in plan.parameters.items():
        if param.device.type == "meta":
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values; build the model under outsize.init "
                f"instead, or materialize it first (outsize.plan works on meta models)"
            )
        if param.device.type not in ("cpu", config.compute_device.type):
            raise ValueError(
                f"parameter {name!r} is on {param.device} but device is {config.compute_device}; move the model to the "
                f"CPU or pass device={str(param.device)!r}"
            )
        plain = type(param) is nn.Parameter or is_distributed(param)
        if not plain and param.layout is torch.strided and not isinstance(param, PagedParameter):
            raise ValueError(f"parameter {name!r} is a {type(param).__name__}; outsize shards plain nn.Parameter only")


def _check_tables(plan: PlacedModel, rule: Rule, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer updates what it is given: rows of tables, and whole parameters."""
    tables = {plan.layouts[index].slots[0].name for index in plan.tables}
    names = {id(param): name for name, param in plan.parameters.items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            if name in tables:
                rule.check_rows(group, name, type(optimizer).__name__)
            elif rule.only_rows and param.requires_grad:
                raise ValueError(
                    f"{type(optimizer).__name__} updates only the rows of tables, embeddings with sparse=True, and "
                    f"parameter {name!r} is none; use outsize.optim.LazyAdamW, which updates both"
                )


def _check_existing(plan: PlacedModel, optimizer: torch.optim.Optimizer | None) -> None:
    """Gradients and optimizer state that exist already can be taken over."""
    for name, param in plan.parameters.items():
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise ValueError(f"the gradient of {name!r} is sparse ({param.grad.layout}); use dense gradients")
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key in plan.kept.arrays:
            value = state.get(key)
            if isinstance(value, torch.Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"the optimizer's state {key!r} of {name!r} has the shape {tuple(value.shape)}, the parameter "
                    f"{tuple(param.shape)}; load the state of the same model or start without one"
                )


def _build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    plan: PlacedModel,
    rule: Rule | None,
    resources: Resources,
    load: Callable[[nn.Parameter], torch.Tensor],
    ranks: Ranks | None,
) -> Prepared:
    lasting = sum("disk" in (tiers.params, tiers.states) for tiers in plan.tiers)
    passing = sum(tiers.grads == "disk" for tiers in plan.tiers)
    allow_open_files((lasting + passing) * len(config.directories))
    opening = Shards(plan, config, rule, resources, ranks is not None)
    shards = [opening.open(layout, tiers) for layout, tiers in zip(plan.layouts, plan.tiers, strict=True)]
    resources.shards, resources.ranks = shards, ranks
    conveyor, clock = resources.conveyor, UpdateClock()
    updater = None if rule is None else ChunkUpdater(rule, conveyor.slab_bytes, conveyor.slabs, clock)
    units = [
        Unit(shard, {slot.name: plan.parameters[slot.name] for slot in shard.layout.slots}, ranks) for shard in shards
    ]
    _refuse_unseen(model, units)
    agree = ranks is None or (ranks.tensor is None and config.unused != "sync")
    scopes, owned, framed, layers = _modules(model, units, plan, config, "auto" if agree else "recompute")
    leaving = 0 if resources.outbox is None else resources.outbox.nbytes
    capacity = _capacity(plan, units, leaving)
    spare = _spare(units, plan, capacity)
    hot = _keep_hot_rows(units, plan, spare, leaving)
    capacity, spare = capacity - hot, spare - hot if "auto" in layers.values() else 0
    resources.activations = _open_activations(plan, config, resources, ranks, chosen=spare > 0)
    choice = Choice(
        spare,
        resources.ledger,
        config.compute_device,
        resources.activations,
        in_turn=ranks is None,
        recomputes=config.activations == "recompute",
        most_open=_most_open(layers, units, capacity),
    )
    reduction = None
    if ranks is not None:
        ranks.model.names = [unit.name or "model" for unit in units]
        whole = accumulates_whole(plan.unit_bytes, plan.tiers, plan.budgets)
        adds_up = torch.tensor([whole], dtype=torch.int32, device="cpu")
        for group in ranks.everyone():
            group.combine(adds_up, "prepare", "min")
        reduction = Reduction(ranks, plan.split[1] > 1, config.reduce_dtype, resources.ledger, choice, bool(adds_up))
    rounds = ranks if config.unused == "sync" and plan.split[1] > 1 else None
    owner, live = Owner(), LiveState()
    places = [RestingPlace(unit, conveyor) for unit in units]
    flight_room = None if plan.budgets.device is None else plan.budgets.passing_bytes(plan.unit_bytes)
    room = Room(units, places, live, capacity - spare, resources.ledger, plan.budgets, reduction, flight_room)
    streamer = Streamer(units, room, live, conveyor, updater, rounds)
    in_backward = optimizer is not None and config.update == "backward"
    gradients = [
        UnitGradients(unit, place, owner, streamer, reduction, in_backward)
        for unit, place in zip(units, places, strict=True)
    ]
    if reduction is not None:
        reduction.collectors += [each.collector for each in gradients if each.collector is not None]
    existing = {name: param.grad for name, param in plan.parameters.items() if param.grad is not None}
    states = dict(optimizer.state) if optimizer is not None else {}
    absent: dict[str, Any] = dict.fromkeys(sorted(rule.optional)) if rule is not None else {}
    states = {param: {**absent, **state} for param, state in states.items() if state}
    sums: dict[str, str] | None = None if ranks is None else {}
    for unit in units:
        _adopt(unit, states, load, sums)
    if ranks is not None and sums is not None:
        check_same(ranks.alike(), "the values of their parameters", sums)
        if ranks.tensor is not None:
            repeated = {name: sums[name] for name, param in plan.parameters.items() if is_repeated(param)}
            check_same([ranks.tensor], "the values of parameters that each has whole", repeated)
    _cast_buffers(model, config)
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
    )
    heads, wide = (_heads(model), _wide(model, units, scopes, plan)) if config.tiles else ([], {})
    hooks.install(engine, model, framed, layers, activations, heads, wide)
    prepared = Prepared(
        weakref.ref(model), optimizer, config, plan, resources, engine, stepper, attached, clock, choice
    )
    engine.classes.prepared = prepared
    for name, grad in existing.items():
        engine.adopt_gradient(name, grad)
    if reduction is not None:
        reduction.complete()
    hooks.refuse_other_optimizers(engine, optimizer)
    weakref.finalize(engine, resources.close)
    return prepared


def _capacity(plan: PlacedModel, units: Sequence[Unit], leaving: int) -> int:
    """Bytes for gathered buffers and, on a CPU, for gradients on their way to where they rest: the computing budget
    less what rests in that memory, less the gradient that autograd is making and those that are `leaving` the device.
    """
    if all(unit.always_resident and unit.shard.tiers.grads != "disk" for unit in units):
        return UNBOUNDED  # nothing moves; the plan has seen to it that all fits
    on_cpu = plan.budgets.device is None
    memory = ("device", "host") if on_cpu else ("device",)
    resting = 0
    for unit, size in zip(units, plan.unit_bytes, strict=True):
        tiers = unit.shard.tiers
        if (tiers.params == "host" and on_cpu) or (tiers.params == "device" and unit.shard.params is not None):
            resting += size.params
        resting += size.most("grads") if tiers.grads in memory else 0
        resting += size.states if tiers.states in memory else 0
    in_flight = max((_largest_gradient(unit, plan) for unit in units), default=0)
    in_flight += leaving
    return plan.budgets.computing[1] - resting - in_flight


def _keep_hot_rows(units: Sequence[Unit], plan: PlacedModel, spare: int, leaving: int) -> int:
    """Give tables on disk memory for their hot rows, each its share. Returns how much of what is `spare` it takes."""
    tables = [unit.shard.rows for unit in units if unit.shard.rows is not None and unit.shard.rows.disk_bytes]
    total = sum(rows.disk_bytes for rows in tables)
    on_cpu = plan.budgets.device is None
    if not on_cpu:
        spare = plan.budgets.host - plan.budgets.staging_bytes - leaving - plan.budgets.passing_bytes(plan.unit_bytes)
        spare -= sum(
            size.most(kind)
            for size, tiers in zip(plan.unit_bytes, plan.tiers, strict=True)
            for kind in KINDS
            if getattr(tiers, kind) == "host"
        )
    if not tables or spare <= 0:
        return 0
    taken = [rows.use_memory(spare * rows.disk_bytes // total) for rows in tables]
    return sum(taken) if on_cpu else 0


def _spare(units: Sequence[Unit], plan: PlacedModel, capacity: int) -> int:
    """Bytes that units which come and go never take: all of them fit at once, and their gradients on their way."""
    moving = [
        (unit, size)
        for unit, size in zip(units, plan.unit_bytes, strict=True)
        if not unit.always_resident and unit.shard.rows is None
    ]
    passing = sum(size.leaving for unit, size in moving if unit.shard.tiers.grads == "disk")
    least = PASSING_UNITS * max((size.leaving for _, size in moving), default=0)
    whole = [size.collected for size in plan.unit_bytes]  # gradients of several ranks
    collected = PASSING_UNITS * max(whole, default=0)
    if accumulates_whole(plan.unit_bytes, plan.tiers, plan.budgets):  # under `no_sync`
        collected = max(collected, sum(whole))
    return max(capacity - sum(unit.nbytes for unit, _ in moving) - max(passing, least) - collected, 0)


def _most_open(layers: Iterable[nn.Module], units: Sequence[Unit], capacity: int) -> int:
    """How many layers may have their parameters gathered at once, beside two units on their way."""
    moving = {id(param): unit for unit in units if not unit.always_resident for param in unit.parameters.values()}
    within = [{moving[id(param)] for param in layer.parameters() if id(param) in moving} for layer in layers]
    largest = max((sum(unit.nbytes for unit in each) for each in within), default=0)
    left = capacity - 2 * max((unit.nbytes for unit in moving.values()), default=0)
    return max(left // max(largest, 1), 1)


def _largest_gradient(unit: Unit, plan: PlacedModel) -> int:
    """Bytes that autograd takes for one gradient of the unit."""
    trained = [info.nbytes for name, info in plan.infos.items() if name in unit.parameters and info.trainable]
    return min(max(trained, default=0), plan.unit_bytes[unit.index].leaving)


def _modules(
    model: nn.Module, units: Sequence[Unit], plan: PlacedModel, config: Config, auto: str
) -> tuple[list[frozenset[int]], dict[int, list[Unit]], dict[nn.Module, bool], dict[nn.Module, str]]:
    """(the modules within each unit, the units that a module's call opens, the modules whose calls get a frame and
    whether they lie inside one that opens the same unit, the layers and what is done with their activations).

    `auto`: what is done with those of layers that come and go, where the user leaves it to outsize.
    """
    beside = plan.beside  # adapters are opened with the unit that they were cut from
    pairs = {
        unit.index: [each for each in units if unit.index in (each.index, beside.get(each.index))] for unit in units
    }
    home = {id(param): beside.get(unit.index, unit.index) for unit in units for param in unit.parameters.values()}
    scopes: list[set[int]] = [set() for _ in units]
    owned: dict[int, list[Unit]] = {}
    framed = {model: False}
    layers: dict[nn.Module, str] = {}
    within: set[nn.Module] = set()  # layers of several units
    for _, module, parent_unit, in_list in _walk(model, home):
        inside = {home[id(param)] for param in module.parameters()}
        own = {home[id(param)] for param in module.parameters(recurse=False)}
        if inside and module is not model and module not in within and parent_unit not in inside:
            mode = _mode(module, [units[index] for index in inside], config, auto if in_list else "keep")
            wanted = mode != "keep" or (in_list and config.micro_batches > 1)
            if wanted and (len(inside) == 1 or (in_list and not _lists_blocks(module))):
                layers[module] = mode
                within.update(module.modules())
        if len(inside) == 1 and module is not model:
            index = next(iter(inside))
            for each in pairs[index]:
                scopes[each.index].add(id(module))
            own = inside
            if parent_unit == index and not module._parameters:
                continue
        if own:
            framed[module] = own == {parent_unit}
            opened = [unit for index in sorted(own) for unit in pairs[index]]
            owned[id(module)] = [unit for unit in opened if not unit.resident and not unit.shard.tile_rows]
    moving = {beside.get(unit.index, unit.index) for unit in units if not unit.resident}
    needed = {
        module: nested
        for module, nested in framed.items()
        if any(home[id(param)] in moving for param in module.parameters())
    }
    return [frozenset(scope) for scope in scopes], owned, needed, layers


def _lists_blocks(module: nn.Module) -> bool:
    """Whether a list of modules of several parts lies in the module: these are layers, and it is none."""
    lists = (each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)))
    return any(sum(any(True for _ in part.children()) for part in each) > 1 for each in lists)


def _walk(model: nn.Module, home: dict[int, int]) -> Any:
    """Each module once: (name, module, the only unit of its parent or -1, whether its parent is a list)."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module, int, bool]] = [("", model, -1, False)]
    while stack:
        name, module, parent_unit, in_list = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module, parent_unit, in_list
        inside = {home[id(param)] for param in module.parameters()}
        own = next(iter(inside)) if len(inside) == 1 and module is not model else -1
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        children = [(f"{name}.{child}", each, own, is_list) for child, each in module.named_children()]
        stack.extend(reversed(children))


def _mode(module: nn.Module, units: Sequence[Unit], config: Config, auto: str) -> str:
    """What is done with the activations of a module that lies in these units."""
    if not any(True for _ in module.children()) or not can_recompute(module):
        return "keep"
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return "keep"
    if config.activations != "auto":
        return config.activations
    alone = len(units) == 1  # what runs again holds all of its units
    return auto if alone and units[0].shard.tiers.params != "device" else "keep"


def _heads(model: nn.Module) -> list[nn.Linear]:
    """The layer that makes the logits of a language model: where the model does not say, its last linear one."""
    of_model = getattr(model, "get_output_embeddings", None)
    head = of_model() if callable(of_model) else None
    if head is None:
        head = next((each for each in reversed(list(model.modules())) if isinstance(each, nn.Linear)), None)
    if type(head) is not nn.Linear or is_distributed(head.weight):
        return []
    return [head]


def _wide(
    model: nn.Module, units: Sequence[Unit], scopes: Sequence[frozenset[int]], plan: PlacedModel
) -> dict[nn.Module, int]:
    """The modules of linear layers within one unit, which stays open for all tiles; the bytes that a call may take."""
    whole = [scope for unit, scope in zip(units, scopes, strict=True) if not unit.shard.tile_rows]
    within = set().union(*whole)
    found = [each for each in model.modules() if id(each) in within and may_have_tiles(each)]
    return {each: plan.budgets.computing[1] for each in found if not any(map(is_distributed, each.parameters()))}


def _adopt(
    unit: Unit,
    states: dict[Any, dict[str, Any]],
    load: Callable[[nn.Parameter], torch.Tensor],
    sums: dict[str, str] | None,
) -> None:
    """Move one unit's values to where they rest; the parameters become views of the unit's gathered buffer."""
    shard = unit.shard
    if not shard.tile_rows or shard.lanes is not None:  # an accelerator's memory is only viewed while it is there
        shard.buffer.materialize()
        shard.buffer.use()
    if shard.device.type != "cpu" and not shard.tile_rows:  # what lies between parameters is stored and saved with them
        shard.buffer.flat.zero_()
    for name, param in unit.parameters.items():
        state = states.pop(param, None)
        with torch.no_grad():
            if not shard.in_place or sums is not None:
                value = local(load(param))
                if sums is not None:
                    sums[name] = f"{crc32c(value):08x}"
                if not shard.in_place:
                    _adopt_value(shard, name, value)
                let_go(value)
                del value
            param.grad = None
            bind(param, shard.param(name))
        if state:
            store_entry(shard, name, state)
    unit.adopt()
    if shard.params is not None:
        if not shard.tile_rows and not shard.in_place:
            shard.write_params()
        unit.release()


def _adopt_value(shard: UnitShard, name: str, value: torch.Tensor) -> None:
    slot = shard.slots[name]
    if shard.tile_rows:
        step, own = round_up(ADOPTED_NUMEL, PAGE_ELEMENTS), shard.own(name, value)
        for first in range(0, slot.numel, step):
            _adopt_part(shard, slot, first, own[first : first + step])
        return
    target = shard.param(name)
    master = shard.array(MASTER, slot)
    if master is None or not target.numel():
        target.copy_(value)
        return
    on_cpu = target.device.type == "cpu"
    weight = target.view(-1) if on_cpu else torch.empty(target.numel(), dtype=target.dtype, device="cpu")
    rest = torch.empty(target.numel(), dtype=MASTER_DTYPE[slot.dtype], device="cpu")
    split_master(value.detach().cpu().reshape(-1).float(), weight, rest)
    if not on_cpu:
        target.copy_(weight.view(target.shape))
    shard.write_array(master, slot.offset, slot.end, shard.own(name, rest))


def _adopt_part(shard: UnitShard, slot: Slot, first: int, value: torch.Tensor) -> None:
    """Elements of a parameter from `first` on, to where they rest."""
    assert shard.params is not None
    weight, master = torch.empty(value.numel(), dtype=DTYPES[slot.dtype], device="cpu"), shard.array(MASTER, slot)
    start, end = slot.offset + first, slot.offset + first + value.numel()
    if master is None:
        weight.copy_(value)
    else:
        rest = torch.empty(value.numel(), dtype=MASTER_DTYPE[slot.dtype], device="cpu")
        split_master(value.cpu().float(), weight, rest)
        shard.write_array(master, start, end, rest)
    shard.params.put(shard.param_layout.span(start, end)[0], weight.view(torch.uint8))


def _cast_buffers(model: nn.Module, config: Config) -> None:
    """As `model.to(device, compute_dtype)` does with buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = config.compute_dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=config.compute_device, dtype=dtype)
