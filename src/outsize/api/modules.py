"""Which modules of a model open which units, which are layers, and which may run in tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from outsize.api.placed import PlacedModel
from outsize.config import Config
from outsize.run.activations import can_recompute
from outsize.run.local import is_distributed
from outsize.run.positions import may_have_tiles
from outsize.run.unit import Unit
from outsize.run.wrappers import is_wrapper, known


def modules_of(
    model: nn.Module, units: Sequence[Unit], plan: PlacedModel, config: Config, auto: str
) -> tuple[list[frozenset[int]], dict[int, list[Unit]], dict[nn.Module, bool], dict[nn.Module, str]]:
    """(the modules within each unit, the units that a module's call opens, the modules whose calls get a frame and
    whether they lie inside one that opens the same unit, the layers and what is done with their activations).

    `auto`: what is done with those of layers that come and go, where the user leaves it to outsize.
    """
    beside = plan.beside  # adapters are opened with the unit that they were cut from
    pairs: dict[int, list[Unit]] = {unit.index: [] for unit in units}
    for unit in units:
        for index in {unit.index, beside.get(unit.index, unit.index)}:
            pairs[index].append(unit)
    home = {id(param): beside.get(unit.index, unit.index) for unit in units for param in unit.parameters.values()}
    scopes: list[set[int]] = [set() for _ in units]
    owned: dict[int, list[Unit]] = {}
    framed = {model: False}
    layers = layers_of(model, home, config, lambda unit: "keep" if units[unit].shard.tiers.params == "device" else auto)
    for module, inside, parent_unit, _ in _walk(model, home):
        own = {home[id(param)] for param in known(module.parameters(recurse=False))}
        if len(inside) == 1 and module is not model:
            index = next(iter(inside))
            for each in pairs[index]:
                scopes[each.index].add(id(module))
            own = inside
            if parent_unit == index and not module._parameters:
                continue
        lists = (each for each in module.children() if isinstance(each, (nn.ParameterList, nn.ParameterDict)))
        listed = {home[id(param)] for each in lists for param in known(each.parameters())}  # fetched as they are used
        reads = len(inside) > 1 and type(module) is not nn.Sequential  # maybe weights of modules in it, which it holds
        if own or listed or reads:
            framed[module] = own | listed == {parent_unit}
            opened = [unit for index in sorted(own) for unit in pairs[index]]
            owned[id(module)] = [unit for unit in opened if not unit.resident and not unit.shard.tile_rows]
    moving = {beside.get(unit.index, unit.index) for unit in units if not unit.resident}
    needed = {
        module: nested
        for module, nested in framed.items()
        if any(home[id(param)] in moving for param in known(module.parameters()))
    }
    return [frozenset(scope) for scope in scopes], owned, needed, layers


def layers_of(
    model: nn.Module, home: Mapping[int, int], config: Config, auto: Callable[[int], str]
) -> dict[nn.Module, str]:
    """The layers, and what is done with the activations of each. `home`: the unit of each parameter, by identity;
    `auto`: what is done in a unit where the user leaves it to outsize."""
    found: dict[nn.Module, str] = {}
    within: set[nn.Module] = set()
    for module, inside, parent_unit, in_list in _walk(model, home):
        if inside and module is not model and module not in within and parent_unit not in inside:
            alone = in_list and len(inside) == 1  # what runs again holds all of its units
            mode = _mode(module, config, auto(min(inside)) if alone else "keep")
            wanted = mode != "keep" or (in_list and config.micro_batches > 1)
            if wanted and (len(inside) == 1 or (in_list and not _lists_blocks(module))):
                if not found.keys().isdisjoint(module.modules()):  # a loss that has the model too, which has a layer
                    continue
                found[module] = mode
                within.update(module.modules())
    return found


def _lists_blocks(module: nn.Module) -> bool:
    """Whether a list of modules of several parts lies in the module: these are layers, and it is none."""
    lists = (each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)))
    return any(sum(any(True for _ in part.children()) for part in each) > 1 for each in lists)


def _walk(model: nn.Module, home: Mapping[int, int]) -> Any:
    """Each module once: (module, its units, the only one of its parent or -1, whether its parent is a list)."""
    seen: set[int] = set()
    stack: list[tuple[nn.Module, int, bool]] = [(model, -1, False)]
    while stack:
        module, parent_unit, in_list = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inside = {home[id(param)] for param in known(module.parameters())}
        yield module, inside, parent_unit, in_list
        own = next(iter(inside)) if len(inside) == 1 and module is not model else -1
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        stack.extend(reversed([(each, own, is_list) for each in module.children()]))


def _mode(module: nn.Module, config: Config, auto: str) -> str:
    """What is done with the activations of a module."""
    if not any(True for _ in module.children()) or not can_recompute(module):
        return "keep"
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return "keep"
    return auto if config.activations == "auto" else config.activations


def heads_of(model: nn.Module) -> list[nn.Linear]:
    """The layer that makes the logits of a language model: where the model does not say, its last linear one."""
    of_model = getattr(model, "get_output_embeddings", None)
    head = of_model() if callable(of_model) else None
    if head is None:
        head = next((each for each in reversed(list(model.modules())) if isinstance(each, nn.Linear)), None)
    if type(head) is not nn.Linear or is_distributed(head.weight) or is_wrapper(head.weight):
        return []
    return [head]


def wide_modules(
    model: nn.Module, units: Sequence[Unit], scopes: Sequence[frozenset[int]], plan: PlacedModel
) -> dict[nn.Module, int]:
    """The modules of linear layers within one unit, which stays open for all tiles; the bytes that a call may take."""
    whole = [scope for unit, scope in zip(units, scopes, strict=True) if not unit.shard.tile_rows]
    within = set().union(*whole)
    found = [each for each in model.modules() if id(each) in within and may_have_tiles(each)]
    plain = (
        each for each in found if not any(is_distributed(param) or is_wrapper(param) for param in each.parameters())
    )
    return dict.fromkeys(plain, plan.budgets.computing[1])
