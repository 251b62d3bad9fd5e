"""What a model and an optimizer are, as arithmetic: names, shapes, units, layouts, bytes, tiers. Moves nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from outsize.api.ranks import agree_on_budgets, check_same, description, local_ranks
from outsize.checkpoint.folder import remove_leftovers
from outsize.config import Config
from outsize.move.codes import BLOCK
from outsize.move.comm import Ranks
from outsize.move.disk import dead_saves, free_bytes
from outsize.move.store import CODE_BYTES, DTYPES, MASTER_BYTES, OWN_BYTES, SCALE_BYTES, STATE_BYTES, TRAINED_DTYPES
from outsize.plan.layout import (
    ALIGN_ELEMENTS,
    PAGE_ELEMENTS,
    ModuleInfo,
    ParamInfo,
    UnitLayout,
    cut_units,
    lay_out,
    part_adapters,
    slice_of,
    tile_rows,
    with_whole_rows,
)
from outsize.plan.placement import (
    Budgets,
    UnitBytes,
    UnitTiers,
    UsedTogether,
    least_staging,
    place,
    with_free_staging,
)
from outsize.run.buffers import collecting_sizes
from outsize.run.embedding import tables_of
from outsize.run.local import is_distributed, is_repeated, largest_part, local
from outsize.run.mapped_files import FileRange, ranges_in_files
from outsize.run.tiles import can_use_tiles
from outsize.run.wrappers import Inner, inside, is_wrapper, known, known_parameters

HOST_MARGIN = 0.8
DEVICE_MARGIN = 0.7
DISK_MARGIN = 0.95
"""The share of what is free that is used when the user names no budget; the rest is for activations and others."""

CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where the kernel tells of this container's memory: (folder, limit, use, and the field of memory.stat with what is in
the use but free for the taking: cached files that nobody has read again)."""

MANY_ROWS = 1 << 18
"""Of an embedding: more than a language has words."""

