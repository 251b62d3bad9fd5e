"""The part of a model that one rank of a three-dimensional job has, for plans: no values are read, none are made."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.api.ranks import dimensions, names_of, split_over
from outsize.planning.parallel import Parallel
from outsize.run.local import is_distributed

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
MATRICES = {"Linear", "Embedding", "Conv1D"}
"""Modules whose weight tensor parallelism splits."""


def shape_of(mesh: Any, params: Iterable[torch.Tensor] = ()) -> Parallel:
    """A mesh of ranks that need not be there: a DeviceMesh, or the size of each dimension by name."""
    if hasattr(mesh, "mesh_dim_names"):
        mesh = dict(zip(names_of(mesh), mesh.mesh.shape, strict=True))
    if not isinstance(mesh, Mapping) or not mesh:
        raise TypeError(f"mesh is {mesh!r}; it must be a DeviceMesh or sizes by name, such as {{'pp': 4, 'dp': 8}}")
    bad = {name: size for name, size in mesh.items() if type(size) is not int or size < 1}
    if bad:
        raise ValueError(f"mesh has {bad}; each dimension has an integer size of at least 1")
    sizes = list(mesh.values())
    stages, data, tensor = ([sizes[at] for at in found] for found in dimensions(list(mesh), split_over(params)))
    *copies, split = data or [1]
    return Parallel(split, *(copies or [1]), *(tensor or [1]), *(stages or [1]))


def part_of_a_rank(model: nn.Module, parallel: Parallel) -> tuple[nn.Module, Parallel]:
    """The largest stage, its matrices cut as tensor parallelism cuts them; what the mesh is for it. The modules are
    shallow copies that share all else with the model's."""
    part, tensor = model, parallel.tensor
    path, layers = _layers_of(model)
    if parallel.stages > 1:
        if len(layers) < parallel.stages:
            raise ValueError(
                f"mesh has {parallel.stages} stages, and the model's longest list of layers "
                f"({'.'.join(path) or type(model).__name__}) has {len(layers)}: a stage needs a layer"
            )
        parts = [_stage(model, path, number, parallel.stages) for number in range(parallel.stages)]
        sizes = [sum(param.numel() for param in each.parameters()) for each in parts]
        number = sizes.index(max(sizes))
        part = parts[number]
        parallel = replace(parallel, stage=number)
    count = sum(at * parallel.stages // len(layers) == parallel.stage for at in range(len(layers)))
    if tensor > 1 and not any(map(is_distributed, model.parameters())):
        part = _cut(part, tensor, {})
    return part, replace(parallel, layers=count)


def width_of(model: nn.Module) -> int:
    """Elements of a token between two layers: those of a layer's first vector, its first norm."""
    _, layers = _layers_of(model)
    shapes = [param.shape for layer in layers[:1] for param in layer.parameters()]
    vectors = [shape[0] for shape in shapes if len(shape) == 1]
    return vectors[0] if vectors else max((shape[-1] for shape in shapes if shape), default=0)


def _layers_of(model: nn.Module) -> tuple[Sequence[str], Sequence[nn.Module]]:
    """The list of modules with most parameters, and its name in the model."""

    def numel(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters())

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, LISTS) and len(module) > 1]
    if not lists:
        return [], []
    name, found = max(lists, key=lambda each: numel(each[1]))  # the outermost of equals
    return [each for each in name.split(".") if each], list(found.children())


def _stage(module: nn.Module, path: Sequence[str], number: int, stages: int) -> nn.Module:
    """What is before the layers goes to the first stage, what is behind them to the last."""
    first, last = number == 0, number == stages - 1
    children: dict[str, Any] = dict(module._modules)
    places = enumerate(children.items())
    if path:
        here = list(children).index(path[0])
        kept = {
            name: _stage(child, path[1:], number, stages) if at == here else child
            for at, (name, child) in places
            if at == here or (first if at < here else last)
        }
    else:
        kept = {name: each for at, (name, each) in places if at * stages // len(children) == number}
    return _with(module, kept, module._parameters if first else {})


def _cut(module: nn.Module, ranks: int, done: dict[int, Any]) -> nn.Module:
    """`done`: parameters by what they were cut from, so that tied ones stay one."""
    if id(module) not in done:
        children = {name: each and _cut(each, ranks, done) for name, each in module._modules.items()}
        params = dict(module._parameters)
        weight = params.get("weight")
        if weight is not None and type(module).__name__ in MATRICES:
            shape = (-(-weight.shape[0] // ranks), *weight.shape[1:])
            part = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"), weight.requires_grad)
            params["weight"] = done.setdefault(id(weight), part)
        done[id(module)] = _with(module, children, params)
    made: nn.Module = done[id(module)]
    return made


def _with(module: nn.Module, children: Mapping[str, Any], params: Mapping[str, Any]) -> nn.Module:
    made = copy.copy(module)
    vars(made)["_modules"], vars(made)["_parameters"] = dict(children), dict(params)
    return made
