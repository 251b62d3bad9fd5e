"""One parameter's entry in `optimizer.state`: shown as a copy that refuses to be written to; checked and stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, final

import torch
from torch.utils._pytree import tree_map_only

from outsize.move.shard import SlotState, UnitShard, own_rows, own_value
from outsize.optim.rules import Rule
from outsize.planning.layout import Slot
from outsize.run.guard import TO_NUMPY
from outsize.run.layer_state import version_of
from outsize.run.local import copy_like, local
from outsize.run.unit import Unit

MOST_STEPS = 2**53
"""The last that a float counts."""

# Note [Copies that refuse writes]
# In torch an entry of `optimizer.state` is the state itself, and scripts write to it: `state[p]["step"] -= 1`,
# `state[p]["exp_avg"][rows] = 0`. Here an entry is a copy, so that such a write would be lost without a word. The
# tensors of an entry are therefore of a class each of whose operations looks whether it has written to one of them, by
# the count of writes that torch keeps for autograd. What an operation gives is a plain tensor, unless it shares their
# memory. A step changes no entry that was read before it. (DTensors have a class of their own, and are not watched.)


@final
class CopiedTensor(torch.Tensor):
    """A tensor of an entry. See Note [Copies that refuse writes]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies: list[torch.Tensor] = []

        def opened(tensor: CopiedTensor) -> torch.Tensor:
            copies.append(_plain(tensor))
            return copies[-1]

        def closed(result: torch.Tensor) -> torch.Tensor:
            return _watched(result) if any(_share_memory(result, each) for each in copies) else result

        if func == _SET_DATA and isinstance(args[0], CopiedTensor):
            _refuse_write()
        given, named = tree_map_only(CopiedTensor, opened, (args, kwargs or {}))
        versions = list(map(version_of, copies))
        result = func(*given, **named)
        if versions != list(map(version_of, copies)):
            _refuse_write()
        if func in TO_NUMPY:
            result.setflags(write=False)
        return tree_map_only(torch.Tensor, closed, result)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _watched(value: Any) -> Any:
    return value.as_subclass(CopiedTensor) if type(value) is torch.Tensor else value


