"""What a model and an optimizer are, as arithmetic: names, shapes, units, layouts, bytes, tiers. Moves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.api.budgets import find_budgets
from outsize.api.modules import layers_of
from outsize.api.placed import Kept, PlacedModel
from outsize.api.ranks import agree_on_budgets, check_same, description, on_all
from outsize.api.refusing import refuse_shared_memory, refuse_tables, refuse_what_cannot_be_split
from outsize.config import Config
from outsize.move.comm import Ranks, combined
from outsize.move.store import DTYPES, OWN_BYTES, STATE_BYTES, TRAINED_DTYPES
from outsize.planning.errors import BudgetError
from outsize.planning.layout import (
    ALIGN_ELEMENTS,
    PAGE_ELEMENTS,
    ModuleInfo,
    ParamInfo,
    UnitLayout,
    cut_units,
    lay_out,
    part_adapters,
    round_up,
    slice_of,
    tile_rows,
    with_whole_rows,
)
from outsize.planning.parallel import Parallel
from outsize.planning.placement import (
    SMALLER,
    Budgets,
    RunAgain,
    UnitBytes,
    UsedTogether,
    format_at_least,
    least_staging,
    place,
    used_at_once,
    with_free_staging,
)
from outsize.planning.sizes import parse_bytes
from outsize.run.buffers import collecting_sizes
from outsize.run.embedding import tables_of
from outsize.run.local import is_distributed, is_repeated, largest_part, local
from outsize.run.mapped_files import FileRange, ranges_in_files
from outsize.run.paging import held_on_disk
from outsize.run.tiles import can_use_tiles
from outsize.run.wrappers import Inner, inside, is_wrapper, known, known_parameters

MANY_ROWS = 1 << 18
"""Of an embedding: more than a language has words."""

SMALLER_WITHOUT_UPDATES = 4
"""Where nothing is updated, and not all weights can stay in memory, units are smaller by this. Less is at work at once,
so more weights stay: 6 % less to read for 3 B parameters in bf16 under 2 GiB."""

ALONE = Parallel()
TILES_A_UNIT = 4
GRADIENT_TILES = 3
ROWS_AT_WORK = PAGE_ELEMENTS
"""Of a parameter that is used in tiles: how many a unit of the usual size would hold; how many of the gradient are in
memory at once, the one that autograd has made, the same in fp32, and one on its way. Several ranks collect one more.
Of a table: what the plan counts for the rows at work, which are the batch's."""

