"""`plan`: what `prepare` would decide, as a table. Moves nothing, so it works on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outsize.api.assemble import kept_by, prepared_of
from outsize.api.public import check_arguments
from outsize.api.survey import Kept, Survey, survey
from outsize.config import Config, make_config
from outsize.optim.choice import rule_for
from outsize.plan.tables import Plan, PlannedUnit, planned

ADAMW_ARRAYS = ("exp_avg", "exp_avg_sq")


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    *,
    ranks: int = 1,
    **fields: Any,
) -> Plan:
    """What goes where, and why; moves nothing and reads no values, so a model on the meta device will do.

    The same fields and the same errors as `prepare`: a `ValueError` for a budget that does not hold the model names the
    unit, the numbers and the remedy. Without an optimizer, AdamW on all trainable parameters is assumed. With `ranks`
    it is the plan of one of so many data-parallel ranks, whose budgets these are.
    """
    made = make_config(config, fields)
    check_arguments(model, optimizer)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be an integer of at least 1")
    for param in model.parameters():
        prepared = prepared_of(param)
        if prepared is not None:
            if config is not None or fields or ranks > 1:
                raise ValueError(
                    "the model is prepared already: plan(model) shows what goes where; other budgets need a fresh model"
                )
            return plan_of(prepared.survey, prepared.config)
    kept = Kept(ADAMW_ARRAYS, frozenset(ADAMW_ARRAYS if made.state_format == "compact" else ()))
    if optimizer is not None:
        kept = kept_by(rule_for(optimizer, made.state_format), made)
    return plan_of(survey(model, optimizer, made, kept, dry=True, size=ranks), made)


def plan_of(found: Survey, config: Config) -> Plan:
    """The table behind a survey."""
    units = tuple(
        planned(size, tiers, config.update) for size, tiers in zip(found.unit_bytes, found.tiers, strict=True)
    )
    trained = [unit for unit in units if unit.size.states]
    moved = 2 * sum(unit.size.params + unit.size.states for unit in trained) + sum(unit.size.grads for unit in trained)
    on_cpu = found.budgets.device is None
    link = 0 if on_cpu else sum(_link_bytes(unit) for unit in units)
    parameters = sum(info.numel for info in found.infos.values())
    return Plan(units, parameters, found.budgets, moved, link, found.together)


def _link_bytes(unit: PlannedUnit) -> int:
    """Bytes that cross between host and device in one direction or the other."""
    fetched = 0 if unit.tiers.params == "device" else 2 * unit.size.params
    updated = 2 * unit.size.params if unit.tiers.params == "device" and unit.tiers.states != "device" else 0
    return fetched + updated + (0 if unit.tiers.grads == "device" else unit.size.grads)
