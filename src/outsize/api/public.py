"""`prepare` and `plan`: a model within budgets, and what goes where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from outsize.api.assemble import assemble, check_types, first_prepared, kept_by, prepared_of
from outsize.api.methods import methods_of
from outsize.api.placed import PlacedModel
from outsize.api.placing import place_model
from outsize.api.ranks import know_place, take_accelerator
from outsize.api.stages import part_of_a_rank, shape_of, width_of
from outsize.config import Config, Fields, make_config, shows_fields
from outsize.move.store import OWN_BYTES
from outsize.optim.choice import rule_for
from outsize.optim.native import AdamRule
from outsize.planning.machine import Machine
from outsize.planning.parallel import Parallel, sent_for_a_token, sent_in_a_step
from outsize.planning.tables import Plan, PlannedUnit, planned
from outsize.run.owner import outside_inference
from outsize.run.paging import page_in
from outsize.run.wrappers import known_parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of Python 3.11; nothing needs it while a program runs

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def prepare(
    model: ModelT, optimizer: OptimizerT, config: Config | None = None, **fields: Unpack[Fields]
) -> tuple[ModelT, OptimizerT]: ...


@overload
def prepare(
    model: ModelT, optimizer: None = None, config: Config | None = None, **fields: Unpack[Fields]
) -> tuple[ModelT, None]: ...


@shows_fields
def prepare(
    model: ModelT, optimizer: Optimizer | None = None, config: Config | None = None, **fields: Unpack[Fields]
) -> tuple[ModelT, Optimizer | None]:
    """Make the model train within the budgets, in place; returns the same two objects.

    Parameters keep their identity, shape and dtype (`compute_dtype` casts them); their values, gradients and optimizer
    state move to their tiers (ZeRO-Infinity, Rajbhandari et al. 2021, section 5). `optimizer` may be None for a model
    that is only run. Fields are those of `Config`; keywords override `config`.

    Raises `ValueError` or `TypeError` before anything is moved: for values that make no sense, an optimizer over other
    parameters, parameters that cannot be trained, a model that is already prepared. A budget that does not hold the
    model is a `BudgetError`.
    Raises `OSError` with the path for a disk directory that cannot be used. A drive that fails while values move ends
    the model: each later use of it is a `RuntimeError`.

    >>> model, optimizer = outsize.prepare(model, optimizer, host_memory="4GiB", disk="disk")
    """
    know_place()
    made = make_config(config, fields)
    made = replace(made, device=made.compute_device)
    _check_types(model, optimizer)
    for name, param in known_parameters(model):
        if prepared_of(param) is not None:
            raise ValueError(
                f"the model is already prepared (parameter {name!r}); go on with the optimizer that was prepared with "
                f"it, or make the model a plain one: outsize.release(model)"
            )
    take_accelerator(made.compute_device)
    with outside_inference():
        assemble(model, optimizer, made, page_in, methods_of(model))
    return model, optimizer


def _check_types(model: object, optimizer: object) -> None:
    if isinstance(optimizer, (list, tuple)):
        raise TypeError("a model has one optimizer; give it several parameter groups in place of several optimizers")
    check_types(model, optimizer)


@shows_fields
def plan(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    *,
    ranks: int = 1,
    example: Any = None,
    machine: Machine | None = None,
    **fields: Unpack[Fields],
) -> Plan:
    """What goes where, and why; moves nothing and reads no weights, so a model on the meta device will do.

    The same fields and the same errors as `prepare`: the `BudgetError` for a budget that does not hold the model names
    the unit, the numbers and the remedy. Without an optimizer, AdamW on all trainable parameters is assumed. With
    `ranks` it is the plan of one of so many data-parallel ranks, whose budgets these are. With `mesh`, a `DeviceMesh`
    or the size of each dimension by name, it is that of a rank of the largest pipeline stage: the model's list of
    layers is cut into equal parts, and matrices are cut as tensor parallelism cuts them, vectors are whole on each
    rank. `plan.parallel` has the bytes that a rank sends, and the pipeline's bubble.

    With an `example` batch, a dict or a tuple for the model, a step is simulated: `plan.step_seconds`,
    `plan.peak_bytes` by tier, and `plan.prediction`, which says what bounds the step. The model's operations are
    counted on tensors without memory; the figures are those of `machine`, by default what `outsize.probe` has measured
    here, else usual values. Without `machine` a layer of each kind also runs here for about a second, with weights of
    its own, if that fits the budget and free memory and takes less than ten seconds. Hooks of yours run with it. Raises
    `ValueError` where the example does not fit the model.

    >>> plan = outsize.plan(model, optimizer, host_memory="4GiB", disk="disk")  # prints as a table
    >>> plan.bytes_on("disk")
    0
    """
    mesh = fields.pop("mesh", None if config is None else config.mesh)
    made = replace(make_config(config, fields), mesh=None)
    _check_types(model, optimizer)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be an integer of at least 1")
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"machine is a {type(machine).__name__}; it must be the figures that outsize.probe returns")
    prepared = first_prepared(model.parameters())
    if prepared is not None:
        if config is not None or fields or ranks > 1 or mesh is not None or example is not None:
            raise ValueError(
                "the model is prepared already: plan(model) shows what goes where; other budgets need a fresh model"
            )
        return replace(_plan_of(prepared.placed, prepared.config), activations=prepared.chosen)
    if mesh is not None and ranks > 1:
        raise ValueError(f"plan takes ranks={ranks} or mesh={mesh}, not both")
    parallel, width = Parallel(ranks) if mesh is None else shape_of(mesh, model.parameters()), width_of(model)
    adamw = AdamRule(amsgrad=False, decoupled=True)
    kept = kept_by(adamw if optimizer is None else rule_for(optimizer, made.state_format), made)
    if parallel.stages * parallel.tensor > 1:
        if example is not None:
            raise ValueError(
                "example simulates a step of data-parallel ranks; leave it out where the mesh cuts the model for "
                "tensor parallelism or a pipeline"
            )
        model, parallel = part_of_a_rank(model, parallel)
        optimizer = None  # it has the parameters of the whole model
    placed = place_model(model, optimizer, made, kept, dry=True, parallel=parallel)
    found = replace(_plan_of(placed, made), parallel=_sending(placed, made, parallel, width))
    if example is None:
        return found
    from outsize.api.predicting import predict  # torch's fake tensors, which take seconds to import

    return replace(found, prediction=predict(model, optimizer, example, placed, made, parallel, machine))


def _sending(placed: PlacedModel, config: Config, parallel: Parallel, width: int) -> Parallel | None:
    if parallel.ranks == 1:
        return None
    params = sum(info.nbytes for info in placed.infos.values())
    grads = sum(info.nbytes for info in placed.infos.values() if info.trainable)
    itemsize = max((OWN_BYTES[info.dtype] for info in placed.infos.values()), default=0)
    if config.reduce_dtype is not None:
        grads = grads * config.reduce_dtype.itemsize // itemsize
    return replace(
        parallel,
        sent_bytes=sent_in_a_step(params, grads, config.stage, parallel.data, parallel.copies),
        token_bytes=sent_for_a_token(width, itemsize, parallel.layers, parallel.tensor, parallel.stages),
    )


def _plan_of(found: PlacedModel, config: Config) -> Plan:
    """The placement as a table."""
    stays = found.stay_gathered
    units = tuple(
        planned(size, tiers, config.update, index in found.tables, stays)
        for index, (size, tiers) in enumerate(zip(found.unit_bytes, found.tiers, strict=True))
    )
    trained = [unit for index, unit in enumerate(units) if unit.size.trained and index not in found.tables]
    moved = sum(2 * (unit.size.params + unit.size.states) + unit.size.moved_grads for unit in trained)
    on_cpu = found.budgets.device is None
    link = 0 if on_cpu else sum(_link_bytes(unit) for unit in units)
    parameters = sum(info.numel for info in found.infos.values())
    return Plan(
        units,
        parameters,
        found.budgets,
        moved,
        link,
        found.together,
        tables=tuple(found.layouts[index].slots[0].name for index in sorted(found.tables)),
        dense_tables=found.dense_tables,
    )


def _link_bytes(unit: PlannedUnit) -> int:
    """Bytes that cross between host and device in one direction or the other."""
    fetched = 0 if unit.tiers.params == "device" else 2 * unit.size.params
    updated = 2 * unit.size.params if unit.tiers.params == "device" and unit.tiers.states != "device" else 0
    return fetched + updated + (0 if unit.tiers.grads == "device" else unit.size.moved_grads)