TIERS = {"host_memory": "host", "device_memory": "device", "disk_space": "disk"}
MOST_TRIES = 100
"""The tier of each budget. How often it is placed to find a budget that is accepted; a few times are usual."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def place_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    kept: Kept,
    dry: bool = False,
    ranks: Ranks | None = None,
    parallel: Parallel = ALONE,
) -> PlacedModel:
    """Cut, lay out and place the model. Raises `ValueError` for what cannot be trained or does not fit.

    A `dry` run trusts `disk_space`: the disk that it plans for may be another machine's. It may be one for
    `parallel` ranks that are not there.
    """
    parameters = dict(known_parameters(model))
    if not parameters:
        raise ValueError("the model has no parameters; there is nothing to prepare")
    with torch._C.DisableTorchFunctionSubclass():
        trains_alone = optimizer is not None and ranks is None and not dry
        refuse_shared_memory(parameters, dict(model.named_buffers()), trains_alone)
    names = {id(param): name for name, param in parameters.items()}
    inner: dict[str, list[Inner]] = {}
    for name, param in model.named_parameters():
        for each in _inside(name, param, config) if is_wrapper(param) else ():
            inner.setdefault(names[id(each.tensor)], []).append(each)
    wished = frozenset(name for name, param in parameters.items() if dry and param.requires_grad)
    optimized = wished if optimizer is None else _optimized(optimizer, names)
    stated = set() if optimizer is None else {id(param) for param, state in optimizer.state.items() if state}
    infos = {
        name: _info(name, param, DTYPE_NAMES[param.dtype], trainable=False)
        if name in inner
        else _checked_info(name, param, config, name in optimized and (param.requires_grad or id(param) in stated))
        for name, param in parameters.items()
    }
    budgets = find_budgets(config, dry)
    shared = parallel.ranks > parallel.stages if ranks is None else not ranks.alone
    tables_split = 0, parallel.data
    if ranks is not None:
        check_same(ranks.in_stage(), "what they prepare", description(parameters, infos, optimizer, config))
        budgets = agree_on_budgets(budgets, ranks)
        tables_split = ranks.rank, ranks.size
    rank, size = tables_split if config.stage else (0, 1)
    if budgets.disk is not None or budgets.device is not None:
        budgets = replace(budgets, least_staging=least_staging(kept.element_bytes(infos)))
    refuse_what_cannot_be_split(config, kept, size, any(not is_repeated(param) for param in parameters.values()))
    tree = _tree("", model, names, set())
    largest = {name: replace(info, shape=largest_part(parameters[name])) for name, info in infos.items()}
    tables = tables_of(model)
    refuse_tables(tables, infos, config, ranks, shared)
    ranges = _in_files(parameters, infos, config, ranks)

    def placed(budgets: Budgets) -> PlacedModel:
        # Alike, whatever part is here.
        unit_bytes = budgets.unit_bytes
        updated = any(each.trainable for each in largest.values())
        if not updated and sum(each.nbytes for each in largest.values()) > budgets.computing[1]:
            unit_bytes = max(unit_bytes // SMALLER_WITHOUT_UPDATES, 1)
        align = PAGE_ELEMENTS if kept.whole else ALIGN_ELEMENTS
        cuts = cut_units(tree, largest, unit_bytes, _chosen_units(model, config), tables, size, align)
        cuts, beside = part_adapters(cuts, largest)
        layouts = list(lay_out(cuts, infos, size, align))
        by_rows = {layout.index for layout in layouts if layout.slots[0].name in tables}
        layouts = [with_whole_rows(each, tables_split[1]) if each.index in by_rows else each for each in layouts]
        units = ({slot.name for slot in each.slots} for each in layouts if each.index not in by_rows)
        in_files = {name: ranges[name] for names in units if names <= ranges.keys() for name in names}
        held: dict[str, int] = {}
        if ranks is None and config.disk_space is None:  # ranks place alike, and what is asked for is a limit of all
            held = held_on_disk(parameters, config.directories)
        graded = [any(parameters[slot.name].requires_grad for slot in layout.slots) for layout in layouts]
        sizes: list[UnitBytes] = []
        for layout, has_grads in zip(layouts, graded, strict=True):
            if layout.index in by_rows:
                sizes.append(_bytes_of_table(layout, kept, tables_split[1]))
            else:
                swapped = sum(min(held.get(slot.name, 0), infos[slot.name].nbytes) for slot in layout.slots)
                nbytes = _bytes_of(layout, kept, config, size, shared and has_grads)
                sizes.append(replace(nbytes, in_place=layout.slots[0].name in in_files, swapped=swapped))
        wanted: dict[str, str] = {"params": config.params, "grads": config.grads, "states": config.states}
        if size > 1 and config.stage < 3:
            wanted["params"] = "device"
        together = _used_together(model, names, layouts, config if updated else replace(config, activations="keep"))
        if kept.row_values:
            budgets = replace(budgets, host=budgets.host - _row_values(layouts, by_rows, tables_split[1]))
        rows: dict[int, int] = {}
        elsewhere = budgets.disk is not None or budgets.device is not None
        apart = kept.whole or (shared and config.unused == "sync")  # whole, or not by all ranks at once
        if config.tiles and elsewhere and not (apart or "device" in (wanted["params"], config.grads)):
            in_tiles, room = _bear_tiles(model), budgets.computing[1]
            groups: dict[int, list[tuple[int, ...]]] = {}
            for each in together.values():
                for at in each:
                    groups.setdefault(at, []).append(each)
            for index in sorted(range(len(layouts)), key=lambda at: -sizes[at].working):
                layout = layouts[index]
                slot, wide = layout.slots[0], STATE_BYTES.get(layout.slots[0].dtype, 0)
                crowded = any(used_at_once(sizes, each) > room for each in groups.get(index, ()))
                too_large = crowded or sizes[index].working > room
                if too_large and len(layout.slots) == 1 and slot.name in in_tiles:
                    count = tile_rows(slot.shape, wide, budgets.unit_bytes // TILES_A_UNIT, size)
                    tile = size * round_up(count * (slot.numel // slot.shape[0]), PAGE_ELEMENTS)
                    working = tile * (2 * OWN_BYTES[slot.dtype] + graded[index] * (GRADIENT_TILES + shared) * wide)
                    if working < sizes[index].working:
                        rows[index], layouts[index] = count, with_whole_rows(layout, size)
                        nbytes = _bytes_of(layouts[index], kept, config, size, shared and graded[index], working)
                        sizes[index] = replace(nbytes, in_place=sizes[index].in_place, swapped=sizes[index].swapped)
        tiers = place(sizes, budgets, wanted, together)
        if budgets.disk is not None:
            swapped = sum(each.swapped for each, tier in zip(sizes, tiers, strict=True) if tier.params == "disk")
            budgets = replace(budgets, disk=budgets.disk + swapped)
        budgets = with_free_staging(sizes, budgets, wanted, tiers, together)
        rows = {index: count for index, count in rows.items() if tiers[index].params != "device"}  # all of it fits
        rows.update((index, layouts[index].slots[0].shape[0]) for index in by_rows)
        tiers = tuple(replace(each, grads="device") if at in by_rows else each for at, each in enumerate(tiers))
        return PlacedModel(
            infos,
            parameters,
            tuple(layouts),
            tuple(sizes),
            tiers,
            budgets,
            kept,
            split=(rank, size),
            together=together,
            tile_rows=rows,
            in_files=in_files,
            beside=beside,
            tables=frozenset(by_rows),
            dense_tables=_dense_tables(model, names, infos, kept),
            tables_split=tables_split,
            inside=inner,
        )

    def placed_or_refused() -> PlacedModel:
        try:
            return placed(budgets)
        except BudgetError as error:
            raise _with_least(error, budgets, placed, config) from None

    return on_all([] if ranks is None else ranks.in_stage(), placed_or_refused)


def _with_least(
    error: BudgetError, budgets: Budgets, placed: Callable[[Budgets], PlacedModel], config: Config
) -> BudgetError:
    """The same error with a budget that is accepted, once others that are too small are raised too. A larger budget may
    mean more staging and larger units, so this places again with what each error says is missing."""
    full = config.disk_space is None or budgets.disk != config.disk_space  # the drive, whatever may be used of it
    given, found = getattr(budgets, TIERS[error.field]), error
    for _ in range(MOST_TRIES):
        tier = TIERS[found.field]
        text = format_at_least(getattr(budgets, tier) + found.needed - found.available)
        raised: dict[str, Any] = {tier: parse_bytes(text, found.field)}
        budgets = replace(budgets, **raised)
        try:
            placed(budgets)
        except BudgetError as again:
            found = again
            continue
        least = getattr(budgets, TIERS[error.field])
        remedy = f"raise {error.field} to at least {format_at_least(least)}"
        message = re.sub(rf"raise {error.field}( to at least [0-9.]+ [KMGT]iB)?", remedy, str(error), count=1)
        if error.field == "disk_space" and full:
            message = message.replace(f"some, or {remedy}", f"some until {format_at_least(least)} may be used there")
        if "units=" not in str(found):  # what is missing in the end is no unit's
            message = message.replace(SMALLER, ", for all that must lie there")
        elif config.units is None:  # the budgets have cut the units
            message = message.replace(SMALLER, "")
        return BudgetError(message, error.field, least, given)
    return error


def _in_files(
    parameters: Mapping[str, nn.Parameter], infos: Mapping[str, ParamInfo], config: Config, ranks: Ranks | None
) -> dict[str, FileRange]:
    """Where the frozen parameters lie that can be read from files of others, in the dtype in which they are used, on
    every rank."""
    if config.params not in ("auto", "disk"):
        return {}
    frozen = {
        name: param
        for name, param in parameters.items()
        if not infos[name].trainable and DTYPE_NAMES[param.dtype] == infos[name].dtype and not is_distributed(param)
    }
    with torch._C.DisableTorchFunctionSubclass():
        found = ranges_in_files(frozen)
    here = [name in found for name in frozen]
    everywhere = combined([] if ranks is None else ranks.in_stage(), here, "prepare")
    return {name: found[name] for name, is_there in zip(frozen, everywhere, strict=True) if is_there}


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


def _bytes_of_table(whole: UnitLayout, kept: Kept, ranks: int) -> UnitBytes:
    """What rests on one rank, the first, which no other has more rows than."""
    layout = slice_of(whole, 0, ranks)
    kept = replace(kept, arrays=(), codes={}) if kept.row_values else kept
    return UnitBytes(layout.name or "model", layout.param_bytes, 0, kept.nbytes_of(layout), tiles=ROWS_AT_WORK)


def _row_values(layouts: Sequence[UnitLayout], by_rows: Collection[int], ranks: int) -> int:
    """Bytes of one value for each row of the tables that rests on the first rank."""
    slots = [(layouts[index].slots[0], slice_of(layouts[index], 0, ranks).slots[0]) for index in by_rows]
    return sum(own.numel * whole.shape[0] // whole.numel * STATE_BYTES[own.dtype] for whole, own in slots)


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


def _used_together(
    model: nn.Module, names: dict[int, str], layouts: Sequence[UnitLayout], config: Config
) -> UsedTogether:
    """The modules whose forward uses several units for its own parameters, and the layers of several units that run
    again. See Note [What one forward uses]."""
    unit_of = {slot.name: layout.index for layout in layouts for slot in layout.slots}
    home = {number: unit_of[name] for number, name in names.items()}
    again = {module for module, mode in layers_of(model, home, config, lambda _: "keep").items() if mode != "keep"}
    found: dict[str, tuple[int, ...]] = {}
    held: dict[str, set[int]] = {}  # by the name of a module: by its call, and those around it
    for name, module in model.named_modules():
        around = held.get(name.rpartition(".")[0], set())  # a model may list its modules in a way of its own
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            held[name] = around
            continue
        whole = module in again or isinstance(module, nn.MultiheadAttention)  # it calls no child of its own
        own = {home[id(param)] for param in known(module.parameters(recurse=whole))}
        held[name] = around | {home[id(param)] for param in known(module.parameters(recurse=False))}
        if len(own | around) > 1 and own:
            found[name] = (RunAgain if module in again else tuple)(sorted(own | (set() if module in again else around)))
    return found


def _info(name: str, tensor: torch.Tensor, dtype: str, trainable: bool) -> ParamInfo:
    return ParamInfo(name, tuple(tensor.shape), dtype, OWN_BYTES[dtype], trainable)


def _checked_info(name: str, param: nn.Parameter, config: Config, trainable: bool) -> ParamInfo:
    if isinstance(param, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise ValueError(f"parameter {name!r} of a lazy module has no shape yet; run one forward before prepare")
    if param.dtype not in TRAINED_DTYPES.values():
        in_parts = "; keep a complex weight as torch.view_as_real of it, and view it back in the forward"
        raise ValueError(
            f"parameter {name!r} is a {type(param).__name__} of {param.dtype}; outsize trains float32, bfloat16, "
            f"float16 and float64 parameters, and moves quantized weights of torchao. Register values that are not "
            f"trained as buffers{in_parts if param.dtype.is_complex else ''}"
        )
    if is_distributed(param) and config.compute_dtype not in (None, param.dtype):
        raise ValueError(
            f"parameter {name!r} is a DTensor of {param.dtype} and compute_dtype is {config.compute_dtype}: cast the "
            f"model before parallelize_module"
        )
    return _info(name, local(param), DTYPE_NAMES[config.compute_dtype or param.dtype], trainable)


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


def _optimized(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> frozenset[str]:
    found = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if is_wrapper(param):
                continue
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(param.shape)} that is "
                    f"not in the model; make the optimizer from model.parameters() of this model, or prepare "
                    f"torch.nn.ModuleList([model, another]) where one optimizer trains two"
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
    whole: UnitLayout, kept: Kept, config: Config, ranks: int = 1, collects: bool = False, tiles: int = 0
) -> UnitBytes:
    """What rests on one rank. The ranks have equal parts of each segment. `collects`: gradients are reduced over ranks.
    `tiles`: what those at work take; their gradients rest in fp32 or wider."""
    layout = slice_of(whole, 0, ranks)
    graded = [segment for segment in layout.segments if segment.trainable]
    copies = 2 if config.delayed_update else 1  # those of two steps
    itemsizes = STATE_BYTES if tiles else OWN_BYTES
    grads = sum(segment.numel * itemsizes[segment.dtype] for segment in graded) * copies
    states = kept.nbytes_of(layout)
    gathered = whole.param_bytes if ranks > 1 and config.stage == 3 else 0
    params = layout.param_bytes if gathered or ranks == 1 else whole.param_bytes
    collected = sum(collecting_sizes(whole, config.reduce_dtype)) if collects else 0
    wider = {dtype: nbytes - itemsizes[dtype] for dtype, nbytes in STATE_BYTES.items()}
    sums = sum(segment.numel * wider[segment.dtype] for segment in graded) * copies
    if config.update == "backward":  # each backward's gradients are used up at once
        sums = 0
    summed = sums if config.compute_device.type == "cpu" else 0
    return UnitBytes(
        layout.name or "model",
        params,
        grads,
        states,
        gathered + collected,
        collected,
        sums,
        summed // copies,
        tiles,
        steps=copies,
    )