def _plain(value: Any) -> Any:
    """The value with the class that it has outside of entries; the memory is the same."""
    if not isinstance(value, CopiedTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _refuse_write(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "optimizer.state[param] is a copy after outsize.prepare, and a change of it would be lost: write the whole "
        "entry, `optimizer.state[param] = {**optimizer.state[param], key: value}` (a tensor of it changes as a "
        "`clone()`)"
    )


@final
class CopiedEntry(dict[str, Any]):
    """A copy of one parameter's state, which says so where another value is put in or a tensor of it is written to."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _watched(value) for key, value in values.items()})

    def __setitem__(self, key: str, value: Any) -> None:
        known = self.get(key)
        if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.shape == known.shape:
            same = torch.equal(value.to(known.device, known.dtype), known)
        else:
            same = value is known
        if not same:
            _refuse_write()

    __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse_write

    def plain(self) -> dict[str, Any]:
        return {key: _plain(value) for key, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (self.plain(),)


def read_entry(unit: Unit, slot: Slot, rule: Rule, on_host: bool) -> dict[str, Any]:
    """A copy of the parameter's state as torch keeps it: on its device, unless `on_host`."""
    state = unit.shard.slot_states.get(slot.name)
    if state is None or not state.initialised:
        return {}
    entry = {
        key: _as_torch(key, value)
        for key, value in state.scalars.items()
        if value is not None or key not in rule.optional
    }
    for name, array in unit.shard.arrays.items():
        if array.public and name not in state.scalars:  # SGD without momentum has None there
            value = unit.shard.read_array(array, slot.offset, slot.end).view(slot.shape)
            value = value.to(rule.narrow.get(name, value.dtype))
            value = value if on_host else value.to(unit.shard.device)
            entry[name] = value if unit.shard.ranks > 1 else copy_like(unit.parameters[slot.name], value)
    return entry


def _as_torch(key: str, value: Any) -> Any:
    """As torch's optimizers keep it: counts of steps are tensors, of a dtype that counts on."""
    if key != "step" or not isinstance(value, float):
        return snapshot(value)
    wide = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return torch.tensor(value, dtype=wide, device="cpu")


def snapshot(value: Any) -> Any:
    """The value as it is now, whatever becomes of the tensor that holds it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def given_entry(state: object, name: str, rule: Rule) -> dict[str, Any]:
    """A state as somebody gives it, of DTensors what this rank has; None for an array that it may be without."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the optimizer's state of {name!r} must be a dict, not {type(state).__name__}")
    entry = {key: local(_plain(value)) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return {**dict.fromkeys(sorted(rule.optional)), **entry} if entry else {}


def check_entry(
    shard: UnitShard, slot: Slot, entry: Mapping[str, Any], rule: Rule, optimizer: str, hyper: Mapping[str, Any] | None
) -> None:
    """Raise `ValueError`, with the parameter's name, for a state that is not this optimizer's.

    `hyper`: the options of the parameter's group; None where it is in none.
    """
    whole, rows = shard.whole_slots[slot.name], {key: own_rows(shard, slot.name, key) for key in shard.row_values}
    names = set() if rows else set(rule.arrays)
    arrays = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    wrong: set[str] = set()
    if whole.numel > 1 and not rule.whole:
        wrong = {key for key, value in arrays.items() if value.shape == whole.shape} - names
    if rule.scalars is not None:
        wrong |= entry.keys() - names - set(rule.scalars)
        values = names & entry.keys() - arrays.keys()
        wrong |= {key for key in values if key not in rule.scalars or entry[key] is not None}
    for key, own in rows.items():
        assert own is not None
        if key not in arrays or arrays[key].numel() not in (whole.shape[0], own.stop - own.start):
            wrong.add(key)
    missing = {key for key in names if key not in entry or (entry[key] is None and key in rule.optional)}
    missing.discard("max_exp_avg_sq")
    if missing and hyper is not None and not rule.whole:  # torch's state has what the parameter's own group needs
        rule.check(hyper, f"the parameter group of {slot.name!r}")
        missing &= set(rule.always(hyper))
    else:
        missing -= rule.optional
    if wrong or missing or any(arrays[key].numel() not in (whole.numel, slot.numel) for key in names & arrays.keys()):
        found = {key: tuple(value.shape) if key in arrays else value for key, value in entry.items()}
        counts = f" and {', '.join(map(repr, rule.counts))}" if rule.counts else ""
        kept = f"{list(rows) or sorted(names)} of shape {tuple(whole.shape)[: 1 if rows else None]}"
        raise ValueError(
            f"the state does not fit {optimizer}: for {slot.name!r} it has {found}, this optimizer keeps "
            f"{kept}{counts}; give the state of the same optimizer. Nothing was changed"
        )
    check_counts(slot.name, entry, rule)


def check_counts(name: str, values: Mapping[str, Any], rule: Rule) -> None:
    """Raise `ValueError`, with the parameter's name, where counts of steps are none."""
    for key in rule.counts:
        value = values.get(key)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)) or not 0 <= value < MOST_STEPS or math.floor(value) != value:
            raise ValueError(
                f"the optimizer's state of {name!r} needs {key!r}, a count of steps, and "
                f"{'has none' if key not in values else f'has {values[key]!r}'}; load the state of the same optimizer"
            )


def store_entry(shard: UnitShard, name: str, entry: Mapping[str, Any]) -> None:
    """Write one parameter's state into the unit's stores; with an empty one it begins anew."""
    slot = shard.slots[name]
    if entry:
        shard.make_room([name])
    before = shard.slot_states.get(name)
    given = {key: value for key, value in entry.items() if key in shard.arrays and isinstance(value, torch.Tensor)}
    for key, array in shard.arrays.items():
        dtype = array.value_dtype(slot.dtype)
        if key in given:
            values = own_part(shard, name, given[key], dtype)
        elif array.public and before is not None and before.initialised:
            values = torch.zeros(slot.numel, dtype=dtype, device="cpu")
        else:
            continue
        shard.write_array(array, slot.offset, slot.end, values)
    scalars = {key: snapshot(own_value(shard, name, key, value)) for key, value in entry.items() if key not in given}
    shard.slot_states[name] = SlotState(scalars, initialised=bool(entry))


def own_part(shard: UnitShard, name: str, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a parameter's array that rest here, 1-D: given are all of them, or these."""
    values = local(given.detach()).to("cpu", dtype).reshape(-1)
    return shard.own(name, values) if values.numel() == shard.whole_slots[name].numel else values
