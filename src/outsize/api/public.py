"""The functions of the public API that work on a prepared model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from outsize.api.assemble import Prepared, assemble, prepared_of
from outsize.api.ranks import know_place, take_accelerator
from outsize.api.views import MemoryReport, memory_of
from outsize.config import Config, make_config
from outsize.run.paging import page_in

ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare(
    model: ModelT, optimizer: torch.optim.Optimizer | None = None, config: Config | None = None, **fields: Any
) -> tuple[ModelT, torch.optim.Optimizer | None]:
    """Make the model train within the budgets, in place; returns the same two objects.

    Parameters keep their identity, shape and dtype (`compute_dtype` casts them); their values, gradients and optimizer
    state move to their tiers (ZeRO-Infinity, Rajbhandari et al. 2021, section 5). `optimizer` may be None for a model
    that is only run. Fields are those of `Config`; keywords override `config`.

    Raises `ValueError` or `TypeError` before anything is moved: for values that make no sense, an optimizer over other
    parameters, parameters that cannot be trained, budgets that do not hold the model, a model that is already prepared.
    Raises `OSError` with the path for a disk directory that cannot be used.
    """
    know_place()
    made = make_config(config, fields)
    made = replace(made, device=made.compute_device)
    check_arguments(model, optimizer)
    for name, param in model.named_parameters():
        if prepared_of(param) is not None:
            raise ValueError(f"the model is already prepared (parameter {name!r}); prepare it once")
    take_accelerator(made.compute_device)
    assemble(model, optimizer, made, page_in)
    return model, optimizer


def check_arguments(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(optimizer, (list, tuple)):
        raise TypeError("a model has one optimizer; give it several parameter groups in place of several optimizers")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")


def require(model: nn.Module) -> Prepared:
    """The prepared model behind `model` or one of its sub-modules. Raises `ValueError` if it is not prepared."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for param in model.parameters():
        prepared = prepared_of(param)
        if prepared is not None:
            return prepared
    raise ValueError("the model is not prepared; call outsize.prepare(model, optimizer) first")


def its_turn(model: nn.Module, verb: str) -> AbstractContextManager[None]:
    """Around what a function of the public API does with a prepared model: one thread at a time."""
    return require(model).engine.owner.turn(f"outsize.{verb}")


def memory(model: nn.Module) -> MemoryReport:
    """Bytes per tier and kind, now and at their peak; waits, update time and disk traffic since `prepare`."""
    return memory_of(require(model))
