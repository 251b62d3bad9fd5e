"""What `prepare` refuses before anything is opened or written."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from outsize.api.placed import Kept, PlacedModel
from outsize.checkpoint.values import encode, inline
from outsize.config import Config
from outsize.move.comm import Ranks
from outsize.optim.rules import Rule
from outsize.optim.worker import NO_OPTIONS
from outsize.planning.layout import ParamInfo, extent
from outsize.run.local import is_distributed, local
from outsize.run.paging import PagedParameter
from outsize.run.unit import Unit
from outsize.run.wrappers import known

logger = logging.getLogger("outsize")

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def warn_of_what_is_not_saved(optimizer: torch.optim.Optimizer, rule: Rule) -> None:
    """Not refused: the training is right, and weights can be exported."""
    try:
        check_state_dict(optimizer)
        encode(dict(rule.tried), "the optimizer's state", lambda *_: None)
        for at, group in enumerate(optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            encode(hyper, f"optimizer.param_groups[{at}]", inline)
    except (TypeError, ValueError) as error:
        logger.warning("outsize.save will refuse this %s: %s", type(optimizer).__name__, str(error))


def check_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` where the class puts more into its state dict than groups and the state of parameters: a
    checkpoint would not have it, and a run that goes on from there would be another."""
    kind = type(optimizer)
    if kind.state_dict is torch.optim.Optimizer.state_dict:
        return
    empty: Any = object.__new__(kind)
    vars(empty).update(vars(optimizer), state={}, param_groups=[])  # no values are read
    try:
        beside = sorted(map(str, kind.state_dict(empty).keys() - {"param_groups", "state"}))
    except Exception:  # it needs parameters: nothing can be told
        return
    if beside:
        raise ValueError(
            f"the state dict of this {kind.__name__} also has {beside}, which outsize.save does not store: "
            f"keep them in its param_groups"
        )


def refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        of_torch = (kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
        wrapper = next((name for name in of_torch if name in _WRAPPERS), None)
        if wrapper is not None:
            raise ValueError(
                f"{repr(name) if name else 'the model'} is wrapped in {wrapper}: do not wrap, outsize averages the "
                f"gradients over ranks and splits parameters itself; pass the plain module"
            )


def check_stages(
    stages: Ranks, model: nn.Module, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse stages of a pipeline that have a parameter in common, by its name, or that train in other ways. The names
    in a list of layers are places in this list, and no names: those stages train, and each must be saved as a model of
    its own."""
    said = {"optimizer": "none" if optimizer is None else type(optimizer).__name__}
    for at, group in enumerate(() if optimizer is None else optimizer.param_groups):
        said |= {f"{key} of group {at}": repr(value) for key, value in group.items() if key not in NO_OPTIONS}
    trains = optimizer is None or any(param.requires_grad for param in parameters.values())
    by_place = isinstance(model, (nn.Sequential, nn.ModuleList))
    every = stages.collect((said, trains, () if by_place else list(parameters)), "prepare")
    for rank, (other, trained, _) in zip(stages.members, every, strict=True):
        if not trained:
            raise ValueError(
                f"the pipeline stage of rank {rank} has no trainable parameter: give it a layer that trains, or cut "
                f"the model into other stages"
            )
        for key in (*every[0][0], *other):
            first, own = every[0][0].get(key, "missing"), other.get(key, "missing")
            if first != own:
                raise ValueError(
                    f"the optimizers of the pipeline stages differ: {key} is {first} on rank {stages.members[0]} and "
                    f"{own} on rank {rank}. Give each stage the same optimizer with the same groups and options; a "
                    f"group may be empty"
                )
    owners: dict[str, int] = {}
    for rank, (_, _, names) in zip(stages.members, every, strict=True):
        for name in names:
            if owners.setdefault(name, rank) != rank:
                raise ValueError(
                    f"the pipeline stages of ranks {owners[name]} and {rank} both have the parameter {name!r}. A "
                    f"parameter that two stages share needs a rank that has both stages (ScheduleDualPipeV), "
                    f"and layers need the names that they have in the whole model"
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
                f"module {(name or type(module).__name__)!r} has max_norm={module.max_norm}, which writes its weight "
                f"in every forward; set max_norm=None and renormalize after step() inside "
                f"outsize.gathered(weight, modify=True)"
            )


def check_devices(plan: PlacedModel, config: Config) -> None:
    for name, param in plan.parameters.items():
        if param.device.type == "meta":
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values; build the model under outsize.init "
                f"instead, or materialize it first (outsize.plan works on meta models)"
            )
        if param.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode(), so torch does not count the writes to it; "
                f"build the model outside of it, or under torch.no_grad()"
            )
        # A launcher's script may have put the model on the first accelerator, which is not that of this rank.
        same = param.device.type if "LOCAL_RANK" in os.environ else param.device
        if param.device.type != "cpu" and same not in (config.compute_device, config.compute_device.type):
            raise ValueError(
                f"parameter {name!r} is on {param.device} but device is {config.compute_device}; move the model to the "
                f"CPU or pass device={str(param.device)!r}"
            )
        plain = type(param) is nn.Parameter or is_distributed(param) or name in plan.inside
        if not plain and param.layout is torch.strided and not isinstance(param, PagedParameter):
            raise ValueError(
                f"parameter {name!r} is of the class {type(param).__name__}; outsize takes plain ones, "
                f"nn.Parameter(param.detach())"
            )


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
            raise ValueError(
                f"the gradient of {name!r} is sparse ({param.grad.layout}), and cannot be taken over; call "
                f"optimizer.zero_grad() before outsize.prepare"
            )
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key in plan.kept.arrays:
            value = state.get(key)
            if isinstance(value, torch.Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"the optimizer's state {key!r} of {name!r} has the shape {tuple(value.shape)}, the parameter "
                    f"{tuple(param.shape)}; load the state of the same model or start without one"
                )


def _is_of_processes(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory that processes share, which is no file that the user has mapped."""
    if tensor.device.type != "cpu" or not tensor.is_shared() or tensor.untyped_storage().filename is not None:
        return False  # torch calls every mapping shared, and has the file's name only where it is
    with suppress(OSError), open("/proc/self/maps") as maps:
        for address, kind, *_ in map(str.split, maps):
            first, end = (int(each, 16) for each in address.split("-"))
            if first <= tensor.data_ptr() < end:
                return kind[3] == "s"
    return False


def refuse_shared_memory(
    parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], trains_alone: bool
) -> None:
    """Raise `ValueError` for a trainable parameter whose memory another process, another tensor of the model, or itself
    has too. `trains_alone`: no other process is a rank of this job, to which `torch.multiprocessing` has handed it.

    In torch a write to one shows in the other; outsize gives each parameter memory of its own.
    """
    spans = []
    for name, tensor in {**buffers, **parameters}.items():
        found = local(tensor)
        if found.layout is torch.strided and found.device.type != "meta" and found.numel():
            spans.append(
                (found.data_ptr(), found.data_ptr() + extent(found.shape, found.stride()) * found.itemsize, name, found)
            )
            if name in parameters and torch._debug_has_internal_overlap(found) == 1:
                raise ValueError(
                    f"parameter {name!r} of shape {tuple(found.shape)} was made by expand: several of its elements are "
                    f"one value in memory, which torch refuses to update. Use `nn.Parameter(value.clone())`, or expand "
                    f"a smaller parameter in forward"
                )
            if name in parameters and tensor.requires_grad and trains_alone and _is_of_processes(found):
                raise ValueError(
                    f"parameter {name!r} lies in memory that processes share (model.share_memory(), or a model that "
                    f"came from another process), and the others would not see what this one trains. Prepare "
                    f"copy.deepcopy(model). To train in several processes start one a rank, with torchrun: outsize "
                    f"averages the gradients over them"
                )
    spans.sort(key=lambda each: each[:2])
    open_ends: list[tuple[int, str, torch.Tensor]] = []
    for start, end, name, tensor in spans:
        open_ends = [each for each in open_ends if each[0] > start]
        for _, other, neighbour in open_ends:
            trained = any(each in parameters and parameters[each].requires_grad for each in (name, other))
            if trained and _meet(tensor, neighbour):
                raise ValueError(_sharing_error(other, name, parameters))
        open_ends.append((end, name, tensor))


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: columns of one matrix have none."""
    first = min(one.data_ptr(), other.data_ptr())
    size = one.itemsize
    starts = [each.data_ptr() - first for each in (one, other)]
    if (one.is_contiguous() and other.is_contiguous()) or other.itemsize != size or any(at % size for at in starts):
        return True
    elements = max(
        at // size + extent(each.shape, each.stride()) for at, each in zip(starts, (one, other), strict=True)
    )
    taken = torch.zeros(elements, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), starts[0] // size).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), starts[1] // size).any())


def _sharing_error(one: str, other: str, parameters: Mapping[str, torch.Tensor]) -> str:
    if one not in parameters or other not in parameters:
        param, buffer = (one, other) if one in parameters else (other, one)
        return (
            f"buffer {buffer!r} is a view of parameter {param!r}, and would not follow it: compute the view in "
            f"forward, or register a copy, `{param}.detach().clone()`"
        )
    return (
        f"parameters {one!r} and {other!r} share memory and are two objects: torch would update the same values twice "
        f"a step. Tie them, `{other} = {one}`, so that both names are one parameter, or clone one of them"
    )


def refuse_tables(
    tables: Collection[str], infos: Mapping[str, ParamInfo], config: Config, ranks: Ranks | None, shared: bool
) -> None:
    """Raise `ValueError` for what tables that are used by rows do not serve. `shared`: on several ranks."""
    dense = "use sparse=False"
    without = "leave it out, or use sparse=False"
    what = {
        f"delayed_update={config.delayed_update}": (config.delayed_update is not False, without),
        "state_format='compact'": (config.state_format == "compact", without),
        "an empty table": (any(not infos[name].numel for name in tables), dense),
        "tensor parallelism": (ranks is not None and ranks.tensor is not None, dense),
        "copies of the model": (
            ranks is not None and ranks.copies is not None,
            "pass a mesh of one dimension, or use sparse=False",
        ),
        "unused='sync' on several ranks": (
            shared and config.unused == "sync",
            "use unused='error', with which every rank uses the same modules, or sparse=False",
        ),
        "float16 on several ranks, each of which may find another overflow": (
            shared and any(infos[name].dtype == "float16" for name in tables),
            "use bfloat16 or float32, or sparse=False",
        ),
    }
    found = next(((words, remedy) for words, (is_so, remedy) in what.items() if is_so), None)
    if tables and found is not None:
        raise ValueError(
            f"table {min(tables)!r} is an embedding with sparse=True, and its rows cannot be moved alone with "
            f"{found[0]}; {found[1]}"
        )


def refuse_what_cannot_be_split(config: Config, kept: Kept, ranks: int, in_parts: bool) -> None:
    """Raise `ValueError` with the reason for what makes no sense where units are split over several ranks, or
    parameters are `in_parts` by tensor parallelism."""
    if kept.whole and in_parts:
        raise ValueError(
            "this optimizer's update needs whole parameters, which tensor parallelism has split; use an elementwise "
            "optimizer (AdamW, Adam, SGD, Adagrad, Lion)"
        )
    if ranks == 1:
        return
    if kept.whole:
        raise ValueError(
            f"this optimizer's update needs whole parameters, which stage {config.stage} splits over {ranks} ranks; "
            f"use stage=0, or an elementwise optimizer (AdamW, Adam, SGD, Adagrad, Lion)"
        )
    if config.stage < 3 and config.params in ("host", "disk"):
        raise ValueError(
            f"stage={config.stage} keeps whole parameters on every rank, and params={config.params!r} would keep "
            f"{ranks} copies of them there; use stage=3, where each rank keeps and moves one part of {ranks}"
        )