TILES_A_UNIT = 4
GRADIENT_TILES = 3
ROWS_AT_WORK = PAGE_ELEMENTS
"""Of a parameter that is used in tiles: how many a unit of the usual size would hold; how many of the gradient are in
memory at once, the one that autograd has made, the same in fp32, and one on its way. Several ranks collect one more.
Of a table: what the plan counts for the rows at work, which are the batch's."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps: its per-element arrays, those of them that rest as 8-bit codes, and whether its update
    needs whole parameters."""

    arrays: tuple[str, ...] = ()
    compact: frozenset[str] = frozenset()
    whole: bool = False
    tables: bool = True
    """Whether tables have arrays too; else one value a row, in host memory."""

    def nbytes(self, dtype: str, numel: int) -> int:
        """Bytes at rest of a parameter's state, the rest of its master included."""
        codes = len(self.compact)
        compact = CODE_BYTES[dtype] * numel + SCALE_BYTES.get(dtype, 0) * -(-numel // BLOCK)
        exact = STATE_BYTES[dtype] * numel
        return codes * compact + (len(self.arrays) - codes) * exact + MASTER_BYTES.get(dtype, 0) * numel


@dataclass(frozen=True)
class PlacedModel:
    """Everything that `prepare` and `plan` decide before a byte moves."""

    infos: dict[str, ParamInfo]
    parameters: dict[str, nn.Parameter]
    layouts: tuple[UnitLayout, ...]
    unit_bytes: tuple[UnitBytes, ...]
    tiers: tuple[UnitTiers, ...]
    budgets: Budgets
    kept: Kept
    split: tuple[int, int] = (0, 1)
    """(this rank, the ranks over which each unit is split)."""
    together: UsedTogether = field(default_factory=dict)
    tile_rows: Mapping[int, int] = field(default_factory=dict)
    """By the index of a unit that is used in tiles: how many rows of its parameter a tile has of each rank."""
    in_files: Mapping[str, FileRange] = field(default_factory=dict)
    """By name: the parameters of units that are read in place where they rest on disk."""
    beside: Mapping[int, int] = field(default_factory=dict)
    """By the index of a unit of adapters: that of the unit they were cut from."""
    tables: frozenset[int] = frozenset()
    """The indices of the units of which only the rows that a batch touches move."""
    dense_tables: tuple[tuple[str, int, int], ...] = ()
    """(name, bytes of weights and states that each step moves, rows) of large embeddings without sparse=True."""
    tables_split: tuple[int, int] = (0, 1)
    """(this rank, the ranks over which each table is split, at every stage)."""
    inside: Mapping[str, Sequence[Inner]] = field(default_factory=dict)
    """By name: where the parameters are that wrappers have. See Note [Wrappers]."""

    @property
    def state_bytes(self) -> int:
        return sum(unit.total for unit in self.unit_bytes)

    def split_of(self, index: int) -> tuple[int, int]:
        """(this rank, the ranks over which the unit is split)."""
        return self.tables_split if index in self.tables else self.split


def place_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    kept: Kept,
    dry: bool = False,
    ranks: Ranks | None = None,
    size: int = 1,
) -> PlacedModel:
    """Cut, lay out and place the model. Raises `ValueError` for what cannot be trained or does not fit.

    A `dry` run trusts `disk_space`: the disk that it plans for may be another machine's. It may be one for `size`
    ranks that are not there.
    """
    parameters = dict(known_parameters(model))
    if not parameters:
        raise ValueError("the model has no parameters; there is nothing to prepare")
    with torch._C.DisableTorchFunctionSubclass():
        _refuse_shared_memory(parameters, dict(model.named_buffers()))
    names = {id(param): name for name, param in parameters.items()}
    inner: dict[str, list[Inner]] = {}
    for name, param in model.named_parameters():
        for each in _inside(name, param, config) if is_wrapper(param) else ():
            inner.setdefault(names[id(each.tensor)], []).append(each)
    wished = frozenset(name for name, param in parameters.items() if dry and param.requires_grad)
    optimized = wished if optimizer is None else _optimized(optimizer, names)
    stated = set() if optimizer is None else {id(param) for param, state in optimizer.state.items() if state}
    infos = {
        name: _inner_info(name, param)
        if name in inner
        else _info(name, param, config, name in optimized and (param.requires_grad or id(param) in stated))
        for name, param in parameters.items()
    }
    budgets = find_budgets(config, dry)
    shared = ranks is not None or size > 1
    tables_split = 0, size
    if ranks is not None:
        check_same(ranks.everyone(), "what they prepare", description(parameters, infos, optimizer, config))
        budgets = agree_on_budgets(budgets, ranks)
        tables_split = ranks.rank, ranks.size
    rank, size = tables_split if config.stage else (0, 1)
    if budgets.disk is not None or budgets.device is not None:
        budgets = replace(budgets, least_staging=least_staging(element_bytes(infos, kept)))
    _refuse_what_cannot_be_split(config, kept, size, any(not is_repeated(param) for param in parameters.values()))
    tree = _tree("", model, names, set())
    largest = {name: replace(info, shape=largest_part(parameters[name])) for name, info in infos.items()}
    tables = tables_of(model)
    _refuse_tables(tables, infos, config, kept, ranks, shared)
    # Alike, whatever part is here.
    cuts = cut_units(tree, largest, budgets.unit_bytes, _chosen_units(model, config), tables)
    cuts, beside = part_adapters(cuts, largest)
    layouts = lay_out(cuts, infos, size, align=PAGE_ELEMENTS if kept.whole else ALIGN_ELEMENTS)
    by_rows = {layout.index for layout in layouts if layout.slots[0].name in tables}
    layouts = tuple(with_whole_rows(each, tables_split[1]) if each.index in by_rows else each for each in layouts)
    in_files = _in_files(parameters, infos, [each for each in layouts if each.index not in by_rows], config, ranks)
    graded = [any(parameters[slot.name].requires_grad for slot in layout.slots) for layout in layouts]
    sizes = tuple(
        replace(
            _bytes_of(layout, infos, kept, config, size, shared and each), in_place=layout.slots[0].name in in_files
        )
        for layout, each in zip(layouts, graded, strict=True)
    )
    wanted = {"params": config.params, "grads": config.grads, "states": config.states}
    if size > 1 and config.stage < 3:
        wanted["params"] = "device"
    together = _used_together(model, names, layouts)
    sizes = tuple(
        _bytes_of_table(layouts[at], infos, kept, tables_split[1]) if at in by_rows else each
        for at, each in enumerate(sizes)
    )
    if not kept.tables:
        budgets = replace(budgets, host=budgets.host - _row_values(layouts, by_rows))
    rows: dict[int, int] = {}
    elsewhere = budgets.disk is not None or budgets.device is not None
    apart = kept.whole or (shared and config.unused == "sync")  # whole, or not by all ranks at once
    if config.tiles and elsewhere and not (apart or "device" in (wanted["params"], config.grads)):
        in_tiles = _bear_tiles(model)
        for index, layout in enumerate(layouts):
            slot, wide = layout.slots[0], STATE_BYTES.get(layout.slots[0].dtype, 0)
            if sizes[index].working > budgets.computing[1] and len(layout.slots) == 1 and slot.name in in_tiles:
                count = tile_rows(slot.shape, wide, budgets.unit_bytes // TILES_A_UNIT, size)
                tile = count * size * (slot.numel // slot.shape[0])
                working = tile * (2 * OWN_BYTES[slot.dtype] + graded[index] * (GRADIENT_TILES + shared) * wide)
                if working < sizes[index].working:
                    rows[index], padded = count, with_whole_rows(layout, size)
                    nbytes = _bytes_of(padded, infos, kept, config, size, shared and graded[index])
                    nbytes = replace(nbytes, tiles=working, in_place=sizes[index].in_place)
                    layouts = (*layouts[:index], padded, *layouts[index + 1 :])
                    sizes = (*sizes[:index], nbytes, *sizes[index + 1 :])
    tiers = place(sizes, budgets, wanted, together)
    budgets = with_free_staging(sizes, budgets, wanted, tiers, together)
    rows = {index: count for index, count in rows.items() if tiers[index].params != "device"}  # all of it fits
    rows.update((index, layouts[index].slots[0].shape[0]) for index in by_rows)
    tiers = tuple(replace(each, grads="device") if at in by_rows else each for at, each in enumerate(tiers))
    tabled, split = frozenset(by_rows), (rank, size)
    return PlacedModel(
        infos,
        parameters,
        layouts,
        sizes,
        tiers,
        budgets,
        kept,
        split,
        together,
        rows,
        in_files,
        beside,
        tabled,
        _dense_tables(model, names, infos, kept),
        tables_split,
        inner,
    )


def _in_files(
    parameters: Mapping[str, nn.Parameter],
    infos: Mapping[str, ParamInfo],
    layouts: Sequence[UnitLayout],
    config: Config,
    ranks: Ranks | None,
) -> dict[str, FileRange]:
    """Where the parameters lie of those frozen units all of whose values can be read from files of others, in the dtype
    in which they are used, on every rank."""
    if config.params not in ("auto", "disk"):
        return {}
    frozen = {
        name: param
        for name, param in parameters.items()
        if not infos[name].trainable and DTYPE_NAMES[param.dtype] == infos[name].dtype and not is_distributed(param)
    }
    with torch._C.DisableTorchFunctionSubclass():
        found = ranges_in_files(frozen)
    flags = [all(slot.name in found for slot in layout.slots) for layout in layouts]
    whole = torch.tensor(flags, dtype=torch.int32, device="cpu")
    for group in ranks.everyone() if ranks is not None else ():
        group.combine(whole, "prepare", "min")
    return {
        slot.name: found[slot.name]
        for layout, each in zip(layouts, whole.tolist(), strict=True)
        for slot in layout.slots
        if each
    }


def _dense_tables(
    model: nn.Module, names: Mapping[int, str], infos: Mapping[str, ParamInfo], kept: Kept
) -> tuple[tuple[str, int, int], ...]:
    found = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not module.sparse:
            info = infos.get(names.get(id(module._parameters.get("weight")), ""))
            if info is not None and info.trainable and info.shape[0] >= MANY_ROWS:
                found[info.name] = 2 * (info.nbytes + kept.nbytes(info.dtype, info.numel)), info.shape[0]
    return tuple((name, *each) for name, each in found.items())


def _bytes_of_table(whole: UnitLayout, infos: Mapping[str, ParamInfo], kept: Kept, ranks: int) -> UnitBytes:
    """What rests on one rank, the first, which no other has more rows than."""
    layout = slice_of(whole, 0, ranks)
    (slot,) = layout.slots
    kept = kept if kept.tables else replace(kept, arrays=(), compact=frozenset())
    states = kept.nbytes(slot.dtype, slot.numel) if infos[slot.name].trainable else 0
    return UnitBytes(layout.name or "model", layout.param_bytes, 0, states, tiles=ROWS_AT_WORK)


def _row_values(layouts: Sequence[UnitLayout], by_rows: Collection[int]) -> int:
    """Bytes of one value for each row of the tables."""
    slots = [layouts[index].slots[0] for index in by_rows]
    return sum(slot.shape[0] * STATE_BYTES[slot.dtype] for slot in slots)


def _refuse_tables(
    tables: Collection[str],
    infos: Mapping[str, ParamInfo],
    config: Config,
    kept: Kept,
    ranks: Ranks | None,
    shared: bool,
) -> None:
    """Raise `ValueError` for what tables that are used by rows do not serve. `shared`: on several ranks."""
    dense = "use sparse=False"
    what = {
        f"delayed_update={config.delayed_update}": (config.delayed_update is not False, dense),
        "state_format='compact'": (config.state_format == "compact", dense),
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
        "an optimizer that keeps one value a row in memory (RowwiseAdagrad) on several ranks": (
            shared and not kept.tables,
            "use torch.optim.Adagrad or outsize.optim.LazyAdamW, or sparse=False",
        ),
    }
    found = next(((words, remedy) for words, (is_so, remedy) in what.items() if is_so), None)
    if tables and found is not None:
        raise ValueError(
            f"table {min(tables)!r} is an embedding with sparse=True, and its rows cannot be moved alone with "
            f"{found[0]}; {found[1]}"
        )


def _bear_tiles(model: nn.Module) -> set[str]:
    """The parameters that only modules use which may take some of their rows at a time. Each is a unit of its own where
    it is large."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), []).append(module)
    return {
        name
        for name, param in model.named_parameters()
        if not is_distributed(param) and all(can_use_tiles(module, param) for module in users[id(param)])
    }


def element_bytes(infos: dict[str, ParamInfo], kept: Kept) -> int:
    """The most that one element of any parameter takes in staging: its state, gradient and weight."""
    dtypes = {info.dtype for info in infos.values()}
    return max(
        STATE_BYTES.get(each, 0) * (len(kept.arrays) + 1) + MASTER_BYTES.get(each, 0) + OWN_BYTES[each]
        for each in dtypes
    )


def _used_together(model: nn.Module, names: dict[int, str], layouts: tuple[UnitLayout, ...]) -> UsedTogether:
    """The modules whose forward uses several units for its own parameters. See Note [What one forward uses]."""
    home = {slot.name: layout.index for layout in layouts for slot in layout.slots}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            continue
        own = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))  # it calls no child of its own
        units = sorted({home[names[id(param)]] for param in known(own)})
        if len(units) > 1:
            found[name] = tuple(units)
    return found


def _refuse_what_cannot_be_split(config: Config, kept: Kept, ranks: int, in_parts: bool) -> None:
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


def _info(name: str, param: nn.Parameter, config: Config, trainable: bool) -> ParamInfo:
    if isinstance(param, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise ValueError(f"parameter {name!r} of a lazy module has no shape yet; run one forward before prepare")
    if param.dtype not in TRAINED_DTYPES.values():
        raise ValueError(
            f"parameter {name!r} is a {type(param).__name__} of {param.dtype}; outsize trains float32, bfloat16, "
            f"float16 and float64 parameters, and moves quantized weights of torchao. Register other values as buffers"
        )
    if is_distributed(param) and config.compute_dtype not in (None, param.dtype):
        raise ValueError(
            f"parameter {name!r} is a DTensor of {param.dtype} and compute_dtype is {config.compute_dtype}: cast the "
            f"model before parallelize_module"
        )
    dtype = DTYPE_NAMES[config.compute_dtype or param.dtype]
    return ParamInfo(name, tuple(local(param).shape), dtype, OWN_BYTES[dtype], trainable)


def _inside(name: str, wrapper: nn.Parameter, config: Config) -> Iterator[Inner]:
    """The tensors inside a quantized weight. Raises `ValueError` where they cannot rest as they are."""
    what = f"parameter {name!r} is a {type(wrapper).__name__}, which wraps other tensors as quantized weights do"
    if wrapper.requires_grad:
        raise ValueError(
            f"{what}. outsize moves such a weight and does not train it: call `requires_grad_(False)` on it, and train "
            f"adapters beside it"
        )
    if config.compute_dtype not in (None, wrapper.dtype):
        raise ValueError(
            f"{what}. It computes in {wrapper.dtype}, and compute_dtype is {config.compute_dtype}: cast the model "
            f"before it is quantized"
        )
    for own, each in inside(name, wrapper):
        tensor = each.tensor
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"{what}. Its tensor {own!r} ({tensor.dtype}, {tensor.layout}, strides {tuple(tensor.stride())}) "
                f"cannot rest: outsize moves contiguous tensors of {', '.join(DTYPES)}. Choose another format, or "
                f"leave this module out of the quantization"
            )
        yield each


def _inner_info(name: str, tensor: torch.Tensor) -> ParamInfo:
    dtype = DTYPE_NAMES[tensor.dtype]
    return ParamInfo(name, tuple(tensor.shape), dtype, OWN_BYTES[dtype], trainable=False)


def _refuse_shared_memory(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for a trainable parameter whose memory another tensor of the model, or itself, has too.

    In torch a write to one shows in the other; outsize gives each parameter memory of its own.
    """
    spans = []
    for name, tensor in {**buffers, **parameters}.items():
        found = local(tensor)
        if found.layout is torch.strided and found.device.type != "meta" and found.numel():
            spans.append((found.data_ptr(), found.data_ptr() + _reach(found) * found.itemsize, name, found))
            if name in parameters and torch._debug_has_internal_overlap(found) == 1:
                raise ValueError(
                    f"parameter {name!r} of shape {tuple(found.shape)} was made by expand: several of its elements are "
                    f"one value in memory, which torch refuses to update. Use `nn.Parameter(value.clone())`, or expand "
                    f"a smaller parameter in forward"
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


def _reach(tensor: torch.Tensor) -> int:
    """Elements of memory from the first to the last of a strided tensor."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: columns of one matrix have none."""
    first = min(one.data_ptr(), other.data_ptr())
    size = one.itemsize
    starts = [each.data_ptr() - first for each in (one, other)]
    if (one.is_contiguous() and other.is_contiguous()) or other.itemsize != size or any(at % size for at in starts):
        return True
    elements = max(at // size + _reach(each) for at, each in zip(starts, (one, other), strict=True))
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


def _optimized(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> frozenset[str]:
    found = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if is_wrapper(param):
                continue
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(param.shape)} that is "
                    f"not in the model; make the optimizer from model.parameters() of this model"
                )
            found.add(names[id(param)])
    return frozenset(found)


def _tree(name: str, module: nn.Module, names: dict[int, str], seen: set[int]) -> ModuleInfo:
    seen.add(id(module))
    own = tuple(names[id(param)] for param in known(module._parameters.values()))
    children = tuple(
        _tree(f"{name}.{child}" if name else child, each, names, seen)
        for child, each in module.named_children()
        if id(each) not in seen
    )
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    return ModuleInfo(name, own, children, is_list)


def _chosen_units(model: nn.Module, config: Config) -> frozenset[str] | None:
    if config.units is None:
        return None
    assert isinstance(config.units, tuple)
    modules = dict(model.named_modules())
    chosen: set[str] = set()
    for entry in config.units:
        if isinstance(entry, str):
            kinds = {name for name, module in modules.items() if type(module).__name__ == entry}
            found = {entry} if entry in modules else kinds
        else:
            found = {name for name, module in modules.items() if isinstance(module, entry)}
        if not found:
            label = entry if isinstance(entry, str) else entry.__name__
            raise ValueError(f"units names {label!r}, but no module of the model has that name or class")
        chosen |= found
    return frozenset(chosen)


def _bytes_of(
    whole: UnitLayout, infos: dict[str, ParamInfo], kept: Kept, config: Config, ranks: int = 1, collects: bool = False
) -> UnitBytes:
    """What rests on one rank. The ranks have equal parts of each segment. `collects`:
    gradients are reduced over ranks."""
    layout = slice_of(whole, 0, ranks)
    trained = [slot for slot in layout.slots if infos[slot.name].trainable]
    graded = [segment for segment in layout.segments if segment.trainable]
    copies = 2 if config.delayed_update else 1  # those of two steps
    grads = sum(segment.numel * segment.itemsize for segment in graded) * copies
    states = sum(kept.nbytes(slot.dtype, slot.numel) for slot in trained)
    gathered = whole.param_bytes if ranks > 1 and config.stage == 3 else 0
    params = layout.param_bytes if gathered or ranks == 1 else whole.param_bytes
    collected = sum(collecting_sizes(whole, config.reduce_dtype)) if collects else 0
    wider = {dtype: nbytes - OWN_BYTES[dtype] for dtype, nbytes in STATE_BYTES.items()}
    sums = sum(segment.numel * wider[segment.dtype] for segment in graded) * copies
    if config.update == "backward":  # each backward's gradients are used up at once
        sums = 0
    return UnitBytes(layout.name or "model", params, grads, states, gathered + collected, collected, sums)


def find_budgets(config: Config, dry: bool = False) -> Budgets:
    """The budgets in bytes; what the user did not name follows from what is free."""
    here = local_ranks()
    host = config.host_memory if config.host_memory is not None else int(available_memory() * HOST_MARGIN) // here
    device = config.device_memory
    if config.compute_device.type != "cpu" and device is None:
        free, _ = torch.get_device_module(config.compute_device).mem_get_info(config.compute_device)
        device = int(free * DEVICE_MARGIN)
    if config.compute_device.type == "cpu":
        host = min(int(host), int(device)) if device is not None else host
        device = None
    disk = None
    if dry and config.disk_space is not None:
        assert isinstance(config.disk_space, int)
        disk = config.disk_space
    elif config.directories:
        for directory in config.directories:
            for saved_into in dead_saves(directory):  # half a checkpoint holds the space of the run's files
                remove_leftovers(saved_into)
        disk = int(free_bytes(config.directories) * DISK_MARGIN) // here
        if config.disk_space is not None:
            assert isinstance(config.disk_space, int)
            disk = min(disk, config.disk_space)
    return Budgets(int(host), None if device is None else int(device), disk)


def available_memory() -> int:
    """Bytes of host memory that a new process could take, within the control group's limit."""
    free = _meminfo_available()
    for limit, used in _control_group():
        free = min(free, max(limit - used, 0))
    return free


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group() -> Iterator[tuple[int, int]]:
    """(the limit, what is used of it) in bytes."""
    for folder, limit, used, inactive in CONTROL_GROUPS:
        try:
            bound, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):
            continue
        yield bound, max(taken - _statistic(folder / "memory.stat", inactive), 0)


def _statistic(path: Path, name: str) -> int:
    try:
        fields = [line.split() for line in path.read_text().splitlines()]
        return next((int(field[1]) for field in fields if field[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
