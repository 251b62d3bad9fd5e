"""Predicts a step of a plan: counts the model's operations, and simulates the step on a machine's figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.api.budgets import available_memory
from outsize.api.counting import Timing, count_step
from outsize.api.placed import FIELDS, PlacedModel
from outsize.api.placing import place_model
from outsize.api.probing import recall
from outsize.api.simulating import Simulation
from outsize.config import Config
from outsize.move.memory import freed_memory_returned
from outsize.planning.machine import Machine
from outsize.planning.parallel import Parallel
from outsize.planning.time import Prediction

GIB = 1 << 30


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    example: Any,
    placed: PlacedModel,
    config: Config,
    parallel: Parallel,
    machine: Machine | None,
) -> Prediction:
    """A step with this example, and what one more GiB of each tier would save of it.

    Raises `TypeError` or `ValueError` for an example that does not fit the model.
    """
    timing = None
    if machine is None:
        timing = _timing(placed, config)
        machine = recall(
            config.compute_device,
            Path(config.directories[0]) if placed.on_disk and config.directories else None,
            parallel.data,
        )
    returned = placed.returns_freed_memory and not placed.holes_bytes
    with freed_memory_returned() if timing is not None and returned else nullcontext():
        counted = count_step(model, example, machine, config.compute_dtype, timing)

    def simulated(placed: PlacedModel) -> Prediction:
        return Simulation(model, placed, config, counted, machine).run()

    found, gains = simulated(placed), {}
    for tier, budget in placed.budgets.by_tier.items():
        wider: dict[str, Any] = {FIELDS[tier]: budget + GIB}
        more = place_model(model, optimizer, replace(config, **wider), placed.kept, dry=True, parallel=parallel)
        saved = (
            0.0 if more.tiers == placed.tiers and placed.stays else found.step_seconds - simulated(more).step_seconds
        )
        gains[tier] = max(saved, 0.0)
    assumed = [f"its computation is by rates: {counted.untimed}"] if counted.untimed else []
    return replace(found, gains=gains, source=machine.source, assumed=(*assumed, *_assumed(optimizer, config)))


def _timing(placed: PlacedModel, config: Config) -> Timing | None:
    """On this machine, within the budget of the device and in memory that is free."""
    device, budget = config.compute_device, next(iter(placed.budgets.by_tier.values()))
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (here is None or here.type != device.type):
        return None
    return Timing(device, min(budget, available_memory(device)))


def _assumed(optimizer: torch.optim.Optimizer | None, config: Config) -> Iterator[str]:
    if not (optimizer is None or isinstance(optimizer, torch.optim.Adam)):
        yield f"updates are counted as those of AdamW: those of {type(optimizer).__name__} take other times"
    if config.activations in ("selective", "offload"):
        yield f"activations={config.activations!r} is counted as 'recompute'"
    if config.micro_batches > 1:
        yield f"the memory is that of one batch: with micro_batches={config.micro_batches} activations take less"
    if config.delayed_update:
        yield "updates are counted as those without delayed_update"
