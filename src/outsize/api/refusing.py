"""What `prepare` refuses before anything is opened or written."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from outsize.api.placing import PlacedModel
from outsize.checkpoint.values import NOT_HYPER, encode, inline
from outsize.config import Config
from outsize.optim.rules import Rule
from outsize.run.local import is_distributed
from outsize.run.paging import PagedParameter
from outsize.run.unit import Unit
from outsize.run.wrappers import known

logger = logging.getLogger("outsize")

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def warn_of_what_is_not_saved(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Not refused: the training is right, and weights can be exported."""
    try:
        encode(dict(rule.tried), "the optimizer's state", lambda *_: None)
        for at, group in enumerate(optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key not in NOT_HYPER}
            encode(hyper, f"optimizer.param_groups[{at}]", inline)
    except (TypeError, ValueError) as error:
        logger.warning("outsize.save will refuse this %s: %s", type(optimizer).__name__, str(error))


def refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        of_torch = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
        wrapper = next((name for name in of_torch if name in _WRAPPERS), None)
        if wrapper is not None:
            raise ValueError(
                f"{repr(name) if name else 'the model'} is wrapped in {wrapper}: do not wrap, outsize averages the "
                f"gradients over ranks and splits parameters itself; pass the plain module"
            )


def refuse_unseen(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse modules that would read or write, where nothing sees it, parameters that come and go."""
    moving = {id(param) for unit in units if not unit.resident for param in unit.parameters.values()}
    for name, module in model.named_modules():
        if not any(id(param) in moving for param in known(module.parameters())):
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


def check_devices(plan: PlacedModel, config: Config) -> None:
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
        plain = type(param) is nn.Parameter or is_distributed(param) or name in plan.inside
        if not plain and param.layout is torch.strided and not isinstance(param, PagedParameter):
            raise ValueError(f"parameter {name!r} is a {type(param).__name__}; outsize shards plain nn.Parameter only")


def check_tables(plan: PlacedModel, rule: Rule, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer updates what it is given: rows of tables, and whole parameters."""
    tables = {plan.layouts[index].slots[0].name for index in plan.tables}
    names = {id(param): name for name, param in plan.parameters.items()}
    for group in optimizer.param_groups:
        for param in known(group["params"]):
            name = names[id(param)]
            if name in tables:
                rule.check_rows(group, name, type(optimizer).__name__)
            elif rule.only_rows and param.requires_grad:
                raise ValueError(
                    f"{type(optimizer).__name__} updates only the rows of tables, embeddings with sparse=True, and "
                    f"parameter {name!r} is none; use outsize.optim.LazyAdamW, which updates both"
                )


def check_existing(plan: PlacedModel, optimizer: torch.optim.Optimizer | None) -> None:
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
